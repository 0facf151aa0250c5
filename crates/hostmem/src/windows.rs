//! Address windows for memory whose frames this process may not see.
//!
//! Every mapping owns one window of its own length; addresses that stand in for physical ones are
//! taken from it, so that no two pages of this process share one. All windows lie between 2^40
//! and 2^43: above the memory of most machines and within what every format of page table can
//! hold. A window is a multiple of the largest page that can fit into its mapping, so that the
//! stand-ins allow the same leaves as real frames.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use runs::{Pa, Span};

const FIRST: u64 = 1 << 40;
const END: u64 = 1 << 43;

/// The windows in use: start and length.
static IN_USE: Mutex<BTreeMap<u64, u64>> = Mutex::new(BTreeMap::new());

fn in_use() -> MutexGuard<'static, BTreeMap<u64, u64>> {
    IN_USE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Addresses that no other window has until this is dropped.
#[derive(Debug)]
pub(crate) struct Window {
    span: Span<Pa>,
}

impl Window {
    /// The lowest free window of `len` bytes; `None` when there is no room.
    pub(crate) fn take(len: u64) -> Option<Self> {
        let align = if len >= 1 << 30 { 1 << 30 } else { 2 << 20 };
        let len = len.checked_next_multiple_of(align)?;
        let mut in_use = in_use();
        let mut start = FIRST;
        for (&taken, &taken_len) in in_use.iter() {
            if taken >= start && taken - start >= len {
                break;
            }
            start = (taken + taken_len).next_multiple_of(align);
        }
        if len > END.saturating_sub(start) {
            return None;
        }
        in_use.insert(start, len);
        Some(Self {
            span: Span::new(start, len),
        })
    }

    pub(crate) fn start(&self) -> u64 {
        self.span.start
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        in_use().remove(&self.span.start);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_in_use_never_overlap_and_are_used_again() {
        let mut windows: Vec<Window> = Vec::new();
        for round in 0u64..60 {
            windows.push(Window::take((round % 7) * (700 << 20) + 4096).unwrap());
            if round % 3 == 2 {
                windows.swap_remove((round as usize * 5) % windows.len());
            }
            for (i, a) in windows.iter().enumerate() {
                assert!(a.span.start >= FIRST && a.span.last() < END);
                for b in &windows[..i] {
                    assert!(!a.span.overlaps(&b.span), "{:?} {:?}", a.span, b.span);
                }
            }
        }
        assert!(Window::take(END - FIRST + 1).is_none());
        assert!(Window::take(u64::MAX).is_none());
    }
}
