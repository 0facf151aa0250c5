//! Inside a shared table: several operations under one guard, and what unmapping claims.

use runs::{Iova, Pa, Span};

use super::access::{Access, Claiming, Restart};
use super::clear::{Refusal, same_run};
use super::guard::Guard;
use super::sink::RunSink;
use super::top::Begin;
use super::{Leaf, Level, SharedTable, Table, at_level, at_top};
use crate::cell::Cell;
use crate::error::{MapError, UnmapError};
use crate::format::{Entry, Format};
use crate::gather::Gather;
use crate::memory::TableMemory;
use crate::prot::Prot;

/// A place inside a [`SharedTable`], for as long as it lives.
///
/// Each operation of the shared form goes inside and leaves again, which costs as much as a single
/// page. Whoever has several things to do, as after a look into a queue, stays inside for all of
/// them. Other threads go on meanwhile; only tables that are unlinked wait, to be used again, until
/// whoever was inside has left. So do not stay while you wait for something: a flush, a lock,
/// another thread, or [`track_dirty`](SharedTable::track_dirty) on the same table.
#[derive(Debug)]
pub struct Inside<'t, F: Format, M: TableMemory, const SLOTS: usize> {
    shared: &'t SharedTable<F, M, SLOTS>,
    // What is claimed is claimed with its number: one operation at a time (`&mut self`).
    guard: Guard<'t, M::Link>,
}

impl<'t, F: Format, M: TableMemory, const SLOTS: usize> Inside<'t, F, M, SLOTS> {
    #[inline(always)]
    pub(super) fn new(shared: &'t SharedTable<F, M, SLOTS>, guard: Guard<'t, M::Link>) -> Self {
        Self { shared, guard }
    }

    #[inline(always)]
    fn access(&self) -> Claiming {
        Claiming(self.guard.number())
    }

    /// See [`Table::map`].
    #[inline(always)]
    pub fn map(&mut self, iova: u64, runs: &[Span<Pa>], prot: Prot) -> Result<(), MapError> {
        let access = self.access();
        if self
            .shared
            .table()
            .map_page(iova, runs, prot, access)
            .is_some()
        {
            return Ok(());
        }
        self.map_runs(iova, runs, prot)
    }

    #[inline(never)]
    fn map_runs(&mut self, iova: u64, runs: &[Span<Pa>], prot: Prot) -> Result<(), MapError> {
        let table = self.shared.table();
        let request = table.check_map(iova, runs, prot)?;
        table.map_checked(request, self.access()).map(|_| ())
    }

    /// See [`Table::unmap`].
    #[inline(always)]
    pub fn unmap(
        &mut self,
        range: Span<Iova>,
        gather: &mut Gather,
        sink: &mut impl RunSink,
    ) -> Result<(), UnmapError> {
        self.remove(range, true, gather, sink).map(|_| ())
    }

    /// See [`Table::unmap_mapped`].
    #[inline(always)]
    pub fn unmap_mapped(
        &mut self,
        range: Span<Iova>,
        gather: &mut Gather,
        sink: &mut impl RunSink,
    ) -> Result<u64, UnmapError> {
        self.remove(range, false, gather, sink)
    }

    /// See [`Table::translate`]. What it says was true at some time during the call.
    #[inline]
    pub fn translate(&self, iova: u64) -> Option<u64> {
        self.shared.table().translate_as::<Claiming>(iova)
    }

    /// See [`Table::leaf_at`]. What it says was true at some time during the call.
    pub fn leaf_at(&self, iova: u64) -> Option<Leaf> {
        self.shared.table().leaf_at(iova)
    }

    #[inline(always)]
    fn remove<S: RunSink>(
        &mut self,
        range: Span<Iova>,
        whole: bool,
        gather: &mut Gather,
        sink: &mut S,
    ) -> Result<u64, UnmapError> {
        let table = self.shared.table();
        // Looked at inside: whoever switches tracking on waits for those who have not seen it.
        table.check_sink(sink, self.shared.tracks_dirty())?;
        if table
            .unmap_page(range, gather, sink, self.access())
            .is_some()
        {
            return Ok(range.len);
        }
        self.remove_range(range, whole, gather, sink)
    }

