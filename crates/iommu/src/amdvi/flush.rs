//! Invalidation of the unit's caches and of TLBs in devices.
//!
//! AMD IOMMU specification, sections 2.4.3 INVALIDATE_IOMMU_PAGES and 2.4.4 INVALIDATE_IOTLB_PAGES. The
//! unit's translations are tagged by domain. TLBs in devices know no domains: each device with one gets commands.
//! Commands for pages times devices, beyond what one flush may have, become one command for everything of
//! the device.

use iopt::{Invalidation, Root, TableMemory};

use super::command::{Command, MOST_PAGES};
use super::unit::Inner;
use super::{AmdVi, Mode};
use crate::commands::{self, Block, parts};
use crate::driver::Flushes;
use crate::error::FlushError;
use crate::notes::Member;
use crate::registers::Registers;
use crate::unit::DomainId;

impl<R: Registers, M: TableMemory> Flushes for AmdVi<R, M> {
    fn flush(&self, domain: DomainId, what: Option<&Invalidation>) -> Result<(), FlushError> {
        let Some(tag) = self.capabilities.tag(domain) else {
            // No device can be in it.
            return Ok(());
        };
        let mut room = commands::Room::new_const();
        let blocks = what.and_then(|what| commands::blocks(what, MOST_PAGES, &mut room));
        let unlinked = what.is_none_or(Invalidation::tables_unlinked);
        let tables = unlinked || self.config.caches_not_present;
        if self.config.mode == Mode::Guest {
            return self.flush_guest(domain, tag, blocks, tables);
        }
        let Inner { ring, notes, .. } = &mut *self.inner.lock();
        let failed = |cause| FlushError::Unit { domain, cause };
        let unit = parts(blocks, 1).map(move |block| match block {
            Some(block) => Command::Pages {
                domain: tag,
                block,
                tables,
            },
            None => Command::domain(tag),
        });
        let members = || notes.members(&self.memory, tag);
        let io = (&self.registers, &self.memory);
        if members().all(|member| member.tlb.is_none()) {
            // As most often. The commands below are much to carry about.
            return ring.issue(io, unit).map_err(failed);
        }
        let members = members();
        let device = parts(blocks, members.clone().count());
        let commands = unit.chain(self.in_devices(members, device));
        ring.issue(io, commands).map_err(failed)
    }

    fn change_root(&self, domain: DomainId, root: Root) -> Result<(), FlushError> {
        match self.config.mode {
            Mode::Host => self.set_root(domain, root),
            Mode::Guest => self.keep_root(domain, root),
        }
    }
}

impl<R: Registers, M: TableMemory> AmdVi<R, M> {
    /// Everything in the TLBs of members.
    pub(super) fn all_in_devices(
        &self,
        members: impl Iterator<Item = Member> + Clone,
    ) -> impl Iterator<Item = Command> + Clone {
        self.in_devices(members, core::iter::once(None))
    }

    /// Pages in the TLBs of members, behind a barrier.
    fn in_devices(
        &self,
        members: impl Iterator<Item = Member> + Clone,
        blocks: impl Iterator<Item = Option<Block>> + Clone,
    ) -> impl Iterator<Item = Command> + Clone {
        let devices = members.filter_map(|member| Some((member.source, member.tlb?)));
        let barrier = devices.clone().next().map(|_| Command::Barrier);
        let commands = devices.flat_map(move |(source, depth)| {
            let blocks = blocks.clone();
            blocks.map(move |block| Command::InDevice {
                source,
                depth,
                block: block.unwrap_or(Block::ALL),
            })
        });
        barrier.into_iter().chain(commands)
    }
}
