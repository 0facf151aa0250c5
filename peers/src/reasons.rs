//! Why rows miss their aims, and what was tried: shown beside them in the document.
//!
//! A reason stands here only after somebody has looked at the generated code or at counters. A row
//! without one is shown as missed all the same, and as not explained.

/// Row, format, reason. The format `*` stands for all; a reason for one format goes before.
pub const REASONS: &[(&str, &str, &str)] = &[
    (
        "map-1",
        "*",
        "122 instructions by callgrind (x86-64, exclusive), half of them the way down. The shared form \
         adds two locked instructions, guard and claim, of about 5 ns each here; a fence behind the first \
         of them was taken out where the processor does not need it. Arm's formats compute more bits of a \
         leaf",
    ),
    (
        "unmap-1",
        "*",
        "151 instructions by callgrind (exclusive): the way down, the live count, the run, and 40 to \
         gather the range; then the flush and the return of its tables. The crates have none of the last \
         four. The shared form adds guard and claim",
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
        "*",
        "by `&` every one of the 512 leaf tables is claimed, a locked instruction and a line of `Meta` \
         each, so that nobody maps into a table that goes",
    ),
    (
        "translate",
        "*",
        "61 instructions by callgrind for four levels: the number of levels is looked at, each level masks \
         the table's address to the arena, and loads with acquire keep the compiler from holding the \
         arena's two words in registers (relaxed ones, tried, save 4 instructions and 7 %). The shared \
         form adds a guard; inside one it does not",
    ),
    (
        "merge",
        "*",
        "the 512 entries are read four times: to find the run, for what hardware has noted before and \
         at the exchange, and again after the flush, when units no longer write through the old table. \
         It was 8 to 16 µs before runs of leaves were found by rows",
    ),
    (
        "split",
        "*",
        "3,000 instructions without vectors, of which 1,300 fill the table; the rest is the search for \
         leaves that are too large, the reserve and the gather",
    ),
    (
        "map-256",
        "armv7s",
        "tables of 256 entries of 4 bytes: a range goes over two of them, and entries of 4 bytes have no \
         vectors",
    ),
    ("map-256-half", "armv7s", "as for empty tables"),
    ("unmap-256-half", "armv7s", "as for mapping"),
    (
        "unmap-256-block",
        "armv7s",
        "entries of 4 bytes have no vectors",
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
    use crate::field::CONTESTS;
    use crate::rows::ROWS;

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
