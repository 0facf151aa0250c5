//! Intel VT-d, from reset to the first DMA, and back.
//!
//! For authors of operating systems. Chapters are those of Intel's specification for Directed I/O
//! (D51397). `machine` stands for the machine, and its head says what an operating system has instead.
//!
//!     cargo run -p dmaspace-examples --example vtd

use std::error::Error;

use iommu::iopt::{
    Arena, AtomicMeta, Gather, NoRuns, Prot, Table, TableMemory, TableOps as _, format::VtdSs,
};
use iommu::runs::Span;
use iommu::{DomainId, Unit, Vtd, vtd};
use machine::{DEVICE, Machine, PC};

/// Where ACPI's DMAR table has the registers (chapter "BIOS Considerations", DRHD structure). In QEMU's PC
/// it is always here.
const REGISTERS: u64 = 0xfed9_0000;

/// A number for what the device sees: the unit tags what it caches with it. 0 may be the unit's own.
const DOMAIN: DomainId = DomainId(1);

/// The device's addresses, which have nothing to do with physical ones.
const IOVA: u64 = 0x1_0000_0000;

const TEXT: &[u8] = b"seen by the device";

fn main() -> Result<(), Box<dyn Error>> {
    let machine = Machine::start(PC, &["-device", "intel-iommu,aw-bits=48"])?;

    // 0. Memory that the unit sees, for its structures and for page tables. Something is noted beside each
    //    page; allocation and addresses are arithmetic.
    let pages = machine.stretch().len() / 512;
    let notes: Vec<_> = (0..pages).map(|_| AtomicMeta::new()).collect();
    let arena = Arena::new((machine.stretch(), &notes[..]), machine.stretch_at())?;
    let memory = &arena;

    // 1. Probe. The driver reads the capability registers, and allocates the root table and the invalidation
    //    queue. Devices still reach all of memory.
    let config = vtd::Config::default();
    let unit = Vtd::new(machine.registers(REGISTERS), memory, config)?;
    let can = unit.capabilities();
    let tables = can.formats[0].ok_or("no tables")?;
    println!("the unit walks {} tables", tables.format);

    // 2. An empty page table, in the same memory. 4 levels of 9 bits and pages of 12 are 48 bits of device
    //    addresses (chapter "Second-Stage Translation").
    let levels = tables.levels.ilog2();
    let mut table = Table::new(VtdSs::new(levels as u8)?, memory)?;

    // 3. Translate. From now on a device that is not attached faults: attach first any device whose DMA must
    //    continue, such as a frame buffer's.
    unit.enable()?;

    // 4. Give the device its table: a context entry that leads to the root.
    unit.attach(DEVICE, DOMAIN, table.root())?;

    // 5. Map two physical ranges at consecutive device addresses, all or nothing.
    let from = machine.store(0x10_0000, TEXT)?;
    let to = machine.store(0x20_0000, &[b'.'; TEXT.len()])?;
    let pages = [Span::new(from, 4096), Span::new(to, 4096)];
    table.map(IOVA, &pages, Prot::RW)?;
    // Most units need only the stores. Emulated ones (CAP.CM) cache absent entries, old ones (CAP.RWBF) buffer
    // stores.
    if can.caches_not_present {
        unit.invalidate_domain(DOMAIN)?;
    }

    // 6. DMA: the device reads through the first page and writes through the second.
    let len = TEXT.len() as u64;
    machine.copy(IOVA, IOVA + 4096, len)?;
    let seen = machine.load(to, TEXT.len())?;
    println!("{DEVICE} copied \"{seen}\"");
    assert_eq!(seen.as_bytes(), TEXT);

    // 7. Take it away. The gather knows what the unit may have cached; one flush for all of it, and only a
    //    flushed gather gives table pages back. Now, not earlier, the memory may have another use.
    let mut gather = Gather::new();
    table.unmap(Span::new(IOVA, 2 * 4096), &mut gather, &mut NoRuns)?;
    let flushed = gather.flush_with(|what| unit.invalidate(DOMAIN, what))?;
    table.reclaim(flushed);
    let told = unit.counters();
    println!("{} commands so far, {} waits", told.commands, told.waits);

    // 8. The device tries all the same. What it writes does not arrive; the unit records why (chapter
    //    "Fault Logging"). A system drains the faults when the unit's interrupt comes.
    machine.store(0x20_0000, &[b'.'; TEXT.len()])?;
    machine.copy(IOVA, IOVA + 4096, len)?;
    assert_eq!(machine.load(to, TEXT.len())?, ".".repeat(TEXT.len()));
    let mut faults = 0;
    let lost = unit.drain_faults(&mut |fault| {
        println!("fault: {fault}");
        faults += 1;
    });
    println!("{faults} faults, {lost} lost for want of room");
    assert!(faults > 0);

    // 9. And back: no device, no table, no unit. All memory has come home.
    unit.detach(DEVICE)?;
    let (gather, _) = table.tear_down();
    // `detach` has flushed the domain.
    memory.reclaim(gather.never_walked().into_tables());
    unit.tear_down()?;
    assert_eq!(memory.in_use(), 0);
    Ok(())
}
