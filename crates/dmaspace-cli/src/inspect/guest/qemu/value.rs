//! Values of QEMU's options: sizes, properties, addresses of the host's devices.
//!
//! Source: QEMU 10.0 `util/cutils.c` (`do_strtosz`), `util/keyval.c`, `hw/core/qdev-properties-system.c`.

use std::collections::BTreeMap;

use dmaspace::topology::{MOST_MEMORY, MOST_NODES};
use serde_json::Value;

use super::super::{ConfigError, SMALL, memory};
use crate::inspect::process::plain;
use crate::size::{self, SizeError};

/// Bytes of the longest name of a property whose parts are properties of their own.
const LONGEST: usize = 256;

/// Properties of one option.
pub(super) type Pairs = BTreeMap<String, String>;

/// A size as QEMU reads it, up to whole pages.
pub(super) fn bytes(of: &str, value: &str) -> Result<u64, ConfigError> {
    let bytes = match scaled(value).and_then(|bytes| bytes.checked_next_multiple_of(SMALL)) {
        Some(bytes) if bytes > 0 => bytes,
        // No size, or more than 64 bits. Units are single letters, without a space before.
        _ => {
            let source = size::parse(value).err().unwrap_or(SizeError::NotANumber);
            return Err(ConfigError::Size {
                of: of.into(),
                value: value.into(),
                source,
            });
        }
    };
    memory(of, bytes, MOST_MEMORY)
}

/// `4G`, `1.5g`, `0x1000`, `1P`. Source: QEMU `do_strtosz`, `util/cutils.c`.
fn scaled(text: &str) -> Option<u64> {
    let decimal = |digits: &str| digits.bytes().all(|digit| digit.is_ascii_digit());
    if let Some(digits) = text.strip_prefix("0x") {
        return u64::from_str_radix(digits, 16).ok();
    }
    let last = text.chars().next_back()?;
    let shift = match last.to_ascii_lowercase() {
        'k' => 10,
        'm' => 20,
        'g' => 30,
        't' => 40,
        'p' => 50,
        'e' => 60,
        _ => 0,
    };
    let number = text
        .strip_suffix(|c: char| c.is_ascii_alphabetic())
        .unwrap_or(text);
    if shift == 0 && !matches!(last, 'b' | 'B' | '0'..='9') {
        return None;
    }
    let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
    if whole.is_empty() || !decimal(whole) || !decimal(fraction) || fraction.len() > 18 {
        return None;
    }
    let tenths = 10u128.checked_pow(u32::try_from(fraction.len()).ok()?)?;
    let whole = whole.parse::<u64>().ok()?.checked_mul(1 << shift)?;
    let fraction = (u128::from(fraction.parse::<u64>().ok()?) << shift) / tenths;
    whole.checked_add(u64::try_from(fraction).ok()?)
}

/// True for a text with a variable of a shell or of a template: `$NAME`, `${NAME}`, `{{ name }}`, `<NAME>`, `@NAME@`, or an
/// ellipsis.
pub(in super::super) fn has_variable(text: &str) -> bool {
    let enclosed = |open, close| text.starts_with(open) && text.ends_with(close) && text.len() > 2;
    let cut = text.contains("...") || text.contains('\u{2026}');
    cut || text.contains('$') || text.contains("{{") || enclosed('<', '>') || enclosed('@', '@')
}

/// The address of a host's device in the value of an option.
pub(super) fn host_address(of: &str, host: &str) -> Result<String, ConfigError> {
    address(host).ok_or_else(|| ConfigError::Address {
        of: format!("-{of}"),
        value: host.into(),
    })
}

/// `0000:01:00.0`, or `01:00.0` in domain 0, as the host lists it. Source: QEMU `set_pci_host_devaddr`,
/// `hw/core/qdev-properties-system.c`.
pub(crate) fn address(text: &str) -> Option<String> {
    let hex = |text: &str, most: u64| {
        let digits = !text.is_empty() && text.bytes().all(|digit| digit.is_ascii_hexdigit());
        let number = u64::from_str_radix(text, 16).ok().filter(|_| digits);
        number.filter(|number| *number <= most)
    };
    let (place, function) = text.split_once('.')?;
    let (place, slot) = place.rsplit_once(':')?;
    let (domain, bus) = place.split_once(':').unwrap_or(("0", place));
    let (domain, bus) = (hex(domain, u32::MAX.into())?, hex(bus, 0xff)?);
    let (slot, function) = (hex(slot, 0x1f)?, hex(function, 7)?);
    Some(format!("{domain:04x}:{bus:02x}:{slot:02x}.{function}"))
}

/// The properties of an option: JSON, or names and values with commas between them, where two commas stand for
/// one of the value. A first value without a name is that of `implied`; any other name without a value is on.
pub(super) fn pairs(option: &str, text: &str, implied: &str) -> Result<Pairs, ConfigError> {
    let inner = text.strip_prefix('{').map(str::trim_start);
    if inner.is_some_and(|inner| inner.is_empty() || inner.starts_with(['"', '}'])) {
        let object: serde_json::Map<String, Value> =
            serde_json::from_str(text).map_err(|source| ConfigError::Json {
                option: option.into(),
                source,
            })?;
        let mut pairs = Pairs::new();
        // Objects within are names with dots between, as in the other form. The parser limits their depth.
        let mut left: Vec<_> = object.into_iter().collect();
        while let Some((name, value)) = left.pop() {
            let value = match value {
                Value::Object(inner) if name.len() <= LONGEST => {
                    left.extend(
                        inner
                            .into_iter()
                            .map(|(part, value)| (format!("{name}.{part}"), value)),
                    );
                    continue;
                }
                Value::String(text) => text,
                other => other.to_string(),
            };
            pairs.insert(plain(&name), plain(&value));
        }
        return Ok(pairs);
    }
    let (mut parts, mut part) = (Vec::new(), String::new());
    let mut characters = text.chars().peekable();
    while let Some(c) = characters.next() {
        match c {
            ',' if characters.next_if_eq(&',').is_none() => parts.push(std::mem::take(&mut part)),
            c => part.push(c),
        }
    }
    parts.push(part);
    let named = parts
        .iter()
        .enumerate()
        .map(|(nth, part)| match part.split_once('=') {
            Some((name, value)) => (plain(name), plain(value)),
            None if nth == 0 => (implied.into(), plain(part)),
            None => (plain(part), "on".into()),
        });
    let mut pairs = Pairs::new();
    for (name, value) in named {
        match pairs.get_mut(&name) {
            // Nodes may be given one by one.
            Some(nodes) if name == "host-nodes" => *nodes += &format!(",{value}"),
            _ => drop(pairs.insert(name, value)),
        }
    }
    Ok(pairs)
}

/// Numbers of nodes: `0`, `0-1`, `[0,1]`, and at most as many as a machine has.
pub(in super::super) fn set(text: &str) -> Vec<u32> {
    let mut nodes = Vec::new();
    for part in text.trim_matches(['[', ']']).split(',').map(str::trim) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (Ok(first), Ok(last)) = (first.parse::<u32>(), last.parse::<u32>()) else {
            continue;
        };
        nodes.extend((first..=last).take(MOST_NODES.saturating_sub(nodes.len())));
    }
    nodes
}
