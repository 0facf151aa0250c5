//! A small unit, written from the specification: what a driver can see of one.
//!
//! Its registers and its command queue are here, `caches.rs` has what it remembers. It notes what it has
//! received, in order, and everything that a driver must not do. It can be slow (each answer takes some rounds),
//! and broken in named ways. Devices that it watches make requests all the time.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::{format, string::String, vec::Vec};

use iopt::walk::{WalkMemory, Walker};
use iopt::{Cell, HeapTables, TableMemory};

use super::caches::{Caches, Looked, Range, Request, Unit_};
use crate::registers::Registers;
use crate::suite::PATIENCE;

/// Commands and writes that the unit has received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Received {
    /// GBPA.ABORT.
    Abort(bool),
    /// CR0.
    Control(u32),
    AllStreams,
    /// Leaf.
    Stream(u32, bool),
    /// PASID, leaf.
    Context(u32, u32, bool),
    AllOfEl2,
    AllOfEl1,
    /// VMID, ASID.
    Asid(u16, u16),
    Vmid(u16),
    /// Tag, range, leaf.
    Pages(Tag, Range, bool),
    /// PASID, address, size.
    Device(u32, Option<u32>, u64, u64),
    Sync,
}

/// The tag of translations: VMID, and ASID for stage 1.
pub(super) type Tag = (u16, Option<u16>);

/// Ways to be broken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Broken {
    /// Bits of CR0 that are never acknowledged.
    pub(super) stuck: u32,
    /// GBPA.Update stays 1.
    pub(super) bypass: bool,
    /// IRQ_CTRL is never acknowledged.
    pub(super) interrupts: bool,
    /// Commands are not looked at.
    pub(super) deaf: bool,
    /// A CMD_SYNC that ends a batch never becomes complete.
    pub(super) mute: bool,
    /// The unit stops with this error, at the command of this number.
    stops: Option<(u32, u32)>,
}

#[derive(Debug, Default)]
pub(super) struct State {
    pub(super) ids: [u32; 6],
    cr0: u32,
    ack: u32,
    /// CR1, CR2.
    registers: [u32; 2],
    pub(super) gbpa: u32,
    pub(super) irq: u32,
    irq_ack: u32,
    pub(super) gerror: u32,
    gerrorn: u32,
    stream_base: u64,
    stream_cfg: u32,
    commands: u64,
    prod: u32,
    cons: u32,
    events: u64,
    event_prod: u32,
    event_cons: u32,
    pub(super) caches: Caches,
    /// Devices that make requests, and what they have found, whenever that changed.
    watched: Vec<(Request, Option<Looked>)>,
    seen: Vec<(Request, Looked)>,
    /// Invalidated, but not known to be complete.
    pending_config: bool,
    pending_tlb: bool,
    fetched: u32,
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
    /// Reads a word as the unit sees it.
    read: Arc<dyn Fn(u64) -> u64 + Send + Sync>,
    tables: Arc<dyn WalkMemory + Send + Sync>,
    state: Arc<Mutex<State>>,
}

const SMMUEN: u32 = 1;
const EVENTQEN: u32 = 1 << 2;
const CMDQEN: u32 = 1 << 3;

impl Model {
    /// A unit with these ID registers that reads `memory`.
    pub(super) fn new(memory: Arc<HeapTables>, ids: [u32; 6]) -> Self {
        let coherent = memory.clone();
        let read = move |address| coherent.read(address).unwrap_or(u64::MAX);
        Self::reading(memory, ids, read)
    }

    /// The same, reading structures and commands in another way.
    pub(super) fn reading(
        memory: Arc<HeapTables>,
        ids: [u32; 6],
        read: impl Fn(u64) -> u64 + Send + Sync + 'static,
    ) -> Self {
        let state = State {
            ids,
            ..State::default()
        };
        Self {
            tables: memory.clone(),
            memory,
            read: Arc::new(read),
            state: Arc::new(Mutex::new(state)),
        }
    }

