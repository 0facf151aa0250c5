//! The event log.
//!
//! AMD IOMMU specification, section 2.5 "Event Logging", and 3.4 for the registers. Entries from head
//! to tail belong to software. Order: read an entry, empty it, then move the head, which gives it back.
//! The unit may move the tail before the entry has arrived, which is why entries are emptied: one
//! without a code is waited for.
//!
//! The driver keeps the head itself, and only writes the register: a unit that takes it over while the log is off
//! alone has less room, and nothing is read twice.
//!
//! When the log is full the unit sets EventOverflow and logs no more (MMIO Offset 2020h, EventOverflow). Order of the
//! restart: read what there is; EventLogEn = 0; EventLogRun = 0 is awaited; base address and both pointers 0;
//! EventOverflow is cleared; EventLogEn = 1.

use iopt::walk::Access;
use iopt::{Cell, TABLE_BYTES, TableMemory};

use super::capabilities::{
    EVENT_HEAD, EVENT_TAIL, EVENTS, LOG, LOGGING, OVERFLOW, PENDING, RING, RING_LENGTH, STATUS,
    control, offset, place,
};
use crate::codes::{Class, Code, find};
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
    /// The place of the oldest entry that was not taken, less than [`RING`].
    pub(super) head: usize,
}

/// Decoded entry of the event log.
pub(super) enum LogEntry {
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
    pub(super) fn set_up<R: Registers, M: TableMemory>(&mut self, registers: &R, memory: &M) {
        let cells = self.cells(memory);
        cells.iter().for_each(|cell| cell.set(0));
        memory.written(cells);
        registers.write64(EVENTS, self.entries | RING_LENGTH);
        self.head = 0;
        registers.write64(EVENT_HEAD, 0);
        registers.write64(EVENT_TAIL, 0);
        registers.write64(STATUS, PENDING);
    }

