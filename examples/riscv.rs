//! The RISC-V IOMMU, from reset to the first DMA, and back.
//!
//! For authors of operating systems. Sections are those of the RISC-V IOMMU Architecture
//! Specification, version 1.0. `machine` stands for the machine, and its head says what an operating system
//! has instead.
//!
//!     cargo run -p dmaspace-examples --example riscv

use std::error::Error;

use iommu::iopt::{
    Arena, AtomicMeta, Gather, NoRuns, Prot, Table, TableMemory, TableOps as _, format::RiscV,
};
use iommu::runs::Span;
use iommu::{DomainId, RiscvIommu, Unit, riscv};
use machine::{DEVICE, Machine, RISCV};

/// The unit is a PCI function here, of base class 8 (system peripheral), sub-class 6 (IOMMU). One that is
/// none is found by ACPI's RIMT or by the device tree (`riscv,iommu`).
const CLASS: u32 = 0x08_06_00;

/// A number for what the device sees: the unit tags what it caches with it, as PSCID.
const DOMAIN: DomainId = DomainId(1);

/// The device's addresses, which have nothing to do with physical ones.
const IOVA: u64 = 0x1_0000_0000;

const TEXT: &[u8] = b"seen by the device";

fn main() -> Result<(), Box<dyn Error>> {
    let mut machine = Machine::start(RISCV, &["-device", "riscv-iommu-pci,addr=1"])?;
    let functions = machine.pci().functions(0)?;
    let unit = functions.iter().find(|function| function.class == CLASS);
    let registers = machine.place(unit.ok_or("no unit")?.address)?;

    // 0. Memory that the unit sees, for its structures and for page tables. Something is noted beside each
    //    page; allocation and addresses are arithmetic.
    let pages = machine.stretch().len() / 512;
    let notes: Vec<_> = (0..pages).map(|_| AtomicMeta::new()).collect();
    let arena = Arena::new((machine.stretch(), &notes[..]), machine.stretch_at())?;
    let memory = &arena;

    // 1. Probe. The driver reads `capabilities` (section "IOMMU capabilities"), and takes memory for the
    //    device directory and two queues. The unit does not change yet. Devices of bus 0 have ids of 8
    //    bits, for which a directory of two levels is enough.
    let config = riscv::Config {
        device_bits: 8,
        ..riscv::Config::default()
    };
    let unit = RiscvIommu::new(machine.registers(registers), memory, config)?;
    let can = unit.capabilities();
    for tables in can.formats.iter().flatten() {
        println!("the unit walks {} tables", tables.format);
    }

    // 2. An empty page table of the first stage, in the same memory: the unit walks it there. 3 levels are
    //    Sv39: 39 bits of device addresses, extended by their sign.
    let mut table = Table::new(RiscV::new(3)?, memory)?;

    // 3. Translate. Queues, `ddtp`, caches, in the order of the driver's module head. From now on a device
    //    that is not attached faults, so attach first any device whose DMA must continue, such as a frame buffer's.
    unit.enable()?;

    // 4. Give the device its table: a device context (section "Device-context fields") that leads to the
    //    root.
    unit.attach(DEVICE, DOMAIN, table.root())?;

    // 5. Map two physical ranges at consecutive device addresses, all or nothing.
    let from = machine.store(0x10_0000, TEXT)?;
    let to = machine.store(0x20_0000, &[b'.'; TEXT.len()])?;
    let pages = [Span::new(from, 4096), Span::new(to, 4096)];
    table.map(IOVA, &pages, Prot::RW)?;
    // Stores are enough: the unit remembers nothing that is not there.
    assert!(can.coherent_walks && !can.caches_not_present);

    // 6. DMA: the device reads through the first page and writes through the second.
    let len = TEXT.len() as u64;
    machine.copy(IOVA, IOVA + 4096, len)?;
    let seen = machine.load(to, TEXT.len())?;
    println!("{DEVICE} copied \"{seen}\"");
    assert_eq!(seen.as_bytes(), TEXT);

    // 7. Take it away. The gather knows what the unit may have cached; one flush for all of it
    //    (IOTINVAL.VMA and IOFENCE.C), and only a flushed gather gives table pages back. Now, not earlier,
    //    the memory may have another use.
    let mut gather = Gather::new();
    table.unmap(Span::new(IOVA, 2 * 4096), &mut gather, &mut NoRuns)?;
    let flushed = gather.flush_with(|what| unit.invalidate(DOMAIN, what))?;
    table.reclaim(flushed);
    let told = unit.counters();
    println!("{} commands so far, {} waits", told.commands, told.waits);

    // 8. The device tries all the same. What it writes does not arrive; the fault queue says why
    //    (section "Fault/Event-Queue (FQ)"). A system drains the faults when the unit's interrupt comes.
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
