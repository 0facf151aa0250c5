//! The crate `page_table_multiarch`: its x86-64 table, which is the one that it offers on x86-64;
//! those for other processors are not compiled there.
//!
//! Its calls for a region are loops over the same calls for a page, and slower than a loop of the
//! user's (measured: by a quarter to map, by half to unmap), so that is what is here; unmapping a page
//! returns what was there. It never gives a table back before the whole goes: what is measured with
//! allocated tables begins anew each time, and there are no figures for giving them back.

use ::page_table_multiarch::x86_64::X64PageTable;
use ::page_table_multiarch::{MappingFlags, PageSize, PagingHandler};
use anyhow::Result;
use memory_addr::{PhysAddr, VirtAddr};
use runs::{Iova, Run, Span};

use super::refused;
use crate::peers::memory;
use crate::peers::peer::{Bench, LARGE, Leaves, Peer, SMALL, Sink, Tables};
use crate::peers::work::Subject;

/// A table.
pub struct Multiarch(X64PageTable<Frames>);

/// The crate's tables, as a subject.
pub fn subjects() -> Vec<Box<dyn Subject>> {
    vec![Box::new(Bench::<Multiarch>::new())]
}

/// The pages of this thread.
struct Frames;

impl PagingHandler for Frames {
    #[inline]
    fn alloc_frames(num: usize, _align: usize) -> Option<PhysAddr> {
        // Tables of four levels are single pages.
        (num == 1).then(|| PhysAddr::from_usize(memory::allocate() as usize))
    }

    #[inline]
    fn dealloc_frames(paddr: PhysAddr, _num: usize) {
        // SAFETY: the crate gives back what it was handed out, when its table goes.
        unsafe { memory::release(paddr.as_usize() as u64) };
    }

    #[inline]
    fn phys_to_virt(paddr: PhysAddr) -> VirtAddr {
        VirtAddr::from_usize(paddr.as_usize())
    }
}

/// Permissions of every leaf.
fn flags() -> MappingFlags {
    MappingFlags::READ | MappingFlags::WRITE | MappingFlags::USER
}

fn virt(at: u64) -> VirtAddr {
    VirtAddr::from_usize(at as usize)
}

impl Peer for Multiarch {
    const NAME: &'static str = "page_table_multiarch";
    const GIVES_BACK: bool = false;

    fn new() -> Result<Self> {
        X64PageTable::try_new().map(Self).map_err(refused)
    }

    #[inline(always)]
    fn map(&mut self, range: Span<Iova>, pa: u64, leaves: Leaves) -> Result<()> {
        let (step, size) = match leaves {
            Leaves::Large => (LARGE, PageSize::Size2M),
            // 1 MiB is mapped by pages of 4 KiB.
            Leaves::Small | Leaves::Any => (SMALL, PageSize::Size4K),
        };
        let mut cursor = self.0.cursor();
        for offset in (0..range.len).step_by(step as usize) {
            let pa = PhysAddr::from_usize((pa + offset) as usize);
            cursor
                .map(virt(range.start + offset), pa, size, flags())
                .map_err(refused)?;
        }
        Ok(())
    }

    #[inline(always)]
    fn unmap<S: Sink>(
        &mut self,
        range: Span<Iova>,
        _: Leaves,
        _: Tables,
        sink: &mut S,
    ) -> Result<()> {
        let mut cursor = self.0.cursor();
        let mut at = range.start;
        while at <= range.last() {
            let (pa, _, size) = cursor.unmap(virt(at)).map_err(refused)?;
            let size = size as usize as u64;
            sink.push(Run::new(at, Span::new(pa.as_usize() as u64, size)));
            at += size;
        }
        Ok(())
    }

    #[inline(always)]
    fn translate(&self, iova: u64) -> Option<u64> {
        let found = self.0.query(virt(iova)).ok();
        found.map(|(pa, ..)| pa.as_usize() as u64)
    }
}

#[cfg(test)]
mod tests {
    use iopt::FormatId;

    use super::*;
    use crate::peers::peer::tests;

    #[test]
    fn it_does_what_it_says_and_leaks_no_table() {
        let root = |table: &Multiarch| table.0.root_paddr().as_usize() as u64;
        tests::holds::<Multiarch>(FormatId::X86_64, root);
    }
}
