//! DART's entries. There is no public specification: what Asahi Linux has observed.

use iopt::format::{DartConfig, DartVersion};

use super::{Bits, Kind, Layout, What, address, bits, flag, ignored};

pub(super) fn layout(config: DartConfig, level: u8, kind: Kind) -> Layout {
    let source = "observed (Asahi Linux)";
    let mut fields: Vec<Bits> = vec![flag(0, "valid", "not present", "present")];
    if kind == Kind::Absent {
        fields.push(ignored(63, 1));
        return Layout { fields, source };
    }
    let first = config.version == DartVersion::V1;
    let page = config.page_log2;
    // Only the lowest level has pages.
    if kind == Kind::Table || (kind == Kind::Unknown && level > 0) {
        fields.extend(if first {
            [ignored(page - 1, 1), address(39, page)]
        } else {
            [
                ignored(page - 5, 1),
                bits(39, page - 4, "address", What::Address(page)),
            ]
        });
        fields.push(ignored(63, 40));
        return Layout { fields, source };
    }
    if first {
        fields.extend([
            flag(1, "SP_DIS", "a part of the page", "the whole page"),
            ignored(6, 2),
            flag(
                7,
                "NO_WRITE",
                "writing is allowed",
                "writing is not allowed",
            ),
            flag(8, "NO_READ", "reading is allowed", "reading is not allowed"),
            ignored(page - 1, 9),
            address(39, page),
        ]);
    } else {
        fields.extend([
            flag(1, "NOCACHE", "cached", "not cached"),
            flag(
                2,
                "NO_WRITE",
                "writing is allowed",
                "writing is not allowed",
            ),
            flag(3, "NO_READ", "reading is allowed", "reading is not allowed"),
            ignored(page - 5, 4),
            bits(39, page - 4, "address", What::Address(page)),
        ]);
    }
    let part = "(4096ths of the page)";
    fields.push(bits(51, 40, "end", What::Number(part)));
    fields.push(bits(63, 52, "start", What::Number(part)));
    Layout { fields, source }
}
