//! QEMU's command in a text: a line of a shell or a script, of `ps`, `systemctl status`, a unit's file, or libvirt's log.
//!
//! A shell's quotes hold. `ps` and `systemctl` print arguments without quotes: JSON that begins a word is one word up to
//! the brace that closes it. A command goes on in the next line behind a backslash, within a quote, and where that line
//! begins with an option.

use std::borrow::Cow;

use super::super::ConfigError;
use super::script::expanded;
use super::value::has_variable;
use crate::inspect::process::plain;

/// Programs that run another one, which may stand before QEMU.
const WRAPPERS: [&str; 22] = [
    "cgexec",
    "chroot",
    "chrt",
    "doas",
    "docker",
    "env",
    "eval",
    "exec",
    "gdb",
    "ionice",
    "ip",
    "nice",
    "nohup",
    "numactl",
    "podman",
    "prlimit",
    "setsid",
    "strace",
    "sudo",
    "systemd-run",
    "taskset",
    "time",
];
/// Words of a message that are looked at for QEMU's name.
const NEAR: usize = 24;

/// A command that runs QEMU.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Command {
    /// Words before it: programs that run it, columns of `ps`.
    pub(super) before: Vec<String>,
    /// The program, without its folder.
    pub(super) program: String,
    /// Its arguments.
    pub(super) arguments: Vec<String>,
    /// Other commands of QEMU follow in the text.
    pub(super) more: bool,
}

/// The first command in `text` that runs QEMU with an option, or else without one.
///
/// # Errors
///
/// When a quote does not close, or there is no such command.
pub(super) fn command(text: &str) -> Result<Command, ConfigError> {
    in_text(&expanded(&text.replace("\r\n", "\n")), true)
}

/// The same of a script without variables; `quoted`: a word of it may be a command, as of `sh -c` and `ssh`.
fn in_text(text: &str, quoted: bool) -> Result<Command, ConfigError> {
    let mut bare: Option<Command> = None;
    let mut at = 0;
    for line in text.split_inclusive('\n') {
        let begin = at + unprompted(line);
        at += line.len();
        let Some(rest) = text.get(begin..).filter(|_| names_qemu(line)) else {
            continue;
        };
        let extent = extent(rest);
        let words = words(extent).ok_or(ConfigError::Quotes)?;
        let inner = words
            .iter()
            .find(|word| quoted && word.contains(' ') && names_qemu(word));
        let inner = inner.and_then(|word| in_text(word, false).ok());
        let Some(mut command) = split(words).or(inner) else {
            continue;
        };
        let is_option = |word: &String| word.starts_with('-') || has_variable(word);
        if command.arguments.iter().any(is_option) {
            let rest = rest.get(extent.len()..).unwrap_or_default();
            command.more =
                quoted && in_text(rest, false).is_ok_and(|next| !next.arguments.is_empty());
            return Ok(command);
        }
        bare = bare.or(Some(command));
    }
    bare.ok_or_else(|| {
        let text = text.get(unprompted(text)..).unwrap_or_default();
        let first = text.split_whitespace().find(|word| !word.contains('='));
        ConfigError::NotQemu {
            program: plain(first.map_or("", base_name)),
        }
    })
}

/// Arguments of a line of a log that is a command of QEMU. Messages of QEMU begin with its name, too.
pub(crate) fn logged(line: &str) -> Option<Vec<String>> {
    let line = line.get(unprompted(line)..).unwrap_or_default();
    let Command {
        before, arguments, ..
    } = split(words(line)?)?;
    let begun = before
        .first()
        .is_none_or(|word| WRAPPERS.contains(&base_name(word)))
        || before.last().is_some_and(|word| is_column(word));
    let options = arguments.iter().any(|word| word.starts_with('-'));
    (begun && options).then_some(arguments)
}

/// True where a line may begin a command of QEMU that goes on in the next one.
pub(crate) fn begins(line: &str) -> bool {
    let mut words = line.split_whitespace();
    let variable =
        |word: &str| word.contains('=') && word.starts_with(|c: char| c.is_ascii_uppercase());
    words.clone().next().is_some_and(variable)
        || words
            .by_ref()
            .take(NEAR)
            .any(|word| is_named(word.trim_matches('"')))
}

/// A column of `ps` or `systemctl status` before a command: a time, or the number of a process behind lines of a tree.
fn is_column(word: &str) -> bool {
    let word = word.trim_start_matches(|c: char| !c.is_ascii());
    let digits = |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
    word.split([':', '-']).all(digits)
}

/// Bytes before a command: spaces, a shell's prompt, which would be a comment in its words, or the key of a unit's file
/// with its prefixes (`systemd.service(5)`, "Command lines").
fn unprompted(text: &str) -> usize {
    let rest = text.trim_start();
    let begin = ["$ ", "# ", "ExecStart="]
        .into_iter()
        .find_map(|begin| rest.strip_prefix(begin))
        .unwrap_or(rest);
    text.len() - begin.trim_start_matches(['-', '+', '!', ':', '@']).len()
}

