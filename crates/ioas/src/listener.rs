//! Who else translates: users in this process with translations of their own.

use alloc::sync::Arc;
use alloc::vec::Vec;

use iommu::FlushError;
use runs::{Iova, Span};

use crate::area::Area;

/// Keeps translations of its own for an address space, in this process: a device model, a cache.
///
/// It is a unit in that nothing is let go before it has forgotten it, but it looks at areas, not at
/// page tables, and also at those that no domain maps.
pub trait Listener: Send + Sync {
    /// `area` is there and can be used.
    fn mapped(&self, area: &Area);

    /// Forgets everything in `range`. When it returns, nobody uses a translation from there that was
    /// looked up earlier. The wait is bounded; after an error it is called again.
    fn unmapped(&self, range: Span<Iova>) -> Result<(), FlushError>;
}

/// The listeners of an address space, and what they are still to be told.
#[derive(Default)]
pub(crate) struct Listeners {
    all: Vec<Arc<dyn Listener>>,
    unmapped: Vec<Span<Iova>>,
}

impl Listeners {
    pub(crate) fn add(&mut self, listener: Arc<dyn Listener>) {
        self.all.push(listener);
    }

    pub(crate) fn remove(&mut self, listener: &Arc<dyn Listener>) {
        self.all.retain(|other| !Arc::ptr_eq(other, listener));
    }

    pub(crate) fn mapped(&self, area: &Area) {
        self.all.iter().for_each(|listener| listener.mapped(area));
    }

    /// Notes that `range` is to be forgotten.
    pub(crate) fn note(&mut self, range: Span<Iova>) {
        if self.all.is_empty() {
            return;
        }
        match self.unmapped.last_mut() {
            Some(last) if last.start.checked_add(last.len) == Some(range.start) => {
                last.len += range.len;
            }
            _ => self.unmapped.push(range),
        }
    }

    /// True when everybody has forgotten what was noted.
    pub(crate) fn is_quiet(&self) -> bool {
        self.unmapped.is_empty()
    }

    /// Has everybody forget what was noted. After an error all of that is still to come.
    pub(crate) fn flush(&mut self) -> Result<(), FlushError> {
        for range in &self.unmapped {
            let mut all = self.all.iter();
            all.try_for_each(|listener| listener.unmapped(*range))?;
        }
        self.unmapped.clear();
        Ok(())
    }
}
