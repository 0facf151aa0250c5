//! Arm's SMMU, version 3, from reset to the first DMA, and back.
//!
//! For authors of operating systems. Sections are those of Arm's architecture specification (IHI
//! 0070). `machine` stands for the machine, and its head says what an operating system has instead.
//!
//!     cargo run -p dmaspace-examples --example smmuv3

use std::error::Error;

use iommu::iopt::{Arena, AtomicMeta, Gather, NoRuns, Prot, Table, TableMemory, TableOps as _};
use iommu::iopt::{format::ArmStage1, format::K4};
use iommu::runs::Span;
use iommu::{DomainId, SmmuV3, Unit, smmuv3};
use machine::{ARM, DEVICE, Machine};

/// Where ACPI's IORT or the device tree (`arm,smmu-v3`) has the registers. In QEMU's `virt` it is always
/// here.
const REGISTERS: u64 = 0x0905_0000;

/// A number for what the device sees: the unit tags what it caches with it, as ASID.
const DOMAIN: DomainId = DomainId(1);

/// The device's addresses, which have nothing to do with physical ones.
const IOVA: u64 = 0x1_0000_0000;

const TEXT: &[u8] = b"seen by the device";

fn main() -> Result<(), Box<dyn Error>> {
    let machine = Machine::start(ARM, &[])?;

    // 0. Memory that the unit sees, for its structures and for page tables. Something is noted beside each
    //    page; allocation and addresses are arithmetic.
    let pages = machine.stretch().len() / 512;
    let notes: Vec<_> = (0..pages).map(|_| AtomicMeta::new()).collect();
    let arena = Arena::new((machine.stretch(), &notes[..]), machine.stretch_at())?;
    let memory = &arena;

    // 1. Probe. The driver reads IDR0 to IDR5 (section 6.3), and takes memory for the stream table and two
    //    queues. The unit does not change yet. What no register says, IORT does: which StreamIDs there are.
    //    Here they are requester ids, so `DEVICE` is one; bus 0 has 256.
    let config = smmuv3::Config {
        last_device: 0xff,
        ..smmuv3::Config::default()
    };
    let unit = SmmuV3::new(machine.registers(REGISTERS), memory, config)?;
    let can = unit.capabilities();
    for tables in can.formats.iter().flatten() {
        println!("the unit walks {} tables", tables.format);
    }

    // 2. An empty page table of stage 1, in the same memory: the unit walks it there. 48 bits of device
    //    addresses, and as many of physical ones as the unit has (IDR5.OAS).
    let mut table = Table::new(ArmStage1::<K4>::new(48, can.output_bits)?, memory)?;

    // 3. Translate. Queues, stream table, caches, then CR0.SMMUEN, in the order of the driver's module
    //    head. From now on a device that is not attached faults, so attach first any device whose DMA must
    //    continue, such as a frame buffer's.
    unit.enable()?;

    // 4. Give the device its table: a stream table entry (section 5.2) that leads to a context descriptor
    //    (section 5.4) that leads to the root.
    unit.attach(DEVICE, DOMAIN, table.root())?;

    // 5. Map two physical ranges at consecutive device addresses, all or nothing.
    let from = machine.store(0x10_0000, TEXT)?;
    let to = machine.store(0x20_0000, &[b'.'; TEXT.len()])?;
    let pages = [Span::new(from, 4096), Span::new(to, 4096)];
    table.map(IOVA, &pages, Prot::RW)?;
    // Stores are enough: an SMMU remembers nothing that is not there. One that reads past the caches
    // (IDR0.COHACC = 0) needs them written back, for which `iopt::observe::NonCoherent` goes around memory.
    assert!(can.coherent_walks && !can.caches_not_present);

    // 6. DMA: the device reads through the first page and writes through the second.
    let len = TEXT.len() as u64;
    machine.copy(IOVA, IOVA + 4096, len)?;
    let seen = machine.load(to, TEXT.len())?;
    println!("{DEVICE} copied \"{seen}\"");
    assert_eq!(seen.as_bytes(), TEXT);

    // 7. Take it away. The gather knows what the unit may have cached; one flush for all of it
    //    (CMD_TLBI_NH_VA and CMD_SYNC, chapter 4), and only a flushed gather gives table pages back. Now, not
    //    earlier, the memory may have another use.
    let mut gather = Gather::new();
    table.unmap(Span::new(IOVA, 2 * 4096), &mut gather, &mut NoRuns)?;
    let flushed = gather.flush_with(|what| unit.invalidate(DOMAIN, what))?;
    table.reclaim(flushed);
    let told = unit.counters();
    println!("{} commands so far, {} waits", told.commands, told.waits);

    // 8. The device tries all the same. What it writes does not arrive; the event queue says why
    //    (section 7.3). A system drains the faults when the unit's interrupt comes.
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
