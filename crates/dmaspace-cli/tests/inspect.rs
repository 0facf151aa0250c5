//! `dmaspace inspect` on this process, whose memory is laid out here, and on others.

// The lints' exception for tests covers test functions, not what they share.
#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use std::fs::{self, File};
use std::ops::ControlFlow;
use std::os::unix::fs::FileExt;
use std::process::{Command, Stdio};
use std::sync::atomic::Ordering;

use common::{Ordinary, dmaspace, has, is_root, refused, report, run, skipped, text};
use dmaspace::hostmem::{Backing, HugeSize, Mapping, RaisedPool};
use serde_json::Value;

const MIB: u64 = 1 << 20;
const PAGE: u64 = 4096;

fn populated(backing: Backing, len: u64) -> Option<Mapping> {
    let mapping = Mapping::new(backing, len, None).ok()?;
    mapping.populate(&mut |_| ControlFlow::Continue(())).ok()?;
    Some(mapping)
}

fn number(value: &Value, name: &str) -> u64 {
    let found = value.pointer(name).and_then(Value::as_u64);
    found.unwrap_or_else(|| panic!("no number at {name}: {value:#}"))
}

fn list<'a>(value: &'a Value, name: &str) -> &'a [Value] {
    value[name].as_array().unwrap()
}

fn starts_at(area: &Value, address: u64) -> bool {
    area["address"] == format!("{address:#x}")
}

/// The area that is exactly this mapping.
fn area<'a>(found: &'a Value, mapping: &Mapping) -> &'a Value {
    let mut areas = list(found, "areas").iter();
    let it = areas.find(|area| starts_at(area, mapping.address()));
    let it = it.unwrap_or_else(|| panic!("no area at {:#x}: {found:#}", mapping.address()));
    assert_eq!(number(it, "/bytes"), mapping.len(), "{it:#}");
    it
}

/// Frames page by page, as the kernel shows them.
fn frames(mapping: &Mapping) -> Vec<Option<u64>> {
    let pagemap = File::open("/proc/self/pagemap").unwrap();
    let pages = mapping.len() / PAGE;
    let entries = (0..pages).map(|page| {
        let mut entry = [0; 8];
        let at = (mapping.address() / PAGE + page) * 8;
        pagemap.read_exact_at(&mut entry, at).unwrap();
        u64::from_ne_bytes(entry)
    });
    entries
        .map(|entry| (entry >> 63 == 1).then_some(entry & ((1 << 55) - 1)))
        .collect()
}

/// Runs of frames, counted one page after the other.
fn runs(frames: &[Option<u64>]) -> u64 {
    let mut last = None;
    let begins = frames.iter().filter(|frame| {
        let begins = frame.is_some() && **frame != last.map(|last: u64| last + 1);
        last = **frame;
        begins
    });
    begins.count() as u64
}

