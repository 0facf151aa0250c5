//! Map with tables that were set aside before: the request names a chain, which is asked before the memory.

use core::cell::Cell;
use core::mem;

use runs::Span;

use super::Table;
use super::form::Exclusive;
use super::request::Request;
use crate::error::{MapError, NoTables};
use crate::format::Format;
use crate::memory::{Chain, Reserve, TableMemory};
use crate::prot::Prot;

impl<F: Format, M: TableMemory> Table<F, M> {
    /// [`map`](Self::map) with tables from `spare`, as far as there are any, so that nobody else can have
    /// them first. Others come from the memory. What is not needed, and after an error all, is there
    /// again.
    pub fn map_sparing(
        &mut self,
        iova: u64,
        runs: &[Span],
        prot: Prot,
        spare: &mut Chain,
    ) -> Result<(), MapError> {
        let request = self.check_map(iova, runs, prot)?;
        let tables = Cell::new(mem::replace(spare, Chain::empty()));
        let request = Request {
            spare: Some(&tables),
            ..request
        };
        let added = self.map_checked(request, Exclusive);
        *spare = tables.into_inner();
        self.tables += added?;
        Ok(())
    }

    /// Takes `count` tables, those of `spare` first. All or nothing.
    #[cold]
    pub(super) fn draw(&self, spare: &Cell<Chain>, count: u64) -> Result<Reserve, NoTables> {
        let mut tables = spare.replace(Chain::empty());
        let more = self.memory.reserve(count.saturating_sub(tables.len()));
        let drawn = more.map(|mut more| {
            let mut drawn = Chain::empty();
            for _ in 0..count {
                let next = tables.pop(&self.memory);
                let next = next.or_else(|| self.memory.take(&mut more).map(|(table, _)| table));
                if let Some(table) = next {
                    drawn.push(&self.memory, table);
                }
            }
            Reserve::new(drawn)
        });
        spare.set(tables);
        drawn
    }
}
