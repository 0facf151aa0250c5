//! What a flush costs, commands and waits for a gather; and that nothing of it is left.

use iopt::format::{RiscV, RiscVG};
use iopt::{Format, Gather, NoRuns, Prot, Table, TableOps as _};
use runs::{PageSizes, SizeHistogram};

use super::*;

const MIB: u64 = 1 << 20;

/// Unmaps pages of one table by one gather, flushes it, and returns commands and waits, after looking that
/// all of it was known before, is unknown now, and that what another domain has there is known still.
fn unmap<F: Format>(
    (capabilities, format, sizes): (u64, F, PageSizes),
    pages: &[Span<Iova>],
    kept: &[Span<Iova>],
) -> (u64, u64) {
    let (driver, model) = enabled(capabilities, CONFIG);
    let tables = HeapTables::with_tables_at(2048, 1 << 40).unwrap();
    let mut table = Table::with_page_sizes(format, &tables, sizes).unwrap();
    for page in pages.iter().chain(kept) {
        let memory = [Span::new(page.start + (1 << 40), page.len)];
        table.map(page.start, &memory, Prot::RW).unwrap();
    }
    let other = Root {
        address: 1 << 50,
        ..table.root()
    };
    driver.attach(DEVICE, DOMAIN, table.root()).unwrap();
    driver.attach(DeviceId(1), DomainId(8), other).unwrap();
    let some = |page: &Span<Iova>| {
        let step = (page.len >> 22).max(1) as usize;
        (page.start >> 12..=page.last() >> 12).step_by(step)
    };
    let all: Vec<u64> = pages.iter().flat_map(some).collect();
    for root in [table.root().address, other.address] {
        let mapped = all.iter().map(|page| (root, *page));
        model.state().mapped.extend(mapped);
    }
    for page in &all {
        assert!(model.reaches(ID, None, *page) && model.reaches(1, None, *page));
    }
    let mut gather = Gather::new();
    for page in pages {
        table.unmap(*page, &mut gather, &mut NoRuns).unwrap();
    }
    model.state().mapped.clear();
    assert!(all.iter().all(|page| model.reaches(ID, None, *page)));
    let before = driver.counters();
    let flushed = gather
        .flush_with(|what| driver.invalidate(DOMAIN, what))
        .unwrap();
    table.reclaim(flushed);
    let after = driver.counters();
    assert!(!all.iter().any(|page| model.reaches(ID, None, *page)));
    assert!(all.iter().all(|page| model.reaches(1, None, *page)));
    let cost = (after.commands - before.commands, after.waits - before.waits);
    assert_eq!(model.received().len() as u64, cost.0 + cost.1);
    cost
}

#[test]
fn one_gather_costs_one_wait() {
    let any = PageSizes::from_bits(1 << 12 | 1 << 21 | 1 << 30);
    let small = PageSizes::from_bits(1 << 12);
    let page = [Span::new(0x1234_5000, 0x1000)];
    let leaf = [Span::new(0x1240_0000, 2 * MIB)];
    let gib = [Span::new(1 << 30, 1 << 30)];
    let scattered: Vec<_> = (0..256)
        .map(|n| Span::new(n * 2 * MIB + (n * 7 % 511) * 4096, 0x1000))
        .collect();
    // 16 pairs: each needs two commands of its own.
    let pairs: Vec<_> = (1..17)
        .map(|n| Span::new(n * 2 * MIB - 0x1000, 0x2000))
        .collect();
    // What stays mapped, so that no table goes: a page beside each.
    let beside = |pages: &[Span<Iova>]| -> Vec<Span<Iova>> {
        let beside = |page: &Span<Iova>| {
            let before = page.start.checked_sub(0x1000);
            before.into_iter().chain([page.start + page.len])
        };
        let beside = pages.iter().flat_map(beside);
        beside.map(|start| Span::new(start, 0x1000)).collect()
    };
    // Commands with S and NL; without; without, while tables go.
    type Row<'a> = (
        &'a str,
        PageSizes,
        &'a [Span<Iova>],
        Vec<Span<Iova>>,
        [u64; 3],
    );
    let rows: [Row<'_>; 6] = [
        ("1 page", any, &page, beside(&page), [1, 1, 1]),
        ("1 leaf of 2 MiB", any, &leaf, beside(&leaf), [1, 1, 1]),
        (
            "256 scattered pages",
            any,
            &scattered,
            beside(&scattered),
            [16, 1, 1],
        ),
        ("16 pairs", any, &pairs, beside(&pairs), [32, 32, 1]),
        ("1 GiB, one leaf", any, &gib, Vec::new(), [1, 1, 1]),
        ("1 GiB, 4 KiB leaves", small, &gib, Vec::new(), [1, 1, 1]),
    ];
    for (name, sizes, pages, kept, costs) in rows {
        let first = RiscV::new(4).unwrap();
        let second = RiscVG::new(4).unwrap();
        for (capabilities, kept, cost) in [
            (RICH, &kept[..], costs[0]),
            (RICH, &[], costs[0]),
            (PLAIN, &kept, costs[1]),
            (PLAIN, &[], costs[2]),
        ] {
            let found = unmap((capabilities, first, sizes), pages, kept);
            assert_eq!(found, (cost, 1), "{name}, first stage");
            let found = unmap((capabilities, second, sizes), pages, kept);
            assert_eq!(found, (cost, 1), "{name}, second stage");
        }
    }
}

