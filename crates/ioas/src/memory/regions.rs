//! Guest memory that is charged to a ledger, once for each region.

use alloc::collections::BTreeMap;
use alloc::sync::{Arc, Weak};

use hostmem::Mapping;

use crate::lock::Mutex;
use crate::memory::Memory;
#[cfg(doc)]
use crate::memory::ledger::Ledger;

/// Regions that a [`Ledger`] is charged for, by their addresses in this process.
///
/// While one of them is alive its region stays mapped, so that the same addresses are the same memory.
#[derive(Debug, Default)]
pub(crate) struct Regions(Mutex<BTreeMap<(u64, u64), Weak<Memory>>>);

impl Regions {
    /// The memory object of `mapping`, or what `make` makes for it.
    pub(crate) fn memory(
        &self,
        mapping: &Mapping,
        make: impl FnOnce() -> Arc<Memory>,
    ) -> Arc<Memory> {
        let regions = &mut *self.0.lock();
        let key = (mapping.address(), mapping.len());
        if let Some(there) = regions.get(&key).and_then(Weak::upgrade) {
            return there;
        }
        regions.retain(|_, region| region.strong_count() > 0);
        let memory = make();
        regions.insert(key, Arc::downgrade(&memory));
        memory
    }
}
