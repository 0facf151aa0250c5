//! AMD's IOMMU, AMD-Vi.
//!
//! AMD I/O Virtualization Technology (IOMMU) Specification, publication 48882, revision 3.08 and later.
//! [`AmdVi`] drives one unit (one IVHD block of ACPI's IVRS table) over [`Registers`](crate::Registers) and over table
//! memory for what the unit reads and writes.
//!
//! # Modes
//!
//! A unit works in one [`Mode`]. With host tables (AMD v1, [`FormatId::AmdV1`](iopt::FormatId::AmdV1)) of any
//! number of levels up to the unit's most, tables may grow, and a device that asks for translations (ATS)
//! is refused them until its TLB was [announced](crate::Unit::set_device_tlb). With guest tables (v2) requests with
//! a PASID have tables of their own ([`Config::pasid_bits`]), and devices are refused translations;
//! `guest.rs` has the orders. Nested translation, guest tables of 5 levels, page requests, interrupt
//! remapping and virtual APICs are not driven; interrupts pass unchanged.
//!
//! # Orders
//!
//! **Enable** (sections 2.4 and 2.5 on the buffers, 3.4 on the registers): command buffer and event log,
//! also a former owner's, are stopped; the exclusion range is switched off, since it would let devices
//! through; the addresses of device table, command buffer and event log are written, both pointers 0;
//! command buffer and event log (and guest tables, GTEn, without which everything would pass) are switched
//! on, then translation, for only then the unit fetches commands; everything is invalidated, by
//! INVALIDATE_IOMMU_ALL or, where the unit lacks it, for each device and each domain. Translation that was on already stays
//! on all the time; what was cached for its former owner may be used until `enable` returns.
//!
//! **Attach**: the domain, then the first word of the device table entry (`table.rs`), then
//! INVALIDATE_DEVTAB_ENTRY, since the entry that blocks may be cached. Where absent entries are cached
//! ([`Config::caches_not_present`]), the domain's translations are invalidated behind it.
//!
//! **Detach**: the entry blocks; INVALIDATE_DEVTAB_ENTRY; a barrier, so that nothing is translated by
//! the old entry any more; INVALIDATE_IOMMU_PAGES for all of the domain; the device's TLB; one wait; then
//! the entry is emptied.
//!
//! **Invalidate**: `commands.rs` of the crate says which pages; one wait at the end of all. The bit PDE
//! (upper levels too) is set when tables were unlinked, and always where absent entries are cached.
//!
//! **TLBs in devices**: INVALIDATE_IOTLB_PAGES for each device of the domain that has one, in the same
//! batch, behind a barrier: the unit may answer a device from its own caches, which must be invalidated before.
//! `queue.rs` says what becomes of a device that does not answer. TLBs are off while the unit is
//! [disabled](AmdVi::disable): what a device keeps over that time is not invalidated.
//!
//! **A new root** ([`Invalidation::new_root`](iopt::Invalidation::new_root)): stored in the entry of each of the domain's devices, then
//! as for a detach, with one INVALIDATE_DEVTAB_ENTRY for each device.
//!
//! **Mapping** needs stores only, but where absent entries are cached.
//!
//! **Faults**: `faults.rs`.
//!
//! **Handover**: the description says whether the unit translates, the mode, the bits of a PASID, where
//! device table, command buffer and event log lie, where the log is to be read on, the last ticket, and which devices were ever attached;
//! members and TLBs are noted behind the ticket (`notes.rs`). The successor compares Control, Status, the
//! three base address registers and the command buffer's pointers with it.
//!
//! # Locks and bounds
//!
//! One spinning lock covers table, commands and log: attach, detach and flushes take turns. Each holds
//! it for a few [bounded](crate::Registers::wait) waits; only `enable`, on a unit without INVALIDATE_IOMMU_ALL,
//! has some hundreds.

mod attach;
mod capabilities;
mod command;
mod config;
mod faults;
mod flush;
mod guest;
mod handover;
mod queue;
mod table;
#[cfg(test)]
mod tests;
mod unit;

pub use config::{Config, Mode};
pub(crate) use faults::{EVENT_CODES, event};

/// One AMD-Vi unit, over its registers `R` and memory `M` for device table, command buffer and event
/// log.
///
/// `M` gives pages of 4 KiB with 64-bit cells, at addresses below the unit's `host_bits`, and the device
/// table in one piece ([`Config::last_device`]). Tables and entries are read through the processor's
/// caches.
pub type AmdVi<R, M> = crate::HardwareUnit<unit::Hardware, R, M>;