#[test]
fn a_process_of_known_layout() {
    // Kinds take turns, so that the kernel does not join two areas to one.
    let small = populated(Backing::Anon4K, 6 * MIB).unwrap();
    let file = populated(Backing::Memfd, 5 * MIB).unwrap();
    let huge = populated(Backing::Thp, 8 * MIB).unwrap();
    let sparse = Mapping::new(Backing::Anon4K, 64 * MIB, None).unwrap();
    for page in [0, 7, 8] {
        sparse.cells()[page * 512].store(1, Ordering::Relaxed);
    }
    // Put back when it goes, whatever becomes of this test.
    let _raised = RaisedPool::raise(HugeSize::TwoMiB, 4 * MIB);
    let pool = populated(Backing::Hugetlb2M, 4 * MIB);
    let pid = std::process::id().to_string();
    let found = report(dmaspace(&["inspect", "--pid", &pid, "--json"]));
    assert_eq!(found["pid"], std::process::id());
    assert_eq!(found["ended"], false);

    let check = |mapping: &Mapping, kind: &str, present: u64, in_huge: u64| {
        let area = area(&found, mapping);
        assert_eq!(area["kind"], kind, "{area:#}");
        assert_eq!(number(area, "/present_bytes"), present, "{area:#}");
        assert_eq!(number(area, "/huge_bytes"), in_huge, "{area:#}");
        if is_root() {
            let frames = frames(mapping);
            let there = frames.iter().flatten().count() as u64;
            assert_eq!(there * PAGE, present);
            assert_eq!(number(area, "/runs"), runs(&frames), "{area:#}");
        }
    };
    check(&small, "anonymous", 6 * MIB, 0);
    check(&file, "shared", 5 * MIB, 0);
    check(&huge, "anonymous", 8 * MIB, huge.folios().unwrap().huge);
    if let Some(pool) = &pool {
        check(pool, "hugetlb", 4 * MIB, 4 * MIB);
        assert_eq!(number(area(&found, pool), "/page_bytes"), 2 * MIB);
    } else {
        skipped(
            "a_process_of_known_layout",
            "no huge pages of 2M are free: not that part",
        );
    }
    assert_eq!(area(&found, &small)["refuses_huge"], true);
    assert_eq!(area(&found, &huge)["asks_for_huge"], true);
    let few = list(&found, "areas").iter();
    let mut few = few.filter(|area| starts_at(area, sparse.address()));
    assert!(
        few.next()
            .is_none_or(|area| number(area, "/present_bytes") == 3 * PAGE)
    );

    // Figures that are counted in two ways agree.
    let present = number(&found, "/present_bytes");
    let sum = |name: &str, field: &str| {
        list(&found, name)
            .iter()
            .map(|part| number(part, field))
            .sum::<u64>()
    };
    assert_eq!(sum("entries", "/bytes"), present);
    assert_eq!(sum("kinds", "/bytes"), present);
    let in_huge: u64 = list(&found, "areas")
        .iter()
        .map(|area| number(area, "/huge_bytes"))
        .sum();
    let entries = list(&found, "entries").iter();
    let entries = entries.filter(|entry| number(entry, "/page_bytes") == 2 * MIB);
    assert_eq!(
        entries.map(|entry| number(entry, "/bytes")).sum::<u64>(),
        in_huge
    );
    let status = fs::read_to_string("/proc/self/status").unwrap();
    for (field, name) in [("/pinned_bytes", "VmPin:"), ("/locked_bytes", "VmLck:")] {
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix(name))
            .unwrap();
        let kib: u64 = line.trim().trim_end_matches(" kB").parse().unwrap();
        assert_eq!(number(&found, field), kib << 10);
    }
    let line = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let capabilities = u64::from_str_radix(line.unwrap().trim(), 16).unwrap();
    // CAP_IPC_LOCK of capability.h.
    let lifted = capabilities & 1 << 14 != 0;
    assert_eq!(found["limit"]["lifted"], lifted, "{capabilities:#x}");
    if !is_root() {
        skipped(
            "a_process_of_known_layout",
            "frames take root: not that part",
        );
        return;
    }
    assert_eq!(list(&found, "missing"), &[] as &[Value]);
    assert_eq!(sum("folios", "/bytes"), present);
    let classes = list(&found["runs"], "classes").iter();
    assert_eq!(
        classes.map(|class| number(class, "/bytes")).sum::<u64>(),
        present
    );
    assert_eq!(list(&found, "costs").len(), 5);
    for cost in list(&found, "costs") {
        let leaves = list(cost, "leaves").iter();
        let (mut bytes, mut count) = (0, 0);
        for leaf in leaves {
            bytes += number(leaf, "/page_bytes") * number(leaf, "/count");
            count += number(leaf, "/count");
        }
        assert_eq!(
            (bytes, count),
            (present, number(cost, "/leaf_count")),
            "{cost:#}"
        );
        assert_eq!(number(cost, "/table_bytes"), number(cost, "/tables") * PAGE);
    }
    check_start(&found["start"]);
}

