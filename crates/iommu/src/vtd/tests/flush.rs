//! What a flush costs: commands and waits for a gather.

use std::vec::Vec;

use iopt::format::VtdSs;
use iopt::{Gather, NoRuns, Prot, Table, TableOps as _};
use runs::PageSizes;

use super::*;
use crate::commands::{Block, MOST_PAGE_COMMANDS, Room, blocks};

const MIB: u64 = 1 << 20;

/// Unmaps pages of one table by one gather, flushes it, and returns commands, waits, and what the
/// unit was received, after looking that all of it was named.
fn unmap(cap: u64, sizes: u64, pages: &[Span<Iova>]) -> (u64, u64, Vec<Received>) {
    let (driver, model) = enabled(cap, ECAP, Mode::Legacy);
    let tables = HeapTables::with_tables(2048).unwrap();
    let sizes = PageSizes::from_bits(sizes);
    let format = VtdSs::new(4).unwrap();
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
    let received = received(&model);
    for page in pages {
        for address in (page.start..=page.last()).step_by(4096) {
            assert!(
                received.iter().any(|received| names(received, address)),
                "{address:#x}"
            );
        }
    }
    (
        after.commands - before.commands,
        after.waits - before.waits,
        received,
    )
}

fn names(received: &Received, address: u64) -> bool {
    match *received {
        Received::Iotlb(2, 7, None) => true,
        Received::Iotlb(3, 7, Some((first, mask, _))) => (first ^ address) >> (12 + mask) == 0,
        _ => false,
    }
}

#[test]
fn one_gather_costs_one_wait() {
    let all = 1 << 12 | 1 << 21 | 1 << 30;
    let small = 1 << 12;
    let page = [Span::new(0x1234_5000, 0x1000)];
    let gib = [Span::new(1 << 30, 1 << 30)];
    // Odd pages of 256 leaf tables.
    let scattered: Vec<_> = (0..256)
        .map(|n| Span::new(n * 2 * MIB + (n * 7 % 512) * 4096, 0x1000))
        .collect();
    // 16 pairs: each needs two commands of its own.
    let pairs: Vec<_> = (1..17)
        .map(|n| Span::new(n * 2 * MIB - 0x1000, 0x2000))
        .collect();
    let mask = |mask: u64| CAP & !(0x3f << 48) | mask << 48;
    // Capabilities, sizes, what is unmapped; commands and waits.
    type Row<'a> = (&'a str, u64, u64, &'a [Span<Iova>], u64);
    let rows: [Row<'_>; 9] = [
        ("1 page", CAP, all, &page, 1),
        ("256 scattered pages", CAP, all, &scattered, 16),
        ("16 pairs", CAP, all, &pairs, 32),
        ("1 GiB, one leaf", CAP, all, &gib, 1),
        ("1 GiB, 4 KiB leaves", CAP, small, &gib, 1),
        (
            "1 GiB, 2 MiB leaves, mask 9",
            mask(9),
            small | 1 << 21,
            &gib,
            1,
        ),
        ("1 GiB, one leaf, mask 9", mask(9), all, &gib, 1),
        ("256 scattered pages, mask 0", mask(0), all, &scattered, 1),
        (
            "1 page, no page-selective",
            CAP & !PAGE_SELECTIVE,
            all,
            &page,
            1,
        ),
    ];
    for (name, cap, sizes, pages, expected) in rows {
        let (commands, waits, received) = unmap(cap, sizes, pages);
        assert_eq!((commands, waits), (expected, 1), "{name}: {received:?}");
        assert_eq!(received.len() as u64, commands + waits, "{name}");
    }
    assert_eq!(32, MOST_PAGE_COMMANDS);
}

