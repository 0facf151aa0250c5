//! Arm's SMMU, versions 1 and 2.
//!
//! Arm System Memory Management Unit Architecture Specification (IHI 0062), versions 1 and 2; section numbers in the
//! files are those of issue B. [`Smmu`] drives the non-secure side of one unit over [`Registers`](crate::Registers).
//! Everything that it tells the unit is in registers, so it takes no memory. It keeps the state of streams and context
//! banks in lists of fixed size beside them, since registers that a former owner has set up may hold anything.
//!
//! A device is a stream, and [`DeviceId`](crate::DeviceId) its stream id. A domain with devices on the unit has a context
//! bank, which all its devices share. It walks stage 1 tables, with stage 2 bypassed, or stage 2 tables:
//! ARMv7 short descriptors ([`FormatId::ArmV7s`](iopt::FormatId::ArmV7s)), and Arm's long descriptors of
//! 4, 16 and 64 KiB as far as IDR0 and IDR2 offer them. Units without AArch64 tables read those of 4 KiB
//! in the way of AArch32: stage 1 with 32 input bits, stage 2 with up to 40. Memory types are where
//! [`ArmStage1`](iopt::format::ArmStage1) looks for them by default.
//!
//! Nested translation, TTBR1, stalled faults, interrupts, the secure side, extended stream mapping
//! registers (EXSMRGS), and the supplement of 64 KiB tables to version 1 are not driven. Errata of
//! implementations are not known here: what needs a bit in SACR or ACTLR is set by the platform's own code.
//!
//! # Orders
//!
//! **Enable** (10.6.3 CR0): all streams are switched off, so that they fault; CR0 without a change of
//! CLIENTPD, since EXIDENABLE changes what stream registers mean; context banks; everything is invalidated
//! (TLBIALLH, TLBIALLNSNH, TLBGSYNC), for tags may have been a former owner's; the streams of attached
//! devices are switched on; CLIENTPD is cleared, and CR0 read again, so that it has arrived. So devices
//! that passed until now pass until they are translated, and what a former owner had translated faults from
//! the beginning. A device whose stream was refused faults, all others are translated. On a unit that is enabled already only the last three happen, and translation stays on
//! all the time.
//!
//! **Attach**: the context bank, if the domain has none yet (`bank.rs`); then the stream (`streams.rs`).
//! Nothing is invalidated: a tag that is free has nothing cached.
//!
//! **Detach**: the stream is switched off; all of the domain is invalidated, and complete (`flush.rs`);
//! the bank is switched off when it was its last stream.
//!
//! **Invalidate**: `flush.rs` says which commands; one sync at the end of all.
//!
//! **Mapping** needs stores only: what is not present is not cached.
//!
//! **Handover**: `handover.rs`.
//!
//! **Faults**: `faults.rs`. A domain's faults that were not drained when its last device leaves are
//! lost.
//!
//! # Locks and bounds
//!
//! One spinning lock covers everything: a flush is at most
//! [`MOST_PAGE_COMMANDS`](crate::MOST_PAGE_COMMANDS) stores and one [bounded](crate::Registers::wait) wait, and
//! the global registers are one anyway. No operation has more than one wait.
//!
//! # How it was tried
//!
//! No emulator models this unit. The tests use scripted registers and a small model that was written from
//! the specification and walks with [`iopt::walk`].

mod attach;
mod bank;
mod capabilities;
mod config;
mod faults;
mod flush;
mod handover;
mod streams;
#[cfg(test)]
mod tests;
mod unit;

pub use config::{Config, Version};
#[cfg(feature = "std")]
pub(crate) use faults::cause;
pub(crate) use faults::{CONTEXT, GLOBAL};

/// One SMMU of version 1 or 2, over its registers `R`. The state of up to 128 streams and 128 context
/// banks is in it, some 6 KiB.
pub type Smmu<R> = crate::HardwareUnit<unit::Hardware, R, ()>;
