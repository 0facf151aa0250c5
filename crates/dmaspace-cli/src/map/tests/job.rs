//! The main job on this machine's memory, as whoever runs the tests.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "helpers of tests panic as tests do"
)]

use std::ops::ControlFlow;

use crate::counter_lock;
use crate::map::{
    JobError, MapBackend, MapJob, MapReport, SizeClass, Software, Stage, Unwatched, Watch,
};
use dmaspace::devices::NotReady;
use hostmem::{Backing, Machine};
use ioas::Placement;
use iommu::NodeId;
use iopt::FormatId;

fn job() -> MapJob {
    over(Software::default())
}

fn over(software: Software) -> MapJob {
    MapJob {
        size: Some(4 << 20),
        backing: None,
        backend: MapBackend::Software(software),
        placement: None,
    }
}

fn run(job: &MapJob) -> MapReport {
    let _turn = counter_lock::pinning();
    let report = job.run(&mut Unwatched).unwrap();
    let MapBackend::Software(Software { devices, .. }) = job.backend else {
        panic!("another back end");
    };
    let size = report.memory.size_bytes;
    assert_eq!(report.backend.name, "software");
    assert_eq!(report.backend.lacks, []);
    assert_eq!(report.dma.read_bytes, size * u64::from(devices));
    assert_eq!(report.dma.written_bytes, size);
    assert_eq!(report.dma.wrong_bytes, 0);
    assert_eq!(report.dma.neighbour_accesses, 4 * u64::from(devices));
    assert_eq!(report.dma.neighbour_reached, 0);
    let unit = report.dma.unit.as_ref().unwrap();
    assert_eq!(unit.faults, 0);
    assert_eq!(unit.neighbour_faults, report.dma.neighbour_accesses);
    assert!(unit.iotlb_misses > 0 && unit.table_reads > 0);
    let classes = |classes: &[SizeClass]| classes.iter().map(|class| class.bytes).sum::<u64>();
    assert_eq!(
        classes(&report.memory.found.as_ref().unwrap().run_sizes),
        size
    );
    assert_eq!(classes(&report.tables.as_ref().unwrap().leaves), size);
    let layout = report.layout.as_ref().unwrap();
    assert_eq!(
        layout.iter().map(|stretch| stretch.len_bytes).sum::<u64>(),
        size
    );
    let counted = report.charge.mapped.since(report.charge.before);
    assert!(counted.locked_bytes + counted.pinned_bytes >= size);
    assert!(report.charge.charged_bytes >= size);
    assert_eq!(report.charge.steps, 1);
    assert_eq!(report.charge.page_steps, size / 4096);
    report
}

#[test]
fn every_format_maps_the_same_memory() {
    for format in FormatId::ALL {
        let report = run(&over(Software {
            format,
            ..Software::default()
        }));
        let tables = report.tables.unwrap();
        assert_eq!(tables.format, format.name());
        assert!(tables.table_pages >= 3);
        assert_eq!(tables.table_bytes, tables.table_pages * 4096);
    }
}

#[test]
fn leaves_are_no_larger_than_allowed() {
    let report = run(&over(Software {
        max_leaf: Some(4096),
        ..Software::default()
    }));
    let leaves = report.tables.unwrap().leaves;
    assert_eq!(leaves.len(), 1);
    assert_eq!((leaves[0].from_bytes, leaves[0].count), (4096, 1024));
    assert_eq!(report.backend.page_sizes_bytes.unwrap(), [4096]);
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
        run(&over(Software {
            devices,
            ..Software::default()
        }));
    }
}

#[test]
fn every_policy_says_where_its_tables_are() {
    assert_eq!(run(&job()).placement, None);
    let nodes = Machine::probe().unwrap().nodes;
    let here = Placement::Near(NodeId(nodes[0]));
    for policy in [Placement::Shared, Placement::PerNode, here] {
        let devices = nodes.len() as u32 + 1;
        let report = run(&MapJob {
            placement: Some(policy),
            ..over(Software {
                devices,
                ..Software::default()
            })
        });
        let placement = report.placement.unwrap();
        assert_eq!(placement.policy.parse(), Ok(policy));
        let expected = if policy == Placement::PerNode {
            nodes.len()
        } else {
            1
        };
        assert_eq!(placement.domains.len(), expected);
        let all: u64 = placement.domains.iter().map(|domain| domain.devices).sum();
        assert_eq!(all, u64::from(devices));
        // All tables are counted, and memory is charged once.
        let bytes = placement
            .domains
            .iter()
            .filter_map(|domain| domain.table_bytes);
        assert_eq!(bytes.sum::<u64>(), report.tables.unwrap().table_bytes);
        assert_eq!(report.charge.charged_bytes, report.memory.size_bytes);
        // Where they are was asked, or the report says that they are elsewhere.
        let wanted = |node: Option<u32>| policy.tables(node.map(NodeId)).map(|node| node.0);
        let there = placement.domains.iter().all(|domain| {
            let found = domain.nodes.as_ref().unwrap();
            found.iter().all(|share| share.node == wanted(domain.node))
        });
        assert_eq!(there, placement.misplaced.is_empty(), "{placement:?}");
    }
}

#[test]
fn tables_on_a_node_without_memory_are_refused_by_name() {
    let placement = Some(Placement::Near(NodeId(4095)));
    for backend in [
        MapBackend::Software(Software::default()),
        MapBackend::Iommufd {
            devices: vec!["ffff:ff:1f.7".into()],
        },
    ] {
        let asked = MapJob {
            placement,
            backend,
            ..job()
        };
        let error = asked.run(&mut Unwatched).unwrap_err();
        let nodes = Machine::probe().unwrap().nodes;
        assert!(
            matches!(&error, JobError::NoNode { node: 4095, nodes: there } if *there == nodes),
            "{error}"
        );
        assert!(error.is_input());
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
        let _turn = counter_lock::pinning();
        let error = job().run(&mut StopAt(stage)).unwrap_err();
        assert!(matches!(error, JobError::Interrupted), "{stage:?}: {error}");
    }
    // Whatever is still pinned would be charged to the next one.
    run(&job());
}

/// Whatever the machine has: this is no device's address.
#[test]
fn a_device_that_is_not_there_is_refused_before_memory_is_taken() {
    let device = || String::from("ffff:ff:1f.7");
    for backend in [
        MapBackend::Vfio {
            devices: vec![device()],
        },
        MapBackend::Iommufd {
            devices: vec![device()],
        },
    ] {
        // More memory than there is, which would be refused, too.
        let asked = MapJob {
            size: Some(1 << 62),
            backend,
            ..job()
        };
        let error = asked.run(&mut Unwatched).unwrap_err();
        let unknown = NotReady::Unknown { address: device() };
        assert!(matches!(&error, JobError::NotReady(cause) if *cause == unknown));
        assert!(error.is_input());
    }
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
        "/compared/rounds",
        "/compared/by_runs_ns/median",
        "/compared/by_page_ns/lower",
        "/compared/ratio/upper",
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
