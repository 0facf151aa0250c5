//! A walker: tables read from any memory, as hardware reads them.
//!
//! The walker serves a unit in software, a monitor that emulates an IOMMU over guest memory, and a
//! person with a dump and a fault. It is written from the specifications (DART, which has no public
//! one, from what was observed) and shares nothing with the [`engine`](crate::engine)'s encoders but
//! the names of the formats: a bit that is wrong on one side cannot agree with itself. It survives any bytes: the level falls with every table, so
//! there are at most as many reads as levels (and, with updates, 16 more of entries that changed),
//! and each address that it reads goes through a [`WalkMemory`] that may refuse it.
//!
//! # One walk
//!
//! 1. The input address is checked against the aperture, before any read.
//! 2. The [`WalkCache`] may offer a table to start from; otherwise the walk starts at the root. A
//!    cached table whose permissions do not allow the access is not used: the walk then meets the
//!    entry that forbids it, and the fault names that one.
//! 3. Each entry is read once, and everything is decided from that one word: present, reserved
//!    bits, permissions so far, and what it leads to. Reserved bits count only in an entry that is
//!    present.
//! 4. The cache receives each table on the way, with the permissions that were granted down to
//!    it.
//! 5. A leaf gives the translation of its whole page, with the permissions of all levels together.
//!
//! Permissions only become fewer on the way down: reading, writing and executing must be allowed
//! by every level, and a page is for user requests only if every level says so. AMD's and Intel's
//! units look at them level by level, Arm's when the leaf is reached: an invalid entry below a
//! table that forbids the access is then what the fault names.
//!
//! # Updates
//!
//! A walker only reads, unless it is made [`with_updates`](Walker::with_updates). It then sets what
//! the unit sets:
//!
//! | format | accessed | dirty, by writes, in the leaf |
//! |---|---|---|
//! | AMD v1 | bit 5 of every entry on the way | bit 6 |
//! | x86-64 | bit 5 of every entry on the way | bit 6 |
//! | VT-d second stage | bit 8 of every entry on the way | bit 9 |
//! | Arm, stage 1 | AF (10) of the leaf | AP\[2\] (7) cleared, where DBM (51) is set |
//! | Arm, stage 2 | AF (10) of the leaf | S2AP\[1\] (7) set, where DBM (51) is set |
//! | ARMv7 | AP\[0\] of the leaf, where it is the access flag | – |
//! | RISC-V | A (6) of the leaf | D (7) |
//! | DART | – | – |
//!
//! An entry is marked by one compare-and-exchange when all checks of this entry have passed, before
//! the walk goes on below it or returns, and before the cache receives the table it leads to. So
//! nothing is set in the entry that a fault names, and upper entries that the walk has used stay
//! marked when it faults further down: an entry counts as accessed when it is used, whatever comes
//! of it. When the entry has changed meanwhile, it is read again and everything is decided anew from
//! the new word, as RISC-V's translation process has it (step 7). After 16 such reads the walk ends
//! with [`WalkReason::Contended`].
//!
//! Where a leaf takes several entries (AMD v1, Arm's contiguous groups, ARMv7, Svnapot) only the one
//! that was read is marked: software must look at all of them (Arm DDI 0487, D8.7.1; Privileged
//! Architecture, "Svnapot").
//!
//! A caller that keeps a translation for later accesses must walk again for the first write while it
//! is [`clean`](Translation::clean). Walks from a cached upper table mark nothing above it.
//!
//! # Levels
//!
//! Level 0 is the level of the smallest page, in faults too. AMD's specification counts the same
//! levels from 1, and Intel's calls them table, directory, directory pointer, PML4 and PML5. Arm
//! counts the other way: its level 3 is level 0 here, its level -1 level 4.

mod amdv1;
mod arm_lpae;
mod armv7s;
mod dart;
mod error;
mod riscv;
mod scan;
mod spec;
#[cfg(test)]
mod tests;
mod update;
mod vtd_ss;
mod walker;
mod x86_64;

use runs::{Iova, Run, Span};

use crate::cell::Cell;
use crate::prot::Prot;

pub use error::{WalkFault, WalkReason};
pub use scan::{Says, ScanStep, Visited};
pub use walker::Walker;

/// Memory that holds tables, as a unit sees it.
pub trait WalkMemory {
    /// The 64-bit little-endian word at `address`, a multiple of 8; read in one piece.
    ///
    /// Where tables change during the walk, the read must be an acquiring atomic one: what the
    /// writer stored before it linked a table is then visible to the reads that follow the link.
    fn read_u64(&self, address: u64) -> Result<u64, BadAddress>;

