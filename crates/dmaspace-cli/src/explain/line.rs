//! Log lines as messages: prefixes, repetitions that syslog has folded, wrapped lines.

use std::borrow::Cow;

use iommu::log::{LogClock, strip};

/// A line without its prefix.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Message<'a> {
    /// The text of the message.
    pub(super) text: Cow<'a, str>,
    /// Seconds since the boot, or of a clock.
    pub(super) seconds: Option<f64>,
    /// `seconds` count from the boot.
    pub(super) since_boot: bool,
    /// The line had a prefix of a log.
    pub(super) logged: bool,
    /// Repetitions that syslog has folded into the line: 1 for most.
    pub(super) weight: u64,
}

/// Takes the prefix off a line.
pub(super) fn message(line: &str) -> Message<'_> {
    let line = line.trim_end();
    let found = strip(line);
    let logged = found.text.len() != line.len() && !(found.text.is_empty() && found.time.is_none());
    if !logged {
        return Message {
            text: Cow::Borrowed(line),
            seconds: None,
            since_boot: false,
            logged,
            weight: 1,
        };
    }
    let mut message = Message {
        text: Cow::Borrowed(""),
        seconds: found.time,
        since_boot: found.clock == LogClock::Boot && found.time.is_some(),
        logged,
        weight: 1,
    };
    match repeated(&found.text) {
        Some((inner, weight)) => {
            let inner = strip(inner);
            message.seconds = inner.time.or(message.seconds);
            message.weight = weight;
            message.text = Cow::Owned(inner.text.into_owned());
        }
        None => message.text = found.text,
    }
    message
}

/// `message repeated 3 times: [ text]` of rsyslog: the text, three times.
fn repeated(line: &str) -> Option<(&str, u64)> {
    let rest = line.trim_start().strip_prefix("message repeated ")?;
    let (count, rest) = rest.split_once(' ')?;
    let text = rest.strip_prefix("times: [")?;
    let text = text.strip_suffix(']').unwrap_or(text).trim();
    Some((text, count.parse::<u64>().ok()?.clamp(1, 1 << 32)))
}

/// True where a line of a log goes on in the next line: a bracket or a list is open.
pub(super) fn is_open(text: &str) -> bool {
    let depth = text.bytes().fold(0i32, |depth, byte| {
        depth + i32::from(byte == b'[') - i32::from(byte == b']')
    });
    let end = text.trim_end();
    depth > 0 || end.ends_with([',', '=']) || end.ends_with("fault addr")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repetitions_of_syslog_count() {
        let line = "Nov 27 16:37:08 box kernel: message repeated 3 times: [ [   35.5] DMAR: x]";
        let found = message(line);
        assert_eq!((found.text.as_ref(), found.weight), ("DMAR: x", 3));
        assert_eq!(found.seconds, Some(35.5));
    }

    #[test]
    fn plain_lines_stay_as_they_are() {
        for line in [
            "<disk/>",
            "[...]",
            "A ram 0x0 0x1000",
            "vfio 0000:01:00.0: x",
        ] {
            let found = message(line);
            assert_eq!((found.text.as_ref(), found.logged), (line, false));
        }
    }

    #[test]
    fn open_brackets_go_on() {
        assert!(is_open("AMD-Vi: Event logged [IO_PAGE_FAULT domain=0x000d"));
        assert!(!is_open(
            "AMD-Vi: Event logged [IO_PAGE_FAULT domain=0x000d]"
        ));
    }
}
