//! Invalidation of the unit's TLB.
//!
//! Arm SMMU architecture (IHI 0062), sections 15.5.31 TLBIASID, 15.5.32 TLBIVA, 15.5.35 TLBIVAL, 15.5.36
//! TLBSTATUS, 10.6.21 TLBGSTATUS, 10.6.22 TLBGSYNC; TLBIIPAS2 of version 2. An invalidation is a write to a
//! register, and is only begun by it; a write to TLBSYNC (of a context bank: for what was written to
//! that bank) or TLBGSYNC (for all) asks for its completion, and TLBSTATUS or TLBGSTATUS says when
//! everything that was begun before is complete, and with it the accesses that used what is invalidated.
//! So a batch is any number of invalidations and one sync.
//!
//! There are no commands for ranges. One that names an address is needed for each entry that may be
//! cached: for each block of the size of the lowest level at which a leaf was removed, also where a
//! contiguous group was one leaf, since its entries may be cached each for itself (DDI 0487, D8.7.1).
//! More than [`MOST_PAGE_COMMANDS`] become one for the domain:
//!
//! | | by address | the domain |
//! |---|---|---|
//! | stage 1 | TLBIVA; TLBIVAL (version 2) when no tables were unlinked | TLBIASID |
//! | stage 2, version 2 | TLBIIPAS2; TLBIIPAS2L when no tables were unlinked | TLBIVMID |
//! | stage 2, version 1 | – | TLBIVMID |
//!
//! TLBIVMID is global, and so is its sync. On version 1 nothing hangs on TLBIVAL: TLBIVA invalidates the same
//! and more.

use iopt::Invalidation;

use super::capabilities::{
    Features, Scheme, Shape, TLBGSTATUS, TLBGSYNC, TLBIALLH, TLBIALLNSNH, TLBIASID, TLBIIPAS2,
    TLBIIPAS2L, TLBIVA, TLBIVAL, TLBIVMID, TLBSTATUS, TLBSYNC,
};
use super::unit::Inner;
use super::{Smmu, bank};
use crate::commands::{CommandCounters, MOST_PAGE_COMMANDS};
use crate::driver::Flushes;
use crate::error::{FlushError, UnitError};
use crate::registers::{Registers, wait_until};
use crate::unit::DomainId;

/// SACTIVE, GSACTIVE.
const ACTIVE: u32 = 1;

impl<R: Registers> Flushes for Smmu<R> {
    fn flush(&self, domain: DomainId, what: Option<&Invalidation>) -> Result<(), FlushError> {
        let Inner {
            banks,
            open,
            counters,
            ..
        } = &mut *self.inner.lock();
        let Some((n, bank)) = bank::of_domain(banks, domain).filter(|_| *open) else {
            return Ok(());
        };
        let tlb = Tlb::new(&self.registers, self.features, n, bank.shape);
        match what {
            Some(what) => tlb.invalidate(what, counters),
            None => tlb.invalidate_all(counters),
        }
        .map_err(|cause| FlushError::Unit { domain, cause })
    }
}

/// A domain's part of the TLBs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tlb<'r, R> {
    registers: &'r R,
    features: Features,
    bank: usize,
    shape: Shape,
}

impl<'r, R: Registers> Tlb<'r, R> {
    /// That of the domain in `bank`, whose root has this shape.
    pub(super) const fn new(
        registers: &'r R,
        features: Features,
        bank: usize,
        shape: Shape,
    ) -> Self {
        Self {
            registers,
            features,
            bank,
            shape,
        }
    }

    /// Invalidates what a gather names.
    pub(super) fn invalidate(
        &self,
        what: &Invalidation,
        counters: &mut CommandCounters,
    ) -> Result<(), UnitError> {
        let by_address = self.features.is_v2() || !self.shape.second;
        // With tables and no range, what the tables held is not named.
        let named = by_address && !what.ranges().is_empty();
        let Some(pages) = named.then(|| pages(what, self.shape)).flatten() else {
            return self.invalidate_all(counters);
        };
        counters.batches += 1;
        let mut count = 0;
        for address in pages {
            self.invalidate_page(address, !what.tables_unlinked());
            count += 1;
        }
        self.sync()?;
        counters.commands += count;
        counters.waits += 1;
        Ok(())
    }

