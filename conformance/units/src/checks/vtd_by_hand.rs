//! VT-d in legacy mode, without a driver: registers and structures are written here, no more of them than
//! is needed. What fails here is the fault of the rig, of a table or of QEMU.
//!
//! Source: Intel Virtualization Technology for Directed I/O, architecture specification (D51397),
//! chapters 7 (faults), 9 (structures) and 11 (registers).

use anyhow::{Context as _, ensure};
use iommu::Registers as _;
use iopt::{
    Cell, Gather, NoRuns, Prot, Root, Table, TableMemory as _, TableOps as _, format::VtdSs,
};
use qtest::pci::Address;
use runs::{Pa, Span};

use super::expect;
use crate::{At, DEVICES, LONGEST, NVME, Place, Registers, Rig, Seen};

// Registers, by their titles in chapter 11.
const VERSION: usize = 0x00;
const CAPABILITY: usize = 0x08;
const EXTENDED_CAPABILITY: usize = 0x10;
const GLOBAL_COMMAND: usize = 0x18;
const GLOBAL_STATUS: usize = 0x1c;
const ROOT_TABLE_ADDRESS: usize = 0x20;
const CONTEXT_COMMAND: usize = 0x28;
const FAULT_STATUS: usize = 0x34;

/// Global command and status: translation.
const TRANSLATION: u32 = 1 << 31;
/// Global command and status: takes the root table's address.
const SET_ROOT: u32 = 1 << 30;
/// Global command: of the status, what the next command leaves as it is (Global Command Register,
/// description).
const KEPT: u32 = 0x96ff_ffff;
/// Context command: invalidates, globally; reads as 0 at the highest bit when that is done.
const ALL_CONTEXTS: u64 = 1 << 63 | 1 << 61;
/// IOTLB invalidate: the same, of all translations.
const ALL_TRANSLATIONS: u64 = 1 << 63 | 1 << 60;
const BUSY: u64 = 1 << 63;
/// Fault status: a record holds a fault.
const PENDING: u32 = 1 << 1;
/// Fault status: there was no room for one.
const OVERFLOW: u32 = 1 << 0;

const DATA: Span<Pa> = Place::Near.data();

const PAGE: u64 = 4096;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// A unit with an empty root table.
struct Vtd<'a> {
    rig: &'a Rig,
    registers: Registers,
    root: u64,
    /// The context table of bus 0.
    contexts: u64,
}

/// A fault record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Fault {
    source: u16,
    page: u64,
    reason: u8,
    read: bool,
}

impl<'a> Vtd<'a> {
    fn new(rig: &'a Rig) -> anyhow::Result<Self> {
        let registers = rig.registers();
        let version = registers.read32(VERSION);
        ensure!(
            version >> 4 != 0 && version >> 8 == 0,
            "version {version:#x}"
        );
        let capability = registers.read64(CAPABILITY);
        // SAGAW: tables of 4 levels. SLLPS: 2 MiB and 1 GiB.
        let needed = 1 << (8 + 2) | 3 << 34;
        ensure!(capability & needed == needed, "capability {capability:#x}");
        let tables = rig.structures();
        Ok(Self {
            rig,
            registers,
            root: tables.allocate(PAGE as usize)?,
            contexts: tables.allocate(PAGE as usize)?,
        })
    }

