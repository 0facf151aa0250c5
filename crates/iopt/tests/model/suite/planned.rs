//! Maps that are planned first and filled then.

use iopt::{Chain, Format, Prot, TableMapError, TableOps as _};
use runs::{Pa, Span};

use super::{Tables, World};

impl<F: Format, A: Tables, const SHARED: bool> World<'_, F, A, SHARED> {
    /// As [`map`](Self::map): first a plan that comes to nothing, then one that is filled, with up to two
    /// of its tables from a chain.
    pub(super) fn map_in_two_calls(
        &mut self,
        iova: u64,
        runs: &[Span<Pa>],
        prot: Prot,
    ) -> Result<(), TableMapError> {
        let (before, used) = (self.snapshot(), self.memory.used());
        drop(self.table.plan_map(iova, runs, prot, None));
        assert_eq!(
            used,
            self.memory.used(),
            "a plan that is dropped gives back"
        );

        let mut spare = Chain::empty();
        let mut two = self.memory.reserve(2).unwrap();
        while let Some((table, _)) = two.take(self.memory) {
            spare.push(self.memory, table);
        }
        drop(self.table.plan_map(iova, runs, prot, Some(&mut spare)));
        assert_eq!((spare.len(), self.memory.used()), (2, used + 2));
        assert!(before == self.snapshot(), "a plan changed the table");

        let tables = self.table.tables();
        let planned = self.table.plan_map(iova, runs, prot, Some(&mut spare));
        let reserved = self.memory.used();
        let result = planned.and_then(iopt::Planned::fill);
        // A plan counts exactly what its fill takes.
        assert_eq!(self.memory.used(), reserved);
        let added = self.table.tables() - tables;
        assert_eq!(spare.len(), 2u64.saturating_sub(added));
        assert_eq!(self.memory.used(), used + added + spare.len());
        self.memory.reclaim(spare);
        result
    }
}
