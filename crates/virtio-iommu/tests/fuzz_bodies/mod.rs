//! The whole device: the bytes are what a driver writes to rings and buffers, the order of calls, and what goes
//! wrong behind the device.

#[path = "../../../../fuzz/src/bytes.rs"]
mod bytes;
#[path = "../guest/mod.rs"]
mod guest;

use runs::Span;
use virtio_iommu::wire::{MOST_REQUEST_BYTES, Request};
use virtio_iommu::{FaultReport, ReportReason, Status, VirtioIommuConfig};
use virtio_queue::QueueT;
use vm_memory::{Bytes as _, GuestAddress};

use bytes::{Bytes, Target};
use guest::{ANSWER, ENDPOINTS, Guest, LAST, PAGE, RINGS, SIZE, config};

/// All targets; the corpus of one lies in `fuzz/corpus/` under its name.
pub const TARGETS: [Target; 1] = [("virtio_iommu_device", play)];

/// Steps of a run.
const STEPS: usize = 200;
/// The bytes of a guest that are mapped, and so pinned, at most.
const ALL: u64 = guest::LOW.len + guest::NEXT.len + guest::HIGH.len;

/// Somewhere: mostly near a page that is mapped.
fn address(bytes: &mut Bytes<'_>) -> u64 {
    let near = u64::from(bytes.u8() % 32) * PAGE;
    match bytes.below(8) {
        0 => bytes.u64(),
        1 => 0xfee0_0000 - 16 * PAGE + near,
        2 => guest::NEXT.start - 16 * PAGE + near,
        3 => guest::HIGH.start + near,
        4 => LAST - near,
        5 => near + u64::from(bytes.u8()),
        _ => near,
    }
}

/// A request that is nearly one.
fn request(bytes: &mut Bytes<'_>) -> Request {
    let domain = u32::from(bytes.u8() % 6);
    let endpoint = match bytes.below(5) {
        nr @ 0..3 => ENDPOINTS[nr],
        _ => u32::from(bytes.u8()),
    };
    let flags = u32::from(bytes.u8() & 0xf);
    let (start, phys) = (address(bytes), address(bytes));
    let end = match bytes.flag() {
        true => start.wrapping_add((1 + u64::from(bytes.u8() % 16)) * PAGE - 1),
        false => address(bytes),
    };
    match bytes.below(7) {
        0 => guest::attach_with(endpoint, domain, flags >> 3),
        1 => guest::detach(endpoint, domain),
        2 | 3 => {
            let range = Span::new(start, end.wrapping_sub(start).wrapping_add(1));
            guest::map(domain, range, phys, flags)
        }
        4 | 5 => {
            let range = Span::new(start, end.wrapping_sub(start).wrapping_add(1));
            guest::unmap(domain, range)
        }
        _ => guest::probe(endpoint),
    }
}

fn fresh(bytes: &mut Bytes<'_>) -> Guest {
    let bypass = [None, Some(false), Some(true)][bytes.below(3)];
    let mut config = VirtioIommuConfig { bypass, ..config() };
    if bytes.flag() {
        config.input = None;
    }
    config.most_mappings = 1 + usize::from(bytes.u8());
    let format = match bytes.flag() {
        true => iopt::FormatId::VtdSs,
        false => iopt::FormatId::AmdV1,
    };
    Guest::with(config, format)
}

/// Any bytes.
pub fn play(data: &[u8]) {
    let mut bytes = Bytes(data);
    let mut guest = fresh(&mut bytes);
    for _ in 0..STEPS {
        if bytes.is_empty() {
            break;
        }
        step(&mut bytes, &mut guest);
        holds(&guest);
    }
    let back = guest.device.back_end();
    (back.no_attach, back.no_detach) = (None, None);
    guest.device.reset();
    guest
        .device
        .ack_features(guest.device.features())
        .expect("offered");
    guest.device.write_config(36, &[0]);
    assert!(!guest.device.needs_reset());
    if guest.device.config()[36] == 0 {
        guest.assert_all_back();
    }
}