    /// The same unit, with tables of another size.
    pub(super) fn with_tables(mut self, tables: Arc<dyn WalkMemory + Send + Sync>) -> Self {
        self.tables = tables;
        self
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has it stop with this error, at the command that comes after `nth` others.
    pub(super) fn stop(&self, error: u32, nth: u32) {
        let state = &mut *self.state();
        (state.broken.stops, state.fetched) = (Some((error, nth)), 0);
    }

    /// Everything that it has received since the last call.
    pub(super) fn received(&self) -> Vec<Received> {
        let mut state = self.state();
        assert!(state.wrong.is_empty(), "{:?}", state.wrong);
        std::mem::take(&mut state.received)
    }

    fn unit(&self, state: &State) -> Unit_<'_> {
        Unit_ {
            read: &*self.read,
            tables: &*self.tables,
            base: state.stream_base,
            shape: state.stream_cfg,
            ids: state.ids,
        }
    }

    /// Looks a request up, in the unit's caches first.
    pub(super) fn look_up(&self, stream: u32, pasid: Option<u32>) -> Looked {
        let state = &mut *self.state();
        assert_eq!(state.ack & SMMUEN, 1, "everything passes");
        self.unit(state).look_up(&mut state.caches, (stream, pasid))
    }

    /// Where a device's read arrives.
    pub(super) fn translate(&self, stream: u32, pasid: Option<u32>, iova: u64) -> Option<u64> {
        let found = self.look_up(stream, pasid).ok()?;
        let state = &mut *self.state();
        let walker = Walker::new(found.root);
        self.unit(state)
            .translate(&mut state.caches, (found.tag, &walker), iova)
    }

    /// Has a device make requests all the time.
    pub(super) fn watch(&self, stream: u32, pasid: Option<u32>) {
        self.state().watched.push(((stream, pasid), None));
        self.traffic(&mut self.state());
    }

    /// Returns the changes that the watched devices have seen since the last call.
    pub(super) fn seen(&self) -> Vec<(Request, Looked)> {
        std::mem::take(&mut self.state().seen)
    }

    fn traffic(&self, state: &mut State) {
        if state.ack & SMMUEN == 0 {
            return;
        }
        for n in 0..state.watched.len() {
            let (request, last) = state.watched[n];
            let found = self.unit(state).look_up(&mut state.caches, request);
            if last != Some(found) {
                state.watched[n].1 = Some(found);
                state.seen.push((request, found));
            }
        }
    }

    /// Records an event, as hardware does, or loses it.
    pub(super) fn event(&self, words: [u64; 4]) {
        let state = &mut *self.state();
        let log2 = (state.events & 0x1f) as u32;
        let mask = (2 << log2) - 1;
        let aborted = (state.gerror ^ state.gerrorn) & 1 << 2 != 0;
        if state.ack & EVENTQEN == 0 || aborted {
            return;
        }
        if (state.event_prod ^ state.event_cons) & mask == 1 << log2 {
            // OVFLG.
            if (state.event_prod ^ state.event_cons) >> 31 == 0 {
                state.event_prod ^= 1 << 31;
            }
            return;
        }
        let place = u64::from(state.event_prod & (mask >> 1));
        let at = (state.events & 0x000f_ffff_ffff_ffe0) + place * 32;
        let cells = self.memory.entries(at, 4);
        cells.iter().zip(words).for_each(|(cell, w)| cell.set(w));
        state.event_prod = state.event_prod & 1 << 31 | (state.event_prod + 1) & mask;
    }

