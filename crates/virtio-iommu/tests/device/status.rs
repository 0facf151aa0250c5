//! Each status, by what brings it.

use ioas::AttachError;
use runs::Span;
use virtio_iommu::wire::{Attach, Request, Unmap, attach_flags, map_flags};
use virtio_iommu::{Status, features};

use crate::guest::{
    Guest, HIGH, LAST, LOW, NEXT, PAGE, PROBE_BYTES, REGISTERS, RESERVED_PAGE, attach, attach_with,
    config, detach, map, pages, probe, status, unmap,
};

const R: u32 = map_flags::READ;
const RW: u32 = map_flags::READ | map_flags::WRITE;
const BYPASS: u32 = attach_flags::BYPASS;

/// A guest whose endpoint 8 is in domain 1, with a page mapped at page 16.
fn mapped() -> Guest {
    let mut guest = Guest::new();
    assert_eq!(guest.send(attach(8, 1)), Some(Status::Ok));
    assert_eq!(guest.send(map(1, pages(16, 2), PAGE, RW)), Some(Status::Ok));
    guest
}

/// Each request is answered with this status, and changes nothing.
fn refused(guest: &mut Guest, status: Status, requests: &[Request]) {
    for request in requests {
        let before = (
            guest.pinned(),
            guest.tables.in_use(),
            guest.device.domains().count(),
        );
        assert_eq!(guest.send(*request), Some(status), "{request:?}");
        let after = (
            guest.pinned(),
            guest.tables.in_use(),
            guest.device.domains().count(),
        );
        assert_eq!(before, after, "{request:?}");
        assert_eq!(guest.device.domain_of(8), Some(1), "{request:?}");
        assert_eq!(guest.read(8, 16 * PAGE), Some(PAGE), "{request:?}");
        let told = guest.device.back_end().refused.pop();
        assert!(told.is_some_and(|told| told.starts_with(&format!("{}: ", request.kind()))));
    }
    assert!(guest.device.counters().with(status) >= requests.len() as u64);
}

#[test]
fn ioerr_is_a_request_that_is_not_in_memory() {
    let mut guest = mapped();
    let room = [(1 << 40, 20, false), (crate::guest::ANSWER, 4, true)];
    guest.blank(4);
    guest.chain(0, &room);
    assert_eq!(status(&guest.answer(4)), Some(Status::IoErr));
    assert_eq!(guest.device.counters().with(Status::IoErr), 1);
    assert_eq!(
        guest.device.back_end().refused.pop().unwrap(),
        "0: 20 bytes of the request at 0x10000000000 cannot be read"
    );
}

#[test]
fn ioerr_comes_with_zeros_and_not_with_the_answer_before_it() {
    let mut guest = mapped();
    let answered = guest.send(probe(8));
    assert_eq!(answered, Some(Status::Ok));
    guest.blank(PROBE_BYTES + 4);
    let answer = (crate::guest::ANSWER, PROBE_BYTES + 4, true);
    guest.chain(0, &[(1 << 40, 72, false), answer]);
    let answer = guest.answer(PROBE_BYTES + 4);
    assert_eq!(status(&answer), Some(Status::IoErr));
    let (properties, _tail) = answer.split_at(PROBE_BYTES as usize);
    assert_eq!(properties, [0; PROBE_BYTES as usize]);
}

#[test]
fn unsupp_is_an_endpoint_that_cannot_share_the_domain() {
    let mut guest = mapped();
    let reserved = Span::new(RESERVED_PAGE, PAGE);
    assert_eq!(guest.send(map(1, reserved, 0, R)), Some(Status::Ok));
    refused(&mut guest, Status::Unsupp, &[attach(16, 1)]);
    // And one that its back end does not attach.
    guest.device.back_end().no_attach = Some(9);
    refused(&mut guest, Status::Unsupp, &[attach(9, 1), attach(9, 2)]);
}

#[test]
fn unsupp_is_an_endpoint_that_does_not_join_others_whatever_the_cause_is() {
    let mut guest = mapped();
    let back = guest.device.back_end();
    (back.no_attach, back.why) = (Some(9), || AttachError::Build("no room".into()));
    refused(&mut guest, Status::Unsupp, &[attach(9, 1)]);
    refused(&mut guest, Status::NoMem, &[attach(9, 2)]);
    // In bypass domains as well.
    assert_eq!(guest.send(attach_with(16, 3, BYPASS)), Some(Status::Ok));
    refused(&mut guest, Status::Unsupp, &[attach_with(9, 3, BYPASS)]);
    guest.device.back_end().no_attach = None;
    assert_eq!(guest.send(attach(9, 1)), Some(Status::Ok));
}

