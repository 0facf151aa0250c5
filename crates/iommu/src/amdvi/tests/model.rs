//! A small unit, written from the specification: what a driver can see of one.
//!
//! It follows the Control Register, fetches commands, stores what COMPLETION_WAIT says, logs events, and
//! looks devices up with its own reading of section 2.2.2, through a cache that only commands empty. It
//! notes what it has received, in order, and everything that a driver must not do. It can be slow (each
//! answer takes some rounds), and broken in named ways.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::{format, string::String, vec::Vec};

use iopt::{Cell, HeapTables, TableMemory};

use crate::registers::Registers;
use crate::suite::PATIENCE;

/// Commands and writes that the unit has received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Received {
    /// The Device Table Base Address Register.
    Table(u64),
    /// Bits of the Control Register that become 1, and that become 0.
    Control(u64, u64),
    ExclusionOff,
    Device(u16),
    /// Domain, address, 2^this pages, PDE.
    Pages(u16, u64, u32, bool),
    /// Domain, PASID, and the rest as for pages.
    GuestPages(u16, u32, u64, u32, bool),
    /// In a device: source, Maxpend, address, 2^this pages.
    InDevice(u16, u8, u64, u32),
    All,
    Barrier,
    Wait,
}

/// Ways to be broken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Broken {
    /// Bits of the status that never change.
    pub(super) stuck: u64,
    /// Commands are not looked at.
    pub(super) deaf: bool,
    /// COMPLETION_WAIT is consumed, but stores nothing.
    pub(super) mute: bool,
    /// At the command of this number, counted from the last start, the unit stops and logs this event,
    /// if it is not 0.
    pub(super) stops: Option<(u64, u32)>,
    /// Events do not arrive where the tail says.
    pub(super) late: bool,
    /// The event log's head is taken over while the log is off alone.
    pub(super) keeps_head: bool,
    /// Devices do not answer; the unit gives them up and goes on.
    pub(super) silent: bool,
}

#[derive(Debug, Default)]
pub(super) struct State {
    features: u64,
    pub(super) control: u64,
    table: u64,
    commands: u64,
    events: u64,
    pub(super) exclusion: u64,
    head: u64,
    tail: u64,
    event_head: u64,
    event_tail: u64,
    status: u64,
    halted: bool,
    pub(super) fetched: u32,
    cached: BTreeMap<u16, [u64; 2]>,
    /// Rounds until the status follows the control.
    pending: u32,
    /// Rounds that an answer takes.
    pub(super) latency: u32,
    pub(super) broken: Broken,
    received: Vec<Received>,
    wrong: Vec<String>,
}

/// The model; clones are the same unit.
#[derive(Clone)]
pub(super) struct Model {
    memory: Arc<HeapTables>,
    state: Arc<Mutex<State>>,
}

const TRANSLATE: u64 = 1;
const LOG: u64 = 1 << 2;
const FETCH: u64 = 1 << 12;
const OVERFLOW: u64 = 1;
const LOGGING: u64 = 1 << 3;
const FETCHING: u64 = 1 << 4;

