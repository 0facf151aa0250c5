//! The driver against plain sets, in any order of what may happen; and what it says of free memory.

use std::collections::BTreeSet;
use std::time::Duration;

use crate::fake::{Answers, Faked, Handle, PAGE, world};
use proptest::prelude::*;
use runs::Span;
use virtio_balloon::driver::{DriverError, DriverSettings, Hinting};
use virtio_balloon::{BalloonConfig, Features, Queue, Tag, Wait};

#[derive(Clone, Debug)]
enum Op {
    Inflate(u64),
    Deflate(u64),
    Follow(u32),
    Migrate(usize, usize),
    OutOfMemory,
    FreezeAndRestore,
    /// The device does not answer the next, and then it does.
    Silent(Box<Op>),
}

fn op() -> impl Strategy<Value = Op> {
    let plain = prop_oneof![
        4 => (0u64..260).prop_map(Op::Inflate),
        4 => (0u64..260).prop_map(Op::Deflate),
        2 => (0u32..260).prop_map(Op::Follow),
        3 => (any::<usize>(), any::<usize>()).prop_map(|(old, new)| Op::Migrate(old, new)),
        1 => Just(Op::OutOfMemory),
        1 => Just(Op::FreezeAndRestore),
    ];
    let silent = plain.clone().prop_map(|op| Op::Silent(Box::new(op)));
    prop_oneof![6 => plain, 1 => silent]
}

/// Does it; true when all went well.
fn step(world: &Handle, driver: &mut Faked, op: &Op) -> bool {
    match op {
        Op::Inflate(pages) => driver.inflate(pages * PAGE).is_ok(),
        Op::Deflate(pages) => driver.deflate(pages * PAGE).is_ok(),
        Op::Follow(pages) => {
            world.with(|world| world.config.num_pages = *pages);
            driver.follow().is_ok()
        }
        Op::Migrate(old, new) => {
            let pair = world.with(|world| {
                let nth =
                    |set: &BTreeSet<u64>, nr: usize| set.iter().nth(nr % set.len().max(1)).copied();
                let (old, new) = (nth(&world.taken, *old)?, nth(&world.free, *new)?);
                world.free.remove(&new);
                world.taken.insert(new);
                Some((old, new))
            });
            let Some((old, new)) = pair else { return true };
            let migrated = driver.migrate(old, new);
            let back = match migrated {
                Ok(()) => Some(old),
                Err(
                    DriverError::Busy | DriverError::NotHeld { .. } | DriverError::BadBlock { .. },
                ) => Some(new),
                // It failed before the first report, or after it: then both are the balloon's.
                Err(_) => (driver.held() < world.with(|world| world.taken.len() as u64) * PAGE)
                    .then_some(new),
            };
            world.with(|world| {
                if let Some(page) = back {
                    world.taken.remove(&page);
                    world.initialized.remove(&page);
                    world.free.insert(page);
                }
            });
            migrated.is_ok()
        }
        Op::OutOfMemory => driver.out_of_memory().is_ok(),
        Op::FreezeAndRestore => driver.freeze().and_then(|()| driver.restore()).is_ok(),
        Op::Silent(op) => {
            world.with(|world| world.answers = Answers::Never);
            step(world, driver, op);
            world.with(crate::fake::World::catch_up);
            false
        }
    }
}

proptest! {
    #[test]
    fn every_page_is_in_the_balloon_or_out_of_it(
        ops in proptest::collection::vec(op(), 1..25),
        (bulk, init) in (any::<bool>(), any::<bool>()),
        data in proptest::collection::btree_set(0u64..400, 0..40),
        scattered in proptest::collection::btree_set(0u64..400, 1..200),
        bitmaps in 1usize..4,
        round in prop_oneof![Just(u64::MAX), 1u64..90_000],
        pfns in 1u16..40,
    ) {
        // Some near one another, others each in a window of its own.
        let pages = scattered.iter().map(|nr| if nr % 7 == 0 { nr << 16 } else { *nr });
        let mut world = world(pages);
        if bulk {
            world = world.bulk();
        }
        if init {
            world = world.init();
        }
        // Pages of which the device says that they are not initialized.
        let data: BTreeSet<u64> = data.iter().map(|nr| nr * PAGE).collect();
        world.with(|world| world.data.clone_from(&data));
        let settings = DriverSettings {
            init_on_inflate: init.then(|| world.with(|world| world.init)),
            bitmaps,
            round,
            pfns,
            tries: 0,
            out_of_memory: 5 * PAGE,
            wait: Wait::Sleep { most: Duration::from_millis(3) },
            ..DriverSettings::default()
        };
        let mut driver = world.driver(settings);
        let mut silent = false;
        for op in &ops {
            let well = step(&world, &mut driver, op);
            silent |= !well;
            if silent {
                // Told twice, perhaps; but never does the device have what the guest has.
                prop_assert!(world.with(|world| world.host.is_subset(&world.taken)));
            } else {
                world.agree(&driver);
            }
            world.with(|world| {
                let zeroed = match init {
                    true => &world.taken - &data,
                    false => BTreeSet::new(),
                };
                match silent {
                    true => assert!(world.initialized.is_subset(&zeroed)),
                    false => assert_eq!(world.initialized, zeroed),
                }
            });
            prop_assert_eq!(driver.held(), world.with(|world| world.taken.len() as u64) * PAGE);
            if matches!(op, Op::FreezeAndRestore) {
                silent = false;
                world.with(|world| world.twice = 0);
            }
        }
        driver.remove().unwrap();
        world.nothing_is_left();
        let free = world.with(|world| world.free.len());
        prop_assert_eq!(free, scattered.len());
    }
}

