//! Clients that are none: each does one thing that must end in a refusal, or at worst in the end of its
//! connection, and in nothing that is left.

use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use dmaspace_vfio_user::{ClientLimits, ServeError};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};

use crate::client::*;
use crate::engine::{FETCH, STORE};

/// The client is still served.
fn is_served(client: &mut Client) {
    assert_eq!(client.ask(GET_INFO, &words(&[16, 0, 0, 0]), &[]).0, 0);
}

/// Sends `bytes` to a server that has agreed on a version, and has the end of the connection.
fn end_of(bytes: &[u8], replies: &[u32]) -> ServeError {
    let bench = Bench::new(1, ClientLimits::default());
    let mut client = bench.client();
    client.send(bytes, &[]);
    for expected in replies {
        assert_eq!(client.reply().2.0, *expected);
    }
    client.stream.shutdown(std::net::Shutdown::Write).unwrap();
    assert!(client.is_closed());
    bench.end().remove(0).end.unwrap_err()
}

#[test]
fn a_size_less_than_a_header_ends_the_connection() {
    let error = end_of(&header(1, SET_IRQS, 15, 0), &[EINVAL]);
    assert!(matches!(error, ServeError::Size { size: 15 }), "{error}");
}

#[test]
fn a_size_of_four_gibibytes_ends_the_connection_and_is_not_allocated() {
    let error = end_of(&header(1, REGION_WRITE, u32::MAX, 0), &[EINVAL]);
    assert!(matches!(error, ServeError::Size { .. }), "{error}");
}

#[test]
fn a_client_that_dies_in_a_header_is_cut() {
    let error = end_of(&header(1, DMA_MAP, 48, 0)[..7], &[]);
    assert!(
        matches!(error, ServeError::Cut { got: 7, size: 16 }),
        "{error}"
    );
}

#[test]
fn a_client_that_dies_in_a_payload_is_cut() {
    let message = [header(1, DMA_MAP, 48, 0), vec![0; 5]].concat();
    let error = end_of(&message, &[]);
    assert!(matches!(error, ServeError::Cut { got: 5, .. }), "{error}");
    let error = end_of(&header(1, DMA_MAP, 48, 0), &[]);
    assert!(matches!(error, ServeError::Cut { got: 16, .. }), "{error}");
}

#[test]
fn a_message_may_come_byte_by_byte() {
    let bench = Bench::new(1, ClientLimits::default());
    let mut client = bench.client();
    for byte in client.message(GET_INFO, 0, &words(&[16, 0, 0, 0])) {
        client.send(&[byte], &[]);
    }
    assert_eq!(client.reply().2.0, 0);
    drop(client);
    bench.end();
}

#[test]
fn requests_before_the_version_end_the_connection() {
    let bench = Bench::new(1, ClientLimits::default());
    let mut client = bench.connect();
    let file = memory_file(PAGE);
    let (error, _) = client.ask(DMA_MAP, &map(3, 0, 0, PAGE), &[file.as_fd()]);
    assert_eq!(error, EINVAL);
    assert!(client.is_closed());
    let end = bench.end().remove(0).end;
    assert!(matches!(end, Err(ServeError::NoVersion { command: 2 })));
}

#[test]
fn versions_that_are_none_are_refused() {
    let versions: [&[u8]; 11] = [
        b"",
        &[0; 3],
        &[1, 0, 0, 0],
        b"\0\0\0\0{}",
        b"\0\0\0\0{\0",
        b"\0\0\0\0\"\0",
        b"\0\0\0\0{\"capabilities\":\"23\"}\0",
        b"\0\0\0\0{\"capabilities\":{\"max_msg_fds\":\"foo\"}}\0",
        b"\0\0\0\0{\"capabilities\":{\"max_msg_fds\":-1}}\0",
        b"\0\0\0\0{\"capabilities\":{\"max_data_xfer_size\":0}}\0",
        b"\0\0\0\0\xff\xfe\0",
    ];
    let bench = Bench::new(versions.len() + 2, ClientLimits::default());
    for version in versions {
        let mut client = bench.connect();
        assert_eq!(client.ask(VERSION, version, &[]).0, EINVAL, "{version:?}");
        assert!(client.is_closed());
    }
    // Nested deeper than a parser's stack.
    let mut client = bench.connect();
    let deep = [vec![0; 4], vec![b'['; 1 << 20], vec![0]].concat();
    assert_eq!(client.ask(VERSION, &deep, &[]).0, EINVAL);
    drop(client);
    let mut client = bench.client();
    assert_eq!(client.ask(VERSION, &[0; 4], &[]).0, EINVAL);
    assert!(bench.engine.refusal().contains("agreed on already"));
    is_served(&mut client);
    drop(client);
    bench.end();
}

