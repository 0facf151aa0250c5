//! Cost of a flush, and the invalidations that it must cause: the unit walks the tables, and keeps translations and
//! tables.

use std::sync::atomic::AtomicU64;

use iopt::format::{ArmStage1, ArmStage2, K4, K16, K64};
use iopt::{Format, Gather, HeapArena, NoRuns, Prot, Table, TableOps as _};
use runs::PageSizes;

use super::caches::Range;
use super::*;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// Unmaps pages by one gather and flushes it; the unit knows them before, and not any more afterwards.
/// Commands, waits, and what was received.
fn unmap<F: Format, const LOG2: u32>(
    format: F,
    sizes: PageSizes,
    ranged: bool,
    pages: &[Span<Iova>],
) -> (u64, u64, Vec<Received>) {
    let ids = [IDR0, IDR1, 0, if ranged { IDR3 } else { 0 }, 0, IDR5];
    let tables = Arc::new(HeapArena::<AtomicU64, LOG2>::with_tables_at(2048, 1 << 40).unwrap());
    let (driver, model) = enabled_with(ids, CONFIG);
    let model = model.with_tables(tables.clone());
    let mut table = Table::with_page_sizes(format, &*tables, sizes).unwrap();
    // Pages are counted from the first address; what is there stays, with its table.
    let origin = format.aperture().spans().next().unwrap().start;
    let placed = pages
        .iter()
        .map(|page| Span::new(origin + page.start, page.len));
    let pages: Vec<_> = placed.collect();
    let to = |address: u64, base: u64| address - origin + base;
    let granule = 1 << F::GRANULE_LOG2;
    table
        .map(origin, &[Span::new(GIB, granule)], Prot::RW)
        .unwrap();
    for page in &pages {
        let memory = [Span::new(to(page.start, 1 << 40), page.len)];
        table.map(page.start, &memory, Prot::RW).unwrap();
    }
    driver.attach(DEVICE, DOMAIN, table.root()).unwrap();
    let ends = |page: &Span<Iova>| {
        [
            page.start,
            page.start + page.len / 2 / granule * granule,
            page.last(),
        ]
    };
    let known = |address| model.translate(STREAM, None, address);
    for address in pages.iter().flat_map(ends) {
        assert_eq!(known(address), Some(to(address, 1 << 40)), "{address:#x}");
    }
    let mut gather = Gather::new();
    for page in &pages {
        table.unmap(*page, &mut gather, &mut NoRuns).unwrap();
    }
    let stale = pages
        .iter()
        .flat_map(ends)
        .filter(|address| known(*address).is_some());
    assert_eq!(stale.count(), 3 * pages.len(), "the unit does not remember");
    model.received();
    let before = driver.counters();
    let flushed = gather
        .flush_with(|what| driver.invalidate(DOMAIN, what))
        .unwrap();
    let after = driver.counters();
    let received = model.received();
    for address in pages.iter().flat_map(ends) {
        assert_eq!(known(address), None, "{address:#x}: {received:x?}");
    }
    assert_eq!(known(origin), Some(GIB));
    // New mappings, in tables that are used again, are found.
    table.reclaim(flushed);
    for page in &pages {
        let memory = [Span::new(to(page.start, 2 << 40), page.len)];
        table.map(page.start, &memory, Prot::RW).unwrap();
    }
    for address in pages.iter().flat_map(ends) {
        assert_eq!(known(address), Some(to(address, 2 << 40)), "{address:#x}");
    }
    let commands = after.commands - before.commands;
    (commands, after.waits - before.waits, received)
}

#[test]
fn other_granules_and_groups_are_named_whole() {
    let any = PageSizes::from_log2_range(12, 51);
    for ranges in [true, false] {
        for len in [1 << 14, 1 << 21, 32 * MIB, GIB, 3 << 21] {
            let page = [Span::new(64 * GIB, len)];
            let first = ArmStage1::<K16>::new(47, 48).unwrap();
            let (_, waits, _) = unmap::<_, 14>(first, any, ranges, &page);
            let second = ArmStage2::<K16>::new(40, 48).unwrap();
            let (commands, _, received) = unmap::<_, 14>(second, any, ranges, &page);
            assert_eq!(waits, 1);
            assert!(!ranges || commands == 1, "{received:x?}");
        }
        for len in [1 << 16, 1 << 21, 512 * MIB, 16 * GIB, 3 << 29] {
            let page = [Span::new(64 * GIB, len)];
            let first = ArmStage1::<K64>::new(48, 48).unwrap().upper();
            let (_, waits, _) = unmap::<_, 16>(first, any, ranges, &page);
            let second = ArmStage2::<K64>::new(42, 48).unwrap();
            let (commands, _, received) = unmap::<_, 16>(second, any, ranges, &page);
            assert_eq!(waits, 1);
            assert!(!ranges || commands == 1, "{received:x?}");
        }
    }
}

