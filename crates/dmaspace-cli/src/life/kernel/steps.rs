//! The steps over the kernel's mappings until the address space goes to somebody else.

use std::sync::Arc;

use ioas::{Capability, Tracking, TrackingError, UnmapError, Unsupported};
use iommu::NodeId;
use iopt::{Interruption, Prot};
use runs::{Bytes, Span};

use super::super::LifeError;
use super::super::balloon::{Balloon, seven_of_eight};
use super::super::crew::PAGE;
use super::super::job::{Done, timed};
use super::super::report::{LifeStep, Refused};
use super::super::steps::{Harvest, memory};
use super::interface::place;
use super::{Life, part_bytes};
use crate::map::JobError;

impl From<Unsupported> for Refused {
    fn from(cause: Unsupported) -> Self {
        Self {
            capability: Some(cause.what.name().into()),
            error: cause.to_string(),
        }
    }
}

pub(super) fn all(life: &mut Life<'_>, took: u64) -> Result<(), LifeError> {
    life.step(LifeStep::Memory, |life| {
        Ok(memory(&life.report.memory, took))
    })?;
    life.step(LifeStep::Pin, pin)?;
    life.step(LifeStep::Roots, roots)?;
    life.step(LifeStep::Dma, dma)?;
    life.step(LifeStep::Hole, hole)?;
    life.step(LifeStep::Close, close)?;
    life.step(LifeStep::Track, track)?;
    life.step(LifeStep::Harvest, harvest)?;
    life.step(LifeStep::Merge, merge)?;
    life.step(LifeStep::Inflate, inflate)?;
    life.step(LifeStep::Deflate, deflate)
}

/// Each part in a mapping of its own, which the kernel charges, pins and fills its tables with in one call.
fn pin(life: &mut Life<'_>) -> Result<Done, LifeError> {
    let size = life.report.memory.size_bytes;
    let len = part_bytes(size);
    let steps = life.ledger.steps();
    let (mapped, took_ns) = timed(|| {
        let space = life.space();
        for part in &life.parts {
            for offset in (0..part.guest.len).step_by(len as usize) {
                let (iova, here) = (part.guest.start + offset, Span::new(offset, len));
                space.map(iova, &part.memory, here, Prot::RW, &mut ())?;
            }
        }
        Ok::<_, ioas::MapError>(())
    });
    mapped.map_err(JobError::from)?;
    let (steps, pages) = (life.ledger.steps() - steps, size / PAGE);
    let (charged, kernel) = (life.ledger.in_use() - life.charged, life.kernel()?);
    let runs = life.mappings().len() as u64;
    Ok(Done {
        took_ns,
        runs,
        bytes: size,
        checked: format!("{steps} charges, not {pages}; kernel: {}", Bytes(kernel)),
        right: charged == size && kernel == size,
        ..Done::default()
    })
}

/// Tables for each node, where they are to be, and of two formats: the kernel's are as it makes them.
fn roots(life: &mut Life<'_>) -> Result<Done, LifeError> {
    let second = life.report.memory.parts.last().map_or(0, |part| part.node);
    let (placed, took_ns) = timed(|| place(life.space(), NodeId(second)));
    Ok(Done {
        took_ns,
        checked: "tables unchanged".into(),
        right: placed.is_err(),
        refused: placed.err().map(Refused::from),
        ..Done::default()
    })
}

fn dma(life: &mut Life<'_>) -> Result<Done, LifeError> {
    let begun = life.copying.begin(&life.devices);
    begun.map_err(LifeError::Devices)?;
    let (waited, took_ns) = timed(|| life.first_pass());
    waited?;
    let counts = life.copying.counts();
    Ok(Done::dma(
        took_ns,
        &counts,
        "each device wrote into each part",
    ))
}

/// The page in the middle of the first mapping.
fn middle(life: &Life<'_>) -> Span {
    let len = part_bytes(life.report.memory.size_bytes);
    Span::new(life.range().start + ((len / 2) & !(PAGE - 1)), PAGE)
}

/// Cutting a page out of a mapping, without a moment in which the rest is missing.
fn hole(life: &mut Life<'_>) -> Result<Done, LifeError> {
    let (range, before) = (middle(life), life.mappings());
    let (cut, took_ns) = timed(|| life.space().take_out(range, Interruption::Refused, &mut ()));
    let refused = match cut {
        Err(UnmapError::CutsMapping { cause, .. }) => Some(Refused::from(cause)),
        Err(source) => return Err(LifeError::Cut { range, source }),
        Ok(_) => None,
    };
    life.seen()?;
    Ok(Done {
        took_ns,
        checked: "all reached as before".into(),
        right: refused.is_some() && life.mappings() == before,
        refused,
        ..Done::default()
    })
}

