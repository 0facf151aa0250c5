//! The document of a small run that is always the same.

use super::*;
use crate::peers::results::{Origin, Point};
use crate::peers::stats::Figure;

fn measured(row: &str, format: &str, entries: &[(Who, &str, f64)]) -> Measured {
    let entry = |(who, name, time): &(Who, &str, f64)| Entry {
        who: *who,
        name: (*name).to_owned(),
        figure: Figure::of(&[*time]).unwrap(),
    };
    Measured {
        row: row.to_owned(),
        format: format.to_owned(),
        work: String::new(),
        entries: entries.iter().map(entry).collect(),
    }
}

fn curve(operation: &str, who: Who, points: &[(f64, f64)]) -> Curve {
    let point = |(x, median): &(f64, f64)| Point {
        x: *x,
        figure: Figure::of(&[*median]).unwrap(),
    };
    Curve {
        operation: operation.to_owned(),
        format: "x86-64".to_owned(),
        who,
        name: "dmaspace-iopt, shared".to_owned(),
        points: points.iter().map(point).collect(),
    }
}

fn run() -> Results {
    use Who::{Crate, Exclusive, Limit, Linux, Scalar, Shared};
    Results {
        origin: Origin {
            processor: "A processor".to_owned(),
            processors: 2,
            load: "0.00 0.01 0.05".to_owned(),
            commit: "0123456789ab".to_owned(),
            rustc: "rustc 1.88.0".to_owned(),
            linux: Some("gcc".to_owned()),
            date: "2026-01-02 03:04".to_owned(),
        },
        rounds: 5,
        rows: vec![
            measured(
                "map-256",
                "x86-64",
                &[
                    (Limit, "stores", 35.0),
                    (Exclusive, "", 58.5),
                    (Shared, "", 120.0),
                    (Scalar, "", 62.0),
                    (Linux, "gcc", 264.0),
                    (Crate, "fast", 371.0),
                    (Crate, "slow", 384.0),
                ],
            ),
            measured(
                "map-256",
                "arm-s1-4k",
                &[
                    (Limit, "stores", 35.0),
                    (Exclusive, "", 60.0),
                    (Linux, "gcc", 250.0),
                ],
            ),
            measured(
                "translate",
                "x86-64",
                &[(Exclusive, "", 3.4), (Crate, "fast", 3.3)],
            ),
        ],
        sizes: vec![curve("map", Shared, &[(4096.0, 10.0), (65536.0, 120.0)])],
        threads: vec![
            curve("apart", Shared, &[(1.0, 1e6), (2.0, 1.9e6)]),
            curve("apart", Limit, &[(1.0, 1e7), (2.0, 2e7)]),
        ],
        groups: Groups::default(),
    }
}

/// The line of the document that begins so, after the heading.
fn line<'a>(text: &'a str, heading: &str, start: &str) -> Option<&'a str> {
    let below = text.split_once(heading)?.1;
    below.lines().find(|line| line.starts_with(start))
}

#[test]
fn a_row_has_aim_ours_limit_linux_and_crate() {
    let text = document(&run());
    assert_eq!(
        line(&text, "## Operations", "| `map-256`").unwrap(),
        "| `map-256` | map 256 × 4K, ns | 1.25/1.5× limit | 58.5/120 | 62.0/– | 35.0 | 250 (arm-s1-4k) \
         | 371 (fast) |"
    );
    let mut without = run();
    for row in &mut without.rows {
        row.entries.retain(|entry| entry.who != Who::Linux);
    }
    let text = document(&without);
    let row = line(&text, "## Operations", "| `map-256`").unwrap();
    assert!(row.contains("| 35.0 | not measured | 371"), "{row}");
}

#[test]
fn missed_aims_are_counted_with_the_furthest_and_the_reason() {
    let text = document(&run());
    // Arm's exclusive form is 1.37 times its aim, which other formats than the reference may be.
    let row = line(&text, "## Missed aims", "| `map-256`").unwrap();
    assert!(
        row.starts_with("| `map-256` | 2 | 2.29× | x86-64 shared 2.29× | ARMv7: "),
        "{row}"
    );
    // Within 1.05 times the crate.
    assert_eq!(line(&text, "## Missed aims", "| `translate`"), None);
    let mut slow = run();
    slow.rows[2].entries[0].figure = Figure::of(&[3.5]).unwrap();
    assert!(line(&document(&slow), "## Missed aims", "| `translate`").is_some());
}

#[test]
fn threads_are_held_against_stores() {
    let text = document(&run());
    assert_eq!(
        line(&text, "| threads | apart |", "| 2").unwrap(),
        "| 2 | 1.90 (1.90×) | 95 % |"
    );
}

#[test]
fn every_plot_of_the_document_is_a_file() {
    let files = files(&run());
    for (path, _) in &files[1..] {
        assert!(files[0].1.contains(&format!("]({path})")), "{path}");
    }
    let names: Vec<_> = files.iter().map(|(path, _)| path.as_str()).collect();
    let wanted = [
        "performance.md",
        "performance/size-map.svg",
        "performance/threads.svg",
    ];
    assert_eq!(names, wanted);
}

#[test]
fn formats_with_groups_are_held_against_the_first() {
    let mut run = run();
    assert!(!document(&run).contains("## Groups"));
    let of = |format: &str, times: [f64; 2]| {
        let [exclusive, shared] = times;
        let entries = [(Who::Exclusive, "", exclusive), (Who::Shared, "", shared)];
        measured("unmap-256", format, &entries)
    };
    run.groups.rows = vec![of("x86-64", [50.0, 60.0]), of("arm-s1-4k", [55.0, 90.0])];
    let text = document(&run);
    assert_eq!(
        line(&text, "## Groups", "| arm").unwrap(),
        "| arm-s1-4k | 55.0 (1.10×) | 90.0 (1.50×) |"
    );
}

#[test]
fn values_are_shown_in_units_that_fit() {
    assert_eq!(nanoseconds(10.0), "10 ns");
    assert_eq!(nanoseconds(1e5), "100 µs");
    assert_eq!(number(1e7), "10M");
}
