//! One command ring under the drivers of units that take commands from memory.
//!
//! A ring is a page of commands, and a word in another page where the unit stores its answers. One batch
//! of commands is under way at a time: flushes of a unit take turns under the driver's lock. So one answer
//! word and one ticket are enough, and the waiting driver is the one to restart a ring that has stopped. The
//! cost is that flushes of different domains wait for each other. The protocol of a batch:
//!
//! 1. the caller's stores to tables and structures come first (a fence), and whatever else a unit needs
//!    before it may look at them ([`CommandQueue::prepare`]);
//! 2. commands are written from the tail on, the last one a *wait*; then the tail register hands them over.
//!    Where head = tail means empty one place stays free; where indexes count one bit beyond the places, all
//!    of them are filled. After a batch that is complete all places are free, and no register is read to know that;
//! 3. the driver waits until the wait is complete: then all commands before it are, and every access that
//!    used an invalidated translation. The unit stores the batch's ticket, a number from 1 on, or, where
//!    it cannot, its head is awaited to come to the tail. A ticket is not used again for as many batches
//!    as its word can count, so an answer that comes late, after its batch was given up, is no answer to
//!    another one.
//!
//! A batch of more commands than the ring has room for goes in parts, each with its own wait: what fits is
//! handed over before there is room for the rest.
//!
//! **When the unit stops** it fetches nothing until software restarts it. The waiting driver looks at
//! the unit in each round ([`CommandQueue::running`]): the driver names the error, puts the ring in order,
//! and the batch is reported as failed; the next one finds a ring in order. A batch that is given up for
//! its time stays in the ring, and takes its places until the unit has done it.
//!
//! Each wait is [bounded](Registers::wait): for room, [`UnitError::QueueFull`]; for the answer,
//! [`UnitError::TimedOut`].

use core::sync::atomic::{Ordering, fence};

use iopt::{Cell, TABLE_BYTES, TableMemory};

use crate::commands::CommandCounters;
use crate::error::UnitError;
use crate::registers::{Registers, wait_until};

/// Properties of the command queue of one kind of unit.
pub trait CommandQueue: Sized {
    /// A command.
    type Command;
    /// The pages of commands and of the answer, in the specification's names.
    const PAGES: [&'static str; 2];
    /// Condition awaited when there is no room.
    const ROOM: &'static str;
    /// The bits of a ticket.
    const TICKET: u64;

    /// The index of the place that the unit fetches next, whatever it says. Bits beyond the ring's indexes
    /// are left out by the ring.
    fn head<R: Registers>(&self, registers: &R) -> u32;

    /// Tells the unit the index behind the last command.
    fn set_tail<R: Registers>(&self, registers: &R, tail: u32);

    /// The words of a command. The rest of a place is zero.
    fn words(&self, command: Self::Command) -> [u64; 2];

    /// The words of a wait that stores `ticket` at `status`, and what it is called.
    fn wait(&self, status: u64, ticket: u64) -> ([u64; 2], &'static str);

    /// True when waits store tickets; otherwise the head is looked at.
    fn stores_tickets(&self) -> bool {
        true
    }

    /// Before the commands of a batch.
    fn prepare<R: Registers>(&mut self, registers: &R) -> Result<(), UnitError> {
        let _ = registers;
        Ok(())
    }

    /// Sees each command first, and gives it back for the ring; a unit without one does it at once.
    fn accept<R: Registers>(
        &mut self,
        registers: &R,
        command: Self::Command,
    ) -> Result<Option<Self::Command>, UnitError> {
        let _ = registers;
        Ok(Some(command))
    }

    /// An error when the unit has stopped. The ring is in order then.
    fn running<R: Registers, M: TableMemory>(
        ring: &mut Ring<Self>,
        unit: (&R, &M),
    ) -> Result<(), UnitError>;

    /// An error when commands before a wait that is complete have failed.
    fn answered<R: Registers, M: TableMemory>(&self, unit: (&R, &M)) -> Result<(), UnitError> {
        let _ = unit;
        Ok(())
    }
}

/// Where a ring lies, and how its places are counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    /// The page of commands; 0 where the unit takes them through registers only.
    pub(crate) entries: u64,
    /// The page of the answer.
    pub(crate) status: u64,
    /// Places, as a power of two.
    pub(crate) log2: u32,
    /// 64-bit words of a place.
    pub(crate) words: usize,
    /// Indexes count one bit beyond the places.
    pub(crate) beyond: bool,
}

impl Layout {
    /// A page of commands of 16 bytes.
    pub(crate) const fn page(entries: u64, status: u64) -> Self {
        Self {
            entries,
            status,
            log2: TABLE_BYTES.ilog2() - 4,
            words: 2,
            beyond: false,
        }
    }

