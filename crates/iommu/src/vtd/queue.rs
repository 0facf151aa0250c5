//! How commands reach the unit: by its queue, or by registers where it has none.
//!
//! VT-d specification, section 6.5.2 "Queued Invalidation Interface". One batch of commands is under
//! way at a time. Its protocol:
//!
//! 1. the caller's stores to tables come first (a fence), and where the unit has write buffers they
//!    are flushed (Global Command Register, WBF);
//! 2. descriptors are written from the tail on, the last one an *invalidation wait* that has the unit
//!    write the batch's ticket to the status word; then the tail register hands them over. One place
//!    stays free, since head = tail means empty;
//! 3. the driver waits until the status word is the ticket. The unit writes it when all commands
//!    before are complete, reads and writes drained. A ticket is not used again for 2^32 batches, so an
//!    answer that comes late, after its batch was given up, is no answer to another one.
//!
//! **When the queue stops** (Fault Status Register, IQE, ICE or ITE) the unit fetches nothing until the
//! bit is cleared. The driver then turns whatever is left between head and tail into waits that write
//! the ticket 0, which nobody waits for, clears the bit, and reports the batch as failed; the next one
//! finds a queue in order. A batch that is given up for its time stays in the queue.
//!
//! A batch of more commands than the queue holds goes in parts, each with its own wait.
//!
//! Descriptors and the status word are written back for units that do not snoop; the unit's own write
//! of the status word is coherent in every unit.

use core::sync::atomic::{Ordering, fence};

use iopt::{Cell, TABLE_BYTES, TableMemory};

use super::command::{ByRegister, Command};
use super::offer::{
    CCMD, FLUSH_WRITES, FSTS, GCMD, GSTS, IQA, IQERCD, IQH, IQT, Offer, QUEUE, QUEUE_ERRORS,
    RTADDR, SCALABLE, STATES, TRANSLATION, WIDE,
};
use super::structures::Structures;
use super::{Config, Mode};
use crate::commands::CommandCounters;
use crate::error::UnitError;
use crate::handover::{AdoptError, WORDS};
use crate::registers::{Registers, wait_until};

/// The invalidation queue: one page, and one for the status word.
#[derive(Debug)]
pub(super) struct Queue {
    pub(super) descriptors: u64,
    pub(super) status: u64,
    /// Words of a descriptor, 2 or 4.
    words: usize,
    /// The place of the next descriptor.
    tail: usize,
    ticket: u32,
}

impl Queue {
    /// A queue in two pages of zeros.
    pub(super) const fn new(descriptors: u64, status: u64, wide: bool) -> Self {
        Self {
            descriptors,
            status,
            words: if wide { 4 } else { 2 },
            tail: 0,
            ticket: 0,
        }
    }

    const fn places(&self) -> usize {
        TABLE_BYTES as usize / 8 / self.words
    }

    /// The register value for a place.
    const fn offset(&self, place: usize) -> u64 {
        (place * self.words * 8) as u64
    }

    /// Where the unit will fetch next, whatever it says.
    fn head<R: Registers>(&self, registers: &R) -> usize {
        registers.read64(IQH) as usize / (self.words * 8) % self.places()
    }

    fn free<R: Registers>(&self, registers: &R) -> usize {
        let used = (self.tail + self.places() - self.head(registers)) % self.places();
        self.places() - 1 - used
    }

    fn write<M: TableMemory>(&self, memory: &M, place: usize, descriptor: [u64; 2]) {
        let cells = memory.entries(self.descriptors, TABLE_BYTES as usize / 8);
        let words = descriptor.into_iter().chain(core::iter::repeat(0));
        if let Some(cells) = cells.get(place * self.words..(place + 1) * self.words) {
            cells.iter().zip(words).for_each(|(cell, w)| cell.set(w));
            memory.written(cells);
        }
    }

    fn read<M: TableMemory>(&self, memory: &M, place: usize) -> [u64; 2] {
        let cells = memory.entries(self.descriptors, TABLE_BYTES as usize / 8);
        let word = |n: usize| cells.get(place * self.words + n).map_or(0, Cell::get);
        [word(0), word(1)]
    }

    /// An invalidation wait descriptor with SW, the write of a status word.
    const fn wait(&self, ticket: u32) -> [u64; 2] {
        [0x5 | 1 << 5 | (ticket as u64) << 32, self.status]
    }

