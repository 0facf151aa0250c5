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
    // TTYP: untranslated and translated writes; where it does not say, the cause may.
    let write = match kind {
        3 | 7 => true,
        1 | 2 | 5 | 6 => false,
        _ => matches!(cause, 6 | 7 | 15 | 23),
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
        access: if write { Access::Write } else { Access::Read },
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
const fn meaning(cause: u16) -> &'static str {
    match cause {
        1 => "instruction access fault",
        4 => "read address misaligned",
        5 => "read access fault",
        6 => "write/AMO address misaligned",
        7 => "write/AMO access fault",
        12 => "instruction page fault",
        13 => "read page fault",
        15 => "write/AMO page fault",
        20 => "instruction guest-page fault",
        21 => "read guest-page fault",
        23 => "write/AMO guest-page fault",
        256 => "all inbound transactions disallowed",
        257 => "DDT entry load access fault",
        258 => "DDT entry not valid",
        259 => "DDT entry misconfigured",
        260 => "transaction type disallowed",
        261 => "MSI PTE load access fault",
        262 => "MSI PTE not valid",
        263 => "MSI PTE misconfigured",
        264 => "MRIF access fault",
        265 => "PDT entry load access fault",
        266 => "PDT entry not valid",
        267 => "PDT entry misconfigured",
        268 => "DDT data corruption",
        269 => "PDT data corruption",
        270 => "MSI PT data corruption",
        271 => "MSI MRIF data corruption",
        272 => "internal data path error",
        273 => "IOMMU MSI write access fault",
        274 => "first/second-stage PT data corruption",
        _ => "a cause without a name here",
    }
}
