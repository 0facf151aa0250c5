//! The command queue.
//!
//! IHI 0070, sections 3.5 "Command and Event queues", 4.7.3 "CMD_SYNC", 7.1 "Command queue errors"; `ring.rs`
//! of the crate has the protocol. Indexes count one bit beyond the places. A wait is a CMD_SYNC; where the
//! unit can write to memory (SMMU_IDR0.MSI) it stores the ticket, and no register has to be read; otherwise
//! SMMU_CMDQ_CONS is awaited to come to the tail.
//!
//! A CMD_SYNC in the middle of a batch is a barrier: no later command begins before it is complete.
//!
//! **When the unit stops** (SMMU_GERROR.CMDQ_ERR) the tail goes back to the command at which it stands, which
//! empties the queue, and the error is acknowledged.

use iopt::TableMemory;

use super::capabilities::{
    ADDRESS, ALLOCATE, CMDQ_BASE, CMDQ_CONS, CMDQ_PROD, COMMAND_ERROR, FAILED, Features, GERROR,
    acknowledge, errors,
};
use super::command::Command;
use crate::error::UnitError;
use crate::handover::UnitAdoptError;
use crate::registers::Registers;
use crate::ring::{CommandQueue, Layout, Ring};

/// The command queue.
#[derive(Debug)]
pub struct Queue {
    /// A CMD_SYNC stores a ticket.
    tickets: bool,
}

pub(super) type Commands = Ring<Queue>;

/// A queue of a page of commands at most, and a page of zeros but for the last ticket.
pub(super) fn new([entries, status]: [u64; 2], features: Features, ticket: u64) -> Commands {
    let layout = Layout {
        log2: features.queue_log2(21, 8),
        beyond: true,
        ..Layout::page(entries, status)
    };
    let tickets = features.writes_tickets();
    Ring::new(layout, Queue { tickets }, ticket)
}

impl CommandQueue for Queue {
    type Command = Command;
    const PAGES: [&'static str; 2] = ["command queue", "store of CMD_SYNC"];
    const ROOM: &'static str = "a command queue with room";
    const TICKET: u64 = u32::MAX as u64;

    fn head<R: Registers>(&self, registers: &R) -> u32 {
        registers.read32(CMDQ_CONS)
    }

    fn set_tail<R: Registers>(&self, registers: &R, tail: u32) {
        registers.write32(CMDQ_PROD, tail);
    }

    fn words(&self, command: Command) -> [u64; 2] {
        command.words()
    }

    fn wait(&self, status: u64, ticket: u64) -> ([u64; 2], &'static str) {
        match self.tickets {
            true => (
                Command::sync_with_ticket(status, ticket as u32),
                "the store of a CMD_SYNC",
            ),
            false => (Command::Sync.words(), "CMDQ_CONS = CMDQ_PROD"),
        }
    }

    fn stores_tickets(&self) -> bool {
        self.tickets
    }

    fn running<R: Registers, M: TableMemory>(
        ring: &mut Commands,
        (registers, memory): (&R, &M),
    ) -> Result<(), UnitError> {
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
        let head = registers.read32(CMDQ_CONS);
        let command = ring.read(memory, head);
        ring.tail = ring.layout.index(head);
        registers.write32(CMDQ_PROD, ring.tail);
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

impl Commands {
    /// Puts the queue into the registers, empty. The unit does not fetch.
    pub(super) fn set_up<R: Registers>(&mut self, registers: &R) {
        self.tail = 0;
        let base = self.layout.entries & ADDRESS | u64::from(self.layout.log2);
        registers.write64(CMDQ_BASE, base | ALLOCATE);
        registers.write32(CMDQ_PROD, 0);
        registers.write32(CMDQ_CONS, 0);
    }

    /// Goes on with a queue in which all commands are complete.
    pub(super) fn resume<R: Registers>(&mut self, registers: &R) -> Result<(), UnitAdoptError> {
        let base = self.layout.entries | u64::from(self.layout.log2);
        let found = registers.read64(CMDQ_BASE);
        UnitAdoptError::compare("SMMU_CMDQ_BASE", found, base, ADDRESS)?;
        let found = errors(registers).into();
        UnitAdoptError::compare("SMMU_GERROR", found, 0, COMMAND_ERROR.into())?;
        self.tail = self.layout.index(registers.read32(CMDQ_PROD));
        let head = self.head(registers);
        UnitAdoptError::compare("SMMU_CMDQ_CONS", head.into(), self.tail.into(), !0)?;
        self.open = true;
        Ok(())
    }
}
