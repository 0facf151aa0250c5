//! The event log.
//!
//! AMD IOMMU specification, section 2.5 "Event Logging", and 3.4 for the registers. Entries from head
//! to tail belong to software. Order: read an entry, empty it, then move the head, which gives it back.
//! The unit may move the tail before the entry has arrived, which is why entries are emptied: one
//! without a code is waited for.
//!
//! When the log is full the unit sets EventOverflow and logs no more. Order of the restart: read what
//! there is; EventLogEn = 0; EventLogRun = 0 is awaited; both pointers 0; EventOverflow is cleared;
//! EventLogEn = 1.

use iopt::walk::Access;
use iopt::{Cell, TABLE_BYTES, TableMemory};

use super::capabilities::{
    EVENT_HEAD, EVENT_TAIL, EVENTS, LOG, LOGGING, OVERFLOW, PENDING, RING, RING_LENGTH, STATUS,
    control, offset, place,
};
use crate::error::UnitError;
use crate::fault::{Details, Fault, FaultReason};
use crate::registers::{Registers, wait_until};
use crate::unit::{DeviceId, DomainId, Pasid};

/// The log: one page.
#[derive(Debug)]
pub(super) struct Log {
    pub(super) entries: u64,
    /// That of the devices.
    pub(super) segment: u16,
}

/// What an entry of the log was.
pub(super) enum Taken {
    /// About a device.
    Fault(Fault),
    /// About a command, whose batch has failed for it.
    Command,
    /// It has not arrived.
    Lost,
}

impl Log {
    fn cells<'m, M: TableMemory>(&self, memory: &'m M) -> &'m [M::Cell] {
        memory.entries(self.entries, TABLE_BYTES as usize / 8)
    }

    /// Puts the log into the registers, empty. The unit does not log.
    pub(super) fn set_up<R: Registers, M: TableMemory>(&self, registers: &R, memory: &M) {
        let cells = self.cells(memory);
        cells.iter().for_each(|cell| cell.set(0));
        memory.written(cells);
        registers.write64(EVENTS, self.entries | RING_LENGTH);
        registers.write64(EVENT_HEAD, 0);
        registers.write64(EVENT_TAIL, 0);
        registers.write64(STATUS, PENDING);
    }

    /// The oldest entry; `None` when there is none.
    pub(super) fn take<R: Registers, M: TableMemory>(
        &self,
        registers: &R,
        memory: &M,
    ) -> Option<Taken> {
        let head = place(registers, EVENT_HEAD);
        if head == place(registers, EVENT_TAIL) {
            return None;
        }
        let entry = self.cells(memory).get(head * 2..head * 2 + 2)?;
        let [first, second] = entry else {
            return None;
        };
        let arrived = wait_until(registers, "an event", || Ok(code(first.get_acquire()) != 0));
        let taken = match arrived {
            Ok(()) => decode(first.get_acquire(), second.get(), self.segment),
            Err(_) => Taken::Lost,
        };
        entry.iter().for_each(|cell| cell.set(0));
        memory.written(entry);
        registers.write64(EVENT_HEAD, offset((head + 1) % RING));
        Some(taken)
    }

    /// True when faults were not logged since the last call. The log has been read.
    pub(super) fn take_overflow<R: Registers, M: TableMemory>(
        &self,
        registers: &R,
        memory: &M,
    ) -> bool {
        if registers.read64(STATUS) & OVERFLOW == 0 {
            return false;
        }
        control(registers, 0, LOG);
        let stopped = wait_until(registers, "Status.EventLogRun = 0", || {
            Ok(registers.read64(STATUS) & LOGGING == 0)
        });
        // A log that does not stop is not taken from under the unit: the next call tries again.
        if stopped.is_ok() {
            self.set_up(registers, memory);
        }
        control(registers, LOG, 0);
        true
    }

    /// The last event about a command that is in the log: its name, and the command's address.
    pub(super) fn command_error<R: Registers, M: TableMemory>(
        &self,
        (registers, memory): (&R, &M),
    ) -> Option<(&'static str, u64)> {
        let events = self.since((registers, memory), place(registers, EVENT_HEAD));
        let errors = events.filter_map(|[first, second]| match code(first.get_acquire()) {
            5 => Some(("ILLEGAL_COMMAND_ERROR", second.get())),
            6 => Some(("COMMAND_HARDWARE_ERROR", second.get())),
            _ => None,
        });
        errors.last()
    }

    /// An error when, since the tail stood at `since`, a device has not answered in time (event
    /// IOTLB_INV_TIMEOUT), or when the log cannot say.
    pub(super) fn time_out<R: Registers, M: TableMemory>(
        &self,
        (registers, memory): (&R, &M),
        since: usize,
    ) -> Result<(), UnitError> {
        for [first, _] in self.since((registers, memory), since) {
            wait_until(registers, "an event", || Ok(code(first.get_acquire()) != 0))?;
            if code(first.get()) == 7 {
                let device = device(first.get(), self.segment);
                return Err(UnitError::DeviceTimedOut { device });
            }
        }
        let record = registers.read64(STATUS);
        if record & (OVERFLOW | LOGGING) != LOGGING {
            return Err(UnitError::Command {
                error: "EventLogRun = 0 (no time-out of a device is logged)",
                command: [0; 2],
                record,
            });
        }
        Ok(())
    }

    /// The places of the events since the tail stood at `since`.
    fn since<'m, R: Registers, M: TableMemory>(
        &self,
        (registers, memory): (&R, &'m M),
        since: usize,
    ) -> impl Iterator<Item = &'m [M::Cell; 2]> + use<'m, R, M> {
        let count = (place(registers, EVENT_TAIL) + RING - since) % RING;
        let cells = self.cells(memory);
        (0..count).filter_map(move |n| cells.get((since + n) % RING * 2..)?.first_chunk())
    }
}

