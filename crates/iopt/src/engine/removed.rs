//! Runs that an unmap has removed, and their report.

use runs::{Joiner, Run, Span};

use super::sink::{RunSink, Wants};
use crate::format::Aperture;
use crate::gather::Gather;

/// Runs that an unmap has removed so far.
pub(super) struct Removed<'a, S> {
    pub(super) gather: &'a mut Gather,
    sink: &'a mut S,
    joiner: Joiner<Run>,
    /// The run in the joiner was written to; only for sinks that want to know.
    dirty: bool,
    aperture: Aperture,
    /// It is known, or not asked for, how much is mapped: all counts as mapped.
    pub(super) known: bool,
    /// Where all of it leads, if that is known to be one run: then leaves are not looked at for the sink.
    pub(super) one: Option<u64>,
    /// See [`Look::lowest`](super::look::Look::lowest).
    pub(super) lowest: usize,
    /// First and last stripped address that was removed.
    hull: Option<(u64, u64)>,
    leaf_levels: u32,
    pub(super) outcome: Outcome,
}

/// Totals of an unmap.
#[derive(Clone, Copy, Default)]
pub(crate) struct Outcome {
    /// Bytes that were mapped.
    pub(crate) bytes: u64,
    /// Tables that were unlinked.
    pub(crate) tables: u64,
}

impl<'a, S: RunSink> Removed<'a, S> {
    pub(super) fn new(
        aperture: Aperture,
        known: bool,
        gather: &'a mut Gather,
        sink: &'a mut S,
    ) -> Self {
        Self {
            gather,
            sink,
            joiner: Joiner::new(),
            dirty: false,
            aperture,
            known,
            one: None,
            lowest: 0,
            hull: None,
            leaf_levels: 0,
            outcome: Outcome::default(),
        }
    }

    /// Reports of removed runs that the sink wants.
    #[inline(always)]
    pub(super) fn wants(&self) -> Wants {
        self.sink.wants()
    }

    /// Tells the last run, and the gather what has to be flushed; returns that, too.
    #[inline(always)]
    pub(super) fn finish(mut self) -> (Outcome, &'a mut Gather) {
        self.end_of_run();
        if let Some((first, last)) = self.hull {
            let range = Span::new(self.aperture.extend(first), last - first + 1);
            if let Some(pa) = self.one {
                self.sink
                    .run(Run::new(range.start, Span::new(pa, range.len)));
            }
            self.gather.add(range, self.leaf_levels);
        }
        (self.outcome, self.gather)
    }

    /// Leaves at `level`, from the stripped address `at` to `pa`.
    #[inline(always)]
    pub(super) fn leaves(&mut self, level: usize, at: u64, pa: u64, len: u64, dirty: bool) {
        self.stretch(level, at, at + (len - 1), len);
        let wants = self.wants();
        if wants == Wants::Nothing || self.one.is_some() {
            return;
        }
        if wants == Wants::DirtyRuns && dirty != self.dirty {
            self.end_of_run();
            self.dirty = dirty;
        }
        let next = Run::new(self.aperture.extend(at), Span::new(pa, len));
        if let Some(run) = self.joiner.push(next) {
            self.tell(run);
        }
    }

    #[inline(always)]
    fn tell(&mut self, run: Run) {
        if self.wants() == Wants::DirtyRuns {
            self.sink.dirty_run(run, self.dirty);
        } else {
            self.sink.run(run);
        }
    }

    #[inline(always)]
    fn end_of_run(&mut self) {
        if let Some(run) = self.joiner.finish() {
            self.tell(run);
        }
    }

    /// Something was removed between `first` and `last`, `bytes` in all.
    #[inline(always)]
    pub(super) fn stretch(&mut self, level: usize, first: u64, last: u64, bytes: u64) {
        self.outcome.bytes += bytes;
        self.leaf_levels |= 1 << level;
        self.hull = Some((self.hull.map_or(first, |(first, _)| first), last));
    }
}
