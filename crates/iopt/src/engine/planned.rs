//! Map in two calls: plan and reserve, then fill.
//!
//! [`TableOps::map`](super::TableOps::map) takes both steps at once. A caller that maps the same in several tables, or
//! in none of them, plans in all of them first: when the last plan is made every table page is reserved, nothing is
//! stored anywhere, and no fill can fail. In between each table is borrowed, so that what was planned stays true.

use core::mem;

use runs::{Pa, Span};

use super::map::{Stop, Target};
use super::request::{Cursor, Request};
use super::trust::{NotSetAside, set_aside};
use super::{Table, at_level};
use crate::error::TableMapError;
use crate::format::Format;
use crate::memory::{Chain, Reserve, TableMemory};
use crate::prot::Prot;

/// A map that cannot be refused any more, and of which nothing is stored yet. Dropped, it gives back what it
/// has reserved, and the table's bytes are what they were.
#[derive(Debug)]
#[must_use = "nothing is mapped until it is filled"]
pub struct Planned<'t, F: Format, M: TableMemory> {
    pub(super) table: &'t Table<F, M>,
    pub(super) plan: Plan<'t>,
}

/// A planned map, without the table.
#[derive(Debug)]
pub(crate) struct Plan<'t> {
    request: Request<'t>,
    /// The table that all of it goes through, and its level.
    from: (u64, usize),
    /// How many tables it adds. All of them are in the reserve.
    needed: u64,
    reserve: Reserve,
    /// Where this many of them came from.
    spare: Option<&'t mut Chain>,
    spared: u64,
}

impl<F: Format, M: TableMemory> Table<F, M> {
    /// See [`TableOps::plan_map`](super::TableOps::plan_map); for callers that keep plan and table together.
    pub(crate) fn plan_request<'t>(
        &self,
        iova: u64,
        runs: &'t [Span<Pa>],
        prot: Prot,
        spare: Option<&'t mut Chain>,
    ) -> Result<Plan<'t>, TableMapError> {
        let request = self.check_map(iova, runs, prot)?;
        let planned = self.plan_from(&request);
        let (from, needed) = planned.map_err(|stop| self.not_mapped(&request, stop))?;
        let mut plan = Plan {
            request,
            from,
            needed,
            reserve: Reserve::empty(),
            spare,
            spared: 0,
        };
        plan.reserve(&self.memory)?;
        Ok(plan)
    }

    /// See [`Planned::fill`].
    pub(crate) fn fill_plan(&self, plan: &mut Plan<'_>) -> Result<(), TableMapError> {
        let (request, reserve) = (&plan.request, &mut plan.reserve);
        let (from, level) = plan.from;
        let mut cursor = Cursor::new(request);
        self.announce(request);
        self.memory.descended();
        let before = reserve.len();
        at_level!(level, v => {
            self.fill(v, from, Target::Linked, &mut cursor, request.bits, reserve);
        });
        self.count(before - reserve.len(), 0);
        Ok(self.intact()?)
    }

    /// Where to fill from, and how many tables that takes.
    fn plan_from(&self, request: &Request<'_>) -> Result<((u64, usize), u64), Stop> {
        self.intact()?;
        let (table, level) = self.lowest_to_map(request)?;
        let (mut cursor, mut needed) = (Cursor::new(request), 0);
        at_level!(level, v => {
            self.plan(v, Some(table), &mut cursor, &mut needed)
        })?;
        self.intact()?;
        Ok(((table, level), needed))
    }
}

impl<F: Format, M: TableMemory> Planned<'_, F, M> {
    /// Maps. Fails only where [the plan does not hold](crate::BrokenPlan).
    pub fn fill(mut self) -> Result<(), TableMapError> {
        self.table.fill_plan(&mut self.plan)
    }
}

impl<F: Format, M: TableMemory> Drop for Planned<'_, F, M> {
    fn drop(&mut self) {
        self.plan.give_back(&self.table.memory);
    }
}

impl Plan<'_> {
    /// Reserves what is needed, those of the spare tables first. All or nothing.
    fn reserve<M: TableMemory>(&mut self, memory: &M) -> Result<(), NotSetAside> {
        let Some(spare) = self.spare.as_deref_mut().filter(|spare| !spare.is_empty()) else {
            self.reserve = set_aside(memory, self.needed)?;
            return Ok(());
        };
        let mut more = set_aside(memory, self.needed.saturating_sub(spare.len()))?;
        let mut all = Chain::empty();
        while let Some((table, _)) = more.take(memory) {
            all.push(memory, table);
        }
        while all.len() < self.needed {
            let Some(table) = spare.pop(memory) else {
                break;
            };
            all.push(memory, table);
            self.spared += 1;
        }
        self.reserve = Reserve::new(all);
        Ok(())
    }

    /// Gives back what is still reserved.
    pub(crate) fn give_back<M: TableMemory>(&mut self, memory: &M) {
        let mut rest = mem::replace(&mut self.reserve, Reserve::empty());
        if let Some(spare) = &mut self.spare {
            while self.spared > 0 {
                let Some((table, _)) = rest.take(memory) else {
                    break;
                };
                spare.push(memory, table);
                self.spared -= 1;
            }
        }
        if !rest.is_empty() {
            memory.give_back(rest);
        }
    }
}
