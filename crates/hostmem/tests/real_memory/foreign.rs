//! Memory that other code has mapped.

use std::fs::File;
use std::num::NonZeroUsize;
use std::ops::ControlFlow;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use hostmem::{
    Backing, FrameSource, FramesError, Mapping, MappingError, PopulateError, Population,
};
use runs::{Offset, Span};

use super::*;

/// Memory that other code has mapped: `len` bytes, of which `file` has some.
struct Foreign {
    start: NonNull<u8>,
    len: usize,
}

impl Foreign {
    fn new(len: u64, file: Option<&File>) -> Arc<Self> {
        let len = len as usize;
        let (flags, fd) = match file {
            Some(file) => (libc::MAP_SHARED, file.as_raw_fd()),
            None => (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1),
        };
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: the kernel chooses a free address.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), len, access, flags, fd, 0) };
        assert_ne!(start, libc::MAP_FAILED);
        // SAFETY: in pages of any size, the bytes are the same.
        unsafe { libc::madvise(start, len, libc::MADV_HUGEPAGE) };
        let start = NonNull::new(start.cast()).unwrap();
        Arc::new(Self { start, len })
    }

    fn map(
        self: &Arc<Self>,
        part: Span<Offset>,
        file: Option<(OwnedFd, u64)>,
    ) -> Result<Mapping, MappingError> {
        // SAFETY: a part of what the owner keeps mapped, which no other code accesses.
        unsafe {
            let start = self.start.byte_add(part.start as usize);
            Mapping::foreign(self.clone(), start, part.len, file)
        }
    }
}

// SAFETY: an address range that belongs to no thread.
unsafe impl Send for Foreign {}
// SAFETY: as above.
unsafe impl Sync for Foreign {}

impl Drop for Foreign {
    fn drop(&mut self) {
        // SAFETY: it is not used any more.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.len) };
    }
}

#[test]
fn foreign_memory_is_pinned_where_it_is_and_its_owner_held() {
    let _turn = turn();
    let len = 8 * MIB;
    let Some(pinner) = pinner(2 * MIB, len) else {
        return;
    };
    // Anonymous, and not from the beginning of a huge page on; and a file from its third page on.
    let owner = Foreign::new(len + 2 * MIB, None);
    let file = Mapping::new(Backing::Memfd, len, None).unwrap();
    let fd = || file.fd().unwrap().try_clone_to_owned().unwrap();
    let of_file = Foreign::new(len, Some(&File::from(fd())));
    let tail = Span::new(2 * PAGE, len - 2 * PAGE);
    let parts = [
        (&owner, Span::new(3 * PAGE, len), None),
        (&of_file, tail, Some((fd(), 2 * PAGE))),
    ];
    for (owner, part, of) in parts {
        let offset = of.as_ref().map_or(0, |(_, offset)| *offset);
        let mapping = Arc::new(owner.map(part, of).unwrap());
        assert_eq!(mapping.file_offset(), offset);
        mapping.populate(&mut on).unwrap();
        let whole = Span::new(0, mapping.len());
        let counter = visible(&pinner);
        let before = in_use(counter);
        let mut pin = pinner.pin(&mapping, whole, &mut on).unwrap();
        // Whole huge pages at both ends.
        assert!(pin.charged_bytes() >= whole.len);
        assert_eq!(in_use(counter), before + pin.charged_bytes());
        if is_real(&mapping) {
            let (runs, _) = runs_of(&pin, whole, FrameSource::Pagemap, 5);
            assert_eq!(pages_of(&runs), frames_page_by_page(&mapping, whole));
        }
        // A part, and then the rest.
        pin.release(Span::new(MIB, 5 * MIB)).unwrap();
        assert_eq!(pin.bytes(), whole.len - 5 * MIB);
        pin.unpin().unwrap();
        assert_eq!(in_use(counter), before);
        // It is foreign: dropping the mapping unmaps nothing.
        mapping.cells()[0].store(7, Ordering::Relaxed);
        assert_eq!(Arc::strong_count(owner), 2);
        drop(mapping);
        assert_eq!(Arc::strong_count(owner), 1);
        let again = owner.map(part, None).unwrap();
        assert_eq!(again.cells()[0].load(Ordering::Relaxed), 7);
    }
    assert_eq!(file.cells()[2 * 512].load(Ordering::Relaxed), 7);
    let odd = |part| owner.map(part, None).map(|mapping| mapping.len());
    assert!(matches!(
        odd(Span::new(8, PAGE)),
        Err(MappingError::Address { .. })
    ));
    assert!(matches!(
        odd(Span::new(0, 8)),
        Err(MappingError::Unaligned { .. })
    ));
    assert!(matches!(odd(Span::new(0, 0)), Err(MappingError::Empty)));
}

