//! Faults folded by unit, device, class and direction, in bounded memory.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::{DefaultHasher, Hash as _, Hasher as _};

use dmaspace::firmware::FirmwareUnitKind;
use iommu::log::{Class, Family, FaultRecord, PciAddress, Suppressed};

use super::finding::{Direction, Evidence, quote};
use super::number::pci;

/// The most folds; devices beyond are counted together.
const MOST_FOLDS: usize = 4096;
/// The most addresses of a fold.
pub(super) const MOST_ADDRESSES: usize = 1024;
/// The first and the last lines that a fold quotes.
const MOST_EVIDENCE: usize = 64;
/// The times of a fold that are looked at for a rate.
const MOST_TIMES: usize = 256;
/// The different messages of a fold by which its faults are found again in another file.
const MOST_MESSAGES: usize = 1024;
/// The same of all folds together.
const MOST_OF_ALL: usize = 65_536;
/// The devices of one number that are named.
pub(super) const MOST_NAMES: usize = 4;

/// Parts of a record that faults of one fold have in common.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Key {
    /// Logs of two files may be of two machines.
    pub(super) file: usize,
    pub(super) family: Family,
    pub(super) class: Class,
    pub(super) direction: Direction,
    pub(super) certain: bool,
    pci: Option<PciAddress>,
    id: Option<u64>,
    client: Option<String>,
    /// Unit, where no device is named.
    pub(super) unit: Option<String>,
}

impl Key {
    fn of(file: usize, record: &FaultRecord) -> Self {
        let named = record.pci.is_some() || record.id.is_some() || record.client.is_some();
        let of_unit = record.class == Class::UnitError || !named;
        Self {
            file,
            family: record.family,
            class: record.class,
            direction: direction(record.access),
            certain: record.certainty == iommu::log::Certainty::Certain,
            pci: record.pci,
            // A function may have several numbers, which are listed beside it.
            id: record.id.filter(|_| record.pci.is_none()),
            client: record.client.clone().filter(|_| record.pci.is_none()),
            unit: record.unit.clone().filter(|_| of_unit),
        }
    }

    /// True where [`Key::of`] gives this key.
    fn is_of(&self, file: usize, record: &FaultRecord) -> bool {
        let pci = record.pci.is_some();
        let named = pci || record.id.is_some() || record.client.is_some();
        let of_unit = record.class == Class::UnitError || !named;
        let same = |ours: &Option<String>, name: &Option<String>, counts: bool| {
            ours.as_deref() == name.as_deref().filter(|_| counts)
        };
        self.file == file
            && self.family == record.family
            && self.class == record.class
            && self.direction == direction(record.access)
            && self.certain == (record.certainty == iommu::log::Certainty::Certain)
            && self.pci == record.pci
            && self.id == record.id.filter(|_| !pci)
            && same(&self.client, &record.client, !pci)
            && same(&self.unit, &record.unit, of_unit)
    }
}

/// Faults of one kind.
#[derive(Clone, Debug)]
pub(super) struct Fold {
    pub(super) key: Key,
    /// The device as printed; empty where none is named.
    pub(super) device: String,
    pub(super) count: u64,
    pub(super) exact: bool,
    /// Addresses as printed.
    pub(super) addresses: BTreeSet<u64>,
    /// Faults at addresses that are not kept.
    pub(super) more_addresses: u64,
    /// The least and the greatest address, also of those that are not kept.
    pub(super) span: Option<(u64, u64)>,
    pub(super) evidence: Vec<Evidence>,
    /// Time and address of the first faults.
    pub(super) times: Vec<(f64, u64)>,
    pub(super) since_boot: bool,
    pub(super) first: Option<f64>,
    pub(super) last: Option<f64>,
    /// Name and meaning of each code.
    pub(super) meanings: BTreeSet<(Option<u32>, &'static str, &'static str)>,
    last_code: Option<Option<u32>>,
    pub(super) source: (&'static str, &'static str),
    /// Levels at which the walk ended, where the unit tells; `last_level` is the one of pages.
    pub(super) levels: BTreeSet<u64>,
    /// Drivers before the event, as the kernel prints them.
    pub(super) drivers: BTreeSet<String>,
    pub(super) pasids: BTreeSet<u32>,
    /// PR of AMD's IO_PAGE_FAULT: an entry was there.
    pub(super) present: BTreeSet<bool>,
    /// Numbers of requests by the stage that refused them.
    pub(super) stages: BTreeSet<u8>,
    /// File of the first line.
    pub(super) file: usize,
    /// `client:` and `sid:` of one record.
    pub(super) also: BTreeSet<String>,
    /// Devices that have the number by a table of firmware.
    pub(super) names: BTreeSet<String>,
    /// Messages by their fields.
    messages: HashMap<u64, Messages>,
    /// Faults with messages beyond [`MOST_MESSAGES`].
    more_messages: u64,
    /// Faults that the kernel has kept back.
    kept_back: u64,
}

