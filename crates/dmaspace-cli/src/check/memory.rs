//! The memory: how much, of which pages, and what it is charged to.

use std::sync::Arc;

use hostmem::{
    Backing, Counter, FrameSource, Limits, Machine, Mapping, PinKind, Pinner, PopulateError,
};
use ioas::Ledger;
use ioas::iommufd::RlimitMode;
use runs::Bytes;

use super::job::{Job, LIMITS, PROBE, timed};
use super::report::{Done, LIES, MemoryReport, nodes};
use super::{Because as _, CheckError, CheckJob, Step};
use crate::size::percent;

/// The unit of our own pins: the smallest part that is unpinned without pinning the rest anew.
pub(super) const PIECE: u64 = 2 << 20;
/// Memory without a size.
const DEFAULT_SIZE: u64 = 256 << 20;
/// Left of the limit on locked memory unless a size is asked for: others of this user lock memory, too.
const SPARE: u64 = 128 << 10;
/// Memory of a control group that a check takes besides, and a byte for each so many: tables, buffers, threads.
const BESIDE: u64 = 8 << 20;
const BESIDE_EACH: u64 = 16;
/// How to raise the limit on locked memory.
const RAISE: &str = "`ulimit -l` raises the limit, and CAP_IPC_LOCK, as root has it, lifts it";

/// The counter that pins are charged to.
#[derive(Clone, Copy, Debug)]
pub(super) struct Account {
    counter: Counter,
    limits: Limits,
    /// Bytes that the limit leaves; `None` without one.
    room: Option<u64>,
    /// Pins are buffers of io_uring, in pieces: what stays of one is pinned anew, and charged twice for a moment, when a
    /// part of it is unpinned.
    pieces: bool,
}

impl Account {
    /// Pins of our own.
    pub(super) fn of_pinner(pinner: &Pinner) -> Result<Self, CheckError> {
        Ok(Self {
            counter: pinner.counter(),
            limits: pinner.limits(),
            room: pinner.room().failed(LIMITS)?,
            pieces: pinner.kind() == PinKind::IoUring,
        })
    }

    /// Pins of a kernel: a container of type 1 counts by process, iommufd by user.
    pub(super) fn of_kernel(mode: RlimitMode) -> Result<Self, CheckError> {
        let limits = Limits::read().failed(LIMITS)?;
        let counter = mode.counter(&limits);
        let left = limits.left(counter).failed(LIMITS)?;
        Ok(Self {
            counter,
            limits,
            room: left.map(|left| left & !4095),
            pieces: false,
        })
    }

    pub(super) fn ledger(&self) -> Result<Arc<Ledger>, CheckError> {
        Ledger::of_counter(self.counter, &self.limits).failed(LIMITS)
    }

    /// The room now.
    pub(super) fn left(&self) -> Result<Option<u64>, CheckError> {
        self.limits.left(self.counter).failed(LIMITS)
    }

    /// Bytes that `size` bytes in these pages take for a moment besides.
    fn besides(&self, size: u64, page: u64) -> u64 {
        match self.pieces {
            true => size.min(page.max(PIECE)),
            false => 0,
        }
    }

    fn over_limit(&self, size: u64, page: u64, room: u64) -> CheckError {
        let limit = self.limits.memlock.unwrap_or(0);
        let in_use = Limits::in_use(self.counter).map_or(0, |in_use| in_use.known);
        CheckError::Input(format!(
            "needs {}, and {} more while a part is unpinned, {} allowed (RLIMIT_MEMLOCK, counted in {}), {} in \
             use: {} are left beside memory of the pins themselves; {RAISE}",
            Bytes(size),
            Bytes(self.besides(size, page)),
            Bytes(limit),
            self.counter,
            Bytes(in_use),
            Bytes(room)
        ))
    }
}

/// The first step: takes the memory that the job asks for, or what suits `account`, and brings it in.
pub(super) fn take(job: &mut Job<'_>, account: &Account) -> Result<Arc<Mapping>, CheckError> {
    job.step_with(Step::Memory, |job| {
        let machine = Machine::probe().failed(PROBE)?;
        let (size, size_reason) = choose_size(job.asked, &machine, account)?;
        let (backing, backing_reason) = match job.asked.backing {
            Some(backing) => (backing, None),
            None => {
                let choice = Backing::choose(size, &machine);
                (choice.backing, Some(choice.reason))
            }
        };
        check_free(&machine, backing, size)?;
        let (mapping, took_ns) = timed(|| brought_in(backing, size, job));
        let mapping = mapping?;
        let frames = FrameSource::detect(&mapping);
        let huge_bytes = mapping.folios().failed(LIES)?.huge;
        job.report.memory = MemoryReport {
            size_bytes: size,
            size_reason,
            backing: backing.name(),
            backing_reason,
            huge_bytes,
            nodes: nodes(&mapping)?,
            addresses: match frames {
                FrameSource::Pagemap => "pagemap",
                FrameSource::FileOffset => "file-offset",
                FrameSource::Synthetic { .. } => "synthetic",
            },
            addresses_reason: frames.to_string(),
            limit_bytes: account.limits.limit(account.counter),
            ..std::mem::take(&mut job.report.memory)
        };
        let checked = format!("{} in huge pages", percent(huge_bytes, size));
        Ok((Done::new(size, took_ns, true, checked), Arc::new(mapping)))
    })
}

/// Refuses memory that the machine, or a control group, does not have free.
pub(super) fn check_free(machine: &Machine, backing: Backing, size: u64) -> Result<(), CheckError> {
    check_cgroups(machine, backing, size)?;
    check_pool(machine, backing, size)
}

