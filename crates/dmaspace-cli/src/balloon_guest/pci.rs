//! A virtio device on PCI, reached through its configuration space alone.
//!
//! Registers of a modern device lie in memory behind its base addresses, where capabilities say. One
//! capability is a window: a field of it says which register is meant, and another one holds what is
//! read or written there (VIRTIO 1.3, 4.1.4.9). Sysfs gives the configuration space as a file, so no
//! register is mapped into this process. It takes four system calls for a register, of which a message
//! needs one.
//!
//! # Protocol
//!
//! The kernel must have no driver for the device. Memory space and bus mastering are switched on, and as
//! they were when the device is let go, after a reset. A queue is selected, described, and enabled at
//! last (4.1.5.1.3).
//!
//! Source: Virtual I/O Device (VIRTIO) 1.3, section 4.1 "Virtio Over PCI Bus".

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use virtio_balloon::Features;
use virtio_balloon::driver::{QueueAddresses, Transport};

use super::GuestError;

/// The vendor of virtio devices, and a balloon's device identification: modern, transitional (4.1.2).
const VENDOR: u16 = 0x1af4;
const MODERN: u16 = 0x1040 + 5;
const TRANSITIONAL: u16 = 0x1002;

// PCI Local Bus Specification 3.0, 6.1, 6.2.2 and 6.7.
const COMMAND: u64 = 0x04;
const MEMORY_SPACE: u16 = 1 << 1;
const BUS_MASTER: u16 = 1 << 2;
const CAPABILITIES: u64 = 0x34;
const VENDOR_CAPABILITY: u8 = 0x09;

// Kinds of capabilities (4.1.4).
const COMMON: usize = 1;
const NOTIFY: usize = 2;
const DEVICE: usize = 4;
const WINDOW: usize = 5;

// Fields of a capability, from its beginning (4.1.4), and what is behind those of notifications
// (4.1.4.4) and of the window.
const KIND: u64 = 3;
const BAR: u64 = 4;
const OFFSET: u64 = 8;
const LENGTH: u64 = 12;
const MULTIPLIER: u64 = 16;
const DATA: u64 = 16;

// Registers (4.1.4.3).
const DEVICE_FEATURE_SELECT: u32 = 0x00;
const DEVICE_FEATURE: u32 = 0x04;
const DRIVER_FEATURE_SELECT: u32 = 0x08;
const DRIVER_FEATURE: u32 = 0x0c;
const NUM_QUEUES: u32 = 0x12;
const STATUS: u32 = 0x14;
const CONFIG_GENERATION: u32 = 0x15;
const QUEUE_SELECT: u32 = 0x16;
const QUEUE_SIZE: u32 = 0x18;
const QUEUE_ENABLE: u32 = 0x1c;
const QUEUE_NOTIFY_OFF: u32 = 0x1e;
const QUEUE_DESC: u32 = 0x20;
const QUEUE_DRIVER: u32 = 0x28;
const QUEUE_DEVICE: u32 = 0x30;

// Status (2.1).
const ACKNOWLEDGE: u8 = 1;
const DRIVER: u8 = 2;
const DRIVER_OK: u8 = 4;
const FEATURES_OK: u8 = 8;
const NEEDS_RESET: u8 = 64;

/// How long a reset may take.
const PATIENCE: Duration = Duration::from_secs(10);
/// How often an answer is looked for while the driver sleeps.
const NAP: Duration = Duration::from_micros(100);

/// Where registers lie.
#[derive(Clone, Copy, Debug)]
struct Place {
    bar: u8,
    offset: u32,
}

/// The device.
#[derive(Debug)]
pub(super) struct Function {
    config: File,
    /// The command register, as it was.
    command: u16,
    window: u64,
    common: Place,
    notify: Place,
    multiplier: u32,
    device: Place,
    begun: Instant,
}

impl Function {
    /// The balloon at `address` (`0000:00:08.0`), below the root `sys` of sysfs.
    pub(super) fn open(sys: &Path, address: &str) -> Result<Self, GuestError> {
        let named = || address.to_owned();
        let well_formed = address
            .chars()
            .all(|c| c.is_ascii_hexdigit() || matches!(c, ':' | '.'));
        let directory = sys.join("bus/pci/devices").join(address);
        if !well_formed || !directory.is_dir() {
            return Err(GuestError::NoDevice { address: named() });
        }
        let driver = fs::read_link(directory.join("driver")).ok();
        if let Some(driver) = driver.as_deref().and_then(Path::file_name) {
            return Err(GuestError::Taken {
                address: named(),
                driver: driver.to_string_lossy().into_owned(),
            });
        }
        let open = OpenOptions::new()
            .read(true)
            .write(true)
            .open(directory.join("config"));
        let config = open.map_err(|cause| GuestError::Registers { cause })?;
        let mut function = Self {
            config,
            command: 0,
            window: 0,
            common: Place { bar: 0, offset: 0 },
            notify: Place { bar: 0, offset: 0 },
            multiplier: 0,
            device: Place { bar: 0, offset: 0 },
            begun: Instant::now(),
        };
        let (vendor, device) = (function.get16(0)?, function.get16(2)?);
        if vendor != VENDOR || ![MODERN, TRANSITIONAL].contains(&device) {
            return Err(GuestError::NoBalloon {
                address: named(),
                vendor,
                device,
            });
        }
        function.find(address)?;
        function.command = function.get16(COMMAND)?;
        let on = function.command | MEMORY_SPACE | BUS_MASTER;
        function.put(COMMAND, &on.to_le_bytes())?;
        Ok(function)
    }

