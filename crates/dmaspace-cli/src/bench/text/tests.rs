//! Reports of a real run in the smallest sizes, whose figures are replaced by the same ones: all else is
//! compared with files in `golden`.

use std::collections::BTreeSet;
use std::sync::OnceLock;

use lab::bench::{Bench, NotRun, Settings, Subject};

use super::super::html::page;
use super::super::program::Program;
use super::*;

/// Everything once, as it came out.
fn measured() -> &'static Measured {
    static MEASURED: OnceLock<Measured> = OnceLock::new();
    MEASURED.get_or_init(|| {
        let _turn = crate::counter_lock::pinning();
        let job = Bench {
            groups: Group::ALL.into(),
            settings: Settings::smallest(),
        };
        Measured::new(job.run(&Program, &mut ()).unwrap())
    })
}

/// Whether memory was pinned: a user's limit may be less than the smallest sizes, or others of the user have it.
fn pins() -> bool {
    let mut missing = measured().report.groups.iter().flat_map(|one| &one.not_run);
    let missing = missing.find(|one| ["thp", "4k"].contains(&one.what.as_str()));
    if let Some(NotRun { what, why }) = missing {
        eprintln!("not run: the report of pins: {what}: {why}");
    }
    missing.is_none()
}

/// One group with the same figures, memory and machine everywhere.
fn masked(group: Group) -> Measured {
    let mut report = measured().report.clone();
    report.machine = Host {
        processor: "A processor".into(),
        processors: 2,
        memory_bytes: 8 << 30,
        available_bytes: 7 << 30,
        nodes: 1,
        kernel: "6.12.0".into(),
        thp: "madvise",
        pool_2m: Some(0),
        pool_1g: None,
        load: Some(0.25),
    };
    report.groups.retain(|one| one.group == group);
    let one = &mut report.groups[0];
    // Pools, devices and processors are the machine's; of formats and sizes two are enough.
    one.rows.retain(|row| {
        let key = &row.key;
        let map = key.group != Group::Map
            || [4 << 10, 1 << 20].contains(&key.size_bytes) && [1, 10].contains(&key.threads);
        let formats = ["", "vtd-ss", "arm-s1-4k", "page-numbers", "ranges"];
        let memories = ["", "thp", "4k"];
        map && formats.contains(&key.format) && memories.contains(&key.memory)
    });
    for row in &mut one.rows {
        if row.key.group == Group::Pin && row.key.size_bytes > 0 {
            // Less, where a limit is lower.
            row.key.size_bytes = 16 << 20;
        }
        let times = match row.key.subject {
            Subject::OriginBefore | Subject::OriginAfter => continue,
            Subject::ByPage | Subject::SharedSimulated => 10.0,
            Subject::ChargeByPage => 5.0,
            _ => 1.0,
        };
        row.figure = Figure {
            min: 1.5 * times,
            median: 2.0 * times,
            max: 4.0 * times,
            mean: 2.5 * times,
            samples: 3,
        };
    }
    let machine = [
        "processors run in turns",
        "16 MiB",
        "instead of",
        "pinned by",
    ];
    one.notes
        .retain(|note| !machine.iter().any(|words| note.contains(words)));
    one.not_run = vec![NotRun {
        what: "hugetlb-1g".into(),
        why: "it requires 1 GiB, the budget is 16 MiB".into(),
    }];
    Measured {
        version: "0.1.0",
        commit: "0123456789ab",
        report,
    }
}

/// In one test, since each has a process of its own, and the run takes long.
#[test]
fn one_run_is_reported_as_text_as_json_and_on_a_page() {
    the_report_of_each_group_is_as_it_was();
    json_has_a_row_for_each_figure_with_stable_names();
    the_page_is_whole_and_refers_to_nothing_outside();
}

