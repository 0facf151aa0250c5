#![cfg_attr(feature = "std", doc = include_str!("../README.md"))]
//!
//! # What is where
//!
//! For authors of operating systems and hypervisors, who drive a unit from reset to the first DMA and on; and for
//! tests and device models, which need one without hardware.
//!
//! A [`Unit`] walks page tables for devices. The seam is small: [attach](Unit::attach) a device to
//! a table's [`Root`](iopt::Root), [invalidate](Unit::invalidate) what a gather collected,
//! [drain](Unit::drain_faults) the faults. It is object-safe.
//!
//! Each driver works over its unit's [`Registers`] and
//! over [table memory](iopt::TableMemory) for the structures and queues that the unit reads.
//! [`vtd`] drives Intel VT-d, [`amdvi`] AMD's IOMMU, [`riscv`] the RISC-V IOMMU, [`smmuv3`] Arm's SMMU, and
//! [`smmu`] its versions 1 and 2 (which keep everything in registers, and need no memory).
//!
//! With the feature `std` there is the `SoftwareUnit`: it reads tables as a device's IOMMU does,
//! with the walker of [`iopt::walk`], caches as hardware does (and so exposes missing flushes),
//! and moves data through [`TargetMemory`]. Each device thread owns a `Port`.
//!
//! The crates [`iopt`] and [`runs`], which define tables and spans, are re-exported.
//!
//! [`codes`] names the faults of every unit and puts them into classes; with `std`, `log` decodes the lines that
//! a kernel prints of them.

#![cfg_attr(not(feature = "std"), no_std)]
#![forbid(unsafe_code)]

#[cfg(test)]
mod absent;
pub mod amdvi;
mod arm;
mod capabilities;
pub mod codes;
mod commands;
mod driver;
mod error;
mod fault;
mod handover;
#[cfg(test)]
mod lines;
#[cfg(feature = "std")]
pub mod log;
mod notes;
mod registers;
mod ring;
pub mod riscv;
#[cfg(feature = "std")]
mod run_map;
mod setup;
#[cfg(test)]
mod short;
pub mod smmu;
pub mod smmuv3;
#[cfg(feature = "std")]
pub mod software;
#[cfg(test)]
mod suite;
mod target;
mod unit;
pub mod vtd;

pub use {iopt, runs};

pub use amdvi::AmdVi;
pub use capabilities::{FormatSupport, UnitCapabilities};
pub use commands::{CommandCounters, MOST_PAGE_COMMANDS};
pub use driver::{Driver, HardwareUnit};
pub use error::{FlushError, UnitAttachError, UnitError};
pub use fault::{Details, Fault, FaultReason, RequestKind, SecondStage};
pub use handover::{Frozen, UnitAdoptError, UnitKind, UnitMemory};
pub use registers::{Registers, SpinLock};
pub use riscv::RiscvIommu;
#[cfg(feature = "std")]
pub use run_map::{MemoryOverlap, RunMap};
pub use setup::{IdRegisters, UnitProbeError, UnitSetupError};
pub use smmu::Smmu;
pub use smmuv3::SmmuV3;
#[cfg(feature = "std")]
pub use software::{
    Aborted, AccessCounters, CacheShape, FlushCounters, Port, SoftwareConfig, SoftwareUnit,
};
pub use target::{BadTarget, TargetMemory};
pub use unit::{DeviceId, DeviceTlb, DomainId, NodeId, Pasid, Unit};
pub use vtd::Vtd;
