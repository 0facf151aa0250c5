//! The memory functions that the compiler calls for large copies and comparisons, which a C
//! library would bring. Written with string instructions: a plain loop would be turned into a
//! call of the very function.

use core::arch::asm;

/// Copies `len` bytes between areas that do not overlap.
#[unsafe(no_mangle)]
unsafe extern "C" fn memcpy(to: *mut u8, from: *const u8, len: usize) -> *mut u8 {
    // SAFETY: the caller owns both areas; the direction flag is clear by the calling convention.
    unsafe {
        asm!("rep movsb", inout("rcx") len => _, inout("rdi") to => _, inout("rsi") from => _,
            options(nostack, preserves_flags));
    }
    to
}

/// Copies `len` bytes between areas that may overlap.
#[unsafe(no_mangle)]
unsafe extern "C" fn memmove(to: *mut u8, from: *const u8, len: usize) -> *mut u8 {
    if (to as usize).wrapping_sub(from as usize) >= len {
        // SAFETY: `to` does not begin inside the source, so that copying upwards is right.
        return unsafe { memcpy(to, from, len) };
    }
    // SAFETY: as in `memcpy`, from the last byte downwards; `len` is not 0, since the distance
    // is below it. The direction flag is put back.
    unsafe {
        asm!("std", "rep movsb", "cld", inout("rcx") len => _,
            inout("rdi") to.add(len - 1) => _, inout("rsi") from.add(len - 1) => _,
            options(nostack));
    }
    to
}

/// Sets `len` bytes to the low byte of `value`.
#[unsafe(no_mangle)]
unsafe extern "C" fn memset(to: *mut u8, value: i32, len: usize) -> *mut u8 {
    // SAFETY: the caller owns the area; the direction flag is clear by the calling convention.
    unsafe {
        asm!("rep stosb", inout("rcx") len => _, inout("rdi") to => _, in("al") value as u8,
            options(nostack, preserves_flags));
    }
    to
}

/// Compares `len` bytes: below 0, 0, or above 0.
#[unsafe(no_mangle)]
unsafe extern "C" fn memcmp(a: *const u8, b: *const u8, len: usize) -> i32 {
    let mut at = 0;
    while at < len {
        // SAFETY: `at` is below `len`, and the caller owns that many bytes of both. Volatile,
        // so that the loop is not taken for a call of this function.
        let (x, y) = unsafe { (a.add(at).read_volatile(), b.add(at).read_volatile()) };
        if x != y {
            return i32::from(x) - i32::from(y);
        }
        at += 1;
    }
    0
}

/// As `memcmp`, telling only whether the bytes differ.
#[unsafe(no_mangle)]
unsafe extern "C" fn bcmp(a: *const u8, b: *const u8, len: usize) -> i32 {
    // SAFETY: the same contract.
    unsafe { memcmp(a, b, len) }
}
