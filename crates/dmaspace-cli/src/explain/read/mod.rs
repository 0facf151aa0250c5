//! Readers: text line by line, and binary tables, to [`Facts`].
//!
//! A file may be any mixture. Each line goes to the readers that a few words of it ask for; lines without a log's
//! prefix also to the readers of listings. Memory is bounded by the facts that are kept, and not by the input.

pub(super) mod acpi;
mod block;
pub(super) mod config;
mod document;
pub(super) mod dump;
pub(super) mod forms;
pub(super) mod lspci;
pub(super) mod monitor;
mod words;

use std::borrow::Cow;
use std::collections::{BTreeMap, VecDeque};
use std::io::{self, BufRead};

use iommu::log;

use super::facts::{Driver, Facts, Known, Line, Member, Vendor, is_vfio};
use super::finding::{Evidence, quote};
use super::folds::printed_by;
use super::line::{Message, is_open};
use super::number::pci;
use words::{AMD, CONFIGURATION, INTEL, MONITOR, NEAR, UNIT, VFIO};

pub(super) use words::Concerned;

/// Lines whose text is kept for quotations.
const MOST_RECENT: usize = 512;
/// Lines of a unit that wait for the rest of their fault.
const MOST_DOUBTED: usize = 64;
/// The most joined lines of a log that a mail has wrapped.
const MOST_WRAPPED: u64 = 4;

/// Lines of a driver that has read its options, which it does on machines of other vendors as well.
///
/// Source: Linux `drivers/iommu/intel/iommu.c`, `intel_iommu_setup`; `drivers/iommu/amd/init.c`, `parse_amd_iommu_options`.
const OF_OPTIONS: [&str; 8] = [
    ": IOMMU enabled",
    ": IOMMU disabled",
    "Unknown option",
    "deprecated; use",
    "Disable GFX device mapping",
    "Forcing DAC for PCI devices",
    "Disable supported super page",
    "Enable scalable mode if",
];

/// A line of a log that may go on in the next one.
#[derive(Debug)]
struct Open {
    interest: u8,
    line: u64,
    last: u64,
    text: String,
    seconds: Option<f64>,
    since_boot: bool,
    weight: u64,
}

/// Reads one text.
pub(super) struct Text<'f> {
    facts: &'f mut Facts,
    file: usize,
    log: log::Reader,
    events: Vec<log::LogEvent>,
    listing: lspci::Listing,
    hexdump: acpi::Hexdump,
    dumps: dump::Dumps,
    open: Option<Open>,
    /// A command line that goes on behind a backslash.
    command: Option<(u64, String)>,
    /// XML up to the end of its root.
    xml: Option<(u64, String)>,
    /// The header of `ls` or of a script that lists a group.
    group: Option<u32>,
    recent: VecDeque<(u64, String)>,
    weights: BTreeMap<u64, u64>,
    near: u32,
    /// A tree of lspci has begun.
    tree: bool,
    /// The file is known as a kernel's log.
    is_log: bool,
    since_boot: bool,
    vendors: u8,
    /// Lines without a reader.
    pub(super) unread: u64,
    first_unread: Option<Evidence>,
    /// Lines of a unit without a reader so far: a later line may complete the fault that they belong to.
    doubted: VecDeque<(u64, Evidence)>,
}

impl<'f> Text<'f> {
    pub(super) fn new(facts: &'f mut Facts, file: usize) -> Self {
        Self {
            facts,
            file,
            log: log::Reader::new(),
            events: Vec::new(),
            listing: lspci::Listing::default(),
            hexdump: acpi::Hexdump::default(),
            dumps: dump::Dumps::default(),
            open: None,
            command: None,
            xml: None,
            group: None,
            recent: VecDeque::new(),
            weights: BTreeMap::new(),
            near: 0,
            is_log: false,
            tree: false,
            since_boot: false,
            vendors: 0,
            unread: 0,
            first_unread: None,
            doubted: VecDeque::new(),
        }
    }

    /// Reads all lines.
    pub(super) fn read(
        mut self,
        text: impl BufRead,
        progress: &mut dyn FnMut(u64),
    ) -> io::Result<()> {
        let (mut number, mut done) = (0u64, 0u64);
        let result = block::each(text, |block| {
            for (raw, found, interest) in block.lines() {
                number += 1;
                self.line(number, raw, found, interest);
            }
            done += block.bytes;
            progress(done);
        });
        self.finish();
        result
    }

