//! The memory that is mapped: how much, of which pages, and what it is charged to.

use std::sync::Arc;

use hostmem::{Backing, Counter, Limits, Machine, Mapping, Pinner};
use ioas::Ledger;
use ioas::iommufd::RlimitMode;
use runs::Bytes;

use super::report::MemoryReport;
use super::{JobError, MapJob, Stage, Watch};
use hostmem::KeptPool;

/// What is taken without a size.
const DEFAULT_SIZE: u64 = 256 << 20;
/// What is left of the limit on locked memory without being asked for: the kernel charges a ring of
/// io_uring too, and takes the charge of one that is closed back a little later.
const SPARE: u64 = 128 << 10;
/// What a job takes of its control group beside its memory, whatever the size, and for each so many bytes:
/// tables, buffers, threads. Jobs on one node took 7 MiB and a part in 22 at most (debug build, 4 to 256 MiB).
const BESIDE: u64 = 8 << 20;
const BESIDE_EACH: u64 = 16;
/// What to do about the limit on locked memory.
pub(crate) const RAISE: &str =
    "`ulimit -l` raises the limit, and CAP_IPC_LOCK, as root has it, lifts it";

/// What pins are charged to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Account {
    counter: Counter,
    limits: Limits,
    /// Bytes that the limit leaves; `None` without one.
    room: Option<u64>,
}

impl Account {
    /// Pins of our own.
    pub(crate) fn of_pinner(pinner: &Pinner) -> Result<Self, JobError> {
        Ok(Self {
            counter: pinner.counter(),
            limits: pinner.limits(),
            room: pinner.room()?,
        })
    }

    /// What a container of VFIO's type 1 pins: it counts by process.
    pub(crate) fn of_process() -> Result<Self, JobError> {
        Self::of_kernel(Limits::read()?, RlimitMode::Process)
    }

    /// What iommufd pins: it counts by user, and for the privileged only what is pinned.
    pub(crate) fn of_user() -> Result<Self, JobError> {
        Self::of_kernel(Limits::read()?, RlimitMode::User)
    }

    fn of_kernel(limits: Limits, mode: RlimitMode) -> Result<Self, JobError> {
        let counter = mode.counter(&limits);
        let room = limits.left(counter)?.map(|left| left & !4095);
        Ok(Self {
            counter,
            limits,
            room,
        })
    }

    /// Bytes that the limit leaves; `None` without one.
    pub(crate) const fn room(&self) -> Option<u64> {
        self.room
    }

    pub(crate) fn ledger(&self) -> Result<Arc<Ledger>, JobError> {
        Ok(Ledger::of_counter(self.counter, &self.limits)?)
    }

    fn over_limit(&self, size: u64, room: u64) -> JobError {
        let limit = self.limits.memlock.unwrap_or(0);
        let in_use = Limits::in_use(self.counter).map_or(0, |in_use| in_use.known);
        JobError::Input(format!(
            "needs {}, {} allowed (RLIMIT_MEMLOCK, counted in {}), {} in use: {} are left beside what \
             the pins take themselves; {RAISE}",
            Bytes(size),
            Bytes(limit),
            self.counter,
            Bytes(in_use),
            Bytes(room)
        ))
    }
}

/// The memory, all of it there. The pool of huge pages is put back when it is dropped, if it is
/// dropped last.
pub(super) struct Taken {
    pub(super) mapping: Arc<Mapping>,
    pub(super) pool: Option<KeptPool>,
}

/// Takes the memory that the job asks for, or what suits `account` when it does not say.
pub(super) fn take(
    job: &MapJob,
    account: &Account,
    watch: &mut dyn Watch,
    report: &mut MemoryReport,
) -> Result<Taken, JobError> {
    let machine = Machine::probe()?;
    let size = choose_size(job, &machine, account, report)?;
    let backing = choose_backing(job, &machine, size, report);
    check_cgroups(&machine, backing, size)?;
    let pool = raise_pool(job, backing, size, watch)?;
    report.pool_pages_added = pool.as_ref().map_or(0, KeptPool::added);
    let mapping = Mapping::new(backing, size, None).map_err(JobError::Mapping)?;
    Ok(Taken {
        mapping: Arc::new(mapping),
        pool,
    })
}

/// The most memory that suits what the control group leaves, half of it at most, as a size and a reason;
/// `None` without a group that has a limit.
pub(crate) fn most_of_cgroup(machine: &Machine, backing: Backing) -> Option<(u64, String)> {
    let cgroup = machine.cgroup(backing)?;
    let left = cgroup.left();
    let most = match backing.huge_size() {
        Some(_) => left,
        None => left.saturating_sub(BESIDE) / (BESIDE_EACH + 1) * BESIDE_EACH,
    };
    let reason = format!(
        "a part of the {} that the control group {} leaves",
        Bytes(left),
        cgroup.path.display()
    );
    Some((most.min(left / 2), reason))
}

