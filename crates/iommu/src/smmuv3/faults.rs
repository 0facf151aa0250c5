//! The event queue.
//!
//! IHI 0070, sections 3.5 "Command and Event queues", 7.2 to 7.4. Records from SMMU_EVENTQ_CONS to
//! SMMU_EVENTQ_PROD are complete and belong to software (3.5.2). Order: read a record, then move
//! SMMU_EVENTQ_CONS, which gives it back. A full queue loses events and says so by OVFLG, which is
//! acknowledged by an equal OVACKFLG; it goes on as soon as there is room. An external abort
//! (SMMU_GERROR.EVENTQ_ABT_ERR) stops it until that is acknowledged.

use iopt::walk::Access;
use iopt::{Cell, TableMemory};

use super::capabilities::{
    ADDRESS, ALLOCATE, EVENTQ_BASE, EVENTQ_CONS, EVENTQ_PROD, EVENTS_ABORTED, acknowledge, errors,
};
use crate::codes::{Class, Code, find};
use crate::fault::{Details, Fault, FaultReason};
use crate::registers::Registers;
use crate::unit::{DeviceId, Pasid};

/// OVFLG and OVACKFLG.
const OVERFLOW: u32 = 1 << 31;

/// The event queue: at most a page.
#[derive(Debug)]
pub(super) struct Events {
    pub(super) entries: u64,
    /// Places, as a power of two.
    pub(super) log2: u32,
}

impl Events {
    /// SMMU_EVENTQ_BASE.
    pub(super) const fn base(&self) -> u64 {
        self.entries & ADDRESS | self.log2 as u64
    }

    /// Puts the queue into the registers, empty. The unit does not write to it.
    pub(super) fn set_up<R: Registers>(&self, registers: &R) {
        registers.write64(EVENTQ_BASE, self.base() | ALLOCATE);
        registers.write32(EVENTQ_PROD, 0);
        registers.write32(EVENTQ_CONS, 0);
    }

    pub(super) const fn places(&self) -> u32 {
        1 << self.log2
    }

    /// An index, with the bit beyond.
    const fn index(&self, value: u32) -> u32 {
        value & (2 * self.places() - 1)
    }

    /// Takes the oldest record; `None` when there is none.
    pub(super) fn take<R: Registers, M: TableMemory>(
        &self,
        registers: &R,
        memory: &M,
    ) -> Option<Fault> {
        let produced = self.index(registers.read32(EVENTQ_PROD));
        let consumed = registers.read32(EVENTQ_CONS);
        let at = self.index(consumed);
        if at == produced {
            return None;
        }
        let place = u64::from(at & (self.places() - 1));
        let cells = memory.entries(self.entries + place * 32, 4);
        let word = |n: usize| cells.get(n).map_or(0, Cell::get_acquire);
        let fault = decode([word(0), word(1), word(2)]);
        registers.write32(EVENTQ_CONS, self.index(at + 1) | consumed & OVERFLOW);
        Some(fault)
    }

    /// True when faults were not recorded since the last call.
    pub(super) fn take_overflow<R: Registers>(&self, registers: &R) -> bool {
        let aborted = errors(registers) & EVENTS_ABORTED;
        if aborted != 0 {
            acknowledge(registers, aborted);
        }
        let consumed = registers.read32(EVENTQ_CONS);
        let overflow = (registers.read32(EVENTQ_PROD) ^ consumed) & OVERFLOW;
        if overflow != 0 {
            let at = self.index(consumed);
            registers.write32(EVENTQ_CONS, at | (consumed ^ overflow) & OVERFLOW);
        }
        aborted | overflow != 0
    }
}

/// A record; its fourth word says more about the walk than a fault can.
fn decode([first, second, address]: [u64; 3]) -> Fault {
    let code = first as u16 & 0xff;
    // SSV; in C_BAD_SUBSTREAMID the number is always valid.
    let pasid =
        (first >> 11 & 1 == 1 || code == 0x08).then_some(Pasid((first >> 12) as u32 & 0xf_ffff));
    // Events that are not about configuration have the request's address; F_BAD_ATS_TREQ encodes the requested access
    // in another way.
    let addressed = matches!(code, 0x01 | 0x05 | 0x07 | 0x0b | 0x10..=0x13 | 0x20);
    let directed = addressed && code != 0x05;
    Fault {
        device: DeviceId((first >> 32) as u32),
        pasid,
        domain: None,
        iova: if addressed { address & !0xfff } else { 0 },
        // RnW.
        access: directed.then_some(match second >> 35 & 1 {
            0 => Access::Write,
            _ => Access::Read,
        }),
        reason: FaultReason::Reported {
            code,
            meaning: meaning(code),
            details: Details::default(),
        },
    }
}

/// Section 7.3, by the number of the event.
pub(crate) const EVENT_CODES: &[Code] = {
    use Class::{AtsRefused, BadTable, DeviceEntry, NotMapped, Permission, Unknown};
    &[
        Code::new(
            0x01,
            Unknown,
            "F_UUT: a kind of request that is not supported",
        ),
        Code::new(
            0x02,
            DeviceEntry,
            "C_BAD_STREAMID: the stream table has no entry for the device",
        ),
        Code::new(
            0x03,
            DeviceEntry,
            "F_STE_FETCH: the device's stream table entry cannot be read",
        ),
        Code::new(
            0x04,
            DeviceEntry,
            "C_BAD_STE: the device's stream table entry is invalid",
        ),
        Code::new(
            0x05,
            AtsRefused,
            "F_BAD_ATS_TREQ: a translation request that the device may not make",
        ),
        Code::likely(
            0x06,
            DeviceEntry,
            "F_STREAM_DISABLED: PASID 0 is for requests without one",
        ),
        Code::new(
            0x07,
            AtsRefused,
            "F_TRANSL_FORBIDDEN: a translated request that the device may not make",
        ),
        Code::new(
            0x08,
            DeviceEntry,
            "C_BAD_SUBSTREAMID: the device has no such PASID",
        ),
        Code::new(
            0x09,
            DeviceEntry,
            "F_CD_FETCH: the context descriptor cannot be read",
        ),
        Code::new(
            0x0a,
            DeviceEntry,
            "C_BAD_CD: the context descriptor is invalid",
        ),
        Code::new(0x0b, BadTable, "F_WALK_EABT: a table cannot be read"),
        Code::new(0x10, NotMapped, "F_TRANSLATION: not present"),
        Code::new(
            0x11,
            BadTable,
            "F_ADDR_SIZE: the table leads beyond the output addresses",
        ),
        Code::likely(0x12, Permission, "F_ACCESS: the access flag is not set"),
        Code::new(0x13, Permission, "F_PERMISSION: not allowed"),
        Code::new(0x20, Unknown, "F_TLB_CONFLICT: two translations are cached"),
        Code::new(
            0x21,
            Unknown,
            "F_CFG_CONFLICT: two configurations are cached",
        ),
        Code::new(
            0x24,
            Unknown,
            "E_PAGE_REQUEST: a hint that a page is wanted",
        ),
        Code::likely(
            0x25,
            DeviceEntry,
            "F_VMS_FETCH: the virtual machine structure cannot be read",
        ),
    ]
};

fn meaning(code: u16) -> &'static str {
    find(EVENT_CODES, code.into()).map_or("an event without a name here", |event| event.text)
}