    fn line(&mut self, number: u64, raw: &str, found: Message<'_>, interest: u8) {
        if self.xml.is_some() || self.command.is_some() {
            self.go_on(number, raw);
            return;
        }
        if let Some(open) = &mut self.open {
            let joined = open.last - open.line < MOST_WRAPPED && number == open.last + 1;
            if joined && !found.logged && !found.text.trim().is_empty() && !looks_new(&found.text) {
                open.text.push(' ');
                open.text += found.text.trim();
                open.last = number;
                self.recent.push_back((number, raw.to_owned()));
                return;
            }
        }
        self.flush();
        self.begin(number, raw, found, interest);
    }

    fn begin(&mut self, number: u64, raw: &str, found: Message<'_>, interest: u8) {
        if !found.logged && self.listed(number, raw, &found.text) {
            return;
        }
        let options = !found.logged && found.text.contains('=');
        if (interest & CONFIGURATION != 0 || options) && self.configured(number, raw, &found) {
            return;
        }
        self.vendor(interest, number, raw);
        if interest & (UNIT | MONITOR | VFIO) != 0 || self.near > 0 {
            self.near = match interest & UNIT {
                0 => self.near.saturating_sub(1),
                _ => NEAR,
            };
            self.remember(number, raw);
            if is_open(&found.text) {
                self.open = Some(Open {
                    interest,
                    line: number,
                    last: number,
                    text: found.text.into_owned(),
                    seconds: found.seconds,
                    since_boot: found.since_boot,
                    weight: found.weight,
                });
            } else {
                self.take(interest, number, &found);
            }
        } else if !found.logged && !self.listed_last(number, raw) {
            self.not_taken(number, raw);
        }
    }

    /// Files of one form, before the words of a log are looked for.
    fn listed(&mut self, number: u64, raw: &str, text: &str) -> bool {
        let (facts, file) = (&mut *self.facts, self.file);
        if self.hexdump.line(facts, file, number, raw) || self.dumps.line(facts, file, number, raw)
        {
            return true;
        }
        let trimmed = text.trim_start();
        // A script's listing: `IOMMU Group 1:`, below it functions; `ls`: a path, below it links.
        if let Some(group) = group_heading(trimmed) {
            self.group = Some(group);
            facts.content(file, "IOMMU groups");
            return true;
        }
        if let Some(group) = self.group {
            // `lrwxrwxrwx ... 0000:02:00.0 -> ../../../../devices/x`, or a line of lspci.
            let device = match trimmed.split_once(" -> ") {
                Some((link, _)) => link.split_whitespace().last().and_then(pci),
                None => trimmed.split_whitespace().next().and_then(pci),
            };
            match device {
                Some(device) => {
                    let member = Member { group, device };
                    let evidence = quote(file, number, raw);
                    Facts::push(
                        &mut facts.members,
                        &mut facts.dropped,
                        "members",
                        member,
                        evidence,
                    );
                    self.listing.close();
                    let _ = self.listing.line(facts, file, number, trimmed);
                    return true;
                }
                None if trimmed.is_empty() || trimmed.starts_with("total ") => return true,
                None if raw.starts_with([' ', '\t']) => {
                    return self.listing.line(facts, file, number, raw);
                }
                None => self.group = None,
            }
        }
        // `IOMMU Group 1 00:01.0 PCI bridge [0604]: ...`: member and function.
        let function = trimmed
            .strip_prefix("IOMMU Group ")
            .or_else(|| trimmed.strip_prefix("IOMMU group "))
            .and_then(|rest| rest.split_once(' '));
        if let Some((_, function)) = function {
            if forms::line(facts, file, number, text) {
                let _ = self
                    .listing
                    .line(facts, file, number, function.trim_start());
                return true;
            }
        }
        if self.listing.line(facts, file, number, raw) {
            return true;
        }
        // `lspci -t`: where devices hang, which its list tells, too.
        let root = trimmed.starts_with("-[") && trimmed.contains("]-");
        if root || self.tree && trimmed.starts_with(['+', '\\', '|', '-']) {
            self.tree = true;
            facts.content(file, "lspci tree");
            return true;
        }
        forms::line(facts, file, number, text)
    }

