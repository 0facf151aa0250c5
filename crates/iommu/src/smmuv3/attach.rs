//! Attach and detach. The head of the module has the orders.

use iopt::{Root, TableMemory};

use super::SmmuV3;
use super::command::Command;
use super::domains::Shape;
use super::entry::Context;
use super::unit::Inner;
use crate::driver::{Attachments, Place, same_root};
use crate::error::{NoPlace, UnitAttachError};
use crate::registers::Registers;
use crate::unit::{DeviceId, DeviceTlb, DomainId};

impl<R: Registers, M: TableMemory> Attachments for SmmuV3<R, M> {
    fn attach_at(&self, place: Place, domain: DomainId, root: Root) -> Result<(), UnitAttachError> {
        self.capabilities.check(&root)?;
        let (features, memory) = (self.features, &self.memory);
        let device = place.device;
        let shape = Shape::of(root.format);
        if shape.second_stage && place.pasid.is_some() {
            let format = root.format;
            return Err(UnitAttachError::Format { format });
        }
        let tag = self.capabilities.check_domain(domain)?;
        if shape.second_stage && features.stage1() && tag == features.stage1_vmid() {
            return Err(UnitAttachError::ReservedDomain { domain });
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
        let no_place = |cause: NoPlace| cause.of(device);
        let noted = domains.set(memory, tag, shape);
        noted.map_err(NoPlace::NoTables).map_err(no_place)?;
        let (stream, context) = streams
            .make(memory, place, shape.second_stage, features)
            .map_err(no_place)?;
        let channel = (&self.registers, memory);
        let failed = |cause| UnitAttachError::Unit { device, cause };
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

    fn detach_at(&self, place: Place) -> Result<(), UnitAttachError> {
        let (features, memory) = (self.features, &self.memory);
        let device = place.device;
        let Inner { streams, ring, .. } = &mut *self.inner.lock();
        streams.check(device)?;
        let none = UnitAttachError::NotAttached { device };
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
            .map_err(|cause| UnitAttachError::Unit { device, cause })?;
        if let Some(context) = &context {
            context.clear();
        }
        if !stays {
            stream.clear();
        }
        Ok(())
    }

    fn check_device(&self, device: DeviceId) -> Result<(), UnitAttachError> {
        self.inner.lock().streams.check(device)
    }

    /// The unit itself keeps to the device's queue depth.
    fn switch_device_tlb(
        &self,
        device: DeviceId,
        tlb: Option<DeviceTlb>,
    ) -> Result<(), UnitAttachError> {
        let streams = &mut self.inner.lock().streams;
        streams.set_device_tlb(&self.memory, device, tlb.is_some())
    }

    fn other_root(&self, domain: DomainId, asked: Root) -> Option<Root> {
        let streams = &self.inner.lock().streams;
        streams.other_root(&self.memory, domain, asked)
    }
}
