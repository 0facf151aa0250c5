//! Surveys of tables whose content is known.

use crate::tables::{
    Change, FORMATS, FindingKind, InDump, LeafReport, Limits, Reached, RunReport, Severity,
    TableFile, Tables, TreeLine, diff, root, survey,
};
use iopt::geometry::Geometry;
use iopt::walk::{Says, ScanStep};
use iopt::{Prot, Root};

use crate::tables::tests::images::{dump_of, each_format, image, image_with, keep, parsed, sample};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

#[test]
fn what_was_mapped_is_what_is_listed_in_every_format() {
    each_format(|name, image, root| {
        let tables = Tables::of_image(parsed(image));
        let found = survey(&tables, Limits::default());
        assert_eq!(found.findings, [], "{name}");
        assert!(found.complete && found.finding_count == 0);
        let mut expected = sample(name);
        expected.sort_by_key(|map| map.0);
        let listed: Vec<_> = found
            .runs
            .iter()
            .map(|run| (run.iova, run.pa, run.bytes))
            .collect();
        let mapped: Vec<_> = expected.iter().map(|map| (map.0, map.1, map.2)).collect();
        assert_eq!(listed, mapped, "{name}");
        assert_eq!(
            found.mapped_bytes,
            expected.iter().map(|map| map.2).sum::<u64>()
        );
        for (run, map) in found.runs.iter().zip(&expected) {
            assert_eq!(
                run.prot.contains('w'),
                map.3.contains(Prot::WRITE),
                "{name} {run:?}"
            );
        }
        // Tables as the image counts them, and leaves as the format has them.
        let shape = Geometry::new(root.format, root.levels).unwrap();
        let tables_counted: u64 = found.levels.iter().map(|level| level.tables).sum();
        assert_eq!(tables_counted, parsed(image).len() as u64, "{name}");
        assert_eq!(
            found.waste.all_bytes,
            shape.root_bytes + (tables_counted - 1) * shape.table_bytes,
            "{name}"
        );
        assert_eq!(found.waste.unlinked_tables, Some(0), "{name}");
        for leaf in &found.leaves {
            assert!(
                shape.page_sizes.contains(leaf.page_bytes),
                "{name} {leaf:?}"
            );
            assert_eq!(leaf.bytes, leaf.count * leaf.page_bytes, "{name}");
        }
        assert_eq!(shape.aperture.bits, found.root.input_bits, "{name}");
    });
}

/// Leaves and tables counted by hand.
#[test]
fn counts_are_those_of_the_layout() {
    // 1 GiB + 2 MiB + 12 KiB of VT-d's second stage, and nothing else.
    let maps = [
        (GIB, GIB, GIB, Prot::RW),
        (2 * GIB, 4 * GIB, 2 * MIB, Prot::RW),
        (2 * GIB + 2 * MIB, 8 * GIB, 12 << 10, Prot::READ),
    ];
    let (image, _) = image("vtd-ss", &maps);
    let found = survey(&Tables::of_image(parsed(&image)), Limits::default());
    let leaf = |page_bytes, count| LeafReport {
        page_bytes,
        count,
        bytes: page_bytes * count,
    };
    assert_eq!(
        found.leaves,
        [leaf(4096, 3), leaf(2 * MIB, 1), leaf(GIB, 1)]
    );
    let by_level: Vec<_> = found
        .levels
        .iter()
        .map(|level| (level.level, level.tables, level.present, level.leaf_entries))
        .collect();
    assert_eq!(
        by_level,
        [(3, 1, 1, 0), (2, 1, 2, 1), (1, 1, 2, 1), (0, 1, 3, 3)]
    );
    let run = |iova, pa, bytes, prot: &str, page| RunReport {
        iova,
        pa,
        bytes,
        prot: prot.into(),
        pages_bytes: (page, page),
    };
    assert_eq!(
        found.runs,
        [
            run(GIB, GIB, GIB, "rw-", GIB),
            run(2 * GIB, 4 * GIB, 2 * MIB, "rw-", 2 * MIB),
            run(2 * GIB + 2 * MIB, 8 * GIB, 12 << 10, "r--", 4096),
        ]
    );
    let lines: Vec<_> = found.tree.iter().map(line).collect();
    assert_eq!(
        lines,
        [
            "0: [0] 1 tables of level 2",
            "1: [1] 1 x 1073741824 to 0x40000000 rw-",
            "1: [2] 1 tables of level 1",
            "2: [0] 1 x 2097152 to 0x100000000 rw-",
            "2: [1] 1 tables of level 0",
            "3: [0] 3 x 4096 to 0x200000000 r--",
        ]
    );
}