#[test]
fn commands_that_are_none_are_refused_and_the_next_is_served() {
    let bench = Bench::new(1, ClientLimits::default());
    let mut client = bench.client();
    for command in [0, 6, 11, 12, 14, 19, 999, u16::MAX] {
        let (error, _) = client.ask(command, &[1; 100], &[]);
        assert_eq!(error, EINVAL);
        assert!(bench.engine.refusal().contains("is not served"));
        is_served(&mut client);
    }
    // A reply to nothing.
    let message = client.message(DMA_UNMAP, 1, &unmap(0, 0, PAGE));
    client.send(&message, &[]);
    assert_eq!(client.reply().2.0, EINVAL);
    assert!(bench.engine.refusal().contains("was not sent"));
    drop(client);
    bench.end();
}

#[test]
fn payloads_of_another_length_are_refused_and_the_next_is_served() {
    let bench = Bench::new(1, ClientLimits::default());
    let mut client = bench.client();
    let commands = [
        DMA_MAP,
        DMA_UNMAP,
        GET_INFO,
        GET_REGION_INFO,
        GET_IRQ_INFO,
        SET_IRQS,
        REGION_READ,
        REGION_WRITE,
        WRITE_MULTI,
        FEATURE,
        MIG_READ,
        MIG_WRITE,
    ];
    for command in commands {
        for bytes in [0, 1, 7, 9, 15, 17, 33, 1 << 20] {
            // All ones: sizes and flags that are never right.
            let (error, _) = client.ask(command, &vec![0xff; bytes], &[]);
            assert_ne!(error, 0, "{command} with {bytes} bytes");
        }
    }
    assert_eq!(client.ask(RESET, &[0], &[]).0, EINVAL);
    is_served(&mut client);
    assert_eq!(bench.memory.counts().maps, 0);
    drop(client);
    bench.end();
}

#[test]
fn a_refused_request_without_reply_is_not_replied_to() {
    let bench = Bench::new(1, ClientLimits::default());
    let mut client = bench.client();
    let message = client.message(DMA_UNMAP, 1 << 4, &unmap(0, 0, 0));
    client.send(&message, &[]);
    is_served(&mut client);
    assert!(bench.engine.refusal().contains("beyond 2^64"));
    drop(client);
    bench.end();
}

#[test]
fn what_is_no_memory_file_is_refused_by_name() {
    let bench = Bench::new(1, ClientLimits::default());
    let mut client = bench.client();
    let (pipe, _writer) = rustix::pipe::pipe().unwrap();
    let event = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
    let (socket, _other) = UnixStream::pair().unwrap();
    let open = |path: &str| OwnedFd::from(std::fs::File::open(path).unwrap());
    let disk = std::env::current_exe().unwrap();
    let files: [(OwnedFd, &str); 7] = [
        (pipe, "a pipe"),
        (socket.into(), "a socket"),
        (open("/dev/zero"), "a character device"),
        (open("/"), "a directory"),
        (
            open("/proc/self/maps"),
            "a file of a file system that is no memory",
        ),
        (
            open(disk.to_str().unwrap()),
            "a file of a file system that is no memory",
        ),
        (event, "without a type"),
    ];
    for (file, name) in files {
        assert_eq!(client.map(&file, 0, 0, PAGE), EINVAL);
        let refusal = bench.engine.refusal();
        assert!(refusal.contains("no memory file"), "{refusal}");
        assert!(refusal.contains(name), "{refusal}");
    }
    assert_eq!(bench.memory.counts().files, 0);
    drop(client);
    bench.end();
}

