//! A virtio device on PCI, as a driver without a guest reaches it: features, configuration, queues.
//!
//! Only modern devices: their registers lie where capabilities of PCI say. What lies in the queues is
//! memory of the machine, and the driver's.
//!
//! # Protocol
//!
//! The device is reset by status 0 and is so when it reads as 0; then a driver says what it is, in
//! steps (VIRTIO 1.3, 3.1.1). A queue is selected, described, and enabled at last (4.1.5.1.3).
//!
//! Source: Virtual I/O Device (VIRTIO) 1.3, section 4.1 "Virtio Over PCI Bus".

use std::{
    thread,
    time::{Duration, Instant},
};

use crate::{
    Error as MachineError, Machine,
    pci::{self, Address, BarKind},
};

/// The vendor of all of them, as [`pci::Function`] names it.
pub const VENDOR: u16 = 0x1af4;
/// The identification of a modern device is this and the number of its type (4.1.2); a transitional
/// balloon has [`TRANSITIONAL_BALLOON`].
pub const MODERN: u16 = 0x1040;
/// A balloon that also serves legacy drivers.
pub const TRANSITIONAL_BALLOON: u16 = 0x1002;

/// Status (2.1): the device was found.
pub const ACKNOWLEDGE: u8 = 1;
/// Status: there is a driver for it.
pub const DRIVER: u8 = 2;
/// Status: the driver is ready.
pub const DRIVER_OK: u8 = 4;
/// Status: features are agreed upon.
pub const FEATURES_OK: u8 = 8;
/// Status: the device must be reset.
pub const NEEDS_RESET: u8 = 64;

/// Pointer to the first capability (PCI Local Bus Specification 3.0, 6.7), and a vendor's own.
const CAPABILITIES: u16 = 0x34;
const CAPABILITY_VENDOR: u8 = 0x09;

// Kinds of capabilities (4.1.4).
const COMMON: u8 = 1;
const NOTIFY: u8 = 2;
const DEVICE: u8 = 4;

// Registers (4.1.4.3).
const DEVICE_FEATURE_SELECT: u64 = 0x00;
const DEVICE_FEATURE: u64 = 0x04;
const DRIVER_FEATURE_SELECT: u64 = 0x08;
const DRIVER_FEATURE: u64 = 0x0c;
const NUM_QUEUES: u64 = 0x12;
const STATUS: u64 = 0x14;
const CONFIG_GENERATION: u64 = 0x15;
const QUEUE_SELECT: u64 = 0x16;
const QUEUE_SIZE: u64 = 0x18;
const QUEUE_ENABLE: u64 = 0x1c;
const QUEUE_NOTIFY_OFF: u64 = 0x1e;
const QUEUE_DESC: u64 = 0x20;
const QUEUE_DRIVER: u64 = 0x28;
const QUEUE_DEVICE: u64 = 0x30;

/// How long a reset may take.
const PATIENCE: Duration = Duration::from_secs(10);

/// Why the device did not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The machine's command failed.
    #[error(transparent)]
    Machine(#[from] MachineError),
    /// Its configuration space was not to be had.
    #[error(transparent)]
    Pci(#[from] pci::Error),
    /// The function has no such capability, or none in memory: it is no modern device.
    #[error("{address} has no virtio capability of kind {kind} in memory")]
    Capability {
        /// The function.
        address: Address,
        /// The kind (4.1.4).
        kind: u8,
    },
    /// It stays as it was.
    #[error("the device is not reset within {PATIENCE:?}: status {status:#x}")]
    Endless {
        /// Its status.
        status: u8,
    },
}

/// The device.
#[derive(Clone, Copy, Debug)]
pub struct Virtio<'a> {
    machine: &'a Machine,
    common: u64,
    notify: u64,
    /// Bytes from one queue's place for notifications to the next.
    multiplier: u64,
    device: u64,
}

impl<'a> Virtio<'a> {
    /// The device at `address`, which has got its base addresses and answers at them.
    ///
    /// # Errors
    ///
    /// [`Error::Capability`] when it is no modern device.
    pub fn new(
        machine: &'a Machine,
        config: &pci::Config<'_>,
        address: Address,
        bars: &[pci::Bar],
    ) -> Result<Self, Error> {
        let (mut places, mut multiplier) = ([None; 5], 0);
        let mut at = u16::from(config.read8(address, CAPABILITIES)?) & !3;
        // A list that goes around ends: so many capabilities fit into configuration space.
        for _ in 0..48 {
            if at == 0 {
                break;
            }
            if config.read8(address, at)? == CAPABILITY_VENDOR {
                let kind = config.read8(address, at + 3)?;
                let index = config.read8(address, at + 4)?;
                let offset = config.read32(address, at + 8)?;
                let bar = bars.iter().find(|bar| bar.index == index);
                let bar = bar.filter(|bar| matches!(bar.kind, BarKind::Memory { .. }));
                let place = places.get_mut(usize::from(kind));
                if let Some(place) = place.filter(|place| place.is_none()) {
                    *place = bar.map(|bar| bar.address + u64::from(offset));
                    if kind == NOTIFY {
                        multiplier = config.read32(address, at + 16)?.into();
                    }
                }
            }
            at = u16::from(config.read8(address, at + 1)?) & !3;
        }
        let place = |kind: u8| places[usize::from(kind)].ok_or(Error::Capability { address, kind });
        Ok(Self {
            machine,
            common: place(COMMON)?,
            notify: place(NOTIFY)?,
            multiplier,
            device: place(DEVICE)?,
        })
    }

