//! Translating, counting, faulting.

use iopt::Prot;
use iopt::walk::{Access, WalkReason};

use super::*;

#[test]
fn hits_misses_and_reads_are_counted_exactly() {
    let (unit, words, _) = unit();
    for n in 0..4 {
        words.set(0x3000 + n * 8, (DATA + (9 - n) * 0x1000) | RW);
    }
    let mut port = unit.port(NIC);
    // Three reads of the table; then one, by the cached table; then none.
    for (iova, expected, misses, reads, upper) in [
        (0x0008, DATA + 0x9008, 1, 3, 0),
        (0x1010, DATA + 0x8010, 2, 4, 1),
        (0x0ff8, DATA + 0x9ff8, 2, 4, 1),
    ] {
        assert_eq!(read(&mut port, iova), Ok(expected));
        let counted = port.counters();
        let now = (
            counted.iotlb_misses,
            counted.table_reads,
            counted.upper_hits,
        );
        assert_eq!(now, (misses, reads, upper));
        assert_eq!(counted.walks, misses);
    }
    assert_eq!(port.counters().iotlb_hits, 1);

    // One access over four pages: two hits and two misses.
    let mut all = vec![0; 4 * 512];
    port.read(0, &mut all).unwrap();
    for (n, word) in all.iter().enumerate() {
        let n = n as u64;
        assert_eq!(*word, DATA + (9 - n / 512) * 0x1000 + n % 512 * 8);
    }
    let counted = port.counters();
    assert_eq!((counted.iotlb_hits, counted.iotlb_misses), (3, 4));
    assert_eq!(
        (counted.bytes_read, counted.bytes_written),
        (3 * 8 + 4 * 4096, 0)
    );

    // Counts of a port stay with its device.
    drop(port);
    let other = unit.port(DISK);
    assert_eq!(unit.device_counters(NIC), counted);
    assert_eq!(unit.counters(), counted);
    assert_eq!(other.counters(), AccessCounters::default());
}

#[test]
fn a_large_leaf_is_one_look_up() {
    let (unit, words, data) = unit();
    // The second 2 MiB: one leaf (PS), to the start of the data.
    words.set(0x2008, DATA | 0x80 | RW);
    let mut port = unit.port(NIC);
    let mut all = vec![0; (2 << 20) / 8];
    port.read(2 << 20, &mut all).unwrap();
    assert!(all.iter().zip(0..).all(|(word, n)| *word == DATA + n * 8));
    let counted = port.counters();
    assert_eq!(
        (
            counted.iotlb_misses,
            counted.iotlb_hits,
            counted.table_reads
        ),
        (1, 0, 2)
    );
    port.write((2 << 20) + 0x12_3450, &[1, 2]).unwrap();
    assert_eq!(
        (cell(&data, DATA + 0x12_3450), cell(&data, DATA + 0x12_3458)),
        (1, 2)
    );
    assert_eq!(port.counters().iotlb_hits, 1);
}

#[test]
fn an_access_stops_at_the_first_fault_and_says_how_far_it_came() {
    let (unit, words, data) = unit();
    words.set(0x3008, DATA | RW);
    words.set(0x3010, (DATA + 0x5000) | 0b01);
    let mut port = unit.port(NIC);

    // The neighbours on both sides of the two pages.
    for iova in [0xff8, 0x3000] {
        let Err(FaultReason::Walk(fault)) = read(&mut port, iova) else {
            panic!("no fault")
        };
        assert_eq!((fault.iova, fault.reason), (iova, WalkReason::NotPresent));
    }
    let mut words = [7; 0x300];
    let aborted = port.read(0x2000, &mut words).unwrap_err();
    assert_eq!((aborted.done, aborted.fault.iova), (0x1000, 0x3000));
    assert_eq!((words[0x1ff], words[0x200]), (DATA + 0x5ff8, 7));

    // A write across into the read-only page.
    let aborted = port.write(0x1ff0, &[1, 2, 3, 4]).unwrap_err();
    assert_eq!(aborted.done, 16);
    assert_eq!(aborted.fault.access, Some(Access::Write));
    let FaultReason::Walk(fault) = aborted.fault.reason else {
        panic!("{aborted}")
    };
    assert_eq!(
        fault.reason,
        WalkReason::Denied {
            granted: Prot::READ
        }
    );
    assert_eq!(
        (cell(&data, DATA + 0xff0), cell(&data, DATA + 0x5000)),
        (1, DATA + 0x5000)
    );
    let counted = port.counters();
    assert_eq!(
        (counted.bytes_read, counted.bytes_written, counted.faults),
        (0x1000, 16, 4)
    );
    // The denied write found a cached translation, and walked.
    assert_eq!(counted.walks, counted.iotlb_misses + 1);
}

