//! Pages that the device has initialized, as the guest learns of them.

use std::collections::BTreeSet;

use crate::fake::{Handle, PAGE, told, world};
use runs::Span;
use virtio_balloon::driver::{DriverSettings, Wire};
use virtio_balloon::{BulkBit, Features, GuestPage, InitBit, Queue};

fn settings(world: &Handle) -> DriverSettings {
    DriverSettings {
        init_on_inflate: Some(world.with(|world| world.init)),
        ..DriverSettings::default()
    }
}

fn pages(numbers: impl IntoIterator<Item = u64>) -> BTreeSet<u64> {
    numbers.into_iter().map(|nr| nr * PAGE).collect()
}

#[test]
fn the_guest_learns_which_pages_are_initialized() {
    let world = world(0..1000).init();
    let data = pages([0, 7, 8, 300, 601]);
    world.with(|world| world.data.clone_from(&data));
    let mut driver = world.driver(settings(&world));
    assert_eq!(driver.wire(), Wire::Pfns);
    driver.inflate(601 * PAGE).unwrap();
    world.agree(&driver);
    // In three messages, of which the last has 89 numbers.
    assert_eq!(world.with(|world| world.messages), 3);
    let zeroed = |world: &Handle| world.with(|world| &world.taken - &data);
    assert_eq!(
        world.with(|world| world.initialized.clone()),
        zeroed(&world)
    );
    assert_eq!(zeroed(&world).len(), 597);

    // A page that comes in the place of another; and one that keeps its data.
    for (old, new) in [(5, 999), (6, 601)] {
        world.with(|world| {
            assert!(world.free.remove(&(new * PAGE)) && world.taken.insert(new * PAGE));
        });
        driver.migrate(old * PAGE, new * PAGE).unwrap();
        world.with(|world| {
            world.taken.remove(&(old * PAGE));
            world.free.insert(old * PAGE);
            let known = world.initialized.contains(&(new * PAGE));
            assert_eq!(known, new == 999);
        });
    }
    // Messages of deflateq have no bitmap, which the fake device checks.
    driver.deflate(0).unwrap();
    let left = told(&world.log(), Queue::Deflate);
    assert_eq!(left.iter().map(|run| run.len).sum::<u64>(), 603 * PAGE);
    driver.remove().unwrap();
    world.nothing_is_left();
}

#[test]
fn bits_that_the_device_has_not_written_are_none() {
    for (most, known) in [(0, 0), (1, 8), (31, 248), (32, 256), (u32::MAX, 256)] {
        let world = world(0..256).init();
        world.with(|world| world.most_written = most);
        let mut driver = world.driver(settings(&world));
        driver.inflate(256 * PAGE).unwrap();
        let initialized = world.with(|world| world.initialized.clone());
        assert_eq!(initialized, pages(0..known), "{most} bytes written");
    }
}

#[test]
fn a_page_of_the_guest_is_initialized_when_all_of_it_is() {
    for (pfns, data) in [(16, 31), (32, 16), (256, 20)] {
        let large = GuestPage::SIZE_64K;
        let world = world([]).init();
        world.with(|world| {
            world.page = large;
            world.span = Span::new(0, 4 * large.bytes());
            world.free = (0..4).map(|nr| nr * large.bytes()).collect();
            // One of the 16 numbers of one page: the last, the first, or another.
            world.data = pages([data]);
        });
        let mut driver = world.driver(DriverSettings {
            pfns,
            ..settings(&world)
        });
        driver.inflate(4 * large.bytes()).unwrap();
        world.agree(&driver);
        let expected = pages([0, 32, 48]);
        assert_eq!(world.with(|world| world.initialized.clone()), expected);
    }
}

#[test]
fn bitmaps_are_accepted_only_where_they_are_wanted_and_offered_and_not_with_bulk() {
    let bulk = BulkBit::DEFAULT.feature();
    let init = |world: &Handle| world.with(|world| world.init.feature());
    let none = Features(0);
    // Not wanted, with everything offered.
    let world_of_both = world(0..10).bulk().init();
    let driver = world_of_both.driver(DriverSettings::default());
    let private = driver.features().0 & (bulk.0 | init(&world_of_both).0);
    assert_eq!(Features(private), bulk);
    for (world, expected) in [
        (world(0..10), none),
        (world(0..10).bulk(), bulk),
        (world(0..10).init(), init(&world_of_both)),
        (world(0..10).bulk().init(), init(&world_of_both)),
    ] {
        let mut driver = world.driver(settings(&world));
        let private = driver.features().0 & (bulk.0 | init(&world).0);
        assert_eq!(Features(private), expected);
        driver.inflate(10 * PAGE).unwrap();
        world.agree(&driver);
        let known = world.with(|world| world.initialized.len());
        assert_eq!(known, if expected == init(&world) { 10 } else { 0 });
    }
    // One bit for both is that of messages in bulk.
    let world = world(0..10).bulk();
    let mut driver = world.driver(DriverSettings {
        init_on_inflate: InitBit::new(BulkBit::DEFAULT.number()).ok(),
        ..DriverSettings::default()
    });
    assert_eq!(driver.wire(), Wire::Bulk);
    driver.inflate(10 * PAGE).unwrap();
    world.agree(&driver);
}
