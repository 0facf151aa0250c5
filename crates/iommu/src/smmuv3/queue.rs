//! The command queue.
//!
//! IHI 0070, sections 3.5 "Command and Event queues", 4.7.3 "CMD_SYNC", 7.1 "Command queue errors". One
//! batch is under way at a time. Its protocol:
//!
//! 1. the caller's stores to tables and structures come first (a fence);
//! 2. commands are written from the tail on, the last one a CMD_SYNC; then SMMU_CMDQ_PROD hands them over.
//!    All places can be filled, since the indexes count one bit beyond them;
//! 3. the driver waits until the CMD_SYNC is complete: all commands before are then, and every access that
//!    has used what was invalidated. Where the unit can write to memory (SMMU_IDR0.MSI), it stores the
//!    batch's ticket, and no register has to be read; a ticket is not used again for 2^32 batches, so an
//!    answer that comes late, after its batch was given up, is no answer to another one. Otherwise
//!    SMMU_CMDQ_CONS is awaited to come to the tail.
//!
//! A CMD_SYNC in the middle of a batch is a barrier: no later command begins before it is complete.
//! A batch of more commands than the queue holds goes in parts, each with its own wait.
//!
//! **When the unit stops** (SMMU_GERROR.CMDQ_ERR) the tail goes back to the command at which it stands, which
//! empties the queue; the error is acknowledged, and the batch reported as failed. The next one finds a queue
//! in order. A batch that is given up for its time stays in the queue.

use core::sync::atomic::{Ordering, fence};

use iopt::{Cell, TableMemory};

use super::command::Command;
use super::offer::{
    ADDRESS, ALLOCATE, CMDQ_BASE, CMDQ_CONS, CMDQ_PROD, COMMAND_ERROR, FAILED, GERROR, acknowledge,
    errors,
};
use crate::commands::CommandCounters;
use crate::error::UnitError;
use crate::handover::AdoptError;
use crate::registers::{Registers, wait_until};

/// The command queue: at most a page, and one for the ticket.
#[derive(Debug)]
pub(super) struct Queue {
    pub(super) entries: u64,
    pub(super) status: u64,
    /// Places, as a power of two: 2 at least.
    log2: u32,
    /// A CMD_SYNC stores a ticket.
    tickets: bool,
    /// The place of the next command, with the bit beyond.
    tail: u32,
    ticket: u32,
    /// The unit can be told something. Otherwise it has nothing cached, or will be told to forget
    /// everything when it is enabled.
    pub(super) open: bool,
    pub(super) counters: CommandCounters,
}

impl Queue {
    /// A queue in two pages of zeros.
    pub(super) fn new(entries: u64, status: u64, log2: u32, tickets: bool) -> Self {
        Self {
            entries,
            status,
            log2,
            tickets,
            tail: 0,
            ticket: 0,
            open: false,
            counters: CommandCounters::default(),
        }
    }

    /// Puts the queue into the registers, empty. The unit does not fetch.
    pub(super) fn set_up<R: Registers>(&mut self, registers: &R) {
        self.tail = 0;
        let base = self.entries & ADDRESS | u64::from(self.log2);
        registers.write64(CMDQ_BASE, base | ALLOCATE);
        registers.write32(CMDQ_PROD, 0);
        registers.write32(CMDQ_CONS, 0);
    }

    /// The last ticket.
    pub(super) const fn ticket(&self) -> u32 {
        self.ticket
    }

    /// Goes on with the tickets of a predecessor, whose last one may still be in memory.
    pub(super) const fn go_on(&mut self, ticket: u32) {
        self.ticket = ticket;
    }

    /// Goes on with a queue in which all commands are complete.
    pub(super) fn resume<R: Registers>(&mut self, registers: &R) -> Result<(), AdoptError> {
        let base = self.entries | u64::from(self.log2);
        let found = registers.read64(CMDQ_BASE);
        AdoptError::compare("SMMU_CMDQ_BASE", found, base, ADDRESS)?;
        AdoptError::compare(
            "SMMU_GERROR",
            errors(registers).into(),
            0,
            COMMAND_ERROR.into(),
        )?;
        self.tail = self.index(registers.read32(CMDQ_PROD));
        let head = self.index(registers.read32(CMDQ_CONS));
        AdoptError::compare("SMMU_CMDQ_CONS", head.into(), self.tail.into(), !0)?;
        self.open = true;
        Ok(())
    }

    const fn places(&self) -> u32 {
        1 << self.log2
    }

    /// An index, with the bit beyond.
    const fn index(&self, value: u32) -> u32 {
        value & (2 * self.places() - 1)
    }

