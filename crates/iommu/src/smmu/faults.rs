//! Faults.
//!
//! Arm SMMU architecture (IHI 0062), sections 15.5.8 FAR, 15.5.9 FSR, 15.5.11 FSYNRm, 10.6.14 GFAR, 10.6.15
//! GFSR, 10.6.17 GFSYNR0. A context bank keeps the first fault of its
//! domain (FSR, FAR, FSYNR0, and CBFRSYNRA in global register space 1) until its FSR is cleared; what
//! reaches no bank is a global fault (GFSR, GFAR, GFSYNR0, GFSYNR1). What comes while one is kept only
//! sets the bit MULTI. Order: everything is read, then the status is written back, which clears the bits
//! that were read. There are no interrupts: faults are drained by calls.

use iopt::walk::Access;

use super::capabilities::{CBFRSYNRA, FAR, FSR, FSYNR0, Features, GFAR, GFSR, GFSYNR0, GFSYNR1};
use crate::fault::{Details, Fault, FaultReason};
use crate::registers::Registers;
use crate::unit::{DeviceId, DomainId};

/// MULTI: there were more faults than the one that is kept.
const MULTI: u32 = 1 << 31;

/// FSR; ASF and UUT are of version 2.
const CONTEXT: [(u32, &str); 8] = [
    (1 << 1, "TF: not present"),
    (1 << 2, "AFF: the access flag is not set"),
    (1 << 3, "PF: not allowed"),
    (1 << 4, "EF: a table, or what it leads to, cannot be read"),
    (1 << 5, "TLBMCF: two cached translations match"),
    (1 << 6, "TLBLKF: a locked cached translation is in the way"),
    (1 << 7, "ASF: an address in a table is too large"),
    (1 << 8, "UUT: a kind of access that is not supported"),
];

/// GFSR.
const GLOBAL: [(u32, &str); 9] = [
    (1 << 1, "USF: the stream is not mapped"),
    (1 << 2, "SMCF: the stream matches twice"),
    (1 << 0, "ICF: the stream is mapped to a fault"),
    (
        1 << 3,
        "UCBF: the stream is mapped to a bank that is not there",
    ),
    (1 << 4, "UCIF: a bank has an interrupt that is not there"),
    (1 << 5, "CAF: a register access that is not allowed"),
    (1 << 6, "EF: what was asked for cannot be reached"),
    (1 << 7, "PF: not allowed"),
    (1 << 8, "UUT: a kind of access that is not supported"),
];

/// Where a fault is kept.
struct Place {
    status: usize,
    address: usize,
    syndrome: usize,
    stream: usize,
    /// The bit WNR of the syndrome.
    write: u32,
    causes: &'static [(u32, &'static str)],
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
        causes: &GLOBAL,
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
        causes: &CONTEXT,
        domain: Some(domain),
    };
    take(registers, &place, ignored)
}

fn take<R: Registers>(registers: &R, place: &Place, ignored: u16) -> (Option<Fault>, bool) {
    let status = registers.read32(place.status);
    let lost = status & MULTI != 0;
    let mut causes = place.causes.iter();
    let cause = causes.find(|(bit, _)| status & bit != 0);
    let fault = cause.map(|(_, meaning)| {
        let [low, high] = [0, 4].map(|half| registers.read32(place.address + half));
        let iova = u64::from(high) << 32 | u64::from(low);
        let write = registers.read32(place.syndrome) & place.write != 0;
        let stream = registers.read32(place.stream) as u16;
        Fault {
            device: DeviceId((stream & !ignored).into()),
            pasid: None,
            domain: place.domain,
            iova: iova & !0xfff,
            access: if write { Access::Write } else { Access::Read },
            reason: FaultReason::Reported {
                code: status as u16,
                meaning,
                details: Details::default(),
            },
        }
    });
    if fault.is_some() || lost {
        registers.write32(place.status, status);
    }
    (fault, lost)
}
