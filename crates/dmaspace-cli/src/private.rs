//! Private data in a machine's texts: names of the machine and of its users, addresses of its network, serial numbers.
//! A text for others goes through [`Private::without`].
//!
//! Names are those of this machine; addresses and numbers are recognized by their form. A word that looks like one
//! is left out: a cause is found without it.

use std::collections::BTreeMap;
use std::path::Path;
use std::{env, fs};

use hostmem::text_at_most;

/// The longest file that is read for names.
const MOST: u64 = 1 << 20;
/// The shortest name that is looked for: a shorter one is a part of ordinary words.
const SHORTEST: usize = 3;
/// Accounts of a distribution, whose names tell nothing, have smaller numbers (`login.defs`, UID_MIN).
const FIRST_USER: u32 = 1000;
/// Names that are words of every log.
const ORDINARY: [&str; 12] = [
    "(none)",
    "admin",
    "debian",
    "guest",
    "host",
    "linux",
    "local",
    "localhost",
    "nobody",
    "root",
    "ubuntu",
    "user",
];

/// Kinds of private data, as they are shown in its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    Host,
    User,
    Serial,
    Mac,
    Address,
    Id,
    Mail,
}

impl Kind {
    /// The word in the place of the part.
    pub(crate) const fn word(self) -> &'static str {
        match self {
            Self::Host => "[host]",
            Self::User => "[user]",
            Self::Serial => "[serial]",
            Self::Mac => "[mac]",
            Self::Address => "[address]",
            Self::Id => "[id]",
            Self::Mail => "[mail]",
        }
    }
}

/// Names of this machine, and counts of what was left out.
#[derive(Debug, Default)]
pub(crate) struct Private {
    /// Names in lower case, the longest first.
    names: Vec<(String, Kind)>,
    /// Parts that were left out, by kind.
    pub(crate) left_out: BTreeMap<Kind, u64>,
}

impl Private {
    /// Reads the names of this machine below `root` (`/`).
    pub(crate) fn read(root: &Path) -> Self {
        let text = |path: &str| text_at_most(root.join(path), MOST).unwrap_or_default();
        let mut private = Self::default();
        for path in [
            "proc/sys/kernel/hostname",
            "proc/sys/kernel/domainname",
            "etc/hostname",
        ] {
            let name = text(path);
            private.name(&name, Kind::Host);
            private.name(name.split('.').next().unwrap_or_default(), Kind::Host);
        }
        for line in text("etc/passwd").lines() {
            let mut fields = line.split(':');
            let name = fields.next().unwrap_or_default();
            let number = fields.nth(1).and_then(|number| number.parse::<u32>().ok());
            if number.is_some_and(|number| (FIRST_USER..65_534).contains(&number)) {
                private.name(name, Kind::User);
                // Full names, between commas.
                for part in fields.nth(1).unwrap_or_default().split([',', ' ']) {
                    private.name(part, Kind::User);
                }
            }
        }
        for home in fs::read_dir(root.join("home"))
            .into_iter()
            .flatten()
            .flatten()
        {
            private.name(&home.file_name().to_string_lossy(), Kind::User);
        }
        private.name(&text("etc/machine-id"), Kind::Id);
        for number in [
            "product_serial",
            "board_serial",
            "chassis_serial",
            "product_uuid",
            "chassis_asset_tag",
        ] {
            private.name(&text(&format!("sys/class/dmi/id/{number}")), Kind::Serial);
        }
        private
    }

    /// As [`Self::read`], with the user's own name.
    pub(crate) fn of_this_machine() -> Self {
        let mut private = Self::read("/".as_ref());
        for variable in ["USER", "LOGNAME", "SUDO_USER"] {
            private.name(&env::var(variable).unwrap_or_default(), Kind::User);
        }
        private
    }

    fn name(&mut self, name: &str, kind: Kind) {
        let name = name.trim().to_lowercase();
        let known = self.names.iter().any(|(known, _)| *known == name);
        if name.len() < SHORTEST || known || ORDINARY.contains(&name.as_str()) {
            return;
        }
        let at = self
            .names
            .partition_point(|(known, _)| known.len() >= name.len());
        self.names.insert(at, (name, kind));
    }

