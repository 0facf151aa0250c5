//! Contexts: the unit's state of a device, and of a process address space of one.
//!
//! RISC-V IOMMU specification, sections "Device-context fields" (words tc, iohgatp, ta, fsc; in the
//! extended format msiptp and what belongs to it are 0, MSI translation off) and "Process-context fields"
//! (ta, fsc).
//!
//! A device context holds one of
//!
//! * **nothing**;
//! * **a table** of the second stage (iohgatp, GSCID) or of the first (fsc, PSCID in ta), the other stage
//!   being Bare;
//! * **processes** (PDTV): fsc leads to a process directory whose contexts hold first-stage tables. The
//!   process 0 is for requests without a PASID (DPE; without it they would not be translated at all). The unit
//!   looks requests that carry PASID 0 up in the same place (section "Process to translate an IOVA"), and can
//!   tell the two apart only by the privilege that the latter may ask for: there is none (ENS = 0). Guest tables
//!   would hold for the directory, too, so there are none beside it.
//!
//! Each context is also where the driver keeps what it knows: there is no second list that could differ.
//! A context is in one of three states:
//!
//! * **empty**: no table in it;
//! * **valid**: V;
//! * **leaving**: as valid, without V. The unit faults, but may still have the old one cached; the address
//!   space counts as attached.
//!
//! While a device's TLB is invalidated, its answer is only taken through a valid context with EN_ATS. So
//! a table of such a device leaves in two steps: an empty table takes its place ([`block`](Device::block)),
//! and when the TLB is empty V is cleared.
//!
//! Without V all other bits are software's. So EN_ATS stays in a context that is empty, and says that the
//! device has a TLB.
//!
//! All other words are in memory before the store that sets V, which is in the first word; the reverse
//! begins with it (section "Updating in-memory data structure entries"). The unit does not cache a context
//! without V, so it is not told when V is set.

use iopt::{Cell, FormatId, Root, TableMemory};

use super::capabilities::Features;
use super::command::Tag;
use super::directory::Directory;

/// V, in tc and in a process context's ta.
const VALID: u64 = 1;
/// EN_ATS.
const DEVICE_TLB: u64 = 1 << 1;
/// PDTV and DPE.
const PROCESSES: u64 = 1 << 5 | 1 << 9;
/// GADE.
const SECOND_DIRTY: u64 = 1 << 7;
/// SADE.
const FIRST_DIRTY: u64 = 1 << 8;

// Words of a device context, and of a process context.
const TC: usize = 0;
const IOHGATP: usize = 1;
const TA: usize = 2;
const FSC: usize = 3;
const PROCESS_TA: usize = 0;
const PROCESS_FSC: usize = 1;

/// PPN of iohgatp and fsc.
const PAGE_NUMBER: u64 = (1 << 44) - 1;
/// ENS and SUM, in a process context's ta: requests of supervisor privilege are translated, by leaves for all
/// as by leaves for them alone.
const SUPERVISOR: u64 = 1 << 1 | 1 << 2;
/// PSCID in ta.
const PSCID: u32 = 12;
/// GSCID in iohgatp.
const GSCID: u32 = 44;

/// Bits of a process id that choose the context in a page.
pub(super) const PROCESS_LEAF_BITS: u32 = 8;

/// Attachment of an address space: its domain and the table to translate through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Attached {
    pub(super) domain: u16,
    pub(super) root: Root,
}

impl Attached {
    /// Tag of translations through it.
    pub(super) fn tag(&self) -> Tag {
        match self.root.format {
            FormatId::RiscVG => Tag::Guest(self.domain),
            _ => Tag::Process(self.domain.into()),
        }
    }
}

/// Content of a device context.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Holds {
    Nothing,
    Table(Attached),
    Processes(Directory),
}

/// MODE and PPN. Sv39, Sv39x4 are 8, and so on.
fn pointer(root: &Root) -> u64 {
    (u64::from(root.levels) + 5) << 60 | root.address >> 12
}

fn root(format: FormatId, pointer: u64) -> Root {
    Root {
        format,
        address: (pointer & PAGE_NUMBER) << 12,
        levels: (pointer >> 60).saturating_sub(5) as u8,
    }
}

/// A device's or a process' context.
pub(super) struct Context<'m, M: TableMemory> {
    pub(super) memory: &'m M,
    pub(super) cells: &'m [M::Cell],
}