#[test]
fn unsupp_is_an_endpoint_that_does_not_leave_its_domain_for_another() {
    let mut guest = mapped();
    guest.device.back_end().no_detach = Some(8);
    refused(&mut guest, Status::Unsupp, &[attach(8, 2)]);
    assert_eq!(guest.send(attach(9, 2)), Some(Status::Ok));
    refused(&mut guest, Status::Unsupp, &[attach(8, 2)]);
}

#[test]
fn deverr_is_an_endpoint_that_does_not_let_go() {
    let mut guest = mapped();
    guest.device.back_end().no_detach = Some(8);
    refused(&mut guest, Status::DevErr, &[detach(8, 1)]);
    guest.device.back_end().no_detach = None;
    assert_eq!(guest.send(detach(8, 1)), Some(Status::Ok));
    guest.assert_all_back();
}

#[test]
fn inval_is_what_makes_no_sense() {
    let mut guest = mapped();
    assert_eq!(guest.send(attach_with(9, 2, BYPASS)), Some(Status::Ok));
    let reserved = [0, 0, 0, 1];
    let attach_reserved = Request::Attach(Attach {
        domain: 2,
        endpoint: 8,
        flags: 0,
        reserved,
    });
    let unmap_reserved = Request::Unmap(Unmap {
        domain: 1,
        virt_start: 0,
        virt_end: LAST,
        reserved,
    });
    let backwards = Request::Unmap(Unmap {
        domain: 1,
        virt_start: 18 * PAGE,
        virt_end: 16 * PAGE - 1,
        reserved: [0; 4],
    });
    let msi = Span::new(0xfeef_f000, PAGE);
    refused(
        &mut guest,
        Status::Inval,
        &[
            attach_reserved,
            attach_with(8, 3, 2),
            attach_with(8, 3, 1 << 31 | BYPASS),
            // A domain of the other kind.
            attach_with(16, 1, BYPASS),
            attach(8, 2),
            // Not there, or not attached to it.
            detach(8, 2),
            detach(8, 3),
            detach(16, 1),
            map(1, pages(17, 4), 0, RW),
            map(1, pages(16, 2), PAGE, RW),
            map(1, pages(0, 1), 0, RW | 8),
            map(1, pages(0, 1), 0, 0),
            map(1, msi, 0, RW),
            map(1, Span::new(0xfee0_0000 - PAGE, 3 * PAGE), 0, RW),
            map(2, pages(0, 1), 0, RW),
            // Memory is not registers.
            map(1, pages(0, 1), 0, RW | map_flags::MMIO),
            map(1, pages(0, 1), REGISTERS.start, RW),
            unmap(2, pages(0, 1)),
            unmap_reserved,
            backwards,
        ],
    );
}

#[test]
fn inval_are_flags_whose_features_are_not_negotiated() {
    let mut guest = Guest::new();
    let all = guest.device.features();
    let without = all & !(features::MMIO | features::BYPASS_CONFIG);
    guest.device.ack_features(without).unwrap();
    assert_eq!(guest.send(attach(8, 1)), Some(Status::Ok));
    let mmio = map(1, pages(0, 1), REGISTERS.start, RW | map_flags::MMIO);
    assert_eq!(guest.send(mmio), Some(Status::Inval));
    assert_eq!(guest.send(attach_with(9, 2, BYPASS)), Some(Status::Inval));
    guest.device.write_config(36, &[1]);
    assert_eq!(guest.device.config()[36], 0);
}

#[test]
fn range_is_what_lies_outside_or_has_no_whole_pages() {
    let mut guest = mapped();
    refused(
        &mut guest,
        Status::Range,
        &[
            attach(8, 100),
            attach(9, u32::MAX),
            map(1, Span::new(1, PAGE), 0, RW),
            map(1, Span::new(0, PAGE - 1), 0, RW),
            map(1, Span::new(0, PAGE), 8, RW),
            map(1, Span::new(LAST + 1, PAGE), 0, RW),
            map(1, Span::new(LAST + 1 - PAGE, 2 * PAGE), 0, RW),
            map(1, Span::new(0u64.wrapping_sub(PAGE), PAGE), 0, RW),
            // Parts of a mapping.
            unmap(1, pages(16, 1)),
            unmap(1, pages(17, 1)),
            unmap(1, Span::new(16 * PAGE, PAGE + 1)),
            unmap(1, pages(0, 17)),
        ],
    );
}

