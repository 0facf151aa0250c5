//! Builders of tables for new domains.

use alloc::collections::BTreeSet;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::fmt;

use iommu::{DomainId, FormatSupport, NodeId, Unit, UnitCapabilities};
use iopt::format::BreakBeforeMake;
use iopt::{AnyTable, ErasableMemory, FormatId};

use crate::lock::Mutex;
use crate::memory::object::Cause;

/// Builds the table of a new domain for a unit that no other domain suits.
pub trait BuildDomain: Send {
    /// An empty table that `unit` can walk, and the number that units know its domain by. With
    /// `dirty`, what devices write to is being tracked: a format that keeps that, if there is a
    /// choice. Where there is none, the domain is blind. The table is to lie on `node`, if one is named
    /// and has memory.
    fn build(
        &mut self,
        unit: &dyn Unit,
        dirty: bool,
        node: Option<NodeId>,
    ) -> Result<(DomainId, AnyTable), Cause>;

    /// The domain has come to its end: no unit knows it any more.
    fn ended(&mut self, domain: DomainId);
}

/// Numbers of domains, shared by all address spaces whose devices may meet on one unit.
#[derive(Debug)]
pub struct DomainIds(Mutex<Ids>);

/// Its size depends on how many numbers are taken, not on how large they are.
#[derive(Debug)]
struct Ids {
    /// From here on only claimed numbers are taken.
    next: u64,
    end: u64,
    /// Numbers before `next` that are free.
    free: BTreeSet<u32>,
    /// Numbers from `next` on that are taken.
    claimed: BTreeSet<u32>,
}

impl DomainIds {
    /// Numbers from 1 on, of as many bits as the units have for them, at most 32 (VT-d keeps 0 for
    /// itself).
    pub fn new(bits: u32) -> Arc<Self> {
        Arc::new(Self(Mutex::new(Ids {
            next: 1,
            end: 1 << bits.min(u32::BITS),
            free: BTreeSet::new(),
            claimed: BTreeSet::new(),
        })))
    }

    /// A free number; `None` when there is none.
    pub fn take(&self) -> Option<DomainId> {
        let ids = &mut *self.0.lock();
        if let Some(id) = ids.free.pop_first() {
            return Some(DomainId(id));
        }
        while ids.next < ids.end {
            let id = ids.next as u32;
            ids.next += 1;
            if !ids.claimed.remove(&id) {
                return Some(DomainId(id));
            }
        }
        None
    }

    /// Takes the number `id`, of a domain that was [taken over](crate::Ioas::adopt). False when
    /// it is in use, or when it has too many bits.
    pub fn claim(&self, id: DomainId) -> bool {
        let ids = &mut *self.0.lock();
        let number = u64::from(id.0);
        if number >= ids.end || number == 0 {
            return false;
        }
        if number < ids.next {
            ids.free.remove(&id.0)
        } else {
            ids.claimed.insert(id.0)
        }
    }

    /// Gives a number back. One that is free changes nothing.
    pub fn give_back(&self, id: DomainId) {
        let ids = &mut *self.0.lock();
        if u64::from(id.0) >= ids.next {
            ids.claimed.remove(&id.0);
        } else if id.0 != 0 {
            ids.free.insert(id.0);
        }
    }
}

/// Builds tables in the first of the formats that the unit walks, with as many levels as it offers. Clones share
/// memory and numbers.
#[derive(Clone)]
pub struct TableBuilder {
    memories: Arc<Memories>,
    ids: Arc<DomainIds>,
    formats: Arc<[FormatId]>,
}

/// Builds a table in the memory of a node, of a format and levels, for a unit.
type Memories = dyn Fn(Option<NodeId>, &FormatSupport, u8, BreakBeforeMake) -> Result<AnyTable, Cause>
    + Send
    + Sync;

impl fmt::Debug for TableBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TableBuilder")
            .field("ids", &self.ids)
            .field("formats", &self.formats)
            .finish_non_exhaustive()
    }
}

/// Failure to build a table.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TableBuilderError {
    /// The unit walks none of the formats.
    #[error("the unit walks none of these formats:{}", Formats(.tried))]
    NoFormat {
        /// Formats that were tried.
        tried: Vec<FormatId>,
    },
    /// All numbers of domains are in use.
    #[error("all numbers of domains are in use")]
    NoDomainId,
}

/// Names of formats, each after a space.
struct Formats<'a>(&'a [FormatId]);

impl fmt::Display for Formats<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|format| write!(f, " {format}"))
    }
}

impl TableBuilder {
    /// Tables in `memory`, whatever node they are for, in the first of `formats` that a unit walks,
    /// numbered by `ids`.
    pub fn new<M>(
        memory: M,
        ids: Arc<DomainIds>,
        formats: impl IntoIterator<Item = FormatId>,
    ) -> Self
    where
        M: ErasableMemory + Clone,
    {
        Self::on_nodes(move |_| Ok(memory.clone()), ids, formats)
    }

