//! The device on memory of this machine.

use std::fs::File;
use std::os::unix::fs::MetadataExt;

use hostmem::{Backing, Mapping};
use runs::Span;
use virtio_balloon::device::{Discard, GuestDiscard, NotDiscarded, Region};
use vm_memory::{
    Bytes, FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion,
};

const PAGE: u64 = 4096;
const LOW: Span = Span::new(0, 4 << 20);
const HIGH: Span = Span::new(8 << 20, 4 << 20);

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

fn check(memory: &GuestMemoryMmap, discarded: &[Span]) {
    for region in [LOW, HIGH] {
        for page in (region.start..=region.last()).step_by(PAGE as usize) {
            let gone = discarded.iter().any(|run| run.contains(page));
            let expected = if gone { 0 } else { page + 1 };
            let found: u64 = memory.read_obj(GuestAddress(page)).unwrap();
            assert_eq!(found, expected, "{page:#x}");
        }
    }
}

const RUNS: [Span; 5] = [
    Span::new(0, PAGE),
    Span::new(3 * PAGE, 5 * PAGE),
    // To the end of the region.
    Span::new((4 << 20) - PAGE, PAGE),
    Span::new(8 << 20, 2 * PAGE),
    Span::new((12 << 20) - 2 * PAGE, 2 * PAGE),
];

#[test]
fn runs_are_discarded_where_they_lie_and_nothing_else_is() {
    let private = GuestMemoryMmap::from_ranges(&ranges()).unwrap();
    let (file, in_file) = shared();
    for memory in [private, in_file] {
        fill(&memory);
        let mut discard = GuestDiscard::new(&memory).unwrap();
        assert_eq!(discard.regions(PAGE), [LOW, HIGH].map(Region::new));
        let before = file.metadata().unwrap().blocks();
        let bytes = discard.discard(&RUNS, &mut |run, cause| panic!("{run}: {cause}"));
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
fn runs_that_are_in_no_region_are_told_and_nothing_of_them_is_touched() {
    let memory = GuestMemoryMmap::from_ranges(&ranges()).unwrap();
    fill(&memory);
    let mut discard = GuestDiscard::new(&memory).unwrap();
    let wrong = [
        Span::new(LOW.len - PAGE, 2 * PAGE),
        Span::new(LOW.len, PAGE),
        Span::new(HIGH.start - PAGE, 2 * PAGE),
        Span::new(u64::MAX - PAGE + 1, PAGE),
    ];
    let mut told = Vec::new();
    let bytes = discard.discard(&wrong, &mut |run, cause| {
        assert_eq!(cause, NotDiscarded::NotPages);
        told.push(run);
    });
    assert_eq!((bytes, &told[..]), (0, &wrong[..]));
    check(&memory, &[]);
}

#[test]
fn a_run_is_translated_to_its_place_in_its_region() {
    let (_, memory) = shared();
    let discard = GuestDiscard::new(&memory).unwrap();
    let place = |run| {
        discard
            .translate(run)
            .map(|(of, part)| (of.mapping().len(), part))
    };
    assert_eq!(
        place(Span::new(HIGH.start + PAGE, 3 * PAGE)),
        Some((HIGH.len, Span::new(PAGE, 3 * PAGE)))
    );
    let across = Span::new(LOW.len - PAGE, 16 << 20);
    assert_eq!(place(across).map(|(_, part)| part.len), Some(PAGE));
    assert_eq!(place(Span::new(LOW.len, PAGE)), None);
    assert_eq!(place(Span::new(HIGH.start - PAGE, 2 * PAGE)), None);
}
