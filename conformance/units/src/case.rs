//! A unit that translates, and what a check does with it.

use anyhow::{Context as _, ensure};
use iommu::{CommandCounters, DeviceId, DomainId, Fault, FlushError, Registers};
use iopt::{Gather, Invalidation, walk::Access};
use runs::{Iova, Span};

use crate::{At, DEVICES, Denied, LONGEST, Rig, Seen, drivers::Live, tables::Tables};

/// A unit that translates, with the driver that has made it do so.
pub(crate) struct Case<'r> {
    rig: &'r Rig,
    driver: Box<dyn Live + 'r>,
}

impl<'r> Case<'r> {
    /// Enables the unit.
    pub(crate) fn new(rig: &'r Rig) -> anyhow::Result<Self> {
        Self::over(rig, rig.registers())
    }

    /// The same over registers that do more.
    pub(crate) fn over(
        rig: &'r Rig,
        registers: impl Registers + Send + Sync + 'r,
    ) -> anyhow::Result<Self> {
        let driver = rig.driver(registers, rig.structures(), None)?;
        driver.enable()?;
        Ok(Self { rig, driver })
    }

    /// A driver that has taken the unit over.
    pub(crate) fn adopted(rig: &'r Rig, driver: Box<dyn Live + 'r>) -> Self {
        Self { rig, driver }
    }

    /// The driver itself.
    pub(crate) fn into_driver(self) -> Box<dyn Live + 'r> {
        self.driver
    }

    /// The driver.
    pub(crate) fn driver(&self) -> &dyn Live {
        &*self.driver
    }

    /// An empty table of the rig's kind, with all leaves that the unit offers.
    pub(crate) fn table(&self) -> anyhow::Result<Tables> {
        let format = self.rig.kind().format;
        let support = self.driver.capabilities().format(format);
        let support = support.with_context(|| format!("the unit does not offer {format}"))?;
        Ok(Tables::new(self.rig, support.page_sizes)?)
    }

    /// Gives a device the table.
    pub(crate) fn attach(&self, device: usize, domain: u32, table: &Tables) -> anyhow::Result<()> {
        let domain = DomainId(domain);
        Ok(self.driver.attach(id(device), domain, table.root())?)
    }

    /// Takes the table away.
    pub(crate) fn detach(&self, device: usize) -> anyhow::Result<()> {
        Ok(self.driver.detach(id(device))?)
    }

    /// Flushes, as a table's operations ask for it.
    pub(crate) fn invalidate(&self, domain: u32, what: &Invalidation) -> Result<(), FlushError> {
        self.driver.invalidate(DomainId(domain), what)
    }

    /// Unmaps, flushes and reclaims.
    pub(crate) fn unmap(
        &self,
        table: &mut Tables,
        range: Span<Iova>,
        domain: u32,
    ) -> anyhow::Result<()> {
        let mut gather = Gather::new();
        table.unmap(range, &mut gather)?;
        self.flush(table, &mut gather, domain)
    }

    /// Flushes and reclaims, with one wait.
    pub(crate) fn flush(
        &self,
        table: &mut Tables,
        gather: &mut Gather,
        domain: u32,
    ) -> anyhow::Result<()> {
        let before = self.counters();
        let flushed = gather.flush_with(|what| self.invalidate(domain, what))?;
        let waits = self.counters().waits - before.waits;
        ensure!(waits <= 1, "{waits} waits in one gather");
        table.reclaim(flushed);
        Ok(())
    }

    /// Commands to the unit so far.
    pub(crate) fn counters(&self) -> CommandCounters {
        self.driver.counters()
    }

    /// Has a device copy as much as it can.
    pub(crate) fn copy(
        &self,
        device: usize,
        from: At,
        to: At,
        expected: Seen,
    ) -> anyhow::Result<()> {
        let seen = self.rig.copy(device, from, to, LONGEST)?;
        ensure!(
            seen == expected,
            "device {device}, {from:x?} to {to:x?}: {seen:?}, not {expected:?}"
        );
        Ok(())
    }

    /// The same, where the device cannot read and does not learn of it: what it writes is anything but
    /// what it was to read.
    pub(crate) fn not_copied(&self, device: usize, from: At, to: At) -> anyhow::Result<()> {
        let seen = self.rig.copy(device, from, to, LONGEST)?;
        ensure!(
            seen != Seen::Copied,
            "device {device}, {from:x?} to {to:x?}: {seen:?}"
        );
        Ok(())
    }

    /// The same through a table, of which the leaves are noted; the copy arrives.
    pub(crate) fn copy_by(
        &self,
        table: &Tables,
        device: usize,
        from: At,
        to: At,
    ) -> anyhow::Result<()> {
        self.copy(device, from, to, Seen::Copied)?;
        let leaves = [from, to].map(|at| table.leaf_at(at.iova));
        self.rig
            .note(leaves.into_iter().flatten().map(|leaf| leaf.run.len));
        Ok(())
    }

    /// Recorded faults.
    pub(crate) fn faults(&self) -> Vec<Fault> {
        let mut faults = Vec::new();
        self.driver.drain_faults(&mut |fault| faults.push(fault));
        faults
    }

    /// Nothing is mapped there: all faults that are recorded say so, and there is one. Yields them.
    pub(crate) fn fault(
        &self,
        device: usize,
        iova: u64,
        access: Access,
    ) -> anyhow::Result<Vec<Fault>> {
        self.recorded(device, iova, access, true)
    }

    /// The same where a leaf does not allow it, which may be cached.
    pub(crate) fn denied(
        &self,
        device: usize,
        iova: u64,
        access: Access,
        cached: bool,
    ) -> anyhow::Result<Vec<Fault>> {
        let told = match self.rig.unit().tells().denied {
            Denied::Recorded => true,
            Denied::RecordedUncached => !cached,
        };
        self.recorded(device, iova, access, told)
    }

    fn recorded(
        &self,
        device: usize,
        iova: u64,
        access: Access,
        told: bool,
    ) -> anyhow::Result<Vec<Fault>> {
        let (faults, tells) = (self.faults(), self.rig.unit().tells());
        ensure!(
            !faults.is_empty() || !told,
            "no fault for {access} of {iova:#x}"
        );
        let page = iova & !0xfff;
        for fault in &faults {
            ensure!(
                fault.device == id(device)
                    && (!tells.address || fault.iova & !0xfff == page)
                    && (!tells.access || fault.access == Some(access)),
                "device {device}, {access} of {iova:#x}: {fault}"
            );
        }
        Ok(faults)
    }

    /// The unit translates no more; nothing is left over.
    pub(crate) fn end(self) -> anyhow::Result<()> {
        let mut faults = Vec::new();
        let lost = self.driver.drain_faults(&mut |fault| faults.push(fault));
        ensure!(faults.is_empty() && lost == 0, "{lost} lost, {faults:?}");
        self.driver.disable()?;
        self.rig.finish()
    }
}

/// A device as units know it.
pub(crate) fn id(device: usize) -> DeviceId {
    DeviceId(DEVICES[device].requester_id().into())
}
