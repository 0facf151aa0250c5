//! Arm's SMMU, versions 1 and 2, from reset to a table that a device would translate through, and back.
//!
//! For authors of operating systems. Sections are those of Arm's SMMU architecture (IHI 0062),
//! issue B. **Nothing does DMA here**: no emulator has this unit. The registers are the real thing, volatile
//! accesses as a kernel has them, but what lies under them is plain memory with the three words that the
//! driver probes. It stores what is written and is never busy, so one sees what a unit would be told.
//!
//!     cargo run -p dmaspace-examples --example smmu

use std::{
    error::Error,
    ptr::NonNull,
    sync::atomic::{AtomicU32, Ordering, fence},
};

use iommu::iopt::walk::{Access, Walker};
use iommu::iopt::{Gather, HeapTables, NoRuns, Prot, Table, TableMemory, TableOps as _};
use iommu::iopt::{format::ArmStage1, format::K4};
use iommu::runs::Span;
use iommu::{DeviceId, DomainId, Registers, Smmu, Unit, smmu};

/// The stream id of the device. ACPI's IORT or the device tree (`iommus`) makes it from a requester id.
const DEVICE: DeviceId = DeviceId(0x28);
const DOMAIN: DomainId = DomainId(1);
const IOVA: u64 = 0x1_0000_0000;

/// Registers at an address.
struct Mmio {
    base: NonNull<u8>,
    bytes: usize,
}

// SAFETY: registers may be reached from any processor; each access is one.
unsafe impl Send for Mmio {}
// SAFETY: as above.
unsafe impl Sync for Mmio {}

impl Mmio {
    /// # Safety
    ///
    /// `bytes` bytes from `base` on, a multiple of 8, are the unit's registers, mapped as device memory as
    /// long as this lives, and no other driver drives the unit.
    unsafe fn new(base: NonNull<u8>, bytes: usize) -> Self {
        Self { base, bytes }
    }

    /// The register of 32 or 64 bits at an offset, which may come from the unit: not one beyond the last.
    fn at<T>(&self, offset: usize) -> Option<NonNull<T>> {
        let inside = offset % size_of::<T>() == 0 && offset < self.bytes;
        // SAFETY: `offset` is a multiple of `T`'s size below `bytes`, so all of `T` lies in the mapping.
        inside.then(|| unsafe { self.base.add(offset) }.cast())
    }

    fn read<T>(&self, offset: usize) -> Option<T> {
        // SAFETY: a register, as `new` was promised, and aligned.
        let value = self.at(offset).map(|at| unsafe { at.read_volatile() });
        // What is read from memory now is as new as this. On Arm: `dsb ld`.
        fence(Ordering::SeqCst);
        value
    }

    fn write<T>(&self, offset: usize, value: T) {
        // What was stored to memory comes before. On Arm: `dsb st`.
        fence(Ordering::SeqCst);
        if let Some(at) = self.at(offset) {
            // SAFETY: a register, as `new` was promised, and aligned.
            unsafe { at.write_volatile(value) }
        }
    }
}

impl Registers for Mmio {
    type Lock = iommu::SpinLock;

