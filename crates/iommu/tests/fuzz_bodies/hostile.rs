//! A unit that may do anything: what its registers answer, what it stores to memory and when is taken from
//! bytes. When they are used up it is a good one.
//!
//! A [`Model`] says how a good unit answers. The bytes then decide, access by access, whether the driver gets
//! that; whether a wait that the driver has posted is answered at once, later, or never; and when the unit
//! makes a nuisance of itself ([`Model::misbehave`]). Its stores go where a unit of its kind stores: to the
//! words that waits name, to its log, and to its queue.
//!
//! It notes the answers to the driver on which promises depend: the waits posted since an operation began, and which of
//! them the unit has answered.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use iommu::Registers;
use iopt::{Cell, HeapTables, TableMemory};

use super::Bytes;

/// Rounds that a driver may wait at a time.
pub(super) const ROUNDS: u32 = 3;

/// Accesses to registers in one operation that only an endless loop needs.
const TOO_MANY: u32 = 2_000_000;

/// How a unit of a kind works.
pub(super) trait Model: Send + 'static {
    /// Answer of a good one.
    fn read(&self, state: &State, offset: usize) -> u64;

    /// Notes the answer to the driver. True when it learns from this that what it has posted is done.
    fn answered(&mut self, state: &State, offset: usize, value: u64) -> bool {
        let _ = (state, offset, value);
        false
    }

    /// Handles a write, whose value the register holds already. Returns the work that it posts.
    fn write(&mut self, state: &mut State, offset: usize, value: u64) -> Posted;

    /// Something that no driver asks for: a fault, an error, an overflow, garbage in the queue.
    fn misbehave(&mut self, state: &mut State);
}

/// Work posted by a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Posted {
    Nothing,
    /// A wait, which the unit answers by storing a number.
    Store {
        address: u64,
        value: u64,
        /// How much of the number is compared.
        mask: u64,
    },
    /// A wait, which the unit answers when a register is read.
    Poll,
}

/// State that all kinds share.
pub(super) struct State {
    bytes: Vec<u8>,
    at: usize,
    registers: BTreeMap<usize, u64>,
    /// Registers as this driver wrote them, independent of the unit's use of them.
    told: BTreeMap<usize, u64>,
    memory: Arc<HeapTables>,
    /// Stores that are not done, and the last that was posted.
    late: VecDeque<Posted>,
    last: Posted,
    /// The word holds garbage, and may answer the next posted wait by chance. Answers of the unit to others must not.
    guessed: bool,
    /// Since the operation began.
    pub(super) waits: u32,
    accesses: u32,
    pub(super) posted: u32,
    unanswered: Vec<Posted>,
}

