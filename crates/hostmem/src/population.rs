//! Bringing in the pages of many mappings at once: see [`Population`].
//!
//! Most of the time goes into zeroing, which several processors do faster than one, and those of the
//! memory's node faster than others. Mappings are grouped by the node of their memory, and each group
//! has workers of its own. They begin when all of them are there: a new thread's stack takes the lock
//! of the address space that populating holds. They take chunks in order and finish what they have
//! taken, so that whatever ends the work, the pages of a mapping before its first chunk that failed, or
//! that no worker has taken, are there. They tell the caller's thread of each chunk, one at a time:
//! progress is reported there.

use std::cmp::Reverse;
use std::io;
use std::num::NonZeroUsize;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, RwLock, mpsc};
use std::thread;

use runs::{Offset, Span};

use crate::mapping::Mapping;
use crate::nodes::KernelNodes;
use crate::populate::PopulateError;
use crate::sys;

/// Bytes between two looks at whether to go on.
const CHUNK: u64 = 64 << 20;

/// The pages of many mappings, to be brought in at once.
///
/// Each node has workers, threads that run on its processors and bring in what is to lie there: mappings
/// with the largest pages first, since memory for them must be contiguous. A mapping is of the node
/// that was named for it or that the policy of its first page names (`mbind`), else of the node on which
/// the thread that calls [`new`](Self::new) runs then. A node without processors for this thread has workers
/// on all that it may use; processors that its affinity excludes are never used.
///
/// A worker brings in 64 MiB (or a page, if that is larger) between two looks at whether to go on, so
/// that the number of workers times as much is under way. What is brought in is remembered: after an
/// interruption or an error, [`run`](Self::run) goes on with the rest.
///
/// ```
/// use std::ops::ControlFlow;
/// use hostmem::{Backing, Mapping, PopulateError, Population};
///
/// let small = Mapping::new(Backing::Anon4K, 1 << 20, None)?;
/// let huge = Mapping::new(Backing::Thp, 4 << 20, None)?;
/// let mut population = Population::new([&small, &huge]);
/// let stopped = population.run(&mut |_done| ControlFlow::Break(()));
/// assert!(matches!(stopped, Err(PopulateError::Interrupted { done }) if done == 4 << 20));
/// let total = population.total();
/// population.run(&mut |done| {
///     println!("{done} of {total} bytes");
///     ControlFlow::Continue(())
/// })?;
/// assert_eq!(population.done(), 5 << 20);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Population<'a> {
    groups: Vec<Group<'a>>,
    /// The node of the thread that has made it.
    here: Option<u32>,
    /// Bytes of a chunk, for pages that are not larger.
    chunk: u64,
    /// Workers of a node at most, where it is not as many as it has processors.
    workers: Option<NonZeroUsize>,
    total: u64,
    done: u64,
}

/// Mappings whose pages are to come from one node.
#[derive(Debug)]
struct Group<'a> {
    node: Option<u32>,
    /// Processors of its workers.
    cpus: Vec<u32>,
    /// Parts that no worker has taken; they are taken from the last one on.
    rest: Mutex<Vec<Part<'a>>>,
}

/// A part of a mapping.
#[derive(Clone, Copy, Debug)]
struct Part<'a> {
    mapping: &'a Mapping,
    /// Position of the mapping in the population.
    nth: usize,
    span: Span<Offset>,
}

/// A chunk, and what became of it.
type Outcome<'a> = (Part<'a>, io::Result<()>);

impl<'a> Population<'a> {
    /// These mappings, of which nothing is brought in yet. Errors name them by their position, from 0 on.
    pub fn new(mappings: impl IntoIterator<Item = &'a Mapping>) -> Self {
        let mut groups: Vec<Group<'a>> = Vec::new();
        let here = sys::current_node();
        let mut total = 0;
        for (nth, mapping) in mappings.into_iter().enumerate() {
            let node = mapping.node().or(here);
            let span = Span::new(0, mapping.len());
            let part = Part { mapping, nth, span };
            total += mapping.len();
            match groups.iter().find(|group| group.node == node) {
                Some(group) => group.rest().push(part),
                None => groups.push(Group {
                    node,
                    cpus: processors(node),
                    rest: Mutex::new(vec![part]),
                }),
            }
        }
        Self {
            groups,
            here,
            chunk: CHUNK,
            workers: None,
            total,
            done: 0,
        }
    }

