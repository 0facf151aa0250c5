//! The structures in which the unit looks up a device.
//!
//! VT-d specification, chapter 9 "Translation Structure Formats":
//!
//! ```text
//! legacy    root table ─bus──▶ context table ─device, function──▶ context entry: table, domain
//! scalable  root table ─bus, upper half──▶ context table ──▶ context entry
//!             ──▶ PASID directory ─PASID 19:6──▶ PASID table ─5:0──▶ PASID entry: table, domain
//! ```
//!
//! (9.1 Root Entry, 9.3 Context Entry; 9.2 Scalable-Mode Root Entry, 9.4 Scalable-Mode Context Entry,
//! 9.5 Scalable-Mode PASID Directory Entry, 9.6 Scalable-Mode PASID Table Entry.) Requests without a
//! PASID use PASID 0 (RID_PASID). A PASID table holds 64 entries and comes with the first of them; a
//! directory has room for all PASIDs of the configuration.
//!
//! The last entry says everything about a device or a PASID of it, so it is also where the driver keeps
//! it. An entry is in one of three states:
//!
//! * **empty**: all zero;
//! * **present**: the device is attached;
//! * **leaving**: as present, without the bit P. The unit faults, but may still have the old one
//!   cached; the device counts as attached.
//!
//! That the device has a TLB stands in the context entry: in legacy mode TT, with the device; in scalable
//! mode DTE, one bit of the word that leads on, changed by one store.
//!
//! Every structure that the unit follows is complete in memory before the store that makes it present: contents,
//! `written`, then the word with P by a release store, `written`. The reverse begins with P. Tables for a bus or a
//! device stay until the unit is torn down.

use iopt::{Cell, FormatId, NoTables, Root, TABLE_BYTES, TableMemory};

use super::{Config, Mode, capabilities::Features};
use crate::error::NoPlace;
use crate::unit::{DeviceId, DomainId};

/// P, in every entry.
const PRESENT: u64 = 1;
/// Addresses in entries.
const ADDRESS: u64 = !0xfff;
/// Words of a page.
const WORDS: usize = TABLE_BYTES as usize / 8;

/// The entry that describes a device, or a PASID of it.
pub(super) struct Entry<'m, M: TableMemory> {
    memory: &'m M,
    cells: &'m [M::Cell],
    mode: Mode,
}

/// Attachment stored in an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Attached {
    pub(super) present: bool,
    pub(super) domain: u16,
    pub(super) root: Root,
}

impl<M: TableMemory> Entry<'_, M> {
    fn word(&self, n: usize) -> u64 {
        self.cells.get(n).map_or(0, Cell::get)
    }

    fn store(&self, n: usize, word: u64) {
        if let Some(cell) = self.cells.get(n) {
            cell.set_release(word);
        }
    }

    /// Returns the attachment in the entry; `None` for an empty one.
    pub(super) fn read(&self) -> Option<Attached> {
        let (low, high) = (self.word(0), self.word(1));
        let width = match self.mode {
            // Context entry, AW: 66:64.
            Mode::Legacy => high & 7,
            // PASID entry, AW: 4:2.
            Mode::ScalableSecond | Mode::ScalableFirst => low >> 2 & 7,
        };
        // A width of 0 would be two levels, which no unit has: the entry is empty.
        if width == 0 {
            return None;
        }
        let (format, address, levels) = match self.mode {
            Mode::Legacy | Mode::ScalableSecond => (FormatId::VtdSs, low, width as u8 + 2),
            Mode::ScalableFirst => {
                let first = self.word(2);
                (FormatId::X86_64, first, 4 + (first >> 2 & 3) as u8)
            }
        };
        Some(Attached {
            present: low & PRESENT != 0,
            domain: match self.mode {
                Mode::Legacy => (high >> 8) as u16,
                Mode::ScalableSecond | Mode::ScalableFirst => high as u16,
            },
            root: Root {
                format,
                address: address & ADDRESS,
                levels,
            },
        })
    }

    /// Makes an empty entry present. The root was checked. `tlb` says that the device has a TLB.
    pub(super) fn set(&self, domain: u16, root: Root, features: Features, tlb: bool) {
        let domain = u64::from(domain);
        // AW: 1 for 3 levels, 2 for 4, 3 for 5.
        let width = u64::from(root.levels.saturating_sub(2));
        // PWSNP, where the unit can snoop: tables lie in ordinary memory.
        let snoop = u64::from(features.snooped_walks()) << 23;
        let low = match self.mode {
            Mode::Legacy => {
                self.store(1, domain << 8 | width);
                // TT = 0: untranslated requests are translated, all others are blocked; 1: translation
                // requests are answered, and translated requests pass.
                root.address | u64::from(tlb) << 2
            }
            Mode::ScalableSecond => {
                self.store(1, domain | snoop);
                // PGTT = 2; SSADE.
                let dirty = u64::from(features.second_stage_dirty()) << 9;
                root.address | dirty | 2 << 6 | width << 2
            }
            Mode::ScalableFirst => {
                self.store(1, domain | snoop);
                // FSPM: 0 for 4 levels, 1 for 5.
                let levels = u64::from(root.levels.saturating_sub(4)) << 2;
                // NXE: without it XD is reserved in the tables, and the format sets it.
                self.store(2, root.address | 1 << 5 | levels);
                // PGTT = 1. AW says nothing about the first stage; 48 bits are always a value.
                1 << 6 | 2 << 2
            }
        };
        self.memory.written(self.cells);
        self.store(0, low | PRESENT);
        self.memory.written(self.cells);
    }

    /// From present to leaving.
    pub(super) fn withdraw(&self) {
        self.store(0, self.word(0) & !PRESENT);
        self.memory.written(self.cells);
    }

    /// From leaving to empty.
    pub(super) fn clear(&self) {
        (0..self.cells.len()).for_each(|n| self.store(n, 0));
        self.memory.written(self.cells);
    }
}

