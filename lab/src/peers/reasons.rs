//! Why rows miss their aims, and what was tried: shown beside them in the document.
//!
//! A reason stands here only after somebody has looked at the generated code or at counters. A row
//! without one is shown as missed all the same, and as not explained.

/// Row, format, reason. The format `*` stands for all; a reason for one format goes before.
pub const REASONS: &[(&str, &str, &str)] = &[
    (
        "map-1",
        "*",
        "half of the instructions are the way down (callgrind); the shared form enters and leaves besides. \
         Arm's formats compute more bits of a leaf",
    ),
    (
        "unmap-1",
        "*",
        "checks, the way down and the entry are one half, the gather is the other: the crates have neither \
         gather nor runs. The exclusive form looks at the neighbours, since it frees the table of the last \
         page",
    ),
    (
        "map-several",
        "*",
        "Arm's formats compute more bits of a leaf than others from the permissions, for each call",
    ),
    (
        "unmap-several",
        "*",
        "as for one page; every second page is unmapped, so the gather's ranges do not join and it \
         compares until it is full",
    ),
    (
        "unmap-many-discard",
        "arm-s1-16k",
        "no leaf table is read. Two thirds of the instructions (callgrind) look whether the two tables above, of 2,048 \
         entries each, are empty now and can be freed; Linux keeps them",
    ),
    (
        "unmap-many-discard",
        "arm-s1-64k",
        "as with 16K: the table above has 8,192 entries",
    ),
    (
        "unmap-many-discard",
        "*",
        "no leaf table is read. Each is put into the chain of the gather, by its metadata, and waits for the flush; \
         Linux's Arm code frees each as it goes",
    ),
    (
        "translate",
        "*",
        "42 instructions by callgrind for four levels (x86-64, exclusive): the number of levels is looked \
         at, and each level masks the table's address to the arena. The shared form must load with acquire, \
         which keeps the compiler from holding the arena's two words in registers, and enters",
    ),
    (
        "merge",
        "*",
        "3,900 instructions by callgrind (x86-64, exclusive), 2,050 of them to read the 512 entries twice: to find the \
         run, and for what hardware has noted after the flush, when units no longer write through the old table. It was \
         5,000 with a third reading for the new leaf and a second look for its size. The limit reads once, and has no \
         flush",
    ),
    (
        "split",
        "*",
        "2,409 instructions by callgrind (x86-64, exclusive), of which 900 fill the table; the rest is the \
         search for leaves that are too large, the reserve and the gather",
    ),
    (
        "map-256",
        "armv7s",
        "tables of 256 entries of 4 bytes: a range goes over two of them, and entries of 4 bytes have no \
         vectors",
    ),
    ("map-256-half", "armv7s", "as for empty tables"),
    ("unmap-256", "armv7s", "as for mapping"),
    (
        "unmap-256",
        "*",
        "the entries are compared with those of the run, all of them before the first is emptied, since a range with a \
         hole is refused whole. The limit goes over them once",
    ),
    ("unmap-256-half", "armv7s", "as for mapping"),
    (
        "unmap-256-half",
        "*",
        "as where nothing else is in the table",
    ),
    (
        "unmap-256-block",
        "armv7s",
        "entries of 4 bytes have no vectors",
    ),
    ("unmap-256-block", "*", "as for pages"),
    (
        "map-many",
        "*",
        "as long as the loop of stores beside it; the two forms, which do the same here, lie further apart \
         in one run than this is missed by",
    ),
    (
        "unmap-many-block",
        "armv7s",
        "entries of 4 bytes have no vectors",
    ),
    (
        "unmap-many-block",
        "*",
        "the entries are compared with those of the run before any table is unlinked; after that tables of leaves are \
         not read again. The exclusive form looks whether the rest of a table is empty",
    ),
    (
        "map-256-block",
        "armv7s",
        "entries of 4 bytes have no vectors",
    ),
    (
        "map-many-block",
        "armv7s",
        "entries of 4 bytes have no vectors",
    ),
    ("cycle", "armv7s", "entries of 4 bytes have no vectors"),
    (
        "map-chosen",
        "*",
        "where a format has other sizes between, 1 MiB is fewer or more entries than the loop stores, down to one: the \
         checks and the way down are most of it",
    ),
    (
        "unmap-chosen",
        "*",
        "as for mapping; the exclusive form looks whether the rest of the table is empty, which is 8,192 entries in \
         tables of 64K",
    ),
    (
        "harvest-clean",
        "*",
        "the lowest samples are those of the limit: tables of 2 MiB, in two sets, leave the caches between the \
         samples of others",
    ),
    (
        "unmap-dirty",
        "*",
        "each entry is taken by itself, by an exchange where hardware may still write to it, so that no dirty bit is \
         lost; the limit reads and clears by plain loads and stores. Arm keeps two bits, and compares once more",
    ),
    (
        "map-chosen",
        "x86-64",
        "no size lies between 4K and 2M: it is 256 × 4K in a half-full table",
    ),
    (
        "unmap-chosen",
        "x86-64",
        "no size lies between 4K and 2M: it is 256 × 4K, as above",
    ),
    (
        "map-chosen",
        "riscv",
        "1 MiB is 16 groups of 16 equal entries: each group is a row of its own",
    ),
    (
        "map-chosen",
        "riscv-g",
        "1 MiB is 16 groups of 16 equal entries: each group is a row of its own",
    ),
    (
        "unmap-chosen",
        "riscv",
        "1 MiB is 16 groups of 16 equal entries, each compared and cleared by itself: 1,450 instructions \
         by callgrind, 1,214 for as many single pages",
    ),
    ("unmap-chosen", "riscv-g", "as for the first stage"),
    (
        "harvest-clean",
        "arm-s1-4k",
        "an entry is seen to be clean by a bit that is 1 and another that is 0, so a row is read twice: for \
         what is set in any of its entries, and for what is set in each",
    ),
];

/// The reason for a row in a format.
pub fn reason(row: &str, format: &str) -> Option<&'static str> {
    find(REASONS, row, format)
}

fn find<'a>(all: &[(&str, &str, &'a str)], row: &str, format: &str) -> Option<&'a str> {
    let of = |wanted: &str| {
        let found = all.iter().find(|(r, f, _)| *r == row && *f == wanted);
        found.map(|(_, _, reason)| *reason)
    };
    of(format).or_else(|| of("*"))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;
    use crate::peers::field::CONTESTS;
    use crate::peers::rows::ROWS;

    #[test]
    fn the_reason_for_one_format_goes_before_that_for_all() {
        let all = [("a", "*", "all"), ("a", "x", "x")];
        assert_eq!(find(&all, "a", "x"), Some("x"));
        assert_eq!(find(&all, "a", "y"), Some("all"));
        assert_eq!(find(&all, "b", "x"), None);
    }

    #[test]
    fn reasons_are_for_rows_and_formats_that_exist() {
        for (row, format, _) in REASONS {
            assert!(ROWS.iter().any(|known| known.id == *row), "{row}");
            let known = CONTESTS.iter().any(|known| known.id == *format);
            assert!(known || *format == "*", "{format}");
        }
    }
}
