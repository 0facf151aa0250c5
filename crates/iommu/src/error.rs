//! Why a unit refused, or did not come to an end.

use core::fmt;
use core::time::Duration;

use iopt::{FormatId, Root};
use runs::Span;

use crate::unit::{DeviceId, DomainId};

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
    /// The root is not a multiple of 4096, or beyond the unit's addresses.
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
