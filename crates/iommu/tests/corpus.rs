//! Regression test of the fuzz targets: every file of `fuzz/corpus` through the body of its target.
//! Random tests of hostile units follow, the same in each run.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "helpers of tests panic as tests do"
)]

#[allow(unreachable_pub, reason = "public to the fuzz targets")]
mod fuzz_bodies;
#[allow(unreachable_pub, reason = "every crate with targets has it")]
#[path = "../../../fuzz/src/replay.rs"]
mod replay;

replay::tests!("iommu", fuzz_bodies::TARGETS);

/// Each driver over so many units of random bytes.
#[test]
fn a_hostile_unit_brings_nothing_down() {
    use std::sync::atomic::Ordering;

    let count = || {
        fuzz_bodies::OUTCOMES
            .each_ref()
            .map(|n| n.load(Ordering::Relaxed))
    };
    let units = fuzz_bodies::TARGETS.into_iter();
    for (name, play) in units.filter(|(name, _)| name.starts_with("unit_")) {
        let mut random = fastrand::Rng::with_seed(1);
        let before = count();
        for _ in 0..1000 {
            let mut bytes = [0; 400];
            random.fill(&mut bytes);
            play(&bytes);
        }
        let after = count();
        let [well, failed] = [0, 1].map(|n| after[n] - before[n]);
        // Both happen often, or the test shows little.
        assert!(well > 1000 && failed > 1000, "{name}: {well} {failed}");
    }
}
