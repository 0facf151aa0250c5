//! Maps, unmaps and DMA of a client that keeps to the protocol.

use std::sync::atomic::Ordering;

use dmaspace_vfio_user::{ClientLimits, MOST_ACCESS};
use vm_memory::{Bytes as _, GuestAddress, GuestMemory as _, Permissions};

use crate::client::*;
use crate::engine::{FETCH, STORE};

#[test]
fn dma_reaches_what_is_mapped_at_any_address_and_nothing_else() {
    let bench = Bench::new(1, ClientLimits::default());
    let mut client = bench.client();
    let file = memory_file(16 * PAGE);
    // Two parts of the file, in the other order, side by side.
    assert_eq!(client.map(&file, 4 * PAGE, 0x10_0000, PAGE), 0);
    assert_eq!(client.map(&file, 2 * PAGE, 0x10_1000, PAGE), 0);
    assert_eq!(client.write(2, 0, b"over the boundary"), 0);
    assert!(client.dma(STORE, 0x10_0ffb, 17));
    assert_eq!(contents(&file, 5 * PAGE - 5, 5), b"over ");
    assert_eq!(contents(&file, 2 * PAGE, 12), b"the boundary");
    put(&file, 5 * PAGE - 5, b"OVER ");
    assert!(client.dma(FETCH, 0x10_0ffb, 17));
    assert_eq!(client.read(2, 0, 17).unwrap(), b"OVER the boundary");
    assert_eq!(bench.memory.counts().files, 1);

    // One byte behind, one before.
    assert!(!client.dma(STORE, 0x10_1fff, 2));
    assert!(
        bench.engine.fault().contains("write of 0x102000"),
        "the fault names the address"
    );
    assert!(!client.dma(FETCH, 0xf_ffff, 1));
    assert!(bench.engine.fault().contains("read of 0xfffff"));
    // The bytes that were inside were not written either.
    assert_eq!(contents(&file, 3 * PAGE - 1, 1), [0]);
    drop(client);
    let served = bench.end();
    assert_eq!((served[0].maps, served[0].refused), (2, 0));
    assert!(served[0].end.is_ok());
}

#[test]
fn an_access_of_no_bytes_is_none_and_one_that_is_too_long_is_refused() {
    let bench = Bench::new(1, ClientLimits::default());
    let mut client = bench.client();
    let file = memory_file(64 << 20);
    assert_eq!(client.map(&file, 0, 0, 64 << 20), 0);
    let view = bench.memory.view();
    // Also where nothing is mapped.
    for at in [0, 1 << 40, u64::MAX] {
        view.write_slice(&[], GuestAddress(at)).unwrap();
        view.read_slice(&mut [], GuestAddress(at)).unwrap();
    }
    let mut bytes = vec![1; MOST_ACCESS + 1];
    let refused = view.read_slice(&mut bytes, GuestAddress(0)).unwrap_err();
    assert!(refused.to_string().contains("are allowed"), "{refused}");
    view.read_slice(&mut bytes[1..], GuestAddress(0)).unwrap();
    assert_eq!(bytes[MOST_ACCESS], 0);
    drop(view);
    drop(client);
    bench.end();
}

#[test]
fn a_map_for_reading_only_is_not_written_to() {
    let bench = Bench::new(1, ClientLimits::default());
    let mut client = bench.client();
    let file = memory_file(2 * PAGE);
    assert_eq!(client.map_for(1, &file, 0, 0, PAGE), 0);
    assert_eq!(client.map_for(2, &file, PAGE, PAGE, PAGE), 0);
    assert!(client.dma(FETCH, 0, 8));
    assert!(!client.dma(STORE, 0, 8));
    assert!(bench.engine.fault().contains("write of 0x0"));
    assert!(client.dma(STORE, PAGE, 8));
    assert!(!client.dma(FETCH, PAGE, 8));
    assert!(bench.engine.fault().contains("read of 0x1000"));
    // An access for both needs both.
    let view = bench.memory.view();
    for page in [0, PAGE] {
        let both = view.get_slices(GuestAddress(page), 8, Permissions::ReadWrite);
        assert!(both.is_err(), "{page:#x}");
    }
    drop(view);
    drop(client);
    bench.end();
}

