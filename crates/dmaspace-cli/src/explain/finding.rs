//! Findings: a cause, how certain it is, and the evidence for it.

use std::collections::BTreeSet;

use serde::ser::SerializeSeq as _;
use serde::{Serialize, Serializer};

/// The most lines that a finding quotes; the count says how many there were.
const MOST_EVIDENCE: usize = 256;
/// The most bytes of a line that are quoted.
const MOST_QUOTE: usize = 400;
/// The most ranges of addresses that a finding lists.
const MOST_RANGES: usize = 1024;

/// How certain a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Certainty {
    /// The input cannot decide it.
    Unknown,
    /// It fits everything that was given, and another reason does, too.
    Likely,
    /// It follows from the input by a specification, by the documented behaviour of a program, or by arithmetic.
    Certain,
}

impl Certainty {
    /// The word that is printed.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Unknown => "unknown",
            Self::Likely => "likely",
            Self::Certain => "certain",
        }
    }
}

/// The direction of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Direction {
    /// From memory.
    Read,
    /// To memory.
    Write,
    /// Instructions.
    Execute,
    /// The record does not say, or nothing was accessed.
    #[default]
    Unknown,
}

/// A place in the input.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Place {
    /// The number of the file, in the order in which files were read.
    pub file: usize,
    /// Where in it.
    pub at: At,
}

/// Where in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum At {
    /// All of it.
    Whole,
    /// A line, from 1.
    Line(u64),
    /// Bytes from the start of a binary table.
    Offset(u64),
}

/// A place with its text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Evidence {
    /// Where.
    pub place: Place,
    /// The text there, free of control characters; empty for a whole file.
    pub quote: String,
}

/// A quotation of a line.
pub(super) fn quote(file: usize, line: u64, text: &str) -> Evidence {
    let mut end = text.len().min(MOST_QUOTE);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    Evidence {
        place: Place {
            file,
            at: At::Line(line),
        },
        quote: plain(text.get(..end).unwrap_or_default().trim()),
    }
}

/// A finding.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Finding {
    /// The cause, by its name in `docs/explain.md`.
    pub cause: &'static str,
    /// How certain it is.
    pub certainty: Certainty,
    /// PCI addresses or stream numbers.
    pub devices: Vec<String>,
    /// Ranges, first and last address.
    pub addresses: Vec<(u64, u64)>,
    /// False where there are more addresses than `addresses` has.
    pub addresses_complete: bool,
    /// The direction.
    pub access: Direction,
    /// How often it happened.
    pub count: Option<u64>,
    /// False where `count` is a lower bound.
    pub count_exact: bool,
    /// The evidence, in order.
    pub evidence: Vec<Evidence>,
    /// Settings and commands that help.
    pub advice: Vec<Advice>,
    /// One or two sentences.
    pub text: String,
    /// Document and section, or file, function and version of Linux or QEMU, that the rule is from.
    pub source: String,
}

/// Something to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Advice {
    /// A sentence, or a setting with a sentence.
    Text(String),
    /// The words of a command that can be copied, each as the program gets it.
    Command(Vec<String>),
    /// The same command for several: each is put in the place of [`Advice::EACH`].
    Each(Vec<String>, Vec<String>),
    /// The words of a command, and the file that gets its output.
    Output(Vec<String>, &'static str),
}

impl Advice {
    pub(crate) fn text(text: impl Into<String>) -> Self {
        Self::Text(text.into())
    }

    pub(crate) fn command<const N: usize>(words: [&str; N]) -> Self {
        Self::Command(words.iter().map(|word| (*word).to_owned()).collect())
    }

    /// A command whose output goes to a file.
    pub(crate) fn output<const N: usize>(words: [&str; N], file: &'static str) -> Self {
        let words = words.iter().map(|word| (*word).to_owned());
        Self::Output(words.collect(), file)
    }

    /// The word of a command that stands for each of several.
    pub(crate) const EACH: &'static str = "$d";