#[test]
fn writes_to_a_read_only_page_are_denied_cached_or_not() {
    let (unit, words, data) = unit();
    words.set(0x3000, DATA | 0b01);
    let mut port = unit.port(NIC);
    for _ in 0..2 {
        assert!(port.write(0, &[1]).is_err());
        assert_eq!(read(&mut port, 0), Ok(DATA));
        assert!(port.write(0, &[1]).is_err());
    }
    assert_eq!(cell(&data, DATA), DATA);
    // Permissions that were added work without a flush, those that were taken need one.
    words.set(0x3000, DATA | RW);
    port.write(0, &[1]).unwrap();
    words.set(0x3000, DATA | 0b01);
    port.write(0, &[2]).unwrap();
    unit.invalidate_ranges(D1, &page(0), 1, false).unwrap();
    assert!(port.write(0, &[3]).is_err());
    assert_eq!(cell(&data, DATA), 2);
}

#[test]
fn faults_are_named_and_those_without_room_are_counted() {
    let (unit, words, _) = unit_with(SoftwareConfig {
        fault_log: 3,
        ..quick()
    });
    words.set(0x3000, 0x1_0000_0000 | RW); // no memory there
    let mut port = unit.port(NIC);
    let mut stranger = unit.port(DISK);
    assert!(port.read(4, &mut [0]).is_err());
    assert!(port.read(0x10, &mut [0]).is_err());
    assert!(stranger.write(0x2000, &[0]).is_err());
    assert!(port.read(u64::MAX - 7, &mut [0, 0]).is_err());
    assert!(port.read(1 << 39, &mut [0]).is_err());
    assert!(port.read(0, &mut []).is_ok());
    let mut texts = Vec::new();
    assert_eq!(
        unit.drain_faults(&mut |fault| texts.push(fault.to_string())),
        2
    );
    assert_eq!(
        texts,
        [
            "00:05.0 (domain 1): read of 0x4: not a multiple of 8 bytes",
            "00:05.0 (domain 1): read of 0x10: there is no memory at the physical address \
             0x100000010",
            "00:06.0: write of 0x2000: not attached",
        ]
    );
    assert_eq!(unit.drain_faults(&mut |_| panic!("drained")), 0);
    assert_eq!(unit.counters().faults, 5);

    // Losses from before are recorded now that there is room.
    assert!(port.read(u64::MAX - 7, &mut [0, 0]).is_err());
    assert!(port.read(1 << 39, &mut [0]).is_err());
    texts.clear();
    unit.drain_faults(&mut |fault| texts.push(fault.to_string()));
    assert_eq!(
        texts,
        [
            "00:05.0 (domain 1): read of 0xfffffffffffffff8: 0x10 bytes go beyond the last address",
            "00:05.0 (domain 1): read of 0x8000000000: outside the 39-bit address space",
        ]
    );
}

#[test]
fn devices_of_different_domains_do_not_see_each_other_s_translations() {
    let (unit, words, _) = unit();
    // Domain 2 has its own root at 0x4000.
    words.set(0x4000, 0x5000 | RW);
    words.set(0x5000, 0x6000 | RW);
    words.set(0x3000, DATA | RW);
    words.set(0x6000, (DATA + 0x1000) | RW);
    words.set(0x6008, (DATA + 0x2000) | RW);
    unit.attach(
        DISK,
        D2,
        Root {
            address: 0x4000,
            ..ROOT
        },
    )
    .unwrap();
    let (mut nic, mut disk) = (unit.port(NIC), unit.port(DISK));
    for _ in 0..2 {
        assert_eq!(read(&mut nic, 0), Ok(DATA));
        assert_eq!(read(&mut disk, 0), Ok(DATA + 0x1000));
        assert_eq!(read(&mut disk, 0x1000), Ok(DATA + 0x2000));
        assert!(read(&mut nic, 0x1000).is_err());
    }
    // A flush of one leaves the other's entries alone.
    words.set(0x3000, 0);
    words.set(0x6000, 0);
    unit.invalidate_ranges(D1, &page(0), 1, true).unwrap();
    assert!(read(&mut nic, 0).is_err());
    assert_eq!(read(&mut disk, 0), Ok(DATA + 0x1000));
    unit.invalidate_domain(D2).unwrap();
    assert!(read(&mut disk, 0).is_err());
}

#[test]
fn devices_of_one_domain_share_its_translations() {
    let (unit, words, _) = unit();
    words.set(0x3000, DATA | RW);
    unit.attach(DISK, D1, ROOT).unwrap();
    assert_eq!(read(&mut unit.port(NIC), 0), Ok(DATA));
    assert_eq!(read(&mut unit.port(DISK), 0), Ok(DATA));
    assert_eq!(unit.device_counters(DISK).iotlb_hits, 1);
}

#[test]
fn swapped_leaves_are_found_by_comparing_data() {
    let (unit, words, _) = unit();
    for n in 0..16u64 {
        words.set(0x3000 + n * 8, (DATA + n * 0x1000) | RW);
    }
    words.set(0x3028, (DATA + 0xa000) | RW);
    words.set(0x3050, (DATA + 0x5000) | RW);
    let mut port = unit.port(NIC);
    let wrong: Vec<u64> = (0..16)
        .filter(|n| read(&mut port, n * 0x1000) != Ok(DATA + n * 0x1000))
        .collect();
    assert_eq!(wrong, [5, 10]);
}