    fn cell(&self, table: u64, index: usize) -> anyhow::Result<&'a (impl Cell + 'a)> {
        let cells = self.rig.structures().entries(table, 512);
        cells.get(index).context("a table has 512 entries")
    }

    /// Writes the entries that lead from the device to the table (9.1 "Root Entry", 9.3 "Context
    /// Entry").
    fn attach(&self, device: Address, domain: u16, root: Root) -> anyhow::Result<()> {
        let function = usize::from(device.requester_id() & 0xff);
        let width = u64::from(root.levels) - 2;
        let high = self.cell(self.contexts, 2 * function + 1)?;
        high.set_release(u64::from(domain) << 8 | width);
        let low = self.cell(self.contexts, 2 * function)?;
        low.set_release(root.address | 1);
        let bus = self.cell(self.root, 0)?;
        bus.set_release(self.contexts | 1);
        Ok(())
    }

    fn enable(&self) -> anyhow::Result<()> {
        self.registers.write64(ROOT_TABLE_ADDRESS, self.root);
        self.command(SET_ROOT)?;
        self.forget()?;
        self.command(TRANSLATION)
    }

    fn command(&self, bit: u32) -> anyhow::Result<()> {
        let status = self.registers.read32(GLOBAL_STATUS);
        self.registers.write32(GLOBAL_COMMAND, status & KEPT | bit);
        // QEMU is done when it answers.
        let status = self.registers.read32(GLOBAL_STATUS);
        ensure!(status & bit != 0, "status {status:#x} after {bit:#x}");
        Ok(())
    }

    /// Invalidates everything, contexts first (6.5 "Invalidation of Translation Caches").
    fn forget(&self) -> anyhow::Result<()> {
        // IRO, in units of 16 bytes; the register is the second of two.
        let extended = self.registers.read64(EXTENDED_CAPABILITY);
        let iotlb = (extended >> 8 & 0x3ff) as usize * 16 + 8;
        for (register, what) in [(CONTEXT_COMMAND, ALL_CONTEXTS), (iotlb, ALL_TRANSLATIONS)] {
            self.registers.write64(register, what);
            let status = self.registers.read64(register);
            ensure!(status & BUSY == 0, "{status:#x} after {what:#x}");
        }
        Ok(())
    }

    /// Takes the fault that is recorded, if there is one, and makes room for the next.
    fn fault(&self) -> Option<Fault> {
        if self.registers.read32(FAULT_STATUS) & PENDING == 0 {
            return None;
        }
        // FRO, in units of 16 bytes.
        let capability = self.registers.read64(CAPABILITY);
        let record = (capability >> 24 & 0x3ff) as usize * 16;
        let (low, high) = (
            self.registers.read64(record),
            self.registers.read64(record + 8),
        );
        self.registers.write32(record + 12, 1 << 31);
        self.registers.write32(FAULT_STATUS, OVERFLOW);
        Some(Fault {
            source: high as u16,
            page: low & !0xfff,
            reason: (high >> 32) as u8,
            read: high >> 62 & 1 == 1,
        })
    }

    fn no_fault(&self) -> anyhow::Result<()> {
        let fault = self.fault();
        ensure!(fault.is_none(), "{fault:x?}");
        Ok(())
    }
}

const fn same(address: u64) -> At {
    let iova = address;
    At { iova, address }
}

pub(super) fn lets_everything_pass_while_it_is_off(rig: &Rig) -> anyhow::Result<()> {
    let end = DATA.start + DATA.len - PAGE;
    for device in 0..NVME {
        for (from, to) in [(DATA.start, end), (end, DATA.start + 0x123)] {
            let seen = rig.copy(device, same(from), same(to), LONGEST)?;
            expect(seen, Seen::Copied, "off")?;
        }
    }
    Ok(())
}

pub(super) fn translates_through_a_table_of_ours(rig: &Rig) -> anyhow::Result<()> {
    for levels in [3, 4] {
        let unit = Vtd::new(rig)?;
        let mut table = Table::new(VtdSs::new(levels)?, rig.structures())?;
        // One leaf of each size, at both ends of what the levels reach.
        let top = 1 << (12 + 9 * u32::from(levels));
        let mut places = Vec::new();
        for (nth, size) in [PAGE, 2 * MIB, GIB].into_iter().enumerate() {
            let address = 8 * GIB + nth as u64 * 4 * GIB + size;
            for (iova, address) in [
                (nth as u64 * GIB, address),
                (top - (nth as u64 * GIB + size), address + 2 * GIB),
            ] {
                table.map(iova, &[Span::new(address, size)], Prot::RW)?;
                places.push((iova, address));
                places.push((iova + size - PAGE, address + size - PAGE));
            }
        }
        unit.attach(DEVICES[0], 7, table.root())?;
        unit.enable()?;
        let at = |nth: usize| {
            let (iova, address) = places[nth % places.len()];
            At { iova, address }
        };
        for nth in 0..places.len() {
            let seen = rig.copy(0, at(nth), at(nth + 5), LONGEST)?;
            let what = format!("{levels} levels, {:x?} to {:x?}", at(nth), at(nth + 5));
            expect(seen, Seen::Copied, &what)?;
        }
        unit.no_fault()?;
        unit.rig.finish()?;
    }
    Ok(())
}

