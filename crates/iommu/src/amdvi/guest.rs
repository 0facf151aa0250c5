//! Guest tables (v2), and PASIDs.
//!
//! AMD IOMMU specification, sections 2.2.2 "Device Table" (GV, GIoV, GLX, guest CR3 table root pointer) and
//! 2.2.6 "Guest and Nested Address Translation": a device's entry leads to a guest CR3 table of 1 to 3
//! levels, 9 bits of a PASID each, and the last word to the table of the PASID. Host translation is off
//! (Mode 0), so all addresses are those of the host. A word is in one of three states:
//!
//! * **empty**: zero;
//! * **present**: V, and the table;
//! * **leaving**: as present, without V. Requests fault, but the unit may still have the old one cached; the
//!   PASID counts as attached, which the notes say.
//!
//! Cached translations are tagged with PASID and DomainID, and a device has one DomainID for all of its PASIDs,
//! whichever domains of ours these are in. So it is the device's own: its requester id. A flush of a domain names each
//! of its members, which are all noted.
//!
//! **Attach**: the tables that lead to the word, from the last to the first, and the word; the device's entry
//! if it has no guest CR3 table yet, then INVALIDATE_DEVTAB_ENTRY, since the entry that blocks may be cached.
//! Where absent entries are cached, the PASID's translations are invalidated behind it.
//!
//! **Detach**: V is cleared; INVALIDATE_IOMMU_PAGES (GN) for all of the PASID; one wait; then the word is
//! emptied. Guest CR3 tables stay until the unit is torn down.
//!
//! No emulated unit walks guest tables: this is tested on the model alone.

use iopt::{Cell, FormatId, Root, TABLE_BYTES, TableMemory};

use super::AmdVi;
use super::command::Command;
use super::table::DeviceTable;
use super::unit::Inner;
use crate::commands::{Block, parts};
use crate::driver::{Attachments, Place, same_root};
use crate::error::{FlushError, NoPlace, UnitAttachError};
use crate::notes::{Member, Notes};
use crate::registers::Registers;
use crate::unit::{DeviceId, DomainId};

/// V, in words of guest CR3 tables of all levels.
const VALID: u64 = 1;
/// The next table.
const ADDRESS: u64 = ((1 << 52) - 1) & !0xfff;
/// Words of a table, and the bits that choose one.
const WORDS: usize = TABLE_BYTES as usize / 8;
const BITS: u32 = WORDS.ilog2();

/// The levels of guest CR3 tables for PASIDs of so many bits.
pub(super) const fn levels(pasid_bits: u32) -> u32 {
    match pasid_bits {
        0 => 1,
        bits => bits.div_ceil(BITS),
    }
}

fn cell<M: TableMemory>(memory: &M, table: u64, pasid: u32, level: u32) -> Option<&M::Cell> {
    let index = (pasid >> (BITS * (level - 1))) as usize % WORDS;
    memory.entries(table, WORDS).get(index)
}

/// The word of a PASID, below a table of so many levels.
fn find<M: TableMemory>(memory: &M, table: u64, levels: u32, pasid: u32) -> Option<&M::Cell> {
    let mut table = table;
    for level in (2..=levels).rev() {
        let word = cell(memory, table, pasid, level)?.get();
        table = (word & VALID != 0).then_some(word & ADDRESS)?;
    }
    cell(memory, table, pasid, 1)
}

/// The same, with new tables where they are missing. After an error those that were linked stay.
fn make<M: TableMemory>(
    memory: &M,
    table: u64,
    levels: u32,
    pasid: u32,
) -> Result<&M::Cell, NoPlace> {
    let mut table = table;
    for level in (2..=levels).rev() {
        let cell = cell(memory, table, pasid, level).ok_or(NoPlace::Cells(table))?;
        let word = cell.get();
        table = match word & VALID {
            0 => {
                let next = memory.allocate(TABLE_BYTES as usize)?;
                store(memory, cell, next | VALID);
                next
            }
            _ => word & ADDRESS,
        };
    }
    cell(memory, table, pasid, 1).ok_or(NoPlace::Cells(table))
}

fn store<M: TableMemory>(memory: &M, cell: &M::Cell, word: u64) {
    cell.set_release(word);
    memory.written(core::slice::from_ref(cell));
}

/// Decodes the root from the word of a member, present or leaving.
fn root(word: u64) -> Root {
    Root {
        format: FormatId::X86_64,
        address: word & ADDRESS,
        levels: 4,
    }
}

/// Hands all pages of a guest CR3 table of so many levels to `each`.
pub(super) fn for_each_page<M: TableMemory>(
    memory: &M,
    table: u64,
    levels: u32,
    each: &mut impl FnMut(u64),
) {
    if levels > 1 {
        for cell in memory.entries(table, WORDS) {
            if cell.get() & VALID != 0 {
                for_each_page(memory, cell.get() & ADDRESS, levels - 1, each);
            }
        }
    }
    each(table);
}