#[test]
fn a_file_that_may_only_be_read_is_refused() {
    let bench = Bench::new(1, ClientLimits::default());
    let mut client = bench.client();
    let file = memory_file(PAGE);
    let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&file));
    let read_only = OwnedFd::from(std::fs::File::open(path).unwrap());
    assert_ne!(client.map_for(1, &read_only, 0, 0, PAGE), 0);
    assert!(bench.engine.refusal().contains("cannot be mapped"));
    assert_eq!(bench.memory.counts().files, 0);
    drop(client);
    bench.end();
}

#[test]
fn ranges_that_overlap_are_refused_with_both_named() {
    let bench = Bench::new(1, ClientLimits::default());
    let mut client = bench.client();
    let file = memory_file(16 * PAGE);
    assert_eq!(client.map(&file, 0, 4 * PAGE, 4 * PAGE), 0);
    for (page, pages) in [(4, 4), (3, 2), (7, 2), (5, 1), (0, 16)] {
        let error = client.map(&file, 0, page * PAGE, pages * PAGE);
        assert_eq!(error, EEXIST, "{page} {pages}");
        let refusal = bench.engine.refusal();
        assert!(refusal.contains("overlaps the map 0x4000"), "{refusal}");
    }
    assert_eq!(client.map(&file, 0, 8 * PAGE, PAGE), 0);
    assert_eq!(client.map(&file, 0, 3 * PAGE, PAGE), 0);
    assert_eq!(bench.memory.counts().maps, 3);
    drop(client);
    bench.end();
}

#[test]
fn ranges_that_are_none_are_refused() {
    let bench = Bench::new(1, ClientLimits::default());
    let mut client = bench.client();
    let file = memory_file(16 * PAGE);
    for (offset, iova, size) in [
        (0, 0, 0),
        (0, 1, PAGE),
        (0, 0, PAGE - 1),
        (1, 0, PAGE),
        (0, u64::MAX - PAGE + 1, 2 * PAGE),
        (u64::MAX - PAGE + 1, 0, PAGE),
        (0, 0, u64::MAX - PAGE + 1),
        (16 * PAGE, 0, PAGE),
        (0, 0, 17 * PAGE),
        (1 << 62, 0, 1 << 62),
        // Beyond what the tables reach.
        (0, 1 << 62, PAGE),
    ] {
        let error = client.map(&file, offset, iova, size);
        assert_ne!(error, 0, "{offset:#x} {iova:#x} {size:#x}");
        bench.engine.refusal();
    }
    for flags in [0, 4, 7, u32::MAX] {
        assert_eq!(client.map_for(flags, &file, 0, 0, PAGE), EINVAL);
        assert!(bench.engine.refusal().contains("flags"));
    }
    for (iova, size) in [(0, 0), (u64::MAX, 2), (2, u64::MAX)] {
        assert_eq!(client.unmap(iova, size), EINVAL);
        assert!(bench.engine.refusal().contains("beyond 2^64"));
    }
    let counts = bench.memory.counts();
    assert_eq!((counts.maps, counts.files), (0, 0));
    is_served(&mut client);
    drop(client);
    bench.end();
}

#[test]
fn a_file_that_shrinks_ends_the_connection_and_not_the_program() {
    let bench = Bench::new(2, ClientLimits::default());
    let mut client = bench.client();
    let file = unsealed_file(16 * PAGE);
    assert_eq!(client.map(&file, 0, 0, 16 * PAGE), 0);
    assert_eq!(client.write(2, 0, b"bytes"), 0);
    assert!(client.dma(STORE, 8 * PAGE, 5));
    rustix::fs::ftruncate(&file, 4 * PAGE).unwrap();
    // The device writes to what is missing.
    let _ = client.stream.set_read_timeout(Some(Duration::from_secs(5)));
    for (at, value) in [(0, 8 * PAGE), (8, 5)] {
        assert_eq!(client.write(0, at, &value.to_le_bytes()), 0);
    }
    let mut command = access(0, 16, 8);
    command.extend_from_slice(&STORE.to_le_bytes());
    let message = client.message(REGION_WRITE, 0, &command);
    client.send(&message, &[]);
    assert!(client.is_closed());
    drop(client);
    let client = bench.client();
    drop(client);
    let served = bench.end();
    let end = served[0].end.as_ref().unwrap_err();
    assert!(
        matches!(end, ServeError::MemoryLost { offset } if *offset == 8 * PAGE),
        "{end}"
    );
    assert!(served[1].end.is_ok());
}

