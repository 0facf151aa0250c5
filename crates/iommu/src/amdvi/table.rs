//! The device table.
//!
//! AMD IOMMU specification, section 2.2.2 "Device Table": an entry of 32 bytes for each requester id.
//! Table 8 says what its bits V and TV do: V = 0 lets everything through; with V = 1 and TV = 0 what
//! needs a translation is blocked. So entries are never zero:
//!
//! * **empty**: V, and nothing else;
//! * **present**: V, TV, and the table (mode, root pointer, IR, IW); the device is attached;
//! * **leaving**: as present, without TV. The unit faults, but may still have the old one cached; the
//!   device counts as attached.
//!
//! Everything about the table is in the first 8 bytes, and the domain is in the second. So the domain
//! is stored while TV is 0, when it means nothing to a translation, and one aligned store of 8 bytes
//! does the rest; the same for a root that has grown. So the unit never sees parts of two entries, though
//! no store is as wide as an entry: the rest of an entry is zero.
//!
//! The entry is also where the driver keeps what it knows of a device. Interrupts are not remapped (IV = 0).
//! Translation requests of a device with a TLB are answered (I) while its entry is present; the bit is
//! stored as the domain is, and goes with TV.
//!
//! With guest tables an entry is empty until the first attach, and then present for good: with GV, GIoV, Mode
//! 0, and a guest CR3 table, which says the rest (`guest.rs`). Its address is in both words, and is stored
//! in the same order. Nothing passes untranslated, since GIoV has requests without a PASID use PASID 0.

use iopt::{Cell, FormatId, NoTables, Root, TABLE_BYTES, TableMemory};

use runs::{Pa, Span};

use super::capabilities::Features;
use crate::unit::{DeviceId, DomainId};

/// V.
const VALID: u64 = 1;
/// TV.
const TRANSLATED: u64 = 1 << 1;
/// HAD: the unit sets accessed (1) and dirty bits (3).
const DIRTY: u64 = 3 << 7;
/// Mode: the levels.
const MODE: u32 = 9;
/// The root pointer.
const ADDRESS: u64 = ((1 << 52) - 1) & !0xfff;
/// IR and IW: the table decides.
const ALLOWED: u64 = 3 << 61;

/// I, in the second word.
const DEVICE_TLB: u64 = 1 << 32;

/// Mode 0, GV and GIoV, IR and IW: everything goes through guest tables, and is then where it belongs.
const GUEST: u64 = 1 << 54 | 1 << 55 | ALLOWED;
/// GLX: the levels of the guest CR3 table, less one.
const GLX: u32 = 56;

/// Words of an entry.
const WORDS: usize = 4;

/// The table.
#[derive(Debug)]
pub(super) struct DeviceTable {
    pub(super) base: u64,
    bytes: u64,
    /// The first and the last device that was ever attached: what a search looks at.
    used: Option<(u16, u16)>,
}

/// Attachment stored in an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Attached {
    pub(super) domain: u16,
    pub(super) root: Root,
}

fn word(root: &Root, features: Features) -> u64 {
    let dirty = if features.dirty() { DIRTY } else { 0 };
    VALID | dirty | u64::from(root.levels) << MODE | root.address | ALLOWED
}

impl DeviceTable {
    /// A table of empty entries.
    pub(super) fn new<M: TableMemory>(memory: &M, last: u16) -> Result<Self, NoTables> {
        let bytes = Self::bytes(last);
        let base = memory.allocate(bytes as usize)?;
        let table = Self {
            base,
            bytes,
            used: None,
        };
        let cells = table.cells(memory);
        for (n, cell) in cells.iter().enumerate() {
            cell.set(if n % WORDS == 0 { VALID } else { 0 });
        }
        memory.written(cells);
        Ok(table)
    }

    /// A table that is there already, of the size and with the devices of [`describe`](Self::describe).
    pub(super) const fn adopt(base: u64, last: u16, described: u64) -> Self {
        let (first_used, last_used) = (described as u16, (described >> 16) as u16);
        Self {
            base,
            bytes: Self::bytes(last),
            used: match described >> 32 & 1 {
                1 => Some((first_used, last_used)),
                _ => None,
            },
        }
    }

    /// In one word which devices were ever attached: the first, the last, and whether there were any.
    pub(super) fn describe(&self) -> u64 {
        self.used.map_or(0, |(first, last)| {
            u64::from(first) | u64::from(last) << 16 | 1 << 32
        })
    }

    /// Bytes of a table with room for a last device.
    const fn bytes(last: u16) -> u64 {
        let bytes = ((last as u64 + 1) * 8 * WORDS as u64).next_power_of_two();
        if bytes < TABLE_BYTES {
            TABLE_BYTES
        } else {
            bytes
        }
    }

    /// Value of the base address register: the size in pages, less one, beside the address.
    pub(super) const fn register(&self) -> u64 {
        self.base | (self.bytes / TABLE_BYTES - 1)
    }

    /// How many devices the table has room for.
    pub(super) const fn devices(&self) -> usize {
        self.bytes as usize / 8 / WORDS
    }

    /// Where the table lies.
    pub(super) const fn span(&self) -> Span<Pa> {
        Span::new(self.base, self.bytes)
    }