#[test]
fn every_format_and_odd_sizes_go_through_the_iotlb() {
    let words = Words::new(32);
    let unit = SoftwareUnit::new(words.clone(), data(4 << 20));
    // AMD v1, 2 levels: PR, IR, IW; next level 1; then a 64 KiB page (next level 7, address bits
    // 12 to 14 are 1) in 16 equal entries.
    words.set(0x1000, 0x6000_0000_0000_2201);
    for n in 0..16 {
        words.set(0x2000 + n * 8, 0x6000_0000_0000_7e01 | (DATA + 0x1_0000));
    }
    let amd = Root {
        format: FormatId::AmdV1,
        address: 0x1000,
        levels: 2,
    };
    unit.attach(NIC, D1, amd).unwrap();
    let mut nic = unit.port(NIC);
    let mut all = vec![0; (64 << 10) / 8];
    nic.read(0, &mut all).unwrap();
    assert!(
        all.iter()
            .zip(0..)
            .all(|(word, n)| *word == DATA + 0x1_0000 + n * 8)
    );
    assert_eq!(
        (nic.counters().iotlb_misses, nic.counters().iotlb_hits),
        (1, 0)
    );

    // x86-64, 4 levels, the last 4 KiB of the address space: P, R/W, U/S.
    for (table, next) in [
        (0x4000, 0x5000),
        (0x5000, 0x6000),
        (0x6000, 0x7000),
        (0x7000, DATA),
    ] {
        words.set(table + 0xff8, next | 7);
    }
    let x86 = Root {
        format: FormatId::X86_64,
        address: 0x4000,
        levels: 4,
    };
    unit.attach(DISK, D2, x86).unwrap();
    let mut disk = unit.port(DISK);
    for _ in 0..2 {
        assert_eq!(read(&mut disk, u64::MAX - 7), Ok(DATA + 0xff8));
    }
    assert_eq!(
        (disk.counters().iotlb_misses, disk.counters().iotlb_hits),
        (1, 1)
    );
    assert!(disk.read(0x0000_8000_0000_0000, &mut [0]).is_err());
}

#[test]
fn a_unit_without_caches_walks_each_time() {
    let none = CacheShape { sets: 1, ways: 0 };
    let (unit, words, _) = unit_with(SoftwareConfig {
        iotlb: none,
        upper: none,
        ..quick()
    });
    words.set(0x3000, DATA | RW);
    let mut port = unit.port(NIC);
    for n in 1..4 {
        assert_eq!(read(&mut port, 0), Ok(DATA));
        assert_eq!(
            (port.counters().iotlb_misses, port.counters().table_reads),
            (n, 3 * n)
        );
    }
}

#[test]
fn a_full_set_gives_up_its_oldest_entry() {
    let (unit, words, _) = unit_with(SoftwareConfig {
        iotlb: CacheShape { sets: 1, ways: 2 },
        ..quick()
    });
    for n in 0..3 {
        words.set(0x3000 + n * 8, (DATA + n * 0x1000) | RW);
    }
    let mut port = unit.port(NIC);
    let mut missed = |iova| {
        let before = port.counters().iotlb_misses;
        read(&mut port, iova).unwrap();
        port.counters().iotlb_misses > before
    };
    let pattern = [0, 0x1000, 0, 0x2000, 0x1000, 0].map(&mut missed);
    assert_eq!(pattern, [true, true, false, true, false, true]);
}

#[test]
fn a_translation_yields_the_runs_at_any_address_and_the_fault_behind_them() {
    let (unit, words, _data) = unit();
    words.set(0x3000, DATA | RW);
    words.set(0x3008, (DATA + 0x8000) | RW);
    let mut port = unit.port(NIC);
    let mut runs = Vec::new();
    port.translate(0xffd, 0x103, Access::Write, &mut |run| runs.push(run))
        .unwrap();
    assert_eq!(
        runs,
        [Span::new(DATA + 0xffd, 3), Span::new(DATA + 0x8000, 0x100)]
    );
    runs.clear();
    let refused = port.translate(0x1fff, 2, Access::Read, &mut |run| runs.push(run));
    let refused = refused.unwrap_err();
    assert_eq!((refused.done, refused.fault.iova), (1, 0x2000));
    assert_eq!(runs, [Span::new(DATA + 0x8fff, 1)]);
    let wraps = port.translate(u64::MAX, 2, Access::Read, &mut |_| ());
    let reason = wraps.unwrap_err().fault.reason;
    assert_eq!(reason, FaultReason::WrapsAround { len: 2 });
    port.translate(u64::MAX, 0, Access::Read, &mut |_| ())
        .unwrap();
    unit.detach(NIC).unwrap();
    let gone = port.translate(0, 1, Access::Read, &mut |_| ());
    assert_eq!(gone.unwrap_err().fault.reason, FaultReason::NotAttached);
}