    /// Follows the capabilities.
    fn find(&mut self, address: &str) -> Result<(), GuestError> {
        let (mut places, mut capabilities) = ([None; 6], [0; 6]);
        let mut at = u64::from(self.get8(CAPABILITIES)? & !3);
        // A list that goes around ends: no more of them fit into configuration space.
        for _ in 0..48 {
            if at == 0 {
                break;
            }
            let kind = usize::from(self.get8(at + KIND)?);
            let vendor = self.get8(at)? == VENDOR_CAPABILITY;
            let place = places.get_mut(kind);
            if let Some(place) = place.filter(|place| vendor && place.is_none()) {
                let (bar, offset) = (self.get8(at + BAR)?, self.get32(at + OFFSET)?);
                // Others are reserved (4.1.4).
                *place = (bar < 6).then_some(Place { bar, offset });
                capabilities[kind] = at;
            }
            at = u64::from(self.get8(at + 1)? & !3);
        }
        let place = |kind: usize| {
            places[kind].ok_or(GuestError::NotModern {
                address: address.to_owned(),
                kind: kind as u8,
            })
        };
        self.common = place(COMMON)?;
        self.notify = place(NOTIFY)?;
        self.device = place(DEVICE)?;
        // What the window's own fields say means nothing yet.
        if capabilities[WINDOW] == 0 {
            place(WINDOW)?;
        }
        self.window = capabilities[WINDOW];
        self.multiplier = self.get32(capabilities[NOTIFY] + MULTIPLIER)?;
        Ok(())
    }

    fn get(&self, at: u64, bytes: &mut [u8]) -> Result<(), GuestError> {
        let read = self.config.read_exact_at(bytes, at);
        read.map_err(|cause| GuestError::Registers { cause })
    }

    fn put(&self, at: u64, bytes: &[u8]) -> Result<(), GuestError> {
        let written = self.config.write_all_at(bytes, at);
        written.map_err(|cause| GuestError::Registers { cause })
    }

    fn get8(&self, at: u64) -> Result<u8, GuestError> {
        let mut bytes = [0];
        self.get(at, &mut bytes)?;
        Ok(bytes[0])
    }

    fn get16(&self, at: u64) -> Result<u16, GuestError> {
        let mut bytes = [0; 2];
        self.get(at, &mut bytes)?;
        Ok(u16::from_le_bytes(bytes))
    }

    fn get32(&self, at: u64) -> Result<u32, GuestError> {
        let mut bytes = [0; 4];
        self.get(at, &mut bytes)?;
        Ok(u32::from_le_bytes(bytes))
    }

    /// Points the window at a register of `len` bytes: 1, 2 or 4.
    fn aim(&self, place: Place, register: u32, len: usize) -> Result<(), GuestError> {
        let offset = place.offset.wrapping_add(register);
        self.put(self.window + BAR, &[place.bar])?;
        self.put(self.window + OFFSET, &offset.to_le_bytes())?;
        self.put(self.window + LENGTH, &(len as u32).to_le_bytes())
    }

    fn read(&self, place: Place, register: u32, bytes: &mut [u8]) -> Result<(), GuestError> {
        self.aim(place, register, bytes.len())?;
        self.get(self.window + DATA, bytes)
    }

    fn write(&self, place: Place, register: u32, bytes: &[u8]) -> Result<(), GuestError> {
        self.aim(place, register, bytes.len())?;
        self.put(self.window + DATA, bytes)
    }

    fn read16(&self, register: u32) -> Result<u16, GuestError> {
        let mut bytes = [0; 2];
        self.read(self.common, register, &mut bytes)?;
        Ok(u16::from_le_bytes(bytes))
    }

    fn read32(&self, register: u32) -> Result<u32, GuestError> {
        let mut bytes = [0; 4];
        self.read(self.common, register, &mut bytes)?;
        Ok(u32::from_le_bytes(bytes))
    }

    fn write16(&self, register: u32, value: u16) -> Result<(), GuestError> {
        self.write(self.common, register, &value.to_le_bytes())
    }