    #[inline(never)]
    fn remove_range<S: RunSink>(
        &mut self,
        range: Span<Iova>,
        whole: bool,
        gather: &mut Gather,
        sink: &mut S,
    ) -> Result<u64, UnmapError> {
        let table = self.shared.table();
        let access = self.access();
        let at = table.check_range(range)?;
        let wanted = Wanted {
            first: at,
            last: at + (range.len - 1),
            whole,
        };
        table.intact()?;
        let mut round = 0;
        let lowest = loop {
            let begin = table.begin();
            let claimed = table.claim_from(begin, at, range.len, &wanted, access);
            let stop = match (claimed, table.intact()) {
                (Ok(lowest), Ok(())) => break lowest,
                (_, Err(cause)) => {
                    table.release_all(begin, at, range.len, access);
                    return Err(cause.into());
                }
                (Err(stop), Ok(())) => stop,
            };
            table.release_all(begin, at, range.len, access);
            match stop {
                Stop::Restart => table.memory.wait(round),
                Stop::Refused(refusal) => match table.refused(refusal, range) {
                    // Another thread may have removed it just now: then look again.
                    UnmapError::InsideLeaf { leaf, .. }
                        if leaf.len == 0 || range.covers(&leaf.input()) => {}
                    error => return Err(error),
                },
            }
            round += 1;
        };
        let outcome = table.remove_claimed(lowest, at, range.len, gather, sink, access);
        let mut left_over = outcome.left_over;
        while left_over {
            let begin = table.begin();
            at_top!(begin, F, Top, root => {
                table.prune::<Top, _>(root, (at, range.len), gather, access);
            });
            // What was the root is an ordinary table when the top has grown meanwhile.
            left_over = table.begin() != begin;
        }
        table
            .intact()
            .inspect_err(|_| table.release_all(table.begin(), at, range.len, access))?;
        Ok(outcome.bytes)
    }
}

/// What an unmap wants, by stripped addresses.
#[derive(Clone, Copy)]
struct Wanted {
    first: u64,
    last: u64,
    /// Holes are refused.
    whole: bool,
}

/// Why an unmap stores nothing.
enum Stop {
    Restart,
    Refused(Refusal),
}

impl From<Restart> for Stop {
    fn from(_: Restart) -> Self {
        Self::Restart
    }
}

impl From<Refusal> for Stop {
    fn from(refusal: Refusal) -> Self {
        Self::Refused(refusal)
    }
}

impl<F: Format, M: TableMemory> Table<F, M> {
    /// Goes down to the lowest table that `[at, at + len)` goes through, which is returned with its
    /// level, and claims what unmapping will store to from there on.
    #[inline(always)]
    fn claim_from<P: Access>(
        &self,
        begin: Begin,
        at: u64,
        len: u64,
        wanted: &Wanted,
        access: P,
    ) -> Result<(u64, usize), Stop> {
        let (table, level) = self.lowest(begin, at, len, access)?;
        at_level!(level, F, V => {
            self.claim_to_unmap::<V, _>(table, at, len, wanted, false, access)
        })?;
        Ok((table, level))
    }

    /// Claims what unmapping `[at, at + todo)` will store to, and looks for what forbids it.
    /// `all` is true below an entry that will be unlinked as a whole.
    #[inline]
    fn claim_to_unmap<V: Level, P: Access>(
        &self,
        table: u64,
        at: u64,
        todo: u64,
        wanted: &Wanted,
        all: bool,
        access: P,
    ) -> Result<(), Stop> {
        if V::N == 0 {
            self.claim(table, access)?;
            let room = self.room(0, at, todo);
            return Ok(self.check_row(table, at, room, wanted.whole)?);
        }
        let stores = all
            || self
                .entries_in(table, V::N, at, todo)
                .any(|part| match part.entry() {
                    Entry::Empty => false,
                    Entry::Leaf { .. } => true,
                    Entry::Table(_) => part.is_whole(),
                });
        if stores {
            self.claim(table, access)?;
        }
        let mut entries = self.entries_in(table, V::N, at, todo);
        while let Some(part) = entries.next() {
            let word = part.word();
            match F::decode(V::N, word) {
                Entry::Empty if wanted.whole => return Err(Refusal::Hole(part.at()).into()),
                Entry::Empty => {}
                Entry::Leaf { .. } if !stores => return Err(Stop::Restart),
                Entry::Leaf { log2, .. } => {
                    // Of many in a row only the first and the last can reach over an end.
                    self.check_leaf::<V>(part.base(), word, wanted)?;
                    let row = part.row();
                    let count = same_run::<F, V, M::Cell, false>(row, log2);
                    let last = row
                        .get(count.saturating_sub(1))
                        .map_or(0, Cell::get_acquire);
                    let bytes = (count as u64) << F::shift(V::N);
                    self.check_leaf::<V>(part.base() + (bytes - 1), last, wanted)?;
                    entries.pass(count);
                }
                Entry::Table(_) if part.is_whole() && !stores => return Err(Stop::Restart),
                Entry::Table(below) => {
                    let (at, len, all) = (part.at(), part.len(), part.is_whole());
                    self.claim_to_unmap::<V::Below, P>(below, at, len, wanted, all, access)?;
                }
            }
        }
        Ok(())
    }

    /// Refuses a leaf at `at` that reaches over an end of the range.
    fn check_leaf<V: Level>(&self, at: u64, word: u64, wanted: &Wanted) -> Result<(), Stop> {
        if let Entry::Leaf { log2, .. } = F::decode(V::N, word) {
            let rest = (1u64 << log2) - 1;
            if at & !rest < wanted.first || at | rest > wanted.last {
                return Err(Refusal::InsideLeaf(at).into());
            }
        }
        Ok(())
    }
}
