//! Prefixes of transports: everything before a message as the kernel wrote it.

use std::borrow::Cow;

use super::text::{after, number};

/// Most prefixes of a line: quotes, a journal's and the kernel's own.
const MOST: usize = 12;

/// Message without the prefixes of its transport.
#[derive(Clone, Debug, PartialEq)]
pub struct Message<'t> {
    /// The message.
    pub text: Cow<'t, str>,
    /// Time in seconds: since the boot, or of a calendar (see `clock`).
    pub time: Option<f64>,
    /// Clock of the time.
    pub clock: LogClock,
    /// Level of the message (0 to 7), if the prefix has one.
    pub level: Option<u8>,
}

/// Clock of a line's time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogClock {
    /// Seconds since the boot.
    Boot,
    /// Seconds of a calendar, of an unnamed zone; only differences mean something, and a syslog's year is unknown.
    Calendar,
}

/// Takes off the prefixes of transports: dmesg's time, also as a date or with a difference; printk's caller; a
/// journal's date, host and `kernel:`; `/dev/kmsg`'s fields and escapes; `<4>`; colours; quotes of mail.
#[must_use]
pub fn strip(line: &str) -> Message<'_> {
    let line = line.trim_end_matches(['\r', '\n']);
    let mut message = Message {
        text: Cow::Borrowed(line),
        time: None,
        clock: LogClock::Boot,
        level: None,
    };
    if !escaped(line) {
        let rest = strip_plain(line, &mut message);
        message.text = Cow::Borrowed(rest);
        return message;
    }
    let mut plain = without_colours(line);
    // Quoted-printable, as mails in archives are.
    if plain.contains("=3D") {
        plain = plain.replace("=3D", "=");
    }
    let mut text = strip_plain(&plain, &mut message).to_owned();
    // Records of /dev/kmsg, and text copied from them.
    if text.contains("\\x") {
        text = unescape(&text);
    }
    message.text = Cow::Owned(text);
    message
}

/// True where the line may have a colour, a quoted `=` or an escaped byte. No branch depends on a byte, so the loop
/// is one over vectors.
fn escaped(line: &str) -> bool {
    let bytes = line.as_bytes();
    let pairs = bytes.iter().zip(bytes.iter().skip(1));
    let single = bytes.iter().fold(false, |found, byte| {
        found | (*byte == 0x1b) | (*byte == b'\\')
    });
    let double = pairs.fold(false, |found, (first, second)| {
        found | ((*first == b'=') & (*second == b'3'))
    });
    single | double
}

fn strip_plain<'t>(line: &'t str, message: &mut Message<'_>) -> &'t str {
    let mut rest = line;
    for _ in 0..MOST {
        match one(rest, message) {
            Some(shorter) if shorter.len() < rest.len() => rest = shorter,
            _ => break,
        }
    }
    rest
}

/// Takes off one prefix.
fn one<'t>(text: &'t str, message: &mut Message<'_>) -> Option<&'t str> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let trimmed = text.trim_start_matches(' ');
    match trimmed.bytes().next()? {
        b'[' => bracket(trimmed, message),
        b'(' => {
            let rest = trimmed.strip_prefix("(XEN)")?;
            Some(rest.strip_prefix(' ').unwrap_or(rest))
        }
        b'<' => {
            let (level, rest) = number(trimmed.get(1..)?)?;
            let rest = rest.strip_prefix('>')?;
            message.level = Some((level & 7) as u8);
            Some(rest)
        }
        b'>' | b'|' => Some(
            trimmed
                .get(1..)?
                .strip_prefix(' ')
                .unwrap_or(trimmed.get(1..)?),
        ),
        b'0'..=b'9' => kmsg(trimmed, message).or_else(|| dated(trimmed, message)),
        // Names of days and months have three letters.
        b'A'..=b'Z' if trimmed.as_bytes().get(3) == Some(&b' ') => dated(trimmed, message),
        b'k' => kernel(trimmed, message),
        _ => None,
    }
}

