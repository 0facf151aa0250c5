//! Why rows miss their aims: shown beside them in the document.
//!
//! A reason stands here only when generated code or counters show it. A row without one is shown as missed, and as not
//! explained.

/// Row and reason.
const REASONS: &[(&str, &str)] = &[
    ("unmap-1", "the gather is half"),
    (
        "map-several",
        "Arm: more bits of a leaf, computed for each call",
    ),
    ("map-256", "ARMv7: a range spans two tables; no vectors"),
    (
        "unmap-256",
        "entries are compared first, since a range with a hole is refused whole",
    ),
    ("unmap-256-block", "as for pages"),
    (
        "unmap-many-discard",
        "leaf tables wait for the flush; Linux's Arm code frees each at once",
    ),
    ("map-many-block", "ARMv7: no vectors"),
    (
        "unmap-many-block",
        "the exclusive form looks for an empty rest of the table, 8,192 entries with 64K",
    ),
    (
        "map-chosen",
        "fewer entries, other sizes between: checks and descent are most of it",
    ),
    ("unmap-chosen", "as for mapping and for `unmap-many-block`"),
    (
        "translate",
        "42 instructions (x86-64, exclusive): the number of levels is read, each level masks the table's address",
    ),
    (
        "harvest-clean",
        "AMD: two sets of tables leave the caches; Arm: rows are read twice",
    ),
    (
        "unmap-dirty",
        "entries are exchanged, so that no dirty bit is lost; the limit loads and stores",
    ),
    (
        "split",
        "of 2,409 instructions (x86-64, exclusive) 900 fill the table",
    ),
    (
        "merge",
        "512 entries are read twice: for the run, and, after the flush, for the bits that hardware set",
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
