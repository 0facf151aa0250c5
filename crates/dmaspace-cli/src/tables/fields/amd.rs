//! AMD's host entries: 48882 revision 3.08, section 2.2.3 "I/O Page Tables for Host Translations".

use super::{Bits, Kind, Layout, What, address, bits, flag, ignored, reserved};

/// Meanings of the Next Level field.
const NEXT: &[&str] = &[
    "a page of the level's size",
    "a table of level 1 (0 here)",
    "a table of level 2 (1 here)",
    "a table of level 3 (2 here)",
    "a table of level 4 (3 here)",
    "a table of level 5 (4 here)",
    "a table of level 6 (5 here)",
    "a page whose size is in its address",
];

pub(super) fn layout(level: u8, kind: Kind, word: u64) -> Layout {
    let source = "AMD 48882 3.08, 2.2.3";
    let mut fields: Vec<Bits> = vec![flag(0, "PR", "not present", "present")];
    if kind == Kind::Absent {
        fields.push(ignored(63, 1));
        return Layout { fields, source };
    }
    let next = word >> 9 & 7;
    let leaf = match kind {
        Kind::Leaf => true,
        Kind::Table => false,
        Kind::Absent | Kind::Unknown => matches!(next, 0 | 7),
    };
    fields.push(ignored(4, 1));
    fields.push(flag(5, "A", "not accessed", "accessed"));
    fields.push(if leaf {
        flag(6, "D", "not written to", "written to")
    } else {
        ignored(6, 6)
    });
    fields.push(ignored(8, 7));
    fields.push(bits(11, 9, "Next Level", What::Code(NEXT)));
    if leaf && next == 0 && level > 0 {
        let low = 12 + 9 * level.min(4);
        fields.push(ignored(low - 1, 12));
        fields.push(address(51, low));
    } else if leaf && next == 7 {
        // The size ends at the lowest bit that is 0.
        let zero = (12..51).find(|bit| word >> bit & 1 == 0).unwrap_or(50);
        fields.push(bits(zero, 12, "size", What::Number("(ones, ended by a 0)")));
        fields.push(address(51, zero + 1));
    } else {
        fields.push(address(51, 12));
    }
    if leaf {
        fields.push(reserved(58, 52));
        fields.push(bits(59, 59, "U", What::Ignored("untranslated requests")));
        fields.push(flag(60, "FC", "as the device asks", "always coherent"));
    } else {
        fields.push(reserved(60, 52));
    }
    fields.push(flag(
        61,
        "IR",
        "reading is not allowed",
        "reading is allowed",
    ));
    fields.push(flag(
        62,
        "IW",
        "writing is not allowed",
        "writing is allowed",
    ));
    fields.push(ignored(63, 63));
    Layout { fields, source }
}
