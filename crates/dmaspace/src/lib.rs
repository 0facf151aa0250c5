//! Device memory for virtual machines, hypervisors and user-space drivers.
//!
//! For authors of monitors and drivers: the crates below from one place, and what they have in common with a
//! machine, its devices and its memory nodes.
//!
//! ```
//! use std::sync::Arc;
//!
//! use dmaspace::balloon::BalloonDma;
//! use dmaspace::ioas::{Ioas, Ledger, Memory, Synthetic};
//! use dmaspace::iommu::{DeviceId, DomainId, RunMap, SoftwareUnit};
//! use dmaspace::iopt::{AnyTable, FormatId, HeapTables, Prot};
//! use dmaspace::runs::{PageSizes, Span};
//! use dmaspace::topology::Topology;
//! use dmaspace::virtio_balloon::{Dma as _, MemoryMap, Part, Region};
//!
//! // Where are devices, the units that translate for them, and memory? `Topology::read` asks this machine.
//! let machine = Topology::parse(
//!     r#"
//!     [[node]]
//!     id = 0
//!     memory_mib = 8192
//!     [[unit]]
//!     name = "dmar0"
//!     node = 0
//!     [[device]]
//!     address = "0000:00:05.0"
//!     unit = "dmar0"
//!     "#,
//! )?;
//! assert_eq!(machine.devices().len(), 1);
//!
//! // An address space for that device: tables in VT-d's format, and here a unit in software.
//! let tables = Arc::new(HeapTables::with_tables(64)?);
//! let sizes = PageSizes::from_bits(u64::MAX);
//! let space = Ioas::new(DomainId(1), AnyTable::new(FormatId::VtdSs, 4, sizes, tables.clone())?);
//! let data = RunMap::<Vec<std::sync::atomic::AtomicU64>>::new([])?;
//! space.attach((Arc::new(SoftwareUnit::new(tables, data)), DeviceId::pci(0, 5, 0)))?;
//!
//! // The guest's memory, 4 MiB at its address 0: pinned, charged and mapped. `ioas::HostMemory` is real memory.
//! let ledger = Ledger::new("user->locked_vm", Some(8 << 20), 0);
//! let frames = Synthetic::new([Span::new(0x4000_0000, 4 << 20)]);
//! let memory = Memory::new(Arc::new(frames), &ledger);
//! space.map(0, &memory, Span::new(0, 4 << 20), Prot::RW, &mut ())?;
//!
//! // What the guest puts into its balloon devices let go first; then it can be discarded.
//! let space = Arc::new(space);
//! let mut dma = BalloonDma::new();
//! dma.add_space(space.clone());
//! let regions = [Region { guest: Span::new(0, 4 << 20), page: 4096, memory }];
//! let map = MemoryMap::new(&regions)?;
//! let block = [Part::new(0, Span::new(2 << 20, 2 << 20))];
//! dma.release(map, &block, &mut |part, reason| panic!("{part:?} is kept: {reason}"));
//! assert!(space.leaf_at(2 << 20).is_none());
//! dma.restore(map, &block, &mut |part, reason| panic!("{part:?} is not back: {reason}"));
//! assert!(space.leaf_at(2 << 20).is_some());
//! # Ok::<_, Box<dyn std::error::Error>>(())
//! ```
//!
//! # What is where
//!
//! * [`balloon`]: devices let go before a balloon's memory is discarded, and have it back before the guest;
//! * [`devices`], [`topology`]: the machine's devices, and its memory nodes;
//! * the crates below, whole: [`runs`], [`iopt`], [`hostmem`], [`iommu`], [`ioas`], [`virtio_balloon`]; with the
//!   feature `virtio-iommu` also `virtio_iommu`;
//! * vhost-user is in the crate `dmaspace-vhost`, the C interface in `dmaspace-capi`, and what maps, inspects,
//!   plans and measures from a terminal in the program (`dmaspace --help`).
//!
//! A guide for each user is in `docs/guides` of the repository.

#![forbid(unsafe_code)]

pub mod balloon;
pub mod devices;
pub mod topology;

pub use {hostmem, ioas, iommu, iopt, runs, virtio_balloon};

#[cfg(feature = "virtio-iommu")]
pub use virtio_iommu;

/// The README's example is compiled and run as it stands.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;