    /// The 32-bit little-endian word at `address`, a multiple of 4, as formats with narrower
    /// entries have it. By default half of the 64-bit word around it.
    #[inline]
    fn read_u32(&self, address: u64) -> Result<u32, BadAddress> {
        let word = self
            .read_u64(address & !7)
            .map_err(|_| BadAddress { address })?;
        Ok((word >> (8 * (address & 4))) as u32)
    }

    /// Replaces the 64-bit little-endian word at `address`, a multiple of 8, by `new` if it is
    /// `old`; the word found otherwise is the inner error. In one atomic step with respect to all
    /// that write tables, acquiring like a read. It may fail although the word is `old`.
    ///
    /// Only walks [with updates](Walker::with_updates) call it. By default memory is read-only: the
    /// outer error.
    #[inline]
    fn compare_exchange_u64(
        &self,
        address: u64,
        old: u64,
        new: u64,
    ) -> Result<Result<(), u64>, BadAddress> {
        let _ = (old, new);
        Err(BadAddress { address })
    }

    /// The same for a 32-bit word at a multiple of 4. By default half of the 64-bit word around it,
    /// whose other half stays as it is.
    #[inline]
    fn compare_exchange_u32(
        &self,
        address: u64,
        old: u32,
        new: u32,
    ) -> Result<Result<(), u32>, BadAddress> {
        exchange_half(self, address, old, new)
    }
}

/// Replaces one half of a 64-bit word.
fn exchange_half(
    memory: &(impl WalkMemory + ?Sized),
    address: u64,
    old: u32,
    new: u32,
) -> Result<Result<(), u32>, BadAddress> {
    let shift = 8 * (address & 4);
    let bad = |_| BadAddress { address };
    let word = memory.read_u64(address & !7).map_err(bad)?;
    let found = (word >> shift) as u32;
    if found != old {
        return Ok(Err(found));
    }
    let changed = word & !(0xffff_ffff << shift) | u64::from(new) << shift;
    let done = memory.compare_exchange_u64(address & !7, word, changed);
    Ok(done.map_err(bad)?.map_err(|word| (word >> shift) as u32))
}

impl<M: WalkMemory + ?Sized> WalkMemory for &M {
    #[inline]
    fn read_u64(&self, address: u64) -> Result<u64, BadAddress> {
        (**self).read_u64(address)
    }
    #[inline]
    fn read_u32(&self, address: u64) -> Result<u32, BadAddress> {
        (**self).read_u32(address)
    }
    #[inline]
    fn compare_exchange_u64(
        &self,
        address: u64,
        old: u64,
        new: u64,
    ) -> Result<Result<(), u64>, BadAddress> {
        (**self).compare_exchange_u64(address, old, new)
    }
    #[inline]
    fn compare_exchange_u32(
        &self,
        address: u64,
        old: u32,
        new: u32,
    ) -> Result<Result<(), u32>, BadAddress> {
        (**self).compare_exchange_u32(address, old, new)
    }
}

#[cfg(feature = "alloc")]
impl<M: WalkMemory + ?Sized> WalkMemory for alloc::sync::Arc<M> {
    #[inline]
    fn read_u64(&self, address: u64) -> Result<u64, BadAddress> {
        (**self).read_u64(address)
    }
    #[inline]
    fn read_u32(&self, address: u64) -> Result<u32, BadAddress> {
        (**self).read_u32(address)
    }
    #[inline]
    fn compare_exchange_u64(
        &self,
        address: u64,
        old: u64,
        new: u64,
    ) -> Result<Result<(), u64>, BadAddress> {
        (**self).compare_exchange_u64(address, old, new)
    }
    #[inline]
    fn compare_exchange_u32(
        &self,
        address: u64,
        old: u32,
        new: u32,
    ) -> Result<Result<(), u32>, BadAddress> {
        (**self).compare_exchange_u32(address, old, new)
    }
}

/// There is no memory at this address, or none that can be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("there is no table memory at {address:#x}")]
pub struct BadAddress {
    /// The address that was read or written.
    pub address: u64,
}

/// Access of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Access {
    /// It reads memory.
    Read,
    /// It writes memory.
    Write,
}

impl Access {
    /// The permission that it needs.
    #[inline]
    pub const fn needs(self) -> Prot {
        match self {
            Self::Read => Prot::READ,
            Self::Write => Prot::WRITE,
        }
    }
}

