//! The report of each kind, to the letter.

use crate::map::{DomainReport, NodeShare, PlacementReport, SizeClass};

use super::super::samples;
use super::*;

fn check(report: &MapReport, expected: &str) {
    let text = write(report, Paint::PLAIN);
    assert_eq!(text, expected.trim_start_matches('\n'), "\n{text}");
    for line in text.lines() {
        assert!(line.chars().count() <= 100, "too wide: {line}");
        assert_eq!(line, line.trim_end());
    }
    assert!(text.lines().count() <= 48, "more than a screen");
}

#[test]
fn the_report_of_huge_pages() {
    check(&samples::huge(), HUGE);
}

#[test]
fn the_report_of_an_ordinary_user_with_something_wrong() {
    check(&samples::synthetic(), SYNTHETIC);
}

#[test]
fn the_report_of_a_real_device_that_copies() {
    check(&samples::sampled(), SAMPLED);
}

#[test]
fn the_report_of_a_real_device_that_has_no_driver() {
    check(&samples::unchecked(), UNCHECKED);
}

#[test]
fn a_raised_pool_is_reported() {
    let text = write(&samples::striped(2), Paint::PLAIN);
    assert!(
        text.contains("\n              1 huge page added to the pool, and removed again\n"),
        "{text}"
    );
}

#[test]
fn where_tables_lie_is_reported_with_what_it_costs() {
    let mut report = samples::huge();
    let on = |node, bytes| Some(vec![NodeShare { node, bytes }]);
    let domain = |node, devices, nodes| DomainReport {
        node,
        devices,
        table_bytes: Some(12 << 10),
        charged_bytes: None,
        nodes,
    };
    report.placement = Some(PlacementReport {
        policy: "per-node".into(),
        domains: vec![
            domain(Some(0), 2, on(Some(0), 12 << 10)),
            domain(Some(1), 1, on(Some(0), 12 << 10)),
            DomainReport {
                devices: 1,
                ..DomainReport::default()
            },
        ],
        misplaced: vec!["tables for node 1 are not all there: 64 KiB on node 0".into()],
    });
    let text = write(&report, Paint::PLAIN);
    assert!(text.contains(PLACED), "{text}");
}

#[test]
fn containers_by_node_are_reported_with_what_each_is_charged() {
    let mut report = samples::sampled();
    let device = report.backend.device.clone();
    report.backend.further_devices = device.into_iter().collect();
    report.backend.further_devices[0].node = Some(1);
    let domain = |node| DomainReport {
        node,
        devices: 1,
        charged_bytes: Some(256 << 20),
        ..DomainReport::default()
    };
    report.placement = Some(PlacementReport {
        policy: "per-node".into(),
        domains: vec![domain(None), domain(Some(1))],
        misplaced: Vec::new(),
    });
    let text = write(&report, Paint::PLAIN);
    assert!(text.contains(CONTAINERS), "{text}");
    let charged =
        "1 device of node 1; the kernel's tables, which it does not show; 256 MiB charged";
    let flat = text.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(flat.contains(charged), "{text}");
}

#[test]
fn colour_only_marks() {
    for report in [samples::huge(), samples::synthetic(), samples::unchecked()] {
        let mut text = write(&report, Paint::PLAIN.with_colour());
        assert!(text.contains("\x1b[1mmemory\x1b[0m"));
        while let Some(at) = text.find('\x1b') {
            let end = text.split_at(at).1.find('m').unwrap();
            text.replace_range(at..=at + end, "");
        }
        assert_eq!(text, write(&report, Paint::PLAIN));
    }
}

#[test]
fn an_empty_report_is_wrong_but_printable() {
    let text = write(&MapReport::default(), Paint::PLAIN);
    assert!(
        text.contains("WRONG  nothing outside the range was tried"),
        "{text}"
    );
}

#[test]
fn extreme_numbers_are_printable() {
    let mut report = samples::huge();
    report.memory.size_bytes = u64::MAX;
    let found = report.memory.found.as_mut().unwrap();
    found.run_sizes = (0..64)
        .map(|log| SizeClass {
            from_bytes: 1 << log,
            count: u64::MAX,
            bytes: u64::MAX,
        })
        .collect();
    report.dma.read_bytes = u64::MAX;
    report.times.map_ns = u64::MAX;
    found.addresses_reason = "ä".repeat(300) + " " + &"ö ".repeat(200);
    write(&report, Paint::PLAIN);
}

const CONTAINERS: &str = "
  interface   vfio: 2 containers of type 1
  device      0000:00:05.0 (1234:11e8), group 3, dmar0
  device      0000:00:05.0 (1234:11e8), group 3, dmar0, node 1
";
const PLACED: &str = "
placement
  policy      per-node: 3 domains
  domain      2 devices of node 0; 12 KiB of tables, on node 0
  domain      1 device of node 1; 12 KiB of tables, on node 0
  domain      1 device of no known node; the kernel's tables, which it does not
              show
  cost        12 KiB of tables, mapped in 3.10 µs, 256 MiB charged
  misplaced   tables for node 1 are not all there: 64 KiB on node 0

times
";
const HUGE: &str = "
memory
  size        256 MiB: the default
  backing     thp: no huge pages of 1G or 2M are free; transparent huge pages
              are on for madvise
  runs        3, 100 % of the memory in huge pages, node 0
                          2 MiB  × 1     2 MiB  ▏
              64 MiB to 128 MiB  × 2   254 MiB  ███████████████████████▊
  addresses   real: page frames (pagemap), 131 lookups

charge
  locked      256 MiB on mm->pinned_vm, no limit applies
  steps       3 by runs, 65,536 page by page
  pin         io_uring, 1 buffer in 1 call

