//! Faults as named records.

use core::fmt;

use iopt::walk::{Access, WalkFault};

use crate::target::BadTarget;
use crate::unit::{DeviceId, DomainId, Pasid};

/// An access that a unit blocked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Requester.
    pub device: DeviceId,
    /// The PASID that the request carried, if it did and the unit says so.
    pub pasid: Option<Pasid>,
    /// The device's domain at that time, if it had one.
    pub domain: Option<DomainId>,
    /// The first address that could not be reached.
    pub iova: u64,
    /// Access that was asked for; `None` where the unit's record does not say. An atomic operation is a write.
    pub access: Option<Access>,
    /// Why it was blocked.
    pub reason: FaultReason,
}

/// Why an access was blocked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum FaultReason {
    /// The device is not attached.
    NotAttached,
    /// The table does not allow it.
    Walk(WalkFault),
    /// The table leads to an address at which there is no memory.
    Target(BadTarget),
    /// The address is not a multiple of 8.
    Misaligned,
    /// The access would go on beyond the end of the 64-bit address space.
    WrapsAround {
        /// Its length in bytes.
        len: u64,
    },
    /// A unit of hardware says why; `iova` is as exact as its record, which may have no more than the page.
    Reported {
        /// The unit's code, as its table in [`codes`](crate::codes) has it, but for AMD's:
        ///
        /// * VT-d: the fault reason (Fault Recording Register, FR; 7.1.3), 8 bits;
        /// * AMD: bits 63:48 of the event log's entry (48882, section 2.5): the event's code in bits 15:12, its flags below,
        ///   which [`amdvi_event`](crate::codes::amdvi_event) takes one by one;
        /// * SMMUv3: the number of the event (IHI 0070, section 7.3), 8 bits;
        /// * SMMUv1 and v2: the lower 16 bits of the FSR of a context bank, or of GFSR where `domain` is `None`: one bit for
        ///   each cause;
        /// * RISC-V: CAUSE (section "Fault/Event-Queue (FQ)"), 12 bits.
        ///
        /// ```
        /// use iommu::codes::{self, Class};
        ///
        /// // IO_PAGE_FAULT with the flags PR, RW and PE.
        /// let code: u16 = 0x2070;
        /// let event = codes::amdvi_event(u32::from(code >> 12), u32::from(code & 0xfff));
        /// assert_eq!(event.map(|event| event.class), Some(Class::Permission));
        /// // RISC-V: a write that the tables do not allow.
        /// assert_eq!(codes::RISCV.get(15).map(|cause| cause.class), Some(Class::NoAccess));
        /// ```
        code: u16,
        /// Meaning of the reason, from the unit's specification.
        meaning: &'static str,
        /// Further fields of the record.
        details: Details,
    },
}

/// Fields of a unit's record of a request, beside its address and PASID. Fields are `None` where the record has no such
/// field, or the driver does not read it (it does for RISC-V only).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Details {
    /// Request that the unit had to serve.
    pub request: Option<RequestKind>,
    /// The request asked for privilege, as one with a PASID can.
    pub privileged: Option<bool>,
    /// Address that the second stage failed to translate, where it has.
    pub second_stage: Option<SecondStage>,
}

/// Kind of a request to a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RequestKind {
    /// Nothing: the unit has failed by itself. The record names no device, and what the address is depends on the
    /// reason.
    None,
    /// An access by an address that is to be translated.
    Untranslated {
        /// It reads instructions.
        execute: bool,
    },
    /// An access by an address that a TLB in the device has translated.
    Translated {
        /// It reads instructions.
        execute: bool,
    },
    /// A translation, for a TLB in the device.
    Translation,
    /// A PCI Express message, whose code stands in the place of the address.
    Message,
}

/// Input of a second stage that failed to translate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SecondStage {
    /// The guest-physical address.
    pub address: u64,
    /// The unit's own access to a table of the first stage, where it was one.
    pub table: Option<Access>,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            device,
            pasid,
            domain,
            iova,
            access,
            reason,
        } = self;
        write!(f, "{device}")?;
        if let Some(pasid) = pasid {
            write!(f, " PASID {pasid}")?;
        }
        match domain {
            Some(domain) => write!(f, " (domain {domain}): ")?,
            None => write!(f, ": ")?,
        }
        let access = Asked(*access);
        match reason {
            FaultReason::Walk(fault) => fault.fmt(f),
            FaultReason::NotAttached => write!(f, "{access} {iova:#x}: not attached"),
            FaultReason::Target(bad) => write!(f, "{access} {iova:#x}: {bad}"),
            FaultReason::Misaligned => {
                write!(f, "{access} {iova:#x}: not a multiple of 8 bytes")
            }
            FaultReason::Reported {
                code,
                meaning,
                details,
            } => {
                match details.request {
                    Some(RequestKind::None) => write!(f, "no request, {iova:#x}")?,
                    Some(RequestKind::Message) => write!(f, "message {iova:#x}")?,
                    Some(RequestKind::Translation) => write!(f, "translation of {iova:#x}")?,
                    Some(RequestKind::Translated { .. }) => {
                        write!(f, "translated {access} {iova:#x}")?
                    }
                    Some(RequestKind::Untranslated { .. }) | None => {
                        write!(f, "{access} {iova:#x}")?
                    }
                }
                if let Some(
                    RequestKind::Untranslated { execute: true }
                    | RequestKind::Translated { execute: true },
                ) = details.request
                {
                    f.write_str(" for execution")?;
                }
                if details.privileged == Some(true) {
                    f.write_str(" with privilege")?;
                }
                write!(f, ": {meaning} (reason {code:#x}")?;
                if let Some(SecondStage { address, table }) = details.second_stage {
                    write!(f, ", second stage of {address:#x}")?;
                    if let Some(access) = table {
                        write!(f, ", a table's {access}")?;
                    }
                }
                f.write_str(")")
            }
            FaultReason::WrapsAround { len } => {
                write!(
                    f,
                    "{access} {iova:#x}: {len:#x} bytes go beyond the last address"
                )
            }
        }
    }
}

/// `read of`, and `access to` where it is not known which.
struct Asked(Option<Access>);

impl fmt::Display for Asked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(access) => write!(f, "{access} of"),
            None => f.write_str("access to"),
        }
    }
}

impl core::error::Error for Fault {}