/// DTE, in a scalable context entry.
const DEVICE_TLB: u64 = 1 << 2;
/// PASIDE, there: requests with a PASID are translated.
const PASIDS: u64 = 1 << 3;
/// PDTS, there: a PASID directory of 2^(7 + PDTS) entries.
const DIRECTORY_SIZE: u32 = 9;

/// Where tables stand, counted from the root table.
const CONTEXTS: usize = 1;
const DIRECTORY: usize = 2;

/// All entries, from the root table on.
#[derive(Debug)]
pub(super) struct Structures {
    pub(super) root: u64,
    pub(super) mode: Mode,
    /// 0 for requests without a PASID alone.
    pub(super) pasid_bits: u32,
}

impl Structures {
    pub(super) fn new<M: TableMemory>(memory: &M, config: &Config) -> Result<Self, NoTables> {
        let root = page(memory)?;
        memory.written(memory.entries(root, WORDS));
        Ok(Self {
            root,
            mode: config.mode,
            pasid_bits: config.pasid_bits,
        })
    }

    /// The entry of a device's PASID, if there is memory for it already.
    pub(super) fn find<'m, M: TableMemory>(
        &self,
        memory: &'m M,
        device: DeviceId,
        pasid: u32,
    ) -> Option<Entry<'m, M>> {
        let mut table = self.root;
        let (path, last) = self.path(device, pasid);
        for (depth, index) in path.into_iter().flatten().enumerate() {
            table = follow(self.cells(memory, table, depth).get(index)?)?;
        }
        self.entry(memory, table, last)
    }

    /// The entry of a device's PASID, with new tables where they are missing; `tlb` says that the device
    /// has a TLB. After an error those that were linked stay, for the next time.
    pub(super) fn make<'m, M: TableMemory>(
        &self,
        memory: &'m M,
        device: DeviceId,
        pasid: u32,
        tlb: bool,
    ) -> Result<Entry<'m, M>, NoPlace> {
        let mut table = self.root;
        let (path, last) = self.path(device, pasid);
        for (depth, index) in path.into_iter().flatten().enumerate() {
            let cells = self.cells(memory, table, depth);
            let cell = cells.get(index).ok_or(NoPlace::Cells(table))?;
            table = match follow(cell) {
                Some(next) => next,
                None => {
                    let next = memory.allocate(self.bytes(depth + 1))?;
                    memory.written(self.cells(memory, next, depth + 1));
                    let bits = if depth == CONTEXTS { self.bits(tlb) } else { 0 };
                    cell.set_release(next | bits | PRESENT);
                    memory.written(core::slice::from_ref(cell));
                    next
                }
            };
        }
        let entry = self.entry(memory, table, last);
        entry.ok_or(NoPlace::Cells(table))
    }

    /// Switches the service of a device's TLB, where that stands above the entries; true if the unit may
    /// have something else cached.
    pub(super) fn set_device_tlb<M: TableMemory>(
        &self,
        memory: &M,
        device: DeviceId,
        on: bool,
    ) -> bool {
        let ([Some(bus), Some(function), _], _) = self.path(device, 0) else {
            return false;
        };
        let contexts = self.cells(memory, self.root, 0).get(bus).and_then(follow);
        let context = contexts.and_then(|table| self.cells(memory, table, CONTEXTS).get(function));
        let Some(context) = context.filter(|context| follow(*context).is_some()) else {
            return false;
        };
        let others = context.get() & !DEVICE_TLB;
        context.set_release(others | if on { DEVICE_TLB } else { 0 });
        memory.written(core::slice::from_ref(context));
        true
    }

    /// Calls `each` for each entry that is not empty, until it says `Some`.
    pub(super) fn search<M: TableMemory, V>(
        &self,
        memory: &M,
        mut each: impl FnMut(Attached) -> Option<V>,
    ) -> Option<V> {
        self.search_below(memory, self.root, 0, &mut each)
    }

    /// A root of the domain that is not the one that is asked for.
    pub(super) fn other_root<M: TableMemory>(
        &self,
        memory: &M,
        domain: DomainId,
        asked: Root,
    ) -> Option<Root> {
        self.search(memory, |there| {
            (u32::from(there.domain) == domain.0 && there.root != asked).then_some(there.root)
        })
    }

    fn search_below<M: TableMemory, V>(
        &self,
        memory: &M,
        table: u64,
        depth: usize,
        each: &mut impl FnMut(Attached) -> Option<V>,
    ) -> Option<V> {
        if depth + 1 == self.names().len() {
            let mut entries = (0..WORDS).step_by(self.words());
            return entries.find_map(|first| each(self.entry(memory, table, first)?.read()?));
        }
        self.links(memory, table, depth)
            .find_map(|next| self.search_below(memory, next, depth + 1, each))
    }

    /// Hands all tables to `each` by pages, with their names, those below before those above, which may
    /// be gone when it returns.
    pub(super) fn for_each<M: TableMemory>(
        &self,
        memory: &M,
        each: &mut impl FnMut(&'static str, u64),
    ) {
        self.for_each_below(memory, self.root, 0, each);
    }

    fn for_each_below<M: TableMemory>(
        &self,
        memory: &M,
        table: u64,
        depth: usize,
        each: &mut impl FnMut(&'static str, u64),
    ) {
        let Some(name) = self.names().get(depth) else {
            return;
        };
        if depth + 1 < self.names().len() {
            self.links(memory, table, depth)
                .for_each(|next| self.for_each_below(memory, next, depth + 1, each));
        }
        (0..self.bytes(depth) as u64)
            .step_by(TABLE_BYTES as usize)
            .for_each(|offset| each(name, table + offset));
    }

    /// The tables, from the root table on.
    fn names(&self) -> &'static [&'static str] {
        match self.mode {
            Mode::Legacy => &["root table", "context table"],
            Mode::ScalableSecond | Mode::ScalableFirst => &[
                "root table",
                "context table",
                "PASID directory",
                "PASID table",
            ],
        }
    }

    /// The tables to which a table leads, which is not a last one.
    fn links<M: TableMemory>(
        &self,
        memory: &M,
        table: u64,
        depth: usize,
    ) -> impl Iterator<Item = u64> {
        // Scalable context entries are 4 words, and only their first leads on; all others are one, or
        // two of which one is zero.
        let step = if depth == CONTEXTS { 4 } else { 1 };
        let cells = self.cells(memory, table, depth);
        cells.iter().step_by(step).filter_map(follow)
    }

    /// The words to follow from the root table on, and the first word of the entry in the last table.
    fn path(&self, device: DeviceId, pasid: u32) -> ([Option<usize>; 3], usize) {
        let (bus, function) = ((device.0 >> 8 & 0xff) as usize, (device.0 & 0xff) as usize);
        match self.mode {
            Mode::Legacy => ([Some(bus * 2), None, None], function * 2),
            Mode::ScalableSecond | Mode::ScalableFirst => {
                let (half, place) = (function >> 7, function & 0x7f);
                let (table, entry) = (pasid as usize >> 6, pasid as usize & 0x3f);
                let path = [bus * 2 + half, place * 4, table];
                (path.map(Some), entry * 8)
            }
        }
    }

    /// Bits beside the address of the PASID directory. RID_PASID and RID_PRIV are 0.
    fn bits(&self, tlb: bool) -> u64 {
        let tlb = if tlb { DEVICE_TLB } else { 0 };
        // 128 entries are for 13 bits.
        let size = u64::from(self.pasid_bits.saturating_sub(13)) << DIRECTORY_SIZE;
        tlb | size | if self.pasid_bits > 0 { PASIDS } else { 0 }
    }

    /// Bytes of a table. A PASID directory has 8 for each 64 PASIDs, and a page at least.
    fn bytes(&self, depth: usize) -> usize {
        let page = TABLE_BYTES as usize;
        match depth {
            DIRECTORY => page.max(8 << self.pasid_bits.saturating_sub(6)),
            _ => page,
        }
    }

    fn cells<'m, M: TableMemory>(&self, memory: &'m M, table: u64, depth: usize) -> &'m [M::Cell] {
        memory.entries(table, self.bytes(depth) / 8)
    }

    /// Words of an entry.
    fn words(&self) -> usize {
        match self.mode {
            Mode::Legacy => 2,
            Mode::ScalableSecond | Mode::ScalableFirst => 8,
        }
    }

    fn entry<'m, M: TableMemory>(
        &self,
        memory: &'m M,
        table: u64,
        first: usize,
    ) -> Option<Entry<'m, M>> {
        let cells = memory.entries(table, WORDS);
        Some(Entry {
            memory,
            cells: cells.get(first..first + self.words())?,
            mode: self.mode,
        })
    }
}

/// The table to which an entry leads.
fn follow<C: Cell>(cell: &C) -> Option<u64> {
    let word = cell.get();
    (word & PRESENT != 0).then_some(word & ADDRESS)
}

/// A page of zeros.
pub(super) fn page<M: TableMemory>(memory: &M) -> Result<u64, NoTables> {
    memory.allocate(TABLE_BYTES as usize)
}
