//! RISC-V's entries: Privileged Architecture, "Sv39", "Svnapot", "Svpbmt", "Virtual Address Translation
//! Process"; "Guest Physical Address Translation" for the second stage.

use super::{Bits, Kind, Layout, What, bits, flag, ignored, reserved};

const PBMT: &[&str] = &["as the memory is", "not cached", "I/O"];

pub(super) fn layout(second: bool, level: u8, kind: Kind, word: u64) -> Layout {
    let source = "RISC-V Privileged, \"Sv39\", \"Svnapot\", \"Svpbmt\"";
    let mut fields: Vec<Bits> = vec![flag(0, "V", "not present", "present")];
    if kind == Kind::Absent {
        fields.push(ignored(63, 1));
        return Layout { fields, source };
    }
    let leaf = match kind {
        Kind::Leaf => true,
        Kind::Table => false,
        Kind::Absent | Kind::Unknown => word & 0xa != 0,
    };
    if !leaf {
        fields.extend([
            flag(1, "R", "a table", "may be read"),
            if word & 4 == 0 {
                flag(2, "W", "a table", "may be written")
            } else {
                // Writable and not readable is a reserved encoding.
                reserved(2, 2)
            },
            flag(3, "X", "a table", "may be executed"),
            reserved(4, 4),
            bits(5, 5, "G", What::Ignored("global")),
            reserved(7, 6),
            bits(9, 8, "RSW", What::Ignored("software's")),
            ppn(53, 10),
            reserved(63, 54),
        ]);
        return Layout { fields, source };
    }
    let napot = word >> 63 == 1 && level == 0;
    fields.push(flag(1, "R", "reading is not allowed", "reading is allowed"));
    fields.push(if word & 6 == 4 {
        reserved(2, 2)
    } else {
        flag(2, "W", "writing is not allowed", "writing is allowed")
    });
    fields.extend([
        flag(3, "X", "may not be executed", "may be executed"),
        match second {
            true => flag(4, "U", "no request", "all requests"),
            false => flag(4, "U", "privileged requests only", "all requests"),
        },
        bits(5, 5, "G", What::Ignored("global")),
        flag(6, "A", "not accessed", "accessed"),
        flag(7, "D", "not written to", "written to"),
        bits(9, 8, "RSW", What::Ignored("software's")),
    ]);
    let low = 10 + 9 * level.min(4);
    if napot {
        fields.push(bits(
            13,
            10,
            "size",
            What::Number("(8: 64 KiB, the only one there is)"),
        ));
        fields.push(ppn(53, 14));
    } else {
        if low > 10 {
            fields.push(reserved(low - 1, 10));
        }
        fields.push(ppn(53, low));
    }
    fields.push(reserved(60, 54));
    fields.push(bits(62, 61, "PBMT", What::Code(PBMT)));
    fields.push(if level == 0 {
        flag(63, "N", "a page of its own", "one of sixteen")
    } else {
        reserved(63, 63)
    });
    Layout { fields, source }
}

/// A part of the page number: bit 10 stands for bit 12 of the address.
const fn ppn(high: u8, low: u8) -> Bits {
    bits(high, low, "PPN", What::Address(low + 2))
}
