//! The DMA check on a device of the machine: it copies samples, and every byte is compared.
//!
//! Such a device is slow, so it copies between a few *places* of [`PLACE`] bytes: at both ends of
//! the memory, across borders of huge pages, and shuffled in between. Each place takes what the next
//! one has held, so that all but two are both read and written. What the device read wrongly, or
//! wrote somewhere else in the memory, is then found by comparing all of the memory.
//!
//! What lies just outside must be out of reach. There are pages on either side that were mapped
//! there before, and that the device has read, so that its unit may know them still; they are
//! unmapped before the memory is mapped. What the device reads there must not be what they hold, and
//! what it writes there must not come to them.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use hostmem::{Backing, Mapping, MappingError};
use runs::{Iova, Offset, Span};

use super::JobError;
use scenario::pattern::{Pattern, differing, fill, shuffled};

/// Bytes of a copy.
pub(crate) const PLACE: u64 = 2048;
/// The most places.
const PLACES: usize = 17;
/// A huge page, over whose borders some places lie.
const HUGE: u64 = 2 << 20;
/// How many borders.
const BORDERS: u64 = 4;
/// Bytes of a page.
const PAGE: u64 = 4096;

/// A device with a buffer of [`PLACE`] bytes, between which and memory it copies.
///
/// Both calls return when the copy is done, and ask `go_on` while they wait.
pub(crate) trait Copier {
    /// Fills the buffer from `iova`.
    ///
    /// # Errors
    ///
    /// When the device does not do it. A fault is no error: the device does not learn of it.
    fn read(
        &mut self,
        iova: u64,
        go_on: &mut dyn FnMut() -> ControlFlow<()>,
    ) -> Result<(), JobError>;

    /// Writes the buffer to `iova`.
    ///
    /// # Errors
    ///
    /// As [`read`](Self::read).
    fn write(
        &mut self,
        iova: u64,
        go_on: &mut dyn FnMut() -> ControlFlow<()>,
    ) -> Result<(), JobError>;
}

/// What was found.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Found {
    pub(super) copies: u64,
    pub(super) wrong: u64,
    pub(super) compared: u64,
    pub(super) neighbour_accesses: u64,
    pub(super) neighbour_reached: u64,
}

/// Pages for either side of the memory, which hold what nothing else does.
pub(super) struct Neighbours(Arc<Mapping>);

impl Neighbours {
    pub(super) fn new() -> Result<Self, MappingError> {
        let pages = Self(Arc::new(Mapping::new(Backing::Anon4K, 2 * PAGE, None)?));
        pages.fill();
        Ok(pages)
    }

    fn fill(&self) {
        for (cell, word) in self.0.cells().iter().zip(words(Pattern::Device, 0)) {
            cell.store(word, Ordering::Relaxed);
        }
    }

    /// Both pages.
    pub(super) const fn mapping(&self) -> &Arc<Mapping> {
        &self.0
    }

    /// Where the pages belong: the device address, and the part of the mapping.
    pub(super) fn pages(range: Span<Iova>) -> [(u64, Span<Offset>); 2] {
        [
            (range.start - PAGE, Span::new(0, PAGE)),
            (range.last() + 1, Span::new(PAGE, PAGE)),
        ]
    }

    /// What of each page touches the memory: the device address, and the offset in the mapping.
    fn edges(range: Span<Iova>) -> [(u64, u64); 2] {
        [
            (range.start - PLACE, PAGE - PLACE),
            (range.last() + 1, PAGE),
        ]
    }

    /// True when somebody has written to the edge at `offset`.
    fn is_changed(&self, offset: u64) -> bool {
        let expected = words(Pattern::Device, offset);
        differing(held(&self.0, offset, PLACE), expected) > 0
    }
}

/// What `len` bytes of memory hold from `offset` on.
pub(crate) fn held(memory: &Mapping, offset: u64, len: u64) -> impl Iterator<Item = u64> {
    let cells = (offset / 8) as usize..((offset + len) / 8) as usize;
    let cells = memory.cells().get(cells).unwrap_or_default();
    cells.iter().map(|cell| cell.load(Ordering::Relaxed))
}

/// What was written there from `offset` on.
pub(crate) fn words(pattern: Pattern, offset: u64) -> impl Iterator<Item = u64> {
    (offset..)
        .step_by(8)
        .map(move |offset| pattern.word(offset))
}

