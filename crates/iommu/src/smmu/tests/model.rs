//! A small unit, written from the specification: its registers, and what invalidations do.
//!
//! An invalidation is only begun by its write, and happens when a sync that covers it is complete; so without a wait,
//! cached translations are still found. `access.rs` has the accesses of devices. The model notes all writes, in order,
//! and everything that a driver must not do. It can be slow (a sync takes some rounds), and broken in named ways.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::{format, string::String, vec, vec::Vec};

use iopt::walk::{UpperTable, WalkMemory};
use runs::Run;

use crate::registers::Registers;
use crate::suite::PATIENCE;

/// A write: the register's name, its number (of the stream or of the bank), the value.
pub(super) type Received = (&'static str, usize, u64);

/// Ways to be broken.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Broken {
    /// Syncs that never end.
    pub(super) bank_sync: bool,
    pub(super) global_sync: bool,
    /// Bits that these registers do not keep.
    pub(super) match_bits: u32,
    pub(super) context_bits: u32,
    pub(super) control_bits: u32,
}

/// Which cached translations: the VMID, and in stage 1 the ASID.
pub(super) type Tag = (u32, Option<u64>);

/// Entry of the TLB.
#[derive(Debug)]
pub(super) struct Cached {
    pub(super) tag: Tag,
    pub(super) page: Run,
    pub(super) write: bool,
    /// It is for all ASIDs of the VMID.
    pub(super) global: bool,
}

impl Cached {
    /// True if it translates for a tag.
    pub(super) fn is_of(&self, tag: Tag) -> bool {
        self.tag == tag || self.global && self.tag.0 == tag.0 && tag.1.is_some()
    }
}

/// An invalidation that has begun.
#[derive(Clone, Copy, Debug)]
enum Begun {
    All,
    Tag(Tag),
    Vmid(u32),
    /// An address, and whether only leaves.
    Page(Tag, u64, bool),
}

/// The registers of a context bank, by offset.
pub(super) const BANK: [(usize, &str); 19] = [
    (0x00, "SCTLR"),
    (0x10, "TCR2"),
    (0x20, "TTBR0"),
    (0x24, "TTBR0 high"),
    (0x28, "TTBR1"),
    (0x2c, "TTBR1 high"),
    (0x30, "TCR"),
    (0x34, "CONTEXTIDR"),
    (0x38, "MAIR0"),
    (0x3c, "MAIR1"),
    (0x58, "FSR"),
    (0x60, "FAR"),
    (0x64, "FAR high"),
    (0x68, "FSYNR0"),
    (0x600, "TLBIVA"),
    (0x610, "TLBIASID"),
    (0x620, "TLBIVAL"),
    (0x630, "TLBIIPAS2"),
    (0x638, "TLBIIPAS2L"),
];

/// Registers of global register space 0, without the ones of streams.
const GLOBAL: [(usize, &str); 13] = [
    (0x00, "CR0"),
    (0x20, "IDR0"),
    (0x24, "IDR1"),
    (0x28, "IDR2"),
    (0x40, "GFAR"),
    (0x44, "GFAR high"),
    (0x48, "GFSR"),
    (0x50, "GFSYNR0"),
    (0x54, "GFSYNR1"),
    (0x64, "TLBIVMID"),
    (0x68, "TLBIALLNSNH"),
    (0x6c, "TLBIALLH"),
    (0x74, "TLBGSTATUS"),
];

