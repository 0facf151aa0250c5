//! The seams of units and of drivers.

use super::*;

impl<R, M> Unit for RiscvIommu<R, M>
where
    R: Registers + Send + Sync,
    M: TableMemory + Send + Sync,
{
    fn capabilities(&self) -> Capabilities {
        self.capabilities
    }

    fn node(&self) -> Option<NodeId> {
        self.config.node
    }

    fn attach(&self, device: DeviceId, domain: DomainId, root: Root) -> Result<(), AttachError> {
        self.do_attach((device, None), domain, root)
    }

    fn detach(&self, device: DeviceId) -> Result<(), AttachError> {
        self.do_detach((device, None))
    }

    fn attach_pasid(
        &self,
        device: DeviceId,
        pasid: Pasid,
        domain: DomainId,
        root: Root,
    ) -> Result<(), AttachError> {
        self.do_attach((device, Some(pasid)), domain, root)
    }

    fn detach_pasid(&self, device: DeviceId, pasid: Pasid) -> Result<(), AttachError> {
        self.do_detach((device, Some(pasid)))
    }

    fn set_device_tlb(&self, device: DeviceId, tlb: Option<DeviceTlb>) -> Result<(), AttachError> {
        self.check_device(device, None)?;
        if tlb.is_some() && !self.capabilities.device_tlbs {
            return Err(AttachError::NoDeviceTlbs { device });
        }
        let Inner { devices, tlbs, .. } = &mut *self.inner.lock();
        let mut members = devices.members(&self.memory);
        if let Some(member) = members.find(|member| member.device == device.0) {
            let domain = DomainId(member.there.domain.into());
            return Err(AttachError::AlreadyAttached { device, domain });
        }
        drop(members);
        let no_memory = |cause| AttachError::Memory { device, cause };
        if let Some(DeviceTlb { queue_depth }) = tlb {
            // 0 is 32.
            let most = usize::from(queue_depth.wrapping_sub(1) & 31) + 1;
            match tlbs {
                Some(tlbs) => tlbs.depth = tlbs.depth.min(most),
                None => {
                    let empty = self.memory.allocate(ROOT_BYTES as usize);
                    let empty = empty.map_err(no_memory)?;
                    let cells = self.memory.entries(empty, ROOT_BYTES as usize / 8);
                    self.memory.written(cells);
                    *tlbs = Some(Tlbs { depth: most, empty });
                }
            }
        }
        let context = match tlb {
            None => devices.find(&self.memory, device.0),
            Some(_) => Some(devices.make(&self.memory, device.0).map_err(no_memory)?),
        };
        if let Some(context) = context {
            context.set_tlb(tlb.is_some());
        }
        Ok(())
    }

    fn invalidate(&self, domain: DomainId, what: &Invalidation) -> Result<(), FlushError> {
        if let Some(root) = what.new_root() {
            // These formats do not grow, so it can only be the one that is there.
            let Inner { devices, tlbs, .. } = &*self.inner.lock();
            check_root((devices, tlbs.as_ref()), &self.memory, domain, root)
                .map_err(|cause| FlushError::Root { domain, cause })?;
            // The lock ends here.
        } else if what.is_empty() {
            return Ok(());
        }
        // With tables and no range, what the tables held is not named.
        let named = what.new_root().is_none() && !what.ranges().is_empty();
        let tables = what.tables_unlinked();
        let by_page = named && (!tables || self.features.upper_levels());
        let most = self.features.most_pages();
        let blocks = by_page.then(|| commands::blocks(what, most)).flatten();
        // Devices hold leaves only, and each takes ranges.
        let of_devices = named.then(|| commands::blocks(what, ALL)).flatten();
        let whole = of_devices.is_none().then_some(EVERYTHING);
        let of_devices = of_devices.into_iter().flatten().chain(whole);
        self.flush(domain, blocks, tables, of_devices)
    }

    fn invalidate_domain(&self, domain: DomainId) -> Result<(), FlushError> {
        let none = None::<iter::Empty<Block>>;
        self.flush(domain, none, true, iter::once(EVERYTHING))
    }

    fn drain_faults(&self, sink: &mut dyn FnMut(Fault)) -> u64 {
        for _ in 0..faults::RECORDS {
            let alone = self.inner.lock();
            if !alone.ring.open {
                // The queue is somebody else's, or nobody's.
                return 0;
            }
            let Some(fault) = faults::take(&self.registers, &self.memory, alone.faults) else {
                return u64::from(faults::take_overflow(&self.registers));
            };
            // Not under the lock: the sink may flush.
            drop(alone);
            sink(fault);
        }
        0
    }
}
