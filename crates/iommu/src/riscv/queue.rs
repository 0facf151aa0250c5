//! The command queue.
//!
//! RISC-V IOMMU specification, section "Command-Queue", and "Command-queue CSR" for the register; `ring.rs` of
//! the crate has the protocol. A wait is an IOFENCE.C: the unit stores its ticket when all commands before are
//! complete, and the reads and writes of devices that it has processed can be seen by all (PR, PW).
//!
//! The unit may execute commands in another order than it fetches them; an IOFENCE.C is where that ends.
//! So there is one between a context and the translations made through it, and one between the unit's
//! translations and a device's ("Device Address Translation Cache invalidations").
//!
//! **When the unit stops** (cqmf, cmd_ill, or cmd_to: a device has not answered an ATS.INVAL) the driver
//! empties the queue (cqen = 0, cqon = 0 is awaited, the errors are cleared, cqen = 1, which puts the head
//! to 0).

use iopt::{Cell, TableMemory};

use super::capabilities::{
    COMMAND_ERRORS, CQB, CQCSR, CQH, CQT, DDTP_PPN, ENABLE, ON, base, set_base, switch,
};
use super::command::Command;
use crate::error::UnitError;
use crate::handover::UnitAdoptError;
use crate::registers::Registers;
use crate::ring::{CommandQueue, Layout, Ring};

/// The register, what it is waited for, and its errors.
const QUEUE: (usize, &str, u32) = (CQCSR, "cqcsr.cqon = cqen, busy = 0", COMMAND_ERRORS);
/// Errors at which the unit stops.
const STOPS: [(u32, &str); 3] = [(1 << 8, "cqmf"), (1 << 9, "cmd_to"), (1 << 10, "cmd_ill")];

/// The command queue.
#[derive(Debug)]
pub struct Queue;

pub(super) type Commands = Ring<Queue>;

/// A queue in two pages, of zeros but for the last ticket of a predecessor, which is where the unit has
/// stored it.
pub(super) fn new<M: TableMemory>(memory: &M, [entries, status]: [u64; 2]) -> Commands {
    let cell = memory.entries(status, 1).first();
    let ticket = cell.map_or(0, Cell::get_acquire) & Queue::TICKET;
    Ring::new(Layout::page(entries, status), Queue, ticket)
}

/// Has the unit use no queue, also not a former owner's.
pub(super) fn stop<R: Registers>(registers: &R) -> Result<(), UnitError> {
    switch(registers, QUEUE, false)
}

impl CommandQueue for Queue {
    type Command = Command;
    const PAGES: [&'static str; 2] = ["command queue", "store of IOFENCE.C"];
    const ROOM: &'static str = "a command queue with room";
    const TICKET: u64 = u32::MAX as u64;

    fn head<R: Registers>(&self, registers: &R) -> u32 {
        registers.read32(CQH)
    }

    fn set_tail<R: Registers>(&self, registers: &R, tail: u32) {
        registers.write32(CQT, tail);
    }

    fn words(&self, command: Command) -> [u64; 2] {
        command.words()
    }

    fn wait(&self, status: u64, ticket: u64) -> ([u64; 2], &'static str) {
        let words = Command::wait(status, ticket as u32);
        (words, "the store of an IOFENCE.C")
    }

    fn running<R: Registers, M: TableMemory>(
        ring: &mut Commands,
        (registers, memory): (&R, &M),
    ) -> Result<(), UnitError> {
        let control = registers.read32(CQCSR);
        let stop = STOPS.iter().find(|(bit, _)| control & bit != 0);
        let error = match stop {
            Some((_, name)) => *name,
            None if control & ON == 0 => "cqon = 0, without an error",
            None => return Ok(()),
        };
        let command = ring.read(memory, ring.head(registers));
        // The next batch finds out whether that has helped.
        let _ = stop_and_start(ring, registers);
        Err(UnitError::Command {
            error,
            command,
            record: control.into(),
        })
    }
}

fn stop_and_start<R: Registers>(ring: &mut Commands, registers: &R) -> Result<(), UnitError> {
    stop(registers)?;
    ring.start(registers)
}

impl Commands {
    /// Has the unit use this queue, empty. It uses none.
    pub(super) fn start<R: Registers>(&mut self, registers: &R) -> Result<(), UnitError> {
        self.tail = 0;
        let Layout { entries, log2, .. } = self.layout;
        set_base(registers, (CQB, "cqb"), entries, log2)?;
        registers.write32(CQT, 0);
        switch(registers, QUEUE, true)
    }

    /// Goes on with a queue in which all commands are complete.
    pub(super) fn resume<R: Registers>(&mut self, registers: &R) -> Result<(), UnitAdoptError> {
        let wanted = base(self.layout.entries, self.layout.log2);
        let found = registers.read64(CQB);
        UnitAdoptError::compare("cqb", found, wanted, DDTP_PPN | 0x1f)?;
        let on = u64::from(ENABLE | ON);
        let found = registers.read32(CQCSR).into();
        UnitAdoptError::compare("cqcsr", found, on, on | u64::from(COMMAND_ERRORS))?;
        let (head, tail) = (registers.read32(CQH).into(), registers.read32(CQT).into());
        UnitAdoptError::compare("cqh", head, tail, u64::MAX)?;
        self.tail = self.head(registers);
        self.open = true;
        Ok(())
    }
}
