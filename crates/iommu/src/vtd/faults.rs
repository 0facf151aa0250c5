//! Fault records.
//!
//! VT-d specification, section 7.2 "Fault Reporting" (primary fault logging) and, in chapter 11, "Fault
//! Status Register" and "Fault Recording Registers". A record belongs to software while its bit F is
//! set. Order: read a record, then clear F, which gives it back; clear the overflow last, since as long
//! as it is set nothing is recorded.

use iopt::walk::Access;

use super::capabilities::{FAULT_PENDING, FAULTS_LOST, FSTS, Features};
use crate::codes::{Class, Code, find};
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
        access: access(high, code),
        reason: FaultReason::Reported {
            code,
            meaning: meaning(code),
            details: Details::default(),
        },
    })
}

/// Access that was asked for, by T1 and T2: they say it of faults of address translation, and of those that are no page request.
fn access(high: u64, code: u16) -> Option<Access> {
    // Interrupt requests.
    if matches!(code, 0x20..=0x2f) {
        return None;
    }
    match (high >> 62 & 1, high >> 28 & 1) {
        (0, 0) => Some(Access::Write),
        (1, 0) => Some(Access::Read),
        // An atomic operation.
        (1, _) => Some(Access::Write),
        // A page request.
        _ => None,
    }
}

/// True when faults were not recorded since the last call.
pub(super) fn take_overflow<R: Registers>(registers: &R) -> bool {
    let lost = registers.read32(FSTS) & FAULTS_LOST != 0;
    if lost {
        registers.write32(FSTS, FAULTS_LOST);
    }
    lost
}