    /// Has at most `most` workers on each node, rather than as many as the node has processors for this
    /// thread.
    #[must_use]
    pub const fn workers(mut self, most: NonZeroUsize) -> Self {
        self.workers = Some(most);
        self
    }

    /// Bytes of all mappings.
    pub const fn total(&self) -> u64 {
        self.total
    }

    /// Bytes that were brought in.
    pub const fn done(&self) -> u64 {
        self.done
    }

    /// Brings in what is left. After each chunk `progress` receives, in this thread, how many bytes of
    /// all mappings are [done](Self::done), and may stop the work. Where one worker is enough, since no
    /// more are asked for or less than 128 MiB are left, and the memory is of the node on which
    /// [`new`](Self::new) was called, this thread is the worker.
    ///
    /// # Errors
    ///
    /// When memory or huge pages run out, or when `progress` breaks before all is done.
    pub fn run(
        &mut self,
        progress: &mut dyn FnMut(u64) -> ControlFlow<()>,
    ) -> Result<(), PopulateError> {
        let counts: Vec<usize> = self
            .groups
            .iter()
            .map(|group| group.prepare(self.chunk, self.workers))
            .collect();
        let Self { groups, chunk, .. } = self;
        let crew = Crew {
            chunk: *chunk,
            stop: AtomicBool::new(false),
        };
        let mut report = Report {
            stop: &crew.stop,
            progress,
            total: self.total,
            done: &mut self.done,
            failed: None,
            interrupted: false,
        };
        let here = match (&groups[..], &counts[..]) {
            ([only], [0 | 1]) => only.node == self.here,
            _ => false,
        };
        if !here {
            crew.work_together(groups, &counts, &mut report);
        }
        // Everything, or what is left when no thread was to be had.
        for group in groups.iter() {
            crew.work(group, |outcome| report.take(outcome));
        }
        let Report {
            failed,
            interrupted,
            ..
        } = report;
        match failed {
            Some((part, source)) => {
                let Part { mapping, nth, span } = part;
                Err(mapping.populate_error(nth, span.start, source))
            }
            None if interrupted && self.done < self.total => {
                Err(PopulateError::Interrupted { done: self.done })
            }
            None => Ok(()),
        }
    }
}

/// The processors on which workers of `node` are to run.
fn processors(node: Option<u32>) -> Vec<u32> {
    let near = node.map_or(Vec::new(), |node| KernelNodes.processors(node));
    if near.is_empty() {
        sys::allowed_cpus()
    } else {
        near
    }
}

impl<'a> Group<'a> {
    fn rest(&self) -> MutexGuard<'_, Vec<Part<'a>>> {
        // It is changed by single steps.
        self.rest.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts what is left in order, and says how many workers it keeps busy: at most `most`, and one for
    /// each whole chunk.
    fn prepare(&self, chunk: u64, most: Option<NonZeroUsize>) -> usize {
        let mut rest = self.rest();
        // The end comes first.
        rest.sort_by_key(|part| {
            let pages = part.mapping.backing().largest_page();
            (pages, Reverse((part.nth, part.span.start)))
        });
        let bytes: u64 = rest.iter().map(|part| part.span.len).sum();
        let pieces = rest
            .iter()
            .map(|part| part.span.len.div_ceil(part.chunk(chunk)));
        let useful = pieces.sum::<u64>().min((bytes / chunk).max(1));
        let most = most.map_or(self.cpus.len(), NonZeroUsize::get).max(1);
        most.min(usize::try_from(useful).unwrap_or(usize::MAX))
    }

    fn take(&self, chunk: u64) -> Option<Part<'a>> {
        let mut rest = self.rest();
        let part = rest.last_mut()?;
        let Span { start, len, .. } = part.span;
        let taken = part.chunk(chunk).min(len);
        let span = Span::new(start, taken);
        let taken_part = Part { span, ..*part };
        part.span = Span::new(start + taken, len - taken);
        if taken == len {
            rest.pop();
        }
        Some(taken_part)
    }
}

