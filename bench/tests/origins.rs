//! The figures of the origins, in the smallest sizes: every one is there, and what was published stands
//! beside it. Counts are as they should be; times are not checked here.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on stops")]

use std::collections::BTreeSet;

use dmaspace_bench::origins::{
    self, Figure, Group, GroupReport, Key, Line, Row, Settings, Subject, Unit, origin,
};

fn group(group: Group) -> GroupReport {
    origins::run(group, Settings::smallest()).unwrap()
}

/// Measured rows, without the origin's figures: memory, format, op, subject and threads.
fn measured(report: &GroupReport) -> BTreeSet<(&str, &str, &str, Subject, u32)> {
    let published = [Subject::OriginBefore, Subject::OriginAfter];
    let rows = report.rows.iter();
    let rows = rows.filter(|row| !published.contains(&row.key.subject));
    let key = |row: &&Row| row.figure.samples > 0;
    assert!(
        rows.clone().all(|row| key(&row)),
        "a figure without samples"
    );
    for row in rows.clone() {
        assert!(
            row.figure.min.is_finite() && row.figure.min >= 0.0,
            "{row:?}"
        );
        assert_eq!(row.key.group, report.group);
    }
    rows.map(|row| &row.key)
        .map(|key| (key.memory, key.format, key.op, key.subject, key.threads))
        .collect()
}

#[test]
fn tables_of_every_format_have_every_operation_that_they_can() {
    use Subject::{ByPage, Dmaspace, Stores};
    let report = group(Group::Tables);
    let formats = [
        "amdv1",
        "x86-64",
        "vtd-ss",
        "arm-s1-4k",
        "arm-s1-16k",
        "arm-s1-64k",
        "arm-s2-4k",
        "riscv",
        "riscv-g",
        "armv7s",
        "dart1",
        "dart2",
    ];
    let all: &[Subject] = &[ByPage, Dmaspace, Stores];
    let ops: [(&str, &[Subject]); 10] = [
        ("map 1 page", &[Dmaspace]),
        ("unmap 1 page", &[Dmaspace]),
        ("map 256 pages", all),
        ("unmap 256 pages", all),
        ("map 256 blocks", all),
        ("unmap 256 blocks", all),
        ("split 1 block", &[ByPage, Dmaspace]),
        ("merge 1 block", &[ByPage, Dmaspace]),
        ("harvest 512 pages", &[ByPage, Dmaspace]),
        ("translate", &[Dmaspace]),
    ];
    let mut expected = BTreeSet::new();
    for format in formats {
        for (op, subjects) in ops {
            let blocks = op.ends_with("blocks") || op.ends_with("1 block");
            let lacks = format.starts_with("dart") && blocks
                || ["armv7s", "dart1", "dart2"].contains(&format) && op.starts_with("harvest");
            if !lacks {
                expected.extend(subjects.iter().map(|who| ("", format, op, *who, 1)));
            }
        }
    }
    assert_eq!(measured(&report), expected);
    // The origin's table, in four formats.
    let lines = report.lines();
    let line = |format: &str, op: &str| {
        let found = |line: &&Line<'_>| line.key.format == format && line.key.op == op;
        *lines.iter().find(found).unwrap()
    };
    let amd = line("amdv1", "unmap 256 pages");
    assert_eq!(amd.origin, Some((Some(6498.0), Some(353.0))));
    assert!(amd.before.is_some() && amd.after.is_some() && amd.stores.is_some());
    assert_eq!(amd.key.size_bytes, 1 << 20);
    let arm = line("arm-s1-4k", "map 1 page");
    assert_eq!(arm.origin, Some((Some(65.0), Some(57.0))));
    assert_eq!(arm.ratio(), None);
    assert_eq!(line("riscv", "map 1 page").origin, None);
}

#[test]
fn maps_have_all_eleven_sizes_for_all_threads_and_formats() {
    let report = group(Group::Map);
    let processors = std::thread::available_parallelism().unwrap().get();
    let threads = BTreeSet::from([1, 2, 10, processors.min(32) as u32]);
    let mut expected = BTreeSet::new();
    for format in ["vtd-ss", "amdv1", "arm-s1-4k"] {
        for op in ["map", "unmap, strict", "unmap, lazy"] {
            for who in [Subject::ByPage, Subject::Dmaspace] {
                expected.extend(threads.iter().map(|count| ("", format, op, who, *count)));
            }
        }
    }
    assert_eq!(measured(&report), expected);
    let lines = report.lines();
    assert_eq!(lines.len(), 3 * 3 * threads.len() * 11);
    for line in &lines {
        let published = [1, 10].contains(&line.key.threads) && line.key.op != "unmap, lazy";
        assert_eq!(line.origin.is_some(), published, "{:?}", line.key);
        assert!(line.before.is_some() && line.after.is_some());
    }
    let mib = |line: &&Line<'_>| {
        let key = line.key;
        (key.size_bytes, key.threads, key.op) == (1 << 20, 10, "unmap, strict")
    };
    let origin = lines.iter().find(mib).unwrap().origin;
    assert_eq!(origin, Some((Some(280.8), Some(191.5))));
}