#[test]
fn a_huge_page_that_is_not_there_does_not_end_the_program() {
    let flags = MemfdFlags::ALLOW_SEALING | MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
    let Ok(file) = memfd_create("huge", flags) else {
        return eprintln!("left out: the kernel has no huge pages");
    };
    // More than any pool has, and sealed.
    let len = 1 << 40;
    rustix::fs::ftruncate(&file, len).unwrap();
    fcntl_add_seals(&file, SealFlags::SHRINK).unwrap();
    let bench = Bench::new(2, ClientLimits::default());
    let mut client = bench.client();
    assert_eq!(client.map(&file, 0, 0, len), 0);
    for (at, value) in [(0, 5 << 30), (8, 8)] {
        assert_eq!(client.write(0, at, &u64::to_le_bytes(value)), 0);
    }
    let mut command = access(0, 16, 8);
    command.extend_from_slice(&STORE.to_le_bytes());
    let message = client.message(REGION_WRITE, 0, &command);
    client.send(&message, &[]);
    // A machine that has a page left serves it.
    let lost = client.is_closed();
    drop(client);
    drop(bench.client());
    let end = bench.end().remove(0).end;
    let is_lost = matches!(end, Err(ServeError::MemoryLost { offset: OFFSET }));
    assert_eq!(lost, is_lost, "{end:?}");
}

/// Offset of the huge page that is not there.
const OFFSET: u64 = 5 << 30;

#[test]
fn regions_by_the_thousand_come_to_the_limit_and_all_go() {
    let limits = ClientLimits {
        maps: 3000,
        files: 8,
        ..ClientLimits::default()
    };
    let bench = Bench::new(1, limits);
    let mut client = bench.client();
    let file = memory_file(2 * PAGE);
    for page in 0..3000 {
        assert_eq!(client.map(&file, 0, 2 * page * PAGE, PAGE), 0);
    }
    assert_eq!(client.map(&file, 0, 1 << 40, PAGE), ENOSPC);
    assert!(bench.engine.refusal().contains("there are 3000 maps"));
    let (error, _) = client.ask(DMA_MAP, &map(3, 0, 1 << 40, PAGE), &[]);
    assert_eq!(error, ENOSPC, "also those that are not shared");
    bench.engine.refusal();
    assert!(client.dma(FETCH, 2 * 2999 * PAGE, 8));
    assert_eq!(client.unmap(0, 1 << 40), 0);
    let counts = bench.memory.counts();
    assert_eq!((counts.maps, counts.files), (0, 0));
    // Files, too.
    let files: Vec<OwnedFd> = (0..9).map(|_| memory_file(PAGE)).collect();
    for (nth, file) in (0..).zip(&files[..8]) {
        assert_eq!(client.map(file, 0, nth * PAGE, PAGE), 0);
    }
    assert_eq!(client.map(&files[8], 0, 8 * PAGE, PAGE), ENOSPC);
    assert!(bench.engine.refusal().contains("8 memory files"));
    assert_eq!(client.unmap(0, PAGE), 0);
    assert_eq!(client.map(&files[8], 0, 8 * PAGE, PAGE), 0);
    drop(client);
    bench.end();
}