/// EventCode.
const fn code(first: u64) -> u64 {
    first >> 60
}

fn device(first: u64, segment: u16) -> DeviceId {
    DeviceId(u32::from(segment) << 16 | first as u32 & 0xffff)
}

fn decode(first: u64, address: u64, segment: u16) -> Taken {
    let code = code(first);
    if matches!(code, 5 | 6) {
        return Taken::Command;
    }
    let flag = |bit: u32| first >> bit & 1 == 1;
    // GN: there is a PASID in place of the domain, its upper bits behind the device.
    let (guest, number) = (flag(48), (first >> 32) as u32 & 0xffff);
    let pasid = Pasid(first as u32 & 0xf_0000 | number);
    Taken::Fault(Fault {
        device: device(first, segment),
        pasid: (code == 2 && guest).then_some(pasid),
        domain: (code == 2 && !guest).then_some(DomainId(number)),
        iova: address & !0xfff,
        // RW.
        access: if flag(53) {
            Access::Write
        } else {
            Access::Read
        },
        reason: FaultReason::Reported {
            code: (first >> 48) as u16,
            meaning: meaning(code, flag),
            details: Details::default(),
        },
    })
}

/// Section 2.5, from 2.5.2 on.
fn meaning(code: u64, flag: impl Fn(u32) -> bool) -> &'static str {
    match code {
        1 => "ILLEGAL_DEV_TABLE_ENTRY: the device's entry cannot be used",
        // I, RZ, PR, PE.
        2 if flag(51) => "IO_PAGE_FAULT: an interrupt that is not allowed",
        2 if flag(55) => "IO_PAGE_FAULT: reserved bits in a table",
        2 if !flag(52) => "IO_PAGE_FAULT: not present",
        2 if flag(54) => "IO_PAGE_FAULT: not allowed",
        2 => "IO_PAGE_FAULT: not translated",
        3 => "DEV_TAB_HARDWARE_ERROR: the device table cannot be read",
        4 => "PAGE_TAB_HARDWARE_ERROR: a table cannot be read",
        7 => "IOTLB_INV_TIMEOUT: the device has not invalidated its translations",
        8 => "INVALID_DEVICE_REQUEST: a kind of request that the device may not make",
        9 => "INVALID_PPR_REQUEST: a page request that the device may not make",
        _ => "an event without a name here",
    }
}
