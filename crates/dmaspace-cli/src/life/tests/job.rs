//! One life of a virtual machine's memory, small: every step and every counter; and lives that end early,
//! at every step, which leave nothing.
//!
//! The kernel's counters belong to the process (and to the user), so that the tests take turns.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "helpers of tests panic as tests do"
)]

use std::ffi::OsString;
use std::fs::File;
use std::ops::ControlFlow;
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;

use crate::counter_lock;
use crate::life::{BandState, LifeError, LifeJob, LifeReport, LifeStep, SuccessorError, succeed};
use hostmem::{Backing, Counter, Limits, Pinner};
use iopt::FormatId;

const MIB: u64 = 1 << 20;
const PAGE: u64 = 4096;

#[test]
#[ignore = "the second process of the tests below, which run it"]
fn the_second_process() {
    // With one processor the harness has begun a line.
    println!();
    succeed(std::io::stdin(), std::io::stdout()).unwrap();
}

fn this_program() -> Vec<OsString> {
    let program = std::env::current_exe().unwrap().into_os_string();
    let arguments = [
        "--exact",
        "life::tests::job::the_second_process",
        "--ignored",
        "--nocapture",
    ];
    let arguments = arguments.map(OsString::from);
    std::iter::once(program).chain(arguments).collect()
}

/// A life of `mib` MiB, where twice of that may be locked.
fn job(mib: u64) -> Option<LifeJob> {
    let room = Pinner::probe(2 * MIB).unwrap().room().unwrap();
    if room.is_some_and(|room| room < (2 * mib + 1) * MIB) {
        eprintln!("SKIPPED: too little may be locked here");
        return None;
    }
    Some(LifeJob {
        size: Some(mib * MIB),
        backing: Some(Backing::Memfd),
        stand_in: true,
        ..LifeJob::new(this_program())
    })
}

fn go_on(_step: LifeStep) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

fn kernel() -> [u64; 2] {
    [Counter::MmLockedVm, Counter::PinnedVm].map(|counter| Limits::in_use(counter).unwrap().known)
}

fn whole(job: &LifeJob) -> LifeReport {
    let before = kernel();
    let report = job.run(&mut go_on).unwrap();
    for step in &report.steps {
        assert!(step.right, "{step:?}");
    }
    assert!(report.is_right(), "{:?} {:?}", report.dma, report.left);
    // Nothing is counted twice, so that the rest is what is left of the whole.
    let times = report.times;
    let steps = report.steps.iter().map(|step| step.took.as_nanos() as u64);
    let steps: u64 = steps.sum();
    assert_eq!(times.steps_ns, steps);
    let known = times.steps_ns + times.waited_ns + times.drawn_ns + times.freed_ns;
    assert_eq!(known + times.rest_ns, times.wall_ns, "{times:?}");
    assert!(times.waited_ns > 0 && times.drawn_ns > 0 && times.freed_ns > 0);
    assert_eq!(kernel(), before);
    report
}

#[test]
fn a_whole_life_is_right_at_every_step_and_leaves_nothing() {
    let _turn = counter_lock::alone();
    let Some(job) = job(64) else { return };
    let report = whole(&job);
    let size = 64 * MIB;
    let steps: Vec<_> = report.steps.iter().map(|step| step.step).collect();
    assert_eq!(steps, LifeStep::ALL);
    let step = |wanted| {
        report
            .steps
            .iter()
            .find(|step| step.step == wanted)
            .unwrap()
    };
    // Stand-ins: each half is one run, and AMD's format maps it by one leaf.
    assert_eq!(
        (step(LifeStep::Pin).runs, step(LifeStep::Pin).bytes),
        (2, size)
    );
    assert_eq!(report.largest_leaf_bytes, 32 * MIB);
    let formats: Vec<_> = report
        .roots
        .iter()
        .map(|root| root.format.as_str())
        .collect();
    assert_eq!(formats, ["vtd-ss", "amdv1"]);
    assert_ne!(report.roots[0].node, report.roots[1].node);
    assert_eq!(step(LifeStep::Hole).bytes, PAGE);
    assert!(step(LifeStep::Hole).flushes >= 2, "a flush of each unit");
    assert_eq!(step(LifeStep::Harvest).bytes, size / 8);
    assert_eq!(step(LifeStep::Inflate).bytes, size / 8 * 7);
    assert_eq!(step(LifeStep::Deflate).bytes, size / 8 * 7);
    assert_eq!(step(LifeStep::HandOver).bytes, size);
    assert!(
        step(LifeStep::Successor).flushes >= 2,
        "by the second process"
    );
    assert_eq!(step(LifeStep::TearDown).tables, 0);
    // Devices were everywhere three times, and in every hole.
    assert!(
        report.dma.read_bytes >= 3 * 2 * size / 2,
        "{:?}",
        report.dma
    );
    assert!(report.dma.faults_in_holes > 100, "{:?}", report.dma);
    // What is drawn covers all addresses, in both roots, and shows what was done.
    let seen = |wanted, state: fn(&BandState) -> bool| {
        let moment = report.moments.iter().find(|moment| moment.after == wanted);
        let bands = moment.unwrap().roots.iter().flatten();
        let found: u64 = bands
            .filter(|band| state(&band.state))
            .map(|band| band.len_bytes)
            .sum();
        found
    };
    for moment in &report.moments[2..13] {
        for root in &moment.roots {
            assert_eq!(root.iter().map(|band| band.len_bytes).sum::<u64>(), size);
        }
        assert_eq!(moment.roots.len(), 2);
    }
    let hole = |state: &BandState| *state == BandState::Hole;
    assert!(seen(LifeStep::Hole, hole) > 0 && seen(LifeStep::Close, hole) == 0);
    let balloon = |state: &BandState| *state == BandState::Balloon;
    assert_eq!(seen(LifeStep::Inflate, balloon), 2 * (size / 8 * 7));
    assert_eq!(
        seen(LifeStep::Harvest, |state| *state == BandState::Dirty),
        2 * size / 8
    );
    let mapped = |state: &BandState| matches!(state, BandState::Mapped { .. });
    assert_eq!(seen(LifeStep::Successor, mapped), 2 * size);
}

