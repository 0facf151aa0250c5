//! The device on memory of this machine.

use std::fs::File;
use std::os::unix::fs::MetadataExt;

use hostmem::{Backing, Mapping};
use runs::{GuestAddr, Span};
use virtio_balloon::device::{Discarder as _, GuestDiscard, NotDiscarded};
use virtio_balloon::{MemoryMap, Part, Refusals};
use vm_memory::{
    Bytes, FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion,
};

const PAGE: u64 = 4096;
const LOW: Span<GuestAddr> = Span::new(0, 4 << 20);
const HIGH: Span<GuestAddr> = Span::new(8 << 20, 4 << 20);

fn ranges() -> [(GuestAddress, usize); 2] {
    [LOW, HIGH].map(|region| (GuestAddress(region.start), region.len as usize))
}

/// A memory file, and both regions in it, behind one another from the second page on.
fn shared() -> (File, GuestMemoryMmap) {
    let len = PAGE + LOW.len + HIGH.len;
    let memfd = Mapping::new(Backing::Memfd, len, None).unwrap();
    let file = File::from(memfd.fd().unwrap().try_clone_to_owned().unwrap());
    let mut start = PAGE;
    let ranges = ranges().map(|(address, len)| {
        let offset = FileOffset::new(file.try_clone().unwrap(), start);
        start += len as u64;
        (address, len, Some(offset))
    });
    let memory = GuestMemoryMmap::from_ranges_with_files(ranges).unwrap();
    (file, memory)
}

/// Every page with its own word.
fn fill(memory: &GuestMemoryMmap) {
    for region in [LOW, HIGH] {
        for page in (region.start..=region.last()).step_by(PAGE as usize) {
            memory.write_obj(page + 1, GuestAddress(page)).unwrap();
        }
    }
}

fn check(memory: &GuestMemoryMmap, discarded: &[Span<GuestAddr>]) {
    for region in [LOW, HIGH] {
        for page in (region.start..=region.last()).step_by(PAGE as usize) {
            let gone = discarded.iter().any(|run| run.contains(page));
            let expected = if gone { 0 } else { page + 1 };
            let found: u64 = memory.read_obj(GuestAddress(page)).unwrap();
            assert_eq!(found, expected, "{page:#x}");
        }
    }
}

const RUNS: [Span<GuestAddr>; 5] = [
    Span::new(0, PAGE),
    Span::new(3 * PAGE, 5 * PAGE),
    // To the end of the region.
    Span::new((4 << 20) - PAGE, PAGE),
    Span::new(8 << 20, 2 * PAGE),
    Span::new((12 << 20) - 2 * PAGE, 2 * PAGE),
];

fn resolved<T>(map: MemoryMap<'_, T>, run: Span<GuestAddr>) -> Vec<Part> {
    let mut parts = Vec::new();
    map.resolve(run, &mut Refusals::new(), |part| parts.push(part));
    parts
}

#[test]
fn runs_are_discarded_where_they_lie_and_nothing_else_is() {
    let private = GuestMemoryMmap::from_ranges(&ranges()).unwrap();
    let (file, in_file) = shared();
    for memory in [private, in_file] {
        fill(&memory);
        let mut discard = GuestDiscard::new();
        let regions = GuestDiscard::regions(&memory, PAGE).unwrap();
        let map = MemoryMap::new(&regions).unwrap();
        let found = regions.iter().map(|region| (region.guest, region.page));
        assert_eq!(
            found.collect::<Vec<_>>(),
            [LOW, HIGH].map(|guest| (guest, PAGE))
        );
        let parts: Vec<_> = RUNS.iter().flat_map(|run| resolved(map, *run)).collect();
        let before = file.metadata().unwrap().blocks();
        let bytes = discard.discard(map, &parts, &mut |part, cause| panic!("{part:?}: {cause}"));
        assert_eq!(bytes, 11 * PAGE);
        if memory.iter().any(|region| region.file_offset().is_some()) {
            // Freed, not only emptied: in blocks of 512 bytes.
            let freed = before - file.metadata().unwrap().blocks();
            assert_eq!(freed * 512, 11 * PAGE);
        }
        check(&memory, &RUNS);
        assert_eq!((discard.totals().bytes, discard.totals().kept), (bytes, 0));
    }
}

#[test]
fn parts_that_are_in_no_region_are_reported_and_nothing_of_them_is_touched() {
    let memory = GuestMemoryMmap::from_ranges(&ranges()).unwrap();
    fill(&memory);
    let regions = GuestDiscard::regions(&memory, PAGE).unwrap();
    let map = MemoryMap::new(&regions).unwrap();
    let part = |region, start| Part::new(region, Span::new(start, 2 * PAGE));
    // Parts of another map: beyond a region's end, and of a region that is not there.
    let wrong = [
        part(0, LOW.len - PAGE),
        part(0, LOW.len),
        part(1, HIGH.len - PAGE),
        part(2, 0),
        part(usize::MAX, u64::MAX - 2 * PAGE + 1),
    ];
    let mut told = Vec::new();
    let mut discard = GuestDiscard::new();
    let bytes = discard.discard(map, &wrong, &mut |part, cause| {
        assert_eq!(cause, NotDiscarded::NotPages);
        told.push(part);
    });
    assert_eq!((bytes, &told[..]), (0, &wrong[..]));
    check(&memory, &[]);
    // Others of the region are discarded all the same.
    let right = Part::new(0, Span::new(PAGE, PAGE));
    let bytes = discard.discard(map, &[right, wrong[0]], &mut |_, _| ());
    assert_eq!(bytes, PAGE);
    check(&memory, &[map.run(&right)]);
}

#[test]
fn a_run_is_resolved_to_its_place_in_its_region() {
    let (_, memory) = shared();
    let regions = GuestDiscard::regions(&memory, PAGE).unwrap();
    let map = MemoryMap::new(&regions).unwrap();
    let inside = resolved(map, Span::new(HIGH.start + PAGE, 3 * PAGE));
    assert_eq!(inside, [Part::new(1, Span::new(PAGE, 3 * PAGE))]);
    let behind = map.region(&inside[0]).unwrap().memory.mapping();
    assert_eq!(behind.map(|behind| behind.len()), Some(HIGH.len));
    // Over the hole, and up to the end of the second.
    let across = resolved(map, Span::new(LOW.len - PAGE, 16 << 20));
    let ends = [(0, LOW.len - PAGE, PAGE), (1, 0, HIGH.len)];
    assert_eq!(
        across,
        ends.map(|(n, start, len)| Part::new(n, Span::new(start, len)))
    );
    assert_eq!(resolved(map, Span::new(LOW.len, PAGE)), []);
}
