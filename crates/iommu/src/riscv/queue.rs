//! The command queue.
//!
//! RISC-V IOMMU specification, section "Command-Queue", and "Command-queue CSR" for the register. One
//! batch is under way at a time. Its protocol:
//!
//! 1. the caller's stores to tables and contexts come first (a fence);
//! 2. commands are written from the tail on, the last one an IOFENCE.C that has the unit store the batch's
//!    ticket; then the tail register hands them over. One place stays free, since head = tail means empty;
//! 3. the driver waits until the ticket is there. The unit stores it when all commands before are
//!    complete, and the reads and writes of devices that it has processed can be seen by all (PR, PW). A
//!    ticket is not used again for 2^32 batches, so an answer that comes late, after its batch was given
//!    up, is no answer to another one.
//!
//! The unit may execute commands in another order than it fetches them; an IOFENCE.C is where that ends.
//! So there is one between a context and the translations made through it, and one between the unit's
//! translations and a device's ("Device Address Translation Cache invalidations").
//!
//! A batch of more commands than the queue holds goes in parts, each with its own wait.
//!
//! **When the unit stops** (cqmf, cmd_ill, or cmd_to: a device has not answered an ATS.INVAL) the driver
//! empties the queue (cqen = 0, cqon = 0 is awaited, the errors are cleared, cqen = 1, which puts the head
//! to 0) and reports the batch as failed; the next one finds a queue in order. A batch that is given up
//! for its time stays in the queue.

use core::sync::atomic::{Ordering, fence};

use iopt::{Cell, TABLE_BYTES, TableMemory};

use super::command::Command;
use super::offer::{
    COMMAND_ERRORS, CQB, CQCSR, CQH, CQT, DDTP_PPN, ENABLE, ON, base, set_base, switch,
};
use crate::commands::CommandCounters;
use crate::error::UnitError;
use crate::handover::AdoptError;
use crate::registers::{Registers, wait_until};

/// Commands of the queue: one page.
const RING: usize = 256;
/// Commands of one part of a batch: all places but the free one and that of the wait.
const PART: usize = RING - 2;

/// The register, what it is waited for, and its errors.
const QUEUE: (usize, &str, u32) = (CQCSR, "cqcsr.cqon = cqen, busy = 0", COMMAND_ERRORS);
/// Errors at which the unit stops.
const STOPS: [(u32, &str); 3] = [(1 << 8, "cqmf"), (1 << 9, "cmd_to"), (1 << 10, "cmd_ill")];

/// The command queue: one page, and one for the ticket.
#[derive(Debug)]
pub(super) struct Queue {
    pub(super) entries: u64,
    pub(super) status: u64,
    /// The place of the next command.
    tail: usize,
    ticket: u32,
    /// The unit can be told something. Otherwise it has nothing cached, or will be told to forget
    /// everything when it is enabled.
    pub(super) open: bool,
    pub(super) counters: CommandCounters,
}

impl Queue {
    /// A queue in two pages of zeros.
    pub(super) fn new(entries: u64, status: u64) -> Self {
        Self {
            entries,
            status,
            tail: 0,
            ticket: 0,
            open: false,
            counters: CommandCounters::default(),
        }
    }

    /// Has the unit use no queue, whoever's it is.
    pub(super) fn stop<R: Registers>(registers: &R) -> Result<(), UnitError> {
        switch(registers, QUEUE, false)
    }

    /// Has the unit use this queue, empty. It uses none.
    pub(super) fn start<R: Registers>(&mut self, registers: &R) -> Result<(), UnitError> {
        self.tail = 0;
        set_base(registers, (CQB, "cqb"), self.entries, RING.ilog2())?;
        registers.write32(CQT, 0);
        switch(registers, QUEUE, true)
    }

    /// Goes on with the tickets of a predecessor: the last one is where the unit has stored it.
    pub(super) fn go_on<M: TableMemory>(&mut self, memory: &M) {
        let status = memory.entries(self.status, 1).first();
        self.ticket = status.map_or(0, |cell| cell.get_acquire() as u32);
    }

    /// Goes on with a queue in which all commands are complete.
    pub(super) fn resume<R: Registers>(&mut self, registers: &R) -> Result<(), AdoptError> {
        let wanted = base(self.entries, RING.ilog2());
        let found = registers.read64(CQB);
        AdoptError::compare("cqb", found, wanted, DDTP_PPN | 0x1f)?;
        let on = u64::from(ENABLE | ON);
        let found = registers.read32(CQCSR).into();
        AdoptError::compare("cqcsr", found, on, on | u64::from(COMMAND_ERRORS))?;
        let (head, tail) = (registers.read32(CQH).into(), registers.read32(CQT).into());
        AdoptError::compare("cqh", head, tail, u64::MAX)?;
        self.tail = Self::head(registers);
        self.open = true;
        Ok(())
    }

    /// Where the unit will fetch next, whatever it says.
    fn head<R: Registers>(registers: &R) -> usize {
        registers.read32(CQH) as usize % RING
    }

    fn free<R: Registers>(&self, registers: &R) -> usize {
        let used = (self.tail + RING - Self::head(registers)) % RING;
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
        mut commands: impl Iterator<Item = Command> + Clone,
    ) -> Result<(), UnitError> {
        fence(Ordering::SeqCst);
        if !self.open {
            return Ok(());
        }
        self.counters.batches += 1;
        loop {
            let count = commands.clone().take(PART).count();
            self.room((registers, memory), count + 1)?;
            for command in commands.by_ref().take(count) {
                self.write(memory, command.words());
            }
            self.ticket = self.ticket.wrapping_add(1);
            self.write(memory, Command::wait(self.status, self.ticket));
            registers.write32(CQT, self.tail as u32);
            self.complete((registers, memory))?;
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
        needed: usize,
    ) -> Result<(), UnitError> {
        let room = wait_until(registers, "a command queue with room", || {
            self.running((registers, memory))?;
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
    ) -> Result<(), UnitError> {
        wait_until(registers, "the store of an IOFENCE.C", || {
            let status = memory.entries(self.status, 1).first();
            // DATA has 32 bits.
            if status.map(|cell| cell.get_acquire() as u32) == Some(self.ticket) {
                return Ok(true);
            }
            self.running((registers, memory))?;
            Ok(false)
        })
    }

    /// An error when the unit has stopped; it fetches again then.
    fn running<R: Registers, M: TableMemory>(
        &mut self,
        (registers, memory): (&R, &M),
    ) -> Result<(), UnitError> {
        let control = registers.read32(CQCSR);
        let stop = STOPS.iter().find(|(bit, _)| control & bit != 0);
        let error = match stop {
            Some((_, name)) => *name,
            None if control & ON == 0 => "cqon = 0, without an error",
            None => return Ok(()),
        };
        let head = Self::head(registers);
        let cells = memory.entries(self.entries, TABLE_BYTES as usize / 8);
        let word = |n: usize| cells.get(head * 2 + n).map_or(0, Cell::get);
        let command = [word(0), word(1)];
        // Whoever comes next finds out whether that has helped.
        let _ = Self::stop(registers).and_then(|()| self.start(registers));
        Err(UnitError::Command {
            error,
            command,
            record: control.into(),
        })
    }
}
