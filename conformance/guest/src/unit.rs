//! Registers behind which a unit answers at once, for each of the library's drivers.
//!
//! It caches nothing, so all that an invalidation asks of it is the store with which a wait ends. The write to the tail
//! register does that, as it does in QEMU; here it is the processor of the driver that executes it. The SMMU of versions
//! 1 and 2 has no queue: its syncs are complete when they are read.
//!
//! Sources: VT-d specification, chapter 11 and section 6.5.2; AMD IOMMU specification, sections 2.4 and 3.4; IHI 0070,
//! sections 4.7.3 and 6.3; RISC-V IOMMU specification, sections "Command-Queue" and "Memory-mapped register interface";
//! IHI 0062, chapters 10 and 15.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use anyhow::bail;
use iommu::{
    AmdVi, Registers, RiscvIommu, Smmu, SmmuV3, SpinLock, Unit, Vtd, amdvi, riscv, smmu, smmuv3,
    vtd,
};
use iopt::{Cell as _, FormatId, HeapTables, TableMemory as _};

/// The last device of a unit whose tables of devices are as long as there are devices: bus 1.
const LAST_DEVICE: u16 = 0x1ff;

/// A kind of unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// VT-d in legacy mode.
    Vtd,
    /// AMD-Vi.
    AmdVi,
    /// Arm's SMMU of version 3.
    SmmuV3,
    /// The RISC-V IOMMU.
    Riscv,
    /// Arm's SMMU of version 2.
    Smmu,
}

impl Kind {
    /// The unit that walks tables of this format.
    ///
    /// # Errors
    ///
    /// Formats of other units.
    pub fn of(format: FormatId) -> anyhow::Result<Self> {
        Ok(match format {
            FormatId::VtdSs => Self::Vtd,
            FormatId::AmdV1 => Self::AmdVi,
            other => bail!("no unit for {}", other.name()),
        })
    }
}

/// A unit of this kind, enabled, with its structures in `memory`.
///
/// # Errors
///
/// When there is not enough memory for its structures.
pub fn prompt(kind: Kind, memory: &Arc<HeapTables>) -> anyhow::Result<Arc<dyn Unit>> {
    let tables = || Arc::clone(memory);
    Ok(match kind {
        Kind::Vtd => {
            let registers = Prompt::new(memory, &VTD);
            let unit = Vtd::new(registers, tables(), vtd::Config::default())?;
            unit.enable()?;
            Arc::new(unit)
        }
        Kind::AmdVi => {
            let config = amdvi::Config {
                last_device: LAST_DEVICE,
                ..amdvi::Config::default()
            };
            let unit = AmdVi::new(Prompt::new(memory, &AMD), tables(), config)?;
            unit.enable()?;
            Arc::new(unit)
        }
        Kind::SmmuV3 => {
            let config = smmuv3::Config {
                last_device: LAST_DEVICE.into(),
                ..smmuv3::Config::default()
            };
            let unit = SmmuV3::new(Prompt::new(memory, &SMMUV3), tables(), config)?;
            unit.enable()?;
            Arc::new(unit)
        }
        Kind::Riscv => {
            let registers = Prompt::new(memory, &RISCV);
            let unit = RiscvIommu::new(registers, tables(), riscv::Config::default())?;
            unit.enable()?;
            Arc::new(unit)
        }
        Kind::Smmu => {
            let registers = Prompt::new(memory, &SMMU);
            let unit = Smmu::new(registers, smmu::Config::default())?;
            unit.enable()?;
            Arc::new(unit)
        }
    })
}

/// Where a kind of unit has what.
struct Layout {
    /// Bytes of registers that hold what is written to them.
    bytes: usize,
    /// Answers that differ from what was written: of an offset, and what it holds.
    read: fn(&Prompt, usize) -> Option<u64>,
    /// Registers of which what is written with 1 is cleared.
    status: &'static [usize],
    queue: Option<Queue>,
}

/// A queue of commands of 16 bytes in a page.
struct Queue {
    /// The register of its address, and the address in it.
    base: (usize, fn(u64) -> u64),
    head: usize,
    tail: usize,
    /// Values of head and tail: how many there are, and what a command adds.
    values: u64,
    command: u64,
    /// Where a command stores what, if it is a wait.
    wait: fn([u64; 2]) -> Option<(u64, u64)>,
}

/// An address in bits 51:12 of a register.
const fn page(base: u64) -> u64 {
    base & 0xf_ffff_ffff_f000
}

const VTD: Layout = Layout {
    bytes: 0x100,
    read: |unit, offset| {
        Some(match offset {
            // Version 1.0.
            0x00 => 0x10,
            // 16 bits of domain, 4 levels, 48 bits of address, 2 MiB and 1 GiB, pages of up to 2^18, draining.
            0x08 => 6 | 1 << 10 | 47 << 16 | 3 << 34 | 1 << 39 | 18 << 48 | 3 << 54,
            // The queue; tables are read through the caches.
            0x10 => 1 | 1 << 1,
            // The status of what was commanded.
            0x1c => unit.register(0x18),
            _ => return None,
        })
    },
    // FSTS.
    status: &[0x34],
    queue: Some(Queue {
        base: (0x90, page),
        head: 0x80,
        tail: 0x88,
        values: 4096,
        command: 16,
        wait: |[first, second]| (first & 0xf == 5).then_some((second, first >> 32)),
    }),
};

const AMD: Layout = Layout {
    bytes: 0x100,
    read: |unit, offset| {
        Some(match offset {
            // All can be invalidated at once.
            0x30 => 1 << 6,
            // EventLogRun and CmdBufRun.
            0x2020 => {
                let control = unit.register(0x18);
                (control >> 2 & 1) << 3 | (control >> 12 & 1) << 4
            }
            _ => return None,
        })
    },
    status: &[],
    queue: Some(Queue {
        base: (0x08, page),
        head: 0x2000,
        tail: 0x2008,
        values: 4096,
        command: 16,
        wait: |[first, second]| (first >> 60 == 1).then_some((first & 0xf_ffff_ffff_fff8, second)),
    }),
};

