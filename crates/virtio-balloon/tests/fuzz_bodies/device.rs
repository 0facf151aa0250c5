//! The whole device: the bytes are what a driver writes to rings, buffers and configuration space, the
//! order of drains, and what goes wrong behind the device.

#[path = "../../../../fuzz/src/bytes.rs"]
mod bytes;
#[path = "../guest/mod.rs"]
mod guest;

use runs::{GuestAddr, Span};
use virtio_balloon::device::{BalloonSettings, Bulk, Unrestored, regions};
use virtio_balloon::{BalloonConfig, Features, InitBit, Numbering, Queue, WIRE_PAGE};
use virtio_queue::QueueT;
use vm_memory::{Bytes as _, GuestAddress};

use bytes::{Bytes, Target};
use guest::{Act, FREE, Guest, HIGH, SIZE};

/// The target.
pub const TARGET: Target = ("balloon_device", play);

/// Steps of a run.
const STEPS: usize = 300;
/// Page sizes of the backing.
const PAGES: [u64; 3] = [WIRE_PAGE, 2 << 20, 1 << 16];

fn queue(bytes: &mut Bytes<'_>) -> Queue {
    Queue::ALL[bytes.below(Queue::ALL.len())]
}

/// Somewhere: mostly memory, and at its borders.
fn place(bytes: &mut Bytes<'_>) -> u64 {
    let offset = u64::from(bytes.u16());
    match bytes.below(6) {
        0 => offset,
        1 => FREE + offset * WIRE_PAGE,
        2 => HIGH.start + offset * WIRE_PAGE,
        3 => (HIGH.start / 2) - 32 + offset % 64,
        4 => u64::MAX - offset,
        _ => FREE + offset,
    }
}

/// A page or more, anywhere.
fn run(bytes: &mut Bytes<'_>) -> Span<GuestAddr> {
    let page = u64::from(bytes.u16()) % (HIGH.last() / WIRE_PAGE);
    Span::new(page * WIRE_PAGE, (1 + u64::from(bytes.u8())) * WIRE_PAGE)
}

fn settings(bytes: &mut Bytes<'_>) -> BalloonSettings {
    let unrestored = [
        Unrestored::Hold,
        Unrestored::HandBack,
        Unrestored::NeedsReset,
    ];
    let features = u64::from(bytes.u8());
    let bulk = bytes.flag().then(Bulk::default);
    let init = features & 0x40 != 0 && bulk.is_none();
    BalloonSettings {
        features: Features(features & 0x3f),
        bulk,
        init_on_inflate: InitBit::new(7).ok().filter(|_| init),
        numbering: match bytes.flag() {
            true => Numbering::Specification,
            false => Numbering::Compressed,
        },
        unrestored: unrestored[bytes.below(unrestored.len())],
        drain_bytes: 1 << (bytes.u8() % 24),
        ..BalloonSettings::default()
    }
}

/// Any bytes.
pub fn play(data: &[u8]) {
    let mut bytes = Bytes(data);
    let settings = settings(&mut bytes);
    let mut page = PAGES[bytes.below(PAGES.len())];
    let mut guest = Guest::fresh(settings, page);
    let offered = guest.device.features();
    guest.device.negotiate(offered).expect("it is offered");
    for _ in 0..STEPS {
        if bytes.is_empty() {
            break;
        }
        let step = bytes.u8();
        play_step(step, &mut bytes, &mut guest, &mut page);
    }
}

