//! Sizes, times and counts as people write and read them.
//!
//! Units are binary, like everything about pages: `K` is 1024 bytes. Printed values carry three
//! significant digits, except where it is exact: `2 MiB`, but `2.50 MiB`.

use std::fmt;

use runs::SizeHistogram;
use serde::Serialize;

/// The smallest page of every format, of which every size must be a multiple.
const PAGE: u64 = 4096;
/// A page of the largest pool that there is, of Arm and POWER: Linux `Documentation/arch/arm64/hugetlbpage.rst` and
/// `arch/powerpc/mm/book3s64/hash_utils.c`.
pub(crate) const LARGEST_PAGE: u64 = 16 << 30;

const UNITS: [&str; 7] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];

/// Why a text is no size.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SizeError {
    /// No digits, or something between them.
    NotANumber,
    /// `1.5G`.
    Fraction,
    /// Letters that are no unit.
    Unit(String),
    /// More than 64 bits of bytes.
    TooLarge,
    /// Zero bytes.
    Zero,
    /// So many bytes, which are no whole pages.
    NotPages(u64),
}

impl fmt::Display for SizeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotANumber => f.write_str("a size is a number with K, M, G or T, like 256M"),
            Self::Fraction => f.write_str(
                "a size has no fraction; use the next smaller unit, like 1536M for 1.5G",
            ),
            Self::Unit(unit) => write!(f, "unknown unit {unit:?}: there are K, M, G and T"),
            Self::TooLarge => f.write_str("no machine has that much: it is 16 EiB or more"),
            Self::Zero => f.write_str("0 bytes are nothing to map; the smallest size is 4K"),
            Self::NotPages(bytes) => {
                let below = bytes / PAGE * PAGE;
                write!(f, "{bytes} bytes are no whole pages of 4K; try ")?;
                match (below, below.checked_add(PAGE)) {
                    (0, _) => f.write_str("4K"),
                    (_, Some(above)) => write!(f, "{} or {}", Short(below), Short(above)),
                    (_, None) => write!(f, "{}", Short(below)),
                }
            }
        }
    }
}

impl std::error::Error for SizeError {}

/// True for a size that pages have.
pub(crate) fn is_page(bytes: u64) -> bool {
    bytes.is_power_of_two() && (PAGE..=LARGEST_PAGE).contains(&bytes)
}

/// The size of memory that `text` names, in bytes: whole pages, and not none.
pub(crate) fn parse(text: &str) -> Result<u64, SizeError> {
    let text = text.trim();
    let digits = text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit()).len();
    let (number, unit) = text.split_at(digits);
    if number.is_empty() {
        return Err(SizeError::NotANumber);
    }
    let unit = unit.trim_start();
    if let Some(rest) = unit.strip_prefix(['.', ',']) {
        return Err(if rest.starts_with(|c: char| c.is_ascii_digit()) {
            SizeError::Fraction
        } else {
            SizeError::NotANumber
        });
    }
    // The report prints "256 MiB", so that is read as well as 256M. "MB" is not: it would be
    // another number.
    let shift = match unit.to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "ki" | "kib" => 10,
        "m" | "mi" | "mib" => 20,
        "g" | "gi" | "gib" => 30,
        "t" | "ti" | "tib" => 40,
        _ if unit.chars().all(char::is_alphabetic) => return Err(SizeError::Unit(unit.into())),
        _ => return Err(SizeError::NotANumber),
    };
    // Digits only, so that the only error left is one of size.
    let number: u64 = number.parse().map_err(|_| SizeError::TooLarge)?;
    let bytes = number.checked_mul(1 << shift).ok_or(SizeError::TooLarge)?;
    match bytes {
        0 => Err(SizeError::Zero),
        bytes if bytes % PAGE != 0 => Err(SizeError::NotPages(bytes)),
        bytes => Ok(bytes),
    }
}

/// Bytes as the command line takes them: `4K`, `1536M`; always exact.
pub(crate) struct Short(pub(crate) u64);

impl fmt::Display for Short {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let steps = (self.0.trailing_zeros() / 10).min(4);
        let unit = ["", "K", "M", "G", "T"][steps as usize];
        write!(f, "{}{unit}", self.0 >> (10 * steps))
    }
}

/// Runs or leaves of one size class.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct SizeClass {
    /// The smallest length of the class, which ends below twice as much.
    pub(crate) from_bytes: u64,
    /// Their number.
    pub(crate) count: u64,
    /// Their bytes together.
    pub(crate) bytes: u64,
}