fn line(line: &TreeLine) -> String {
    match line {
        TreeLine::Tables {
            depth,
            index,
            count,
            level,
            ..
        } => {
            format!("{depth}: [{index}] {count} tables of level {level}")
        }
        TreeLine::Leaves {
            depth,
            index,
            count,
            page_bytes,
            pa,
            prot,
            ..
        } => {
            format!("{depth}: [{index}] {count} x {page_bytes} to {pa:#x} {prot}")
        }
        TreeLine::Fault {
            depth, index, text, ..
        } => format!("{depth}: [{index}] {text}"),
    }
}

/// 64 MiB in pages of 4 KiB are 32 tables in one line, all of which one larger leaf each would replace.
#[test]
fn tables_that_larger_leaves_would_replace_are_counted_and_drawn_in_one_line() {
    let maps = [(GIB, 6 * GIB, 64 * MIB, Prot::RW)];
    let (image, _) = image_with("vtd-ss", 4096, &maps);
    let found = survey(&Tables::of_image(parsed(&image)), Limits::default());
    assert_eq!(found.waste.mergeable_tables, 32);
    assert_eq!(found.waste.mergeable_bytes, 32 * 4096);
    let lines: Vec<_> = found.tree.iter().map(line).collect();
    assert_eq!(
        lines,
        [
            "0: [0] 1 tables of level 2",
            "1: [1] 1 tables of level 1",
            "2: [0] 32 tables of level 0",
            "3: [0] 16384 x 4096 to 0x180000000 rw-",
        ]
    );
    // Leaves with other permissions are another run, in a table of their own or in the same one.
    let maps = [
        (GIB, 6 * GIB, 2 * MIB, Prot::RW),
        (GIB + 2 * MIB, 6 * GIB + 2 * MIB, MIB, Prot::READ),
        (GIB + 3 * MIB, 6 * GIB + 3 * MIB, MIB, Prot::RW),
    ];
    let (image, _) = image_with("vtd-ss", 4096, &maps);
    let found = survey(&Tables::of_image(parsed(&image)), Limits::default());
    let lines: Vec<_> = found.tree.iter().map(line).collect();
    assert_eq!(
        lines[2..],
        [
            "2: [0] 1 tables of level 0",
            "3: [0] 512 x 4096 to 0x180000000 rw-",
            "2: [1] 1 tables of level 0",
            "3: [0] 256 x 4096 to 0x180200000 r--",
            "3: [256] 256 x 4096 to 0x180300000 rw-",
        ]
    );
    // Misaligned memory can have no larger leaf.
    let maps = [(GIB, 6 * GIB + 4096, 64 * MIB, Prot::RW)];
    let (image, _) = crate::tables::tests::images::image("vtd-ss", &maps);
    let found = survey(&Tables::of_image(parsed(&image)), Limits::default());
    assert_eq!(found.waste.mergeable_tables, 0);
}

#[test]
fn a_dump_says_what_the_image_says() {
    for name in FORMATS {
        let (bytes, told) = image(name, &sample(name));
        let (dump, offset) = dump_of(&bytes);
        let place = root(name, told.address, None, None, false).unwrap();
        assert_eq!(
            (place.levels, place.address),
            (told.levels, told.address),
            "{name}"
        );
        let (kept, as_dump) = (keep(&bytes), keep(&dump));
        let image = kept.open(None);
        let file = as_dump.open(Some(InDump {
            root: place,
            offset,
            encryption_bit: None,
        }));
        let one = survey(&image.tables().unwrap(), Limits::default());
        let mut other = survey(&file.tables().unwrap(), Limits::default());
        assert_eq!(other.waste.unlinked_tables, None);
        other.waste.unlinked_tables = Some(0);
        // Input bits of Arm and DART are configured otherwise by the image's own.
        other.root = one.root.clone();
        assert_eq!(one, other, "{name}");
        assert!(diff(&one, &other).is_same());
    }
}

