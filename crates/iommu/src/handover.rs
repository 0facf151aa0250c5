//! Handover of a live unit: translation is never off, and no device notices.
//!
//! 1. **Freeze**: the old driver waits until all commands are complete, lists what the unit goes on reading
//!    and writing ([`UnitMemory`]), and is gone. It leaves a description, [`Frozen`], of a few words, which
//!    goes to the successor in any way as [bytes](Frozen::to_bytes).
//! 2. **Keep out**: the successor's memory must not hand out what was listed. With an arena over the
//!    same memory that is [`iopt::Takeover::keep`] for each stretch of structures and
//!    [`iopt::Takeover::adopt`] for each table; [`iopt::Table::for_each_table`] lists the pages of a
//!    table for others.
//! 3. **Adopt**: the new driver reads the unit's registers and structures, compares them with the
//!    description, and goes on where the old one has stopped. It writes nothing before its first
//!    command. A mismatch is an error with the register's name, and nothing has changed.
//!
//! Between freezing and adopting, devices go on using the mappings of that time. Nothing may be unmapped,
//! since no driver could flush. Faults stay in the unit, as far as it has room. If the successor does not
//! come, the predecessor adopts its own unit again.
//!
//! The description says only what neither registers nor structures tell. Counters begin at 0 again.

use core::fmt;

use iopt::Root;
use runs::{Pa, Span};

use crate::setup::UnitSetupError;
use crate::unit::DomainId;

/// Memory that a unit goes on using while no driver has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnitMemory {
    /// Memory for a structure or a queue, in whole pages.
    Structure {
        /// Which, in the specification's name.
        name: &'static str,
        /// Where.
        span: Span<Pa>,
    },
    /// A page table, with all tables below it. It comes once for each device, or PASID, that
    /// translates through it.
    Table {
        /// The domain.
        domain: DomainId,
        /// The table.
        root: Root,
    },
}

/// Which driver a unit has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
#[non_exhaustive]
pub enum UnitKind {
    /// [`Vtd`](crate::Vtd).
    Vtd = 1,
    /// [`AmdVi`](crate::AmdVi).
    AmdVi = 2,
    /// Arm's SMMU, version 3.
    SmmuV3 = 3,
    /// The IOMMU of RISC-V.
    Riscv = 4,
    /// Arm's SMMU, versions 1 and 2.
    Smmu = 5,
}

impl fmt::Display for UnitKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Vtd => "VT-d unit",
            Self::AmdVi => "AMD-Vi unit",
            Self::SmmuV3 => "SMMUv3",
            Self::Riscv => "RISC-V IOMMU of version 1",
            Self::Smmu => "SMMU",
        })
    }
}

/// Words that a driver may put into its description.
pub(crate) const WORDS: usize = 6;

/// Description of a frozen unit, for its successor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "without it no driver can take over the unit without interrupting translation"]
pub struct Frozen {
    pub(crate) kind: UnitKind,
    pub(crate) words: [u64; WORDS],
}

/// The first bytes of a description.
const MAGIC: [u8; 8] = *b"dmaspIO\0";
/// The only version.
const VERSION: u16 = 1;

impl Frozen {
    /// Bytes of a description.
    pub const BYTES: usize = 16 + 8 * WORDS;

    /// Kind of the unit.
    pub const fn kind(&self) -> UnitKind {
        self.kind
    }