/// `[   12.345678]`, `[Thu Jan  1 12:00:00 2026]`, `[    T123]`, `[C0]`, `[  +0.000012]`, `[   12.3 <    0.1>]`.
fn bracket<'t>(text: &'t str, message: &mut Message<'_>) -> Option<&'t str> {
    let end = text.bytes().take(62).position(|byte| byte == b']')?;
    let (inner, rest) = (text.get(1..end)?, text.get(end + 1..)?);
    let inner = inner.trim();
    let rest = || rest.strip_prefix(' ').unwrap_or(rest);
    let caller = |prefix: char| {
        let digits = inner.strip_prefix(prefix);
        digits.is_some_and(|digits| {
            !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit())
        })
    };
    if caller('T') || caller('C') {
        return Some(rest());
    }
    if let Some(difference) = inner.strip_prefix(['+', '<']) {
        let number = difference.trim_matches([' ', '>', '+']);
        return number.parse::<f64>().is_ok().then(rest);
    }
    // Some kernels add the processor: "12.345678@0", "12.345678,0".
    let first = inner.split([' ', '<', '@', ',']).next().unwrap_or(inner);
    // A number with a point: "[1]" is no time.
    if first.contains('.')
        && first
            .bytes()
            .all(|byte| byte.is_ascii_digit() || byte == b'.')
    {
        message.time = first.parse().ok();
        message.clock = LogClock::Boot;
        let rest = rest();
        return Some(kernel_behind_host(rest).unwrap_or(rest));
    }
    let day = date(inner)?;
    note_calendar(message, day.0);
    Some(rest())
}

fn note_calendar(message: &mut Message<'_>, time: f64) {
    if message.time.is_none() {
        message.time = Some(time);
        message.clock = LogClock::Calendar;
    }
}

/// `6,339,5140900,-;text` of /dev/kmsg; more fields may follow the flag.
fn kmsg<'t>(text: &'t str, message: &mut Message<'_>) -> Option<&'t str> {
    let (fields, rest) = text.split_once(';')?;
    if fields.len() > 80 || fields.contains(' ') {
        return None;
    }
    let mut fields = fields.split(',');
    let level: u64 = fields.next()?.parse().ok()?;
    fields.next()?.parse::<u64>().ok()?;
    let micros: u64 = fields.next()?.parse().ok()?;
    fields.next()?;
    message.level = Some((level & 7) as u8);
    message.time = Some(micros as f64 / 1e6);
    message.clock = LogClock::Boot;
    Some(rest)
}

/// `Jan 01 12:00:00 host kernel: `, `2026-01-01T12:00:00+00:00 host kernel: `, with or without host and `kernel:`.
fn dated<'t>(text: &'t str, message: &mut Message<'_>) -> Option<&'t str> {
    let Some((time, rest)) = date(text).or_else(|| time_of_day(text)) else {
        return android(text, message);
    };
    note_calendar(message, time);
    let rest = rest.trim_start();
    let rest = rest.strip_prefix("UTC ").unwrap_or(rest);
    Some(kernel_behind_host(rest).unwrap_or(rest))
}

/// `12:00:00 `.
fn time_of_day(text: &str) -> Option<(f64, &str)> {
    let two = text.as_bytes().get(2) == Some(&b':');
    let (time, rest) = two.then(|| clock(text))??;
    rest.starts_with(' ').then_some((time, rest))
}

/// `01-31 12:00:00.000     0     0 E `, of Android's logcat.
fn android<'t>(text: &'t str, message: &mut Message<'_>) -> Option<&'t str> {
    let (month, rest) = number(text)?;
    let (day, rest) = number(rest.strip_prefix('-')?)?;
    let (time, rest) = clock(rest.strip_prefix(' ')?)?;
    let (_, rest) = number(rest)?;
    let (_, rest) = number(rest)?;
    let mut letters = rest.trim_start().chars();
    letters.next().filter(char::is_ascii_uppercase)?;
    note_calendar(message, days(1972, month, day)? * 86400.0 + time);
    letters.as_str().strip_prefix(' ')
}

/// `kernel: `, and the facility of `dmesg -x`: `kern  :err   : `.
fn kernel<'t>(text: &'t str, message: &mut Message<'_>) -> Option<&'t str> {
    if let Some(rest) = text.strip_prefix("kernel:") {
        return Some(rest.strip_prefix(' ').unwrap_or(rest));
    }
    let (level, rest) = text
        .strip_prefix("kern")?
        .trim_start()
        .strip_prefix(':')?
        .split_once(':')?;
    let names = [
        "emerg", "alert", "crit", "err", "warn", "notice", "info", "debug",
    ];
    let level = names.iter().position(|name| *name == level.trim())?;
    message.level = Some(level as u8);
    Some(rest.strip_prefix(' ').unwrap_or(rest))
}

