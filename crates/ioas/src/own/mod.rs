//! The own back end: domains with tables of ours, and the pins behind them.
//!
//! The rule that this module keeps: **no memory is unpinned that a device can still reach.** Memory
//! leaves by one of two ways only.
//!
//! * Its entries are emptied in every domain's table, its hold is *retired*, and only when every
//!   domain has been flushed is it released. Until then its ranges stay in the domains' gathers, and
//!   its hold among the retired, over failed flushes too.
//! * Every device is detached, as when the whole address space is dropped. If a unit does not
//!   release a device, the memory is never unpinned: a leak is harmless, DMA into memory that belongs to
//!   another owner is not.
//!
//! Areas are pinned and mapped for as long as there is a domain. The first domain to come maps all
//! of them, the last to go unpins all of them; the areas themselves stay. So a device that is plugged
//! in again finds its mappings, and an address space can be set up before there is hardware. A domain
//! that the caller has built stays.
//!
//! A unit joins a domain whose format and page sizes it walks, and whose units answer as it does
//! whether DMA is forced to be coherent. If there is none, a new domain is built, and all areas are
//! mapped in it before the device is attached, all or nothing.
//!
//! Domains come and go while no other operation is under way. Others map and unmap at once, each in all
//! domains: they are given ranges that are disjoint.

mod backend;
mod build;
mod domain;
mod encoding;
mod fault;
mod fill;
mod handover;
#[cfg(feature = "linux")]
pub(crate) mod software;
mod space;
mod spare;
mod take_over;
mod unit;

use alloc::boxed::Box;
use alloc::vec;
use alloc::vec::Vec;
use core::convert::Infallible;
use core::fmt;
use core::iter;
use core::slice;

use iommu::{DeviceId, DomainId};
use iopt::AnyTable;
use runs::{Iova, Pa, Span};

pub use build::{BuildDomain, DomainIds, TableBuilder, TableBuilderError};
pub use encoding::DecodeError;
pub use fault::{FaultPlace, SpaceFault};
pub use handover::{HandOverError, HandedArea, HandedDomain, Handover, Leaving};
pub use take_over::{TakeOverError, TakenDomain};
pub use unit::Iommu;

pub(crate) use domain::{Devices, Domain, Member, detach};
pub(crate) use fill::{Fill, Leaves, map as map_runs};

use crate::areas::Areas;
use crate::areas::area::HeldArea;
use crate::lock::Mutex;
use crate::observer::Observer;
use crate::space::dirty_log::DirtyLog;
use crate::space::error::{AttachError, DetachError, MapError};
use crate::space::flush::Retired;
use crate::space::placement::{Placement, home};
use crate::space::reservation::ForReleased;

/// Spans in a batch: 64 KiB.
const BATCH: usize = 4096;

/// The own back end: tables of ours in domains, which units walk, and memory that is pinned by us.
pub(crate) struct Own {
    pub(crate) domains: Vec<Domain>,
    /// The first domain stays without devices.
    kept: bool,
    builder: Mutex<Option<Box<dyn BuildDomain>>>,
    pub(crate) placement: Placement,
    /// Writes in domains that have ended, and possible writes of devices that have left.
    written: Mutex<DirtyLog>,
    /// Ranges that devices cannot translate, with the device.
    reserved: Vec<(DeviceId, Span<Iova>)>,
    batches: Batches,
}

/// Room for runs on their way from a pin to tables: there are as many as there were threads at once.
struct Batches(Mutex<Vec<Box<[Span<Pa>]>>>);

impl Batches {
    fn with<T>(&self, work: impl FnOnce(&mut [Span<Pa>]) -> T) -> T {
        let spare = self.0.lock().pop();
        let mut batch = spare.unwrap_or_else(|| vec![Span::default(); BATCH].into_boxed_slice());
        let result = work(&mut batch);
        self.0.lock().push(batch);
        result
    }
}

impl fmt::Debug for Own {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Own")
            .field("domains", &self.domains.len())
            .finish_non_exhaustive()
    }
}

