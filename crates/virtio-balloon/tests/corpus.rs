//! What the fuzz targets came upon, once more: every file of `fuzz/corpus` through the body of its
//! target. And random bytes through that of the device.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "helpers of tests panic as tests do"
)]

#[allow(unreachable_pub, reason = "public to the fuzz targets")]
#[path = "fuzz_bodies/device.rs"]
mod device;
#[allow(unreachable_pub, reason = "public to the fuzz targets")]
mod fuzz_bodies;
#[allow(unreachable_pub, reason = "every crate with targets has it")]
#[path = "../../../fuzz/src/replay.rs"]
mod replay;

use proptest::prelude::*;

fn names() -> impl Iterator<Item = &'static str> {
    let decoders = fuzz_bodies::TARGETS.iter().map(|(name, _)| *name);
    decoders.chain([device::NAME])
}

fn run(name: &str, data: &[u8]) {
    let mut decoders = fuzz_bodies::TARGETS.iter();
    match decoders.find(|(target, _)| *target == name) {
        Some((_, body)) => body(data),
        None => device::play(data),
    }
}

#[test]
fn every_file_of_the_corpus_still_holds() {
    replay::all(names(), run);
}

#[test]
fn every_target_is_built() {
    replay::are_built("virtio_balloon", names());
}

proptest! {
    #[test]
    fn any_driver_is_served_or_refused(data in proptest::collection::vec(any::<u8>(), 0..2000)) {
        device::play(&data);
    }
}