fn name(of: &[(usize, &'static str)], register: usize) -> Option<&'static str> {
    of.iter()
        .find(|known| known.0 == register)
        .map(|known| known.1)
}

#[derive(Default)]
pub(super) struct State {
    pub(super) version: u32,
    pub(super) global: Vec<(&'static str, u32)>,
    pub(super) smr: Vec<u32>,
    pub(super) s2cr: Vec<u32>,
    pub(super) cbar: Vec<u32>,
    pub(super) cba2r: Vec<u32>,
    pub(super) cbfrsynra: Vec<u32>,
    pub(super) banks: Vec<Vec<u32>>,
    pub(super) cached: Vec<Cached>,
    pub(super) tables: Vec<(Tag, UpperTable)>,
    /// Begun, by which bank, or globally.
    begun: Vec<(Option<usize>, Begun)>,
    /// Syncs under way, and rounds until they are complete.
    syncs: Vec<(Option<usize>, u32)>,
    /// Rounds that a sync takes.
    pub(super) latency: u32,
    pub(super) broken: Broken,
    received: Vec<Received>,
    pub(super) wrong: Vec<String>,
}

impl State {
    pub(super) fn get(&self, register: &str) -> u32 {
        let known = self.global.iter().find(|known| known.0 == register);
        known.map_or(0, |known| known.1)
    }

    pub(super) fn put(&mut self, register: &str, value: u32) {
        let known = self.global.iter_mut().find(|known| known.0 == register);
        known.unwrap().1 = value;
    }

    pub(super) fn bank(&self, n: usize, register: &str) -> u32 {
        let place = BANK.iter().position(|known| known.1 == register).unwrap();
        self.banks[n][place]
    }

    pub(super) fn put_bank(&mut self, n: usize, register: &str, value: u32) {
        let place = BANK.iter().position(|known| known.1 == register).unwrap();
        self.banks[n][place] = value;
    }

    /// A bank's tag.
    pub(super) fn tag(&self, n: usize) -> Tag {
        let second = self.cbar[n] >> 16 & 3 == 0;
        let wide = self.cba2r[n] & 1 == 1 || self.bank(n, "TCR") >> 31 == 1;
        let asid = match wide {
            true => self.bank(n, "TTBR0 high") >> 16 & 0xff,
            false => self.bank(n, "CONTEXTIDR") & 0xff,
        };
        (self.cbar[n] & 0xff, (!second).then_some(asid.into()))
    }

    /// True when accesses may come to a bank.
    fn reached(&self, n: usize) -> bool {
        let leads = |s2cr: &u32| s2cr >> 16 & 3 == 0 && *s2cr & 0xff == n as u32;
        self.get("CR0") & 1 == 0 && self.s2cr.iter().any(leads)
    }

    fn received(&mut self, register: &'static str, n: usize, value: u64) {
        self.received.push((register, n, value));
    }

    fn begin(&mut self, by: Option<usize>, what: Begun) {
        self.begun.push((by, what));
    }

    fn sync(&mut self, by: Option<usize>) {
        self.syncs.push((by, self.latency));
        self.advance(false);
    }

    /// Syncs whose time has come complete what they cover.
    fn advance(&mut self, round: bool) {
        let Broken {
            bank_sync,
            global_sync,
            ..
        } = self.broken;
        let stuck = |by: Option<usize>| if by.is_some() { bank_sync } else { global_sync };
        for (by, rounds) in &mut self.syncs {
            if !stuck(*by) {
                *rounds = rounds.saturating_sub(round.into());
            }
        }
        let done: Vec<_> = self
            .syncs
            .extract_if(.., |sync| sync.1 == 0 && !stuck(sync.0))
            .collect();
        for (by, _) in done {
            let covered: Vec<_> = self
                .begun
                .extract_if(.., |begun| by.is_none() || begun.0 == by)
                .collect();
            for (_, what) in covered {
                self.forget(what);
            }
        }
    }

    fn forget(&mut self, what: Begun) {
        let hit = |tag: Tag| match what {
            Begun::All => true,
            Begun::Tag(gone) | Begun::Page(gone, ..) => gone == tag,
            Begun::Vmid(gone) => gone == tag.0,
        };
        let covers = |start: u64, log2: u32| match what {
            Begun::Page(_, address, _) => (start ^ address).checked_shr(log2).unwrap_or(0) == 0,
            _ => true,
        };
        let leaf = matches!(what, Begun::Page(_, _, true));
        let leaf_hit = |it: &Cached| match what {
            // TLBIASID leaves what is global.
            Begun::Tag(gone) => gone == it.tag && !it.global,
            Begun::Page(gone, ..) => it.is_of(gone),
            _ => hit(it.tag),
        };
        self.cached
            .retain(|it| !(leaf_hit(it) && covers(it.page.iova, it.page.len.trailing_zeros())));
        self.tables
            .retain(|(tag, it)| leaf || !(hit(*tag) && covers(it.iova, it.span_log2)));
    }

    fn write_bank(&mut self, n: usize, register: usize, value: u64, wide: bool) {
        let tag = self.tag(n);
        let long64 = self.version == 2 && self.cba2r[n] & 1 == 1;
        let Some(name) = name(&BANK, register) else {
            match register {
                0x7f0 => {
                    self.received("TLBSYNC", n, 0);
                    self.sync(Some(n));
                }
                _ => self.wrong.push(format!("write of {register:#x} in a bank")),
            }
            return;
        };
        self.received(name, n, value);
        let by_address = matches!(name, "TLBIVA" | "TLBIVAL" | "TLBIIPAS2" | "TLBIIPAS2L");
        if wide != (by_address && long64) {
            self.wrong.push(format!("{name} by {wide}"));
        }
        if by_address {
            let second = name.starts_with("TLBII");
            let leaf = name.ends_with('L');
            if second != tag.1.is_none() || self.version == 1 && (second || leaf) {
                self.wrong.push(format!("{name} of bank {n}"));
            }
            // Bits 55:12 of the address, or an address of 32 bits with the ASID below.
            let (address, asid) = match (long64, second) {
                (true, _) => ((value & ((1 << 44) - 1)) << 12, value >> 48),
                (false, true) => (value << 12, 0),
                (false, false) => (value & !0xfff, value & 0xff),
            };
            let tag = (tag.0, (!second).then_some(asid));
            self.begin(Some(n), Begun::Page(tag, address, leaf));
            return;
        }
        match name {
            "TLBIASID" => self.begin(Some(n), Begun::Tag((tag.0, Some(value)))),
            "FSR" => {
                let left = self.bank(n, name) & !(value as u32);
                self.put_bank(n, name, left);
            }
            _ => {
                if self.reached(n) {
                    self.wrong.push(format!("{name} of bank {n} is in use"));
                }
                self.put_bank(n, name, value as u32);
            }
        }
    }

    fn write_global(&mut self, register: usize, value: u32) {
        let broken = self.broken;
        let number = register % 0x400 / 4;
        let streams = self.s2cr.len();
        match register {
            0x70 => {
                self.received("TLBGSYNC", 0, 0);
                return self.sync(None);
            }
            0x800..0xa00 if number < streams && self.get("IDR0") >> 27 & 1 == 1 => {
                self.received("SMR", number, value.into());
                // Bit 15 of both halves is there with EXIDENABLE; VALID without.
                let bits = match self.get("CR0") >> 3 & 1 {
                    0 => 0xffff_7fff,
                    _ => u32::MAX,
                };
                self.smr[number] = value & bits & !broken.match_bits;
                return;
            }
            0xc00..0xe00 if number < streams => {
                self.received("S2CR", number, value.into());
                self.s2cr[number] = value & !broken.context_bits;
                return;
            }
            _ => {}
        }
        let Some(name) = name(&GLOBAL, register) else {
            self.wrong.push(format!("write of {register:#x}"));
            return;
        };
        self.received(name, 0, value.into());
        match name {
            "CR0" => self.put(name, value & !broken.control_bits),
            "GFSR" => self.put(name, self.get(name) & !value),
            "TLBIVMID" => self.begin(None, Begun::Vmid(value)),
            "TLBIALLNSNH" => self.begin(None, Begun::All),
            // There are no hypervisor's contexts.
            "TLBIALLH" => {}
            _ => self.wrong.push(format!("write of {name}")),
        }
    }

    fn write(&mut self, offset: usize, value: u64, wide: bool) {
        let idr1 = self.get("IDR1");
        let page = if idr1 >> 31 == 1 { 1 << 16 } else { 1 << 12 };
        let half = page << ((idr1 >> 28 & 7) + 1);
        let n = offset % page % 0x400 / 4;
        let low = value as u32;
        match offset {
            _ if offset >= half && (offset - half) / page < self.banks.len() => {
                self.write_bank((offset - half) / page, offset % page, value, wide);
            }
            _ if wide || offset >= 2 * page => {
                self.wrong.push(format!("write of {offset:#x} by {wide}"));
            }
            _ if offset < page => self.write_global(offset, low),
            _ if n >= self.banks.len() => self.wrong.push(format!("bank {n}")),
            _ => {
                if self.reached(n) {
                    self.wrong.push(format!("bank {n} is in use"));
                }
                match offset - page {
                    ..0x200 => {
                        self.received("CBAR", n, value);
                        self.cbar[n] = low;
                    }
                    0x800..0xa00 if self.version == 2 => {
                        self.received("CBA2R", n, value);
                        self.cba2r[n] = low;
                    }
                    other => self.wrong.push(format!("write of {other:#x} in space 1")),
                }
            }
        }
    }

    fn read(&self, offset: usize) -> u32 {
        let idr1 = self.get("IDR1");
        let page = if idr1 >> 31 == 1 { 1 << 16 } else { 1 << 12 };
        let half = page << ((idr1 >> 28 & 7) + 1);
        let (bank, register) = (offset.wrapping_sub(half) / page, offset % page);
        let active = |by| u32::from(self.syncs.iter().any(|sync| sync.0 == by));
        if offset < page {
            let number = offset % 0x400 / 4;
            return match offset {
                0x74 => active(None),
                0x800..0xa00 => self.smr.get(number).copied().unwrap_or(0),
                0xc00..0xe00 => self.s2cr.get(number).copied().unwrap_or(0),
                _ => name(&GLOBAL, offset).map_or(0, |name| self.get(name)),
            };
        }
        if offset < 2 * page {
            let all = match register / 0x400 {
                0 => &self.cbar,
                1 => &self.cbfrsynra,
                _ => &self.cba2r,
            };
            return all.get(register % 0x400 / 4).copied().unwrap_or(0);
        }
        match register {
            _ if offset < half || bank >= self.banks.len() => u32::MAX,
            0x7f4 => active(Some(bank)),
            _ => name(&BANK, register).map_or(0, |name| self.bank(bank, name)),
        }
    }
}

/// The model; clones are the same unit.
#[derive(Clone)]
pub(super) struct Model {
    pub(super) memory: Arc<dyn WalkMemory + Send + Sync>,
    state: Arc<Mutex<State>>,
}

impl Model {
    /// A unit that reads `memory`, as it comes out of reset: everything passes.
    pub(super) fn new(
        memory: Arc<dyn WalkMemory + Send + Sync>,
        version: u32,
        [idr0, idr1, idr2]: [u32; 3],
    ) -> Self {
        let streams = match idr0 >> 27 & 1 {
            1 => idr0 & 0xff,
            _ => 1 << (idr0 >> 9 & 0xf),
        };
        let banks = (idr1 & 0xff) as usize;
        // Undefined after reset.
        let noise = |n| vec![0x5a5a_0000 | 1 << 31; n];
        let mut state = State {
            version,
            global: GLOBAL.iter().map(|known| (known.1, 0)).collect(),
            smr: noise(streams as usize),
            // Valid, and a bank.
            s2cr: vec![1 << 10; streams as usize],
            cbar: noise(banks),
            cba2r: noise(banks),
            cbfrsynra: noise(banks),
            banks: vec![noise(BANK.len()); banks],
            ..State::default()
        };
        for (register, value) in [("IDR0", idr0), ("IDR1", idr1), ("IDR2", idr2), ("CR0", 1)] {
            state.put(register, value);
        }
        Self {
            memory,
            state: Arc::new(Mutex::new(state)),
        }
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the writes since the last call.
    pub(super) fn received(&self) -> Vec<Received> {
        let mut state = self.state();
        assert!(state.wrong.is_empty(), "{:?}", state.wrong);
        std::mem::take(&mut state.received)
    }
}

impl Registers for Model {
    type Lock = crate::SpinLock;

    fn read32(&self, offset: usize) -> u32 {
        self.state().read(offset)
    }

    fn write32(&self, offset: usize, value: u32) {
        self.state().write(offset, value.into(), false);
    }

    fn read64(&self, offset: usize) -> u64 {
        self.state().wrong.push(format!("64 bits of {offset:#x}"));
        0
    }

    fn write64(&self, offset: usize, value: u64) {
        self.state().write(offset, value, true);
    }

    fn wait(&self, round: u32) -> bool {
        self.state().advance(true);
        round < PATIENCE
    }
}
