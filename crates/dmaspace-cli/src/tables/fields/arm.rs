//! Arm's long descriptors: DDI 0487, D8.3 "Translation table descriptor formats", D8.4 (permissions),
//! D8.5 (AF, DBM), D8.7 (Contiguous).

use iopt::format::ArmGranule;

use super::{Bits, Kind, Layout, What, bits, flag, ignored};

const SOURCE: &str = "Arm DDI 0487, D8.3 to D8.7";

/// How a granule's entries hold addresses.
#[derive(Clone, Copy)]
struct Granule {
    page_log2: u8,
    wide: bool,
}

impl Granule {
    const fn of(granule: ArmGranule) -> Self {
        let (page_log2, wide) = match granule {
            ArmGranule::K4 => (12, false),
            ArmGranule::K4Lpa2 => (12, true),
            ArmGranule::K16 => (14, false),
            ArmGranule::K16Lpa2 => (14, true),
            ArmGranule::K64 => (16, false),
            ArmGranule::K64Lpa => (16, true),
        };
        Self { page_log2, wide }
    }

    /// Bits 51:50 of an address are in the place of SH (LPA2).
    const fn in_shareability(self) -> bool {
        self.wide && self.page_log2 < 16
    }

    const fn shift(self, level: u8) -> u8 {
        self.page_log2 + (self.page_log2 - 3) * level
    }

    /// Bits 50:11 or so: the address, and what lies around it.
    fn address(self, low: u8, below: &[Bits]) -> Vec<Bits> {
        let mut fields = Vec::new();
        // From bit 12 up to the address.
        if self.wide && self.page_log2 == 16 {
            fields.push(bits(15, 12, "address 51:48", What::Address(48)));
            if low > 16 {
                fields.extend(below.iter().filter(|bits| bits.low >= 16));
            }
        } else {
            fields.extend(below.iter().filter(|bits| bits.low < low));
        }
        let top = if self.in_shareability() { 49 } else { 47 };
        fields.push(bits(top, low, "address", What::Address(low)));
        if top == 47 {
            fields.push(ignored(49, 48));
        }
        fields
    }
}

/// From bit 12 up to `low`: RES0, but nT in blocks.
fn below(from: u8, low: u8, block: bool) -> Vec<Bits> {
    let mut fields = Vec::new();
    if low <= from {
        return fields;
    }
    if !block || low <= 16 {
        fields.push(ignored(low - 1, from));
        return fields;
    }
    if from < 16 {
        fields.push(ignored(15, from));
    }
    fields.push(bits(
        16,
        16,
        "nT",
        What::Ignored("marked while sizes change"),
    ));
    if low > 17 {
        fields.push(ignored(low - 1, 17));
    }
    fields
}

fn kind_of(level: u8, kind: Kind, word: u64) -> Kind {
    match (kind, word & 3, level) {
        (Kind::Unknown, 3, 0) => Kind::Leaf,
        (Kind::Unknown, 3, _) => Kind::Table,
        (Kind::Unknown, 1, 1..) => Kind::Leaf,
        (Kind::Unknown, ..) => Kind::Absent,
        (kind, ..) => kind,
    }
}

fn start(level: u8, kind: Kind, word: u64) -> Vec<Bits> {
    let valid = flag(0, "valid", "not present", "present");
    if kind == Kind::Absent {
        let shape = if word & 1 == 0 {
            ignored(1, 1)
        } else if level == 0 {
            flag(1, "type", "a reserved encoding: not present", "a page")
        } else {
            flag(1, "type", "a block, which this level has not", "a table")
        };
        return vec![valid, shape, ignored(63, 2)];
    }
    let shape = if level == 0 {
        flag(1, "type", "a reserved encoding: not present", "a page")
    } else {
        flag(1, "type", "a block", "a table")
    };
    vec![valid, shape]
}

/// A table's address, from bit 12 to bit 50.
fn table_address(granule: Granule) -> Vec<Bits> {
    let from = if granule.wide && granule.page_log2 == 16 {
        16
    } else {
        12
    };
    granule.address(granule.page_log2, &below(from, granule.page_log2, false))
}

/// A leaf's address.
fn leaf_address(granule: Granule, level: u8) -> Vec<Bits> {
    let low = granule.shift(level.min(3)).min(47);
    let from = if granule.wide && granule.page_log2 == 16 {
        16
    } else {
        12
    };
    granule.address(low, &below(from, low, level > 0))
}

/// Bits 9:8.
const fn shareability(granule: Granule) -> Bits {
    if granule.in_shareability() {
        bits(9, 8, "address 51:50", What::Address(50))
    } else {
        bits(9, 8, "SH", What::Ignored("shareability"))
    }
}

