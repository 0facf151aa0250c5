//! Streams: which context bank a device's accesses go to.
//!
//! Arm SMMU architecture (IHI 0062), sections 10.6.23 S2CRn and 10.6.25 SMRn: where streams are matched
//! (IDR0.SMS), SMRn holds an id and a mask of bits that are not compared, and S2CRn says what becomes of
//! the streams that match; otherwise there is an S2CR for each id. A stream that matches nothing faults
//! (CR0.USFCFG).
//!
//! **On**: SMR, while S2CR says "fault"; SMR is read again, since a unit need not have all its bits; then
//! S2CR, which is read again too, so that it has arrived. **Off**: S2CR, then SMR. So one store, that of
//! S2CR, switches a stream, whether its valid bit is in SMR or, with ids of 16 bits (CR0.EXIDENABLE), in
//! S2CR.

use super::Config;
use super::capabilities::{BYPASS, CR0, EXTENDED, Features, MOST, S2CR, SMR};
use super::unit::refused;
use crate::error::UnitError;
use crate::registers::Registers;
use crate::setup::UnitProbeError;

/// SMR.VALID.
const VALID: u32 = 1 << 31;
/// S2CR.TYPE: fault. A context bank is 0.
const FAULT: u32 = 2 << 16;
/// S2CR.TYPE and CBNDX.
const BANK: u32 = 3 << 16 | 0xff;
/// S2CR.EXIDVALID.
const EXTENDED_VALID: u32 = 1 << 10;
/// Bits of an id, and of a mask, in the form that has VALID.
const BITS: u32 = 0x7fff;

/// A stream that counts as attached.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stream {
    /// Its id, without the bits that are not compared.
    pub(super) id: u16,
    pub(super) bank: u8,
    /// It is off: an attach was refused, or a detach was not answered.
    pub(super) leaving: bool,
}

/// All streams, by the number of their S2CR.
pub(super) type Streams = [Option<Stream>; MOST];

/// The place of an id.
pub(super) fn find(streams: &Streams, id: u16) -> Option<(usize, Stream)> {
    let mut used = streams
        .iter()
        .enumerate()
        .filter_map(|(n, stream)| Some((n, (*stream)?)));
    used.find(|(_, stream)| stream.id == id)
}

/// A place for an id that has none.
pub(super) fn free(streams: &Streams, features: Features, id: u16) -> Option<usize> {
    let count = features.streams();
    if features.matches() {
        streams[..count].iter().position(Option::is_none)
    } else {
        Some(usize::from(id)).filter(|n| *n < count)
    }
}

/// Lets the stream at place `n` through to its bank. It is off.
pub(super) fn switch_on<R: Registers>(
    registers: &R,
    features: Features,
    ignored: u16,
    n: usize,
    stream: Stream,
) -> Result<(), UnitError> {
    let mut bank = u32::from(stream.bank);
    let mut compared = BANK;
    if features.matches() {
        let mut entry = u32::from(ignored) << 16 | u32::from(stream.id);
        if features.extended() {
            bank |= EXTENDED_VALID;
            compared |= EXTENDED_VALID;
        } else {
            entry |= VALID;
        }
        registers.write32(SMR + 4 * n, entry);
        let there = registers.read32(SMR + 4 * n);
        // Bits of the id that are not compared need not be kept.
        if (there ^ entry) & !u32::from(ignored) != 0 {
            switch_off(registers, features, n);
            return Err(refused("SMR", there));
        }
    }
    registers.write32(S2CR + 4 * n, bank);
    let there = registers.read32(S2CR + 4 * n);
    if (there ^ bank) & compared != 0 {
        switch_off(registers, features, n);
        return Err(refused("S2CR", there));
    }
    Ok(())
}

/// The stream at place `n` of a unit in use, if it is on.
pub(super) fn read<R: Registers>(registers: &R, features: Features, n: usize) -> Option<Stream> {
    let context = registers.read32(S2CR + 4 * n);
    let (id, on) = match (features.matches(), features.extended()) {
        (false, _) => (n as u32, true),
        (true, true) => {
            let entry = registers.read32(SMR + 4 * n);
            (entry, context & EXTENDED_VALID != 0)
        }
        (true, false) => {
            let entry = registers.read32(SMR + 4 * n);
            (entry & BITS, entry & VALID != 0)
        }
    };
    // Another TYPE is more than 8 bits.
    let bank = (context & BANK).try_into().ok()?;
    on.then_some(Stream {
        id: id as u16,
        bank,
        leaving: false,
    })
}

/// Has the streams of place `n` fault.
pub(super) fn switch_off<R: Registers>(registers: &R, features: Features, n: usize) {
    registers.write32(S2CR + 4 * n, FAULT);
    if features.matches() {
        registers.write32(SMR + 4 * n, 0);
    }
}

/// The bits of stream ids that the unit keeps, after a look whether it can leave out those that are to be
/// ignored: both by writing all ones to a register that is not valid, which then gets back what it held.
pub(super) fn bits<R: Registers>(
    registers: &R,
    features: Features,
    config: &Config,
) -> Result<u16, UnitProbeError> {
    let all = u32::from(features.stream_bits());
    let (ids, masks) = if features.matches() {
        let control = registers.read32(CR0);
        let unused = |n: &usize| match control & EXTENDED {
            0 => registers.read32(SMR + 4 * n) & VALID == 0,
            _ => registers.read32(S2CR + 4 * n) & EXTENDED_VALID == 0,
        };
        let streams = features.streams();
        // Before the unit is set up, registers hold anything and do nothing.
        let free = match control & BYPASS {
            0 => (0..streams).find(unused),
            _ => Some(0),
        };
        let register = SMR + 4 * free.ok_or(UnitProbeError::InUse { streams })?;
        let before = registers.read32(register);
        let kept = |ones| {
            registers.write32(register, ones);
            registers.read32(register) & ones
        };
        // Apart, since an id need not be kept where its mask is set.
        let (ids, masks) = (kept(all & BITS), kept((all & BITS) << 16) >> 16);
        registers.write32(register, before);
        // The 16th bit is only there once EXIDENABLE is set.
        let last = all & !BITS;
        (ids | last, masks | last)
    } else {
        (all, 0)
    };
    let (ignored, writable) = (config.ignored, masks as u16);
    if ignored & !writable != 0 {
        return Err(UnitProbeError::StreamMask { ignored, writable });
    }
    Ok(ids as u16)
}