/// Where nothing was cut there is nothing to close, and asking for it changes nothing.
fn close(life: &mut Life<'_>) -> Result<Done, LifeError> {
    let (range, before, kernel) = (middle(life), life.mappings(), life.kernel()?);
    let (back, took_ns) = timed(|| life.space().put_back(range, Interruption::Refused, &mut ()));
    back.map_err(|source| LifeError::PutBack { range, source })?;
    Ok(Done {
        took_ns,
        checked: "nothing was cut: nothing has changed".into(),
        right: life.mappings() == before && life.kernel()? == kernel,
        ..Done::default()
    })
}

/// Splitting leaves for it, which are the kernel's.
fn track(life: &mut Life<'_>) -> Result<Done, LifeError> {
    let tracking = Tracking {
        leaf: Some(PAGE),
        interruption: Interruption::Refused,
    };
    let (tracked, took_ns) = timed(|| life.space().track_dirty(tracking));
    let refused = match tracked {
        Err(TrackingError::Unsupported(cause)) => Some(Refused::from(cause)),
        Err(error) => return Err(error.into()),
        Ok(()) => None,
    };
    life.not_split.clone_from(&refused);
    life.seen()?;
    Ok(Done {
        took_ns,
        checked: "leaves unchanged".into(),
        right: refused.is_some() && !life.space().tracks_dirty(),
        refused,
        ..Done::default()
    })
}

/// Dirty pages in leaves as they are. Where a unit cannot tell, all memory counts as written to.
fn harvest(life: &mut Life<'_>) -> Result<Done, LifeError> {
    life.space().track_dirty(Tracking::default())?;
    life.copying.note_anew(None);
    life.seen()?;
    let size = life.report.memory.size_bytes;
    let found = Harvest::take(&life.space, life.range(), &life.copying)?;
    let can = life.space().capabilities();
    let (refused, checked, right) = match found.blind {
        true => {
            let (what, backend) = (Capability::PageDirty, can.backend);
            let checked = format!("{} count as dirty", Bytes(found.bytes));
            let refused = Refused::from(Unsupported { what, backend });
            (
                Some(refused),
                checked,
                found.bytes == size && !can.page_dirty,
            )
        }
        false => (None, found.checked(), found.more == 0),
    };
    Ok(Done {
        took_ns: found.took_ns,
        runs: found.runs.len() as u64,
        bytes: found.bytes,
        checked,
        right: right && found.missed == 0,
        refused,
        ..Done::default()
    })
}

/// Tracking ends. What was not split cannot be merged.
fn merge(life: &mut Life<'_>) -> Result<Done, LifeError> {
    let before = life.mappings();
    let ((), took_ns) = timed(|| life.space().untrack_dirty());
    life.seen()?;
    Ok(Done {
        took_ns,
        checked: "nothing to merge".into(),
        right: life.mappings() == before && !life.space().tracks_dirty(),
        refused: life.not_split.take(),
        ..Done::default()
    })
}

fn inflate(life: &mut Life<'_>) -> Result<Done, LifeError> {
    let mut balloon = Balloon::new(&life.parts, Arc::clone(&life.space))?;
    let ballooned = seven_of_eight(&life.parts);
    let bytes: u64 = ballooned.iter().map(|span| span.len).sum();
    life.copying.moving(&ballooned);
    let (discarded, took_ns) = timed(|| balloon.inflate());
    let discarded = discarded?;
    let kernel = life.kernel()?;
    for range in &discarded {
        life.copying.discarded(*range);
    }
    life.copying.open();
    life.seen()?;
    let counters = balloon.counters();
    life.balloon = Some(balloon);
    let size = life.report.memory.size_bytes;
    let charged = life.ledger.in_use() - life.charged;
    Ok(Done {
        took_ns,
        runs: counters.discards,
        bytes: counters.discarded,
        checked: format!(
            "{} still pinned; messages: {}",
            Bytes(kernel),
            counters.chains
        ),
        // The charge is kept, so that the memory can come back.
        right: counters.discarded == bytes && kernel == size - bytes && charged == size,
        ..Done::default()
    })
}

fn deflate(life: &mut Life<'_>) -> Result<Done, LifeError> {
    let Some(mut balloon) = life.balloon.take() else {
        return Ok(Done::default());
    };
    let ballooned = seven_of_eight(&life.parts);
    life.copying.moving(&ballooned);
    let (back, took_ns) = timed(|| balloon.deflate());
    back?;
    life.copying.closed();
    life.everywhere()?;
    let (counters, kernel) = (balloon.counters(), life.kernel()?);
    let runs = life.mappings().len() as u64;
    Ok(Done {
        took_ns,
        runs,
        bytes: counters.deflated,
        checked: format!("{} pinned again, zeros found", Bytes(kernel)),
        right: kernel == life.report.memory.size_bytes && counters.not_restored == 0,
        ..Done::default()
    })
}
