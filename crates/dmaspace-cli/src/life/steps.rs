//! The steps of a life until the address space goes to somebody else.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ioas::{Ioas, Observer, Step, Tracking};
use iommu::Unit;
use iopt::{AnyTable, Interruption, Leaf, Pending, Prot};
use runs::{Bytes, SizeHistogram, Span};

use super::LifeError;
use super::balloon::{Balloon, seven_of_eight};
use super::crew::{Checked, Crew, PAGE};
use super::job::{Done, Life, timed};
use super::report::{LifeMemory, LifeStep, RootReport};
use crate::map::JobError;
use crate::map::clock::in_nanoseconds;
use crate::map::memory::{counted, nodes};

pub(super) fn all(life: &mut Life<'_>, took: u64) -> Result<(), LifeError> {
    life.step(LifeStep::Memory, |life| {
        Ok(memory(&life.report.memory, took))
    })?;
    pin_and_map(life)?;
    life.step(LifeStep::Dma, dma)?;
    hole(life)?;
    tracking(life)?;
    life.step(LifeStep::Inflate, inflate)?;
    life.step(LifeStep::Deflate, deflate)
}

/// Whether the memory is on its nodes.
pub(super) fn memory(memory: &LifeMemory, took_ns: u64) -> Done {
    let planned = memory.second_node_planned;
    let there = memory.parts.iter().enumerate().all(|(number, part)| {
        // A kernel that does not tell has no say.
        let at = |at: Option<u32>| at.is_none_or(|at| at == part.node);
        (planned && number > 0) || part.nodes.iter().all(|share| at(share.node))
    });
    let nodes = match planned {
        true => "one node here: the second planned",
        false => "each half on its node",
    };
    Done {
        took_ns,
        bytes: memory.size_bytes,
        checked: nodes.into(),
        right: there,
        ..Done::default()
    }
}

/// The times of an operation's steps.
#[derive(Default)]
struct Split {
    begun: Option<Instant>,
    pin: Duration,
    rest: Duration,
}

impl Observer for Split {
    fn begin(&mut self, _step: Step) {
        self.begun = Some(Instant::now());
    }

    fn end(&mut self, step: Step, _bytes: u64) {
        let taken = self.begun.take().map_or(Duration::ZERO, |at| at.elapsed());
        match step {
            Step::Charge | Step::Pin => self.pin += taken,
            _ => self.rest += taken,
        }
    }

    fn progress(&mut self, _step: Step, _done: u64) -> ControlFlow<()> {
        ControlFlow::Continue(())
    }
}

/// Attaches the devices, each with a root of its own, and maps all memory: one charge and one pin for each
/// memory, one pass for both roots.
fn pin_and_map(life: &mut Life<'_>) -> Result<(), LifeError> {
    let mut split = Split::default();
    let steps = life.begun.ledger.steps();
    let (attached, attach_ns) = timed(|| {
        let space = life.space();
        life.begun.units.iter().try_for_each(|(unit, device)| {
            let unit = Arc::new(unit.clone()) as Arc<dyn Unit>;
            space.attach((unit, *device)).map_err(JobError::Attach)
        })
    });
    attached?;
    {
        let space = life.space();
        for part in &life.begun.parts {
            let whole = Span::new(0, part.guest.len);
            let mapped = space.map(part.guest.start, &part.memory, whole, Prot::RW, &mut split);
            mapped.map_err(JobError::from)?;
        }
    }
    life.step(LifeStep::Pin, |life| pinned(life, &split, steps))?;
    life.step(LifeStep::Roots, |life| {
        rooted(life, attach_ns + in_nanoseconds(split.rest))
    })
}

fn pinned(life: &mut Life<'_>, split: &Split, steps: u64) -> Result<Done, LifeError> {
    let begun = &life.begun;
    let bytes = life.report.memory.size_bytes;
    let charged = begun.ledger.in_use() - begun.charged;
    let kernel = counted()?.since(begun.counted);
    let kernel = kernel.locked_bytes.max(kernel.pinned_bytes);
    let pages = bytes / PAGE;
    let steps = begun.ledger.steps() - steps;
    Ok(Done {
        took_ns: in_nanoseconds(split.pin),
        runs: begun.physical.runs(),
        bytes,
        checked: format!("{steps} charges, not {pages}; kernel: {}", Bytes(kernel)),
        // Pages of a pool that are locked are not counted.
        right: charged == bytes
            && (kernel == bytes || kernel == 0 && begun.backing.huge_size().is_some()),
        ..Done::default()
    })
}