#[test]
fn an_unmap_takes_all_maps_in_its_range_and_cuts_none() {
    let bench = Bench::new(1, ClientLimits::default());
    let mut client = bench.client();
    let file = memory_file(64 * PAGE);
    for page in 0..16 {
        assert_eq!(client.map(&file, page * PAGE, 2 * page * PAGE, PAGE), 0);
    }
    assert_eq!(client.map(&file, 32 * PAGE, 64 * PAGE, 4 * PAGE), 0);
    // Either half of the last one, and its middle.
    for [first, pages] in [[0, 66], [66, 10], [65, 1]] {
        assert_eq!(client.unmap(first * PAGE, pages * PAGE), EINVAL);
        assert!(bench.engine.refusal().contains("cuts the map"));
    }
    assert_eq!(bench.memory.counts().maps, 17);
    assert!(client.dma(FETCH, 65 * PAGE, 8));
    // An unmap of nothing does nothing.
    assert_eq!(client.unmap(1 << 40, 1 << 40), 0);
    assert_eq!(client.unmap(0, 64 * PAGE), 0);
    assert_eq!(bench.memory.counts().maps, 1);
    assert!(!client.dma(FETCH, 0, 8));
    bench.engine.fault();
    assert!(client.dma(FETCH, 65 * PAGE, 8));
    // Everything: flag 2, of Linux's VFIO.
    let (error, _) = client.ask(DMA_UNMAP, &unmap(2, 0, 0), &[]);
    assert_eq!(error, 0);
    let counts = bench.memory.counts();
    assert_eq!((counts.maps, counts.files), (0, 0));
    assert!(!client.dma(FETCH, 65 * PAGE, 8));
    bench.engine.fault();
    let (error, _) = client.ask(DMA_UNMAP, &unmap(2, PAGE, PAGE), &[]);
    assert_eq!(error, EINVAL);
    drop(client);
    bench.end();
}

#[test]
fn a_file_is_mapped_once_and_unmapped_with_its_last_map() {
    let bench = Bench::new(1, ClientLimits::default());
    let mut client = bench.client();
    let file = memory_file(256 * PAGE);
    let again = rustix::io::dup(&file).unwrap();
    let other = memory_file(256 * PAGE);
    assert_eq!(client.map(&file, 0, 0, PAGE), 0);
    assert_eq!(client.map(&again, PAGE, PAGE, PAGE), 0);
    assert_eq!(client.map(&other, 0, 2 * PAGE, PAGE), 0);
    assert_eq!(bench.memory.counts().files, 2);
    assert_eq!(mappings_of(&file), 1);
    assert_eq!(client.unmap(0, PAGE), 0);
    assert_eq!(mappings_of(&file), 1);
    assert_eq!(client.unmap(PAGE, PAGE), 0);
    // Before the answer.
    assert_eq!(mappings_of(&file), 0);
    assert_eq!(bench.memory.counts().files, 1);
    drop(client);
    bench.end();
}

/// Number of mappings of the file in this process, which is the server, too.
fn mappings_of(file: &std::os::fd::OwnedFd) -> usize {
    let inode = rustix::fs::fstat(file).unwrap().st_ino.to_string();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let field = |line: &str| line.split_whitespace().nth(4).map(str::to_owned);
    maps.lines()
        .filter(|line| field(line) == Some(inode.clone()))
        .count()
}

#[test]
fn a_file_that_has_grown_is_another_one() {
    let bench = Bench::new(1, ClientLimits::default());
    let mut client = bench.client();
    let file = memory_file(PAGE);
    assert_eq!(client.map(&file, 0, 0, PAGE), 0);
    assert_eq!(client.map(&file, PAGE, PAGE, PAGE), EINVAL);
    assert!(bench.engine.refusal().contains("of a file of 0x1000"));
    rustix::fs::ftruncate(&file, 2 * PAGE).unwrap();
    assert_eq!(client.map(&file, PAGE, PAGE, PAGE), 0);
    assert_eq!(client.write(2, 0, b"grown"), 0);
    assert!(client.dma(STORE, PAGE, 5));
    assert_eq!(contents(&file, PAGE, 5), b"grown");
    drop(client);
    bench.end();
}

#[test]
fn memory_that_is_not_shared_is_a_map_and_a_fault() {
    let bench = Bench::new(1, ClientLimits::default());
    let mut client = bench.client();
    let payload = map(3, 0, 0x20_0000, 16 * PAGE);
    assert_eq!(client.ask(DMA_MAP, &payload, &[]).0, 0);
    assert_eq!(bench.memory.counts().maps, 1);
    assert!(!client.dma(FETCH, 0x20_0000, 8));
    assert!(bench.engine.fault().contains("read of 0x200000"));
    let file = memory_file(PAGE);
    assert_eq!(client.map(&file, 0, 0x20_1000, PAGE), EEXIST);
    assert_eq!(client.unmap(0x20_0000, PAGE), EINVAL);
    assert_eq!(client.unmap(0x20_0000, 16 * PAGE), 0);
    assert_eq!(client.map(&file, 0, 0x20_1000, PAGE), 0);
    assert_eq!(client.unmap(0x20_1000, PAGE), 0);
    // All addresses that there are.
    for half in [0, 1 << 63] {
        let payload = map(3, 0, half, 1 << 63);
        assert_eq!(client.ask(DMA_MAP, &payload, &[]).0, 0);
    }
    assert_eq!(bench.memory.counts().bytes, u64::MAX);
    assert!(!client.dma(FETCH, u64::MAX - 8, 8));
    bench.engine.fault();
    assert_eq!(client.map(&file, 0, 0, PAGE), EEXIST);
    drop(client);
    bench.end();
}