/// `host kernel: `, `host kernel[0]: `, `kernel: `.
fn kernel_behind_host(text: &str) -> Option<&str> {
    let behind = |text: &str| text.strip_prefix("kernel").map(str::len);
    let length = behind(text).or_else(|| {
        let bytes = text.as_bytes();
        let space = bytes.iter().take(80).position(|byte| *byte == b' ')?;
        behind(text.get(space + 1..)?)
    })?;
    let rest = text.get(text.len() - length..)?;
    let rest = match rest.strip_prefix('[') {
        Some(process) => after(process, "]")?,
        None => rest,
    };
    let rest = rest.strip_prefix(':')?;
    Some(rest.strip_prefix(' ').unwrap_or(rest))
}

/// A date with a time, as seconds, and the rest.
fn date(text: &str) -> Option<(f64, &str)> {
    // A weekday before a date by numbers: systemd's full form.
    let text = match word(text, &WEEKDAYS) {
        Some((_, rest)) if rest.starts_with(|first: char| first.is_ascii_digit()) => rest,
        _ => text,
    };
    // 2026-01-01T12:00:00.123456+00:00
    if text.bytes().next()?.is_ascii_digit() {
        let (year, rest) = number(text)?;
        let (month, rest) = number(rest.strip_prefix('-')?)?;
        let (day, rest) = number(rest.strip_prefix('-')?)?;
        let (time, rest) = clock(rest.strip_prefix(['T', ' '])?)?;
        let zone = rest.strip_prefix(['+', '-', 'Z']).unwrap_or(rest);
        let rest = zone.trim_start_matches(|byte: char| byte.is_ascii_digit() || byte == ':');
        return Some((days(year, month, day)? * 86400.0 + time, rest));
    }
    // [Thu ]Jan  1 12:00:00[ 2026]
    let rest = word(text, &WEEKDAYS).map_or(text, |(_, rest)| rest);
    let (month, rest) = word(rest, &MONTHS)?;
    let (day, rest) = number(rest)?;
    let (time, rest) = clock(rest.trim_start())?;
    let (year, rest) = match number(rest) {
        Some((year, behind)) if (1970..2200).contains(&year) => (year, behind),
        // A leap year: the 29th of February is a day of it.
        _ => (1972, rest),
    };
    Some((days(year, month as u64 + 1, day)? * 86400.0 + time, rest))
}

const WEEKDAYS: [&str; 7] = ["Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun"];
const MONTHS: [&str; 12] = [
    "Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec",
];

fn word<'t>(text: &'t str, names: &[&str]) -> Option<(usize, &'t str)> {
    let (first, rest) = text.trim_start().split_once(' ')?;
    let place = names.iter().position(|name| *name == first)?;
    Some((place, rest))
}

/// `12:00:00`, also with a fraction.
fn clock(text: &str) -> Option<(f64, &str)> {
    let (hours, rest) = number(text)?;
    let (minutes, rest) = number(rest.strip_prefix(':')?)?;
    let (seconds, rest) = match rest.strip_prefix(':') {
        Some(rest) => number(rest)?,
        // dmesg's relative form: "[Aug 4 09:48]".
        None if rest.is_empty() => (0, rest),
        None => return None,
    };
    let (fraction, rest) = match rest.strip_prefix(['.', ',']) {
        Some(behind) => {
            let (value, after) = number(behind)?;
            let digits = behind.len().saturating_sub(after.len()).min(18);
            (value as f64 / 10f64.powi(digits as i32), after)
        }
        None => (0.0, rest),
    };
    if hours > 24 || minutes > 59 || seconds > 60 {
        return None;
    }
    let whole = hours * 3600 + minutes * 60 + seconds;
    Some((whole as f64 + fraction, rest))
}

/// Days since the start of 1970.
fn days(year: u64, month: u64, day: u64) -> Option<f64> {
    if !(1970..10_000).contains(&year) || !(1..=12).contains(&month) || !(1..=31).contains(&day) {
        return None;
    }
    // Years begin with March, so that a leap day ends one.
    let year = if month > 2 { year } else { year - 1 };
    let month = (month + 9) % 12;
    let days = year * 365 + year / 4 - year / 100 + year / 400 + (month * 153 + 2) / 5 + day;
    Some(days as f64 - 719_469.0)
}