/// Checks that `device` sees `memory` at `range`, and nothing beside it: `neighbours` were there
/// before. `progress` is told the bytes that were written or compared, up to twice the memory's.
pub(super) fn check(
    device: &mut dyn Copier,
    neighbours: &Neighbours,
    memory: &Mapping,
    range: Span<Iova>,
    progress: &mut dyn FnMut(u64) -> ControlFlow<()>,
) -> Result<Found, JobError> {
    let stopped = |flow: ControlFlow<()>| match flow {
        ControlFlow::Continue(()) => Ok(()),
        ControlFlow::Break(()) => Err(JobError::Interrupted),
    };
    let mut found = Found::default();
    stopped(fill(memory, progress))?;
    let mut go_on = || progress(range.len);
    look_beside(device, neighbours, memory, range, &mut go_on, &mut found)?;
    let places = places(range.len);
    let mut moved = Vec::new();
    for (to, from) in places.iter().zip(places.iter().skip(1)) {
        device.read(range.start + from, &mut go_on)?;
        device.write(range.start + to, &mut go_on)?;
        found.copies += 1;
        moved.push((*to, *from));
    }
    stopped(compare(memory, moved, &mut found, &mut |done| {
        progress(range.len + done)
    }))?;
    Ok(found)
}

/// Has the device read and write on either side of the range.
fn look_beside(
    device: &mut dyn Copier,
    neighbours: &Neighbours,
    memory: &Mapping,
    range: Span<Iova>,
    go_on: &mut dyn FnMut() -> ControlFlow<()>,
    found: &mut Found,
) -> Result<(), JobError> {
    for (iova, offset) in Neighbours::edges(range) {
        // What the neighbour does not hold, so that it would show there, and that what was read
        // there is told from what was in the buffer before.
        device.read(range.last() + 1 - PLACE, go_on)?;
        device.write(iova, go_on)?;
        let written = neighbours.is_changed(offset);
        neighbours.fill();
        device.read(iova, go_on)?;
        device.write(range.start, go_on)?;
        let came = held(memory, 0, PLACE).zip(words(Pattern::Device, offset));
        let read = came.filter(|(found, theirs)| found == theirs).count() > 0;
        found.neighbour_accesses += 2;
        found.neighbour_reached += u64::from(read) + u64::from(written);
    }
    // The only place of the memory that was written to.
    let first = memory.cells().iter().take((PLACE / 8) as usize);
    for (cell, word) in first.zip(words(Pattern::Processor, 0)) {
        cell.store(word, Ordering::Relaxed);
    }
    Ok(())
}

/// Offsets of places in memory of `len` bytes, a page at least; none overlaps another.
fn places(len: u64) -> Vec<u64> {
    let ends = [0, len - PLACE];
    let huge = 1..len.div_ceil(HUGE);
    let step = (huge.end - huge.start).div_ceil(BORDERS).max(1) as usize;
    let borders = huge.step_by(step).map(|page| page * HUGE - PLACE / 2);
    // Across the borders of small pages, of which each may be somewhere else.
    let pages = shuffled(len / PAGE, 1).filter(|page| *page > 0);
    let small = pages.map(|page| page * PAGE - PLACE / 2);
    let mut places: Vec<u64> = Vec::with_capacity(PLACES);
    for place in ends.into_iter().chain(borders).chain(small) {
        if places.len() == PLACES {
            break;
        }
        if places.iter().all(|other| other.abs_diff(place) >= PLACE) {
            places.push(place);
        }
    }
    // The first is only written and the last only read: the ends shall be both.
    let middle = places.len() / 2;
    places.rotate_right(middle);
    places
}

/// Compares all of the memory with what was written first, but for the places that were `moved`: to
/// the first offset from the second.
fn compare(
    memory: &Mapping,
    mut moved: Vec<(u64, u64)>,
    found: &mut Found,
    progress: &mut dyn FnMut(u64) -> ControlFlow<()>,
) -> ControlFlow<()> {
    moved.sort_unstable();
    let end = memory.len();
    let mut stretches = Vec::new();
    let mut at = 0;
    for (to, from) in moved {
        stretches.push((Span::<Offset>::new(at, to - at), at));
        stretches.push((Span::new(to, PLACE), from));
        at = to + PLACE;
    }
    stretches.push((Span::new(at, end - at), at));
    for (stretch, from) in stretches {
        for start in (0..stretch.len).step_by(8 << 20) {
            let len = (stretch.len - start).min(8 << 20);
            let here = held(memory, stretch.start + start, len);
            found.wrong += differing(here, words(Pattern::Processor, from + start));
            found.compared += len;
            progress(found.compared)?;
        }
    }
    ControlFlow::Continue(())
}

#[cfg(test)]
mod tests {
    use iommu::{DeviceId, DomainId, Port, RunMap, SoftwareUnit, Unit};
    use iopt::format::VtdSs;
    use iopt::{Gather, HeapTables, Prot, Table};

    use super::super::target::Piece;
    use super::*;

    const IOVA: u64 = 1 << 32;
    const PA: u64 = 1 << 33;
    const NEIGHBOURS: u64 = 1 << 34;
    const LEN: u64 = 64 * PAGE;

    type Tables = Arc<HeapTables>;

    /// A device of the software unit, as slow to learn of a fault as `edu`.
    struct Slow {
        port: Port<Tables, RunMap<Piece>>,
        buffer: [u64; (PLACE / 8) as usize],
    }

