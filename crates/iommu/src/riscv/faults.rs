//! The fault queue.
//!
//! RISC-V IOMMU specification, section "Fault/Event-Queue (FQ)", and "Fault queue CSR" for the register.
//! Records from head to tail belong to software; a record is in memory before the tail moves. Order: read
//! a record, then move the head, which gives it back.
//!
//! All that is defined of a record is handed on: CAUSE, DID, PID with PV and PRIV, TTYP, iotval, and iotval2
//! where the cause is a guest-page fault. A unit may leave the offsets in pages out of both addresses.
//!
//! When the queue is full (fqof), or cannot be written (fqmf), the unit records no more until the bit is
//! cleared, after there is room.

use iopt::walk::Access;
use iopt::{Cell, TABLE_BYTES, TableMemory};

use super::capabilities::{ENABLE, FQB, FQCSR, FQH, FQT, LOST, set_base, switch};
use crate::codes::{Class, Code, find};
use crate::error::UnitError;
use crate::fault::{Details, Fault, FaultReason, RequestKind, SecondStage};
use crate::registers::Registers;
use crate::unit::{DeviceId, Pasid};

/// Records of the queue: one page.
pub(super) const RECORDS: usize = 128;
/// Words of a record.
const WORDS: usize = 4;

const QUEUE: (usize, &str, u32) = (FQCSR, "fqcsr.fqon = fqen, busy = 0", LOST);

/// Has the unit record nothing, wherever it did.
pub(super) fn stop<R: Registers>(registers: &R) -> Result<(), UnitError> {
    switch(registers, QUEUE, false)
}

/// Has the unit record in the page at `queue`, empty. It records nothing.
pub(super) fn start<R: Registers>(registers: &R, queue: u64) -> Result<(), UnitError> {
    set_base(registers, (FQB, "fqb"), queue, RECORDS.ilog2())?;
    registers.write32(FQH, 0);
    switch(registers, QUEUE, true)
}

/// The oldest record; `None` when there is none.
pub(super) fn take<R: Registers, M: TableMemory>(
    registers: &R,
    memory: &M,
    queue: u64,
) -> Option<Fault> {
    let place = |register| registers.read32(register) as usize % RECORDS;
    let head = place(FQH);
    if head == place(FQT) {
        return None;
    }
    let cells = memory.entries(queue, TABLE_BYTES as usize / 8);
    let record = cells.get(head * WORDS..(head + 1) * WORDS)?;
    let [header, _, iova, second] = record else {
        return None;
    };
    let fault = decode(header.get_acquire(), iova.get(), second.get());
    registers.write32(FQH, ((head + 1) % RECORDS) as u32);
    Some(fault)
}

/// True when faults were not recorded since the last call. The queue has been read.
pub(super) fn take_overflow<R: Registers>(registers: &R) -> bool {
    let lost = registers.read32(FQCSR) & LOST;
    if lost != 0 {
        registers.write32(FQCSR, ENABLE | lost);
    }
    lost != 0
}

fn decode(header: u64, iova: u64, second: u64) -> Fault {
    let cause = (header & 0xfff) as u16;
    // PV, PID.
    let pasid = (header >> 32 & 1 == 1).then_some(Pasid(header as u32 >> 12));
    let kind = header >> 34 & 0x3f;
    // TTYP: untranslated and translated; where it does not say, as for translations, the cause may.
    let access = match (kind, cause) {
        // No request, and a message.
        (0 | 9, _) => None,
        (3 | 7, _) => Some(Access::Write),
        (1 | 2 | 5 | 6, _) => Some(Access::Read),
        (_, 6 | 7 | 15 | 23) => Some(Access::Write),
        (_, 1 | 4 | 5 | 12 | 13 | 20 | 21) => Some(Access::Read),
        _ => None,
    };
    // Table "Fault record TTYP field encodings".
    let request = match kind {
        0 => Some(RequestKind::None),
        1..=3 => Some(RequestKind::Untranslated { execute: kind == 1 }),
        5..=7 => Some(RequestKind::Translated { execute: kind == 5 }),
        8 => Some(RequestKind::Translation),
        9 => Some(RequestKind::Message),
        _ => None,
    };
    // Guest-page faults; in bit 0, whether it was an implicit access for the first stage; in bit 1, a write.
    let second_stage = matches!(cause, 20 | 21 | 23).then_some(SecondStage {
        address: second & !3,
        table: match second & 3 {
            1 => Some(Access::Read),
            3 => Some(Access::Write),
            _ => None,
        },
    });
    Fault {
        device: DeviceId((header >> 40) as u32),
        pasid,
        domain: None,
        iova,
        access,
        reason: FaultReason::Reported {
            code: cause,
            meaning: meaning(cause),
            details: Details {
                request,
                // PRIV, 0 without a PASID.
                privileged: Some(header >> 33 & 1 == 1),
                second_stage,
            },
        },
    }
}

/// Table "Fault record CAUSE field encodings".
pub(crate) const CAUSES: &[Code] = {
    use Class::{BadTable, DeviceEntry, InterruptRequest, NoAccess, UnitError, Unknown};
    &[
        Code::new(1, Unknown, "instruction access fault"),
        Code::new(4, Unknown, "read address misaligned"),
        Code::new(5, Unknown, "read access fault"),
        Code::new(6, Unknown, "write/AMO address misaligned"),
        Code::new(7, Unknown, "write/AMO access fault"),
        Code::new(12, NoAccess, "instruction page fault"),
        Code::new(13, NoAccess, "read page fault"),
        Code::new(15, NoAccess, "write/AMO page fault"),
        Code::new(20, NoAccess, "instruction guest-page fault"),
        Code::new(21, NoAccess, "read guest-page fault"),
        Code::new(23, NoAccess, "write/AMO guest-page fault"),
        Code::likely(256, DeviceEntry, "all inbound transactions disallowed"),
        Code::new(257, DeviceEntry, "DDT entry load access fault"),
        Code::new(258, DeviceEntry, "DDT entry not valid"),
        Code::new(259, DeviceEntry, "DDT entry misconfigured"),
        Code::new(260, Unknown, "transaction type disallowed"),
        Code::likely(261, InterruptRequest, "MSI PTE load access fault"),
        Code::likely(262, InterruptRequest, "MSI PTE not valid"),
        Code::likely(263, InterruptRequest, "MSI PTE misconfigured"),
        Code::likely(264, InterruptRequest, "MRIF access fault"),
        Code::new(265, DeviceEntry, "PDT entry load access fault"),
        Code::new(266, DeviceEntry, "PDT entry not valid"),
        Code::new(267, DeviceEntry, "PDT entry misconfigured"),
        Code::likely(268, DeviceEntry, "DDT data corruption"),
        Code::likely(269, DeviceEntry, "PDT data corruption"),
        Code::likely(270, InterruptRequest, "MSI PT data corruption"),
        Code::likely(271, InterruptRequest, "MSI MRIF data corruption"),
        Code::likely(272, UnitError, "internal data path error"),
        Code::likely(273, UnitError, "IOMMU MSI write access fault"),
        Code::likely(274, BadTable, "first/second-stage PT data corruption"),
    ]
};

fn meaning(cause: u16) -> &'static str {
    find(CAUSES, cause.into()).map_or("a cause without a name here", |cause| cause.text)
}