fn rooted(life: &mut Life<'_>, took_ns: u64) -> Result<Done, LifeError> {
    let size = life.report.memory.size_bytes;
    let mut roots = Vec::new();
    let mut right = true;
    let mut largest = 0;
    {
        let looked = |_, table: &AnyTable| (table.root(), table.tables(), table.leaf_sizes());
        let domains = life.space().tables(looked).into_iter();
        let domains = domains.zip(&life.begun.tables);
        for (((root, tables, sizes), memory), (_, device)) in domains.zip(&life.begun.units) {
            largest = largest.max(sizes.iter().map(|(size, _)| size).max().unwrap_or(0));
            // Each root in its own node's memory, and all memory in each root.
            right &= memory.arena.contains(root.address);
            right &= memory.arena.in_use() == tables && sizes.total().bytes == size;
            roots.push(RootReport {
                node: memory.node.0,
                nodes: nodes(&memory.file)?,
                format: root.format.name().into(),
                device: device.to_string(),
            });
        }
    }
    right &= roots.len() == 2;
    life.report.roots = roots;
    life.report.largest_leaf_bytes = largest;
    Ok(Done {
        took_ns,
        runs: life.begun.physical.runs() * 2,
        bytes: 2 * size,
        checked: format!("each on its node; leaves up to {}", Bytes(largest)),
        right,
        ..Done::default()
    })
}

fn dma(life: &mut Life<'_>) -> Result<Done, LifeError> {
    let begun = life.devices.begin(&life.begun.units);
    begun.map_err(LifeError::Devices)?;
    let (waited, took_ns) = timed(|| life.first_pass());
    waited?;
    let counts = life.devices.counts();
    Ok(Done::dma(
        took_ns,
        &counts,
        "each of 2 devices was everywhere",
    ))
}

/// The largest leaf of all roots, and the page in its middle.
fn largest_leaf(life: &Life<'_>) -> Option<(Leaf, Span)> {
    let mut found: Option<Leaf> = None;
    life.space().tables(|_, table| {
        table.for_each_leaf(life.range(), |leaf| {
            if found.is_none_or(|found| leaf.run.len > found.run.len) {
                found = Some(leaf);
            }
        });
    });
    let leaf = found?;
    let page = leaf.run.iova + ((leaf.run.len / 2) & !(PAGE - 1));
    Some((leaf, Span::new(page, PAGE)))
}

/// Leaves by size, of all roots.
fn leaves(life: &Life<'_>) -> Vec<SizeHistogram> {
    life.space().tables(|_, table| table.leaf_sizes())
}

fn count(leaves: &[SizeHistogram]) -> u64 {
    leaves.iter().map(|sizes| sizes.total().count).sum()
}

/// A hole of a page, cut into the largest leaf and closed again.
fn hole(life: &mut Life<'_>) -> Result<(), LifeError> {
    let (leaf, hole) = largest_leaf(life).ok_or(LifeError::NoLeaf)?;
    let before = leaves(life);
    life.step(LifeStep::Hole, |life| {
        life.devices.moving(&[hole]);
        let (cut, took_ns) = timed(|| life.space().take_out(hole, Interruption::Refused, &mut ()));
        let unpinned = cut.map_err(|source| LifeError::Cut {
            range: hole,
            source,
        })?;
        life.devices.open();
        life.marks.holes.push(hole);
        life.seen()?;
        let now = leaves(life);
        let less = now
            .iter()
            .zip(&before)
            .all(|(now, before)| now.total().bytes + PAGE == before.total().bytes);
        Ok(Done {
            took_ns,
            runs: 1,
            bytes: PAGE,
            checked: format!(
                "out of a leaf of {}: now {} leaves",
                Bytes(leaf.run.len),
                count(&now)
            ),
            right: less && unpinned == PAGE,
            ..Done::default()
        })
    })?;
    life.step(LifeStep::Close, |life| {
        life.devices.moving(&[hole]);
        let (back, took_ns) = timed(|| life.space().put_back(hole, Interruption::Refused, &mut ()));
        back.map_err(|source| LifeError::PutBack {
            range: hole,
            source,
        })?;
        life.devices.closed();
        life.marks.holes.clear();
        life.seen()?;
        let now = leaves(life);
        Ok(Done {
            took_ns,
            runs: 1,
            bytes: PAGE,
            checked: format!("leaves as before: {}", count(&now)),
            right: now == before,
            ..Done::default()
        })
    })
}

/// What a harvest has found, beside what devices say.
pub(super) struct Harvest {
    pub(super) took_ns: u64,
    /// The unit cannot tell: everything counts as written to.
    pub(super) blind: bool,
    pub(super) runs: Vec<Span>,
    pub(super) bytes: u64,
    /// Pages that were written to and are not in it.
    pub(super) missed: u64,
    /// Pages in it that nobody has begun to write to.
    pub(super) more: u64,
}

impl Harvest {
    pub(super) fn take<M: Checked>(
        space: &Ioas,
        range: Span,
        devices: &Crew<M>,
    ) -> Result<Self, LifeError> {
        let words = vec![0; (range.len / PAGE).div_ceil(64) as usize];
        let mut pending = Pending::new(words, range, PAGE)?;
        let sure = devices.written();
        let (found, took_ns) = timed(|| -> Result<_, LifeError> {
            let harvested = space.harvest(&mut pending)?;
            let shown = space.show(&mut pending)?;
            let (words, runs) = (shown.words().to_vec(), shown.runs().collect::<Vec<_>>());
            shown.acknowledge();
            Ok((harvested.blind, words, runs))
        });
        let (blind, words, runs) = found?;
        Ok(Self {
            took_ns,
            blind,
            bytes: runs.iter().map(|run| run.len).sum(),
            runs,
            missed: missing(&sure, &words),
            more: missing(&words, &devices.perhaps_written()),
        })
    }

