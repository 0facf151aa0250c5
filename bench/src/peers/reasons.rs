//! Why rows miss their aims: shown beside them in the document.
//!
//! A reason stands here only when generated code or counters show it. A row without one is shown as missed, and as not
//! explained.

/// Row, format, reason. The format `*` stands for all; a reason for one format goes before.
pub const REASONS: &[(&str, &str, &str)] = &[
    (
        "map-1",
        "*",
        "half of the instructions are the descent; the shared form enters and leaves besides. Arm's formats compute more bits \
         of a leaf",
    ),
    (
        "unmap-1",
        "*",
        "the gather is half; crates have neither gather nor runs. The exclusive form reads the neighbours, since it frees the \
         last page's table",
    ),
    (
        "map-several",
        "*",
        "Arm's formats compute more bits of a leaf from the permissions, for each call",
    ),
    (
        "unmap-several",
        "*",
        "as for one page; every second page is unmapped, so the gather compares ranges that do not join until it is full",
    ),
    (
        "unmap-many-discard",
        "arm-s1-16k",
        "two thirds of the instructions check whether the two tables above, of 2,048 entries each, can be freed; Linux keeps \
         them",
    ),
    (
        "unmap-many-discard",
        "arm-s1-64k",
        "as with 16K, with 8,192 entries above",
    ),
    (
        "unmap-many-discard",
        "*",
        "each leaf table is chained to the gather, unread, and waits for the flush; Linux's Arm code frees each at once",
    ),
    (
        "translate",
        "*",
        "42 instructions for four levels (x86-64, exclusive): the number of levels is read, and each level masks the table's \
         address to the arena. The shared form enters, and its acquire loads keep the arena's two words out of registers",
    ),
    (
        "merge",
        "*",
        "3,900 instructions (x86-64, exclusive), 2,050 of them to read the 512 entries twice: to find the run, and, after the \
         flush, what hardware noted. The limit reads once and has no flush",
    ),
    (
        "split",
        "*",
        "2,409 instructions (x86-64, exclusive), of which 900 fill the table; the rest finds leaves that are too large, \
         reserves and gathers",
    ),
    (
        "map-256",
        "armv7s",
        "a range spans two tables of 256 entries, and entries of 4 bytes have no vectors",
    ),
    ("map-256-half", "armv7s", "as for empty tables"),
    ("unmap-256", "armv7s", "as for mapping"),
    (
        "unmap-256",
        "*",
        "all entries are compared with the run before the first is emptied, since a range with a hole is refused whole; the \
         limit passes once",
    ),
    ("unmap-256-half", "armv7s", "as for mapping"),
    ("unmap-256-half", "*", "as for `unmap-256`"),
    (
        "unmap-256-block",
        "armv7s",
        "entries of 4 bytes have no vectors",
    ),
    ("unmap-256-block", "*", "as for pages"),
    (
        "map-many",
        "*",
        "as long as the loop of stores; the two forms, which do the same here, differ by more than the miss",
    ),
    (
        "unmap-many-block",
        "armv7s",
        "entries of 4 bytes have no vectors",
    ),
    (
        "unmap-many-block",
        "*",
        "entries are compared with the run before a table is unlinked, then not read again; the exclusive form checks whether \
         the rest of a table is empty",
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
        "with other sizes between, 1 MiB is other numbers of entries than the loop stores, down to one: checks and descent are \
         most of it",
    ),
    (
        "unmap-chosen",
        "*",
        "as for mapping; the exclusive form checks whether the rest of the table is empty, 8,192 entries with 64K",
    ),
    (
        "harvest-clean",
        "*",
        "the lowest samples are the limit's: two sets of tables of 2 MiB leave the caches between samples",
    ),
    (
        "unmap-dirty",
        "*",
        "each entry is exchanged where hardware may still write to it, so that no dirty bit is lost; the limit uses plain \
         loads and stores. Arm keeps two bits, and compares once more",
    ),
    (
        "map-chosen",
        "x86-64",
        "no size lies between 4K and 2M: it is 256 × 4K in a half-full table",
    ),
    (
        "unmap-chosen",
        "x86-64",
        "256 × 4K, as above: no size lies between 4K and 2M",
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
        "1 MiB is 16 groups of 16 equal entries, each compared and cleared by itself: 1,450 instructions, 1,214 for as many \
         single pages",
    ),
    ("unmap-chosen", "riscv-g", "as for the first stage"),
    (
        "harvest-clean",
        "arm-s1-4k",
        "a clean entry has one bit set and another clear, so a row is read twice: for what any of its entries has, and for \
         what each has",
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