    /// Resets it, and waits until it is.
    pub fn reset(&self) -> Result<(), Error> {
        self.machine.writeb(self.common + STATUS, 0)?;
        let begun = Instant::now();
        loop {
            let status = self.status()?;
            if status == 0 {
                return Ok(());
            }
            if begun.elapsed() > PATIENCE {
                return Err(Error::Endless { status });
            }
            thread::sleep(Duration::from_micros(100));
        }
    }

    /// Its status.
    pub fn status(&self) -> Result<u8, Error> {
        Ok(self.machine.readb(self.common + STATUS)?)
    }

    /// Adds bits to its status, and yields what it is then.
    pub fn add_status(&self, bits: u8) -> Result<u8, Error> {
        let status = self.status()?;
        self.machine.writeb(self.common + STATUS, status | bits)?;
        self.status()
    }

    /// The features 0 to 63 that it offers.
    pub fn offered(&self) -> Result<u64, Error> {
        let mut features = 0;
        for (select, shift) in [(0, 0), (1, 32)] {
            let register = self.common + DEVICE_FEATURE_SELECT;
            self.machine.writel(register, select)?;
            features |= u64::from(self.machine.readl(self.common + DEVICE_FEATURE)?) << shift;
        }
        Ok(features)
    }

    /// Accepts features; whether the device agrees, its [status](Self::status) tells.
    pub fn accept(&self, features: u64) -> Result<(), Error> {
        for (select, shift) in [(0, 0), (1, 32)] {
            let register = self.common + DRIVER_FEATURE_SELECT;
            self.machine.writel(register, select)?;
            let half = (features >> shift) as u32;
            self.machine.writel(self.common + DRIVER_FEATURE, half)?;
        }
        Ok(())
    }

    /// The most entries of a queue; 0 where there is none.
    pub fn queue_size(&self, queue: u16) -> Result<u16, Error> {
        if queue >= self.machine.readw(self.common + NUM_QUEUES)? {
            return Ok(0);
        }
        self.machine.writew(self.common + QUEUE_SELECT, queue)?;
        Ok(self.machine.readw(self.common + QUEUE_SIZE)?)
    }

    /// Enables a queue of `size` entries: its descriptors, the driver's ring and the device's.
    pub fn enable_queue(&self, queue: u16, size: u16, addresses: [u64; 3]) -> Result<(), Error> {
        self.machine.writew(self.common + QUEUE_SELECT, queue)?;
        self.machine.writew(self.common + QUEUE_SIZE, size)?;
        let registers = [QUEUE_DESC, QUEUE_DRIVER, QUEUE_DEVICE];
        for (register, address) in registers.into_iter().zip(addresses) {
            let at = self.common + register;
            self.machine.writel(at, address as u32)?;
            self.machine.writel(at + 4, (address >> 32) as u32)?;
        }
        Ok(self.machine.writew(self.common + QUEUE_ENABLE, 1)?)
    }

    /// Tells it that something waits in a queue.
    pub fn notify(&self, queue: u16) -> Result<(), Error> {
        self.machine.writew(self.common + QUEUE_SELECT, queue)?;
        let offset = self.machine.readw(self.common + QUEUE_NOTIFY_OFF)?;
        let place = self.notify + u64::from(offset) * self.multiplier;
        Ok(self.machine.writew(place, queue)?)
    }

    /// The generation of its type's own configuration: another one after each change of which it told.
    pub fn generation(&self) -> Result<u8, Error> {
        Ok(self.machine.readb(self.common + CONFIG_GENERATION)?)
    }

    /// Reads a field of its type's own configuration.
    pub fn read_config(&self, offset: u16) -> Result<u32, Error> {
        Ok(self.machine.readl(self.device + u64::from(offset))?)
    }

    /// Writes one.
    pub fn write_config(&self, offset: u16, value: u32) -> Result<(), Error> {
        Ok(self
            .machine
            .writel(self.device + u64::from(offset), value)?)
    }
}
