//! Registers behind which a unit answers at once, for the library's drivers of VT-d and AMD-Vi.
//!
//! It caches nothing, so all that an invalidation asks of it is the store with which a wait ends. The write to the tail
//! register does that, as it does in QEMU; here it is the guest's processor that executes it.
//!
//! Sources: VT-d specification, chapter 11 and section 6.5.2; AMD IOMMU specification, sections 2.4 and 3.4.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use anyhow::bail;
use ioas::Endpoint;
use iommu::{AmdVi, DeviceId, Registers, SpinLock, Vtd, amdvi, vtd};
use iopt::{Cell as _, FormatId, HeapTables, TableMemory as _};

/// The last device behind AMD-Vi: bus 1.
const LAST_DEVICE: u16 = 0x1ff;

/// A device of a unit that walks tables of this format, enabled, with its structures in `memory`.
pub(crate) fn prompt(
    format: FormatId,
    memory: &Arc<HeapTables>,
    device: DeviceId,
) -> anyhow::Result<Endpoint> {
    Ok(match format {
        FormatId::VtdSs => {
            let registers = Prompt::new(memory, &VTD);
            let unit = Vtd::new(registers, Arc::clone(memory), vtd::Config::default())?;
            unit.enable()?;
            (Arc::new(unit), device).into()
        }
        FormatId::AmdV1 => {
            let registers = Prompt::new(memory, &AMD);
            let config = amdvi::Config {
                last_device: LAST_DEVICE,
                ..amdvi::Config::default()
            };
            let unit = AmdVi::new(registers, Arc::clone(memory), config)?;
            unit.enable()?;
            (Arc::new(unit), device).into()
        }
        other => bail!("no unit for {}", other.name()),
    })
}

/// Where a kind of unit has what.
struct Layout {
    /// Registers that always read the same.
    constants: &'static [(usize, u64)],
    /// The queue's address, head and tail.
    queue: [usize; 3],
    /// What is switched on, and where it is read back as `status` says.
    control: [usize; 2],
    status: fn(u64) -> u64,
    /// Where a command stores what, if it is a wait.
    wait: fn([u64; 2]) -> Option<(u64, u64)>,
}

const VTD: Layout = Layout {
    constants: &[
        // Version 1.0.
        (0x00, 0x10),
        // 16 bits of domain, 4 levels, 48 bits of address, 2 MiB and 1 GiB, pages of up to 2^18, draining.
        (
            0x08,
            6 | 1 << 10 | 47 << 16 | 3 << 34 | 1 << 39 | 18 << 48 | 3 << 54,
        ),
        // The queue; tables are read through the caches.
        (0x10, 1 | 1 << 1),
    ],
    queue: [0x90, 0x80, 0x88],
    control: [0x18, 0x1c],
    // The status of what was commanded.
    status: |control| control,
    wait: |[first, second]| (first & 0xf == 5).then_some((second, first >> 32)),
};

const AMD: Layout = Layout {
    // All can be invalidated at once.
    constants: &[(0x30, 1 << 6)],
    queue: [0x08, 0x2000, 0x2008],
    control: [0x18, 0x2020],
    // EventLogRun and CmdBufRun.
    status: |control| (control >> 2 & 1) << 3 | (control >> 12 & 1) << 4,
    wait: |[first, second]| (first >> 60 == 1).then_some((first & 0xf_ffff_ffff_fff8, second)),
};

/// Bytes of the queue, and of a command.
const QUEUE: u64 = 4096;
const COMMAND: u64 = 16;

struct Prompt {
    memory: Arc<HeapTables>,
    layout: &'static Layout,
    control: AtomicU64,
    base: AtomicU64,
    head: AtomicU64,
}

impl Prompt {
    fn new(memory: &Arc<HeapTables>, layout: &'static Layout) -> Self {
        Self {
            memory: Arc::clone(memory),
            layout,
            control: AtomicU64::new(0),
            base: AtomicU64::new(0),
            head: AtomicU64::new(0),
        }
    }

    /// Does the commands up to the tail.
    fn serve(&self, tail: u64) {
        let base = self.base.load(Ordering::Relaxed) & 0xf_ffff_ffff_f000;
        let (mut at, tail) = (self.head.load(Ordering::Relaxed), tail % QUEUE);
        while at != tail {
            let command = self.memory.entries(base + at, 2);
            let word = |nth: usize| command.get(nth).map_or(0, |cell| cell.get());
            if let Some((address, value)) = (self.layout.wait)([word(0), word(1)])
                && let [cell] = self.memory.entries(address, 1)
            {
                cell.set(value);
            }
            at = (at + COMMAND) % QUEUE;
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
        let Layout { queue, control, .. } = self.layout;
        if offset == queue[1] {
            return self.head.load(Ordering::Relaxed);
        }
        let switched = self.control.load(Ordering::Relaxed);
        if offset == control[1] {
            return (self.layout.status)(switched);
        }
        if offset == control[0] {
            return switched;
        }
        let mut constants = self.layout.constants.iter();
        let known = constants.find(|(known, _)| *known == offset);
        known.map_or(0, |(_, value)| *value)
    }

    fn write64(&self, offset: usize, value: u64) {
        let Layout { queue, control, .. } = self.layout;
        if offset == queue[2] {
            self.serve(value);
        } else if offset == queue[0] {
            self.base.store(value, Ordering::Relaxed);
        } else if offset == queue[1] {
            self.head.store(value % QUEUE, Ordering::Relaxed);
        } else if offset == control[0] {
            self.control.store(value, Ordering::Relaxed);
        }
    }

    fn wait(&self, round: u32) -> bool {
        // It has answered already.
        round < 1000
    }
}
