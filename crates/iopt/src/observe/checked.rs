//! Checks of mappings across domains.

use runs::Run;

use super::record::{Domain, MappingRecord};
use crate::engine::Table;
use crate::format::Format;
use crate::memory::{TableMemory, pass_on, pass_steps_on, pass_stores_on};
use crate::prot::Prot;

/// Table memory that tells a [`MappingRecord`] what its tables map.
///
/// Each domain has its own; the record is one for all. The check refuses nothing: it says
/// afterwards, and as exactly as it can, what was wrong.
///
/// All tables in one such memory belong to its domain. Table memory that several domains share is
/// passed by reference, with a `Checked` around it for each of them.
#[derive(Debug)]
pub struct Checked<M, L> {
    inner: M,
    record: L,
    domain: Domain,
}

impl<M, L: MappingRecord> Checked<M, L> {
    /// Tables of `domain` in `inner`. They should be empty now.
    pub const fn new(inner: M, record: L, domain: Domain) -> Self {
        Self {
            inner,
            record,
            domain,
        }
    }

    /// The memory inside.
    pub const fn inner(&self) -> &M {
        &self.inner
    }

    /// The record.
    pub const fn record(&self) -> &L {
        &self.record
    }

    /// The domain of these tables.
    pub const fn domain(&self) -> Domain {
        self.domain
    }
}

impl<M: TableMemory, L: MappingRecord> TableMemory for Checked<M, L> {
    pass_on!(self => self.inner);
    pass_stores_on!(self => self.inner);
    pass_steps_on!(self => self.inner);

    const WATCHES_RUNS: bool = true;

    fn mapped(&self, run: Run, prot: Prot) {
        self.record.mapped(self.domain, run, prot);
        self.inner.mapped(run, prot);
    }

    fn unmapped(&self, run: Run) {
        self.record.unmapped(self.domain, run);
        self.inner.unmapped(run);
    }
}

impl<F: Format, M: TableMemory> Table<F, M> {
    /// Compares all that is mapped with what `record` has of `domain`, whose only table this is.
    /// Differences are in the record's report afterwards.
    ///
    /// Finds what the hooks cannot see: entries that were stored past the engine, or damaged.
    pub fn verify(&self, record: &impl MappingRecord, domain: Domain) {
        let leaves = &mut self
            .format
            .aperture()
            .spans()
            .flat_map(|span| self.leaves(span))
            .map(|leaf| (leaf.run, leaf.prot));
        record.compare(domain, leaves);
    }
}
