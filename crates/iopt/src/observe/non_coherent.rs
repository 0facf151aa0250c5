//! Tables that the unit reads past the processor's caches.
//!
//! VT-d units say so with ECAP.C = 0 (VT-d specification, section 10.4.3 "Extended Capability
//! Register", field C: Page-walk Coherency), SMMUs with IDR0.COHACC = 0 (IHI 0070, section 6.3.1
//! "SMMU_IDR0"). In scalable mode VT-d's ECAP.SMPWCS = 0 says so, too. A store of the processor then
//! counts when its cache line has been written back, and lines are written back when they are flushed
//! *or at any earlier time*. So it is not enough to flush in the end: a new table must be in memory
//! before the entry that leads to it is stored at all. The engine calls
//! [`written`](TableMemory::written) in that order.

use crate::memory::{TableMemory, pass_on, pass_runs_on, pass_steps_on};

/// How a processor writes cache lines back.
///
/// On x86-64 that is `clflush` or `clwb` for each line and `sfence` at the end, on Arm `dc cvac`
/// and `dsb`. The instructions need `unsafe` code where there are any, which is the
/// implementation's.
pub trait CacheLines {
    /// Bytes of a cache line, a power of two.
    const LINE: usize;

    /// Writes back the line that begins at `line`, a multiple of [`LINE`](Self::LINE). It holds at
    /// least one entry of a table; it can begin before, and end behind, the table memory where that
    /// is not aligned to lines.
    fn write_back(&self, line: *const u8);

    /// Returns when every line of earlier [`write_back`](Self::write_back)s of this thread is where
    /// the unit finds it.
    fn complete(&self);
}

/// Table memory for units that do not see the processor's caches.
#[derive(Debug, Default)]
pub struct NonCoherent<M, C> {
    inner: M,
    lines: C,
}

impl<M, C: CacheLines> NonCoherent<M, C> {
    /// Tables in `inner`, written back by `lines`.
    pub const fn new(inner: M, lines: C) -> Self {
        const { assert!(C::LINE.is_power_of_two(), "a line is a power of two") }
        Self { inner, lines }
    }

    /// The memory inside.
    pub const fn inner(&self) -> &M {
        &self.inner
    }

    /// The write-back of cache lines.
    pub const fn lines(&self) -> &C {
        &self.lines
    }
}

impl<M: TableMemory, C: CacheLines> TableMemory for NonCoherent<M, C> {
    pass_on!(self => self.inner);
    pass_steps_on!(self => self.inner);
    pass_runs_on!(self => self.inner);

    const FLUSHES: bool = true;

    fn written(&self, entries: &[M::Cell]) {
        let bytes = size_of_val(entries);
        if bytes > 0 {
            let start: *const u8 = entries.as_ptr().cast();
            // Back to where the first line begins.
            let before = start.addr() & (C::LINE - 1);
            let first = start.wrapping_sub(before);
            for line in 0..(before + bytes).div_ceil(C::LINE) {
                self.lines.write_back(first.wrapping_add(line * C::LINE));
            }
            self.lines.complete();
        }
        self.inner.written(entries);
    }
}
