//! Codes of faults: names, meaning and class, one table for each kind of unit.
//!
//! The tables stand beside the drivers, which name their faults by them; the module `log` names the faults that a
//! kernel has printed by the same tables. A [`Class`] says what is common to codes of different units.

use core::fmt;

/// Class of a fault: the part of the translation that refused the request, in words common to all units.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Class {
    /// The tables have no entry for the address.
    NotMapped,
    /// The entry is there and does not permit this access.
    Permission,
    /// The entry is absent or does not permit the access, and the code cannot tell which.
    NoAccess,
    /// A table is malformed, or cannot be read.
    BadTable,
    /// The device has no valid root, context, PASID, device-table, stream-table or device-directory entry: no page
    /// table is involved.
    DeviceEntry,
    /// The address is beyond what the unit or the domain translates.
    AddressWidth,
    /// A translated request, or a request for a translation, that the device may not make.
    AtsRefused,
    /// An interrupt message was refused, not DMA to memory.
    InterruptRequest,
    /// AMD's reverse map table refuses the page.
    Rmp,
    /// The unit or a device did not answer, or a read of the unit failed: no request was judged.
    UnitError,
    /// The code has no published meaning, or one that fits no other class.
    Unknown,
}

/// Certainty of a class.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Certainty {
    /// The code is named here without a class that follows from it.
    Unknown,
    /// The usual reason; others fit too.
    Likely,
    /// It follows from the code by the specification.
    Certain,
}

/// Place in a document.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Citation {
    /// Title or number of the document.
    pub document: &'static str,
    /// Section, table, register, or, for a driver, the function.
    pub section: &'static str,
}

impl fmt::Display for Citation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {}", self.document, self.section)
    }
}

/// A code of a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Code {
    /// The number; of registers with a bit for each cause, the bit as a mask.
    pub code: u32,
    /// Name (if the specification has one) and meaning, with `: ` between them.
    pub text: &'static str,
    /// Class.
    pub class: Class,
    /// Certainty of the class.
    pub certainty: Certainty,
}

impl Code {
    pub(crate) const fn new(code: u32, class: Class, text: &'static str) -> Self {
        let certainty = match class {
            Class::Unknown => Certainty::Unknown,
            _ => Certainty::Certain,
        };
        Self {
            code,
            text,
            class,
            certainty,
        }
    }

    /// The same, where other reasons fit the code too.
    pub(crate) const fn likely(code: u32, class: Class, text: &'static str) -> Self {
        Self {
            code,
            text,
            class,
            certainty: Certainty::Likely,
        }
    }

    /// Name in the specification; empty where it has numbers only.
    #[must_use]
    pub fn name(&self) -> &'static str {
        self.text.split_once(": ").map_or("", |(name, _)| name)
    }

    /// Meaning, without the name.
    #[must_use]
    pub fn meaning(&self) -> &'static str {
        self.text
            .split_once(": ")
            .map_or(self.text, |(_, rest)| rest)
    }
}

/// The entry of `table` for `code`.
pub(crate) fn find(table: &'static [Code], code: u32) -> Option<&'static Code> {
    table.iter().find(|entry| entry.code == code)
}

/// Documents of the tables.
pub(crate) mod documents {
    use super::Citation;

    macro_rules! sources {
        ($($(#[$doc:meta])* $name:ident = $document:literal, $section:literal;)*) => {
            $($(#[$doc])* pub(crate) const $name: Citation = Citation { document: $document, section: $section };)*
        };
    }

    sources! {
        VTD = "Intel VT-d specification", "7.1.3 Fault Conditions";
        AMDVI = "AMD 48882", "2.5 Event Logging";
        SMMUV3 = "Arm IHI 0070", "7.3 Event records";
        SMMU_CONTEXT = "Arm IHI 0062", "SMMU_CBn_FSR";
        SMMU_GLOBAL = "Arm IHI 0062", "SMMU_sGFSR";
        RISCV = "RISC-V IOMMU specification", "Fault record CAUSE field encodings";
    }
}

/// Table of one kind of unit.
#[derive(Clone, Copy, Debug)]
pub struct CodeTable {
    /// Document that defines the codes.
    pub source: Citation,
    /// The codes.
    pub codes: &'static [Code],
}

impl CodeTable {
    /// The entry for `code`.
    #[must_use]
    pub fn get(&self, code: u32) -> Option<&'static Code> {
        find(self.codes, code)
    }
}

/// VT-d: fault reasons.
pub const VTD: CodeTable = CodeTable {
    source: documents::VTD,
    codes: crate::vtd::FAULT_REASONS,
};

/// AMD's IOMMU: codes of events; see [`amdvi_event`] for those that depend on flags.
pub const AMDVI: CodeTable = CodeTable {
    source: documents::AMDVI,
    codes: crate::amdvi::EVENT_CODES,
};

/// SMMUv3: numbers of events.
pub const SMMUV3: CodeTable = CodeTable {
    source: documents::SMMUV3,
    codes: crate::smmuv3::EVENT_CODES,
};

/// SMMUv1 and v2: bits of a context bank's FSR.
pub const SMMU_CONTEXT: CodeTable = CodeTable {
    source: documents::SMMU_CONTEXT,
    codes: crate::smmu::CONTEXT,
};

/// SMMUv1 and v2: bits of GFSR.
pub const SMMU_GLOBAL: CodeTable = CodeTable {
    source: documents::SMMU_GLOBAL,
    codes: crate::smmu::GLOBAL,
};

/// RISC-V: causes.
pub const RISCV: CodeTable = CodeTable {
    source: documents::RISCV,
    codes: crate::riscv::CAUSES,
};

/// The event of AMD's IOMMU with this code and these flags (bits 59:48 of an entry).
#[must_use]
pub fn amdvi_event(code: u32, flags: u32) -> Option<&'static Code> {
    crate::amdvi::event(code, flags)
}
