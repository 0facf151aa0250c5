//! Files of `-readconfig`: options in sections.
//!
//! Source: QEMU 10.0 `util/qemu-config.c`, `qemu_config_foreach`: `[option]` or `[option "id"]`, then `name = "value"`.

use super::value::Pairs;
use crate::inspect::process::plain;

/// The longest file that is read.
pub(super) const MOST: u64 = 1 << 20;

/// An option with its properties.
pub(super) struct Section {
    pub(super) option: String,
    pub(super) pairs: Pairs,
}

/// The sections of a file; `None` where a line is none of its form.
pub(super) fn sections(text: &str) -> Option<Vec<Section>> {
    let mut all: Vec<Section> = Vec::new();
    for line in text.lines().map(str::trim) {
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        if let Some(head) = line.strip_prefix('[') {
            let mut parts = head.strip_suffix(']')?.splitn(2, char::is_whitespace);
            let option = plain(parts.next()?);
            let id = parts.next().map(|id| plain(id.trim().trim_matches('"')));
            let pairs = id.map(|id| ("id".to_owned(), id)).into_iter().collect();
            all.push(Section { option, pairs });
            continue;
        }
        let (name, value) = line.split_once('=')?;
        let value = value.trim().strip_prefix('"')?.strip_suffix('"')?;
        let section = all.last_mut()?;
        section.pairs.insert(plain(name.trim()), plain(value));
    }
    Some(all)
}

#[cfg(test)]
mod tests {
    use super::sections;

    #[test]
    fn sections_have_names_and_properties() {
        let text = "# a comment\n[machine]\n  type = \"q35\"\n\n[device \"video\"]\n driver=\"qxl\"\n bus = \"pcie.0\"\n";
        let all = sections(text).unwrap();
        let found: Vec<_> = all
            .iter()
            .map(|one| (one.option.as_str(), one.pairs.len()))
            .collect();
        assert_eq!(found, [("machine", 1), ("device", 3)]);
        for damaged in ["type = \"q35\"", "[machine\n", "[a]\nb = c", "[a]\nb"] {
            assert!(sections(damaged).is_none(), "{damaged}");
        }
    }
}