    fn read32(&self, offset: usize) -> u32 {
        self.read(offset).unwrap_or(u32::MAX)
    }
    fn write32(&self, offset: usize, value: u32) {
        self.write(offset, value);
    }
    fn read64(&self, offset: usize) -> u64 {
        self.read(offset).unwrap_or(u64::MAX)
    }
    fn write64(&self, offset: usize, value: u64) {
        self.write(offset, value);
    }
    /// A kernel looks at its clock here, and gives up after a second.
    fn wait(&self, round: u32) -> bool {
        std::hint::spin_loop();
        round < 1_000_000
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    // The stand-in: 16 pages of 4 KiB with global registers, 16 with context banks. IDR0 (section 10.6.1):
    // stages 1 and 2, coherent walks, 16 stream match registers for ids of 15 bits; IDR1: the pages, 4
    // banks; IDR2: 48 bits of addresses, tables of 4 KiB in AArch64's format.
    let block: Vec<AtomicU32> = (0..32 * 1024).map(|_| AtomicU32::new(0)).collect();
    for (register, value) in [
        (0x20, 0x7 << 28 | 1 << 27 | 1 << 14 | 15 << 9 | 16),
        (0x24, 3 << 28 | 4),
        (0x28, 1 << 12 | 5 << 8 | 5 << 4 | 5),
    ] {
        block[register / 4].store(value, Ordering::Relaxed);
    }
    let base = NonNull::from(&*block).cast();
    // SAFETY: so many bytes, which live until the end of `main`, may be written by any thread, and are
    // written by this driver only.
    let registers = unsafe { Mmio::new(base, size_of_val(&*block)) };

    // 1. Probe. Firmware says which version it is. All of this unit's configuration is in registers, so
    //    the driver takes no memory.
    let unit = Smmu::new(registers, smmu::Config::default())?;
    println!("page sizes of each format:");
    for support in unit.capabilities().formats.iter().flatten() {
        println!("  {}: {:#x}", support.format, support.page_sizes.bits());
    }

    // 2. An empty page table of stage 1: 48 bits of device addresses, as many of physical ones. Its memory
    //    is a kernel's direct map; here the heap, which is said to begin at 4 GiB.
    let memory = HeapTables::with_tables_at(64, 1 << 32)?;
    let mut table = Table::new(ArmStage1::<K4>::new(48, 48)?, &memory)?;

    // 3. Translate: stream registers, caches, then CR0.CLIENTPD, in the order of the driver's module head.
    unit.enable()?;

    // 4. Give the device its table: a context bank with the root, and a stream that leads to it.
    unit.attach(DEVICE, DOMAIN, table.root())?;
    // Bank 0 is the first page of the upper half, TTBR0 at 0x20 (section 15.5.39).
    let root = unit.registers().read64(16 * 4096 + 0x20) & ((1 << 48) - 1);
    println!("context bank 0 has the root {root:#x}");
    assert_eq!(root, table.root().address);

    // 5. Map two physical ranges at consecutive device addresses. Stores are enough: this unit does not cache
    //    absent entries.
    let pages = [Span::new(0x10_0000, 4096), Span::new(0x20_0000, 4096)];
    table.map(IOVA, &pages, Prot::RW)?;

    // 6. In place of DMA, the walk that the unit would make, by an independent reader of the format.
    let walker = Walker::new(table.root());
    let walked = walker.walk(&memory, IOVA + 4096 + 8, Access::Write, &mut ())?;
    println!("a write to {:#x} reaches {:#x}", IOVA + 4096 + 8, walked.pa);
    assert_eq!(walked.pa, 0x20_0008);

    // 7. Take it away: TLBIVAL for each page, one sync for all (sections 15.5.35 and 15.5.36), and only then
    //    the memory may have another use.
    let mut gather = Gather::new();
    table.unmap(Span::new(IOVA, 2 * 4096), &mut gather, &mut NoRuns)?;
    let flushed = gather.flush_with(|what| unit.invalidate(DOMAIN, what))?;
    table.reclaim(flushed);
    let told = unit.counters();
    println!("{} commands so far, {} waits", told.commands, told.waits);

    // 8. A device that tries all the same leaves a fault in the bank's FSR and FAR, or in the global
    //    registers if it is unknown. A system calls `drain_faults` when the unit's interrupt comes. Not
    //    here: ones clear FSR, and plain memory would keep them and show a fault that did not happen.

    // 9. And back: no device, no table, no unit.
    unit.detach(DEVICE)?;
    let (gather, _) = table.tear_down();
    // `detach` has flushed the domain.
    memory.reclaim(gather.never_walked().into_tables());
    unit.tear_down()?;
    assert_eq!(memory.in_use(), 0);
    Ok(())
}