/// Messages with the same fields.
#[derive(Clone, Copy, Debug, Default)]
struct Messages {
    count: u64,
    /// Seconds since the boot of the first and the last one, where the log has them.
    span: Option<(f64, f64)>,
}

/// The fields of a record, but for those that its fold has and the place.
fn message_of(record: &FaultRecord) -> u64 {
    let mut hasher = DefaultHasher::new();
    record.unit.hash(&mut hasher);
    record.id.hash(&mut hasher);
    record.pasid.hash(&mut hasher);
    record.domain.hash(&mut hasher);
    record.address.hash(&mut hasher);
    record.code.hash(&mut hasher);
    record.ipa.hash(&mut hasher);
    record.flags.hash(&mut hasher);
    record.fields.hash(&mut hasher);
    hasher.finish()
}

/// All folds.
#[derive(Debug, Default)]
pub(super) struct Folds {
    pub(super) folds: Vec<Fold>,
    places: HashMap<Key, usize>,
    /// Folds of the last faults.
    recent: [usize; 8],
    /// Messages that are kept of all folds.
    remembered: usize,
    /// Faults of devices beyond [`MOST_FOLDS`].
    pub(super) beyond: u64,
    /// Suppressed faults that wait for the next fault of the family: file, fact.
    waiting: Vec<(usize, Suppressed, Evidence)>,
    /// The fold of the last fault of each family in a file.
    latest: BTreeMap<(usize, Family), usize>,
    /// The fault before.
    last: Option<(usize, Family, usize)>,
    /// Suppressed messages without a fault.
    pub(super) orphans: Vec<(Suppressed, Evidence)>,
}

