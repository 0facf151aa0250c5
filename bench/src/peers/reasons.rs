//! Why rows miss their aims: shown beside them in the document.
//!
//! A reason stands here only when generated code or counters show it. A row without one is shown as missed, and as not
//! explained.

/// Row and reason.
const REASONS: &[(&str, &str)] = &[
    (
        "unmap-1",
        "the gather is half; crates have neither gather nor runs",
    ),
    (
        "map-several",
        "Arm's formats compute more bits of a leaf, for each call",
    ),
    (
        "map-256",
        "ARMv7: a range spans two tables, and entries of 4 bytes have no vectors",
    ),
    (
        "unmap-256",
        "entries are compared before the first is emptied, since a range with a hole is refused whole",
    ),
    ("unmap-256-block", "as for pages"),
    (
        "unmap-many-discard",
        "leaf tables wait for the flush; Linux's Arm code frees each at once",
    ),
    ("map-many-block", "ARMv7: no vectors"),
    (
        "unmap-many-block",
        "the exclusive form checks whether the rest of a table is empty, 8,192 entries with 64K",
    ),
    (
        "map-chosen",
        "fewer entries with other sizes between: checks and descent are most of it",
    ),
    (
        "unmap-chosen",
        "as for mapping; and as for `unmap-many-block`",
    ),
    (
        "translate",
        "42 instructions (x86-64, exclusive): the number of levels is read, and each level masks the table's address",
    ),
    (
        "harvest-clean",
        "AMD: two sets of tables leave the caches between samples; Arm: rows are read twice",
    ),
    (
        "unmap-dirty",
        "each entry is exchanged, so that no dirty bit is lost; the limit uses plain loads and stores",
    ),
    (
        "split",
        "of 2,409 instructions (x86-64, exclusive) 900 fill the table; the rest finds leaves, reserves and gathers",
    ),
    (
        "merge",
        "the 512 entries are read twice: to find the run, and, after the flush, what hardware noted",
    ),
];

/// The reason for a row.
pub fn reason(row: &str) -> Option<&'static str> {
    let found = REASONS.iter().find(|(known, _)| *known == row);
    found.map(|(_, reason)| *reason)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::peers::rows::ROWS;

    #[test]
    fn reasons_are_for_rows_that_exist() {
        for (row, _) in REASONS {
            assert!(ROWS.iter().any(|known| known.id == *row), "{row}");
        }
    }
}
