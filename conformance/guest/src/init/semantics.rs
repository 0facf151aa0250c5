//! The semantics of mapping, on the real kernel: the rows of the table that the tests of `ioas` show
//! on a model, call by call and through the library.

#![allow(
    clippy::panic,
    reason = "a row has no errors but the kernel's: one that cannot go on stops, and fails"
)]

#[path = "../../../../crates/ioas/tests/kernel/semantics/table/mod.rs"]
#[allow(
    dead_code,
    unused_imports,
    clippy::unwrap_used,
    reason = "some of it is for models only; a row that cannot go on stops"
)]
pub(crate) mod table;

use std::{
    fs,
    marker::PhantomData,
    panic::{self, AssertUnwindSafe},
    sync::{Arc, OnceLock},
};

use anyhow::{Context as _, bail, ensure};
use guest::machines::{EDU, NVME};
use ioas::{
    AttachError, Errno, Ioas, KernelError, Ledger, Mapper, Memory,
    iommufd::SpaceMapper,
    vfio::{ContainerMapper, Group, VfioDevice},
};
use iopt::Prot;
use runs::{Iova, Span};

use table::{Answer, Column, LIMIT, PAGE, RESERVED, Raw, Subject, Surroundings, Which, rows};

use crate::{
    limit::{counter, unprivileged},
    message,
    mock::{Any, Passing},
    objects::Patchwork,
    pci,
    space::{Compatibility, DeviceOf, InContainer, Interface, Iommufd, Type1},
};

/// How many mappings the containers of the rows take.
const ENTRIES: &str = "/sys/module/vfio_iommu_type1/parameters/dma_entry_limit";

const CONTAINERS: &[Column] = &[Column::Type1, Column::Compatibility];

/// Rows that no kernel shows here, of which interfaces, and why.
const NOT_SHOWN: &[(&str, &[Column], &str)] = &[
    (
        "attach: a mapping is where it cannot translate",
        CONTAINERS,
        NO_NARROW,
    ),
    (
        "attach: refused, nothing has changed",
        CONTAINERS,
        NO_NARROW,
    ),
    (
        "attach: a second device, which translates less",
        CONTAINERS,
        NO_NARROW,
    ),
    (
        "attach: over the limit of locked memory",
        &[Column::Compatibility],
        "nothing is pinned when a group is attached, but when a device of it is opened",
    ),
    (
        "dirty: a device that cannot tell",
        &[Column::Iommufd],
        "the library has no page table made for that; `tracking` has the kernel refuse one",
    ),
    (
        "unmap: a user does not let go",
        &[Column::Type1, Column::Compatibility, Column::Iommufd],
        "who holds pages of a container is a driver that there is none of here; iommufd's mock lets go",
    ),
];

const NO_NARROW: &str = "the unit of a machine translates the same for all its devices";

/// The counter on which the kernel shows what is pinned: iommufd counts `VmLck` only for who may not
/// lock without limit, and as a container.
pub(crate) const fn counter_of(column: Column) -> &'static str {
    match column {
        Column::Type1 => "VmLck",
        Column::Compatibility | Column::Iommufd => "VmPin",
    }
}

/// Value of the counter in the beginning, and the devices that are open.
struct Around<I: Shown> {
    before: u64,
    open: Vec<VfioDevice>,
    interface: PhantomData<I>,
}

impl<I: Shown> Around<I> {
    const COUNTER: &'static str = counter_of(I::COLUMN);

    fn new() -> anyhow::Result<Self> {
        Ok(Self {
            before: counter(Self::COUNTER)?,
            open: Vec::new(),
            interface: PhantomData,
        })
    }
}

impl<I: Shown> Surroundings<I::Rows> for Around<I> {
    fn attached(&mut self, device: &RowDevice<I>) -> Result<(), KernelError> {
        self.open.extend(I::open(device)?);
        Ok(())
    }

    fn locked(&self) -> u64 {
        match counter(Self::COUNTER) {
            Ok(now) => now.wrapping_sub(self.before),
            Err(error) => panic!("{error:#}"),
        }
    }

    fn hold(&mut self, range: Span<Iova>) {
        panic!("nobody here holds {range}");
    }
}

/// Memory with a page that cannot be pinned, for all rows.
fn memory() -> anyhow::Result<&'static Arc<Patchwork>> {
    static OF_ALL: OnceLock<Arc<Patchwork>> = OnceLock::new();
    if let Some(there) = OF_ALL.get() {
        return Ok(there);
    }
    let new = Patchwork::new()?;
    Ok(OF_ALL.get_or_init(|| Arc::new(new)))
}

