//! Refusals of a unit, and operations that it did not complete.

use core::fmt;
use core::time::Duration;

use iopt::{FormatId, NoTables, Root};
use runs::{Iova, Span};

use crate::unit::{DeviceId, DomainId, Pasid};

/// Why a device was not attached or detached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum UnitAttachError {
    /// The device is attached already; it must be detached first.
    #[error("{device} is attached to domain {domain} already")]
    AlreadyAttached {
        /// The device.
        device: DeviceId,
        /// Where it is.
        domain: DomainId,
    },
    /// The device is not attached.
    #[error("{device} is not attached")]
    NotAttached {
        /// The device.
        device: DeviceId,
    },
    /// The unit does not walk this format.
    #[error("the unit does not walk {format} tables")]
    Format {
        /// The format.
        format: FormatId,
    },
    /// The unit does not walk tables of so many levels.
    #[error("the unit walks no {format} tables of {levels} levels, only of{}", Levels(*.offered))]
    Levels {
        /// The format.
        format: FormatId,
        /// The levels asked for.
        levels: u8,
        /// Levels that it walks: bit *n* for *n* levels.
        offered: u16,
    },
    /// The root is not a multiple of its size and of 4096, or beyond the unit's addresses.
    #[error("the root {address:#x} is not a page's address of {bits} bits")]
    RootAddress {
        /// Its address.
        address: u64,
        /// Bits of the unit's addresses.
        bits: u32,
    },
    /// The domain's number is beyond what the unit's tags hold.
    #[error("domain {domain} does not fit in the unit's {bits} bits")]
    DomainId {
        /// The domain.
        domain: DomainId,
        /// Bits of a domain's number.
        bits: u32,
    },
    /// Other devices of the domain translate through another table.
    #[error("domain {domain} has the root {} on this unit, not {}", Table(.there), Table(.asked))]
    OtherRoot {
        /// The domain.
        domain: DomainId,
        /// The table that it has on this unit.
        there: Root,
        /// The table that was asked for.
        asked: Root,
    },
    /// Accesses of the device were still under way when the time was over.
    #[error("{device} still had an access under way on {busy} ports after {} ms", .waited.as_millis())]
    TimedOut {
        /// The device.
        device: DeviceId,
        /// How many of its ports were busy.
        busy: u32,
        /// How long the unit has waited.
        waited: Duration,
    },
    /// The device is not one of those behind this unit, by its segment.
    #[error("{device} is not in the unit's segment {segment:04x}")]
    Elsewhere {
        /// The device.
        device: DeviceId,
        /// The unit's segment.
        segment: u16,
    },
    /// The unit was set up for devices up to a lower one.
    #[error("{device} is beyond {}, the last in the unit's table", DeviceId(*.last))]
    Beyond {
        /// The device.
        device: DeviceId,
        /// The highest requester id, without the segment.
        last: u32,
    },
    /// The unit keeps this domain for itself (VT-d's caching mode; SMMUv3's stage 1 keeps a VMID).
    #[error("the unit keeps domain {domain} for itself")]
    ReservedDomain {
        /// The domain.
        domain: DomainId,
    },
    /// The PASID is 0, or beyond what the unit was set up for.
    #[error("{device}: PASID {pasid}{}", Pasids(*.bits))]
    Pasid {
        /// The device.
        device: DeviceId,
        /// The PASID.
        pasid: Pasid,
        /// Bits of a PASID; 0 where there are none.
        bits: u32,
    },
    /// Requests with a PASID go through stage 1, and those without cannot go through stage 2 beside them.
    #[error("{device} is attached through another stage")]
    OtherStage {
        /// The device.
        device: DeviceId,
    },
    /// The unit does not answer translation requests of the device.
    #[error("the unit does not serve a TLB in {device}")]
    NoDeviceTlbs {
        /// The device.
        device: DeviceId,
    },
    /// A resource that the unit needs for it is used up.
    #[error("{device}: all {available} {what} are in use")]
    NoRoom {
        /// The device.
        device: DeviceId,
        /// The resource, in the specification's names.
        what: &'static str,
        /// How many of them there are.
        available: u32,
    },
    /// There is no memory for the structures in which the unit looks the device up.
    #[error("{device}: {cause}")]
    NoTables {
        /// The device.
        device: DeviceId,
        /// Bytes that it takes, and that there are.
        cause: NoTables,
    },
    /// The table memory broke its contract: it did not give all cells of a structure in which the unit looks the device
    /// up ([`TableMemory::entries`](iopt::TableMemory::entries)).
    #[error(
        "{device}: the table memory broke its contract: it did not give all cells of the structure at {address:#x}"
    )]
    Cells {
        /// The device.
        device: DeviceId,
        /// Where the structure lies.
        address: u64,
    },
    /// The unit has not done what it was commanded.
    ///
    /// The device has no translation, but counts as attached until a `detach` succeeds.
    #[error("{device}: {cause}")]
    Unit {
        /// The device.
        device: DeviceId,
        /// The cause.
        cause: UnitError,
    },
}

