//! The crate `x86_64`: [`OffsetPageTable`].
//!
//! It has calls for one page only; a range is a loop over them. Unmapping returns the frame, so the
//! runs cost no further look. Tables stay until [`CleanUp`] looks through the range for empty ones.

use std::fmt::Debug;
use std::ptr;

use ::x86_64::structures::paging::mapper::CleanUp;
use ::x86_64::structures::paging::page::PageRangeInclusive;
use ::x86_64::structures::paging::{
    FrameAllocator, FrameDeallocator, Mapper, OffsetPageTable, Page, PageSize, PageTable,
    PageTableFlags, PhysFrame, Size2MiB, Size4KiB, Translate,
};
use ::x86_64::{PhysAddr, VirtAddr};
use anyhow::Result;
use runs::{Iova, Run, Span};

use super::refused;
use crate::peers::memory;
use crate::peers::peer::{Bench, Leaves, Peer, Sink, Tables};
use crate::peers::work::Subject;

/// What every leaf allows.
const FLAGS: PageTableFlags = PageTableFlags::PRESENT
    .union(PageTableFlags::WRITABLE)
    .union(PageTableFlags::USER_ACCESSIBLE);

/// A table.
pub struct X86 {
    table: OffsetPageTable<'static>,
    /// Of the root.
    at: u64,
}

/// The crate's tables, as a subject.
pub fn subjects() -> Vec<Box<dyn Subject>> {
    vec![Box::new(Bench::<X86>::new())]
}

/// The pages of this thread.
struct Frames;

// SAFETY: pages that are handed out are nobody else's.
unsafe impl FrameAllocator<Size4KiB> for Frames {
    #[inline]
    fn allocate_frame(&mut self) -> Option<PhysFrame> {
        Some(PhysFrame::containing_address(PhysAddr::new(
            memory::allocate(),
        )))
    }
}

impl FrameDeallocator<Size4KiB> for Frames {
    #[inline]
    unsafe fn deallocate_frame(&mut self, frame: PhysFrame) {
        // SAFETY: the caller says that nobody uses it; all frames of a table are of the allocator.
        unsafe { memory::release(frame.start_address().as_u64()) };
    }
}

/// The pages of a range.
#[inline(always)]
fn pages<S: PageSize>(range: Span<Iova>) -> PageRangeInclusive<S> {
    Page::range_inclusive(
        Page::containing_address(VirtAddr::new(range.start)),
        Page::containing_address(VirtAddr::new(range.last())),
    )
}

impl X86 {
    #[inline(always)]
    fn map_as<S: PageSize + Debug>(&mut self, range: Span<Iova>, pa: u64) -> Result<()>
    where
        OffsetPageTable<'static>: Mapper<S>,
    {
        for offset in (0..range.len).step_by(S::SIZE as usize) {
            let page = Page::<S>::containing_address(VirtAddr::new(range.start + offset));
            let frame = PhysFrame::containing_address(PhysAddr::new(pa + offset));
            // SAFETY: no processor uses the table, so whatever it maps is touched by nobody.
            let mapped = unsafe { self.table.map_to(page, frame, FLAGS, &mut Frames) };
            match mapped {
                Ok(flush) => flush.ignore(),
                Err(error) => return Err(refused(error)),
            }
        }
        Ok(())
    }

    #[inline(always)]
    fn unmap_as<S: PageSize>(&mut self, range: Span<Iova>, sink: &mut impl Sink) -> Result<()>
    where
        OffsetPageTable<'static>: Mapper<S>,
    {
        for page in pages::<S>(range) {
            match self.table.unmap(page) {
                Ok((frame, flush)) => {
                    flush.ignore();
                    sink.push(Run::new(
                        page.start_address().as_u64(),
                        Span::new(frame.start_address().as_u64(), S::SIZE),
                    ));
                }
                Err(error) => return Err(refused(error)),
            }
        }
        Ok(())
    }
}

impl Peer for X86 {
    const NAME: &'static str = "x86_64";

    fn new() -> Result<Self> {
        let at = memory::allocate();
        let root = ptr::with_exposed_provenance_mut::<PageTable>(at as usize);
        // SAFETY: the page is this table's alone, aligned as `PageTable` is and as large; entries are
        // integers, so that any content is one. It is empty before it is used.
        let root = unsafe { &mut *root };
        root.zero();
        // SAFETY: the physical address of a page is its address, and the root is empty.
        let table = unsafe { OffsetPageTable::new(root, VirtAddr::zero()) };
        Ok(Self { table, at })
    }

    #[inline(always)]
    fn map(&mut self, range: Span<Iova>, pa: u64, leaves: Leaves) -> Result<()> {
        match leaves {
            Leaves::Large => self.map_as::<Size2MiB>(range, pa),
            // 1 MiB is mapped by pages of 4 KiB; the user would have to choose.
            Leaves::Small | Leaves::Any => self.map_as::<Size4KiB>(range, pa),
        }
    }

    #[inline(always)]
    fn unmap<S: Sink>(
        &mut self,
        range: Span<Iova>,
        leaves: Leaves,
        tables: Tables,
        sink: &mut S,
    ) -> Result<()> {
        match leaves {
            Leaves::Large => self.unmap_as::<Size2MiB>(range, sink)?,
            Leaves::Small | Leaves::Any => self.unmap_as::<Size4KiB>(range, sink)?,
        }
        if tables == Tables::GoBack {
            // SAFETY: all tables are of this thread's pages, and no processor uses them.
            unsafe {
                self.table
                    .clean_up_addr_range(pages::<Size4KiB>(range), &mut Frames);
            }
        }
        Ok(())
    }

    #[inline(always)]
    fn translate(&self, iova: u64) -> Option<u64> {
        let found = self.table.translate_addr(VirtAddr::new(iova));
        found.map(|pa| pa.as_u64())
    }
}

impl Drop for X86 {
    fn drop(&mut self) {
        // The crate gives back what is empty only.
        // SAFETY: the root and all below it are this table's, which is used no more.
        unsafe { memory::release_tree(self.at, 3) };
    }
}

#[cfg(test)]
mod tests {
    use iopt::FormatId;

    use super::*;
    use crate::peers::peer::tests;

    #[test]
    fn it_does_what_it_says_and_leaks_no_table() {
        tests::holds::<X86>(FormatId::X86_64, |table| table.at);
    }
}
