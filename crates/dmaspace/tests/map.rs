//! The main job on this machine's memory, as whoever runs the tests.

#![allow(clippy::unwrap_used, reason = "helpers of tests panic as tests do")]

use std::ops::ControlFlow;

use dmaspace::hostmem::Backing;
use dmaspace::iopt::FormatId;
use dmaspace::map::{JobError, MapJob, MapReport, Stage, Unwatched, Watch};

fn job() -> MapJob {
    MapJob {
        size: Some(4 << 20),
        backing: None,
        max_leaf: None,
        format: FormatId::VtdSs,
        devices: 2,
    }
}

fn run(job: &MapJob) -> MapReport {
    let report = job.run(&mut Unwatched).unwrap();
    let size = report.memory.size_bytes;
    assert_eq!(report.dma.read_bytes, size * u64::from(job.devices));
    assert_eq!(report.dma.written_bytes, size);
    assert_eq!((report.dma.wrong_bytes, report.dma.faults), (0, 0));
    assert_eq!(report.dma.neighbour_accesses, 4 * u64::from(job.devices));
    assert_eq!(report.dma.neighbour_faults, report.dma.neighbour_accesses);
    assert!(report.dma.iotlb_misses > 0 && report.dma.table_reads > 0);
    assert_eq!(
        report
            .memory
            .run_sizes
            .iter()
            .map(|class| class.bytes)
            .sum::<u64>(),
        size
    );
    assert_eq!(
        report
            .tables
            .leaves
            .iter()
            .map(|class| class.bytes)
            .sum::<u64>(),
        size
    );
    assert_eq!(
        report
            .layout
            .iter()
            .map(|stretch| stretch.len_bytes)
            .sum::<u64>(),
        size
    );
    assert!(report.charge.charged_bytes >= size);
    assert_eq!(report.charge.steps, 1);
    assert_eq!(report.charge.page_steps, size / 4096);
    report
}

#[test]
fn every_format_maps_the_same_memory() {
    for format in FormatId::ALL {
        let report = run(&MapJob { format, ..job() });
        assert_eq!(report.tables.format, format.name());
        assert!(report.tables.table_pages >= 3);
        assert_eq!(report.tables.table_bytes, report.tables.table_pages * 4096);
    }
}

#[test]
fn leaves_are_no_larger_than_allowed() {
    let report = run(&MapJob {
        max_leaf: Some(4096),
        ..job()
    });
    assert_eq!(report.tables.leaves.len(), 1);
    assert_eq!(
        (
            report.tables.leaves[0].from_bytes,
            report.tables.leaves[0].count
        ),
        (4096, 1024)
    );
}

#[test]
fn each_backing_without_huge_pages_of_a_pool_works() {
    for backing in [Backing::Anon4K, Backing::Thp, Backing::Memfd] {
        let report = run(&MapJob {
            backing: Some(backing),
            ..job()
        });
        assert_eq!(report.memory.backing, backing.name());
        assert_eq!(report.memory.backing_reason, None);
    }
}

#[test]
fn one_device_and_many_devices_see_everything() {
    for devices in [1, 7] {
        run(&MapJob { devices, ..job() });
    }
}

#[test]
fn requests_that_make_no_sense_are_input_errors() {
    for size in [0, 5000, 1 << 62] {
        let error = MapJob {
            size: Some(size),
            ..job()
        }
        .run(&mut Unwatched)
        .unwrap_err();
        assert!(error.is_input(), "{error}");
    }
}

/// Stops the job when a stage is reached.
struct StopAt(Stage);

impl Watch for StopAt {
    fn progress(&mut self, stage: Stage, _done: u64, _total: u64) -> ControlFlow<()> {
        if stage == self.0 {
            ControlFlow::Break(())
        } else {
            ControlFlow::Continue(())
        }
    }
}

#[test]
fn a_job_that_is_stopped_gives_everything_back() {
    for stage in [Stage::Populate, Stage::Pin, Stage::Map, Stage::DmaCheck] {
        let error = job().run(&mut StopAt(stage)).unwrap_err();
        assert!(matches!(error, JobError::Interrupted), "{stage:?}: {error}");
    }
    // Whatever is still pinned would be charged to the next one.
    run(&job());
}

#[test]
fn the_report_is_stable_json_with_units() {
    let json = serde_json::to_value(run(&job())).unwrap();
    for name in [
        "/memory/size_bytes",
        "/memory/runs",
        "/charge/charged_bytes",
        "/charge/limit_bytes",
        "/charge/page_steps",
        "/tables/table_bytes",
        "/tables/leaves/0/count",
        "/times/populate_ns",
        "/times/pin_ns",
        "/times/find_runs_ns",
        "/times/map_ns",
        "/times/map_by_page_ns",
        "/times/attach_ns",
        "/times/dma_check_ns",
        "/times/unmap_ns",
        "/times/unpin_ns",
        "/dma/faults",
        "/dma/iotlb_hits",
        "/layout/0/leaf_bytes",
    ] {
        assert!(json.pointer(name).is_some(), "{name} is missing");
    }
}
