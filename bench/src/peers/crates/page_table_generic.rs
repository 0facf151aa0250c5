//! The crate `page-table-generic`: its table over an x86-64 entry, which the user of it writes.
//!
//! It maps and unmaps ranges in one recursion. A table goes with its last page, always: it looks
//! through each table that it unmapped from. Unmapping does not tell what was there; where runs are
//! wanted, its iterator walks the range first.

use ::page_table_generic::{
    FrameAllocator, MapConfig, PageTable, PageTableEntry, PhysAddr, TableMeta, UnmapConfig,
    VirtAddr,
};
use anyhow::Result;
use runs::{Iova, Run, Span};

use super::refused;
use crate::peers::memory::{self, ADDRESS};
use crate::peers::peer::{Bench, Leaves, Peer, Sink, Tables};
use crate::peers::work::Subject;

/// Present, writable, user.
const RW: u64 = 0b111;
/// A leaf above the lowest level.
const PS: u64 = 1 << 7;

/// A table.
pub struct Generic(PageTable<Meta, Frames>);

/// The crate's tables, as a subject.
pub fn subjects() -> Vec<Box<dyn Subject>> {
    vec![Box::new(Bench::<Generic>::new())]
}

/// x86-64, four levels, pages of up to 2 MiB.
#[derive(Clone, Copy)]
struct Meta;

impl TableMeta for Meta {
    type P = Entry;
    const PAGE_SIZE: usize = 4096;
    const LEVEL_BITS: &[usize] = &[9, 9, 9, 9];
    // Lest ranges of 2 MiB pages become pages of 1 GiB.
    const MAX_BLOCK_LEVEL: usize = 2;

    #[inline(always)]
    fn flush(_: Option<VirtAddr>) {}
}

/// An entry.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
struct Entry(u64);

impl PageTableEntry for Entry {
    /// The bits beside the address.
    type PteConfig = u64;

    #[inline(always)]
    fn new_page(paddr: PhysAddr, config: u64, is_huge: bool) -> Self {
        Self(paddr.as_usize() as u64 | config | if is_huge { PS } else { 0 })
    }

    #[inline(always)]
    fn new_table(paddr: PhysAddr) -> Self {
        Self(paddr.as_usize() as u64 | RW)
    }

    #[inline(always)]
    fn paddr(&self, _: bool) -> PhysAddr {
        PhysAddr::from_usize((self.0 & ADDRESS) as usize)
    }

    #[inline(always)]
    fn config(&self, is_dir: bool) -> u64 {
        self.0 & !ADDRESS & if is_dir { !PS } else { !0 }
    }

    #[inline(always)]
    fn present(&self) -> bool {
        self.0 & 1 != 0
    }

    #[inline(always)]
    fn huge(&self, is_dir: bool) -> bool {
        is_dir && self.0 & PS != 0
    }

    #[inline(always)]
    fn unused(&self) -> bool {
        self.0 == 0
    }

    #[inline(always)]
    fn clear(&mut self) {
        self.0 = 0;
    }
}

/// The pages of this thread.
#[derive(Clone, Copy)]
struct Frames;

impl FrameAllocator for Frames {
    #[inline]
    fn alloc_frame(&self) -> Option<PhysAddr> {
        Some(PhysAddr::from_usize(memory::allocate() as usize))
    }

    #[inline]
    fn dealloc_frame(&self, frame: PhysAddr) {
        // SAFETY: the crate gives back what it was handed out, once it is linked no more.
        unsafe { memory::release(frame.as_usize() as u64) };
    }

    #[inline(always)]
    fn phys_to_virt(&self, paddr: PhysAddr) -> *mut u8 {
        std::ptr::with_exposed_provenance_mut(paddr.as_usize())
    }
}

fn virt(at: u64) -> VirtAddr {
    VirtAddr::from_usize(at as usize)
}

impl Peer for Generic {
    const NAME: &'static str = "page-table-generic";
    const KEEPS: bool = false;
    const SPLITS: bool = true;

    fn new() -> Result<Self> {
        PageTable::new(Frames).map(Self).map_err(refused)
    }

    #[inline(always)]
    fn map(&mut self, range: Span<Iova>, pa: u64, leaves: Leaves) -> Result<()> {
        let config = MapConfig {
            vaddr: virt(range.start),
            paddr: PhysAddr::from_usize(pa as usize),
            size: range.len as usize,
            pte: RW,
            allow_huge: leaves != Leaves::Small,
            flush: false,
        };
        self.0.map(&config).map_err(refused)
    }

    #[inline(always)]
    fn unmap<S: Sink>(
        &mut self,
        range: Span<Iova>,
        _: Leaves,
        _: Tables,
        sink: &mut S,
    ) -> Result<()> {
        if S::WANTED {
            let end = virt(range.start + range.len);
            for found in self.0.walk(virt(range.start), end) {
                if found.is_final_mapping {
                    let at = found.vaddr.as_usize() as u64;
                    let len = if found.level == 1 { 4096 } else { 2 << 20 };
                    sink.push(Run::new(at, Span::new(found.pte.0 & ADDRESS, len)));
                }
            }
        }
        let config = UnmapConfig {
            start_vaddr: virt(range.start),
            size: range.len as usize,
            flush: false,
        };
        self.0.unmap_with_config(&config).map_err(refused)
    }

    #[inline(always)]
    fn translate(&self, iova: u64) -> Option<u64> {
        let found = self.0.translate_phys(virt(iova)).ok();
        found.map(|pa| pa.as_usize() as u64)
    }

    #[inline(always)]
    fn split(&mut self, leaf: Span<Iova>) -> Result<()> {
        let split = self.0.split_huge_page(virt(leaf.start));
        split.map(|_| ()).map_err(refused)
    }
}

#[cfg(test)]
mod tests {
    use iopt::FormatId;

    use super::*;
    use crate::peers::peer::tests;

    #[test]
    fn it_does_what_it_says_and_leaks_no_table() {
        let root = |table: &Generic| table.0.root_paddr().as_usize() as u64;
        tests::holds::<Generic>(FormatId::X86_64, root);
    }
}
