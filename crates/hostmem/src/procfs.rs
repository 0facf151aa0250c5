//! The few lines of `/proc` and `/sys` that this crate reads.

use std::io;
use std::path::{Path, PathBuf};

use thiserror::Error;

use crate::text_at_most;

/// The longest file that is read. `/proc/self/mountinfo` has a line for each mount, and a machine of containers some
/// ten thousand of them.
const MOST: u64 = 64 << 20;

/// A file of `/proc` or `/sys` that could not be read or understood.
#[derive(Debug, Error)]
pub enum ProcfsError {
    /// Reading it failed.
    #[error("cannot read {path}")]
    Read {
        /// The file.
        path: PathBuf,
        /// Cause.
        source: io::Error,
    },
    /// It was read, but what is looked for is not in it.
    #[error("{path} has no {what}")]
    Missing {
        /// The file.
        path: PathBuf,
        /// The line or number that is missing.
        what: &'static str,
    },
}

pub(crate) fn read(path: impl AsRef<Path>) -> Result<String, ProcfsError> {
    let path = path.as_ref();
    text_at_most(path, MOST).map_err(|source| ProcfsError::Read {
        path: path.to_owned(),
        source,
    })
}

pub(crate) fn read_number(path: impl AsRef<Path>) -> Result<u64, ProcfsError> {
    let path = path.as_ref();
    read(path)?
        .trim()
        .parse()
        .map_err(|_| ProcfsError::Missing {
            path: path.to_owned(),
            what: "a number",
        })
}

/// The value of the line `name:` of a text like `/proc/meminfo` or `/proc/self/status`.
pub(crate) fn line<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))
        .map(str::trim)
}

/// The bytes that the line `name:   n kB` counts.
pub(crate) fn line_bytes(text: &str, name: &str) -> Option<u64> {
    let kib: u64 = line(text, name)?.strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

/// The most numbers of a list that are read: more than Linux has of nodes or processors.
const MOST_NUMBERS: usize = 1 << 16;

/// The numbers of a kernel list like `0-2,5`.
pub(crate) fn list(text: &str) -> Vec<u32> {
    let mut numbers = Vec::new();
    for part in text.trim().split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        if let (Ok(first), Ok(last)) = (first.parse::<u32>(), last.parse::<u32>()) {
            numbers.extend((first..=last).take(MOST_NUMBERS - numbers.len()));
        }
    }
    numbers
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_found_by_their_whole_name() {
        let text = "MemTotalX:  1 kB\nMemTotal:   24684544 kB\nThreads:\t3\n";
        assert_eq!(line_bytes(text, "MemTotal"), Some(24_684_544 * 1024));
        assert_eq!(line(text, "Threads"), Some("3"));
        assert_eq!(line_bytes(text, "Threads"), None);
        assert_eq!(line_bytes(text, "Mem"), None);
    }

    #[test]
    fn lists_hold_single_numbers_and_ranges() {
        assert_eq!(list("0\n"), [0]);
        assert_eq!(list("0-2,5,7-8\n"), [0, 1, 2, 5, 7, 8]);
        assert!(list("\n").is_empty());
        // However long a list is said to be.
        assert_eq!(list("0-4294967295,7-4294967295").len(), MOST_NUMBERS);
    }
}
