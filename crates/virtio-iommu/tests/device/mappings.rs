//! MAP and UNMAP, seen by endpoints.

use iopt::FormatId;
use runs::Span;
use virtio_iommu::wire::{Request, map_flags};
use virtio_iommu::{MemoryRegion, Status};

use crate::guest::{
    Guest, HIGH, LAST, LOW, NEXT, PAGE, REGISTERS, attach, config, map, pages, unmap,
};

const R: u32 = map_flags::READ;
const W: u32 = map_flags::WRITE;
const RW: u32 = R | W;

fn guest() -> Guest {
    let mut guest = Guest::new();
    assert_eq!(guest.send(attach(8, 1)), Some(Status::Ok));
    guest
}

/// Maps and unmaps pages; says whether each was done.
fn play(guest: &mut Guest, requests: &[Request]) -> Vec<bool> {
    let send = |request: &Request| guest.send(*request) == Some(Status::Ok);
    requests.iter().map(send).collect()
}

fn reached(guest: &Guest) -> Vec<u64> {
    let reached = |page: &u64| guest.read(8, page * PAGE).is_some();
    (0..24).filter(reached).collect()
}

#[test]
fn the_seven_examples_of_the_specification() {
    let mapping = |first, last| map(1, pages(first, last - first + 1), first * PAGE, RW);
    let unmapping = |first, last| unmap(1, pages(first, last - first + 1));
    let examples: [(&[Request], bool, &[u64]); 7] = [
        (&[unmapping(0, 4)], true, &[]),
        (&[mapping(0, 9), unmapping(0, 9)], true, &[]),
        (&[mapping(0, 4), mapping(5, 9), unmapping(0, 9)], true, &[]),
        (
            &[mapping(0, 9), unmapping(0, 4)],
            false,
            &[0, 1, 2, 3, 4, 5, 6, 7, 8, 9],
        ),
        (
            &[mapping(0, 4), mapping(5, 9), unmapping(0, 4)],
            true,
            &[5, 6, 7, 8, 9],
        ),
        (&[mapping(0, 4), unmapping(0, 9)], true, &[]),
        (
            &[mapping(0, 4), mapping(10, 14), unmapping(0, 14)],
            true,
            &[],
        ),
    ];
    for (nr, (requests, done, left)) in examples.iter().enumerate() {
        let mut guest = guest();
        let answers = play(&mut guest, requests);
        let (last, before) = answers.split_last().unwrap();
        assert!(before.iter().all(|done| *done), "({})", nr + 1);
        assert_eq!(last, done, "({})", nr + 1);
        assert_eq!(reached(&guest), *left, "({})", nr + 1);
        assert_eq!(guest.pinned(), left.len() as u64 * PAGE);
    }
}

#[test]
fn a_mapping_is_one_operation_however_scattered_its_memory_is() {
    let mut guest = guest();
    // All of the first region, which lies in two runs of physical memory.
    assert_eq!(
        guest.send(map(1, Span::new(1 << 30, LOW.len), 0, RW)),
        Some(Status::Ok)
    );
    let space = guest.device.space_of(8).unwrap();
    assert_eq!(space.len(), 1);
    for offset in (0..LOW.len).step_by(PAGE as usize) {
        assert_eq!(guest.read(8, (1 << 30) + offset + 8), Some(offset + 8));
    }
    assert_eq!((guest.pinned(), guest.ledger.in_use()), (LOW.len, LOW.len));
    // Once more elsewhere: pinned and charged already.
    assert_eq!(
        guest.send(map(1, Span::new(2 << 30, LOW.len), 0, R)),
        Some(Status::Ok)
    );
    assert_eq!((guest.pinned(), guest.ledger.in_use()), (LOW.len, LOW.len));
    assert_eq!(
        guest.send(unmap(1, Span::new(1 << 30, 2 << 30))),
        Some(Status::Ok)
    );
    assert_eq!((guest.pinned(), guest.ledger.in_use()), (0, 0));
    assert!(guest.device.reset());
    guest.assert_all_back();
}