impl Part<'_> {
    /// Bytes of a chunk of it: whole pages.
    fn chunk(&self, chunk: u64) -> u64 {
        chunk.max(self.mapping.backing().page())
    }
}

/// State that the workers share.
struct Crew {
    /// Bytes of a chunk, for pages that are not larger.
    chunk: u64,
    /// No more are to be taken.
    stop: AtomicBool,
}

impl Crew {
    /// Has `counts` workers on each group, and reports what they tell.
    fn work_together<'a>(
        &self,
        groups: &[Group<'a>],
        counts: &[usize],
        report: &mut Report<'_, 'a>,
    ) {
        let gate = RwLock::new(());
        thread::scope(|scope| {
            // Without room, so that no worker gets far ahead of what is reported.
            let (tell, told) = mpsc::sync_channel(0);
            let closed = gate.write();
            // One of each group first: there may be no more threads to be had.
            let rounds = 0..counts.iter().copied().max().unwrap_or(0);
            let wanted = rounds.flat_map(|round| {
                let some = groups.iter().zip(counts);
                some.filter_map(move |(group, count)| (round < *count).then_some(group))
            });
            for group in wanted {
                let (tell, gate) = (tell.clone(), &gate);
                let work = move || {
                    // Elsewhere it is slower, and nothing else.
                    let _ = sys::run_on(&group.cpus);
                    drop(gate.read());
                    self.work(group, |outcome| tell.send(outcome).is_ok());
                };
                let thread = thread::Builder::new().name("populate".into());
                if thread.spawn_scoped(scope, work).is_err() {
                    break;
                }
            }
            drop((tell, closed));
            for outcome in told {
                report.take(outcome);
            }
        });
    }

    /// Takes chunks of a group and brings them in, until there are none left or `tell` says that it is
    /// enough. One that fails is left.
    fn work<'a>(&self, group: &Group<'a>, mut tell: impl FnMut(Outcome<'a>) -> bool) {
        while !self.stop.load(Ordering::Relaxed) {
            let Some(part) = group.take(self.chunk) else {
                break;
            };
            let result = part.mapping.bring_in(part.span);
            if result.is_err() {
                // Before others find it.
                self.stop.store(true, Ordering::Relaxed);
                group.rest().push(part);
            }
            if !tell((part, result)) {
                break;
            }
        }
    }
}

/// Progress reported so far.
struct Report<'r, 'a> {
    stop: &'r AtomicBool,
    progress: &'r mut dyn FnMut(u64) -> ControlFlow<()>,
    total: u64,
    done: &'r mut u64,
    /// The first chunk that failed, by mapping and offset.
    failed: Option<(Part<'a>, io::Error)>,
    interrupted: bool,
}

impl<'a> Report<'_, 'a> {
    /// Takes note; false when no more chunks are to be taken.
    fn take(&mut self, (part, result): Outcome<'a>) -> bool {
        match result {
            Ok(()) => {
                *self.done += part.span.len;
                let goes_on = self.failed.is_none() && !self.interrupted;
                self.interrupted |=
                    goes_on && (self.progress)(*self.done).is_break() && *self.done < self.total;
            }
            Err(source) => {
                let place = |part: &Part<'_>| (part.nth, part.span.start);
                let first = self.failed.as_ref().map(|(first, _)| place(first));
                if first.is_none_or(|first| place(&part) < first) {
                    self.failed = Some((part, source));
                }
            }
        }
        let ends = self.interrupted || self.failed.is_some();
        self.stop.fetch_or(ends, Ordering::Relaxed);
        !ends
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Backing, NodePolicy, procfs};
    use std::fs;
    use std::time::{Duration, Instant};

    const CHUNK: u64 = 4 * 4096;
    /// A thread has run by then, on any machine.
    const LONG: Duration = Duration::from_secs(600);

    /// Threads that populate are counted by their name.
    fn turn() -> MutexGuard<'static, ()> {
        static TURN: Mutex<()> = Mutex::new(());
        TURN.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn small(chunks: u64) -> Mapping {
        Mapping::new(Backing::Anon4K, chunks * CHUNK, None).unwrap()
    }

