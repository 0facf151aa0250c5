//! An IOMMU unit from reset to the first DMA through an address space, and back.
//!
//! For authors of operating systems and hypervisors; `docs/guides/hypervisor.md` leads through it. The unit is one that
//! QEMU has, and an NVMe controller behind it does the DMA. `machine` stands for the machine, and its head says what an
//! operating system has instead.
//!
//!     cargo run -p dmaspace-examples --example unit -- --unit vtd
//!
//! Units: `vtd` in legacy mode, `vtd-scalable`, `amd-vi`, `smmuv3`, `riscv`.

use std::{env, error::Error, sync::Arc};

use ioas::{FixedRuns, Ioas, Iommu, Ledger, Memory};
use iommu::iopt::Prot;
use iommu::runs::Span;
use iommu::{AmdVi, Driver, RiscvIommu, SmmuV3, Vtd, amdvi, riscv, smmuv3, vtd};
use machine::{ARM, DEVICE, Machine, PC, RISCV, TableMemory};
use qtest::nvme::{BLOCK_BYTES, Data, Ring, Status};

/// The device's addresses, which have nothing to do with physical ones: queues, and two buffers.
const QUEUES: u64 = 0x1_0000_0000;
const SOURCE: u64 = 0x2_0000_0000;
const TARGET: u64 = 0x3_0000_0000;

/// Pages of a buffer: more than the two whose addresses fit in a command.
const PAGES: u64 = 6;
const BYTES: u64 = PAGES * 4096;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let unit = match &*arguments {
        [] => "vtd",
        [option, unit] if option == "--unit" => unit,
        _ => return Err("usage: unit --unit vtd|vtd-scalable|amd-vi|smmuv3|riscv".into()),
    };
    match unit {
        "vtd" => vtd(vtd::Mode::Legacy, "scalable-mode=off"),
        "vtd-scalable" => vtd(vtd::Mode::ScalableSecond, "scalable-mode=on"),
        "amd-vi" => amd_vi(),
        "smmuv3" => smmuv3(),
        "riscv" => riscv(),
        unknown => Err(format!("no unit {unknown}").into()),
    }
}

/// Intel VT-d (D51397). ACPI's DMAR table says where the registers are (chapter "BIOS Considerations", DRHD structure). In
/// QEMU's PC it is always here.
fn vtd(mode: vtd::Mode, option: &str) -> Result<(), Box<dyn Error>> {
    const REGISTERS: u64 = 0xfed9_0000;
    // The same by the names of QEMU 11 and of QEMU 10.
    let units = ["", "x-"].map(|x| format!("intel-iommu,aw-bits=48,{x}{option}"));
    let machine = Machine::start(PC, &units.each_ref().map(String::as_str))?;
    let memory = machine.table_memory()?;

    // 1. Probe. The driver reads the capability registers, and allocates the root table and the invalidation
    //    queue. Devices still reach all of memory.
    let config = vtd::Config {
        mode,
        ..vtd::Config::default()
    };
    let unit = Vtd::new(machine.registers(REGISTERS), memory.clone(), config)?;
    let faults = translate(&machine, &memory, unit, |unit| unit.tear_down().map(drop))?;
    assert!(faults > 0);
    Ok(())
}

/// AMD-Vi (48882). ACPI's IVRS table and the unit's PCI capability block say where the registers are (section 5.2.2, IVHD
/// block). QEMU's are always here.
fn amd_vi() -> Result<(), Box<dyn Error>> {
    const REGISTERS: u64 = 0xfed8_0000;
    // The option of QEMU 11 and that of QEMU 10, without which the unit translates nothing.
    let machine = Machine::start(PC, &["amd-iommu,dma-remap=on", "amd-iommu,pt=off"])?;
    let memory = machine.table_memory()?;

    // IVRS says what no register does: how many devices, and here that the unit remembers absent entries (NpCache), as
    // emulated ones do. The device table is one piece of 32 bytes a device, so 8 KiB are enough for bus 0.
    let config = amdvi::Config {
        last_device: 0xff,
        caches_not_present: true,
        ..amdvi::Config::default()
    };
    let unit = AmdVi::new(machine.registers(REGISTERS), memory.clone(), config)?;
    // A unit of silicon logs each (section 2.5.3, IO_PAGE_FAULT); QEMU 10 is silent about entries that are zero.
    translate(&machine, &memory, unit, |unit| unit.tear_down().map(drop))?;
    Ok(())
}

/// Arm's SMMU, version 3 (IHI 0070). ACPI's IORT or the device tree (`arm,smmu-v3`) says where the registers are. In QEMU's
/// `virt` it is always here.
fn smmuv3() -> Result<(), Box<dyn Error>> {
    const REGISTERS: u64 = 0x0905_0000;
    let machine = Machine::start(ARM, &[])?;
    let memory = machine.table_memory()?;

    // IORT says what no register does: which StreamIDs there are. Here they are requester ids, so `DEVICE` is one; bus 0
    // has 256.
    let config = smmuv3::Config {
        last_device: 0xff,
        ..smmuv3::Config::default()
    };
    let unit = SmmuV3::new(machine.registers(REGISTERS), memory.clone(), config)?;
    let faults = translate(&machine, &memory, unit, |unit| unit.tear_down().map(drop))?;
    assert!(faults > 0);
    Ok(())
}