impl core::fmt::Display for Access {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(match self {
            Self::Read => "read",
            Self::Write => "write",
        })
    }
}

/// Result of a walk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Translation {
    /// Physical address of the input address itself.
    pub pa: u64,
    /// The whole page: its first input address, its physical address and its size.
    pub page: Run,
    /// The input addresses of the page that accesses may touch: all of them, but where DART's
    /// sub-page protection leaves only a part. Later accesses by this translation, and accesses of
    /// several bytes, must stay within.
    pub open: Span<Iova>,
    /// The level of the leaf.
    pub level: u8,
    /// Permissions of all levels together.
    pub prot: Prot,
    /// The unit has not yet marked a write in the leaf: a caller that keeps this translation must walk
    /// again for the first write. False where the leaf is dirty, or where the unit keeps no dirty
    /// state in it.
    pub clean: bool,
    /// How many table entries were read.
    pub reads: u8,
}

/// A table below the root, as a unit may keep it in a cache of upper levels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UpperTable {
    /// The first input address that the table translates.
    pub iova: u64,
    /// It translates 2^`span_log2` bytes of input addresses.
    pub span_log2: u32,
    /// Its level.
    pub level: u8,
    /// Its address.
    pub address: u64,
    /// Permissions of the entries above it.
    pub prot: Prot,
}

impl UpperTable {
    /// How many bytes, as a power of two, a table at `level` translates, in the formats whose
    /// tables have 512 entries for pages of 4 KiB; [`Walker::span_log2`] has it for every format.
    /// 64 stands for everything.
    pub const fn span_log2(level: u8) -> u32 {
        let log2 = spec::shift(level) + 9;
        if log2 > 64 { 64 } else { log2 }
    }
}

/// A unit's cache of upper levels.
///
/// `()` is the unit that has none.
pub trait WalkCache {
    /// The lowest table known that translates `iova`.
    fn find(&mut self, iova: u64) -> Option<UpperTable>;

    /// Notes a table that the walk came to. The root is not told.
    fn found(&mut self, table: &UpperTable);
}

impl WalkCache for () {
    #[inline]
    fn find(&mut self, _iova: u64) -> Option<UpperTable> {
        None
    }

    #[inline]
    fn found(&mut self, _table: &UpperTable) {}
}

impl<C: WalkCache + ?Sized> WalkCache for &mut C {
    #[inline]
    fn find(&mut self, iova: u64) -> Option<UpperTable> {
        (**self).find(iova)
    }

    #[inline]
    fn found(&mut self, table: &UpperTable) {
        (**self).found(table);
    }
}

/// The software unit reads tables where the engine keeps them.
///
/// Entries are read with the width that they have: there are no 64-bit words in an arena of 32-bit
/// cells.
impl<S, const TABLE_LOG2: u32> WalkMemory for crate::arena::Arena<S, TABLE_LOG2>
where
    S: crate::arena::Storage,
{
    #[inline]
    fn read_u64(&self, address: u64) -> Result<u64, BadAddress> {
        if <S::Cell as Cell>::BYTES != 8 {
            return Err(BadAddress { address });
        }
        self.read(address).ok_or(BadAddress { address })
    }

    #[inline]
    fn read_u32(&self, address: u64) -> Result<u32, BadAddress> {
        let half = if <S::Cell as Cell>::BYTES == 8 {
            address & 4
        } else {
            0
        };
        let word = self.read(address - half).ok_or(BadAddress { address })?;
        Ok((word >> (8 * half)) as u32)
    }

    #[inline]
    fn compare_exchange_u64(
        &self,
        address: u64,
        old: u64,
        new: u64,
    ) -> Result<Result<(), u64>, BadAddress> {
        match self.cell(address) {
            Some(cell) if <S::Cell as Cell>::BYTES == 8 => Ok(cell.set_if(old, new)),
            _ => Err(BadAddress { address }),
        }
    }

    #[inline]
    fn compare_exchange_u32(
        &self,
        address: u64,
        old: u32,
        new: u32,
    ) -> Result<Result<(), u32>, BadAddress> {
        if <S::Cell as Cell>::BYTES == 8 {
            return exchange_half(self, address, old, new);
        }
        let cell = self.cell(address).ok_or(BadAddress { address })?;
        let done = cell.set_if(u64::from(old), u64::from(new));
        Ok(done.map_err(|found| found as u32))
    }
}