#[test]
fn a_life_on_real_frames_and_in_other_formats_is_right_too() {
    let _turn = counter_lock::alone();
    let Some(mut job) = job(16) else { return };
    job.stand_in = false;
    job.formats = [FormatId::X86_64, FormatId::VtdSs];
    let report = whole(&job);
    assert_eq!(report.roots[0].format, "x86-64");
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

#[test]
fn a_byte_that_another_writer_has_changed_is_found() {
    let _turn = counter_lock::alone();
    let Some(job) = job(2) else { return };
    let mut done = false;
    let report = job.run(&mut |step| {
        if step == LifeStep::Close && !done {
            for file in memory_files(MIB) {
                file.write_all_at(b"stray", 5 * PAGE).unwrap();
                done = true;
            }
        }
        ControlFlow::Continue(())
    });
    let report = report.unwrap();
    assert!(done, "there are no memory files of a life");
    assert!(report.dma.wrong_bytes >= 5, "{:?}", report.dma);
    assert!(!report.is_right());
}

#[test]
fn whoever_stops_it_at_any_step_finds_everything_given_back() {
    let _turn = counter_lock::alone();
    let Some(job) = job(1) else { return };
    let before = kernel();
    for last in LifeStep::ALL {
        let mut stop = |step| match step == last {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        };
        match job.run(&mut stop) {
            Err(LifeError::Interrupted(step)) => assert_eq!(step, last),
            other => panic!("{last}: {other:?}"),
        }
        assert_eq!(kernel(), before, "{last}");
    }
}

#[test]
fn a_second_process_that_fails_leaves_nothing_behind() {
    let _turn = counter_lock::alone();
    let Some(job) = job(1) else { return };
    let before = kernel();
    let successor = |words: &[&str]| {
        let job = LifeJob {
            successor: words.iter().map(OsString::from).collect(),
            ..job.clone()
        };
        let Err(LifeError::Scenario(scenario::Error::Successor(error))) = job.run(&mut go_on)
        else {
            panic!("{words:?} has succeeded");
        };
        assert_eq!(kernel(), before, "{words:?}");
        error
    };
    let error = successor(&["/nonexistent/program"]);
    assert!(matches!(error, SuccessorError::Start { .. }), "{error:?}");
    let error = successor(&["/bin/false"]);
    assert!(matches!(error, SuccessorError::Ended { .. }), "{error:?}");
    let error = successor(&["/bin/sh", "-c", "echo @hello; sleep 100"]);
    assert!(
        matches!(error, SuccessorError::Unexpected { .. }),
        "{error:?}"
    );
    let error = successor(&["/bin/sh", "-c", "echo @item; read a; echo @failed at once"]);
    let refused = matches!(&error, SuccessorError::Refused { why } if why == "at once");
    assert!(refused, "{error:?}");
}

#[test]
fn what_makes_no_sense_is_refused_before_anything_is_taken() {
    let refused = |change: fn(&mut LifeJob)| {
        let mut job = LifeJob::new(this_program());
        change(&mut job);
        let error = job.run(&mut go_on).unwrap_err();
        assert!(error.is_input(), "{error:?}");
        error.to_string()
    };
    let said = refused(|job| job.size = Some(65 << 10));
    assert!(
        said.contains("16 equal parts of whole pages, multiples of 64 KiB"),
        "{said}"
    );
    let said = refused(|job| (job.size, job.backing) = (Some(MIB), Some(Backing::Thp)));
    assert!(
        said.starts_with("thp memory cannot go to a second process"),
        "{said}"
    );
}
