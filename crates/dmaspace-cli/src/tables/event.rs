//! Report of a unit for a walk that ended in a fault, in the words of its specification.

use iopt::FormatId;
use iopt::walk::{Access, WalkFault, WalkReason};
use serde::Serialize;

/// A unit's report.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Event {
    /// Its name or code.
    pub name: String,
    /// Specification and section that say so.
    pub source: &'static str,
}

/// Returns the report of the unit that walks such tables; `None` for DART, whose reports are not public.
pub fn event(format: FormatId, fault: &WalkFault) -> Option<Event> {
    let write = fault.access == Access::Write;
    let (name, source): (&str, _) = match format {
        FormatId::VtdSs => (
            match fault.reason {
                WalkReason::OutsideAperture { .. } | WalkReason::Levels { .. } => {
                    "fault reason 0x4 (legacy mode)"
                }
                WalkReason::NoMemory { .. } | WalkReason::BadOutput { .. } => {
                    "fault reason 0x7 (legacy mode), 0x78 (scalable)"
                }
                WalkReason::Reserved { .. } | WalkReason::PageSize { .. } => {
                    "fault reason 0xc (legacy mode)"
                }
                _ if write => "fault reason 0x5 (legacy mode)",
                _ => "fault reason 0x6 (legacy mode)",
            },
            "VT-d 5.0, section 7.1.3",
        ),
        FormatId::X86_64 => (
            match fault.reason {
                WalkReason::OutsideAperture { .. } | WalkReason::Levels { .. } => {
                    "VT-d fault reason 0x80; AMD IO_PAGE_FAULT"
                }
                WalkReason::NoMemory { .. } | WalkReason::BadOutput { .. } => {
                    "VT-d fault reason 0x70; AMD PAGE_TAB_HARDWARE_ERROR"
                }
                WalkReason::Reserved { .. } | WalkReason::PageSize { .. } => {
                    "VT-d fault reason 0x72; AMD IO_PAGE_FAULT with RZ"
                }
                WalkReason::NotPresent => "VT-d fault reason 0x71; AMD IO_PAGE_FAULT, PR clear",
                _ => "VT-d fault reason 0x81 or 0x85; AMD IO_PAGE_FAULT with PE",
            },
            "VT-d 5.0, section 7.1.3; AMD 48882 3.08, section 2.5.3",
        ),
        FormatId::AmdV1 => (
            match fault.reason {
                WalkReason::NoMemory { .. } | WalkReason::BadOutput { .. } => {
                    "PAGE_TAB_HARDWARE_ERROR"
                }
                WalkReason::Reserved { .. }
                | WalkReason::PageSize { .. }
                | WalkReason::NextLevel { .. } => "IO_PAGE_FAULT with RZ",
                WalkReason::Denied { .. } => "IO_PAGE_FAULT with PR and PE",
                _ => "IO_PAGE_FAULT, PR clear",
            },
            "AMD 48882 3.08, section 2.5.3",
        ),
        FormatId::ArmStage1(_) | FormatId::ArmStage2(_) | FormatId::ArmV7s => (
            match fault.reason {
                WalkReason::NoMemory { .. } => "F_WALK_EABT (0x0b)",
                WalkReason::BadOutput { .. } => "F_ADDR_SIZE (0x11)",
                WalkReason::AccessFlag => "F_ACCESS (0x12)",
                WalkReason::Denied { .. } => "F_PERMISSION (0x13)",
                _ => "F_TRANSLATION (0x10)",
            },
            "SMMUv3 (IHI 0070), section 7.3",
        ),
        FormatId::RiscV | FormatId::RiscVG => {
            let second = format == FormatId::RiscVG;
            let access = matches!(
                fault.reason,
                WalkReason::NoMemory { .. } | WalkReason::BadOutput { .. }
            );
            (
                match (access, second, write) {
                    (true, _, false) => "cause 5, read access fault",
                    (true, _, true) => "cause 7, write/AMO access fault",
                    (false, false, false) => "cause 13, read page fault",
                    (false, false, true) => "cause 15, write/AMO page fault",
                    (false, true, false) => "cause 21, read guest-page fault",
                    (false, true, true) => "cause 23, write/AMO guest-page fault",
                },
                "RISC-V IOMMU 1.0, \"Fault/Event-Queue\"",
            )
        }
        _ => return None,
    };
    Some(Event {
        name: name.into(),
        source,
    })
}