/// Bits 9:8 of a table's entry.
const fn table_low(granule: Granule) -> Bits {
    if granule.in_shareability() {
        bits(9, 8, "address 51:50", What::Address(50))
    } else {
        ignored(9, 8)
    }
}

/// An entry of either stage: `table` are bits 63:50 where it leads to a table, `leaf` tells the fields
/// of a page or block.
fn layout(
    granule: ArmGranule,
    level: u8,
    kind: Kind,
    word: u64,
    table: &[Bits],
    leaf: impl FnOnce(Granule, &mut Vec<Bits>),
) -> Layout {
    let granule = Granule::of(granule);
    let kind = kind_of(level, kind, word);
    let mut fields = start(level, kind, word);
    match kind {
        Kind::Absent => {}
        Kind::Table => {
            fields.extend([ignored(7, 2), table_low(granule), ignored(11, 10)]);
            fields.extend(table_address(granule));
            fields.extend(table);
        }
        _ => leaf(granule, &mut fields),
    }
    Layout {
        fields,
        source: SOURCE,
    }
}

/// Bits 63:50 of stage 1's entries that lead to a table.
const TABLE_ATTRIBUTES: [Bits; 6] = [
    ignored(58, 50),
    flag(
        59,
        "PXNTable",
        "no limit below",
        "not executable for privileged requests below",
    ),
    flag(60, "UXNTable", "no limit below", "not executable below"),
    flag(
        61,
        "APTable[0]",
        "no limit below",
        "privileged requests only below",
    ),
    flag(62, "APTable[1]", "no limit below", "no writing below"),
    bits(63, 63, "NSTable", What::Ignored("security")),
];

pub(super) fn stage1(granule: ArmGranule, level: u8, kind: Kind, word: u64) -> Layout {
    layout(
        granule,
        level,
        kind,
        word,
        &TABLE_ATTRIBUTES,
        |granule, fields| {
            fields.extend([
                bits(
                    4,
                    2,
                    "AttrIndx",
                    What::Ignored("memory type: an index into MAIR"),
                ),
                bits(5, 5, "NS", What::Ignored("security")),
                flag(6, "AP[1]", "privileged requests only", "all requests"),
                flag(
                    7,
                    "AP[2]",
                    "writing is allowed",
                    "writing is not allowed, or clean with DBM",
                ),
                shareability(granule),
                flag(
                    10,
                    "AF",
                    "not accessed: the unit sets it, or faults",
                    "accessed",
                ),
                bits(11, 11, "nG", What::Ignored("global")),
            ]);
            fields.extend(leaf_address(granule, level));
            fields.extend([
                bits(50, 50, "GP", What::Ignored("guarded")),
                flag(
                    51,
                    "DBM",
                    "AP[2] is a permission",
                    "AP[2] is the dirty state",
                ),
                flag(
                    52,
                    "Contiguous",
                    "a leaf of its own",
                    "one of a contiguous group",
                ),
                flag(53, "PXN", "may be executed", "not by privileged requests"),
                flag(54, "UXN", "may be executed", "may not be executed"),
                bits(58, 55, "software", What::Ignored("software's")),
                ignored(63, 59),
            ]);
        },
    )
}

pub(super) fn stage2(granule: ArmGranule, level: u8, kind: Kind, word: u64) -> Layout {
    layout(
        granule,
        level,
        kind,
        word,
        &[ignored(63, 50)],
        |granule, fields| {
            fields.extend([
                bits(5, 2, "MemAttr", What::Ignored("memory type")),
                flag(6, "S2AP[0]", "reading is not allowed", "reading is allowed"),
                flag(
                    7,
                    "S2AP[1]",
                    "writing is not allowed, or clean with DBM",
                    "writing is allowed",
                ),
                shareability(granule),
                flag(
                    10,
                    "AF",
                    "not accessed: the unit sets it, or faults",
                    "accessed",
                ),
                bits(11, 11, "FnXS", What::Ignored("of invalidations")),
            ]);
            fields.extend(leaf_address(granule, level));
            fields.extend([
                ignored(50, 50),
                flag(
                    51,
                    "DBM",
                    "S2AP[1] is a permission",
                    "S2AP[1] is the dirty state",
                ),
                flag(
                    52,
                    "Contiguous",
                    "a leaf of its own",
                    "one of a contiguous group",
                ),
                bits(
                    54,
                    53,
                    "XN",
                    What::Code(&[
                        "may be executed",
                        "not by privileged requests",
                        "may not be executed",
                        "by privileged requests only",
                    ]),
                ),
                bits(58, 55, "software", What::Ignored("software's")),
                ignored(63, 59),
            ]);
        },
    )
}