/// An estimate is the sum of its parts, and a change saves what it says.
fn check_start(start: &Value) {
    for by in ["type1", "iommufd", "now"] {
        // Not where io_uring may not pin.
        let pin_map = start[by]["pin_map_ns"].as_u64().unwrap_or(0);
        let parts = number(&start[by], "/fault_ns") + pin_map;
        let total = number(&start[by], "/total_ns");
        assert!(total.abs_diff(parts) <= 3, "{start:#}");
        assert!(number(&start[by], "/error_ns") > 0, "{start:#}");
    }
    assert!(number(start, "/pages") > 0);
}

/// QEMU with a machine that does not run, of this memory; ended when it goes.
struct Qemu(std::process::Child);

impl Qemu {
    fn new(options: &[&str]) -> Self {
        let quiet = [
            "-S", "-display", "none", "-serial", "none", "-monitor", "none",
        ];
        let mut command = Command::new("qemu-system-x86_64");
        command.args(quiet).args(options).stdin(Stdio::null());
        Self(command.spawn().unwrap())
    }

    /// The report once the memory is there.
    fn report(&self, size: u64) -> Value {
        let pid = self.0.id().to_string();
        for _ in 0..600 {
            let inspect = dmaspace(&["inspect", "--pid", &pid, "--json", "--no-times"]);
            let (stdout, _, _) = run(inspect);
            let found: Value = serde_json::from_str(&stdout).unwrap_or_default();
            if found["mappable_bytes"] == size && !found["guest"].is_null() {
                return found;
            }
            std::thread::sleep(std::time::Duration::from_millis(50));
        }
        panic!("no memory of {size} bytes is found in QEMU");
    }
}