impl Folds {
    /// Adds a fault. `text` is the message of its last line; `quoted` are its lines, of which the reader knows the text.
    pub(super) fn add(
        &mut self,
        file: usize,
        record: &FaultRecord,
        weight: u64,
        since_boot: bool,
        text: &str,
        quoted: impl Fn(u64) -> String,
    ) {
        let Some(at) = self.place(file, record) else {
            self.beyond += weight;
            return;
        };
        if self.last != Some((file, record.family, at)) {
            self.last = Some((file, record.family, at));
            self.latest.insert((file, record.family), at);
        }
        let waiting = self.take_waiting(file, record.family);
        let Some(fold) = self.folds.get_mut(at) else {
            return;
        };
        for (suppressed, evidence) in waiting {
            fold.suppressed(&suppressed, evidence);
        }
        fold.count = fold.count.saturating_add(weight);
        let time = record.time.filter(|_| since_boot);
        let room = self.remembered < MOST_OF_ALL;
        let new = fold.remember(message_of(record), weight, time, room);
        self.remembered += usize::from(new);
        if let Some(address) = record.address {
            let room = fold.addresses.len() < MOST_ADDRESSES;
            fold.reaches(address.value, address.value);
            if room {
                fold.addresses.insert(address.value);
            } else if !fold.addresses.contains(&address.value) {
                fold.more_addresses += 1;
            }
        }
        for line in &record.lines {
            if fold.evidence.len() < MOST_EVIDENCE {
                fold.evidence.push(quote(file, *line, &quoted(*line)));
            }
        }
        if let Some(time) = record.time {
            if fold.times.len() < MOST_TIMES {
                let address = record.address.map_or(0, |address| address.value);
                fold.times.push((time, address));
            }
            fold.since_boot |= since_boot;
            fold.first = Some(fold.first.map_or(time, |first| first.min(time)));
            fold.last = Some(fold.last.map_or(time, |last| last.max(time)));
        }
        let meaning = (record.code, record.name, record.meaning);
        if fold.last_code != Some(record.code) && fold.meanings.len() < 16 {
            fold.last_code = Some(record.code);
            fold.meanings.insert(meaning);
        }
        for name in ["PLVL", "LVL", "level"] {
            fold.levels
                .extend(record.field(name).filter(|_| fold.levels.len() < 16));
        }
        let word = text.trim_start().split(' ').next().unwrap_or_default();
        if !word.ends_with(':') && fold.drivers.len() < 16 && !fold.drivers.contains(word) {
            fold.drivers
                .extend(printed_by(text).map(|(driver, _)| driver.to_owned()));
        }
        if let Some(stage) = record.stage {
            fold.stages.insert(match stage {
                iommu::log::Stage::One => 1,
                iommu::log::Stage::Two => 2,
            });
        }
        if record.family == Family::AmdVi && record.code == Some(2) {
            fold.present
                .extend(record.field("flags").map(|flags| flags >> 4 & 1 == 1));
        }
        fold.pasids
            .extend(record.pasid.filter(|_| fold.pasids.len() < 16));
        if let (Some(_), Some(id)) = (record.pci, record.id) {
            fold.also.insert(format!("{id:#x}"));
        }
    }

    /// The fold of a fault; `None`: it is one too many.
    fn place(&mut self, file: usize, record: &FaultRecord) -> Option<usize> {
        // Faults come in bursts of few devices.
        let recent = self.recent.iter().copied();
        let mut known = recent.filter(|at| {
            let fold = self.folds.get(*at);
            fold.is_some_and(|fold| fold.key.is_of(file, record))
        });
        if let Some(at) = known.next() {
            return Some(at);
        }
        let key = Key::of(file, record);
        let at = match self.places.get(&key) {
            Some(at) => *at,
            None if self.folds.len() >= MOST_FOLDS => return None,
            None => {
                self.folds.push(Fold::new(file, key.clone(), record));
                self.places.insert(key, self.folds.len() - 1);
                self.folds.len() - 1
            }
        };
        self.recent.rotate_right(1);
        if let Some(first) = self.recent.first_mut() {
            *first = at;
        }
        Some(at)
    }

    /// Faults that the kernel has kept back: they belong to the next fault of the family, or to the one before.
    pub(super) fn suppress(&mut self, file: usize, suppressed: Suppressed, evidence: Evidence) {
        const MOST_WAITING: usize = 256;
        if self.waiting.len() < MOST_WAITING {
            self.waiting.push((file, suppressed, evidence));
        } else {
            self.settle(file, &suppressed, evidence);
        }
    }

    fn take_waiting(&mut self, file: usize, family: Family) -> Vec<(Suppressed, Evidence)> {
        if self.waiting.is_empty() {
            return Vec::new();
        }
        let all = std::mem::take(&mut self.waiting);
        let mut found = Vec::new();
        for (of, suppressed, evidence) in all {
            if of == file && suppressed.family == family {
                found.push((suppressed, evidence));
            } else {
                self.waiting.push((of, suppressed, evidence));
            }
        }
        found
    }

    /// Ends a file: what no fault follows belongs to the fault before it.
    pub(super) fn finish(&mut self) {
        for (file, suppressed, evidence) in std::mem::take(&mut self.waiting) {
            self.settle(file, &suppressed, evidence);
        }
    }

    fn settle(&mut self, file: usize, suppressed: &Suppressed, evidence: Evidence) {
        let latest = self.latest.get(&(file, suppressed.family)).copied();
        match latest.and_then(|at| self.folds.get_mut(at)) {
            Some(fold) => fold.suppressed(suppressed, evidence),
            None if self.orphans.len() < 64 => self.orphans.push((suppressed.clone(), evidence)),
            None => {}
        }
    }

