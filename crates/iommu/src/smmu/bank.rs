//! Context banks: one for each domain that has devices.
//!
//! Arm SMMU architecture (IHI 0062), sections 11.2.1 CBARn, 15.5.29 SCTLR, 15.5.38 TTBCR, 15.5.39 TTBRm,
//! 15.5.7 CONTEXTIDR, 15.5.12 MAIRm; CBA2Rn and TCR2 of version 2. The tables' own fields are those of the
//! processors (DDI 0487, TCR_EL1, VTCR_EL2; DDI 0406, TTBCR, TTBR0).
//!
//! A domain's translations are tagged with the number of its bank, so tags are never shared and never
//! too wide: in stage 1 the bank is the ASID, under VMID 0; in stage 2 the bank plus 1 is the VMID.
//! There are at most 128 banks, so both fit in 8 bits, and the wider ones are not switched on.
//!
//! **Writing one**: it is switched off (SCTLR), which is safe because no stream leads to it; CBA2R says
//! how the others are read, so it comes first, then CBAR; then what describes the tables; old faults
//! are cleared; SCTLR.M is set last. **Freeing one**: the last stream has left and the flush behind it
//! is complete; SCTLR.M is cleared.

use iopt::Root;

use super::capabilities::{
    CBA2R, CBAR, CONTEXTIDR, FSR, Features, MAIR0, MAIR1, MOST, SCTLR, Scheme, Shape, TCR, TCR2,
    TTBR0, TTBR1,
};
use crate::arm::MAIR;
use crate::handover::UnitAdoptError;
use crate::registers::Registers;
use crate::unit::DomainId;

// CBAR.
/// TYPE: stage 1, stage 2 is bypassed; stage 2 is 0.
const FIRST_ONLY: u32 = 1 << 16;
/// BPSHCFG non-shareable, MemAttr write-back: the weakest of both, so that stage 1 alone decides.
const WEAKEST: u32 = 3 << 8 | 0xf << 12;
/// CBA2R.VA64.
const VA64: u32 = 1;

// SCTLR.
/// M.
const ON: u32 = 1;
/// TRE, TEX remapping. Tables of short descriptors are written without it; long ones always have it.
const REMAP: u32 = 1 << 1;
/// AFE: AP\[0\] of a short descriptor is the access flag.
const ACCESS_FLAG: u32 = 1 << 2;
/// CFRE: a fault is answered with an abort. HUPCF: a fault that was not drained yet does not hold up
/// the domain's other accesses. CFCFG stays 0: no access is stalled.
const FAULTS: u32 = 1 << 5 | 1 << 8;
/// ASIDPNE: our ASIDs are not the processors'.
const PRIVATE: u32 = 1 << 12;

// TCR.
/// EAE: long descriptors; it is fixed in stage 2.
const LONG: u32 = 1 << 31;
/// EPD1: no tables for the top of the address space.
const NO_UPPER: u32 = 1 << 23;
/// IRGN0, ORGN0 write-back, write-allocate; SH0 inner shareable.
const COHERENT: u32 = 1 << 8 | 1 << 10 | 3 << 12;
/// IRGN0, ORGN0 non-cacheable; SH0 outer shareable.
const UNCACHED: u32 = 2 << 12;
/// TCR2.SEP: the bus says which addresses are at the top, with its 49th bit if it has one. Everything
/// else is extended with zeros.
const ZEROS: u32 = 7 << 15;
/// The same as [`COHERENT`] in a short TTBR0: S, NOS, IRGN and RGN write-back, write-allocate.
const SHORT_COHERENT: u32 = 1 << 1 | 1 << 5 | 1 << 6 | 1 << 3;
/// S: shareable; not cached.
const SHORT_UNCACHED: u32 = 1 << 1;

/// A bank in use.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bank {
    pub(super) domain: DomainId,
    pub(super) root: Root,
    /// How the unit reads the root.
    pub(super) shape: Shape,
    /// Streams that count as attached.
    pub(super) members: u16,
}

/// All banks, by number.
pub(super) type Banks = [Option<Bank>; MOST];

/// The bank of a domain.
pub(super) fn of_domain(banks: &Banks, domain: DomainId) -> Option<(usize, &Bank)> {
    let mut used = banks
        .iter()
        .enumerate()
        .filter_map(|(n, bank)| Some((n, bank.as_ref()?)));
    used.find(|(_, bank)| bank.domain == domain)
}

/// A bank that is free for a stage. Banks that know only stage 2 come first.
pub(super) fn free(banks: &Banks, features: Features, second: bool) -> Option<usize> {
    let first = if second { 0 } else { features.second_only() };
    (first..features.banks()).find(|n| banks[*n].is_none())
}

