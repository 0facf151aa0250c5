//! A small unit, written from the specification: what a driver can see of one.
//!
//! It follows the Global Command Register, consumes the queue, writes status words, answers register
//! commands, and records faults; it looks devices up in memory (`look_up.rs`). It notes what it has received,
//! in order, and everything that a driver must not do. It can be slow (each answer takes some rounds), and
//! broken in named ways.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::{format, string::String, vec::Vec};

use iopt::{Cell, HeapTables, TableMemory};

use crate::registers::Registers;
use crate::suite::PATIENCE;

/// Commands and writes that the unit has received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Received {
    WriteBuffers,
    Root(u64),
    Queue(bool),
    Translation(bool),
    ProtectedMemoryOff,
    /// Granularity, domain, source.
    Contexts(u8, u16, u16),
    /// Granularity, domain, PASID.
    Pasids(u8, u16, u32),
    /// Granularity, domain, and for pages: address, mask, IH.
    Iotlb(u8, u16, Option<(u64, u32, bool)>),
    /// The same of one PASID, which comes behind the domain.
    PasidIotlb(u8, u16, u32, Option<(u64, u32, bool)>),
    /// In a device: source, PASID, queue depth, address, mask.
    Device(u16, u32, u8, u64, u32),
    /// A wait that writes this.
    Wait(u32),
}

/// Ways to be broken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Broken {
    /// Bits of GSTS that never change.
    pub(super) stuck: u32,
    /// The queue is not looked at.
    pub(super) deaf: bool,
    /// Waits are consumed, but write nothing.
    pub(super) mute: bool,
    /// The queue stops with this bit of FSTS at the descriptor of this number, counted from 0.
    pub(super) stops: Option<(u32, u32)>,
    /// Register commands are never done.
    pub(super) busy: bool,
    /// Register commands are done, and say that nothing was invalidated.
    pub(super) refuses: bool,
    /// PMEN.PRS stays.
    pub(super) protects: bool,
}

#[derive(Debug, Default)]
pub(super) struct State {
    pub(super) cap: u64,
    pub(super) ecap: u64,
    gsts: u32,
    root: u64,
    pub(super) active_root: u64,
    ccmd: u64,
    iotlb: u64,
    iva: u64,
    pub(super) fsts: u32,
    pub(super) pmen: u32,
    head: u64,
    tail: u64,
    iqa: u64,
    pub(super) fetched: u32,
    /// Records: low, high.
    pub(super) records: Vec<(u64, u64)>,
    next_record: usize,
    /// A command of GCMD on its way, and the rounds that it takes.
    pending: Option<(u32, u32)>,
    /// Rounds that an answer takes.
    pub(super) latency: u32,
    pub(super) broken: Broken,
    pub(super) received: Vec<Received>,
    pub(super) wrong: Vec<String>,
}

/// The model; clones are the same unit.
#[derive(Clone)]
pub(super) struct Model {
    memory: Arc<HeapTables>,
    /// Reads a word as the unit sees it.
    pub(super) read: Arc<dyn Fn(u64) -> u64 + Send + Sync>,
    state: Arc<Mutex<State>>,
}

const TE: u32 = 1 << 31;
const SRTP: u32 = 1 << 30;
const WBF: u32 = 1 << 27;
const QIE: u32 = 1 << 26;

impl Model {
    /// A unit with these capability registers that reads `memory`.
    pub(super) fn new(memory: Arc<HeapTables>, cap: u64, ecap: u64) -> Self {
        let coherent = memory.clone();
        let read = move |address| coherent.read(address).unwrap_or(u64::MAX);
        Self::reading(memory, cap, ecap, read)
    }

