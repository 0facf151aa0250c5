//! The balloon's driver as a program in the guest: memory of a process, held by pins, in a balloon
//! whose device it drives itself.
//!
//! A kernel without a driver for bulk messages, or for balloons at all, is served all the same: this
//! process takes memory, pins it so that it stays where it is, finds its physical addresses, and talks to
//! the device over PCI. What ends with the process comes back to the guest, so the device is reset
//! before that. If the process is killed, the device keeps what it was given until somebody resets it:
//! it may then discard pages that the guest uses for something else. So the device must be one that
//! discards when it is told, and never later: this is what virtio balloons do.
//!
//! Free page reporting and hinting are not accepted: what the kernel has free is not known here.

#![allow(
    unreachable_pub,
    reason = "`pub` is what other commands, tests and fuzz targets use; the crate shows none of it"
)]

mod command;
mod dma;
mod pages;
mod pci;

use std::error::Error as StdError;
use std::path::Path;
use std::time::Duration;

use hostmem::{PinKind, Pinner};
use serde::Serialize;

use crate::json::hex;
use virtio_balloon::driver::{Driver, Error as DriverError, Progress, Settings, Wire};
use virtio_balloon::{BulkBit, Features};

pub(crate) use command::{ABOUT, BalloonGuestArgs, EXAMPLES, run};
use dma::DmaMemory;
use pages::{ProcessPages, meminfo};
use pci::Function;

/// How often the device is looked after.
const TICK: Duration = Duration::from_millis(50);
/// Pieces in which memory is pinned.
const PIECE: u64 = 2 << 20;

/// A balloon to be driven from a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GuestJob {
    /// The device's address on PCI: `0000:00:08.0`.
    pub device: String,
    /// The feature bit of messages in bulk, if they are accepted.
    pub bulk: Option<BulkBit>,
    /// The largest block that is asked for in bytes, a power of two up to 2 MiB.
    pub block: u64,
    /// What the guest is left with in any case, bytes; `None`: an eighth of its memory.
    pub reserve: Option<u64>,
}

/// Something that happened. In JSON the name stands under `event`, and names of numbers end in their
/// unit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
#[non_exhaustive]
pub enum GuestEvent {
    /// The device is driven.
    Begun {
        /// What was negotiated, all 64 bits.
        #[serde(with = "hex")]
        features: u64,
        /// Messages are in bulk.
        bulk: bool,
    },
    /// Where the balloon stands, when that has changed.
    Balloon {
        /// Wanted in it.
        target_bytes: u64,
        /// In it.
        actual_bytes: u64,
        /// The guest has no more to give.
        starved: bool,
    },
    /// The device was sent statistics.
    Stats,
    /// Something did not go well, and it goes on.
    Trouble {
        /// What.
        cause: String,
    },
    /// The device was reset, and the guest has its memory back.
    Ended,
}

/// Who runs it.
pub trait GuestOperator {
    /// False when it is to end. Returns at the latest after `patience`.
    fn goes_on(&mut self, patience: Duration) -> bool;

    /// Something happened.
    fn tell(&mut self, event: &GuestEvent);
}

/// Why the balloon is not driven.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GuestError {
    /// There is no such device.
    #[error("there is no PCI device {address}")]
    NoDevice {
        /// What was asked for.
        address: String,
    },
    /// It is something else.
    #[error("{address} is no balloon: vendor {vendor:#06x}, device {device:#06x}")]
    NoBalloon {
        /// The device.
        address: String,
        /// Its vendor.
        vendor: u16,
        /// Its device identification.
        device: u16,
    },
    /// Somebody drives it already.
    #[error(
        "{address} is driven by {driver}: echo {address} > /sys/bus/pci/drivers/{driver}/unbind"
    )]
    Taken {
        /// The device.
        address: String,
        /// By whom.
        driver: String,
    },
    /// It has no registers of a modern device, or none that configuration space leads to.
    #[error("{address} has no virtio capability of kind {kind}: it is no modern device")]
    NotModern {
        /// The device.
        address: String,
        /// The kind (VIRTIO 1.3, 4.1.4).
        kind: u8,
    },
    /// Its configuration space cannot be read or written.
    #[error("the device's registers cannot be reached")]
    Registers {
        /// What the kernel said.
        #[source]
        cause: pci::Cause,
    },
    /// It does not become reset.
    #[error("the device is not reset in time: status {status:#x}")]
    Endless {
        /// Its status.
        status: u8,
    },
    /// Physical addresses are not shown to this process.
    #[error("physical addresses are shown to root only")]
    Unprivileged,
    /// Memory can be locked here, but not pinned.
    #[error("memory cannot be pinned, and locked memory may move: {why}")]
    NoPins {
        /// Why.
        why: String,
    },
    /// An address beside the memory for queues.
    #[error("{address:#x} is not in the memory for queues")]
    Outside {
        /// The address.
        address: u64,
    },
    /// Something else.
    #[error(transparent)]
    Other(Box<dyn StdError + Send + Sync>),
}

