//! Protect: other permissions for what is mapped, in place.
//!
//! # Protocol
//!
//! There are two passes, and the second cannot fail. The first looks: everything is mapped, no leaf
//! reaches over the ends, and every leaf has the memory attributes that are asked for. The second
//! replaces the entries.
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

use super::entries::decode;
use super::{Level, Table, at_level, below};
use crate::cell::Cell;
use crate::error::ProtectError;
use crate::format::{Entry, Format};
use crate::gather::Gather;
use crate::memory::TableMemory;
use crate::prot::Prot;

/// Permissions that may change in place.
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
    InsideLeaf(u64),
    Hole(u64),
    Attributes(u64),
}

impl<F: Format, M: TableMemory> Table<F, M> {
    /// See [`TableOps::protect`](super::TableOps::protect).
    pub(super) fn protect_range(
        &self,
        range: Span<Iova>,
        prot: Prot,
        gather: &mut Gather,
    ) -> Result<(), ProtectError> {
        let request = self.check_protect(range, prot)?;
        self.intact()?;
        let (at, len) = (request.first, range.len);
        let (root, level) = self.begin().table();
        let looked = at_level!(level, v => self.look_below(v, root, at, len, &request));
        self.intact()?;
        looked.map_err(|stop| self.refusal(&request, stop))?;
        at_level!(level, v => self.rewrite_below(v, root, at, len, &request, gather));
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

    #[cold]
    fn refusal(&self, request: &Request, stop: Stop) -> ProtectError {
        let (range, wanted) = (request.range, request.prot);
        let aperture = self.aperture();
        let leaf = |at| self.leaf_at(aperture.extend(at));
        match stop {
            Stop::Hole(at) => {
                let at = aperture.extend(at);
                ProtectError::Hole { range, at }
            }
            Stop::InsideLeaf(at) => {
                let leaf = leaf(at).map(|leaf| leaf.run).unwrap_or_default();
                ProtectError::InsideLeaf { range, leaf }
            }
            Stop::Attributes(at) => {
                let found = leaf(at).map(|leaf| (leaf.run, leaf.prot));
                let (leaf, found) = found.unwrap_or((Run::default(), Prot::empty()));
                ProtectError::Attributes {
                    wanted,
                    leaf,
                    found,
                }
            }
        }
    }

    /// Looks for what forbids the change.
    fn look_below(
        &self,
        v: impl Level,
        table: u64,
        at: u64,
        todo: u64,
        request: &Request,
    ) -> Result<(), Stop> {
        let attributes = request.prot.difference(PERMISSIONS);
        for part in self.entries_in(table, v.n(), at, todo) {
            let (base, word) = (part.base(), part.word());
            match decode::<F>(v.n(), word) {
                Entry::Leaf { log2, .. } => {
                    let rest = (1u64 << log2) - 1;
                    if base & !rest < request.first || base | rest > request.last {
                        return Err(Stop::InsideLeaf(base));
                    }
                    if self.format.prot(v.n(), word).difference(PERMISSIONS) != attributes {
                        return Err(Stop::Attributes(base));
                    }
                }
                Entry::Table(below) => {
                    let (at, len) = (part.at(), part.len());
                    below!(v, v => self.look_below(v, below, at, len, request))?;
                }
                Entry::Empty => return Err(Stop::Hole(part.at())),
            }
        }
        Ok(())
    }

    /// Second pass: replaces the entries.
    fn rewrite_below(
        &self,
        v: impl Level,
        table: u64,
        at: u64,
        todo: u64,
        request: &Request,
        gather: &mut Gather,
    ) {
        let mut entries = self.entries_in(table, v.n(), at, todo);
        while let Some(part) = entries.next() {
            match part.entry() {
                Entry::Leaf { pa, log2 } => {
                    // The first pass has seen that the leaf lies in the range.
                    let count = 1usize << log2.saturating_sub(F::shift(v.n()));
                    let group = part.group(count);
                    let word = F::leaf(v.n(), pa, log2, request.bits);
                    if self.rewrite_leaf(v, group, word) {
                        let iova = self.aperture().extend(part.base());
                        if self.memory.watches_runs() {
                            let run = Run::new(iova, Span::new(pa, 1 << log2));
                            self.memory.unmapped(run);
                            self.memory.mapped(run, request.prot);
                        }
                        gather.add(Span::new(iova, 1 << log2), 1 << v.n());
                    }
                    entries.pass(count);
                }
                Entry::Table(below) => {
                    let (at, len) = (part.at(), part.len());
                    below!(v, v => self.rewrite_below(v, below, at, len, request, gather));
                }
                Entry::Empty => {}
            }
        }
    }

    /// Replaces the entries of a leaf, the first of which becomes `word`. True when one of them was
    /// something else.
    #[inline]
    fn rewrite_leaf(&self, v: impl Level, cells: &[M::Cell], mut word: u64) -> bool {
        let own = F::shift(v.n());
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