#[test]
fn maps_far_apart_come_to_the_end_of_the_tables_and_all_go() {
    let limits = ClientLimits {
        tables: 64,
        ..ClientLimits::default()
    };
    let bench = Bench::new(1, limits);
    let mut client = bench.client();
    let file = memory_file(PAGE);
    let mut maps = 0;
    let error = loop {
        match client.map(&file, 0, maps << 31, PAGE) {
            0 => maps += 1,
            error => break error,
        }
        assert!(maps < 64, "more maps than tables");
    };
    assert_eq!(error, 12, "ENOMEM");
    bench.engine.refusal();
    assert!(maps > 10);
    assert!(client.dma(STORE, (maps - 1) << 31, 8), "as before");
    assert_eq!(bench.memory.counts().maps as u64, maps);
    assert_eq!(client.unmap(0, 1 << 47), 0);
    assert_eq!(client.map(&file, 0, 0, PAGE), 0);
    drop(client);
    bench.end();
}

#[test]
fn files_longer_than_the_address_space_are_refused() {
    let limits = ClientLimits {
        file_bytes: u64::MAX,
        ..ClientLimits::default()
    };
    let bench = Bench::new(2, limits);
    let mut client = bench.client();
    let mut refusals = 0;
    let files: Vec<OwnedFd> = (0..16).map(|_| memory_file(1 << 45)).collect();
    for (nth, file) in (0..).zip(&files) {
        if client.map(file, 0, nth * PAGE, PAGE) != 0 {
            bench.engine.refusal();
            refusals += 1;
        }
    }
    assert!(refusals > 0, "512 TiB in 128");
    is_served(&mut client);
    drop(client);
    let mut client = bench.client();
    assert_eq!(client.map(&files[0], 1 << 44, 0, PAGE), 0);
    assert!(client.dma(STORE, 0, 8));
    drop(client);
    bench.end();

    let bench = Bench::new(1, ClientLimits::default());
    let mut client = bench.client();
    assert_eq!(client.map(&files[0], 0, 0, PAGE), ENOSPC);
    assert!(bench.engine.refusal().contains("are allowed"));
    drop(client);
    bench.end();
}

#[test]
fn descriptors_where_none_belong_are_closed() {
    let bench = Bench::new(1, ClientLimits::default());
    let mut client = bench.client();
    let file = memory_file(PAGE);
    let before = descriptors_of(&file);
    let two = [file.as_fd(), file.as_fd()];
    let (error, _) = client.ask(DMA_MAP, &map(3, 0, 0, PAGE), &two);
    assert_eq!(error, EINVAL);
    assert!(bench.engine.refusal().contains("2 file descriptors came"));
    let (error, _) = client.ask(GET_INFO, &words(&[16, 0, 0, 0]), &two);
    assert_eq!(error, EINVAL);
    bench.engine.refusal();
    // As many as a message of the kernel holds, and in several pieces.
    let many = [file.as_fd(); 253];
    assert_eq!(client.ask(DMA_MAP, &map(3, 0, 0, PAGE), &many).0, EINVAL);
    bench.engine.refusal();
    let message = client.message(GET_INFO, 0, &words(&[16, 0, 0, 0]));
    for byte in message.chunks(1) {
        client.send(byte, &two);
    }
    assert_eq!(client.reply().2.0, EINVAL);
    bench.engine.refusal();
    assert_eq!(descriptors_of(&file), before, "descriptors are left open");
    is_served(&mut client);
    drop(client);
    bench.end();
}

/// Descriptors of this process for `file`.
fn descriptors_of(file: &OwnedFd) -> usize {
    let of = |stat: &rustix::fs::Stat| (stat.st_dev, stat.st_ino);
    let inode = of(&rustix::fs::fstat(file).unwrap());
    let all = std::fs::read_dir("/proc/self/fd").unwrap();
    all.filter_map(|entry| rustix::fs::stat(entry.ok()?.path()).ok())
        .filter(|stat| of(stat) == inode)
        .count()
}

#[test]
fn a_second_client_is_refused_while_the_first_is_served() {
    let bench = Bench::new(2, ClientLimits::default());
    let mut first = bench.client();
    let file = memory_file(PAGE);
    assert_eq!(first.map(&file, 0, 0, PAGE), 0);
    for _ in 0..3 {
        let mut second = bench.connect();
        assert!(second.is_closed());
    }
    is_served(&mut first);
    assert!(first.dma(STORE, 0, 8));
    drop(first);
    let mut next = bench.client();
    is_served(&mut next);
    drop(next);
    let served = bench.end();
    assert_eq!((served[0].others, served[1].others), (3, 0));
}