    fn population<'a>(mappings: &[&'a Mapping], workers: usize) -> Population<'a> {
        let mut population = Population::new(mappings.iter().copied());
        population.chunk = CHUNK;
        population.workers(NonZeroUsize::new(workers).unwrap())
    }

    /// Processors of each thread that populates, sorted.
    fn threads_run_on() -> Vec<Vec<u32>> {
        let tasks = fs::read_dir("/proc/self/task").unwrap();
        let populating = tasks.filter_map(|task| {
            let task = task.ok()?.path();
            let status = procfs::read(task.join("status")).ok()?;
            let name = procfs::line(&status, "Name")?;
            let cpus = procfs::line(&status, "Cpus_allowed_list")?;
            (name == "populate").then(|| procfs::list(cpus))
        });
        let mut found: Vec<_> = populating.collect();
        found.sort();
        found
    }

    #[test]
    fn workers_run_where_the_memory_is_to_be_and_report_each_chunk() {
        let _turn = turn();
        let mappings = [small(64), small(64)];
        let mut population = population(&[&mappings[0], &mappings[1]], 2);
        // The processors of a node are some of those that this process may use.
        let allowed = sys::allowed_cpus();
        let [only] = &population.groups[..] else {
            panic!("{:?}", population.groups);
        };
        assert!(!only.cpus.is_empty() && only.cpus.iter().all(|cpu| allowed.contains(cpu)));
        // As if the second one were of another node.
        let second = only.rest().pop().unwrap();
        population.groups.push(Group {
            node: None,
            cpus: allowed[allowed.len() - 1..].to_vec(),
            rest: Mutex::new(vec![second]),
        });
        population.groups[0].cpus.truncate(1);
        let mut expected: Vec<_> = population.groups.iter().map(|it| it.cpus.clone()).collect();
        expected.extend(expected.clone());
        expected.sort();
        let (mut reported, began) = (Vec::new(), Instant::now());
        let result = population.run(&mut |done| {
            // All workers are there, and have still others to take; they run there in a moment.
            while reported.is_empty() && threads_run_on() != expected {
                let found = threads_run_on();
                let waits = found.len() <= expected.len() && began.elapsed() < LONG;
                assert!(waits, "{found:?}, not {expected:?}");
                thread::yield_now();
            }
            reported.push(done);
            ControlFlow::Continue(())
        });
        result.unwrap();
        let steps: Vec<u64> = (1..=128).map(|n| n * CHUNK).collect();
        assert_eq!(reported, steps);
        assert_eq!(
            (population.done(), population.total()),
            (128 * CHUNK, 128 * CHUNK)
        );
        for mapping in &mappings {
            match mapping.folios() {
                Ok(folios) => assert_eq!(folios.small, mapping.len()),
                Err(error) => eprintln!("not run in part: {error}"),
            }
        }
    }

    #[test]
    fn workers_that_are_stopped_leave_no_holes_and_go_on_with_the_rest() {
        let _turn = turn();
        let (chunks, workers) = (64, 3);
        for stop in [1, 2, 40] {
            let mapping = small(chunks);
            let mut population = population(&[&mapping], workers);
            let mut calls = 0;
            let result = population.run(&mut |_| {
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
            assert_eq!(population.done(), done);
            // Each worker may have taken one more.
            assert!((stop..=stop + workers as u64).contains(&(done / CHUNK)));
            let pagemap = crate::nodes::open_pagemap().unwrap();
            let whole = Span::new(0, mapping.len());
            let mut stretches = crate::stretches::Stretches::new(&mapping, whole);
            match stretches.next(&pagemap) {
                Ok(found) => assert_eq!(found.map(|there| there.span), Some(Span::new(0, done))),
                Err(error) => eprintln!("not run in part: {error}"),
            }
            let mut reported = Vec::new();
            let result = population.run(&mut |done| {
                reported.push(done);
                ControlFlow::Continue(())
            });
            result.unwrap();
            let steps: Vec<u64> = (done / CHUNK + 1..=chunks).map(|n| n * CHUNK).collect();
            assert_eq!(reported, steps, "only the rest");
            if let Ok(folios) = mapping.folios() {
                assert_eq!(folios.absent, 0);
            }
            population.run(&mut |_| panic!("nothing is left")).unwrap();
        }
    }

    #[test]
    fn the_largest_pages_come_first_and_what_failed_comes_again() {
        let thp = Mapping::new(Backing::Thp, 2 << 20, None).unwrap();
        let (first, second) = (small(3), small(1));
        let population = population(&[&first, &thp, &second], 1);
        let [group] = &population.groups[..] else {
            panic!("{:?}", population.groups);
        };
        let large = 1 << 20;
        let next = |chunk| {
            let part = group.take(chunk)?;
            Some((part.nth, part.span.start, part.span.len))
        };
        group.prepare(large, None);
        assert_eq!(next(large), Some((1, 0, large)));
        let failed = group.take(large).unwrap();
        assert_eq!(next(2 * CHUNK), Some((0, 0, 2 * CHUNK)));
        group.rest().push(failed);
        group.prepare(large, None);
        assert_eq!(next(large), Some((1, large, large)));
        assert_eq!(next(large), Some((0, 2 * CHUNK, CHUNK)));
        assert_eq!(next(large), Some((2, 0, CHUNK)));
        assert_eq!(next(large), None);
    }

    #[test]
    fn a_worker_has_a_whole_chunk_at_least() {
        let mappings: Vec<Mapping> = (0..16).map(|_| small(1)).collect();
        let mut population = Population::new(&mappings);
        let most = NonZeroUsize::new(5);
        let count = |chunk, most| population.groups[0].prepare(chunk, most);
        assert_eq!(count(CHUNK, most), 5);
        assert_eq!(count(8 * CHUNK, most), 2);
        assert_eq!(count(64 * CHUNK, most), 1);
        // A chunk for each of the mappings.
        assert_eq!(count(CHUNK / 4, NonZeroUsize::new(99)), 64);
        let cpus = population.groups[0].cpus.len();
        assert_eq!(count(CHUNK, None), cpus.min(16));
        population.groups.clear();
        population.total = 0;
        population.run(&mut |_| panic!("nothing is left")).unwrap();
    }

    #[test]
    fn the_first_page_that_is_missing_is_that_of_the_lowest_chunk_that_failed() {
        let mapping = small(2);
        let (stop, mut done) = (AtomicBool::new(false), 0);
        let mut report = Report {
            stop: &stop,
            progress: &mut |_| ControlFlow::Continue(()),
            total: 16 * 4096,
            done: &mut done,
            failed: None,
            interrupted: false,
        };
        let refused = || Err(io::Error::from_raw_os_error(libc::ENOMEM));
        // As workers tell of them, and not in their order.
        for (nth, page, result, goes_on) in [
            (1, 0, Ok(()), true),
            (2, 1, refused(), false),
            (1, 5, refused(), false),
            (1, 2, refused(), false),
            (1, 3, refused(), false),
            (1, 1, Ok(()), false),
        ] {
            let part = Part {
                mapping: &mapping,
                nth,
                span: Span::new(page * 4096, 4096),
            };
            assert_eq!(report.take((part, result)), goes_on, "{nth} {page}");
        }
        let failed = report.failed.map(|(part, _)| (part.nth, part.span.start));
        assert_eq!(failed, Some((1, 2 * 4096)));
        assert_eq!(done, 2 * 4096);
    }

    #[test]
    fn the_node_is_the_one_that_the_policy_of_the_memory_names() {
        let node = KernelNodes.memory_nodes()[0];
        let policy = |mode| {
            let mapping = small(1);
            let mut mask = [0; 16];
            mask[0] = 1 << node;
            let result = sys::set_policy(mapping.address(), mapping.len(), mode, &mask);
            result.map(|()| mapping.node())
        };
        assert_eq!(small(1).node(), None);
        for (mode, found) in [
            (libc::MPOL_PREFERRED, Some(node)),
            (libc::MPOL_BIND, Some(node)),
            (libc::MPOL_BIND | libc::MPOL_F_STATIC_NODES, Some(node)),
            (libc::MPOL_INTERLEAVE, None),
        ] {
            match policy(mode) {
                Ok(node) => assert_eq!(node, found, "{mode:#x}"),
                Err(error) => eprintln!("not run in part: mbind: {error}"),
            }
        }
    }
}
