//! Requests of the host, answered by the driver against a fake device.

use crate::fake::{Answers, Faked, Handle, PAGE, world};
use runs::{GuestAddr, Span};
use virtio_balloon::driver::{Answered, Error, Settings};
use virtio_balloon::{BulkFormat, Config, HostRequest, Numbering, Queue, ResponseHeader, Wait};

fn settings() -> Settings {
    Settings {
        requests: true,
        hint_block: 16 * PAGE,
        wait: Wait::Spin { looks: 3 },
        ..Settings::default()
    }
}

/// A guest of these free pages whose device has requests.
fn asking(free: impl IntoIterator<Item = u64>, format: BulkFormat) -> Handle {
    let world = world(free).bulk(format);
    world.with(|world| world.config.bulk_flags = Config::BULK_REQUESTS);
    world
}

/// What was told since the last look, its headers checked: all but the last go on.
fn told(world: &Handle, id: u16) -> Vec<Span<GuestAddr>> {
    let answers = world.with(|world| std::mem::take(&mut world.answers_got));
    let last = answers.len() - 1;
    for (nr, (header, runs)) in answers.iter().enumerate() {
        let flag = match nr == last {
            true => ResponseHeader::DONE,
            false => ResponseHeader::CONTINUED,
        };
        assert_eq!((header.flag, header.id), (flag, id));
        assert_eq!(runs.is_empty(), nr == last);
    }
    answers.into_iter().flat_map(|(_, runs)| runs).collect()
}

fn free(world: &Handle) -> u64 {
    world.with(|world| world.free.len() as u64)
}

fn answer(driver: &mut Faked) -> Option<Answered> {
    driver.answer_request().unwrap()
}

#[test]
fn free_blocks_are_reported_and_given_back() {
    for format in BulkFormat::ALL
        .into_iter()
        .filter(|format| format.has_header())
    {
        for numbering in [Numbering::Specification, Numbering::Compressed] {
            // Blocks of 16 pages: every second one, and pages that make none.
            let blocks = (0..64).step_by(2).flat_map(|nr| nr * 16..(nr + 1) * 16);
            let world = asking(blocks.chain(2000..2010), format);
            world.with(|world| world.numbering = numbering);
            let mut driver = world.driver(Settings {
                numbering,
                ..settings()
            });
            assert_eq!(answer(&mut driver), None, "nobody has asked");
            for id in [1, 2, u16::MAX] {
                world.with(|world| world.ask(HostRequest::UNUSED_PAGES, id));
                let before = free(&world);
                let bytes = 32 * 16 * PAGE;
                assert_eq!(answer(&mut driver), Some(Answered { id, bytes }));
                assert_eq!(answer(&mut driver), None);
                assert_eq!(free(&world), before);
                let told = told(&world, id);
                assert_eq!(told.iter().map(|run| run.len).sum::<u64>(), bytes);
                assert!(told.is_sorted_by(|a, b| a.last() < b.start), "{told:?}");
                assert!(told.iter().all(|run| run.is_aligned(16 * PAGE)));
            }
            // What is in the balloon is not told.
            driver.inflate(512 * PAGE).unwrap();
            world.with(|world| world.ask(HostRequest::UNUSED_PAGES, 7));
            assert_eq!(answer(&mut driver), Some(Answered { id: 7, bytes: 0 }));
            assert_eq!(told(&world, 7), []);
            world.agree(&driver);
            driver.remove().unwrap();
            world.nothing_is_left();
        }
    }
}

#[test]
fn requests_that_are_not_known_are_answered_with_no_pages() {
    let world = asking(0..64, BulkFormat::BitmapRecords);
    let mut driver = world.driver(settings());
    world.with(|world| world.ask(9, 3));
    assert_eq!(answer(&mut driver), Some(Answered { id: 3, bytes: 0 }));
    let answers = world.with(|world| world.answers_got.clone());
    let header = ResponseHeader {
        command: 9,
        flag: ResponseHeader::DONE,
        id: 3,
        data_len: 0,
    };
    assert_eq!(answers, [(header, vec![])]);
}

#[test]
fn without_what_it_takes_there_are_no_requests() {
    let pages = || 0..64;
    let cases: [(&str, Handle, Settings, u64); 5] = [
        (
            "not wanted",
            asking(pages(), BulkFormat::Ranges),
            Settings::default(),
            0,
        ),
        (
            "not offered",
            world(pages()).bulk(BulkFormat::Ranges),
            settings(),
            0,
        ),
        (
            "no header",
            asking(pages(), BulkFormat::Chunks),
            settings(),
            0,
        ),
        (
            "no room for pages",
            asking(pages(), BulkFormat::Ranges),
            settings(),
            3,
        ),
        (
            "not in bulk",
            asking(pages(), BulkFormat::Ranges),
            Settings {
                bulk: None,
                ..settings()
            },
            0,
        ),
    ];
    for (case, world, settings, words) in cases {
        if words > 0 {
            // Those that are held and hinted, a bitmap, and no more.
            world.with(|world| world.words = words as usize);
        }
        let mut driver = world.driver(settings);
        assert_eq!(driver.answer_request(), Err(Error::NoRequests), "{case}");
        driver.inflate(32 * PAGE).unwrap();
        world.agree(&driver);
        driver.remove().unwrap();
        world.nothing_is_left();
    }
}

#[test]
fn a_host_that_does_not_take_the_answer_keeps_no_page_and_is_answered_later() {
    let world = asking(0..64, BulkFormat::Ranges);
    let mut driver = world.driver(settings());
    world.with(|world| {
        world.ask(HostRequest::UNUSED_PAGES, 1);
        world.answers = Answers::Never;
    });
    let silent = driver.answer_request();
    let queue = Queue::Requests;
    assert!(matches!(silent, Err(Error::Silent { queue: of, .. }) if of == queue));
    assert_eq!(free(&world), 64);
    assert_eq!(answer(&mut driver), None, "the answer is still there");
    world.with(|world| world.answers = Answers::AtOnce);
    driver.inflate(32 * PAGE).unwrap();
    world.with(|world| world.catch_up());
    // The buffer for the next request comes first.
    assert_eq!(answer(&mut driver), None);
    world.with(|world| {
        world.answers_got.clear();
        world.ask(HostRequest::UNUSED_PAGES, 2);
    });
    let bytes = 32 * PAGE;
    assert_eq!(answer(&mut driver), Some(Answered { id: 2, bytes }));
    assert_eq!(told(&world, 2), [Span::new(32 * PAGE, bytes)]);
    driver.freeze().unwrap();
    driver.restore().unwrap();
    assert_eq!(answer(&mut driver), None);
    world.with(|world| world.ask(HostRequest::UNUSED_PAGES, 3));
    let bytes = 64 * PAGE;
    assert_eq!(answer(&mut driver), Some(Answered { id: 3, bytes }));
}
