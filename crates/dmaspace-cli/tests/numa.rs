//! `dmaspace numa`: plans for a made-up machine, guests for it, and what is simulated.

// The lints' exception for tests covers test functions, not what they share.
#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use common::{dmaspace, names, refused, report, run, text};
use tempfile::TempDir;

const TWO_SOCKETS: &str = r#"
[[node]]
id = 0
memory_mib = 2048
cpus = 2
distances = [10, 21]
[[node]]
id = 1
memory_mib = 2048
cpus = 2
distances = [21, 10]
[[unit]]
name = "dmar0"
node = 0
[[unit]]
name = "dmar1"
node = 1
[[device]]
address = "0000:17:00.0"
kind = "Ethernet"
unit = "dmar0"
link_gbps = 200
[[device]]
address = "0000:b1:00.0"
kind = "Ethernet"
unit = "dmar1"
emulated = "edu"
"#;

fn file(content: &str) -> (TempDir, PathBuf) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("machine.toml");
    fs::write(&path, content).unwrap();
    (directory, path)
}

#[test]
fn a_plan_shows_domains_tables_and_predictions() {
    let (_kept, path) = file(TWO_SOCKETS);
    let (shown, stderr, status) = run(dmaspace(&["numa", "plan", "--topology", text(&path)]));
    assert_eq!((stderr.as_str(), status), ("", Some(0)));
    let expected = "\
nodes
  node  memory  CPUs  distances  units
  0     2 GiB   2     10 21      dmar0
  1     2 GiB   2     21 10      dmar1

  mapped      4 GiB in one piece

devices, links in GB/s
  address       kind      group  unit   node  link
  0000:17:00.0  Ethernet  -      dmar0  0     25.0
  0000:b1:00.0  Ethernet  -      dmar1  1     (25.0)
  in brackets: assumed

predicted GB/s with leaves of 4 KiB (a formula, not measured)
  address       shared  per-node  near(0)  near(1)
  0000:17:00.0  14.1    14.1      14.1     10.5
  0000:b1:00.0  10.5    14.1      10.5     14.1

shared
  domain 0    tables on node 0, walked by dmar0 dmar1 for 2 devices
  leaves  entries of a map  tables
  4 KiB   1,050,629         8.02 MiB on node 0
  2 MiB   2,053             24 KiB on node 0
  1 GiB   5                 8 KiB on node 0

per-node
  domain 0    tables on node 0, walked by dmar0 for 1 device
  domain 1    tables on node 1, walked by dmar1 for 1 device
  leaves  entries of a map  tables
  4 KiB   2,101,258         8.02 MiB on node 0, 8.02 MiB on node 1
  2 MiB   4,106             24 KiB on node 0, 24 KiB on node 1
  1 GiB   10                8 KiB on node 0, 8 KiB on node 1
";
    assert!(shown.starts_with(expected), "{shown}");
}

#[test]
fn a_plan_in_json_has_its_table_bytes_exactly() {
    let (_kept, path) = file(TWO_SOCKETS);
    let plan = report(dmaspace(&[
        "numa",
        "plan",
        "--json",
        "--memory",
        "1G",
        "--topology",
        text(&path),
    ]));
    assert_eq!(plan["memory_bytes"], 1u64 << 30);
    assert_eq!(plan["policies"][1]["placement"], "per-node");
    // 512 tables of pages, one of each level above.
    let tables = &plan["policies"][1]["tables"][0];
    assert_eq!(tables["leaf_bytes"], 4096);
    assert_eq!(tables["nodes"][1]["bytes"], 515 * 4096);
    assert_eq!(tables["entries"], 2 * (262_144 + 514));
    assert_eq!(plan["policies"][0]["devices"][1]["tables_on"], 0);
}

