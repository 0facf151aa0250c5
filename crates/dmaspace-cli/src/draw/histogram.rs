//! Runs by size, with bars.

use crate::map::SizeClass;

use crate::draw::sheet::Sheet;
use crate::size::{bytes, count};

/// Rows of the histogram; more classes are put together.
const ROWS: usize = 8;
/// Characters of a full bar.
const BAR: u64 = 24;

/// Runs of sizes `from..below` bytes.
#[derive(Clone, Copy)]
struct Row {
    from: u64,
    below: u64,
    count: u64,
    bytes: u64,
}

impl Row {
    fn label(&self) -> String {
        // All of the same size, so that there is no need to speak of a class.
        if self.from.checked_mul(self.count) == Some(self.bytes) {
            bytes(self.from)
        } else {
            format!("{} to {}", bytes(self.from), bytes(self.below))
        }
    }
}

/// The classes as rows: size, count, bytes and a bar.
pub(crate) fn histogram(sheet: &mut Sheet, classes: &[SizeClass]) {
    let rows = rows(classes);
    let total = rows
        .iter()
        .map(|row| row.bytes)
        .fold(0, u64::saturating_add);
    let labels: Vec<_> = rows.iter().map(Row::label).collect();
    let counts: Vec<_> = rows.iter().map(|row| count(row.count)).collect();
    let widest = |texts: &[String]| texts.iter().map(String::len).max().unwrap_or(0);
    let (label_width, count_width) = (widest(&labels), widest(&counts));
    for ((row, label), count) in rows.iter().zip(labels).zip(counts) {
        let part = bytes(row.bytes);
        let bar = bar(row.bytes, total);
        sheet.value(
            "",
            &format!("{label:>label_width$}  × {count:>count_width$}  {part:>8}  {bar}"),
        );
    }
}

/// The classes as at most [`ROWS`] rows: neighbours are put together, all by the same factor.
fn rows(classes: &[SizeClass]) -> Vec<Row> {
    // 64 classes of powers of two are all that there can be.
    for factor in 1..=64 {
        let mut rows: Vec<(u32, Row)> = Vec::new();
        for class in classes.iter().filter(|class| class.count > 0) {
            let group = class.from_bytes.max(1).ilog2() / factor;
            let row = Row {
                from: class.from_bytes,
                below: class.from_bytes.saturating_mul(2),
                count: class.count,
                bytes: class.bytes,
            };
            match rows.last_mut() {
                Some((last, whole)) if *last == group => {
                    whole.from = whole.from.min(row.from);
                    whole.below = whole.below.max(row.below);
                    whole.count = whole.count.saturating_add(row.count);
                    whole.bytes = whole.bytes.saturating_add(row.bytes);
                }
                _ => rows.push((group, row)),
            }
        }
        if rows.len() <= ROWS {
            return rows.into_iter().map(|(_, row)| row).collect();
        }
    }
    Vec::new()
}

/// A bar of eighths of a character; what is something shows.
fn bar(part: u64, whole: u64) -> String {
    const EIGHTHS: [&str; 8] = ["", "▏", "▎", "▍", "▌", "▋", "▊", "▉"];
    if part == 0 || whole == 0 {
        return String::new();
    }
    let eighths = u128::from(part) * u128::from(BAR) * 8 / u128::from(whole);
    let eighths = eighths.clamp(1, u128::from(BAR) * 8) as usize;
    "█".repeat(eighths / 8) + EIGHTHS[eighths % 8]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bar_is_as_long_as_its_part_and_never_hides_something() {
        assert_eq!(bar(0, 100), "");
        assert_eq!(bar(1, 1_000_000), "▏");
        assert_eq!(bar(1, 2), "█".repeat(12));
        assert_eq!(bar(7, 7), "█".repeat(24));
        assert_eq!(bar(7, 0), "");
    }
}
