//! The seam between builders of tables and the units that walk them.

use core::fmt;

use iopt::{Invalidation, Root};
use runs::{Iova, Span};

use crate::capabilities::UnitCapabilities;
use crate::error::{FlushError, UnitAttachError};
use crate::fault::Fault;

/// A unit that translates for devices.
///
/// # Order
///
/// Taking something away from a device has one order, and each step waits for the one before:
///
/// 1. **store**: the entries are emptied in the table;
/// 2. **invalidate**: the unit receives what to invalidate, by [`invalidate`](Self::invalidate), which
///    makes the stores visible to the unit before it begins;
/// 3. **wait**: `invalidate` returns when every access that could have used the old entries is
///    over, not earlier;
/// 4. **reuse**: only now memory is unpinned and table pages are used for something else.
///
/// Giving something to a device needs only the stores. Where the unit remembers what was not present, or buffers stores
/// ([`UnitCapabilities::caches_not_present`]), [`invalidate`](Self::invalidate) of
/// [`Invalidation::mapped`] for the mapped range follows them.
///
/// An error from step 2 or 3 means that step 4 must not happen: the gather is kept and flushed
/// again.
pub trait Unit: Send + Sync {
    /// Returns the unit's capabilities, which do not change.
    fn capabilities(&self) -> UnitCapabilities;

    /// The memory node to which the unit belongs, if that is known: tables are best placed there.
    fn node(&self) -> Option<NodeId>;

    /// Hands the stretches of device addresses to `sink` that `device` cannot translate, for instance
    /// those of message-signalled interrupts.
    fn reserved(&self, device: DeviceId, sink: &mut dyn FnMut(Span<Iova>)) {
        let _ = (device, sink);
    }

    /// Lets `device` translate through the table at `root`, as a member of `domain`.
    ///
    /// A domain is what cached translations are tagged with, so all devices of a domain on one unit
    /// share one root. A device that is attached is never attached over: it is detached first, and
    /// there is a moment in which it has no translation. Until its first attach, and from a detach
    /// on, everything that a device does faults.
    ///
    /// It is for requests without a PASID. Where devices can use PASIDs, the units of Intel, AMD and RISC-V look
    /// these up as PASID 0, so that it is for requests that carry PASID 0 too; Arm's SMMUv3 blocks those.
    fn attach(&self, device: DeviceId, domain: DomainId, root: Root)
    -> Result<(), UnitAttachError>;

    /// Takes the translation away from `device`.
    ///
    /// When it returns, no access of the device through the old table is under way, and none will
    /// come; when it was the last of its domain, nothing of the domain is cached any more and the
    /// domain's number and tables may be used for something else.
    ///
    /// After [`UnitAttachError::TimedOut`] or [`UnitAttachError::Unit`] the device has no translation, but an
    /// access may still be under way: the device counts as attached until a second `detach`
    /// succeeds.
    fn detach(&self, device: DeviceId) -> Result<(), UnitAttachError>;

    /// Lets requests of `device` that carry `pasid` translate through the table at `root`, as a member
    /// of `domain`: the same as [`attach`](Self::attach), which is for requests without a PASID, for one
    /// more address space of the device.
    ///
    /// PASID 0 is what units look up for requests without one, so it is refused, as is one beyond
    /// [`UnitCapabilities::pasid_bits`]. A device can have address spaces by PASID and be attached or not.
    fn attach_pasid(
        &self,
        device: DeviceId,
        pasid: Pasid,
        domain: DomainId,
        root: Root,
    ) -> Result<(), UnitAttachError> {
        let _ = (domain, root);
        let bits = self.capabilities().pasid_bits;
        Err(UnitAttachError::Pasid {
            device,
            pasid,
            bits,
        })
    }

    /// Takes the translation away from requests of `device` that carry `pasid`, with the promise of
    /// [`detach`](Self::detach).
    fn detach_pasid(&self, device: DeviceId, pasid: Pasid) -> Result<(), UnitAttachError> {
        let bits = self.capabilities().pasid_bits;
        Err(UnitAttachError::Pasid {
            device,
            pasid,
            bits,
        })
    }

    /// Says whether `device` has a TLB of its own that is switched on (PCI Express Base Specification,
    /// chapter 10 "ATS Specification"); until then it has none. From the next attach on its translation
    /// requests are answered, and what a flush invalidates is invalidated in its TLB too, behind the unit.
    ///
    /// It is said while nothing of the device is attached, and taken back when its TLB is off again.
    fn set_device_tlb(
        &self,
        device: DeviceId,
        tlb: Option<DeviceTlb>,
    ) -> Result<(), UnitAttachError> {
        match tlb {
            None => Ok(()),
            Some(_) => Err(UnitAttachError::NoDeviceTlbs { device }),
        }
    }

    /// Invalidates what `what` names in `domain`: translations that overlap its ranges and come from
    /// its leaf levels and, if tables were unlinked, the domain's cached tables.
    ///
    /// If it names a [new root](Invalidation::new_root), the domain's devices translate through that
    /// one from now on, and everything about the domain is invalidated.
    ///
    /// When it returns, no access uses one of them, or a table that was unlinked before the call.
    /// The wait is bounded. A domain without devices has nothing to invalidate.
    fn invalidate(&self, domain: DomainId, what: &Invalidation) -> Result<(), FlushError>;

    /// Invalidates everything about `domain`, with the same promise as
    /// [`invalidate`](Self::invalidate).
    fn invalidate_domain(&self, domain: DomainId) -> Result<(), FlushError>;

    /// Hands the recorded faults to `sink`, oldest first, and returns how many were lost since the
    /// last call because there was no room for them: at least so many, where a unit notes only that
    /// it has lost some.
    ///
    /// `sink` is called without the driver's lock, so it may flush.
    fn drain_faults(&self, sink: &mut dyn FnMut(Fault)) -> u64;
}

/// A device as a unit knows it: its requester id.
///
/// For PCI the bits are `segment << 16 | bus << 8 | device << 3 | function`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceId(pub u32);

impl DeviceId {
    /// The PCI function `bus:device.function` of segment 0. A device is taken modulo 32 and a
    /// function modulo 8.
    pub const fn pci(bus: u8, device: u8, function: u8) -> Self {
        Self((bus as u32) << 8 | (device as u32 & 0x1f) << 3 | function as u32 & 7)
    }

    /// Refuses a device of another segment than its unit.
    pub(crate) const fn check_segment(self, segment: u16) -> Result<(), UnitAttachError> {
        if self.0 >> 16 != segment as u32 {
            let device = self;
            return Err(UnitAttachError::Elsewhere { device, segment });
        }
        Ok(())
    }
}

/// `00:05.0`, and `0001:00:05.0` outside of segment 0.
impl fmt::Display for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 >> 16 != 0 {
            write!(f, "{:04x}:", self.0 >> 16)?;
        }
        write!(
            f,
            "{:02x}:{:02x}.{}",
            self.0 >> 8 & 0xff,
            self.0 >> 3 & 0x1f,
            self.0 & 7
        )
    }
}

/// Number of a domain, with which a unit tags cached translations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DomainId(pub u32);

impl fmt::Display for DomainId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A process address space of a device, which the PASID prefix of a request names. At most 20 bits.
///
/// AMD, Arm and RISC-V have their own names for it: PASID, substream id, process id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Pasid(pub u32);

impl fmt::Display for Pasid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A TLB in a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceTlb {
    /// How many invalidations the device takes before it answers the first (its ATS Capability
    /// Register, Invalidate Queue Depth: 1 to 31, and 0 for 32).
    pub queue_depth: u8,
}

/// A memory node, by the operating system's number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId(pub u32);

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