    /// A command for each of these; for one of them a plain command.
    pub(crate) fn each<const N: usize>(these: &[&str], words: [&str; N]) -> Self {
        let words = words.iter().map(|word| (*word).to_owned());
        match these {
            [one] => {
                let put = |word: String| match word == Self::EACH {
                    true => (*one).to_owned(),
                    false => word,
                };
                Self::Command(words.map(put).collect())
            }
            several => Self::Each(
                several.iter().map(|one| (*one).to_owned()).collect(),
                words.collect(),
            ),
        }
    }

    /// One line, the command as a shell takes it.
    pub(crate) fn line(&self) -> String {
        match self {
            Self::Text(text) => text.clone(),
            Self::Command(words) => shell(words),
            Self::Output(words, file) => format!("{} > {}", shell(words), quoted(file)),
            Self::Each(these, words) => {
                let words = words.iter().map(|word| match word == Self::EACH {
                    true => "\"$d\"".to_owned(),
                    false => quoted(word),
                });
                let words = words.collect::<Vec<_>>().join(" ");
                format!("for d in {}; do {words}; done", shell(these))
            }
        }
    }
}

/// The words with a shell's quotes.
pub(crate) fn shell(words: &[String]) -> String {
    let quoted = words.iter().map(|word| quoted(word));
    quoted.collect::<Vec<_>>().join(" ")
}

/// A word with a shell's quotes, where it needs them.
pub(crate) fn quoted(word: &str) -> String {
    let word = plain(word);
    match shlex::try_quote(&word) {
        Ok(quoted) => quoted.into_owned(),
        // A null byte is a control character, which is no more there.
        Err(_) => "''".into(),
    }
}

/// The text without control characters, and without characters that change the direction of text.
pub(crate) fn plain(text: &str) -> String {
    let hidden = |c: char| {
        c.is_control()
            || matches!(c, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{feff}')
    };
    text.chars()
        .map(|c| if c == '\t' { ' ' } else { c })
        .filter(|c| !hidden(*c))
        .collect()
}

impl Finding {
    pub(crate) fn new(cause: &'static str, certainty: Certainty, source: &'static str) -> Self {
        Self {
            cause,
            certainty,
            devices: Vec::new(),
            addresses: Vec::new(),
            addresses_complete: true,
            access: Direction::Unknown,
            count: None,
            count_exact: true,
            evidence: Vec::new(),
            advice: Vec::new(),
            text: String::new(),
            source: source.to_owned(),
        }
    }

    pub(crate) fn certain(cause: &'static str, source: &'static str) -> Self {
        Self::new(cause, Certainty::Certain, source)
    }

    pub(crate) fn likely(cause: &'static str, source: &'static str) -> Self {
        Self::new(cause, Certainty::Likely, source)
    }

    pub(crate) fn device(mut self, device: impl Into<String>) -> Self {
        let device = device.into();
        if !self.devices.contains(&device) {
            self.devices.push(device);
        }
        self
    }

    pub(crate) fn devices<T: Into<String>>(self, devices: impl IntoIterator<Item = T>) -> Self {
        devices.into_iter().fold(self, Self::device)
    }

    pub(crate) fn range(mut self, first: u64, last: u64) -> Self {
        if self.addresses.contains(&(first, last)) {
            return self;
        }
        match self.addresses.len() < MOST_RANGES {
            true => self.addresses.push((first, last)),
            false => self.addresses_complete = false,
        }
        self
    }

    pub(crate) fn evidence<'a>(mut self, evidence: impl IntoIterator<Item = &'a Evidence>) -> Self {
        for one in evidence {
            let known = self.evidence.iter().any(|known| known.place == one.place);
            if !known && self.evidence.len() < MOST_EVIDENCE {
                self.evidence.push(one.clone());
            }
        }
        self
    }

    pub(crate) fn advise(mut self, advice: Advice) -> Self {
        if !self.advice.contains(&advice) {
            self.advice.push(advice);
        }
        self
    }

    pub(crate) fn say(mut self, text: impl Into<String>) -> Self {
        self.text = text.into();
        self
    }
}