#[test]
fn a_mapping_over_two_regions_is_one_and_cannot_be_cut_where_they_meet() {
    let mut guest = guest();
    let phys = NEXT.start - 2 * PAGE;
    assert_eq!(guest.send(map(1, pages(10, 4), phys, RW)), Some(Status::Ok));
    // Neighbours at both ends, of mappings of their own.
    assert_eq!(guest.send(map(1, pages(9, 1), 0, RW)), Some(Status::Ok));
    assert_eq!(guest.send(map(1, pages(14, 1), 0, RW)), Some(Status::Ok));
    for page in 0..4 {
        assert_eq!(guest.read(8, (10 + page) * PAGE), Some(phys + page * PAGE));
    }
    for cut in [
        pages(10, 2),
        pages(12, 2),
        pages(9, 3),
        pages(12, 3),
        pages(11, 1),
        pages(0, 12),
    ] {
        assert_eq!(guest.send(unmap(1, cut)), Some(Status::Range), "{cut}");
    }
    assert_eq!(guest.pinned(), 5 * PAGE);
    assert_eq!(guest.send(unmap(1, pages(10, 4))), Some(Status::Ok));
    assert_eq!(reached(&guest), [9, 14]);
    // Two mappings that meet at the same place are two.
    assert_eq!(guest.send(map(1, pages(10, 2), phys, RW)), Some(Status::Ok));
    assert_eq!(
        guest.send(map(1, pages(12, 2), NEXT.start, RW)),
        Some(Status::Ok)
    );
    assert_eq!(guest.send(unmap(1, pages(10, 2))), Some(Status::Ok));
    assert_eq!(reached(&guest), [9, 12, 13, 14]);
}

#[test]
fn an_unmap_leaves_the_joints_of_mappings_behind_it() {
    let mut guest = guest();
    let phys = NEXT.start - 2 * PAGE;
    for first in [10, 20] {
        let range = pages(first, 4);
        assert_eq!(guest.send(map(1, range, phys, RW)), Some(Status::Ok));
    }
    assert_eq!(guest.send(unmap(1, pages(10, 4))), Some(Status::Ok));
    for cut in [pages(20, 2), pages(22, 2)] {
        assert_eq!(guest.send(unmap(1, cut)), Some(Status::Range), "{cut}");
    }
    assert_eq!(reached(&guest), [20, 21, 22, 23]);
    assert_eq!(guest.send(unmap(1, pages(20, 4))), Some(Status::Ok));
}

/// VIRTIO 1.3, 5.13.6.5.2: all three are looked at before what lies there.
#[test]
fn a_map_whose_ends_are_not_aligned_is_out_of_range_whatever_lies_there() {
    let mut guest = guest();
    let page = pages(10, 1);
    for (range, phys) in [
        (page, 8),
        (page, (1 << 50) + 8),
        (Span::new(page.start + 8, PAGE - 8), 0),
        (Span::new(page.start, PAGE - 8), 1 << 50),
    ] {
        let sent = guest.send(map(1, range, phys, RW));
        assert_eq!(sent, Some(Status::Range), "{range} {phys:#x}");
    }
    let sent = guest.send(map(1, page, 1 << 50, RW));
    assert_eq!(sent, Some(Status::Fault));
    assert_eq!(reached(&guest), [0; 0]);
}

#[test]
fn a_mapping_over_two_regions_is_made_whole_or_not_at_all() {
    let mut guest = guest();
    let phys = NEXT.start - 2 * PAGE;
    assert_eq!(guest.send(map(1, pages(13, 1), 0, RW)), Some(Status::Ok));
    let tables = guest.tables.in_use();
    assert_eq!(
        guest.send(map(1, pages(10, 4), phys, RW)),
        Some(Status::Inval)
    );
    assert_eq!((guest.pinned(), guest.tables.in_use()), (PAGE, tables));
    assert_eq!(reached(&guest), [13]);
    // No joint is left of it.
    assert_eq!(guest.send(map(1, pages(10, 2), phys, RW)), Some(Status::Ok));
    assert_eq!(guest.send(unmap(1, pages(12, 2))), Some(Status::Ok));
    assert_eq!(reached(&guest), [10, 11]);
}

#[test]
fn an_unmap_need_not_be_aligned_and_may_be_the_whole_space() {
    let mut guest = guest();
    assert_eq!(guest.send(map(1, pages(1, 1), 0, RW)), Some(Status::Ok));
    assert_eq!(guest.send(map(1, pages(5, 1), 0, RW)), Some(Status::Ok));
    assert_eq!(
        guest.send(unmap(1, Span::new(PAGE - 5, PAGE + 77))),
        Some(Status::Ok)
    );
    assert_eq!(reached(&guest), [5]);
    let Request::Unmap(mut all) = unmap(1, pages(0, 1)) else {
        panic!("an unmap");
    };
    all.virt_end = u64::MAX;
    assert_eq!(guest.send(Request::Unmap(all)), Some(Status::Ok));
    assert_eq!((reached(&guest), guest.pinned()), (vec![], 0));
    // Up to the last address that there is.
    let top = LAST + 1 - PAGE;
    assert_eq!(
        guest.send(map(1, Span::new(top, PAGE), 0, RW)),
        Some(Status::Ok)
    );
    assert_eq!(guest.read(8, LAST - 7), Some(PAGE - 8));
    all.virt_start = 1;
    assert_eq!(guest.send(Request::Unmap(all)), Some(Status::Ok));
    assert_eq!(guest.read(8, LAST - 7), None);
}

