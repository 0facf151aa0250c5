//! The end of a life: the address space goes to a second process, which ends it.

use std::os::fd::AsRawFd;

use hostmem::Mapping;
use runs::Span;

use super::job::{Done, Life, timed};
use super::memory::free_pages;
use super::report::{Band, BandState, Left, LifeReport, LifeStep};
use super::successor::{Devices as Hardware, Second, SuccessorError};
use super::{LifeError, LifeJob};
use crate::map::Counted;
use crate::map::memory::counted;
use hostmem::KeptPool;

/// Where another process finds a memory file of this one.
pub(super) fn path(mapping: &Mapping) -> String {
    let fd = mapping.fd().map_or(-1, |fd| fd.as_raw_fd());
    format!("/proc/{}/fd/{fd}", std::process::id())
}

pub(super) fn all(life: &mut Life<'_>, job: &LifeJob) -> Result<(), LifeError> {
    life.step(LifeStep::HandOver, |life| hand_over(life, job))?;
    life.step(LifeStep::Successor, successor)
}

fn hand_over(life: &mut Life<'_>, job: &LifeJob) -> Result<Done, LifeError> {
    // The second process stores to no table when it takes over.
    life.told = Some(life.roots());
    let started = std::time::Instant::now();
    let mut second = Second::start(&job.successor)?;
    let begun = &life.begun;
    let memories: Vec<_> = begun.parts.iter().map(|part| part.memory.clone()).collect();
    let tables = begun.space.tables(|_, table| table.tables());
    let tables = tables.iter().sum();
    let leaving = begun.space.hand_over(&memories)?;
    let mut items = Vec::new();
    for (part, base) in begun.parts.iter().zip(&begun.bases) {
        let base = base.map_or(String::new(), |base| format!(" {base}"));
        items.push(format!("memory {}{base}", path(&part.mapping)));
    }
    for tables in &begun.tables {
        items.push(format!("tables {} {}", path(&tables.file), tables.base));
    }
    items.push(format!("handover {}", leaving.handover()));
    second.describe(&items)?;
    let hardware = Hardware {
        units: &begun.units,
        physical: &begun.physical,
    };
    let adopted = second.serve(hardware, "adopted")?;
    if !begun.physical.same() {
        return Err(SuccessorError::OtherFrames.into());
    }
    let unpinned = leaving.give_up().map_err(LifeError::GiveUp)?;
    second.answer("ok")?;
    let took_ns = crate::map::clock::nanoseconds(started);
    life.second = Some(second);
    life.everywhere()?;
    let (size, charged) = (life.report.memory.size_bytes, adopted.first().copied());
    let ours = life.begun.ledger.in_use() - life.begun.charged;
    let kernel = counted()?.since(life.begun.counted);
    Ok(Done {
        took_ns,
        runs: life.begun.physical.runs_of_successor(),
        bytes: unpinned,
        tables: Some(tables),
        checked: "pinned by both, then by it alone".into(),
        right: unpinned == size
            && charged == Some(size)
            && ours == 0
            && kernel == Counted::default(),
        ..Done::default()
    })
}

/// The second process cuts a hole and closes it; devices are told what to expect.
fn successor(life: &mut Life<'_>) -> Result<Done, LifeError> {
    let Some(mut second) = life.second.take() else {
        return Ok(Done::default());
    };
    let unexpected = |numbers: &[u64]| SuccessorError::Unexpected {
        line: format!("{numbers:?}"),
    };
    let opening = second.serve(life.hardware(), "opening")?;
    let [start, len] = *opening.as_slice() else {
        return Err(unexpected(&opening).into());
    };
    let hole = Span::new(start, len);
    life.devices.moving(&[hole]);
    let started = std::time::Instant::now();
    second.answer("ok")?;
    second.serve(life.hardware(), "opened")?;
    let cut_ns = crate::map::clock::nanoseconds(started);
    life.devices.open();
    life.seen()?;
    second.answer("ok")?;
    second.serve(life.hardware(), "closing")?;
    life.devices.moving(&[hole]);
    let (closed, close_ns) = timed(|| {
        second.answer("ok")?;
        second.serve(life.hardware(), "closed")
    });
    let closed = closed?;
    life.devices.closed();
    life.seen()?;
    second.answer("ok")?;
    let told = second.serve(life.hardware(), "bands")?;
    life.told = Some(drawn(&told));
    second.answer("ok")?;
    life.second = Some(second);
    Ok(Done {
        took_ns: cut_ns + close_ns,
        runs: 2,
        bytes: hole.len,
        tables: closed.first().copied(),
        checked: "its own hole cut and closed".into(),
        right: hole.len == super::crew::PAGE,
        ..Done::default()
    })
}

/// The roots, of which the second process has told: numbers in fours.
fn drawn(told: &[u64]) -> Vec<Vec<Band>> {
    let mut roots: Vec<Vec<Band>> = Vec::new();
    for [root, iova, len_bytes, leaf_bytes] in told.as_chunks::<4>().0 {
        let state = match leaf_bytes {
            0 => BandState::Absent,
            leaf_bytes => BandState::Mapped {
                leaf_bytes: *leaf_bytes,
            },
        };
        let (iova, len_bytes) = (*iova, *len_bytes);
        let band = Band {
            iova,
            len_bytes,
            state,
        };
        while roots.len() <= (*root).min(1) as usize {
            roots.push(Vec::new());
        }
        if let Some(bands) = roots.last_mut() {
            bands.push(band);
        }
    }
    roots
}

/// Stops the devices, has the second process end the address space, and looks at every counter.
pub(super) fn end(mut life: Life<'_>) -> Result<LifeReport, LifeError> {
    let mut left = Left::default();
    life.step(LifeStep::TearDown, |life| {
        let size = life.report.memory.size_bytes;
        life.devices.stop()?;
        let Some(mut second) = life.second.take() else {
            return Ok(Done::default());
        };
        second.serve(life.hardware(), "ending")?;
        let (told, took_ns) = timed(|| {
            second.answer("ok")?;
            second.serve(life.hardware(), "left")
        });
        let told = told?;
        second.answer("ok")?;
        second.end()?;
        let [ledger, locked_bytes, pinned_bytes, tables] = *told.as_slice() else {
            let line = format!("{told:?}");
            return Err(SuccessorError::Unexpected { line }.into());
        };
        let begun = &life.begun;
        left = Left {
            ledger_bytes: begun.ledger.in_use() - begun.charged,
            kernel: counted()?.since(begun.counted),
            successor_ledger_bytes: ledger,
            successor_kernel: Counted {
                locked_bytes,
                pinned_bytes,
            },
            table_pages: tables,
            areas: life.space().len() as u64,
            huge_pages: 0,
        };
        life.told = Some(Vec::new());
        Ok(Done {
            took_ns,
            runs: life.begun.physical.runs_of_successor(),
            bytes: size,
            tables: Some(tables),
            checked: "all counters of both at zero".into(),
            right: left.is_nothing() && life.begun.physical.runs_of_successor() == 0,
            ..Done::default()
        })
    })?;
    let Life {
        begun,
        mut report,
        started,
        ..
    } = life;
    let (backing, free) = (begun.backing, begun.free);
    let (freed, took_ns) = timed(|| begun.into_pool().map_or(Ok(()), KeptPool::restore));
    freed.map_err(crate::map::JobError::from)?;
    left.huge_pages = free.saturating_sub(free_pages(backing));
    report.left = left;
    report.times.freed_ns = took_ns;
    report.times = report.times.closed(started, &report.steps);
    Ok(report)
}
