//! Files that are not mapped: KVM's `guest_memfd`, and a memory file in its place where there is none.
//!
//! Source: Linux `Documentation/virt/kvm/api.rst`, KVM_CREATE_GUEST_MEMFD.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt};

use hostmem::{Discard, DiscardError, DiscardRefusal};

use super::*;

/// A `guest_memfd` of a virtual machine without processors.
fn guest_memfd(len: u64) -> io::Result<OwnedFd> {
    const CREATE_VM: libc::Ioctl = 0xae01;
    const CREATE_GUEST_MEMFD: libc::Ioctl = 0xc040_aed4u32 as libc::Ioctl;
    let kvm = File::options().read(true).write(true).open("/dev/kvm")?;
    let new = |fd: i32| match fd {
        // SAFETY: just opened, with no other owner.
        0.. => Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
        _ => Err(io::Error::last_os_error()),
    };
    // SAFETY: takes a number.
    let machine = new(unsafe { libc::ioctl(kvm.as_raw_fd(), CREATE_VM, 0) })?;
    // Size, flags, and six words that are reserved.
    let mut request = [len, 0, 0, 0, 0, 0, 0, 0_u64];
    // SAFETY: the structure has 64 bytes.
    new(unsafe { libc::ioctl(machine.as_raw_fd(), CREATE_GUEST_MEMFD, &raw mut request) })
}

const RUNS: [Span<Offset>; 3] = [
    Span::new(0x1000, 0x3000),
    // Half a page, and the rest of the file.
    Span::new(0x8800, 0x1800),
    Span::new(0xf_0000, 0x1_0000),
];

/// Discards of a file; the bytes that were, those that were kept, and the calls.
fn discard(file: OwnedFd, start: u64) -> (u64, u64, u64) {
    let part = Span::new(start, MIB);
    let discard = Discard::of_file(file, part).unwrap();
    assert_eq!((discard.page(), discard.batches()), (4096, false));
    let mut parts = Vec::new();
    let kept = &mut |part, why| parts.push((part, why));
    let done = discard.discard(&RUNS, kept).unwrap();
    assert_eq!(
        parts,
        [(
            Span::new(0x8800, 0x800),
            DiscardRefusal::PartOfPage { page: 4096 }
        )]
    );
    let beyond = discard.discard(&[Span::new(MIB - 4096, 8192)], &mut |_, _| ());
    assert!(matches!(
        beyond,
        Err(DiscardError::Outside { index: 0, .. })
    ));
    (done.bytes, done.kept, done.calls)
}

#[test]
fn pages_of_a_guest_memfd_are_punched() {
    match guest_memfd(2 * MIB) {
        Err(error) => eprintln!("NOT RUN: guest_memfd: {error}"),
        Ok(file) => {
            // Its pages are there. (Their content no one but the guest can read.)
            // SAFETY: works on the file alone.
            let filled = unsafe {
                libc::fallocate(
                    file.as_raw_fd(),
                    libc::FALLOC_FL_KEEP_SIZE,
                    0,
                    2 * MIB as i64,
                )
            };
            assert_eq!(filled, 0, "{}", io::Error::last_os_error());
            assert_eq!(discard(file, 0), (0x1_4000, 0x800, 3));
        }
    }
}

/// The same calls, where what they have done can be read: a model of `guest_memfd`.
#[test]
fn a_file_that_is_not_mapped_has_holes_where_it_was_discarded() {
    let start = MIB;
    let mapping = Mapping::new(Backing::Memfd, 2 * MIB, None).unwrap();
    let own = || mapping.fd().unwrap().try_clone_to_owned().unwrap();
    let file = File::from(own());
    file.write_all_at(&vec![0x5a; 2 * MIB as usize], 0).unwrap();
    drop(mapping);
    assert_eq!(file.metadata().unwrap().blocks() * 512, 2 * MIB);
    assert_eq!(
        discard(OwnedFd::from(file.try_clone().unwrap()), start),
        (0x1_4000, 0x800, 3)
    );
    assert_eq!(file.metadata().unwrap().blocks() * 512, 2 * MIB - 0x1_4000);
    assert_eq!(file.metadata().unwrap().len(), 2 * MIB);
    let mut bytes = vec![0; 2 * MIB as usize];
    file.read_exact_at(&mut bytes, 0).unwrap();
    let gone = |at: u64| {
        let whole =
            RUNS.map(|run| Span::new(run.start.next_multiple_of(4096), run.len / 4096 * 4096));
        at >= start
            && whole
                .iter()
                .any(|run: &Span<Offset>| run.contains(at - start))
    };
    for (at, byte) in (0..).zip(bytes) {
        assert_eq!(byte, if gone(at) { 0 } else { 0x5a }, "{at:#x}");
    }
}

#[test]
fn what_is_no_part_of_a_file_is_refused() {
    let mapping = Mapping::new(Backing::Memfd, MIB, None).unwrap();
    let file = || mapping.fd().unwrap().try_clone_to_owned().unwrap();
    let odd = Discard::of_file(file(), Span::new(0x800, 0x1000)).unwrap_err();
    assert!(matches!(
        odd,
        DiscardError::FileOffset {
            offset: 0x800,
            page: 4096
        }
    ));
    for part in [
        Span::new(u64::MAX - 0xfff, 0x1000),
        Span::new(0x1000, u64::MAX),
        Span::new(1 << 63, 0x1000),
    ] {
        let beyond = Discard::of_file(file(), part).unwrap_err();
        assert!(
            matches!(beyond, DiscardError::Outside { run, .. } if run == part),
            "{part}"
        );
    }
    // A file that has no holes: the kernel's number.
    let (read, _write) = io::pipe().unwrap();
    let discard = Discard::of_file(read.into(), Span::new(0, MIB)).unwrap();
    let mut kept = Vec::new();
    let done = discard
        .discard(&[Span::new(0, MIB)], &mut |part, why| {
            kept.push((part, why))
        })
        .unwrap();
    assert_eq!((done.bytes, done.kept, kept.len()), (0, MIB, 1));
    assert!(matches!(kept[0].1, DiscardRefusal::Refused { .. }));
}