    /// Forms that a line is tried for last.
    fn listed_last(&mut self, number: u64, raw: &str) -> bool {
        let Some(line) = monitor::line(raw.trim()) else {
            return monitor::is_remark(raw);
        };
        self.facts
            .content(self.file, "lines of a kernel or monitor");
        self.facts.line(line, quote(self.file, number, raw));
        true
    }

    fn vendor(&mut self, interest: u8, number: u64, raw: &str) {
        for (bit, vendor) in [(INTEL, Vendor::Intel), (AMD, Vendor::Amd)] {
            let first = interest & bit != 0 && self.vendors & bit == 0;
            if first && !OF_OPTIONS.iter().any(|words| raw.contains(words)) {
                self.vendors |= bit;
                let known = Known {
                    fact: vendor,
                    evidence: quote(self.file, number, raw),
                };
                self.facts.vendors.push(known);
            }
        }
    }

    /// Keeps the text of a line for quotations.
    fn remember(&mut self, number: u64, raw: &str) {
        // The text of the oldest line gives its room.
        let full = self.recent.len() >= MOST_RECENT;
        let oldest = full.then(|| self.recent.pop_front()).flatten();
        let mut room = oldest.map_or_else(String::new, |(_, text)| text);
        room.clear();
        let mut end = raw.len().min(400);
        while !raw.is_char_boundary(end) {
            end -= 1;
        }
        room += raw.get(..end).unwrap_or_default();
        self.recent.push_back((number, room));
    }

    fn flush(&mut self) {
        if let Some(open) = self.open.take() {
            let found = Message {
                text: Cow::Owned(open.text),
                seconds: open.seconds,
                since_boot: open.since_boot,
                logged: true,
                weight: open.weight,
            };
            self.take(open.interest, open.line, &found);
        }
    }

    fn take(&mut self, interest: u8, line: u64, found: &Message<'_>) {
        let text = found.text.as_ref();
        if interest & VFIO != 0 {
            self.bound(line, text);
        }
        let asked = interest & (MONITOR | VFIO) != 0;
        if let Some(fact) = asked.then(|| monitor::line(text)).flatten() {
            self.facts
                .content(self.file, "lines of a kernel or monitor");
            let evidence = self.quotation(line, text);
            // The driver's own walk belongs to the fault before it.
            if !matches!(fact, Line::SoftWalk { .. }) {
                self.facts.line(fact, evidence);
                return;
            }
            self.facts.line(fact, evidence);
        }
        if found.weight > 1 && self.weights.len() < 4096 {
            self.weights.insert(line, found.weight);
        }
        self.since_boot = found.since_boot;
        let mut events = std::mem::take(&mut self.events);
        self.log.line(text, line, found.seconds, &mut events);
        let decoded = !events.is_empty();
        self.events_of(&mut events, text);
        self.events = events;
        if decoded {
            return;
        }
        let iommufd = interest & UNIT != 0 && text.contains("iommufd");
        let about = interest & (MONITOR | VFIO) != 0 || iommufd;
        let failed = matches!(
            self.facts.lines.last().map(|known| &known.fact),
            Some(Line::MapFailed { .. })
        );
        if about && monitor::is_context(text, failed) {
            return;
        }
        if about && looks_failed(text) {
            let evidence = self.quotation(line, text);
            self.facts.not_decoded(text, evidence);
        } else if !found.logged && !monitor::is_remark(text) {
            self.doubt(line, text);
        }
    }

    /// Keeps a line that the next ones may explain.
    fn doubt(&mut self, line: u64, text: &str) {
        if text.trim().is_empty() {
            return;
        }
        if self.doubted.len() >= MOST_DOUBTED {
            if let Some((_, oldest)) = self.doubted.pop_front() {
                self.count_unread(oldest);
            }
        }
        self.doubted.push_back((line, quote(self.file, line, text)));
    }

    fn count_unread(&mut self, evidence: Evidence) {
        self.unread += 1;
        let first = self.first_unread.as_ref();
        if first.is_none_or(|first| evidence.place < first.place) {
            self.first_unread = Some(evidence);
        }
    }