/// Refuses `size` bytes of `backing`, and what a job takes beside, where a control group does not leave that:
/// the kernel would kill this process.
pub(crate) fn check_cgroups(
    machine: &Machine,
    backing: Backing,
    size: u64,
) -> Result<(), JobError> {
    let beside = BESIDE + size / BESIDE_EACH;
    let ordinary = match backing.huge_size() {
        Some(_) => beside,
        None => size.saturating_add(beside),
    };
    if let Some(cgroup) = machine.cgroup_below(Backing::Anon4K, ordinary) {
        return Err(JobError::Input(format!(
            "needs {}, with {} for tables and threads, and {cgroup}",
            Bytes(ordinary),
            Bytes(beside)
        )));
    }
    match machine.cgroup_below(backing, size) {
        None => Ok(()),
        Some(cgroup) => Err(JobError::Input(format!(
            "needs {} of {backing} memory, and {cgroup}",
            Bytes(size)
        ))),
    }
}

/// Brings all of the memory in.
pub(super) fn populate(mapping: &Mapping, watch: &mut dyn Watch) -> Result<(), JobError> {
    let total = mapping.len();
    if watch.progress(Stage::Populate, 0, total).is_break() {
        return Err(JobError::Interrupted);
    }
    mapping.populate(&mut |done| watch.progress(Stage::Populate, done, total))?;
    Ok(())
}

/// Refuses more memory than the machine has.
pub(crate) fn check_total(machine: &Machine, size: u64) -> Result<(), JobError> {
    if size > machine.total {
        return Err(JobError::Input(format!(
            "{} of memory are more than this machine has: {}",
            Bytes(size),
            Bytes(machine.total)
        )));
    }
    Ok(())
}

/// The size, and why it is that when nobody asked for one.
fn choose_size(
    job: &MapJob,
    machine: &Machine,
    account: &Account,
    report: &mut MemoryReport,
) -> Result<u64, JobError> {
    let page = job.backing.map_or(machine.page, Backing::page);
    if let Some(size) = job.size {
        if size == 0 || size % page != 0 {
            let what = job.backing.map_or("4k", Backing::name);
            return Err(JobError::Input(format!(
                "a size of {size} bytes is not a multiple of {}, the page of {what} memory, or is 0",
                Bytes(page)
            )));
        }
        check_total(machine, size)?;
        if let Some(room) = account.room.filter(|room| size > *room) {
            return Err(account.over_limit(size, room));
        }
        report.size_bytes = size;
        return Ok(size);
    }
    let mut size = DEFAULT_SIZE.max(page);
    let mut reason = "the default".to_string();
    let most = most_of_cgroup(machine, job.backing.unwrap_or(Backing::Anon4K));
    // Of a limit as small as 64 KiB, the default for long, half is left.
    let spare = account.room.map(|room| room - SPARE.min(room / 2));
    if let Some(room) = spare.filter(|room| *room < size) {
        size = room / page * page;
        if size == 0 {
            return Err(account.over_limit(page, room));
        }
        reason = format!(
            "what is left of the limit on locked memory ({}, RLIMIT_MEMLOCK)",
            Bytes(account.limits.memlock.unwrap_or(0))
        );
    }
    if let Some((most, why)) = most.filter(|(most, _)| *most < size) {
        (size, reason) = ((most / page * page).max(page), why);
    }
    if machine.available / 2 < size {
        size = (machine.available / 2 / page * page).max(page);
        reason = format!(
            "half of the {} that the machine has available",
            Bytes(machine.available)
        );
    }
    report.size_bytes = size;
    report.size_reason = Some(reason);
    Ok(size)
}

fn choose_backing(
    job: &MapJob,
    machine: &Machine,
    size: u64,
    report: &mut MemoryReport,
) -> Backing {
    let backing = job.backing.unwrap_or_else(|| {
        let choice = Backing::choose(size, machine);
        report.backing_reason = Some(choice.reason);
        choice.backing
    });
    report.backing = backing.name().into();
    backing
}

/// Huge pages that were asked for by name are added to the pool where they are missing.
fn raise_pool(
    job: &MapJob,
    backing: Backing,
    size: u64,
    watch: &mut dyn Watch,
) -> Result<Option<KeptPool>, JobError> {
    match (job.backing, backing.huge_size()) {
        (Some(_), Some(page)) => {
            let mut on = || watch.progress(Stage::Populate, 0, size);
            match KeptPool::raise(page, size, &mut on) {
                Ok(pool) => Ok(Some(pool)),
                // A signal makes the kernel stop looking for pages.
                Err(_) if on().is_break() => Err(JobError::Interrupted),
                Err(cause) => Err(cause.into()),
            }
        }
        _ => Ok(None),
    }
}
