//! virtio's block device over PCI, without the legacy interface: several queues over a file.
//!
//! BAR 0 holds the structures of VIRTIO 1.3, 4.1.4, a page each: common configuration, ISR status, device
//! configuration, notifications. BAR 1 holds the MSI-X table, which QEMU keeps by itself. A disk has either MSI-X or INTx
//! ([`Interrupts`]), and no `VIRTIO_PCI_CAP_PCI_CFG`, which is for drivers that cannot reach a BAR.
//!
//! Source: VIRTIO 1.3, 4.1 (PCI), 5.2 (block device).

use std::fs::OpenOptions;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;

use dmaspace_vfio_user::{
    CONFIG_REGION, ClientMemory, Description, DeviceModel, INTX, Irqs, MSIX, RequestRefusal,
};
use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_F_BLK_SIZE, VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_MQ, VIRTIO_BLK_F_SEG_MAX,
};
use virtio_bindings::virtio_config::{
    VIRTIO_CONFIG_S_DRIVER_OK, VIRTIO_CONFIG_S_FEATURES_OK, VIRTIO_CONFIG_S_NEEDS_RESET,
    VIRTIO_F_ACCESS_PLATFORM, VIRTIO_F_VERSION_1,
};
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};
use virtio_queue::QueueT as _;

use crate::pci::{BYTES, ConfigSpace, Identity};
use crate::queue::{ISR_CONFIG, NO_VECTOR, SECTOR, SIZE, Shared, Slot};

/// BAR 0: a page for each structure, then notifications, 4 bytes for each queue.
const COMMON: u64 = 0;
const ISR: u64 = 0x1000;
const DEVICE: u64 = 0x2000;
const NOTIFY: u64 = 0x3000;
const BAR: u64 = 0x4000;
/// BAR 1: the MSI-X table, and the pending bits behind it.
const MSIX_BAR: u64 = 0x1000;
const PENDING: u32 = 0x800;
/// The most queues: a vector for each, and one for changes.
pub const MOST_QUEUES: u16 = 16;

/// `VIRTIO_PCI_CAP_COMMON_CFG` and so on.
const CAPABILITIES: [(u8, u64, u32); 4] = [
    (1, COMMON, 0x38),
    (3, ISR, 1),
    (4, DEVICE, 64),
    (2, NOTIFY, 4 * MOST_QUEUES as u32),
];

const FEATURES: u64 = 1 << VIRTIO_BLK_F_SEG_MAX
    | 1 << VIRTIO_BLK_F_BLK_SIZE
    | 1 << VIRTIO_BLK_F_FLUSH
    | 1 << VIRTIO_BLK_F_MQ
    | 1 << VIRTIO_RING_F_INDIRECT_DESC
    | 1 << VIRTIO_RING_F_EVENT_IDX
    | 1 << VIRTIO_F_VERSION_1
    // The driver uses the DMA API: addresses are those behind the guest's IOMMU.
    | 1 << VIRTIO_F_ACCESS_PLATFORM;

/// The most pieces of data in a request: header and status take two places of a ring.
const SEGMENTS: u32 = SIZE as u32 - 2;

/// The disk.
pub struct Disk {
    shared: Arc<Shared>,
    queues: Vec<Arc<Slot>>,
    config: Mutex<ConfigSpace>,
    registers: Arc<Mutex<Registers>>,
}

/// The common configuration (VIRTIO 1.3, 4.1.4.3), without what belongs to a queue.
struct Registers {
    device_features: u32,
    driver_features: u32,
    features: u64,
    vector: u16,
    status: u8,
    queue: u16,
}

impl Registers {
    const NEW: Self = Self {
        device_features: 0,
        driver_features: 0,
        features: 0,
        vector: NO_VECTOR,
        status: 0,
        queue: 0,
    };
}

/// How the disk interrupts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interrupts {
    /// A message for each queue, and one for changes.
    Msix,
    /// One line for all, and the ISR status that says why (VIRTIO 1.3, 4.1.4.5).
    Intx,
}

