//! I/O address spaces: areas over pinned memory, a ledger, domains.
//!
//! An [`Ioas`] is what devices of one owner see as memory. It is the only place that knows that
//! memory has owners and limits: mapping a part of a [`MemoryObject`] charges it to the [`Ledger`],
//! pins it, learns its physical runs from the pin, and fills the page table by these runs, all or
//! nothing. Unmapping goes the other way and unpins nothing before every unit has forgotten it.
//!
//! ```
//! use std::sync::Arc;
//!
//! use ioas::{Ioas, Ledger, MemoryObject, Synthetic};
//! use iommu::{DeviceId, DomainId, RunMap, SoftwareUnit};
//! use iopt::{AnyTable, FormatId, HeapTables, Prot};
//! use runs::{PageSizes, Span};
//!
//! // Tables in VT-d's second-stage format, for whoever walks them: here the software unit.
//! let tables = Arc::new(HeapTables::with_tables(64)?);
//! let table = AnyTable::new(FormatId::VtdSs, 4, PageSizes::from_bits(u64::MAX), tables.clone())?;
//! let ledger = Ledger::new("user->locked_vm", Some(8 << 20), 0);
//! let mut space = Ioas::new(DomainId(1), table, ledger);
//!
//! // 4 MiB of memory in two runs: pinned, charged and mapped in one step each.
//! let memory: Arc<dyn MemoryObject> =
//!     Arc::new(Synthetic::new([Span::new(0x4000_0000, 2 << 20), Span::new(0x8000_1000, 2 << 20)]));
//! space.map(0x10_0000_0000, &memory, Span::new(0, 4 << 20), Prot::RW, &mut ())?;
//! assert_eq!(space.leaf_at(0x10_0000_0000).map(|leaf| leaf.run.len), Some(2 << 20));
//! assert_eq!(space.ledger().in_use(), 4 << 20);
//!
//! // More than the limit allows is refused with numbers, and nothing happens.
//! let refused = space.map(0x20_0000_0000, &memory, Span::new(0, 4 << 20), Prot::RW, &mut ());
//! assert!(refused.is_ok());
//! let refused = space.map(0x30_0000_0000, &memory, Span::new(0, 4 << 20), Prot::RW, &mut ());
//! assert_eq!(
//!     refused.unwrap_err().to_string(),
//!     "needs 4 MiB, 8 MiB allowed, 8 MiB in use (user->locked_vm)"
//! );
//!
//! // A device sees the space for as long as it is attached.
//! let data = RunMap::<Vec<std::sync::atomic::AtomicU64>>::new([])?;
//! let unit = Arc::new(SoftwareUnit::new(tables.clone(), data));
//! space.attach(unit.clone(), DeviceId::pci(0, 5, 0))?;
//!
//! space.close()?; // unmapped, flushed, unpinned, given back
//! assert_eq!(tables.in_use(), 0);
//! # Ok::<_, Box<dyn std::error::Error>>(())
//! ```
//!
//! The core needs an allocator but not `std`. The feature `linux` adds memory objects that the
//! kernel pins (`HostMemory`) and table memory of the host (`HostTables`).

#![no_std]
#![deny(unsafe_code)]

extern crate alloc;

mod area;
mod error;
mod fill;
mod ledger;
#[cfg(feature = "linux")]
mod linux;
mod object;
mod observer;
mod reach;
mod space;
mod synthetic;

pub use area::Area;
pub use error::{CloseError, DetachError, MapError, UnmapError};
pub use ledger::{Charge, Ledger, OverLimit};
#[cfg(feature = "linux")]
pub use linux::{Effort, HostMemory, HostTables, MappedStorage};
pub use object::{Cause, MemoryObject, PinFailed, Pinned, RunReader};
pub use observer::{Observer, Step};
pub use space::{Ioas, Unmapped};
pub use synthetic::Synthetic;
