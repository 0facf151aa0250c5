//! What a flush costs: commands and waits for a gather; and roots that grow.

use iopt::format::AmdV1;
use iopt::{Gather, NoRuns, Prot, Table, TableOps as _};
use runs::PageSizes;

use super::*;

const MIB: u64 = 1 << 20;

/// Unmaps pages of one table by one gather, flushes it, and returns commands, waits, and what the
/// unit was received, after looking that all of it was named.
fn unmap(sizes: PageSizes, pages: &[Span<Iova>]) -> (u64, u64, Vec<Received>) {
    let (driver, model) = enabled(CONFIG);
    let tables = HeapTables::with_tables(2048).unwrap();
    let format = AmdV1::new(4).unwrap();
    let mut table = Table::with_page_sizes(format, &tables, sizes).unwrap();
    for page in pages {
        let memory = [Span::new(page.start + (1 << 40), page.len)];
        table.map(page.start, &memory, Prot::RW).unwrap();
    }
    let mut gather = Gather::new();
    for page in pages {
        table.unmap(*page, &mut gather, &mut NoRuns).unwrap();
    }
    let before = driver.counters();
    let flushed = gather
        .flush_with(|what| driver.invalidate(DOMAIN, what))
        .unwrap();
    table.reclaim(flushed);
    let after = driver.counters();
    let received = model.received();
    for page in pages {
        for address in (page.start..=page.last()).step_by(4096) {
            let named = received.iter().any(|received| match *received {
                Received::Pages(7, first, mask, _) => {
                    (first ^ address).checked_shr(12 + mask).unwrap_or(0) == 0
                }
                _ => false,
            });
            assert!(named, "{address:#x}");
        }
    }
    (
        after.commands - before.commands,
        after.waits - before.waits,
        received,
    )
}

#[test]
fn one_gather_costs_one_wait() {
    let any = PageSizes::from_log2_range(12, 51);
    let small = PageSizes::from_bits(1 << 12);
    let page = [Span::new(0x1234_5000, 0x1000)];
    let odd = [Span::new(32 << 10, 32 << 10)];
    let gib = [Span::new(1 << 30, 1 << 30)];
    // Odd pages of 256 leaf tables.
    let scattered: Vec<_> = (0..256)
        .map(|n| Span::new(n * 2 * MIB + (n * 7 % 512) * 4096, 0x1000))
        .collect();
    // 16 pairs: each needs two commands of its own.
    let pairs: Vec<_> = (1..17)
        .map(|n| Span::new(n * 2 * MIB - 0x1000, 0x2000))
        .collect();
    let rows: [(&str, PageSizes, &[Span<Iova>], u64); 6] = [
        ("1 page", any, &page, 1),
        ("a leaf of 32 KiB", any, &odd, 1),
        ("256 scattered pages", any, &scattered, 16),
        ("16 pairs", any, &pairs, 32),
        ("1 GiB, one leaf", any, &gib, 1),
        ("1 GiB, 4 KiB leaves", small, &gib, 1),
    ];
    for (name, sizes, pages, expected) in rows {
        let (commands, waits, received) = unmap(sizes, pages);
        assert_eq!((commands, waits), (expected, 1), "{name}: {received:?}");
        assert_eq!(received.len() as u64, commands + waits, "{name}");
    }
}

#[test]
fn upper_levels_are_named_only_when_a_table_was_unlinked() {
    let (driver, model) = enabled(CONFIG);
    for unlinked in [false, true] {
        let what = Invalidation::of(Span::new(0x3000, 0x1000), 1, unlinked);
        driver.invalidate(DOMAIN, &what).unwrap();
        assert_eq!(
            model.received(),
            [Received::Pages(7, 0x3000, 0, unlinked), Received::Wait]
        );
    }
    // Sizes: two pages, and all that there is.
    for (range, address, mask) in [
        (Span::new(0x6000, 0x2000), 0x6000, 1),
        (Span::new(0x4000, 0x3000), 0x4000, 2),
        (Span::new(0, 1 << 63), 0, 51),
        (Span::new(0x1000, !0xfff - 0x1000), 0, 52),
    ] {
        let what = Invalidation::of(range, 1, false);
        driver.invalidate(DOMAIN, &what).unwrap();
        assert_eq!(
            model.received(),
            [Received::Pages(7, address, mask, false), Received::Wait]
        );
    }
    // Tables without a range: everything.
    let what = Invalidation::of(Span::new(0, 0), 0, true);
    driver.invalidate(DOMAIN, &what).unwrap();
    assert_eq!(model.received(), [whole(7), Received::Wait]);
    // Nothing at all, and a domain that no device can be in.
    let nothing = Invalidation::of(Span::new(0, 0), 0, false);
    driver.invalidate(DOMAIN, &nothing).unwrap();
    driver.invalidate_domain(DomainId(1 << 16 | 7)).unwrap();
    assert_eq!(model.received(), []);
}

