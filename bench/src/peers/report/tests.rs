//! The document of a small run that is always the same.

use super::*;

/// Two rows, two formats, two series.
const RUN: &str = include_str!("fixture.json");

fn run() -> Results {
    serde_json::from_str(RUN).unwrap()
}

/// The line of the document that begins so, after the heading.
fn line<'a>(text: &'a str, heading: &str, start: &str) -> &'a str {
    let below = text.split_once(heading).unwrap().1;
    below.lines().find(|line| line.starts_with(start)).unwrap()
}

#[test]
fn what_is_read_is_what_was_written() {
    let again = serde_json::to_string(&run()).unwrap();
    assert_eq!(serde_json::from_str::<Results>(&again).unwrap(), run());
}

#[test]
fn the_first_table_has_aim_limit_ours_linux_and_crate() {
    let text = document(&run());
    assert_eq!(
        line(&text, "## The operations", "| `map-256`"),
        "| `map-256` | map 256 × 4K, ns | 1.25/1.5× limit | 58.5 | 120 | 62.0/– | 35.0 | 54.0 | – | 250 ± 3 % (arm-s1-4k) \
         | 371 (page-table-generic) |"
    );
    assert_eq!(
        line(&text, "## The operations", "| `translate`"),
        "| `translate` | translate, random in 1 GiB of 4K, ns | 1.05× by hand / 1.1× Linux | 3.40 | – | – | – | – | – | – | – |"
    );
    assert_eq!(
        line(&text, "### Ratios", "| `map-256`"),
        "| `map-256` | 1.67× | 3.43× | 2.20× (x86-64) | 6.34× | 0 | 0 | 1 | x86-64 shared, 2.29× |"
    );
}

#[test]
fn what_was_not_measured_of_linux_is_said() {
    let mut run = run();
    for row in &mut run.rows {
        row.entries.retain(|entry| entry.who != Who::Linux);
    }
    run.origin.linux = None;
    let text = document(&run);
    assert_eq!(
        line(&text, "## The operations", "| `map-256`"),
        "| `map-256` | map 256 × 4K, ns | 1.25/1.5× limit | 58.5 | 120 | 62.0/– | 35.0 | 54.0 | – | not measured \
         | 371 (page-table-generic) |"
    );
    assert!(text.contains("| Linux's code, 7.2, compiled by | not measured |"));
}

#[test]
fn missed_aims_are_shown_with_a_place_for_their_reason() {
    let text = document(&run());
    // The other format has no limit.
    assert_eq!(
        line(&text, "### Missed aims", "| `map-256`"),
        "| `map-256` | exclusive: x86-64 1.34×; shared: x86-64 2.29× | not explained yet |"
    );
    let mut well = run();
    well.rows.retain(|row| row.row == "translate");
    assert!(document(&well).contains("### Missed aims\n\nNone."));
}

#[test]
fn threads_and_memory_are_held_against_their_limits() {
    let text = document(&run());
    assert_eq!(
        line(&text, "| apart: threads |", "| 2"),
        "| 2 | 1.90 | 1.90× | 19.0 | 1.90× | 100 % |"
    );
    assert!(text.contains(" 1 of 1 pairs of a format"), "{text}");
    let mut more = run();
    more.memory[0].tables *= 2;
    let more = document(&more);
    assert!(more.contains(" 0 of 1 pairs of a format"), "{more}");
    assert_eq!(
        line(&more, "## Memory", "| x86-64"),
        "| x86-64 | 4K | 2.000 |"
    );
    assert!(text.contains("| commit | `0123456789ab` |"));
}

#[test]
fn steps_that_grow_with_the_size_are_no_cliffs() {
    let text = document(&run());
    assert_eq!(
        line(&text, "## Cost with size", "| map, leaves of 4K"),
        "| map, leaves of 4K, x86-64 | exclusive | 10.0 ns at 4K | 120 ns at 64K | 1.50× at 64K |"
    );
}

#[test]
fn every_plot_of_the_document_is_a_file() {
    let run = run();
    let files = files(&run);
    for (path, _) in &files[1..] {
        assert!(files[0].1.contains(&format!("]({path})")), "{path}");
    }
    let names: Vec<_> = files.iter().map(|(path, _)| path.as_str()).collect();
    let wanted = [
        "performance.md",
        "performance/size-map-4k.svg",
        "performance/threads.svg",
    ];
    assert_eq!(names, wanted);
}

#[test]
fn standings_end_where_they_should() {
    assert_eq!(Standing::of(60.0, 60.0), Standing::Met);
    assert_eq!(Standing::of(90.0, 60.0), Standing::Near);
    assert_eq!(Standing::of(90.1, 60.0), Standing::Missed);
}

#[test]
fn formats_with_groups_are_held_against_the_first() {
    let mut run = run();
    assert!(!document(&run).contains("## Groups"));
    let of = |format: &str, times: [f64; 2]| Measured {
        row: "unmap-256".to_owned(),
        format: format.to_owned(),
        work: String::new(),
        conditions: String::new(),
        entries: [Who::Exclusive, Who::Shared]
            .into_iter()
            .zip(times)
            .map(|(who, time)| Entry {
                who,
                name: String::new(),
                figure: crate::peers::stats::Figure::of(&[time]).unwrap(),
            })
            .collect(),
    };
    run.groups.rows = vec![of("x86-64", [50.0, 60.0]), of("arm-s1-4k", [55.0, 90.0])];
    let text = document(&run);
    assert_eq!(
        line(&text, "## Groups", "| Arm"),
        "| Arm stage 1, 4K granule | 55.0 (1.10×) | 90.0 (1.50×) |"
    );
}