/// A dump that ends in the middle of the tables, and words that were changed.
#[test]
fn what_is_wrong_is_found_with_its_place() {
    let maps = [
        (0, GIB, 4 << 10, Prot::RW),
        (4 << 10, 2 * GIB, 8 << 10, Prot::RW),
    ];
    let (bytes, told) = image("vtd-ss", &maps);
    let (dump, offset) = dump_of(&bytes);
    let tables = dump.len() / 4096;
    assert_eq!(tables, 4);
    let place = InDump {
        root: Root { ..told },
        offset,
        encryption_bit: None,
    };
    let words = |bytes: &[u8]| keep(bytes);
    let findings = |bytes: &[u8]| {
        let kept = words(bytes);
        let file = kept.open(Some(place));
        let found = survey(&file.tables().unwrap(), Limits::default());
        let kinds: Vec<_> = found
            .findings
            .iter()
            .map(|f| (f.kind, f.iova, f.level))
            .collect();
        (kinds, found)
    };
    assert_eq!(findings(&dump).0, []);

    // Which page of the dump is which table.
    let mut level_at = [0; 4];
    let kept = words(&dump);
    let file = kept.open(Some(place));
    let opened = file.tables().unwrap();
    let scan = opened.walker().scan(&opened, |entry| {
        level_at[((entry.table - offset) / 4096) as usize] = entry.level;
        ScanStep::Into
    });
    scan.unwrap();
    let page = |level: u8| 4096 * level_at.iter().position(|at| *at == level).unwrap();

    // Reserved bit 62 in the second page.
    let mut broken = dump.clone();
    broken[page(0) + 8 + 7] |= 0x40;
    let (kinds, found) = findings(&broken);
    assert_eq!(kinds, [(FindingKind::Faults, 4096, 0)]);
    assert_eq!(found.findings[0].severity, Severity::Wrong);
    assert!(
        found.findings[0].text.contains("0x4000000000000000"),
        "{found:?}"
    );
    assert_eq!(found.mapped_bytes, 8 << 10);

    // The lowest table is missing: what lies behind the dump's end.
    let mut hole = dump.clone();
    let away = (offset + (64 << 20)).to_le_bytes();
    hole[page(1)..page(1) + 8].copy_from_slice(&away);
    hole[page(1)] |= 3;
    let (kinds, found) = findings(&hole);
    assert_eq!(kinds, [(FindingKind::Faults, 0, 0)]);
    assert!(
        found.findings[0].text.contains("cannot be read"),
        "{found:?}"
    );

    // A second link to the lowest table.
    let mut shared = dump.clone();
    let link: [u8; 8] = shared[page(1)..page(1) + 8].try_into().unwrap();
    shared[page(1) + 16..page(1) + 24].copy_from_slice(&link);
    let (kinds, found) = findings(&shared);
    assert_eq!(kinds, [(FindingKind::Shared, 4 * MIB, 1)]);
    assert_eq!(found.mapped_bytes, 12 << 10, "it is not read again");

    // The root leads to itself: once for each level.
    let mut loops = vec![0; 4096];
    loops[..8].copy_from_slice(&(offset | 3).to_le_bytes());
    let kept = words(&loops);
    let root = Root {
        address: offset,
        ..told
    };
    let file = kept.open(Some(InDump { root, ..place }));
    let found = survey(&file.tables().unwrap(), Limits::default());
    assert_eq!(
        found.levels.iter().map(|level| level.tables).sum::<u64>(),
        4
    );
    assert_eq!(found.leaves[0].count, 1, "the root is its own page at last");

    // An empty table is a note.
    let mut empty = dump;
    empty[page(0)..page(0) + 4096].fill(0);
    let (kinds, found) = findings(&empty);
    assert_eq!(kinds, [(FindingKind::Empty, 0, 1)]);
    assert_eq!(found.findings[0].severity, Severity::Note);
    assert_eq!(
        (found.waste.empty_tables, found.waste.empty_bytes),
        (1, 4096)
    );
}

#[test]
fn a_group_of_which_a_part_is_missing_is_found() {
    // 64 KiB of AMD v1 are sixteen entries.
    let maps = [(64 << 10, GIB, 64 << 10, Prot::RW)];
    let (bytes, told) = image("amdv1", &maps);
    let (mut dump, offset) = dump_of(&bytes);
    let place = InDump {
        root: told,
        offset,
        encryption_bit: None,
    };
    let mut last = 0;
    let kept = keep(&dump);
    let file = kept.open(Some(place));
    let tables = file.tables().unwrap();
    let scan = tables.walker().scan(&tables, |entry| {
        if matches!(entry.says, Ok(Says::Leaf(_))) {
            last = (entry.table - offset) as usize + 8 * entry.index as usize;
        }
        ScanStep::Into
    });
    scan.unwrap();
    let whole = survey(&tables, Limits::default());
    assert_eq!(
        whole.leaves,
        [LeafReport {
            page_bytes: 64 << 10,
            count: 1,
            bytes: 64 << 10
        }]
    );
    dump[last..last + 8].fill(0);
    let kept = keep(&dump);
    let file = kept.open(Some(place));
    let found = survey(&file.tables().unwrap(), Limits::default());
    assert_eq!(found.findings[0].kind, FindingKind::Group);
    assert_eq!(found.mapped_bytes, 60 << 10);
}

