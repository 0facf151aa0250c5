//! Regression test of the fuzz target: every file of `fuzz/corpus` through its body. And random bytes.

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

use proptest::prelude::*;

replay::tests!("virtio_iommu", fuzz_bodies::TARGETS);

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn any_driver_is_served_or_refused(data in prop::collection::vec(any::<u8>(), 0..2000)) {
        fuzz_bodies::play(&data);
    }
}
