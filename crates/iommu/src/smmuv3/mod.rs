//! Arm's SMMU, version 3.
//!
//! Arm System Memory Management Unit Architecture Specification, SMMU architecture version 3 (IHI 0070), F.b
//! and later. [`SmmuV3`] drives the Non-secure side of one unit over [`Registers`](crate::Registers) and over table memory for
//! what the unit reads and writes. A [`DeviceId`](crate::DeviceId) is a StreamID here: what ACPI's IORT table, or a device
//! tree, makes of a requester id.
//!
//! Tables are AArch64's (VMSAv8-64), through stage 1 or through stage 2, of 4, 16 and 64 KiB, with 52 bits
//! where the unit has them, in either half of the address space for stage 1. Stage 1 is the regime of EL1,
//! with ASIDs and two privileges; tables have the options that are `iopt`'s defaults: memory types have the
//! default indices, write-back is not forced by stage 2. PASIDs are served through stage 1, and devices' TLBs
//! through both. Nested translation, bypass, page requests, stalled faults and interrupts are not driven.
//!
//! # Orders
//!
//! **Enable** (sections 3.11 and 6.3.9): what happens to devices while the unit does not translate is set to
//! "abort"; translation and all queues are switched off, also a former owner's, since the addresses of tables
//! and queues may only be written then; the addresses, and how they are read (CR1), are written; the command
//! queue is switched on, and then the event queue; all configuration and all translations are invalidated, in
//! this order, so that none is made by old configuration; translation is switched on. So there is a moment
//! in which devices are blocked, also when the unit has translated before, but none in which they pass; after
//! an error they are blocked, or the unit translates. Devices' TLBs are to be switched on after it (section
//! 6.3.9.6).
//!
//! **Attach** (section 3.21.3.1): what the entry says is stored without V and invalidated (CMD_CFGI_STE, with
//! the tables that lead to it); then V is stored, and the entry invalidated once more: two batches. The unit
//! reads the words of an entry in no order and may remember them while it is invalid. Where an entry of stage
//! 1 is valid already, because of another PASID, the same is done to the context descriptor (CMD_CFGI_CD);
//! otherwise that is complete before, since nothing leads to it.
//!
//! **Detach**: V is cleared, of the context descriptor as long as another one is in use, otherwise of both;
//! the entry is invalidated; a barrier, so that nothing is translated by it any more; the domain's
//! translations (by ASID, or by VMID); if the device has a TLB, a barrier and all of that; one wait; then the
//! entry is emptied.
//!
//! **Invalidate**: `command.rs` says which commands; then, if a device of the domain has a TLB, a barrier and
//! its invalidations (section 4.5.1); one wait at the end of all. The flag Leaf is set when no tables were
//! unlinked.
//!
//! **Mapping** needs stores only.
//!
//! **Faults**: `faults.rs`.
//!
//! **Handover** (`handover.rs`): the description says whether the unit translates, where stream table and
//! queues lie, the table's shape, and the last ticket. The successor compares CR0, the base registers and the
//! command queue's indexes with it, and reads the rest from the structures.
//!
//! # Tags
//!
//! A domain's number is the ASID of its translations, or the VMID for stage 2. All of stage 1 has one VMID,
//! the last: it must not be one of stage 2 (section 3.17). So a unit with both stages keeps the domain of
//! this number from stage 2.
//!
//! # Locks and bounds
//!
//! One spinning lock covers structures, commands and events: attach, detach and flushes take turns. Each
//! holds it for a few [bounded](crate::Registers::wait) waits. A flush looks for the devices of its domain only where
//! a device has a TLB.

mod attach;
mod capabilities;
mod command;
mod config;
mod domains;
mod entry;
mod faults;
mod flush;
mod handover;
mod queue;
mod streams;
mod table;
#[cfg(test)]
mod tests;
mod unit;

pub use config::Config;
pub(crate) use faults::EVENT_CODES;

/// One SMMUv3, over its registers `R` and memory `M` for stream table, context descriptors and queues.
///
/// `R` are register pages 0 and 1. `M` gives pages of 4 KiB with 64-bit cells, at addresses of the unit's
/// output bits, and some structures in one piece ([`Config`]). For units without
/// [coherent walks](crate::UnitCapabilities::coherent_walks) it must write lines back ([`iopt::observe::NonCoherent`]),
/// as the memory of the page tables must, and what the unit writes, the event queue, must not be read from
/// caches: such memory is best not cached at all.
pub type SmmuV3<R, M> = crate::HardwareUnit<unit::Hardware, R, M>;
