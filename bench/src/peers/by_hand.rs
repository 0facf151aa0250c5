//! What a careful person writes by hand: x86-64 tables of four levels without an error path.
//!
//! One descent per table of leaves, then a plain loop of relaxed 8-byte stores: shifts are constants
//! there. Nothing is checked: neither that what is mapped was free, nor that what is unmapped was
//! there. There are no counts; a table that may be empty is looked through, one that a range covers
//! is known to be. A new table that a range fills is not zeroed before. Entries are of x86-64, for
//! the user, read and write.
//!
//! A translation checks what makes it right: that the address is one of those that the table
//! translates, that each entry is present, and whether it is a leaf of 1 GiB or of 2 MiB.
//!
//! One thread only; a table is linked with a release store, for whoever walks meanwhile.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Relaxed, Release};

use anyhow::Result;
use runs::{Iova, Run, Span};

use crate::peers::memory::{self, ADDRESS, PAGE, Page};
use crate::peers::peer::{Bench, Leaves, Peer, Sink, Tables};
use crate::peers::work::Subject;

/// Present, writable, user.
const LINK: u64 = 0b111;
/// Page size: a leaf above level 0.
const PS: u64 = 1 << 7;
/// The level of the root.
const TOP: u32 = 3;

/// A table by hand.
pub struct ByHand {
    /// The root's address.
    root: u64,
}

/// The table by hand, as a subject.
pub fn subjects() -> Vec<Box<dyn Subject>> {
    vec![Box::new(Bench::<ByHand>::new())]
}

/// Bits of an address below those that an entry of `level` spans.
const fn shift(level: u32) -> u32 {
    12 + 9 * level
}

/// The table at an address, or under an entry.
#[inline(always)]
fn table(entry: u64) -> &'static Page {
    // SAFETY: only the root's address and entries that link tables get here; all are pages that were
    // handed out, and tables by hand are written to by atomics alone.
    unsafe { memory::page(entry & ADDRESS) }
}

/// A new table, zeroed unless it will be `filled`.
#[cold]
fn new_table(filled: bool) -> u64 {
    let at = memory::allocate();
    if !filled {
        for entry in table(at).entries() {
            entry.store(0, Relaxed);
        }
    }
    at
}

impl ByHand {
    /// The entry of level `LEVEL` for an address; tables that are missing are made.
    #[inline(always)]
    fn entry<const LEVEL: u32>(&self, iova: u64) -> &'static AtomicU64 {
        let mut at = table(self.root).entry(iova >> shift(TOP));
        for level in (LEVEL..TOP).rev() {
            let mut link = at.load(Relaxed);
            if link == 0 {
                link = new_table(false) | LINK;
                at.store(link, Release);
            }
            at = table(link).entry(iova >> shift(level));
        }
        at
    }

    /// Maps a range in leaves of level `LEAF`; `ABOVE` is the level above.
    #[inline(always)]
    fn map_at<const LEAF: u32, const ABOVE: u32>(&self, range: Span<Iova>, mut pa: u64) {
        let flags = if LEAF == 0 { LINK } else { LINK | PS };
        if range.len == 1 << shift(LEAF) {
            self.entry::<LEAF>(range.start).store(pa | flags, Relaxed);
            return;
        }
        let (mut at, end) = (range.start, range.start + range.len);
        while at < end {
            let stop = end.min((at | ((1 << shift(ABOVE)) - 1)) + 1);
            let above = self.entry::<ABOVE>(at);
            let link = above.load(Relaxed);
            let (from, count) = (at >> shift(LEAF) & 511, (stop - at) >> shift(LEAF));
            let next = if link == 0 {
                new_table(count == 512) | LINK
            } else {
                link
            };
            let entries = &table(next).entries()[from as usize..][..count as usize];
            for (entry, n) in entries.iter().zip(0..) {
                entry.store((pa + (n << shift(LEAF))) | flags, Relaxed);
            }
            if link == 0 {
                above.store(next, Release);
            }
            pa += stop - at;
            at = stop;
        }
    }

    /// Unmaps a range of leaves of level `LEAF`; tables stay.
    #[inline(always)]
    fn unmap_at<const LEAF: u32, const ABOVE: u32, S: Sink>(
        &self,
        range: Span<Iova>,
        sink: &mut S,
    ) {
        if range.len == 1 << shift(LEAF) {
            let entry = self.entry::<LEAF>(range.start);
            if S::WANTED {
                let pa = entry.load(Relaxed) & ADDRESS;
                sink.push(Run::new(range.start, Span::new(pa, range.len)));
            }
            entry.store(0, Relaxed);
            return;
        }
        let (mut at, end) = (range.start, range.start + range.len);
        while at < end {
            let stop = end.min((at | ((1 << shift(ABOVE)) - 1)) + 1);
            let leaves = table(self.entry::<ABOVE>(at).load(Relaxed));
            empty::<LEAF, S>(leaves, Span::new(at, stop - at), true, sink);
            at = stop;
        }
    }

    /// Unmaps a range of leaves of level `LEAF`; tables go.
    fn take_at<const LEAF: u32, S: Sink>(&self, range: Span<Iova>, sink: &mut S) {
        take::<LEAF, S>(table(self.root), TOP, range, sink);
    }
}