pub(super) fn keeps_devices_apart(rig: &Rig) -> anyhow::Result<()> {
    let unit = Vtd::new(rig)?;
    // The same addresses lead each of them elsewhere.
    let memory = [DATA.start, DATA.start + MIB];
    let mut tables = Vec::new();
    for (nth, address) in memory.into_iter().enumerate() {
        let mut table = Table::new(VtdSs::new(4)?, rig.structures())?;
        table.map(0, &[Span::new(address, 2 * PAGE)], Prot::RW)?;
        unit.attach(DEVICES[nth], nth as u16 + 1, table.root())?;
        tables.push(table);
    }
    unit.enable()?;
    for _ in 0..2 {
        for (nth, address) in memory.into_iter().enumerate() {
            let at = |iova| At {
                iova,
                address: address + iova,
            };
            let seen = rig.copy(nth, at(0), at(PAGE), LONGEST)?;
            expect(seen, Seen::Copied, "its own memory")?;
            let other = At {
                iova: PAGE,
                address: memory[1 - nth] + PAGE,
            };
            let seen = rig.copy(nth, at(0), other, LONGEST)?;
            expect(seen, Seen::Untouched, "the other's memory")?;
        }
    }
    unit.no_fault()?;
    unit.rig.finish()?;
    Ok(())
}

pub(super) fn records_faults(rig: &Rig) -> anyhow::Result<()> {
    let unit = Vtd::new(rig)?;
    let mut table = Table::new(VtdSs::new(4)?, rig.structures())?;
    let (good, read_only, write_only) = (0x10_0000, 0x20_0000, 0x30_0000);
    for (iova, prot) in [
        (good, Prot::RW),
        (read_only, Prot::READ),
        (write_only, Prot::WRITE),
    ] {
        table.map(iova, &[Span::new(DATA.start + iova, PAGE)], prot)?;
    }
    unit.attach(DEVICES[0], 1, table.root())?;
    unit.enable()?;
    // Where nothing is mapped that would be mapped to the same place; addresses that no table can map
    // lead nowhere, so anything may be looked at.
    let at = |iova| At {
        iova,
        address: DATA.start + if iova < DATA.len { iova } else { good },
    };
    let (beyond, far) = (1 << 48, 0x7777_7777_6000);
    // Reasons of section 7.1.3: 2 no context entry, 4 beyond the table, 5 no write, 6 no read.
    for (device, from, to, seen, page, reason, read) in [
        (0, good, 0x5000, Seen::Untouched, 0x5000, 5, false),
        (0, far, good, Seen::Otherwise, far, 6, true),
        (0, good, read_only, Seen::Untouched, read_only, 5, false),
        (0, write_only, good, Seen::Otherwise, write_only, 6, true),
        (0, good, beyond, Seen::Untouched, beyond, 4, false),
        (1, good, good + 2048, Seen::Untouched, good, 2, true),
    ] {
        let what = format!("device {device}, {from:#x} to {to:#x}");
        expect(rig.copy(device, at(from), at(to), 64)?, seen, &what)?;
        let fault = unit.fault().with_context(|| format!("{what}: no fault"))?;
        let expected = Fault {
            source: DEVICES[device].requester_id(),
            page,
            reason,
            read,
        };
        ensure!(fault == expected, "{what}: {fault:x?}, not {expected:x?}");
    }
    // Allowed accesses go on.
    for (from, to) in [(good, write_only), (read_only, good)] {
        expect(
            rig.copy(0, at(from), at(to), LONGEST)?,
            Seen::Copied,
            "allowed",
        )?;
    }
    unit.no_fault()?;
    unit.rig.finish()?;
    Ok(())
}

pub(super) fn goes_on_with_what_it_knows_until_it_is_notified(rig: &Rig) -> anyhow::Result<()> {
    let unit = Vtd::new(rig)?;
    let mut table = Table::new(VtdSs::new(4)?, rig.structures())?;
    table.map(0, &[Span::new(DATA.start, 2 * PAGE)], Prot::RW)?;
    unit.attach(DEVICES[0], 1, table.root())?;
    unit.enable()?;
    let at = |iova| At {
        iova,
        address: DATA.start + iova,
    };
    let copy = || rig.copy(0, at(0), at(PAGE), LONGEST);
    expect(copy()?, Seen::Copied, "mapped")?;
    let mut gather = Gather::new();
    table.unmap(Span::new(PAGE, PAGE), &mut gather, &mut NoRuns)?;
    expect(copy()?, Seen::Copied, "unmapped, but not invalidated")?;
    let flushed = gather.flush_with(|_| unit.forget())?;
    expect(copy()?, Seen::Untouched, "invalidated")?;
    ensure!(unit.fault().is_some_and(|fault| fault.page == PAGE));
    table.reclaim(flushed);
    unit.rig.finish()?;
    Ok(())
}
