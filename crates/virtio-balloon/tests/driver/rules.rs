//! The driver's life, each rule by itself, against a fake guest and a fake device.

use std::time::Duration;

use crate::fake::{self, Answers, Event, INDIRECT, PAGE, told, world};
use runs::Span;
use virtio_balloon::driver::{DriverError, DriverSettings, TargetProgress, Wire};
use virtio_balloon::{BalloonDriver, Features, Numbering, Queue, Wait};

fn settings() -> DriverSettings {
    DriverSettings::default()
}

const TWO_MB: u64 = 512;

#[test]
fn blocks_of_2m_come_first() {
    // Three whole blocks of 2 MiB, and scattered pages, among them a block of 64 KiB.
    let scattered = (2000..2100).step_by(3).chain(2112..2128);
    let world = world((0..3 * TWO_MB).chain(scattered));
    let pages = world.with(|world| world.free.len() as u64);
    let mut driver = world.driver(settings());
    assert_eq!(driver.inflate(pages * PAGE), Ok(TargetProgress::Reached));
    world.agree(&driver);
    let asked: Vec<u64> = world
        .log()
        .into_iter()
        .filter_map(|event| match event {
            Event::Asked(bytes) => Some(bytes),
            _ => None,
        })
        .collect();
    assert_eq!(asked[..3], [2 << 20; 3]);
    assert!(asked.is_sorted_by(|a, b| a >= b), "{asked:?}");
    assert!(asked.contains(&0x1_0000) && asked.ends_with(&[PAGE]));
    // A page for each page, a call for each size that was not to be had, and no more.
    assert!(asked.len() < 3 + 10 + 50, "{}", asked.len());
}

#[test]
fn a_pass_covers_all_bitmaps() {
    // Some pages in each of 32 GiB.
    let gib = (1 << 30) / PAGE;
    let pages: Vec<u64> = (0..32)
        .flat_map(|nr| [nr * gib, nr * gib + 5, (nr + 1) * gib - 1])
        .collect();
    let world = world(pages.iter().copied()).bulk();
    let mut driver = world.driver(settings());
    assert_eq!(driver.inflate(96 * PAGE), Ok(TargetProgress::Reached));
    world.agree(&driver);
    assert_eq!(world.with(|world| world.messages), 1);
}

#[test]
fn fewer_bitmaps_mean_more_passes() {
    let gib = (1 << 30) / PAGE;
    // All of the first window before the second, as the fake guest gives them.
    let pages: Vec<u64> = (0..8).flat_map(|nr| [nr * gib, nr * gib + 7]).collect();
    for (there, wished, passes) in [(1, 32, 8), (2, 32, 4), (32, 3, 3), (32, 32, 1)] {
        let world = world(pages.iter().copied()).bulk();
        // Words of which pages are held and hinted come first.
        world.with(|world| world.words = 2 + there);
        let mut driver = world.driver(DriverSettings {
            bitmaps: wished,
            ..settings()
        });
        assert_eq!(driver.inflate(16 * PAGE), Ok(TargetProgress::Reached));
        world.agree(&driver);
        assert_eq!(
            world.with(|world| world.messages),
            passes,
            "{there} of {wished}"
        );
        driver.remove().unwrap();
        world.nothing_is_left();
    }
}

#[test]
fn rounds_are_bounded_and_nothing_is_left() {
    for bulk in [false, true] {
        let mut world = world(0..100);
        if bulk {
            world = world.bulk();
        }
        world.with(|world| world.offered = world.offered.without(Features::DEFLATE_ON_OOM));
        let mut driver = world.driver(DriverSettings {
            round: 16 * PAGE,
            ..settings()
        });
        assert_eq!(driver.inflate(100 * PAGE), Ok(TargetProgress::Reached));
        let mut before = 0;
        for event in world.log() {
            if let Event::Actual(pages) = event {
                assert!(pages - before <= 16, "{before} to {pages}");
                before = pages;
            }
        }
        assert_eq!(before, 100);
        world.agree(&driver);
        driver.remove().unwrap();
        world.nothing_is_left();
    }
}

