//! What is attached, and what is flushed: the orders at the head of the module.

use iopt::{Invalidation, Root, TableMemory};

use super::SmmuV3;
use super::command::{self, Command};
use super::domains::Shape;
use super::entry::Context;
use super::streams::Member;
use super::unit::Inner;
use crate::driver::{Place, same_root};
use crate::error::{AttachError, FlushError};
use crate::registers::Registers;
use crate::unit::DomainId;

impl<R: Registers, M: TableMemory> SmmuV3<R, M> {
    pub(super) fn do_attach(
        &self,
        place: Place,
        domain: DomainId,
        root: Root,
    ) -> Result<(), AttachError> {
        self.capabilities.check(&root)?;
        let (features, memory) = (self.features, &self.memory);
        let device = place.device;
        let shape = Shape::of(root.format);
        if shape.second_stage && place.pasid.is_some() {
            let format = root.format;
            return Err(AttachError::Format { format });
        }
        let tag = self.capabilities.check_domain(domain)?;
        if shape.second_stage && features.stage1() && tag == features.stage1_vmid() {
            return Err(AttachError::ReservedDomain { domain });
        }
        let Inner {
            streams,
            domains,
            ring,
            ..
        } = &mut *self.inner.lock();
        streams.check(device)?;
        streams.is_free(memory, place, shape.second_stage)?;
        same_root(streams.other_root(memory, domain, root), domain, root)?;
        let no_memory = |cause| AttachError::Memory { device, cause };
        domains.set(memory, tag, shape).map_err(no_memory)?;
        let (stream, context) = streams
            .make(memory, place, shape.second_stage, features)
            .map_err(no_memory)?;
        let channel = (&self.registers, memory);
        let failed = |cause| AttachError::Unit { device, cause };
        let (id, pasid) = (device.0, place.number());
        match context {
            Some(context) if stream.is_valid() => {
                context.set(tag, &root, features);
                let told = |leaf| Command::Context {
                    stream: id,
                    pasid,
                    leaf,
                };
                ring.issue(channel, [told(false)]).map_err(failed)?;
                context.validate();
                ring.issue(channel, [told(true)]).map_err(|cause| {
                    context.withdraw();
                    failed(cause)
                })
            }
            context => {
                if let Some(context) = &context {
                    context.set(tag, &root, features);
                    context.validate();
                    stream.set_first(features);
                } else {
                    stream.set_second(tag, &root, features);
                }
                let told = |leaf| Command::Stream { stream: id, leaf };
                let mut step = |leaf| ring.issue(channel, [told(leaf)]);
                let told = step(false).and_then(|()| {
                    stream.validate();
                    step(true)
                });
                told.map_err(|cause| {
                    stream.withdraw();
                    context.iter().for_each(Context::withdraw);
                    failed(cause)
                })
            }
        }
    }

    pub(super) fn do_detach(&self, place: Place) -> Result<(), AttachError> {
        let (features, memory) = (self.features, &self.memory);
        let device = place.device;
        let Inner { streams, ring, .. } = &mut *self.inner.lock();
        streams.check(device)?;
        let none = AttachError::NotAttached { device };
        let (stream, context, there) = streams.find(memory, place).ok_or(none)?;
        let shape = Shape::of(there.root.format);
        if let Some(context) = &context {
            context.withdraw();
        }
        // The unit finds another table of the device through the same entry.
        let stays = context.is_some() && streams.is_used(memory, &stream);
        if !stays {
            stream.withdraw();
        }
        let (id, pasid, leaf) = (device.0, place.number(), true);
        let entry = match stays {
            true => Command::Context {
                stream: id,
                pasid,
                leaf,
            },
            false => Command::Stream { stream: id, leaf },
        };
        let tlb = stream.has_device_tlb();
        let commands = [
            Some(entry),
            Some(Command::Sync),
            Some(Command::Domain(shape.tag(there.domain, features))),
            tlb.then_some(Command::Sync),
            tlb.then(|| Command::whole_device(place)),
        ];
        ring.issue((&self.registers, memory), commands.into_iter().flatten())
            .map_err(|cause| AttachError::Unit { device, cause })?;
        if let Some(context) = &context {
            context.clear();
        }
        if !stays {
            stream.clear();
        }
        Ok(())
    }

    /// Has the unit forget what is named of a domain, or all of it.
    pub(super) fn do_flush(
        &self,
        domain: DomainId,
        what: Option<&Invalidation>,
    ) -> Result<(), FlushError> {
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
        let devices = devices.flat_map(|(n, Member { place, .. })| {
            let blocks = what.and_then(|what| command::device_pages(what, shape));
            let whole = blocks.is_none().then(|| Command::whole_device(place));
            let blocks = blocks.into_iter().flatten();
            let blocks = blocks.map(move |block| Command::device(place, block.address, block.mask));
            let barrier = (n == 0).then_some(Command::Sync);
            barrier.into_iter().chain(blocks).chain(whole)
        });
        ring.issue((&self.registers, memory), unit.chain(devices))
            .map_err(|cause| FlushError::Unit { domain, cause })
    }
}
