//! Errors that a sanitizer has to see before its silence over the suites is believed.

use std::hint::black_box;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;

static mut PLAIN: u64 = 0;

/// Two threads write at the same time: an arrival orders nothing.
fn race() {
    let arrived = AtomicU32::new(0);
    let write = || {
        arrived.fetch_add(1, Ordering::Relaxed);
        while arrived.load(Ordering::Relaxed) < 2 {
            thread::yield_now();
        }
        for _ in 0..5000 {
            // SAFETY: none, this is the error.
            unsafe { *(&raw mut PLAIN) += 1 };
        }
    };
    thread::scope(|scope| {
        scope.spawn(write);
        scope.spawn(write);
    });
}

fn overflow() {
    let words = black_box(vec![0u64; 4]);
    // SAFETY: none, this is the error.
    black_box(unsafe { words.as_ptr().add(4).read() });
}

fn main() {
    match std::env::args().nth(1).as_deref() {
        Some("thread") => race(),
        Some("address") => overflow(),
        _ => eprintln!("thread or address"),
    }
}