tables
  format      vtd-ss, 4 levels
  leaves      128 of 2 MiB
  memory      3 table pages, 12 KiB, node 0

times
  populate     31.2 ms      8.01 GiB/s
  pin          1.20 ms       208 GiB/s
  find runs    45.0 µs     5,560 GiB/s
  map          3.10 µs    80,600 GiB/s
  attach       2.40 µs    1.20 µs each
  DMA check     102 ms      7.35 GiB/s
  unmap        2.90 µs    86,200 GiB/s
  unpin         410 µs       610 GiB/s

the same map again: median and middle half of 15 rounds
  by runs      3.10 µs   2.90 µs to 9.00 µs
  by pages     1.20 ms   1.10 ms to 1.50 ms
  ratio            387   167 to 402

DMA check
  devices     2 read 512 MiB and wrote 256 MiB
  faults      0 inside the range; 4 of 4 accesses just outside it
  IOTLB       196,352 hits (99.9 %), 256 misses, 3.00 table reads per miss

OK  every byte was right, and everything was given back
";
const SYNTHETIC: &str = "
memory
  size        8 MiB: what is left of the limit on locked memory (8 MiB,
              RLIMIT_MEMLOCK)
  backing     4k
  runs        190, 0 % of the memory in huge pages, node 0: 5 MiB, unknown node:
              3 MiB
                4 KiB to 16 KiB  × 144   768 KiB  ██▎
               16 KiB to 64 KiB  ×  36   768 KiB  ██▎
              64 KiB to 256 KiB  ×   7   640 KiB  █▉
               256 KiB to 1 MiB  ×   2   768 KiB  ██▎
                 4 MiB to 8 MiB  ×   1  5.12 MiB  ███████████████▍
  addresses   NOT REAL: synthetic addresses in a shuffled layout, not page
              frames

charge
  locked      8 MiB on mm->locked_vm, 100 % of the limit of 8 MiB
  steps       190 by runs, 2,048 page by page
  pin         mlock: io_uring is refused: Operation not permitted, 1 call

tables
  format      amdv1, 3 levels
  leaves      1,024 of 4 KiB, 64 of 64 KiB
  memory      1 table page, 4 KiB, node 1

times
  populate        0 ns
  pin             0 ns
  find runs       0 ns
  map          20.0 µs       391 GiB/s
  attach          0 ns
  DMA check       0 ns
  unmap           0 ns
  unpin           0 ns

the same map again: median and middle half of 1 round
  by runs      20.0 µs   20.0 µs to 20.0 µs
  by pages     15.0 µs   15.0 µs to 15.0 µs
  ratio           0.75   0.75 to 0.75

DMA check
  devices     1 read 8 MiB and wrote 8 MiB
  faults      2 inside the range; 1 of 2 accesses just outside it
  IOTLB       0 hits (0 %), 0 misses

WRONG  1 byte was not what it had to be
       2 faults inside the range
       1 access outside the range got through
";
const SAMPLED: &str = "
back end
  interface   vfio: a container of type 1
  device      0000:00:05.0 (1234:11e8), group 3, dmar0
  mappings    1 mapping, room for 65,534 more; 0 left at the end
  pages       4 KiB, 2 MiB, 1 GiB
  windows     0x0 to 0xfedfffff, 0xfef00000 to 0xffffffffffff
  cannot      unmap a part of a mapping; map memory that is not in this process

memory
  size        256 MiB: the default
  backing     thp: no huge pages of 1G or 2M are free; transparent huge pages
              are on for madvise
  pages       100 % of the memory in huge pages, node 0

charge
  locked      256 MiB on mm->locked_vm, no limit applies
  steps       1 in the ledger, 65,536 page by page
  VmLck       0 B before, 256 MiB while mapped, 0 B at the end
  VmPin       0 B before, 0 B while mapped, 0 B at the end

tables
  format      the kernel's; it shows neither leaves nor pages nor runs

times
  populate     31.2 ms      8.01 GiB/s
  map          14.1 ms      17.7 GiB/s   pinned by the same call
  attach       2.40 µs
  DMA check     4.06 s
  unmap        5.10 ms      49.0 GiB/s   unpinned by the same call

DMA check
  device      edu made 16 copies, read 32 KiB and wrote 32 KiB of 256 MiB
  compared    256 MiB, copied or not
  outside     0 of 4 accesses just outside it got through

OK  every byte that was compared was right, and everything was given back
";
const UNCHECKED: &str = "
back end
  interface   iommufd: /dev/vfio/devices/vfio0
  device      0000:00:05.0 (8086:1234), group 3, dmar0, node 1
  mappings    2 mappings, no limit to them; 0 left at the end
  pages       4 KiB and multiples of it; the kernel does not list other sizes
  windows     0x0 to 0xfedfffff, 0xfef00000 to 0xffffffffffff
  cannot      unmap a part of a mapping; map memory that is not in this process

memory
  size        256 MiB: the default
  backing     thp: no huge pages of 1G or 2M are free; transparent huge pages
              are on for madvise
  pages       100 % of the memory in huge pages, node 0

charge
  locked      256 MiB on mm->locked_vm, no limit applies
  steps       1 in the ledger, 65,536 page by page
  VmLck       0 B before, 256 MiB while mapped, 0 B at the end
  VmPin       0 B before, 0 B while mapped, 0 B at the end

tables
  format      the kernel's; it shows neither leaves nor pages nor runs

times
  populate     31.2 ms      8.01 GiB/s
  map          14.1 ms      17.7 GiB/s   pinned by the same call
  attach       2.40 µs
  unmap        5.10 ms      49.0 GiB/s   unpinned by the same call

DMA check
  device      not checked: no driver for 8086:1234 here

OK  mapped, unmapped, and everything given back; no byte was checked
";