    fn cells<'m, M: TableMemory>(&self, memory: &'m M, index: u32) -> &'m [M::Cell] {
        let place = u64::from(index & (self.places() - 1));
        memory.entries(self.entries + place * 16, 2)
    }

    /// Has the unit do the commands that `fill` gives, and waits until they are complete.
    pub(super) fn issue<R: Registers, M: TableMemory>(
        &mut self,
        (registers, memory): (&R, &M),
        fill: impl FnOnce(&mut Batch<'_, R, M>) -> Result<(), UnitError>,
    ) -> Result<(), UnitError> {
        fence(Ordering::SeqCst);
        if !self.open {
            return Ok(());
        }
        self.counters.batches += 1;
        let next = self.tail;
        let mut batch = Batch {
            queue: self,
            registers,
            memory,
            next,
            free: 0,
            count: 0,
        };
        fill(&mut batch)?;
        batch.finish()
    }
}

/// Commands on their way into the queue.
pub(super) struct Batch<'q, R, M> {
    queue: &'q mut Queue,
    registers: &'q R,
    memory: &'q M,
    /// The tail, when these commands are handed over.
    next: u32,
    /// Places that are known to be free.
    free: u32,
    count: u32,
}

impl<R: Registers, M: TableMemory> Batch<'_, R, M> {
    /// Adds a command.
    pub(super) fn push(&mut self, command: Command) -> Result<(), UnitError> {
        // One is for the CMD_SYNC that comes last.
        if self.free < 2 && self.count > 0 {
            self.finish()?;
        }
        self.room(2)?;
        self.write(command.words());
        self.count += 1;
        Ok(())
    }

    /// Has all later commands wait until the earlier ones are complete.
    pub(super) fn barrier(&mut self) -> Result<(), UnitError> {
        self.push(Command::Sync)
    }

    /// Waits until so many places are free.
    fn room(&mut self, needed: u32) -> Result<(), UnitError> {
        if self.free >= needed {
            return Ok(());
        }
        let room = wait_until(self.registers, "a command queue with room", || {
            self.running()?;
            let head = self.registers.read32(CMDQ_CONS);
            let used = self.queue.index(self.next.wrapping_sub(head));
            self.free = self.queue.places().saturating_sub(used);
            Ok(self.free >= needed)
        });
        match room {
            Err(UnitError::TimedOut { .. }) => {
                let free = self.free;
                Err(UnitError::QueueFull { needed, free })
            }
            other => other,
        }
    }

    fn write(&mut self, words: [u64; 2]) {
        let cells = self.queue.cells(self.memory, self.next);
        cells.iter().zip(words).for_each(|(cell, w)| cell.set(w));
        self.memory.written(cells);
        self.next = self.queue.index(self.next + 1);
        self.free = self.free.saturating_sub(1);
    }

    /// Hands the commands over, and waits for them.
    fn finish(&mut self) -> Result<(), UnitError> {
        self.room(1)?;
        let queue = &mut *self.queue;
        queue.ticket = queue.ticket.wrapping_add(1);
        let (tickets, ticket) = (queue.tickets, queue.ticket);
        let status = queue.status;
        self.write(if tickets {
            Command::sync_with_ticket(status, ticket)
        } else {
            Command::Sync.words()
        });
        let tail = self.next;
        self.queue.tail = tail;
        self.registers.write32(CMDQ_PROD, tail);
        let awaited = if tickets {
            "the store of a CMD_SYNC"
        } else {
            "CMDQ_CONS = CMDQ_PROD"
        };
        wait_until(self.registers, awaited, || {
            let done = if tickets {
                let cell = self.memory.entries(status, 1).first();
                cell.map(|cell| cell.get_acquire() as u32) == Some(ticket)
            } else {
                self.queue.index(self.registers.read32(CMDQ_CONS)) == tail
            };
            if !done {
                self.running()?;
            }
            Ok(done)
        })?;
        self.queue.counters.commands += u64::from(self.count);
        self.queue.counters.waits += 1;
        (self.count, self.free) = (0, 0);
        Ok(())
    }

    /// An error when the unit has stopped; it takes commands again then.
    fn running(&mut self) -> Result<(), UnitError> {
        let registers = self.registers;
        let errors = errors(registers);
        if errors & FAILED != 0 {
            return Err(UnitError::Refused {
                register: "SMMU_GERROR",
                value: registers.read32(GERROR).into(),
            });
        }
        if errors & COMMAND_ERROR == 0 {
            return Ok(());
        }
        let queue = &mut *self.queue;
        let head = registers.read32(CMDQ_CONS);
        let cells = queue.cells(self.memory, head);
        let word = |n: usize| cells.get(n).map_or(0, Cell::get);
        let command = [word(0), word(1)];
        queue.tail = queue.index(head);
        registers.write32(CMDQ_PROD, queue.tail);
        acknowledge(registers, COMMAND_ERROR);
        Err(UnitError::Command {
            // ERR.
            error: match head >> 24 & 0x7f {
                1 => "CERROR_ILL",
                2 => "CERROR_ABT",
                3 => "CERROR_ATC_INV_SYNC",
                _ => "a command error without a name",
            },
            command,
            record: head.into(),
        })
    }
}