fn the_report_of_each_group_is_as_it_was() {
    let golden = [
        (Group::Pin, include_str!("golden/pin.txt")),
        (Group::Map, include_str!("golden/map.txt")),
        (Group::Balloon, include_str!("golden/balloon.txt")),
        (Group::Tables, include_str!("golden/tables.txt")),
        (Group::Numa, include_str!("golden/numa.txt")),
    ];
    for (group, expected) in golden {
        if group == Group::Pin && !pins() {
            continue;
        }
        let text = write(&masked(group), Paint::PLAIN);
        if std::env::var_os("DMASPACE_BLESS").is_some() {
            let file = format!("src/bench/text/golden/{group}.txt");
            std::fs::write(file, &text).unwrap();
        } else {
            assert_eq!(text, expected, "\n{text}");
        }
    }
}

fn json_has_a_row_for_each_figure_with_stable_names() {
    let text = crate::json(measured()).unwrap();
    let json: serde_json::Value = serde_json::from_str(&text).unwrap();
    for name in ["version", "commit", "machine", "quick", "groups"] {
        assert!(json.get(name).is_some(), "{name}");
    }
    let names = [
        "format",
        "group",
        "max",
        "mean",
        "median",
        "memory",
        "min",
        "op",
        "samples",
        "size_bytes",
        "subject",
        "threads",
        "unit",
    ];
    let mut keys = BTreeSet::new();
    for (group, found) in measured()
        .report
        .groups
        .iter()
        .zip(json["groups"].as_array().unwrap())
    {
        assert_eq!(found["group"], group.group.name());
        let rows = found["rows"].as_array().unwrap();
        assert_eq!(rows.len(), group.rows.len());
        for row in rows {
            let row = row.as_object().unwrap();
            assert_eq!(row.keys().map(String::as_str).collect::<Vec<_>>(), names);
            assert!(row["median"].as_f64().unwrap() >= row["min"].as_f64().unwrap());
            let key = [
                "group",
                "op",
                "memory",
                "format",
                "subject",
                "threads",
                "size_bytes",
            ];
            assert!(
                keys.insert(key.map(|name| row[name].to_string())),
                "twice: {row:?}"
            );
        }
    }
    let subjects: BTreeSet<_> = keys.iter().map(|key| key[4].as_str()).collect();
    // Charges by page and by folio are of pins alone.
    if pins() {
        assert_eq!(subjects.len(), 9, "{subjects:?}");
    }
}

fn the_page_is_whole_and_refers_to_nothing_outside() {
    let page = page(measured());
    for outside in [
        "http:", "https:", "src=", "href=", "url(", "@import", "<script",
    ] {
        assert!(!page.contains(outside), "{outside}");
    }
    for group in Group::ALL {
        assert!(page.contains(&format!("<h2>{}</h2>", heading(group))));
    }
    // Nine plots of maps, two of pins, one of a balloon, four of tables, one of nodes.
    if pins() {
        assert_eq!(page.matches("<svg ").count(), 17);
    }
    assert!(page.contains("prefers-color-scheme:dark"));
    assert!(!page.contains("NaN") && !page.contains("inf\""));
    let mut open = Vec::new();
    for part in page.split('<').skip(1) {
        let (tag, text) = part.split_once('>').expect("a tag ends");
        assert!(!text.contains('>'), "{text}");
        let entities = text.matches('&').count();
        let known = ["&amp;", "&lt;", "&gt;"].map(|entity| text.matches(entity).count());
        assert_eq!(entities, known.iter().sum::<usize>(), "{text}");
        match tag.strip_prefix('/') {
            Some(name) => assert_eq!(open.pop(), Some(name)),
            None if tag.starts_with('!') || tag.ends_with('/') => {}
            None => open.push(tag.split(' ').next().unwrap()),
        }
    }
    assert!(open.is_empty(), "{open:?}");
}

#[test]
fn figures_have_as_many_digits_as_they_are_good_for() {
    let one = |samples| Figure {
        min: 0.005,
        median: 0.05,
        max: 12_345.0,
        mean: 1.0,
        samples,
    };
    assert_eq!(shown(Unit::Microseconds, &one(1)), "0.050");
    assert_eq!(shown(Unit::Microseconds, &one(3)), "0.050 (0.0050–12,300)");
    assert_eq!(shown(Unit::Count, &one(3)), "0");
    assert_eq!(published((Some(4126.0), None)), "4,130→-");
}
