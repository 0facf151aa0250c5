//! The structures in which the unit looks up a device.
//!
//! VT-d specification, chapter 9 "Translation Structure Formats":
//!
//! ```text
//! legacy    root table ─bus──▶ context table ─device, function──▶ context entry: table, domain
//! scalable  root table ─bus, upper half──▶ context table ──▶ context entry
//!             ──▶ PASID directory ─0──▶ PASID table ─0──▶ PASID entry: table, domain
//! ```
//!
//! (9.1 Root Entry, 9.3 Context Entry; 9.2 Scalable-Mode Root Entry, 9.4 Scalable-Mode Context Entry,
//! 9.5 Scalable-Mode PASID Directory Entry, 9.6 Scalable-Mode PASID Table Entry.) Requests without a
//! PASID use PASID 0 (RID_PASID), the only one here.
//!
//! The last entry says everything about a device, so it is also where the driver keeps it: there is
//! no second list that could differ. An entry is in one of three states:
//!
//! * **empty**: all zero;
//! * **present**: the device is attached;
//! * **leaving**: as present, without the bit P. The unit faults, but may still have the old one
//!   cached; the device counts as attached.
//!
//! Whatever the unit follows is complete in memory before the store that makes it present: contents,
//! `written`, then the word with P by a release store, `written`. The reverse begins with P. Tables
//! for a bus or a device stay until the unit is torn down.

use iopt::{Cell, FormatId, NoTables, Root, TABLE_BYTES, TableMemory};

use super::{Mode, offer::Offer};
use crate::unit::DeviceId;

/// P, in every entry.
const PRESENT: u64 = 1;
/// Addresses in entries.
const ADDRESS: u64 = !0xfff;

/// The entry that describes a device.
pub(super) struct Entry<'m, M: TableMemory> {
    memory: &'m M,
    cells: &'m [M::Cell],
    mode: Mode,
}