    /// One command; `None` when it is not one.
    fn execute(
        &self,
        state: &mut State,
        [first, second]: [u64; 2],
        last: bool,
    ) -> Option<Received> {
        let [idr0, .., idr3, _, _] = state.ids;
        let has = |bit: u32| idr0 >> bit & 1 == 1;
        let stream = (first >> 32) as u32;
        let (vmid, asid) = ((first >> 32) as u16, (first >> 48) as u16);
        // A VMID of a unit without stage 2, and numbers that are too long.
        let tagged = (has(0) || vmid == 0) && (has(18) || vmid < 256) && (has(12) || asid < 256);
        let received = match first & 0xff {
            0x03 if second & !1 == 0 => Received::Stream(stream, second & 1 == 1),
            0x04 if stream == 0 && second == 31 => Received::AllStreams,
            0x05 if has(1) && second & !1 == 0 => {
                Received::Context(stream, (first >> 12) as u32 & 0xf_ffff, second & 1 == 1)
            }
            0x11 if has(1) && tagged && second == 0 => Received::Asid(vmid, asid),
            0x28 if has(0) && tagged && second == 0 => Received::Vmid(vmid),
            code @ (0x12 | 0x2a) if has(if code == 0x12 { 1 } else { 0 }) && tagged => {
                let range = Range::decode(first, second, idr3 >> 10 & 1 == 1)?;
                let tag = (vmid, (code == 0x12).then_some(asid));
                Received::Pages(tag, range, second & 1 == 1)
            }
            0x20 if has(9) && first >> 8 == 0 && second == 0 => Received::AllOfEl2,
            0x30 if first >> 8 == 0 && second == 0 => Received::AllOfEl1,
            0x40 if has(10) && first & 0x700 == 0 && second & 0xfc0 == 0 => {
                let pasid = (first >> 11 & 1 == 1).then_some((first >> 12) as u32 & 0xf_ffff);
                Received::Device(stream, pasid, second & !0xfff, second & 0x3f)
            }
            0x46 => {
                let ticket = first >> 12 & 3 == 1;
                // SIG_NONE, or SIG_IRQ with an MSI that is write-back and inner shareable.
                if ticket && (!has(13) || first >> 22 & 3 != 3 || first >> 24 & 0xf != 0xf) {
                    return None;
                }
                if ticket && !state.broken.mute {
                    let cell = &self.memory.entries(second & !7, 1)[0];
                    assert_eq!(second & 7, 0, "the lower half");
                    cell.set_release(cell.get() >> 32 << 32 | first >> 32);
                }
                Received::Sync
            }
            _ => return None,
        };
        if has(13) && last && first & 0xff == 0x46 {
            assert_eq!(first >> 12 & 3, 1, "the unit writes tickets");
        }
        self.after(state, received);
        Some(received)
    }

    /// Effect of a command on the caches, with a check of what must be complete before it.
    fn after(&self, state: &mut State, received: Received) {
        match received {
            Received::Sync => (state.pending_config, state.pending_tlb) = (false, false),
            Received::AllStreams | Received::Stream(..) | Received::Context(..) => {
                state.pending_config = true
            }
            Received::Device(..) if state.pending_tlb => {
                state.wrong.push("ATC before the TLB is complete".into());
            }
            Received::Device(..) => {}
            _ if state.pending_config => {
                state
                    .wrong
                    .push("TLB before configuration is complete".into());
            }
            _ => state.pending_tlb = true,
        }
        if !(matches!(received, Received::Device(..)) && state.ack & SMMUEN == 0) {
            state.caches.forget(received);
        }
    }

    fn fetch(&self, state: &mut State) {
        let log2 = (state.commands & 0x1f) as u32;
        let mask = (2 << log2) - 1;
        loop {
            // CMDQ_ERR, and SFM_ERR: "The SMMU has stopped processing commands" (section 6.3.20).
            let active = (state.gerror ^ state.gerrorn) & (1 | 1 << 8) != 0;
            let empty = (state.prod ^ state.cons) & mask == 0;
            if state.ack & CMDQEN == 0 || state.broken.deaf || active || empty {
                return;
            }
            let place = u64::from(state.cons & (mask >> 1));
            let at = (state.commands & 0x000f_ffff_ffff_ffe0) + place * 16;
            let words = [at, at + 8].map(|at| (self.read)(at));
            let next = (state.cons + 1) & mask;
            let last = next == state.prod & mask;
            if state.broken.mute && last && state.ids[0] >> 13 & 1 == 0 {
                return;
            }
            let stop = state.broken.stops.filter(|stop| stop.1 == state.fetched);
            state.fetched += 1;
            let error = if let Some((error, _)) = stop {
                error
            } else if let Some(received) = self.execute(state, words, last) {
                state.received.push(received);
                state.cons = next;
                self.traffic(state);
                continue;
            } else {
                state.wrong.push(format!("command {words:x?}"));
                1
            };
            state.cons = state.cons & mask | error << 24;
            state.gerror ^= 1;
            return;
        }
    }

    /// The status follows the control, and commands are fetched.
    fn advance(&self, state: &mut State) {
        if state.pending > 0 {
            state.pending -= 1;
            return;
        }
        let free = !state.broken.stuck;
        state.ack = state.ack & !free | state.cr0 & free;
        if !state.broken.bypass {
            state.gbpa &= !(1 << 31);
        }
        if !state.broken.interrupts {
            state.irq_ack = state.irq;
        }
        self.fetch(state);
    }

