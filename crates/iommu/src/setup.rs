//! Failures to make a driver for a unit.

use core::fmt;

use iopt::NoTables;

use crate::error::NoPlace;
use crate::handover::UnitKind;

/// Failure of a driver's `new`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum UnitSetupError {
    /// The registers say that the unit cannot be driven, or not as it is configured.
    #[error(transparent)]
    Probe(#[from] UnitProbeError),
    /// There is no memory for what the driver and the unit share: tables of devices and queues. A table
    /// of devices of one level is one piece.
    #[error(transparent)]
    NoTables(#[from] NoTables),
    /// The table memory broke its contract: it did not give all cells of a structure
    /// ([`TableMemory::entries`](iopt::TableMemory::entries)). Nothing is taken.
    #[error(
        "the table memory broke its contract: it did not give all cells of the structure at {address:#x}"
    )]
    Cells {
        /// Where the structure lies.
        address: u64,
    },
    /// The memory lies beyond the addresses that the unit has, or that its structures hold.
    #[error("memory up to {last:#x} lies beyond the unit's addresses of {bits} bits")]
    Addresses {
        /// The memory's last address.
        last: u64,
        /// Bits of an address.
        bits: u32,
    },
}

impl From<NoPlace> for UnitSetupError {
    fn from(cause: NoPlace) -> Self {
        match cause {
            NoPlace::NoTables(cause) => Self::NoTables(cause),
            NoPlace::Cells(address) => Self::Cells { address },
        }
    }
}

/// Why the registers of a unit say that it cannot be driven. Nothing was changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum UnitProbeError {
    /// No unit of this kind answers at these registers; of RISC-V's, none of version 1 of the specification.
    #[error("no {kind} answers: {read}")]
    NoUnit {
        /// The driver's kind.
        kind: UnitKind,
        /// Version and capabilities.
        read: IdRegisters,
    },
    /// The unit walks no table that is known: AMD's HATS is 3; RISC-V has none of Sv39 to Sv57 and none of Sv39x4 to
    /// Sv57x4; Arm's has no AArch64 tables in this processor's byte order, with a granule and a stage that are known.
    #[error("the {kind} walks no known tables: {read}")]
    Tables {
        /// The driver's kind.
        kind: UnitKind,
        /// Formats, and their sizes.
        read: IdRegisters,
    },
    /// The unit does not have the mode of the configuration, or walks no known table in it: VT-d's [`Mode`], and AMD's
    /// guest tables, for which GTSup, GIoSup and IASup are needed.
    ///
    /// [`Mode`]: crate::vtd::Mode
    #[error("the unit does not offer {mode}: {read}")]
    Mode {
        /// The mode.
        mode: &'static str,
        /// Registers that say which modes there are.
        read: IdRegisters,
    },
    /// The unit takes no PASIDs of so many bits in this mode (VT-d: ECAP.PASID and PSS; AMD: PASmax and GLXSup).
    #[error("PASIDs of {asked} bits, but the unit supports {offered}")]
    Pasids {
        /// The bits asked for.
        asked: u32,
        /// The most that there can be.
        offered: u32,
    },
    /// The unit reads memory in big-endian order only (RISC-V: `fctl.BE` is 1, and `capabilities.END` 0).
    #[error("the unit reads memory in big-endian order only: {read}")]
    BigEndian {
        /// The register `capabilities`.
        read: IdRegisters,
    },
    /// All faults of devices stall, until software has answered each (SMMU_IDR0.STALL_MODEL).
    #[error("all faults stall: {read}")]
    StallsAlways {
        /// SMMU_IDR0.
        read: IdRegisters,
    },
    /// The unit has tables or queues of its own, or no room for a command and a CMD_SYNC
    /// (SMMU_IDR1: TABLES_PRESET, QUEUES_PRESET, CMDQS).
    #[error("tables or queues cannot be set up: {read}")]
    Queues {
        /// SMMU_IDR1.
        read: IdRegisters,
    },
    /// The unit has no room for a single device.
    #[error("the SMMU has {streams} stream mapping registers and {banks} context banks")]
    NoRoom {
        /// Stream mapping registers.
        streams: usize,
        /// Context banks.
        banks: usize,
    },
    /// The unit cannot leave these bits of stream ids out.
    #[error("the SMMU cannot ignore the bits {ignored:#x} of stream ids, but {writable:#x}")]
    StreamMask {
        /// The bits asked for ([`smmu::Config::ignored`](crate::smmu::Config::ignored)).
        ignored: u16,
        /// Bits that it can leave out.
        writable: u16,
    },
    /// All stream match registers are in use, so that none can be asked for its bits.
    #[error("all {streams} stream match registers are in use")]
    InUse {
        /// How many there are.
        streams: usize,
    },
}

/// One or two registers that say what a unit is and can do, with what was read from them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IdRegisters([Option<(&'static str, u64)>; 2]);

impl IdRegisters {
    pub(crate) const fn one(name: &'static str, value: u64) -> Self {
        Self([Some((name, value)), None])
    }

    pub(crate) const fn two(first: (&'static str, u64), second: (&'static str, u64)) -> Self {
        Self([Some(first), Some(second)])
    }

    /// Names, as the unit's specification has them, and values.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> + use<> {
        self.0.into_iter().flatten()
    }
}

/// `CAP 0x1234, ECAP 0xf`.
impl fmt::Display for IdRegisters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (n, (name, value)) in self.iter().enumerate() {
            let separator = if n == 0 { "" } else { ", " };
            write!(f, "{separator}{name} {value:#x}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::string::ToString;

    use super::*;
    use crate::handover::UnitAdoptError;

    #[test]
    fn a_cause_is_named_with_its_registers_by_whichever_step_meets_it() {
        let no_unit = UnitProbeError::NoUnit {
            kind: UnitKind::Vtd,
            read: IdRegisters::two(("VER", 0x10), ("CAP", u64::MAX)),
        };
        let text = "no VT-d unit answers: VER 0x10, CAP 0xffffffffffffffff";
        assert_eq!(UnitSetupError::from(no_unit).to_string(), text);
        let adopted = UnitAdoptError::Setup(no_unit.into());
        assert_eq!(adopted.to_string(), text);
        let tables = UnitProbeError::Tables {
            kind: UnitKind::AmdVi,
            read: IdRegisters::one("Extended Feature", 0xc00),
        };
        let text = "the AMD-Vi unit walks no known tables: Extended Feature 0xc00";
        assert_eq!(tables.to_string(), text);
    }
}
