//! Whole reports as people read them.

use crate::inspect::needs::{
    BarReport, GuestRange, LockReport, MappingsReport, NeedFinding, Pieces, PoolReport,
};
use crate::inspect::{
    Advice, AreaKind, Estimate, FolioReport, FormatCost, GivenDevice, Interface, Limit,
    LockCounter, NeedsReport, RunsReport,
};

use super::*;

const MIB: u64 = 1 << 20;

fn seconds(fault: f64, pin_map: f64) -> Estimate {
    Estimate {
        fault_ns: (fault * 1e9) as u64,
        pin_map_ns: Some((pin_map * 1e9) as u64),
        total_ns: ((fault + pin_map) * 1e9) as u64,
        error_ns: 100_000_000,
    }
}

fn advised(finding: &str, setting: &str, reboot: bool, after: Estimate) -> Advice {
    Advice {
        finding: finding.into(),
        setting: vec![setting.into()],
        assumes: Vec::new(),
        reboot,
        estimate: Some(after),
        saved_ns: Some(seconds(1.4, 0.2).total_ns - after.total_ns),
        pages: None,
    }
}

fn locked() -> LockReport {
    LockReport {
        counter: LockCounter::Process,
        memory_bytes: 4 << 30,
        address_spaces: 1,
        mlocked_bytes: 0,
        needed_bytes: 4 << 30,
        at_start: true,
        limit_of: Some("the process"),
        limit_bytes: Some(8 * MIB),
    }
}

fn finding(cause: &'static str) -> NeedFinding {
    NeedFinding {
        cause,
        likely: false,
        title: "something is short".into(),
        text: String::new(),
        devices: Vec::new(),
        addresses: Vec::new(),
        advice: Vec::new(),
        source: "",
        reserved: None,
    }
}

fn pool(nodes: Vec<u32>, free: u64) -> PoolReport {
    PoolReport {
        page_bytes: 2 * MIB,
        nodes,
        needed_pages: 1024,
        free_pages: Some(free),
        growth_pages: 0,
        missing_pages: 1024_u64.saturating_sub(free),
    }
}

fn needed() -> NeedsReport {
    NeedsReport {
        locked: Some(locked()),
        findings: vec![finding("memlock.too-low")],
        ..NeedsReport::default()
    }
}

fn monitor() -> ProcessReport {
    let class = |page_bytes, bytes| FolioReport { page_bytes, bytes };
    ProcessReport {
        pid: 4711,
        name: "qemu-system-x86".into(),
        guest: Some(Guest {
            name: Some("web".into()),
            memory: vec![
                Ram {
                    bytes: 2 << 30,
                    shared: true,
                    asks_for_huge: Some(true),
                    ..Ram::default()
                };
                2
            ],
            remapped: Some(Remapped {
                bytes: 2 << 30,
                times: 5,
            }),
            devices: vec![GivenDevice {
                name: Some("Intel Corporation 82574L".into()),
                ..GivenDevice::from("0000:01:00.0".to_owned())
            }],
            ..Guest::default()
        }),
        mappable_bytes: 4 << 30,
        present_bytes: 1025 * MIB,
        rest_bytes: 1100 * MIB,
        rest_present_bytes: 12 * MIB,
        pinned_bytes: MIB,
        limit: Limit {
            memlock_bytes: Some(8 * MIB),
            lifted: false,
        },
        folios: vec![class(4096, MIB), class(64 << 10, 1024 * MIB)],
        entries: vec![class(4096, 1025 * MIB)],
        nodes: vec![(Some(0), 1025 * MIB)],
        runs: Some(RunsReport {
            count: 16_640,
            largest_bytes: 64 << 10,
            classes: Vec::new(),
        }),
        costs: vec![FormatCost {
            format: "vtd-ss".into(),
            leaf_count: 262_400,
            reach_64_bytes: 256 << 10,
            ..FormatCost::default()
        }],
        needs: needed(),
        start: Some(StartReport {
            pages: 1 << 20,
            interface: Interface::Type1,
            threads: vec![0; 2],
            speeds: None,
            type1: Some(seconds(1.4, 0.2)),
            iommufd: Some(seconds(1.4, 0.1)),
            now: Some(seconds(1.05, 0.2)),
            one_thread: None,
            together: Some(seconds(0.11, 0.01)),
            conditions: None,
            notes: Vec::new(),
        }),
        advice: vec![
            advised(
                "hugetlb pages of 2 MiB",
                "-object a",
                false,
                seconds(0.2, 0.01),
            ),
            advised(
                "hugetlb pages of 1 GiB",
                "-object b",
                true,
                seconds(0.1, 0.01),
            ),
        ],
        missing: vec![Missing {
            what: "nodes",
            why: "there is no numa_maps".into(),
        }],
        ..ProcessReport::default()
    }
}

#[test]
fn a_monitor_as_people_read_it() {
    let text = process(&monitor(), Paint::PLAIN);
    assert_eq!(text, MONITOR.trim_start_matches('\n'), "\n{text}");
}

