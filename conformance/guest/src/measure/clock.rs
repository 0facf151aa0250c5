//! Clock of the guest: its unit, and the cost of a reading.

use std::{arch::asm, time::Instant};

/// Turns of the loop: a third of the time between two ticks of the kernel.
const TURNS: u64 = 100_000;

/// Has a processor execute a known number of instructions: the number, and the fewest nanoseconds that have passed of
/// some times.
pub(crate) fn check() -> (u64, u64) {
    let fewest = (0..20).map(|_| turn()).min();
    (2 * TURNS, fewest.unwrap_or_default())
}

fn turn() -> u64 {
    let begun = Instant::now();
    // SAFETY: changes one register, which it names, and flags.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        asm!(
            "2:",
            "sub {turns}, 1",
            "jnz 2b",
            turns = inout(reg) TURNS => _,
            options(nomem, nostack),
        );
    }
    // SAFETY: the same.
    #[cfg(target_arch = "aarch64")]
    unsafe {
        asm!(
            "2:",
            "subs {turns}, {turns}, #1",
            "b.ne 2b",
            turns = inout(reg) TURNS => _,
            options(nomem, nostack),
        );
    }
    begun.elapsed().as_nanos() as u64
}

/// Nanoseconds between two readings of the clock with nothing in between: the fewest of many.
pub(crate) fn empty() -> f64 {
    let one = |_| {
        let begun = Instant::now();
        std::hint::black_box(());
        begun.elapsed().as_nanos() as f64
    };
    (0..10_000).map(one).fold(f64::INFINITY, f64::min)
}

/// Nanoseconds of zeroing a page by the processor's string instruction, as the kernel does it: the fewest of many.
pub(crate) fn zero() -> f64 {
    let mut page = [1u8; 4096];
    let mut one = |_| {
        let begun = Instant::now();
        // SAFETY: writes the bytes of `page`, and changes registers that it names.
        #[cfg(target_arch = "x86_64")]
        unsafe {
            asm!(
                "rep stosb",
                inout("rdi") page.as_mut_ptr() => _,
                inout("rcx") page.len() => _,
                in("al") 0u8,
                options(nostack, preserves_flags),
            );
        }
        begun.elapsed().as_nanos() as f64
    };
    (0..1000).map(&mut one).fold(f64::INFINITY, f64::min)
}