impl Own {
    pub(crate) fn new(
        kept: Option<(DomainId, AnyTable)>,
        builder: Option<Box<dyn BuildDomain>>,
    ) -> Self {
        Self {
            kept: kept.is_some(),
            domains: match kept {
                Some((id, table)) => vec![Domain::new(id, table, None)],
                None => Vec::new(),
            },
            builder: Mutex::new(builder),
            placement: Placement::default(),
            written: Mutex::default(),
            reserved: Vec::new(),
            batches: Batches(Mutex::new(vec![
                vec![Span::default(); BATCH].into_boxed_slice(),
            ])),
        }
    }

    /// Lets a device into a domain that suits its unit, or into a new one.
    fn attach_member(
        &mut self,
        member: Member,
        dirty: bool,
        areas: &mut Areas,
    ) -> Result<(), AttachError> {
        let Member { unit, device, .. } = &member;
        let device = *device;
        let mut reserved = Vec::new();
        unit.reserved(device, &mut |span| {
            if !span.is_empty() {
                reserved.push((device, span));
            }
        });
        for (_, span) in &reserved {
            if let Some((area, _)) = areas.0.first_overlap(span.start, span.last()) {
                let reserved = *span;
                return Err(AttachError::Reserved { area, reserved });
            }
        }
        self.enter(member, dirty, areas)?;
        self.reserved.append(&mut reserved);
        Ok(())
    }

    fn enter(&mut self, member: Member, dirty: bool, areas: &mut Areas) -> Result<(), AttachError> {
        let Member { unit, device, near } = &member;
        let (device, home) = (*device, home(&**unit, *near));
        let mut refused = None;
        for domain in &mut self.domains {
            let suits = domain.suits(&**unit, dirty) && self.placement.joins(domain.node(), home);
            // A table that the caller has built is tried in any case: the unit says what is wrong.
            if domain.coherent.is_some() && !suits {
                continue;
            }
            match unit.attach(device, domain.id, domain.table.root()) {
                Ok(()) => {
                    domain.devices.0.push(member);
                    return Ok(());
                }
                // The device stays where it was, and no other domain could have it.
                Err(cause @ iommu::UnitAttachError::AlreadyAttached { .. }) => {
                    return Err(AttachError::Unit(cause));
                }
                Err(cause) if is_endless(&cause) => {
                    if detach(&**unit, device).is_err() {
                        domain.devices.0.push(member);
                    }
                    return Err(AttachError::Unit(cause));
                }
                Err(cause) => refused = refused.or(Some(cause)),
            }
        }
        let Some(builder) = self.builder.get_mut() else {
            return Err(refused.map_or(AttachError::NoDomain { device }, AttachError::Unit));
        };
        let node = self.placement.tables(home);
        let built = builder.build(&**unit, dirty, node);
        let (id, table) = built.map_err(AttachError::Build)?;
        let coherent = Some(unit.capabilities().snoop_control);
        let mut domain = Domain::new(id, table, coherent);
        domain.tables_on = node;
        if dirty {
            domain.track();
        }
        let first = self.domains.is_empty();
        let charged = match first {
            true => areas.charge_released(None),
            false => Ok(ForReleased::default()),
        };
        let charged = charged.map_err(|(area, cause)| AttachError::Replay { area, cause });
        let attached = charged.and_then(|charged| {
            replay(&mut domain, &self.batches, areas)?;
            match unit.attach(device, id, domain.table.root()) {
                Ok(()) => Ok((charged, Ok(()))),
                Err(cause) if is_endless(&cause) && detach(&**unit, device).is_err() => {
                    Ok((charged, Err(AttachError::Unit(cause))))
                }
                Err(cause) => Err(AttachError::Unit(cause)),
            }
        });
        match attached {
            Ok((charged, result)) => {
                areas.keep(charged);
                domain.devices.0.push(member);
                self.domains.push(domain);
                result
            }
            Err(cause) => {
                domain.end();
                builder.ended(id);
                if first {
                    unpin(areas);
                }
                Err(cause)
            }
        }
    }