#[test]
fn a_file_of_huge_pages_is_mapped_again_as_what_it_is() {
    let _turn = turn();
    let len = 4 * MIB;
    let Some(Memory { mapping, .. }) = memory(Backing::Hugetlb2M, len) else {
        return;
    };
    mapping.cells()[0].store(7, Ordering::Relaxed);
    let fd = || mapping.fd().unwrap().try_clone_to_owned().unwrap();
    // However few pages are left in the pool.
    let again = Mapping::of_file(fd()).unwrap();
    assert_eq!((again.backing(), again.len()), (Backing::Hugetlb2M, len));
    assert_eq!(again.cells()[0].load(Ordering::Relaxed), 7);
    let owner: Arc<Mapping> = Arc::new(again);
    let start = |offset| NonNull::new((owner.address() + offset) as *mut u8).unwrap();
    // SAFETY: the owner keeps it mapped, and lends it as atomic cells.
    let foreign =
        |offset, file| unsafe { Mapping::foreign(owner.clone(), start(offset), 2 * MIB, file) };
    let second = foreign(2 * MIB, Some((fd(), 2 * MIB))).unwrap();
    assert_eq!(
        (second.backing(), second.file_offset()),
        (Backing::Hugetlb2M, 2 * MIB)
    );
    let inside = foreign(PAGE, Some((fd(), PAGE)));
    assert!(
        matches!(inside, Err(MappingError::Address { .. })),
        "{inside:?}"
    );
}

#[test]
fn a_page_that_cannot_be_brought_in_is_named_whoever_meets_it() {
    let _turn = turn();
    // The file ends in the second chunk of 64 MiB.
    let short = Mapping::new(Backing::Memfd, 70 * MIB, None).unwrap();
    let fd = || short.fd().unwrap().try_clone_to_owned().unwrap();
    let owner = Foreign::new(192 * MIB, Some(&File::from(fd())));
    for threads in [1, 3] {
        let mapping = owner.map(Span::new(0, 192 * MIB), Some((fd(), 0))).unwrap();
        let mut told = Vec::new();
        let failed = Population::new([&mapping])
            .workers(NonZeroUsize::new(threads).unwrap())
            .run(&mut |done| {
                told.push(done);
                ControlFlow::Continue(())
            });
        match failed {
            Err(PopulateError::Refused { offset, .. }) => assert_eq!(offset, 64 * MIB),
            result => panic!("{result:?}"),
        }
        assert!(told.is_empty() || told == [64 * MIB], "{told:?}");
        // The memory before that page is there.
        if let Ok(folios) = mapping.folios() {
            assert!(folios.small + folios.huge >= 64 * MIB, "{folios:?}");
        }
    }
}

#[test]
fn a_page_that_vanishes_is_named() {
    let _turn = turn();
    let len = 8 * MIB;
    for backing in [Backing::Anon4K, Backing::Thp] {
        let Some(pinner) = pinner(2 * MIB, len) else {
            return;
        };
        let Memory { mapping, .. } = memory(backing, len).unwrap();
        if !is_real(&mapping) {
            return eprintln!("not run: frames are hidden from this process");
        }
        let pin = pinner.pin(&mapping, Span::new(0, len), &mut on).unwrap();
        let gone = 4 * MIB;
        // SAFETY: the pages are mapped and nothing else uses them; the next access gives new ones.
        let result = unsafe {
            libc::madvise(
                (mapping.address() + gone) as *mut _,
                2 << 20,
                libc::MADV_DONTNEED,
            )
        };
        assert_eq!(result, 0);
        let mut frames = pin.runs(Span::new(0, len), FrameSource::Pagemap).unwrap();
        let mut out = vec![Span::default(); 4096];
        match frames.next_batch(&mut out) {
            Err(FramesError::NotPresent { offset }) => assert_eq!(offset, gone),
            result => panic!("{result:?}"),
        }
    }
}