    /// Puts the queue into the registers, empty, and has the unit use it. It is not in use.
    pub(super) fn set_up<R: Registers>(&mut self, registers: &R) -> Result<(), UnitError> {
        self.tail = 0;
        // What an earlier owner of the unit has left.
        registers.write32(FSTS, error_bits());
        // "Queue Invalidation Tail Register": 0 before the queue is enabled.
        registers.write64(IQT, 0);
        let wide = if self.words == 4 { WIDE } else { 0 };
        // QS = 0: one page.
        registers.write64(IQA, self.descriptors | wide);
        command(registers, QUEUE, true, "GSTS.QIES = 1")
    }

    /// Has the unit do the commands, and waits for them; counts what is complete.
    fn run<R: Registers, M: TableMemory>(
        &mut self,
        (registers, memory): (&R, &M),
        draining: (bool, bool),
        mut commands: impl Iterator<Item = Command> + Clone,
        counters: &mut CommandCounters,
    ) -> Result<(), UnitError> {
        loop {
            // All places but the free one and that of the wait.
            let count = commands.clone().take(self.places() - 2).count();
            self.room((registers, memory), count + 1)?;
            for command in commands.by_ref().take(count) {
                self.put(memory, command.descriptor(draining));
            }
            self.ticket = self.ticket.checked_add(1).unwrap_or(1);
            self.put(memory, self.wait(self.ticket));
            registers.write64(IQT, self.offset(self.tail));
            let status = memory.entries(self.status, 1);
            wait_until(registers, "the status of an invalidation wait", || {
                if status.first().map(|cell| cell.get_acquire() as u32) == Some(self.ticket) {
                    return Ok(true);
                }
                self.running(registers, memory)?;
                Ok(false)
            })?;
            counters.commands += count as u64;
            counters.waits += 1;
            if commands.clone().next().is_none() {
                return Ok(());
            }
        }
    }

    fn put<M: TableMemory>(&mut self, memory: &M, descriptor: [u64; 2]) {
        self.write(memory, self.tail, descriptor);
        self.tail = (self.tail + 1) % self.places();
    }