    /// Makes faults that several files show, as the output of dmesg and a journal, one.
    pub(super) fn join_files(&mut self) {
        let mut joined: Vec<Fold> = Vec::new();
        let mut places: HashMap<Key, Vec<usize>> = HashMap::new();
        for fold in std::mem::take(&mut self.folds) {
            let key = Key {
                file: 0,
                ..fold.key.clone()
            };
            let alike = places.entry(key).or_default();
            let mut others = alike.iter().copied();
            let same = others.find(|at| {
                let other = joined.get(*at);
                other.is_some_and(|other| other.file != fold.file && other.is_shown_by(&fold))
            });
            match same.and_then(|at| joined.get_mut(at)) {
                Some(other) => other.join(fold),
                None => {
                    alike.push(joined.len());
                    joined.push(fold);
                }
            }
        }
        self.folds = joined;
    }

    /// The folds of the last fault of a family in a file.
    pub(super) fn latest(&mut self, file: usize, family: Family) -> Option<&mut Fold> {
        let at = self.latest.get(&(file, family)).copied()?;
        self.folds.get_mut(at)
    }
}

impl Fold {
    fn new(file: usize, key: Key, record: &FaultRecord) -> Self {
        Self {
            key,
            device: record.device().unwrap_or_default(),
            count: 0,
            exact: true,
            addresses: BTreeSet::new(),
            more_addresses: 0,
            span: None,
            evidence: Vec::new(),
            times: Vec::new(),
            since_boot: false,
            first: None,
            last: None,
            meanings: BTreeSet::new(),
            last_code: None,
            source: (record.source.document, record.source.section),
            levels: BTreeSet::new(),
            drivers: BTreeSet::new(),
            pasids: BTreeSet::new(),
            present: BTreeSet::new(),
            stages: BTreeSet::new(),
            file,
            also: BTreeSet::new(),
            names: BTreeSet::new(),
            messages: HashMap::new(),
            more_messages: 0,
            kept_back: 0,
        }
    }

    /// The kind of unit and the number of the device, where the log has nothing else of it.
    pub(super) fn number(&self) -> Option<(FirmwareUnitKind, u32)> {
        let kind = match self.key.family {
            Family::SmmuV3 => FirmwareUnitKind::SmmuV3,
            Family::SmmuV2 => FirmwareUnitKind::Smmu,
            Family::Riscv => FirmwareUnitKind::Riscv,
            _ => return None,
        };
        let id = self.key.id.filter(|_| self.key.client.is_none())?;
        Some((kind, u32::try_from(id).ok()?))
    }

    /// Notes the devices that have the number by a table.
    pub(super) fn translated(&mut self, id: u32, names: BTreeSet<String>, evidence: Vec<Evidence>) {
        if let Some(device) = names.first().filter(|_| names.len() == 1) {
            if let Some(device) = pci(device) {
                self.device = device;
                self.also.insert(format!("{id:#x}"));
            }
        }
        self.names = names;
        self.evidence.extend(evidence.into_iter().take(MOST_NAMES));
    }

    /// True where the message is a new one.
    fn remember(&mut self, message: u64, weight: u64, time: Option<f64>, room: bool) -> bool {
        let new = !self.messages.contains_key(&message);
        if new && (!room || self.messages.len() >= MOST_MESSAGES) {
            self.more_messages = self.more_messages.saturating_add(weight);
            return false;
        }
        let known = self.messages.entry(message).or_default();
        known.count = known.count.saturating_add(weight);
        if let Some(time) = time {
            let first = known.span.map_or(time, |(first, _)| first);
            known.span = Some((first, time));
        }
        new
    }