impl GuestError {
    fn other(cause: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        Self::Other(cause.into())
    }

    /// True when another device, or root, could do.
    pub const fn is_input(&self) -> bool {
        matches!(
            self,
            Self::NoDevice { .. }
                | Self::NoBalloon { .. }
                | Self::Taken { .. }
                | Self::NotModern { .. }
                | Self::Unprivileged
        )
    }
}

/// What the driver says, by the error of its seams if it is one.
fn cause(error: DriverError<GuestError>) -> GuestError {
    match error {
        DriverError::Seam(cause) => cause,
        other => GuestError::other(other.to_string()),
    }
}

type Balloon = Driver<Function, DmaMemory, ProcessPages>;

impl GuestJob {
    /// Follows the device's target until the operator ends it. Then the balloon is emptied and the
    /// device reset.
    ///
    /// # Errors
    ///
    /// [`GuestError`]. When the device does not answer any more it is reset, and the guest has its
    /// memory back; if it cannot even be reset, it may still discard what it was given.
    pub fn run(&self, operator: &mut dyn GuestOperator) -> Result<(), GuestError> {
        let mut driver = self.driver()?;
        operator.tell(&GuestEvent::Begun {
            features: driver.features().0,
            bulk: matches!(driver.wire(), Wire::Bulk(_)),
        });
        let followed = follow(&mut driver, operator);
        let ended = driver.remove().map_err(cause);
        followed?;
        ended?;
        operator.tell(&GuestEvent::Ended);
        Ok(())
    }

    fn driver(&self) -> Result<Balloon, GuestError> {
        let function = Function::open(Path::new("/sys"), &self.device)?;
        let pinner = Pinner::probe(PIECE).map_err(GuestError::other)?;
        if pinner.kind() != PinKind::IoUring {
            let why = pinner.why().unwrap_or_default().to_owned();
            return Err(GuestError::NoPins { why });
        }
        let reserve = match self.reserve {
            Some(reserve) => reserve,
            None => meminfo("MemTotal")? / 8,
        };
        let memory = DmaMemory::new(&pinner)?;
        let pages = ProcessPages::new(pinner, reserve)?;
        let defaults = Settings::default();
        let settings = Settings {
            features: defaults
                .features
                .without(Features::FREE_PAGE_HINT)
                .without(Features::PAGE_REPORTING),
            bulk: self.bulk,
            block: self.block,
            // Between two tries, who runs it may want to end.
            tries: 1,
            ..defaults
        };
        Driver::new(function, memory, pages, settings).map_err(cause)
    }
}

fn follow(driver: &mut Balloon, operator: &mut dyn GuestOperator) -> Result<(), GuestError> {
    let mut said = None;
    loop {
        let progress = driver.follow().map_err(cause)?;
        driver.pages().trim();
        let target_bytes = driver.target().map_err(cause)?;
        let now = GuestEvent::Balloon {
            target_bytes,
            actual_bytes: driver.held(),
            starved: matches!(progress, Progress::Starved { .. }),
        };
        if said.as_ref() != Some(&now) {
            operator.tell(&now);
            said = Some(now);
        }
        if let Some(cause) = driver.pages().cause.take() {
            let cause = cause.to_string();
            operator.tell(&GuestEvent::Trouble { cause });
        }
        if driver.features().contains(Features::STATS_VQ) && driver.answer_stats().map_err(cause)? {
            operator.tell(&GuestEvent::Stats);
        }
        if !operator.goes_on(TICK) {
            return Ok(());
        }
    }
}
