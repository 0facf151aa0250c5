//! Fault records.
//!
//! VT-d specification, section 7.2 "Fault Reporting" (primary fault logging) and, in chapter 11, "Fault
//! Status Register" and "Fault Recording Registers". A record belongs to software while its bit F is
//! set. Order: read a record, then clear F, which gives it back; clear the overflow last, since as long
//! as it is set nothing is recorded.

use iopt::walk::Access;

use super::capabilities::{FAULT_PENDING, FAULTS_LOST, FSTS, Features};
use crate::fault::{Details, Fault, FaultReason};
use crate::registers::Registers;
use crate::unit::{DeviceId, Pasid};

/// The record that came first, and how many there can be; `None` when none is pending.
pub(super) fn pending<R: Registers>(registers: &R, features: Features) -> Option<(u32, u32)> {
    let status = registers.read32(FSTS);
    let (_, records) = features.fault_records();
    // FRI.
    (status & FAULT_PENDING != 0).then_some((status >> 8 & 0xff, records))
}

/// Takes a record, if it holds a fault.
pub(super) fn take<R: Registers>(
    registers: &R,
    features: Features,
    index: u32,
    segment: u16,
) -> Option<Fault> {
    let (first, records) = features.fault_records();
    let record = first + 16 * (index % records) as usize;
    let high = registers.read64(record + 8);
    if high >> 63 == 0 {
        return None;
    }
    // FI.
    let iova = registers.read64(record) & !0xfff;
    registers.write32(record + 12, 1 << 31);
    let code = (high >> 32) as u16 & 0xff;
    Some(Fault {
        device: DeviceId(u32::from(segment) << 16 | high as u32 & 0xffff),
        // PP, PV.
        pasid: (high >> 31 & 1 == 1).then_some(Pasid((high >> 40) as u32 & 0xf_ffff)),
        domain: None,
        iova,
        // T1: 0 for writes and page requests, 1 for reads and atomic operations.
        access: if high >> 62 & 1 == 1 {
            Access::Read
        } else {
            Access::Write
        },
        reason: FaultReason::Reported {
            code,
            meaning: meaning(code),
            details: Details::default(),
        },
    })
}

/// True when faults were not recorded since the last call.
pub(super) fn take_overflow<R: Registers>(registers: &R) -> bool {
    let lost = registers.read32(FSTS) & FAULTS_LOST != 0;
    if lost {
        registers.write32(FSTS, FAULTS_LOST);
    }
    lost
}

/// Section 7.1.3, the tables of fault conditions: legacy mode below 0x30, scalable mode from there.
const fn meaning(code: u16) -> &'static str {
    match code {
        0x1 | 0x39 => "no root entry for the bus",
        0x2 | 0x41 => "no context entry for the device",
        0x3 | 0x43 => "the context entry is invalid",
        0x4 => "the address is beyond the table",
        0x5 => "writing is not allowed",
        0x6 => "reading is not allowed",
        0x7 | 0x70 | 0x78 => "a table cannot be read",
        0x8 | 0x38 => "the root table cannot be read",
        0x9 | 0x40 => "the context table cannot be read",
        0xa | 0x3a => "reserved bits in the root entry",
        0xb | 0x42 => "reserved bits in the context entry",
        0xc | 0x72 | 0x7a => "reserved bits in a table",
        0xd => "the context entry blocks this kind of request",
        0xe | 0x87 => "the table leads to the interrupt range",
        0x30..=0x32 => "the root table's mode does not allow the request",
        0x44 => "the context entry does not serve TLBs in devices",
        0x45 => "the context entry does not allow PASIDs",
        0x46 => "the PASID is beyond the directory",
        0x47 => "the context entry does not allow page requests",
        0x48 => "the context entry's PASID for requests without one is invalid",
        0x50 => "the PASID directory cannot be read",
        0x51 => "no PASID directory entry",
        0x52 => "reserved bits in the PASID directory entry",
        0x58 => "the PASID table cannot be read",
        0x59 => "no PASID entry",
        0x5a => "reserved bits in the PASID entry",
        0x5b => "the PASID entry is invalid",
        0x5c | 0x82 => "executing is not allowed",
        0x5d => "requests with privilege are not allowed",
        0x71 => "not present",
        0x73 => "the first-stage root cannot be read",
        // Second-stage entries have no bit that says present.
        0x79 => "not present, or not allowed (second stage)",
        0x7b => "the second-stage root is invalid",
        0x80 => "the address is not canonical",
        0x81 => "the page is not one of user mode",
        0x85 => "writing is not allowed (first stage, or both)",
        0x86 => "reading is not allowed (first stage, or both)",
        0x7c | 0x90 | 0x91 => "accessed and dirty bits cannot be set",
        _ => "a reason without a name here",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_device_meets_where_nothing_is_mapped_has_a_name_in_every_mode() {
        // Legacy mode; scalable mode, first and second stage.
        for code in [0x5, 0x6, 0x71, 0x79, 0x85, 0x86] {
            let name = meaning(code);
            assert!(
                name.contains("not allowed") || name.contains("not present"),
                "{code:#x}: {name}"
            );
        }
        for code in (0x1..=0xe).chain(0x40..=0x48).chain(0x58..=0x5d) {
            assert_ne!(meaning(code), meaning(0xff), "{code:#x}");
        }
    }
}
