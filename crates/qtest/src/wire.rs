//! The text of the protocol: lines that QEMU sends, numbers, and bytes in base64.
//!
//! Requests and answers are lines. An answer begins with `OK`, or with `FAIL` or `ERR` and a reason;
//! lines that begin with `IRQ` come at any time (QEMU, docs/devel/testing/qtest, "QTest Protocol").

use crate::irq::Irq;

/// A line from QEMU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Line<'a> {
    /// The command was done; what it yields.
    Done(&'a str),
    /// The command was refused; why.
    Refused(&'a str),
    /// A line has changed; no answer.
    Irq(Irq),
}

/// Understands a line, without its end.
pub(crate) fn line(text: &str) -> Option<Line<'_>> {
    let (first, rest) = text.split_once(' ').unwrap_or((text, ""));
    match first {
        "OK" => Some(Line::Done(rest)),
        "FAIL" | "ERR" => Some(Line::Refused(rest)),
        "IRQ" => {
            let (what, line) = rest.split_once(' ')?;
            let raised = match what {
                "raise" => true,
                "lower" => false,
                _ => return None,
            };
            let line = line.parse().ok()?;
            Some(Line::Irq(Irq { line, raised }))
        }
        _ => None,
    }
}

/// A number as QEMU writes them: hexadecimal with `0x`, or decimal.
pub(crate) fn number(text: &str) -> Option<u64> {
    let digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_alphanumeric());
    match text.strip_prefix("0x") {
        Some(hex) if digits(hex) => u64::from_str_radix(hex, 16).ok(),
        None if digits(text) => text.parse().ok(),
        _ => None,
    }
}

/// RFC 4648, section 4 "Base 64 Encoding".
const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

/// Appends `bytes` in base64.
pub(crate) fn encode(bytes: &[u8], text: &mut String) {
    for group in bytes.chunks(3) {
        let at = |nth: usize| u32::from(group.get(nth).copied().unwrap_or(0));
        let bits = at(0) << 16 | at(1) << 8 | at(2);
        for nth in 0..4 {
            let digit = ALPHABET[(bits >> (18 - 6 * nth) & 63) as usize];
            let digit = if nth > group.len() { b'=' } else { digit };
            text.push(char::from(digit));
        }
    }
}

/// Fills `bytes` from base64 that holds exactly so many.
pub(crate) fn decode(text: &str, bytes: &mut [u8]) -> Option<()> {
    let value = |digit: u8| match digit {
        b'A'..=b'Z' => Some(digit - b'A'),
        b'a'..=b'z' => Some(digit - b'a' + 26),
        b'0'..=b'9' => Some(digit - b'0' + 52),
        b'+' => Some(62),
        b'/' => Some(63),
        _ => None,
    };
    let text = text.as_bytes();
    if text.len() != bytes.len().div_ceil(3) * 4 {
        return None;
    }
    for (digits, group) in text.chunks(4).zip(bytes.chunks_mut(3)) {
        let (digits, padding) = digits.split_at(group.len() + 1);
        if padding.iter().any(|&byte| byte != b'=') {
            return None;
        }
        let mut bits = 0;
        for &digit in digits {
            bits = bits << 6 | u32::from(value(digit)?);
        }
        // The spare bits of the last digit are zero.
        let spare = 6 * digits.len() - 8 * group.len();
        if bits & ((1 << spare) - 1) != 0 {
            return None;
        }
        let whole = (bits >> spare).to_be_bytes();
        group.copy_from_slice(&whole[4 - group.len()..]);
    }
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_answers_or_interrupts() {
        assert_eq!(line("OK"), Some(Line::Done("")));
        assert_eq!(line("OK 0x01"), Some(Line::Done("0x01")));
        let refused = "Unknown command 'x'";
        assert_eq!(
            line(&format!("FAIL {refused}")),
            Some(Line::Refused(refused))
        );
        assert_eq!(line("ERR no"), Some(Line::Refused("no")));
        let irq = |line, raised| Some(Line::Irq(Irq { line, raised }));
        assert_eq!(line("IRQ raise 16"), irq(16, true));
        assert_eq!(line("IRQ lower 0"), irq(0, false));
        for broken in [
            "",
            "O",
            "OKAY",
            "ok",
            "IRQ",
            "IRQ raise",
            "IRQ up 1",
            "IRQ raise 256",
        ] {
            assert_eq!(line(broken), None, "{broken}");
        }
    }

    #[test]
    fn numbers_are_hexadecimal_or_decimal_and_fit() {
        assert_eq!(number("0x00000000010000ed"), Some(0x0100_00ed));
        assert_eq!(number("0xffffffffffffffff"), Some(u64::MAX));
        assert_eq!(number("1234"), Some(1234));
        for broken in [
            "",
            "0x",
            "0x10000000000000000",
            "-1",
            "+1",
            "0x+1",
            "12 ",
            "0x 1",
            "f",
        ] {
            assert_eq!(number(broken), None, "{broken}");
        }
    }

    /// RFC 4648, section 10 "Test Vectors".
    #[test]
    fn base64_is_that_of_the_rfc() {
        let vectors = [
            ("", ""),
            ("f", "Zg=="),
            ("fo", "Zm8="),
            ("foo", "Zm9v"),
            ("foob", "Zm9vYg=="),
            ("fooba", "Zm9vYmE="),
            ("foobar", "Zm9vYmFy"),
        ];
        for (plain, coded) in vectors {
            let mut text = String::new();
            encode(plain.as_bytes(), &mut text);
            assert_eq!(text, coded);
            let mut bytes = vec![0xee; plain.len()];
            assert_eq!(decode(coded, &mut bytes), Some(()));
            assert_eq!(bytes, plain.as_bytes());
        }
        let all: Vec<u8> = (0..=255).collect();
        let mut text = String::new();
        encode(&all, &mut text);
        let mut back = [0; 256];
        assert_eq!(decode(&text, &mut back), Some(()));
        assert_eq!(back[..], all);
    }

    #[test]
    fn base64_that_is_broken_or_of_another_length_is_refused() {
        for (text, len) in [
            ("Zg==", 2),
            ("Zg==", 0),
            ("Zm8=", 1),
            ("Zm9v", 2),
            ("Zh==", 1), // spare bits
            ("Z===", 1),
            ("Zg=", 1),
            ("Zg", 1),
            ("Zm 9", 3),
            ("Zm9-", 3),
            ("=m9v", 3),
        ] {
            assert_eq!(decode(text, &mut vec![0; len]), None, "{text} {len}");
        }
    }
}
