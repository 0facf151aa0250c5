//! Proves that the lower crates need neither `std` nor an allocator.
//!
//! This program has its own panic handler, start, and memory functions, no global allocator and
//! no C library. It fails to build as soon as one of its dependencies pulls in `std` (the panic
//! handler exists twice) or allocates (there is no allocator). It also runs: [`check`] does a
//! small job with each crate, and the exit status is 0 or the number of the step that went
//! wrong; 100 is a panic.

#![no_std]
#![no_main]

use core::{
    arch::{asm, naked_asm},
    hint::black_box,
    panic::PanicInfo,
};

mod balloon;
mod memory;
mod tables;

#[panic_handler]
fn panic(_: &PanicInfo) -> ! {
    exit(100)
}

/// Where the kernel enters, with the stack aligned to 16 bytes and no return address on it. A
/// call puts one there, as every function expects.
#[unsafe(naked)]
#[unsafe(no_mangle)]
unsafe extern "C" fn _start() -> ! {
    naked_asm!("call {start}", "ud2", start = sym start)
}

extern "C" fn start() -> ! {
    exit(match check() {
        Ok(()) => 0,
        Err(step) => step,
    })
}

/// Ends the process.
fn exit(status: i32) -> ! {
    const EXIT_GROUP: u64 = 231;
    // SAFETY: the system call does not return and takes no pointers.
    unsafe {
        asm!("syscall", "ud2", in("rax") EXIT_GROUP, in("rdi") status, options(noreturn));
    }
}

/// A small job with each crate; the error is the number of the step.
fn check() -> Result<(), i32> {
    runs_of_folios()?;
    pages_of_a_run()?;
    runs_of_a_bitmap()?;
    histogram()?;
    tables::every_format()?;
    tables::what_a_unit_accepts()?;
    tables::drivers()?;
    balloon::messages()?;
    balloon::huge_pages()
}

/// Steps 1 and 2: of three folios, the first two are neighbours.
fn runs_of_folios() -> Result<(), i32> {
    use runs::{Joiner, Pa, Span, merge_sorted};

    let folios = black_box([
        Span::<Pa>::new(0x20_0000, 0x1000),
        Span::new(0x20_1000, 0x3000),
        Span::new(0x80_0000, 0x1000),
    ]);
    let expected = [Span::new(0x20_0000, 0x4000), Span::new(0x80_0000, 0x1000)];

    let mut joiner = Joiner::new();
    let mut found = folios.into_iter().filter_map(|folio| joiner.push(folio));
    let first = found.next();
    require(1, found.next().is_none())?;
    require(
        1,
        first == Some(expected[0]) && joiner.finish() == Some(expected[1]),
    )?;

    let mut spans = folios;
    let kept = merge_sorted(&mut spans);
    require(2, spans.get(..kept) == Some(&expected[..]))
}

/// Step 3: 4 MiB at a 2 MiB boundary are two pages of 2 MiB.
fn pages_of_a_run() -> Result<(), i32> {
    let sizes = runs::PageSizes::from_bits(black_box(1 << 12 | 1 << 21 | 1 << 30));
    require(
        3,
        sizes.step(0x20_0000, runs::Span::new(0x4020_0000, 4 << 20)) == Some((2 << 20, 2)),
    )
}

/// Step 4: the bits of a run, set and found again.
fn runs_of_a_bitmap() -> Result<(), i32> {
    let mut words = black_box([0u64; 3]);
    require(4, runs::bitmap::set(&mut words, 60..130) == 70)?;
    let mut found = runs::bitmap::runs(&words);
    require(4, found.next() == Some(60..130) && found.next().is_none())
}

/// Step 5: counts by size.
fn histogram() -> Result<(), i32> {
    let mut histogram = runs::SizeHistogram::new();
    histogram.add(black_box(0x1000), 2);
    histogram.add(black_box(0x20_0000), 1);
    require(5, histogram.total().bytes == 0x20_2000)
}

fn require(step: i32, holds: bool) -> Result<(), i32> {
    if holds { Ok(()) } else { Err(step) }
}
