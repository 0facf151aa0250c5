//! Bringing in the pages of a mapping.
//!
//! `MADV_POPULATE_WRITE` makes the pages as a write to each of them would, without changing a
//! byte, and reports what would have been a signal as an error. Kernels before 5.14 do not know
//! it: there each page is written with the value that it holds, and huge pages of a pool, whose
//! shortage would be a signal, are first allocated through their file.
//!
//! Most of the time goes into zeroing, which several processors do faster than one. Threads take
//! chunks in ascending order and finish what they have taken, so that whatever ends the work, the
//! pages before the first chunk that failed, or that no thread has taken, are there. They run on the
//! node where the memory is to be, and tell the caller's thread of each chunk, one at a time:
//! progress is reported there.
//!
//! Source: madvise(2), fallocate(2).

use std::io;
use std::num::NonZeroUsize;
use std::ops::ControlFlow;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;
use std::thread;

use runs::{Offset, Span};
use thiserror::Error;

use crate::machine::{HugeSize, Machine, Pool};
use crate::mapping::Mapping;
use crate::nodes::KernelNodes;
use crate::sys::{self, Advice};
use runs::Bytes;

/// Bytes between two looks at whether to go on.
const CHUNK: u64 = 64 << 20;

/// Failure to bring in all pages. Those before the offset are there; dropping the mapping frees them.
#[derive(Debug, Error)]
pub enum PopulateError {
    /// The caller wanted to stop.
    #[error("interrupted after {}", Bytes(*done))]
    Interrupted {
        /// Bytes whose pages are there.
        done: u64,
    },
    /// The machine, or this process' share of it, has no more memory.
    #[error("no memory for the page at offset {offset:#x}; {} are available", Bytes(*available))]
    NoMemory {
        /// Offset in the mapping from which on pages are missing, to within 64 MiB.
        offset: u64,
        /// `MemAvailable`, bytes.
        available: u64,
        /// Error of the kernel.
        source: io::Error,
    },
    /// The pool of huge pages cannot give what was reserved, for instance because of a limit of
    /// the control group or of the node.
    #[error("no huge page of {size} for offset {offset:#x}; {free} are free in the pool")]
    HugePages {
        /// Their size.
        size: HugeSize,
        /// Offset in the mapping from which on pages are missing, to within a chunk.
        offset: u64,
        /// Free pages in the pool.
        free: u64,
        /// Error of the kernel.
        source: io::Error,
    },
    /// A run that goes beyond the memory, or is no multiple of 4 KiB.
    #[error("{run} is not made of whole pages of the memory")]
    BadRun {
        /// The run.
        run: Span<Offset>,
    },
    /// The kernel refuses for another reason.
    #[error("cannot bring in the pages from offset {offset:#x} on")]
    Refused {
        /// Offset in the mapping, to within a chunk.
        offset: u64,
        /// Cause.
        source: io::Error,
    },
}

/// State shared by threads that populate together.
struct Chunks {
    /// Bytes of one.
    size: u64,
    /// Offset of the next that no thread has taken.
    next: AtomicU64,
    /// No more are to be taken.
    stop: AtomicBool,
}

/// A chunk, and what became of it.
type Outcome = (Span<Offset>, io::Result<()>);

impl Mapping {
    /// Brings in all pages, by as many threads as the memory's node has processors for this
    /// process. After each 64 MiB (or each page, when that is larger) `progress` receives, in the
    /// caller's thread, how many bytes are done, and may stop the work.
    ///
    /// # Errors
    ///
    /// When memory or huge pages run out, or when `progress` breaks.
    pub fn populate(
        &self,
        progress: &mut dyn FnMut(u64) -> ControlFlow<()>,
    ) -> Result<(), PopulateError> {
        self.populate_by(None, progress)
    }

