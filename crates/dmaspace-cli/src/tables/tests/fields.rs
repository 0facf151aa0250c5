//! Fields beside the walker: two texts from one specification, which must not disagree.

use std::collections::{BTreeMap, BTreeSet};

use crate::tables::fields::{Field, Kind, fields};
use crate::tables::{FORMATS, Tables, root};
use iopt::walk::{Access, BadAddress, Says, ScanStep, WalkMemory, WalkReason, Walker};

use crate::tables::tests::images::{each_format, parsed};

/// Tables with one word changed.
struct Changed<'a> {
    tables: &'a Tables<'a>,
    address: u64,
    word: u64,
}

impl WalkMemory for Changed<'_> {
    fn read_u64(&self, address: u64) -> Result<u64, BadAddress> {
        if address == self.address {
            return Ok(self.word);
        }
        self.tables.read_u64(address)
    }
    fn read_u32(&self, address: u64) -> Result<u32, BadAddress> {
        if address == self.address {
            return Ok(self.word as u32);
        }
        self.tables.read_u32(address)
    }
}

fn at(fields: &[Field], bit: u8) -> &Field {
    let mut found = fields
        .iter()
        .filter(|field| (field.low..=field.high).contains(&bit));
    found.next().unwrap()
}

/// Every bit of an entry is in exactly one field, whatever the entry.
#[test]
fn fields_cover_every_bit_once() {
    let mut random = fastrand::Rng::with_seed(1);
    for name in FORMATS {
        let root = root(name, 0, None, None, false).unwrap();
        let format = root.format;
        let width = 8 * Walker::new(root).entry_bytes().unwrap() as u32;
        for round in 0..2000u32 {
            // Few bits, many bits.
            let word = match round % 4 {
                0 => 0,
                1 => 1 << random.u32(..64),
                2 => random.u64(..),
                _ => !(1 << random.u32(..64)),
            } & (u64::MAX >> (64 - width));
            let level = (round / 4 % 6) as u8;
            for kind in [Kind::Table, Kind::Leaf, Kind::Absent, Kind::Unknown] {
                let mut next = 0;
                for field in fields(format, level, kind, word) {
                    let what = format!("{name} {word:#x} at level {level} as {kind:?}: {field:?}");
                    assert_eq!(u32::from(field.low), next, "{what}");
                    assert!(
                        field.high >= field.low && !field.meaning.is_empty(),
                        "{what}"
                    );
                    next = u32::from(field.high) + 1;
                }
                assert_eq!(next, width, "{name} {word:#x} at level {level} as {kind:?}");
            }
        }
    }
}

/// Bits of ignored fields can be flipped without an effect; bits of reserved ones cannot.
#[test]
fn fields_say_what_the_walker_does() {
    let mut met: BTreeMap<String, BTreeSet<(u8, bool)>> = BTreeMap::new();
    each_format(|name, image, root| {
        let tables = Tables::of_image(parsed(image));
        let walker = Walker::new(root);
        let entry_bytes = walker.entry_bytes().unwrap();
        let mut entries = Vec::new();
        let scan = walker.scan(&tables, |entry| {
            let leaf = matches!(entry.says, Ok(Says::Leaf(_)));
            // A few of each kind.
            if entries
                .iter()
                .filter(|(l, e)| (*l, e_level(e)) == (leaf, entry.level))
                .count()
                < 3
            {
                entries.push((leaf, *entry));
            }
            ScanStep::Into
        });
        scan.unwrap();
        for (leaf, entry) in entries {
            met.entry(name.into())
                .or_default()
                .insert((entry.level, leaf));
            let kind = if leaf { Kind::Leaf } else { Kind::Table };
            let said = fields(root.format, entry.level, kind, entry.word);
            // The fields are the same if the kind of the entry is not known.
            assert_eq!(
                said,
                fields(root.format, entry.level, Kind::Unknown, entry.word),
                "{name} {entry:?}"
            );
            assert!(said.iter().all(|field| !field.wrong), "{said:?}");
            let address = entry.table + u64::from(entry.index) * entry_bytes;
            // Somewhere that a leaf maps.
            let mut iova = entry.iova;
            if !leaf {
                let mut below = None;
                let found = walker.scan(&tables, |other| {
                    if other.iova >= entry.iova && matches!(other.says, Ok(Says::Leaf(_))) {
                        below.get_or_insert(other.iova);
                    }
                    ScanStep::Into
                });
                found.unwrap();
                iova = below.unwrap();
            }
            let walk = |word| {
                let changed = Changed {
                    tables: &tables,
                    address,
                    word,
                };
                walker.walk(&changed, iova, Access::Read, &mut ())
            };
            let before = walk(entry.word).unwrap();
            for bit in 0..(8 * entry_bytes) as u8 {
                let word = entry.word ^ 1 << bit;
                let field = at(&said, bit);
                let after = walk(word);
                let what = format!("{name}, bit {bit} of {entry:?}, {field:?}: {after:?}");
                match field.name {
                    _ if field.meaning.starts_with("must be 0") => {
                        let reason = after.unwrap_err().reason;
                        assert!(matches!(reason, WalkReason::Reserved { .. }), "{what}");
                    }
                    _ if is_ignored(field) => assert_eq!(after, Ok(before), "{what}"),
                    name if name.starts_with("address") || name == "PPN" => {
                        assert_ne!(after, Ok(before), "{what}");
                    }
                    _ => {}
                }
            }
        }
    });
    // Every level of every format was met, tables and leaves.
    for name in FORMATS {
        let root = root(name, 0, None, None, false).unwrap();
        let tables = met[name].iter().filter(|(_, leaf)| !leaf).count();
        assert_eq!(tables, usize::from(root.levels) - 1, "{name}");
        assert!(met[name].iter().any(|(_, leaf)| *leaf), "{name}");
    }
}

fn e_level(entry: &iopt::walk::Visited) -> u8 {
    entry.level
}

/// True if the layouts call a field ignored: the same text for every value.
fn is_ignored(field: &Field) -> bool {
    // RISC-V has another X.
    let another = field.name == "X" && field.source.starts_with("RISC-V");
    field.name == "ignored" || (IGNORED.contains(&field.name) && !another)
}

/// Names of fields by which a walk decides nothing.
const IGNORED: [&str; 25] = [
    "X", "EMT", "IPAT", "PWT", "PCD", "PAT", "G", "EA", "RSW", "AttrIndx", "NS", "nG", "GP",
    "software", "MemAttr", "FnXS", "SH", "nT", "NSTable", "Domain", "TEX", "B", "C", "S", "A",
];