    /// Notes a driver of VFIO that has printed a line about its device: `vfio-pci 0000:3b:00.0: enabling device`. QEMU's
    /// `vfio 0000:3b:00.0: ` names no driver. What a listing says counts before.
    fn bound(&mut self, line: u64, text: &str) {
        let Some((driver, device)) = printed_by(text) else {
            return;
        };
        if driver == "vfio" || !is_vfio(driver) {
            return;
        }
        let evidence = self.quotation(line, text);
        if let Some(function) = self.facts.function(&device, &evidence) {
            if function.driver == Driver::Unknown {
                function.driver = Driver::Bound(driver.to_owned());
            }
        }
    }

    fn quotation(&self, line: u64, otherwise: &str) -> Evidence {
        let mut recent = self.recent.iter().rev();
        let text = recent.find(|(number, _)| *number == line);
        quote(self.file, line, text.map_or(otherwise, |(_, text)| text))
    }

    fn events_of(&mut self, events: &mut Vec<log::LogEvent>, text: &str) {
        let file = self.file;
        if !events.is_empty() && !self.is_log {
            self.is_log = true;
            self.facts.content(file, "kernel log");
        }
        for event in events.drain(..) {
            match event {
                log::LogEvent::Fault(record) => {
                    self.doubted
                        .retain(|(line, _)| !record.lines.contains(line));
                    let weights = record
                        .lines
                        .iter()
                        .filter_map(|line| self.weights.get(line));
                    let weight = weights.max().copied().unwrap_or(1);
                    let recent = &self.recent;
                    let quoted = |line: u64| {
                        let found = recent.iter().rev().find(|(number, _)| *number == line);
                        found.map_or_else(String::new, |(_, text)| text.clone())
                    };
                    self.facts
                        .folds
                        .add(file, &record, weight, self.since_boot, text, quoted);
                }
                log::LogEvent::Suppressed(suppressed) => {
                    let evidence = self.quotation(suppressed.line, text);
                    self.facts.folds.suppress(file, suppressed, evidence);
                }
                log::LogEvent::Dump(dump) => {
                    self.doubted.retain(|(line, _)| !dump.lines.contains(line));
                    let lines = dump.lines.iter();
                    let evidence = lines.map(|line| self.quotation(*line, "")).collect();
                    if self.facts.log_dumps.len() < super::facts::MOST {
                        self.facts.log_dumps.push((*dump, evidence));
                    } else {
                        *self.facts.dropped.entry("dumps").or_default() += 1;
                    }
                }
                log::LogEvent::Undecoded(note) => {
                    let evidence = self.quotation(note.line, &note.text);
                    self.facts.not_decoded(&note.text, evidence);
                }
                log::LogEvent::Overflow(note) => {
                    let family = note.family;
                    if let Some(fold) =
                        family.and_then(|family| self.facts.folds.latest(file, family))
                    {
                        fold.exact = false;
                    }
                }
                _ => {}
            }
        }
    }

    fn not_taken(&mut self, number: u64, raw: &str) {
        if raw.trim().is_empty() {
            return;
        }
        match self.first_unread {
            Some(_) => self.unread += 1,
            None => self.count_unread(quote(self.file, number, raw)),
        }
    }

    fn finish(mut self) {
        self.flush();
        for (line, text) in self.xml.take().into_iter().chain(self.command.take()) {
            let taken = match config::libvirt(&text) {
                Some(new) => {
                    self.configuration(line, text.lines().next().unwrap_or_default(), new);
                    true
                }
                None => self.qemu(line, &text, &text),
            };
            if !taken {
                self.not_taken(line, &text);
            }
        }
        let mut events = std::mem::take(&mut self.events);
        self.log.finish(&mut events);
        self.events_of(&mut events, "");
        self.hexdump.finish(self.facts, self.file);
        self.dumps.finish(self.facts);
        std::mem::take(&mut self.listing).finish(self.facts);
        self.facts.folds.finish();
        for (_, evidence) in std::mem::take(&mut self.doubted) {
            self.count_unread(evidence);
        }
        if let Some(evidence) = self.first_unread {
            let lines = match self.unread {
                1 => "a line was".to_owned(),
                lines => format!("{lines} lines were"),
            };
            let known = self.facts.contents.contains_key(&self.file);
            self.facts.unread.push((self.file, known, lines, evidence));
        }
    }
}

/// A line without a prefix that begins a message of its own, and continues none.
fn looks_new(text: &str) -> bool {
    let word = text.split_whitespace().next().unwrap_or_default();
    (word.ends_with(':') && word.len() > 2) || text.contains("callbacks suppressed")
}

