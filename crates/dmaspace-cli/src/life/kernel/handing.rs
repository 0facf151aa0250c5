//! The end over the kernel's mappings: they go to a second process, while devices go on, and end there.

use std::sync::Arc;

use iopt::Prot;

use super::super::handing::path;
use super::super::job::{Done, timed};
use super::super::report::{Left, LifeStep, Refused};
use super::super::successor::{Second, SuccessorError};
use super::super::{LifeError, LifeJob};
use super::Life;
use crate::map::clock::nanoseconds;
use crate::map::memory::counted;
use crate::map::{Counted, JobError};

pub(super) fn all(life: &mut Life<'_>, job: &LifeJob) -> Result<(), LifeError> {
    life.step(LifeStep::HandOver, |life| hand_over(life, job))?;
    life.step(LifeStep::Successor, successor)
}

/// What this process owns goes to a second one, with the kernel's files.
fn hand_over(life: &mut Life<'_>, job: &LifeJob) -> Result<Done, LifeError> {
    if let Some(why) = life.interface.stays()? {
        return Ok(Done {
            checked: "stays with this process".into(),
            right: true,
            refused: Some(Refused {
                capability: None,
                error: why.into(),
            }),
            ..Done::default()
        });
    }
    let started = std::time::Instant::now();
    let mut second = Second::start(&job.successor)?;
    let numbers = life
        .handed
        .numbers
        .iter()
        .map(|number| format!(" {number}"));
    let mut items = vec![format!(
        "interface {}{}",
        life.interface.name(),
        numbers.collect::<String>()
    )];
    for part in &life.parts {
        items.push(format!("memory {}", path(&part.mapping)));
    }
    {
        let space = life.space();
        for area in space.areas() {
            let of = |part: &&super::Part| Arc::ptr_eq(&part.memory, area.memory());
            let number = life.parts.iter().position(|part| of(&part)).unwrap_or(0);
            let (range, offset) = (area.range(), area.part().start);
            let prot = Prot::RW.bits();
            items.push(format!(
                "area {} {} {number} {offset} {prot}",
                range.start, range.len
            ));
        }
        for piece in space.give_up().map_err(JobError::Registers)? {
            items.push(format!("piece {} {}", piece.start, piece.len));
        }
    }
    second.describe(&items)?;
    second.told("files")?;
    second.answer_with("ok", &life.handed.files)?;
    // Here they would keep groups in the container.
    life.handed.files.clear();
    let charged = second.told_numbers("adopted")?;
    let ours = life.ledger.in_use() - life.charged;
    let kernel = counted()?.since(life.counted);
    second.answer("ok")?;
    let took_ns = nanoseconds(started);
    life.second = Some(second);
    life.everywhere()?;
    let size = life.report.memory.size_bytes;
    Ok(Done {
        took_ns,
        runs: items
            .iter()
            .filter(|item| item.starts_with("piece"))
            .count() as u64,
        bytes: size,
        checked: "charged there, and here no more".into(),
        right: *charged == [size, size] && ours == 0 && kernel == Counted::default(),
        ..Done::default()
    })
}

/// The second process tries to cut a hole, too.
fn successor(life: &mut Life<'_>) -> Result<Done, LifeError> {
    let Some(mut second) = life.second.take() else {
        return Ok(Done {
            checked: "there is no other".into(),
            right: true,
            ..Done::default()
        });
    };
    let (told, took_ns) = timed(|| second.told("refused"));
    let told = told?;
    second.answer("ok")?;
    life.second = Some(second);
    life.seen()?;
    let (capability, error) = told.split_once(' ').unwrap_or_default();
    Ok(Done {
        took_ns,
        checked: "all reached as before".into(),
        right: !capability.is_empty(),
        refused: Some(Refused {
            capability: Some(capability.into()),
            error: error.into(),
        }),
        ..Done::default()
    })
}

/// Stops the devices, has whoever owns the address space end it, and looks at every counter.
pub(super) fn end(life: &mut Life<'_>) -> Result<(Done, Left), LifeError> {
    life.copying.stop()?;
    let mut left = Left::default();
    let took_ns = match life.second.take() {
        Some(mut second) => {
            second.told("ending")?;
            let (told, took_ns) = timed(|| {
                second.answer("ok")?;
                second.told_numbers("left")
            });
            let told = told?;
            second.answer("ok")?;
            second.end()?;
            let [ledger, locked_bytes, pinned_bytes] = *told.as_slice() else {
                let line = format!("{told:?}");
                return Err(SuccessorError::Unexpected { line }.into());
            };
            left.successor_ledger_bytes = ledger;
            left.successor_kernel = Counted {
                locked_bytes,
                pinned_bytes,
            };
            took_ns
        }
        None => {
            let (done, took_ns) = timed(|| life.space().unmap_all(&mut ()));
            done.map_err(JobError::from)?;
            left.areas = life.space().len() as u64;
            took_ns
        }
    };
    left.ledger_bytes = life.ledger.in_use() - life.charged;
    left.kernel = counted()?.since(life.counted);
    life.devices.clear();
    let done = Done {
        took_ns,
        bytes: life.report.memory.size_bytes,
        checked: "all counters at zero".into(),
        right: left.is_nothing(),
        ..Done::default()
    };
    Ok((done, left))
}