/// Each kind of memory that can be had, charged in each way, and how often.
#[test]
fn real_memory_is_charged_once_by_us_once_a_folio_and_once_a_page_by_others() {
    use Subject::{ByFolio, ByPage, ChargeByPage, Dmaspace};
    let report = group(Group::Pin);
    let not_run: Vec<_> = report.not_run.iter().map(|it| it.what.as_str()).collect();
    let mut expected = BTreeSet::new();
    // 16 MiB have no page of 1 GiB; pools take root.
    assert!(not_run.contains(&"hugetlb-1g"), "{not_run:?}");
    for memory in ["hugetlb-2m", "thp", "4k"] {
        if not_run.contains(&memory) {
            assert_eq!(memory, "hugetlb-2m");
            continue;
        }
        let ways: &[Subject] = match memory {
            "4k" => &[ChargeByPage, ByPage, Dmaspace],
            _ => &[ChargeByPage, ByFolio, ByPage, Dmaspace],
        };
        for op in ["map for DMA", "charge and map", "charges"] {
            expected.extend(ways.iter().map(|who| (memory, "vtd-ss", op, *who, 1)));
        }
        for op in ["pin", "find runs", "unmap", "unpin"] {
            expected.insert((memory, "vtd-ss", op, Dmaspace, 1));
        }
    }
    let ours = measured(&report);
    let ours = ours.into_iter().filter(|key| key.1 == "vtd-ss");
    assert_eq!(ours.collect::<BTreeSet<_>>(), expected);
    for line in report.lines() {
        let published = line.key.memory == "hugetlb-2m" && line.key.op == "map for DMA";
        assert_eq!(line.origin.is_some(), published);
        if line.key.op != "charges" || line.key.format != "vtd-ss" {
            continue;
        }
        let count = |figure: Option<&Figure>| figure.map(|figure| figure.median as u64);
        let pages = line.key.size_bytes / 4096;
        assert_eq!(count(line.after), Some(1));
        assert_eq!(count(line.before), Some(pages));
        assert_eq!(count(line.all_by_page), Some(pages));
        // Where a transparent one is not to be had its parts are runs of their own.
        let least = line.key.size_bytes >> 21;
        match (line.key.memory, count(line.by_folio)) {
            ("hugetlb-2m", folios) => assert_eq!(folios, Some(least)),
            ("thp", Some(folios)) => assert!((least..=pages).contains(&folios), "{folios}"),
            ("4k", None) => {}
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_balloon_is_inflated_by_page_numbers_and_in_bulk_by_fewer_messages() {
    let report = group(Group::Balloon);
    let not_run: Vec<_> = report.not_run.iter().map(|it| it.what.as_str()).collect();
    let mut expected = BTreeSet::new();
    for memory in ["hugetlb-2m", "thp", "4k", "4k-scattered"] {
        if not_run.contains(&memory) {
            assert_eq!(memory, "hugetlb-2m");
            continue;
        }
        for op in [
            "allocate",
            "encode",
            "send",
            "translate",
            "discard",
            "inflate",
            "messages",
        ] {
            expected.insert((memory, "", op, Subject::ByPage, 1));
            for format in ["page-numbers", "bitmap-records"] {
                expected.insert((memory, format, op, Subject::Dmaspace, 1));
            }
        }
    }
    assert_eq!(measured(&report), expected);
    // Page by page stands beside each format.
    for line in report.lines() {
        let (before, after) = (line.before.unwrap(), line.after.unwrap());
        let scattered = line.key.memory == "4k-scattered";
        let taken = if scattered { 8 << 20 } else { 14 << 20 };
        assert_eq!(line.key.size_bytes, taken);
        let published = !scattered && !["encode", "messages"].contains(&line.key.op);
        assert_eq!(line.origin.is_some(), published);
        if line.key.op == "messages" {
            let pages = taken as f64 / 4096.0;
            assert_eq!(before.median, pages / 256.0);
            let after = after.median;
            let by_numbers = pages / 256.0;
            match line.key.format {
                "page-numbers" if scattered => assert!(after >= by_numbers, "{after}"),
                "page-numbers" => assert_eq!(after, by_numbers),
                _ => assert_eq!(after, 1.0, "{}", line.key.format),
            }
        }
    }
}

#[test]
fn nodes_are_simulated_and_say_so() {
    let report = group(Group::Numa);
    assert_eq!(measured(&report).len(), 6);
    assert!(
        report
            .notes
            .iter()
            .any(|note| note.contains("simulated, not measured"))
    );
    let lines = report.lines();
    assert_eq!(lines.len(), 3);
    for line in &lines {
        let (before, after) = line.origin.unwrap();
        // As docs/numa.md says: within 10 % of what was published.
        let near = |figure: f64, published: f64| (figure / published - 1.0).abs() < 0.1;
        assert!(near(line.before.unwrap().median, before.unwrap()));
        assert!(near(line.after.unwrap().median, after.unwrap()));
    }
    let both = lines
        .iter()
        .find(|line| line.key.op == "both sockets")
        .unwrap();
    assert!(both.ratio().unwrap() > 1.2, "more is better");
}

#[test]
fn a_ratio_says_how_many_times_less_time_or_more_bytes() {
    let row = |unit, subject, value| Row {
        key: Key {
            group: Group::Tables,
            op: "map",
            memory: "",
            format: "vtd-ss",
            subject,
            threads: 1,
            size_bytes: 4096,
            unit,
        },
        figure: Figure {
            min: value,
            median: value,
            max: value,
            mean: value,
            samples: 1,
        },
    };
    for (unit, ratio) in [(Unit::Nanoseconds, 4.0), (Unit::GigabytesPerSecond, 0.25)] {
        let report = GroupReport {
            group: Group::Tables,
            notes: Vec::new(),
            not_run: Vec::new(),
            rows: vec![
                row(unit, Subject::ByPage, 8.0),
                row(unit, Subject::Dmaspace, 2.0),
            ],
        };
        let lines = report.lines();
        assert_eq!(lines.len(), 1);
        assert_eq!(lines[0].ratio(), Some(ratio));
    }
}

#[test]
fn what_was_published_is_whole() {
    let count = |group| origin::published(group).len();
    assert_eq!(Group::ALL.map(count), [1, 44, 5, 24, 3]);
}
