//! Variables of a script: a command of one is read with the values that the lines above give them.

use std::collections::BTreeMap;

/// The most variables, and bytes of all text with their values: a value may have others in it.
const MOST_VARIABLES: usize = 1024;
const MOST_TEXT: usize = 1 << 20;

/// The text with the values of variables that its lines assign before, as far as they have any. Arrays, positional
/// parameters and the output of commands stay as they are.
pub(super) fn expanded(text: &str) -> String {
    let mut script = Script::default();
    let mut out = String::new();
    let mut waiting = String::new();
    for line in text.split_inclusive('\n') {
        waiting += line;
        // A value may go on in the next line.
        let open = waiting.trim_end().ends_with('\\') || shlex::split(&waiting).is_none();
        if open && waiting.len() < MOST_TEXT && assigns(&waiting) {
            continue;
        }
        script.take(&waiting, &mut out);
        waiting.clear();
    }
    script.take(&waiting, &mut out);
    out
}

/// True for a line that begins with an assignment.
fn assigns(line: &str) -> bool {
    name_of(unexported(line)).is_some()
}

fn unexported(line: &str) -> &str {
    let line = line.trim_start();
    let begin = ["export ", "local ", "readonly ", "declare "];
    let rest = begin.into_iter().find_map(|begin| line.strip_prefix(begin));
    rest.map_or(line, str::trim_start)
}

/// A variable that is assigned, whether its value is added, and the place behind the sign.
fn name_of(line: &str) -> Option<(&str, bool, usize)> {
    let at = line.find('=')?;
    let name = line.get(..at)?;
    let (name, adds) = name
        .strip_suffix('+')
        .map_or((name, false), |name| (name, true));
    is_name(name).then_some((name, adds, at + 1))
}

fn is_name(text: &str) -> bool {
    let letter = |byte: u8| byte.is_ascii_alphabetic() || byte == b'_';
    text.bytes().next().is_some_and(letter)
        && text
            .bytes()
            .all(|byte| letter(byte) || byte.is_ascii_digit())
}

#[derive(Default)]
struct Script {
    /// Values; `None` of a variable whose value a condition decides.
    values: BTreeMap<String, Option<String>>,
    /// Conditions and loops that are open.
    open: u32,
}

impl Script {
    /// A line, or several that belong together.
    fn take(&mut self, line: &str, out: &mut String) {
        let line = match line.contains('$') && out.len() < MOST_TEXT {
            true => self.filled(line),
            false => line.to_owned(),
        };
        match line.split_whitespace().next().unwrap_or_default() {
            "if" | "case" | "for" | "while" | "until" | "select" => self.open += 1,
            "fi" | "esac" | "done" => self.open = self.open.saturating_sub(1),
            _ => {}
        }
        let assigned = unexported(&line);
        match (name_of(assigned), shlex::split(assigned).as_deref()) {
            // A value alone in its line; before a command it would be in that one's environment.
            (Some((name, adds, at)), Some([word])) if self.open == 0 => {
                let value = word.get(at..).unwrap_or_default();
                self.assign(
                    name,
                    adds,
                    Some(value).filter(|value| !value.starts_with('(')),
                );
            }
            // An assignment behind `&&`, `;` or `then`, or in a branch.
            _ => {
                let words = assigned.split([' ', '\t', ';']);
                for (name, adds, _) in words.filter_map(name_of) {
                    self.assign(name, adds, None);
                }
            }
        }
        *out += &line;
    }

    fn assign(&mut self, name: &str, adds: bool, value: Option<&str>) {
        let known = self.values.get(name).cloned().unwrap_or_default();
        let before = if adds { known } else { Some(String::new()) };
        let value = before.zip(value).map(|(before, value)| before + value);
        if self.values.len() < MOST_VARIABLES {
            self.values.insert(name.to_owned(), value);
        }
    }

    /// A line with the values that are known, outside of single quotes.
    fn filled(&self, line: &str) -> String {
        let mut out = String::new();
        let (mut rest, mut quote) = (line, None);
        while let Some(c) = rest.chars().next() {
            let (value, length) = match c {
                '$' if quote != Some('\'') => self.value(rest),
                _ => (None, c.len_utf8()),
            };
            match (quote, c) {
                (None, '"' | '\'') => quote = Some(c),
                (Some(open), _) if open == c => quote = None,
                _ => {}
            }
            match value.filter(|value| out.len() + value.len() < MOST_TEXT) {
                Some(value) => out += value,
                None => out += rest.get(..length).unwrap_or_default(),
            }
            rest = rest.get(length..).unwrap_or_default();
        }
        out
    }

    /// The value of the variable at the beginning, and how long its name is with its signs.
    fn value<'a>(&'a self, text: &'a str) -> (Option<&'a str>, usize) {
        let known = |name: &str| self.values.get(name)?.as_deref();
        if let Some(rest) = text.strip_prefix("${") {
            let Some(inner) = rest.find('}').and_then(|end| rest.get(..end)) else {
                return (None, 1);
            };
            let (name, default) = match inner.split_once(":-") {
                Some((name, default)) => (name, Some(default)),
                None => (inner, None),
            };
            let value = known(name).filter(|value| !value.is_empty());
            let default = default.filter(|_| is_name(name));
            return (value.or(default), inner.len() + 3);
        }
        let name = text.get(1..).unwrap_or_default();
        let end = name.find(|c: char| !c.is_ascii_alphanumeric() && c != '_');
        let name = name.get(..end.unwrap_or(name.len())).unwrap_or_default();
        (known(name), name.len() + 1)
    }
}

#[cfg(test)]
mod tests {
    use super::expanded;

    #[test]
    fn variables_have_the_values_of_the_lines_above() {
        for (script, text) in [
            (
                "A=4G\nqemu -m $A -x ${A}b $B $1 $((A*2))",
                "qemu -m 4G -x 4Gb $B $1 $((A*2))",
            ),
            ("export M='a b'\nM+=,c\nrun \"$M\"", "run \"a b,c\""),
            ("run ${MEM:-4G} ${1:-x} ${B", "run 4G ${1:-x} ${B"),
            ("O=\"-m 4G \\\n -smp 2\"\nrun $O", "run -m 4G  -smp 2"),
            ("A=1 run $A", "A=1 run $A"),
            ("A=1\nrun '$A' \"$A\"", "run '$A' \"1\""),
            ("A=1\nif x; then\n  A=2\nfi\nrun $A", "run $A"),
            ("A=1\nx && A=2\nB=$A\nrun $A $B", "run $A $A"),
            ("A=1\nx && A=2\nA=3\nrun $A", "run 3"),
            ("a=(1 2)\nrun ${a[@]}", "run ${a[@]}"),
        ] {
            let found = expanded(script);
            assert_eq!(found.lines().last().unwrap(), text, "{found}");
        }
    }

    #[test]
    fn values_within_values_end() {
        let doubled = "A=$A$A$A$A$A$A$A$A\n".repeat(64);
        let found = expanded(&format!("A=xxxxxxxx\n{doubled}"));
        assert!(found.len() < 64 << 20, "{}", found.len());
    }
}
