//! Configurations among other lines: command lines of kernels and of QEMU, and libvirt's documents.
//!
//! A command goes on behind a backslash, a document up to the end of its root; [`Text`] hands their lines to
//! [`Text::go_on`] until then.

use std::borrow::Cow;

use super::super::facts::{Facts, Known};
use super::super::finding::quote;
use super::super::line::Message;
use super::{Text, config};

impl Text<'_> {
    pub(super) fn configured(&mut self, number: u64, raw: &str, found: &Message<'_>) -> bool {
        let text = found.text.as_ref();
        if let Some(at) = text.find("<domain").filter(|at| {
            text.get(*at + 7..)
                .is_none_or(|rest| rest.starts_with([' ', '>', '\t']) || rest.is_empty())
        }) {
            self.xml = Some((number, String::new()));
            self.go_on(number, text.get(at..).unwrap_or_default());
            return true;
        }
        if let Some((_, line)) = text
            .split_once("ommand line: ")
            .filter(|_| found.logged || text.starts_with("Kernel"))
        {
            self.command_line(number, raw, line);
            return true;
        }
        if config::begins(text) {
            if text.trim_end().ends_with('\\') {
                self.command = Some((number, String::new()));
                self.go_on(number, text);
                return true;
            }
            if self.qemu(number, raw, text) {
                return true;
            }
        }
        let options = (!found.logged).then(|| kernel_options(text)).flatten();
        if let Some(line) = options {
            self.command_line(number, raw, &line);
            return true;
        }
        false
    }

    fn command_line(&mut self, number: u64, raw: &str, line: &str) {
        self.facts.content(self.file, "kernel command line");
        let evidence = quote(self.file, number, raw);
        let line: String = line.chars().take(16 << 10).collect();
        let facts = &mut *self.facts;
        Facts::push(
            &mut facts.command_lines,
            &mut facts.dropped,
            "command lines",
            line,
            evidence,
        );
    }

    pub(super) fn qemu(&mut self, number: u64, raw: &str, text: &str) -> bool {
        let Some(words) = config::qemu_words(text) else {
            return false;
        };
        self.facts.content(self.file, "QEMU's command line");
        self.configuration(number, raw, config::qemu(&words));
        true
    }

    pub(super) fn configuration(&mut self, number: u64, raw: &str, new: crate::inspect::Guest) {
        const MOST_CONFIGURATIONS: usize = 1024;
        if self.facts.configurations.len() >= MOST_CONFIGURATIONS {
            *self.facts.dropped.entry("configurations").or_default() += 1;
            return;
        }
        let known = Known {
            fact: new,
            evidence: quote(self.file, number, raw),
        };
        self.facts.configurations.push(known);
    }

    /// Lines of a document that began before.
    pub(super) fn go_on(&mut self, number: u64, raw: &str) {
        if let Some((line, mut text)) = self.xml.take() {
            let closes = raw.contains("</domain>");
            let room = text.len() + raw.len() < config::MOST_TEXT;
            if room {
                text += raw;
                text.push('\n');
            }
            if closes || !room {
                let end = text
                    .find("</domain>")
                    .map_or(text.len(), |at| at + "</domain>".len());
                let head = text.lines().next().unwrap_or_default().to_owned();
                match config::libvirt(text.get(..end).unwrap_or_default()) {
                    Some(new) => {
                        self.facts.content(self.file, "libvirt XML");
                        self.configuration(line, &head, new);
                    }
                    None => self.not_taken(line, &head),
                }
            } else {
                self.xml = Some((line, text));
            }
            return;
        }
        if let Some((line, mut text)) = self.command.take() {
            let part = raw.trim_end();
            let more = part.strip_suffix('\\');
            let room = text.len() + part.len() < config::MOST_TEXT;
            if room {
                text += more.unwrap_or(part);
                text.push(' ');
            }
            if more.is_some() && room {
                self.command = Some((line, text));
            } else if !self.qemu(line, &text.clone(), &text) {
                self.not_taken(line, &text);
            }
        }
        let _ = number;
    }
}

/// The options of a kernel's command line, also as a boot loader's file has them.
fn kernel_options(text: &str) -> Option<String> {
    let text = text.trim();
    let line = match text.split_once('=') {
        Some((name, value)) if name.contains("CMDLINE") => {
            Cow::Borrowed(value.trim_matches(['"', '\'']))
        }
        _ => Cow::Borrowed(text.strip_prefix("options ").unwrap_or(text)),
    };
    const PLAIN: [&str; 12] = [
        "quiet",
        "splash",
        "ro",
        "rw",
        "rhgb",
        "nomodeset",
        "debug",
        "single",
        "noresume",
        "text",
        "nosplash",
        "--",
    ];
    let words: Vec<&str> = line.split_whitespace().collect();
    let is_option = |word: &&&str| {
        let name = word.split('=').next().unwrap_or_default();
        let named = !name.is_empty()
            && name.bytes().all(|byte| {
                byte.is_ascii_alphanumeric()
                    || matches!(byte, b'_' | b'-' | b'.' | b'/' | b'[' | b']')
            });
        named && word.contains('=') && !word.ends_with([',', ':']) || PLAIN.contains(word)
    };
    let options = words.iter().filter(is_option).count();
    let decides = |word: &&str| {
        [
            "intel_iommu=",
            "amd_iommu=",
            "iommu=",
            "iommu.",
            "intremap=",
            "root=",
            "console=tty",
            "BOOT_IMAGE=",
            "arm-smmu",
        ]
        .iter()
        .any(|known| word.starts_with(known))
    };
    let right = options * 10 >= words.len() * 7 && words.iter().any(decides);
    right.then(|| line.into_owned())
}

#[cfg(test)]
mod tests {
    use super::kernel_options;

    #[test]
    fn command_lines_of_kernels_are_told_from_prose() {
        assert!(kernel_options("root=/dev/sda1 intel_iommu=on quiet").is_some());
        assert_eq!(
            kernel_options("GRUB_CMDLINE_LINUX_DEFAULT=\"quiet iommu=pt\"").as_deref(),
            Some("quiet iommu=pt")
        );
        assert_eq!(
            kernel_options("I gave intel_iommu=on and nothing changed"),
            None
        );
        assert_eq!(kernel_options("qemu-system-x86_64 -m 4G"), None);
    }
}
