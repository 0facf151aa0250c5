//! Moving a domain's tables to another memory node, while devices run.
//!
//! 1. **Copy**: a new table is built on the node, and all areas are mapped in it. No unit knows it.
//! 2. **Switch**: each unit of the domain gets the new root. Both tables say the same, so that it
//!    does not matter which of them an access finds, or how far a unit has come.
//! 3. **Flush**: the same command has the unit invalidate everything of the domain, and waits for what is
//!    under way. It is one flush, of a gather that names the new root.
//! 4. **Free**: no unit walks the old table any more. What devices have written to by it is kept for
//!    the next harvest, and its tables are given back.
//!
//! If a unit does not answer in 2 or 3, it is not known which root it walks. Both tables stay then:
//! nothing is mapped until a later flush succeeds (the gather names a new root), and what is unmapped
//! is taken out of both.

use core::mem;

use iommu::{DomainId, FlushError, NodeId};
use iopt::{AnyTable, Gather, Interruption, ResizeError};
use runs::{Iova, Span};

use super::domain::{Domain, empty_table, end_table};
use super::written::Written;
use super::{Own, replay};
use crate::areas::Areas;
use crate::error::AttachError;
use crate::object::Cause;
use crate::space::Ioas;

/// Why tables were not moved.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MoveError {
    /// There is no such domain.
    #[error("there is no domain {domain}")]
    NoDomain {
        /// Its number.
        domain: DomainId,
    },
    /// The caller has built the domain's table: nothing can build another one.
    #[error("the table of domain {domain} was built by the caller")]
    NoBuilder {
        /// Its number.
        domain: DomainId,
    },
    /// No table can be built on the node; the old one stays.
    #[error("no table can be built there")]
    Build(#[source] Cause),
    /// The new table is of a kind that a unit of the domain cannot walk; the old one stays.
    #[error("a unit of domain {domain} cannot walk the new table")]
    Differs {
        /// The domain.
        domain: DomainId,
    },
    /// The areas cannot be mapped in the new table; the old one stays.
    #[error(transparent)]
    Copy(AttachError),
    /// Leaves cannot be split as they are while it is tracked what devices write to; the old table
    /// stays.
    #[error("leaves cannot be split: {0}")]
    Split(ResizeError<FlushError>),
    /// What was unmapped before is not flushed yet; the old table stays.
    #[error("what was unmapped is not flushed: {0}")]
    Before(FlushError),
    /// A unit did not change to the new root in time. Both tables stay until a flush succeeds,
    /// which ends the move.
    #[error("a unit did not change to the new root: {0}")]
    Flush(FlushError),
}

/// A table that units may still walk, and what was taken out of it meanwhile.
pub(crate) struct Leaving {
    table: AnyTable,
    gather: Gather,
    tracked: bool,
}

impl Leaving {
    /// Tracks what devices write to, as far as it can, or no more: as the table does that comes after it.
    pub(super) fn track(&mut self, on: bool) {
        self.tracked = self.table.track_dirty(on).is_ok() && on;
    }

    pub(super) fn empty(
        &mut self,
        range: Span<Iova>,
        owned: Span<Iova>,
        note: &mut dyn FnMut(Span<Iova>),
    ) -> Result<(), iopt::TableUnmapError> {
        let (table, gather) = (&self.table, &mut self.gather);
        empty_table(table, gather, range, owned, self.tracked, note)
    }

    /// No unit walks it any more: what devices have written to goes to `written` if that is tracked.
    pub(super) fn end(self, written: &mut Written) {
        end_table(self.table, self.gather, self.tracked, written);
    }
}

impl Own {
    fn move_tables(
        &mut self,
        id: DomainId,
        node: Option<NodeId>,
        leaf: Option<u64>,
        areas: &mut Areas,
    ) -> Result<(), MoveError> {
        let mut domains = self.domains.iter_mut();
        let domain = domains.find(|domain| domain.id == id);
        let domain = domain.ok_or(MoveError::NoDomain { domain: id })?;
        let (Some(builder), Some(_)) = (self.builder.get_mut(), domain.coherent) else {
            return Err(MoveError::NoBuilder { domain: id });
        };
        // The gather holds tables of the old memory.
        domain.flush().map_err(MoveError::Before)?;
        let Some(first) = domain.devices.units().next() else {
            return Err(MoveError::NoDomain { domain: id });
        };
        let built = builder.build(first, domain.tracked, node);
        let (spare, table) = built.map_err(MoveError::Build)?;
        // The domain keeps its number.
        builder.ended(spare);
        let mut copy = Domain::new(id, table, domain.coherent);
        if domain.tracked {
            copy.track();
        }
        let fits = domain
            .devices
            .units()
            .all(|unit| copy.suits(unit, domain.tracked));
        if !fits || copy.table.page_sizes() != domain.table.page_sizes() {
            copy.end();
            return Err(MoveError::Differs { domain: id });
        }
        let mut copied = replay(&mut copy, &self.batches, areas).map_err(MoveError::Copy);
        let sizes = copy.table.page_sizes().bits();
        let size = leaf.filter(|size| sizes & size == *size);
        for area in areas.iter().filter(|area| area.is_there()) {
            if let (Ok(()), Some(size)) = (&copied, size) {
                // No unit walks it: there is no moment in which anything is missing.
                let split = copy.split(area.range, size, Interruption::Allowed);
                copied = split.map_err(MoveError::Split);
            }
        }
        if let Err(cause) = copied {
            copy.end();
            return Err(cause);
        }
        let (table, spare) = (copy.table, copy.spare.into_inner());
        let old = &mut domain.table;
        let spare = mem::replace(domain.spare.get_mut(), spare);
        spare.end(old.memory());
        domain.gathers.get_mut().left.walk_from(table.root());
        *domain.leaving.get_mut() = Some(Leaving {
            table: mem::replace(old, table),
            gather: Gather::new(),
            tracked: domain.tracked,
        });
        domain.tables_on = node;
        domain.flush().map_err(MoveError::Flush)
    }
}

impl Ioas {
    /// Moves the tables of `domain` to `node`, or anywhere, while its devices go on. Areas keep their
    /// pins; leaves are as a fresh map makes them.
    ///
    /// Where tables should lie is what [`Placement::tables`](crate::Placement::tables) says of the
    /// domain's [node](crate::Place::node), which changes when the device leaves that gave it.
    ///
    /// # Errors
    ///
    /// See [`MoveError`], which says which table units walk then.
    pub fn move_tables(&self, domain: DomainId, node: Option<NodeId>) -> Result<(), MoveError> {
        let core = &mut *self.gate.write();
        let leaf = core.tracking.and_then(|tracking| tracking.leaf);
        match core.own() {
            Some(own) => own.move_tables(domain, node, leaf, &mut self.state.lock().areas),
            None => Err(MoveError::NoDomain { domain }),
        }
    }
}