impl Drop for Qemu {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn the_memory_of_a_guest_is_told_from_qemus_own() {
    if !has(&["qemu-system-x86_64"]) {
        return skipped("the_memory_of_a_guest_is_told", "needs qemu-system-x86_64");
    }
    let size = 192 * MIB;
    let memfd = "memory-backend-memfd,id=ram,size=192M";
    let _raised = RaisedPool::raise(HugeSize::TwoMiB, size);
    let huge = format!("{memfd},hugetlb=on,hugetlbsize=2M,prealloc=on");
    for (object, pool, shared) in [("", 0, false), (memfd, 0, true), (&huge, 2 * MIB, true)] {
        if pool > 0 && populated(Backing::Hugetlb2M, size).is_none() {
            skipped(
                "the_memory_of_a_guest_is_told",
                "no huge pages of 2M are free: not that part",
            );
            continue;
        }
        let machine = ["-machine", "memory-backend=ram", "-object", object];
        let machine = if object.is_empty() { &[][..] } else { &machine };
        let qemu = Qemu::new(&[&["-m", "192M"], machine].concat());
        let found = qemu.report(size);
        assert_eq!(found["guest"]["monitor"], "qemu", "{found:#}");
        let [ram] = list(&found["guest"], "memory") else {
            panic!("{found:#}");
        };
        assert_eq!(number(ram, "/bytes"), size);
        assert_eq!(ram["shared"], shared, "{ram:#}");
        assert_eq!(ram["pool_bytes"].as_u64().unwrap_or(0), pool, "{ram:#}");
        assert!(number(&found, "/rest_present_bytes") > MIB, "{found:#}");
    }
}

#[test]
fn a_machine_that_does_not_run_is_predicted_by_its_configuration() {
    let line = "qemu-system-x86_64 -m 4G -object memory-backend-memfd,id=a,size=4G -machine \
                memory-backend=a -device vfio-pci,host=01:00.0";
    let (stdout, stderr, status) = run(dmaspace(&["inspect", "--qemu", line]));
    assert_eq!((stderr.as_str(), status), ("", Some(0)), "{stdout}");
    assert!(
        stdout.contains("  guest RAM   4 GiB: memfd, asks for huge pages\n"),
        "{stdout}"
    );
    // One screen, of which notes about this machine are up to nine lines.
    let mut widths = stdout.lines().map(|line| line.chars().count());
    assert!(widths.all(|width| width <= 80), "{stdout}");
    assert!(stdout.lines().count() <= 52, "{stdout}");
    let found = report(dmaspace(&["inspect", "--qemu", line, "--json"]));
    // Needs that are short are not about time.
    let advice = list(&found, "advice").iter();
    let short = list(&found["needs"], "findings").len();
    for one in advice.skip(short) {
        let (saved, after) = (number(one, "/saved_ns"), number(one, "/estimate/total_ns"));
        assert_eq!(saved + after, number(&found, "/start/type1/total_ns"));
    }

    let directory = tempfile::tempdir().unwrap();
    let xml = directory.path().join("domain.xml");
    let domain = "<domain><name>web</name><memory unit='GiB'>4</memory></domain>";
    fs::write(&xml, domain).unwrap();
    let found = report(dmaspace(&[
        "inspect",
        "--libvirt",
        text(&xml),
        "--json",
        "--no-times",
    ]));
    assert_eq!(found["guest"]["name"], "web");
    assert!(found["start"]["type1"].is_null());
    let advice = list(&found, "advice").iter();
    let mut settings = advice.map(|one| one["setting"].to_string());
    assert!(
        settings.any(|setting| setting.contains("<hugepages>")),
        "{found:#}"
    );

    let refusal = refused(dmaspace(&["inspect", "--qemu", "qemu -m much"]));
    assert!(
        refusal.starts_with("-m: \"much\" is no size: "),
        "{refusal}"
    );
    let refusal = refused(dmaspace(&["inspect", "--libvirt", "/nowhere.xml"]));
    assert!(
        refusal.starts_with("cannot read /nowhere.xml: "),
        "{refusal}"
    );
}

#[test]
fn the_text_has_its_sections() {
    let memory = populated(Backing::Anon4K, 4 * MIB).unwrap();
    let pid = std::process::id().to_string();
    let arguments = ["inspect", "--pid", &pid, "--no-times"];
    let (stdout, stderr, status) = run(dmaspace(&arguments));
    assert_eq!((stderr.as_str(), status), ("", Some(0)), "{stdout}");
    for section in ["largest areas", "start: "] {
        assert!(
            stdout.lines().any(|line| line.starts_with(section)),
            "{stdout}"
        );
    }
    assert!(!stdout.contains("estimate"), "{stdout}");
    assert!(
        stdout.contains(&format!("{:#x}", memory.address())),
        "{stdout}"
    );
}

#[test]
fn a_process_that_is_not_there_or_not_ours_is_refused_by_name() {
    let gone = refused(dmaspace(&["inspect", "--pid", "4194305"]));
    assert_eq!(gone, "there is no process 4194305");
    for neither in [&["inspect"][..], &["inspect", "--json"]] {
        let (stdout, stderr, status) = run(dmaspace(neither));
        assert_eq!((stdout.as_str(), status), ("", Some(2)), "{stderr}");
        assert!(
            stderr.contains("<--pid <PID>|--qemu <LINE>|--libvirt <FILE>>"),
            "{stderr}"
        );
    }
    if let Some(ordinary) = Ordinary::new("a_process_that_is_not_there_or_not_ours", 7) {
        let pid = std::process::id().to_string();
        let refusal = refused(ordinary.command(8 << 20, &["inspect", "--pid", &pid]));
        assert!(
            refusal.ends_with("requires CAP_SYS_PTRACE (root)"),
            "{refusal}"
        );
    }
}

#[test]
fn a_process_without_memory_of_its_own_is_refused_by_name() {
    let mut child = Command::new("true").stdin(Stdio::null()).spawn().unwrap();
    let pid = child.id().to_string();
    // Ended, and not yet waited for.
    let status = format!("/proc/{pid}/status");
    while !fs::read_to_string(&status).unwrap().contains("State:\tZ") {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    let refusal = refused(dmaspace(&["inspect", "--pid", &pid]));
    child.wait().unwrap();
    let why = "has no memory of its own: it is a zombie, which has ended and waits for its parent";
    assert_eq!(refusal, format!("process {pid} (true) {why}"));
    // A container has no thread of the kernel.
    let comm = fs::read_to_string("/proc/2/comm").unwrap_or_default();
    if comm.trim() != "kthreadd" {
        return skipped("a_process_without_memory", "process 2 is no kernel thread");
    }
    let refusal = refused(dmaspace(&["inspect", "--pid", "2"]));
    let why = "has no memory of its own: it is a thread of the kernel";
    assert_eq!(refusal, format!("process 2 (kthreadd) {why}"));
}

#[test]
fn an_ordinary_user_hears_what_takes_root() {
    let Some(ordinary) = Ordinary::new("an_ordinary_user_hears_what_takes_root", 8) else {
        return;
    };
    // A child of the same user that waits for its input.
    let mut child = ordinary_cat(&ordinary);
    let pid = child.id().to_string();
    let (stdout, stderr, status) = run(ordinary.command(8 << 20, &["inspect", "--pid", &pid]));
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!((stderr.as_str(), status), ("", Some(0)), "{stdout}");
    let why = "the kernel shows frame numbers to CAP_SYS_ADMIN only (root)";
    let lines = format!("\n  runs, leaves, folios\n              {why}\n");
    assert!(stdout.contains(&lines), "{stdout}");
    assert!(!stdout.contains("0 runs"), "{stdout}");
}

fn ordinary_cat(ordinary: &Ordinary) -> std::process::Child {
    let user = ordinary.user();
    let mut command = Command::new("setpriv");
    command.args([
        "--reuid",
        user,
        "--regid",
        user,
        "--clear-groups",
        "sleep",
        "60",
    ]);
    let child = command.spawn().unwrap();
    // The loop waits for the exec: the name is only there after it.
    let path = format!("/proc/{}/comm", child.id());
    for _ in 0..10_000 {
        if fs::read_to_string(&path).is_ok_and(|name| name.trim() == "sleep") {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    child
}

#[test]
fn processes_that_end_meanwhile_are_no_crash() {
    for _ in 0..20 {
        let mut child = Command::new("true").stdin(Stdio::null()).spawn().unwrap();
        let pid = child.id().to_string();
        let (stdout, stderr, status) = run(dmaspace(&["inspect", "--pid", &pid, "--no-times"]));
        // It was there, or was there no more.
        assert!(matches!(status, Some(0 | 2)), "{stdout}{stderr}");
        child.wait().unwrap();
    }
}

#[test]
fn a_tebibyte_of_holes_is_looked_at_all_the_same() {
    if !has(&["python3"]) {
        return skipped("a_tebibyte_of_holes", "takes python3");
    }
    let program = "import mmap,sys\n\
        m=mmap.mmap(-1,1<<40,flags=mmap.MAP_PRIVATE|mmap.MAP_ANONYMOUS|0x4000)\n\
        m[0]=1; m[1<<39]=1; m[(1<<40)-1]=1\n\
        print('ready',flush=True); sys.stdin.read()";
    let mut child = Command::new("python3")
        .args(["-c", program])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    std::io::BufRead::read_line(
        &mut std::io::BufReader::new(child.stdout.take().unwrap()),
        &mut line,
    )
    .unwrap();
    assert_eq!(line, "ready\n");
    let pid = child.id().to_string();
    let found = report(dmaspace(&[
        "inspect",
        "--pid",
        &pid,
        "--json",
        "--no-times",
    ]));
    child.kill().unwrap();
    child.wait().unwrap();
    let sizes = list(&found, "areas")
        .iter()
        .map(|area| number(area, "/bytes"));
    let large = list(&found, "areas")
        .iter()
        .find(|area| number(area, "/bytes") >= 1 << 40);
    assert!(sizes.max() >= Some(1 << 40));
    // Three pages of whichever size.
    assert!(number(large.unwrap(), "/present_bytes") <= 3 * 2 * MIB);
    assert!(number(&found, "/mappable_bytes") >= 1 << 40);
}