    /// The text with a word in place of each piece of private data.
    pub(crate) fn without(&mut self, text: &str) -> String {
        let mut out = String::with_capacity(text.len());
        let mut rest = text;
        let mut before = ' ';
        while let Some(c) = rest.chars().next() {
            let found = if is_part(before) { None } else { self.at(rest) };
            let length = match found {
                Some((kind, length)) => {
                    *self.left_out.entry(kind).or_default() += 1;
                    out += kind.word();
                    length
                }
                None => {
                    out.push(c);
                    c.len_utf8()
                }
            };
            before = rest
                .get(..length)
                .and_then(|part| part.chars().next_back())
                .unwrap_or(c);
            rest = rest.get(length..).unwrap_or_default();
        }
        out
    }

    /// Private data at the beginning of a word, and its bytes.
    fn at(&self, text: &str) -> Option<(Kind, usize)> {
        let ends = |length: usize| {
            let next = text.get(length..).and_then(|rest| rest.chars().next());
            !next.is_some_and(is_part)
        };
        for (name, kind) in &self.names {
            let part = text.get(..name.len());
            if part.is_some_and(|part| part.to_lowercase() == *name) && ends(name.len()) {
                return Some((*kind, name.len()));
            }
        }
        let end = text.find(|c: char| c.is_whitespace() || "\"'(),;[]{}<>=|/".contains(c));
        let word = text.get(..end.unwrap_or(text.len())).unwrap_or_default();
        let word = word.trim_end_matches(['.', ':', '?', '!']);
        if let Some(kind) = by_form(word) {
            return Some((kind, word.len()));
        }
        serial(text)
    }
}

/// A character within a word.
fn is_part(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// The kind of a word by its form.
fn by_form(word: &str) -> Option<Kind> {
    let hex = |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_hexdigit());
    let groups = |sign: char, lengths: &[usize]| {
        let parts: Vec<&str> = word.split(sign).collect();
        parts.len() == lengths.len()
            && parts
                .iter()
                .zip(lengths)
                .all(|(part, length)| hex(part) && part.len() == *length)
    };
    if groups(':', &[2; 6]) || groups('-', &[2; 6]) || groups(':', &[2; 8]) {
        return Some(Kind::Mac);
    }
    if groups('-', &[8, 4, 4, 4, 12]) {
        return Some(Kind::Id);
    }
    // With a port or the length of a prefix behind it.
    let bare = word.split(['/', '%']).next().unwrap_or(word);
    let without_port = bare.rsplit_once(':').map_or(bare, |(host, _)| host);
    let is_v4 = |text: &str| text.parse::<std::net::Ipv4Addr>().is_ok();
    let v6 = bare.contains("::") || bare.matches(':').count() == 7;
    if is_v4(bare)
        || is_v4(without_port)
        || v6 && bare.len() > 2 && bare.parse::<std::net::Ipv6Addr>().is_ok()
    {
        return Some(Kind::Address);
    }
    let mail = word.split_once('@').filter(|(user, host)| {
        let plain = |text: &str| {
            !text.is_empty()
                && text
                    .bytes()
                    .all(|byte| byte.is_ascii_alphanumeric() || b"._+-".contains(&byte))
        };
        plain(user) && plain(host)
    });
    mail.map(|_| Kind::Mail)
}

/// A value that is called a serial number: `SerialNumber: X`, `serial=X`, `S/N X`.
fn serial(text: &str) -> Option<(Kind, usize)> {
    const CALLED: [&str; 5] = ["serial number", "serialnumber", "serial", "s/n", "sn"];
    let lower: String = text.chars().take(16).flat_map(char::to_lowercase).collect();
    let called = CALLED
        .into_iter()
        .find(|called| lower.starts_with(called))?;
    let behind = text.get(called.len()..)?;
    let value = behind.trim_start_matches([' ', ':', '=', '"', '#']);
    let signs = behind.get(..behind.len() - value.len())?;
    let length = value
        .find(|c: char| c.is_whitespace() || ",;\"'".contains(c))
        .unwrap_or(value.len());
    // A name of a port (`serial8250`, `-serial stdio`) has no sign before it, and a number has digits.
    let is_number = signs.contains([':', '=', '#'])
        && value
            .get(..length)?
            .bytes()
            .any(|byte| byte.is_ascii_digit());
    is_number.then_some((Kind::Serial, called.len() + signs.len() + length))
}

