//! Listeners: users in this process with translations of their own.

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::mem;

use iommu::FlushError;
use runs::{Iova, Joinable as _, Span};

use crate::areas::area::Area;
use crate::lock::{Mutex, RwLock};

/// Keeps translations of its own for an address space, in this process: a device model, a cache.
///
/// Like a unit, it must invalidate a range before its memory is released, but it sees areas, not
/// page tables, and also at those that no domain maps.
///
/// Several threads may call it at once, for areas that are apart; calls of [`unmapped`](Self::unmapped)
/// never overlap each other. It must not call the address space.
pub trait Listener: Send + Sync {
    /// `area` is there and can be used.
    fn mapped(&self, area: &Area);

    /// Invalidates everything in `range`. When it returns, no translation from there is used that was
    /// looked up earlier. The wait is bounded; after an error it is called again.
    fn unmapped(&self, range: Span<Iova>) -> Result<(), FlushError>;
}

/// The listeners of an address space, and what they must still invalidate.
#[derive(Default)]
pub(crate) struct Listeners {
    /// They come and go while no operation is under way.
    pub(crate) all: RwLock<Vec<Arc<dyn Listener>>>,
    unmapped: Mutex<Unmapped>,
    /// One thread at a time has them invalidate, so that the second one waits for what the first has taken.
    flushing: Mutex<()>,
}

#[derive(Default)]
struct Unmapped {
    ranges: Vec<Span<Iova>>,
    /// Some are being invalidated.
    under_way: bool,
}

impl Listeners {
    pub(crate) fn mapped(&self, area: &Area) {
        let all = self.all.read();
        all.iter().for_each(|listener| listener.mapped(area));
    }

    /// Notes that `range` is to be invalidated.
    pub(crate) fn note(&self, range: Span<Iova>) {
        if self.all.read().is_empty() {
            return;
        }
        let ranges = &mut self.unmapped.lock().ranges;
        let joined = ranges.last().and_then(|last| last.join(&range));
        match (ranges.last_mut(), joined) {
            (Some(last), Some(joined)) => *last = joined,
            _ => ranges.push(range),
        }
    }

    /// True when all listeners have invalidated what was noted.
    pub(crate) fn is_quiet(&self) -> bool {
        let unmapped = self.unmapped.lock();
        unmapped.ranges.is_empty() && !unmapped.under_way
    }

    /// Has all listeners invalidate what was noted. After an error all of that is still to come.
    pub(crate) fn flush(&self) -> Result<(), FlushError> {
        if self.is_quiet() {
            return Ok(());
        }
        let _flushing = self.flushing.lock();
        let ranges = {
            let mut unmapped = self.unmapped.lock();
            unmapped.under_way = true;
            mem::take(&mut unmapped.ranges)
        };
        // A listener that panics has not invalidated.
        let mut unheard = Unheard {
            of: &self.unmapped,
            ranges,
        };
        let all = self.all.read();
        for range in &unheard.ranges {
            let mut all = all.iter();
            all.try_for_each(|listener| listener.unmapped(*range))?;
        }
        unheard.ranges.clear();
        Ok(())
    }
}

/// Ranges that are being invalidated. Dropped, they are still to come.
struct Unheard<'a> {
    of: &'a Mutex<Unmapped>,
    ranges: Vec<Span<Iova>>,
}

impl Drop for Unheard<'_> {
    fn drop(&mut self) {
        let mut unmapped = self.of.lock();
        self.ranges.append(&mut unmapped.ranges);
        unmapped.ranges = mem::take(&mut self.ranges);
        unmapped.under_way = false;
    }
}
