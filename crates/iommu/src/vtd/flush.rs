//! Invalidation of the unit's caches and of TLBs in devices.
//!
//! VT-d specification, section 6.5 "Invalidation of Translation Caches". Each cache comes after the one
//! that it is filled from: context cache, PASID cache, IOTLB, and last the TLBs in devices, which the unit
//! answers from its IOTLB (6.5.2.5). The unit keeps that order within the queue (6.5.2.11 "Queued
//! Invalidation Ordering Considerations"), so one wait at the end covers all.
//!
//! Second-stage translations are tagged by domain, whatever the PASID; first-stage ones by domain and PASID, so each
//! PASID of the domain is named. TLBs in devices know no domains: each device with one gets commands for each of its
//! PASIDs in the domain. Commands for pages times PASIDs, or times devices, beyond what one flush may have become one
//! command for everything of the PASID, or of the device's PASID.

use iopt::{Invalidation, TableMemory};

use super::command::{Command, InDevice};
use super::unit::Inner;
use super::{Mode, Vtd};
use crate::commands::{self, Block, parts};
use crate::driver::Flushes;
use crate::error::FlushError;
use crate::notes::{Member, Notes};
use crate::registers::Registers;
use crate::unit::DomainId;

impl<R: Registers, M: TableMemory> Flushes for Vtd<R, M> {
    fn flush(&self, domain: DomainId, what: Option<&Invalidation>) -> Result<(), FlushError> {
        let Some(tag) = self.capabilities.tag(domain) else {
            // No device can be in it.
            return Ok(());
        };
        let mask = self.features.page_mask();
        let mut room = commands::Room::new_const();
        let blocks = what.and_then(|what| commands::blocks(what, mask?, &mut room));
        let tables = what.is_none_or(Invalidation::tables_unlinked);
        let leaf_only = !tables && !self.features.caching_mode();
        let Inner { ring, notes, .. } = &mut *self.inner.lock();
        let failed = |cause| FlushError::Unit { domain, cause };
        let devices = || {
            let members = notes.members(&self.memory, tag);
            members.filter(|member| member.tlb.is_some())
        };
        if !self.tagged() && devices().next().is_none() {
            // As most often. The commands below are much to carry about.
            let unit = parts(blocks, 1).map(|block| self.pages(tag, 0, block, leaf_only));
            return self.issue(ring, unit).map_err(failed);
        }
        let (pasids, devices) = (self.pasids(notes, tag), devices());
        let unit = parts(blocks, pasids.clone().count());
        let device = parts(blocks, devices.clone().count());
        let unit = pasids.flat_map(move |pasid| {
            let commands = unit.clone();
            commands.map(move |block| self.pages(tag, pasid, block, leaf_only))
        });
        let device = devices.flat_map(move |member| {
            let commands = device.clone();
            commands.filter_map(move |block| self.in_device(member, block))
        });
        self.issue(ring, unit.chain(device)).map_err(failed)
    }
}

impl<R: Registers, M: TableMemory> Vtd<R, M> {
    /// The commands that invalidate an entry, and what was translated through it.
    pub(super) fn invalidate_member(
        &self,
        member: Member,
    ) -> impl Iterator<Item = Command> + Clone {
        let Member {
            source,
            pasid,
            domain,
            ..
        } = member;
        let entry = match self.config.mode {
            Mode::Legacy => Command::Context { domain, source },
            // The context entry stays as it is.
            Mode::ScalableSecond | Mode::ScalableFirst => Command::Pasid { domain, pasid },
        };
        let unit = [entry, self.pages(domain, pasid, None, false)];
        unit.into_iter().chain(self.in_device(member, None))
    }

    /// The commands that invalidate, in caching mode, that there was no entry.
    pub(super) fn invalidate_absence(
        &self,
        domain: u16,
        source: u16,
        pasid: u32,
    ) -> impl Iterator<Item = Command> + Clone {
        let all = self.pages(domain, pasid, None, false);
        self.invalidate_context(source)
            .chain(self.all_pasids())
            .chain(core::iter::once(all))
    }

    /// The command that invalidates a context entry through which nothing is translated. Where it does
    /// not name a domain itself, and where it is not present, it is cached under the number 0.
    pub(super) fn invalidate_context(&self, source: u16) -> impl Iterator<Item = Command> + Clone {
        core::iter::once(Command::Context { domain: 0, source })
    }

    pub(super) fn all_pasids(&self) -> Option<Command> {
        (self.config.mode != Mode::Legacy).then_some(Command::AllPasids)
    }

    /// True if a domain's translations are tagged by PASIDs.
    fn tagged(&self) -> bool {
        self.config.mode == Mode::ScalableFirst && self.config.pasid_bits > 0
    }

    /// The PASIDs by which a domain's translations are tagged, each once; 0 where they are not.
    fn pasids(&self, notes: &Notes, domain: u16) -> impl Iterator<Item = u32> + Clone {
        let tagged = self.tagged();
        let members = tagged.then(|| notes.members(&self.memory, domain));
        let members = members.into_iter().flatten().map(|member| member.pasid);
        let before = members.clone();
        let each = members.enumerate().filter_map(move |(n, pasid)| {
            let mut before = before.clone().take(n);
            before.all(|there| there != pasid).then_some(pasid)
        });
        (!tagged).then_some(0).into_iter().chain(each)
    }

    /// Pages of a domain, or all of it, in the unit.
    fn pages(&self, domain: u16, pasid: u32, block: Option<Block>, leaf_only: bool) -> Command {
        match (self.config.mode, block) {
            (Mode::Legacy | Mode::ScalableSecond, None) => Command::Domain { domain },
            (Mode::Legacy | Mode::ScalableSecond, Some(block)) => Command::Pages {
                domain,
                block,
                leaf_only,
            },
            (Mode::ScalableFirst, None) => Command::FirstStage { domain, pasid },
            (Mode::ScalableFirst, Some(block)) => Command::FirstStagePages {
                domain,
                pasid,
                block,
                leaf_only,
            },
        }
    }

    /// The same in a device, if it has a TLB.
    fn in_device(&self, member: Member, block: Option<Block>) -> Option<Command> {
        let Member { source, pasid, .. } = member;
        Some(Command::DeviceTlb(InDevice {
            source,
            pasid,
            depth: member.tlb?,
            physical: if self.features.throttles() { source } else { 0 },
            block: block.unwrap_or(Block::ALL),
        }))
    }
}
