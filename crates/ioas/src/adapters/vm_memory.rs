//! An address space for device models on `vm-memory`: see [`GuestIommu`].

use alloc::format;
use alloc::sync::{Arc, Weak};
use alloc::vec::Vec;
use core::fmt;
use core::time::Duration;

use iommu::FlushError;
use iopt::Prot;
use parking_lot::{RwLock, RwLockReadGuard};
use runs::{Iova, Span};
use vm_memory::iommu::{Error, IotlbIterator, IovaRange};
use vm_memory::{GuestAddress, Iommu, Iotlb, Permissions};

use crate::areas::area::Area;
use crate::memory::Memory;
use crate::space::listener::Listener;

/// An address space for device models on `vm-memory`.
///
/// It implements [`vm_memory::Iommu`] over vm-memory's own [`Iotlb`], which holds all
/// areas over the guest's memory at any time: there are no misses to be filled in. An unmap removes
/// its translations before memory is released, and waits for the holders of guards, up to a limit;
/// beyond that the unmap reports an error, and the memory stays pinned until a later flush succeeds.
/// A thread that maps must hold no guard: it would wait for itself. Readers take the lock recursively, since a
/// descriptor may name another one while a guard is held.
///
/// ```
/// use std::sync::Arc;
/// use std::time::Duration;
///
/// use ioas::{GuestIommu, Ioas, Ledger, Memory, Synthetic};
/// use iommu::DomainId;
/// use iopt::{AnyTable, FormatId, HeapTables, Prot};
/// use runs::{PageSizes, Span};
/// use vm_memory::{GuestAddress, Iommu, Permissions};
///
/// let tables = Arc::new(HeapTables::with_tables(16)?);
/// let table = AnyTable::new(FormatId::VtdSs, 4, PageSizes::from_bits(u64::MAX), tables)?;
/// let mut space = Ioas::over_table(DomainId(1), table);
/// let ledger = Ledger::unlimited();
/// let ram = Memory::new(Arc::new(Synthetic::new([Span::new(0x10_0000, 1 << 20)])), &ledger);
///
/// let iommu = Arc::new(GuestIommu::new(Duration::from_millis(100)));
/// iommu.add_memory(&ram, GuestAddress(0x8000_0000));
/// space.add_listener(iommu.clone());
/// space.map(0x1000, &ram, Span::new(0x2000, 0x4000), Prot::RW)?;
///
/// let mut found = iommu.translate(GuestAddress(0x1800), 0x1000, Permissions::Write)?;
/// assert_eq!(found.next().map(|range| range.base), Some(GuestAddress(0x8000_2800)));
/// drop(found);
/// space.unmap_all()?;
/// assert!(iommu.translate(GuestAddress(0x1800), 8, Permissions::Read).is_err());
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
pub struct GuestIommu {
    /// A thread may look up while it holds a guard, so readers never queue behind a writer.
    iotlb: RwLock<Iotlb>,
    memories: RwLock<Vec<(Weak<Memory>, GuestAddress)>>,
    wait: Duration,
}

impl GuestIommu {
    /// Nothing is translated yet. An unmap waits for guards up to `wait`.
    pub fn new(wait: Duration) -> Self {
        Self {
            iotlb: RwLock::new(Iotlb::new()),
            memories: RwLock::default(),
            wait,
        }
    }

    /// `memory` is guest memory from `base` on. Areas over memory that was not added are not
    /// translated: add it before the address space is [told](crate::Ioas::add_listener).
    pub fn add_memory(&self, memory: &Arc<Memory>, base: GuestAddress) {
        let mut memories = self.memories.write();
        memories.retain(|(memory, _)| memory.strong_count() > 0);
        memories.push((Arc::downgrade(memory), base));
    }

    fn base_of(&self, memory: &Arc<Memory>) -> Option<GuestAddress> {
        let memories = self.memories.read();
        let found = memories
            .iter()
            .find(|(other, _)| core::ptr::eq(other.as_ptr(), Arc::as_ptr(memory)))?;
        Some(found.1)
    }
}

impl fmt::Debug for GuestIommu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GuestIommu").finish_non_exhaustive()
    }
}

/// vm-memory's lengths are `usize`, and its ranges end before 2^64: the last page of the address
/// space is left out.
fn length(range: Span<Iova>) -> usize {
    let len = match range.start.checked_add(range.len) {
        Some(_) => range.len,
        None => range.len - 4096.min(range.len),
    };
    usize::try_from(len).unwrap_or(usize::MAX)
}

impl Listener for GuestIommu {
    fn mapped(&self, area: &Area) {
        let Some(base) = self.base_of(area.memory()) else {
            return;
        };
        let permissions = match (
            area.prot().contains(Prot::READ),
            area.prot().contains(Prot::WRITE),
        ) {
            (true, true) => Permissions::ReadWrite,
            (true, false) => Permissions::Read,
            (false, true) => Permissions::Write,
            (false, false) => return,
        };
        let (range, part) = (area.range(), area.part());
        let Some(target) = base.0.checked_add(part.start) else {
            return;
        };
        let iova = GuestAddress(range.start);
        let mut iotlb = self.iotlb.write();
        // It refuses nothing so far; what it would refuse is not translated.
        let _ = iotlb.set_mapping(iova, GuestAddress(target), length(range), permissions);
    }

    fn unmapped(&self, range: Span<Iova>) -> Result<(), FlushError> {
        match self.iotlb.try_write_for(self.wait) {
            Some(mut iotlb) => {
                iotlb.invalidate_mapping(GuestAddress(range.start), length(range));
                Ok(())
            }
            None => Err(FlushError::Held {
                range,
                waited: self.wait,
            }),
        }
    }
}

impl Iommu for GuestIommu {
    type IotlbGuard<'a> = RwLockReadGuard<'a, Iotlb>;

    fn translate(
        &self,
        iova: GuestAddress,
        length: usize,
        access: Permissions,
    ) -> Result<IotlbIterator<Self::IotlbGuard<'_>>, Error> {
        let iova_range = IovaRange { base: iova, length };
        if iova.0.checked_add(length as u64).is_none() {
            let reason = "the range ends beyond 2^64".into();
            return Err(Error::CannotResolve { iova_range, reason });
        }
        Iotlb::lookup(self.iotlb.read_recursive(), iova, length, access).map_err(|fails| {
            let first = |ranges: &[IovaRange]| ranges.first().map_or(0, |range| range.base.0);
            let reason = if fails.misses.is_empty() {
                format!("no {access:?} access at {:#x}", first(&fails.access_fails))
            } else {
                format!("{:#x} is not mapped", first(&fails.misses))
            };
            Error::CannotResolve { iova_range, reason }
        })
    }
}
