//! ARMv7's short descriptors: DDI 0406C, section B3.5.1.

use super::{Bits, Kind, Layout, What, address, bits, flag, ignored};

const AP: &[&str] = &[
    "not accessed; privileged requests only",
    "accessed; privileged requests only",
    "not accessed; all requests",
    "accessed; all requests",
];

fn c_and_b() -> [Bits; 2] {
    [
        bits(2, 2, "B", What::Ignored("memory type")),
        bits(3, 3, "C", What::Ignored("memory type")),
    ]
}

fn access(bit: u8) -> Bits {
    flag(bit, "AP[2]", "writing is allowed", "writing is not allowed")
}

pub(super) fn layout(level: u8, kind: Kind, word: u64) -> Layout {
    let source = "Arm DDI 0406C, B3.5.1 and B3.7";
    let mut fields: Vec<Bits> = Vec::new();
    match (word & 3, level) {
        _ if kind == Kind::Absent || word & 3 == 0 => {
            fields.push(bits(1, 0, "type", What::Code(&["not present"])));
            fields.push(ignored(31, 2));
        }
        (1, 1..) => fields.extend([
            bits(1, 0, "type", What::Code(&["", "a table"])),
            flag(2, "PXN", "may be executed", "not by privileged requests"),
            bits(3, 3, "NS", What::Ignored("security")),
            ignored(4, 4),
            bits(8, 5, "Domain", What::Ignored("ignored by an SMMU")),
            ignored(9, 9),
            address(31, 10),
        ]),
        (_, 1..) => {
            let large = word >> 18 & 1 == 1;
            fields.extend([
                flag(0, "PXN", "may be executed", "not by privileged requests"),
                flag(1, "type", "", "a section or supersection"),
            ]);
            fields.extend(c_and_b());
            fields.push(flag(4, "XN", "may be executed", "may not be executed"));
            fields.push(if large {
                bits(8, 5, "address 39:36", What::Address(36))
            } else {
                bits(8, 5, "Domain", What::Ignored("ignored by an SMMU"))
            });
            fields.extend([
                ignored(9, 9),
                bits(11, 10, "AP[1:0]", What::Code(AP)),
                bits(14, 12, "TEX", What::Ignored("memory type")),
                access(15),
                bits(16, 16, "S", What::Ignored("shareability")),
                bits(17, 17, "nG", What::Ignored("global")),
                flag(18, "size", "a section, 1 MiB", "a supersection, 16 MiB"),
                bits(19, 19, "NS", What::Ignored("security")),
            ]);
            fields.extend(if large {
                vec![
                    bits(23, 20, "address 35:32", What::Address(32)),
                    address(31, 24),
                ]
            } else {
                vec![address(31, 20)]
            });
        }
        (1, _) => {
            fields.push(bits(
                1,
                0,
                "type",
                What::Code(&["", "a large page, 64 KiB"]),
            ));
            fields.extend(c_and_b());
            fields.extend([
                bits(5, 4, "AP[1:0]", What::Code(AP)),
                ignored(8, 6),
                access(9),
                bits(10, 10, "S", What::Ignored("shareability")),
                bits(11, 11, "nG", What::Ignored("global")),
                bits(14, 12, "TEX", What::Ignored("memory type")),
                flag(15, "XN", "may be executed", "may not be executed"),
                address(31, 16),
            ]);
        }
        _ => {
            fields.push(flag(0, "XN", "may be executed", "may not be executed"));
            fields.push(flag(1, "type", "", "a small page, 4 KiB"));
            fields.extend(c_and_b());
            fields.extend([
                bits(5, 4, "AP[1:0]", What::Code(AP)),
                bits(8, 6, "TEX", What::Ignored("memory type")),
                access(9),
                bits(10, 10, "S", What::Ignored("shareability")),
                bits(11, 11, "nG", What::Ignored("global")),
                address(31, 12),
            ]);
        }
    }
    Layout { fields, source }
}