/// The classes of a histogram that have something in them.
pub(crate) fn classes(sizes: &SizeHistogram) -> Vec<SizeClass> {
    let classes = sizes.iter().map(|(from_bytes, class)| SizeClass {
        from_bytes,
        count: class.count,
        bytes: class.bytes,
    });
    classes.collect()
}

/// Three significant digits: `1.23`, `12.3`, `123`, `1,230`.
pub(crate) fn three_digits(value: f64) -> String {
    // The borders are where rounding would show a fourth digit.
    if value < 9.995 {
        format!("{value:.2}")
    } else if value < 99.95 {
        format!("{value:.1}")
    } else {
        let scale = 10f64.powf((value.log10() - 2.0).floor()).max(1.0);
        count(((value / scale).round() * scale) as u64)
    }
}

/// Bytes for people: `2 MiB`, `2.50 MiB`.
pub(crate) fn bytes(bytes: u64) -> String {
    let exact = UNITS
        .iter()
        .enumerate()
        .map(|(step, unit)| (10 * step as u32, unit))
        .filter(|(shift, _)| bytes.trailing_zeros() >= *shift && bytes >> shift > 0)
        .map(|(shift, unit)| (bytes >> shift, unit))
        .find(|(number, _)| *number < 1024);
    if let Some((number, unit)) = exact {
        return format!("{number} {unit}");
    }
    let mut value = bytes as f64;
    let mut units = UNITS.iter();
    let mut unit = units.next();
    while value.round() >= 1024.0 {
        let Some(larger) = units.next() else { break };
        unit = Some(larger);
        value /= 1024.0;
    }
    match unit {
        Some(&"B") | None => format!("{} B", count(bytes)),
        // Up to 1023, so that the unit is the same as for a neighbour that is exact.
        Some(unit) if value >= 999.5 => format!("{value:.0} {unit}"),
        Some(unit) => format!("{} {unit}", three_digits(value)),
    }
}

/// A time for people: `512 ns`, `1.20 ms`.
pub(crate) fn duration(ns: u64) -> String {
    if ns < 1000 {
        return format!("{ns} ns");
    }
    let mut value = ns as f64 / 1e3;
    let mut unit = "µs";
    for larger in ["ms", "s"] {
        if value < 999.5 {
            break;
        }
        value /= 1e3;
        unit = larger;
    }
    format!("{} {unit}", three_digits(value))
}

/// A count in groups of three digits: `65,536`.
pub(crate) fn count(number: u64) -> String {
    let digits = number.to_string();
    let mut grouped = String::with_capacity(digits.len() + digits.len() / 3);
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at) % 3 == 0 {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    grouped
}

/// A count of things: `1 run`, `3 runs`, `2 misses`.
pub(crate) fn counted(number: u64, thing: &str) -> String {
    let (thing, plural) = match thing {
        _ if number == 1 => (thing, ""),
        "leaf" => ("leaves", ""),
        thing if thing.ends_with('s') => (thing, "es"),
        _ => (thing, "s"),
    };
    format!("{} {thing}{plural}", count(number))
}

