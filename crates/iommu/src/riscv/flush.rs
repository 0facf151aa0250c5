//! Invalidation when mappings are removed. The head of the module has the order.

use iopt::{Invalidation, TableMemory};

use super::RiscvIommu;
use super::command::{ALL, Command};
use super::devices::Member;
use super::unit::{Inner, Tlbs};
use crate::commands::{self, Block};
use crate::driver::Flushes;
use crate::error::FlushError;
use crate::registers::Registers;
use crate::unit::DomainId;

/// Everything, in the terms of a command for pages.
pub(super) const EVERYTHING: Block = Block {
    address: 0,
    mask: ALL,
};

impl<R: Registers, M: TableMemory> Flushes for RiscvIommu<R, M> {
    fn flush(&self, domain: DomainId, what: Option<&Invalidation>) -> Result<(), FlushError> {
        let tables = what.is_none_or(Invalidation::tables_unlinked);
        let by_page = what.filter(|_| !tables || self.features.upper_levels());
        let most = self.features.most_pages();
        let [mut room, mut devices] = [const { commands::Room::new_const() }; 2];
        let blocks = by_page.and_then(|what| commands::blocks(what, most, &mut room));
        // Devices hold leaves only, and each takes ranges.
        let of_devices = what.and_then(|what| commands::blocks(what, ALL, &mut devices));
        let whole = [EVERYTHING];
        let of_devices = of_devices.unwrap_or(&whole);
        self.flush_blocks(domain, blocks, tables, of_devices)
    }
}

impl<R: Registers, M: TableMemory> RiscvIommu<R, M> {
    pub(super) fn device_tlb(&self, device: u32, process: Option<u32>, block: Block) -> Command {
        Command::DeviceTlb {
            device,
            segments: self.config.device_bits > 16,
            process,
            block,
        }
    }

    /// Invalidates blocks of a domain, or all of it, in the unit and in the devices' TLBs.
    fn flush_blocks(
        &self,
        domain: DomainId,
        blocks: Option<&[Block]>,
        tables: bool,
        of_devices: &[Block],
    ) -> Result<(), FlushError> {
        let memory = &self.memory;
        let Inner {
            devices,
            ring,
            tlbs,
            ..
        } = &mut *self.inner.lock();
        let members = devices
            .members(memory)
            .filter(move |member| u32::from(member.there.domain) == domain.0);
        let Some(first) = members.clone().next() else {
            return Ok(());
        };
        let tag = first.there.tag();
        let command = move |pages| Command::Table { tag, pages };
        let whole = blocks.is_none().then_some(command(None));
        let pages = blocks.unwrap_or_default().iter();
        let pages = pages.map(move |block| command(Some((*block, tables))));
        let of_devices = of_devices.iter().copied();
        let of_devices = self.of_devices(tlbs.as_ref(), members, of_devices);
        let commands = whole.into_iter().chain(pages).chain(of_devices);
        ring.issue((&self.registers, memory), commands)
            .map_err(|cause| FlushError::Unit { domain, cause })
    }

    /// The commands that invalidate blocks in the TLBs of devices, behind the unit.
    pub(super) fn of_devices(
        &self,
        tlbs: Option<&Tlbs>,
        members: impl Iterator<Item = Member> + Clone,
        blocks: impl Iterator<Item = Block> + Clone,
    ) -> impl Iterator<Item = Command> + Clone {
        let most = tlbs.map_or(1, |tlbs| tlbs.depth);
        // No search where there are no TLBs.
        let members = tlbs.map(|_| members).into_iter().flatten();
        members
            .filter(|member| member.tlb)
            .flat_map(move |member| blocks.clone().map(move |block| (member, block)))
            .enumerate()
            .flat_map(move |(n, (member, block))| {
                let command = self.device_tlb(member.device, member.process, block);
                // Before the first, too.
                [(n % most == 0).then_some(Command::Barrier), Some(command)]
            })
            .flatten()
    }
}