#[test]
fn a_client_that_dies_while_its_requests_are_served_leaves_nothing() {
    let bench = Bench::new(51, ClientLimits::default());
    let file = memory_file(64 * PAGE);
    for round in 0..50 {
        let mut client = bench.client();
        let mut all = Vec::new();
        for page in 0..64 {
            let payload = map(3, page * PAGE, page * PAGE, PAGE);
            all.push(client.message(DMA_MAP, 0, &payload));
        }
        for message in all {
            client.send(&message, &[file.as_fd()]);
        }
        let unmaps = client.message(DMA_UNMAP, 0, &unmap(0, 0, 64 * PAGE));
        // Half of it, at times.
        client.send(&unmaps[..unmaps.len() - round % 40], &[]);
    }
    let mut client = bench.client();
    is_served(&mut client);
    assert_eq!(bench.memory.counts().maps, 0);
    drop(client);
    assert_eq!(bench.end().len(), 51);
}

#[test]
fn a_client_that_reads_no_replies_is_left_after_a_while() {
    let limits = ClientLimits {
        reply: Duration::from_millis(200),
        ..ClientLimits::default()
    };
    let bench = Bench::new(2, limits);
    let mut client = bench.client();
    let message = client.message(REGION_READ, 0, &access(2, 0, 1 << 20));
    let begun = Instant::now();
    // The loop ends once the server has closed the connection.
    while std::io::Write::write_all(&mut client.stream, &message).is_ok() {}
    let mut next = bench.client();
    is_served(&mut next);
    assert!(begun.elapsed() < Duration::from_secs(10));
    drop((client, next));
    let end = bench.end().remove(0).end;
    assert!(matches!(end, Err(ServeError::Socket(_))));
}

#[test]
fn any_bytes_are_answered_or_refused_and_nothing_is_left() {
    let seed = std::env::var("SEED")
        .ok()
        .and_then(|seed| seed.parse().ok());
    let seed = seed.unwrap_or_else(|| fastrand::u64(..));
    eprintln!("SEED={seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    let clients = 300;
    let bench = Bench::new(clients + 1, ClientLimits::default());
    let file = unsealed_file(16 * PAGE);
    for _ in 0..clients {
        let mut client = bench.client();
        client.stream.set_nonblocking(false).unwrap();
        for _ in 0..random.usize(1..40) {
            let numbers = [
                0,
                1,
                2,
                3,
                PAGE,
                2 * PAGE,
                16 * PAGE,
                1 << 17,
                1 << 63,
                u64::MAX,
            ];
            let mut payload = Vec::new();
            for _ in 0..random.usize(0..12) {
                let number = *random.choice(&numbers).unwrap();
                match random.bool() {
                    true => payload.extend_from_slice(&number.to_ne_bytes()),
                    false => payload.extend_from_slice(&(number as u32).to_ne_bytes()),
                }
            }
            // `argsz` and flags that get further.
            for at in [0, 4] {
                if random.bool() && payload.len() >= at + 4 {
                    let word: u32 = [random.u32(0..64), 1 << random.u32(0..20)][at / 4];
                    payload[at..at + 4].copy_from_slice(&word.to_ne_bytes());
                }
            }
            let mut message = client.message(random.u16(0..20), 0, &payload);
            if random.u8(..) == 0 {
                let at = random.usize(..message.len());
                message[at] = random.u8(..);
            }
            let fds = [file.as_fd(), file.as_fd()];
            let fds = &fds[..random.usize(0..3)];
            let sent = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                client.send(&message, fds);
            }));
            // Its replies are read only now and then; a connection may have ended.
            if sent.is_err() {
                break;
            }
        }
    }
    let mut client = bench.client();
    is_served(&mut client);
    drop(client);
    bench.end();
}
