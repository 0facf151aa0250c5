//! The memory of a life: how much, of which pages, and on which nodes.

use std::ops::ControlFlow;
use std::sync::Arc;

use hostmem::{Backing, Machine, Mapping};
use runs::Bytes;
use scenario::{PARTS, nodes};

use super::report::{LifeMemory, PartReport};
use super::{LifeError, LifeJob};
use crate::map::JobError;
use crate::map::memory::{RAISE, check_cgroups, check_total, most_of_cgroup};
use hostmem::KeptPool;

/// Memory without a word about its size.
const DEFAULT_SIZE: u64 = 256 << 20;
/// What is left of the limit on locked memory: rings of io_uring are charged to it too.
const SPARE: u64 = 256 << 10;

/// The memory, all of it there.
pub(super) struct Taken {
    /// A memory file for each node.
    pub(super) mappings: Vec<Arc<Mapping>>,
    /// The nodes, and where what is for them can lie: a planned node has no memory.
    pub(super) nodes: [(u32, Option<u32>); 2],
    pub(super) backing: Backing,
    /// Huge pages that were free before, of the memory's kind.
    pub(super) free: u64,
}

/// Free huge pages of this kind that nobody has reserved.
pub(super) fn free_pages(backing: Backing) -> u64 {
    let pool = backing.huge_size().and_then(hostmem::Pool::read);
    pool.map_or(0, |pool| pool.unreserved())
}

/// The backing that was asked for, or that with the largest pages that are free.
fn choose_backing(job: &LifeJob, size: u64, machine: &Machine) -> Result<Backing, LifeError> {
    let Some(backing) = job.backing else {
        let huge = [Backing::Hugetlb1G, Backing::Hugetlb2M];
        let fits = |backing: &Backing| {
            let pool = backing.huge_size().and_then(|size| machine.pool(size));
            let free = pool.map_or(0, |pool| pool.unreserved());
            size % (PARTS * backing.page()) == 0
                && free >= size / backing.page()
                && machine.cgroup_below(*backing, size).is_none()
        };
        return Ok(huge.into_iter().find(fits).unwrap_or(Backing::Memfd));
    };
    match backing {
        Backing::Anon4K | Backing::Thp => Err(LifeError::Input(format!(
            "{backing} memory cannot go to a second process: memfd, hugetlb-2m and hugetlb-1g can"
        ))),
        backing => Ok(backing),
    }
}

/// The size, and why it is that when nobody asked for one.
fn choose_size(
    job: &LifeJob,
    room: Option<u64>,
    machine: &Machine,
) -> Result<(u64, Option<String>), LifeError> {
    // Both owners have it pinned for a while.
    let most = room.map(|room| room.saturating_sub(SPARE) / 2);
    let page = job.backing.map_or(4096, Backing::page);
    let unit = PARTS * page;
    let Some(size) = job.size else {
        let most = most.unwrap_or(u64::MAX).min(DEFAULT_SIZE.max(unit));
        let cgroup = most_of_cgroup(machine, job.backing.unwrap_or(Backing::Memfd));
        let (most, reason) = match cgroup.filter(|(left, _)| *left < most) {
            // Where that is too little, the refusal says so.
            Some((left, reason)) => (left.max(unit).min(most), reason),
            None if most == DEFAULT_SIZE => (most, "the default".into()),
            None => {
                let reason = "what the limit on locked memory, or the page, allows";
                (most, reason.into())
            }
        };
        // Not an odd size: a power of two.
        let size = most.checked_ilog2().map_or(0, |log2| 1 << log2);
        if size < unit {
            return Err(LifeError::Input(format!(
                "the limit on locked memory leaves {} for two owners, and {} are needed; {RAISE}",
                Bytes(most),
                Bytes(unit)
            )));
        }
        return Ok((size, Some(reason)));
    };
    if size == 0 || size % unit != 0 {
        return Err(LifeError::Input(format!(
            "a size of {size} bytes is not 16 equal parts of whole pages, multiples of {}, or is 0",
            Bytes(unit)
        )));
    }
    if let Some(most) = most.filter(|most| size > *most) {
        return Err(LifeError::Input(format!(
            "{} are more than the limit on locked memory leaves for two owners: {}; {RAISE}",
            Bytes(size),
            Bytes(most)
        )));
    }
    Ok((size, None))
}

/// Takes the memory of which `room` may be locked, and brings it in. The pool of huge pages is put back when
/// it is dropped, if it is dropped last.
pub(super) fn take(
    job: &LifeJob,
    room: Option<u64>,
    report: &mut LifeMemory,
    on: &mut dyn FnMut() -> ControlFlow<()>,
) -> Result<(Taken, Option<KeptPool>), LifeError> {
    let machine = Machine::probe().map_err(JobError::from)?;
    check_total(&machine, job.size.unwrap_or(0))?;
    let (size, reason) = choose_size(job, room, &machine)?;
    let backing = choose_backing(job, size, &machine)?;
    check_cgroups(&machine, backing, size)?;
    let free = free_pages(backing);
    let pool = match (job.backing, backing.huge_size()) {
        (Some(_), Some(page)) => Some(KeptPool::raise(page, size, on).map_err(JobError::from)?),
        _ => None,
    };
    let first = machine.nodes.first().copied().unwrap_or(0);
    let second = machine.nodes.get(1).copied().unwrap_or(first + 1);
    // A planned node has no memory: what is for it lies on the first.
    let at = |node: u32| (node, machine.nodes.contains(&node).then_some(node));
    let wanted = [at(first), at(second)];
    let mut mappings = Vec::new();
    for (node, at) in wanted {
        let mapping = Mapping::new(backing, size / 2, at).map_err(JobError::Mapping)?;
        mapping.populate(&mut |_| on()).map_err(JobError::from)?;
        report.parts.push(PartReport {
            node,
            size_bytes: size / 2,
            nodes: nodes(&mapping).map_err(JobError::from)?,
        });
        mappings.push(Arc::new(mapping));
    }
    report.size_bytes = size;
    report.size_reason = reason;
    report.backing = backing.name().into();
    report.second_node_planned = machine.nodes.len() < 2;
    let taken = Taken {
        mappings,
        nodes: wanted,
        backing,
        free,
    };
    Ok((taken, pool))
}