    /// The same, reading memory in another way.
    pub(super) fn reading(
        memory: Arc<HeapTables>,
        cap: u64,
        ecap: u64,
        read: impl Fn(u64) -> u64 + Send + Sync + 'static,
    ) -> Self {
        let records = ((cap >> 40 & 0xff) + 1) as usize;
        let state = State {
            cap,
            ecap,
            records: std::vec![(0, 0); records],
            ..State::default()
        };
        Self {
            memory,
            read: Arc::new(read),
            state: Arc::new(Mutex::new(state)),
        }
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Everything that it has received since the last call.
    pub(super) fn received(&self) -> Vec<Received> {
        let mut state = self.state();
        assert!(state.wrong.is_empty(), "{:?}", state.wrong);
        std::mem::take(&mut state.received)
    }

    /// Records a fault, as hardware does: into the next record, or not at all.
    pub(super) fn fault(&self, source: u16, page: u64, read: bool, reason: u8) {
        let mut state = self.state();
        let next = state.next_record;
        if state.fsts & 1 == 1 {
            return;
        }
        if state.records[next].1 >> 63 == 1 {
            state.fsts |= 1;
            return;
        }
        let high = 1 << 63 | u64::from(read) << 62 | u64::from(reason) << 32 | u64::from(source);
        state.records[next] = (page, high);
        if state.fsts & 2 == 0 {
            state.fsts = state.fsts & !0xff00 | 2 | (next as u32) << 8;
        }
        state.next_record = (next + 1) % state.records.len();
    }

    /// One descriptor; false when it is not one.
    fn execute(&self, state: &mut State, words: [u64; 4]) -> bool {
        let [low, high, ..] = words;
        let (granularity, domain) = ((low >> 4 & 3) as u8, (low >> 16) as u16);
        let scalable = state.iqa >> 11 & 1 == 1;
        let pages = || {
            let (address, mask) = (high & !0xfff, (high & 0x3f) as u32);
            let aligned = address & ((0x1000u64 << mask) - 1) == 0;
            let fits = u64::from(mask) <= state.cap >> 48 & 0x3f;
            (aligned && fits && high & 0xf80 == 0).then_some((address, mask, high >> 6 & 1 == 1))
        };
        let pasid = (low >> 32) as u32 & 0xf_ffff;
        // PFSID: the function itself where the unit counts, and else reserved.
        let physical = (low >> 12 & 0xf | low >> 52 << 4) as u16;
        let counts = state.ecap >> 41 & 1 == 1;
        let physical_is = |source: u16| physical == if counts { source } else { 0 };
        // The lowest 0 from bit 12 on says how many pages.
        let sized = |high: u64, size: bool| {
            let mask = if size {
                (high >> 12).trailing_ones() + 1
            } else {
                0
            };
            let address = (high >> 12).checked_shr(mask).unwrap_or(0) << mask << 12;
            (address, mask)
        };
        let received = match low & 0xf {
            1 if high == 0 => Received::Contexts(granularity, domain, (low >> 32) as u16),
            2 => {
                let drains = low >> 6 & 3;
                // Bit 6 is DW, bit 7 DR; they are reserved where the unit does not drain.
                let offered = state.cap >> 54 & 3;
                match (granularity, pages()) {
                    _ if drains & !offered != 0 => return false,
                    (1 | 2, _) if high == 0 => Received::Iotlb(granularity, domain, None),
                    (3, Some(pages)) => Received::Iotlb(3, domain, Some(pages)),
                    _ => return false,
                }
            }
            5 if low & 0xffff_ffd0 == 0 && low >> 5 & 1 == 1 => {
                if !state.broken.mute {
                    let status = self.memory.entries(high & !7, 1);
                    status[0].set(low >> 32);
                }
                Received::Wait((low >> 32) as u32)
            }
            6 if scalable && low & 0xfff0_0000_0000_f1c0 == 0 => match (granularity, pages()) {
                (2, _) if high == 0 => Received::PasidIotlb(2, domain, pasid, None),
                (3, Some(pages)) => Received::PasidIotlb(3, domain, pasid, Some(pages)),
                _ => return false,
            },
            7 if scalable && granularity != 2 && high == 0 => {
                Received::Pasids(granularity, domain, pasid)
            }
            3 | 8 if state.ecap >> 2 & 1 == 0 => return false,
            3 if low & 0xffe0_0ff0 == 0 && high & 0xffe == 0 => {
                let source = (low >> 32) as u16;
                let (address, mask) = sized(high, high & 1 == 1);
                if !physical_is(source) {
                    return false;
                }
                Received::Device(source, 0, (low >> 16) as u8 & 0x1f, address, mask)
            }
            // G is not needed.
            8 if scalable && low & 0xe00 == 0 && high & 0x7ff == 0 => {
                let source = (low >> 16) as u16;
                let (address, mask) = sized(high, high >> 11 & 1 == 1);
                if !physical_is(source) {
                    return false;
                }
                Received::Device(source, pasid, (low >> 4) as u8 & 0x1f, address, mask)
            }
            _ => return false,
        };
        state.received.push(received);
        true
    }

    /// Consumes the queue.
    fn fetch(&self, state: &mut State) {
        let bytes = if state.iqa >> 11 & 1 == 1 { 32 } else { 16 };
        let errors = 0x70;
        while state.gsts & QIE != 0
            && !state.broken.deaf
            && state.fsts & errors == 0
            && state.head != state.tail
        {
            let at = (state.iqa & !0xfff) + state.head;
            let words = [0, 8, 16, 24].map(|word| match word < bytes {
                true => (self.read)(at + word),
                false => 0,
            });
            let stop = state.broken.stops.filter(|stop| stop.1 == state.fetched);
            state.fetched += 1;
            let good = words[2] == 0 && words[3] == 0;
            if let Some((bit, _)) = stop {
                state.fsts |= bit;
            } else if !good || !self.execute(state, words) {
                state.wrong.push(format!("descriptor {words:x?}"));
                state.fsts |= 1 << 4;
            } else {
                state.head = (state.head + bytes) % 4096;
            }
        }
    }

    fn command(&self, state: &mut State, value: u32) {
        let changed = (value ^ state.gsts) & (TE | QIE) | value & (SRTP | WBF);
        let allowed = !state.broken.stuck;
        match changed {
            TE if value & TE != 0 => {
                if state.gsts & SRTP == 0 {
                    state.wrong.push("translation without a root table".into());
                }
                state.received.push(Received::Translation(true));
            }
            TE => state.received.push(Received::Translation(false)),
            QIE => {
                if value & QIE != 0 && state.tail != 0 {
                    state.wrong.push("a queue that begins with its tail".into());
                }
                if value & QIE == 0 && state.head != state.tail {
                    state.wrong.push("a queue that is cut off".into());
                }
                (state.head, state.fetched) = (0, 0);
                state.received.push(Received::Queue(value & QIE != 0));
            }
            SRTP => {
                state.active_root = state.root;
                state.gsts |= SRTP & allowed;
                let root = state.root;
                state.received.push(Received::Root(root));
            }
            WBF => {
                state.gsts &= !WBF | !allowed;
                state.received.push(Received::WriteBuffers);
            }
            other => state.wrong.push(format!("GCMD changes {other:#x} at once")),
        }
        let states = (TE | QIE) & allowed;
        state.gsts = state.gsts & !states | value & states;
    }

    /// Answers what has waited long enough.
    fn advance(&self, state: &mut State) {
        match state.pending {
            Some((value, 0)) => {
                state.pending = None;
                self.command(state, value);
            }
            Some((value, left)) => state.pending = Some((value, left - 1)),
            None => self.fetch(state),
        }
        self.register_commands(state);
    }

    fn register_commands(&self, state: &mut State) {
        if state.broken.busy {
            return;
        }
        let refused = state.broken.refuses;
        if state.ccmd >> 63 == 1 {
            let value = state.ccmd;
            let granularity = value >> 61 & 3;
            state.ccmd = if refused { 0 } else { granularity << 59 };
            let received =
                Received::Contexts(granularity as u8, value as u16, (value >> 16) as u16);
            state.received.push(received);
        }
        if state.iotlb >> 63 == 1 {
            let (value, iva) = (state.iotlb, state.iva);
            let granularity = value >> 60 & 3;
            state.iotlb = if refused { 0 } else { granularity << 57 };
            let pages = (granularity == 3).then_some((
                iva & !0xfff,
                (iva & 0x3f) as u32,
                iva >> 6 & 1 == 1,
            ));
            let received = Received::Iotlb(granularity as u8, (value >> 32) as u16, pages);
            state.received.push(received);
        }
    }

    fn after_write(&self, state: &mut State) {
        if state.latency == 0 {
            self.advance(state);
        }
    }

    /// The record and the word of it at an offset.
    fn record(state: &State, offset: usize) -> Option<usize> {
        let first = (state.cap >> 24 & 0x3ff) as usize * 16;
        let index = offset.checked_sub(first)? / 16;
        (index < state.records.len()).then_some(index)
    }
}

impl Registers for Model {
    type Lock = crate::SpinLock;