    /// What was compared, in words.
    pub(super) fn checked(&self) -> String {
        let Self { missed, more, .. } = self;
        format!("{missed} writes missed, {more} pages too many")
    }
}

/// The bits of `these` that are not in `those`.
fn missing(these: &[u64], those: &[u64]) -> u64 {
    let both = these.iter().zip(those);
    both.map(|(these, those)| u64::from((these & !those).count_ones()))
        .sum()
}

/// Dirty pages: leaves are split, harvested, and merged back.
fn tracking(life: &mut Life<'_>) -> Result<(), LifeError> {
    let before = leaves(life);
    let tracking = Tracking {
        leaf: Some(PAGE),
        interruption: Interruption::Refused,
    };
    // Devices write into the third eighth of each half: what is dirty is to be seen.
    let hot: Vec<Span> = life
        .begun
        .parts
        .iter()
        .map(|part| Span::new(part.guest.start + part.guest.len / 4, part.guest.len / 8))
        .collect();
    let hot_bytes: u64 = hot.iter().map(|span| span.len).sum();
    life.step(LifeStep::Track, |life| {
        life.devices.note_anew(Some(hot.clone()));
        let (tracked, took_ns) = timed(|| life.space().track_dirty(tracking));
        tracked?;
        // What they wrote before is forgotten, and so is what is known of it here.
        life.devices.note_anew(Some(hot.clone()));
        life.seen()?;
        let now = leaves(life);
        let all_small = now
            .iter()
            .all(|sizes| sizes.iter().all(|(size, _)| size == PAGE));
        Ok(Done {
            took_ns,
            runs: count(&before),
            bytes: 2 * life.report.memory.size_bytes,
            checked: format!("{} leaves became {}", count(&before), count(&now)),
            right: all_small,
            ..Done::default()
        })
    })?;
    life.step(LifeStep::Harvest, |life| {
        life.everywhere()?;
        let found = Harvest::take(&life.begun.space, life.range(), &life.devices)?;
        life.marks.dirty.clone_from(&found.runs);
        let all = found.missed == 0 && found.more == 0 && found.bytes == hot_bytes;
        Ok(Done {
            took_ns: found.took_ns,
            runs: found.runs.len() as u64,
            bytes: found.bytes,
            checked: found.checked(),
            right: all && !found.blind,
            ..Done::default()
        })
    })?;
    life.step(LifeStep::Merge, |life| {
        let ((), took_ns) = timed(|| life.space().untrack_dirty());
        life.marks.dirty.clear();
        life.devices.write_everywhere();
        life.seen()?;
        let now = leaves(life);
        Ok(Done {
            took_ns,
            runs: count(&now),
            bytes: 2 * life.report.memory.size_bytes,
            checked: format!("leaves as before: {}", count(&now)),
            right: now == before,
            ..Done::default()
        })
    })
}

fn inflate(life: &mut Life<'_>) -> Result<Done, LifeError> {
    let space = Arc::clone(&life.begun.space);
    let mut balloon = Balloon::new(&life.begun.parts, space)?;
    let ballooned = seven_of_eight(&life.begun.parts);
    let bytes: u64 = ballooned.iter().map(|span| span.len).sum();
    life.devices.moving(&ballooned);
    let (discarded, took_ns) = timed(|| balloon.inflate());
    let discarded = discarded?;
    for range in &discarded {
        life.devices.discarded(*range);
    }
    life.devices.open();
    life.marks.balloon = ballooned;
    life.seen()?;
    let counters = balloon.counters();
    life.balloon = Some(balloon);
    let held: u64 = life.begun.parts.iter().map(|part| part.memory.held()).sum();
    let kernel = counted()?.since(life.begun.counted);
    let kernel = kernel.locked_bytes.max(kernel.pinned_bytes);
    let size = life.report.memory.size_bytes;
    Ok(Done {
        took_ns,
        runs: counters.discards,
        bytes: counters.discarded,
        checked: format!(
            "{} still pinned; messages: {}",
            Bytes(held),
            counters.chains
        ),
        right: counters.discarded == bytes && held == size - bytes && kernel <= size - bytes,
        ..Done::default()
    })
}

fn deflate(life: &mut Life<'_>) -> Result<Done, LifeError> {
    let ballooned = std::mem::take(&mut life.marks.balloon);
    let Some(mut balloon) = life.balloon.take() else {
        return Ok(Done::default());
    };
    life.devices.moving(&ballooned);
    let (back, took_ns) = timed(|| balloon.deflate());
    back?;
    life.devices.closed();
    life.everywhere()?;
    let counters = balloon.counters();
    let held: u64 = life.begun.parts.iter().map(|part| part.memory.held()).sum();
    Ok(Done {
        took_ns,
        runs: life.begun.physical.runs(),
        bytes: counters.deflated,
        checked: format!("{} pinned again, zeros found", Bytes(held)),
        right: held == life.report.memory.size_bytes && counters.not_restored == 0,
        ..Done::default()
    })
}
