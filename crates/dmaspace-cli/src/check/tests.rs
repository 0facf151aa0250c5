//! The check on this machine's memory, as the user who runs the tests.
//!
//! The kernel's counters belong to the process, so that the tests take turns.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "helpers of tests panic as tests do"
)]

use std::fs::File;
use std::ops::ControlFlow;
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};

use hostmem::{Backing, Counter, Limits, Machine};
use ioas::Placement;
use iommu::NodeId;
use iopt::FormatId;

use super::report::CheckReport;
use super::software::STEPS;
use super::{Backend, CheckError, CheckJob, PAGE, Software, Step, report_file};

const MIB: u64 = 1 << 20;

fn over(software: Software) -> CheckJob {
    CheckJob {
        size: Some(2 * MIB),
        software,
        ..CheckJob::default()
    }
}

fn job() -> CheckJob {
    over(Software::default())
}

fn go_on(_step: Step) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

fn kernel() -> [u64; 2] {
    [Counter::MmLockedVm, Counter::PinnedVm].map(|counter| Limits::in_use(counter).unwrap().known)
}

/// All steps over tables of our own.
fn steps() -> Vec<Step> {
    let between = STEPS.iter().map(|(step, _)| *step);
    let steps = [Step::Memory].into_iter().chain(between);
    steps.chain([Step::Close]).collect()
}

/// A check that comes to its end, with nothing wrong.
fn run(job: &CheckJob) -> CheckReport {
    let _turn = turn();
    let before = kernel();
    let report = job.run(&mut go_on).unwrap();
    assert_eq!(kernel(), before);
    for done in &report.steps {
        assert!(done.right, "{done:?}");
    }
    assert!(report.is_right(), "{:?} {:?}", report.dma, report.left);
    let found: Vec<_> = report.steps.iter().map(|done| done.step).collect();
    assert_eq!(found, steps());
    let size = report.memory.size_bytes;
    // Charged in one step, not by pages of 4 KiB.
    assert_eq!(report.memory.charge_steps, 1);
    assert!(report.memory.charged_bytes >= size);
    let counted = report.memory.mapped;
    assert!(counted.locked_bytes + counted.pinned_bytes >= size);
    let dma = report.dma.as_ref().unwrap();
    // Each device twice everywhere; twice in each hole, which the last time is all memory.
    let each = u64::from(dma.devices) * size;
    assert!(
        dma.read_bytes >= 2 * each && dma.written_bytes >= 2 * each,
        "{dma:?}"
    );
    assert!(dma.faults_expected >= 2 * each / PAGE, "{dma:?}");
    let of = |step| {
        report
            .steps
            .iter()
            .find(|done| done.step == step)
            .unwrap()
            .bytes
    };
    assert_eq!(of(Step::Hole), PAGE);
    assert_eq!(of(Step::Harvest), (size / 8).max(PAGE));
    assert_eq!(of(Step::Release), of(Step::Restore));
    let tables = report.tables.as_ref().unwrap();
    let leaves: u64 = tables.leaves.iter().map(|class| class.bytes).sum();
    assert_eq!(leaves, size);
    report
}

#[test]
fn every_format_is_right_at_every_step_and_leaves_nothing() {
    for format in FormatId::ALL {
        let report = run(&over(Software {
            format,
            ..Software::default()
        }));
        assert_eq!(report.tables.unwrap().format, format.name());
        let again = report.compared.unwrap();
        assert!(again.by_runs_ns.median > 0.0 && again.ratio.lower > 0.0);
    }
}

#[test]
fn leaves_are_no_larger_than_allowed() {
    let report = run(&over(Software {
        max_leaf: Some(PAGE),
        ..Software::default()
    }));
    let leaves = report.tables.unwrap().leaves;
    assert_eq!(leaves.len(), 1);
    assert_eq!((leaves[0].from_bytes, leaves[0].count), (PAGE, 512));
}

#[test]
fn each_backing_without_huge_pages_of_a_pool_is_right() {
    for backing in [Backing::Anon4K, Backing::Thp, Backing::Memfd] {
        let report = run(&CheckJob {
            backing: Some(backing),
            ..job()
        });
        assert_eq!(report.memory.backing, backing.name());
        assert_eq!(report.memory.backing_reason, None);
    }
}

#[test]
fn one_device_and_many_devices_see_everything_and_a_page_is_enough() {
    for devices in [1, 7] {
        let software = Software {
            devices,
            ..Software::default()
        };
        run(&CheckJob {
            size: Some(64 << 10),
            ..over(software)
        });
    }
    run(&CheckJob {
        size: Some(PAGE),
        ..job()
    });
}