    /// The description, little-endian: `dmaspIO` and a zero, version (2 bytes, 1), kind of the unit (2
    /// bytes), 4 zeros, and the driver's words.
    pub fn to_bytes(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        let head = VERSION as u64 | (self.kind as u64) << 16;
        let words = [u64::from_le_bytes(MAGIC), head];
        for (place, word) in bytes
            .chunks_exact_mut(8)
            .zip(words.iter().chain(&self.words))
        {
            place.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// Reads a description.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, UnitAdoptError> {
        if bytes.len() != Self::BYTES || !bytes.starts_with(&MAGIC) {
            return Err(UnitAdoptError::NoDescription { len: bytes.len() });
        }
        let mut words = bytes.chunks_exact(8).map(|chunk| {
            let word = chunk.iter().rev();
            word.fold(0, |word, byte| word << 8 | u64::from(*byte))
        });
        let head = words.nth(1).unwrap_or(0);
        let version = head as u16;
        if version != VERSION {
            return Err(UnitAdoptError::Version { found: version });
        }
        let kind = [
            UnitKind::Vtd,
            UnitKind::AmdVi,
            UnitKind::SmmuV3,
            UnitKind::Riscv,
            UnitKind::Smmu,
        ]
        .into_iter()
        .find(|kind| *kind as u64 == head >> 16)
        .ok_or(UnitAdoptError::Kind { found: head >> 16 })?;
        let mut frozen = Self {
            kind,
            words: [0; WORDS],
        };
        frozen
            .words
            .iter_mut()
            .zip(words)
            .for_each(|(w, found)| *w = found);
        Ok(frozen)
    }

    /// The words, for the driver whose they are.
    pub(crate) fn words(&self, kind: UnitKind) -> Result<[u64; WORDS], UnitAdoptError> {
        if self.kind != kind {
            let found = self.kind as u64;
            return Err(UnitAdoptError::Kind { found });
        }
        Ok(self.words)
    }
}

/// Failure of a driver's `adopt` to take a unit over. The unit goes on as it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum UnitAdoptError {
    /// These bytes are no description.
    #[error("{len} bytes are no description of a unit")]
    NoDescription {
        /// How many.
        len: usize,
    },
    /// The description has another version.
    #[error("the description has version {found}, not {VERSION}")]
    Version {
        /// Which.
        found: u16,
    },
    /// It describes another kind of unit, by its number.
    #[error("the description is of a unit of another kind, {found}")]
    Kind {
        /// Which.
        found: u64,
    },
    /// A register is not as the predecessor has left it: it is another unit, or one that has stopped.
    #[error("{name} is {found:#x}, not {wanted:#x}: not the unit described")]
    Register {
        /// Its name.
        name: &'static str,
        /// Expected value of the compared bits.
        wanted: u64,
        /// Value found in them.
        found: u64,
    },
    /// The unit, or the successor's memory, is not one that a driver could be made for.
    #[error(transparent)]
    Setup(#[from] UnitSetupError),
}

impl UnitAdoptError {
    /// Refuses a register that does not hold what it should, of the bits in `mask`.
    pub(crate) const fn compare(
        name: &'static str,
        found: u64,
        wanted: u64,
        mask: u64,
    ) -> Result<(), Self> {
        let (found, wanted) = (found & mask, wanted & mask);
        if found != wanted {
            return Err(Self::Register {
                name,
                wanted,
                found,
            });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_description_comes_back_from_its_bytes_and_others_are_refused() {
        let frozen = Frozen {
            kind: UnitKind::AmdVi,
            words: [1, 2 << 40, u64::MAX, 4, 5, 6],
        };
        let bytes = frozen.to_bytes();
        assert_eq!(Frozen::from_bytes(&bytes), Ok(frozen));
        assert_eq!(bytes[8..12], [1, 0, 2, 0]);
        assert!(frozen.words(UnitKind::AmdVi).is_ok());
        let other = UnitAdoptError::Kind { found: 2 };
        assert_eq!(frozen.words(UnitKind::Vtd), Err(other));
        for (at, to, error) in [
            (0, 0, UnitAdoptError::NoDescription { len: bytes.len() }),
            (8, 2, UnitAdoptError::Version { found: 2 }),
            (10, 9, UnitAdoptError::Kind { found: 9 }),
            (
                13,
                1,
                UnitAdoptError::Kind {
                    found: 2 + (1 << 24),
                },
            ),
        ] {
            let mut bytes = bytes;
            bytes[at] = to;
            assert_eq!(Frozen::from_bytes(&bytes), Err(error));
        }
        let short = Frozen::from_bytes(&bytes[1..]);
        assert_eq!(short, Err(UnitAdoptError::NoDescription { len: 63 }));
    }
}
