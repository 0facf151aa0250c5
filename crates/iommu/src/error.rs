//! Why a unit refused, or did not come to an end.

use core::fmt;
use core::time::Duration;

use iopt::{FormatId, NoTables, Root};
use runs::Span;

use crate::unit::{DeviceId, DomainId, Pasid};

/// Why a device was not attached or detached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum AttachError {
    /// The device is attached already; it must be detached first.
    AlreadyAttached {
        /// The device.
        device: DeviceId,
        /// Where it is.
        domain: DomainId,
    },
    /// The device is not attached.
    NotAttached {
        /// The device.
        device: DeviceId,
    },
    /// The unit does not walk this format.
    Format {
        /// The format.
        format: FormatId,
    },
    /// The unit does not walk tables of so many levels.
    Levels {
        /// The format.
        format: FormatId,
        /// The levels asked for.
        levels: u8,
        /// What it walks: bit *n* for *n* levels.
        offered: u16,
    },
    /// The root is not a multiple of its size and of 4096, or beyond the unit's addresses.
    RootAddress {
        /// Its address.
        address: u64,
        /// Bits of the unit's addresses.
        bits: u32,
    },
    /// The domain's number is beyond what the unit's tags hold.
    DomainId {
        /// The domain.
        domain: DomainId,
        /// Bits of a domain's number.
        bits: u32,
    },
    /// Other devices of the domain translate through another table.
    OtherRoot {
        /// The domain.
        domain: DomainId,
        /// The table that it has on this unit.
        there: Root,
        /// The table that was asked for.
        asked: Root,
    },
    /// Accesses of the device were still under way when the time was over.
    TimedOut {
        /// The device.
        device: DeviceId,
        /// How many of its ports were busy.
        busy: u32,
        /// How long the unit has waited.
        waited: Duration,
    },
    /// The device is not one of those behind this unit, by its segment.
    Elsewhere {
        /// The device.
        device: DeviceId,
        /// The unit's segment.
        segment: u16,
    },
    /// The unit was set up for devices up to a lower one.
    Beyond {
        /// The device.
        device: DeviceId,
        /// The highest requester id, without the segment.
        last: u32,
    },
    /// The unit keeps this domain for itself (VT-d's caching mode; SMMUv3's stage 1 keeps a VMID).
    ReservedDomain {
        /// The domain.
        domain: DomainId,
    },
    /// The PASID is 0, or beyond what the unit was set up for.
    Pasid {
        /// The device.
        device: DeviceId,
        /// The PASID.
        pasid: Pasid,
        /// Bits of a PASID; 0 where there are none.
        bits: u32,
    },
    /// Requests with a PASID go through stage 1, and those without cannot go through stage 2 beside them.
    OtherStage {
        /// The device.
        device: DeviceId,
    },
    /// The unit does not answer translation requests of the device.
    NoDeviceTlbs {
        /// The device.
        device: DeviceId,
    },
    /// What the unit would need for it is all in use.
    NoRoom {
        /// The device.
        device: DeviceId,
        /// What that is, in the specification's names.
        what: &'static str,
        /// How many of them there are.
        available: u32,
    },
    /// There is no memory for the structures in which the unit looks the device up.
    Memory {
        /// The device.
        device: DeviceId,
        /// Why not.
        cause: NoTables,
    },
    /// The unit has not done what it was told.
    ///
    /// The device has no translation, but counts as attached until a `detach` succeeds.
    Unit {
        /// The device.
        device: DeviceId,
        /// What went wrong.
        cause: UnitError,
    },
}