/// True where QEMU's name is in a line, as far as a look without quotes shows it.
fn names_qemu(line: &str) -> bool {
    let line = line.get(unprompted(line)..).unwrap_or_default();
    let mut words = line.split_whitespace();
    words.any(|word| is_named(word.trim_matches(['"', '\''])))
}

/// The part of a text that belongs to the command at its beginning.
fn extent(text: &str) -> &str {
    let mut end = 0;
    for line in text.split_inclusive('\n') {
        end += line.len();
        let (so_far, next) = text.split_at_checked(end).unwrap_or((text, ""));
        let (begun, next) = (so_far.trim_end(), next.trim_start());
        let waits = begun.split_whitespace().next_back();
        let goes_on = begun.ends_with('\\')
            || next.starts_with('-')
            || waits.is_some_and(|word| word.starts_with('-') && word.len() > 1)
            || words(so_far).is_none();
        // Variables before a command have a line each in libvirt's log.
        let assigned = so_far.split_whitespace().all(|word| word.contains('='));
        if !goes_on && !assigned {
            return so_far;
        }
    }
    text
}

/// A command by its words; `None` where none of them runs QEMU.
fn split(words: Vec<String>) -> Option<Command> {
    let assigned = words.iter().take_while(|word| word.contains('=')).count();
    let words = words.get(assigned..).unwrap_or_default();
    let first = words.first()?;
    let find = |is: fn(&str) -> bool| words.iter().position(|word| is(word));
    let at = match is_named(first) {
        true => 0,
        // `qemu` alone may be a user or a group.
        false => find(is_program).or_else(|| {
            let wraps = WRAPPERS.contains(&base_name(first));
            find(is_named).filter(|_| wraps)
        })?,
    };
    let arguments = words.get(at + 1..).unwrap_or_default();
    Some(Command {
        before: words.get(..at).unwrap_or_default().to_vec(),
        program: base_name(words.get(at)?).to_owned(),
        arguments: arguments.to_vec(),
        more: false,
    })
}

/// Words as a shell splits them, with JSON that begins a word as one word; `None` where a quote does not close.
fn words(text: &str) -> Option<Vec<String>> {
    // The rest of a command that goes on in a line that is not there.
    let text = text.trim_end();
    let cut = text
        .strip_suffix('\\')
        .filter(|rest| rest.is_empty() || rest.ends_with(char::is_whitespace));
    // A line that goes on is no word of its own.
    let text = cut.unwrap_or(text).replace("\\\n", " ");
    shlex::split(&quoted_json(&text))
}

/// The text with single quotes around JSON that begins a word outside of quotes.
fn quoted_json(text: &str) -> Cow<'_, str> {
    let mut out = String::new();
    let (mut from, mut quote, mut start, mut escaped) = (0, None, true, false);
    let mut at = 0;
    while let Some(c) = text.get(at..).and_then(|rest| rest.chars().next()) {
        let rest = text.get(at..).unwrap_or_default();
        if quote.is_none() && start && c == '{' {
            if let Some(length) = template(rest).or_else(|| json(rest)) {
                out += text.get(from..at).unwrap_or_default();
                out.push('\'');
                out += &rest
                    .get(..length)
                    .unwrap_or_default()
                    .replace('\'', "'\\''");
                out.push('\'');
                at += length;
                (from, start) = (at, false);
                continue;
            }
        }
        match (quote, c) {
            _ if escaped => escaped = false,
            (None | Some('"'), '\\') => escaped = true,
            (None, '"' | '\'') => quote = Some(c),
            (Some(open), _) if open == c => quote = None,
            _ => {}
        }
        start = quote.is_none() && c.is_whitespace();
        at += c.len_utf8();
    }
    match from {
        0 => Cow::Borrowed(text),
        _ => Cow::Owned(out + text.get(from..).unwrap_or_default()),
    }
}

/// Bytes of a template's variable at the beginning: `{{ name }}`.
fn template(text: &str) -> Option<usize> {
    let inner = text.strip_prefix("{{")?.find("}}")?;
    Some(inner + 4)
}

/// Bytes of the JSON object at the beginning, up to the end of a text that is cut within it; `None` where its first part
/// is no string.
fn json(text: &str) -> Option<usize> {
    if !text.get(1..)?.trim_start().starts_with('"') {
        return None;
    }
    let (mut depth, mut string, mut escaped) = (0u32, false, false);
    for (at, c) in text.char_indices() {
        match c {
            _ if escaped => escaped = false,
            '\\' if string => escaped = true,
            '"' => string = !string,
            '{' if !string => depth += 1,
            '}' if !string => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return Some(at + 1);
        }
    }
    Some(text.len())
}

