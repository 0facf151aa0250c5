//! An address space over tables of ours goes over to the next kernel: `kexec`, with Linux's live update orchestrator.
//!
//! ```text
//! first kernel                             second kernel
//! maps two memory files for a device
//! preserves both, the file of the tables,
//! and one with the description
//! loads the next kernel ── kexec ──▶       retrieves the files
//!                                          pins their memory, and compares it with the tables
//!                                          owns the tables where they lie: has the device go on, unmaps
//! ```
//!
//! The device is the software unit's. It ends with the first kernel, and does nothing meanwhile.

use std::{
    convert::Infallible,
    ffi::CString,
    fs::{self, File},
    hash::{DefaultHasher, Hash as _, Hasher as _},
    io::{Read as _, Seek as _, Write as _},
    ops::Range,
    os::fd::{AsRawFd as _, OwnedFd},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use anyhow::{Context as _, ensure};
use guest::machines::Machine;
use hostmem::{Backing, FrameSource, LiveUpdate, LiveUpdateError, Mapping, Pin, Pinner};
use ioas::{
    DomainIds, Handover, HostMemory, HostTables, Ioas, Ledger, MappedStorage, Memory, TableBuilder,
    TakeOverError, TakenDomain,
};
use iommu::{DeviceId, RunMap, SoftwareUnit, Unit as _};
use iopt::{AnyTable, FormatId, Prot, Takeover};
use runs::{Offset, Pa, Span};
use rustix::{
    fs::{MemfdFlags, memfd_create},
    system::{self, RebootCommand},
};

/// On the command line of the second kernel.
const UPDATED: &str = "dmaspace.updated";
/// Not in `libc` for RISC-V. Source: Linux, include/uapi/asm-generic/unistd.h.
#[cfg(target_arch = "riscv64")]
const KEXEC_FILE_LOAD: libc::c_long = 294;
#[cfg(not(target_arch = "riscv64"))]
const KEXEC_FILE_LOAD: libc::c_long = libc::SYS_kexec_file_load;

pub(crate) const SESSION: &str = "dmaspace";
/// The numbers of the files: two of memory, in small pages and in huge ones, that of the tables, the description.
const MEMORY: [u64; 2] = [1, 2];
const TABLES: u64 = 3;
const DESCRIPTION: u64 = 4;

const DEVICE: DeviceId = DeviceId::pci(0, 3, 0);
const SIZE: u64 = 8 << 20;
const HUGE: u64 = 2 << 20;
const TABLE_BYTES: u64 = 1 << 20;
const TABLES_AT: u64 = 1 << 46;
/// The areas: where, which memory, and which part of it.
const AREAS: [(u64, usize, u64, u64); 3] = [
    (1 << 30, 0, 0, SIZE / 2),
    (3 << 30, 0, SIZE / 2, SIZE / 2),
    (1 << 40, 1, 0, SIZE),
];

/// A part of a mapping.
struct Cells(Arc<Mapping>, Range<usize>);

impl AsRef<[AtomicU64]> for Cells {
    fn as_ref(&self) -> &[AtomicU64] {
        self.0.cells().get(self.1.clone()).unwrap_or_default()
    }
}

type SoftUnit = SoftwareUnit<Arc<HostTables>, RunMap<Cells>>;

/// Which physical addresses hold which bytes: by pins of this look's own, not by any table.
fn learn(memories: &[Arc<Mapping>]) -> anyhow::Result<RunMap<Cells>> {
    let pinner = Pinner::of_process()?;
    let mut pieces = Vec::new();
    for mapping in memories {
        let whole = Span::new(0, mapping.len());
        let pin = pinner.pin(mapping, whole, &mut |_| std::ops::ControlFlow::Continue(()))?;
        let mut offset = 0;
        for run in frames(&pin, whole)? {
            let words = offset / 8..(offset + run.len as usize) / 8;
            pieces.push((run.start, Cells(mapping.clone(), words)));
            offset += run.len as usize;
        }
    }
    Ok(RunMap::new(pieces)?)
}

/// Where memory lies that is pinned.
pub(crate) fn frames(pin: &Pin, whole: Span<Offset>) -> anyhow::Result<Vec<Span<Pa>>> {
    let (mut runs, mut batch) = (Vec::new(), [Span::default(); 64]);
    let mut frames = pin.runs(whole, FrameSource::Pagemap)?;
    loop {
        match frames.next_batch(&mut batch)? {
            0 => return Ok(runs),
            count => runs.extend_from_slice(&batch[..count]),
        }
    }
}

/// Word of a memory when the first kernel ends.
const fn word(memory: usize, nth: u64) -> u64 {
    ((nth << 8) | (memory as u64 + 1)).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// The device reads all areas, and finds in each word what is expected.
fn device_reads(unit: &SoftUnit, expected: impl Fn(usize, u64) -> u64) -> anyhow::Result<()> {
    let mut port = unit.port(DEVICE);
    for (iova, memory, offset, len) in AREAS {
        let mut words = vec![0; len as usize / 8];
        port.read(iova, &mut words)?;
        for (nth, found) in (offset / 8..).zip(words) {
            let wanted = expected(memory, nth);
            ensure!(
                found == wanted,
                "word {nth:#x} of memory {memory} is {found:#x}, not {wanted:#x}"
            );
        }
    }
    Ok(())
}

/// Hash of all words of a mapping.
fn digest(mapping: &Mapping) -> u64 {
    let mut hasher = DefaultHasher::new();
    for cell in mapping.cells() {
        cell.load(Ordering::Relaxed).hash(&mut hasher);
    }
    hasher.finish()
}

fn objects(mappings: &[Arc<Mapping>], ledger: &Arc<Ledger>) -> Vec<Arc<Memory>> {
    let object =
        |mapping: &Arc<Mapping>| Memory::new(Arc::new(HostMemory::new(mapping.clone())), ledger);
    mappings.iter().map(object).collect()
}

fn again(file: &Mapping) -> anyhow::Result<Mapping> {
    let fd = file.fd().context("no memory file")?;
    Ok(Mapping::of_file(fd.try_clone_to_owned()?)?)
}

/// True if this is the second kernel, by its command line.
pub(crate) fn goes_on(words: &str) -> bool {
    words.split_whitespace().any(|word| word == UPDATED)
}

/// The test, of which each kernel has a half.
pub(crate) fn to_the_next_kernel(_: &Machine) -> anyhow::Result<()> {
    let words = fs::read_to_string("/proc/cmdline")?;
    if goes_on(&words) {
        second()
    } else {
        first(&words).map(|never| match never {})
    }
}

fn first(words: &str) -> anyhow::Result<Infallible> {
    let shmem = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";
    let make = |memory: usize, huge: &str| {
        fs::write(shmem, huge).context(shmem)?;
        let mapping = Mapping::new(Backing::Memfd, SIZE, None)?;
        mapping.populate(&mut |_| std::ops::ControlFlow::Continue(()))?;
        for (cell, nth) in mapping.cells().iter().zip(0..) {
            cell.store(word(memory, nth), Ordering::Relaxed);
        }
        anyhow::Ok(Arc::new(mapping))
    };
    let mappings = [make(0, "never")?, make(1, "always")?];
    let file = Mapping::new(Backing::Memfd, TABLE_BYTES, None)?;
    let tables = Arc::new(HostTables::new(
        MappedStorage::over(again(&file)?),
        TABLES_AT,
    )?);
    let unit: Arc<SoftUnit> = Arc::new(SoftwareUnit::new(tables.clone(), learn(&mappings)?));
    let builder = TableBuilder::new(tables, DomainIds::new(16), [FormatId::VtdSs]);
    let space = Ioas::over_tables(builder);
    let ledger = Ledger::unlimited();
    let memories = objects(&mappings, &ledger);
    space.attach((unit.clone(), DEVICE))?;
    for (iova, memory, offset, len) in AREAS {
        space.map(iova, &memories[memory], Span::new(offset, len), Prot::RW)?;
    }
    device_reads(&unit, word)?;

    let session = LiveUpdate::create(SESSION)?;
    let twice = LiveUpdate::create(SESSION);
    ensure!(
        matches!(twice, Err(LiveUpdateError::Session { .. })),
        "{twice:?}"
    );
    refused_by_name(&session)?;
    for (number, mapping) in MEMORY.into_iter().zip(&mappings) {
        session.preserve(number, mapping.fd().context("no file")?)?;
    }
    let taken = session.preserve(MEMORY[0], file.fd().context("no file")?);
    ensure!(
        matches!(taken, Err(LiveUpdateError::Preserve { number: 1, .. })),
        "{taken:?}"
    );
    session.preserve(TABLES, file.fd().context("no file")?)?;
    // Preserved memory was pinned, and has not moved.
    device_reads(&unit, word)?;
    let leaving = space.hand_over(&memories)?;
    let mut description = File::from(memfd_create("description", MemfdFlags::empty())?);
    writeln!(description, "{:x} {}", digest(&file), leaving.handover())?;
    session.preserve(DESCRIPTION, &description)?;
    println!("the next kernel: {:?}", unit.counters());
    next_kernel(words, || Ok(()))
}

/// Files that Linux 7.2 cannot preserve.
fn refused_by_name(session: &LiveUpdate) -> anyhow::Result<()> {
    let huge = Mapping::new(Backing::Hugetlb2M, 2 << 20, None)?;
    let huge = huge.fd().context("no file")?.try_clone_to_owned()?;
    let open = |path: &str| File::options().read(true).write(true).open(path);
    for (file, name) in [
        (huge, "hugetlb pages of 2 MiB"),
        (OwnedFd::from(open("/dev/iommu")?), "/dev/iommu"),
        (open("/dev/vfio/vfio")?.into(), "/dev/vfio/vfio"),
        (File::create_new("/tmp/file")?.into(), "/tmp/file"),
    ] {
        let refused = session.preserve(9, &file).err().context(name)?;
        ensure!(
            matches!(refused, LiveUpdateError::Kind { .. }),
            "{refused:?}"
        );
        ensure!(refused.to_string().contains(name), "{refused}");
    }
    Ok(())
}

/// Starts it, with what this one was started with; last of all comes `last`.
pub(crate) fn next_kernel(
    words: &str,
    last: impl FnOnce() -> anyhow::Result<()>,
) -> anyhow::Result<Infallible> {
    let kernel = File::open("/bin/kernel").context("/bin/kernel")?;
    // Kept by `retain_initrd`.
    let initrd = "/sys/firmware/initrd";
    let initrd = File::open(initrd).context(initrd)?;
    let words = CString::new(format!("{} {UPDATED}", words.trim()))?;
    let len = words.as_bytes_with_nul().len();
    // SAFETY: the kernel reads the files and `len` bytes of the command line. Source: kexec_file_load(2).
    let loaded = unsafe {
        libc::syscall(
            KEXEC_FILE_LOAD,
            kernel.as_raw_fd(),
            initrd.as_raw_fd(),
            len,
            words.as_ptr(),
            0,
        )
    };
    ensure!(
        loaded == 0,
        "kexec_file_load: {}",
        std::io::Error::last_os_error()
    );
    last()?;
    system::reboot(RebootCommand::Kexec).context("kexec")?;
    anyhow::bail!("the next kernel was not started")
}

fn second() -> anyhow::Result<()> {
    let none = LiveUpdate::retrieve("other");
    ensure!(
        matches!(none, Err(LiveUpdateError::Session { .. })),
        "{none:?}"
    );
    let session = LiveUpdate::retrieve(SESSION)?;
    let none = session.take(9);
    ensure!(
        matches!(none, Err(LiveUpdateError::Take { number: 9, .. })),
        "{none:?}"
    );
    let mapping = |number| anyhow::Ok(Arc::new(Mapping::of_file(session.take(number)?)?));
    let mappings = [mapping(MEMORY[0])?, mapping(MEMORY[1])?];
    let file = Mapping::of_file(session.take(TABLES)?)?;
    let mut description = File::from(session.take(DESCRIPTION)?);
    let mut text = String::new();
    description.rewind()?;
    description.read_to_string(&mut text)?;
    let (before, handover) = text.trim().split_once(' ').context("no description")?;
    let before = u64::from_str_radix(before, 16)?;
    let handover: Handover = handover.parse()?;
    session.finish()?;
    ensure!(digest(&file) == before, "the tables are others");

    let ledger = Ledger::unlimited();
    let memories = objects(&mappings, &ledger);
    // Each for the other: their pages are elsewhere than the tables lead.
    let swapped = [memories[1].clone(), memories[0].clone()];
    let (taken, _) = taken(&handover, again(&file)?, RunMap::new([])?)?;
    let refused = Ioas::adopt(&handover, &swapped, taken, None);
    let refused = refused.err().context("other memory was adopted")?;
    ensure!(
        matches!(refused, TakeOverError::Differs { .. }),
        "{refused}"
    );
    println!("refused: {refused}");
    ensure!(
        (ledger.in_use(), digest(&file)) == (0, before),
        "something has changed"
    );

    let (taken, unit) = self::taken(&handover, again(&file)?, learn(&mappings)?)?;
    let space = Ioas::adopt(&handover, &memories, taken, None)?;
    ensure!(digest(&file) == before, "tables were changed");
    let charged = ledger.in_use();
    ensure!(charged == 2 * SIZE, "{charged:#x} bytes are charged");
    device_reads(&unit, word)?;
    // And goes on: what the device writes is in the memory.
    let mut port = unit.port(DEVICE);
    for (iova, memory, offset, len) in AREAS {
        let words: Vec<u64> = (offset / 8..(offset + len) / 8)
            .map(|nth| !word(memory, nth))
            .collect();
        port.write(iova, &words)?;
    }
    for (memory, mapping) in mappings.iter().enumerate() {
        for (cell, nth) in mapping.cells().iter().zip(0..) {
            let found = cell.load(Ordering::Relaxed);
            ensure!(
                found == !word(memory, nth),
                "word {nth:#x} of memory {memory} is {found:#x}"
            );
        }
    }
    let (iova, .., len) = AREAS[0];
    space.unmap(Span::new(iova, len))?;
    ensure!(
        port.read(iova, &mut [0]).is_err(),
        "the device reaches what is unmapped"
    );
    space.map(iova, &memories[0], Span::new(0, len), Prot::RW)?;
    device_reads(&unit, |memory, nth| !word(memory, nth))?;
    space.detach(DEVICE)?;
    space.close()?;
    ensure!(
        ledger.in_use() == 0,
        "{:#x} bytes stay charged",
        ledger.in_use()
    );
    Ok(())
}

/// The domain with its table in this file, and a unit that walks it for the device.
fn taken(
    handover: &Handover,
    file: Mapping,
    frames: RunMap<Cells>,
) -> anyhow::Result<(Vec<TakenDomain>, Arc<SoftUnit>)> {
    let [domain] = &handover.domains[..] else {
        anyhow::bail!("{} domains", handover.domains.len());
    };
    let mut takeover = Takeover::<_, 12>::new(MappedStorage::over(file), TABLES_AT)?;
    let table = AnyTable::adopt(&mut takeover, domain.root, domain.page_sizes)?;
    let tables = Arc::new(takeover.finish());
    let unit: Arc<SoftUnit> = Arc::new(SoftwareUnit::new(tables.clone(), frames));
    unit.attach(DEVICE, domain.id, domain.root)?;
    let table = table.open(tables)?;
    let leaves = table.leaf_sizes();
    let huge = leaves.iter().find(|(size, _)| *size == HUGE);
    let huge = huge.map_or(0, |(_, all)| all.bytes);
    ensure!(huge == SIZE, "{huge:#x} bytes are mapped by huge leaves");
    let members = vec![(unit.clone() as Arc<dyn iommu::Unit>, DEVICE)];
    Ok((vec![(table, members)], unit))
}