/// Description of a disk with `queues` queues.
pub fn description(queues: u16, interrupts: Interrupts) -> Description {
    let mut description = Description::default();
    description.regions[0] = BAR;
    description.regions[1] = MSIX_BAR;
    description.regions[CONFIG_REGION] = BYTES as u64;
    // QEMU asks for one for errors (`VFIO_PCI_ERR_IRQ_INDEX`), and warns where there is none. None occur.
    description.irqs[3] = 1;
    match interrupts {
        Interrupts::Msix => description.irqs[MSIX] = u32::from(queues) + 1,
        Interrupts::Intx => description.irqs[INTX] = 1,
    }
    description
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Disk {
    /// Over the file `path`, whose length is a multiple of sectors.
    ///
    /// # Errors
    ///
    /// When the file cannot be opened.
    pub fn new(
        path: &Path,
        queues: u16,
        interrupts: Interrupts,
        memory: Arc<ClientMemory>,
        irqs: Arc<Irqs>,
    ) -> io::Result<Self> {
        let queues = queues.clamp(1, MOST_QUEUES);
        let open = || OpenOptions::new().read(true).write(true).open(path);
        let shared = Arc::new(Shared {
            memory,
            irqs,
            interrupts,
            isr: AtomicU8::new(0),
            sectors: open()?.metadata()?.len() / SECTOR,
            requests: AtomicU64::new(0),
            gathered: AtomicU64::new(0),
        });
        let mut config = ConfigSpace::new(Identity {
            vendor: 0x1af4,
            // 0x1040 and the number of a block device.
            device: 0x1042,
            class: 0x01_8000,
            subsystem: (0x1af4, 0x1100),
        });
        match interrupts {
            Interrupts::Msix => config.msix(queues + 1, 1, PENDING),
            Interrupts::Intx => config.interrupt_pin(),
        }
        for (kind, offset, length) in CAPABILITIES {
            // Length of the capability, kind, BAR, identifier, padding, offset, length.
            let bytes = if kind == 2 { 20 } else { 16 };
            let mut body = vec![bytes, kind, 0, 0, 0, 0];
            body.extend_from_slice(&(offset as u32).to_le_bytes());
            body.extend_from_slice(&length.to_le_bytes());
            if kind == 2 {
                // Bytes from one queue's notification to the next one's.
                body.extend_from_slice(&4_u32.to_le_bytes());
            }
            config.capability(0x09, &body);
        }
        let registers = Arc::new(Mutex::new(Registers::NEW));
        let mut slots = Vec::new();
        for _ in 0..queues {
            let slot = Arc::new(Slot::new(open()?)?);
            let (worker, shared) = (slot.clone(), shared.clone());
            let registers = registers.clone();
            thread::spawn(move || {
                worker.serve(&shared, |error| {
                    println!("a queue is broken: {error}");
                    let registers = &mut *lock(&registers);
                    registers.status |= VIRTIO_CONFIG_S_NEEDS_RESET as u8;
                    shared.interrupt(registers.vector, ISR_CONFIG);
                })
            });
            slots.push(slot);
        }
        Ok(Self {
            shared,
            queues: slots,
            config: Mutex::new(config),
            registers,
        })
    }

    /// Requests that were served, and how many of them had more than one piece of data.
    pub fn counts(&self) -> (u64, u64) {
        let Shared {
            requests, gathered, ..
        } = &*self.shared;
        (
            requests.load(Ordering::Relaxed),
            gathered.load(Ordering::Relaxed),
        )
    }

    /// The device configuration (VIRTIO 1.3, 5.2.4).
    fn configuration(&self) -> [u8; 64] {
        let mut bytes = [0; 64];
        bytes[0..8].copy_from_slice(&self.shared.sectors.to_le_bytes());
        bytes[12..16].copy_from_slice(&SEGMENTS.to_le_bytes());
        bytes[20..24].copy_from_slice(&(SECTOR as u32).to_le_bytes());
        bytes[34..36].copy_from_slice(&(self.queues.len() as u16).to_le_bytes());
        bytes
    }

    /// The common configuration as bytes.
    fn common(&self) -> [u8; 0x38] {
        let registers = lock(&self.registers);
        let half = |features: u64, select: u32| match select {
            0 => features as u32,
            1 => (features >> 32) as u32,
            _ => 0,
        };
        let mut bytes = [0; 0x38];
        let mut set = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
        set(0x00, &registers.device_features.to_le_bytes());
        set(
            0x04,
            &half(FEATURES, registers.device_features).to_le_bytes(),
        );
        set(0x08, &registers.driver_features.to_le_bytes());
        let taken = half(registers.features, registers.driver_features);
        set(0x0c, &taken.to_le_bytes());
        set(0x10, &registers.vector.to_le_bytes());
        set(0x12, &(self.queues.len() as u16).to_le_bytes());
        set(0x14, &[registers.status, 0]);
        set(0x16, &registers.queue.to_le_bytes());
        if let Some(slot) = self.queues.get(usize::from(registers.queue)) {
            let number = registers.queue;
            drop(registers);
            let state = slot.lock();
            set(0x18, &state.queue.size().to_le_bytes());
            set(0x1a, &state.vector.to_le_bytes());
            set(0x1c, &u16::from(state.queue.ready()).to_le_bytes());
            set(0x1e, &number.to_le_bytes());
            set(0x20, &state.queue.desc_table().to_le_bytes());
            set(0x28, &state.queue.avail_ring().to_le_bytes());
            set(0x30, &state.queue.used_ring().to_le_bytes());
        }
        bytes
    }

    /// A write of 1 to 8 bytes to the common configuration. Drivers write whole fields, or halves of 64 bits.
    fn set_common(&self, at: u64, value: u64) {
        let word = value as u32;
        let registers = &mut *lock(&self.registers);
        match at {
            0x00 => registers.device_features = word,
            0x08 => registers.driver_features = word,
            0x0c => {
                let shift = match registers.driver_features {
                    0 => 0,
                    1 => 32,
                    _ => return,
                };
                let kept = registers.features & !(0xffff_ffff << shift);
                registers.features = kept | u64::from(word) << shift;
            }
            0x10 => registers.vector = self.vector(word),
            0x14 => self.set_status(registers, word as u8),
            0x16 => registers.queue = word as u16,
            _ => {
                let event_idx = registers.features >> VIRTIO_RING_F_EVENT_IDX & 1 == 1;
                let slot = self.queues.get(usize::from(registers.queue));
                let Some(slot) = slot else { return };
                let mut state = slot.lock();
                match at {
                    0x18 => state.queue.set_size(word as u16),
                    0x1a => state.vector = self.vector(word),
                    0x1c if word == 1 => {
                        state.queue.set_event_idx(event_idx);
                        state.queue.set_ready(true);
                    }
                    0x20 => state.queue.set_desc_table_address(Some(word), None),
                    0x24 => state.queue.set_desc_table_address(None, Some(word)),
                    0x28 => state.queue.set_avail_ring_address(Some(word), None),
                    0x2c => state.queue.set_avail_ring_address(None, Some(word)),
                    0x30 => state.queue.set_used_ring_address(Some(word), None),
                    0x34 => state.queue.set_used_ring_address(None, Some(word)),
                    _ => {}
                }
            }
        }
    }

    /// A vector that the device has, or none.
    fn vector(&self, vector: u32) -> u16 {
        let there = vector <= self.queues.len() as u32;
        if there { vector as u16 } else { NO_VECTOR }
    }

    fn set_status(&self, registers: &mut Registers, status: u8) {
        if status == 0 {
            return self.reset_all(registers);
        }
        let ok = VIRTIO_CONFIG_S_FEATURES_OK as u8;
        let wrong = registers.features & !FEATURES != 0
            || registers.features >> VIRTIO_F_VERSION_1 & 1 == 0;
        // Features that do not fit are not acknowledged (VIRTIO 1.3, 3.1.1).
        registers.status |= if wrong { status & !ok } else { status };
        if registers.status & VIRTIO_CONFIG_S_DRIVER_OK as u8 != 0 {
            // Requests may have come before.
            self.queues.iter().for_each(|slot| slot.ring());
        }
    }

    fn reset_all(&self, registers: &mut Registers) {
        for slot in &self.queues {
            // No request is under way.
            let mut state = slot.lock();
            state.queue.reset();
            state.vector = NO_VECTOR;
            state.broken = false;
        }
        self.shared.read_isr();
        *registers = Registers::NEW;
    }
}

impl DeviceModel for Disk {
    fn read(&self, region: usize, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let copy = |from: &[u8], at: u64, out: &mut [u8]| {
            out.fill(0);
            let from = from.iter().skip(at as usize);
            out.iter_mut().zip(from).for_each(|(to, from)| *to = *from);
        };
        match (region, offset) {
            (CONFIG_REGION, _) => lock(&self.config).read(offset, out),
            (0, COMMON..ISR) => copy(&self.common(), offset - COMMON, out),
            (0, DEVICE..NOTIFY) => copy(&self.configuration(), offset - DEVICE, out),
            (0, ISR..DEVICE) => copy(&[self.shared.read_isr()], offset - ISR, out),
            _ => out.fill(0),
        }
        Ok(())
    }

    fn write(&self, region: usize, offset: u64, bytes: &[u8]) -> io::Result<()> {
        match (region, offset) {
            (CONFIG_REGION, _) => lock(&self.config).write(offset, bytes),
            (0, COMMON..ISR) => {
                let mut word = [0; 8];
                word.iter_mut()
                    .zip(bytes)
                    .for_each(|(to, from)| *to = *from);
                let value = u64::from_le_bytes(word);
                self.set_common(offset, value);
                if bytes.len() == 8 {
                    self.set_common(offset + 4, value >> 32);
                }
            }
            (0, NOTIFY..BAR) => {
                let queue = self.queues.get(((offset - NOTIFY) / 4) as usize);
                queue.into_iter().for_each(|slot| slot.ring());
            }
            _ => {}
        }
        Ok(())
    }

    fn reset(&self) {
        self.reset_all(&mut lock(&self.registers));
    }

    fn refused(&self, command: u16, refusal: &RequestRefusal) {
        println!("refused {command}: {refusal:?}");
    }
}
