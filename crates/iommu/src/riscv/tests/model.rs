//! A small unit, written from the specification: what a driver can see of one.
//!
//! It has the registers, runs commands, stores what IOFENCE.C says, records faults, and finds contexts and
//! translations with its own reading of the chapter "Data Structures", through caches that only commands
//! empty. It makes the most of what the specification lets a unit do: between two fences it runs commands
//! backwards, and after each of them the devices that are [busy](State::busy) make accesses, so that
//! whatever can be cached is. It notes what it has received, in order, and everything that a driver must not
//! do. It can be slow (each answer takes some rounds), and broken in named ways.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::{format, string::String, vec::Vec};

use iopt::{Cell, HeapTables, TableMemory};

use crate::registers::Registers;
use crate::suite::PATIENCE;

/// The tag of translations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Space {
    Pscid(u64),
    Gscid(u64),
}

/// An address and 2^this pages.
pub(super) type Range = (u64, u32);

/// Commands and writes that the unit has received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Received {
    /// ddtp.iommu_mode.
    Mode(u64),
    /// fctl.
    Features(u32),
    /// A queue's register, and whether the queue is on.
    Queue(usize, bool),
    Device(Option<u64>),
    Process(u64, u64),
    /// All of one table, or leaves, and NL.
    Table(Space, Option<(Range, bool)>),
    /// IOTINVAL.VMA for a GSCID, or for all without one.
    First(Option<u64>),
    Second,
    /// Device, with its segment if that was said; process.
    Tlb(u64, bool, Option<u64>, Range),
    Fence,
    Wait,
}

/// Ways to be broken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Broken {
    /// A queue's register whose status never changes.
    pub(super) stuck: Option<usize>,
    /// ddtp.busy stays.
    pub(super) busy: bool,
    /// Modes that the unit has not.
    pub(super) no_modes: u64,
    /// fctl cannot be changed.
    pub(super) fixed: bool,
    /// A queue's base register that cannot be written.
    pub(super) no_base: Option<usize>,
    /// Commands are not looked at.
    pub(super) deaf: bool,
    /// IOFENCE.C is consumed, but stores nothing.
    pub(super) mute: bool,
    /// At the command of this number, counted from the last start, the unit stops with these bits in cqcsr;
    /// with 0, cqon goes.
    pub(super) stops: Option<(u32, u32)>,
}

#[derive(Debug, Default)]
pub(super) struct State {
    pub(super) capabilities: u64,
    pub(super) fctl: u32,
    pub(super) ddtp: u64,
    /// Registers by offset: cqb, fqb; cqh, cqt, fqh, fqt; cqcsr, fqcsr, pqcsr.
    pub(super) bases: BTreeMap<usize, u64>,
    pub(super) places: BTreeMap<usize, u32>,
    pub(super) csrs: BTreeMap<usize, u32>,
    pub(super) fetched: u32,
    /// Fetched, and not run.
    pub(super) pending: Vec<Received>,
    /// An ATS.INVAL before the next fence has no answer.
    pub(super) unanswered: bool,
    pub(super) contexts: BTreeMap<u64, [u64; 4]>,
    pub(super) processes: BTreeMap<(u64, u64), [u64; 2]>,
    /// The leaf that an access has found, by tag and number of a page.
    pub(super) translations: BTreeMap<(Space, u64), u64>,
    pub(super) tlbs: BTreeSet<(u64, u64, u64)>,
    /// Mappings of tables: root, and number of a page. Every request reaches it.
    pub(super) mapped: BTreeSet<(u64, u64)>,
    /// Where tables lie that the unit walks instead.
    pub(super) tables: Option<Arc<HeapTables>>,
    /// Accesses that go on all the time: device, process, number of a page.
    pub(super) busy: Vec<(u64, Option<u64>, u64)>,
    /// Rounds until the registers follow.
    slow: u32,
    /// Rounds that an answer takes.
    pub(super) latency: u32,
    pub(super) broken: Broken,
    pub(super) received: Vec<Received>,
    pub(super) wrong: Vec<String>,
}

/// The model; clones are the same unit.
#[derive(Clone)]
pub(super) struct Model {
    pub(super) memory: Arc<HeapTables>,
    state: Arc<Mutex<State>>,
}

pub(super) const ON: u32 = 1 << 16;
const BUSY: u32 = 1 << 17;
pub(super) const CQCSR: usize = 72;
const FQCSR: usize = 76;
pub(super) const PQCSR: usize = 80;
pub(super) const CQH: usize = 32;
pub(super) const CQT: usize = 36;
const FQH: usize = 48;
const FQT: usize = 52;

pub(super) const PPN: u64 = (1 << 44) - 1;

// Bits of a leaf.
const USER: u32 = 4;
pub(super) const GLOBAL: u32 = 5;