    /// True where another file shows faults of this fold: the same messages, and of one boot as far as both logs count
    /// from one.
    fn is_shown_by(&self, other: &Self) -> bool {
        let both = self
            .messages
            .iter()
            .filter_map(|(message, ours)| Some((ours, other.messages.get(message)?)));
        let both: Vec<_> = both.collect();
        let timed: Vec<_> = both
            .iter()
            .filter_map(|(ours, theirs)| Some((ours.span?, theirs.span?)))
            .collect();
        // Logs print a time with different digits.
        let near = |a: f64, b: f64| (a - b).abs() < 1e-5;
        let one_boot = timed.is_empty()
            || timed
                .iter()
                .any(|(ours, theirs)| near(ours.0, theirs.0) || near(ours.1, theirs.1));
        !both.is_empty() && one_boot
    }

    /// Takes the faults of another file in: each message as often as the file has it that has it more often.
    fn join(&mut self, other: Self) {
        for (message, theirs) in other.messages {
            let ours = self.messages.entry(message).or_default();
            ours.count = ours.count.max(theirs.count);
        }
        self.more_messages = self.more_messages.max(other.more_messages);
        self.kept_back = self.kept_back.max(other.kept_back);
        let shown = self.messages.values().map(|messages| messages.count);
        self.count = shown
            .fold(0u64, u64::saturating_add)
            .saturating_add(self.more_messages)
            .saturating_add(self.kept_back);
        // Where messages were not kept, which of them are the same is not known.
        self.exact &= other.exact && self.more_messages == 0;
        let room = MOST_ADDRESSES.saturating_sub(self.addresses.len());
        let new = other.addresses.difference(&self.addresses);
        let mut new: Vec<u64> = new.copied().collect();
        let beyond = new.split_off(room.min(new.len())).len() as u64;
        self.addresses.extend(new);
        self.more_addresses = self.more_addresses.max(other.more_addresses).max(beyond);
        if let Some((first, last)) = other.span {
            self.reaches(first, last);
        }
        self.evidence
            .extend(other.evidence.into_iter().take(MOST_EVIDENCE));
        if self.times.is_empty() || other.since_boot && !self.since_boot {
            self.times = other.times;
            self.since_boot = other.since_boot;
            (self.first, self.last) = (other.first, other.last);
        }
        self.meanings.extend(other.meanings);
        self.levels.extend(other.levels);
        self.drivers.extend(other.drivers);
        self.pasids.extend(other.pasids);
        self.present.extend(other.present);
        self.stages.extend(other.stages);
        self.also.extend(other.also);
        self.names.extend(other.names);
    }

    fn reaches(&mut self, first: u64, last: u64) {
        let (least, greatest) = self.span.unwrap_or((first, last));
        self.span = Some((least.min(first), greatest.max(last)));
    }

    fn suppressed(&mut self, suppressed: &Suppressed, evidence: Evidence) {
        self.kept_back = self.kept_back.saturating_add(suppressed.faults);
        self.count = self.count.saturating_add(suppressed.faults);
        self.exact &= suppressed.exact;
        if self.evidence.len() < MOST_EVIDENCE {
            self.evidence.push(evidence);
        }
    }

    /// Neighbouring pages joined: first and last address as printed.
    pub(super) fn ranges(&self) -> Vec<(u64, u64)> {
        let mut ranges: Vec<(u64, u64)> = Vec::new();
        for address in &self.addresses {
            match ranges.last_mut() {
                Some((_, last)) if address >> 12 <= (*last >> 12) + 1 => *last = *address,
                _ => ranges.push((*address, *address)),
            }
        }
        ranges
    }
}

/// `vfio-pci 0000:c1:00.0: `: the driver and its device, as `dev_err` prints them.
pub(super) fn printed_by(text: &str) -> Option<(&str, String)> {
    let (driver, rest) = text.trim_start().split_once(' ')?;
    let device = pci(rest.split(' ').next()?.strip_suffix(':')?)?;
    let named = driver
        .bytes()
        .all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'.'));
    named.then_some((driver, device))
}

pub(super) fn direction(access: iommu::log::FaultAccess) -> Direction {
    match access {
        iommu::log::FaultAccess::Read => Direction::Read,
        iommu::log::FaultAccess::Write => Direction::Write,
        iommu::log::FaultAccess::Execute => Direction::Execute,
        iommu::log::FaultAccess::Unknown => Direction::Unknown,
    }
}
