//! Pages that devices write to, as an address space harvests them: exactly those, while devices move on and areas
//! come and go. The unit sets D only together with A (see `checks/changes.rs`), so a page is written to once between
//! two maps of it.

use std::{collections::BTreeSet, sync::Arc};

use anyhow::ensure;
use fastrand::Rng;
use ioas::{DomainIds, FixedRuns, Ioas, Iommu, Ledger, Memory, TableBuilder, Tracking};
use iommu::Unit as _;
use iopt::{Interruption, Pending, Prot};
use runs::{Pa, Span};
use shadow::PAGE;

use crate::{At, LONGEST, Rig, Seen, handed::Handed, id};

const PAGES: u64 = 256;
const ROUNDS: u64 = 12;
const IOVA: u64 = 1 << 32;

/// A harvest has what was written to since the last one, no page less and none more; and an area that is unmapped
/// and mapped again is clean.
pub(crate) fn dirty(rig: &Rig) -> anyhow::Result<()> {
    let driver = rig.driver(rig.registers(), Arc::clone(rig.structures()), None)?;
    driver.enable()?;
    let unit = Arc::new(Handed::new(driver));
    ensure!(unit.capabilities().dirty_tracking, "the unit sets no bits");
    let ids = DomainIds::new(unit.capabilities().domain_bits);
    let builder = TableBuilder::new(Arc::clone(rig.structures()), ids, [rig.kind().format]);
    let iommu = Iommu::with_builder(unit, builder);
    let space = Ioas::over(&iommu)?;
    let data = rig.data().start;
    let run = Span::<Pa>::new(data, 2 * PAGES * PAGE);
    let memory = Memory::new(Arc::new(FixedRuns::new([run], PAGE)?), &Ledger::unlimited());
    let all = Span::new(IOVA, PAGES * PAGE);
    // Pages to read from lie elsewhere.
    let source = Span::new(PAGES * PAGE, PAGE);
    space.map(IOVA - PAGE, &memory, source, Prot::READ)?;
    space.map(IOVA, &memory, Span::new(0, all.len), Prot::RW)?;
    for device in 0..2 {
        space.attach(iommu.device(id(device)))?;
    }
    space.track_dirty(Tracking {
        leaf: Some(PAGE),
        interruption: Interruption::Refused,
    })?;
    let from = At {
        iova: IOVA - PAGE,
        address: data + source.start,
    };
    let at = |page: u64| At {
        iova: IOVA + page * PAGE,
        address: data + page * PAGE,
    };
    let mut random = Rng::with_seed(8 + rig.round());
    let mut fresh: Vec<u64> = (0..PAGES).collect();
    for round in 0..ROUNDS {
        random.shuffle(&mut fresh);
        let count = random.usize(..12).min(fresh.len());
        let written: BTreeSet<u64> = fresh.drain(..count).collect();
        for page in &written {
            let device = random.usize(..2);
            let seen = rig.copy(device, from, at(*page), LONGEST)?;
            ensure!(seen == Seen::Copied, "page {page}: {seen:?}");
        }
        let mut pending = Pending::new([0u64; (PAGES / 64) as usize], all, PAGE)?;
        let harvested = space.harvest(&mut pending)?;
        ensure!(!harvested.blind, "the unit is blind");
        let shown = space.show(&mut pending)?;
        let dirty = |page: &u64| shown.words()[(page / 64) as usize] >> (page % 64) & 1 == 1;
        let found: BTreeSet<u64> = (0..PAGES).filter(dirty).collect();
        shown.acknowledge();
        ensure!(
            found == written,
            "round {round}: {found:?}, not {written:?}"
        );
        // Some of it comes anew.
        let first = random.u64(..PAGES / 2);
        let part = Span::new(IOVA + first * PAGE, 16 * PAGE);
        space.unmap_cutting(part, Interruption::Refused)?;
        let offsets = Span::new(first * PAGE, part.len);
        space.map(part.start, &memory, offsets, Prot::RW)?;
        fresh.retain(|page| !(first..first + 16).contains(page));
        fresh.extend(first..first + 16);
    }
    space.close()?;
    iommu.unit().disable()?;
    rig.finish()
}
