//! Readers by thread, with the barrier that this machine has: on Linux one that the reclaimer has all
//! threads execute. The same over fences is `reclaim_fences`; every order of two threads in a model,
//! `interleavings`.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "helpers of tests panic as tests do"
)]

mod by_thread;

/// Before the first table is shared.
fn choose() {}

#[test]
fn fences_are_chosen_before_the_first_table_or_not_at_all() {
    let _chosen = iopt::reclaim::Threads::default();
    // False where the barrier is granted; true where there is none, and fences are used already.
    let fences = iopt::reclaim::use_fences();
    println!("fences: {fences}");
    assert!(fences || cfg!(all(target_os = "linux", not(miri), not(dmaspace_fences))));
    assert!(iopt::reclaim::fence_heavy());
    assert_eq!(iopt::reclaim::use_fences(), fences);
}