impl Bank {
    /// A bank without streams.
    pub(super) const fn new(domain: DomainId, root: Root, shape: Shape) -> Self {
        Self {
            domain,
            root,
            shape,
            members: 0,
        }
    }

    /// TTBR0, TCR.
    fn table(&self, features: Features, n: usize) -> (u64, u32) {
        let Shape {
            scheme,
            second,
            page,
            input_bits,
            ..
        } = self.shape;
        let (address, levels) = (self.root.address, u32::from(self.root.levels));
        let walks = if features.coherent() {
            COHERENT
        } else {
            UNCACHED
        };
        // TG0.
        let granule = match page {
            12 => 0,
            14 => 2 << 14,
            _ => 1 << 14,
        };
        // SL0: from Arm's level 2 upwards with pages of 4 KiB, from level 3 with larger ones.
        let start = levels.wrapping_sub(if page == 12 { 2 } else { 1 }) << 6;
        let size64 = 64 - input_bits;
        // T0SZ of 4 bits, with its sign again in S.
        let size32 = 32u32.wrapping_sub(input_bits) & 0x1f;
        match (scheme, second) {
            (Scheme::Short, _) => {
                let walks = if features.coherent() {
                    SHORT_COHERENT
                } else {
                    SHORT_UNCACHED
                };
                (address | u64::from(walks), 0)
            }
            (Scheme::Long, false) => (
                address | (n as u64) << 48,
                LONG | NO_UPPER | walks | size32 & 7,
            ),
            (Scheme::Long, true) => (address, LONG | walks | start | size32),
            (Scheme::Long64, false) => (
                address | (n as u64) << 48,
                NO_UPPER | walks | granule | size64,
            ),
            (Scheme::Long64, true) => {
                let output = features.output_size(true) << 16;
                (address, LONG | walks | granule | start | output | size64)
            }
        }
    }

    /// CBAR.
    const fn kind(&self, n: usize) -> u32 {
        match self.shape.second {
            true => n as u32 + 1,
            false => FIRST_ONLY | WEAKEST,
        }
    }

    /// Refuses a bank in use that was not written by [`write`](Self::write).
    pub(super) fn compare<R: Registers>(
        &self,
        registers: &R,
        features: Features,
        n: usize,
    ) -> Result<(), UnitAdoptError> {
        let (address, control) = self.table(features, n);
        UnitAdoptError::compare("TTBR0", base(registers, features, n), address, !0)?;
        // EAE is fixed in stage 2, and need not read as it was written.
        for (name, place, wanted, mask) in [
            ("TCR", features.bank(n, TCR), control, !LONG),
            ("CBAR", features.global1(CBAR, n), self.kind(n), !0),
            ("SCTLR", features.bank(n, SCTLR), ON, ON),
        ] {
            let found = registers.read32(place);
            UnitAdoptError::compare(name, found.into(), wanted.into(), mask.into())?;
        }
        Ok(())
    }

    /// Writes bank `n`. No stream leads to it.
    pub(super) fn write<R: Registers>(&self, registers: &R, features: Features, n: usize) {
        let write = |register, value| registers.write32(features.bank(n, register), value);
        let second = self.shape.second;
        switch_off(registers, features, n);
        if features.is_v2() {
            let va64 = match self.shape.scheme {
                Scheme::Long64 => VA64,
                Scheme::Short | Scheme::Long => 0,
            };
            registers.write32(features.global1(CBA2R, n), va64);
        }
        registers.write32(features.global1(CBAR, n), self.kind(n));
        let (base, control) = self.table(features, n);
        if features.is_v2() && !second {
            write(TCR2, ZEROS | features.output_size(false));
        }
        write(TCR, control);
        write(TTBR0, base as u32);
        write(TTBR0 + 4, (base >> 32) as u32);
        let mut mode = ON | FAULTS;
        if !second {
            write(TTBR1, 0);
            write(TTBR1 + 4, 0);
            mode |= ACCESS_FLAG | PRIVATE;
            if self.shape.scheme == Scheme::Short {
                write(CONTEXTIDR, n as u32);
            } else {
                write(MAIR0, MAIR as u32);
                write(MAIR1, (MAIR >> 32) as u32);
                mode |= REMAP;
            }
        }
        write(SCTLR, mode);
    }
}

/// TTBR0 of bank `n`.
pub(super) fn base<R: Registers>(registers: &R, features: Features, n: usize) -> u64 {
    let [low, high] = [0, 4].map(|half| registers.read32(features.bank(n, TTBR0) + half));
    u64::from(high) << 32 | u64::from(low)
}

/// Switches bank `n` off and clears its faults. No stream leads to it, for without translation it would
/// let everything through.
pub(super) fn switch_off<R: Registers>(registers: &R, features: Features, n: usize) {
    registers.write32(features.bank(n, SCTLR), 0);
    registers.write32(features.bank(n, FSR), u32::MAX);
}