#[test]
fn noent_is_who_is_not_there() {
    let mut guest = mapped();
    refused(
        &mut guest,
        Status::NoEnt,
        &[
            attach(7, 1),
            attach(7, 2),
            detach(7, 1),
            map(2, pages(0, 1), 0, RW),
            unmap(2, pages(0, 1)),
            probe(7),
        ],
    );
    // The properties of an unknown endpoint are zeros.
    let mut buffer = [0; virtio_iommu::wire::MOST_REQUEST_BYTES];
    let answer = guest.send_bytes(probe(7).encode(&mut buffer), PROBE_BYTES + 4);
    assert!(answer[..64].iter().all(|byte| *byte == 0));
}

#[test]
fn fault_is_what_is_no_memory() {
    let mut guest = mapped();
    let top = 0u64.wrapping_sub(PAGE);
    refused(
        &mut guest,
        Status::Fault,
        &[
            // In the hole, into it, over it, behind everything, beyond 2^64.
            map(1, pages(0, 1), NEXT.start + NEXT.len, RW),
            map(1, pages(0, 2), NEXT.start + NEXT.len - PAGE, RW),
            map(1, Span::new(0x10_0000, HIGH.start + PAGE), 0, RW),
            map(1, pages(0, 2), HIGH.start + HIGH.len - PAGE, RW),
            map(1, pages(0, 1), top, RW),
            map(1, pages(0, 2), top, RW),
        ],
    );
    // All 2^64 bytes, where all can be mapped.
    let mut config = config();
    config.input = None;
    let mut guest = Guest::with(config, iopt::FormatId::VtdSs);
    assert_eq!(guest.send(attach(9, 1)), Some(Status::Ok));
    let Request::Map(mut all) = map(1, pages(0, 1), 0, RW) else {
        panic!("a map");
    };
    all.virt_end = u64::MAX;
    assert_eq!(guest.send(Request::Map(all)), Some(Status::Fault));
    // And what the tables do not reach.
    let beyond = map(1, Span::new(1 << 60, PAGE), 0, RW);
    assert_eq!(guest.send(beyond), Some(Status::Range));
}

#[test]
fn nomem_is_a_limit() {
    let mut guest = mapped();
    // Domains: one is there, three more can be, and there are two more endpoints.
    guest.device.back_end().spaces = 1;
    assert_eq!(guest.send(attach(9, 2)), Some(Status::Ok));
    refused(&mut guest, Status::NoMem, &[attach(16, 3)]);
    let mut few = config();
    few.most_domains = 1;
    let mut guest = Guest::with(few, iopt::FormatId::VtdSs);
    assert_eq!(guest.send(attach(8, 1)), Some(Status::Ok));
    assert_eq!(guest.send(map(1, pages(16, 2), PAGE, RW)), Some(Status::Ok));
    refused(&mut guest, Status::NoMem, &[attach(9, 2)]);

    // Mappings of a domain.
    for nr in 0..63 {
        assert_eq!(
            guest.send(map(1, pages(32 + nr, 1), 0, R)),
            Some(Status::Ok)
        );
    }
    refused(&mut guest, Status::NoMem, &[map(1, pages(200, 1), 0, R)]);
    assert_eq!(
        guest.device.counters().with(Status::NoMem),
        2,
        "{:?}",
        guest.device.counters()
    );
    assert!(guest.device.reset());

    // Locked memory.
    let mut guest = mapped();
    let _held = guest.ledger.charge(HIGH.len + NEXT.len);
    refused(
        &mut guest,
        Status::NoMem,
        &[map(1, Span::new(1 << 30, LOW.len + NEXT.len), 0, RW)],
    );
    assert_eq!(guest.pinned(), 2 * PAGE);
}

#[test]
fn nomem_are_tables_that_are_used_up() {
    let mut config = config();
    config.most_mappings = usize::MAX;
    let mut guest = Guest::with(config, iopt::FormatId::VtdSs);
    assert_eq!(guest.send(attach(9, 1)), Some(Status::Ok));
    // Each in tables of its own.
    let mut maps = (0..128).map(|nr| map(1, Span::new(nr << 33, PAGE), 0, R));
    let refused =
        maps.find_map(|map| Some((map, guest.send(map)?)).filter(|(_, it)| *it != Status::Ok));
    let (last, status) = refused.unwrap();
    assert_eq!(status, Status::NoMem);
    let Request::Map(last) = last else {
        panic!("a map");
    };
    assert_eq!(guest.read(9, last.virt_start), None);
    assert_eq!(guest.read(9, last.virt_start - (1 << 33)), Some(0));
    // An unmap makes room.
    assert_eq!(
        guest.send(unmap(1, Span::new(0, 1 << 33))),
        Some(Status::Ok)
    );
    assert_eq!(guest.send(Request::Map(last)), Some(Status::Ok));
    assert!(guest.device.reset());
    guest.assert_all_back();
}