const SMMUV3: Layout = Layout {
    bytes: 0x100,
    read: |unit, offset| {
        Some(match offset {
            // Both stages, AArch64, coherent, tags of 16 bits, stores of CMD_SYNC, streams in two levels.
            0x00 => 0b1_1011 | 1 << 12 | 1 << 13 | 1 << 18 | 2 << 21 | 1 << 27,
            // 16 bits of StreamIDs, queues of a page.
            0x04 => 16 | 8 << 21 | 7 << 16,
            // Invalidations of ranges.
            0x0c => 1 << 10,
            // 48 bits of address, pages of 4 KiB.
            0x14 => 5 | 1 << 4,
            // CR0ACK, GBPA, IRQ_CTRLACK: done.
            0x24 => unit.register(0x20),
            0x44 => unit.register(0x44) & !(1 << 31),
            0x54 => unit.register(0x50),
            _ => return None,
        })
    },
    status: &[],
    queue: Some(Queue {
        base: (0x90, page),
        head: 0x9c,
        tail: 0x98,
        // One bit beyond the places.
        values: 512,
        command: 1,
        wait: |[first, second]| {
            (first & 0x30ff == 0x1046).then_some((second & 0xf_ffff_ffff_fffc, first >> 32))
        },
    }),
};

const RISCV: Layout = Layout {
    bytes: 0x100,
    read: |unit, offset| {
        Some(match offset {
            // Version 1.0, Sv48 in both stages, 56 bits of address.
            0 => 0x10 | 1 << 10 | 1 << 18 | 56 << 32,
            // Queues are on when they are enabled.
            72 | 76 | 80 => (unit.register(offset) & 1) * 0x1_0001,
            _ => return None,
        })
    },
    status: &[],
    queue: Some(Queue {
        base: (24, |base| (base & !0x3ff) << 2),
        head: 32,
        tail: 36,
        values: 256,
        command: 1,
        // IOFENCE.C with AV.
        wait: |[first, second]| {
            (first & 0x7ff == 2 | 1 << 10).then_some((second << 2, first >> 32))
        },
    }),
};

const SMMU: Layout = Layout {
    // 16 pages of global registers, 16 with context banks.
    bytes: 32 * 4096,
    read: |_, offset| {
        Some(match offset {
            // Stages 1 and 2, coherent walks, 16 stream match registers for ids of 15 bits.
            0x20 => 7 << 28 | 1 << 27 | 1 << 14 | 15 << 9 | 16,
            // The pages, 4 banks.
            0x24 => 3 << 28 | 4,
            // 48 bits of address, pages of 4 KiB in AArch64's format.
            0x28 => 1 << 12 | 5 << 8 | 5 << 4 | 5,
            _ => return None,
        })
    },
    // GFSR.
    status: &[0x48],
    queue: None,
};

struct Prompt {
    memory: Arc<HeapTables>,
    layout: &'static Layout,
    /// Values by offset, with a place for each 32 bits.
    registers: Vec<AtomicU64>,
    head: AtomicU64,
}

impl Prompt {
    fn new(memory: &Arc<HeapTables>, layout: &'static Layout) -> Self {
        Self {
            memory: Arc::clone(memory),
            layout,
            registers: (0..layout.bytes / 4).map(|_| AtomicU64::new(0)).collect(),
            head: AtomicU64::new(0),
        }
    }

    /// The value that was written.
    fn register(&self, offset: usize) -> u64 {
        let register = self.registers.get(offset / 4);
        register.map_or(0, |register| register.load(Ordering::Relaxed))
    }

    /// Does the commands up to the tail.
    fn serve(&self, queue: &Queue, tail: u64) {
        let (register, address) = queue.base;
        let base = address(self.register(register));
        let (mut at, tail) = (self.head.load(Ordering::Relaxed), tail % queue.values);
        while at != tail {
            let place = at * (16 / queue.command) % 4096;
            let command = self.memory.entries(base + place, 2);
            let word = |nth: usize| command.get(nth).map_or(0, |cell| cell.get());
            if let Some((address, value)) = (queue.wait)([word(0), word(1)])
                && let [cell] = self.memory.entries(address, 1)
            {
                cell.set(value);
            }
            at = (at + queue.command) % queue.values;
        }
        self.head.store(tail, Ordering::Relaxed);
    }
}

impl Registers for Prompt {
    type Lock = SpinLock;

    fn read32(&self, offset: usize) -> u32 {
        self.read64(offset) as u32
    }

    fn write32(&self, offset: usize, value: u32) {
        self.write64(offset, value.into());
    }

    fn read64(&self, offset: usize) -> u64 {
        match &self.layout.queue {
            Some(queue) if offset == queue.head => self.head.load(Ordering::Relaxed),
            _ => (self.layout.read)(self, offset).unwrap_or_else(|| self.register(offset)),
        }
    }

    fn write64(&self, offset: usize, value: u64) {
        match &self.layout.queue {
            Some(queue) if offset == queue.tail => return self.serve(queue, value),
            Some(queue) if offset == queue.head => {
                return self.head.store(value % queue.values, Ordering::Relaxed);
            }
            _ if self.layout.status.contains(&offset) => return,
            _ => {}
        }
        if let Some(register) = self.registers.get(offset / 4) {
            register.store(value, Ordering::Relaxed);
        }
    }

    fn wait(&self, round: u32) -> bool {
        // It has answered already.
        round < 1000
    }
}
