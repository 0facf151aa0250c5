//! A front end that makes its memory file shorter while the balloon has it mapped.

use std::os::unix::fs::FileExt as _;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use dmaspace::vhost::{Backend, BackendMemory, Link, Vring};
use hostmem::ShrinkWatch;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use vm_memory::GuestAddressSpace as _;

use super::events::{CALL, KICK, queue};
use super::*;

/// A message that waits in the ring behind one that went in, and of which the balloon was not told.
fn waiting(monitor: &mut Monitor) {
    monitor.inflate(0, PAGES, 256);
    let pages = (0..256).map(|page| (PAGES / 4096 + page) as u32);
    let message: Vec<u8> = pages.flat_map(u32::to_le_bytes).collect();
    monitor.put(INFLATE, 1, &message);
}

fn end_of_session(running: &mut Running) -> Option<String> {
    let ended = running.wait(|event| matches!(event, BackendEvent::Disconnected { .. }));
    let BackendEvent::Disconnected { cause } = ended else {
        panic!("waited for the end");
    };
    cause
}

#[test]
fn a_front_end_that_shrinks_its_memory_ends_by_name_and_the_next_one_is_served() {
    ShrinkWatch::install().unwrap();
    let mut running = Running::start(1 << 20);
    let [_, available, used, buffer] = ring(INFLATE).map(|at| at - BASE);
    // Everything is gone; the ring is, from its second part on; the message in it, in the middle of the ring.
    for (left, found) in [
        (0, available),
        (available, available),
        (used, buffer),
        (buffer, buffer),
    ] {
        let file = guest();
        // This queue alone: a look at the ring of another one would be first.
        let mut monitor = Monitor::connect_with(&running.socket, &file, &[0], FEATURES, None);
        waiting(&mut monitor);
        file.set_len(OFFSET + left).unwrap();
        monitor.kicks[INFLATE].write(1).unwrap();
        let cause = end_of_session(&mut running).unwrap();
        let region = format!("region {}, ", runs_span());
        assert!(
            cause.starts_with("the front end has shrunk its memory: ") && cause.contains(&region),
            "{cause}"
        );
        let offset = cause.rsplit_once("offset ").unwrap().1;
        let offset = u64::from_str_radix(offset.trim_start_matches("0x"), 16).unwrap();
        assert!((left..=found).contains(&offset), "{left:#x}: {cause}");
        drop(monitor);
        // It is served as if nothing had been.
        let mut next = Monitor::connect(&running.socket, &guest(), [0; 3]);
        next.inflate(0, PAGES, 256);
        assert_eq!(next.config(), [256, 256]);
        drop(next);
        assert_eq!(end_of_session(&mut running), None);
    }
    let report = running.end();
    // The waiting messages read as zeros or not at all, and name no page of the guest.
    assert_eq!(report.inflated_bytes, 8 << 20);
}

/// The guest's memory, as it is shown.
fn runs_span() -> String {
    runs::Span::<runs::GuestAddr>::new(BASE, BYTES as u64).to_string()
}

const NOW: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 0,
};

/// A device that accesses the guest's memory at each kick, and counts how often it found nothing.
#[derive(Default)]
struct Looks {
    memory: Mutex<Option<BackendMemory>>,
    gone: AtomicU32,
    woken: AtomicU32,
}

impl Backend for Looks {
    const QUEUES: u16 = 1;

    fn features(&self) -> u64 {
        1 << 32
    }

    fn negotiated(&self, _features: u64) {}

    fn read_config(&self, _offset: u32, _size: u32) -> Vec<u8> {
        Vec::new()
    }

    fn write_config(&self, _offset: u32, _bytes: &[u8]) {}

    fn memory(&self, memory: &BackendMemory) -> std::io::Result<()> {
        *self.memory.lock().unwrap() = Some(memory.clone());
        Ok(())
    }

    fn kicked(&self, _queue: u16, _vrings: &[Vring]) {
        let memory = self.memory.lock().unwrap().clone().unwrap().memory();
        if memory.read_obj::<u64>(GuestAddress(PAGES)).unwrap() == 0 {
            self.gone.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn woken(&self, _vrings: &[Vring]) {
        self.woken.fetch_add(1, Ordering::Relaxed);
    }

    fn stopped(&self, _queue: u16) {}

    fn reset(&self) {}
}

#[test]
fn a_device_is_told_of_nothing_once_memory_was_found_to_be_gone() {
    ShrinkWatch::install().unwrap();
    let (theirs, front) = UnixStream::pair().unwrap();
    let device = Arc::new(Looks::default());
    let link = Link::new(front, device.clone()).unwrap();
    let file = guest();
    file.write_all_at(&[1; 8], OFFSET + PAGES - BASE).unwrap();
    let mut monitor = Monitor::over(theirs, &file, &[0], 1 << 32 | 1 << 30, None);
    let event = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    monitor.front.get_vring_base(0).unwrap();
    monitor.give(CALL, &queue(0), &event);
    monitor.give(KICK, &queue(0), &event);
    file.set_len(OFFSET).unwrap();
    let kick = || {
        rustix::io::write(&event, &1_u64.to_ne_bytes()).unwrap();
        // The kick is taken before the device hears of it.
        let deadline = Instant::now() + PATIENCE;
        let raised = || poll(&mut [PollFd::new(&event, PollFlags::IN)], Some(&NOW)) != Ok(0);
        while raised() {
            assert!(Instant::now() < deadline, "the kick is not taken");
            thread::sleep(Duration::from_millis(1));
        }
    };
    kick();
    let deadline = Instant::now() + PATIENCE;
    let told = || [&device.gone, &device.woken].map(|count| count.load(Ordering::Relaxed));
    while told() != [1, 0] {
        assert!(Instant::now() < deadline, "{:?}", told());
        thread::sleep(Duration::from_millis(1));
    }
    assert!(link.lost().is_some());
    link.wake();
    kick();
    kick();
    // Waits for the thread that tells it.
    link.close();
    assert_eq!(told(), [1, 0]);
}