    fn read32(&self, offset: usize) -> u32 {
        let state = self.state();
        match offset {
            0x00 => 0x10,
            0x1c => state.gsts,
            0x34 => state.fsts,
            0x64 => state.pmen,
            _ => u32::MAX,
        }
    }

    fn write32(&self, offset: usize, value: u32) {
        let state = &mut *self.state();
        match offset {
            0x18 => {
                if state.pending.is_some() {
                    state.wrong.push("GCMD while a command is under way".into());
                }
                if value & SRTP != 0 {
                    state.gsts &= !SRTP;
                }
                if value & WBF != 0 {
                    state.gsts |= WBF;
                }
                state.pending = Some((value, state.latency));
                self.after_write(state);
            }
            // PFO, IQE, ICE, ITE: cleared by 1.
            0x34 => state.fsts &= !(value & 0x71),
            0x64 => {
                state.received.push(Received::ProtectedMemoryOff);
                // PRS follows EPM.
                let status = value >> 31 | u32::from(state.broken.protects);
                state.pmen = value & 1 << 31 | status;
            }
            _ => match Self::record(state, offset - 12) {
                Some(index) if offset & 0xf == 12 && value == 1 << 31 => {
                    state.records[index].1 &= !(1 << 63);
                    if state.records.iter().all(|record| record.1 >> 63 == 0) {
                        state.fsts &= !2;
                    }
                }
                _ => state.wrong.push(format!("write of {offset:#x}")),
            },
        }
    }

