//! Memory whose missing pages another thread brings in: it learns what was discarded.
//!
//! The handler is as that of a guest that is restored from a snapshot: pages come from a pattern, those that were
//! discarded are zeros. Source: userfaultfd(2), ioctl_userfaultfd(2), Linux `include/uapi/linux/userfaultfd.h`.

use std::collections::BTreeSet;
use std::io;
use std::mem;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use hostmem::Discard;

use super::*;

const API: u64 = 0xaa;
/// `UFFD_FEATURE_EVENT_REMOVE`, `_MISSING_HUGETLBFS`, `_MISSING_SHMEM`.
const FEATURES: u64 = 1 << 3 | 1 << 4 | 1 << 5;
const MODE_MISSING: u64 = 1;
const EVENT_PAGEFAULT: u8 = 0x12;
const EVENT_REMOVE: u8 = 0x15;

/// `_IOWR(0xaa, number, words of 8 bytes)`.
const fn request(number: u64, words: u64) -> libc::Ioctl {
    (3 << 30 | (words * 8) << 16 | API << 8 | number) as libc::Ioctl
}

fn call<const WORDS: usize>(fd: &OwnedFd, number: u64, words: &mut [u64; WORDS]) -> io::Result<()> {
    // SAFETY: the structure of this request has as many words, all of which are read and written.
    let done = unsafe { libc::ioctl(fd.as_raw_fd(), request(number, WORDS as u64), words) };
    if done == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// A handler's file over all of `mapping`.
fn watch(mapping: &Mapping) -> io::Result<OwnedFd> {
    let flags = libc::O_CLOEXEC | libc::O_NONBLOCK;
    // SAFETY: takes flags, and returns a new descriptor or -1.
    let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, flags) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: just opened, with no other owner.
    let fd = unsafe { OwnedFd::from_raw_fd(fd as i32) };
    call(&fd, 0x3f, &mut [API, FEATURES, 0])?;
    call(
        &fd,
        0,
        &mut [mapping.address(), mapping.len(), MODE_MISSING, 0],
    )?;
    Ok(fd)
}

/// Word of the snapshot in the page at this offset: nowhere 0.
fn pattern(offset: u64) -> u64 {
    !offset
}

struct Handler {
    fd: OwnedFd,
    start: u64,
    page: u64,
    /// Offsets of pages.
    removed: BTreeSet<u64>,
    events: u64,
    faults: Vec<u64>,
}

impl Handler {
    /// Handles what happens until `stop`; returns the pages that were removed, and by how many events.
    fn run(mut self, stop: &AtomicBool) -> (BTreeSet<u64>, u64) {
        while !stop.load(Ordering::Acquire) {
            let mut poll = libc::pollfd {
                fd: self.fd.as_raw_fd(),
                events: libc::POLLIN,
                revents: 0,
            };
            // SAFETY: one structure, which is there.
            unsafe { libc::poll(&raw mut poll, 1, 10) };
            while let Some(message) = self.read() {
                self.note(message);
            }
            for fault in mem::take(&mut self.faults) {
                self.resolve(fault);
            }
        }
        (self.removed, self.events)
    }

    fn read(&self) -> Option<[u64; 4]> {
        let mut message = [0_u64; 4];
        // SAFETY: as many bytes as the buffer has.
        let read = unsafe { libc::read(self.fd.as_raw_fd(), message.as_mut_ptr().cast(), 32) };
        (read == 32).then_some(message)
    }

    fn note(&mut self, [head, first, second, _]: [u64; 4]) {
        match head as u8 {
            EVENT_PAGEFAULT => self.faults.push((second - self.start) & !(self.page - 1)),
            EVENT_REMOVE => {
                self.events += 1;
                let pages = (first..second).step_by(self.page as usize);
                self.removed.extend(pages.map(|at| at - self.start));
            }
            other => panic!("event {other:#x}"),
        }
    }

    /// `UFFDIO_COPY` of one page.
    fn resolve(&mut self, offset: u64) {
        let gone = self.removed.contains(&offset);
        let words = (0..self.page).step_by(8);
        let page: Vec<u64> = words
            .map(|at| if gone { 0 } else { pattern(offset + at) })
            .collect();
        let (to, from) = (self.start + offset, page.as_ptr() as u64);
        match call(&self.fd, 3, &mut [to, from, self.page, 0, 0]) {
            Ok(()) => {}
            Err(error) if error.raw_os_error() == Some(libc::EEXIST) => {}
            // An event is to be read first.
            Err(error) if error.raw_os_error() == Some(libc::EAGAIN) => self.faults.push(offset),
            Err(error) => panic!("UFFDIO_COPY: {error}"),
        }
    }
}

/// Ends a handler, also where the test has failed.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

