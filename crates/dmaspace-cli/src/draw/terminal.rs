//! Where text goes: how wide it may be, and which characters are seen there. All that the program prints for
//! people passes through here.

use std::borrow::Cow;
use std::env;
use std::ffi::OsStr;
use std::io;

use terminal_size::terminal_size_of;

/// The width of a report where nothing says otherwise.
pub(crate) const COLUMNS: usize = 80;
/// Narrower text is not read more easily, and no table fits.
const NARROWEST: usize = 40;

/// The columns of stdout: COLUMNS, else those of the terminal, else [`COLUMNS`].
pub(crate) fn columns() -> usize {
    let asked = env::var("COLUMNS").ok().and_then(|text| text.parse().ok());
    let of_terminal = || terminal_size_of(io::stdout()).map(|(width, _)| width.0.into());
    let columns = asked.filter(|columns| *columns > 0).or_else(of_terminal);
    columns.unwrap_or(COLUMNS).max(NARROWEST)
}

/// Returns true if a locale of this environment has UTF-8: the first that is set decides (POSIX, section 8.2).
fn has_utf8(locale: impl Fn(&'static str) -> Option<String>) -> bool {
    let names = ["LC_ALL", "LC_CTYPE", "LANG"];
    let set = names.into_iter().filter_map(locale);
    let codeset = set.into_iter().find(|value| !value.is_empty());
    codeset.is_some_and(|value| {
        let value = value.to_ascii_lowercase();
        value.contains("utf-8") || value.contains("utf8")
    })
}

fn is_utf8() -> bool {
    has_utf8(|name| {
        let value = env::var_os(name);
        value.map(|value| OsStr::to_string_lossy(&value).into_owned())
    })
}

/// The text as the locale can show it.
pub(crate) fn shown(text: &str) -> Cow<'_, str> {
    match text.is_ascii() || is_utf8() {
        true => Cow::Borrowed(text),
        false => Cow::Owned(ascii(text)),
    }
}

/// The characters of a progress bar that the locale can show.
pub(crate) fn progress_chars() -> &'static str {
    match is_utf8() {
        true => "█▉▊▋▌▍▎▏ ",
        false => "#- ",
    }
}

/// The same in ASCII. Replacements that are longer take from the next gap between columns, so that columns stay where
/// they are.
pub(crate) fn ascii(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let (mut longer, mut before) = (0, ' ');
    let mut characters = text.chars().peekable();
    while let Some(character) = characters.next() {
        // Characters between spaces are prose.
        longer += match character {
            '±' | '→' if before != ' ' => 1,
            '…' if before != ' ' => 2,
            _ => 0,
        };
        before = character;
        match character {
            '\n' => {
                longer = 0;
                out.push(character);
            }
            ' ' if longer > 0 && characters.peek() == Some(&' ') => longer -= 1,
            _ if character.is_ascii() => out.push(character),
            'µ' => out.push('u'),
            '×' => out.push('x'),
            '±' => out.push_str("+-"),
            '→' => out.push_str("->"),
            '…' => out.push_str("..."),
            '–' => out.push('-'),
            '✓' => out.push('+'),
            '✗' => out.push('X'),
            '█' | '▉' | '▊' | '▋' | '▌' => out.push('#'),
            '▍' | '▎' | '▏' => out.push('-'),
            _ => out.push('?'),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_locale_that_is_set_decides() {
        let of = |set: &'static [(&'static str, &'static str)]| {
            has_utf8(|name| {
                let found = set.iter().find(|(key, _)| *key == name);
                found.map(|(_, value)| (*value).to_owned())
            })
        };
        assert!(of(&[("LANG", "C.UTF-8")]));
        assert!(of(&[("LC_ALL", ""), ("LC_CTYPE", "de_DE.utf8")]));
        assert!(!of(&[("LC_ALL", "C"), ("LANG", "C.UTF-8")]));
        assert!(!of(&[]));
    }

    #[test]
    fn text_in_ascii_has_no_other_bytes_and_keeps_its_columns() {
        let text = "  12.3 µs  4 × 2 MiB  ███▋▍  ✓ ✗ – ä";
        assert_eq!(ascii(text), "  12.3 us  4 x 2 MiB  ####-  + X - ?");
        assert_eq!(ascii("a → b … ± c"), "a -> b ... +- c");
        let table = "  1→2    three\n  10→20  three\n  -      three\n 1 → 2  three";
        let expected = "  1->2   three\n  10->20 three\n  -      three\n 1 -> 2  three";
        assert_eq!(ascii(table), expected);
    }
}
