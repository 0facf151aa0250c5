//! A monitor with a balloon, complete but for a bus: `docs/balloon-monitor.md` leads through it.
//!
//! `Monitor` is what a transport (PCI, MMIO) of a monitor does; `guest` is a driver in as few lines as
//! possible, where a monitor has a machine that runs one.

use std::error::Error;

use runs::Bytes;
use virtio_balloon::device::{
    BalloonDevice, BalloonEvent, BalloonMonitor as Events, BalloonSettings, Bulk, Discard, Drained,
    GuestDiscard,
};
use virtio_balloon::{Features, KeepReason, MemoryMap, Part, Queue, Releaser, Stats, Tag};
use virtio_queue::{Queue as Ring, QueueT};
use vm_memory::{GuestAddress, GuestMemoryMmap};

/// Descriptors of each ring.
const RING: u16 = 128;

/// Device events: interrupts for the driver, log lines for the operator.
#[derive(Default)]
struct Interrupts {
    /// The driver must read the configuration space.
    config_interrupt: bool,
}

impl Events for Interrupts {
    fn config_changed(&mut self) {
        self.config_interrupt = true;
    }

    fn event(&mut self, event: BalloonEvent) {
        match event {
            BalloonEvent::Progress { target, actual } => {
                println!("balloon: {} of {}", Bytes(actual), Bytes(target));
            }
            // Kept parts, failed discards and so on.
            other => println!("balloon: {other:?}"),
        }
    }

    fn stats(&mut self, stats: &Stats, _asked: bool) {
        if let Some(free) = stats.get(Tag::FreeMemory) {
            println!("guest: {} free", Bytes(free));
        }
    }
}

/// Shows the order only; `dmaspace::balloon` does it over an address space of this project.
#[derive(Default)]
struct Passthrough {
    released: u64,
}

impl<T> Releaser<T> for Passthrough {
    fn attached(&self) -> bool {
        true
    }

    fn release(
        &mut self,
        _map: MemoryMap<'_, T>,
        parts: &[Part],
        _kept: &mut dyn FnMut(Part, KeepReason),
    ) {
        // Unmapped, flushed, unpinned: then it is discarded.
        self.released += parts.iter().map(|part| part.offsets.len).sum::<u64>();
    }

    /// Free pages are not reported, since these devices reach all memory.
    fn held(&self, _: MemoryMap<'_, T>, _: &[Part], _: &mut dyn FnMut(Part, KeepReason)) {}

    fn restore(
        &mut self,
        _map: MemoryMap<'_, T>,
        parts: &[Part],
        _failed: &mut dyn FnMut(Part, KeepReason),
    ) {
        // Pinned, mapped: then the guest gets it.
        let bytes = parts.iter().map(|part| part.offsets.len).sum();
        self.released = self.released.saturating_sub(bytes);
    }
}

struct Monitor {
    memory: GuestMemoryMmap,
    device: BalloonDevice<GuestDiscard, Passthrough, Interrupts, Discard>,
    /// Rings by queue number.
    rings: Vec<Ring>,
    /// Queues with messages left by a drain.
    again: Vec<u16>,
}

impl Monitor {
    fn new(memory: GuestMemoryMmap) -> Result<Self, Box<dyn Error>> {
        let regions = GuestDiscard::regions(&memory, 4096)?;
        let settings = BalloonSettings {
            // Off unless set here; a driver without it uses page numbers.
            bulk: Some(Bulk::default()),
            ..BalloonSettings::default()
        };
        let (discard, events) = (GuestDiscard::new(), Interrupts::default());
        let device =
            BalloonDevice::new(settings, regions, discard, Passthrough::default(), events)?;
        let rings = (0..device.queues()).map(|_| Ring::new(RING));
        Ok(Self {
            rings: rings.collect::<Result<_, _>>()?,
            again: Vec::new(),
            memory,
            device,
        })
    }

    /// The driver has acknowledged features. False: `FEATURES_OK` stays unset.
    fn features_ok(&mut self, features: Features) -> bool {
        let result = self.device.negotiate(features);
        result
            .inspect_err(|error| println!("balloon: {error}"))
            .is_ok()
    }

    /// The driver has notified the queue of this number. True: it gets an interrupt.
    fn notified(&mut self, number: u16) -> Result<bool, Box<dyn Error>> {
        let Some(queue) = self.device.queue(number) else {
            return Ok(false);
        };
        let ring = self
            .rings
            .get_mut(usize::from(number))
            .ok_or("no such ring")?;
        let drained: Drained = self.device.drain(queue, ring, &self.memory)?;
        if drained.more {
            // A drain is bounded: the rest follows after the other queues.
            self.again.push(number);
        }
        Ok(drained.notify)
    }

    /// Called when idle: drains what is left. True: the driver gets an interrupt.
    fn go_on(&mut self) -> Result<bool, Box<dyn Error>> {
        let mut interrupt = false;
        for number in std::mem::take(&mut self.again) {
            interrupt |= self.notified(number)?;
        }
        Ok(interrupt)
    }

