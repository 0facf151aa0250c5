//! Invalidation when mappings are removed. The head of the module has the order; `command.rs` says which commands.

use iopt::{Invalidation, TableMemory};

use super::SmmuV3;
use super::command::{self, Command};
use super::streams::Member;
use super::unit::Inner;
use crate::commands::Room;
use crate::driver::Flushes;
use crate::error::FlushError;
use crate::registers::Registers;
use crate::unit::DomainId;

impl<R: Registers, M: TableMemory> Flushes for SmmuV3<R, M> {
    fn flush(&self, domain: DomainId, what: Option<&Invalidation>) -> Result<(), FlushError> {
        let Some(number) = self.capabilities.tag(domain) else {
            // No device can be in it.
            return Ok(());
        };
        let (features, memory) = (self.features, &self.memory);
        let Inner {
            streams,
            domains,
            ring,
            ..
        } = &mut *self.inner.lock();
        let Some(shape) = domains.get(memory, number) else {
            // None ever was.
            return Ok(());
        };
        let tag = shape.tag(number, features);
        let pages = what.and_then(|what| command::pages(what, shape, features.ranges()));
        let whole = pages.is_none().then_some(Command::Domain(tag));
        let pages = pages.into_iter().flatten();
        let unit = pages.map(|pages| Command::Pages(tag, pages)).chain(whole);
        let members = streams.has_device_tlbs().then(|| streams.members(memory));
        let behind = |member: &Member| member.device_tlb && member.there.domain == number;
        let devices = members.into_iter().flatten().filter(behind).enumerate();
        let asked = what.filter(|_| streams.has_device_tlbs());
        let mut room = Room::new_const();
        let blocks = asked.and_then(|what| command::device_pages(what, shape, &mut room));
        let devices = devices.flat_map(|(n, Member { place, .. })| {
            let whole = blocks.is_none().then(|| Command::whole_device(place));
            let blocks = blocks.unwrap_or_default().iter();
            let blocks = blocks.map(move |block| Command::device(place, block.address, block.mask));
            let barrier = (n == 0).then_some(Command::Sync);
            barrier.into_iter().chain(blocks).chain(whole)
        });
        ring.issue((&self.registers, memory), unit.chain(devices))
            .map_err(|cause| FlushError::Unit { domain, cause })
    }
}
