//! Intel's and x86-64's entries.
//!
//! VT-d (D51397), revision 5.0: section 9.8 "Second-Stage Paging Entries", 9.7 "First-Stage Paging
//! Entries"; AMD64 APM volume 2 (24593), section 5.3; AMD-Vi (48882), section 2.2.4.

use super::{Bits, Kind, Layout, What, address, bits, flag, ignored, reserved};

/// Returns true if an entry is a page: at the lowest level always, in the two above by PS.
const fn is_leaf(level: u8, kind: Kind, word: u64) -> bool {
    match kind {
        Kind::Leaf => true,
        Kind::Table => false,
        Kind::Absent | Kind::Unknown => level == 0 || (level <= 2 && word & 0x80 != 0),
    }
}

/// The lowest bit of a page's address at a level.
const fn page_low(level: u8) -> u8 {
    // Not asked for levels that have no pages; the result stays within an entry.
    let level = if level < 4 { level } else { 4 };
    12 + 9 * level
}

pub(super) fn second_stage(level: u8, kind: Kind, word: u64) -> Layout {
    let source = "VT-d 5.0, 9.8 and 3.7";
    let mut fields: Vec<Bits> = vec![
        flag(0, "R", "reading is not allowed", "reading is allowed"),
        flag(1, "W", "writing is not allowed", "writing is allowed"),
    ];
    if kind == Kind::Absent {
        // Not present while R and W are 0.
        fields.push(ignored(63, 2));
        return Layout { fields, source };
    }
    fields.push(bits(
        2,
        2,
        "X",
        What::Ignored("instruction fetches, where supported"),
    ));
    let leaf = is_leaf(level, kind, word);
    if leaf {
        fields.extend([
            bits(
                5,
                3,
                "EMT",
                What::Ignored("memory type, where the unit uses it"),
            ),
            bits(
                6,
                6,
                "IPAT",
                What::Ignored("memory type, where the unit uses it"),
            ),
            match level {
                0 => ignored(7, 7),
                _ => flag(7, "PS", "a table", "a page"),
            },
            flag(8, "A", "not accessed", "accessed"),
            flag(9, "D", "not written to", "written to"),
            ignored(10, 10),
            flag(11, "SNP", "snooped as the device asks", "always snooped"),
        ]);
        if level > 0 {
            fields.push(reserved(page_low(level) - 1, 12));
        }
        fields.push(address(51, page_low(level)));
    } else {
        fields.push(ignored(6, 3));
        fields.push(reserved(7, 7));
        fields.extend([
            flag(8, "A", "not accessed", "accessed"),
            ignored(10, 9),
            reserved(11, 11),
            address(51, 12),
        ]);
    }
    fields.extend([ignored(61, 52), reserved(62, 62), ignored(63, 63)]);
    Layout { fields, source }
}

pub(super) fn first_stage(level: u8, kind: Kind, word: u64) -> Layout {
    let source = "APM 2, 5.3 and 5.4; VT-d 5.0, 9.7";
    let mut fields: Vec<Bits> = vec![flag(0, "P", "not present", "present")];
    if kind == Kind::Absent {
        fields.push(ignored(63, 1));
        return Layout { fields, source };
    }
    let leaf = is_leaf(level, kind, word);
    fields.extend([
        flag(1, "R/W", "writing is not allowed", "writing is allowed"),
        flag(2, "U/S", "privileged requests only", "all requests"),
        bits(3, 3, "PWT", What::Ignored("memory type")),
        bits(4, 4, "PCD", What::Ignored("memory type")),
        flag(5, "A", "not accessed", "accessed"),
    ]);
    if leaf {
        fields.extend([
            flag(6, "D", "not written to", "written to"),
            match level {
                0 => bits(7, 7, "PAT", What::Ignored("memory type")),
                _ => flag(7, "PS", "a table", "a page"),
            },
            bits(8, 8, "G", What::Ignored("global")),
        ]);
    } else {
        fields.extend([ignored(6, 6), reserved(7, 7), ignored(8, 8)]);
    }
    fields.push(ignored(9, 9));
    fields.push(bits(
        10,
        10,
        "EA",
        What::Ignored("extended accessed (VT-d)"),
    ));
    fields.push(ignored(11, 11));
    if leaf && level > 0 {
        fields.push(bits(12, 12, "PAT", What::Ignored("memory type")));
        fields.push(reserved(page_low(level) - 1, 13));
        fields.push(address(51, page_low(level)));
    } else {
        fields.push(address(51, 12));
    }
    fields.push(ignored(62, 52));
    fields.push(flag(63, "NX", "may be executed", "may not be executed"));
    Layout { fields, source }
}
