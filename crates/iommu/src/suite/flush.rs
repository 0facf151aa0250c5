//! Commands of a flush, and their cost.
//!
//! One gather costs one wait, and as few commands as its ranges have blocks; where that is too much, or the unit has
//! no such command, the whole domain is one. Leaves are named whole, upper levels where a table was unlinked. When
//! a flush returns, nothing of its ranges is cached; what another domain has there may be. Nothing is said about
//! nothing, about a domain that no device can be in, and by a unit that is off.

use iopt::{AnyTable, Gather, NoRuns, Prot};
use runs::PageSizes;

use super::*;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// A gather: its name, the sizes of leaves, and the pages that are unmapped.
type Pages = (&'static str, u64, Vec<Span<Iova>>);

fn gathers() -> [Pages; 9] {
    let (all, small) = (u64::MAX, 1 << 12);
    let one = |start, len| vec![Span::new(start, len)];
    // Odd pages of 256 leaf tables.
    let scattered = (0..256).map(|n| Span::new(n * 2 * MIB + (n * 7 % 511) * 4096, 0x1000));
    // Pages on both sides of a table's end: each pair needs two commands of its own.
    let pairs = (1..17).map(|n| Span::new(n * 2 * MIB - 0x1000, 0x2000));
    [
        ("1 page", all, one(0x1234_5000, 0x1000)),
        ("32 KiB", all, one(0x8000, 0x8000)),
        ("31 pages", all, one(0x1234_1000, 31 * 0x1000)),
        ("2 leaves of 2 MiB", all, one(8 * MIB, 4 * MIB)),
        (
            "a page and 2 MiB",
            all,
            [one(0x5000, 0x1000), one(2 * MIB, 2 * MIB)].concat(),
        ),
        ("256 scattered pages", all, scattered.collect()),
        ("16 pairs", all, pairs.collect()),
        ("1 GiB, one leaf", all, one(GIB, GIB)),
        ("1 GiB, 4 KiB leaves", small, one(GIB, GIB)),
    ]
}

/// Pages beside these, so that no table goes.
fn beside(pages: &[Span<Iova>]) -> Vec<u64> {
    let beside = |page: &Span<Iova>| {
        let before = page.start.checked_sub(0x1000);
        before.into_iter().chain([page.start + page.len])
    };
    pages.iter().flat_map(beside).collect()
}

pub(crate) fn one_gather_costs_one_wait_and_nothing_of_it_is_left<G: Rig>(rig: &G)
where
    Driven<G>: Operations + Send + Sync,
{
    for (rig, format, levels, kept, costs) in rig.costs() {
        for (pages, expected) in gathers().iter().zip(costs) {
            let cost = gather(&rig, (format, levels), pages, kept);
            assert_eq!(cost, (expected, 1), "{format:?}, {}", pages.0);
        }
    }
}

/// The device, and one of another domain, have the same pages; these are unmapped for both, and flushed for the first.
/// Commands and waits.
fn gather<G: Rig>(
    rig: &G,
    (format, levels): (FormatId, u8),
    (name, sizes, pages): &Pages,
    kept: bool,
) -> (u64, u64)
where
    Driven<G>: Operations + Send + Sync,
{
    let (driver, model) = rig.enabled();
    let (tables, model) = rig.walking(model);
    let sizes = PageSizes::from_bits(*sizes);
    let places = [(G::DEVICE, G::DOMAIN), (SECOND, OTHER)];
    let made = places.map(|(device, domain)| {
        let table = AnyTable::new(format, levels, sizes, tables.clone()).unwrap();
        driver.attach(device, domain, table.root()).unwrap();
        for page in pages {
            let memory = [Span::new(page.start + (1 << 38), page.len)];
            table.map(page.start, &memory, Prot::RW).unwrap();
        }
        for page in beside(pages).into_iter().filter(|_| kept) {
            let memory = [Span::new(1 << 38, 0x1000)];
            table.map(page, &memory, Prot::RW).unwrap();
        }
        table
    });
    let some = |page: &Span<Iova>| {
        let step = (page.len / 4).max(4096) as usize;
        (page.start..page.start + page.len)
            .step_by(step)
            .chain([page.last() & !0xfff])
    };
    let all = || pages.iter().flat_map(some);
    let reaches =
        |received: &[G::Received], place, iova| rig.reaches(&model, received, place, iova);
    for place in places {
        assert!(all().all(|iova| reaches(&[], place, iova)), "{name}");
    }
    let [mut gathered, mut theirs] = [&made[0], &made[1]].map(|table| {
        let mut gather = Gather::new();
        for page in pages {
            let alone = table.alone();
            alone.unmap(*page, &mut gather, &mut NoRuns).unwrap();
        }
        gather
    });
    for place in places {
        let known = all().all(|iova| reaches(&[], place, iova));
        assert!(known, "{name}: the unit does not remember");
    }
    G::received(&model);
    let before = driver.counters();
    let flushed = gathered.flush_with(|what| driver.invalidate(G::DOMAIN, what));
    made[0].reclaim(flushed.unwrap());
    let after = driver.counters();
    let received = G::received(&model);
    for iova in all() {
        assert!(!reaches(&received, places[0], iova), "{name}: {iova:#x}");
        assert!(reaches(&received, places[1], iova), "{name}: {iova:#x}");
    }
    let flushed = theirs.flush_with(|what| driver.invalidate(OTHER, what));
    made[1].reclaim(flushed.unwrap());
    // Pages that are mapped anew, in tables that are used again, are found.
    for page in pages {
        let memory = [Span::new(page.start + (1 << 39), page.len)];
        made[0].map(page.start, &memory, Prot::RW).unwrap();
    }
    assert!(all().all(|iova| reaches(&[], places[0], iova)), "{name}");
    G::received(&model);
    assert_eq!(after.batches - before.batches, 1);
    let cost = (after.commands - before.commands, after.waits - before.waits);
    assert_eq!(received.len() as u64, cost.0 + cost.1, "{received:?}");
    cost
}

pub(crate) fn ranges_levels_and_tables_are_said_as_the_unit_has_them<G: Rig>(rig: &G)
where
    Driven<G>: Operations + Send + Sync,
{
    for root in rig.stages() {
        let (driver, model) = rig.enabled();
        driver.attach(G::DEVICE, G::DOMAIN, root).unwrap();
        G::received(&model);
        // Tables without a range: everything.
        let whole = (Span::new(0, 0), 0, true, rig.whole(root, G::DOMAIN));
        for (range, levels, unlinked, expected) in rig.flushes(root).into_iter().chain([whole]) {
            let what = Invalidation::of(range, levels, unlinked);
            driver.invalidate(G::DOMAIN, &what).unwrap();
            let received = G::received(&model);
            assert_eq!(received, expected, "{range}, {levels:#b}, {unlinked}");
        }
    }
}

pub(crate) fn nothing_is_flushed_where_nothing_can_be_cached<G: Rig>(rig: &G)
where
    Driven<G>: Operations + Send + Sync,
{
    let (driver, model) = rig.attached();
    let nothing = Invalidation::of(Span::new(0, 0), 0, false);
    driver.invalidate(G::DOMAIN, &nothing).unwrap();
    let page = Invalidation::of(Span::new(0x3000, 0x1000), 1, true);
    // No device can be in one, and none is in the other.
    for domain in [DomainId(u32::MAX), OTHER] {
        if domain != OTHER || rig.knows_members() {
            driver.invalidate(domain, &page).unwrap();
            driver.invalidate_domain(domain).unwrap();
        }
    }
    assert_eq!(G::received(&model), []);
    driver.disable().unwrap();
    G::received(&model);
    driver.invalidate_domain(G::DOMAIN).unwrap();
    assert_eq!(G::received(&model), [], "nothing is translated");
    driver.enable().unwrap();
    G::received(&model);
    driver.invalidate_domain(G::DOMAIN).unwrap();
    assert_eq!(G::received(&model), rig.whole(rig.root(), G::DOMAIN));
}
