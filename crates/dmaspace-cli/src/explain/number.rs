//! Numbers and PCI addresses as people and kernels write them.

/// A PCI address in full, from `01:00.0`, `0000:01:00.0` or longer domains.
pub(super) fn pci(text: &str) -> Option<String> {
    let (place, function) = text.split_once('.')?;
    let function = match function.as_bytes() {
        [digit @ b'0'..=b'7'] => digit - b'0',
        _ => return None,
    };
    let hex = |text: &str, digits: std::ops::RangeInclusive<usize>| {
        let right =
            digits.contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        u32::from_str_radix(text, 16).ok().filter(|_| right)
    };
    let (place, device) = place.rsplit_once(':')?;
    let device = hex(device, 2..=2).filter(|device| *device < 32)?;
    let (segment, bus) = match place.rsplit_once(':') {
        Some((segment, bus)) => (hex(segment, 4..=8)?, bus),
        None => (0, place),
    };
    let bus = hex(bus, 2..=2)?;
    Some(format!("{segment:04x}:{bus:02x}:{device:02x}.{function}"))
}

/// The first PCI address in a text, among words of `0-9a-f:.`.
pub(super) fn pci_within(text: &str) -> Option<String> {
    text.split(|c: char| !(c.is_ascii_hexdigit() || c == ':' || c == '.'))
        .filter(|word| word.len() >= 7)
        .find_map(|word| pci(word.trim_matches([':', '.'])))
}

/// A number: decimal, or hexadecimal with `0x`.
pub(super) fn number(text: &str) -> Option<u64> {
    match text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
        Some(digits) => hexadecimal(digits),
        None => {
            let plain = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
            text.parse().ok().filter(|_| plain)
        }
    }
}

/// Hexadecimal digits.
pub(super) fn hexadecimal(digits: &str) -> Option<u64> {
    let plain = !digits.is_empty() && digits.bytes().all(|digit| digit.is_ascii_hexdigit());
    u64::from_str_radix(digits, 16).ok().filter(|_| plain)
}

/// The number behind `key`, decimal or hexadecimal.
pub(super) fn number_after(text: &str, key: &str) -> Option<u64> {
    let rest = text.split_once(key)?.1.trim_start();
    let end = rest.find(|c: char| !(c.is_ascii_hexdigit() || c == 'x' || c == 'X'));
    number(rest.get(..end.unwrap_or(rest.len()))?)
}

#[cfg(test)]
mod tests {
    use super::{pci, pci_within};

    #[test]
    fn addresses_are_pci_addresses_in_full() {
        for (text, full) in [
            ("01:00.0", Some("0000:01:00.0")),
            ("0000:c1:1f.7", Some("0000:c1:1f.7")),
            ("10000:e1:00.0", Some("10000:e1:00.0")),
            ("01:20.0", None),
            ("01:00.8", None),
            ("1:00.0", None),
            ("12:30:45.1", None),
        ] {
            assert_eq!(pci(text).as_deref(), full, "{text}");
        }
        assert_eq!(
            pci_within("vfio-pci,host=b0:00.0,bus=pci.1: x").as_deref(),
            Some("0000:b0:00.0")
        );
    }
}
