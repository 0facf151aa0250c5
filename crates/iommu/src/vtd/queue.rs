//! How commands reach the unit: by its queue, or by registers where it has none.
//!
//! VT-d specification, section 6.5.2 "Queued Invalidation Interface"; `ring.rs` of the crate has the
//! protocol. Where the unit has write buffers they are flushed before each batch (Global Command Register,
//! WBF). A wait is an *invalidation wait* that writes the ticket to the status word: the unit does so when
//! all commands before are complete, reads and writes drained.
//!
//! **When the queue stops** (Fault Status Register, IQE, ICE or ITE) the unit fetches nothing until the
//! bit is cleared. The driver then turns whatever is left between head and tail into waits that write
//! the ticket 0, which nothing waits for, and clears the bit.
//!
//! Descriptors and the status word are written back for units that do not snoop; the unit's own write
//! of the status word is coherent in every unit.

use iopt::TableMemory;

use super::Mode;
use super::capabilities::{
    CCMD, FLUSH_WRITES, FSTS, Features, GCMD, GSTS, IQA, IQERCD, IQH, IQT, QUEUE, QUEUE_ERRORS,
    STATES, WIDE,
};
use super::command::{ByRegister, Command};
use crate::error::UnitError;
use crate::registers::{Registers, wait_until};
use crate::ring::{CommandQueue, Layout, Ring};

/// The invalidation queue.
#[derive(Debug)]
pub struct Queue {
    features: Features,
    /// Descriptors have 256 bits.
    pub(super) wide: bool,
}

pub(super) type Commands = Ring<Queue>;

/// A queue in two pages, of zeros but for what waits have stored up to the last ticket; both are 0 where
/// the unit has none.
pub(super) fn new(
    [entries, status]: [u64; 2],
    mode: Mode,
    features: Features,
    ticket: u64,
) -> Commands {
    let wide = mode != Mode::Legacy;
    let layout = Layout::page(entries, status);
    let layout = match wide {
        true => Layout {
            log2: layout.log2 - 1,
            words: 4,
            ..layout
        },
        false => layout,
    };
    Ring::new(layout, Queue { features, wide }, ticket)
}

impl Queue {
    /// Bytes of a descriptor, as a power of two.
    const fn shift(&self) -> u32 {
        4 + self.wide as u32
    }

    /// Value of IQA: QS = 0, one page.
    pub(super) const fn base(&self, entries: u64) -> u64 {
        entries | if self.wide { WIDE } else { 0 }
    }
}