/// Why there is no place for an entry.
#[derive(Clone, Copy, Debug)]
pub(crate) enum NoPlace {
    NoTables(NoTables),
    /// The memory gives fewer cells than the structure at this address has.
    Cells(u64),
}

impl From<NoTables> for NoPlace {
    fn from(cause: NoTables) -> Self {
        Self::NoTables(cause)
    }
}

impl NoPlace {
    pub(crate) const fn of(self, device: DeviceId) -> UnitAttachError {
        match self {
            Self::NoTables(cause) => UnitAttachError::NoTables { device, cause },
            Self::Cells(address) => UnitAttachError::Cells { device, address },
        }
    }
}

/// Numbers of levels, from a bit for each.
struct Levels(u16);

impl fmt::Display for Levels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut separator = ' ';
        for n in (0..16).filter(|n| self.0 >> n & 1 == 1) {
            write!(f, "{separator}{n}")?;
            separator = '/';
        }
        Ok(())
    }
}

/// Why a PASID is refused, by the bits that one may have.
struct Pasids(u32);

impl fmt::Display for Pasids {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            0 => f.write_str(", but the unit supports none"),
            bits => write!(f, " is not between 1 and the last of {bits} bits"),
        }
    }
}

/// A root with its shape.
struct Table<'r>(&'r Root);

impl fmt::Display for Table<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Root {
            format,
            address,
            levels,
        } = self.0;
        write!(f, "{address:#x} ({format}, {levels} levels)")
    }
}

/// Reason why a flush did not complete. Nothing that it covers may be reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FlushError {
    /// Accesses that began before the flush were still under way when the time was over.
    #[error("flush of domain {domain}: after {} ms {busy} ports still had an access under way that began before it, first {device}", .waited.as_millis())]
    TimedOut {
        /// The domain.
        domain: DomainId,
        /// The first device that was busy.
        device: DeviceId,
        /// How many ports were busy in all.
        busy: u32,
        /// How long the unit has waited.
        waited: Duration,
    },
    /// A thread of this process still uses a translation.
    #[error("flush of {range}: a translation was still in use after {} ms", .waited.as_millis())]
    Held {
        /// The device addresses that were to be invalidated.
        range: Span<Iova>,
        /// How long the flush has waited.
        waited: Duration,
    },
    /// The table has grown to a root that the unit cannot walk. The old one is in use still.
    #[error("the new root of domain {domain}: {cause}")]
    Root {
        /// The domain.
        domain: DomainId,
        /// Why not.
        cause: UnitAttachError,
    },
    /// The unit has not done what it was commanded.
    #[error("flush of domain {domain}: {cause}")]
    Unit {
        /// The domain.
        domain: DomainId,
        /// The cause.
        cause: UnitError,
    },
}

/// Error between a driver and its unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum UnitError {
    /// The unit has not answered.
    #[error("the unit has not come to {awaited} in {rounds} rounds")]
    TimedOut {
        /// State that the driver waited for, in the specification's names.
        awaited: &'static str,
        /// How often it has called [`Registers::wait`](crate::Registers::wait).
        rounds: u32,
    },
    /// The unit has not taken earlier commands from its queue, and there is no room for more.
    #[error("the unit does not consume commands: {needed} places needed, {free} free")]
    QueueFull {
        /// Places needed.
        needed: u32,
        /// Places free.
        free: u32,
    },
    /// The unit has stopped at a command, or has lost one. All commands that were under way are to
    /// be repeated.
    #[error("the unit reports {error} at the command {:#x} {:#x} (record {record:#x})", .command[0], .command[1])]
    Command {
        /// The error, in the specification's name.
        error: &'static str,
        /// The first two words of the command at which the queue stood.
        command: [u64; 2],
        /// The unit's record of the cause, as it stands in its register; 0 where there is none.
        record: u64,
    },
    /// A device has not invalidated what its TLB holds. The commands are to be repeated.
    #[error("{device} has not invalidated its translations in time")]
    DeviceTimedOut {
        /// The device.
        device: DeviceId,
    },
    /// The unit has refused a command that was given through registers.
    #[error("the unit has refused a command: {register} is {value:#x}")]
    Refused {
        /// The register.
        register: &'static str,
        /// Value of the register.
        value: u64,
    },
}
