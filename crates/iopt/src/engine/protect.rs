//! Protect: other permissions for what is mapped, in place.
//!
//! # Protocol
//!
//! As ever there are two passes, and the second cannot fail. The first goes over the range, claims
//! (in the shared access) every table at level 0 and every other one that holds a leaf of the range,
//! and looks: everything is mapped, no leaf reaches over the ends, and every leaf has the memory
//! attributes that are asked for. The second replaces the entries.
//!
//! Output address, size and memory attributes stay the same, so no format demands that the entry is
//! emptied and flushed in between (Arm D8.16.1 names what does; permissions are not among it). In a
//! group the entries change one by one: a unit meets the old permissions or the new ones, as it does
//! until the flush anyhow.
//!
//! Hardware sets accessed and dirty bits meanwhile. An entry is therefore replaced by a
//! compare-and-exchange that carries both over, also from a leaf that may be written to a leaf that
//! may not: what was written before stays dirty. An entry that says already what is wanted is not
//! stored to, and what has not changed need not be flushed.

use runs::{Iova, Run, Span};

use super::access::{Access, Claiming, Exclusive, Restart};
use super::entries::{Part, decode};
use super::{Level, SharedTable, Table, at_top};
use crate::cell::Cell;
use crate::error::ProtectError;
use crate::format::{Entry, Format};
use crate::gather::Gather;
use crate::memory::TableMemory;
use crate::prot::Prot;

/// What may change in place.
const PERMISSIONS: Prot = Prot::RW.union(Prot::EXECUTE).union(Prot::PRIVILEGED);

/// A request that is well formed.
#[derive(Clone, Copy)]
struct Request {
    range: Span<Iova>,
    /// First and last stripped address.
    first: u64,
    last: u64,
    prot: Prot,
    /// Permission and attribute bits of the leaves.
    bits: u64,
}

/// Why the first pass came to an end early, by stripped addresses.
enum Stop {
    Restart,
    InsideLeaf(u64),
    Hole(u64),
    Attributes(u64),
}

impl From<Restart> for Stop {
    fn from(_: Restart) -> Self {
        Self::Restart
    }
}

impl<F: Format, M: TableMemory> Table<F, M> {
    /// Gives everything in `range` the permissions `prot`, in place: all of it is mapped and no leaf
    /// reaches over its ends, or nothing happens. Addresses, sizes, and accessed and dirty bits stay
    /// what they are; memory attributes ([`COHERENT`](Prot::COHERENT), [`DEVICE`](Prot::DEVICE),
    /// [`UNCACHED`](Prot::UNCACHED)) cannot change.
    ///
    /// `gather` is told what must be flushed before the device is held to the new permissions.
    pub fn protect(
        &mut self,
        range: Span<Iova>,
        prot: Prot,
        gather: &mut Gather,
    ) -> Result<(), ProtectError> {
        let request = self.check_protect(range, prot)?;
        self.intact()?;
        let looked = self.look(&request, Exclusive);
        self.intact()?;
        if let Err(stop) = looked {
            // By `&mut` nothing changes between two looks: there is always a cause.
            let at = range.start;
            let otherwise = ProtectError::Hole { range, at };
            return Err(self.refusal(&request, stop).unwrap_or(otherwise));
        }
        self.rewrite(&request, gather, Exclusive);
        Ok(self.intact()?)
    }

    fn check_protect(&self, range: Span<Iova>, prot: Prot) -> Result<Request, ProtectError> {
        let first = self.check_range(range)?;
        let Some(bits) = self.format.leaf_bits(prot) else {
            let format = self.format.id();
            return Err(ProtectError::Prot { prot, format });
        };
        Ok(Request {
            range,
            first,
            last: first + (range.len - 1),
            prot,
            bits,
        })
    }

    fn look<P: Access>(&self, request: &Request, access: P) -> Result<(), Stop> {
        let (at, len) = (request.first, request.range.len);
        at_top!(self.begin(), F, Top, root => self.look_below::<Top, P>(root, at, len, request, access))
    }

    fn rewrite<P: Access>(&self, request: &Request, gather: &mut Gather, access: P) {
        let (at, len) = (request.first, request.range.len);
        at_top!(self.begin(), F, Top, root => {
            self.rewrite_below::<Top, P>(root, at, len, request, gather, access);
        });
    }

    /// The cause in words. `None` when it is not true any more: then look again.
    #[cold]
    fn refusal(&self, request: &Request, stop: Stop) -> Option<ProtectError> {
        let (range, wanted) = (request.range, request.prot);
        let aperture = self.aperture();
        match stop {
            Stop::Restart => None,
            Stop::Hole(at) => {
                let at = aperture.extend(at);
                Some(ProtectError::Hole { range, at })
            }
            Stop::InsideLeaf(at) => {
                let leaf = self.leaf_at(aperture.extend(at))?.run;
                let inside = !range.covers(&leaf.input());
                inside.then_some(ProtectError::InsideLeaf { range, leaf })
            }
            Stop::Attributes(at) => {
                let leaf = self.leaf_at(aperture.extend(at))?;
                let (leaf, found) = (leaf.run, leaf.prot);
                let other = found.difference(PERMISSIONS) != wanted.difference(PERMISSIONS);
                other.then_some(ProtectError::Attributes {
                    wanted,
                    leaf,
                    found,
                })
            }
        }
    }