#[test]
fn every_policy_says_where_its_tables_are() {
    assert_eq!(run(&job()).placement, None);
    let nodes = Machine::probe().unwrap().nodes;
    let here = Placement::Near(NodeId(nodes[0]));
    for policy in [Placement::Shared, Placement::PerNode, here] {
        let devices = nodes.len() as u32 + 1;
        let job = over(Software {
            devices,
            ..Software::default()
        });
        let report = run(&CheckJob {
            placement: Some(policy),
            size: Some(64 << 10),
            ..job
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
        assert_eq!(
            bytes.sum::<u64>(),
            report.tables.unwrap().table_pages * PAGE
        );
        assert_eq!(report.memory.charged_bytes, report.memory.size_bytes);
        // Where they are was asked, or the report says that they are elsewhere.
        let wanted = |node: Option<u32>| policy.tables(node.map(NodeId)).map(|node| node.0);
        let there = placement.domains.iter().all(|domain| {
            let found = domain.nodes.as_ref().unwrap();
            found.iter().all(|share| share.node == wanted(domain.node))
        });
        assert_eq!(there, placement.misplaced.is_empty(), "{placement:?}");
    }
}

/// The memory files of this process that are `len` bytes long.
fn memory_files(len: u64) -> Vec<File> {
    let files = std::fs::read_dir("/proc/self/fd").unwrap();
    let files = files.map(|entry| entry.unwrap().path());
    let memory = |path: &PathBuf| {
        let file = std::fs::read_link(path).unwrap_or_default();
        file.to_string_lossy().starts_with("/memfd:")
    };
    let opened = files.filter(memory).filter_map(|path| {
        let file = File::options().write(true).open(path).ok()?;
        (file.metadata().unwrap().len() == len).then_some(file)
    });
    opened.collect()
}

/// Every page is written to by another writer while one of them is a hole: what stands there is found when it is mapped
/// again, whatever devices have written over in between.
#[test]
fn a_byte_that_another_writer_has_changed_is_found() {
    let _turn = turn();
    let size = 2 * MIB + 5 * PAGE;
    let mut done = false;
    let job = CheckJob {
        size: Some(size),
        backing: Some(Backing::Memfd),
        ..job()
    };
    let report = job.run(&mut |step| {
        if step == Step::CloseHole && !done {
            for file in memory_files(size) {
                for page in 0..size / PAGE {
                    file.write_all_at(b"stray", page * PAGE).unwrap();
                }
                done = true;
            }
        }
        ControlFlow::Continue(())
    });
    let report = report.unwrap();
    assert!(done, "there is no memory file");
    assert!(
        report.dma.as_ref().unwrap().wrong_bytes >= 4,
        "{:?}",
        report.dma
    );
    assert!(!report.is_right());
    let close = report
        .steps
        .iter()
        .find(|done| done.step == Step::CloseHole);
    assert!(!close.unwrap().right, "and the step is named");
}

#[test]
fn a_check_that_is_stopped_at_any_step_gives_everything_back() {
    let _turn = turn();
    let before = kernel();
    let job = CheckJob {
        size: Some(64 << 10),
        times: true,
        ..job()
    };
    for last in [Step::Times].into_iter().chain(steps()) {
        let stopped = job.run(&mut |step| match step == last {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        });
        match stopped {
            Err(CheckError::Interrupted(step)) => assert_eq!(step, last),
            other => panic!("{last:?}: {other:?}"),
        }
        assert_eq!(kernel(), before, "{last:?}");
    }
}

#[test]
fn tables_on_a_node_without_memory_are_refused_by_name() {
    let placement = Some(Placement::Near(NodeId(4095)));
    for backend in [Backend::Software, Backend::Iommufd] {
        let error = CheckJob {
            placement,
            backend,
            devices: vec!["ffff:ff:1f.7".into()],
            ..job()
        }
        .run(&mut go_on)
        .unwrap_err();
        let nodes = Machine::probe().unwrap().nodes;
        let nodes: Vec<_> = nodes.iter().map(u32::to_string).collect();
        let expected = "the machine has no memory on node 4095; nodes that have: ";
        assert_eq!(error.to_string(), format!("{expected}{}", nodes.join(", ")));
        assert!(error.is_input(), "{error}");
    }
}

#[test]
fn requests_that_make_no_sense_are_input_errors() {
    for size in [0, 5000, 1 << 62] {
        let error = CheckJob {
            size: Some(size),
            ..job()
        }
        .run(&mut go_on)
        .unwrap_err();
        assert!(error.is_input(), "{error}");
    }
}

/// An address that no machine has.
#[test]
fn a_device_that_is_not_there_is_refused_before_memory_is_taken() {
    for backend in [Backend::Vfio, Backend::Iommufd] {
        // More memory than there is, which would be refused, too.
        let job = CheckJob {
            size: Some(1 << 62),
            backend,
            devices: vec!["ffff:ff:1f.7".into()],
            ..job()
        };
        let error = job.run(&mut go_on).unwrap_err();
        let expected = "no PCI device has the address \"ffff:ff:1f.7\"";
        assert!(error.to_string().starts_with(expected), "{error}");
        assert!(error.is_input());
    }
}

#[test]
fn more_huge_pages_than_are_free_are_refused_with_the_line_that_adds_them() {
    let pool = hostmem::Pool::read(hostmem::HugeSize::TwoMiB).unwrap_or_default();
    let wanted = pool.unreserved() + 1;
    let size = Some(wanted * 2 * MIB);
    let job = CheckJob {
        size,
        backing: Some(Backing::Hugetlb2M),
        ..job()
    };
    let error = job.run(&mut go_on).unwrap_err();
    assert!(error.is_input());
    let line = format!(
        "echo {} > /sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages",
        pool.total + 1
    );
    assert!(error.to_string().ends_with(&line), "{error}");
}

#[test]
fn json_has_stable_names_with_units() {
    let report = run(&CheckJob {
        placement: Some(Placement::Shared),
        ..job()
    });
    let json = serde_json::to_value(report).unwrap();
    for name in [
        "/backend",
        "/memory/size_bytes",
        "/memory/size_reason",
        "/memory/backing_reason",
        "/memory/huge_bytes",
        "/memory/nodes/0/bytes",
        "/memory/runs",
        "/memory/addresses",
        "/memory/charged_bytes",
        "/memory/charge_steps",
        "/memory/limit_bytes",
        "/memory/mapped/pinned_bytes",
        "/tables/table_pages",
        "/tables/leaves/0/from_bytes",
        "/placement/domains/0/table_bytes",
        "/steps/0/step",
        "/steps/0/bytes",
        "/steps/0/took_ns",
        "/steps/0/checked",
        "/steps/0/refused",
        "/steps/0/right",
        "/dma/read_bytes",
        "/dma/wrong_bytes",
        "/dma/faults_expected",
        "/dma/faults_unexpected",
        "/dma/reached_in_holes",
        "/compared/rounds",
        "/compared/by_runs_ns/median",
        "/compared/by_page_ns/lower",
        "/compared/ratio/upper",
        "/left/charged_bytes",
        "/left/table_pages",
        "/left/kernel/locked_bytes",
    ] {
        assert!(json.pointer(name).is_some(), "{name} is missing");
    }
    let steps = json["steps"].as_array().unwrap().iter();
    let steps: Vec<_> = steps.map(|step| step["step"].as_str().unwrap()).collect();
    let expected = "memory attach pin find-runs map dma hole close-hole track harvest merge release restore unmap close";
    assert_eq!(steps.join(" "), expected);
}

#[test]
fn a_report_to_be_sent_has_times_and_no_names_or_addresses() {
    let report = run(&CheckJob {
        times: true,
        ..job()
    });
    let timed = report.times.iter().filter(|times| times.refused.is_none());
    let timed: Vec<_> = timed
        .map(|times| (times.backing, times.size_bytes))
        .collect();
    assert!(
        timed.contains(&("4k", 64 << 10)) && timed.contains(&("thp", 2 * MIB)),
        "{timed:?}"
    );
    let sent = report_file::write(&report).unwrap();
    let json: serde_json::Value = serde_json::from_str(&sent).unwrap();
    // Everything that it says of the machine.
    let fields: Vec<_> = json
        .as_object()
        .unwrap()
        .keys()
        .map(String::as_str)
        .collect();
    let expected = "backend counter devices dmaspace granule_bytes huge_page_bytes kernel lacks limited memory_nodes \
                    most_mappings page_bytes page_sizes_bytes pin processor processor_vendor right schema steps times \
                    transparent_huge_pages units";
    assert_eq!(fields.join(" "), expected);
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
    for field in ["kernel", "processor", "processor_vendor", "units"] {
        let text = json[field].to_string();
        let mut words = text.split(|c: char| !c.is_ascii_alphanumeric());
        assert!(words.all(|word| word != host.trim()), "{field}: {text}");
    }
    assert!(!sent.contains("0x"), "{sent}");
    let pci = |word: &&str| word.split([':', '.']).count() == 4 && word.contains(':');
    let words = sent.split(['"', ' ', ',']);
    assert_eq!(words.filter(pci).collect::<Vec<_>>(), [""; 0]);
    assert_eq!(json["right"], true);
    assert_eq!(json["steps"].as_array().unwrap().len(), report.steps.len());
}