/// Maps pages as the format can, has the device reach them through the unit's own walk, takes them away,
/// one half by a flush and the other by the detach, and looks that neither this device nor one of another
/// domain reaches them.
fn leaves<F: Format>(format: F) {
    let tables = Arc::new(HeapTables::with_tables_at(64, 1 << 40).unwrap());
    let mut other = Table::new(format, tables.clone()).unwrap();
    let mut table = Table::new(format, tables.clone()).unwrap();
    let prots = (0..=Prot::all().bits()).map(Prot::from_bits_retain);
    let prots = prots.filter(|prot| format.leaf_bits(*prot).is_some());
    for (prot, capabilities) in prots.flat_map(|prot| [(prot, PLAIN), (prot, RICH)]) {
        let (driver, model) = enabled(capabilities, CONFIG);
        model.state().tables = Some(tables.clone());
        driver.attach(DEVICE, DOMAIN, table.root()).unwrap();
        driver.attach(DeviceId(1), OTHER, other.root()).unwrap();
        let pages = [5, 6, 0x205, 0x40_0000];
        for page in pages {
            let memory = [Span::new(1 << 30 | page << 12, 0x1000)];
            table.map(page << 12, &memory, prot).unwrap();
            assert!(model.reaches(ID, None, page), "{prot}");
        }
        let mut gather = Gather::new();
        for page in &pages[..2] {
            let page = Span::new(page << 12, 0x1000);
            table.unmap(page, &mut gather, &mut NoRuns).unwrap();
        }
        let flushed = gather.flush_with(|what| driver.invalidate(DOMAIN, what));
        table.reclaim(flushed.unwrap());
        let reached = |device, page| model.reaches(device, None, page);
        for page in &pages[..2] {
            let still = [ID, 1].map(|device| reached(device, *page));
            assert_eq!(still, [false; 2], "{format:?}, {prot}: after a flush");
        }
        driver.detach(DEVICE).unwrap();
        // The domain's number goes to another table.
        driver.attach(DEVICE, DOMAIN, other.root()).unwrap();
        for page in pages {
            let still = [ID, 1].map(|device| reached(device, page));
            assert_eq!(still, [false; 2], "{format:?}, {prot}: after a detach");
        }
        let mut gather = Gather::new();
        for page in &pages[2..] {
            let page = Span::new(page << 12, 0x1000);
            table.unmap(page, &mut gather, &mut NoRuns).unwrap();
        }
        let flushed = gather.flush_with(|what| driver.invalidate(DOMAIN, what));
        table.reclaim(flushed.unwrap());
    }
    for table in [&mut table, &mut other] {
        assert_eq!(table.leaf_sizes(), SizeHistogram::new());
    }
}

#[test]
fn no_leaf_that_a_table_can_hold_outlives_its_flush_or_the_detach() {
    for (updates, types) in [(false, false), (false, true), (true, false), (true, true)] {
        for levels in 3..=5 {
            let first = RiscV::new(levels).unwrap();
            let first = first.with_hardware_updates(updates);
            leaves(first.with_memory_types(types));
            let second = RiscVG::new(levels).unwrap();
            let second = second.with_hardware_updates(updates);
            leaves(second.with_memory_types(types));
        }
    }
}