    /// As [`populate`](Self::populate), by at most so many threads. Less than 128 MiB is left to
    /// the caller's, and so is everything where one is asked for.
    ///
    /// # Errors
    ///
    /// As [`populate`](Self::populate).
    pub fn populate_by(
        &self,
        threads: Option<NonZeroUsize>,
        progress: &mut dyn FnMut(u64) -> ControlFlow<()>,
    ) -> Result<(), PopulateError> {
        let chunk = CHUNK.max(self.backing().page());
        let cpus = self.cpus();
        let wanted = threads.map_or(cpus.len(), NonZeroUsize::get);
        // A thread for each whole chunk at most.
        let most = usize::try_from(self.len() / chunk).unwrap_or(usize::MAX);
        self.populate_together(chunk, wanted.min(most), &cpus, progress)
    }

    /// Brings in the pages of `runs`, offsets, in this thread: those that were
    /// [discarded](crate::Discard), for instance.
    ///
    /// # Errors
    ///
    /// When memory or huge pages run out, and [`PopulateError::BadRun`]. The pages of the runs before
    /// are there then.
    pub fn populate_runs(&self, runs: &[Span<Offset>]) -> Result<(), PopulateError> {
        let mut advice_known = true;
        for &run in runs {
            let pages = self.pages_of(run).ok_or(PopulateError::BadRun { run })?;
            self.bring_in(pages, &mut advice_known)
                .map_err(|source| self.populate_error(pages.start, source))?;
        }
        Ok(())
    }

    /// The processors on which threads that populate are to run: those of the memory's node; if
    /// none was named, of the node on which this thread runs, since pages come from the node of
    /// the thread that touches them first.
    fn cpus(&self) -> Vec<u32> {
        let node = self.node().or_else(sys::current_node);
        let near = node.map_or(Vec::new(), |node| KernelNodes.processors(node));
        if near.is_empty() {
            sys::allowed_cpus()
        } else {
            near
        }
    }

    /// Brings in all pages by `threads` threads on `cpus`; by this one where that is one.
    fn populate_together(
        &self,
        chunk: u64,
        threads: usize,
        cpus: &[u32],
        progress: &mut dyn FnMut(u64) -> ControlFlow<()>,
    ) -> Result<(), PopulateError> {
        let chunks = Chunks {
            size: chunk,
            next: AtomicU64::new(0),
            stop: AtomicBool::new(false),
        };
        let mut report = Report {
            chunks: &chunks,
            progress,
            len: self.len(),
            done: 0,
            failed: None,
            interrupted: false,
        };
        if threads > 1 {
            thread::scope(|scope| {
                // Without room, so that no thread gets far ahead of what is reported.
                let (tell, told) = mpsc::sync_channel(0);
                for _ in 0..threads {
                    let (tell, chunks) = (tell.clone(), &chunks);
                    let work = move || {
                        // Elsewhere it is slower, and nothing else.
                        let _ = sys::run_on(cpus);
                        self.take_chunks(chunks, |chunk| tell.send(chunk).is_ok());
                    };
                    let thread = thread::Builder::new().name("populate".into());
                    if thread.spawn_scoped(scope, work).is_err() {
                        break;
                    }
                }
                drop(tell);
                for chunk in told {
                    report.take(chunk);
                }
            });
        }
        // Everything, or what is left when no thread was to be had.
        self.take_chunks(&chunks, |chunk| report.take(chunk));
        match report.failed {
            Some((offset, source)) => Err(self.populate_error(offset, source)),
            None if report.interrupted => Err(PopulateError::Interrupted { done: report.done }),
            None => Ok(()),
        }
    }

    /// Takes chunks and brings them in, until there are none left or `tell` says that it is enough.
    fn take_chunks(&self, chunks: &Chunks, mut tell: impl FnMut(Outcome) -> bool) {
        let mut advice_known = true;
        while !chunks.stop.load(Ordering::Relaxed) {
            let start = chunks.next.fetch_add(chunks.size, Ordering::Relaxed);
            if start >= self.len() {
                break;
            }
            let part = Span::new(start, chunks.size.min(self.len() - start));
            let result = self.bring_in(part, &mut advice_known);
            if !tell((part, result)) {
                break;
            }
        }
    }

