//! Why rows miss their aims, and what was tried: shown beside them in the document.
//!
//! A reason stands here only after somebody has looked at the generated code or at counters. A row
//! without one is shown as missed all the same, and as not explained.

/// Row, format, reason. The format `*` stands for all; a reason for one format goes before.
pub const REASONS: &[(&str, &str, &str)] = &[];

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
