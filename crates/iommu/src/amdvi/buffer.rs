//! The command buffer.
//!
//! AMD IOMMU specification, section 2.4 "Commands", and 3.4 for the registers. One batch is under way
//! at a time. Its protocol:
//!
//! 1. the caller's stores to tables come first (a fence);
//! 2. commands are written from the tail on, the last one a COMPLETION_WAIT that has the unit store the
//!    batch's ticket; then the tail register hands them over. One place stays free, since head = tail
//!    means empty;
//! 3. the driver waits until the ticket is there. The unit stores it when all commands before are
//!    complete (2.4.1): reads that used what was invalidated have been answered, writes are visible.
//!    Tickets are not used again, so an answer that comes late, after its batch was given up, is no
//!    answer to another one.
//!
//! Commands may overlap as long as none of them is a COMPLETION_WAIT with the flag F: that is the
//! barrier between a device's entry and the translations made through it.
//!
//! A device that does not answer INVALIDATE_IOTLB_PAGES holds up the store, or is given up by the unit, which
//! logs IOTLB_INV_TIMEOUT and goes on. So behind the store of a batch with such commands the driver looks at
//! the events that have come with it, and fails the batch for the device; also while the log has overflowed,
//! when there would be none. Who drains the faults sees the event, too.
//!
//! A batch of more commands than the buffer holds goes in parts, each with its own wait.
//!
//! **When the unit stops** (ILLEGAL_COMMAND_ERROR, COMMAND_HARDWARE_ERROR; CmdBufRun = 0) the driver
//! looks for the event that says why, empties the buffer (CmdBufEn = 0, both pointers 0, CmdBufEn = 1)
//! and reports the batch as failed; the next one finds a buffer in order. A batch that is given up for
//! its time stays in the buffer.

use core::sync::atomic::{Ordering, fence};

use iopt::{Cell, TABLE_BYTES, TableMemory};

use super::command::Command;
use super::events::Log;
use super::offer::{
    COMMAND_HEAD, COMMAND_TAIL, COMMANDS, EVENT_TAIL, FETCH, FETCHING, RING, RING_LENGTH, STATUS,
    control, offset, place,
};
use crate::commands::CommandCounters;
use crate::error::UnitError;
use crate::handover::AdoptError;
use crate::registers::{Registers, wait_until};

/// Commands of one part of a batch: all places but the free one and that of the wait.
const PART: usize = RING - 2;

/// The command buffer: one page, and one for the ticket.
#[derive(Debug)]
pub(super) struct Buffer {
    pub(super) entries: u64,
    pub(super) status: u64,
    /// The place of the next command.
    tail: usize,
    ticket: u64,
    /// The unit can be told something. Otherwise it has nothing cached, or will be told to forget
    /// everything when it is enabled.
    pub(super) open: bool,
    pub(super) counters: CommandCounters,
}

impl Buffer {
    /// A buffer in two pages, of zeros but for what stores of tickets up to the last have left.
    pub(super) fn new(entries: u64, status: u64, ticket: u64) -> Self {
        Self {
            entries,
            status,
            tail: 0,
            ticket,
            open: false,
            counters: CommandCounters::default(),
        }
    }

    /// Puts the buffer into the registers, empty. The unit does not fetch.
    pub(super) fn set_up<R: Registers>(&mut self, registers: &R) {
        self.tail = 0;
        registers.write64(COMMANDS, self.entries | RING_LENGTH);
        registers.write64(COMMAND_HEAD, 0);
        registers.write64(COMMAND_TAIL, 0);
    }

    /// The last ticket.
    pub(super) const fn ticket(&self) -> u64 {
        self.ticket
    }

    /// Goes on with a buffer in which all commands are complete.
    pub(super) fn resume<R: Registers>(&mut self, registers: &R) -> Result<(), AdoptError> {
        let fetching = registers.read64(STATUS);
        AdoptError::compare("Status", fetching, FETCHING, FETCHING)?;
        let found = registers.read64(COMMANDS);
        AdoptError::compare("Command Buffer Base", found, self.entries | RING_LENGTH, !0)?;
        self.tail = place(registers, COMMAND_TAIL);
        let head = place(registers, COMMAND_HEAD);
        AdoptError::compare("Command Buffer Head", head as u64, self.tail as u64, !0)?;
        self.open = true;
        Ok(())
    }