    /// The page of the answer, of a unit with a ring.
    pub(crate) fn answers(&self) -> Option<u64> {
        (self.entries != 0).then_some(self.status)
    }

    /// Places.
    pub(crate) const fn places(&self) -> u32 {
        1 << self.log2
    }

    /// How many places can be filled.
    const fn room(&self) -> u32 {
        self.places() - !self.beyond as u32
    }

    /// An index, of what a register or a sum says.
    pub(crate) const fn index(&self, value: u32) -> u32 {
        value & ((self.places() << self.beyond as u32) - 1)
    }
}

/// A ring of commands.
#[derive(Debug)]
pub struct Ring<Q> {
    pub(crate) layout: Layout,
    pub(crate) queue: Q,
    /// The index of the next command.
    pub(crate) tail: u32,
    /// Places from there on that are known to be free, without a look at the unit's head: all of them when the last
    /// wait is complete, none while one is not.
    free: u32,
    /// The last ticket.
    pub(crate) ticket: u64,
    /// The unit takes commands: it is in use, or on the way there. Otherwise it has nothing cached,
    /// or will invalidate everything when it is enabled.
    pub(crate) open: bool,
    pub(crate) counters: CommandCounters,
}

impl<Q: CommandQueue> Ring<Q> {
    /// A ring of which the last ticket was `ticket`. The unit does not use it.
    pub(crate) fn new(layout: Layout, queue: Q, ticket: u64) -> Self {
        Self {
            layout,
            queue,
            tail: 0,
            free: 0,
            ticket,
            open: false,
            counters: CommandCounters::default(),
        }
    }

    /// Hands the ring's pages to `each`, with their names.
    pub(crate) fn for_each_page(&self, each: &mut impl FnMut(&'static str, u64)) {
        let Layout {
            entries, status, ..
        } = self.layout;
        if entries != 0 {
            let [commands, answer] = Q::PAGES;
            each(commands, entries);
            each(answer, status);
        }
    }

    /// Where the unit will fetch next.
    pub(crate) fn head<R: Registers>(&self, registers: &R) -> u32 {
        self.layout.index(self.queue.head(registers))
    }

    fn cells<'m, M: TableMemory>(&self, memory: &'m M, index: u32) -> &'m [M::Cell] {
        let Layout { entries, words, .. } = self.layout;
        let place = index as usize % self.layout.places() as usize;
        memory.entries(entries + (place * words * 8) as u64, words)
    }

    /// Writes a command at an index.
    pub(crate) fn write<M: TableMemory>(&self, memory: &M, index: u32, words: [u64; 2]) {
        let cells = self.cells(memory, index);
        for (n, cell) in cells.iter().enumerate() {
            cell.set(words.get(n).map_or(0, |word| *word));
        }
        memory.written(cells);
    }

    /// The first words of the command at an index.
    pub(crate) fn read<M: TableMemory>(&self, memory: &M, index: u32) -> [u64; 2] {
        let cells = self.cells(memory, index);
        [0, 1].map(|n: usize| cells.get(n).map_or(0, Cell::get))
    }

