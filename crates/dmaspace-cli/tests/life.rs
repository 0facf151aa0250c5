//! `dmaspace life`: what it says, as text, JSON and picture, and how it ends.

// The lints' exception for tests covers test functions, not what they share.
#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use std::fs;

use common::{Ordinary, dmaspace, refused, report, run, text};

/// Small, and the same on every machine but for its nodes: offsets stand in for frames.
const SMALL: [&str; 6] = ["life", "--size", "16M", "--backing", "memfd", "--offsets"];

/// Figures masked, spaces squeezed, and what goes on in the next line joined. What depends on the machine's
/// nodes is one word.
fn masked(report: &str) -> Vec<String> {
    let joined = report.replace("\n              ", " ");
    joined.lines().map(mask).collect()
}

fn mask(line: &str) -> String {
    let figure = |word: &str| word.starts_with(|c: char| c.is_ascii_digit());
    let word = |word: &str| match figure(word) {
        true => {
            "#".to_owned()
                + word.trim_start_matches(|c: char| c.is_ascii_digit() || ".,".contains(c))
        }
        false => word.into(),
    };
    let words: Vec<String> = line.split_whitespace().map(word).collect();
    let units = ["ns", "µs", "ms", "s", "B", "KiB", "MiB", "GiB"];
    let mut squeezed: Vec<String> = Vec::new();
    for word in words {
        let unit = units.contains(&word.trim_end_matches(':'));
        if !(unit && squeezed.last().is_some_and(|last| last == "#")) {
            squeezed.push(word);
        }
    }
    let nodes = [
        "one node here: the second planned",
        "each half on its node",
        "node # planned",
        "half on each node",
    ];
    let line = squeezed.join(" ");
    nodes
        .iter()
        .fold(line, |line, nodes| line.replace(nodes, "NODES"))
}

#[test]
fn a_life_is_reported_on_one_screen() {
    let mut command = dmaspace(&SMALL);
    command.env("COLUMNS", "100");
    let (shown, stderr, status) = run(command);
    assert_eq!((stderr.as_str(), status), ("", Some(0)), "{shown}");
    assert!(shown.lines().count() <= 40, "{shown}");
    let lines = masked(&shown);
    let from = lines
        .iter()
        .position(|line| line.starts_with("step"))
        .unwrap();
    let expected = "\
step time runs moved tables flushes found
memory # # # # # NODES
pin, charge # # # # # # charges, not #; kernel: #
two roots # # # # # each on its node; leaves up to #
DMA begins # # # # # each of # devices was everywhere
cut a hole # # # # # out of a leaf of # now # leaves
close it # # # # # leaves as before: #
track, split # # # # # # leaves became #
harvest # # # # # # writes missed, # pages too many
merge # # # # # leaves as before: #
balloon in # # # # # # still pinned; messages: #
balloon out # # # # # # pinned again, zeros found
hand over # # # # # pinned by both, then by it alone
successor # # # # # its own hole cut and closed
tear down # # # # # all counters of both at zero

time
steps #
devices # until they have seen what a step changed
picture # noting the leaves after each step
freeing #
rest # checks, and setting up
all #

devices, all the time
DMA # accesses: # read, # written; # bytes wrong
faults outside the holes: #; in the holes: # none got through

OK every check held; charge, pins, tables, areas and huge pages are at zero";
    let expected: Vec<_> = expected.lines().collect();
    assert_eq!(lines[from..], expected, "{shown}");
    assert!(
        shown.contains("faults      outside the holes: 0;"),
        "{shown}"
    );
}

#[test]
fn a_step_is_one_line_in_80_columns() {
    let mut command = dmaspace(&SMALL);
    command.env("COLUMNS", "80");
    let (shown, stderr, status) = run(command);
    assert_eq!((stderr.as_str(), status), ("", Some(0)), "{shown}");
    let lines = masked(&shown);
    let steps = lines
        .iter()
        .skip_while(|line| !line.starts_with("step"))
        .take_while(|line| !line.is_empty());
    let expected = "\
step time runs moved tables flushes found
memory # # # # # NODES
pin, charge # # # # # # charges
two roots # # # # # leaves to #
DMA begins # # # # # all pages reached
cut a hole # # # # # # leaves
close it # # # # # # leaves
track, split # # # # # # leaves
harvest # # # # # # missed, # extra
merge # # # # # # leaves
balloon in # # # # # # pinned
balloon out # # # # # # pinned
hand over # # # # # pinned there only
successor # # # # # hole cut, closed
tear down # # # # # counters at zero";
    assert_eq!(
        steps.collect::<Vec<_>>(),
        expected.lines().collect::<Vec<_>>(),
        "{shown}"
    );
    // Nothing of it goes on in the next line.
    assert!(!shown.contains("\n              "), "{shown}");
}

