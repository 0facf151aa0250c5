//! Byte counts as people read them.

use core::fmt;

/// A number of bytes, printed with a binary unit: `2 GiB`, `8.1 MiB`, `12 bytes`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Bytes(pub u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
        let Some(unit) = (self.0.checked_ilog2().unwrap_or(0) / 10).checked_sub(1) else {
            return write!(f, "{} bytes", self.0);
        };
        let shift = 10 * (unit + 1);
        let name = UNITS.get(unit as usize).copied().unwrap_or("EiB");
        let whole = self.0 >> shift;
        let tenths = (u128::from(self.0 & ((1 << shift) - 1)) * 10) >> shift;
        if self.0 == whole << shift {
            write!(f, "{whole} {name}")
        } else {
            write!(f, "{whole}.{tenths} {name}")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Bytes;
    use std::string::ToString;

    #[test]
    fn the_largest_unit_that_is_not_zero_is_taken() {
        let text = |n| Bytes(n).to_string();
        assert_eq!(text(0), "0 bytes");
        assert_eq!(text(1023), "1023 bytes");
        assert_eq!(text(1024), "1 KiB");
        assert_eq!(text(8 << 20), "8 MiB");
        assert_eq!(text((8 << 20) + (1 << 17)), "8.1 MiB");
        assert_eq!(text(u64::MAX), "15.9 EiB");
    }
}