fn without_colours(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((before, behind)) = rest.split_once('\x1b') {
        plain.push_str(before);
        rest = match behind.strip_prefix('[') {
            Some(sequence) => sequence.trim_start_matches(|c: char| c.is_ascii_digit() || c == ';'),
            None => behind,
        };
        // The letter that ends it.
        let mut letters = rest.chars();
        if letters
            .next()
            .is_some_and(|letter| letter.is_ascii_alphabetic())
        {
            rest = letters.as_str();
        }
    }
    plain.push_str(rest);
    plain
}

/// `\x09` to a tab, `\x0a` to a space, and so on: bytes that /dev/kmsg escapes.
fn unescape(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((before, behind)) = rest.split_once("\\x") {
        plain.push_str(before);
        let byte = behind
            .get(..2)
            .and_then(|digits| u8::from_str_radix(digits, 16).ok());
        match byte {
            Some(byte) => {
                plain.push(match byte {
                    b'\t' => '\t',
                    0..0x20 | 0x7f.. => ' ',
                    _ => char::from(byte),
                });
                rest = behind.get(2..).unwrap_or_default();
            }
            None => {
                plain.push_str("\\x");
                rest = behind;
            }
        }
    }
    plain.push_str(rest);
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_transport_leaves_the_same_message() {
        let message = "DMAR: [DMA Read] Request device [00:02.0] fault addr 0 [fault reason 06] x";
        for prefix in [
            "",
            "[   12.345678] ",
            "[   12.345678][  T123] ",
            "[   12.345678] [    C0] ",
            "[Thu Jan  1 12:00:00 2026] ",
            "[  +0.000012] ",
            "[   12.345678 <    0.000012>] ",
            "Jan 01 12:00:00 host kernel: ",
            "Jan  1 12:00:00 host kernel[0]: [   12.345678] ",
            "2026-01-01T12:00:00.123456+00:00 host kernel: ",
            "2026-01-01T12:00:00,123456+0000 ",
            "[   12.345678] host kernel: ",
            "[    0.938401] kernel: ",
            "6,339,5140900,-;",
            "3,1001,9100000,-,caller=T123;",
            "<4>[   12.345678] ",
            "<3>",
            "kern  :err   : [   12.345678] ",
            "> > [   12.345678] ",
            "(XEN) [2026-01-01 12:00:00] ",
            "(XEN) [   12.345678] ",
            "(XEN) ",
            "[Aug 4 09:48] ",
            "<6>[   12.345678,0] ",
            "[   12.345678@1] ",
            "Thu 2026-01-01 12:00:00 UTC host kernel: ",
            "11:35:15 kernel: ",
            "00:08:18  ",
            "01-31 12:00:00.000     0     0 E ",
            "\x1b[32m[   12.345678] \x1b[0m\x1b[31m",
        ] {
            let line = format!("{prefix}{message}\r\n");
            let stripped = strip(&line);
            assert_eq!(stripped.text, message, "{prefix:?}");
        }
        assert_eq!(strip("[   12.345678] x").time, Some(12.345678));
        assert_eq!(strip("6,339,5140900,-;x").time, Some(5.1409));
        let one = strip("Jan 01 12:00:00 host kernel: x").time.unwrap();
        let two = strip("Jan 02 12:00:01 host kernel: x").time.unwrap();
        assert_eq!(two - one, 86401.0);
        assert_eq!(strip("[Thu Jan  1 00:00:01 1970] x").time, Some(1.0));
    }

    #[test]
    fn messages_without_a_prefix_stay() {
        for text in [
            "AMD-Vi: Event logged [IO_PAGE_FAULT device=03:00.0]",
            "[fault reason 06] PTE Read access is not set",
            "[1] x",
            "0x0000000000000010",
            "",
            "\t0x0000000000000010",
            "[",
            "kernel",
            "18446744073709551615:00:00 x",
            "2026-01-01T18446744073709551615:00:00 x",
            "18446744073709551615-12-31T00:00:00 x",
            "Jan 18446744073709551615 00:00:00 x",
        ] {
            assert_eq!(strip(text).text, text);
        }
        assert_eq!(
            strip("3,1,2,-;arm-smmu-v3 x: \\x090x10").text,
            "arm-smmu-v3 x: \t0x10"
        );
    }
}