    /// Asks the guest for statistics; they come when it has answered.
    fn ask(&mut self) -> Result<bool, Box<dyn Error>> {
        let number = self.device.number(Queue::Stats).ok_or("no statsq")?;
        let ring = self
            .rings
            .get_mut(usize::from(number))
            .ok_or("no such ring")?;
        Ok(self.device.request_stats(ring, &self.memory)?)
    }

    /// The driver has written 0 to the device status.
    fn reset(&mut self) -> Result<(), Box<dyn Error>> {
        self.rings.iter_mut().for_each(QueueT::reset);
        self.again.clear();
        match self.device.reset()[..] {
            [] => Ok(()),
            [first, ..] => Err(format!("devices lack {first} and more; stop the guest").into()),
        }
    }
}

/// The guest's driver.
mod guest {
    use super::{Error, GuestAddress, GuestMemoryMmap, QueueT, RING, Ring};
    use vm_memory::Bytes;

    /// Where rings and buffers are, 64 KiB for each queue.
    fn base(number: u16) -> u64 {
        0x1_0000 * (1 + u64::from(number))
    }

    /// Tells the device where a ring is, as a transport's registers do.
    pub(crate) fn set_up(number: u16, ring: &mut Ring) {
        let base = base(number) as u32;
        ring.set_desc_table_address(Some(base), Some(0));
        ring.set_avail_ring_address(Some(base + 0x1000), Some(0));
        ring.set_used_ring_address(Some(base + 0x2000), Some(0));
        ring.set_ready(true);
    }

    /// Sends the `count`-th message on this queue.
    pub(crate) fn send(
        memory: &GuestMemoryMmap,
        number: u16,
        count: u16,
        message: &[u8],
    ) -> Result<(), Box<dyn Error>> {
        let base = base(number);
        let (buffer, head) = (base + 0x4000, count % RING);
        memory.write_slice(message, GuestAddress(buffer))?;
        // A descriptor: address, length, flags, next.
        let mut descriptor = [0; 16];
        descriptor[..8].copy_from_slice(&buffer.to_le_bytes());
        descriptor[8..12].copy_from_slice(&(message.len() as u32).to_le_bytes());
        memory.write_slice(&descriptor, GuestAddress(base + 16 * u64::from(head)))?;
        let place = base + 0x1004 + 2 * u64::from(head);
        memory.write_obj(head.to_le(), GuestAddress(place))?;
        let index = count.wrapping_add(1).to_le();
        memory.write_obj(index, GuestAddress(base + 0x1002))?;
        Ok(())
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let memory = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), 64 << 20)])?;
    let mut monitor = Monitor::new(memory)?;

    // The driver sets up: it takes what it knows, and page numbers are what it knows.
    let offered = monitor.device.features();
    let without = offered.without(Features::MUST_TELL_HOST);
    assert!(!monitor.features_ok(without), "with devices it must tell");
    let known = Features::MUST_TELL_HOST.with(Features::STATS_VQ);
    assert!(monitor.features_ok(known.with(Features::VERSION_1)));
    for (number, ring) in (0..).zip(&mut monitor.rings) {
        guest::set_up(number, ring);
    }

    // The host wants 4 MiB back. The driver gets an interrupt, reads the target, and sends pages.
    monitor.device.set_target(4 << 20);
    assert!(std::mem::take(
        &mut monitor.device.monitor().config_interrupt
    ));
    let mut field = [0; 4];
    monitor.device.read_config(0, &mut field);
    let wanted = u32::from_le_bytes(field);
    let first = (32u32 << 20) / 4096;
    let pages: Vec<u32> = (first..first + wanted).collect();
    for (count, message) in (0..).zip(pages.chunks(256)) {
        let message: Vec<u8> = message.iter().flat_map(|page| page.to_le_bytes()).collect();
        guest::send(&monitor.memory, 0, count, &message)?;
        assert!(monitor.notified(0)?, "the driver waits for its answer");
    }
    assert!(!monitor.go_on()?, "nothing is left");
    monitor.device.write_config(4, &wanted.to_le_bytes());
    assert_eq!(monitor.device.counters().discarded, 4 << 20);
    assert_eq!(monitor.device.dma().released, 4 << 20);

    // Statistics: the driver has given a buffer, and answers each request with the next.
    let free = |bytes: u64| [&4u16.to_le_bytes()[..], &bytes.to_le_bytes()].concat();
    guest::send(&monitor.memory, 2, 0, &free(50 << 20))?;
    monitor.notified(2)?;
    assert!(monitor.ask()?);
    guest::send(&monitor.memory, 2, 1, &free(48 << 20))?;
    monitor.notified(2)?;

    // Half of it goes back: devices see it before the driver does.
    monitor.device.set_target(2 << 20);
    let half: Vec<u8> = pages[..512]
        .iter()
        .flat_map(|page| page.to_le_bytes())
        .collect();
    guest::send(&monitor.memory, 1, 0, &half)?;
    assert!(monitor.notified(1)?);
    monitor.device.write_config(4, &512u32.to_le_bytes());
    assert_eq!(monitor.device.dma().released, 2 << 20);
    assert_eq!(monitor.device.refusals().total(), 0);

    // The machine is started anew.
    monitor.reset()
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_example_runs() {
        super::main().expect("it runs");
    }
}