#[test]
fn a_plan_is_drawn() {
    let (kept, path) = file(TWO_SOCKETS);
    let svg = kept.path().join("plan.svg");
    let arguments = [
        "numa",
        "plan",
        "--topology",
        text(&path),
        "--svg",
        text(&svg),
    ];
    assert_eq!(run(dmaspace(&arguments)).2, Some(0));
    let drawn = fs::read_to_string(&svg).unwrap();
    let count = |part: &str| drawn.matches(part).count();
    // One table in all under the one policy, one on each node under the other; one device is far.
    assert_eq!(count("class=\"table\""), 3);
    assert_eq!((count("class=\"near\""), count("class=\"far\"")), (3, 1));
    assert!(drawn.starts_with("<svg ") && drawn.ends_with("</svg>\n"));
    assert_eq!(names(kept.path()), ["machine.toml", "plan.svg"]);
}

#[test]
fn a_guest_is_printed_for_qemu_and_libvirt() {
    let (_kept, path) = file(TWO_SOCKETS);
    let emit = |options: &[&str]| {
        let fixed = ["numa", "plan", "--topology", text(&path), "--memory", "1G"];
        dmaspace(&[&fixed, options].concat())
    };
    let (shown, stderr, status) = run(emit(&["--emit", "qemu", "--viommu", "--no-bind"]));
    assert_eq!((stderr.as_str(), status), ("", Some(0)));
    let expected = "\
-machine q35 \\
-m 1048576k \\
-smp 4 \\
-object memory-backend-ram,id=memory0,size=524288k \\
-numa node,nodeid=0,cpus=0-1,memdev=memory0 \\
-object memory-backend-ram,id=memory1,size=524288k \\
-numa node,nodeid=1,cpus=2-3,memdev=memory1 \\
-numa dist,src=0,dst=1,val=21 \\
-numa dist,src=1,dst=0,val=21 \\
-device intel-iommu,caching-mode=on,aw-bits=48 \\
-device pxb-pcie,id=node0,bus=pcie.0,bus_nr=85,numa_node=0 \\
-device pcie-root-port,id=port1,bus=node0,chassis=1 \\
-device vfio-pci,host=0000:17:00.0,bus=port1 \\
-device pxb-pcie,id=node1,bus=pcie.0,bus_nr=170,numa_node=1 \\
-device pcie-root-port,id=port2,bus=node1,chassis=2 \\
-device edu,bus=port2
";
    assert_eq!(shown, expected);
    let error = refused(emit(&["--emit", "libvirt"]));
    assert!(
        error.starts_with("0000:b1:00.0 is to be emulated as \"edu\""),
        "{error}"
    );
    let (_kept, real) = file(&TWO_SOCKETS.replace("emulated = \"edu\"\n", ""));
    let (xml, _, status) = run(dmaspace(&[
        "numa",
        "plan",
        "--emit",
        "libvirt",
        "--topology",
        text(&real),
    ]));
    assert_eq!(status, Some(0));
    assert!(
        xml.contains("<memnode cellid='1' mode='strict' nodeset='1'/>"),
        "{xml}"
    );
}

#[test]
fn what_cannot_be_planned_is_refused() {
    let plan = |content: &str, options: &[&str]| {
        let (kept, path) = file(content);
        let error = refused(dmaspace(
            &[&["numa", "plan", "--topology", text(&path)], options].concat(),
        ));
        error.replace(text(kept.path()), "")
    };
    let error = plan("[[node]]\nid = 0\ncpu = 1\n", &[]);
    assert!(
        error.starts_with("/machine.toml: line 3: unknown field `cpu`"),
        "{error}"
    );
    let error = plan("[[node]]\nid = 0\n", &[]);
    assert!(
        error.ends_with("say how much with --memory SIZE"),
        "{error}"
    );
    let error = plan("[[node]]\nid = 0\nmemory_mib = 1\n", &["--emit", "qemu"]);
    assert!(
        error.contains("a guest could not show any; --topology"),
        "{error}"
    );
    let error = refused(dmaspace(&["numa", "plan", "--topology", "/nowhere"]));
    assert!(
        error.starts_with("cannot read /nowhere: No such file"),
        "{error}"
    );
    for options in [
        &["--viommu"][..],
        &["--no-bind"],
        &["--emit", "qemu", "--json"],
        &["--json", "--viommu"],
        &["--json", "--no-bind"],
    ] {
        let (_, stderr, status) = run(dmaspace(&[&["numa", "plan"], options].concat()));
        assert_eq!(status, Some(2), "{stderr}");
    }
}

