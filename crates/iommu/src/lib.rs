//! IOMMU units: the seam that they share, drivers of hardware, and one in software.
//!
//! For authors of operating systems and hypervisors, who drive a unit from reset to the first DMA and on; and for
//! tests and device models, which want one without hardware.
//!
//! A [`Unit`] walks page tables for devices. The seam is small: [attach](Unit::attach) a device to
//! a table's [`Root`](iopt::Root), [invalidate](Unit::invalidate) what a gather collected,
//! [drain](Unit::drain_faults) the faults. It is object-safe, allocates nothing and is `no_std`.
//!
//! Drivers are `no_std` and allocate nothing of their own: each works over its unit's [`Registers`] and
//! over [table memory](iopt::TableMemory) for the structures and queues that the unit reads.
//! [`vtd`] drives Intel VT-d, [`amdvi`] AMD's IOMMU, [`riscv`] the RISC-V IOMMU, [`smmuv3`] Arm's SMMU, and
//! [`smmu`] its versions 1 and 2 (which keep everything in registers, and need no memory).
//!
//! With the feature `std` there is the `SoftwareUnit`: it reads tables as a device's IOMMU does,
//! with the walker of [`iopt::walk`], caches as hardware does (and so shows what was not flushed),
//! and moves data through [`TargetMemory`]. Each device thread owns a `Port`.
//!
#![cfg_attr(feature = "std", doc = "```")]
#![cfg_attr(not(feature = "std"), doc = "```ignore")]
//! use std::sync::Arc;
//! use std::sync::atomic::AtomicU64;
//!
//! use iommu::{DeviceId, DomainId, RunMap, SoftwareUnit, Unit};
//! use iopt::{Gather, HeapTables, Prot, Table, format::VtdSs};
//! use runs::Span;
//!
//! // 64 KiB of memory at the physical address 0x8000_0000.
//! let memory: Vec<AtomicU64> = (0..8192).map(AtomicU64::new).collect();
//! let data = RunMap::new([(0x8000_0000, memory)])?;
//!
//! // A table maps it at the device's address 0.
//! let tables = Arc::new(HeapTables::with_tables(64)?);
//! let mut table = Table::new(VtdSs::new(4)?, tables.clone())?;
//! table.map(0, &[Span::new(0x8000_0000, 64 << 10)], Prot::READ)?;
//!
//! let unit = SoftwareUnit::new(tables, data);
//! let device = DeviceId::pci(0, 5, 0);
//! unit.attach(device, DomainId(1), table.root())?;
//!
//! // The device reads across a page boundary: two misses in the IOTLB.
//! let mut port = unit.port(device);
//! let mut words = [0; 4];
//! port.read(0xff0, &mut words)?;
//! assert_eq!(words, [0x1fe, 0x1ff, 0x200, 0x201]);
//! assert_eq!(unit.counters().iotlb_misses, 2);
//!
//! // It may not write, and the fault says why.
//! let aborted = port.write(0x1000, &[0]).unwrap_err();
//! assert!(aborted.to_string().starts_with("00:05.0 (domain 1): write of 0x1000: "));
//!
//! // Unmap, flush, reclaim: then the memory may be used for something else.
//! let mut gather = Gather::new();
//! table.unmap(Span::new(0, 64 << 10), &mut gather, &mut iopt::NoRuns)?;
//! let flushed = gather.flush_with(|what| unit.invalidate(DomainId(1), what))?;
//! table.reclaim(flushed);
//! assert!(port.read(0, &mut words).is_err());
//! # Ok::<_, Box<dyn std::error::Error>>(())
//! ```

#![cfg_attr(not(feature = "std"), no_std)]
#![forbid(unsafe_code)]

pub mod amdvi;
mod arm;
mod capabilities;
mod commands;
mod driver;
mod error;
mod fault;
mod handover;
#[cfg(test)]
mod lines;
mod notes;
mod registers;
mod ring;
pub mod riscv;
#[cfg(feature = "std")]
mod run_map;
pub mod smmu;
pub mod smmuv3;
#[cfg(feature = "std")]
pub mod software;
#[cfg(test)]
mod suite;
mod target;
mod unit;
pub mod vtd;

pub use amdvi::AmdVi;
pub use capabilities::{Capabilities, FormatSupport};
pub use commands::{CommandCounters, MOST_PAGE_COMMANDS};
pub use driver::{Driver, HardwareUnit};
pub use error::{AttachError, FlushError, SetupError, UnitError};
pub use fault::{Details, Fault, FaultReason, RequestKind, SecondStage};
pub use handover::{AdoptError, Frozen, Held, UnitKind};
pub use registers::{Registers, SpinLock};
pub use riscv::RiscvIommu;
#[cfg(feature = "std")]
pub use run_map::{MemoryOverlap, RunMap};
pub use smmu::Smmu;
pub use smmuv3::SmmuV3;
#[cfg(feature = "std")]
pub use software::{Aborted, CacheShape, Config, Counters, FlushCounters, Port, SoftwareUnit};
pub use target::{BadTarget, TargetMemory};
pub use unit::{DeviceId, DeviceTlb, DomainId, NodeId, Pasid, Unit};
pub use vtd::Vtd;
