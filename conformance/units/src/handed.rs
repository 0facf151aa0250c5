//! A unit whose drivers change, while address spaces are over it.

use std::sync::{PoisonError, RwLock, RwLockReadGuard};

use anyhow::Context as _;
use iommu::{
    DeviceId, DomainId, Fault, FlushError, Frozen, NodeId, UnitAttachError, UnitCapabilities,
};
use iopt::{Invalidation, Root};
use runs::{Iova, Span};

use crate::drivers::Live;

/// A unit with the driver that it has now.
pub(crate) struct Handed(RwLock<Option<Box<dyn Live>>>);

/// Says of a unit that lost its driver what a unit can say: nothing, or that it does not answer.
const GONE: iommu::UnitError = iommu::UnitError::TimedOut {
    awaited: "a driver",
    rounds: 0,
};

impl Handed {
    pub(crate) fn new(driver: Box<dyn Live>) -> Self {
        Self(RwLock::new(Some(driver)))
    }

    fn read(&self) -> RwLockReadGuard<'_, Option<Box<dyn Live>>> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// The driver lets go of the unit, and `adopt` makes the next one.
    pub(crate) fn change(
        &self,
        adopt: impl FnOnce(&Frozen) -> anyhow::Result<Box<dyn Live>>,
    ) -> anyhow::Result<()> {
        let mut slot = self.0.write().unwrap_or_else(PoisonError::into_inner);
        let old = slot.take().context("the unit has no driver")?;
        let frozen = old.freeze(&mut |_| ())?;
        *slot = Some(adopt(&frozen)?);
        Ok(())
    }

    fn moving(
        &self,
        device: DeviceId,
        work: impl FnOnce(&dyn Live) -> Result<(), UnitAttachError>,
    ) -> Result<(), UnitAttachError> {
        let cause = GONE;
        let none = || Err(UnitAttachError::Unit { device, cause });
        self.read().as_deref().map_or_else(none, work)
    }

    fn flushing(
        &self,
        domain: DomainId,
        work: impl FnOnce(&dyn Live) -> Result<(), FlushError>,
    ) -> Result<(), FlushError> {
        let cause = GONE;
        let none = || Err(FlushError::Unit { domain, cause });
        self.read().as_deref().map_or_else(none, work)
    }

    /// Ends it.
    pub(crate) fn disable(&self) -> anyhow::Result<()> {
        let driver = self.read();
        Ok(driver
            .as_ref()
            .context("the unit has no driver")?
            .disable()?)
    }
}

impl iommu::Unit for Handed {
    fn capabilities(&self) -> UnitCapabilities {
        let driver = self.read();
        let none = UnitCapabilities::default();
        driver.as_ref().map_or(none, |driver| driver.capabilities())
    }

    fn node(&self) -> Option<NodeId> {
        self.read().as_ref()?.node()
    }

    fn reserved(&self, device: DeviceId, sink: &mut dyn FnMut(Span<Iova>)) {
        if let Some(driver) = self.read().as_ref() {
            driver.reserved(device, sink);
        }
    }

    fn attach(
        &self,
        device: DeviceId,
        domain: DomainId,
        root: Root,
    ) -> Result<(), UnitAttachError> {
        self.moving(device, |driver| driver.attach(device, domain, root))
    }

    fn detach(&self, device: DeviceId) -> Result<(), UnitAttachError> {
        self.moving(device, |driver| driver.detach(device))
    }

    fn invalidate(&self, domain: DomainId, what: &Invalidation) -> Result<(), FlushError> {
        self.flushing(domain, |driver| driver.invalidate(domain, what))
    }

    fn invalidate_domain(&self, domain: DomainId) -> Result<(), FlushError> {
        self.flushing(domain, |driver| driver.invalidate_domain(domain))
    }

    fn drain_faults(&self, sink: &mut dyn FnMut(Fault)) -> u64 {
        let driver = self.read();
        let drained = driver.as_ref().map(|driver| driver.drain_faults(sink));
        drained.unwrap_or(0)
    }
}
