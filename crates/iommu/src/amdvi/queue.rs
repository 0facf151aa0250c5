//! The command buffer.
//!
//! AMD IOMMU specification, section 2.4 "Commands", and 3.4 for the registers; `ring.rs` of the crate has the
//! protocol. A wait is a COMPLETION_WAIT: the unit stores its ticket when all commands before are complete
//! (2.4.1): reads that used what was invalidated have been answered, writes are visible.
//!
//! Commands may overlap as long as none of them is a COMPLETION_WAIT with the flag F: that is the
//! barrier between a device's entry and the translations made through it.
//!
//! A device that does not answer INVALIDATE_IOTLB_PAGES holds up the store, or is given up by the unit, which
//! logs IOTLB_INV_TIMEOUT and goes on. So behind the store of a batch with such commands the driver looks at
//! the events that have come with it, and fails the batch for the device; also while the log has overflowed,
//! when there would be none. A drain of the faults returns the event, too.
//!
//! **When the unit stops** (ILLEGAL_COMMAND_ERROR, COMMAND_HARDWARE_ERROR; CmdBufRun = 0) the driver
//! looks for the event that says why, and empties the buffer (CmdBufEn = 0, both pointers 0, CmdBufEn = 1).

use iopt::TableMemory;

use super::capabilities::{
    COMMAND_HEAD, COMMAND_TAIL, COMMANDS, EVENT_TAIL, FETCH, FETCHING, RING_LENGTH, STATUS,
    control, offset, place,
};
use super::command::Command;
use super::faults::Log;
use crate::error::UnitError;
use crate::handover::UnitAdoptError;
use crate::registers::{Registers, wait_until};
use crate::ring::{CommandQueue, Layout, Ring};

/// The command buffer, and the log that says what became of its commands.
#[derive(Debug)]
pub struct Queue {
    pub(super) log: Log,
    /// Where the log's tail stood before the first command for a device's TLB.
    events: Option<usize>,
}

pub(super) type Commands = Ring<Queue>;

/// A buffer in two pages, of zeros but for what stores of tickets up to the last have left.
pub(super) fn new([entries, status]: [u64; 2], log: Log, ticket: u64) -> Commands {
    let queue = Queue { log, events: None };
    Ring::new(Layout::page(entries, status), queue, ticket)
}

impl CommandQueue for Queue {
    type Command = Command;
    const PAGES: [&'static str; 2] = ["command buffer", "store of COMPLETION_WAIT"];
    const ROOM: &'static str = "a command buffer with room";
    const TICKET: u64 = u64::MAX;

    fn head<R: Registers>(&self, registers: &R) -> u32 {
        place(registers, COMMAND_HEAD) as u32
    }

    fn set_tail<R: Registers>(&self, registers: &R, tail: u32) {
        registers.write64(COMMAND_TAIL, offset(tail as usize));
    }

    fn words(&self, command: Command) -> [u64; 2] {
        command.words()
    }

    fn wait(&self, status: u64, ticket: u64) -> ([u64; 2], &'static str) {
        let words = Command::wait(status, ticket);
        (words, "the store of a COMPLETION_WAIT")
    }

    fn prepare<R: Registers>(&mut self, _registers: &R) -> Result<(), UnitError> {
        self.events = None;
        Ok(())
    }

    fn accept<R: Registers>(
        &mut self,
        registers: &R,
        command: Command,
    ) -> Result<Option<Command>, UnitError> {
        if self.events.is_none() && matches!(command, Command::InDevice { .. }) {
            self.events = Some(place(registers, EVENT_TAIL));
        }
        Ok(Some(command))
    }

    fn running<R: Registers, M: TableMemory>(
        ring: &mut Commands,
        (registers, memory): (&R, &M),
    ) -> Result<(), UnitError> {
        if registers.read64(STATUS) & FETCHING != 0 {
            return Ok(());
        }
        let head = ring.head(registers);
        let log = &ring.queue.log;
        let (error, record) = log
            .command_error((registers, memory))
            .unwrap_or(("CmdBufRun = 0, without an event", 0));
        let command = ring.read(memory, head);
        control(registers, 0, FETCH);
        ring.set_up(registers);
        control(registers, FETCH, 0);
        // The next batch finds out whether that has helped.
        let _ = wait_until(registers, "Status.CmdBufRun = 1", || {
            Ok(registers.read64(STATUS) & FETCHING != 0)
        });
        Err(UnitError::Command {
            error,
            command,
            record,
        })
    }

    fn answered<R: Registers, M: TableMemory>(&self, unit: (&R, &M)) -> Result<(), UnitError> {
        match self.events {
            Some(since) => self.log.time_out(unit, since),
            None => Ok(()),
        }
    }
}

impl Commands {
    /// Puts the buffer into the registers, empty. The unit does not fetch.
    pub(super) fn set_up<R: Registers>(&mut self, registers: &R) {
        self.tail = 0;
        registers.write64(COMMANDS, self.layout.entries | RING_LENGTH);
        registers.write64(COMMAND_HEAD, 0);
        registers.write64(COMMAND_TAIL, 0);
    }

    /// Goes on with a buffer in which all commands are complete.
    pub(super) fn resume<R: Registers>(&mut self, registers: &R) -> Result<(), UnitAdoptError> {
        let fetching = registers.read64(STATUS);
        UnitAdoptError::compare("Status", fetching, FETCHING, FETCHING)?;
        let (found, wanted) = (registers.read64(COMMANDS), self.layout.entries);
        UnitAdoptError::compare("Command Buffer Base", found, wanted | RING_LENGTH, !0)?;
        self.tail = place(registers, COMMAND_TAIL) as u32;
        let head = self.head(registers);
        UnitAdoptError::compare("Command Buffer Head", head.into(), self.tail.into(), !0)?;
        self.open = true;
        Ok(())
    }
}