    fn control(state: &mut State, value: u32) {
        if (state.cr0 ^ state.ack) & (value ^ state.cr0) != 0 {
            state.wrong.push("CR0 before it was acknowledged".into());
        }
        let has = |bit: u32| state.ids[0] >> bit & 1 == 1;
        // Write-back and inner shareable; RECINVSID, PTM.
        let cr1 = if has(4) { 0xd75 } else { 0 };
        let expected = [cr1, if has(5) { 6 } else { 2 }];
        if value & SMMUEN != 0 && state.registers != expected {
            state.wrong.push(format!("CR1, CR2 {:x?}", state.registers));
        }
        state.cr0 = value;
        state.received.push(Received::Control(value));
        state.pending = state.latency;
    }
}

impl Registers for Model {
    type Lock = crate::SpinLock;

    fn read32(&self, offset: usize) -> u32 {
        let state = self.state();
        match offset {
            0x00..0x18 => state.ids[offset / 4],
            0x20 => state.cr0,
            0x24 => state.ack,
            0x44 => state.gbpa,
            0x50 => state.irq,
            0x54 => state.irq_ack,
            0x60 => state.gerror,
            0x64 => state.gerrorn,
            0x88 => state.stream_cfg,
            0x98 => state.prod,
            0x9c => state.cons,
            0x1_00a8 => state.event_prod,
            0x1_00ac => state.event_cons,
            _ => u32::MAX,
        }
    }

    fn write32(&self, offset: usize, value: u32) {
        let state = &mut *self.state();
        // Functions in force, or about to be.
        let on = state.ack | state.cr0;
        match offset {
            0x20 => Self::control(state, value),
            0x28 if on & (SMMUEN | EVENTQEN | CMDQEN) == 0 => state.registers[0] = value,
            0x2c if on & SMMUEN == 0 => state.registers[1] = value,
            0x44 if state.gbpa >> 31 == 0 && value >> 31 == 1 => {
                state.gbpa = value;
                state.pending = state.latency;
                state.received.push(Received::Abort(value >> 20 & 1 == 1));
            }
            0x50 => {
                state.irq = value;
                state.pending = state.latency;
            }
            0x64 => state.gerrorn = value,
            0x88 if on & SMMUEN == 0 => state.stream_cfg = value,
            0x98 => {
                let moved_back = (state.gerror ^ state.gerrorn) & 1 != 0 || on & CMDQEN == 0;
                let log2 = state.commands & 0x1f;
                let added = value.wrapping_sub(state.prod) & ((2 << log2) - 1);
                if !moved_back && added > 1 << log2 {
                    state
                        .wrong
                        .push(format!("CMDQ_PROD {:#x} to {value:#x}", state.prod));
                }
                state.prod = value;
                state.pending = state.latency;
                self.traffic(state);
            }
            0x9c if on & CMDQEN == 0 => state.cons = value,
            0x1_00a8 if on & EVENTQEN == 0 => state.event_prod = value,
            0x1_00ac => state.event_cons = value,
            _ => state.wrong.push(format!("write of {offset:#x}")),
        }
        if state.latency == 0 {
            self.advance(state);
        }
    }

    fn read64(&self, offset: usize) -> u64 {
        let mut state = self.state();
        match offset {
            0x80 => state.stream_base | 1 << 62,
            0x90 => state.commands | 1 << 62,
            0xa0 => state.events | 1 << 62,
            _ => {
                state.wrong.push(format!("64 bits of {offset:#x}"));
                0
            }
        }
    }

    fn write64(&self, offset: usize, value: u64) {
        let state = &mut *self.state();
        let on = state.ack | state.cr0;
        // RA, WA.
        let wrong = value >> 52 != 1 << 10;
        match offset {
            0x80 if on & SMMUEN == 0 && !wrong => state.stream_base = value & !(1 << 62),
            0x90 if on & CMDQEN == 0 && !wrong => state.commands = value & !(1 << 62),
            0xa0 if on & EVENTQEN == 0 && !wrong => state.events = value & !(1 << 62),
            _ => state.wrong.push(format!("write of {offset:#x}")),
        }
    }

    fn wait(&self, round: u32) -> bool {
        self.advance(&mut self.state());
        round < PATIENCE
    }
}
