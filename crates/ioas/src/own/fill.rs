//! From pinned memory to the entries of every domain's table, batch by batch, in one pass.
//!
//! The batch is the only memory that this takes, whatever the number of runs. Runs come joined, also
//! over the border of two batches ([`Hold::with_runs`](crate::Hold::with_runs)), so that the leaves do
//! not depend on where a reader happens to end a batch.
//!
//! # Several roots
//!
//! Every batch is mapped in all domains before the next one is read, so memory is pinned, charged and
//! looked up once, whatever the number of domains. A batch is mapped in all domains or in none:
//!
//! 1. In each domain it is **planned**: the table is looked at, nothing is stored, and the table pages
//!    that it will need there are counted and **reserved** in that domain's memory, which may be another
//!    node's. What can refuse the batch (an entry in the way, runs that do not fit the format, a node
//!    without table memory) does so here. Plans made before are then dropped, and with them go their
//!    reserves: no table has changed, and no unit has to invalidate anything.
//! 2. Only when all domains have planned, each is **filled** from what it has reserved. That cannot fail:
//!    the range is this operation's alone, and a plan counts what its fill takes at most.
//!
//! So at any time all domains have the same bytes, all of what was mapped before, and an operation that
//! ends early has to take just these back. That is the limit of the promise: runs are found batch by
//! batch and the leaves of later ones are not known, so tables are reserved for a batch (4096 runs), not
//! for all of a map. A map that is refused in its first batch has stored nothing in any table; one that is
//! refused later is undone, and flushed, before it returns. To count ahead would take a second pass over
//! the runs, and to reserve for the worst case a table for each 2 MiB however large the leaves are.
//!
//! Released memory has its tables set aside in every domain (`spare.rs`): plans take those first.
//!
//! A domain that comes later is filled by itself, before a unit knows it: what fails there has stored
//! nothing in the others.

use alloc::vec::Vec;

use iopt::{AnyPlanned, Prot};
use runs::{Iova, Pa, Span};

use super::domain::Domain;
use crate::areas::area::HeldArea;
use crate::lock::pause;
use crate::memory::object::RunReader;
use crate::observer::{Observer, Step, observed};
use crate::space::error::MapError;

/// Access of leaves, and tables that they may lie in.
#[derive(Clone, Copy)]
pub(crate) struct Leaves {
    prot: Prot,
    /// Registers of a device.
    mmio: bool,
    /// Tables are set aside for it.
    released: bool,
}

impl Leaves {
    /// Leaves of memory that is not released; `mmio` for registers of a device.
    pub(crate) const fn new(prot: Prot, mmio: bool) -> Self {
        Self {
            prot,
            mmio,
            released: false,
        }
    }

    pub(super) fn of(area: &HeldArea) -> Self {
        let fresh = Self::new(area.prot, area.memory.object().is_mmio());
        Self {
            released: area.released,
            ..fresh
        }
    }

    /// The permissions of leaves in the table of `domain`.
    fn prot_in(self, domain: &Domain) -> Prot {
        domain.prot(self.prot, self.mmio)
    }
}

/// Runs to be mapped, and the progress of the map.
pub(crate) struct Fill<'a> {
    domains: &'a [Domain],
    batch: &'a mut [Span<Pa>],
    range: Span<Iova>,
    leaves: Leaves,
    /// Bytes from the start of the range on that are in all tables. Nothing else is in any.
    pub(crate) mapped: u64,
}

impl<'a> Fill<'a> {
    /// Bytes of `range` from its start on go into the tables of `domains`, by way of `batch`.
    pub(crate) const fn new(
        domains: &'a [Domain],
        batch: &'a mut [Span<Pa>],
        range: Span<Iova>,
        leaves: Leaves,
    ) -> Self {
        Self {
            domains,
            batch,
            range,
            leaves,
            mapped: 0,
        }
    }

    /// Fills the tables with the runs that `reader` reads, none of which goes on in the next one.
    pub(crate) fn stream(
        &mut self,
        reader: &mut dyn RunReader,
        observer: &mut dyn Observer,
    ) -> Result<(), MapError> {
        let room = self.batch.len();
        loop {
            let (count, bytes) = observed(observer, Step::FindRuns, |_| {
                let count = reader.next_batch(self.batch).map_err(MapError::Runs)?;
                let runs = self.batch.get(..count);
                let runs = runs.ok_or(MapError::BatchTooLong { count, room })?;
                // Lengths beyond 2^64 together the tables refuse.
                let lengths = runs.iter().map(|run| run.len);
                let found = lengths.fold(0, u64::wrapping_add);
                // Never more than the range: what lies behind it belongs to others.
                if found > self.range.len - self.mapped {
                    return Err(self.differ(self.mapped.saturating_add(found)));
                }
                Ok(((count, found), found))
            })?;
            if count == 0 {
                break;
            }
            observed(observer, Step::FillTables, |_| {
                let (at, runs) = (self.range.start + self.mapped, &self.batch[..count]);
                map(self.domains, at, runs, self.leaves)?;
                self.mapped += bytes;
                Ok::<_, MapError>(((), bytes))
            })?;
            if observer.progress(Step::FillTables, self.mapped).is_break() {
                return Err(MapError::Interrupted);
            }
        }
        match self.mapped == self.range.len {
            true => Ok(()),
            false => Err(self.differ(self.mapped)),
        }
    }

    const fn differ(&self, found: u64) -> MapError {
        MapError::RunsDiffer {
            pinned: self.range.len,
            found,
        }
    }
}

/// Attempts of a map while tables wait for another thread.
const ROUNDS: u32 = 200;

/// Maps `runs` from `at` on in all of `domains`, or stores nothing.
///
/// Tables that were given back wait for threads that are inside of the table, of which the scheduler may have
/// stopped one. So a map that finds no tables is refused only when none wait, or have for long.
pub(crate) fn map(
    domains: &[Domain],
    at: u64,
    runs: &[Span<Pa>],
    leaves: Leaves,
) -> Result<(), MapError> {
    let (mut all_there, mut round) = (false, 0);
    loop {
        let mapped = match (domains, leaves.released) {
            // A table that is alone plans, reserves and fills in one call, with short cuts.
            ([domain], false) => domain.table.map(at, runs, leaves.prot_in(domain)),
            _ => map_in_all(domains, at, runs, leaves),
        };
        match mapped {
            Err(iopt::TableMapError::NoTables(_)) if !all_there && round < ROUNDS => {
                all_there = true;
                for domain in domains {
                    all_there &= domain.table.poll();
                }
                if !all_there {
                    pause();
                }
                round += 1;
            }
            done => return done.map_err(MapError::Table),
        }
    }
}

/// Plans the runs in each of `domains`, and fills when all have planned.
fn map_in_all(
    domains: &[Domain],
    at: u64,
    runs: &[Span<Pa>],
    leaves: Leaves,
) -> Result<(), iopt::TableMapError> {
    let spares = domains
        .iter()
        .map(|domain| leaves.released.then(|| domain.spare.lock()));
    let mut spares: Vec<_> = spares.collect();
    let planned = domains.iter().zip(&mut spares).map(|(domain, spare)| {
        let spare = spare.as_mut().map(|spare| spare.tables());
        domain
            .table
            .plan_map(at, runs, leaves.prot_in(domain), spare)
    });
    let planned: Vec<_> = planned.collect::<Result<_, _>>()?;
    planned.into_iter().try_for_each(AnyPlanned::fill)
}
