//! Taking an address space over from another process: see [`Handover`].

use alloc::boxed::Box;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::fmt;

use iommu::{DeviceId, DomainId, Unit};
use iopt::{AnyTable, Prot, Root};
use runs::{Iova, Offset, Pa, Span};

use super::domain::Member;
use super::handover::{HandedArea, Handover};
use super::{BuildDomain, Domain, Own};
use crate::areas::Areas;
use crate::areas::area::{Area, HeldArea};
use crate::memory::{Hold, Memory};
use crate::space::Ioas;
use crate::space::choice::in_order;
use crate::space::dirty_log::DirtyLog;
use crate::space::error::MapError;

/// A domain's table, and its devices with their units.
pub type TakenDomain = (AnyTable, Vec<(Arc<dyn Unit>, DeviceId)>);

/// Failure to take an address space over. Nothing is pinned or charged for it here, and no table
/// has changed.
#[derive(Debug)]
#[non_exhaustive]
pub enum TakeOverError {
    /// There are not as many tables as domains.
    Domains {
        /// Domains.
        described: usize,
        /// Tables.
        given: usize,
    },
    /// A table is not the one of its domain.
    Table {
        /// The domain's.
        described: Root,
        /// Root of the given table.
        given: Root,
    },
    /// A device of a domain was left out.
    Device {
        /// The domain.
        domain: DomainId,
        /// The device.
        device: DeviceId,
    },
    /// An area overlaps another one, is no part of its memory, or is empty.
    Area(HandedArea),
    /// A range in which addresses are chosen, or to which devices have written, is empty or ends beyond
    /// 2^64, or one of the former overlaps another.
    Range {
        /// The range.
        range: Span<Iova>,
    },
    /// An area's memory cannot be charged or pinned, or its runs are not found.
    Hold {
        /// The area.
        area: Span<Iova>,
        /// Cause.
        cause: MapError,
    },
    /// A leaf leads to other memory than what was pinned.
    Differs {
        /// The domain.
        domain: DomainId,
        /// The device address.
        iova: u64,
        /// Address and access in the table; `None` when nothing is mapped.
        table: Option<(u64, Prot)>,
        /// Address of the memory, and access of the area.
        memory: (u64, Prot),
    },
    /// A table maps more than the areas.
    More {
        /// The domain.
        domain: DomainId,
        /// Bytes that its table maps.
        mapped: u64,
        /// Bytes of the areas that are not out.
        areas: u64,
    },
}

impl fmt::Display for TakeOverError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Domains { described, given } => {
                write!(f, "{given} tables were given for {described} domains")
            }
            Self::Table { described, given } => write!(
                f,
                "the table {} of {} levels at {:#x} was given for {} of {} levels at {:#x}",
                given.format,
                given.levels,
                given.address,
                described.format,
                described.levels,
                described.address
            ),
            Self::Device { domain, device } => {
                write!(f, "{device} of domain {} was left out", domain.0)
            }
            Self::Area(area) => write!(
                f,
                "the area {} is no part of memory {} from {:#x} on, or overlaps another one",
                area.range, area.memory, area.offset
            ),
            Self::Range { range } => write!(
                f,
                "the allowed or dirty range {range} is empty, or overlaps another one"
            ),
            Self::Hold { area, .. } => write!(f, "the area {area} cannot be held"),
            Self::Differs {
                domain,
                iova,
                table,
                memory: (pa, prot),
            } => {
                write!(f, "domain {} maps {iova:#x} ", domain.0)?;
                match table {
                    Some((pa, prot)) => write!(f, "to {pa:#x} ({prot})")?,
                    None => f.write_str("to nothing")?,
                }
                write!(f, ", and the memory is at {pa:#x} ({prot})")
            }
            Self::More {
                domain,
                mapped,
                areas,
            } => write!(
                f,
                "domain {} maps {mapped:#x} bytes, and the areas have {areas:#x}",
                domain.0
            ),
        }
    }
}

impl core::error::Error for TakeOverError {
    fn source(&self) -> Option<&(dyn core::error::Error + 'static)> {
        match self {
            Self::Hold { cause, .. } => Some(cause),
            _ => None,
        }
    }
}