/// Ends the process where it would otherwise hang: a discard that waits for its own handler never returns.
fn no_longer_than<T>(time: Duration, work: impl FnOnce() -> T) -> T {
    let (done, ended) = mpsc::channel::<()>();
    thread::scope(|scope| {
        scope.spawn(move || {
            if ended.recv_timeout(time) == Err(mpsc::RecvTimeoutError::Timeout) {
                eprintln!("the discard hangs");
                std::process::abort();
            }
        });
        let result = work();
        drop(done);
        result
    })
}

/// Discards `runs` of memory that a thread watches; returns its notifications, the number of events, and the words read
/// then.
fn discarded(
    backing: Backing,
    len: u64,
    notifying: bool,
    runs: &[Span<Offset>],
) -> Option<(BTreeSet<u64>, u64, BTreeSet<u64>)> {
    let Memory { mapping, _pool } = memory(backing, len)?;
    // No page is there.
    let all = Discard::new(mapping.clone()).unwrap();
    all.discard(&[Span::new(0, len)], &mut |_, _| ()).unwrap();
    let fd = match watch(&mapping) {
        Ok(fd) => fd,
        Err(error) => {
            eprintln!("NOT RUN: userfaultfd of {backing:?}: {error}");
            return None;
        }
    };
    let page = backing.page();
    let handler = Handler {
        fd,
        start: mapping.address(),
        page,
        removed: BTreeSet::new(),
        events: 0,
        faults: Vec::new(),
    };
    let stop = AtomicBool::new(false);
    let first = |offset: u64| mapping.cells()[offset as usize / 8].load(Ordering::Relaxed);
    let (told, zeros) = thread::scope(|scope| {
        let handler = scope.spawn(|| handler.run(&stop));
        let stop = Stop(&stop);
        let offsets = || (0..len).step_by(page as usize);
        for offset in offsets() {
            assert_eq!(first(offset), pattern(offset), "the handler brings it in");
        }
        let discard = Discard::new(mapping.clone()).unwrap();
        let discard = if notifying {
            discard.notifying()
        } else {
            discard
        };
        let kept = &mut |part, why| {
            assert!(
                matches!(why, hostmem::DiscardRefusal::PartOfPage { .. }),
                "{part}: {why}"
            )
        };
        let done = no_longer_than(Duration::from_secs(60), || discard.discard(runs, kept));
        assert!(done.unwrap().bytes > 0);
        let zeros = offsets().filter(|offset| match first(*offset) {
            0 => true,
            word => {
                assert_eq!(word, pattern(*offset));
                false
            }
        });
        let zeros = zeros.collect();
        drop(stop);
        (handler.join().unwrap(), zeros)
    });
    Some((told.0, told.1, zeros))
}

/// Every second page, so that private memory has common calls, and long runs.
fn runs(page: u64) -> Vec<Span<Offset>> {
    let short = (0..64).map(|n| Span::new(2 * n * page, page));
    short.chain([Span::new(200 * page, 300 * page)]).collect()
}

fn pages(runs: &[Span<Offset>], page: u64) -> BTreeSet<u64> {
    let pages = |run: &Span<Offset>| (run.start..run.start + run.len).step_by(page as usize);
    runs.iter().flat_map(pages).collect()
}

#[test]
fn a_handler_in_the_same_process_learns_what_was_discarded_and_brings_in_zeros() {
    let _turn = turn();
    for (backing, notifying) in [
        (Backing::Anon4K, false),
        (Backing::Thp, true),
        (Backing::Memfd, true),
    ] {
        let runs = runs(4096);
        if let Some((told, events, zeros)) = discarded(backing, 4 * MIB, notifying, &runs) {
            let all = pages(&runs, 4096);
            assert_eq!((&told, &zeros), (&all, &all), "{backing:?}");
            assert_eq!(events, 65, "{backing:?}");
        }
    }
}

#[test]
fn of_a_file_of_huge_pages_a_handler_learns_of_whole_pages_only() {
    let _turn = turn();
    let page = Backing::Hugetlb2M.page();
    // One and a half, a half, and one.
    let runs = [
        Span::new(0, 3 * page / 2),
        Span::new(2 * page, page / 2),
        Span::new(3 * page, page),
    ];
    if let Some((told, events, zeros)) = discarded(Backing::Hugetlb2M, 4 * page, true, &runs) {
        let all = BTreeSet::from([0, 3 * page]);
        assert_eq!((told, events, zeros), (all.clone(), 2, all));
    }
}

/// Reason for `notifying`: the handler brings back what the guest has given away.
#[test]
fn punching_a_file_sends_no_event() {
    let _turn = turn();
    let runs = runs(4096);
    if let Some((told, events, zeros)) = discarded(Backing::Memfd, 4 * MIB, false, &runs) {
        assert_eq!((told.len(), events, zeros.len()), (0, 0, 0));
    }
}
