//! Marking entries as accessed and dirty.

use super::spec::Shape;
use super::walker::Walker;
use super::{BadAddress, WalkFault, WalkMemory, WalkReason};

/// How often a walk looks at entries again that changed while it marked them.
pub(super) const RETRIES: u8 = 16;

impl Walker {
    /// Writes `marked` over the entry at `place`, which the walk is at. False: it has changed since
    /// it was read, and is to be read again.
    pub(super) fn mark(
        &self,
        memory: &(impl WalkMemory + ?Sized),
        shape: &Shape,
        at: &WalkFault,
        place: u64,
        marked: u64,
        retries: &mut u8,
    ) -> Result<bool, WalkFault> {
        if !self.updates || marked == at.entry {
            return Ok(true);
        }
        let done = if shape.entry_log2 == 2 {
            memory
                .compare_exchange_u32(place, at.entry as u32, marked as u32)
                .map(|done| done.is_ok())
        } else {
            memory
                .compare_exchange_u64(place, at.entry, marked)
                .map(|done| done.is_ok())
        };
        match done {
            Ok(true) => Ok(true),
            Ok(false) => match retries.checked_sub(1) {
                Some(left) => {
                    *retries = left;
                    Ok(false)
                }
                None => Err(at.because(WalkReason::Contended)),
            },
            Err(BadAddress { address }) => Err(at.because(WalkReason::NotWritable { address })),
        }
    }

    /// True when the unit keeps dirty state, in formats where that needs the access flag kept too
    /// (Arm, TCR.HD: only where HA is 1; RISC-V has one bit for both).
    pub(super) const fn keeps_dirty(&self) -> bool {
        self.sets_accessed && self.sets_dirty
    }
}