impl CommandQueue for Queue {
    type Command = Command;
    const PAGES: [&'static str; 2] = ["invalidation queue", "status of invalidation waits"];
    const ROOM: &'static str = "a queue with room";
    const TICKET: u64 = u32::MAX as u64;

    fn head<R: Registers>(&self, registers: &R) -> u32 {
        (registers.read64(IQH) >> self.shift()) as u32
    }

    fn set_tail<R: Registers>(&self, registers: &R, tail: u32) {
        registers.write64(IQT, u64::from(tail) << self.shift());
    }

    fn words(&self, command: Command) -> [u64; 2] {
        command.descriptor(self.features.draining())
    }

    fn wait(&self, status: u64, ticket: u64) -> ([u64; 2], &'static str) {
        // SW, the write of a status word.
        let words = [0x5 | 1 << 5 | ticket << 32, status];
        (words, "the status of an invalidation wait")
    }

    fn prepare<R: Registers>(&mut self, registers: &R) -> Result<(), UnitError> {
        flush_writes(registers, self.features)
    }

    fn accept<R: Registers>(
        &mut self,
        registers: &R,
        command: Command,
    ) -> Result<Option<Command>, UnitError> {
        if self.features.queue() {
            return Ok(Some(command));
        }
        let command = command.by_register(self.features.draining());
        by_register(registers, self.features, command).map(|()| None)
    }

    fn running<R: Registers, M: TableMemory>(
        ring: &mut Commands,
        (registers, memory): (&R, &M),
    ) -> Result<(), UnitError> {
        let status = registers.read32(FSTS);
        let mut errors = QUEUE_ERRORS.iter();
        let Some((_, error)) = errors.find(|(bit, _)| status & bit != 0) else {
            return Ok(());
        };
        let record = registers.read64(IQERCD);
        let head = ring.head(registers);
        let command = ring.read(memory, head);
        let (nothing, _) = ring.queue.wait(ring.layout.status, 0);
        let mut place = head;
        while place != ring.tail {
            ring.write(memory, place, nothing);
            place = ring.layout.index(place + 1);
        }
        registers.write32(FSTS, error_bits());
        // A unit may look for descriptors only when the tail is written.
        ring.queue.set_tail(registers, ring.tail);
        Err(UnitError::Command {
            error,
            command,
            record,
        })
    }
}

impl Commands {
    /// Puts the queue into the registers, empty, and has the unit use it. It is not in use.
    pub(super) fn set_up<R: Registers>(&mut self, registers: &R) -> Result<(), UnitError> {
        if self.layout.answers().is_none() {
            return Ok(());
        }
        self.tail = 0;
        // Errors left by an earlier owner of the unit.
        registers.write32(FSTS, error_bits());
        // "Queue Invalidation Tail Register": 0 before the queue is enabled.
        registers.write64(IQT, 0);
        registers.write64(IQA, self.queue.base(self.layout.entries));
        command(registers, QUEUE, true, "GSTS.QIES = 1")
    }
}

/// All of the errors at which the queue stops; writing 1 clears.
fn error_bits() -> u32 {
    QUEUE_ERRORS.iter().fold(0, |all, (bit, _)| all | bit)
}

/// Flushes the unit's write buffers, where it has any that do not flush themselves.
pub(super) fn flush_writes<R: Registers>(
    registers: &R,
    features: Features,
) -> Result<(), UnitError> {
    if !features.write_buffers() {
        return Ok(());
    }
    let states = registers.read32(GSTS) & STATES;
    registers.write32(GCMD, states | FLUSH_WRITES);
    wait_until(registers, "GSTS.WBFS = 0", || {
        Ok(registers.read32(GSTS) & FLUSH_WRITES == 0)
    })
}

/// Switches one bit of the Global Command Register, and waits until the status follows. All other
/// states stay as they are: one bit changes in one write (section "Global Command Register").
pub(super) fn command<R: Registers>(
    registers: &R,
    bit: u32,
    on: bool,
    awaited: &'static str,
) -> Result<(), UnitError> {
    let status = registers.read32(GSTS);
    // RTPS says only that there was a root table before this one.
    if bit & STATES != 0 && (status & bit != 0) == on {
        return Ok(());
    }
    let states = status & STATES & !bit;
    registers.write32(GCMD, if on { states | bit } else { states });
    wait_until(registers, awaited, || {
        Ok((registers.read32(GSTS) & bit != 0) == on)
    })
}

/// Gives one command through registers: waits for those to be free, writes, waits for the end.
fn by_register<R: Registers>(
    registers: &R,
    features: Features,
    command: ByRegister,
) -> Result<(), UnitError> {
    const BUSY: u64 = 1 << 63;
    let address = features.iotlb_registers();
    let (register, value, name, idle, done) = match command {
        ByRegister::Context(value) => (CCMD, value, "CCMD", "CCMD.ICC = 0", 59),
        ByRegister::Iotlb(value, _) => (address + 8, value, "IOTLB", "IOTLB.IVT = 0", 57),
        ByRegister::None => return Ok(()),
    };
    let free = || Ok(registers.read64(register) & BUSY == 0);
    wait_until(registers, idle, free)?;
    if let ByRegister::Iotlb(_, Some(pages)) = command {
        registers.write64(address, pages);
    }
    registers.write64(register, value);
    wait_until(registers, idle, free)?;
    // Granularity of the invalidation that was done, or wider (CAIG, IAIG): 0 is nothing.
    let value = registers.read64(register);
    if value >> done & 3 == 0 {
        return Err(UnitError::Refused {
            register: name,
            value,
        });
    }
    Ok(())
}
