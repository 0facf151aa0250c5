//! Regression test of the fuzz targets: every file of `fuzz/corpus` through the body of its target.
//! The device gets random bytes, too.

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

replay::tests!(
    "virtio_balloon",
    [&fuzz_bodies::TARGETS[..], &[device::TARGET]].concat()
);

proptest! {
    #[test]
    fn any_driver_is_served_or_refused(data in proptest::collection::vec(any::<u8>(), 0..2000)) {
        device::play(&data);
    }
}