#[test]
fn differences_are_those_that_were_made() {
    let before = [(0, GIB, 8 * MIB, Prot::RW), (GIB, 3 * GIB, MIB, Prot::RW)];
    let after = [
        (0, GIB, 2 * MIB, Prot::RW),
        (2 * MIB, GIB + 2 * MIB, 2 * MIB, Prot::READ),
        (4 * MIB, 5 * GIB, MIB, Prot::RW),
        (GIB, 3 * GIB, MIB, Prot::RW),
        (2 * GIB, 3 * GIB, MIB, Prot::RW),
    ];
    let of = |maps| {
        let (bytes, _) = image("x86-64", maps);
        survey(&Tables::of_image(parsed(&bytes)), Limits::default())
    };
    let found = diff(&of(&before), &of(&after));
    let reached = |(pa, prot): (u64, &str)| Reached {
        pa,
        prot: prot.into(),
    };
    let change = |iova, bytes, before: Option<(u64, &str)>, after: Option<(u64, &str)>| Change {
        iova,
        bytes,
        before: before.map(reached),
        after: after.map(reached),
    };
    assert_eq!(
        found.changes,
        [
            change(
                2 * MIB,
                2 * MIB,
                Some((GIB + 2 * MIB, "rw-")),
                Some((GIB + 2 * MIB, "r--"))
            ),
            change(
                4 * MIB,
                MIB,
                Some((GIB + 4 * MIB, "rw-")),
                Some((5 * GIB, "rw-"))
            ),
            change(5 * MIB, 3 * MIB, Some((GIB + 5 * MIB, "rw-")), None),
            change(2 * GIB, MIB, None, Some((3 * GIB, "rw-"))),
        ]
    );
    assert_eq!(found.same_bytes, 3 * MIB);
    assert_eq!(
        (found.removed_bytes, found.added_bytes, found.changed_bytes),
        (3 * MIB, MIB, 3 * MIB)
    );
    let other_leaves = diff(&of(&before), &{
        let (bytes, _) = image_with("vtd-ss", 4096, &before);
        survey(&Tables::of_image(parsed(&bytes)), Limits::default())
    });
    assert!(other_leaves.is_same(), "sizes of leaves are no difference");
}

#[test]
fn limits_are_kept_and_said() {
    let maps: Vec<_> = (0..64)
        .map(|n| (n * 4 * MIB, GIB + n * 8192, 4096, Prot::RW))
        .collect();
    let (bytes, _) = image("vtd-ss", &maps);
    let tables = Tables::of_image(parsed(&bytes));
    let limits = Limits {
        tables: 10,
        runs: 3,
        findings: 1,
        lines: 2,
    };
    let found = survey(&tables, limits);
    assert!(!found.complete);
    assert_eq!((found.runs.len(), found.run_count), (3, 8));
    assert_eq!(found.tree.len(), 2);
    assert!(!diff(&found, &found).is_same(), "not all is known");
    let all = survey(
        &tables,
        Limits {
            tables: 1000,
            ..limits
        },
    );
    assert!(all.complete && all.run_count == 64);
}

#[test]
fn files_that_are_not_what_they_were_said_to_be_are_refused() {
    let (bytes, told) = image("vtd-ss", &[(0, GIB, 4096, Prot::RW)]);
    let place = |address, offset| {
        Some(InDump {
            root: Root { address, ..told },
            offset,
            encryption_bit: None,
        })
    };
    let refusal = |bytes: &[u8], place| {
        let kept = keep(bytes);
        match TableFile::open(&kept.path, place) {
            Err(error) => crate::output::sentence(&error),
            Ok(file) => crate::output::sentence(&file.tables().map(|_| ()).unwrap_err()),
        }
    };
    assert!(refusal(b"", None).contains("no image of tables"));
    assert!(refusal(&bytes, place(0, 0)).contains("is an image"));
    assert!(refusal(&bytes[..bytes.len() - 1], None).contains("bytes, of which"));
    let mut damaged = bytes.clone();
    damaged[100] ^= 1;
    assert!(refusal(&damaged, None).contains("checksum"));
    assert!(refusal(&[0; 64], place(0x1008, 0)).contains("not an aligned address"));
    assert!(refusal(&[0; 64], place(0x1000, 0)).contains("not the root at 0x1000"));
    assert!(refusal(&[0; 64], place(0x1000, 0x2000)).contains("from 0x2000 on"));
    let missing = TableFile::open("/nowhere/at/all".as_ref(), None).unwrap_err();
    assert_eq!(missing.to_string(), "cannot read /nowhere/at/all");
}