    /// Has the unit do the commands, and waits until they are complete.
    pub(crate) fn issue<R: Registers, M: TableMemory>(
        &mut self,
        (registers, memory): (&R, &M),
        commands: impl IntoIterator<Item = Q::Command>,
    ) -> Result<(), UnitError> {
        fence(Ordering::SeqCst);
        if !self.open {
            return Ok(());
        }
        self.queue.prepare(registers)?;
        self.counters.batches += 1;
        let next = self.tail;
        let mut batch = Batch {
            ring: self,
            registers,
            memory,
            next,
            count: 0,
        };
        for command in commands {
            batch.push(command)?;
        }
        batch.finish()
    }
}

/// Commands on their way into the ring.
struct Batch<'r, Q, R, M> {
    ring: &'r mut Ring<Q>,
    registers: &'r R,
    memory: &'r M,
    /// The tail, when these commands are handed over.
    next: u32,
    count: u32,
}

impl<Q: CommandQueue, R: Registers, M: TableMemory> Batch<'_, Q, R, M> {
    fn push(&mut self, command: Q::Command) -> Result<(), UnitError> {
        let Some(command) = self.ring.queue.accept(self.registers, command)? else {
            self.ring.counters.commands += 1;
            self.ring.counters.waits += 1;
            return Ok(());
        };
        // One place is for the wait that comes last.
        if self.ring.free < 2 && self.count > 0 {
            self.finish()?;
        }
        self.reserve(2)?;
        self.write(self.ring.queue.words(command));
        self.count += 1;
        Ok(())
    }

    /// Waits until so many places are free.
    fn reserve(&mut self, needed: u32) -> Result<(), UnitError> {
        if self.ring.free >= needed {
            return Ok(());
        }
        let room = wait_until(self.registers, Q::ROOM, || {
            Q::running(self.ring, (self.registers, self.memory))?;
            let (layout, head) = (self.ring.layout, self.ring.head(self.registers));
            let used = layout.index(self.next.wrapping_sub(head));
            self.ring.free = layout.room().saturating_sub(used);
            Ok(self.ring.free >= needed)
        });
        match room {
            Err(UnitError::TimedOut { .. }) => {
                let free = self.ring.free;
                Err(UnitError::QueueFull { needed, free })
            }
            other => other,
        }
    }

    fn write(&mut self, words: [u64; 2]) {
        self.ring.write(self.memory, self.next, words);
        self.next = self.ring.layout.index(self.next + 1);
        self.ring.free = self.ring.free.saturating_sub(1);
    }

    /// Hands the commands over, and waits for them.
    fn finish(&mut self) -> Result<(), UnitError> {
        let status = self.ring.layout.status;
        if self.ring.layout.entries == 0 {
            return Ok(());
        }
        self.reserve(1)?;
        // Nothing waits for 0, which fresh memory holds.
        let ticket = match self.ring.ticket.wrapping_add(1) & Q::TICKET {
            0 => 1,
            next => next,
        };
        let (words, awaited) = self.ring.queue.wait(status, ticket);
        self.write(words);
        let (tail, unit) = (self.next, (self.registers, self.memory));
        (self.ring.ticket, self.ring.tail, self.ring.free) = (ticket, tail, 0);
        self.ring.queue.set_tail(self.registers, tail);
        wait_until(self.registers, awaited, || {
            let done = if self.ring.queue.stores_tickets() {
                let cell = self.memory.entries(status, 1).first();
                cell.map(|cell| cell.get_acquire() & Q::TICKET) == Some(ticket)
            } else {
                self.ring.head(self.registers) == tail
            };
            if !done {
                Q::running(self.ring, unit)?;
            }
            Ok(done)
        })?;
        self.ring.free = self.ring.layout.room();
        self.ring.queue.answered(unit)?;
        self.ring.counters.commands += u64::from(self.count);
        self.ring.counters.waits += 1;
        self.count = 0;
        Ok(())
    }
}