#[test]
fn this_machine_has_a_plan() {
    let (shown, stderr, status) = run(dmaspace(&["numa", "plan", "--memory", "1G"]));
    assert_eq!((stderr.as_str(), status), ("", Some(0)));
    assert!(shown.starts_with("nodes\n"), "{shown}");
}

/// Where there is one node there is nothing to compare, whatever device is named.
#[test]
fn a_load_on_a_machine_is_simulated_on_one_screen() {
    let (_kept, path) = file(TWO_SOCKETS);
    let options = ["numa", "simulate", "--topology", text(&path)];
    let begun = Instant::now();
    let (shown, stderr, status) = run(dmaspace(&options));
    // 0.1 s of an unoptimized program; two seconds are promised of an optimized one.
    assert!(begun.elapsed() < Duration::from_secs(10));
    assert_eq!((stderr.as_str(), status), ("", Some(0)));
    assert!(shown.lines().count() <= 24, "{shown}");
    for line in [
        "  devices     2, all at once; 1 link assumed, 25.0 GB/s",
        "simulated GB/s, not measured",
        "  leaves  tables    all   slowest  reads  remote  bytes",
    ] {
        assert!(shown.lines().any(|found| found == line), "{line}\n{shown}");
    }
    let best = shown
        .lines()
        .skip_while(|line| !line.starts_with("gain over"));
    assert!(
        best.skip(1).any(|line| line.ends_with("  leaves of 2 MiB")),
        "{shown}"
    );

    // The second device's reads are remote with one table, and none is with one on each node.
    let random = [&options[..], &["--traffic", "random", "--json"]].concat();
    let found = report(dmaspace(&random));
    let rows = found["rows"].as_array().unwrap();
    let row = |leaf: u64, placement| {
        let mut rows = rows.iter();
        rows.find(|row| row["leaf_bytes"] == leaf && row["placement"] == placement)
            .unwrap()
    };
    let [shared, per_node] = ["shared", "per-node"].map(|placement| row(4096, placement));
    let number = |row: &serde_json::Value, name: &str| row[name].as_f64().unwrap();
    assert!(
        (0.45..0.55).contains(&number(shared, "remote_share")),
        "{shared}"
    );
    assert_eq!(per_node["remote_share"], 0.0);
    let gain = number(per_node, "bytes_per_second") / number(shared, "bytes_per_second");
    assert!((1.1..1.9).contains(&gain), "{gain}");
    assert!(number(row(1 << 30, "shared"), "reads_per_request") < 0.01);

    let without = TWO_SOCKETS.replace("unit = \"dmar", "group = 1 # \"dmar");
    let (_kept, path) = file(&without);
    let refusal = refused(dmaspace(&["numa", "simulate", "--topology", text(&path)]));
    assert!(
        refusal.starts_with("no IOMMU unit translates for a device"),
        "{refusal}"
    );
}

#[test]
fn what_is_published_is_simulated_and_called_that() {
    let directory = tempfile::tempdir().unwrap();
    let svg = directory.path().join("heat.svg");
    let (shown, stderr, status) = run(dmaspace(&[
        "numa",
        "simulate",
        "--published",
        "--svg",
        text(&svg),
    ]));
    assert_eq!((stderr.as_str(), status), ("", Some(0)));
    for line in [
        "pcie-bench: random reads by window in 4 KiB pages, VT-d, Gb/s (simulated)",
        "  20 of 20 counted rows are within 10 %",
        "origin 5: NCCL allreduce on machines of two sockets, GB/s (simulated)",
        "  3 of 3 counted rows are within 10 %",
        "16 devices in 4 GiB: GB/s of all, one table and one per node (simulated)",
    ] {
        assert!(shown.lines().any(|found| found == line), "{line}\n{shown}");
    }
    let drawn = fs::read_to_string(&svg).unwrap();
    assert_eq!(drawn.matches(" ×</text>").count(), 30);
    assert!(drawn.contains(": simulated</text>"), "{drawn}");
}