impl Ioas {
    /// Takes over what another process [hands over](Self::hand_over): `memories` in the same order,
    /// and for each domain in order its table, as it was [adopted](AnyTable::adopt), and its devices,
    /// which go on as they are. Domains for further devices are built by `builder`, whose numbers must
    /// not be those of the domains ([`DomainIds::claim`](crate::DomainIds::claim)).
    ///
    /// When it returns, the memory of all areas is pinned, and charged to the memories' ledgers, and
    /// is what the tables lead to. The other process may give up now; before that nothing must be
    /// changed here. Listeners, users of pins and how to flush are not handed over: they are set anew.
    ///
    /// # Errors
    ///
    /// See [`TakeOverError`]. The other process goes on then.
    pub fn adopt(
        handover: &Handover,
        memories: &[Arc<Memory>],
        tables: Vec<TakenDomain>,
        builder: Option<Box<dyn BuildDomain>>,
    ) -> Result<Self, TakeOverError> {
        // Domains join an address space only after all checks: dropped, an address space would detach their devices.
        let mut domains = taken_domains(handover, tables)?;
        let checked = |ranges: &[Span<Iova>]| {
            in_order(ranges).map_err(|range| TakeOverError::Range { range })
        };
        let allowed = checked(&handover.allowed)?;
        // In no order, and a range may be there twice.
        let ill = |range: &&Span<Iova>| Span::<Iova>::checked(range.start, range.len).is_none();
        if let Some(range) = handover.written.iter().find(ill) {
            return Err(TakeOverError::Range { range: *range });
        }
        let mut areas = taken_areas(handover, memories)?;
        if !domains.is_empty() {
            let charged = areas.charge_released(None);
            areas.keep(charged.map_err(|(area, cause)| TakeOverError::Hold { area, cause })?);
            areas.0.try_for_each_mut(0, u64::MAX, |range, area| {
                if !area.is_there() {
                    return Ok(());
                }
                let hold = area.memory.hold(area.part(), &mut ());
                let hold = hold.map_err(|cause| TakeOverError::Hold { area: range, cause })?;
                domains
                    .iter()
                    .try_for_each(|domain| compare(domain, area, &hold))?;
                area.hold = Some(hold);
                Ok(())
            })?;
        }
        for area in areas.iter().filter(|area| area.released) {
            for domain in &mut domains {
                let kept = domain.spare.get_mut().add(area.range, &domain.table);
                kept.map_err(|cause| TakeOverError::Hold {
                    area: area.range,
                    cause: MapError::Table(cause),
                })?;
            }
        }
        let held = areas.iter().filter(|area| area.is_there());
        let bytes = held.fold(0u64, |sum, area| sum.saturating_add(area.range.len));
        for domain in &mut domains {
            let mapped = domain.table.leaf_sizes().total().bytes;
            if mapped != bytes {
                return Err(TakeOverError::More {
                    domain: domain.id,
                    mapped,
                    areas: bytes,
                });
            }
            if handover.tracking.is_some() {
                domain.track();
            }
        }
        let mut own = Own::new(None, builder);
        for domain in &domains {
            for Member { unit, device, .. } in &domain.devices.0 {
                let reserved = &mut own.reserved;
                unit.reserved(*device, &mut |span| {
                    if !span.is_empty() {
                        reserved.push((*device, span));
                    }
                });
            }
        }
        own.domains = domains;
        *own.written.get_mut() = DirtyLog::of(&handover.written);
        own.kept = handover.kept;
        let mut space = Self::over_backend(own);
        space.state.get_mut().areas = areas;
        let core = space.gate.get_mut();
        core.allowed = allowed;
        core.tracking = handover.tracking;
        space.externals.track(handover.tracking.is_some());
        Ok(space)
    }
}

/// The domains, each with its table and its devices.
fn taken_domains(
    handover: &Handover,
    tables: Vec<TakenDomain>,
) -> Result<Vec<Domain>, TakeOverError> {
    let (described, given) = (handover.domains.len(), tables.len());
    if described != given {
        return Err(TakeOverError::Domains { described, given });
    }
    let mut domains = Vec::with_capacity(given);
    for (handed, (table, devices)) in handover.domains.iter().zip(tables) {
        let (described, given) = (handed.root, table.root());
        if described != given {
            return Err(TakeOverError::Table { described, given });
        }
        for device in &handed.devices {
            if !devices.iter().any(|(_, given)| given == device) {
                let (domain, device) = (handed.id, *device);
                return Err(TakeOverError::Device { domain, device });
            }
        }
        let mut domain = Domain::new(handed.id, table, handed.coherent);
        let member = |(unit, device)| Member {
            unit,
            device,
            near: None,
        };
        domain.devices.0 = devices.into_iter().map(member).collect();
        domains.push(domain);
    }
    Ok(domains)
}