/// Section 7.1.3, the tables of fault conditions: legacy mode below 0x20, interrupts from there, scalable mode from
/// 0x30.
pub(crate) const FAULT_REASONS: &[Code] = {
    use Class::{
        AddressWidth, AtsRefused, BadTable, DeviceEntry, InterruptRequest, NoAccess, NotMapped,
        Permission, Unknown,
    };
    &[
        Code::new(0x01, DeviceEntry, "no root entry for the bus"),
        Code::new(0x02, DeviceEntry, "no context entry for the device"),
        Code::new(0x03, DeviceEntry, "the context entry is invalid"),
        Code::new(0x04, AddressWidth, "the address is beyond the table"),
        // Second-stage entries have no bit that says present.
        Code::new(0x05, NoAccess, "writing is not allowed"),
        Code::new(0x06, NoAccess, "reading is not allowed"),
        Code::new(0x07, BadTable, "a table cannot be read"),
        Code::new(0x08, DeviceEntry, "the root table cannot be read"),
        Code::new(0x09, DeviceEntry, "the context table cannot be read"),
        Code::new(0x0a, DeviceEntry, "reserved bits in the root entry"),
        Code::new(0x0b, DeviceEntry, "reserved bits in the context entry"),
        Code::new(0x0c, BadTable, "reserved bits in a table"),
        Code::new(
            0x0d,
            AtsRefused,
            "the context entry blocks this kind of request",
        ),
        Code::likely(0x0e, BadTable, "the table leads to the interrupt range"),
        Code::new(
            0x20,
            InterruptRequest,
            "reserved fields in the interrupt request",
        ),
        Code::new(
            0x21,
            InterruptRequest,
            "the interrupt index is beyond the table",
        ),
        Code::new(0x22, InterruptRequest, "the interrupt entry is not present"),
        Code::new(0x23, InterruptRequest, "the interrupt table cannot be read"),
        Code::new(
            0x24,
            InterruptRequest,
            "reserved bits in the interrupt entry",
        ),
        Code::new(
            0x25,
            InterruptRequest,
            "interrupts of the compatibility format are blocked",
        ),
        Code::new(
            0x26,
            InterruptRequest,
            "the interrupt entry is not one of the device (source id)",
        ),
        Code::likely(
            0x27,
            InterruptRequest,
            "the posted-interrupt descriptor cannot be read",
        ),
        Code::likely(
            0x28,
            InterruptRequest,
            "reserved bits in the posted-interrupt descriptor",
        ),
        Code::likely(
            0x30,
            DeviceEntry,
            "the root table's mode does not allow the request",
        ),
        Code::likely(
            0x31,
            DeviceEntry,
            "the root table's mode does not allow the request (with PASID)",
        ),
        Code::likely(
            0x32,
            AtsRefused,
            "the root table's mode does not allow the request (for pages)",
        ),
        Code::new(0x38, DeviceEntry, "the root table cannot be read"),
        Code::new(0x39, DeviceEntry, "no root entry for the bus"),
        Code::new(0x3a, DeviceEntry, "reserved bits in the root entry"),
        Code::new(0x40, DeviceEntry, "the context table cannot be read"),
        Code::new(0x41, DeviceEntry, "no context entry for the device"),
        Code::new(0x42, DeviceEntry, "reserved bits in the context entry"),
        Code::new(0x43, DeviceEntry, "the context entry is invalid"),
        Code::likely(
            0x44,
            AtsRefused,
            "the context entry does not serve TLBs in devices",
        ),
        Code::likely(0x45, DeviceEntry, "the context entry does not allow PASIDs"),
        Code::likely(0x46, DeviceEntry, "the PASID is beyond the directory"),
        Code::likely(
            0x47,
            AtsRefused,
            "the context entry does not allow page requests",
        ),
        Code::likely(
            0x48,
            DeviceEntry,
            "the context entry's PASID for requests without one is invalid",
        ),
        Code::new(0x50, DeviceEntry, "the PASID directory cannot be read"),
        Code::new(0x51, DeviceEntry, "no PASID directory entry"),
        Code::new(
            0x52,
            DeviceEntry,
            "reserved bits in the PASID directory entry",
        ),
        Code::new(0x58, DeviceEntry, "the PASID table cannot be read"),
        Code::new(0x59, DeviceEntry, "no PASID entry"),
        Code::new(0x5a, DeviceEntry, "reserved bits in the PASID entry"),
        Code::new(0x5b, DeviceEntry, "the PASID entry is invalid"),
        Code::likely(0x5c, Permission, "executing is not allowed (PASID entry)"),
        Code::likely(0x5d, Permission, "requests with privilege are not allowed"),
        Code::new(0x70, BadTable, "a table cannot be read (first stage)"),
        Code::new(0x71, NotMapped, "not present"),
        Code::new(0x72, BadTable, "reserved bits in a table (first stage)"),
        Code::likely(0x73, BadTable, "the first-stage root cannot be read"),
        Code::likely(
            0x74,
            BadTable,
            "a first-stage table lies beyond the second stage's addresses",
        ),
        Code::likely(
            0x75,
            BadTable,
            "the second stage does not allow reading the first-stage root",
        ),
        Code::likely(
            0x76,
            BadTable,
            "the second stage does not allow reading a first-stage table",
        ),
        Code::likely(
            0x77,
            BadTable,
            "the second stage does not allow writing a first-stage table",
        ),
        Code::new(0x78, BadTable, "a table cannot be read (second stage)"),
        Code::new(0x79, NoAccess, "not present, or not allowed (second stage)"),
        Code::new(0x7a, BadTable, "reserved bits in a table (second stage)"),
        Code::likely(0x7b, BadTable, "the second-stage root is invalid"),
        Code::new(
            0x7c,
            Unknown,
            "accessed and dirty bits cannot be set (second stage)",
        ),
        Code::new(0x80, AddressWidth, "the address is not canonical"),
        Code::likely(0x81, Permission, "the page is not one of user mode"),
        Code::new(0x82, Permission, "executing is not allowed"),
        Code::likely(0x83, AddressWidth, "the address is beyond the unit's width"),
        Code::likely(
            0x84,
            AddressWidth,
            "the address is beyond the second stage's table",
        ),
        Code::new(
            0x85,
            Permission,
            "writing is not allowed (first stage, or both)",
        ),
        Code::new(
            0x86,
            Permission,
            "reading is not allowed (first stage, or both)",
        ),
        Code::likely(0x87, BadTable, "the table leads to the interrupt range"),
        Code::new(
            0x90,
            Unknown,
            "accessed and dirty bits cannot be set (first stage)",
        ),
        Code::new(
            0x91,
            Unknown,
            "accessed and dirty bits cannot be set (first stage)",
        ),
    ]
};

fn meaning(code: u16) -> &'static str {
    find(FAULT_REASONS, code.into()).map_or("a reason without a name here", |code| code.text)
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
