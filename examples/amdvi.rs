//! AMD-Vi, from reset to the first DMA, and back.
//!
//! For authors of operating systems. Sections are those of AMD's IOMMU specification (48882).
//! `machine` stands for the machine, and its head says what an operating system has instead.
//!
//!     cargo run -p dmaspace-examples --example amdvi

use std::error::Error;

use iommu::iopt::{
    Arena, AtomicMeta, Gather, NoRuns, Prot, Table, TableMemory, TableOps as _, format::AmdV1,
};
use iommu::runs::Span;
use iommu::{AmdVi, DomainId, Unit, amdvi};
use machine::{DEVICE, Machine, PC};

/// Where the unit's PCI capability block has the registers, and ACPI's IVRS table too (section 5.2.2, IVHD
/// block). QEMU's are always here.
const REGISTERS: u64 = 0xfed8_0000;

/// A number for what the device sees: the unit tags what it caches with it.
const DOMAIN: DomainId = DomainId(1);

/// The device's addresses, which have nothing to do with physical ones.
const IOVA: u64 = 0x1_0000_0000;

const TEXT: &[u8] = b"seen by the device";

fn main() -> Result<(), Box<dyn Error>> {
    // From version 11 on the one option, before the other: without it QEMU's unit translates nothing.
    let start = |option| Machine::start(PC, &["-device", &format!("amd-iommu,{option}")]);
    let machine = start("pt=off").or_else(|_| start("dma-remap=on"))?;

    // 0. Memory that the unit sees, for its structures and for page tables. Something is noted beside each
    //    page; allocation and addresses are arithmetic.
    let pages = machine.stretch().len() / 512;
    let notes: Vec<_> = (0..pages).map(|_| AtomicMeta::new()).collect();
    let arena = Arena::new((machine.stretch(), &notes[..]), machine.stretch_at())?;
    let memory = &arena;

    // 1. Probe. The driver reads the Extended Feature Register (section 3.4.7), and takes memory for the
    //    device table, the command buffer and the event log. What no register says, IVRS does: how many
    //    devices, and here that the unit remembers absent entries (NpCache), as emulated ones do. The
    //    device table is one piece of 32 bytes a device, so 8 KiB are enough for bus 0.
    let config = amdvi::Config {
        last_device: 0xff,
        caches_not_present: true,
        ..amdvi::Config::default()
    };
    let unit = AmdVi::new(machine.registers(REGISTERS), memory, config)?;
    let can = unit.capabilities();
    let tables = can.formats[0].ok_or("no tables")?;
    println!(
        "the unit walks {} tables of up to {} levels",
        tables.format,
        tables.levels.ilog2()
    );

    // 2. An empty page table, in the same memory: the unit walks it there. 3 levels are 39 bits of device
    //    addresses (section 2.2.3). Should more be needed, `Table::grow` puts a level on top, and the flush
    //    tells the unit.
    let mut table = Table::new(AmdV1::new(3)?, memory)?;

    // 3. Translate. Buffers, device table, then the Control Register's IommuEn, in the order of the
    //    driver's module head. From now on a device that is not attached faults, so attach first
    //    any device whose DMA must continue.
    unit.enable()?;

    // 4. Give the device its table: a device table entry that leads to the root (section 2.2.2).
    unit.attach(DEVICE, DOMAIN, table.root())?;

    // 5. Map two physical ranges at consecutive device addresses, all or nothing.
    let from = machine.store(0x10_0000, TEXT)?;
    let to = machine.store(0x20_0000, &[b'.'; TEXT.len()])?;
    let pages = [Span::new(from, 4096), Span::new(to, 4096)];
    table.map(IOVA, &pages, Prot::RW)?;
    // A unit of silicon needs no more than the stores.
    if can.caches_not_present {
        unit.invalidate_domain(DOMAIN)?;
    }

    // 6. DMA: the device reads through the first page and writes through the second.
    let len = TEXT.len() as u64;
    machine.copy(IOVA, IOVA + 4096, len)?;
    let seen = machine.load(to, TEXT.len())?;
    println!("{DEVICE} copied \"{seen}\"");
    assert_eq!(seen.as_bytes(), TEXT);

    // 7. Take it away. The gather knows what the unit may have cached; one flush for all of it
    //    (INVALIDATE_IOMMU_PAGES and COMPLETION_WAIT, section 2.4), and only a flushed gather gives table
    //    pages back. Now, not earlier, the memory may have another use.
    let mut gather = Gather::new();
    table.unmap(Span::new(IOVA, 2 * 4096), &mut gather, &mut NoRuns)?;
    let flushed = gather.flush_with(|what| unit.invalidate(DOMAIN, what))?;
    table.reclaim(flushed);
    let told = unit.counters();
    println!("{} commands so far, {} waits", told.commands, told.waits);

    // 8. The device tries all the same. What it writes does not arrive. A unit of silicon logs why (section
    //    2.5.3, IO_PAGE_FAULT), and a system drains that when the unit's interrupt comes; QEMU's is silent
    //    about entries that are zero.
    machine.store(0x20_0000, &[b'.'; TEXT.len()])?;
    machine.copy(IOVA, IOVA + 4096, len)?;
    assert_eq!(machine.load(to, TEXT.len())?, ".".repeat(TEXT.len()));
    let mut faults = 0;
    let lost = unit.drain_faults(&mut |fault| {
        println!("fault: {fault}");
        faults += 1;
    });
    println!("{faults} faults, {lost} lost for want of room");

    // 9. And back: no device, no table, no unit. All memory has come home.
    unit.detach(DEVICE)?;
    let (gather, _) = table.tear_down();
    // `detach` has flushed the domain.
    memory.reclaim(gather.never_walked().into_tables());
    unit.tear_down()?;
    assert_eq!(memory.in_use(), 0);
    Ok(())
}