/// The areas, not held yet.
fn taken_areas(handover: &Handover, memories: &[Arc<Memory>]) -> Result<Areas, TakeOverError> {
    let mut areas = Areas::default();
    for handed in &handover.areas {
        let wrong = || TakeOverError::Area(*handed);
        let memory = memories.get(handed.memory).ok_or_else(wrong)?;
        let range = Span::checked(handed.range.start, handed.range.len).ok_or_else(wrong)?;
        let part = Span::<Offset>::checked(handed.offset, range.len).ok_or_else(wrong)?;
        if range.is_empty() || !Span::new(0, memory.len()).covers(&part) {
            return Err(wrong());
        }
        let area = Area {
            range,
            memory: Arc::clone(memory),
            offset: handed.offset,
            prot: handed.prot,
            out: handed.out,
            released: handed.released,
            cut: handed.cut,
        };
        areas.insert(area.into()).map_err(|_| wrong())?;
    }
    Ok(areas)
}

/// Refuses a table that does not lead exactly where the memory of `area` is, which `hold` holds.
fn compare(domain: &Domain, area: &HeldArea, hold: &Hold) -> Result<(), TakeOverError> {
    let prot = domain.prot(area.prot, area.memory.object().is_mmio());
    let range = area.range;
    let failed = |cause| TakeOverError::Hold { area: range, cause };
    let mut batch = [Span::default(); 64];
    let mut found = 0u64;
    hold.with_runs(area.part(), |reader| {
        loop {
            let room = batch.len();
            let count = reader.next_batch(&mut batch);
            let count = count.map_err(|cause| failed(MapError::Runs(cause)))?;
            let runs = batch.get(..count);
            for run in runs.ok_or(failed(MapError::BatchTooLong { count, room }))? {
                let next = found.saturating_add(run.len);
                if run.is_empty() || next > range.len {
                    let (pinned, found) = (range.len, next);
                    return Err(failed(MapError::RunsDiffer { pinned, found }));
                }
                same(domain, range.start + found, *run, prot)?;
                found = next;
            }
            if count == 0 {
                let pinned = range.len;
                let differ = || failed(MapError::RunsDiffer { pinned, found });
                return (found == pinned).then_some(()).ok_or_else(differ);
            }
        }
    })
}

/// Refuses a table that does not lead from `iova` on to `run`.
fn same(domain: &Domain, iova: u64, run: Span<Pa>, prot: Prot) -> Result<(), TakeOverError> {
    let last = run.len - 1;
    // Bytes that lead there.
    let mut done = Some(0);
    let mut wrong = None;
    domain
        .table
        .for_each_leaf(Span::new(iova, run.len), |leaf| {
            let Some(offset) = done.filter(|_| wrong.is_none()) else {
                return;
            };
            let here = leaf.run.iova.max(iova);
            let leads_to = leaf.run.pa + (here - leaf.run.iova);
            if here - iova != offset
                || leads_to != run.start.wrapping_add(offset)
                || differ(leaf.prot, prot)
            {
                let found = (here - iova == offset).then_some((leads_to, leaf.prot));
                wrong = Some((offset, found));
                return;
            }
            let end = leaf.run.input().last() - iova;
            done = (end < last).then_some(end + 1);
        });
    // A hole at the end.
    let wrong = wrong.or(done.map(|offset| (offset, None)));
    wrong.map_or(Ok(()), |(offset, table)| {
        Err(TakeOverError::Differs {
            domain: domain.id,
            iova: iova + offset,
            table,
            memory: (run.start.wrapping_add(offset), prot),
        })
    })
}

/// Returns true if a leaf grants other access than requested: for reading and writing, which every format can say.
fn differ(leaf: Prot, asked: Prot) -> bool {
    (leaf ^ asked).intersects(Prot::RW)
}