#[test]
fn many_devices_with_tlbs_are_invalidated_in_parts() {
    let config = Config {
        device_tlbs: true,
        ..CONFIG
    };
    for msi in [0, MSI] {
        for log2 in [19, 4, 1] {
            let mut ids = IDS;
            ids[0] |= msi;
            ids[1] = ids[1] & !(0x1f << 21) | log2 << 21;
            let memory = Arc::new(HeapTables::with_tables(1024).unwrap());
            let model = Model::new(memory.clone(), ids);
            let driver = SmmuV3::new(model.clone(), memory, config).unwrap();
            driver.enable().unwrap();
            for device in 0..300 {
                driver
                    .set_device_tlb(DeviceId(device), Some(DeviceTlb { queue_depth: 1 }))
                    .unwrap();
                driver
                    .attach(DeviceId(device), DOMAIN, root(0x1000))
                    .unwrap();
            }
            model.received();
            let before = driver.counters();
            driver.invalidate_domain(DOMAIN).unwrap();
            let after = driver.counters();
            let received = model.received();
            assert_eq!(received[0], whole(7));
            let devices = received.iter().filter_map(|received| match received {
                Received::Device(stream, None, 0, 52) => Some(*stream),
                _ => None,
            });
            assert!(devices.eq(0..300));
            // One for the domain, a barrier; each part ends with a wait.
            assert_eq!(after.commands - before.commands, 302);
            let part = (1u64 << log2.min(8)) - 1;
            assert_eq!(after.waits - before.waits, 302u64.div_ceil(part));
            assert_eq!(after.batches - before.batches, 1);
        }
    }
}

/// Maps a page in every way in which the table lets all requests read it, and looks that neither
/// its device nor one of another domain reaches it after the domain was flushed, nor after the detach.
fn leaves<F: Format, const LOG2: u32>(format: F) {
    let tables = Arc::new(HeapArena::<AtomicU64, LOG2>::with_tables_at(64, 1 << 40).unwrap());
    let (driver, model) = enabled(CONFIG);
    let model = model.with_tables(tables.clone());
    let mut table = Table::new(format, &*tables).unwrap();
    let other = Table::new(format, &*tables).unwrap();
    let neighbour = DeviceId(1);
    driver.attach(neighbour, DomainId(8), other.root()).unwrap();
    let page = Span::new(
        format.aperture().spans().next().unwrap().start,
        1 << F::GRANULE_LOG2,
    );
    let prots = (0..=Prot::all().bits()).map(Prot::from_bits_retain);
    let prots = prots.filter(|prot| *prot & (Prot::READ | Prot::PRIVILEGED) == Prot::READ);
    for prot in prots.filter(|prot| format.leaf_bits(*prot).is_some()) {
        for detaches in [false, true] {
            driver.attach(DEVICE, DOMAIN, table.root()).unwrap();
            table
                .map(page.start, &[Span::new(GIB, page.len)], prot)
                .unwrap();
            let reached = || [STREAM, 1].map(|stream| model.translate(stream, None, page.start));
            assert_eq!(reached(), [Some(GIB), None], "{prot}");
            let mut gather = Gather::new();
            table.unmap(page, &mut gather, &mut NoRuns).unwrap();
            if detaches {
                driver.detach(DEVICE).unwrap();
                driver.attach(DEVICE, DOMAIN, table.root()).unwrap();
            } else {
                driver.invalidate_domain(DOMAIN).unwrap();
            }
            assert_eq!(reached(), [None; 2], "{format:?}, {prot}, {detaches}");
            table.reclaim(gather.flush_with(|_| Ok::<_, ()>(())).unwrap());
            driver.detach(DEVICE).unwrap();
        }
    }
    model.received();
}

#[test]
fn no_leaf_that_a_table_can_hold_outlives_the_flush_of_its_domain_or_the_detach() {
    let first = ArmStage1::<K4>::new(48, 48).unwrap();
    leaves::<_, 12>(first);
    leaves::<_, 12>(first.upper());
    leaves::<_, 14>(ArmStage1::<K16>::new(48, 48).unwrap());
    leaves::<_, 16>(ArmStage1::<K64>::new(48, 48).unwrap());
    leaves::<_, 12>(ArmStage2::<K4>::new(40, 48).unwrap());
}

#[test]
fn a_domains_number_that_comes_back_is_flushed_as_its_new_tables_are() {
    let (driver, model) = enabled(CONFIG);
    let stage1 = |granule, levels| Root {
        format: FormatId::ArmStage1(config(granule, 48)),
        address: 0x10_0000,
        levels,
    };
    let second = second(0x10_0000);
    let roots = [
        (second, 12),
        (stage1(ArmGranule::K4, 4), 12),
        (stage1(ArmGranule::K64, 3), 16),
        (stage1(ArmGranule::K16, 4), 14),
        (second, 12),
    ];
    for (root, log2) in roots {
        driver.attach(DEVICE, DOMAIN, root).unwrap();
        model.received();
        driver.invalidate_domain(DOMAIN).unwrap();
        let first = root != second;
        let all = if first { whole(7) } else { Received::Vmid(7) };
        assert_eq!(model.received(), [all, Received::Sync], "{root:?}");
        let pages = Span::new(0x10_0000, 0x2_0000);
        let what = iopt::Invalidation::of(pages, 1, false);
        driver.invalidate(DOMAIN, &what).unwrap();
        let tag = if first { (VMID, Some(7)) } else { (7, None) };
        let range = Range {
            address: pages.start,
            more: Some((log2, pages.len, 3)),
        };
        assert_eq!(
            model.received(),
            [Received::Pages(tag, range, true), Received::Sync]
        );
        driver.detach(DEVICE).unwrap();
    }
}