#[test]
fn what_the_device_writes_to_is_reported_by_page_and_once() {
    let bench = Bench::new(1, ClientLimits::default());
    let mut client = bench.client();
    let file = memory_file(8 << 20);
    assert_eq!(client.map(&file, 0, 1 << 30, 8 << 20), 0);
    let report = |client: &mut Client| {
        let ask = longs(&[1 << 30, 8 << 20, PAGE]);
        let head = words(&[8 + 24 + 256, 8 | 1 << 16]);
        let (error, reply) = client.ask(FEATURE, &[head, ask].concat(), &[]);
        assert_eq!(error, 0);
        let bitmap = reply[32..].chunks_exact(8);
        let bitmap = bitmap.map(|word| u64::from_ne_bytes(word.try_into().unwrap()));
        bitmap.collect::<Vec<u64>>()
    };
    let start = [words(&[24, 6 | 1 << 17]), longs(&[1 << 21]), words(&[0, 0])].concat();
    assert!(client.dma(STORE, 1 << 30, 8));
    let (error, reply) = client.ask(FEATURE, &start, &[]);
    assert_eq!(error, 0);
    assert_eq!(reply[8..16], PAGE.to_ne_bytes(), "the page that it takes");
    assert!(
        report(&mut client).iter().all(|word| *word == 0),
        "of before"
    );
    // Two pages and a third, which is only read.
    assert!(client.dma(STORE, (1 << 30) + 5 * PAGE - 1, 2));
    assert!(client.dma(FETCH, (1 << 30) + 9 * PAGE, 8));
    let mut expected = vec![0; 32];
    expected[0] = 0b11_0000;
    assert_eq!(report(&mut client), expected);
    assert!(report(&mut client).iter().all(|word| *word == 0), "once");
    assert!(client.dma(STORE, (1 << 30) + 5 * PAGE, 1));
    expected[0] = 0b10_0000;
    assert_eq!(report(&mut client), expected);
    let stop = words(&[8, 7 | 1 << 17]);
    assert_eq!(client.ask(FEATURE, &stop, &[]).0, 0);
    let ask = [words(&[512, 8 | 1 << 16]), longs(&[1 << 30, PAGE, PAGE])].concat();
    assert_eq!(client.ask(FEATURE, &ask, &[]).0, EINVAL);
    assert!(bench.engine.refusal().contains("not tracked"));
    drop(client);
    bench.end();
}

#[test]
fn the_device_keeps_its_state_when_a_client_leaves_and_the_next_finds_no_memory() {
    let bench = Bench::new(2, ClientLimits::default());
    let file = memory_file(PAGE);
    let mut client = bench.client();
    assert_eq!(client.map(&file, 0, 0, PAGE), 0);
    assert_eq!(client.write(2, 0, b"kept"), 0);
    drop(client);
    let mut client = bench.client();
    assert_eq!(bench.engine.left.load(Ordering::Relaxed), 1);
    assert_eq!(client.read(2, 0, 4).unwrap(), b"kept");
    assert!(!client.dma(STORE, 0, 4));
    assert!(bench.engine.fault().contains("write of 0x0"));
    assert_eq!(client.map(&file, 0, 0, PAGE), 0);
    assert!(client.dma(STORE, 0, 4));
    drop(client);
    assert_eq!(bench.end().len(), 2);
}

#[test]
fn small_files_and_large_ones_lie_beside_each_other() {
    let bench = Bench::new(1, ClientLimits::default());
    let mut client = bench.client();
    // As a machine has them that puts a ROM and a display beside two nodes of memory.
    let lengths = [PAGE, PAGE, 1 << 30, 1 << 30];
    let files = lengths.map(memory_file);
    let last = |len: u64, nth: u64| (nth << 32) + len - 8;
    for (nth, (len, file)) in (0..).zip(lengths.into_iter().zip(&files)) {
        assert_eq!(client.map(file, 0, nth << 32, len), 0, "{len:#x}");
        assert_eq!(client.write(2, 0, &[nth as u8 + 1; 8]), 0);
        assert!(client.dma(STORE, last(len, nth), 8));
    }
    for (nth, (len, file)) in (0..).zip(lengths.into_iter().zip(&files)) {
        assert_eq!(contents(file, len - 8, 8), [nth as u8 + 1; 8]);
    }
    assert_eq!(bench.memory.counts().files, 4);
    drop(client);
    bench.end();
}