/// The table of a member.
pub(super) fn root_of<M: TableMemory>(
    memory: &M,
    table: &DeviceTable,
    levels: u32,
    member: Member,
) -> Option<Root> {
    let entry = table.entry(memory, DeviceId(member.source.into()))?;
    let word = find(memory, entry.guest()?, levels, member.pasid)?;
    Some(root(word.get()))
}

/// All of a PASID.
fn all_of(source: u16, pasid: u32) -> Command {
    Command::GuestPages {
        domain: source,
        pasid,
        block: Block::ALL,
        tables: true,
    }
}

impl<R: Registers, M: TableMemory> AmdVi<R, M> {
    /// The levels of guest CR3 tables.
    pub(super) const fn guest_levels(&self) -> u32 {
        levels(self.config.pasid_bits)
    }

    /// A root of the domain that is not the one that is asked for.
    pub(super) fn other_guest_root(
        &self,
        (table, notes): (&DeviceTable, &Notes),
        domain: DomainId,
        asked: Root,
    ) -> Option<Root> {
        let (tag, levels) = (self.capabilities.tag(domain)?, self.guest_levels());
        let mut members = notes.members(&self.memory, tag);
        let there = members.find_map(|member| root_of(&self.memory, table, levels, member));
        there.filter(|there| *there != asked)
    }

    pub(super) fn attach_guest(
        &self,
        place: Place,
        domain: DomainId,
        root: Root,
    ) -> Result<(), UnitAttachError> {
        let (device, pasid) = (place.device, place.number());
        let tag = self.check(device, domain, &root)?;
        let Inner { table, ring, notes } = &mut *self.inner.lock();
        let (memory, source) = (&self.memory, device.0 as u16);
        if let Some(there) = notes.member(memory, source, pasid) {
            let domain = DomainId(there.domain.into());
            return Err(UnitAttachError::AlreadyAttached { device, domain });
        }
        let other = self.other_guest_root((table, notes), domain, root);
        same_root(other, domain, root)?;
        let no_place = |cause: NoPlace| cause.of(device);
        let short = no_place(NoPlace::Cells(table.base));
        let entry = table.entry(memory, device).ok_or(short)?;
        let levels = self.guest_levels();
        let first = match entry.guest() {
            Some(first) => first,
            None => {
                let first = memory.allocate(TABLE_BYTES as usize);
                let first = first.map_err(NoPlace::NoTables).map_err(no_place)?;
                memory.written(memory.entries(first, WORDS));
                table.note(device);
                entry.set_guest(source, first, levels);
                first
            }
        };
        let word = make(memory, first, levels, pasid).map_err(no_place)?;
        let member = Member {
            source,
            pasid,
            domain: tag,
            tlb: None,
        };
        notes.add(memory, member).map_err(no_place)?;
        store(memory, word, root.address | VALID);
        let absent = self.config.caches_not_present;
        let commands = [
            // Also when an earlier attach has set the entry: it may have failed behind that.
            Some(Command::Device { source }),
            absent.then_some(Command::Barrier),
            absent.then(|| all_of(source, pasid)),
        ];
        let commands = commands.into_iter().flatten();
        let told = ring.issue((&self.registers, memory), commands);
        told.map_err(|cause| {
            store(memory, word, root.address);
            UnitAttachError::Unit { device, cause }
        })
    }

    pub(super) fn detach_guest(&self, place: Place) -> Result<(), UnitAttachError> {
        let (device, pasid) = (place.device, place.number());
        self.check_device(device)?;
        let Inner { table, ring, notes } = &mut *self.inner.lock();
        let (memory, source) = (&self.memory, device.0 as u16);
        let first = table.entry(memory, device).and_then(|entry| entry.guest());
        let word = first.and_then(|first| find(memory, first, self.guest_levels(), pasid));
        let (Some(word), Some(_)) = (word, notes.member(memory, source, pasid)) else {
            return Err(UnitAttachError::NotAttached { device });
        };
        store(memory, word, word.get() & !VALID);
        let commands = core::iter::once(all_of(source, pasid));
        ring.issue((&self.registers, memory), commands)
            .map_err(|cause| UnitAttachError::Unit { device, cause })?;
        store(memory, word, 0);
        notes.remove(memory, source, pasid);
        Ok(())
    }

    /// Invalidates pages of all members of a domain; everything where none are named.
    pub(super) fn flush_guest(
        &self,
        domain: DomainId,
        tag: u16,
        blocks: Option<&[Block]>,
        tables: bool,
    ) -> Result<(), FlushError> {
        let Inner { ring, notes, .. } = &mut *self.inner.lock();
        let members = notes.members(&self.memory, tag);
        let blocks = parts(blocks, members.clone().count());
        let commands = members.flat_map(move |Member { source, pasid, .. }| {
            blocks.clone().map(move |block| match block {
                Some(block) => Command::GuestPages {
                    domain: source,
                    pasid,
                    block,
                    tables,
                },
                None => all_of(source, pasid),
            })
        });
        ring.issue((&self.registers, &self.memory), commands)
            .map_err(|cause| FlushError::Unit { domain, cause })
    }
}
