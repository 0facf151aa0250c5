//! Many runs by few calls.
//!
//! A call costs more than a page: the system call itself, the lock of the address space, and an
//! interrupt to every other processor on which the process runs. So short runs of private memory wait
//! for each other, up to what one `process_madvise` takes. A long run pays for a call of its own, and
//! gains nothing from a common one.
//!
//! The kernel may do less than it was asked: it says how many bytes. The rest is asked for again, from
//! there on, also from inside a run. A run at which it stops gets a call of its own, whose error says
//! why.

use std::io;
use std::os::fd::AsFd;

use runs::{Offset, Span};

use super::kernel::Way;
use super::{Call, Discard, DiscardRefusal, Discarded};

/// Runs in a call: `UIO_MAXIOV`.
pub(crate) const RUNS: usize = 1024;
/// Bytes in a call: the kernel cuts off what is beyond (`MAX_RW_COUNT`).
pub(crate) const BYTES: u64 = (2 << 30) - 4096;
/// Bytes of a run that gets a call of its own: measured, runs from 1 to 4 MiB on take as long either
/// way, 4 KiB pages as transparent huge ones.
pub(crate) const LONG: u64 = 4 << 20;
/// Repetitions of an interrupted call.
const AGAIN: u32 = 64;

/// Discards runs, and tells what was kept.
pub(crate) struct Batch<'a> {
    discard: &'a Discard,
    kept: &'a mut dyn FnMut(Span<Offset>, DiscardRefusal),
    pub(crate) done: Discarded,
    waiting: Vec<Span<Offset>>,
    bytes: u64,
}

impl<'a> Batch<'a> {
    pub(crate) fn new(
        discard: &'a Discard,
        kept: &'a mut dyn FnMut(Span<Offset>, DiscardRefusal),
    ) -> Self {
        Self {
            discard,
            kept,
            done: Discarded::default(),
            waiting: Vec::new(),
            bytes: 0,
        }
    }

    /// Tells that `part` is kept, which is less than a page.
    pub(crate) fn keep_part(&mut self, part: Span<Offset>) {
        if !part.is_empty() {
            let page = self.discard.page();
            self.keep(part, DiscardRefusal::PartOfPage { page });
        }
    }

    fn keep(&mut self, part: Span<Offset>, why: DiscardRefusal) {
        self.done.kept += part.len;
        (self.kept)(part, why);
    }

    /// Drops the pages of `run` by a call of its own; true when that works.
    pub(crate) fn alone(&mut self, run: Span<Offset>, way: Way) -> bool {
        let calls = &*self.discard.calls;
        let result = match self.discard.mapping() {
            Some(mapping) => again(|| calls.drop_pages(mapping.region(), run, way)),
            None => Err(not_there()),
        };
        self.note(run, Call::Madvise, result)
    }

    /// Frees the pages of `run` in the mapping's file.
    pub(crate) fn punch(&mut self, run: Span<Offset>) {
        let calls = &*self.discard.calls;
        let result = match self.discard.memory.file() {
            Some((file, offset)) => {
                let part = Span::new(offset + run.start, run.len);
                again(|| calls.punch(file.as_fd(), part))
            }
            None => Err(not_there()),
        };
        self.note(run, Call::Fallocate, result);
    }

    fn note(&mut self, run: Span<Offset>, call: Call, result: io::Result<()>) -> bool {
        self.done.calls += 1;
        match &result {
            Ok(()) => self.done.bytes += run.len,
            Err(error) => {
                let errno = error.raw_os_error().unwrap_or(libc::EIO);
                self.keep(run, DiscardRefusal::Refused { call, errno });
            }
        }
        result.is_ok()
    }

    /// Takes the next run of private memory.
    pub(crate) fn push(&mut self, run: Span<Offset>) {
        if run.len >= LONG || !self.discard.batches() {
            self.alone(run, Way::Private);
            return;
        }
        if self.waiting.len() == RUNS || self.bytes + run.len > BYTES {
            self.flush();
        }
        self.waiting.push(run);
        self.bytes += run.len;
    }

    /// Discards all runs that wait.
    pub(crate) fn flush(&mut self) {
        let mut waiting = std::mem::take(&mut self.waiting);
        self.bytes = 0;
        let mut rest = &mut waiting[..];
        while let [first, others @ ..] = &mut *rest {
            let first = *first;
            let together = !others.is_empty() && self.discard.batches();
            let done = if together { self.together(rest) } else { Ok(0) };
            let skipped = skip(rest, *done.as_ref().unwrap_or(&0));
            if skipped > 0 {
                self.done.bytes += skipped;
                rest = trim(rest);
                continue;
            }
            let possible = self.alone(first, Way::Private);
            if possible && done.is_err() {
                // It is not this run that the common call does not take.
                self.discard.stop_batches();
            }
            rest = &mut rest[1..];
        }
        waiting.clear();
        self.waiting = waiting;
    }

    fn together(&mut self, runs: &[Span<Offset>]) -> io::Result<u64> {
        self.done.calls += 1;
        let mapping = self.discard.mapping().ok_or_else(not_there)?;
        again(|| self.discard.calls.drop_batch(mapping.region(), runs))
    }
}

/// Not reached: what backs the memory has been looked at.
fn not_there() -> io::Error {
    io::Error::from_raw_os_error(libc::EBADF)
}

/// Takes `bytes` off the beginning of the runs, to the last whole page: those that are done are empty
/// then. Returns how many were taken off.
fn skip(runs: &mut [Span<Offset>], bytes: u64) -> u64 {
    let mut skipped = 0;
    for run in runs {
        let left = bytes - skipped;
        let done = if left < run.len {
            left & !4095
        } else {
            run.len
        };
        *run = Span::new(run.start + done, run.len - done);
        skipped += done;
        if !run.is_empty() {
            break;
        }
    }
    skipped
}

/// The runs of which something is left.
fn trim(runs: &mut [Span<Offset>]) -> &mut [Span<Offset>] {
    let done = runs.iter().take_while(|run| run.is_empty()).count();
    &mut runs[done..]
}

/// Makes a call again while it is interrupted, but not for ever.
fn again<T>(mut call: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    let mut result = call();
    for _ in 0..AGAIN {
        match &result {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => result = call(),
            _ => break,
        }
    }
    result
}