#[test]
fn without_buffers_the_bulk_feature_goes() {
    type Case = (&'static str, fn(&mut fake::World));
    let cases: [Case; 5] = [
        ("no bitmap", |world| world.words = 2),
        ("no buffer of its own", |world| world.bytes = 0),
        ("no buffer for the device", |world| world.shared = 0),
        ("an unknown format", |world| world.config.bulk_format = 2),
        ("messages too short", |world| {
            world.config.bulk_message_bytes = 23
        }),
    ];
    for (case, prepare) in cases {
        let world = world(0..1000).bulk();
        let bulk = world.with(|world| {
            prepare(world);
            world.bulk.feature()
        });
        let made = BalloonDriver::new(world.clone(), world.clone(), world.clone(), settings());
        let mut driver = match made {
            Ok(driver) => driver,
            // Not even for page numbers: then there is no driver, and nothing is left of it.
            Err(DriverError::NoMemory { .. }) => {
                assert!(case.starts_with("no buffer"), "{case}");
                world.nothing_is_left();
                continue;
            }
            Err(error) => panic!("{case}: {error}"),
        };
        assert!(!driver.features().contains(bulk), "{case}");
        assert_eq!(driver.wire(), Wire::Pfns, "{case}");
        assert_eq!(driver.inflate(1000 * PAGE), Ok(TargetProgress::Reached));
        world.agree(&driver);
        assert_eq!(world.with(|world| world.messages), 4, "{case}");
    }
    // Only the large ones are missing.
    let world = world(0..1000).bulk();
    world.with(|world| world.large = false);
    let driver = world.driver(settings());
    assert_eq!(driver.wire(), Wire::Pfns);
}

#[test]
fn a_bulk_bit_that_is_not_wanted_or_not_offered_is_not_accepted() {
    let unwanted = DriverSettings {
        bulk: None,
        ..settings()
    };
    let cases = [(world(0..10).bulk(), unwanted), (world(0..10), settings())];
    for (world, settings) in cases {
        let mut driver = world.driver(settings);
        assert_eq!(driver.wire(), Wire::Pfns);
        // The device takes page numbers on both queues, where the bit was not accepted.
        driver.inflate(10 * PAGE).unwrap();
        world.agree(&driver);
        assert_eq!(world.with(|world| world.most_bytes), 40);
        driver.deflate(3 * PAGE).unwrap();
        world.agree(&driver);
    }
}

#[test]
fn waiting_has_an_end() {
    let most = Duration::from_millis(30);
    let spin = Wait::Spin { looks: 1000 };
    for wait in [Wait::Sleep { most }, spin] {
        let world = world(0..100);
        let mut driver = world.driver(DriverSettings { wait, ..settings() });
        world.with(|world| world.answers = Answers::Never);
        let Err(DriverError::Silent {
            queue: Queue::Inflate,
            waited,
            looked,
        }) = driver.inflate(10 * PAGE)
        else {
            panic!("it answered")
        };
        match wait {
            Wait::Sleep { most } => assert!(waited >= most && waited < 2 * most),
            Wait::Spin { looks } => assert_eq!(looked, looks),
        }
        // The message is with the device: no page moves, and nothing is overwritten.
        assert_eq!(driver.inflate(20 * PAGE), Err(DriverError::Busy));
        assert_eq!(driver.deflate(0), Err(DriverError::Busy));
        assert_eq!(driver.held(), 10 * PAGE);
        // It answers after all.
        world.with(fake::World::catch_up);
        assert_eq!(driver.deflate(0), Ok(10 * PAGE));
        world.with(|world| world.answers = Answers::Never);
        assert!(driver.inflate(10 * PAGE).is_err());
        // Or it never does.
        driver.remove().unwrap();
        world.nothing_is_left();
    }
}

#[test]
fn a_broken_queue_is_named() {
    let world = world(0..100);
    let mut driver = world.driver(settings());
    world.with(|world| (world.answers, world.broken) = (Answers::Never, true));
    assert_eq!(driver.inflate(PAGE), Err(DriverError::Broken));
    for (id, answers) in [(1, 1), (0, 2), (0, 7)] {
        let world = fake::world(0..100);
        let mut driver = world.driver(settings());
        world.with(|world| world.answers = Answers::Wrong(id, answers));
        let queue = Queue::Inflate;
        assert_eq!(
            driver.inflate(PAGE),
            Err(DriverError::Answer { queue, answers, id })
        );
        assert_eq!(
            driver.inflate(PAGE),
            Err(DriverError::Answer { queue, answers, id })
        );
        driver.freeze().unwrap();
        world.nothing_is_left();
    }
    let world = fake::world(0..100);
    world.with(|world| world.refuses = true);
    let made = BalloonDriver::new(world.clone(), world.clone(), world.clone(), settings());
    assert!(matches!(made, Err(DriverError::Features { .. })));
    world.with(|world| (world.refuses, world.queue_size) = (false, 0));
    let made = BalloonDriver::new(world.clone(), world.clone(), world.clone(), settings());
    assert!(matches!(
        made,
        Err(DriverError::NoQueue {
            queue: Queue::Inflate,
            number: 0,
            size: 0
        })
    ));
    world.nothing_is_left();
}

#[test]
fn no_page_is_reused_before_the_answer() {
    for bulk in [false, true] {
        let mut world = world(0..600);
        if bulk {
            world = world.bulk();
        }
        let mut driver = world.driver(settings());
        driver.inflate(600 * PAGE).unwrap();
        world.log();
        world.with(|world| world.answers = Answers::Late(3));
        assert_eq!(driver.deflate(300 * PAGE), Ok(300 * PAGE));
        world.agree(&driver);
        let log = world.log();
        let answer = log
            .iter()
            .position(|event| *event == Event::Answered(Queue::Deflate));
        let given = log
            .iter()
            .position(|event| matches!(event, Event::GivenBack(_)));
        assert!(answer.unwrap() < given.unwrap(), "{log:?}");
        // No page is reused without an answer.
        world.with(|world| world.answers = Answers::Never);
        assert!(matches!(driver.deflate(0), Err(DriverError::Silent { .. })));
        assert!(
            !world
                .log()
                .iter()
                .any(|event| matches!(event, Event::GivenBack(_)))
        );
        assert_eq!(driver.held(), 300 * PAGE);
    }
}

#[test]
fn deflate_never_gives_back_more_than_was_taken() {
    let world = world(0..600);
    let mut driver = world.driver(settings());
    driver.inflate(500 * PAGE).unwrap();
    assert_eq!(driver.deflate(0), Ok(500 * PAGE));
    assert_eq!(driver.deflate(0), Ok(0));
    assert_eq!(driver.deflate(u64::MAX), Ok(0));
    world.with(|world| assert_eq!((world.taken.len(), world.free.len()), (0, 600)));
    assert_eq!(world.with(|world| world.config.actual), 0);
}

#[test]
fn migration_reports_the_new_page_then_the_old() {
    let world = world(0..20);
    let mut driver = world.driver(settings());
    driver.inflate(10 * PAGE).unwrap();
    world.log();
    let old = *world
        .with(|world| world.taken.first().copied())
        .as_ref()
        .unwrap();
    let new = world.with(|world| {
        let new = world.free.pop_last().unwrap();
        world.taken.insert(new);
        new
    });
    let (from, to) = (Span::new(old, PAGE), Span::new(new, PAGE));
    assert_eq!(
        driver.migrate(to.start, new),
        Err(DriverError::NotHeld { run: to })
    );
    assert_eq!(
        driver.migrate(old, old),
        Err(DriverError::BadBlock { block: from })
    );
    assert_eq!(driver.migrate(old, new), Ok(()));
    let told: Vec<_> = world
        .log()
        .into_iter()
        .filter(|event| matches!(event, Event::Message(..)))
        .collect();
    let expected = [
        Event::Message(Queue::Inflate, vec![to]),
        Event::Message(Queue::Deflate, vec![from]),
    ];
    assert_eq!(told, expected);
    world.with(|world| {
        world.taken.remove(&old);
        world.free.insert(old);
    });
    world.agree(&driver);
    // A busy balloon: try again.
    world.with(|world| world.answers = Answers::Never);
    assert!(driver.inflate(11 * PAGE).is_err());
    assert_eq!(driver.migrate(new, old), Err(DriverError::Busy));
    world.with(fake::World::catch_up);
    driver.remove().unwrap();
    world.nothing_is_left();
}

#[test]
fn out_of_memory_deflates_a_step() {
    let world = world(0..1000);
    let mut driver = world.driver(settings());
    driver.inflate(700 * PAGE).unwrap();
    assert_eq!(
        world.with(|world| world.managed),
        0,
        "the guest still counts on it"
    );
    for left in [444, 188, 0, 0] {
        driver.out_of_memory().unwrap();
        assert_eq!(driver.held(), left * PAGE);
        world.agree(&driver);
    }
    let mut driver = world.driver(DriverSettings {
        out_of_memory: 3 * PAGE,
        ..settings()
    });
    driver.inflate(7 * PAGE).unwrap();
    assert_eq!(driver.out_of_memory(), Ok(3 * PAGE));
    driver.freeze().unwrap();
    // Not negotiated: the balloon stays.
    world.with(|world| world.offered = world.offered.without(Features::DEFLATE_ON_OOM));
    driver.restore().unwrap();
    driver.inflate(7 * PAGE).unwrap();
    assert_eq!(driver.out_of_memory(), Ok(0));
    assert_eq!(driver.held(), 7 * PAGE);
}

#[test]
fn managed_pages_go_down_unless_the_balloon_gives_way() {
    let world = world(0..1000);
    world.with(|world| world.offered = world.offered.without(Features::DEFLATE_ON_OOM));
    let mut driver = world.driver(settings());
    driver.inflate(700 * PAGE).unwrap();
    assert_eq!(world.with(|world| world.managed), -700 * PAGE as i64);
    driver.deflate(100 * PAGE).unwrap();
    assert_eq!(world.with(|world| world.managed), -100 * PAGE as i64);
    driver.freeze().unwrap();
    assert_eq!(world.with(|world| world.managed), 0);
}

#[test]
fn what_was_got_is_reported_then_a_pause_and_again() {
    let pause = Duration::from_millis(200);
    for bulk in [false, true] {
        let mut world = world(0..50);
        if bulk {
            world = world.bulk();
        }
        let mut driver = world.driver(DriverSettings {
            tries: 2,
            ..settings()
        });
        let held = 50 * PAGE;
        assert_eq!(
            driver.inflate(80 * PAGE),
            Ok(TargetProgress::Starved { held })
        );
        world.agree(&driver);
        let log = world.log();
        let first = log
            .iter()
            .position(|event| *event == Event::Paused(pause))
            .unwrap();
        let pages: u64 = told(&log[..first], Queue::Inflate)
            .iter()
            .map(|run| run.len)
            .sum();
        assert_eq!(pages, held, "told before the pause");
        assert!(log[..first].contains(&Event::Actual(50)));
        assert_eq!(
            log.iter()
                .filter(|event| **event == Event::Paused(pause))
                .count(),
            2
        );
        // There is more later.
        world.with(|world| world.free.extend((50..80).map(|nr| nr * PAGE)));
        world.with(|world| world.span.len = 80 * PAGE);
        driver.freeze().unwrap();
        let mut driver = world.driver(settings());
        assert_eq!(driver.inflate(80 * PAGE), Ok(TargetProgress::Reached));
    }
}

#[test]
fn freeze_and_restore_leave_no_page_behind() {
    let world = world(0..2000).bulk();
    let mut driver = world.driver(settings());
    for _ in 0..3 {
        driver.inflate(1500 * PAGE).unwrap();
        world.agree(&driver);
        driver.freeze().unwrap();
        world.nothing_is_left();
        assert_eq!(driver.inflate(PAGE), Err(DriverError::Frozen));
        assert_eq!(driver.deflate(0), Err(DriverError::Frozen));
        driver.restore().unwrap();
        assert_eq!(driver.held(), 0);
    }
    // Told before, where the device still answers.
    driver.inflate(10 * PAGE).unwrap();
    world.log();
    driver.remove().unwrap();
    let log = world.log();
    let told = log
        .iter()
        .position(|event| matches!(event, Event::Message(Queue::Deflate, _)));
    assert!(told.unwrap() < log.iter().position(|event| *event == Event::Reset).unwrap());
    world.nothing_is_left();
}

#[test]
fn it_follows_the_device() {
    let world = world(0..2000);
    let mut driver = world.driver(settings());
    for pages in [1000, 200, 200, 1999, 0] {
        world.with(|world| world.config.num_pages = pages);
        assert_eq!(driver.follow(), Ok(TargetProgress::Reached));
        assert_eq!(world.with(|world| world.config.actual), pages);
        world.agree(&driver);
    }
}

#[test]
fn both_numberings_and_both_kinds_of_chains() {
    for numbering in [Numbering::Specification, Numbering::Compressed] {
        for chains in [INDIRECT, Features(0)] {
            let world = world((0..2000).filter(|nr| nr % 5 != 0)).bulk();
            world.with(|world| {
                world.numbering = numbering;
                // Without statistics and hints the numbers differ.
                let rest = INDIRECT
                    .with(Features::STATS_VQ)
                    .with(Features::FREE_PAGE_HINT);
                world.offered = world.offered.without(rest).with(chains);
            });
            let mut driver = world.driver(DriverSettings {
                numbering,
                ..settings()
            });
            driver.inflate(1500 * PAGE).unwrap();
            world.agree(&driver);
            driver.deflate(77 * PAGE).unwrap();
            world.agree(&driver);
            let blocks: Vec<_> = (0..40).map(|nr| Span::new(nr << 22, 1 << 22)).collect();
            assert_eq!(driver.report(&blocks), Ok(2));
            assert_eq!(world.with(|world| world.reported.clone()), blocks);
        }
    }
}
