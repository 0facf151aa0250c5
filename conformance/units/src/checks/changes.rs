//! Tables that change while a device uses them, for every unit and every table.

use anyhow::{Context as _, ensure};
use fastrand::Rng;
use iommu::FlushError;
use iopt::{Gather, Pending, Prot, walk::Access};
use runs::{Iova, Span};

use super::suite::{GIB, MIB, first, page, sizes};
use crate::{At, Rig, Seen, case::Case};

/// Leaves are split, merged and cut, and parts unmapped and mapped again, with copies through what has
/// changed after each step.
pub(super) fn resize(rig: &Rig) -> anyhow::Result<()> {
    const DOMAIN: u32 = 6;
    // Splits, merges and cuts; beside them parts are unmapped and mapped again.
    const REFITS: u32 = 50;
    let case = Case::new(rig)?;
    let mut table = case.table()?;
    let sizes = sizes(&table, 64 * MIB);
    let (page, big) = (page(&table), sizes.last().copied().unwrap_or(4096));
    let base = first(&case, &table).next_multiple_of(big) + big;
    let address = (rig.data().start + GIB).next_multiple_of(big.max(GIB));
    let area = Span::<Iova>::new(base, 4 * big);
    table.map(base, &[Span::new(address, area.len)], Prot::RW)?;
    case.attach(0, DOMAIN, &table)?;
    let mut mapped = vec![true; (area.len / page) as usize];
    let mut random = Rng::with_seed(11 + rig.round());
    let flush = |what: &iopt::Invalidation| case.invalidate(DOMAIN, what);
    let at = |nth: u64| At {
        iova: base + nth * page,
        address: address + nth * page,
    };
    let (mut step, mut resizes) = (0, 0);
    while resizes < REFITS {
        step += 1;
        let mut gather = Gather::new();
        let nth = random.u64(..area.len / page);
        // Range to change, in pages.
        let kind = random.u64(..5);
        resizes += u32::from(kind < 3);
        let (what, from, count) = match kind {
            0 => {
                let size = *random.choice(&sizes).context("no sizes")?;
                table.split(Span::new(at(nth).iova, page), size, &mut gather, flush)?;
                ("split", nth, 1)
            }
            1 => {
                let from = nth * page / big * big;
                let range = Span::new(base + from, big);
                table.merge(range, &mut gather, flush)?;
                ("merge", from / page, big / page)
            }
            2 => {
                table.cut(at(nth).iova, &mut gather, flush)?;
                ("cut", nth.saturating_sub(1), 2)
            }
            3 => {
                let count = 1 + random.u64(..(area.len / page - nth).min(64));
                for edge in [nth, nth + count] {
                    if edge < area.len / page {
                        table.cut(at(edge).iova, &mut gather, flush)?;
                    }
                }
                let range = Span::new(at(nth).iova, count * page);
                table.unmap_mapped(range, &mut gather)?;
                mapped[nth as usize..(nth + count) as usize].fill(false);
                ("unmap", nth, count)
            }
            _ => {
                for one in 0..area.len / page {
                    if !mapped[one as usize] {
                        table.map(at(one).iova, &[Span::new(at(one).address, page)], Prot::RW)?;
                        mapped[one as usize] = true;
                    }
                }
                ("map", nth, 1)
            }
        };
        let flushed = gather.flush_with(flush)?;
        table.reclaim(flushed);
        let Some(source) = (0..area.len / page).rev().find(|nth| mapped[*nth as usize]) else {
            continue;
        };
        let last = area.len / page - 1;
        for target in [from, (from + count).min(last), random.u64(..last)] {
            let context =
                || format!("step {step}, {what} of {count} pages from {from}, page {target}");
            if target == source {
                continue;
            }
            if mapped[target as usize] {
                case.copy_by(&table, 0, at(source), at(target))
                    .with_context(context)?;
            } else {
                case.copy(0, at(source), at(target), Seen::Untouched)
                    .with_context(context)?;
                case.fault(0, at(target).iova, Access::Write)
                    .with_context(context)?;
            }
        }
    }
    case.detach(0)?;
    case.end()
}

/// Steps of the mixture: about so many for each unit, and so many at least with each of its tables.
const STEPS: u64 = 450;
const LEAST_STEPS: u64 = 60;
/// Its areas lie at multiples of this.
const SLOT: u64 = 8 * MIB;
const SLOTS: u64 = 16;