    fn free<R: Registers>(&self, registers: &R) -> usize {
        let used = (self.tail + RING - place(registers, COMMAND_HEAD)) % RING;
        RING - 1 - used
    }

    fn write<M: TableMemory>(&mut self, memory: &M, words: [u64; 2]) {
        let cells = memory.entries(self.entries, TABLE_BYTES as usize / 8);
        if let Some(cells) = cells.get(self.tail * 2..self.tail * 2 + 2) {
            cells.iter().zip(words).for_each(|(cell, w)| cell.set(w));
            memory.written(cells);
        }
        self.tail = (self.tail + 1) % RING;
    }

    /// Has the unit do the commands, and waits until they are complete.
    pub(super) fn issue<R: Registers, M: TableMemory>(
        &mut self,
        (registers, memory): (&R, &M),
        log: &Log,
        mut commands: impl Iterator<Item = Command> + Clone,
    ) -> Result<(), UnitError> {
        fence(Ordering::SeqCst);
        if !self.open {
            return Ok(());
        }
        self.counters.batches += 1;
        let in_device = |command| matches!(command, Command::InDevice { .. });
        let events = commands
            .clone()
            .any(in_device)
            .then(|| place(registers, EVENT_TAIL));
        loop {
            let count = commands.clone().take(PART).count();
            self.room((registers, memory), log, count + 1)?;
            for command in commands.by_ref().take(count) {
                self.write(memory, command.words());
            }
            self.ticket = self.ticket.wrapping_add(1);
            self.write(memory, Command::wait(self.status, self.ticket));
            registers.write64(COMMAND_TAIL, offset(self.tail));
            self.complete((registers, memory), log)?;
            if let Some(since) = events {
                log.time_out((registers, memory), since)?;
            }
            self.counters.commands += count as u64;
            self.counters.waits += 1;
            if commands.clone().next().is_none() {
                return Ok(());
            }
        }
    }

    fn room<R: Registers, M: TableMemory>(
        &mut self,
        (registers, memory): (&R, &M),
        log: &Log,
        needed: usize,
    ) -> Result<(), UnitError> {
        let room = wait_until(registers, "a command buffer with room", || {
            self.running((registers, memory), log)?;
            Ok(self.free(registers) >= needed)
        });
        match room {
            Err(UnitError::TimedOut { .. }) => {
                let (needed, free) = (needed as u32, self.free(registers) as u32);
                Err(UnitError::QueueFull { needed, free })
            }
            other => other,
        }
    }

    fn complete<R: Registers, M: TableMemory>(
        &mut self,
        (registers, memory): (&R, &M),
        log: &Log,
    ) -> Result<(), UnitError> {
        wait_until(registers, "the store of a COMPLETION_WAIT", || {
            let status = memory.entries(self.status, 1).first();
            if status.map(Cell::get_acquire) == Some(self.ticket) {
                return Ok(true);
            }
            self.running((registers, memory), log)?;
            Ok(false)
        })
    }

    /// An error when the unit has stopped; it fetches again then.
    fn running<R: Registers, M: TableMemory>(
        &mut self,
        (registers, memory): (&R, &M),
        log: &Log,
    ) -> Result<(), UnitError> {
        if registers.read64(STATUS) & FETCHING != 0 {
            return Ok(());
        }
        let head = place(registers, COMMAND_HEAD);
        let (error, record) = log
            .command_error((registers, memory))
            .unwrap_or(("CmdBufRun = 0, without an event", 0));
        let cells = memory.entries(self.entries, TABLE_BYTES as usize / 8);
        let word = |n: usize| cells.get(head * 2 + n).map_or(0, Cell::get);
        let command = [word(0), word(1)];
        control(registers, 0, FETCH);
        self.set_up(registers);
        control(registers, FETCH, 0);
        // Whoever comes next finds out whether that has helped.
        let _ = wait_until(registers, "Status.CmdBufRun = 1", || {
            Ok(registers.read64(STATUS) & FETCHING != 0)
        });
        Err(UnitError::Command {
            error,
            command,
            record,
        })
    }
}
