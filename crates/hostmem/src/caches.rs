//! Eviction from the processors' caches, so that the next accesses really go to memory.

use std::sync::atomic::AtomicU64;

use crate::procfs;

/// Returns true if [`evict`] can do it on this machine.
pub const fn can_evict() -> bool {
    cfg!(target_arch = "x86_64")
}

/// Takes the cache lines of these cells out of the caches of all processors, and waits until that is
/// done. False, and nothing happens, where no instruction is known for it here
/// ([`can_evict`]).
///
/// Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, "CLFLUSH": ordered
/// with loads by MFENCE only.
#[cfg(target_arch = "x86_64")]
pub fn evict<'a>(cells: impl IntoIterator<Item = &'a AtomicU64>) -> bool {
    use core::arch::x86_64::{_mm_clflush, _mm_mfence};
    // SAFETY: CLFLUSH does to a line what a load does to faults and permissions, and changes no
    // bytes; the address is that of a cell that is borrowed. Both instructions are part of SSE2,
    // which every x86-64 processor has.
    unsafe {
        _mm_mfence();
        for cell in cells {
            _mm_clflush(cell.as_ptr().cast_const().cast());
        }
        _mm_mfence();
    }
    true
}

/// Takes the cache lines of these cells out of the caches: not on this architecture.
#[cfg(not(target_arch = "x86_64"))]
pub fn evict<'a>(_cells: impl IntoIterator<Item = &'a AtomicU64>) -> bool {
    false
}

/// Bytes of the largest cache of the first processor that tells; `None` when none does.
///
/// Source: Linux `Documentation/ABI/testing/sysfs-devices-system-cpu`, "cache".
pub fn largest_cache() -> Option<u64> {
    let entries = std::fs::read_dir("/sys/devices/system/cpu/cpu0/cache").ok()?;
    let sizes = entries.filter_map(|entry| {
        let text = procfs::read(entry.ok()?.path().join("size")).ok()?;
        bytes(&text)
    });
    sizes.max()
}

/// `491520K`, in bytes.
fn bytes(text: &str) -> Option<u64> {
    let kib: u64 = text.trim().strip_suffix('K')?.parse().ok()?;
    kib.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::Ordering;

    #[test]
    fn what_was_evicted_still_holds_what_was_stored() {
        let cells: Vec<AtomicU64> = (0..4096).map(AtomicU64::new).collect();
        assert_eq!(evict(&cells), can_evict());
        for (nth, cell) in (0..).zip(&cells) {
            assert_eq!(cell.load(Ordering::Relaxed), nth);
        }
    }

    #[test]
    fn sizes_are_in_kib() {
        assert_eq!(bytes("491520K\n"), Some(480 << 20));
        assert_eq!(bytes("491520\n"), None);
        assert_eq!(bytes("18446744073709551615K"), None);
    }
}