    fn write32(&self, register: u32, value: u32) -> Result<(), GuestError> {
        self.write(self.common, register, &value.to_le_bytes())
    }

    fn status(&self) -> Result<u8, GuestError> {
        let mut bytes = [0];
        self.read(self.common, STATUS, &mut bytes)?;
        Ok(bytes[0])
    }

    /// Adds bits to the status, and yields what it is then.
    fn add_status(&self, bits: u8) -> Result<u8, GuestError> {
        let status = self.status()?;
        self.write(self.common, STATUS, &[status | bits])?;
        self.status()
    }
}

impl Drop for Function {
    fn drop(&mut self) {
        // The driver has reset it. If that failed, it must not reach memory any longer either.
        let _ = self.put(COMMAND, &self.command.to_le_bytes());
    }
}

impl Transport for Function {
    type Error = GuestError;

    fn reset(&mut self) -> Result<(), GuestError> {
        self.write(self.common, STATUS, &[0])?;
        let begun = Instant::now();
        loop {
            match self.status()? {
                0 => break,
                status if begun.elapsed() > PATIENCE => {
                    return Err(GuestError::Endless { status });
                }
                _ => thread::sleep(NAP),
            }
        }
        self.add_status(ACKNOWLEDGE | DRIVER).map(|_| ())
    }

    fn offered(&mut self) -> Result<Features, GuestError> {
        let mut features = 0;
        for (select, shift) in [(0, 0), (1, 32)] {
            self.write32(DEVICE_FEATURE_SELECT, select)?;
            features |= u64::from(self.read32(DEVICE_FEATURE)?) << shift;
        }
        Ok(Features(features))
    }

    fn accept(&mut self, features: Features) -> Result<bool, GuestError> {
        for (select, shift) in [(0, 0), (1, 32)] {
            self.write32(DRIVER_FEATURE_SELECT, select)?;
            self.write32(DRIVER_FEATURE, (features.0 >> shift) as u32)?;
        }
        Ok(self.add_status(FEATURES_OK)? & FEATURES_OK != 0)
    }

    fn begin(&mut self) -> Result<(), GuestError> {
        self.add_status(DRIVER_OK).map(|_| ())
    }

    fn broken(&mut self) -> Result<bool, GuestError> {
        // A device that is gone reads as ones.
        Ok(self.status()? & NEEDS_RESET != 0)
    }

    fn read_config(&mut self, offset: u16, bytes: &mut [u8]) -> Result<(), GuestError> {
        let mut register = u32::from(offset);
        for field in bytes.chunks_mut(4) {
            self.read(self.device, register, field)?;
            register += 4;
        }
        Ok(())
    }

    fn write_config(&mut self, offset: u16, value: u32) -> Result<(), GuestError> {
        self.write(self.device, offset.into(), &value.to_le_bytes())
    }

    fn generation(&mut self) -> Result<u32, GuestError> {
        let mut bytes = [0];
        self.read(self.common, CONFIG_GENERATION, &mut bytes)?;
        Ok(bytes[0].into())
    }

    fn queue_size(&mut self, queue: u16) -> Result<u16, GuestError> {
        if queue >= self.read16(NUM_QUEUES)? {
            return Ok(0);
        }
        self.write16(QUEUE_SELECT, queue)?;
        self.read16(QUEUE_SIZE)
    }

    fn enable_queue(
        &mut self,
        queue: u16,
        size: u16,
        addresses: QueueAddresses,
    ) -> Result<(), GuestError> {
        self.write16(QUEUE_SELECT, queue)?;
        self.write16(QUEUE_SIZE, size)?;
        for (register, address) in [
            (QUEUE_DESC, addresses.descriptors),
            (QUEUE_DRIVER, addresses.available),
            (QUEUE_DEVICE, addresses.used),
        ] {
            self.write32(register, address as u32)?;
            self.write32(register + 4, (address >> 32) as u32)?;
        }
        self.write16(QUEUE_ENABLE, 1)
    }

    fn notify(&mut self, queue: u16) -> Result<(), GuestError> {
        self.write16(QUEUE_SELECT, queue)?;
        let offset = u32::from(self.read16(QUEUE_NOTIFY_OFF)?);
        let register = offset.wrapping_mul(self.multiplier);
        self.write(self.notify, register, &queue.to_le_bytes())
    }

    fn wait(&mut self, _queue: u16, most: Duration) -> Result<(), GuestError> {
        thread::sleep(most.min(NAP));
        Ok(())
    }

    fn now(&mut self) -> Duration {
        self.begun.elapsed()
    }

    fn pause(&mut self, time: Duration) {
        thread::sleep(time);
    }
}

/// What the kernel says of registers, for [`GuestError::Registers`].
pub(super) type Cause = io::Error;