#[test]
fn statistics_wait_with_the_device_until_it_asks() {
    let world = world(0..100);
    let mut driver = world.driver(DriverSettings::default());
    let free = || world.with(|world| world.stats.unwrap().get(Tag::FreeMemory));
    assert_eq!(free(), Some(100 * PAGE), "the first buffer");
    assert_eq!(driver.answer_stats(), Ok(false));
    driver.inflate(30 * PAGE).unwrap();
    assert_eq!(driver.answer_stats(), Ok(false));
    assert_eq!(free(), Some(100 * PAGE));
    world.with(crate::fake::World::ask_stats);
    assert_eq!(driver.answer_stats(), Ok(true));
    assert_eq!(free(), Some(70 * PAGE));
    assert_eq!(driver.answer_stats(), Ok(false));
    world.with(|world| world.offered = world.offered.without(Features::STATS_VQ));
    driver.freeze().unwrap();
    driver.restore().unwrap();
    let feature = Features::STATS_VQ;
    assert_eq!(
        driver.answer_stats(),
        Err(DriverError::NotNegotiated { feature })
    );
}

#[test]
fn hinted_pages_are_kept_until_it_is_over() {
    let world = world(0..4096);
    let mut driver = world.driver(DriverSettings::default());
    assert_eq!(driver.hint(), Ok(Hinting::Nothing));
    driver.inflate(1024 * PAGE).unwrap();
    world.with(|world| world.config.free_page_hint_cmd_id = 5);
    let bytes = 3 << 22;
    assert_eq!(driver.hint(), Ok(Hinting::Hinted { command: 5, bytes }));
    assert_eq!(driver.hint(), Ok(Hinting::Nothing), "once for each command");
    world.with(|world| {
        assert_eq!(world.hints, [5, BalloonConfig::HINT_STOP]);
        let blocks: Vec<_> = (1..4).map(|nr| Span::new(nr << 22, 1 << 22)).collect();
        assert_eq!(world.reported, blocks);
        assert!(world.free.is_empty());
        world.config.free_page_hint_cmd_id = BalloonConfig::HINT_STOP;
    });
    assert_eq!(driver.hint(), Ok(Hinting::Nothing));
    assert!(
        world.with(|world| world.free.is_empty()),
        "stopped, not done"
    );
    world.with(|world| world.config.free_page_hint_cmd_id = BalloonConfig::HINT_DONE);
    assert_eq!(driver.hint(), Ok(Hinting::Done { bytes }));
    assert_eq!(world.with(|world| world.free.len()), 3072);
    world.agree(&driver);
    // Something else in the configuration changes on the way.
    world.with(|world| {
        world.reported.clear();
        world.config.free_page_hint_cmd_id = 6;
        world.stop_hints = Some((1, 6));
    });
    assert_eq!(driver.hint(), Ok(Hinting::Hinted { command: 6, bytes }));
    world.with(|world| world.config.free_page_hint_cmd_id = BalloonConfig::HINT_DONE);
    assert_eq!(driver.hint(), Ok(Hinting::Done { bytes }));
    // The command changes on the way; hinted pages come back with the rest.
    world.with(|world| {
        world.reported.clear();
        world.config.free_page_hint_cmd_id = 7;
        world.stop_hints = Some((2, 8));
    });
    assert_eq!(
        driver.hint(),
        Ok(Hinting::Hinted {
            command: 7,
            bytes: 2 << 22
        })
    );
    driver.remove().unwrap();
    world.nothing_is_left();
}

#[test]
fn without_room_for_hints_they_are_not_negotiated() {
    let world = world(0..10);
    world.with(|world| world.words = 1);
    let driver = world.driver(DriverSettings::default());
    assert!(!driver.features().contains(Features::FREE_PAGE_HINT));
    assert!(driver.features().contains(Features::PAGE_REPORTING));
}

#[test]
fn the_poison_value_is_stated_or_reporting_is_off() {
    let poison = Some(0xaaaa_aaaa);
    let cases = [
        (None, true, false, true),
        (poison, true, true, true),
        (poison, false, false, false),
    ];
    for (value, offered, accepted, reporting) in cases {
        let world = world(0..10);
        if !offered {
            world.with(|world| world.offered = world.offered.without(Features::PAGE_POISON));
        }
        let driver = world.driver(DriverSettings {
            poison: value,
            ..DriverSettings::default()
        });
        assert_eq!(driver.features().contains(Features::PAGE_POISON), accepted);
        assert_eq!(
            driver.features().contains(Features::PAGE_REPORTING),
            reporting
        );
        let told = world.with(|world| world.config.poison_val);
        assert_eq!(told, value.filter(|_| accepted).unwrap_or(0));
    }
}

#[test]
fn blocks_of_no_whole_pages_are_not_reported() {
    let world = world(0..10);
    let mut driver = world.driver(DriverSettings::default());
    for block in [Span::new(1, PAGE), Span::new(0, 0), Span::new(0, 1 << 32)] {
        assert_eq!(
            driver.report(&[block]),
            Err(DriverError::BadBlock { block })
        );
    }
    assert_eq!(driver.report(&[]), Ok(0));
    world.with(|world| world.answers = Answers::Never);
    let block = Span::new(0, PAGE);
    let silent = driver.report(&[block]);
    assert!(matches!(
        silent,
        Err(DriverError::Silent {
            queue: Queue::Reporting,
            ..
        })
    ));
    assert_eq!(driver.report(&[block]), Err(DriverError::Busy));
}
