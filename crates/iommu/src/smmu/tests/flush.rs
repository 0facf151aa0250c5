//! What a flush costs, and what is invalidated by it.

use iopt::{Format, Gather, NoRuns, TableOps as _};
use runs::PageSizes;

use super::*;

const MIB: u64 = 1 << 20;

/// Unmaps pages of one table by one gather, flushes it, and returns commands, waits, and what the unit was
/// received, after looking that nothing of it is cached.
fn unmap<F: Format>(format: F, sizes: PageSizes, pages: &[Span<Iova>], config: Config) -> Costs {
    let idr2 = match config.version {
        Version::V1 => IDR2_V1,
        Version::V2 => IDR2,
    };
    let memory = memory();
    let (driver, model) = unit_with(memory.clone(), config, [IDR0, IDR1, idr2]);
    driver.enable().unwrap();
    let mut table = Table::with_page_sizes(format, memory, sizes).unwrap();
    driver.attach(DEVICE, DOMAIN, table.root()).unwrap();
    let places =
        |page: &Span<Iova>| (page.start..=page.last()).step_by((page.len / 4).max(4096) as usize);
    for page in pages {
        let data = [Span::new(page.start + DATA, page.len)];
        table.map(page.start, &data, Prot::RW).unwrap();
        for place in places(page) {
            let there = Seen::Translated(place + DATA);
            assert_eq!(model.access(STREAM, place, true), there);
        }
    }
    let mut gather = Gather::new();
    for page in pages {
        table.unmap(*page, &mut gather, &mut NoRuns).unwrap();
    }
    model.received();
    let before = driver.counters();
    let flushed = gather.flush_with(|what| driver.invalidate(DOMAIN, what));
    table.reclaim(flushed.unwrap());
    let after = driver.counters();
    for place in pages.iter().flat_map(places) {
        assert_eq!(
            model.access(STREAM, place, false),
            NOT_PRESENT,
            "{place:#x}"
        );
    }
    assert_eq!(after.batches - before.batches, 1);
    let (commands, waits) = (after.commands - before.commands, after.waits - before.waits);
    let received = model.received();
    assert_eq!(received.len() as u64, commands + waits);
    Costs {
        commands,
        waits,
        by: received[0].0,
    }
}

#[derive(Debug, PartialEq, Eq)]
struct Costs {
    commands: u64,
    waits: u64,
    /// The first register.
    by: &'static str,
}

#[test]
fn one_gather_costs_one_wait() {
    let all = PageSizes::from_log2_range(12, 34);
    let small = PageSizes::from_bits(1 << 12);
    let no_groups = PageSizes::from_bits(1 << 12 | 1 << 21 | 1 << 30);
    let page = [Span::new(0x1234_5000, 0x1000)];
    let group = [Span::new(0x1_0000, 0x1_0000)];
    let two = [Span::new(2 * MIB, 4 * MIB)];
    let both = [Span::new(0x5000, 0x1000), Span::new(2 * MIB, 2 * MIB)];
    let gib = [Span::new(1 << 30, 1 << 30)];
    // Odd pages of 256 leaf tables: a gather keeps 16 ranges apart.
    let scattered: Vec<_> = (0..256)
        .map(|n| Span::new(n * 2 * MIB + (n * 7 % 512) * 4096, 0x1000))
        .collect();
    let few: Vec<_> = (0..16).map(|n| Span::new(n * 2 * MIB, 0x2000)).collect();
    type Name = &'static str;
    type Row<'r> = (Name, PageSizes, &'r [Span<Iova>], u64, Name, Name);
    let rows: [Row<'_>; 9] = [
        ("1 page", all, &page, 1, "TLBIVA", "TLBIIPAS2"),
        ("a group", all, &group, 16, "TLBIVA", "TLBIIPAS2"),
        ("2 blocks", no_groups, &two, 2, "TLBIVA", "TLBIIPAS2"),
        // The block may be cached as what its entry says, the page as itself: too many of its size.
        ("both", no_groups, &both, 1, "TLBIASID", "TLBIVMID"),
        ("16 pairs", all, &few, 32, "TLBIVA", "TLBIIPAS2"),
        ("256 scattered", all, &scattered, 1, "TLBIASID", "TLBIVMID"),
        ("1 GiB, one leaf", all, &gib, 1, "TLBIVA", "TLBIIPAS2"),
        (
            "1 GiB, 2 MiB",
            PageSizes::from_bits(1 << 12 | 1 << 21),
            &gib,
            1,
            "TLBIASID",
            "TLBIVMID",
        ),
        ("1 GiB, 4 KiB", small, &gib, 1, "TLBIASID", "TLBIVMID"),
    ];
    for (name, sizes, pages, commands, first, second) in rows {
        let waits = 1;
        let host = ArmStage1::<K4>::new(48, 48).unwrap();
        let by = first;
        let costs = Costs {
            commands,
            waits,
            by,
        };
        assert_eq!(unmap(host, sizes, pages, V2), costs, "{name}");
        let guest = ArmStage2::<K4>::new(48, 48).unwrap();
        let by = second;
        let costs = Costs {
            commands,
            waits,
            by,
        };
        assert_eq!(unmap(guest, sizes, pages, V2), costs, "{name}");
        // Version 1 has no command by address for stage 2, and none for leaves only.
        let guest = ArmStage2::<K4>::new(40, 40).unwrap();
        let by = "TLBIVMID";
        let commands = 1;
        let costs = Costs {
            commands,
            waits,
            by,
        };
        assert_eq!(unmap(guest, sizes, pages, V1), costs, "{name}");
    }
    let host = ArmStage1::<K4>::new(32, 40).unwrap();
    let costs = unmap(host, no_groups, &two, V1);
    assert_eq!((costs.commands, costs.by), (2, "TLBIVA"));
}