/// An interface of which the rows are shown.
pub(crate) trait Shown: Interface + 'static {
    /// Its operations, with devices of all kinds.
    type Rows: Mapper;

    /// A new address space, and devices by [`Which`], as many as there are.
    fn rows() -> anyhow::Result<(Self::Rows, Vec<RowDevice<Self>>)>
    where
        Self: Sized;

    /// Has a device that was attached reach the memory, for as long as what this returns is there.
    fn open(_attached: &RowDevice<Self>) -> Result<Option<VfioDevice>, KernelError> {
        Ok(None)
    }
}

type RowDevice<I> = <<I as Shown>::Rows as Mapper>::Device;

impl<const COMPATIBILITY: bool> Shown for InContainer<COMPATIBILITY> {
    type Rows = ContainerMapper;

    fn rows() -> anyhow::Result<(ContainerMapper, Vec<Group>)> {
        let devices = vec![real::<Self>(&(), EDU)?, real::<Self>(&(), NVME)?];
        Ok((Self::mapper(&())?, devices))
    }

    /// Groups of a container that iommufd plays are attached when one of their devices is opened.
    fn open(group: &Group) -> Result<Option<VfioDevice>, KernelError> {
        if !COMPATIBILITY {
            return Ok(None);
        }
        match group.device(EDU) {
            Err(KernelError::Refused { errno, .. }) if errno == Errno::ENODEV.0 => {
                group.device(NVME).map(Some)
            }
            edu => edu.map(Some),
        }
    }
}

impl Shown for Iommufd {
    type Rows = SpaceMapper<Any>;

    /// A mock translates less than 2 GiB. No row wants two real devices, and to open an NVMe device
    /// takes time.
    fn rows() -> anyhow::Result<(SpaceMapper<Any>, Vec<Any>)> {
        let owner = Self::file()?;
        let usual = real::<Self>(&owner, EDU)?;
        let mock = || Any::Mock(Passing::new(&owner));
        let devices = vec![Any::Real(usual), mock(), mock()];
        Ok((SpaceMapper::for_devices(&owner)?, devices))
    }
}

fn real<I: Interface>(file: &I::File, device: &'static str) -> anyhow::Result<DeviceOf<I>> {
    pci::Device(device).bind_to_vfio()?;
    I::attachable(file, pci::Device(device))
}

fn raw<I: Shown>() -> anyhow::Result<Raw<I::Rows>> {
    let around = Box::new(Around::<I>::new()?);
    let (space, devices) = I::rows()?;
    Ok(memory()?.raw(space, devices, around))
}

/// An address space of the library.
struct Real<I: Shown> {
    // Dropped first: a group leaves only when its devices are closed.
    around: Around<I>,
    ioas: Ioas,
    devices: Vec<Arc<RowDevice<I>>>,
    ledger: Arc<Ledger>,
    memory: Arc<Memory>,
}

impl<I: Shown> Real<I> {
    fn new() -> anyhow::Result<Self> {
        let around = Around::new()?;
        let (mapper, devices) = I::rows()?;
        // It allows more than the kernel, so that the kernel is asked.
        let ledger = Ledger::new(Around::<I>::COUNTER, Some(16 * LIMIT), 0);
        let mut real = Self {
            around,
            ioas: Ioas::over_mapper(mapper),
            devices: devices.into_iter().map(Arc::new).collect(),
            memory: Memory::new(memory()?.clone(), &ledger),
            ledger,
        };
        real.attach(Which::Usual)?;
        Ok(real)
    }
}

impl<I: Shown> Subject for Real<I> {
    fn space(&self) -> &Ioas {
        &self.ioas
    }

    fn memory(&self) -> Arc<Memory> {
        self.memory.clone()
    }

    fn attach(&mut self, which: Which) -> Result<(), AttachError> {
        let device = &self.devices[which as usize];
        self.ioas.attach(device.clone())?;
        let opened = self.around.attached(device);
        let known = opened.and_then(|()| self.ioas.refresh());
        known.map_err(|error| AttachError::Kernel(error.into()))
    }

    fn detach(&mut self) {
        self.around.open.clear();
        if let Err(error) = self.ioas.detach(&self.devices[0]) {
            panic!("{error}: {error:?}");
        }
    }

    fn hold(&mut self, range: Span<Iova>) {
        self.around.hold(range);
    }

    fn charged(&self) -> u64 {
        let (ours, the_kernels) = (self.ledger.in_use(), self.around.locked());
        assert_eq!(ours, the_kernels, "the ledger and {}", Around::<I>::COUNTER);
        ours
    }
}

