//! Numbers, names and addresses within a message.

use super::PciAddress;

/// Searches in lines. The standard library's prepare for long texts, which takes longer than to search a line.
pub(super) trait Text {
    /// True when `key` stands in the text.
    fn has(&self, key: &str) -> bool;
    /// The texts before and behind the first `key`.
    fn around(&self, key: &str) -> Option<(&str, &str)>;
}

impl Text for str {
    fn has(&self, key: &str) -> bool {
        find(self, key).is_some()
    }

    fn around(&self, key: &str) -> Option<(&str, &str)> {
        let at = find(self, key)?;
        Some((self.get(..at)?, self.get(at + key.len()..)?))
    }
}

fn find(text: &str, key: &str) -> Option<usize> {
    let bytes = text.as_bytes();
    let (first, others) = key.as_bytes().split_first()?;
    let mut from = 0;
    loop {
        // Keys are ASCII, whose bytes are parts of no other character.
        let at = from + text.get(from..)?.find(char::from(*first))?;
        if bytes.get(at + 1..)?.starts_with(others) {
            return Some(at);
        }
        from = at + 1;
    }
}

/// The text behind `key`.
pub(super) fn after<'t>(text: &'t str, key: &str) -> Option<&'t str> {
    text.around(key).map(|(_, rest)| rest)
}

/// `text` without the leading white space and without `key`, which it begins with.
pub(super) fn starts<'t>(text: &'t str, key: &str) -> Option<&'t str> {
    text.trim_start().strip_prefix(key)
}

fn digits(text: &str, radix: u32) -> Option<(u64, &str)> {
    let (mut value, mut end) = (0u64, 0);
    for byte in text.bytes() {
        let Some(digit) = char::from(byte).to_digit(radix) else {
            break;
        };
        value = value.checked_mul(radix.into())?.checked_add(digit.into())?;
        end += 1;
    }
    Some((value, text.get(end..)?)).filter(|_| end > 0)
}

/// A hexadecimal number, with or without `0x`, and the rest. None where a digit is illegible.
pub(super) fn hex(text: &str) -> Option<(u64, &str)> {
    let (value, rest) = hex_part(text)?;
    let goes_on = |next: char| next.is_ascii_alphabetic() || matches!(next, '?' | '*');
    (!rest.starts_with(goes_on)).then_some((value, rest))
}

/// The same, whatever follows the digits.
pub(super) fn hex_part(text: &str) -> Option<(u64, &str)> {
    let text = text.trim_start();
    let number = text.strip_prefix("0x").or_else(|| text.strip_prefix("0X"));
    digits(number.unwrap_or(text), 16)
}

/// A number, hexadecimal with `0x`, decimal without, and the rest.
pub(super) fn number(text: &str) -> Option<(u64, &str)> {
    let text = text.trim_start();
    match text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
        Some(number) => digits(number, 16),
        None => digits(text, 10),
    }
}

/// The hexadecimal number behind `key`.
pub(super) fn hex_after(text: &str, key: &str) -> Option<u64> {
    after(text, key).and_then(hex).map(|(value, _)| value)
}

/// The number behind `key`.
pub(super) fn number_after(text: &str, key: &str) -> Option<u64> {
    after(text, key).and_then(number).map(|(value, _)| value)
}

/// As `u32`; none where it is larger.
pub(super) fn small(value: Option<u64>) -> Option<u32> {
    value.and_then(|value| value.try_into().ok())
}

/// The address of a PCI function: `0000:01:00.0`, `01:00.0`, `0x01:0x00.0`, and the rest.
pub(super) fn pci(text: &str) -> Option<(PciAddress, &str)> {
    let mut fields = [0; 3];
    let mut count = 0;
    let mut rest = text.trim_start();
    let function = loop {
        let (value, behind) = hex(rest)?;
        *fields.get_mut(count)? = value;
        count += 1;
        if let Some(function) = behind.strip_prefix('.') {
            break function;
        }
        rest = behind.strip_prefix(':')?;
        if !rest.starts_with(|first: char| first.is_ascii_hexdigit()) {
            return None;
        }
    };
    let (segment, bus, device) = match (count, fields) {
        (2, [bus, device, _]) => (0, bus, device),
        (3, [segment, bus, device]) => (segment, bus, device),
        _ => return None,
    };
    let (function, rest) = hex(function)?;
    if device > 0x1f || function > 7 {
        return None;
    }
    let address = PciAddress {
        segment: segment.try_into().ok()?,
        bus: bus.try_into().ok()?,
        device: device as u8,
        function: function as u8,
    };
    Some((address, rest))
}

/// The first `most` bytes of `text`, or a little less: no character is cut.
pub(super) fn cut(text: &str, most: usize) -> &str {
    let mut end = most.min(text.len());
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text.get(..end).unwrap_or_default()
}

/// Head that the driver's core puts before a message: `DRIVER DEVICE: `, and the rest.
pub(super) fn head(text: &str) -> Option<(&str, &str)> {
    let mut from = 0;
    loop {
        let at = from + text.get(from..)?.find(':')?;
        let (head, rest) = (text.get(..at)?, text.get(at + 1..)?);
        if rest.starts_with([' ', '\t']) || rest.is_empty() {
            return Some((head, rest.trim_start()));
        }
        from = at + 1;
    }
}

/// The last word of a head: the device's name.
pub(super) fn device(head: &str) -> &str {
    head.rsplit([' ', '\t']).next().unwrap_or(head)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_end_where_their_digits_do_and_are_not_too_large() {
        assert_eq!(hex("0xffff_"), Some((0xffff, "_")));
        assert_eq!(hex(" fff9a000 "), Some((0xfff9_a000, " ")));
        assert_eq!(hex("0x"), None);
        assert_eq!(hex("ffffff???????000"), None);
        assert_eq!(hex("12345678123456781"), None);
        assert_eq!(number("06]"), Some((6, "]")));
        assert_eq!(number("0x25]"), Some((0x25, "]")));
        assert_eq!(number("é"), None);
    }

    #[test]
    fn pci_addresses_have_three_spellings() {
        for (text, full) in [
            ("00:12.0]", "0000:00:12.0"),
            ("0x00:0x02.0]", "0000:00:02.0"),
            ("0001:c1:1f.7", "0001:c1:1f.7"),
            ("10000:e1:00.0", "10000:e1:00.0"),
        ] {
            assert_eq!(pci(text).unwrap().0.to_string(), full);
        }
        for text in [
            "00:20.0",
            "00:00.8",
            "100:00.0",
            "1:2:3:4.0",
            "00:",
            "5000000.iommu",
        ] {
            assert_eq!(pci(text), None, "{text}");
        }
    }
}
