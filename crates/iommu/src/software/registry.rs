//! Attached devices, and the ports that exist.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use iopt::Root;
use iopt::walk::Walker;

use super::slot::{AccessCounters, Slot};
use crate::error::UnitAttachError;
use crate::unit::{DeviceId, DomainId};

/// Translation context of a device's accesses.
#[derive(Clone, Copy, Debug)]
pub(super) struct Context {
    pub(super) domain: DomainId,
    pub(super) walker: Walker,
}

/// A device, from its first port or attach on.
pub(super) struct Device {
    pub(super) id: DeviceId,
    /// Changes with the context.
    generation: AtomicU64,
    context: Mutex<Option<Context>>,
    ports: Mutex<Ports>,
}

#[derive(Default)]
struct Ports {
    open: Vec<Arc<Slot>>,
    /// Counters of closed ports.
    closed: AccessCounters,
}

impl Device {
    fn new(id: DeviceId) -> Arc<Self> {
        Arc::new(Self {
            id,
            generation: AtomicU64::new(0),
            context: Mutex::default(),
            ports: Mutex::default(),
        })
    }

    #[inline]
    pub(super) fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    /// The context, with the generation that belongs to it.
    pub(super) fn context(&self) -> (u64, Option<Context>) {
        let context = lock(&self.context);
        (self.generation(), *context)
    }

    /// Sets the context. The new generation is the result.
    fn set_context(&self, new: Option<Context>) -> u64 {
        let mut context = lock(&self.context);
        *context = new;
        let generation = self.generation.load(Ordering::Relaxed) + 1;
        self.generation.store(generation, Ordering::Release);
        generation
    }

    pub(super) fn close(&self, slot: &Arc<Slot>) {
        let mut ports = lock(&self.ports);
        ports.open.retain(|open| !Arc::ptr_eq(open, slot));
        ports.closed += slot.counters.counters();
    }

    fn counters(&self) -> AccessCounters {
        let ports = lock(&self.ports);
        let mut sum = ports.closed;
        ports
            .open
            .iter()
            .for_each(|slot| sum += slot.counters.counters());
        sum
    }

    fn busy(&self, into: &mut Vec<Busy>) {
        for slot in &lock(&self.ports).open {
            if let Some(turn) = slot.busy() {
                into.push(Busy {
                    device: self.id,
                    slot: slot.clone(),
                    turn,
                });
            }
        }
    }
}

/// An access that was under way when it was looked for.
pub(super) struct Busy {
    pub(super) device: DeviceId,
    slot: Arc<Slot>,
    turn: u64,
}

impl Busy {
    pub(super) fn is_over(&self) -> bool {
        self.slot.has_left(self.turn)
    }
}

#[derive(Default)]
pub(super) struct Registry {
    members: Mutex<Members>,
}

#[derive(Default)]
struct Members {
    devices: BTreeMap<DeviceId, Member>,
    domains: BTreeMap<DomainId, Domain>,
}

struct Member {
    device: Arc<Device>,
    /// Where it is attached, or from where a detach has not come to its end.
    domain: Option<DomainId>,
}

struct Domain {
    root: Root,
    devices: usize,
}

/// A device on its way out.
pub(super) struct Leaving {
    device: Arc<Device>,
    generation: u64,
}

impl Leaving {
    /// The accesses that are under way. To be called after [`barrier`](super::barrier).
    pub(super) fn busy(&self) -> Vec<Busy> {
        let mut busy = Vec::new();
        self.device.busy(&mut busy);
        busy
    }
}

impl Registry {
    /// A new port.
    pub(super) fn open(&self, device: DeviceId) -> (Arc<Device>, Arc<Slot>) {
        // The registry's lock is held while the port is added: see the protocol.
        let mut members = lock(&self.members);
        let device = members.member(device).device.clone();
        let slot = Arc::new(Slot::default());
        lock(&device.ports).open.push(slot.clone());
        (device, slot)
    }

    pub(super) fn attach(
        &self,
        device: DeviceId,
        domain: DomainId,
        walker: Walker,
    ) -> Result<(), UnitAttachError> {
        let root = walker.root();
        let mut members = lock(&self.members);
        if let Some(domain) = members.member(device).domain {
            return Err(UnitAttachError::AlreadyAttached { device, domain });
        }
        let there = members
            .domains
            .entry(domain)
            .or_insert(Domain { root, devices: 0 });
        if there.root != root {
            return Err(UnitAttachError::OtherRoot {
                domain,
                there: there.root,
                asked: root,
            });
        }
        there.devices += 1;
        let member = members.member(device);
        member.domain = Some(domain);
        member.device.set_context(Some(Context { domain, walker }));
        Ok(())
    }