/// A run that is mapped.
#[derive(Clone, Copy, Debug)]
struct Area {
    at: At,
    len: u64,
}

impl Area {
    /// One of its pages.
    fn page(self, page: u64, random: &mut Rng) -> At {
        self.at.plus(random.u64(..self.len / page) * page)
    }
}

/// A place for an area.
#[derive(Clone, Copy, Debug, Default)]
struct Slot {
    area: Option<Area>,
    /// Place that was reached last, and may be remembered by the unit when it should not.
    touched: Option<At>,
}

/// Areas come and go; what was touched last is touched again when it is gone.
pub(super) fn mixture(rig: &Rig) -> anyhow::Result<()> {
    const DOMAIN: u32 = 9;
    let case = Case::new(rig)?;
    let mut table = case.table()?;
    let page = page(&table);
    let base = first(&case, &table);
    case.attach(0, DOMAIN, &table)?;
    let mut random = Rng::with_seed(6 + rig.round());
    // One is always there, to copy from.
    let mut slots = vec![Slot::default(); SLOTS as usize];
    let steps = (STEPS / rig.unit().kinds().len() as u64).max(LEAST_STEPS);
    for step in 0..steps {
        let nth = step.min(1) * (1 + random.u64(..SLOTS - 1));
        let slot = &mut slots[nth as usize];
        if let Some(area) = slot.area.take() {
            case.unmap(&mut table, Span::new(area.at.iova, area.len), DOMAIN)?;
        } else {
            // In half of the cases both addresses are equal modulo 2 MiB, so that there are large
            // leaves in it.
            let half = SLOT / page / 2;
            let offset = random.u64(..half) * page;
            let shift = random.u64(..2) * random.u64(..512) * page;
            let start = (rig.data().start + GIB).next_multiple_of(GIB);
            let area = Area {
                at: At {
                    iova: base + nth * SLOT + offset,
                    address: start + nth * 64 * MIB + offset + shift,
                },
                len: (1 + random.u64(..half)) * page,
            };
            let memory = Span::new(area.at.address, area.len);
            table.map(area.at.iova, &[memory], Prot::RW)?;
            slot.area = Some(area);
        }
        let from = slots[0].area.context("the first slot is empty")?;
        for nth in [nth, 1 + step % (SLOTS - 1)] {
            let slot = &mut slots[nth as usize];
            let from = from.page(page, &mut random);
            let what = || format!("step {step}, slot {nth}");
            if let Some(area) = slot.area.filter(|_| nth > 0) {
                let to = area.page(page, &mut random);
                case.copy_by(&table, 0, from, to).with_context(what)?;
                slot.touched = Some(to);
            } else if let Some(to) = slot.touched {
                case.copy(0, from, to, Seen::Untouched).with_context(what)?;
                case.fault(0, to.iova, Access::Write).with_context(what)?;
            }
        }
    }
    case.detach(0)?;
    case.end()
}

/// Reach of a table above the first one, once the unit has its root.
pub(super) fn grows(rig: &Rig) -> anyhow::Result<()> {
    const DOMAIN: u32 = 12;
    let case = Case::new(rig)?;
    let table = case.table()?;
    let (page, data) = (page(&table), rig.data().start);
    let low = At {
        iova: 0,
        address: data,
    };
    table.map(low.iova, &[Span::new(low.address, 2 * page)], Prot::RW)?;
    case.attach(0, DOMAIN, &table)?;
    let levels = rig.kind().levels;
    let high = At {
        iova: 1 << table.aperture().bits,
        address: data + MIB,
    };
    case.copy(0, low, high, Seen::Untouched)?;
    case.faults();
    let mut gather = Gather::new();
    table.grow(levels + 1, &mut gather)?;
    table.map(high.iova, &[Span::new(high.address, page)], Prot::RW)?;
    case.copy_by(&table, 0, low, low.plus(page))?;
    let flushed = gather.flush_with(|what| case.invalidate(DOMAIN, what))?;
    table.reclaim(flushed);
    case.copy_by(&table, 0, low, high)?;
    case.copy_by(&table, 0, high, low)?;
    case.detach(0)?;
    case.end()
}