#[test]
fn a_table_that_has_grown_is_walked_from_its_new_root_by_all_devices_of_the_domain() {
    let (driver, model) = enabled(CONFIG);
    let tables = HeapTables::with_tables_at(64, 1 << 40).unwrap();
    let mut table = Table::new(AmdV1::new(1).unwrap(), &tables).unwrap();
    table
        .map(0, &[Span::new(0x9000, 0x1000)], Prot::RW)
        .unwrap();
    let old = table.root();
    // The first and the last of the table; another domain; one that is not attached any more.
    let devices = [0, SOURCE, 0x3ff];
    for device in devices {
        driver.attach(DeviceId(device.into()), DOMAIN, old).unwrap();
    }
    let (other, gone) = (DeviceId(5), DeviceId(6));
    driver.attach(other, DomainId(8), root(0x5000, 2)).unwrap();
    driver.attach(gone, DOMAIN, old).unwrap();
    driver.detach(gone).unwrap();
    for device in devices {
        assert_eq!(model.look_up(device), Some((7, old.address, 1)));
    }
    model.received();

    let mut gather = Gather::new();
    let new = table.grow(6, &mut gather).unwrap();
    model.state().broken.mute = true;
    let failed = gather.flush_with(|what| driver.invalidate(DOMAIN, what));
    assert!(matches!(failed, Err(FlushError::Unit { .. })));
    model.state().broken.mute = false;
    model.received();
    // The stores are done. The unit was not heard, and is received again.
    let flushed = gather
        .flush_with(|what| driver.invalidate(DOMAIN, what))
        .unwrap();
    table.reclaim(flushed);
    assert_eq!(
        model.received(),
        [
            Received::Device(0),
            Received::Device(SOURCE),
            Received::Device(0x3ff),
            Received::Barrier,
            whole(7),
            Received::Wait
        ]
    );
    for device in devices {
        assert_eq!(model.look_up(device), Some((7, new.address, 6)));
    }
    assert_eq!(model.look_up(5), Some((8, 0x5000, 2)));
    assert_eq!(model.look_up(6), None);
    // Who comes now comes to the new root.
    let refused = driver.attach(gone, DOMAIN, old);
    assert!(matches!(refused, Err(UnitAttachError::OtherRoot { .. })));
    driver.attach(gone, DOMAIN, new).unwrap();
}

#[test]
fn a_root_that_the_unit_cannot_walk_is_refused_and_the_old_one_stays() {
    let (driver, model) = unit(1 << 6, CONFIG);
    driver.enable().unwrap();
    let tables = HeapTables::with_tables_at(64, 1 << 40).unwrap();
    let mut table = Table::new(AmdV1::new(4).unwrap(), &tables).unwrap();
    table
        .map(0, &[Span::new(0x9000, 0x1000)], Prot::RW)
        .unwrap();
    let old = table.root();
    driver.attach(DEVICE, DOMAIN, old).unwrap();
    model.received();
    let mut gather = Gather::new();
    table.grow(5, &mut gather).unwrap();
    let refused = gather
        .flush_with(|what| driver.invalidate(DOMAIN, what))
        .unwrap_err();
    let cause = UnitAttachError::Levels {
        format: FormatId::AmdV1,
        levels: 5,
        offered: 0b1_1110,
    };
    let domain = DOMAIN;
    assert_eq!(refused, FlushError::Root { domain, cause });
    assert_eq!(model.received(), []);
    assert_eq!(model.look_up(SOURCE), Some((7, old.address, 4)));
    let _ = gather.never_walked();
}