/// Words of commands, by format and version: the page's number and the tag are where they belong.
#[test]
fn commands_name_page_and_tag_as_their_format_has_them() {
    let what = |unlinked| iopt::Invalidation::of(Span::new(0x8765_4000, 0x1000), 1, unlinked);
    let received = |root: Root, config, idr2, unlinked| {
        let (driver, model) = unit_with(memory(), config, [IDR0, IDR1 & !(3 << 16), idr2]);
        driver.enable().unwrap();
        // Not the bank of number 0.
        let format = FormatId::ArmV7s;
        let other = Root {
            format,
            address: 0,
            levels: 2,
        };
        for n in 0..3 {
            driver.attach(DeviceId(n), DomainId(n), other).unwrap();
        }
        driver.attach(DEVICE, DOMAIN, root).unwrap();
        model.received();
        driver.invalidate(DOMAIN, &what(unlinked)).unwrap();
        model.received()
    };
    let sync = ("TLBSYNC", 3, 0);
    let stage = |format: fn(iopt::format::ArmConfig) -> FormatId, input_bits, levels| Root {
        format: format(iopt::format::ArmConfig {
            granule: iopt::format::ArmGranule::K4,
            input_bits,
            upper: false,
        }),
        address: 1 << 20,
        levels,
    };
    let host = stage(FormatId::ArmStage1, 48, 4);
    let wide = 3 << 48 | 0x8_7654;
    assert_eq!(
        received(host, V2, IDR2, false),
        [("TLBIVAL", 3, wide), sync]
    );
    assert_eq!(received(host, V2, IDR2, true), [("TLBIVA", 3, wide), sync]);
    let guest = stage(FormatId::ArmStage2, 40, 3);
    let page = 0x8_7654;
    assert_eq!(
        received(guest, V2, IDR2, false),
        [("TLBIIPAS2L", 3, page), sync]
    );
    assert_eq!(
        received(guest, V2, IDR2, true),
        [("TLBIIPAS2", 3, page), sync]
    );
    // Its VMID is not that of stage 1.
    let all = [("TLBIVMID", 0, 4), ("TLBGSYNC", 0, 0)];
    assert_eq!(received(guest, V1, IDR2_V1, false), all);
    let host = stage(FormatId::ArmStage1, 32, 3);
    let narrow = 0x8765_4003;
    assert_eq!(
        received(host, V1, IDR2_V1, false),
        [("TLBIVA", 3, narrow), sync]
    );
    let short = Root {
        format: FormatId::ArmV7s,
        address: 1 << 20,
        levels: 2,
    };
    assert_eq!(
        received(short, V2, IDR2, false),
        [("TLBIVAL", 3, narrow), sync]
    );
}

#[test]
fn a_table_that_was_unlinked_is_not_walked_any_more() {
    let (driver, model, memory) = enabled();
    let mut table = first(&memory, 0);
    driver.attach(DEVICE, DOMAIN, table.root()).unwrap();
    model.state().latency = 4;
    assert_eq!(model.access(STREAM, 0, false), Seen::Translated(DATA));
    let mut gather = Gather::new();
    table
        .unmap(Span::new(0, 16 << 12), &mut gather, &mut NoRuns)
        .unwrap();
    assert!(gather.invalidation().tables_unlinked());
    let there = Seen::Translated(DATA);
    assert_eq!(model.access(STREAM, 0, false), there, "still cached");
    let flushed = gather.flush_with(|what| driver.invalidate(DOMAIN, what));
    table.reclaim(flushed.unwrap());
    assert!(model.state().tables.is_empty());
    assert_eq!(model.access(STREAM, 0, false), NOT_PRESENT);
    // And mapping needs no flush.
    let before = driver.counters();
    table
        .map(0, &[Span::new(DATA, 0x1000)], Prot::READ)
        .unwrap();
    assert_eq!(model.access(STREAM, 0, false), there);
    assert_eq!(driver.counters(), before);
}

#[test]
fn nothing_is_flushed_where_nothing_can_be_cached() {
    let (driver, model, memory) = enabled();
    let what = iopt::Invalidation::of(Span::new(0x3000, 0x1000), 1, false);
    driver.invalidate(DOMAIN, &what).unwrap();
    driver.invalidate_domain(DOMAIN).unwrap();
    let table = first(&memory, 0);
    driver.attach(DEVICE, DOMAIN, table.root()).unwrap();
    model.received();
    let nothing = iopt::Invalidation::of(Span::new(0, 0), 0, false);
    driver.invalidate(DOMAIN, &nothing).unwrap();
    assert_eq!(model.received(), []);
    driver.disable().unwrap();
    model.received();
    driver.invalidate_domain(DOMAIN).unwrap();
    assert_eq!(model.received(), [], "nothing is translated");
    driver.enable().unwrap();
    model.received();
    // Tables without a range, and a level that no table has: everything.
    let odd = iopt::Invalidation::of(Span::new(0, 0x1000), 1 << 31, false);
    let tables = iopt::Invalidation::of(Span::new(0, 0), 0, true);
    for what in [odd, tables] {
        driver.invalidate(DOMAIN, &what).unwrap();
        assert_eq!(model.received(), [("TLBIASID", 2, 2), ("TLBSYNC", 2, 0)]);
    }
}