    impl Copier for Slow {
        fn read(
            &mut self,
            iova: u64,
            _: &mut dyn FnMut() -> ControlFlow<()>,
        ) -> Result<(), JobError> {
            let _ = self.port.read(iova, &mut self.buffer);
            Ok(())
        }

        fn write(
            &mut self,
            iova: u64,
            _: &mut dyn FnMut() -> ControlFlow<()>,
        ) -> Result<(), JobError> {
            let _ = self.port.write(iova, &self.buffer);
            Ok(())
        }
    }

    /// Runs the check over a table that maps the memory, after `tamper` has had its hands on it.
    fn check_with(tamper: impl FnOnce(&mut Table<VtdSs, Tables>)) -> Found {
        let memory = Arc::new(Mapping::new(Backing::Anon4K, LEN, None).unwrap());
        let neighbours = Neighbours::new().unwrap();
        let data = RunMap::new([
            (PA, Piece::new(&memory, 0, LEN)),
            (NEIGHBOURS, Piece::new(neighbours.mapping(), 0, 2 * PAGE)),
        ])
        .unwrap();
        let tables = Arc::new(HeapTables::with_tables(64).unwrap());
        let mut table = Table::new(VtdSs::new(4).unwrap(), Arc::clone(&tables)).unwrap();
        table.map(IOVA, &[Span::new(PA, LEN)], Prot::RW).unwrap();
        tamper(&mut table);

        let unit = SoftwareUnit::new(tables, data);
        let device = DeviceId::pci(1, 0, 0);
        unit.attach(device, DomainId(1), table.root()).unwrap();
        let mut slow = Slow {
            port: unit.port(device),
            buffer: [0; (PLACE / 8) as usize],
        };
        let go_on = &mut |_| ControlFlow::Continue(());
        check(&mut slow, &neighbours, &memory, Span::new(IOVA, LEN), go_on).unwrap()
    }

    /// Has a page lead to another page of the memory, or nowhere.
    fn remap(table: &mut Table<VtdSs, Tables>, page: u64, to: Option<u64>) {
        let mut gather = Gather::new();
        let range = Span::new(IOVA + page * PAGE, PAGE);
        table.unmap(range, &mut gather, &mut iopt::NoRuns).unwrap();
        table.reclaim(gather.never_walked());
        if let Some(to) = to {
            let run = [Span::new(PA + to * PAGE, PAGE)];
            table.map(range.start, &run, Prot::RW).unwrap();
        }
    }

    #[test]
    fn memory_that_is_mapped_right_is_found_right() {
        let expected = Found {
            copies: PLACES as u64 - 1,
            wrong: 0,
            compared: LEN,
            neighbour_accesses: 4,
            neighbour_reached: 0,
        };
        assert_eq!(check_with(|_| {}), expected);
    }

    #[test]
    fn a_page_at_either_end_that_leads_elsewhere_or_nowhere_is_found() {
        let last = LEN / PAGE - 1;
        for page in [0, last] {
            for to in [None, Some(last / 2)] {
                let found = check_with(|table| remap(table, page, to));
                assert!(found.wrong > PLACE / 2, "page {page} to {to:?}: {found:?}");
            }
        }
    }

    #[test]
    fn a_neighbour_that_is_still_mapped_is_found() {
        for (nth, (iova, part)) in Neighbours::pages(Span::new(IOVA, LEN))
            .into_iter()
            .enumerate()
        {
            for (prot, reached) in [(Prot::READ, 1), (Prot::RW, 2)] {
                let run = [Span::new(NEIGHBOURS + part.start, PAGE)];
                let found = check_with(|table| table.map(iova, &run, prot).unwrap());
                assert_eq!(found.neighbour_reached, reached, "neighbour {nth}");
                assert_eq!((found.neighbour_accesses, found.wrong), (4, 0));
            }
        }
    }

    #[test]
    fn places_lie_at_the_ends_and_across_borders_and_never_overlap() {
        for (len, count) in [
            (PAGE, 2),
            (2 * PAGE, 3),
            (LEN, PLACES),
            (HUGE, PLACES),
            (HUGE + PAGE, PLACES),
            (1 << 30, PLACES),
        ] {
            let places = places(len);
            assert_eq!(places.len(), count, "{len:#x}");
            // Both ends are read and written where there is a third place.
            let inner = places.get(1..places.len() - 1).unwrap();
            assert!(len <= 2 * PAGE || [0, len - PLACE].iter().all(|end| inner.contains(end)));
            let borders = places.iter().filter(|at| (**at + PLACE / 2) % HUGE == 0);
            let most = (len.div_ceil(HUGE) - 1).min(BORDERS);
            assert!(borders.count() as u64 >= most.min(1), "{len:#x}");
            let mut sorted = places.clone();
            sorted.sort_unstable();
            assert!(sorted.windows(2).all(|two| two[0] + PLACE <= two[1]));
            assert!(sorted.last().unwrap() + PLACE <= len);
            assert!(sorted.iter().all(|at| at % 8 == 0));
        }
    }
}
