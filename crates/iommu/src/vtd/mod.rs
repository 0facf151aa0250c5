//! Intel VT-d.
//!
//! Intel Virtualization Technology for Directed I/O, architecture specification (D51397), revision
//! 4.0 and later; sections are named by their titles where their numbers have changed between
//! revisions. [`Vtd`] drives one unit (one remapping hardware unit of the DMAR table) over
//! [`Registers`](crate::Registers) and over table memory for what the unit reads.
//!
//! # Modes
//!
//! A unit works in one [`Mode`]: legacy, with second-stage tables; or scalable, where all requests go
//! through second-stage or through first-stage tables. The offered format follows from it. In scalable
//! mode requests with a PASID have tables of their own ([`Config::pasid_bits`]). A device that asks for
//! translations (ATS) is refused them until its TLB was [announced](crate::Unit::set_device_tlb). Nested and
//! pass-through translation, page requests and interrupt remapping are not driven.
//!
//! # Orders
//!
//! **Enable** (sections "Global Command Register", "Root Table Address Register", and 6.2 on caching):
//! a queue that a former owner has left is emptied and switched off; our queue is switched on; stores
//! are flushed out of write buffers; the root table's address is written, then taken over by SRTP;
//! context cache, PASID cache and IOTLB are invalidated, in this order, as a whole; translation is
//! switched on; protected memory regions are switched off last, since until then they are what
//! protects. Translation that was on already stays on all the time. Each step waits for its status.
//!
//! **Attach**: the tables that lead to the entry, from the last to the first, then the entry, P last
//! (`structures.rs` has the order of stores). Nothing is cached of an entry that was not present, but
//! in caching mode: there the context cache (in domain 0, where such entries are kept), the PASID cache
//! and the domain's translations are invalidated (section 6.1 "Caching Mode").
//!
//! **Detach**: P is cleared, then the context entry (in scalable mode the PASID entry), the domain's
//! translations and the device's are invalidated in this order, each cache after the one that it is filled
//! from (section 6.5 "Invalidation of Translation Caches"), with all reads and writes drained; then the
//! entry is emptied. Units without draining (CAP.DRD, CAP.DWD) let requests that they have translated go
//! on. Other PASIDs of the device stay.
//!
//! **Invalidate**: `flush.rs` says what, and `commands.rs` of the crate which pages; one wait at the end of
//! all. The hint IH ("leaves only") is given when no tables were unlinked, and never in caching mode, where
//! a new table may stand where the unit remembers none.
//!
//! **TLBs in devices**: attach and flushes look at what was said of the device before. In scalable mode the
//! context entry that is there changes by one store (DTE), and the context cache is invalidated; nothing
//! is translated through it then. A device that does not answer in time (ITE) fails the batch. TLBs are
//! off while the unit is [disabled](Vtd::disable): what a device keeps over that time is not invalidated.
//!
//! **Mapping** needs stores only, but in caching mode or with write buffers (RWBF): both are reported
//! as [`caches_not_present`](crate::UnitCapabilities::caches_not_present).
//!
//! **Faults**: `faults.rs`. A record names a page, and no domain.
//!
//! **Handover** (`handover.rs`): the description says whether the unit translates, the mode, the bits of a PASID, the root
//! table, and pages and last ticket of the queue, where the notes on members are too (`notes.rs`). The successor compares GSTS, RTADDR, IQA, IQH and IQT with it.
//!
//! # Locks and bounds
//!
//! One spinning lock covers structures and commands: attach, detach and flushes take turns. Each holds
//! it for at most a few [bounded](crate::Registers::wait) waits.

mod attach;
mod capabilities;
mod command;
mod config;
mod faults;
mod flush;
mod handover;
mod queue;
mod structures;
#[cfg(test)]
mod tests;
mod unit;

pub use config::{Config, Mode};
pub(crate) use faults::FAULT_REASONS;

/// One VT-d unit, over its registers `R` and memory `M` for root table, context tables and queue.
///
/// `M` gives pages of 4 KiB with 64-bit cells, at addresses below the unit's `host_bits`. For units
/// without [coherent walks](crate::UnitCapabilities::coherent_walks) it must write lines back
/// ([`iopt::observe::NonCoherent`]), as the memory of the page tables must.
pub type Vtd<R, M> = crate::HardwareUnit<unit::Hardware, R, M>;