/// A report.
#[derive(Clone, Debug, Default)]
pub(super) struct Report {
    /// The names of the files, as the user gave them.
    pub files: Vec<String>,
    /// The findings, the most certain ones of each group first.
    pub findings: Vec<Finding>,
    /// Remarks, a line each: input that was not read.
    pub notes: Vec<String>,
    /// Contents of each file.
    pub contents: Vec<(usize, BTreeSet<&'static str>)>,
}

impl Report {
    /// A place as it is printed: `FILE`, `FILE:LINE`, `FILE:0xOFFSET`.
    pub(crate) fn place(&self, place: &Place) -> String {
        let file = self.files.get(place.file).map_or("?", String::as_str);
        match place.at {
            At::Whole => file.to_owned(),
            At::Line(line) => format!("{file}:{line}"),
            At::Offset(offset) => format!("{file}:{offset:#x}"),
        }
    }

    /// The places of evidence, with lines that follow one another joined.
    pub(crate) fn places(&self, evidence: &[Evidence]) -> Vec<String> {
        let mut places: Vec<&Place> = evidence.iter().map(|one| &one.place).collect();
        places.sort();
        places.dedup();
        let mut out = Vec::new();
        let mut open: Option<(usize, u64, u64)> = None;
        let close = |open: &mut Option<(usize, u64, u64)>, out: &mut Vec<String>| {
            if let Some((file, first, last)) = open.take() {
                let name = self.files.get(file).map_or("?", String::as_str);
                out.push(match last - first {
                    0 => format!("{name}:{first}"),
                    _ => format!("{name}:{first}-{last}"),
                });
            }
        };
        for place in places {
            match (place.at, &mut open) {
                (At::Line(line), Some((file, _, last)))
                    if *file == place.file && line == *last + 1 =>
                {
                    *last = line;
                }
                (At::Line(line), _) => {
                    close(&mut open, &mut out);
                    open = Some((place.file, line, line));
                }
                _ => {
                    close(&mut open, &mut out);
                    out.push(self.place(place));
                }
            }
        }
        close(&mut open, &mut out);
        out
    }
}

/// A finding as `--json` prints it.
#[derive(Serialize)]
struct JsonFinding<'a> {
    cause: &'static str,
    certainty: Certainty,
    devices: &'a [String],
    #[serde(serialize_with = "ranges")]
    addresses: &'a [(u64, u64)],
    addresses_complete: bool,
    access: Direction,
    #[serde(skip_serializing_if = "Option::is_none")]
    count: Option<u64>,
    count_exact: bool,
    evidence: Vec<String>,
    advice: Vec<String>,
    text: &'a str,
    source: &'a str,
}

#[derive(Serialize)]
struct JsonFile<'a> {
    file: &'a str,
    contents: &'a BTreeSet<&'static str>,
}

#[derive(Serialize)]
struct JsonReport<'a> {
    findings: Vec<JsonFinding<'a>>,
    files: Vec<JsonFile<'a>>,
    notes: &'a [String],
}

impl Serialize for Report {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let findings = self.findings.iter().map(|one| JsonFinding {
            cause: one.cause,
            certainty: one.certainty,
            devices: &one.devices,
            addresses: &one.addresses,
            addresses_complete: one.addresses_complete,
            access: one.access,
            count: one.count,
            count_exact: one.count_exact,
            evidence: self.places(&one.evidence),
            advice: one.advice.iter().map(Advice::line).collect(),
            text: &one.text,
            source: &one.source,
        });
        let files = self.contents.iter().map(|(file, contents)| JsonFile {
            file: self.files.get(*file).map_or("?", String::as_str),
            contents,
        });
        JsonReport {
            findings: findings.collect(),
            files: files.collect(),
            notes: &self.notes,
        }
        .serialize(to)
    }
}

fn ranges<S: Serializer>(ranges: &[(u64, u64)], to: S) -> Result<S::Ok, S::Error> {
    let mut list = to.serialize_seq(Some(ranges.len()))?;
    for (first, last) in ranges {
        list.serialize_element(&[format!("{first:#x}"), format!("{last:#x}")])?;
    }
    list.end()
}
