//! The RISC-V IOMMU.
//!
//! RISC-V IOMMU Architecture Specification, version 1.0 and later; chapters and sections are named by their
//! titles. [`RiscvIommu`] drives one unit over [`Registers`](crate::Registers) and over table memory for what the unit reads
//! and writes.
//!
//! A device is attached to a table of the first stage (Sv39, Sv48, Sv57:
//! [`FormatId::RiscV`](iopt::FormatId::RiscV)) or of the second (Sv39x4, Sv48x4, Sv57x4:
//! [`FormatId::RiscVG`](iopt::FormatId::RiscVG)), the other stage being Bare. Requests with a PASID go through
//! first-stage tables, also those of supervisor privilege
//! ([`with_supervisor_requests`](iopt::format::RiscVTables::with_supervisor_requests)); those with PASID 0 as those
//! without one ([`Config::pasid_bits`]). Both stages together, page requests, translation of message-signalled interrupts and
//! the unit's own interrupts are not driven: interrupts of devices are writes like others, and need a
//! mapping.
//!
//! # Orders
//!
//! **Enable** (sections "Guidelines for initialization", "Device-directory-table pointer"): a directory of
//! a former owner is left by way of Off, which blocks all devices for a moment; Bare is left on and our own
//! directory stays. All queues, also a former owner's, are stopped; fctl is set to little-endian order and
//! 64-bit tables (only with the unit Off); command queue and fault queue are started; `ddtp` is written,
//! with the fewest levels that hold the devices' ids and that the unit takes; everything is invalidated, in
//! devices' TLBs too. Entries cached for a former owner may be used until `enable` returns.
//!
//! **Disable**: Off, which ends what is under way, then Bare, then the queues. Translated requests do not pass
//! then: a TLB in a device is to be switched off before.
//!
//! **Attach**: the context, V last (`entry.rs`), and nothing else: the unit caches no context and no entry
//! without V ("Caching in-memory data structures"). So **mapping** needs stores only, too.
//!
//! **Detach** ("Changing device directory table entry", "Changing process directory table entry"): V of the
//! context is cleared; IODIR.INVAL_DDT, or IODIR.INVAL_PDT while the device has other processes; a fence, so
//! that nothing is translated by the old context any more; IOTINVAL.VMA for the PSCID, or IOTINVAL.VMA and
//! IOTINVAL.GVMA for the GSCID; one wait; then the context is emptied, and a process directory without
//! processes given back (what was translated through those that were there before has gone with them).
//! With a TLB in the device the context blocks, but stays valid, since only through such a one its answers
//! are taken (`entry.rs`); after the same commands come a fence and an ATS.INVAL for all; behind that wait V
//! is cleared, with an IODIR.INVAL_DDT and a wait of its own.
//!
//! **Invalidate**: `commands.rs` of the crate says which pages: IOTINVAL.VMA for first-stage tables,
//! IOTINVAL.GVMA for second-stage tables; then a fence and ATS.INVAL for each device of the domain with a TLB;
//! one wait at the end of all. When tables were unlinked, entries above the leaves must go: by NL, or, where
//! the unit lacks it, with all of the domain.
//!
//! **Faults**: `faults.rs`.
//!
//! **Handover**: `handover.rs`.
//!
//! # Locks and bounds
//!
//! One spinning lock covers directories, commands and faults: attach, detach and flushes take turns. Each
//! holds it for a few [bounded](crate::Registers::wait) waits.

mod attach;
mod capabilities;
mod command;
mod config;
mod devices;
mod directory;
mod entry;
mod faults;
mod flush;
mod handover;
mod queue;
#[cfg(test)]
mod tests;
mod unit;

pub use config::Config;
pub(crate) use faults::CAUSES;

/// One RISC-V IOMMU, over its registers `R` and memory `M` for directories and queues.
///
/// `M` gives pages of 4 KiB with 64-bit cells, at addresses that the unit has
/// ([`output_bits`](crate::UnitCapabilities::output_bits)). Tables, directories and queues are read through the
/// processor's caches.
pub type RiscvIommu<R, M> = crate::HardwareUnit<unit::Hardware, R, M>;
