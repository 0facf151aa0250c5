//! Reports made by hand, for the tests of this folder.

use scenario::Counted;

use crate::map::{
    BackendReport, ChargeReport, Compared, DeviceUsed, DmaReport, Lack, MapReport, MappingsReport,
    MemoryReport, NodeShare, PinsReport, RunsReport, SampleReport, SizeClass, Spread, Stretch,
    TablesReport, Times, UnitReport, WindowReport,
};

pub(crate) const K: u64 = 1 << 10;
pub(crate) const M: u64 = 1 << 20;

fn class(from_bytes: u64, count: u64, bytes: u64) -> SizeClass {
    SizeClass {
        from_bytes,
        count,
        bytes,
    }
}

fn node(node: Option<u32>, bytes: u64) -> NodeShare {
    NodeShare { node, bytes }
}

fn spread(median: f64, lower: f64, upper: f64) -> Spread {
    Spread {
        median,
        lower,
        upper,
    }
}

fn software() -> BackendReport {
    BackendReport {
        name: "software".into(),
        granule_bytes: 4 * K,
        page_sizes_bytes: Some(vec![4 * K, 2 * M, 1 << 30]),
        windows: vec![WindowReport {
            first: 0,
            last: (1 << 48) - 1,
        }],
        ..BackendReport::default()
    }
}

/// Transparent huge pages, as root.
pub(crate) fn huge() -> MapReport {
    MapReport {
        backend: software(),
        memory: MemoryReport {
            size_bytes: 256 * M,
            size_reason: Some("the default".into()),
            backing: "thp".into(),
            backing_reason: Some(
                "no huge pages of 1G or 2M are free; transparent huge pages are on for madvise"
                    .into(),
            ),
            pool_pages_added: 0,
            huge_bytes: 256 * M,
            nodes: vec![node(Some(0), 256 * M)],
            found: Some(RunsReport {
                runs: 3,
                run_sizes: vec![class(2 * M, 1, 2 * M), class(64 * M, 2, 254 * M)],
                addresses: "pagemap".into(),
                addresses_reason: "page frames (pagemap)".into(),
                looks: 131,
            }),
        },
        charge: ChargeReport {
            charged_bytes: 256 * M,
            limit_bytes: None,
            counter: "mm->pinned_vm".into(),
            steps: 3,
            page_steps: 65_536,
            before: Counted::default(),
            mapped: Counted {
                locked_bytes: 0,
                pinned_bytes: 256 * M,
            },
            after: Counted::default(),
            pins: Some(PinsReport {
                pin: "io_uring".into(),
                pin_reason: None,
                pin_calls: 1,
                pin_buffers: 1,
            }),
        },
        tables: Some(TablesReport {
            format: "vtd-ss".into(),
            levels: 4,
            leaves: vec![class(2 * M, 128, 256 * M)],
            table_pages: 3,
            table_bytes: 12 * K,
            nodes: vec![node(Some(0), 12 * K)],
        }),
        placement: None,
        times: Times {
            populate_ns: 31_200_000,
            pin_ns: Some(1_200_000),
            find_runs_ns: Some(45_000),
            map_ns: 3_100,
            attach_ns: 2_400,
            dma_check_ns: Some(102_000_000),
            unmap_ns: 2_900,
            unpin_ns: Some(410_000),
        },
        compared: Some(Compared {
            rounds: 15,
            by_runs_ns: spread(3_100.0, 2_900.0, 9_000.0),
            by_page_ns: spread(1_200_000.0, 1_100_000.0, 1_500_000.0),
            ratio: spread(387.0, 167.0, 402.0),
        }),
        dma: DmaReport {
            devices: 2,
            read_bytes: 512 * M,
            written_bytes: 256 * M,
            neighbour_accesses: 4,
            unit: Some(UnitReport {
                faults: 0,
                neighbour_faults: 4,
                iotlb_hits: 196_352,
                iotlb_misses: 256,
                table_reads: 768,
            }),
            ..DmaReport::default()
        },
        layout: Some(vec![Stretch {
            iova: 0x1_0000_0000,
            len_bytes: 256 * M,
            leaf_bytes: 2 * M,
        }]),
    }
}

/// A real device, by its group, which has copied samples.
pub(crate) fn sampled() -> MapReport {
    let lack = |name: &str, cannot: &str| Lack {
        name: name.into(),
        cannot: cannot.into(),
    };
    let window = |first, last| WindowReport { first, last };
    let huge = huge();
    MapReport {
        backend: BackendReport {
            name: "vfio".into(),
            device: Some(DeviceUsed {
                address: "0000:00:05.0".into(),
                id: "1234:11e8".into(),
                group: Some(3),
                cdev: None,
                unit: Some("dmar0".into()),
                node: None,
            }),
            further_devices: Vec::new(),
            lacks: vec![
                lack("unmap_part", "unmap a part of a mapping"),
                lack("given_runs", "map memory that is not in this process"),
            ],
            granule_bytes: 4 * K,
            page_sizes_bytes: Some(vec![4 * K, 2 * M, 1 << 30]),
            windows: vec![window(0, 0xfedf_ffff), window(0xfef0_0000, (1 << 48) - 1)],
            mappings: Some(MappingsReport {
                made: 1,
                available: Some(65_534),
                left: 0,
            }),
        },
        memory: MemoryReport {
            found: None,
            ..huge.memory
        },
        charge: ChargeReport {
            counter: "mm->locked_vm".into(),
            steps: 1,
            mapped: Counted {
                locked_bytes: 256 * M,
                pinned_bytes: 0,
            },
            pins: None,
            ..huge.charge
        },
        tables: None,
        placement: None,
        times: Times {
            pin_ns: None,
            find_runs_ns: None,
            map_ns: 14_100_000,
            dma_check_ns: Some(4_060_000_000),
            unmap_ns: 5_100_000,
            unpin_ns: None,
            ..huge.times
        },
        compared: None,
        dma: DmaReport {
            devices: 1,
            sample: Some(SampleReport {
                engine: "edu".into(),
                copies: 16,
                compared_bytes: 256 * M,
            }),
            read_bytes: 32 * K,
            written_bytes: 32 * K,
            neighbour_accesses: 4,
            ..DmaReport::default()
        },
        layout: None,
    }
}