impl Model {
    /// A unit with this feature register that reads `memory`.
    pub(super) fn new(memory: Arc<HeapTables>, features: u64) -> Self {
        let state = State {
            features,
            ..State::default()
        };
        Self {
            memory,
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

    fn read(&self, address: u64) -> u64 {
        self.memory.read(address).unwrap_or(u64::MAX)
    }

    /// The entry of a requester, from the cache if it is there; `None` beyond the table.
    fn fetch_entry(&self, source: u16) -> Option<[u64; 2]> {
        let state = &mut *self.state();
        assert_eq!(state.control & TRANSLATE, 1, "everything passes");
        let room = ((state.table & 0x1ff) + 1) * 128;
        if u64::from(source) >= room {
            return None;
        }
        let at = (state.table & !0xfff) + u64::from(source) * 32;
        let entry = state.cached.entry(source);
        Some(*entry.or_insert_with(|| {
            let words = [0, 8, 16, 24].map(|word| self.read(at + word));
            assert_eq!(
                words[2..],
                [0, 0],
                "interrupts pass, and guest tables have 4 levels"
            );
            [words[0], words[1]]
        }))
    }

    /// Looks up an entry in guest CR3 tables, by its own reading of section 2.2.6: the domain by which it tags, and the
    /// table. `None` when it blocks.
    pub(super) fn look_up_guest(&self, source: u16, pasid: Option<u64>) -> Option<(u16, u64)> {
        let [first, second] = self.fetch_entry(source)?;
        assert_eq!(first & 1, 1, "V = 0: everything passes");
        if first >> 1 & 1 == 0 {
            return None;
        }
        assert_eq!(self.state().control >> 16 & 1, 1, "GTEn");
        assert_eq!(first >> 55 & 1, 1, "GV");
        assert_eq!(first >> 9 & 7, 0, "host translation is off");
        assert_eq!(first >> 61, 3, "IR and IW");
        // Without GIoV what has no PASID would pass.
        assert_eq!(first >> 54 & 1, 1, "GIoV");
        let glx = first >> 56 & 3;
        let pasid = pasid.unwrap_or(0);
        if pasid >> (9 * (glx + 1)) != 0 {
            return None;
        }
        let (a, b, c) = (first >> 58 & 7, second >> 16 & 0xffff, second >> 43);
        let mut word = a << 12 | b << 15 | c << 31;
        for level in (0..=glx).rev() {
            let at = (word & 0x000f_ffff_ffff_f000) + (pasid >> (9 * level) & 0x1ff) * 8;
            word = self.read(at);
            if word & 1 == 0 {
                return None;
            }
        }
        assert_eq!(word & 0xfff0_0000_0000_0ffe, 0, "reserved bits");
        Some((second as u16, word & !1))
    }

    /// Looks a requester up, in the unit's cache first: domain, table, levels. `None` when it blocks.
    pub(super) fn look_up(&self, source: u16) -> Option<(u16, u64, u64)> {
        let [first, second] = self.fetch_entry(source)?;
        assert_eq!(first & 1, 1, "V = 0: everything passes");
        if first >> 1 & 1 == 0 {
            return None;
        }
        assert_eq!(first >> 61, 3, "IR and IW");
        assert_eq!(first >> 52 & 0x1ff, 0, "no guest tables");
        assert_eq!(second >> 16 & !(1 << 16), 0, "nothing but domain and I");
        let mode = first >> 9 & 7;
        assert!((1..=6).contains(&mode), "mode {mode}");
        Some((second as u16, first & 0x000f_ffff_ffff_f000, mode))
    }

    /// True if translation requests of a device are answered (I), according to the unit's cache.
    pub(super) fn serves_tlb(&self, source: u16) -> bool {
        self.look_up(source);
        self.state().cached[&source][1] >> 32 & 1 == 1
    }

    /// The first words of an entry as it is in memory.
    pub(super) fn entry(&self, source: u16) -> u64 {
        let table = self.state().table & !0xfff;
        self.read(table + u64::from(source) * 32)
    }

    /// Logs an event, as hardware does, or loses it.
    pub(super) fn event(&self, first: u64, second: u64) {
        self.log(&mut self.state(), [first, second]);
    }

    fn log(&self, state: &mut State, words: [u64; 2]) {
        if state.status & LOGGING == 0 {
            return;
        }
        let next = (state.event_tail + 16) % 4096;
        if next == state.event_head {
            state.status = state.status & !LOGGING | OVERFLOW;
            return;
        }
        if !state.broken.late {
            let at = (state.events & 0x000f_ffff_ffff_f000) + state.event_tail;
            let cells = self.memory.entries(at & !0xfff, 512);
            let place = (at & 0xfff) as usize / 8;
            cells[place + 1].set(words[1]);
            cells[place].set_release(words[0]);
        }
        state.event_tail = next;
    }

    /// One command; false when it is not one.
    fn execute(&self, state: &mut State, [first, second]: [u64; 2]) -> bool {
        let received = match first >> 60 {
            1 if first & 0x0ff0_0000_0000_0000 == 0 => match first & 7 {
                // S.
                1 => {
                    if !state.broken.mute {
                        let at = first & 0x000f_ffff_ffff_fff8;
                        self.memory.entries(at, 1)[0].set_release(second);
                    }
                    Received::Wait
                }
                // F.
                4 if second == 0 => Received::Barrier,
                _ => return false,
            },
            2 if first & 0x0fff_ffff_ffff_0000 == 0 && second == 0 => {
                state.cached.remove(&(first as u16));
                Received::Device(first as u16)
            }
            // GN.
            3 if first & 0x0fff_0000_fff0_0000 == 0 && second & 0xffc == 4 => {
                let (address, mask) = sized(second);
                let (domain, pasid) = ((first >> 32) as u16, first as u32 & 0xf_ffff);
                Received::GuestPages(domain, pasid, address, mask, second >> 1 & 1 == 1)
            }
            3 if first & 0x0fff_0000_ffff_ffff == 0 && second & 0xffc == 0 => {
                let (address, mask) = sized(second);
                Received::Pages((first >> 32) as u16, address, mask, second >> 1 & 1 == 1)
            }
            // QueueID is the device, and there is no PASID.
            4 if first >> 32 & 0x0fff_ffff == first & 0xffff
                && first & 0x00ff_0000 == 0
                && second & 0xffe == 0 =>
            {
                let source = first as u16;
                let (address, mask) = sized(second);
                if state.broken.silent {
                    let at = (state.commands & 0x000f_ffff_ffff_f000) + state.head;
                    self.log(state, [7 << 60 | u64::from(source), at]);
                }
                Received::InDevice(source, (first >> 24) as u8, address, mask)
            }
            8 if first << 4 == 0 && second == 0 && state.features >> 6 & 1 == 1 => {
                state.cached.clear();
                Received::All
            }
            _ => return false,
        };
        state.received.push(received);
        true
    }

    fn fetch(&self, state: &mut State) {
        while state.status & FETCHING != 0 && !state.broken.deaf && state.head != state.tail {
            let at = (state.commands & 0x000f_ffff_ffff_f000) + state.head;
            let words = [self.read(at), self.read(at + 8)];
            let stop = state.broken.stops.filter(|stop| stop.1 == state.fetched);
            state.fetched += 1;
            let event = match stop {
                Some((event, _)) => event,
                None if self.execute(state, words) => {
                    state.head = (state.head + 16) % 4096;
                    continue;
                }
                None => {
                    state.wrong.push(format!("command {words:x?}"));
                    5
                }
            };
            state.halted = true;
            state.status &= !FETCHING;
            if event != 0 {
                self.log(state, [event << 60, at]);
            }
        }
    }

    /// The status follows the control, and commands are fetched.
    fn advance(&self, state: &mut State) {
        if state.pending > 0 {
            state.pending -= 1;
            return;
        }
        let on = |bit: u64| state.control & bit != 0 && state.control & TRANSLATE != 0;
        let fetching = if on(FETCH) && !state.halted {
            FETCHING
        } else {
            0
        };
        let logging = if on(LOG) && state.status & OVERFLOW == 0 {
            LOGGING
        } else {
            0
        };
        let free = (FETCHING | LOGGING) & !state.broken.stuck;
        state.status = state.status & !free | (fetching | logging) & free;
        self.fetch(state);
    }

    fn control(state: &mut State, value: u64) {
        let (set, cleared) = (value & !state.control, state.control & !value);
        if cleared & FETCH != 0 {
            (state.halted, state.fetched) = (false, 0);
        }
        if set & TRANSLATE != 0 && state.table == 0 {
            state
                .wrong
                .push("translation without a device table".into());
        }
        state.control = value;
        state.pending = state.latency;
        if set | cleared != 0 {
            state.received.push(Received::Control(set, cleared));
        }
    }
}

/// Address and size: S says that the lowest 0 from bit 12 on gives it.
fn sized(word: u64) -> (u64, u32) {
    let pages = word >> 12;
    match word & 1 {
        0 => (pages << 12, 0),
        _ => {
            let mask = pages.trailing_ones() + 1;
            (pages >> mask << mask << 12, mask)
        }
    }
}

impl Registers for Model {
    type Lock = crate::SpinLock;

    fn read32(&self, offset: usize) -> u32 {
        self.state().wrong.push(format!("32 bits of {offset:#x}"));
        0
    }

    fn write32(&self, offset: usize, _value: u32) {
        self.state().wrong.push(format!("32 bits of {offset:#x}"));
    }

    fn read64(&self, offset: usize) -> u64 {
        let state = self.state();
        match offset {
            0x00 => state.table,
            0x08 => state.commands,
            0x10 => state.events,
            0x18 => state.control,
            0x30 => state.features,
            0x2000 => state.head,
            0x2008 => state.tail,
            0x2010 => state.event_head,
            0x2018 => state.event_tail,
            0x2020 => state.status,
            _ => u64::MAX,
        }
    }

    fn write64(&self, offset: usize, value: u64) {
        let state = &mut *self.state();
        let fetching = state.control & FETCH != 0 || state.status & FETCHING != 0;
        let logging = state.control & LOG != 0 || state.status & LOGGING != 0;
        match offset {
            0x00 => {
                state.table = value;
                state.received.push(Received::Table(value));
            }
            0x08 if !fetching => state.commands = value,
            0x10 if !logging => state.events = value,
            0x18 => Self::control(state, value),
            0x20 => {
                if state.exclusion & 1 > value & 1 {
                    state.received.push(Received::ExclusionOff);
                }
                state.exclusion = value;
            }
            0x2000 if !fetching => state.head = value,
            0x2008 => state.tail = value,
            0x2010 if state.broken.keeps_head && logging => {}
            0x2010 => state.event_head = value,
            0x2018 if !logging => state.event_tail = value,
            0x2020 => state.status &= !(value & 7),
            _ => state.wrong.push(format!("write of {offset:#x}")),
        }
        if state.latency == 0 {
            self.advance(state);
        }
    }

    fn wait(&self, round: u32) -> bool {
        self.advance(&mut self.state());
        round < PATIENCE
    }
}