impl fmt::Display for AttachError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AlreadyAttached { device, domain } => {
                write!(f, "{device} is attached to domain {domain} already")
            }
            Self::NotAttached { device } => write!(f, "{device} is not attached"),
            Self::Format { format } => write!(f, "the unit does not walk {format} tables"),
            Self::Levels {
                format,
                levels,
                offered,
            } => {
                write!(
                    f,
                    "the unit walks no {format} tables of {levels} levels, only of"
                )?;
                let mut separator = ' ';
                for n in (0..16).filter(|n| offered >> n & 1 == 1) {
                    write!(f, "{separator}{n}")?;
                    separator = '/';
                }
                Ok(())
            }
            Self::RootAddress { address, bits } => {
                write!(
                    f,
                    "the root {address:#x} is not a page's address of {bits} bits"
                )
            }
            Self::DomainId { domain, bits } => {
                write!(f, "domain {domain} does not fit in the unit's {bits} bits")
            }
            Self::OtherRoot {
                domain,
                there,
                asked,
            } => write!(
                f,
                "domain {domain} has the root {:#x} ({}, {} levels) on this unit, not {:#x} ({}, \
                 {} levels)",
                there.address,
                there.format,
                there.levels,
                asked.address,
                asked.format,
                asked.levels
            ),
            Self::Elsewhere { device, segment } => {
                write!(f, "{device} is not in the unit's segment {segment:04x}")
            }
            Self::Beyond { device, last } => {
                write!(
                    f,
                    "{device} is beyond {}, the last in the unit's table",
                    DeviceId(*last)
                )
            }
            Self::Pasid {
                device,
                pasid,
                bits: 0,
            } => write!(f, "{device}: PASID {pasid}, but the unit takes none"),
            Self::Pasid {
                device,
                pasid,
                bits,
            } => write!(
                f,
                "{device}: PASID {pasid} is not between 1 and the last of {bits} bits"
            ),
            Self::OtherStage { device } => {
                write!(f, "{device} is attached through another stage")
            }
            Self::NoDeviceTlbs { device } => {
                write!(f, "the unit does not serve a TLB in {device}")
            }
            Self::ReservedDomain { domain } => {
                write!(f, "the unit keeps domain {domain} for itself")
            }
            Self::NoRoom {
                device,
                what,
                available,
            } => write!(f, "{device}: all {available} {what} are in use"),
            Self::Memory { device, cause } => write!(f, "{device}: {cause}"),
            Self::Unit { device, cause } => write!(f, "{device}: {cause}"),
            Self::TimedOut {
                device,
                busy,
                waited,
            } => write!(
                f,
                "{device} still had an access under way on {busy} ports after {} ms",
                waited.as_millis()
            ),
        }
    }
}

impl core::error::Error for AttachError {}

/// Why a flush did not come to an end. Nothing that it covers may be reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum FlushError {
    /// Accesses that began before the flush were still under way when the time was over.
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
    /// Somebody in this process still uses a translation.
    Held {
        /// The device addresses that were to be forgotten.
        range: Span,
        /// How long the flush has waited.
        waited: Duration,
    },
    /// The table has grown to a root that the unit cannot walk. The old one is in use still.
    Root {
        /// The domain.
        domain: DomainId,
        /// Why not.
        cause: AttachError,
    },
    /// The unit has not done what it was told.
    Unit {
        /// The domain.
        domain: DomainId,
        /// What went wrong.
        cause: UnitError,
    },
}

impl fmt::Display for FlushError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Held { range, waited } => write!(
                f,
                "flush of {range}: after {} ms somebody still used a translation of it",
                waited.as_millis()
            ),
            Self::Root { domain, cause } => write!(f, "the new root of domain {domain}: {cause}"),
            Self::Unit { domain, cause } => write!(f, "flush of domain {domain}: {cause}"),
            Self::TimedOut {
                domain,
                device,
                busy,
                waited,
            } => write!(
                f,
                "flush of domain {domain}: after {} ms {busy} ports still had an access under way \
                 that began before it, first {device}",
                waited.as_millis()
            ),
        }
    }
}

impl core::error::Error for FlushError {}

/// What went wrong between a driver and its unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum UnitError {
    /// The unit has not answered.
    TimedOut {
        /// What the driver waited for, in the specification's names.
        awaited: &'static str,
        /// How often it has called [`Registers::wait`](crate::Registers::wait).
        rounds: u32,
    },
    /// The unit has not taken earlier commands from its queue, and there is no room for more.
    QueueFull {
        /// Places needed.
        needed: u32,
        /// Places free.
        free: u32,
    },
    /// The unit has stopped at a command, or has lost one. All commands that were under way are to
    /// be repeated.
    Command {
        /// The error, in the specification's name.
        error: &'static str,
        /// The first two words of the command at which the queue stood.
        command: [u64; 2],
        /// What the unit says about the cause, as it stands in its register; 0 where it says nothing.
        record: u64,
    },
    /// A device has not invalidated what its TLB holds. The commands are to be repeated.
    DeviceTimedOut {
        /// The device.
        device: DeviceId,
    },
    /// The unit has refused a command that was given through registers.
    Refused {
        /// The register.
        register: &'static str,
        /// What it holds.
        value: u64,
    },
}

impl fmt::Display for UnitError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TimedOut { awaited, rounds } => {
                write!(f, "the unit has not come to {awaited} in {rounds} rounds")
            }
            Self::QueueFull { needed, free } => write!(
                f,
                "the unit does not take commands: {needed} places needed, {free} free"
            ),
            Self::Command {
                error,
                command: [low, high],
                record,
            } => write!(
                f,
                "the unit reports {error} at the command {low:#x} {high:#x} (record {record:#x})"
            ),
            Self::DeviceTimedOut { device } => {
                write!(f, "{device} has not invalidated its translations in time")
            }
            Self::Refused { register, value } => {
                write!(
                    f,
                    "the unit has refused a command: {register} is {value:#x}"
                )
            }
        }
    }
}

impl core::error::Error for UnitError {}