    /// Invalidates everything of the domain.
    pub(super) fn invalidate_all(&self, counters: &mut CommandCounters) -> Result<(), UnitError> {
        counters.batches += 1;
        let tag = self.bank as u32;
        if self.shape.second {
            self.registers.write32(TLBIVMID, tag + 1);
            global_sync(self.registers)?;
        } else {
            let place = self.features.bank(self.bank, TLBIASID);
            self.registers.write32(place, tag);
            self.sync()?;
        }
        counters.commands += 1;
        counters.waits += 1;
        Ok(())
    }

    fn sync(&self) -> Result<(), UnitError> {
        let [begin, status] =
            [TLBSYNC, TLBSTATUS].map(|place| self.features.bank(self.bank, place));
        sync(self.registers, (begin, status), "TLBSTATUS.SACTIVE = 0")
    }

    fn invalidate_page(&self, address: u64, leaf: bool) {
        let registers = self.registers;
        let leaf = leaf && self.features.is_v2();
        let register = match (self.shape.second, leaf) {
            (false, false) => TLBIVA,
            (false, true) => TLBIVAL,
            (true, false) => TLBIIPAS2,
            (true, true) => TLBIIPAS2L,
        };
        let place = self.features.bank(self.bank, register);
        let tag = self.bank as u64;
        match (self.shape.scheme, self.shape.second) {
            // The page's number, and the ASID at the top.
            (Scheme::Long64, false) => registers.write64(place, tag << 48 | address >> 12),
            (Scheme::Long64, true) => registers.write64(place, address >> 12),
            // The page's address, and the ASID at the bottom.
            (Scheme::Short | Scheme::Long, false) => {
                registers.write32(place, (address | tag) as u32);
            }
            (Scheme::Short | Scheme::Long, true) => {
                registers.write32(place, (address >> 12) as u32);
            }
        }
    }
}

/// Invalidates everything that is not the secure world's.
pub(super) fn invalidate_everything<R: Registers>(
    registers: &R,
    counters: &mut CommandCounters,
) -> Result<(), UnitError> {
    counters.batches += 1;
    registers.write32(TLBIALLH, 0);
    registers.write32(TLBIALLNSNH, 0);
    global_sync(registers)?;
    counters.commands += 2;
    counters.waits += 1;
    Ok(())
}

fn global_sync<R: Registers>(registers: &R) -> Result<(), UnitError> {
    sync(registers, (TLBGSYNC, TLBGSTATUS), "TLBGSTATUS.GSACTIVE = 0")
}

fn sync<R: Registers>(
    registers: &R,
    (begin, status): (usize, usize),
    awaited: &'static str,
) -> Result<(), UnitError> {
    registers.write32(begin, 0);
    wait_until(registers, awaited, || {
        Ok(registers.read32(status) & ACTIVE == 0)
    })
}

/// The addresses to name, one in each block; `None` when they are too many.
fn pages(what: &Invalidation, shape: Shape) -> Option<impl Iterator<Item = u64>> {
    let level = what.leaf_levels().trailing_zeros() % u32::BITS;
    let shift = shape.shift(level);
    if shift >= u64::BITS {
        return None;
    }
    let blocks = what
        .ranges()
        .iter()
        .filter(|range| !range.is_empty())
        .map(move |range| range.start >> shift..=range.last() >> shift);
    let count = blocks.clone().fold(0u64, |count, blocks| {
        count.saturating_add(blocks.end() - blocks.start() + 1)
    });
    let few = count <= MOST_PAGE_COMMANDS as u64;
    few.then(|| blocks.flatten().map(move |block| block << shift))
}
