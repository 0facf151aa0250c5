//! Memory of a process, pinned and mapped as a virtual machine's is when it starts: by VFIO's type 1, by iommufd, and by
//! an [`Ioas`] with tables of its own.
//!
//! The kernel's two are used through the library, which adds a few hundred instructions to a call. The library's own
//! pins through the kernel, too (io_uring), and fills its own table, behind a driver's unit.

use std::{
    fs,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Instant,
};

use anyhow::Context as _;
use guest::{
    machines::EDU,
    pci::Device,
    samples::{FOLIOS_64K, Kind, SpaceSample, Way},
    unit::{self, prompt},
};
use hostmem::Mapping;
use ioas::{
    HostMemory, Ioas, Ledger, Memory,
    iommufd::{Iommufd, SpaceMapper},
    vfio::{Container, ContainerMapper, Group},
};
use iommu::{DeviceId, DomainId};
use iopt::{AnyTable, FormatId, HeapTables, Prot};
use runs::{PageSizes, Span};

/// Tables of the library's own, and of its unit.
const TABLES: u64 = 1024;
const DEVICE: DeviceId = DeviceId::pci(0, 1, 0);
/// A multiple of every leaf's size.
const IOVA: u64 = 4 << 30;
const PAGE: usize = 4096;

/// An address space with a device.
pub(crate) struct Space(Ioas);

impl Space {
    pub(crate) fn new(way: Way, format: FormatId) -> anyhow::Result<Self> {
        let edu = Device(EDU);
        Ok(Self(match way {
            Way::Type1 => {
                edu.bind_to_vfio()?;
                let mapper = ContainerMapper::new(Container::open()?);
                let ioas = Ioas::over_mapper(mapper);
                ioas.attach(Arc::new(Group::open(edu.group()?)?))?;
                ioas
            }
            Way::Iommufd => {
                edu.bind_to_vfio()?;
                let owner = Iommufd::open()?;
                let ioas = Ioas::over_mapper(SpaceMapper::new(&owner)?);
                ioas.attach(Arc::new(owner.open_device(&edu.cdev()?)?))?;
                ioas
            }
            Way::Ours => {
                let tables = Arc::new(HeapTables::with_tables(TABLES)?);
                let sizes = PageSizes::from_bits(u64::MAX);
                let table = AnyTable::new(format, 4, sizes, Arc::clone(&tables))?;
                let ioas = Ioas::over_table(DomainId(1), table);
                ioas.attach((prompt(unit::Kind::of(format)?, &tables)?, DEVICE))?;
                ioas
            }
        }))
    }

    /// Maps new memory, which was touched before where it is to be `present`, and unmaps it.
    pub(crate) fn run(&self, way: Way, kind: Kind, present: bool) -> anyhow::Result<SpaceSample> {
        let (name, backing, len) = kind;
        let small = name == FOLIOS_64K;
        for (size, on) in [("64", small), ("2048", !small)] {
            let file = format!("/sys/kernel/mm/transparent_hugepage/hugepages-{size}kB/enabled");
            fs::write(&file, if on { "madvise" } else { "never" }).context(file)?;
        }
        let mapping = Arc::new(Mapping::new(backing, len, None)?);
        let begun = Instant::now();
        if present {
            touch(mapping.cells());
        }
        let touched = begun.elapsed();
        let memory = HostMemory::new(Arc::clone(&mapping));
        let memory = Memory::new(Arc::new(memory), &Ledger::unlimited());
        let whole = Span::new(0, len);
        let begun = Instant::now();
        let done = self.0.map(IOVA, &memory, whole, Prot::RW);
        let mapped = begun.elapsed();
        done.with_context(|| format!("{way:?}, {name}"))?;
        let begun = Instant::now();
        let done = self.0.unmap(Span::new(IOVA, len));
        let unmapped = begun.elapsed();
        done.with_context(|| format!("{way:?}, {name}"))?;
        let [touch, map, unmap] = [touched, mapped, unmapped].map(|time| time.as_nanos() as f64);
        Ok(SpaceSample {
            way,
            kind,
            present,
            touch,
            map,
            unmap,
        })
    }
}

/// Writes to each page.
fn touch(cells: &[AtomicU64]) {
    for page in cells.chunks(PAGE / size_of::<AtomicU64>()) {
        if let Some(first) = page.first() {
            first.store(1, Ordering::Relaxed);
        }
    }
}