pub(super) fn bit(word: u64, bit: u32) -> bool {
    word >> bit & 1 == 1
}

impl Model {
    /// A unit with these capabilities that reads `memory`.
    pub(super) fn new(memory: Arc<HeapTables>, capabilities: u64) -> Self {
        let state = State {
            capabilities,
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

    pub(super) fn read(&self, address: u64) -> u64 {
        self.memory.read(address).unwrap_or(u64::MAX)
    }

    /// "Process to locate the Device-context": address of the context.
    fn locate(&self, state: &State, device: u64) -> Option<u64> {
        let extended = bit(state.capabilities, 22);
        let levels = (state.ddtp & 0xf).checked_sub(1).filter(|n| *n > 0)?;
        let (low, size) = if extended { (6, 64) } else { (7, 32) };
        if device >> (low + 9 * (levels - 1)) != 0 {
            return None;
        }
        let mut at = (state.ddtp >> 10 & PPN) << 12;
        for level in (1..levels).rev() {
            let entry = self.read(at + (device >> (low + 9 * (level - 1)) & 511) * 8);
            if !bit(entry, 0) {
                return None;
            }
            assert_eq!(entry & !(PPN << 10 | 1), 0, "reserved bits of an entry");
            at = (entry >> 10 & PPN) << 12;
        }
        Some(at + (device & ((1 << low) - 1)) * size)
    }

    /// The device's context, in the cache if it is there.
    pub(super) fn context(&self, state: &mut State, device: u64) -> Option<[u64; 4]> {
        if let Some(words) = state.contexts.get(&device) {
            return Some(*words);
        }
        let at = self.locate(state, device)?;
        let words = [0, 8, 16, 24].map(|word| self.read(at + word));
        let [control, second, attributes, first] = words;
        if !bit(control, 0) {
            return None;
        }
        if bit(state.capabilities, 22) {
            assert_eq!([32, 40, 48, 56].map(|word| self.read(at + word)), [0; 4]);
        }
        // "Device-context configuration checks".
        let processes = bit(control, 5);
        assert_eq!(
            control & !0b11_1010_0011,
            0,
            "bits that we do not use: {control:#x}"
        );
        assert!(!bit(control, 1) || bit(state.capabilities, 25), "EN_ATS");
        assert!(
            control & (3 << 7) == 0 || bit(state.capabilities, 24),
            "GADE, SADE"
        );
        assert_eq!(processes, bit(control, 9), "DPE with PDTV");
        assert_eq!(attributes & !0xffff_f000, 0, "ta {attributes:#x}");
        assert_eq!(first >> 44 & 0xffff, 0, "fsc {first:#x}");
        if processes {
            assert!(
                bit(state.capabilities, 37 + (first >> 60) as u32),
                "pdtp.MODE"
            );
        } else if first != 0 {
            assert!(bit(state.capabilities, (first >> 60) as u32 + 1), "MODE");
        }
        if second != 0 {
            assert_eq!(first, 0, "both stages");
            assert!(bit(state.capabilities, (second >> 60) as u32 + 9), "MODE");
            assert_eq!(second & 3, 0, "a root of 16 KiB");
        }
        state.contexts.insert(device, words);
        Some(words)
    }

    /// Translation context of an access: tag, root, levels, and true if the device may have a TLB.
    pub(super) fn look_up(
        &self,
        device: u64,
        process: Option<u64>,
    ) -> Option<(Space, u64, u64, bool)> {
        let (found, _) = self.find(&mut self.state(), (device, process), false)?;
        Some(found)
    }

    /// And the context's attributes, of one in a process directory.
    fn find(
        &self,
        state: &mut State,
        (device, process): (u64, Option<u64>),
        privileged: bool,
    ) -> Option<((Space, u64, u64, bool), u64)> {
        assert!(state.ddtp & 0xf != 1, "everything passes");
        let [control, second, attributes, first] = self.context(state, device)?;
        let tlb = bit(control, 1);
        let table = |pointer: u64| ((pointer & PPN) << 12, (pointer >> 60) - 5);
        if !bit(control, 5) {
            if process.is_some() {
                return None;
            }
            let (space, pointer) = if second != 0 {
                (Space::Gscid(second >> 44 & 0xffff), second)
            } else {
                (Space::Pscid(attributes >> 12 & 0xf_ffff), first)
            };
            let (root, levels) = table(pointer);
            return Some(((space, root, levels, tlb), 0));
        }
        let process = process.unwrap_or(0);
        let words = match state.processes.get(&(device, process)) {
            Some(words) => *words,
            None => {
                let levels = first >> 60;
                if process >> (8 + 9 * (levels - 1)) != 0 {
                    return None;
                }
                let mut at = (first & PPN) << 12;
                for level in (1..levels).rev() {
                    let entry = self.read(at + (process >> (8 + 9 * (level - 1)) & 511) * 8);
                    if !bit(entry, 0) {
                        return None;
                    }
                    at = (entry >> 10 & PPN) << 12;
                }
                at += (process & 0xff) * 16;
                [self.read(at), self.read(at + 8)]
            }
        };
        let [attributes, first] = words;
        if !bit(attributes, 0) {
            return None;
        }
        assert_eq!(attributes & !0xffff_f007, 0, "reserved");
        if privileged && !bit(attributes, 1) {
            // ENS.
            return None;
        }
        assert!(bit(state.capabilities, (first >> 60) as u32 + 1), "MODE");
        state.processes.insert((device, process), words);
        let (root, levels) = table(first);
        let space = Space::Pscid(attributes >> 12 & 0xf_ffff);
        Some(((space, root, levels, tlb), attributes))
    }

    /// The leaf of a page, if there is one.
    fn walk(
        &self,
        state: &State,
        (space, root, levels): (Space, u64, u64),
        page: u64,
    ) -> Option<u64> {
        let Some(tables) = &state.tables else {
            let mapped = state.mapped.contains(&(root, page));
            return mapped.then_some(1 << USER);
        };
        let mut at = root;
        for level in (0..levels).rev() {
            let first = level + 1 == levels && matches!(space, Space::Gscid(_));
            let entries = if first { 2048 } else { 512 };
            let word = tables.read(at + (page >> (9 * level)) % entries * 8)?;
            if !bit(word, 0) {
                return None;
            }
            if word & 0b1110 != 0 {
                return Some(word);
            }
            at = (word >> 10 & PPN) << 12;
        }
        None
    }

    /// Returns the cached leaf of a page. A global leaf of a first-stage table is there for all of them.
    fn cached(state: &State, space: Space, page: u64) -> Option<u64> {
        let own = state.translations.get(&(space, page)).copied();
        own.or_else(|| {
            let global = |((of, at), leaf): (&(Space, u64), &u64)| {
                let first = matches!((of, space), (Space::Pscid(_), Space::Pscid(_)));
                (first && *at == page && bit(*leaf, GLOBAL)).then_some(*leaf)
            };
            state.translations.iter().find_map(global)
        })
    }

    /// True when the device reaches the page, be it by something that is cached.
    pub(super) fn reaches(&self, device: u64, process: Option<u64>, page: u64) -> bool {
        self.access(&mut self.state(), (device, process), false, page)
    }

    /// The same of a request that asks for supervisor privilege, as one with a PASID can.
    pub(super) fn reaches_privileged(&self, device: u64, process: u64, page: u64) -> bool {
        self.access(&mut self.state(), (device, Some(process)), true, page)
    }

    pub(super) fn access(
        &self,
        state: &mut State,
        (device, process): (u64, Option<u64>),
        privileged: bool,
        page: u64,
    ) -> bool {
        let kept = (device, process.unwrap_or(u64::MAX), page);
        if !privileged && state.tlbs.contains(&kept) {
            return true;
        }
        let Some(found) = self.find(state, (device, process), privileged) else {
            return false;
        };
        let ((space, root, levels, tlb), attributes) = found;
        let found = Self::cached(state, space, page);
        let Some(leaf) = found.or_else(|| self.walk(state, (space, root, levels), page)) else {
            return false;
        };
        state.translations.insert((space, page), leaf);
        // U; requests with privilege reach what is for all with SUM.
        let user = bit(leaf, USER);
        if privileged {
            return !user || bit(attributes, 2);
        }
        if tlb && user {
            state.tlbs.insert(kept);
        }
        user
    }

    /// Records a fault, as hardware does, or loses it.
    pub(super) fn fault(&self, header: u64, iova: u64) {
        self.fault_of_second(header, iova, 0);
    }

    /// The same with iotval2.
    pub(super) fn fault_of_second(&self, header: u64, iova: u64, second: u64) {
        let state = &mut *self.state();
        let csr = state.csrs.entry(FQCSR).or_default();
        if *csr & ON == 0 || *csr & 0x300 != 0 {
            return;
        }
        let place = |at| state.places.get(&at).copied().unwrap_or(0);
        let (head, tail) = (place(FQH), place(FQT));
        if (tail + 1) % 128 == head {
            *csr |= 1 << 9;
            return;
        }
        let page = (state.bases[&40] >> 10 & PPN) << 12;
        let record = &self.memory.entries(page, 512)[tail as usize * 4..][..4];
        for (cell, word) in record.iter().zip([header, 0, iova, second]) {
            cell.set_release(word);
        }
        state.places.insert(FQT, (tail + 1) % 128);
    }

    /// The status follows, and commands are fetched.
    fn advance(&self, state: &mut State) {
        if state.slow > 0 {
            state.slow -= 1;
            return;
        }
        if !state.broken.busy {
            state.ddtp &= !(1 << 4);
        }
        for (offset, csr) in &mut state.csrs {
            let on = if *csr & 1 == 1 { ON } else { 0 };
            if *csr & BUSY != 0 && state.broken.stuck != Some(*offset) {
                *csr = *csr & !(BUSY | ON) | on;
            }
        }
        self.fetch(state);
    }

    fn control(state: &mut State, offset: usize, value: u32) {
        let csr = state.csrs.entry(offset).or_default();
        if *csr & BUSY != 0 {
            state.wrong.push(format!("{offset} while it is busy"));
        }
        let (was, is) = (*csr & 1 == 1, value & 1 == 1);
        let mut errors = *csr & !value & 0xf00;
        if is && !was {
            errors = 0;
            let first = if offset == CQCSR { CQH } else { FQT };
            state.places.insert(first, 0);
            (state.fetched, state.pending) = (0, Vec::new());
        }
        *csr = errors | *csr & ON | BUSY | u32::from(is);
        if was != is {
            state.received.push(Received::Queue(offset, is));
        }
    }

    fn point(state: &mut State, value: u64) {
        let (was, is) = (state.ddtp & 0xf, value & 0xf);
        let pages = (state.ddtp ^ value) & (PPN << 10);
        let wrong = match is {
            _ if bit(state.ddtp, 4) => Some("ddtp while it is busy"),
            0 if pages != 0 => Some("another page with Off"),
            1 if was > 1 => Some("Bare that was not Off"),
            2.. if was > 1 && (was != is || pages != 0) => Some("a directory over another"),
            _ => None,
        };
        state.wrong.extend(wrong.map(String::from));
        state.received.push(Received::Mode(is));
        // A mode that the unit has not becomes the highest that it has.
        let has = |mode: &u64| !bit(state.broken.no_modes, *mode as u32);
        let mode = if has(&is) {
            is
        } else {
            (0..5).rev().find(has).unwrap_or(0)
        };
        state.ddtp = value & !0xf | mode | 1 << 4;
    }
}

impl Registers for Model {
    type Lock = crate::SpinLock;

    fn read32(&self, offset: usize) -> u32 {
        let state = &mut *self.state();
        match offset {
            8 => state.fctl,
            CQH | CQT | FQH | FQT => state.places.get(&offset).copied().unwrap_or(0),
            CQCSR | FQCSR | PQCSR => state.csrs.get(&offset).copied().unwrap_or(0),
            _ => {
                state.wrong.push(format!("32 bits of {offset}"));
                u32::MAX
            }
        }
    }

    fn write32(&self, offset: usize, value: u32) {
        let state = &mut *self.state();
        match offset {
            8 => {
                if state.ddtp & 0xf != 0 || state.csrs.values().any(|csr| csr & (ON | 1) != 0) {
                    state.wrong.push("fctl of a unit that works".into());
                }
                state.received.push(Received::Features(value));
                if !state.broken.fixed {
                    state.fctl = value;
                }
            }
            CQT | FQH => {
                state.places.insert(offset, value);
            }
            CQCSR | FQCSR | PQCSR => {
                Self::control(state, offset, value);
                state.slow = state.latency;
            }
            _ => state.wrong.push(format!("32 bits of {offset}")),
        }
        if state.slow == 0 {
            self.advance(state);
        }
    }

    fn read64(&self, offset: usize) -> u64 {
        let state = &mut *self.state();
        match offset {
            0 => state.capabilities,
            16 => state.ddtp,
            24 | 40 => state.bases.get(&offset).copied().unwrap_or(0),
            _ => {
                state.wrong.push(format!("64 bits of {offset}"));
                u64::MAX
            }
        }
    }

    fn write64(&self, offset: usize, value: u64) {
        let state = &mut *self.state();
        match offset {
            16 => {
                Self::point(state, value);
                state.slow = state.latency;
            }
            24 | 40 => {
                let csr = if offset == 24 { CQCSR } else { FQCSR };
                if state
                    .csrs
                    .get(&csr)
                    .is_some_and(|csr| csr & (ON | BUSY) != 0)
                {
                    state.wrong.push(format!("{offset} of a queue that is on"));
                }
                if state.broken.no_base != Some(offset) {
                    state.bases.insert(offset, value);
                }
            }
            _ => state.wrong.push(format!("64 bits of {offset}")),
        }
        if state.slow == 0 {
            self.advance(state);
        }
    }

    fn wait(&self, round: u32) -> bool {
        self.advance(&mut self.state());
        round < PATIENCE
    }
}