/// A part of a whole. Less than the whole is never rounded to 100 %, and more than nothing never to 0 %.
pub(crate) fn percent(part: u64, whole: u64) -> String {
    if part == 0 || whole == 0 {
        return "0 %".into();
    }
    if part == whole {
        return "100 %".into();
    }
    let share = part as f64 / whole as f64 * 100.0;
    let bounded = if part < whole {
        share.clamp(0.1, 99.9)
    } else {
        share
    };
    format!("{bounded:.1} %")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn pages_are_powers_of_two_up_to_the_largest() {
        for bytes in [4 << 10, 64 << 10, 2 << 20, 512 << 20, 1 << 30, 16 << 30] {
            assert!(is_page(bytes), "{bytes}");
        }
        for bytes in [0, 1, 2048, 12 << 10, 3 << 20, 32 << 30, u64::MAX] {
            assert!(!is_page(bytes), "{bytes}");
        }
    }

    #[test]
    fn sizes_are_read_with_and_without_units() {
        for (text, bytes) in [
            ("4096", 4096),
            ("4K", 4 << 10),
            ("256M", 256 << 20),
            ("256m", 256 << 20),
            ("256MiB", 256 << 20),
            ("256 MiB", 256 << 20),
            (" 1G ", 1 << 30),
            ("2T", 2 << 40),
            ("16777215T", 16_777_215 << 40),
            ("0004K", 4096),
        ] {
            assert_eq!(parse(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn what_is_no_size_is_refused_with_the_reason() {
        for (text, error) in [
            ("", SizeError::NotANumber),
            ("G", SizeError::NotANumber),
            ("-4K", SizeError::NotANumber),
            ("0x1000", SizeError::NotANumber),
            ("1 2K", SizeError::NotANumber),
            ("1.G", SizeError::NotANumber),
            ("1.5G", SizeError::Fraction),
            ("1,5G", SizeError::Fraction),
            ("1GB", SizeError::Unit("GB".into())),
            ("1Q", SizeError::Unit("Q".into())),
            ("0", SizeError::Zero),
            ("0G", SizeError::Zero),
            ("5000", SizeError::NotPages(5000)),
            ("1K", SizeError::NotPages(1024)),
            ("16777216T", SizeError::TooLarge),
            ("18446744073709551616", SizeError::TooLarge),
            (
                "99999999999999999999999999999999999999G",
                SizeError::TooLarge,
            ),
        ] {
            assert_eq!(parse(text), Err(error), "{text}");
        }
    }

    #[test]
    fn a_refusal_names_what_would_do() {
        assert_eq!(
            SizeError::NotPages(5000).to_string(),
            "5000 bytes are no whole pages of 4K; try 4K or 8K"
        );
        assert_eq!(
            SizeError::NotPages(7).to_string(),
            "7 bytes are no whole pages of 4K; try 4K"
        );
        assert_eq!(
            SizeError::NotPages((1 << 20) + 1).to_string(),
            "1048577 bytes are no whole pages of 4K; try 1M or 1028K"
        );
        assert_eq!(
            SizeError::NotPages(u64::MAX).to_string(),
            "18446744073709551615 bytes are no whole pages of 4K; try 18014398509481980K"
        );
    }

    #[test]
    fn bytes_are_printed_with_three_digits_or_exactly() {
        for (number, text) in [
            (0, "0 B"),
            (1, "1 B"),
            (1023, "1023 B"),
            (4096, "4 KiB"),
            (5000, "4.88 KiB"),
            (10 << 10, "10 KiB"),
            ((10 << 10) + 1, "10.0 KiB"),
            ((1 << 20) - 1, "1.00 MiB"),
            (256 << 20, "256 MiB"),
            (1536 << 20, "1.50 GiB"),
            (1000 << 10, "1000 KiB"),
            ((1023 << 10) - 1, "1023 KiB"),
            (1 << 30, "1 GiB"),
            (123 << 40, "123 TiB"),
            (u64::MAX, "16.0 EiB"),
        ] {
            assert_eq!(bytes(number), text);
        }
    }

    #[test]
    fn times_are_printed_with_three_digits() {
        for (ns, text) in [
            (0, "0 ns"),
            (999, "999 ns"),
            (1000, "1.00 µs"),
            (12_345, "12.3 µs"),
            (999_499, "999 µs"),
            (999_500, "1.00 ms"),
            (31_200_000, "31.2 ms"),
            (1_500_000_000, "1.50 s"),
            (12_345_000_000_000, "12,300 s"),
        ] {
            assert_eq!(duration(ns), text);
        }
    }

    #[test]
    fn counts_and_shares_are_printed() {
        assert_eq!(count(0), "0");
        assert_eq!(count(999), "999");
        assert_eq!(count(1_234_567), "1,234,567");
        assert_eq!(counted(1, "run"), "1 run");
        assert_eq!(counted(0, "run"), "0 runs");
        assert_eq!(counted(2, "miss"), "2 misses");
        assert_eq!(percent(0, 0), "0 %");
        assert_eq!(percent(1, 1_000_000), "0.1 %");
        assert_eq!(percent(999_999, 1_000_000), "99.9 %");
        assert_eq!(percent(7, 7), "100 %");
        assert_eq!(percent(1, 2), "50.0 %");
    }

    proptest! {
        #[test]
        fn what_is_suggested_is_read_back(pages in 1..u64::MAX >> 12) {
            let bytes = pages << 12;
            prop_assert_eq!(parse(&Short(bytes).to_string()), Ok(bytes));
        }

        #[test]
        fn no_text_is_worse_than_an_error(text in ".*") {
            let _ = parse(&text);
        }

        #[test]
        fn no_number_is_too_odd_to_print(number: u64, ns: u64) {
            prop_assert!(bytes(number).len() <= 8, "{}", bytes(number));
            prop_assert!(duration(ns).chars().count() <= 16);
            let _ = (duration(ns), percent(number, ns));
        }
    }
}
