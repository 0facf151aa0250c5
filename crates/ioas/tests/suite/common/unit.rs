//! A unit that fails on demand.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use iommu::{
    DeviceId, DomainId, Fault, FlushError, NodeId, Unit, UnitAttachError, UnitCapabilities,
};
use iopt::{Invalidation, Root};
use runs::{Iova, Span};

use super::{DEVICE, Faults};

/// A unit of which calls can be made to fail, and that tells when it is called.
pub(crate) struct FrailUnit {
    pub(crate) inner: Arc<dyn Unit>,
    pub(crate) caches_not_present: bool,
    pub(crate) reserved: Vec<Span<Iova>>,
    pub(crate) attaches: Faults,
    /// Attaches that the unit makes, and does not come to the end of.
    pub(crate) endless: Faults,
    pub(crate) invalidates: Faults,
    pub(crate) detaches: Faults,
    /// Every attach that was not refused.
    pub(crate) attached: Mutex<Vec<(DeviceId, DomainId)>>,
    /// The last invalidation by ranges that was not refused.
    pub(crate) invalidated: Mutex<Option<Invalidation>>,
    /// Called at each invalidation, before anything else.
    pub(crate) at_invalidate: Hook,
    /// Called at each detach.
    pub(crate) at_detach: Hook,
}

/// Called by several threads at once.
pub(crate) type Hook = Mutex<Option<Arc<dyn Fn() + Send + Sync>>>;

impl FrailUnit {
    pub(crate) fn new(inner: Arc<dyn Unit>) -> Self {
        Self {
            inner,
            caches_not_present: false,
            reserved: Vec::new(),
            attaches: Faults::default(),
            endless: Faults::default(),
            invalidates: Faults::default(),
            detaches: Faults::default(),
            attached: Mutex::default(),
            invalidated: Mutex::default(),
            at_invalidate: Mutex::default(),
            at_detach: Mutex::default(),
        }
    }

    fn flush(&self, domain: DomainId) -> Result<(), FlushError> {
        call(&self.at_invalidate);
        if self.invalidates.hit() {
            return Err(FlushError::TimedOut {
                domain,
                device: DEVICE,
                busy: 1,
                waited: Duration::from_millis(3),
            });
        }
        Ok(())
    }
}

pub(crate) fn call(hook: &Hook) {
    let hook = hook.lock().unwrap().clone();
    if let Some(hook) = hook {
        hook();
    }
}

impl Unit for FrailUnit {
    fn capabilities(&self) -> UnitCapabilities {
        let mut capabilities = self.inner.capabilities();
        capabilities.caches_not_present = self.caches_not_present;
        capabilities
    }

    fn node(&self) -> Option<NodeId> {
        self.inner.node()
    }

    fn reserved(&self, _device: DeviceId, sink: &mut dyn FnMut(Span<Iova>)) {
        self.reserved.iter().for_each(|span| sink(*span));
    }

    fn attach(
        &self,
        device: DeviceId,
        domain: DomainId,
        root: Root,
    ) -> Result<(), UnitAttachError> {
        if self.attaches.hit() {
            return Err(UnitAttachError::RootAddress {
                address: root.address,
                bits: 12,
            });
        }
        self.inner.attach(device, domain, root)?;
        if self.endless.hit() {
            return Err(UnitAttachError::TimedOut {
                device,
                busy: 1,
                waited: Duration::from_millis(3),
            });
        }
        self.attached.lock().unwrap().push((device, domain));
        Ok(())
    }

    fn detach(&self, device: DeviceId) -> Result<(), UnitAttachError> {
        call(&self.at_detach);
        if self.detaches.hit() {
            return Err(UnitAttachError::TimedOut {
                device,
                busy: 1,
                waited: Duration::from_millis(3),
            });
        }
        self.inner.detach(device)
    }

    fn invalidate(&self, domain: DomainId, what: &Invalidation) -> Result<(), FlushError> {
        self.flush(domain)?;
        *self.invalidated.lock().unwrap() = Some(what.clone());
        self.inner.invalidate(domain, what)
    }

    fn invalidate_domain(&self, domain: DomainId) -> Result<(), FlushError> {
        self.flush(domain)?;
        self.inner.invalidate_domain(domain)
    }

    fn drain_faults(&self, sink: &mut dyn FnMut(Fault)) -> u64 {
        self.inner.drain_faults(sink)
    }
}