#[test]
fn a_life_in_json_has_its_figures_exactly_and_is_drawn() {
    let kept = tempfile::tempdir().unwrap();
    let svg = kept.path().join("life.svg");
    let mut arguments = SMALL.to_vec();
    arguments.extend(["--json", "--svg", text(&svg)]);
    let life = report(dmaspace(&arguments));
    let size = 16u64 << 20;
    assert_eq!(life["memory"]["size_bytes"], size);
    assert_eq!(life["memory"]["addresses"], "file-offset");
    let roots = life["roots"].as_array().unwrap();
    let formats: Vec<_> = roots.iter().map(|root| &root["format"]).collect();
    assert_eq!(formats, ["vtd-ss", "amdv1"]);
    assert_eq!(life["largest_leaf_bytes"], size / 2);
    let steps = life["steps"].as_array().unwrap();
    let names: Vec<_> = steps
        .iter()
        .map(|step| step["step"].as_str().unwrap())
        .collect();
    let expected = "memory pin roots dma hole close track harvest merge inflate deflate hand-over \
                    successor tear-down";
    assert_eq!(names.join(" "), expected);
    for step in steps {
        let fields: Vec<_> = step
            .as_object()
            .unwrap()
            .keys()
            .map(String::as_str)
            .collect();
        let expected = "bytes checked flushes refused right runs step tables took_ns";
        assert_eq!(fields.join(" "), expected);
        assert!(
            step["took_ns"].as_u64().unwrap() > 0 && step["right"] == true,
            "{step}"
        );
    }
    assert_eq!(steps[9]["bytes"], size / 8 * 7);
    for (name, value) in [
        ("wrong_bytes", 0),
        ("faults_outside_holes", 0),
        ("reached_in_holes", 0),
    ] {
        assert_eq!(life["dma"][name], value, "{name}");
    }
    for (name, left) in life["left"].as_object().unwrap() {
        let parts: Vec<_> = match left.as_object() {
            Some(parts) => parts.values().collect(),
            None => vec![left],
        };
        assert!(parts.iter().all(|value| **value == 0), "{name}: {left}");
    }
    let band = &life["moments"][4]["roots"][0][0];
    assert_eq!(
        (&band["iova"], &band["state"]),
        (&"0x10000000000".into(), &"mapped".into())
    );
    let drawn = fs::read_to_string(&svg).unwrap();
    assert!(drawn.starts_with("<svg ") && drawn.ends_with("</svg>\n"));
    assert!(drawn.contains("0 faults outside the holes"), "{drawn}");
}

#[test]
fn an_ordinary_user_with_a_limit_sees_it_too() {
    let Some(user) = Ordinary::new("an_ordinary_user_with_a_limit_sees_it_too", 7) else {
        return;
    };
    let (shown, stderr, status) = run(user.command(8 << 20, &["life"]));
    assert_eq!((stderr.as_str(), status), ("", Some(0)), "{shown}");
    assert!(
        shown.contains("offsets in the memory files, not page frames"),
        "{shown}"
    );
    assert!(shown.contains("\nOK  every check held"), "{shown}");
    let said = refused(user.command(8 << 20, &["life", "--size", "8M"]));
    assert!(
        said.contains("more than the limit on locked memory leaves for two owners"),
        "{said}"
    );
}

#[test]
fn a_back_end_of_the_kernel_takes_a_device_and_draws_nothing() {
    let said = |options: &[&str]| {
        let mut arguments = vec!["life"];
        arguments.extend(options);
        refused(dmaspace(&arguments))
    };
    let none = said(&["--backend", "vfio"]);
    assert!(
        none.starts_with("--backend vfio requires --device ADDRESS"),
        "{none}"
    );
    let software = said(&["--device", "0000:00:05.0"]);
    assert!(
        software.starts_with("--device requires --backend vfio or iommufd"),
        "{software}"
    );
    let kernel = ["--backend", "iommufd", "--device", "ffff:ff:1f.7"];
    let drawn = said(&[&kernel[..], &["--svg", "life.svg"]].concat());
    assert!(
        drawn.starts_with("--svg means nothing with --backend iommufd"),
        "{drawn}"
    );
    let offsets = said(&[&kernel[..], &["--offsets"]].concat());
    assert!(
        offsets.starts_with("--offsets means nothing with --backend iommufd"),
        "{offsets}"
    );
    let absent = said(&kernel);
    assert!(absent.contains("ffff:ff:1f.7"), "{absent}");
}

#[test]
fn a_successor_without_a_first_owner_ends() {
    let mut command = dmaspace(&["life-successor"]);
    command.write_stdin("");
    let (_, _, status) = run(command);
    assert_eq!(status, Some(1));
}