/// Commands and waits of three unmaps: a page, 256 scattered pages, 1 GiB.
pub(super) fn flush_costs(rig: &Rig) -> anyhow::Result<()> {
    const DOMAIN: u32 = 2;
    let case = Case::new(rig)?;
    let mut table = case.table()?;
    let (page, base) = (page(&table), first(&case, &table) + GIB);
    let address = rig.data().start.next_multiple_of(GIB);
    case.attach(0, DOMAIN, &table)?;
    let apart = 64 * page;
    for (what, count) in [("1 page", 1), ("256 scattered", 256), ("1 GiB", 1)] {
        let len = if what == "1 GiB" { GIB } else { page };
        let spans = (0..count).map(|nth| (base + nth * apart, address + nth * apart));
        let mut gather = Gather::new();
        for (iova, address) in spans.clone() {
            table.map(iova, &[Span::new(address, len)], Prot::RW)?;
        }
        for (iova, _) in spans {
            table.unmap(Span::new(iova, len), &mut gather)?;
        }
        let before = case.counters();
        let flushed = gather
            .flush_with(|what| -> Result<(), FlushError> { case.invalidate(DOMAIN, what) })?;
        table.reclaim(flushed);
        let after = case.counters();
        let (commands, waits) = (after.commands - before.commands, after.waits - before.waits);
        ensure!(
            waits == 1 && commands <= 32,
            "{what}: {commands} commands, {waits} waits"
        );
        rig.cost(what, commands, waits);
    }
    case.detach(0)?;
    case.end()
}

/// Pages of the check of dirty bits, and how often each of its steps is done.
const PAGES: u64 = 64;
const ROUNDS: u64 = 8;

/// Dirty bits that the unit sets, also between harvest and flush. QEMU sets D only together with A (seen
/// in 10.0), not in a leaf that has A already, against VT-d's section 3.6.2 "Accessed, Extended Accessed,
/// and Dirty Flags". So each page gets dirty once.
pub(super) fn dirty(rig: &Rig) -> anyhow::Result<()> {
    const DOMAIN: u32 = 2;
    let case = Case::new(rig)?;
    let table = case.table()?;
    let (page, data) = (page(&table), rig.data().start);
    let all = Span::new(0, PAGES * page);
    table.map(0, &[Span::new(data, all.len)], Prot::RW)?;
    table.track_dirty(true)?;
    case.attach(0, DOMAIN, &table)?;
    let mut random = Rng::with_seed(8 + rig.round());
    let mut pages = (0..PAGES - 1).map(|nth| 1 + nth * 37 % (PAGES - 1));
    let at = |nth: u64| At {
        iova: nth * page,
        address: data + nth * page,
    };
    // Reads the first page, writes one a second time and some others.
    let mut write_some = |again: Option<u64>| -> anyhow::Result<u64> {
        let mut written = 0;
        let count = 1 + random.u64(..3) as usize;
        for nth in again.into_iter().chain(pages.by_ref().take(count)) {
            case.copy(0, at(0), at(nth), Seen::Copied)?;
            rig.note([page]);
            written |= 1 << nth;
        }
        Ok(written)
    };
    let harvest = |between: &mut dyn FnMut() -> anyhow::Result<u64>| {
        let mut pending = Pending::new([0; 1], all, page)?;
        table.harvest(all, &mut pending)?;
        let meanwhile = between()?;
        let shown = pending.flush_with(|what| case.invalidate(DOMAIN, what))?;
        let found = shown.words()[0];
        shown.acknowledge();
        anyhow::Ok((found, meanwhile))
    };
    for round in 0..ROUNDS {
        let written: u64 = write_some(None)?;
        let again = u64::from(written.trailing_zeros());
        let (found, meanwhile) = harvest(&mut || write_some(Some(again)))?;
        // Writes between harvest and flush are seen now or with the next harvest.
        let (next, _) = harvest(&mut || Ok(0))?;
        let (all, shown) = (written | meanwhile, found | next);
        ensure!(
            found & !all == 0 && written & !found == 0 && all == shown,
            "round {round}: {written:#x} and {meanwhile:#x} written, {found:#x} and {next:#x} found"
        );
    }
    case.detach(0)?;
    case.end()
}