    /// Takes `device` out of its domain, the first one if several have a device of that name. A domain
    /// without devices ends, and with the last one the pins of all areas. While it is tracked what is
    /// dirty, what the device could write without leaving a trace is noted.
    fn detach_device(
        &mut self,
        device: DeviceId,
        dirty: bool,
        areas: &mut Areas,
        retired: &Retired,
    ) -> Result<(), DetachError> {
        let mut found = None;
        for (place, domain) in self.domains.iter_mut().enumerate() {
            if let Some(detached) = domain.detach(device) {
                found = Some((place, detached?));
                break;
            }
        }
        let (place, blind) = found.ok_or(DetachError::NotAttached { device })?;
        if dirty && blind {
            let reached = areas.iter().filter(|area| area.is_written());
            let written = self.written.get_mut();
            reached.for_each(|area| written.add_unseen(area.range));
        }
        self.end_if_left(place, areas, retired);
        if self.devices().all(|other| other != device) {
            self.reserved.retain(|(whose, _)| *whose != device);
        }
        Ok(())
    }

    /// Ranges that devices have written to, or could, that are in no table.
    fn written(&mut self) -> Vec<Span<Iova>> {
        let of_domains = self.domains.iter_mut().map(|domain| &mut domain.written);
        let all = of_domains.chain(iter::once(&mut self.written));
        all.flat_map(|written| written.get_mut().ranges()).collect()
    }

    /// The attached devices.
    fn devices(&self) -> impl Iterator<Item = DeviceId> + '_ {
        let domains = self.domains.iter();
        domains.flat_map(|domain| domain.devices.0.iter().map(|member| member.device))
    }

    fn end_if_left(&mut self, place: usize, areas: &mut Areas, retired: &Retired) {
        if !self.domains[place].devices.0.is_empty() || (self.kept && place == 0) {
            return;
        }
        let domain = self.domains.remove(place);
        let id = domain.id;
        self.written.get_mut().append(&domain.end());
        if let Some(builder) = self.builder.get_mut() {
            builder.ended(id);
        }
        if self.domains.is_empty() {
            unpin(areas);
            // No device is left that could reach it. Who is in this process is waited for.
            let _ = retired.settle(self);
        }
    }

    /// Detaches every device that its unit releases. The error is that of the first one that stays.
    fn detach_all(&mut self, areas: &mut Areas, retired: &Retired) -> Result<(), DetachError> {
        let mut result = Ok(());
        for place in (0..self.domains.len()).rev() {
            result = self.domains[place].devices.detach_all().and(result);
            self.end_if_left(place, areas, retired);
        }
        result
    }
}

/// True when the unit has not come to the end of an attach: it counts the device as a member of the domain until a
/// detach succeeds, and may use the domain's number and table.
const fn is_endless(cause: &iommu::UnitAttachError) -> bool {
    use iommu::UnitAttachError::{TimedOut, Unit};
    matches!(cause, TimedOut { .. } | Unit { .. })
}

/// Fills the tables of `domains` with an area that is held. Also says how many bytes of it are in them,
/// after an error too.
fn fill(
    domains: &[Domain],
    batches: &Batches,
    area: &HeldArea,
    observer: &mut dyn Observer,
) -> (Result<(), MapError>, u64) {
    let Some(hold) = &area.hold else {
        return (Ok(()), 0);
    };
    batches.with(|batch| {
        let mut fill = Fill::new(domains, batch, area.range, Leaves::of(area));
        let result = hold.with_runs(area.part(), |runs| fill.stream(runs, observer));
        (result, fill.mapped)
    })
}

/// Maps all areas in a domain that no device sees yet. Areas that nothing holds are pinned for it.
fn replay(domain: &mut Domain, batches: &Batches, areas: &mut Areas) -> Result<(), AttachError> {
    areas.0.try_for_each_mut(0, u64::MAX, |range, area| {
        let failed = |cause| AttachError::Replay { area: range, cause };
        if area.released {
            let kept = domain.spare.get_mut().add(range, &domain.table);
            kept.map_err(|cause| failed(MapError::Table(cause)))?;
        }
        if !area.is_there() {
            return Ok(());
        }
        if area.hold.is_none() {
            area.hold = Some(area.memory.hold(area.part(), &mut ()).map_err(failed)?);
        }
        let (filled, _) = fill(slice::from_ref(domain), batches, area, &mut ());
        filled.map_err(failed)
    })
}

/// Releases the memory of all areas, which no domain maps.
fn unpin(areas: &mut Areas) {
    let Ok(()) = areas.0.try_for_each_mut(0, u64::MAX, |_, area| {
        area.hold = None;
        area.reserved = None;
        Ok::<_, Infallible>(())
    });
}