    fn bring_in(&self, part: Span<Offset>, advice_known: &mut bool) -> io::Result<()> {
        loop {
            let result = if *advice_known {
                self.region().advise(part, Advice::PopulateWrite)
            } else {
                self.touch(part)
            };
            match result {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if *advice_known && error.raw_os_error() == Some(libc::EINVAL) => {
                    *advice_known = false;
                }
                result => return result,
            }
        }
    }

    /// Writes to each page of `part` what it holds.
    pub(crate) fn touch(&self, part: Span<Offset>) -> io::Result<()> {
        if let (Some(_), Some(file)) = (self.backing().huge_size(), self.fd()) {
            let in_file = Span::new(self.file_offset() + part.start, part.len);
            sys::allocate(file.as_fd(), in_file)?;
        }
        let page = self.backing().page() as usize / 8;
        let (first, end) = (part.start / 8, (part.start + part.len) / 8);
        let cells = self.cells().get(first as usize..end as usize);
        for cell in cells.unwrap_or_default().iter().step_by(page) {
            // A compare-and-swap writes; adding 0 may be compiled to a load. A failure means
            // that another thread has just written.
            let value = cell.load(Ordering::Relaxed);
            let _ = cell.compare_exchange(value, value, Ordering::Relaxed, Ordering::Relaxed);
        }
        Ok(())
    }

    fn populate_error(&self, offset: u64, source: io::Error) -> PopulateError {
        match (self.backing().huge_size(), source.raw_os_error()) {
            (Some(size), Some(libc::ENOMEM | libc::EFAULT | libc::ENOSPC)) => {
                PopulateError::HugePages {
                    size,
                    offset,
                    free: Pool::read(size).map_or(0, |pool| pool.free),
                    source,
                }
            }
            (_, Some(libc::ENOMEM)) => PopulateError::NoMemory {
                offset,
                available: Machine::probe().map_or(0, |machine| machine.available),
                source,
            },
            _ => PopulateError::Refused { offset, source },
        }
    }
}

/// Progress reported so far.
struct Report<'a> {
    chunks: &'a Chunks,
    progress: &'a mut dyn FnMut(u64) -> ControlFlow<()>,
    len: u64,
    done: u64,
    /// The first chunk that failed, by offset.
    failed: Option<(u64, io::Error)>,
    interrupted: bool,
}