/// The RISC-V IOMMU (version 1.0). Here it is a PCI function, of base class 8 (system peripheral), sub-class 6 (IOMMU). One
/// that is none is found by ACPI's RIMT or by the device tree (`riscv,iommu`).
fn riscv() -> Result<(), Box<dyn Error>> {
    const CLASS: u32 = 0x08_06_00;
    let mut machine = Machine::start(RISCV, &["riscv-iommu-pci,addr=1"])?;
    let registers = machine.find(CLASS)?;
    let memory = machine.table_memory()?;

    // Devices of bus 0 have ids of 8 bits, for which a device directory of two levels is enough.
    let config = riscv::Config {
        device_bits: 8,
        ..riscv::Config::default()
    };
    let unit = RiscvIommu::new(machine.registers(registers), memory.clone(), config)?;
    let faults = translate(&machine, &memory, unit, |unit| unit.tear_down().map(drop))?;
    assert!(faults > 0);
    Ok(())
}

/// Has the unit translate, and the device read and write blocks through an address space. The faults that it recorded.
fn translate<U: Driver + 'static>(
    machine: &Machine,
    memory: &TableMemory,
    unit: U,
    tear_down: impl FnOnce(U) -> Result<(), iommu::UnitError>,
) -> Result<u32, Box<dyn Error>> {
    // 2. Translate. From now on a device that is not attached faults: attach first any device whose DMA must
    //    continue, such as a frame buffer's.
    unit.enable()?;

    // 3. An address space, and the device in it. The unit's capabilities choose the format and levels of its table.
    let iommu = Iommu::new(Arc::new(unit), memory.clone());
    let space = Ioas::over(&iommu)?;
    space.attach(iommu.device(DEVICE))?;
    space.tables(|domain, table| println!("domain {domain}: {}", table.root().format));

    // 4. Map page frames, all or nothing. The runs of a buffer lie anywhere, and follow one another for the device. A unit
    //    that remembers absent entries is flushed.
    let queues = [machine.frames(0x100_0000, 5)];
    let source = [(0x110_0000, 3), (0x120_5000, 1), (0x140_0000, 2)];
    let source = source.map(|(at, pages)| machine.frames(at, pages));
    let target = [(0x1a0_1000, 2), (0x180_0000, 4)];
    let target = target.map(|(at, pages)| machine.frames(at, pages));
    let map = |iova, runs: &[Span<_>], prot| {
        let runs = FixedRuns::new(runs.iter().copied(), 4096)?;
        let buffer = Memory::new(Arc::new(runs), &Ledger::unlimited());
        space.map(iova, &buffer, Span::new(0, buffer.len()), prot)?;
        Ok::<_, Box<dyn Error>>(())
    };
    map(QUEUES, &queues, Prot::RW)?;
    map(SOURCE, &source, Prot::READ)?;
    map(TARGET, &target, Prot::RW)?;

    // 5. DMA: the controller finds commands, completions and lists of pages by its own addresses, and writes blocks to its
    //    disk and reads them again.
    let page = |nth: u64| Ring {
        address: queues[0].start + nth * 4096,
        device: QUEUES + nth * 4096,
    };
    let data = |device| Data {
        device,
        bytes: BYTES,
        list: page(4),
    };
    let mut nvme = machine.nvme(page(0), page(1))?;
    let created = nvme.create_queues(page(2), page(3))?;
    assert_eq!(created, Status::SUCCESS);
    let wanted: Vec<u8> = (0..BYTES).map(|at| (at / 13) as u8).collect();
    machine.store(&source, &wanted)?;
    assert_eq!(nvme.write(0, data(SOURCE))?, Status::SUCCESS);
    assert_eq!(nvme.read(0, data(TARGET))?, Status::SUCCESS);
    assert_eq!(machine.load(&target)?, wanted);
    let (blocks, runs) = (BYTES / BLOCK_BYTES, source.len() + target.len());
    println!("{DEVICE} wrote and read {blocks} blocks, {PAGES} pages each way, in {runs} runs");

    // 6. Take the target away: when this returns, no access to it is under way, and its frames may have another use.
    space.unmap(Span::new(TARGET, BYTES))?;
    let done = iommu.unit().counters();
    println!("{} commands so far, {} waits", done.commands, done.waits);

    // 7. The device tries all the same. Nothing arrives; the unit records why. A system drains the faults when the unit's
    //    interrupt comes; the address space of the device adds the areas there.
    machine.store(&target, &[0xee; BYTES as usize])?;
    let status = nvme.read(0, data(TARGET))?;
    assert_eq!(machine.load(&target)?, [0xee; BYTES as usize]);
    let mut faults = 0;
    let lost = iommu.unit().drain_faults(&mut |fault| {
        if let Some(fault) = space.locate(fault).filter(|_| faults == 0) {
            println!("fault: {fault}");
        }
        faults += 1;
    });
    println!("faults: {faults}, and {lost} lost for want of room");
    println!("the controller's status is {:#x}", status.0);

    // 8. And back: no device, no address space, no unit. All memory has come home.
    nvme.stop()?;
    space.detach(DEVICE)?;
    space.close()?;
    let unit = Arc::clone(iommu.unit());
    drop(iommu);
    tear_down(Arc::into_inner(unit).ok_or("the unit is in use")?)?;
    assert_eq!(memory.in_use(), 0);
    Ok(faults)
}
