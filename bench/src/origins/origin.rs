//! Figures of the origins: the five public documents that the project grew out of.

use super::report::{Group, Unit};

/// A figure that was published, before and after the change that its document describes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Published {
    /// The group that measures the same here.
    pub group: Group,
    /// The operation.
    pub op: &'static str,
    /// The kind of memory; empty where it is not said.
    pub memory: &'static str,
    /// The format; empty where it stands for all.
    pub format: &'static str,
    /// Threads.
    pub threads: u32,
    /// Bytes of one operation; 0 where those measured here may be others.
    pub size_bytes: u64,
    /// The unit.
    pub unit: Unit,
    /// Before.
    pub before: Option<f64>,
    /// After.
    pub after: Option<f64>,
}

/// The machine on which an origin's figures were taken, as far as it is known.
pub const fn machine(group: Group) -> &'static str {
    match group {
        Group::Pin => "VFIO type 1, DMA mapping of 8 GiB in pages of 2 MiB (2025)",
        Group::Map => "SMMUv3, a map benchmark in Linux (2021)",
        Group::Balloon => "a guest of 8 GiB under QEMU, inflated to 7 GiB (2016)",
        Group::Tables => "i7-12700, gcc 13.3, in the kernel, averages (2025)",
        Group::Numa => "NCCL allreduce, two sockets, four NICs and four GPUs each (2023)",
    }
}

/// The published figures of a group.
pub fn published(group: Group) -> Vec<Published> {
    match group {
        Group::Pin => pin(),
        Group::Map => map(),
        Group::Balloon => balloon(),
        Group::Tables => tables(),
        Group::Numa => numa(),
    }
}

/// One that holds for any memory, format and size.
const fn any(group: Group, op: &'static str, unit: Unit) -> Published {
    Published {
        group,
        op,
        memory: "",
        format: "",
        threads: 1,
        size_bytes: 0,
        unit,
        before: None,
        after: None,
    }
}

fn pin() -> Vec<Published> {
    vec![Published {
        memory: "hugetlb-2m",
        before: Some(33.8),
        after: Some(15.6),
        ..any(Group::Pin, "map for DMA", Unit::Milliseconds)
    }]
}

/// Times by size from 4K on: map before and after, unmap before and after, of one thread and of ten, µs.
const MAP: [[f64; 8]; 11] = [
    [0.1, 0.1, 1.3, 0.8, 0.3, 0.1, 7.0, 5.8],
    [0.2, 0.2, 1.5, 0.9, 0.4, 0.3, 6.7, 6.0],
    [0.3, 0.1, 1.9, 1.1, 0.5, 0.3, 6.3, 5.6],
    [0.5, 0.2, 2.7, 1.4, 0.5, 0.2, 8.3, 6.3],
    [1.0, 0.2, 4.5, 2.0, 1.0, 0.3, 17.3, 12.4],
    [1.8, 0.2, 7.9, 3.3, 1.8, 0.3, 36.0, 24.2],
    [3.7, 0.4, 14.8, 6.1, 4.3, 1.2, 67.2, 46.4],
    [7.1, 0.5, 14.7, 10.4, 7.8, 1.3, 93.7, 94.2],
    [14.0, 0.8, 53.9, 19.3, 14.7, 1.8, 280.8, 191.5],
    [0.2, 0.2, 0.9, 0.9, 3.6, 1.5, 3.2, 2.5],
    [0.5, 0.4, 1.5, 1.0, 2.0, 1.8, 3.1, 2.6],
];

fn map() -> Vec<Published> {
    let mut all = Vec::new();
    for (line, size) in MAP.iter().zip(super::map::SIZES) {
        let [
            map_1,
            map_1_after,
            unmap_1,
            unmap_1_after,
            map_10,
            map_10_after,
            unmap_10,
            unmap_10_after,
        ] = *line;
        for (op, threads, before, after) in [
            ("map", 1, map_1, map_1_after),
            ("unmap, strict", 1, unmap_1, unmap_1_after),
            ("map", 10, map_10, map_10_after),
            ("unmap, strict", 10, unmap_10, unmap_10_after),
        ] {
            all.push(Published {
                threads,
                size_bytes: size,
                before: Some(before),
                after: Some(after),
                ..any(Group::Map, op, Unit::Microseconds)
            });
        }
    }
    all
}

/// Every second page of 4 KiB goes into the balloon, which the origin has not measured.
pub(super) const SCATTERED: &str = "4k-scattered";

fn balloon() -> Vec<Published> {
    let of = |op, before, after| Published {
        before: Some(before),
        after,
        ..any(Group::Balloon, op, Unit::Milliseconds)
    };
    // Parts of the whole, as the document gives them.
    let all = 4126.0;
    vec![
        of("allocate", all * 0.065, None),
        of("send", all * 0.683, None),
        of("translate", all * 0.061, None),
        of("discard", all * 0.19, None),
        of("inflate", all, Some(590.0)),
    ]
}

/// Times by format: map 1 × 4K, map 256 × 4K, map 256 × 2M, unmap the same; after and before, ns.
const TABLES: [(&str, [(f64, f64); 6]); 4] = [
    (
        "amdv1",
        [
            (53.0, 66.0),
            (386.0, 1909.0),
            (362.0, 1633.0),
            (69.0, 88.0),
            (353.0, 6498.0),
            (373.0, 6014.0),
        ],
    ),
    (
        "x86-64",
        [
            (56.0, 62.0),
            (405.0, 1355.0),
            (393.0, 1160.0),
            (71.0, 72.0),
            (228.0, 891.0),
            (254.0, 721.0),
        ],
    ),
    (
        "vtd-ss",
        [
            (55.0, 65.0),
            (391.0, 518.0),
            (383.0, 635.0),
            (69.0, 87.0),
            (210.0, 321.0),
            (255.0, 349.0),
        ],
    ),
    (
        "arm-s1-4k",
        [
            (57.0, 65.0),
            (380.0, 389.0),
            (358.0, 419.0),
            (72.0, 77.0),
            (521.0, 357.0),
            (489.0, 358.0),
        ],
    ),
];

fn tables() -> Vec<Published> {
    let ops = [
        "map 1 page",
        "map 256 pages",
        "map 256 blocks",
        "unmap 1 page",
        "unmap 256 pages",
        "unmap 256 blocks",
    ];
    let of = |(format, figures): (&'static str, [(f64, f64); 6])| {
        ops.into_iter()
            .zip(figures)
            .map(move |(op, (after, before))| Published {
                format,
                before: Some(before),
                after: Some(after),
                ..any(Group::Tables, op, Unit::Nanoseconds)
            })
    };
    TABLES.into_iter().flat_map(of).collect()
}

fn numa() -> Vec<Published> {
    let of = |(op, before, after)| Published {
        before: Some(before),
        after: Some(after),
        ..any(Group::Numa, op, Unit::GigabytesPerSecond)
    };
    let [first, second, both] = super::numa::CASES;
    vec![
        of((first, 24.0, 32.0)),
        of((second, 32.0, 32.0)),
        of((both, 45.0, 63.0)),
    ]
}