    /// Claims what holds leaves of `[at, at + todo)`, and looks for what forbids the change.
    fn look_below<V: Level, P: Access>(
        &self,
        table: u64,
        at: u64,
        todo: u64,
        request: &Request,
        access: P,
    ) -> Result<(), Stop> {
        let is_leaf = |part: Part<'_, F, M::Cell>| matches!(part.entry(), Entry::Leaf { .. });
        let held = V::N == 0 || !P::SHARED || self.entries_in(table, V::N, at, todo).any(is_leaf);
        if held {
            self.claim(table, access)?;
        }
        let attributes = request.prot.difference(PERMISSIONS);
        for part in self.entries_in(table, V::N, at, todo) {
            let (base, word) = (part.base(), part.word());
            match decode::<F>(V::N, word) {
                Entry::Leaf { log2, .. } => {
                    let rest = (1u64 << log2) - 1;
                    if !held {
                        return Err(Stop::Restart);
                    }
                    if base & !rest < request.first || base | rest > request.last {
                        return Err(Stop::InsideLeaf(base));
                    }
                    if self.format.prot(V::N, word).difference(PERMISSIONS) != attributes {
                        return Err(Stop::Attributes(base));
                    }
                }
                Entry::Table(below) => {
                    let (at, len) = (part.at(), part.len());
                    self.look_below::<V::Below, P>(below, at, len, request, access)?;
                }
                Entry::Empty => return Err(Stop::Hole(part.at())),
            }
        }
        Ok(())
    }

    /// Second pass: replaces the entries and gives the claims back.
    fn rewrite_below<V: Level, P: Access>(
        &self,
        table: u64,
        at: u64,
        todo: u64,
        request: &Request,
        gather: &mut Gather,
        access: P,
    ) {
        let mut entries = self.entries_in(table, V::N, at, todo);
        while let Some(part) = entries.next() {
            match part.entry() {
                Entry::Leaf { pa, log2 } => {
                    // The first pass has seen that the leaf lies in the range.
                    let count = 1usize << log2.saturating_sub(F::shift(V::N));
                    let group = part.group(count);
                    let word = F::leaf(V::N, pa, log2, request.bits);
                    if self.rewrite_leaf::<V>(group, word) {
                        let iova = self.aperture().extend(part.base());
                        if self.memory.watches_runs() {
                            let run = Run::new(iova, pa, 1 << log2);
                            self.memory.unmapped(run);
                            self.memory.mapped(run, request.prot);
                        }
                        gather.add(Span::new(iova, 1 << log2), 1 << V::N);
                    }
                    entries.pass(count);
                }
                Entry::Table(below) => {
                    let (at, len) = (part.at(), part.len());
                    self.rewrite_below::<V::Below, P>(below, at, len, request, gather, access);
                }
                Entry::Empty => {}
            }
        }
        self.release(table, access);
    }

    /// Replaces the entries of a leaf, the first of which becomes `word`. True when one of them was
    /// something else.
    #[inline]
    fn rewrite_leaf<V: Level>(&self, cells: &[M::Cell], mut word: u64) -> bool {
        let own = F::shift(V::N);
        let stride = if F::GROUPS_ADVANCE { F::stride(own) } else { 0 };
        let keeps_dirty = self.format.keeps_dirty();
        let mut changed = false;
        for cell in cells {
            let mut old = cell.get();
            loop {
                let mut new = word | old & F::ACCESSED;
                if keeps_dirty && F::is_dirty(old) {
                    new = F::dirtied(new);
                }
                if new == old {
                    break;
                }
                match cell.set_if(old, new) {
                    Ok(()) => {
                        changed = true;
                        break;
                    }
                    // Hardware was quicker.
                    Err(now) => old = now,
                }
            }
            word = word.wrapping_add(stride);
        }
        if changed {
            self.memory.written(cells);
        }
        changed
    }
}

impl<F: Format, M: TableMemory, const SLOTS: usize> SharedTable<F, M, SLOTS> {
    /// See [`Table::protect`].
    pub fn protect(
        &self,
        range: Span<Iova>,
        prot: Prot,
        gather: &mut Gather,
    ) -> Result<(), ProtectError> {
        let table = &self.table;
        let request = table.check_protect(range, prot)?;
        let guard = self.guard();
        let access = Claiming(guard.number());
        let mut round = 0;
        let release = || table.release_all(table.begin(), request.first, range.len, access);
        table.intact()?;
        loop {
            let looked = table.look(&request, access);
            table.intact().inspect_err(|_| release())?;
            let Err(stop) = looked else { break };
            // What was found is put in words while it is held, as far as it is.
            let cause = table.refusal(&request, stop);
            release();
            if let Some(cause) = cause {
                return Err(cause);
            }
            table.memory.wait(round);
            round += 1;
        }
        table.rewrite(&request, gather, access);
        Ok(table.intact().inspect_err(|_| release())?)
    }
}