    /// Tables in the memory that `memories` has for a node, or anywhere for `None`. It is asked for each
    /// domain, and answers for where that memory really is.
    pub fn on_nodes<M: ErasableMemory>(
        memories: impl Fn(Option<NodeId>) -> Result<M, Cause> + Send + Sync + 'static,
        ids: Arc<DomainIds>,
        formats: impl IntoIterator<Item = FormatId>,
    ) -> Self {
        Self {
            memories: Arc::new(move |node, support, levels, demand| {
                let (format, sizes) = (support.format, support.page_sizes);
                let memory = memories(node)?;
                Ok(AnyTable::demanding(format, levels, sizes, demand, memory)?)
            }),
            ids,
            formats: formats.into_iter().collect(),
        }
    }
}

impl BuildDomain for TableBuilder {
    fn build(
        &mut self,
        unit: &dyn Unit,
        _dirty: bool,
        node: Option<NodeId>,
    ) -> Result<(DomainId, AnyTable), Cause> {
        let can = unit.capabilities();
        let support = self.formats.iter().find_map(|format| can.format(*format));
        let Some(support) = support else {
            let tried = self.formats.to_vec();
            return Err(TableBuilderError::NoFormat { tried }.into());
        };
        let levels = levels(&can, support.levels);
        let id = self.ids.take().ok_or(TableBuilderError::NoDomainId)?;
        let table = (self.memories)(node, &support, levels, can.break_before_make);
        let table = table.inspect_err(|_| self.ids.give_back(id))?;
        Ok((id, table))
    }

    fn ended(&mut self, domain: DomainId) {
        self.ids.give_back(domain);
    }
}

/// The fewest levels that reach all of the unit's input addresses, or as many as there are.
fn levels(can: &UnitCapabilities, offered: u16) -> u8 {
    let enough = |levels: &u8| 12 + 9 * u32::from(*levels) >= can.input_bits;
    let mut offers = (0..16u8).filter(|levels| offered >> levels & 1 == 1);
    let most = offers.clone().next_back().unwrap_or(0);
    offers.find(enough).unwrap_or(most)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn rest(ids: &DomainIds) -> Vec<u32> {
        let mut rest: Vec<u32> = core::iter::from_fn(|| ids.take()).map(|id| id.0).collect();
        rest.sort_unstable();
        rest
    }

    #[test]
    fn a_number_that_is_claimed_is_given_to_no_other() {
        let ids = DomainIds::new(3);
        assert!(ids.claim(DomainId(3)));
        assert!(ids.claim(DomainId(1)));
        // Taken, kept by units for themselves, of too many bits.
        for id in [1, 3, 0, 8, u32::MAX] {
            assert!(!ids.claim(DomainId(id)), "{id}");
        }
        assert_eq!(rest(&ids), [2, 4, 5, 6, 7]);
        ids.give_back(DomainId(3));
        assert!(ids.claim(DomainId(3)));
        assert_eq!(ids.take(), None);
    }

    #[test]
    fn a_large_number_takes_no_more_room_than_a_small_one() {
        let ids = DomainIds::new(32);
        for id in [0xffff_fff0, u32::MAX] {
            assert!(ids.claim(DomainId(id)));
            assert!(!ids.claim(DomainId(id)), "it is taken");
        }
        let kept = |ids: &Ids| ids.claimed.len() + ids.free.len();
        assert_eq!(kept(&ids.0.lock()), 2);
        assert_eq!(ids.take(), Some(DomainId(1)));
        ids.give_back(DomainId(0xffff_fff0));
        assert!(ids.claim(DomainId(0xffff_fff0)));
        assert_eq!(ids.0.lock().next, 2);
    }

    proptest! {
        #[test]
        fn as_a_plain_set_of_numbers(
            bits in 1..6u32,
            ops in prop::collection::vec((0..3u8, 0..40u32), 0..80),
        ) {
            let ids = DomainIds::new(bits);
            let mut taken = BTreeSet::new();
            for (op, id) in ops {
                let good = (1..1 << bits).contains(&id);
                match op {
                    0 => match ids.take() {
                        Some(id) => prop_assert!(id.0 > 0 && id.0 < 1 << bits && taken.insert(id.0)),
                        None => prop_assert_eq!(taken.len(), (1 << bits) - 1),
                    },
                    1 => {
                        let claimed = ids.claim(DomainId(id));
                        prop_assert_eq!(claimed, good && taken.insert(id), "{}", id);
                    }
                    // Also a number that is free.
                    _ => {
                        ids.give_back(DomainId(id));
                        taken.remove(&id);
                    }
                }
            }
            let free: Vec<u32> = (1..1 << bits).filter(|id| !taken.contains(id)).collect();
            prop_assert_eq!(rest(&ids), free);
        }
    }
}
