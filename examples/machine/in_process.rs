//! A balloon in this process, for a driver of the crate `virtio-drivers`: its registers are calls, and it reaches rings
//! and messages by the addresses that an address space translates.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use dmaspace::virtio_balloon::Features;
use dmaspace::virtio_balloon::device::Discard;
use dmaspace::{BalloonDevice, BalloonEvent, BalloonMonitor, BalloonSettings};
use dmaspace::{GuestDiscard, GuestIommu, Ioas, Mapping, Memory};
use virtio_drivers::PhysAddr;
use virtio_drivers::transport::{DeviceStatus, DeviceType, InterruptStatus, Transport};
use virtio_queue::{Queue, QueueT};
use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryMmap, IommuMemory};
use zerocopy::{FromBytes, Immutable, IntoBytes};

const RING: u16 = 64;

/// Prints what the device has to say.
struct Log;

impl BalloonMonitor for Log {
    fn event(&mut self, event: BalloonEvent) {
        println!("balloon: {event:?}");
    }
}

/// The device, and the transport to it.
pub struct InProcess {
    device: BalloonDevice<GuestDiscard, (), Log, Discard>,
    rings: Vec<Queue>,
    memory: IommuMemory<GuestMemoryMmap, GuestIommu>,
    status: DeviceStatus,
}

impl InProcess {
    /// The balloon of a guest of 64 MiB, which reaches rings and messages by the addresses of `space`. With it the first
    /// MiB of the guest, for its driver.
    ///
    /// # Errors
    ///
    /// No memory.
    pub fn new(space: &Ioas) -> anyhow::Result<(Self, Arc<Mapping>)> {
        let regions = [
            (GuestAddress(0), 1 << 20),
            (GuestAddress(1 << 20), 63 << 20),
        ];
        let guest = GuestMemoryMmap::<()>::from_ranges(&regions)?;
        let first = guest.iter().next().context("a guest without memory")?;
        let mapping = Arc::new(Mapping::of_guest_region(first)?);
        let regions = GuestDiscard::regions(&guest, 4096)?;
        let iommu = GuestIommu::new(Duration::from_secs(1));
        let memory = IommuMemory::new(guest, iommu, true, ());
        space.add_listener(memory.iommu().clone());
        let device = BalloonDevice::new(
            BalloonSettings::default(),
            regions,
            GuestDiscard::new(),
            (),
            Log,
        )?;
        let rings = (0..device.queues()).map(|_| Queue::new(RING));
        let this = Self {
            rings: rings.collect::<Result<_, _>>()?,
            memory,
            device,
            status: DeviceStatus::empty(),
        };
        Ok((this, mapping))
    }

    /// `memory` is the first of the guest's.
    pub fn add_memory(&self, memory: &Arc<Memory>) {
        self.memory.iommu().add_memory(memory, GuestAddress(0));
    }

    /// Bytes that the driver says are in the balloon, that were discarded, and messages that were refused.
    pub fn state(&self) -> (u64, u64, u64) {
        let discarded = self.device.counters().discarded;
        (
            self.device.actual(),
            discarded,
            self.device.refusals().total(),
        )
    }

    fn ring(&mut self, queue: u16) -> Option<&mut Queue> {
        self.rings.get_mut(usize::from(queue))
    }
}

impl Transport for InProcess {
    fn device_type(&self) -> DeviceType {
        DeviceType::MemoryBalloon
    }

    fn read_device_features(&mut self) -> u64 {
        self.device.features().0
    }

    fn write_driver_features(&mut self, features: u64) {
        if let Err(error) = self.device.negotiate(Features(features)) {
            println!("balloon: {error}");
            self.status |= DeviceStatus::DEVICE_NEEDS_RESET;
        }
    }

    fn max_queue_size(&mut self, queue: u16) -> u32 {
        self.ring(queue)
            .map_or(0, |ring| u32::from(ring.max_size()))
    }

    fn notify(&mut self, number: u16) {
        let Some(queue) = self.device.queue(number) else {
            return;
        };
        let Some(ring) = self.rings.get_mut(usize::from(number)) else {
            return;
        };
        while let Some(more) = match self.device.drain(queue, ring, &self.memory) {
            Ok(drained) => drained.more.then_some(()),
            Err(error) => {
                println!("balloon: {:#}", anyhow::Error::new(error));
                self.status |= DeviceStatus::DEVICE_NEEDS_RESET;
                None
            }
        } {
            more
        }
    }

    fn get_status(&self) -> DeviceStatus {
        self.status
    }

    fn set_status(&mut self, status: DeviceStatus) {
        if status.is_empty() {
            self.rings.iter_mut().for_each(QueueT::reset);
            self.device.reset();
        }
        self.status = status;
    }

    fn set_guest_page_size(&mut self, _: u32) {}

    fn requires_legacy_layout(&self) -> bool {
        false
    }

    fn queue_set(
        &mut self,
        queue: u16,
        size: u32,
        descriptors: PhysAddr,
        driver: PhysAddr,
        device: PhysAddr,
    ) {
        let halves = |at: PhysAddr| (Some(at as u32), Some((at >> 32) as u32));
        if let Some(ring) = self.ring(queue) {
            ring.set_size(size as u16);
            let (low, high) = halves(descriptors);
            ring.set_desc_table_address(low, high);
            let (low, high) = halves(driver);
            ring.set_avail_ring_address(low, high);
            let (low, high) = halves(device);
            ring.set_used_ring_address(low, high);
            ring.set_ready(true);
        }
    }

    fn queue_unset(&mut self, queue: u16) {
        if let Some(ring) = self.ring(queue) {
            ring.reset();
        }
    }

    fn queue_used(&mut self, queue: u16) -> bool {
        self.ring(queue).is_some_and(|ring| ring.ready())
    }

    fn ack_interrupt(&mut self) -> InterruptStatus {
        InterruptStatus::empty()
    }

    fn read_config_generation(&self) -> u32 {
        0
    }

    fn read_config_space<T: FromBytes + IntoBytes>(
        &self,
        offset: usize,
    ) -> virtio_drivers::Result<T> {
        let mut value = T::new_zeroed();
        self.device.read_config(offset as u64, value.as_mut_bytes());
        Ok(value)
    }

    fn write_config_space<T: IntoBytes + Immutable>(
        &mut self,
        offset: usize,
        value: T,
    ) -> virtio_drivers::Result<()> {
        self.device.write_config(offset as u64, value.as_bytes());
        Ok(())
    }
}