#[test]
fn ranges_and_upper_levels_are_said_where_the_unit_has_them() {
    for (table, space) in [
        (root(0x1000, 4), Space::Pscid(7)),
        (second(0x4000, 4), Space::Gscid(7)),
    ] {
        let (driver, model) = enabled(RICH, CONFIG);
        driver.attach(DEVICE, DOMAIN, table).unwrap();
        let all = Received::Table(space, None);
        for unlinked in [false, true] {
            let what = Invalidation::of(Span::new(0x3000, 0x1000), 1, unlinked);
            driver.invalidate(DOMAIN, &what).unwrap();
            let leaf = Received::Table(space, Some(((0x3000, 0), unlinked)));
            assert_eq!(model.received(), [leaf, Received::Wait]);
        }
        // Sizes: two pages, four of which three are meant, the upper half, all that there is.
        for (range, address, mask) in [
            (Span::new(0x6000, 0x2000), 0x6000, 1),
            (Span::new(0x4000, 0x3000), 0x4000, 2),
            (Span::new(1 << 63, 1 << 62), 1 << 63, 50),
            (Span::new(0x1000, !0xfff - 0x1000), 0, 52),
        ] {
            let what = Invalidation::of(range, 1, false);
            driver.invalidate(DOMAIN, &what).unwrap();
            let leaf = Received::Table(space, Some(((address, mask), false)));
            assert_eq!(model.received(), [leaf, Received::Wait]);
        }
        // Tables without a range: everything.
        let what = Invalidation::of(Span::new(0, 0), 0, true);
        driver.invalidate(DOMAIN, &what).unwrap();
        assert_eq!(model.received(), [all, Received::Wait]);
        // Nothing at all, and domains without a device.
        let nothing = Invalidation::of(Span::new(0, 0), 0, false);
        driver.invalidate(DOMAIN, &nothing).unwrap();
        for domain in [8, 1 << 16 | 7] {
            driver.invalidate_domain(DomainId(domain)).unwrap();
        }
        assert_eq!(model.received(), []);
        // Without NL tables go with everything; without S so does what is not 4 KiB.
        let (driver, model) = enabled(PLAIN, CONFIG);
        driver.attach(DEVICE, DOMAIN, table).unwrap();
        for (levels, unlinked, expected) in [
            (1, false, Received::Table(space, Some(((0x3000, 0), false)))),
            (1, true, all),
            (2, false, all),
            (3, false, all),
        ] {
            let what = Invalidation::of(Span::new(0x3000, 0x1000), levels, unlinked);
            driver.invalidate(DOMAIN, &what).unwrap();
            assert_eq!(model.received(), [expected, Received::Wait]);
        }
    }
}

#[test]
fn a_batch_that_the_queue_does_not_hold_goes_in_parts() {
    let config = Config {
        pasid_bits: 17,
        ..CONFIG
    };
    let memory = Arc::new(HeapTables::with_tables(64).unwrap());
    let model = Model::new(memory.clone(), PLAIN);
    let driver = RiscvIommu::new(model.clone(), memory, config).unwrap();
    driver.enable().unwrap();
    let tlb = Some(DeviceTlb { queue_depth: 0 });
    driver.set_device_tlb(DEVICE, tlb).unwrap();
    for pasid in 1..=600 {
        driver
            .attach_pasid(DEVICE, Pasid(pasid), DOMAIN, root(0x1000, 4))
            .unwrap();
    }
    model.received();
    let before = driver.counters();
    driver.invalidate_domain(DOMAIN).unwrap();
    let after = driver.counters();
    // 1 and a fence, 600, and a fence after each 32 of them.
    assert_eq!(after.commands - before.commands, 2 + 600 + 18);
    assert_eq!(
        (after.waits - before.waits, after.batches - before.batches),
        (3, 1)
    );
    let received = model.received();
    let (mut under_way, mut processes) = (0, Vec::new());
    for received in received {
        match received {
            Received::Tlb(ID, false, Some(process), (0, 52)) => {
                under_way += 1;
                processes.push(process);
            }
            Received::Fence | Received::Wait => under_way = 0,
            other => assert_eq!(other, whole(7)),
        }
        assert!(under_way <= 32);
    }
    assert!(processes.into_iter().eq(1..=600));
}