    /// Has the devices of a domain walk with another walker.
    pub(super) fn set_root(&self, domain: DomainId, walker: Walker) {
        let mut members = lock(&self.members);
        let Members { devices, domains } = &mut *members;
        if let Some(there) = domains.get_mut(&domain) {
            there.root = walker.root();
        }
        for member in devices.values() {
            // A device on its way out has no context, and gets none.
            if member.domain == Some(domain) && member.device.context().1.is_some() {
                member.device.set_context(Some(Context { domain, walker }));
            }
        }
    }

    /// Takes the context away. The device stays a member until [`finish_detach`](Self::finish_detach).
    pub(super) fn begin_detach(&self, device: DeviceId) -> Result<Leaving, UnitAttachError> {
        let members = lock(&self.members);
        let member = members
            .devices
            .get(&device)
            .filter(|member| member.domain.is_some());
        let device = match member {
            Some(member) => member.device.clone(),
            None => return Err(UnitAttachError::NotAttached { device }),
        };
        let generation = device.set_context(None);
        Ok(Leaving { device, generation })
    }

    /// Ends the membership. `invalidate` is called, under the registry's lock, when the domain has no
    /// other device.
    pub(super) fn finish_detach(&self, leaving: Leaving, invalidate: impl FnOnce(DomainId)) {
        let mut members = lock(&self.members);
        let Members { devices, domains } = &mut *members;
        // Another thread may have detached the device as well, and even attached it again.
        let member = devices
            .get_mut(&leaving.device.id)
            .filter(|member| member.device.generation() == leaving.generation);
        let Some(id) = member.and_then(|member| member.domain.take()) else {
            return;
        };
        if let Some(domain) = domains.get_mut(&id) {
            domain.devices -= 1;
            if domain.devices == 0 {
                domains.remove(&id);
                invalidate(id);
            }
        }
    }

    /// The accesses under way of all devices of a domain. To be called after [`barrier`](super::barrier).
    pub(super) fn busy_in(&self, domain: DomainId) -> Vec<Busy> {
        let mut busy = Vec::new();
        for member in lock(&self.members).devices.values() {
            if member.domain == Some(domain) {
                member.device.busy(&mut busy);
            }
        }
        busy
    }

    /// The table of a domain that has devices.
    pub(super) fn root(&self, domain: DomainId) -> Option<Root> {
        lock(&self.members)
            .domains
            .get(&domain)
            .map(|domain| domain.root)
    }

    /// Counters of one device, or of all of them.
    pub(super) fn counters(&self, device: Option<DeviceId>) -> AccessCounters {
        let mut sum = AccessCounters::default();
        for (id, member) in &lock(&self.members).devices {
            if device.is_none_or(|wanted| wanted == *id) {
                sum += member.device.counters();
            }
        }
        sum
    }
}

impl Members {
    fn member(&mut self, id: DeviceId) -> &mut Member {
        let new = || Member {
            device: Device::new(id),
            domain: None,
        };
        self.devices.entry(id).or_insert_with(new)
    }
}

/// A panic of another thread leaves nothing half done under these locks.
fn lock<V>(mutex: &Mutex<V>) -> MutexGuard<'_, V> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use iopt::FormatId;

    use super::*;

    const DEVICE: DeviceId = DeviceId(3);

    fn walker(address: u64) -> Walker {
        Walker::new(Root {
            format: FormatId::VtdSs,
            address,
            levels: 3,
        })
    }

    /// Two threads detach a device; the slower one ends when the device is attached again.
    #[test]
    fn a_detach_that_comes_late_leaves_the_next_attach_alone() {
        let registry = Registry::default();
        registry
            .attach(DEVICE, DomainId(1), walker(0x1000))
            .unwrap();
        let late = registry.begin_detach(DEVICE).unwrap();
        let first = registry.begin_detach(DEVICE).unwrap();
        let mut invalidated = Vec::new();
        registry.finish_detach(first, |domain| invalidated.push(domain));
        assert_eq!(invalidated, [DomainId(1)]);
        registry
            .attach(DEVICE, DomainId(2), walker(0x2000))
            .unwrap();
        registry.finish_detach(late, |domain| invalidated.push(domain));
        assert_eq!(invalidated, [DomainId(1)]);
        assert_eq!(
            registry.root(DomainId(2)).map(|root| root.address),
            Some(0x2000)
        );
        let again = registry.attach(DEVICE, DomainId(1), walker(0x1000));
        let (device, domain) = (DEVICE, DomainId(2));
        assert_eq!(
            again,
            Err(UnitAttachError::AlreadyAttached { device, domain })
        );
    }
}