/// A line of VFIO or iommufd that tells of a failure.
fn looks_failed(text: &str) -> bool {
    let lower = text.to_ascii_lowercase();
    let about = ["vfio", "iommufd", "ioas"];
    let failed = [
        "fail", "error", "cannot", "can't", "unable", "denied", "fault", "refus",
    ];
    // Messages that were kept back, and no failures.
    let suppressed = lower.ends_with(" callbacks suppressed");
    !suppressed
        && about.iter().any(|part| lower.contains(part))
        && failed.iter().any(|part| lower.contains(part))
}

/// `IOMMU Group 1:`, `/sys/kernel/iommu_groups/1/devices:`.
fn group_heading(text: &str) -> Option<u32> {
    let text = text.trim_end();
    let group = text
        .strip_prefix("IOMMU Group ")
        .or_else(|| text.strip_prefix("IOMMU group "))
        .or_else(|| text.strip_prefix("Group "))
        .map(|rest| rest.trim_end_matches(':'));
    let of_path = || {
        text.split_once("iommu_groups/")?
            .1
            .strip_suffix("/devices:")
    };
    group.or_else(of_path)?.trim_end_matches('/').parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Facts {
        let mut facts = Facts::default();
        Text::new(&mut facts, 0)
            .read(text.as_bytes(), &mut |_| {})
            .unwrap();
        facts
    }

    #[test]
    fn a_mixture_is_read_line_by_line() {
        let facts = read(
            "[   1.5] Kernel command line: root=/dev/sda1 intel_iommu=on\n\
             [  10.5] DMAR: [DMA Write] Request device [00:12.0] fault addr\n\
             0 [fault reason 05] PTE Write access is not set\n\
             vfio_pin_pages_remote: RLIMIT_MEMLOCK (65536) exceeded\n\
             qemu-system-x86_64 -m 4G \\\n  -device vfio-pci,host=01:00.0\n\
             <domain>\n<memory>4194304</memory>\n</domain>\n\
             00:12.0 System peripheral [0880]: Intel Corporation x [8086:19ac]\n",
        );
        assert_eq!(facts.command_lines.len(), 1);
        assert_eq!(facts.folds.folds.len(), 1);
        assert_eq!(facts.lines.len(), 1);
        assert_eq!(facts.configurations.len(), 2);
        assert_eq!(
            facts.configurations[0].fact.devices[0].address,
            "0000:01:00.0"
        );
        assert!(facts.known("0000:00:12.0", None).is_some());
    }

    #[test]
    fn lines_of_a_fault_without_time_stamps_are_no_unread_ones() {
        let unit = "arm-smmu-v3 arm-smmu-v3.0.auto:";
        let words = [
            "0x0000010000000010",
            "0x0000020000000000",
            "0x0000000012345000",
            "0x0000000012345000",
        ];
        let mut text = format!("{unit} event 0x10 received:\n");
        for word in words {
            text += &format!("{unit} \t{word}\n");
        }
        let facts = read(&text);
        assert_eq!(facts.folds.folds.len(), 1);
        assert!(facts.unread.is_empty(), "{:?}", facts.unread);
        let facts = read(&format!("{unit} of nobody\n{text}something else\n"));
        let (_, _, lines, first) = &facts.unread[0];
        assert_eq!((lines.as_str(), facts.unread.len()), ("2 lines were", 1));
        assert!(first.quote.ends_with("of nobody"), "{first:?}");
    }

    #[test]
    fn groups_are_read_from_listings_of_scripts_and_ls() {
        let facts = read(
            "IOMMU Group 1:\n\t00:01.0 PCI bridge [0604]: Intel x [8086:1901]\n\t01:00.0 VGA compatible controller [0300]: x [10de:1]\n\
             /sys/kernel/iommu_groups/2/devices:\ntotal 0\nlrwxrwxrwx 1 root root 0 x 0000:02:00.0 -> ../../../../devices/x\n",
        );
        let groups: Vec<_> = facts
            .members
            .iter()
            .map(|one| (one.fact.group, one.fact.device.as_str()))
            .collect();
        assert_eq!(
            groups,
            [
                (1, "0000:00:01.0"),
                (1, "0000:01:00.0"),
                (2, "0000:02:00.0")
            ]
        );
        assert!(facts.known("0000:00:01.0", None).unwrap().fact.is_bridge());
    }
}