/// What an entry says.
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

    /// What the entry says; `None` for an empty one.
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

    /// Makes an empty entry present. The root was checked.
    pub(super) fn set(&self, domain: u16, root: Root, offer: Offer) {
        let domain = u64::from(domain);
        // AW: 1 for 3 levels, 2 for 4, 3 for 5.
        let width = u64::from(root.levels.saturating_sub(2));
        // PWSNP, where the unit can snoop: tables lie in ordinary memory.
        let snoop = u64::from(offer.snooped_walks()) << 23;
        let low = match self.mode {
            Mode::Legacy => {
                self.store(1, domain << 8 | width);
                // TT = 0: untranslated requests are translated, translated ones are blocked.
                root.address
            }
            Mode::ScalableSecond => {
                self.store(1, domain | snoop);
                // PGTT = 2; SSADE.
                let dirty = u64::from(offer.second_stage_dirty()) << 9;
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

/// All entries, from the root table on.
#[derive(Debug)]
pub(super) struct Structures {
    pub(super) root: u64,
    pub(super) mode: Mode,
}

impl Structures {
    pub(super) fn new<M: TableMemory>(memory: &M, mode: Mode) -> Result<Self, NoTables> {
        let root = page(memory)?;
        memory.written(cells(memory, root));
        Ok(Self { root, mode })
    }

    /// The device's entry, if there is memory for it already.
    pub(super) fn find<'m, M: TableMemory>(
        &self,
        memory: &'m M,
        device: DeviceId,
    ) -> Option<Entry<'m, M>> {
        let mut table = self.root;
        let (path, last) = self.path(device);
        for (index, _) in path.into_iter().flatten() {
            table = follow(memory, table, index)?;
        }
        self.entry(memory, table, last)
    }

    /// The device's entry, with new tables where they are missing. After an error those that were
    /// linked stay, for the next time.
    pub(super) fn make<'m, M: TableMemory>(
        &self,
        memory: &'m M,
        device: DeviceId,
    ) -> Result<Option<Entry<'m, M>>, NoTables> {
        let mut table = self.root;
        let (path, last) = self.path(device);
        for (index, bits) in path.into_iter().flatten() {
            table = match follow(memory, table, index) {
                Some(next) => next,
                None => {
                    let next = page(memory)?;
                    memory.written(cells(memory, next));
                    if let Some(cell) = cells(memory, table).get(index) {
                        cell.set_release(next | bits | PRESENT);
                        memory.written(core::slice::from_ref(cell));
                    }
                    next
                }
            };
        }
        Ok(self.entry(memory, table, last))
    }

    /// Calls `each` for the entry of each device that has one, until it says `Some`.
    pub(super) fn search<M: TableMemory, V>(
        &self,
        memory: &M,
        mut each: impl FnMut(Attached) -> Option<V>,
    ) -> Option<V> {
        for bus in 0..256u32 {
            // In legacy mode the second half is always zero.
            if cells(memory, self.root)
                .get(bus as usize * 2..bus as usize * 2 + 2)
                .is_none_or(|halves| halves.iter().all(|half| half.get() & PRESENT == 0))
            {
                continue;
            }
            for function in 0..256 {
                let entry = self.find(memory, DeviceId(bus << 8 | function));
                if let Some(found) = entry.and_then(|entry| entry.read()).and_then(&mut each) {
                    return Some(found);
                }
            }
        }
        None
    }

    /// Hands all tables to `each` with their names, those below before those above, which may be gone
    /// when it returns.
    pub(super) fn for_each<M: TableMemory>(
        &self,
        memory: &M,
        each: &mut impl FnMut(&'static str, u64),
    ) {
        let names: &[&str] = match self.mode {
            Mode::Legacy => &["root table", "context table"],
            Mode::ScalableSecond | Mode::ScalableFirst => &[
                "root table",
                "context table",
                "PASID directory",
                "PASID table",
            ],
        };
        below(memory, self.root, names, each);
    }

    /// The words to follow from the root table on, each with what stands beside the address in it;
    /// and the first word of the entry in the last table.
    fn path(&self, device: DeviceId) -> ([Option<(usize, u64)>; 3], usize) {
        let (bus, function) = ((device.0 >> 8 & 0xff) as usize, (device.0 & 0xff) as usize);
        match self.mode {
            Mode::Legacy => ([Some((bus * 2, 0)), None, None], function * 2),
            Mode::ScalableSecond | Mode::ScalableFirst => {
                let (half, place) = (function >> 7, function & 0x7f);
                // PDTS = 0: a directory of 128 entries, in a page. RID_PASID and RID_PRIV are 0.
                let path = [(bus * 2 + half, 0), (place * 4, 0), (0, 0)];
                (path.map(Some), 0)
            }
        }
    }

    fn entry<'m, M: TableMemory>(
        &self,
        memory: &'m M,
        table: u64,
        first: usize,
    ) -> Option<Entry<'m, M>> {
        let words = match self.mode {
            Mode::Legacy => 2,
            Mode::ScalableSecond | Mode::ScalableFirst => 8,
        };
        Some(Entry {
            memory,
            cells: cells(memory, table).get(first..first + words)?,
            mode: self.mode,
        })
    }
}

/// The table to which an entry leads.
fn follow<M: TableMemory>(memory: &M, table: u64, index: usize) -> Option<u64> {
    let word = cells(memory, table).get(index)?.get();
    (word & PRESENT != 0).then_some(word & ADDRESS)
}

/// A page of zeros.
pub(super) fn page<M: TableMemory>(memory: &M) -> Result<u64, NoTables> {
    memory.allocate(TABLE_BYTES as usize)
}

fn cells<M: TableMemory>(memory: &M, page: u64) -> &[M::Cell] {
    memory.entries(page, TABLE_BYTES as usize / 8)
}

/// A table, named by the first of `names`, and what hangs below it.
fn below<M: TableMemory>(
    memory: &M,
    table: u64,
    names: &[&'static str],
    each: &mut impl FnMut(&'static str, u64),
) {
    let Some((name, names)) = names.split_first() else {
        return;
    };
    if !names.is_empty() {
        // Scalable context entries are 4 words, and only their first leads on; a PASID directory's
        // are one.
        let step = if names.len() == 2 { 4 } else { 1 };
        for cell in cells(memory, table).iter().step_by(step) {
            if cell.get() & PRESENT != 0 {
                below(memory, cell.get() & ADDRESS, names, each);
            }
        }
    }
    each(name, table);
}