    /// The oldest entry; `None` when there is none.
    pub(super) fn take<R: Registers, M: TableMemory>(
        &mut self,
        registers: &R,
        memory: &M,
    ) -> Option<LogEntry> {
        let head = self.head;
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
            Err(_) => LogEntry::Lost,
        };
        entry.iter().for_each(|cell| cell.set(0));
        memory.written(entry);
        self.head = (head + 1) % RING;
        registers.write64(EVENT_HEAD, offset(self.head));
        Some(taken)
    }

    /// True when faults were not logged since the last call. The log has been read.
    pub(super) fn take_overflow<R: Registers, M: TableMemory>(
        &mut self,
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
        let events = self.since((registers, memory), self.head);
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

fn decode(first: u64, address: u64, segment: u16) -> LogEntry {
    let code = code(first);
    if matches!(code, 5 | 6) {
        return LogEntry::Command;
    }
    let flag = |bit: u32| first >> bit & 1 == 1;
    // GN: there is a PASID in place of the domain, its upper bits behind the device.
    let (guest, number) = (flag(48), (first >> 32) as u32 & 0xffff);
    let pasid = Pasid(first as u32 & 0xf_0000 | number);
    LogEntry::Fault(Fault {
        device: device(first, segment),
        pasid: (code == 2 && guest).then_some(pasid),
        domain: (code == 2 && !guest).then_some(DomainId(number)),
        iova: address & !0xfff,
        access: access(code, (first >> 48) as u32),
        reason: FaultReason::Reported {
            code: (first >> 48) as u16,
            meaning: event(code as u32, (first >> 48) as u32 & 0xfff)
                .map_or("an event without a name here", |event| event.text),
            details: Details::default(),
        },
    })
}

/// Access that was asked for: RW of IO_PAGE_FAULT and RMP_PAGE_FAULT, which means something with PR = 1, I = 0 and TR = 0 only (of an
/// access that met an entry; not of an interrupt, nor of a translation request).
fn access(code: u64, flags: u32) -> Option<Access> {
    let flag = |bit: u32| flags >> bit & 1 == 1;
    let meant = matches!(code, 0x2 | 0xd) && flag(4) && !flag(3) && !flag(8);
    meant.then(|| match flag(5) {
        true => Access::Write,
        false => Access::Read,
    })
}

/// Section 2.5, from 2.5.2 on, by the event's code.
pub(crate) const EVENT_CODES: &[Code] = {
    use Class::{AtsRefused, BadTable, DeviceEntry, Rmp, UnitError, Unknown};
    &[
        Code::new(
            0x1,
            DeviceEntry,
            "ILLEGAL_DEV_TABLE_ENTRY: the device's entry cannot be used",
        ),
        Code::new(0x2, Unknown, "IO_PAGE_FAULT: not translated"),
        Code::new(
            0x3,
            UnitError,
            "DEV_TAB_HARDWARE_ERROR: the device table cannot be read",
        ),
        Code::new(
            0x4,
            BadTable,
            "PAGE_TAB_HARDWARE_ERROR: a table cannot be read",
        ),
        Code::likely(
            0x5,
            UnitError,
            "ILLEGAL_COMMAND_ERROR: a command that the unit does not know",
        ),
        Code::new(
            0x6,
            UnitError,
            "COMMAND_HARDWARE_ERROR: a command cannot be read",
        ),
        Code::new(
            0x7,
            UnitError,
            "IOTLB_INV_TIMEOUT: the device has not invalidated its translations",
        ),
        Code::new(
            0x8,
            Unknown,
            "INVALID_DEVICE_REQUEST: a kind of request that the device may not make",
        ),
        Code::likely(
            0x9,
            AtsRefused,
            "INVALID_PPR_REQUEST: a page request that the device may not make",
        ),
        Code::new(
            0xa,
            Unknown,
            "EVENT_COUNTER_ZERO: a counter has reached its limit",
        ),
        Code::new(
            0xb,
            Unknown,
            "GUEST_EVENT_FAULT: an event of a guest cannot be logged",
        ),
        Code::new(
            0xd,
            Rmp,
            "RMP_PAGE_FAULT: the reverse map table refuses the page",
        ),
        Code::new(
            0xe,
            UnitError,
            "RMP_HW_ERROR: the reverse map table cannot be read",
        ),
    ]
};

/// IO_PAGE_FAULT by its flags: I, PR, RZ, PE; then the rest.
const PAGE_FAULTS: [Code; 5] = [
    Code::new(
        0x2,
        Class::InterruptRequest,
        "IO_PAGE_FAULT: an interrupt that is not allowed",
    ),
    Code::new(0x2, Class::NotMapped, "IO_PAGE_FAULT: not present"),
    Code::new(
        0x2,
        Class::BadTable,
        "IO_PAGE_FAULT: reserved bits in a table",
    ),
    Code::new(0x2, Class::Permission, "IO_PAGE_FAULT: not allowed"),
    Code::new(0x2, Class::Unknown, "IO_PAGE_FAULT: not translated"),
];

/// Section 2.5.9, INVALID_DEVICE_REQUEST by its type.
const REQUESTS: [Code; 8] = {
    use Class::{AtsRefused, InterruptRequest, Unknown};
    [
        Code::likely(
            0x8,
            InterruptRequest,
            "INVALID_DEVICE_REQUEST: a read of the interrupt range",
        ),
        Code::likely(
            0x8,
            AtsRefused,
            "INVALID_DEVICE_REQUEST: a translated request that the device may not make",
        ),
        Code::new(
            0x8,
            Unknown,
            "INVALID_DEVICE_REQUEST: port I/O that the device may not make",
        ),
        Code::new(
            0x8,
            Unknown,
            "INVALID_DEVICE_REQUEST: a system management message that the device may not send",
        ),
        Code::new(
            0x8,
            Unknown,
            "INVALID_DEVICE_REQUEST: a read of the system management range",
        ),
        Code::new(
            0x8,
            InterruptRequest,
            "INVALID_DEVICE_REQUEST: an interrupt that the device may not send",
        ),
        Code::likely(
            0x8,
            InterruptRequest,
            "INVALID_DEVICE_REQUEST: a write to a reserved interrupt address",
        ),
        Code::new(
            0x8,
            Unknown,
            "INVALID_DEVICE_REQUEST: a system management address that is to be translated",
        ),
    ]
};

/// The event with this code and these flags (bits 59:48 of an entry).
pub(crate) fn event(code: u32, flags: u32) -> Option<&'static Code> {
    let flag = |bit: u32| flags >> bit & 1 == 1;
    match code {
        0x2 => {
            let place = match () {
                () if flag(3) => 0,
                // RZ and PE mean something with PR only.
                () if !flag(4) => 1,
                () if flag(7) => 2,
                () if flag(6) => 3,
                () => 4,
            };
            PAGE_FAULTS.get(place)
        }
        0x8 => REQUESTS.get(flags as usize >> 9 & 7),
        _ => find(EVENT_CODES, code),
    }
}
