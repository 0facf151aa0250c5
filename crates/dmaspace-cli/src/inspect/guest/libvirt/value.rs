//! Values of libvirt's elements: sizes, numbers, sets of cells and nodes.
//!
//! Source: libvirt `docs/formatdomain.rst`, "Memory Allocation", "NUMA Node Tuning"; `src/util/virutil.c`.

use std::ops::RangeInclusive;

use dmaspace::topology::MOST_NODES;

use super::super::{ConfigError, number};
use crate::inspect::process::plain;

/// The most cells, and of what is kept for each of several elements.
pub(super) const MOST: usize = MOST_NODES;
/// Numbers of cells.
pub(super) const CELLS: RangeInclusive<u64> = 0..=MOST_NODES as u64 - 1;

/// Nodes of the host that memory is from.
#[derive(Clone, Default)]
pub(super) struct Nodes {
    pub(super) set: Vec<u32>,
    /// Pages of other nodes are refused.
    pub(super) bound: bool,
}

/// Nodes of the host. Source: libvirt `docs/formatdomain.rst`, "NUMA Node Tuning": the mode is strict where none is given.
pub(super) fn nodes(set: &str, mode: Option<&str>) -> Nodes {
    Nodes {
        set: Set::of(set).map_or_else(Vec::new, |set| set.all()),
        bound: mode.is_none_or(|mode| mode == "strict"),
    }
}

/// A set of cells: `0-3,^2,7`. Cells behind a `^` are in none of the rest.
pub(super) struct Set {
    within: Vec<RangeInclusive<u64>>,
    without: Vec<RangeInclusive<u64>>,
}

impl Set {
    pub(super) fn of(text: &str) -> Option<Self> {
        let (mut within, mut without) = (Vec::new(), Vec::new());
        for part in text.split(',').map(str::trim) {
            let (into, part) = match part.strip_prefix('^') {
                Some(part) => (&mut without, part),
                None => (&mut within, part),
            };
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let cell = |text: &str| number("", text.trim(), &CELLS).ok();
            into.push(cell(first)?..=cell(last)?);
        }
        Some(Self { within, without })
    }

    pub(super) fn all(&self) -> Vec<u32> {
        let all = CELLS.filter(|cell| self.holds(*cell));
        all.map(|cell| cell as u32).collect()
    }

    pub(super) fn holds(&self, cell: u64) -> bool {
        let any = |ranges: &[RangeInclusive<u64>]| ranges.iter().any(|range| range.contains(&cell));
        any(&self.within) && !any(&self.without)
    }
}

/// There is room for one more.
pub(super) fn one_more<T>(of: &str, all: &[T]) -> Result<(), ConfigError> {
    match all.len() < MOST {
        true => Ok(()),
        false => Err(ConfigError::Many {
            of: of.into(),
            most: MOST,
        }),
    }
}

/// A number in a range: hexadecimal behind `0x`, octal behind `0`. Source: libvirt `virPCIDeviceAddressParseXML`, by
/// `virStrToLong_uip` with base 0.
pub(super) fn based(
    of: String,
    text: &str,
    range: &RangeInclusive<u64>,
) -> Result<u64, ConfigError> {
    let (digits, radix) = match (text.strip_prefix("0x"), text.strip_prefix('0')) {
        (Some(digits), _) => (digits, 16),
        (None, Some(digits)) if !digits.is_empty() => (digits, 8),
        (None, _) => (text, 10),
    };
    let known = digits.bytes().all(|digit| digit.is_ascii_hexdigit());
    let number = u64::from_str_radix(digits, radix).ok().filter(|_| known);
    let number = number.filter(|number| range.contains(number));
    number.ok_or_else(|| ConfigError::Number {
        of,
        value: text.into(),
        least: *range.start(),
        most: *range.end(),
    })
}

/// A size in bytes; what has no room in 64 bits is all that have.
///
/// Source: libvirt `docs/formatdomain.rst`, "Memory Allocation"; `virScaleInteger`.
pub(super) fn scaled(of: &str, text: &str, unit: &str) -> Result<u64, ConfigError> {
    let scale: u64 = match unit.to_ascii_lowercase().as_str() {
        "b" | "byte" | "bytes" => 1,
        "kb" => 1000,
        "" | "k" | "kib" => 1 << 10,
        "mb" => 1000 * 1000,
        "m" | "mib" => 1 << 20,
        "gb" => 1000 * 1000 * 1000,
        "g" | "gib" => 1 << 30,
        "tb" => 1000 * 1000 * 1000 * 1000,
        "t" | "tib" => 1 << 40,
        "pb" => 1000 * 1000 * 1000 * 1000 * 1000,
        "p" | "pib" => 1 << 50,
        "eb" => 1000 * 1000 * 1000 * 1000 * 1000 * 1000,
        "e" | "eib" => 1 << 60,
        _ => {
            return Err(ConfigError::Value {
                of: format!("{of} unit"),
                value: plain(unit),
                known: "bytes, KB, KiB, MB, MiB, GB, GiB, TB, TiB",
            });
        }
    };
    Ok(number(of, text, &(0..=u64::MAX))?.saturating_mul(scale))
}
