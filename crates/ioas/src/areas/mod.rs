//! The areas of an address space, by device address, and, once it is asked for, by memory.
//!
//! The index by memory costs nothing until [`Ioas::areas_over`](crate::Ioas::areas_over) is called for
//! the first time; from then on each area that comes or goes is noted there, too. Areas over the same
//! memory may overlap there, and be of any length beside each other, so the index is kept by classes of
//! length: how far one can reach into what lies behind is bounded in each class by twice its length.

pub(crate) mod area;

use alloc::collections::BTreeMap;
use alloc::sync::Arc;

use runs::{Iova, Offset, Span};

use crate::areas::area::HeldArea;
use crate::memory::Memory;
use crate::ranges::intervals::{InsertError, Intervals};

/// The areas of an address space, as a back end sees them.
///
/// Areas come and go by the methods here and not by those of the field, which know nothing of the index.
#[derive(Debug, Default)]
pub(crate) struct Areas(pub(crate) Intervals<Iova, HeldArea>, Option<ByMemory>);

impl Areas {
    /// All of them, in order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &HeldArea> {
        self.0.overlapping(0, u64::MAX).map(|(_, area)| area)
    }

    /// Adds `area`; returns it where it is now.
    pub(crate) fn insert(
        &mut self,
        area: HeldArea,
    ) -> Result<Option<&mut HeldArea>, InsertError<Iova>> {
        let added = self.0.insert_mut(area.range, area)?;
        if let (Some(index), Some(area)) = (&mut self.1, &added) {
            index.insert(Key::of(area), area.range.len);
        }
        Ok(added)
    }

    pub(crate) fn remove(&mut self, start: u64) -> Option<(Span<Iova>, HeldArea)> {
        let removed = self.0.remove(start);
        if let (Some(index), Some((_, area))) = (&mut self.1, &removed) {
            index.areas.remove(&Key::of(area));
        }
        removed
    }

    /// See [`Intervals::extract_inside`].
    pub(crate) fn extract_inside(
        &mut self,
        first: u64,
        last: u64,
    ) -> impl Iterator<Item = (Span<Iova>, HeldArea)> {
        let Self(areas, index) = self;
        areas.extract_inside(first, last).inspect(move |(_, area)| {
            if let Some(index) = index {
                index.areas.remove(&Key::of(area));
            }
        })
    }

    /// The areas over some of `part` of `memory`.
    pub(crate) fn over(
        &mut self,
        memory: &Arc<Memory>,
        part: Span<Offset>,
    ) -> impl Iterator<Item = &HeldArea> {
        let Self(areas, index) = self;
        let index = index.get_or_insert_with(|| {
            let mut index = ByMemory::default();
            for (range, area) in areas.overlapping(0, u64::MAX) {
                index.insert(Key::of(area), range.len);
            }
            index
        });
        let found = index.overlapping(Arc::as_ptr(memory).addr(), part);
        found.filter_map(|key| areas.at(key.iova).map(|(_, area)| area))
    }
}

/// In the order of the index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Key {
    /// Address of the [`Memory`]: an area keeps it there.
    memory: usize,
    /// log2 of the area's length.
    class: u32,
    /// In the memory.
    offset: u64,
    /// The device address: memory may be at several.
    iova: u64,
}

impl Key {
    fn of(area: &HeldArea) -> Self {
        Self {
            memory: Arc::as_ptr(&area.memory).addr(),
            class: area.range.len.checked_ilog2().unwrap_or(0),
            offset: area.offset,
            iova: area.range.start,
        }
    }
}

/// Areas by memory, with their lengths.
#[derive(Debug, Default)]
struct ByMemory {
    areas: BTreeMap<Key, u64>,
    /// A bit for each class that was ever used.
    classes: u64,
}

impl ByMemory {
    fn insert(&mut self, key: Key, len: u64) {
        self.classes |= 1 << key.class;
        self.areas.insert(key, len);
    }

    fn overlapping(&self, memory: usize, part: Span<Offset>) -> impl Iterator<Item = Key> {
        let end = part.start.saturating_add(part.len);
        let used = move |class: &u32| !part.is_empty() && self.classes >> class & 1 != 0;
        let classes = (0..u64::BITS).filter(used);
        classes.flat_map(move |class| {
            let at = |offset| Key {
                memory,
                class,
                offset,
                iova: 0,
            };
            // Two to the next class, less one byte: the longest of this one.
            let longest = (2u64 << class).wrapping_sub(1);
            let near = self
                .areas
                .range(at(part.start.saturating_sub(longest))..at(end));
            let reaches = move |key: &Key, len: u64| key.offset.saturating_add(len) > part.start;
            near.filter(move |(key, len)| reaches(key, **len))
                .map(|(key, _)| *key)
        })
    }
}
