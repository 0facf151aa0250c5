//! Clock of the measurements.

use std::hint::black_box;
use std::sync::OnceLock;
use std::time::Instant;

/// Runs `f`, which does `batch` operations, and returns the nanoseconds of one. The cost of an
/// empty bracket is subtracted.
pub fn time(batch: u64, f: impl FnOnce()) -> f64 {
    let empty = empty();
    let started = Instant::now();
    f();
    let taken = started.elapsed().as_nanos() as f64;
    (taken - empty).max(0.0) / batch.max(1) as f64
}

/// The lowest time of an empty bracket, nanoseconds.
fn empty() -> f64 {
    static EMPTY: OnceLock<f64> = OnceLock::new();
    *EMPTY.get_or_init(|| {
        let one = |_| {
            let started = Instant::now();
            black_box(());
            started.elapsed().as_nanos() as f64
        };
        (0..10_000).map(one).fold(f64::INFINITY, f64::min)
    })
}