fn play_step(step: u8, bytes: &mut Bytes<'_>, guest: &mut Guest, page: &mut u64) {
    match step % 18 {
        0 => {
            // Rings, tables and buffers lie low.
            let at = 0x1_0000 + u64::from(bytes.u16()) * 8;
            let word: [u8; 8] = bytes.take();
            guest
                .memory
                .write_slice(&word, GuestAddress(at))
                .expect("it is memory");
        }
        1 | 2 => {
            let table = match bytes.flag() {
                true => guest.rings[bytes.below(5)].base,
                false => FREE,
            };
            let (nr, flags) = (u16::from(bytes.u8()), u16::from(bytes.u8()) & 7);
            let len = match bytes.flag() {
                true => u32::from(bytes.u8()) * 4096,
                false => u32::from_le_bytes(bytes.take()),
            };
            let buffer = (place(bytes), len);
            guest.descriptor(table, nr, buffer, flags, u16::from(bytes.u8()));
        }
        3 => guest.offer(queue(bytes), bytes.u16() % (SIZE + 2)),
        4 | 5 => {
            let message: [u8; 64] = bytes.take();
            let len = bytes.below(65);
            guest.send(queue(bytes), &message[..len]);
        }
        6 => {
            // Runs that are runs, in whatever form.
            let runs = [run(bytes), run(bytes)];
            let queue = queue(bytes);
            if queue == Queue::Reporting || queue == Queue::FreePage {
                let buffers = runs.map(|run| (run.start, run.len as u32, true));
                guest.chain(queue, &buffers);
            } else {
                let numbers = runs.iter().flat_map(|run| {
                    (run.start..run.start + run.len)
                        .step_by(4096)
                        .map(|page| page / WIRE_PAGE)
                });
                let init = guest.device.negotiated();
                let init = init.is_some_and(|features| features.contains(Features(1 << 7)));
                if queue == Queue::Inflate && init {
                    guest.asking(numbers, bytes.below(80));
                } else {
                    guest.pfns(queue, numbers);
                }
            }
        }
        7..10 => drain(queue(bytes), guest, *page),
        10 => {
            let data: [u8; 32] = bytes.take();
            let offset = match bytes.flag() {
                true => u64::from(bytes.u8() % 32),
                false => bytes.u64(),
            };
            guest.device.write_config(offset, &data[..bytes.below(33)]);
            let mut found = [0xff; 32];
            guest.device.read_config(offset, &mut found);
        }
        11 => {
            let taken = Features(guest.device.features().0 & !u64::from(bytes.u8()));
            let result = guest.device.negotiate(taken);
            let devices = guest.notes.borrow().attached;
            assert!(result.is_ok() || devices, "{result:?}");
        }
        12 => {
            let lacking = guest.device.reset();
            assert_eq!(lacking.is_empty(), guest.notes.borrow().lost.is_empty());
            guest
                .device
                .negotiate(guest.device.features())
                .expect("it is offered");
        }
        13 => match bytes.below(4) {
            0 => {
                let id = guest.device.start_hints();
                if let Ok(id) = id {
                    assert!(id >= BalloonConfig::HINT_FIRST);
                    guest.send(Queue::FreePage, &id.to_le_bytes());
                }
            }
            1 => guest.device.stop_hints(),
            2 => guest.device.finish_hints(),
            _ => guest.notes.borrow_mut().discard_hints = bytes.flag(),
        },
        14 => _ = guest.request_stats(),
        15 => {
            let parts = match bytes.flag() {
                true => vec![guest::pages(u64::from(bytes.u8()), 3)],
                false => Vec::new(),
            };
            let mut notes = guest.notes.borrow_mut();
            match bytes.below(3) {
                0 => notes.kept = parts,
                1 => notes.lost = parts,
                _ => notes.stuck = parts,
            }
        }
        16 => {
            let attached = guest.notes.borrow().attached;
            if attached {
                guest.device.devices_detached();
            }
            let may = attached || guest.device.devices_attached().is_ok();
            guest.notes.borrow_mut().attached = may && !attached;
        }
        _ => {
            guest.device.set_target(bytes.u64());
            let state = guest.device.state();
            if bytes.flag() {
                *page = PAGES[bytes.below(PAGES.len())];
                let regions = regions(&guest.memory, *page);
                guest.device.set_regions(regions).expect("whole pages");
            }
            match guest.device.restore(&state) {
                Ok(()) => assert_eq!(guest.device.state().config, state.config),
                Err(_) => assert_eq!(guest.device.negotiated(), None),
            }
        }
    }
}

fn drain(queue: Queue, guest: &mut Guest, page: u64) {
    guest.acts();
    let before = guest.device.counters();
    if let Ok(drained) = guest.try_drain(queue) {
        assert!(drained.used <= SIZE + 1, "{drained:?}");
        assert!(!(drained.held && drained.more));
        assert!(drained.used > 0 || !drained.notify);
    }
    let attached = guest.notes.borrow().attached;
    let kept = guest.notes.borrow().kept.clone();
    let mut released: Vec<Span<GuestAddr>> = Vec::new();
    let mut runs = 0;
    for act in guest.acts() {
        match act {
            Act::Release(parts) => released = parts,
            Act::Discard(parts) => {
                for part in &parts {
                    assert!(part.is_aligned(page), "{part} of pages of {page}");
                    if queue == Queue::Inflate {
                        assert!(released.iter().any(|run| run.covers(part)), "{part}");
                        assert!(!kept.iter().any(|kept| kept.overlaps(part)), "{part}");
                    }
                }
                runs += parts.len() as u64;
                assert!(
                    !attached || queue == Queue::Inflate,
                    "{queue:?} with devices"
                );
                assert!(!matches!(queue, Queue::Deflate | Queue::Stats));
            }
            _ => {}
        }
    }
    let after = guest.device.counters();
    assert_eq!(after.discards - before.discards, runs);
    assert!(guest.rings.iter().all(|ring| ring.queue.size() == SIZE));
}
