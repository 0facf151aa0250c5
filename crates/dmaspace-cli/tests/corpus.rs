//! What the fuzz targets came upon, once more: every file of `fuzz/corpus` through the body of its
//! target.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "helpers of tests panic as tests do"
)]

#[allow(dead_code, unreachable_pub, reason = "every test that counts has it")]
#[path = "../../../fuzz/src/allocated.rs"]
mod allocated;
#[allow(unreachable_pub, reason = "public to the fuzz targets")]
mod fuzz_bodies;
#[allow(unreachable_pub, reason = "every crate with targets has it")]
#[path = "../../../fuzz/src/replay.rs"]
mod replay;

use allocated::Counting;
use proptest::prelude::*;

#[global_allocator]
static ALLOCATOR: Counting<{ 512 << 20 }> = Counting;

fn names() -> impl Iterator<Item = &'static str> {
    fuzz_bodies::TARGETS.iter().map(|(name, _)| *name)
}

#[test]
fn every_file_of_the_corpus_still_holds() {
    replay::all(names(), fuzz_bodies::run);
}

#[test]
fn every_target_is_built() {
    replay::are_built("dmaspace_cli", names());
}

proptest! {
    #[test]
    fn any_change_of_the_corpus_still_holds(
        nth in any::<u16>(),
        changes in prop::collection::vec((any::<u16>(), any::<u8>()), 0..24),
    ) {
        replay::changed(names(), nth.into(), &changes, fuzz_bodies::run);
    }
}