#[test]
fn leaves_only_is_said_when_no_table_was_unlinked() {
    let (driver, model) = enabled(CAP, ECAP, Mode::Legacy);
    for (unlinked, hint) in [(false, true), (true, false)] {
        let what = Invalidation::of(Span::new(0x3000, 0x1000), 1, unlinked);
        driver.invalidate(DOMAIN, &what).unwrap();
        assert_eq!(
            received(&model),
            [
                Received::Iotlb(3, 7, Some((0x3000, 0, hint))),
                Received::Wait(0)
            ]
        );
    }
    // Tables without a range: everything.
    let what = Invalidation::of(Span::new(0, 0), 0, true);
    driver.invalidate(DOMAIN, &what).unwrap();
    assert_eq!(
        received(&model),
        [Received::Iotlb(2, 7, None), Received::Wait(0)]
    );
    // Nothing at all, and a domain that no device can be in.
    driver
        .invalidate(DOMAIN, &Invalidation::of(Span::new(0, 0), 0, false))
        .unwrap();
    let what = Invalidation::of(Span::new(0, 0x1000), 1, true);
    driver.invalidate(DomainId(7 | 1 << 8), &what).unwrap();
    driver.invalidate_domain(DomainId(1 << 16 | 7)).unwrap();
    assert_eq!(received(&model), []);
}

#[test]
fn a_large_leaf_is_named_whole() {
    let block = |level: u32, range, most| {
        let what = Invalidation::of(range, 1 << level, false);
        blocks(&what, most, &mut Room::new()).map(<[_]>::to_vec)
    };
    let part = Span::new((5 << 21) + 0x3000, 0x1000);
    let address = 5 << 21;
    assert_eq!(
        block(1, part, 18),
        Some([Block { address, mask: 9 }].into())
    );
    assert_eq!(
        block(2, part, 18),
        Some(
            [Block {
                address: 0,
                mask: 18
            }]
            .into()
        )
    );
    assert_eq!(block(2, part, 17), None);
    assert_eq!(block(1, part, 8), None);
    // The last page of all.
    let last = Span::new(!0xfff, 0x1000);
    let address = !0xfff;
    assert_eq!(
        block(0, last, 18),
        Some([Block { address, mask: 0 }].into())
    );
    // 32 pieces are few, 33 are many.
    let pieces = |count: u64| block(0, Span::new(0, count << 21), 9).map(|blocks| blocks.len());
    assert_eq!((pieces(32), pieces(64)), (Some(32), None));
}

#[test]
fn blocks_cover_the_range_and_less_than_twice_of_it() {
    let mut random = fastrand::Rng::with_seed(1);
    let mut next = || random.u64(..);
    for _ in 0..200_000 {
        let bits = next() % 40;
        let first = next() >> (next() % 52) >> 12;
        let count = 1 + next() % (1 << bits);
        let Some(range) = Span::checked(first << 12, count << 12) else {
            continue;
        };
        let what = Invalidation::of(range, 1, false);
        let most = 52;
        let mut room = Room::new();
        let found = blocks(&what, most, &mut room).unwrap();
        assert!(found.len() <= 2, "{range}: {found:?}");
        let mut reached = range.start >> 12;
        let mut total = 0u128;
        for block in found.iter() {
            let (start, pages) = (block.address >> 12, 1u64 << block.mask);
            assert_eq!(start % pages, 0, "{range}: {found:?}");
            assert!(start <= reached, "{range}: {found:?}");
            reached = start + pages;
            total += u128::from(pages);
        }
        assert!(reached > range.last() >> 12, "{range}: {found:?}");
        assert!(total < 2 * u128::from(count), "{range}: {found:?}");
    }
}

#[test]
fn a_new_root_is_refused_and_the_old_one_is_not_new() {
    let tables = HeapTables::with_tables(64).unwrap();
    let (driver, model) = enabled(CAP, ECAP, Mode::Legacy);
    driver.attach(DEVICE, DOMAIN, root(0x1000, 3)).unwrap();
    // Only AMD's tables grow, so one of these plays the part.
    let mut table = Table::new(iopt::format::AmdV1::new(3).unwrap(), &tables).unwrap();
    let mut gather = Gather::new();
    table.grow(4, &mut gather).unwrap();
    let asked = gather.invalidation().new_root().unwrap();
    let refused = gather
        .flush_with(|what| driver.invalidate(DOMAIN, what))
        .unwrap_err();
    let cause = UnitAttachError::OtherRoot {
        domain: DOMAIN,
        there: root(0x1000, 3),
        asked,
    };
    assert_eq!(
        refused,
        FlushError::Root {
            domain: DOMAIN,
            cause
        }
    );
    assert_eq!(received(&model), []);
    let _ = gather.never_walked();
}