/// The name of a unit up to what may be the address of its registers: `smmu3` of `smmu3.0x0000000005000000`.
pub(crate) fn without_address(name: &str) -> &str {
    name.split(['.', '@', ':']).next().unwrap_or_default()
}

/// A sentence whose words in hexadecimal are left out.
pub(crate) fn without_addresses(sentence: &str) -> String {
    let words = sentence.split(' ');
    let shown: Vec<_> = words
        .map(|word| if word.contains("0x") { "…" } else { word })
        .collect();
    shown.join(" ")
}

/// The kernel's version, without what a distribution or a user adds in words: `6.12.48-amd64`, but of
/// `6.12.48-myhost.example` only the number.
pub(crate) fn release(text: &str) -> String {
    let text = text.trim();
    let number = text.len()
        - text
            .trim_start_matches(|c: char| c.is_ascii_digit() || c == '.')
            .len();
    let (number, rest) = text.split_at(number);
    let known = ["-amd64", "-arm64", "-generic", "-cloud-amd64"];
    let known = known.into_iter().find(|known| rest.ends_with(known));
    format!("{number}{}", known.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_files::Files;

    #[test]
    fn names_addresses_and_numbers_go_and_the_rest_stays() {
        let files = Files::new();
        files
            .file("proc/sys/kernel/hostname", "build7.example.org\n")
            .file("etc/passwd", "root:x:0:0:root:/root:/bin/sh\nahmet:x:1000:1000:Ahmet Yildiz,,,:/home/ahmet:/bin/sh\n")
            .file("sys/class/dmi/id/product_serial", "CZ12345\n")
            .directory("home/mia");
        let mut private = Private::read(&files.path(""));
        for (text, expected) in [
            (
                "build7 kernel: build7.example.org: x",
                "[host] kernel: [host]: x",
            ),
            (
                "root=/dev/sda1 rebuild7 ahmet's /home/mia/vm.img yildiz",
                "root=/dev/sda1 rebuild7 [user]'s /home/[user]/vm.img [user]",
            ),
            (
                "eth0: 52:54:00:12:34:56, 10.0.0.7:22 fe80::1%eth0 2001:db8::1/64",
                "eth0: [mac], [address] [address] [address]/64",
            ),
            (
                "root=UUID=0a1b2c3d-0000-1111-2222-333344445555 a.b@c.de",
                "root=UUID=[id] [mail]",
            ),
            (
                "usb: SerialNumber: 4711AB, serial=X9 Serial8250 -serial stdio CZ12345",
                "usb: [serial], [serial] Serial8250 -serial stdio [serial]",
            ),
            // Addresses of devices and memory, versions and registers are what is asked for.
            (
                "0000:01:00.0 0xfeedf000 6.12.48 [8086:10d3] 00100000-7fffffff : System RAM 10.0",
                "0000:01:00.0 0xfeedf000 6.12.48 [8086:10d3] 00100000-7fffffff : System RAM 10.0",
            ),
        ] {
            assert_eq!(private.without(text), expected);
        }
        assert_eq!(private.left_out[&Kind::Mac], 1);
    }

    #[test]
    fn a_units_name_has_no_address_and_a_kernels_no_name() {
        assert_eq!(without_address("smmu3.0x0000000005000000"), "smmu3");
        assert_eq!(without_address("dmar0"), "dmar0");
        assert_eq!(release("6.12.48+deb13-amd64\n"), "6.12.48-amd64");
        assert_eq!(release("7.2.0-rc1-myhost"), "7.2.0");
    }
}
