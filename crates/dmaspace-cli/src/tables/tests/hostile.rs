//! Files of any bytes: whatever is in them, work and output are bounded and nothing panics.

use crate::tables::{FORMATS, InDump, Limits, TableFile, Tables, diff, explain, root, survey};
use iopt::Prot;
use proptest::prelude::*;

use crate::tables::tests::images::{dump_of, image, keep, parsed, sample};

const LIMITS: Limits = Limits {
    tables: 64,
    runs: 100,
    findings: 50,
    lines: 100,
};

fn look(tables: &Tables<'_>, iovas: &[u64]) {
    let found = survey(tables, LIMITS);
    let counted: u64 = found.levels.iter().map(|level| level.tables).sum();
    assert!(counted <= LIMITS.tables + 1, "{counted} tables");
    assert!(found.runs.len() <= LIMITS.runs && found.tree.len() <= LIMITS.lines);
    assert!(found.findings.len() <= LIMITS.findings + 1);
    assert!(found.finding_count >= found.findings.len() as u64);
    let leaves: u64 = found
        .leaves
        .iter()
        .map(|leaf| leaf.bytes)
        .fold(0, u64::saturating_add);
    assert_eq!(leaves, found.mapped_bytes);
    let _ = diff(&found, &found);
    for iova in iovas {
        let way = explain(tables, *iova);
        assert!(way.steps.len() <= usize::from(tables.root().levels));
        // A walk finds the runs that the survey lists.
        if let Some(run) = found
            .runs
            .iter()
            .find(|run| iova.wrapping_sub(run.iova) < run.bytes)
            && let crate::tables::Outcome::Translated { pa, .. } = way.read
        {
            assert_eq!(pa - run.pa, iova - run.iova);
        }
    }
}

/// Words that look like entries more often than chance has it.
fn word() -> impl Strategy<Value = u64> {
    prop_oneof![
        3 => Just(0u64),
        2 => any::<u64>(),
        // Present, allowed, and leading into the dump.
        4 => (0u64..64, any::<u64>()).prop_map(|(page, bits)| {
            page << 12 | bits & 0xe000_0000_0000_0fff | 3
        }),
        1 => (0u64..64, any::<u16>()).prop_map(|(page, bits)| page << 10 | u64::from(bits) | 1),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    #[test]
    fn any_dump_is_survived(
        format in 0..FORMATS.len(),
        words in prop::collection::vec(word(), 1..600),
        pages in 1usize..40,
        address in 0u64..40,
        cut in 0usize..4096,
        iovas in prop::collection::vec(any::<u64>(), 4),
        bits in prop::option::of(0u8..70),
        levels in prop::option::of(0u8..9),
        encryption in prop::option::of(0u32..80),
    ) {
        let place = root(FORMATS[format], address << 12, levels, bits, false);
        if let Ok(root) = place {
            let mut bytes: Vec<u8> = words.iter().cycle().take(pages * 512)
                .flat_map(|word| word.to_le_bytes()).collect();
            bytes.truncate(bytes.len() - cut);
            let kept = keep(&bytes);
            let place = InDump { root, offset: 0, encryption_bit: encryption };
            let file = kept.open(Some(place));
            if let Ok(tables) = file.tables() {
                look(&tables, &iovas);
                let near: Vec<u64> = iovas.iter().map(|iova| iova >> 30).collect();
                look(&tables, &near);
            }
        }
    }

    #[test]
    fn any_change_of_an_image_is_survived(
        format in 0..FORMATS.len(),
        changes in prop::collection::vec((any::<u32>(), any::<u8>()), 1..40),
        cut in prop::option::of(any::<u32>()),
    ) {
        let (mut bytes, told) = image(FORMATS[format], &sample(FORMATS[format]));
        let (mut dump, offset) = dump_of(&bytes);
        for (at, by) in changes {
            let len = bytes.len();
            bytes[at as usize % len] ^= by;
            let len = dump.len();
            dump[at as usize % len] ^= by;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut as usize % bytes.len());
        }
        // The checksum refuses it, mostly.
        let kept = keep(&bytes);
        if let Ok(file) = TableFile::open(&kept.path, None)
            && let Ok(tables) = file.tables()
        {
            look(&tables, &[0, 1 << 20]);
        }
        let kept = keep(&dump);
        let file = kept.open(Some(InDump { root: told, offset, encryption_bit: None }));
        if let Ok(tables) = file.tables() {
            let iovas: Vec<u64> = sample(FORMATS[format]).iter().map(|map| map.0).collect();
            look(&tables, &iovas);
        }
    }
}

/// The worst that a small dump can be: every entry of every table leads to the same table.
#[test]
fn tables_that_lead_to_themselves_are_read_once_for_each_level() {
    let mut bytes = Vec::new();
    for _ in 0..512 {
        bytes.extend_from_slice(&3u64.to_le_bytes());
    }
    let kept = keep(&bytes);
    let place = root("vtd-ss", 0, Some(5), None, false).unwrap();
    let file = kept.open(Some(InDump {
        root: place,
        offset: 0,
        encryption_bit: None,
    }));
    let found = survey(&file.tables().unwrap(), Limits::default());
    assert_eq!(
        found.levels.iter().map(|level| level.tables).sum::<u64>(),
        5
    );
    assert_eq!(found.finding_count, 4 * 511);
    assert_eq!(found.leaves.iter().map(|leaf| leaf.count).sum::<u64>(), 512);
}

#[test]
fn an_image_is_taken_as_it_is() {
    let (bytes, _) = image("amdv1", &[(0, 1 << 30, 4096, Prot::RW)]);
    look(&Tables::of_image(parsed(&bytes)), &[0, 4096]);
}
