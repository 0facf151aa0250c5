//! Files that describe more than a machine has are refused, before much is allocated for them.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "helpers of tests panic as tests do"
)]

#[allow(dead_code, unreachable_pub, reason = "every test that counts has it")]
#[path = "../../../fuzz/src/allocated.rs"]
mod allocated;

use std::fmt::Write as _;

use allocated::{Counting, within};
use dmaspace::topology::{Topology, TopologyError};

#[global_allocator]
static ALLOCATOR: Counting<{ 512 << 20 }> = Counting;

#[test]
fn a_file_does_not_make_a_plan_of_more_lines_than_it_should() {
    let mut text = String::new();
    for id in 0..1024 {
        writeln!(text, "[[node]]\nid={id}\nmemory_mib=1").unwrap();
    }
    for device in 0..1025 {
        let (bus, slot) = (device / 32, device % 32);
        writeln!(text, "[[device]]\naddress=\"0000:{bus:02x}:{slot:02x}.0\"").unwrap();
    }
    let error = within(64 << 20, || Topology::parse(&text)).unwrap_err();
    let count = 1024 * 1025;
    assert!(
        matches!(error, TopologyError::TooMany { count: found, most: 1_048_576, .. } if found == count),
        "{error}"
    );
}

#[test]
fn processors_are_counted_as_far_as_there_are_any() {
    let error = Topology::parse("[[node]]\nid = 0\ncpus = 4294967295\n").unwrap_err();
    assert_eq!(
        error.to_string(),
        "4294967295 processors of a node, and at most 65536 are taken"
    );
}