    fn read64(&self, offset: usize) -> u64 {
        let state = self.state();
        let iotlb = (state.ecap >> 8 & 0x3ff) as usize * 16;
        match offset {
            0x08 => state.cap,
            0x10 => state.ecap,
            0x20 => state.root,
            0x28 => state.ccmd,
            0x80 => state.head,
            0x88 => state.tail,
            0x90 => state.iqa,
            0xb0 => 0x3,
            _ if offset == iotlb + 8 => state.iotlb,
            _ => match (Self::record(&state, offset), offset & 0xf) {
                (Some(index), 0) => state.records[index].0,
                (Some(index), 8) => state.records[index].1,
                _ => u64::MAX,
            },
        }
    }

    fn write64(&self, offset: usize, value: u64) {
        let state = &mut *self.state();
        let iotlb = (state.ecap >> 8 & 0x3ff) as usize * 16;
        let queued = state.gsts & QIE != 0;
        match offset {
            0x20 => state.root = value,
            _ if offset == 0x28 || offset == iotlb + 8 => {
                let register = if offset == 0x28 {
                    &mut state.ccmd
                } else {
                    &mut state.iotlb
                };
                if queued || *register >> 63 == 1 {
                    state.wrong.push(format!("register {offset:#x} too early"));
                } else {
                    *register = value;
                }
                self.after_write(state);
            }
            0x88 => {
                state.tail = value;
                self.after_write(state);
            }
            0x90 if !queued => state.iqa = value,
            _ if offset == iotlb => state.iva = value,
            _ => state.wrong.push(format!("write of {offset:#x}")),
        }
    }

    fn wait(&self, round: u32) -> bool {
        self.advance(&mut self.state());
        round < PATIENCE
    }
}
