//! Threads that change the address space at once, and what they write down.
//!
//! A mutator works mostly in a slice of its own of the device addresses, so that operations go on beside each other;
//! one operation of [`ELSEWHERE`] is anywhere, and comes in the way of others. Neighbours have leaf tables in common.
//! Memory is for all: the same pages are pinned for several at once.
//!
//! The shadow model predicts what an operation does where it was alone; where several were, the areas say which came
//! last. An error of those that another operation can bring about is expected only if one was at work there; and a
//! fault is armed for one thread, so that it excuses no error of another.
//!
//! Not made beside others: a device is attached and detached by one mutator, whose it is; tracking begins, ends and is
//! harvested by one at a time, since it has one bitmap to be compared with; and memory is mapped nowhere while it is
//! released and discarded, which no monitor may do. Looks at everything, and giving everything back are
//! for quiet points.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use runs::{Iova, Span};

use crate::operations::Said;
use crate::scenario::World;
use crate::{IOVA, PAGE, PAGES};

/// One operation of so many is anywhere.
const ELSEWHERE: u64 = 8;
/// Operations that are remembered.
const REMEMBERED: usize = 60;

/// A thread that changes the address space.
pub(crate) struct Mutator<'a> {
    pub(crate) world: &'a World,
    pub(crate) book: &'a Book,
    pub(crate) random: &'a mut fastrand::Rng,
    pub(crate) number: usize,
    /// How many there are.
    pub(crate) of: usize,
}

/// Records of the mutators.
#[derive(Default)]
pub(crate) struct Book {
    operations: AtomicU64,
    said: Mutex<Lines>,
}

#[derive(Default)]
struct Lines {
    log: VecDeque<String>,
    /// Operations by name: how often they were done, and refused.
    counts: BTreeMap<&'static str, (u64, u64)>,
}

impl Book {
    /// Operations so far.
    pub(crate) fn operations(&self) -> u64 {
        self.operations.load(Ordering::Relaxed)
    }

    /// Operations by name, how often they were done and refused, and the last ones.
    pub(crate) fn read(&self) -> (Vec<(&'static str, u64, u64)>, Vec<String>) {
        let lines = self.said.lock().unwrap_or_else(PoisonError::into_inner);
        let counts = lines.counts.iter();
        let counts = counts.map(|(name, (done, refused))| (*name, *done, *refused));
        (counts.collect(), lines.log.iter().cloned().collect())
    }
}

/// All device addresses.
pub(crate) const fn everywhere() -> Span<Iova> {
    Span::new(IOVA, PAGES * PAGE)
}

impl Mutator<'_> {
    /// Where the next operation is.
    pub(crate) fn region(&mut self) -> Span<Iova> {
        if self.random.u64(..ELSEWHERE) == 0 {
            return everywhere();
        }
        // No border but the outer ones is a multiple of 2 MiB.
        let border = |number: usize| match number as u64 * PAGES / self.of as u64 {
            outer @ (0 | PAGES) => outer,
            inner => inner | 37,
        };
        let Range { start, end } = border(self.number)..border(self.number + 1);
        Span::new(IOVA + start * PAGE, (end - start) * PAGE)
    }

    /// Notes what came of an operation; an error that no fault has brought about is a complaint.
    pub(crate) fn note(&self, name: &'static str, what: &str, result: Said) {
        let world = self.world;
        let fired = world.faults.disarm();
        // A flush makes up for one that failed.
        if fired && let Err(cause) = world.space.flush() {
            let text = format!("a flush after a failure: {cause}");
            world.scene.complain(text);
        }
        world.settle();
        let (done, refused, said) = match result {
            Ok(()) => (1, 0, "done".into()),
            Err((cause, expected)) => {
                if !expected && !fired {
                    let text = format!("{name} {what}: refused: {cause}");
                    world.scene.complain(text);
                }
                (0, 1, format!("refused: {cause}"))
            }
        };
        let fault = if fired { ", with a fault" } else { "" };
        let mut lines = self.book.said.lock();
        let lines = lines
            .as_deref_mut()
            .unwrap_or_else(|poison| poison.get_mut());
        let counts = lines.counts.entry(name).or_default();
        *counts = (counts.0 + done, counts.1 + refused);
        let (nth, by) = (
            self.book.operations.fetch_add(1, Ordering::Relaxed) + 1,
            self.number,
        );
        lines
            .log
            .push_back(format!("{nth}: by {by}: {name} {what}: {said}{fault}"));
        if lines.log.len() > REMEMBERED {
            lines.log.pop_front();
        }
    }
}