impl<M: TableMemory> Context<'_, M> {
    fn word(&self, n: usize) -> u64 {
        self.cells.get(n).map_or(0, Cell::get)
    }

    fn store(&self, n: usize, word: u64) {
        if let Some(cell) = self.cells.get(n) {
            cell.set_release(word);
        }
    }

    /// Stores the first word, when all others are in memory.
    fn publish(&self, word: u64) {
        self.memory.written(self.cells);
        self.store(TC, word);
        self.memory.written(self.cells);
    }

    pub(super) fn is_valid(&self) -> bool {
        self.word(TC) & VALID != 0
    }

    /// From valid to leaving.
    pub(super) fn withdraw(&self) {
        self.publish(self.word(TC) & !VALID);
    }
}

/// A device's context.
pub(super) struct Device<'m, M: TableMemory>(pub(super) Context<'m, M>);

impl<M: TableMemory> Device<'_, M> {
    pub(super) fn holds(&self) -> Holds {
        let context = &self.0;
        let (second, first) = (context.word(IOHGATP), context.word(FSC));
        if second != 0 {
            return Holds::Table(Attached {
                domain: (second >> GSCID) as u16,
                root: root(FormatId::RiscVG, second),
            });
        }
        if first == 0 {
            return Holds::Nothing;
        }
        if context.word(TC) & PROCESSES == PROCESSES {
            return Holds::Processes(Directory {
                root: (first & PAGE_NUMBER) << 12,
                levels: (first >> 60) as u32,
                leaf_bits: PROCESS_LEAF_BITS,
            });
        }
        Holds::Table(Attached {
            domain: (context.word(TA) >> PSCID) as u16,
            root: root(FormatId::RiscV, first),
        })
    }

    /// The device has a TLB.
    pub(super) fn has_tlb(&self) -> bool {
        self.0.word(TC) & DEVICE_TLB != 0
    }

    /// Says so, in an empty context.
    pub(super) fn set_tlb(&self, there: bool) {
        self.0.publish(if there { DEVICE_TLB } else { 0 });
    }

    /// Makes an empty context valid. The root was checked.
    pub(super) fn set_table(&self, domain: u16, root: &Root, features: Features) {
        let (domain, pointer) = (u64::from(domain), pointer(root));
        let dirty = if root.format == FormatId::RiscVG {
            self.0.store(IOHGATP, pointer | domain << GSCID);
            SECOND_DIRTY
        } else {
            self.0.store(TA, domain << PSCID);
            self.0.store(FSC, pointer);
            FIRST_DIRTY
        };
        self.validate(if features.dirty() { dirty } else { 0 });
    }

    /// Makes an empty context valid, or one that has the directory valid again.
    pub(super) fn set_processes(&self, directory: &Directory, features: Features) {
        let pointer = u64::from(directory.levels) << 60 | directory.root >> 12;
        self.0.store(FSC, pointer);
        let dirty = if features.dirty() { FIRST_DIRTY } else { 0 };
        self.validate(PROCESSES | dirty);
    }

    fn validate(&self, control: u64) {
        let tlb = self.0.word(TC) & DEVICE_TLB;
        self.0.publish(tlb | control | VALID);
    }

    /// Puts an empty table in the place of the one in a valid context, by one store.
    pub(super) fn block(&self, empty: u64) {
        for n in [IOHGATP, FSC] {
            let pointer = self.0.word(n);
            if pointer != 0 {
                self.0.store(n, pointer & !PAGE_NUMBER | empty >> 12);
            }
        }
        self.0.memory.written(self.0.cells);
    }

    /// From leaving to empty.
    pub(super) fn clear(&self) {
        self.set_tlb(self.has_tlb());
        for n in [IOHGATP, TA, FSC] {
            self.0.store(n, 0);
        }
        self.0.memory.written(self.0.cells);
    }
}

/// The context of a process address space.
pub(super) struct Process<'m, M: TableMemory>(pub(super) Context<'m, M>);

impl<M: TableMemory> Process<'_, M> {
    /// Returns the attachment; `None` for an empty context.
    pub(super) fn read(&self) -> Option<Attached> {
        let first = self.0.word(PROCESS_FSC);
        (first != 0).then_some(Attached {
            domain: (self.0.word(PROCESS_TA) >> PSCID) as u16,
            root: root(FormatId::RiscV, first),
        })
    }

    /// Makes an empty context valid. The root was checked. Without `supervisor` requests of that privilege are
    /// refused.
    pub(super) fn set(&self, domain: u16, root: &Root, supervisor: bool) {
        self.0.store(PROCESS_FSC, pointer(root));
        let privilege = if supervisor { SUPERVISOR } else { 0 };
        self.0
            .publish(u64::from(domain) << PSCID | privilege | VALID);
    }

    /// From leaving to empty.
    pub(super) fn clear(&self) {
        self.0.store(PROCESS_FSC, 0);
        self.0.publish(0);
    }
}