#[test]
fn endpoints_do_what_the_flags_allow_and_nothing_else() {
    for format in [FormatId::VtdSs, FormatId::X86_64] {
        let mut guest = Guest::with(config(), format);
        assert_eq!(guest.send(attach(8, 1)), Some(Status::Ok));
        for (page, flags) in [(1, R), (2, W), (3, RW)] {
            let request = map(1, pages(page, 1), page * PAGE, flags);
            assert_eq!(guest.send(request), Some(Status::Ok), "{format} {flags}");
            let at = page * PAGE;
            assert_eq!(guest.writes(8, at, at), flags & W != 0, "{format} {flags}");
            // x86 has nothing that can only be written (5.13.6.5.2).
            let reads = flags & R != 0 || format == FormatId::X86_64;
            assert_eq!(guest.read(8, at).is_some(), reads, "{format} {flags}");
        }
    }
}

#[test]
fn registers_are_mapped_as_registers() {
    let mut guest = guest();
    let request = map(1, pages(1, 2), REGISTERS.start + PAGE, RW | map_flags::MMIO);
    assert_eq!(guest.send(request), Some(Status::Ok));
    assert_eq!(guest.read(8, PAGE + 16), Some(REGISTERS.start + PAGE + 16));
    assert_eq!(guest.pinned(), 0);
}

#[test]
fn mappings_outlive_their_region() {
    let mut guest = guest();
    assert_eq!(
        guest.send(map(1, pages(1, 1), HIGH.start, RW)),
        Some(Status::Ok)
    );
    let less: Vec<MemoryRegion> = guest.regions[..2].to_vec();
    guest.device.set_memory(less).unwrap();
    assert_eq!(guest.read(8, PAGE), Some(HIGH.start));
    assert_eq!(
        guest.send(map(1, pages(2, 1), HIGH.start, RW)),
        Some(Status::Fault)
    );
    assert_eq!(guest.send(unmap(1, pages(1, 1))), Some(Status::Ok));
    assert_eq!(guest.pinned(), 0);
}

#[test]
fn a_balloon_finds_what_endpoints_reach() {
    let mut guest = guest();
    let [low, next] = [0, 1].map(|nr: usize| guest.regions[nr].memory.clone());
    let whole = Span::new(0, LOW.len);
    assert_eq!(guest.device.first_mapped(&low, whole), None);
    // Two domains; one sees its pages twice.
    assert_eq!(guest.send(attach(9, 2)), Some(Status::Ok));
    for request in [
        map(1, pages(100, 2), 8 * PAGE, R),
        map(1, pages(200, 4), 7 * PAGE, RW),
        map(2, pages(50, 1), 4 * PAGE, W),
    ] {
        assert_eq!(guest.send(request), Some(Status::Ok));
    }
    let first = |guest: &Guest, from: u64, to: u64| {
        let part = Span::new(from * PAGE, (to - from) * PAGE);
        let found = guest.device.first_mapped(&low, part);
        found.map(|found| (found.start / PAGE, found.len / PAGE))
    };
    assert_eq!(first(&guest, 0, 256), Some((4, 1)));
    assert_eq!(first(&guest, 5, 256), Some((7, 4)));
    assert_eq!(first(&guest, 9, 10), Some((9, 1)));
    assert_eq!(first(&guest, 11, 256), None);
    assert_eq!(
        guest.device.first_mapped(&next, Span::new(0, NEXT.len)),
        None
    );
    assert_eq!(guest.send(unmap(2, pages(50, 1))), Some(Status::Ok));
    assert_eq!(first(&guest, 0, 7), None);
}

#[test]
fn a_balloon_finds_all_memory_in_bypass_mode() {
    let mut config = config();
    config.bypass = Some(true);
    let guest = Guest::with(config, FormatId::VtdSs);
    let low = guest.regions[0].memory.clone();
    let page = Span::new(PAGE, PAGE);
    assert_eq!(guest.device.first_mapped(&low, page), Some(page));
}