/// Tries rows, each of which is a name, what is right, and how to learn what is: with few entries
/// and the limit on locked memory.
fn try_all<I: Shown>(
    all: impl FnOnce() -> Vec<(&'static str, Answer, Trial)> + Send + 'static,
) -> anyhow::Result<()> {
    let entries = fs::read_to_string(ENTRIES)?;
    fs::write(ENTRIES, "8")?;
    let tried = unprivileged(LIMIT, move || {
        let mut wrong = Vec::new();
        let mut shown = 0;
        for (name, right, trial) in all() {
            let not_shown = NOT_SHOWN
                .iter()
                .find(|(known, columns, _)| *known == name && columns.contains(&I::COLUMN));
            if let Some((_, _, why)) = not_shown {
                println!("guest-init: not shown on {:?}: {name}: {why}", I::COLUMN);
                continue;
            }
            shown += 1;
            match panic::catch_unwind(AssertUnwindSafe(trial)) {
                Ok(Ok(answer)) if answer == right => {}
                Ok(Ok(answer)) => wrong.push(format!("{name}: {answer:?} and not {right:?}")),
                Ok(Err(error)) => wrong.push(format!("{name}: {error:#}")),
                Err(panic) => wrong.push(format!("{name}: panicked: {}", message(&*panic))),
            }
        }
        ensure!(wrong.is_empty(), "{}", wrong.join("\n"));
        ensure!(shown > 20, "only {shown} rows");
        Ok(())
    });
    fs::write(ENTRIES, entries.trim())?;
    tried
}

type Trial = Box<dyn FnOnce() -> anyhow::Result<Answer>>;

/// The kernel answers as the table says.
pub(crate) fn kernel<I: Shown>() -> anyhow::Result<()> {
    try_all::<I>(|| {
        let rows = rows::<I::Rows, Real<I>>().into_iter();
        let calls = rows.filter_map(|row| {
            let (calls, right) = (row.kernel?, row.answer(I::COLUMN)?);
            let trial: Trial = Box::new(move || Ok(calls(&mut raw::<I>()?)));
            Some((row.name, right, trial))
        });
        calls.collect()
    })
}

/// The library behaves over it as the table says.
pub(crate) fn library<I: Shown>() -> anyhow::Result<()> {
    try_all::<I>(|| {
        let rows = rows::<I::Rows, Real<I>>().into_iter();
        let calls = rows.filter_map(|row| {
            let (calls, right) = (row.library?, row.library_answer(I::COLUMN, false)?);
            let trial: Trial =
                Box::new(move || Ok(calls(&mut Real::<I>::new()?, I::COLUMN.profile())));
            Some((row.name, right, trial))
        });
        calls.collect()
    })
}

/// A container that iommufd plays does nothing with a group whose devices are closed: what is mapped is
/// pinned, and the windows are known, when one is opened.
pub(crate) fn pins_when_opened() -> anyhow::Result<()> {
    unprivileged(LIMIT, || {
        let counted = counter_of(Column::Compatibility);
        let before = counter(counted)?;
        let ledger = Ledger::new(counted, Some(16 * LIMIT), 0);
        let group = Arc::new(Compatibility::attachable(&(), pci::Device(EDU))?);
        let mapper = Compatibility::mapper(&())?;
        let mut ioas = Ioas::over_mapper(mapper);
        ioas.attach(group.clone())?;
        let memory = Memory::new(memory()?.clone(), &ledger);
        let map = |ioas: &Ioas, iova, len| ioas.map(iova, &memory, Span::new(0, len), Prot::RW);
        map(&mut ioas, 1 << 30, LIMIT)?;
        map(&mut ioas, 2 << 30, PAGE)?;
        ensure!(counter(counted)? == before, "pinned without a device");
        let reserved = |ioas: &Ioas| !ioas.windows().iter().any(|w| w.covers(&RESERVED));
        ensure!(!reserved(&ioas), "the windows are {:?}", ioas.windows());
        match group.device(EDU) {
            Err(KernelError::Refused { errno, .. }) if errno == Errno::ENOMEM.0 => {}
            other => bail!("over the limit: {other:?}"),
        }
        ioas.unmap(Span::new(2 << 30, PAGE))?;
        let device = group.device(EDU)?;
        ensure!(counter(counted)? == before + LIMIT, "not pinned");
        ioas.refresh()?;
        ensure!(reserved(&ioas), "the windows are {:?}", ioas.windows());
        drop(device);
        ensure!(counter(counted)? == before, "still pinned");
        ensure!(ledger.in_use() == LIMIT, "the ledger does not know");
        Ok(())
    })
}

/// The list of what is not shown has no rows that are not in the table.
pub(crate) fn names() -> anyhow::Result<()> {
    let rows = rows::<ContainerMapper, Real<Type1>>();
    for (name, ..) in NOT_SHOWN {
        rows.iter()
            .find(|row| row.name == *name)
            .with_context(|| format!("there is no row {name}"))?;
    }
    Ok(())
}