    fn cells<'m, M: TableMemory>(&self, memory: &'m M) -> &'m [M::Cell] {
        memory.entries(self.base, self.bytes as usize / 8)
    }

    /// The device's entry. The device is one for which there is room.
    pub(super) fn entry<'m, M: TableMemory>(
        &self,
        memory: &'m M,
        device: DeviceId,
    ) -> Option<Entry<'m, M>> {
        let first = device.0 as usize % (1 << 16) * WORDS;
        let cells = self.cells(memory).get(first..first + WORDS)?;
        Some(Entry { memory, cells })
    }

    /// Notes that a device is attached.
    pub(super) fn note(&mut self, device: DeviceId) {
        let source = device.0 as u16;
        let (first, last) = self.used.unwrap_or((source, source));
        self.used = Some((first.min(source), last.max(source)));
    }

    /// All devices that have a guest CR3 table, which comes with them.
    pub(super) fn guests<'t, M: TableMemory>(
        &'t self,
        memory: &'t M,
    ) -> impl Iterator<Item = (u16, u64)> + Clone + 't {
        let used = self.used.map(|(first, last)| first..=last);
        used.into_iter().flatten().filter_map(move |source| {
            let entry = self.entry(memory, DeviceId(source.into()))?;
            Some((source, entry.guest()?))
        })
    }

    /// All devices that are attached, with what their entries say.
    pub(super) fn attached<'t, M: TableMemory>(
        &'t self,
        memory: &'t M,
    ) -> impl Iterator<Item = (u16, Attached)> + Clone + 't {
        let used = self.used.map(|(first, last)| first..=last);
        used.into_iter().flatten().filter_map(move |source| {
            let there = self.entry(memory, DeviceId(source.into()))?.read()?;
            Some((source, there))
        })
    }

    /// A root of the domain that is not the one that is asked for.
    pub(super) fn other_root<M: TableMemory>(
        &self,
        memory: &M,
        domain: DomainId,
        asked: Root,
    ) -> Option<Root> {
        let mut roots = self.attached(memory).map(|(_, there)| there);
        let other = |there: &Attached| u32::from(there.domain) == domain.0 && there.root != asked;
        roots.find(other).map(|there| there.root)
    }

    /// All devices of a domain, with what their entries say.
    pub(super) fn members<'t, M: TableMemory>(
        &'t self,
        memory: &'t M,
        domain: u16,
    ) -> impl Iterator<Item = (u16, Attached)> + Clone + 't {
        self.attached(memory)
            .filter(move |(_, there)| there.domain == domain)
    }
}

/// The entry of one device.
pub(super) struct Entry<'m, M: TableMemory> {
    memory: &'m M,
    cells: &'m [M::Cell],
}

impl<M: TableMemory> Entry<'_, M> {
    fn word(&self, n: usize) -> u64 {
        self.cells.get(n).map_or(0, Cell::get)
    }

    fn store(&self, n: usize, word: u64) {
        if let Some(cell) = self.cells.get(n) {
            cell.set_release(word);
            self.memory.written(self.cells);
        }
    }

    /// Returns the attachment in the entry; `None` for an empty one.
    pub(super) fn read(&self) -> Option<Attached> {
        let (first, second) = (self.word(0), self.word(1));
        let levels = (first >> MODE & 7) as u8;
        (levels != 0).then_some(Attached {
            domain: second as u16,
            root: Root {
                format: FormatId::AmdV1,
                address: first & ADDRESS,
                levels,
            },
        })
    }

    /// Makes an empty entry present. The root was checked.
    pub(super) fn set(&self, domain: u16, root: &Root, features: Features, tlb: bool) {
        let tlb = if tlb { DEVICE_TLB } else { 0 };
        self.store(1, u64::from(domain) | tlb);
        self.store(0, word(root, features) | TRANSLATED);
    }

    /// The guest CR3 table, if there is one.
    pub(super) fn guest(&self) -> Option<u64> {
        let (first, second) = (self.word(0), self.word(1));
        let address =
            (first >> 58 & 7) << 12 | (second >> 16 & 0xffff) << 15 | (second >> 43) << 31;
        (first & GUEST == GUEST).then_some(address)
    }

    /// Makes an empty entry present, with an empty guest CR3 table of so many levels. Translations through
    /// it are tagged with `domain` and the PASID.
    pub(super) fn set_guest(&self, domain: u16, table: u64, levels: u32) {
        let high = (table >> 15 & 0xffff) << 16 | (table >> 31 & 0x1f_ffff) << 43;
        self.store(1, u64::from(domain) | high);
        let low = (table >> 12 & 7) << 58 | u64::from(levels - 1) << GLX;
        self.store(0, VALID | TRANSLATED | GUEST | low);
    }

    /// Another root, in the same state.
    pub(super) fn set_root(&self, root: &Root, features: Features) {
        let state = self.word(0) & TRANSLATED;
        self.store(0, word(root, features) | state);
    }

    /// From present to leaving.
    pub(super) fn withdraw(&self) {
        self.store(0, self.word(0) & !TRANSLATED);
        self.store(1, self.word(1) & !DEVICE_TLB);
    }

    /// From leaving to empty.
    pub(super) fn clear(&self) {
        self.store(0, VALID);
        self.store(1, 0);
    }
}
