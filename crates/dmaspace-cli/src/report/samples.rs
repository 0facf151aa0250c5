//! Reports made by hand, for the tests of this folder.

use dmaspace::map::{
    ChargeReport, DmaReport, MapReport, MemoryReport, NodeShare, SizeClass, Stretch, TablesReport,
    Times,
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

/// Transparent huge pages, as root.
pub(crate) fn huge() -> MapReport {
    MapReport {
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
            runs: 3,
            run_sizes: vec![class(2 * M, 1, 2 * M), class(64 * M, 2, 254 * M)],
            nodes: vec![node(Some(0), 256 * M)],
            addresses: "pagemap".into(),
            addresses_reason: "page frames (pagemap)".into(),
            looks: 131,
        },
        charge: ChargeReport {
            pin: "io_uring".into(),
            pin_reason: None,
            charged_bytes: 256 * M,
            limit_bytes: None,
            counter: "mm->pinned_vm".into(),
            steps: 3,
            page_steps: 65_536,
            pin_calls: 1,
            pin_buffers: 1,
        },
        tables: TablesReport {
            format: "vtd-ss".into(),
            levels: 4,
            leaves: vec![class(2 * M, 128, 256 * M)],
            table_pages: 3,
            table_bytes: 12 * K,
            nodes: vec![node(Some(0), 12 * K)],
        },
        times: Times {
            populate_ns: 31_200_000,
            pin_ns: 1_200_000,
            find_runs_ns: 45_000,
            map_ns: 3_100,
            map_by_page_ns: 1_200_000,
            attach_ns: 2_400,
            dma_check_ns: 102_000_000,
            unmap_ns: 2_900,
            unpin_ns: 410_000,
        },
        dma: DmaReport {
            devices: 2,
            read_bytes: 512 * M,
            written_bytes: 256 * M,
            wrong_bytes: 0,
            faults: 0,
            neighbour_faults: 4,
            neighbour_accesses: 4,
            iotlb_hits: 196_352,
            iotlb_misses: 256,
            table_reads: 768,
        },
        layout: vec![Stretch {
            iova: 0x1_0000_0000,
            len_bytes: 256 * M,
            leaf_bytes: 2 * M,
        }],
    }
}

/// An ordinary user under a small limit, on a machine that tells little, with something wrong.
pub(crate) fn synthetic() -> MapReport {
    let counts = [96, 48, 24, 12, 4, 3, 1, 1];
    let small = (0..)
        .zip(counts)
        .map(|(log, n)| class(K << (log + 2), n, n * (K << (log + 2))));
    MapReport {
        memory: MemoryReport {
            size_bytes: 8 * M,
            size_reason: Some(
                "what is left of the limit on locked memory (8 MiB, RLIMIT_MEMLOCK)".into(),
            ),
            backing: "4k".into(),
            backing_reason: None,
            pool_pages_added: 0,
            huge_bytes: 0,
            runs: 190,
            run_sizes: small.chain([class(4 * M, 1, 5248 * K)]).collect(),
            nodes: vec![node(Some(0), 5 * M), node(None, 3 * M)],
            addresses: "synthetic".into(),
            addresses_reason: "synthetic addresses in a shuffled layout, not page frames".into(),
            looks: 0,
        },
        charge: ChargeReport {
            pin: "mlock".into(),
            pin_reason: Some("io_uring is refused: Operation not permitted".into()),
            charged_bytes: 8 * M,
            limit_bytes: Some(8 * M),
            counter: "mm->locked_vm".into(),
            steps: 190,
            page_steps: 2048,
            pin_calls: 1,
            pin_buffers: 0,
        },
        tables: TablesReport {
            format: "amdv1".into(),
            levels: 3,
            leaves: vec![class(4 * K, 1024, 4 * M), class(64 * K, 64, 4 * M)],
            table_pages: 1,
            table_bytes: 4 * K,
            nodes: vec![node(Some(1), 4 * K)],
        },
        times: Times {
            map_ns: 20_000,
            map_by_page_ns: 15_000,
            ..Times::default()
        },
        dma: DmaReport {
            devices: 1,
            read_bytes: 8 * M,
            written_bytes: 8 * M,
            wrong_bytes: 1,
            faults: 2,
            neighbour_faults: 1,
            neighbour_accesses: 2,
            iotlb_hits: 0,
            iotlb_misses: 0,
            table_reads: 0,
        },
        layout: vec![
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
        ],
    }
}

/// One huge page that was added to the pool, in leaves of alternating sizes, tiny among large.
pub(crate) fn striped(stretches: u64) -> MapReport {
    let mut report = huge();
    report.memory.pool_pages_added = 1;
    report.layout = (0..stretches)
        .map(|n| Stretch {
            iova: n * 4 * M,
            len_bytes: if n % 2 == 0 { 4 * M - 4 * K } else { 4 * M },
            leaf_bytes: if n % 2 == 0 { 4 * K } else { 2 * M },
        })
        .collect();
    report
}
