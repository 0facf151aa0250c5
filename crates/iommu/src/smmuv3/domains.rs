//! Shape of each domain's tables.
//!
//! A TLB invalidation is one of a stage, and one of ranges names the granule. A gather says neither, so it
//! is noted for each domain: a byte, in pages of which one serves 4,096 domains. The note of a domain without
//! devices stays until another table takes its number.

use iopt::{Cell, FormatId, NoTables, TABLE_BYTES, TableMemory};

use super::capabilities::Features;
use super::command::Tag;
use crate::arm;

/// Domains of a page, as a power of two.
const PAGE_LOG2: u32 = TABLE_BYTES.ilog2();

/// A stage and a granule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Shape {
    pub(super) second_stage: bool,
    /// Bytes of the granule, as a power of two.
    pub(super) log2: u32,
}

impl Shape {
    pub(super) fn of(format: FormatId) -> Self {
        let (second_stage, log2) = match format {
            FormatId::ArmStage1(config) => (false, arm::granule_log2(config.granule)),
            FormatId::ArmStage2(config) => (true, arm::granule_log2(config.granule)),
            // No unit offers it here.
            _ => (false, 12),
        };
        Self { second_stage, log2 }
    }

    /// Tag of a domain's translations in the unit.
    pub(super) fn tag(self, domain: u16, features: Features) -> Tag {
        if self.second_stage {
            Tag::Vmid(domain)
        } else {
            Tag::Asid {
                vmid: features.stage1_vmid(),
                asid: domain,
            }
        }
    }
}

/// The notes.
#[derive(Debug, Default)]
pub(super) struct Domains {
    pages: [Option<u64>; 1 << (16 - PAGE_LOG2)],
}

impl Domains {
    /// The word with a domain's byte, and where in it that is.
    fn place<'m, M: TableMemory>(&self, memory: &'m M, domain: u16) -> Option<(&'m M::Cell, u32)> {
        let page = *self.pages.get(usize::from(domain >> PAGE_LOG2))?;
        let cells = memory.entries(page?, TABLE_BYTES as usize / 8);
        let byte = usize::from(domain) % TABLE_BYTES as usize;
        Some((cells.get(byte / 8)?, byte as u32 % 8 * 8))
    }

    /// Returns the shape noted for a domain.
    pub(super) fn get<M: TableMemory>(&self, memory: &M, domain: u16) -> Option<Shape> {
        let (cell, shift) = self.place(memory, domain)?;
        let byte = (cell.get() >> shift & 0xff) as u32;
        (byte != 0).then_some(Shape {
            second_stage: byte & 0x80 != 0,
            log2: byte & 0x7f,
        })
    }

    /// Notes what a domain is like.
    pub(super) fn set<M: TableMemory>(
        &mut self,
        memory: &M,
        domain: u16,
        shape: Shape,
    ) -> Result<(), NoTables> {
        if let Some(page @ None) = self.pages.get_mut(usize::from(domain >> PAGE_LOG2)) {
            *page = Some(memory.allocate(TABLE_BYTES as usize)?);
        }
        if let Some((cell, shift)) = self.place(memory, domain) {
            let byte = u64::from(shape.second_stage) << 7 | u64::from(shape.log2);
            cell.set(cell.get() & !(0xff << shift) | byte << shift);
        }
        Ok(())
    }

    /// The pages.
    pub(super) fn pages(&self) -> impl Iterator<Item = u64> {
        self.pages.into_iter().flatten()
    }
}