fn step(bytes: &mut Bytes<'_>, guest: &mut Guest) {
    match bytes.below(16) {
        0 => {
            // Rings, tables and buffers.
            let at = u64::from(bytes.u16()) % (RINGS - 8);
            let word: [u8; 8] = bytes.take();
            guest
                .memory
                .write_slice(&word, GuestAddress(at))
                .expect("it is memory");
        }
        1 | 2 => {
            let queue = &guest.queues[bytes.below(2)];
            let table = match bytes.flag() {
                true => queue.desc_table(),
                false => 0xb000,
            };
            let (nr, flags) = (u16::from(bytes.u8()) % SIZE, u16::from(bytes.u8()) & 7);
            let address = match bytes.flag() {
                true => u64::from(bytes.u16()),
                false => bytes.u64(),
            };
            let next = u16::from(bytes.u8()) % (SIZE + 1);
            let len = u32::from(bytes.u16());
            guest.descriptor(table, nr, (address, len), flags, next);
        }
        3 => guest.offer(bytes.below(2), bytes.u16() % (SIZE + 2)),
        4 => _ = guest.serve(),
        5 => {
            let message: [u8; 76] = bytes.take();
            let len = bytes.below(77) as u32;
            guest
                .memory
                .write_slice(&message, GuestAddress(0xa000))
                .expect("it is memory");
            let room = u32::from(bytes.u8() % 80);
            guest.chain(0, &[(0xa000, len, false), (ANSWER, room, true)]);
            _ = guest.serve();
        }
        6 => {
            let faults = [0; 3].map(|_| FaultReport {
                reason: ReportReason::Mapping,
                endpoint: ENDPOINTS[bytes.below(3)],
                access: None,
                address: Some(bytes.u64()),
            });
            guest.give(u16::from(bytes.u8()) % SIZE, u32::from(bytes.u8() % 32));
            _ = guest.tell(&faults);
        }
        7 => {
            let data: [u8; 8] = bytes.take();
            let offset = u64::from(bytes.u8() % 48);
            guest.device.write_config(offset, &data[..bytes.below(9)]);
        }
        8 => {
            let refused = match bytes.flag() {
                true => Some(ENDPOINTS[bytes.below(3)]),
                false => None,
            };
            let back = guest.device.back_end();
            match bytes.flag() {
                true => back.no_attach = refused,
                false => back.no_detach = refused,
            }
        }
        9 => {
            guest.device.reset();
            let taken = guest.device.features() & !u64::from(bytes.u8() & bytes.u8());
            guest.device.ack_features(taken).expect("offered");
        }
        10 => {
            let less = guest.regions[bytes.below(2)..].to_vec();
            guest.device.set_memory(less).expect("regions");
        }
        _ => {
            // One that is answered, unless the rings are broken.
            let mut buffer = [0; MOST_REQUEST_BYTES];
            let request = request(bytes);
            let message = request.encode(&mut buffer);
            guest
                .memory
                .write_slice(message, GuestAddress(0xa000))
                .expect("it is memory");
            let room = request.answer_bytes(guest::PROBE_BYTES as usize) as u32;
            guest.chain(
                0,
                &[(0xa000, message.len() as u32, false), (ANSWER, room, true)],
            );
            _ = guest.serve();
        }
    }
}

/// Invariants.
fn holds(guest: &Guest) {
    assert!(guest.pinned() <= ALL && guest.ledger.in_use() == guest.pinned());
    let config = guest.device.config();
    assert!(config[36] <= 1 && config[37..] == [0; 3]);
    let counters = guest.device.counters();
    assert!(
        Status::ALL
            .iter()
            .all(|status| counters.with(*status) < 1 << 32)
    );
    for endpoint in ENDPOINTS {
        // Every reached word is the guest's, and in a domain or bypass mode.
        if let Some(word) = guest.read(endpoint, PAGE) {
            let regions = [guest::LOW, guest::NEXT, guest::HIGH, guest::REGISTERS];
            assert!(regions.iter().any(|region| region.contains(word)));
            assert!(guest.device.space_of(endpoint).is_some());
        }
    }
}