#[test]
fn a_configuration_as_people_read_it() {
    let monitor = monitor();
    let text = configuration(
        &ConfigurationReport {
            guest: monitor.guest.unwrap(),
            needs: NeedsReport {
                pools: vec![pool(vec![0], 512), pool(Vec::new(), 4096)],
                ram: vec![GuestRange {
                    first: 1 << 32,
                    last: (1 << 40) - 1,
                }],
                last_address: Some((1 << 39) - 1),
                bars: vec![BarReport {
                    device: "0000:01:00.0".into(),
                    bytes: 128 << 30,
                }],
                findings: [
                    "memlock.per-device",
                    "layout.address-width",
                    "start.bar-mapping",
                ]
                .map(finding)
                .into(),
                locked: Some(LockReport {
                    address_spaces: 2,
                    needed_bytes: 8 << 30,
                    limit_bytes: Some(4 << 30),
                    ..locked()
                }),
                mappings: Some(MappingsReport {
                    ram: 2,
                    pieces: vec![Pieces {
                        what: "virtio-mem",
                        bytes: 64 << 30,
                        piece_bytes: 2 << 20,
                        count: 32_768,
                    }],
                    limit: 65_535,
                }),
                ..NeedsReport::default()
            },
            start: StartReport {
                type1: None,
                ..monitor.start.unwrap()
            },
            advice: Vec::new(),
        },
        Paint::PLAIN,
    );
    assert_eq!(text, CONFIGURATION.trim_start_matches('\n'), "\n{text}");
}

#[test]
fn another_process_has_its_areas_and_what_takes_privilege_is_unknown() {
    let mut found = monitor();
    (found.guest, found.runs, found.start) = (None, None, None);
    found.missing[0].what = "runs, leaves, folios";
    found.areas = vec![AreaReport {
        area: Area {
            address: 0x7f00_0000_0000,
            bytes: 4 << 30,
            kind: AreaKind::Anonymous,
            name: String::new(),
            page_bytes: 4096,
            locked_bytes: 0,
            asks_for_huge: false,
            refuses_huge: false,
            mappable: true,
            executable: false,
            shared: false,
            guest_ram: false,
        },
        present_bytes: 1025 * MIB,
        huge_bytes: 0,
        runs: None,
    }];
    let text = process(&found, Paint::PLAIN);
    for part in [
        "process 4711 (qemu-system-x86)\n  mappable    4 GiB\n",
        "  0x7f0000000000  4 GiB  1.00 GiB  0 %   anonymous\n",
        "\n  runs, leaves, folios\n              there is no numa_maps\n",
    ] {
        assert!(text.contains(part), "{text}");
    }
    assert!(!text.contains("runs  "), "{text}");
}

const MONITOR: &str = r"
virtual machine, process 4711 (qemu-system-x86)
  name        web
  guest RAM   4 GiB in 2 parts: memfd, asks for huge pages
              2 GiB below 4 GiB, mapped 5 times while it starts
  devices     0000:01:00.0 Intel Corporation 82574L
  rest        1.07 GiB, 12 MiB present: heap, stacks, firmware, video memory
  present     1.00 GiB (25.0 %): 1.00 GiB by entries of 4 KiB
  folios      1 GiB of 64 KiB, 1 MiB of 4 KiB
  nodes       0: 1.00 GiB
  runs        16,640, the largest 64 KiB; VT-d has 262,400 leaves for them,
              64 of which, in a translation cache of 64 entries, reach 256 KiB
  pinned      1 MiB, locked 0 B, limit 8 MiB (RLIMIT_MEMLOCK)

needs
  locked      ! 4 GiB (mm->locked_vm): 8 MiB allowed by the process

start: the kernel maps 4 GiB (estimate: 1,048,576 faults)
                          fault, zero  pin, map  all
  today, type 1           1.40 s       200 ms    1.60 s ± 100 ms
  today, iommufd          1.40 s       100 ms    1.50 s ± 100 ms
  hot-plug now            1.05 s       200 ms    1.25 s ± 100 ms
  hugetlb pages of 2 MiB  200 ms       10.0 ms   210 ms ± 100 ms
  hugetlb pages of 1 GiB  100 ms       10.0 ms   110 ms ± 100 ms
  together, no reboot     110 ms       10.0 ms   120 ms ± 100 ms

  note        calibrated by a debug build: 3 to 4 times slower than a release
              build

changes that help
  1. hugetlb pages of 2 MiB: saves 1.39 s
     -object a
  2. hugetlb pages of 1 GiB: saves 1.49 s, needs a reboot (without one: 1.39 s)
     -object b

not known
  nodes       there is no numa_maps
";

const CONFIGURATION: &str = r"
virtual machine, by its configuration
  name        web
  guest RAM   4 GiB in 2 parts: memfd, asks for huge pages
              2 GiB below 4 GiB, mapped 5 times while it starts
  devices     0000:01:00.0 Intel Corporation 82574L

needs
  pool        ! 1,024 pages of 2 MiB on node 0: 512 are free
  pool        ✓ 1,024 pages of 2 MiB: 4,096 are free
  locked      ! 8 GiB, 4 GiB in each of 2 address spaces (mm->locked_vm): 4 GiB
              allowed by the process
  mappings    ✓ 2 for RAM, up to 32,768 more in pieces: 65,535 allowed
  addresses   ! RAM up to 0xffffffffff: the IOMMU translates up to 0x7fffffffff
  BARs        ! 128 GiB of 0000:01:00.0

start: the kernel maps 4 GiB
  faults      1,048,576
";