/// A real device, by its own node, that nobody here can have do DMA.
pub(crate) fn unchecked() -> MapReport {
    let mut report = sampled();
    report.backend.name = "iommufd".into();
    if let Some(device) = &mut report.backend.device {
        device.id = "8086:1234".into();
        device.cdev = Some("/dev/vfio/devices/vfio0".into());
        device.node = Some(1);
    }
    report.backend.page_sizes_bytes = None;
    report.backend.mappings = Some(MappingsReport {
        made: 2,
        available: None,
        left: 0,
    });
    report.times.dma_check_ns = None;
    report.dma = DmaReport {
        devices: 1,
        not_checked: Some("no driver for 8086:1234 here".into()),
        ..DmaReport::default()
    };
    report
}

/// An ordinary user under a small limit, on a machine that tells little, with something wrong.
pub(crate) fn synthetic() -> MapReport {
    let counts = [96, 48, 24, 12, 4, 3, 1, 1];
    let small = (0..)
        .zip(counts)
        .map(|(log, n)| class(K << (log + 2), n, n * (K << (log + 2))));
    MapReport {
        backend: software(),
        memory: MemoryReport {
            size_bytes: 8 * M,
            size_reason: Some(
                "what is left of the limit on locked memory (8 MiB, RLIMIT_MEMLOCK)".into(),
            ),
            backing: "4k".into(),
            backing_reason: None,
            pool_pages_added: 0,
            huge_bytes: 0,
            nodes: vec![node(Some(0), 5 * M), node(None, 3 * M)],
            found: Some(RunsReport {
                runs: 190,
                run_sizes: small.chain([class(4 * M, 1, 5248 * K)]).collect(),
                addresses: "synthetic".into(),
                addresses_reason: "synthetic addresses in a shuffled layout, not page frames"
                    .into(),
                looks: 0,
            }),
        },
        charge: ChargeReport {
            charged_bytes: 8 * M,
            limit_bytes: Some(8 * M),
            counter: "mm->locked_vm".into(),
            steps: 190,
            page_steps: 2048,
            pins: Some(PinsReport {
                pin: "mlock".into(),
                pin_reason: Some("io_uring is refused: Operation not permitted".into()),
                pin_calls: 1,
                pin_buffers: 0,
            }),
            ..ChargeReport::default()
        },
        tables: Some(TablesReport {
            format: "amdv1".into(),
            levels: 3,
            leaves: vec![class(4 * K, 1024, 4 * M), class(64 * K, 64, 4 * M)],
            table_pages: 1,
            table_bytes: 4 * K,
            nodes: vec![node(Some(1), 4 * K)],
        }),
        placement: None,
        times: Times {
            pin_ns: Some(0),
            find_runs_ns: Some(0),
            map_ns: 20_000,
            dma_check_ns: Some(0),
            unpin_ns: Some(0),
            ..Times::default()
        },
        compared: Some(Compared {
            rounds: 1,
            by_runs_ns: spread(20_000.0, 20_000.0, 20_000.0),
            by_page_ns: spread(15_000.0, 15_000.0, 15_000.0),
            ratio: spread(0.75, 0.75, 0.75),
        }),
        dma: DmaReport {
            devices: 1,
            read_bytes: 8 * M,
            written_bytes: 8 * M,
            wrong_bytes: 1,
            neighbour_accesses: 2,
            neighbour_reached: 1,
            unit: Some(UnitReport {
                faults: 2,
                neighbour_faults: 1,
                ..UnitReport::default()
            }),
            ..DmaReport::default()
        },
        layout: Some(vec![
            Stretch {
                iova: 0x10_0000,
                len_bytes: 4 * M,
                leaf_bytes: 4 * K,
            },
            Stretch {
                iova: 0x10_0000 + 4 * M,
                len_bytes: 4 * M,
                leaf_bytes: 64 * K,
            },
        ]),
    }
}

/// One huge page that was added to the pool, in leaves of alternating sizes, tiny among large.
pub(crate) fn striped(stretches: u64) -> MapReport {
    let mut report = huge();
    report.memory.pool_pages_added = 1;
    let layout = (0..stretches)
        .map(|n| Stretch {
            iova: n * 4 * M,
            len_bytes: if n % 2 == 0 { 4 * M - 4 * K } else { 4 * M },
            leaf_bytes: if n % 2 == 0 { 4 * K } else { 2 * M },
        })
        .collect();
    report.layout = Some(layout);
    report
}
