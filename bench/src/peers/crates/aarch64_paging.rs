//! The crate `aarch64-paging`: a stage-1 [`Mapping`] that is not active, so that it neither checks
//! for break-before-make nor invalidates.
//!
//! It maps, and unmaps by mapping what is not valid, whole ranges in one recursion. It overwrites
//! what was there. Nothing tells what was there; where runs are wanted, the range is walked first. A
//! table goes when all that it spans is unmapped in one call, and otherwise when all tables are
//! looked through. To map pages of 2 MiB alone there is no call: the range is cut so that none
//! spans the 1 GiB of the level above.

use std::ptr::{self, NonNull};

use ::aarch64_paging::Mapping;
use ::aarch64_paging::descriptor::{Descriptor, El1Attributes, PhysicalAddress};
use ::aarch64_paging::paging::{
    Constraints, El1And0, MemoryRegion, PageTable, Translation, VaRange,
};
use anyhow::Result;
use runs::{Iova, Run, Span};

use super::refused;
use crate::peers::memory;
use crate::peers::peer::{Bench, LARGE, Leaves, Peer, SMALL, Sink, Tables};
use crate::peers::work::Subject;

/// The level of the root: four levels, 48 bits.
const ROOT: usize = 0;
/// What every leaf allows: normal memory, read and write.
const FLAGS: El1Attributes = El1Attributes::VALID
    .union(El1Attributes::ATTRIBUTE_INDEX_0)
    .union(El1Attributes::INNER_SHAREABLE)
    .union(El1Attributes::USER)
    .union(El1Attributes::ACCESSED)
    .union(El1Attributes::NON_GLOBAL);

/// A table.
pub struct Aarch64(Mapping<Frames, El1And0>);

/// The crate's tables, as a subject.
pub fn subjects() -> Vec<Box<dyn Subject>> {
    vec![Box::new(Bench::<Aarch64>::new())]
}

/// The pages of this thread.
struct Frames;

type Table = PageTable<El1Attributes>;

impl Translation<El1Attributes> for Frames {
    #[inline]
    fn allocate_table(&mut self) -> (NonNull<Table>, PhysicalAddress) {
        let at = PhysicalAddress(memory::allocate() as usize);
        let table = self.physical_to_virtual(at);
        // SAFETY: a page that is nobody else's, aligned as a table is and as large; zeroes are an
        // empty table.
        unsafe { table.write_bytes(0, 1) };
        (table, at)
    }

    #[inline]
    unsafe fn deallocate_table(&mut self, table: NonNull<Table>) {
        // SAFETY: the caller says that it was allocated here and is used no more.
        unsafe { memory::release(table.as_ptr().expose_provenance() as u64) };
    }

    #[inline(always)]
    fn physical_to_virtual(&self, pa: PhysicalAddress) -> NonNull<Table> {
        let table = ptr::with_exposed_provenance_mut::<Table>(pa.0);
        // SAFETY: the crate asks for what it was handed out, and no page is at 0.
        unsafe { NonNull::new_unchecked(table) }
    }
}

fn region(range: Span<Iova>) -> MemoryRegion {
    MemoryRegion::new(range.start as usize, (range.start + range.len) as usize)
}

impl Aarch64 {
    /// Maps `range`, or unmaps it, in parts none of which goes beyond a multiple of `step`.
    #[inline(always)]
    fn in_steps(
        &mut self,
        range: Span<Iova>,
        step: u64,
        pa: u64,
        flags: El1Attributes,
        constraints: Constraints,
    ) -> Result<()> {
        let (mut at, end) = (range.start, range.start + range.len);
        while at < end {
            let stop = end.min((at | (step - 1)) + 1);
            let part = region(Span::new(at, stop - at));
            let pa = PhysicalAddress((pa + (at - range.start)) as usize);
            self.0
                .map_range(&part, pa, flags, constraints)
                .map_err(refused)?;
            at = stop;
        }
        Ok(())
    }
}

impl Peer for Aarch64 {
    const NAME: &'static str = "aarch64-paging";
    const SPLITS: bool = true;

    fn new() -> Result<Self> {
        let lower = VaRange::Lower;
        Ok(Self(Mapping::with_asid_and_va_range(
            Frames, 0, ROOT, El1And0, lower,
        )))
    }

    #[inline(always)]
    fn map(&mut self, range: Span<Iova>, pa: u64, leaves: Leaves) -> Result<()> {
        let (constraints, step) = match leaves {
            Leaves::Small => (Constraints::NO_BLOCK_MAPPINGS, 1 << 47),
            Leaves::Large => (Constraints::empty(), 256 * LARGE),
            Leaves::Any => (Constraints::empty(), 1 << 47),
        };
        self.in_steps(range, step, pa, FLAGS, constraints)
    }

    #[inline(always)]
    fn unmap<S: Sink>(
        &mut self,
        range: Span<Iova>,
        leaves: Leaves,
        tables: Tables,
        sink: &mut S,
    ) -> Result<()> {
        if S::WANTED {
            let take = &mut |part: &MemoryRegion, found: &Descriptor<_>, _| {
                let pa = found.output_address().0 as u64;
                sink.push(Run::new(
                    part.start().0 as u64,
                    Span::new(pa, part.len() as u64),
                ));
                Ok(())
            };
            self.0.walk_range(&region(range), take).map_err(refused)?;
        }
        let page = if leaves == Leaves::Large {
            LARGE
        } else {
            SMALL
        };
        let step = match tables {
            // Half of what a table spans.
            Tables::Stay => 256 * page,
            Tables::GoBack => 1 << 47,
        };
        let (none, any) = (El1Attributes::empty(), Constraints::empty());
        self.in_steps(range, step, 0, none, any)?;
        // Tables of the two lowest levels went with the whole GiB that they span together.
        if tables == Tables::GoBack && !range.is_aligned(1 << 30) {
            self.0.compact_subtables();
        }
        Ok(())
    }

    #[inline(always)]
    fn translate(&self, iova: u64) -> Option<u64> {
        let mut found = None;
        let page = region(Span::new(iova, 1));
        let take = &mut |_: &MemoryRegion, leaf: &Descriptor<_>, level: usize| {
            let inside = (4096 << (9 * (3 - level))) - 1;
            if leaf.is_valid() {
                found = Some(leaf.output_address().0 as u64 | iova & inside);
            }
            Ok(())
        };
        self.0.walk_range(&page, take).ok()?;
        found
    }

    #[inline(always)]
    fn split(&mut self, leaf: Span<Iova>) -> Result<()> {
        // What changes its first page must split it; this changes nothing.
        let first = region(Span::new(leaf.start, SMALL));
        self.0.modify_range(&first, &|_, _| Ok(())).map_err(refused)
    }
}

#[cfg(test)]
mod tests {
    use iopt::FormatId;
    use iopt::format::{ArmConfig, ArmGranule};

    use super::*;
    use crate::peers::peer::tests;

    #[test]
    fn it_does_what_it_says_and_leaks_no_table() {
        let format = FormatId::ArmStage1(ArmConfig {
            granule: ArmGranule::K4,
            input_bits: 48,
            upper: false,
        });
        let root = |table: &Aarch64| table.0.root_address().0 as u64;
        tests::holds::<Aarch64>(format, root);
    }

    #[test]
    fn an_address_that_is_not_mapped_leads_nowhere() {
        let table = Aarch64::new().unwrap();
        assert_eq!(table.translate(1 << 33), None);
    }
}