/// Takes the leaves of `range`, all in one table, and zeroes their entries where somebody may read
/// the table later.
#[inline(always)]
fn empty<const LEAF: u32, S: Sink>(leaves: &Page, range: Span<Iova>, zero: bool, sink: &mut S) {
    let (from, count) = (range.start >> shift(LEAF) & 511, range.len >> shift(LEAF));
    let mut run = Run::new(range.start, Span::new(0, 0));
    let mut expected = 0;
    for entry in &leaves.entries()[from as usize..][..count as usize] {
        if S::WANTED {
            let pa = entry.load(Relaxed) & ADDRESS;
            if pa != expected {
                run.len = expected.wrapping_sub(run.pa);
                if run.len > 0 {
                    sink.push(run);
                }
                run = Run::new(run.iova + run.len, Span::new(pa, 0));
            }
            expected = pa + (1 << shift(LEAF));
        }
        if zero {
            entry.store(0, Relaxed);
        }
    }
    if S::WANTED {
        run.len = expected.wrapping_sub(run.pa);
        sink.push(run);
    }
}

/// Takes what is mapped in `range` under a table of `level`, and the tables that are empty then.
/// True when this one is.
fn take<const LEAF: u32, S: Sink>(
    page: &Page,
    level: u32,
    range: Span<Iova>,
    sink: &mut S,
) -> bool {
    // All that it spans goes, and then itself: what it holds does not matter any more.
    let all = level < TOP && range.len == 1 << shift(level + 1);
    if level == LEAF {
        empty::<LEAF, S>(page, range, !all, sink);
    } else {
        let (mut at, end) = (range.start, range.start + range.len);
        while at < end {
            let stop = end.min((at | ((1 << shift(level)) - 1)) + 1);
            let above = page.entry(at >> shift(level));
            let link = above.load(Relaxed);
            let part = Span::new(at, stop - at);
            if take::<LEAF, S>(table(link), level - 1, part, sink) {
                above.store(0, Relaxed);
                // SAFETY: it was linked here only, and is no more.
                unsafe { memory::release(link & ADDRESS) };
            }
            at = stop;
        }
    }
    all || page.entries().iter().all(|entry| entry.load(Relaxed) == 0)
}

impl Peer for ByHand {
    const NAME: &'static str = "by hand";

    fn new() -> Result<Self> {
        Ok(Self {
            root: new_table(false),
        })
    }

    #[inline(always)]
    fn map(&mut self, range: Span<Iova>, pa: u64, leaves: Leaves) -> Result<()> {
        match leaves {
            Leaves::Large => self.map_at::<1, 2>(range, pa),
            // 1 MiB is mapped by pages of 4 KiB.
            Leaves::Small | Leaves::Any => self.map_at::<0, 1>(range, pa),
        }
        Ok(())
    }

    #[inline(always)]
    fn unmap<S: Sink>(
        &mut self,
        range: Span<Iova>,
        leaves: Leaves,
        tables: Tables,
        sink: &mut S,
    ) -> Result<()> {
        match (leaves, tables) {
            (Leaves::Large, Tables::Stay) => self.unmap_at::<1, 2, S>(range, sink),
            (_, Tables::Stay) => self.unmap_at::<0, 1, S>(range, sink),
            (Leaves::Large, Tables::GoBack) => self.take_at::<1, S>(range, sink),
            (_, Tables::GoBack) => self.take_at::<0, S>(range, sink),
        }
        Ok(())
    }

    #[inline(always)]
    fn translate(&self, iova: u64) -> Option<u64> {
        // 48 bits count, and all above are equal to the highest of these (AMD64 Architecture
        // Programmer's Manual volume 2, "Canonical Address Access").
        if !matches!(iova as i64 >> 47, 0 | -1) {
            return None;
        }
        let mut entry = table(self.root).entry(iova >> shift(TOP)).load(Relaxed);
        for level in (0..TOP).rev() {
            if entry & 1 == 0 {
                return None;
            }
            if entry & PS != 0 && level + 1 < TOP {
                let inside = (1 << shift(level + 1)) - 1;
                return Some(entry & ADDRESS & !inside | iova & inside);
            }
            entry = table(entry).entry(iova >> shift(level)).load(Relaxed);
        }
        (entry & 1 != 0).then_some(entry & ADDRESS | iova & (PAGE - 1))
    }
}

impl Drop for ByHand {
    fn drop(&mut self) {
        // SAFETY: the root and all below it are this table's, which is used no more.
        unsafe { memory::release_tree(self.root, TOP) };
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use iopt::FormatId;

    use super::*;
    use crate::peers::peer::tests;
    use crate::peers::work::IOVA;

    #[test]
    fn it_does_what_it_says_and_leaks_no_table() {
        tests::holds::<ByHand>(FormatId::X86_64, |table| table.root);
    }

    #[test]
    fn leaves_above_and_addresses_that_are_none_are_distinguished() {
        let table = ByHand::new().unwrap();
        // A leaf of 1 GiB, at the end of the lower half and at the beginning of the upper one.
        for iova in [(1 << 47) - (1 << 30), !0 << 47] {
            table.entry::<2>(iova).store(5 << 30 | LINK | PS, Relaxed);
            let inside = (1 << 30) - 3;
            assert_eq!(table.translate(iova + inside), Some((5 << 30) + inside));
            assert_eq!(table.translate((iova + inside) ^ (1 << 48)), None);
        }
        // What the indices alone would find in the upper half.
        assert_eq!(table.translate(1 << 47), None);
        let present = table.entry::<1>(IOVA);
        present.store(7 << 21 | LINK | PS, Relaxed);
        assert_eq!(table.translate(IOVA + 5), Some((7 << 21) + 5));
        present.store((7 << 21 | LINK | PS) & !1, Relaxed);
        assert_eq!(table.translate(IOVA + 5), None);
    }
}
