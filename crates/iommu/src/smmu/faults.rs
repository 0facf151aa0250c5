//! Faults.
//!
//! Arm SMMU architecture (IHI 0062), sections 15.5.8 FAR, 15.5.9 FSR, 15.5.11 FSYNRm, 10.6.14 GFAR, 10.6.15
//! GFSR, 10.6.17 GFSYNR0. A context bank keeps the first fault of its domain (FSR, FAR, FSYNR0, and
//! CBFRSYNRA in global register space 1) until its FSR is cleared; what reaches no bank is a global fault
//! (GFSR, GFAR, GFSYNR0, GFSYNR1). A fault that comes while one is kept only sets the bit MULTI. Order:
//! everything is read, then the status is written back, which clears the bits that were read. There are no
//! interrupts: faults are drained by calls.

use iopt::walk::Access;

use super::capabilities::{CBFRSYNRA, FAR, FSR, FSYNR0, Features, GFAR, GFSR, GFSYNR0, GFSYNR1};
use crate::codes::{Class, Code};
use crate::fault::{Details, Fault, FaultReason};
use crate::registers::Registers;
use crate::unit::{DeviceId, DomainId};

/// MULTI: there were more faults than the one that is kept.
const MULTI: u32 = 1 << 31;

/// FSR, by bit; ASF and UUT are of version 2.
pub(crate) const CONTEXT: &[Code] = {
    use Class::{BadTable, NotMapped, Permission, Unknown};
    &[
        Code::new(1 << 1, NotMapped, "TF: not present"),
        Code::likely(1 << 2, Permission, "AFF: the access flag is not set"),
        Code::new(1 << 3, Permission, "PF: not allowed"),
        Code::likely(
            1 << 4,
            BadTable,
            "EF: a table, or the memory behind it, cannot be read",
        ),
        Code::new(1 << 5, Unknown, "TLBMCF: two cached translations match"),
        Code::new(
            1 << 6,
            Unknown,
            "TLBLKF: a locked cached translation is in the way",
        ),
        Code::likely(1 << 7, BadTable, "ASF: an address in a table is too large"),
        Code::new(
            1 << 8,
            Unknown,
            "UUT: a kind of access that is not supported",
        ),
    ]
};

/// GFSR, by bit.
pub(crate) const GLOBAL: &[Code] = {
    use Class::{DeviceEntry, Unknown};
    &[
        Code::new(1 << 1, DeviceEntry, "USF: the stream is not mapped"),
        Code::likely(1 << 2, DeviceEntry, "SMCF: the stream matches twice"),
        Code::likely(1 << 0, DeviceEntry, "ICF: the stream is mapped to a fault"),
        Code::likely(
            1 << 3,
            DeviceEntry,
            "UCBF: the stream is mapped to a bank that is not there",
        ),
        Code::new(
            1 << 4,
            Unknown,
            "UCIF: a bank has an interrupt that is not there",
        ),
        Code::new(
            1 << 5,
            Unknown,
            "CAF: a register access that is not allowed",
        ),
        Code::new(
            1 << 6,
            Unknown,
            "EF: the requested address cannot be reached",
        ),
        Code::new(1 << 7, Unknown, "PF: not allowed"),
        Code::new(
            1 << 8,
            Unknown,
            "UUT: a kind of access that is not supported",
        ),
    ]
};

/// The cause among the bits of `status`.
pub(crate) fn cause(causes: &'static [Code], status: u32) -> Option<&'static Code> {
    causes.iter().find(|cause| status & cause.code != 0)
}

/// Where a fault is kept.
struct Place {
    status: usize,
    address: usize,
    syndrome: usize,
    stream: usize,
    /// The bit WNR of the syndrome.
    write: u32,
    causes: &'static [Code],
    /// Causes that are no request of a device: UCIF and CAF.
    other: u32,
    domain: Option<DomainId>,
}

/// Takes the global fault, if there is one, and says whether others were lost.
pub(super) fn take_global<R: Registers>(registers: &R, ignored: u16) -> (Option<Fault>, bool) {
    let place = Place {
        status: GFSR,
        address: GFAR,
        syndrome: GFSYNR0,
        stream: GFSYNR1,
        write: 1 << 1,
        causes: GLOBAL,
        other: 1 << 4 | 1 << 5,
        domain: None,
    };
    take(registers, &place, ignored)
}

/// The same for context bank `n`.
pub(super) fn take_context<R: Registers>(
    registers: &R,
    features: Features,
    (n, domain): (usize, DomainId),
    ignored: u16,
) -> (Option<Fault>, bool) {
    let place = Place {
        status: features.bank(n, FSR),
        address: features.bank(n, FAR),
        syndrome: features.bank(n, FSYNR0),
        stream: features.global1(CBFRSYNRA, n),
        write: 1 << 4,
        causes: CONTEXT,
        other: 0,
        domain: Some(domain),
    };
    take(registers, &place, ignored)
}

fn take<R: Registers>(registers: &R, place: &Place, ignored: u16) -> (Option<Fault>, bool) {
    let status = registers.read32(place.status);
    let lost = status & MULTI != 0;
    let fault = cause(place.causes, status).map(|cause| {
        let [low, high] = [0, 4].map(|half| registers.read32(place.address + half));
        let iova = u64::from(high) << 32 | u64::from(low);
        let access = Some(match registers.read32(place.syndrome) & place.write {
            0 => Access::Read,
            _ => Access::Write,
        });
        let stream = registers.read32(place.stream) as u16;
        Fault {
            device: DeviceId((stream & !ignored).into()),
            pasid: None,
            domain: place.domain,
            iova: iova & !0xfff,
            access: access.filter(|_| cause.code & place.other == 0),
            reason: FaultReason::Reported {
                code: status as u16,
                meaning: cause.text,
                details: Details::default(),
            },
        }
    });
    if fault.is_some() || lost {
        registers.write32(place.status, status);
    }
    (fault, lost)
}