    fn room<R: Registers, M: TableMemory>(
        &self,
        (registers, memory): (&R, &M),
        needed: usize,
    ) -> Result<(), UnitError> {
        let room = wait_until(registers, "a queue with room", || {
            self.running(registers, memory)?;
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

    /// An error when the queue has stopped; it goes on then.
    fn running<R: Registers, M: TableMemory>(
        &self,
        registers: &R,
        memory: &M,
    ) -> Result<(), UnitError> {
        error(registers).map_or(Ok(()), |name| Err(self.restart(registers, memory, name)))
    }

    /// Takes what is left out of a queue that has stopped, and has it go on. The error to report.
    fn restart<R: Registers, M: TableMemory>(
        &self,
        registers: &R,
        memory: &M,
        error: &'static str,
    ) -> UnitError {
        let record = registers.read64(IQERCD);
        let head = self.head(registers);
        let failed = UnitError::Command {
            error,
            command: self.read(memory, head),
            record,
        };
        let mut place = head;
        while place != self.tail {
            self.write(memory, place, self.wait(0));
            place = (place + 1) % self.places();
        }
        registers.write32(FSTS, error_bits());
        // A unit may look for descriptors only when the tail is written.
        registers.write64(IQT, self.offset(self.tail));
        failed
    }
}

/// All of the errors at which the queue stops; writing 1 clears.
fn error_bits() -> u32 {
    QUEUE_ERRORS.iter().fold(0, |all, (bit, _)| all | bit)
}

/// The first of the errors at which the queue stops.
fn error<R: Registers>(registers: &R) -> Option<&'static str> {
    let status = registers.read32(FSTS);
    let mut errors = QUEUE_ERRORS.iter();
    errors
        .find(|(bit, _)| status & bit != 0)
        .map(|(_, name)| *name)
}

/// How commands reach the unit, and how many have.
#[derive(Debug)]
pub(super) struct Channel {
    pub(super) queue: Option<Queue>,
    /// The unit can be told something: it is in use, or on the way there. Otherwise it has nothing
    /// cached, or will be told to forget everything when it is enabled.
    pub(super) open: bool,
    pub(super) counters: CommandCounters,
}

impl Channel {
    /// The page of the status word, where there is one.
    pub(super) fn answers(&self) -> Option<u64> {
        self.queue.as_ref().map(|queue| queue.status)
    }

    /// The queue's pages, with their names.
    pub(super) fn for_each_page(&self, each: &mut impl FnMut(&'static str, u64)) {
        if let Some(queue) = &self.queue {
            each("invalidation queue", queue.descriptors);
            each("status of invalidation waits", queue.status);
        }
    }

    /// What a successor must know: bit 0 whether the unit is in use, from bit 8 on the mode, from bit 16
    /// on the bits of a PASID; the root table; descriptors and status, 0 without a queue; the last ticket.
    pub(super) fn describe(&self, structures: &Structures) -> [u64; WORDS] {
        let Structures {
            root,
            mode,
            pasid_bits,
        } = *structures;
        let (descriptors, status, ticket) = self.queue.as_ref().map_or((0, 0, 0), |queue| {
            (queue.descriptors, queue.status, queue.ticket)
        });
        let state = u64::from(self.open) | (mode as u64) << 8 | u64::from(pasid_bits) << 16;
        [state, root, descriptors, status, ticket.into(), 0]
    }

    /// The root table, and the channel of a unit that is as [`describe`](Self::describe) says.
    pub(super) fn adopt<R: Registers>(
        registers: &R,
        words: [u64; WORDS],
        config: &Config,
        offer: Offer,
    ) -> Result<(u64, Self), AdoptError> {
        let [state, root, descriptors, status, ticket, _] = words;
        let open = state & 1 != 0;
        let mode = config.mode;
        AdoptError::compare("the mode", mode as u64, state >> 8, 0xff)?;
        let pasid_bits = config.pasid_bits.into();
        AdoptError::compare("bits of a PASID", pasid_bits, state >> 16, u64::MAX)?;
        let mut channel = Self {
            queue: None,
            open,
            counters: CommandCounters::default(),
        };
        let wide = mode != Mode::Legacy;
        let queued = descriptors != 0;
        AdoptError::compare("ECAP.QI", offer.queue().into(), queued.into(), 1)?;
        if open {
            let on = TRANSLATION | if queued { QUEUE } else { 0 };
            let status = registers.read32(GSTS);
            AdoptError::compare("GSTS", status.into(), on.into(), on.into())?;
            let address = root | if wide { SCALABLE } else { 0 };
            AdoptError::compare("RTADDR", registers.read64(RTADDR), address, u64::MAX)?;
        }
        if queued {
            let mut queue = Queue::new(descriptors, status, wide);
            queue.ticket = ticket as u32;
            if open {
                let width = if wide { WIDE } else { 0 };
                let address = registers.read64(IQA);
                AdoptError::compare("IQA", address, descriptors | width, u64::MAX)?;
                let (head, tail) = (registers.read64(IQH), registers.read64(IQT));
                AdoptError::compare("IQH", head, tail, u64::MAX)?;
                queue.tail = queue.head(registers);
            }
            channel.queue = Some(queue);
        }
        Ok((root, channel))
    }

    /// Has the unit do the commands, and waits until they are complete.
    pub(super) fn issue<R: Registers, M: TableMemory>(
        &mut self,
        (registers, memory): (&R, &M),
        offer: Offer,
        commands: impl Iterator<Item = Command> + Clone,
    ) -> Result<(), UnitError> {
        fence(Ordering::SeqCst);
        if !self.open {
            return Ok(());
        }
        flush_writes(registers, offer)?;
        let draining = offer.draining();
        self.counters.batches += 1;
        let Some(queue) = &mut self.queue else {
            for command in commands {
                by_register(registers, offer, command.by_register(draining))?;
                self.counters.commands += 1;
                self.counters.waits += 1;
            }
            return Ok(());
        };
        queue.run((registers, memory), draining, commands, &mut self.counters)
    }
}

/// Flushes the unit's write buffers, where it has any that do not flush themselves.
pub(super) fn flush_writes<R: Registers>(registers: &R, offer: Offer) -> Result<(), UnitError> {
    if !offer.write_buffers() {
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
    offer: Offer,
    command: ByRegister,
) -> Result<(), UnitError> {
    const BUSY: u64 = 1 << 63;
    let address = offer.iotlb_registers();
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
    // What was invalidated at least (CAIG, IAIG): 0 is nothing.
    let value = registers.read64(register);
    if value >> done & 3 == 0 {
        return Err(UnitError::Refused {
            register: name,
            value,
        });
    }
    Ok(())
}