impl State {
    /// The next bytes.
    pub(super) fn take<V>(&mut self, what: impl FnOnce(&mut Bytes<'_>) -> V) -> V {
        let mut rest = Bytes(self.bytes.get(self.at..).unwrap_or_default());
        let before = rest.0.len();
        let value = what(&mut rest);
        self.at += before - rest.0.len();
        value
    }

    pub(super) fn byte(&mut self) -> u8 {
        self.take(|data| data.u8())
    }

    fn word(&mut self) -> u64 {
        self.take(|data| data.u64())
    }

    pub(super) fn register(&self, offset: usize) -> u64 {
        self.registers.get(&offset).copied().unwrap_or(0)
    }

    /// Value that the driver wrote to a register: the addresses of its memory, and the features in use.
    pub(super) fn told(&self, offset: usize) -> u64 {
        self.told.get(&offset).copied().unwrap_or(0)
    }

    /// Sets the value that a register holds from now on.
    pub(super) fn set(&mut self, offset: usize, value: u64) {
        self.registers.insert(offset, value);
    }

    /// A word of memory.
    pub(super) fn load(&self, address: u64) -> u64 {
        self.memory.read(address & !7).unwrap_or(0)
    }

    /// Stores to memory; nothing outside of it.
    pub(super) fn store(&self, address: u64, value: u64) {
        if self.memory.contains(address) {
            self.memory.entries(address & !7, 1)[0].set_release(value);
        }
    }

    /// The two words of the 16-byte command before a tail, in a queue of 256.
    pub(super) fn before(&self, queue: u64, tail: u64) -> [u64; 2] {
        let last = queue + (tail.wrapping_sub(1) & 0xff) * 16;
        [self.load(last), self.load(last + 8)]
    }

    /// From now on an operation is under way.
    pub(super) fn begin(&mut self) {
        (self.waits, self.accesses, self.posted) = (0, 0, 0);
        self.unanswered.clear();
    }

    /// True when every wait since then was answered.
    pub(super) fn answered(&self) -> bool {
        self.unanswered.is_empty()
    }

    /// The unit has no driver any more, and its memory may belong to another owner.
    pub(super) fn leave(&mut self) {
        self.told.clear();
        self.late.clear();
        self.last = Posted::Nothing;
    }

    fn access(&mut self) {
        self.accesses += 1;
        assert!(self.accesses < TOO_MANY, "accesses without an end");
    }

    fn post(&mut self, posted: Posted) {
        match (posted, self.last) {
            (Posted::Nothing, _) => return,
            // A driver has one word for all its waits. Another one comes from garbage in the queue.
            (Posted::Store { address, .. }, Posted::Store { address: word, .. })
                if address != word =>
            {
                return;
            }
            _ => {}
        }
        self.posted += 1;
        let foreseen = match posted {
            Posted::Store {
                address,
                value,
                mask,
            } => self.guessed && (self.load(address) ^ value) & mask == 0,
            _ => false,
        };
        if !foreseen {
            self.unanswered.push(posted);
        }
        if posted != Posted::Poll {
            self.late.push_back(posted);
            self.last = posted;
            if self.byte() < 0xc0 {
                self.answer_all();
            }
        }
    }

    fn answer_all(&mut self) {
        while let Some(Posted::Store { address, value, .. }) = self.late.pop_front() {
            self.answer_by(address, value);
            self.guessed = false;
        }
    }

    /// Stores to the word of a wait, which may answer it.
    fn answer_by(&mut self, at: u64, stored: u64) {
        self.store(at, stored);
        self.unanswered.retain(|posted| match *posted {
            Posted::Store {
                address,
                value,
                mask,
            } => address != at || (value ^ stored) & mask != 0,
            _ => true,
        });
    }

    /// Garbage in the word of the last wait.
    fn garbage(&mut self) {
        if let Posted::Store { address, value, .. } = self.last {
            let garbage = match self.byte() {
                byte @ 0..0x80 => value.wrapping_add(u64::from(byte)).wrapping_sub(0x40),
                _ => self.word(),
            };
            self.answer_by(address, garbage);
            self.guessed = true;
        }
    }

    /// Returns `good`, `good` with a bit changed, or anything.
    fn reply(&mut self, good: u64, bits: u8) -> u64 {
        match self.byte() {
            0..0xe0 => good,
            0xe0..0xfe => good ^ 1 << (self.byte() % bits),
            0xfe => u64::MAX,
            0xff => self.word(),
        }
    }
}

struct Inner<M> {
    model: M,
    state: State,
}

/// The registers of a unit.
pub(super) struct Unit<M>(Arc<Mutex<Inner<M>>>);

impl<M> Clone for Unit<M> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<M: Model> Unit<M> {
    pub(super) fn new(model: M, memory: Arc<HeapTables>, bytes: &[u8]) -> Self {
        let state = State {
            bytes: bytes.to_vec(),
            at: 0,
            registers: BTreeMap::new(),
            told: BTreeMap::new(),
            memory,
            late: VecDeque::new(),
            last: Posted::Nothing,
            guessed: false,
            waits: 0,
            accesses: 0,
            posted: 0,
            unanswered: Vec::new(),
        };
        Self(Arc::new(Mutex::new(Inner { model, state })))
    }

    fn lock(&self) -> MutexGuard<'_, Inner<M>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn with<V>(&self, what: impl FnOnce(&mut State) -> V) -> V {
        what(&mut self.lock().state)
    }

    pub(super) fn is_used_up(&self) -> bool {
        self.with(|state| state.at >= state.bytes.len())
    }

    /// It does something of its own accord, or not.
    pub(super) fn act(&self) {
        let Inner { model, state } = &mut *self.lock();
        match state.byte() {
            0..0x80 => state.answer_all(),
            0x80..0xc0 => {}
            0xc0..0xd0 => state.garbage(),
            _ => model.misbehave(state),
        }
    }

    fn read(&self, offset: usize, bits: u8) -> u64 {
        let Inner { model, state } = &mut *self.lock();
        state.access();
        let good = model.read(state, offset);
        let value = state.reply(good, bits) & (u64::MAX >> (64 - bits));
        if model.answered(state, offset, value) {
            state.unanswered.clear();
        }
        value
    }

    fn write(&self, offset: usize, value: u64) {
        let Inner { model, state } = &mut *self.lock();
        state.access();
        state.set(offset, value);
        state.told.insert(offset, value);
        let posted = model.write(state, offset, value);
        state.post(posted);
    }
}

impl<M: Model> Registers for Unit<M> {
    type Lock = iommu::SpinLock;

    fn read32(&self, offset: usize) -> u32 {
        self.read(offset, 32) as u32
    }
    fn write32(&self, offset: usize, value: u32) {
        self.write(offset, value.into());
    }
    fn read64(&self, offset: usize) -> u64 {
        self.read(offset, 64)
    }
    fn write64(&self, offset: usize, value: u64) {
        self.write(offset, value);
    }
    fn wait(&self, round: u32) -> bool {
        self.with(|state| state.waits += 1);
        self.act();
        round < ROUNDS
    }
}
