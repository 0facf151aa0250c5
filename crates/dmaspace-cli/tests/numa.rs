//! `dmaspace numa`: plans for a made-up machine, and guests for it.

// The lints' exception for tests covers test functions, not what they share.
#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use std::fs;
use std::path::PathBuf;

use common::{dmaspace, refused, report, run, text};
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
    let (shown, stderr, status) = run(dmaspace(&["numa", "--topology", text(&path)]));
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
fn a_guest_is_printed_for_qemu_and_libvirt() {
    let (_kept, path) = file(TWO_SOCKETS);
    let emit = |options: &[&str]| {
        let fixed = ["numa", "--topology", text(&path), "--memory", "1G"];
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
            &[&["numa", "--topology", text(&path)], options].concat(),
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
    let error = refused(dmaspace(&["numa", "--topology", "/nowhere"]));
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
        let (_, stderr, status) = run(dmaspace(&[&["numa"], options].concat()));
        assert_eq!(status, Some(2), "{stderr}");
    }
}

#[test]
fn this_machine_has_a_plan() {
    let (shown, stderr, status) = run(dmaspace(&["numa", "--memory", "1G"]));
    assert_eq!((stderr.as_str(), status), ("", Some(0)));
    assert!(shown.starts_with("nodes\n"), "{shown}");
}