impl Report<'_> {
    /// Takes note; false when no more chunks are to be taken.
    fn take(&mut self, (part, result): Outcome) -> bool {
        match result {
            Ok(()) => {
                self.done += part.len;
                let goes_on = self.failed.is_none() && !self.interrupted;
                self.interrupted |=
                    goes_on && (self.progress)(self.done).is_break() && self.done < self.len;
            }
            Err(source) => {
                let first = self.failed.as_ref().map(|(first, _)| *first);
                if first.is_none_or(|first| part.start < first) {
                    self.failed = Some((part.start, source));
                }
            }
        }
        let ends = self.interrupted || self.failed.is_some();
        self.chunks.stop.store(ends, Ordering::Relaxed);
        !ends
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Backing, procfs};
    use std::fs;

    /// Processors of each thread that populates.
    fn threads_run_on() -> Vec<Vec<u32>> {
        let tasks = fs::read_dir("/proc/self/task").unwrap();
        let populating = tasks.filter_map(|task| {
            let task = task.ok()?.path();
            let status = procfs::read(task.join("status")).ok()?;
            let name = procfs::line(&status, "Name")?;
            let cpus = procfs::line(&status, "Cpus_allowed_list")?;
            (name == "populate").then(|| procfs::list(cpus))
        });
        populating.collect()
    }

    #[test]
    fn threads_run_where_the_memory_is_to_be_and_report_each_chunk() {
        let len = 64 * 4 * 4096;
        let mapping = Mapping::new(Backing::Anon4K, len, None).unwrap();
        let allowed = sys::allowed_cpus();
        let last = &allowed[allowed.len() - 1..];
        let mut reported = Vec::new();
        let mut bound = false;
        let result = mapping.populate_together(4 * 4096, 3, last, &mut |done| {
            // The thread that reported this chunk has still others to take, except at the end.
            if reported.is_empty() {
                bound = threads_run_on().iter().any(|cpus| cpus == last);
            }
            reported.push(done);
            ControlFlow::Continue(())
        });
        result.unwrap();
        assert!(bound);
        let steps: Vec<u64> = (1..=64).map(|n| n * 4 * 4096).collect();
        assert_eq!(reported, steps);
        match mapping.folios() {
            Ok(folios) => assert_eq!(folios.small, len),
            Err(error) => eprintln!("not run in part: {error}"),
        }
        // The processors of the node are some of those that this process may use.
        let cpus = mapping.cpus();
        assert!(!cpus.is_empty() && cpus.iter().all(|cpu| allowed.contains(cpu)));
    }

    #[test]
    fn threads_that_are_stopped_leave_no_holes() {
        let (chunk, threads) = (4 * 4096, 3);
        let len = 64 * chunk;
        for stop in [1, 2, 40] {
            let mapping = Mapping::new(Backing::Anon4K, len, None).unwrap();
            let mut calls = 0;
            let result = mapping.populate_together(chunk, threads, &mapping.cpus(), &mut |_| {
                calls += 1;
                if calls == stop {
                    ControlFlow::Break(())
                } else {
                    ControlFlow::Continue(())
                }
            });
            let Err(PopulateError::Interrupted { done }) = result else {
                panic!("{result:?}");
            };
            assert_eq!(calls, stop, "not asked again");
            // Each thread may have taken one more.
            assert!((stop..=stop + threads as u64).contains(&(done / chunk)));
            let pagemap = crate::nodes::open_pagemap().unwrap();
            let whole = Span::new(0, len);
            let mut stretches = crate::stretches::Stretches::new(&mapping, whole);
            match stretches.next(&pagemap) {
                Ok(found) => assert_eq!(found.map(|there| there.span), Some(Span::new(0, done))),
                Err(error) => eprintln!("not run in part: {error}"),
            }
        }
    }

    #[test]
    fn the_first_page_that_is_missing_is_that_of_the_lowest_chunk_that_failed() {
        let chunks = Chunks {
            size: 4096,
            next: AtomicU64::new(0),
            stop: AtomicBool::new(false),
        };
        let mut report = Report {
            chunks: &chunks,
            progress: &mut |_| ControlFlow::Continue(()),
            len: 8 * 4096,
            done: 0,
            failed: None,
            interrupted: false,
        };
        let refused = || Err(io::Error::from_raw_os_error(libc::ENOMEM));
        // As threads tell of them, and not in their order.
        for (nth, result, goes_on) in [
            (0, Ok(()), true),
            (5, refused(), false),
            (2, refused(), false),
            (3, refused(), false),
            (1, Ok(()), false),
        ] {
            let part = Span::new(nth * 4096, 4096);
            assert_eq!(report.take((part, result)), goes_on, "{nth}");
        }
        assert_eq!(report.failed.map(|(offset, _)| offset), Some(2 * 4096));
        assert_eq!(report.done, 2 * 4096);
    }

    #[test]
    fn touching_brings_in_every_page_and_keeps_the_bytes() {
        let mapping = Mapping::new(Backing::Anon4K, 64 * 4096, None).unwrap();
        mapping.cells()[512].store(7, Ordering::Relaxed);
        mapping.touch(Span::new(0, 32 * 4096)).unwrap();
        let folios = match mapping.folios() {
            Ok(folios) => folios,
            Err(error) => return eprintln!("not run: {error}"),
        };
        assert_eq!((folios.small, folios.absent), (32 * 4096, 32 * 4096));
        assert_eq!(mapping.cells()[512].load(Ordering::Relaxed), 7);
    }
}