/// A program without its folder.
pub(in super::super) fn base_name(path: &str) -> &str {
    path.rsplit(['/', '\\']).next().unwrap_or(path)
}

/// True for a word that runs QEMU where it stands first.
fn is_named(word: &str) -> bool {
    let name = base_name(word);
    let variable = has_variable(name) && name.to_ascii_lowercase().contains("qemu");
    variable || is_program(word) || is_short(name) && !word.contains('=')
}

/// Names that other words may have, too; `kvm.pve` is one that a distribution has moved away.
fn is_short(name: &str) -> bool {
    let name = name.split('.').next().unwrap_or(name);
    matches!(name, "qemu" | "kvm" | "kvm-spice")
}

/// True for a word that runs QEMU wherever it stands: `qemu-system-x86_64`, `qemu-lite-system-x86_64`, `/usr/bin/kvm`.
pub(crate) fn is_program(word: &str) -> bool {
    let name = base_name(word);
    let plain = |c: u8| c.is_ascii_alphanumeric() || b"_.-".contains(&c);
    let system = name.starts_with("qemu-")
        && name
            .split_once("-system-")
            .is_some_and(|(_, of)| !of.is_empty())
        && name.bytes().all(plain);
    let path = word.starts_with('/') && is_short(name);
    !word.contains('=') && (system || path || name == "qemu-kvm")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(text: &str) -> (String, String) {
        let command = command(text).unwrap();
        (command.before.join(" "), command.arguments.join(" "))
    }

    #[test]
    fn a_command_is_found_in_what_tools_print() {
        for (text, before, arguments) in [
            (
                "root  4711 99.0 1.5 12 34 ?  Sl  Mar01  88:10 /usr/bin/kvm -id 1 -m 4G",
                "root 4711 99.0 1.5 12 34 ? Sl Mar01 88:10",
                "-id 1 -m 4G",
            ),
            (
                "● a.scope - it's up\n  Active: yes\n  └─libvirt\n   ├─emulator\n   │ └─42 /usr/bin/qemu-system-x86_64 -m 1G\n  └─vcpu0\n",
                "│ └─42",
                "-m 1G",
            ),
            (
                "[Service]\nExecStartPre=/bin/true\nExecStart=/usr/bin/qemu-system-x86_64 \\\n -m 2G\nRestart=no\n",
                "",
                "-m 2G",
            ),
            (
                "#!/bin/sh\nQEMU=/usr/bin/qemu-system-x86_64\nwhich qemu-system-x86_64\n$QEMU -m 1G \\\n  -smp 2\n$QEMU -m 2G\n",
                "",
                "-m 1G -smp 2",
            ),
            ("qemu-kvm\n-m 1G\n\n-smp\n2\necho done", "", "-m 1G -smp 2"),
            ("ssh a@b 'exec kvm -m 1G'", "exec", "-m 1G"),
            (
                "cmd='kvm -m 1G'\ncmd=\"$cmd -S\"\neval $cmd",
                "eval",
                "-m 1G -S",
            ),
        ] {
            assert_eq!(of(text), (before.into(), arguments.into()), "{text}");
        }
    }

    #[test]
    fn the_first_of_several_commands_counts_and_the_others_are_noted() {
        let two = command("kvm -m 1G &\nsleep 5\nkvm -m 2G &\n").unwrap();
        assert_eq!(
            (two.arguments, two.more),
            (["-m", "1G", "&"].map(String::from).to_vec(), true)
        );
        assert!(!command("kvm -m 1G\nkvm\n").unwrap().more);
    }

    #[test]
    fn json_without_quotes_is_one_word() {
        let text = r#"qemu-system-x86_64 -object {"qom-type": "a", "b":{"c":"}\" '"}} -m 1G '{"d": "e"}' {f} {"cut":"#;
        let command = command(text).unwrap();
        assert_eq!(
            command.arguments,
            [
                "-object",
                r#"{"qom-type": "a", "b":{"c":"}\" '"}}"#,
                "-m",
                "1G",
                r#"{"d": "e"}"#,
                "{f}",
                r#"{"cut":"#
            ]
        );
    }

    #[test]
    fn messages_of_qemu_are_no_commands() {
        for line in [
            "qemu-system-x86_64: -device vfio-pci,host=b0:00.0: warning: x",
            "the kvm -m 4G line",
            "started /usr/bin/qemu-system-x86_64 -m 4G",
        ] {
            assert_eq!(logged(line), None, "{line}");
        }
        for line in [
            "LC_ALL=C PATH=/bin /usr/bin/kvm -m 4G",
            "root 1 0 0 10:00 ? 00:00:01 qemu-system-x86_64 -m 4G",
            "└─31 /usr/libexec/qemu-kvm -m 4G",
        ] {
            assert_eq!(logged(line).unwrap(), ["-m", "4G"], "{line}");
        }
    }
}