/// Refuses huge pages that are not free, with the line that adds them.
fn check_pool(machine: &Machine, backing: Backing, size: u64) -> Result<(), CheckError> {
    let Some(huge) = backing.huge_size() else {
        return Ok(());
    };
    let pool = machine.pool(huge).unwrap_or_default();
    let (wanted, free) = (size / huge.bytes(), pool.unreserved());
    if free >= wanted {
        return Ok(());
    }
    Err(CheckError::Input(format!(
        "needs {wanted} free huge pages of {}, and {free} are free; as root: echo {} > \
         /sys/kernel/mm/hugepages/hugepages-{}kB/nr_hugepages",
        Bytes(huge.bytes()),
        pool.total + (wanted - free),
        huge.bytes() >> 10
    )))
}

/// Refuses memory, and what a check takes beside, that a control group does not leave: the kernel would kill this process.
fn check_cgroups(machine: &Machine, backing: Backing, size: u64) -> Result<(), CheckError> {
    let beside = BESIDE + size / BESIDE_EACH;
    let ordinary = match backing.huge_size() {
        Some(_) => beside,
        None => size.saturating_add(beside),
    };
    if let Some(cgroup) = machine.cgroup_below(Backing::Anon4K, ordinary) {
        return Err(CheckError::Input(format!(
            "needs {}, with {} for tables and threads, and {cgroup}",
            Bytes(ordinary),
            Bytes(beside)
        )));
    }
    match machine.cgroup_below(backing, size) {
        None => Ok(()),
        Some(cgroup) => Err(CheckError::Input(format!(
            "needs {} of {backing} memory, and {cgroup}",
            Bytes(size)
        ))),
    }
}

/// At most half of what a control group leaves, with the reason; `None` without a group that has a limit.
fn most_of_cgroup(machine: &Machine, backing: Backing) -> Option<(u64, String)> {
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

/// The size, and the reason for it if none was asked for.
fn choose_size(
    job: &CheckJob,
    machine: &Machine,
    account: &Account,
) -> Result<(u64, Option<String>), CheckError> {
    let page = job.backing.map_or(machine.page, Backing::page);
    if let Some(size) = job.size {
        if size == 0 || size % page != 0 {
            let kind = job.backing.map_or("4k", Backing::name);
            return Err(CheckError::Input(format!(
                "a size of {size} bytes is not a multiple of {}, the page of {kind} memory, or is 0",
                Bytes(page)
            )));
        }
        if size > machine.total {
            return Err(CheckError::Input(format!(
                "{} of memory are more than this machine has: {}",
                Bytes(size),
                Bytes(machine.total)
            )));
        }
        let needed = size.saturating_add(account.besides(size, page));
        return match account.room.filter(|room| needed > *room) {
            Some(room) => Err(account.over_limit(size, page, room)),
            None => Ok((size, None)),
        };
    }
    let (mut size, mut reason) = (DEFAULT_SIZE.max(page), "the default".to_owned());
    let mut at_most = |most: u64, why: String| {
        if most < size {
            (size, reason) = (most / page * page, why);
        }
    };
    // Half is left where the limit is as small as 64 KiB, the default for long.
    if let Some(room) = account.room {
        let most = room - account.besides(room, page).max(SPARE).min(room / 2);
        if most < page {
            return Err(account.over_limit(page, page, room));
        }
        let limit = Bytes(account.limits.memlock.unwrap_or(0));
        at_most(
            most,
            format!("the rest of the limit on locked memory ({limit}, RLIMIT_MEMLOCK)"),
        );
    }
    if let Some((most, why)) = most_of_cgroup(machine, job.backing.unwrap_or(Backing::Anon4K)) {
        at_most(most.max(page), why);
    }
    let half = (machine.available / 2).max(page);
    let available = Bytes(machine.available);
    at_most(
        half,
        format!("half of the {available} that the machine has available"),
    );
    Ok((size, Some(reason)))
}

/// Memory that is brought in.
pub(super) fn brought_in(
    backing: Backing,
    size: u64,
    job: &mut Job<'_>,
) -> Result<Mapping, CheckError> {
    let mapping = Mapping::new(backing, size, None).refused("cannot get the memory")?;
    job.go_on()?;
    match mapping.populate(&mut |_| job.ask()) {
        Err(PopulateError::Interrupted { .. }) => Err(CheckError::Interrupted(job.step)),
        populated => populated
            .refused("cannot bring the memory in")
            .map(|_| mapping),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_leaves_room_for_a_piece_that_is_pinned_anew() {
        const MIB: u64 = 1 << 20;
        let machine = Machine::probe().unwrap();
        let chosen = |pieces, room, size| {
            let account = Account {
                counter: Counter::UserLockedVm,
                limits: Limits::read().unwrap(),
                room: Some(room),
                pieces,
            };
            let job = CheckJob {
                size,
                backing: Some(Backing::Anon4K),
                ..CheckJob::default()
            };
            let chosen = choose_size(&job, &machine, &account).ok();
            chosen.map(|(size, _)| size)
        };
        for (pieces, room, size, expected) in [
            (true, 8 * MIB, Some(6 * MIB), Some(6 * MIB)),
            (true, 8 * MIB, Some(7 * MIB), None),
            (true, MIB, Some(MIB / 2), Some(MIB / 2)),
            (true, MIB, Some(MIB - 4096), None),
            (false, 8 * MIB, Some(8 * MIB), Some(8 * MIB)),
            (true, 8 * MIB, None, Some(6 * MIB)),
            (true, 64 << 10, None, Some(32 << 10)),
            (false, 8 * MIB, None, Some(8 * MIB - SPARE)),
            (true, 4096, None, None),
        ] {
            assert_eq!(
                chosen(pieces, room, size),
                expected,
                "{pieces} {room} {size:?}"
            );
        }
    }
}
