//! Facts that the readers have found, each with its place. Rules look at nothing else.

use std::collections::{BTreeMap, BTreeSet};

use dmaspace::firmware::FirmwareTable;

use super::finding::{At, Evidence, Place, plain};
use super::folds::Folds;
use crate::inspect::Guest;
use crate::inspect::needs::CountedPool;

/// The most facts of one kind that are kept.
pub(super) const MOST: usize = 65_536;
/// The most kinds of lines that are named as not decoded.
const MOST_UNKNOWN: usize = 64;

/// A fact with its place.
#[derive(Clone, Debug)]
pub(super) struct Known<T> {
    pub(super) fact: T,
    pub(super) evidence: Evidence,
}

/// All facts.
#[derive(Debug, Default)]
pub(super) struct Facts {
    /// Faults, folded.
    pub(super) folds: Folds,
    /// Lines of kernels and monitors that are no faults of a unit.
    pub(super) lines: Vec<Known<Line>>,
    /// Members of groups.
    pub(super) members: Vec<Known<Member>>,
    /// PCI functions by address and file: files of two machines may have the same address.
    pub(super) functions: BTreeMap<(String, usize), Known<Function>>,
    /// Lines of `/proc/iomem`.
    pub(super) iomem: Vec<Known<(u64, u64, String)>>,
    /// Ranges of IOVAs that are translated.
    pub(super) apertures: Vec<Known<(u64, u64)>>,
    /// Lines of `reserved_regions`.
    pub(super) reserved: Vec<Known<(u64, u64, String)>>,
    /// Areas of layouts.
    pub(super) areas: Vec<Known<LayoutArea>>,
    /// Free pages of pools.
    pub(super) pools: Vec<Known<CountedPool>>,
    /// Nodes of devices, from a listing.
    pub(super) device_nodes: Vec<Known<(String, u32)>>,
    /// Bytes of a page of the host.
    pub(super) host_page: Option<Known<u64>>,
    /// Kernel command lines.
    pub(super) command_lines: Vec<Known<String>>,
    /// Guests' configurations.
    pub(super) configurations: Vec<Known<Guest>>,
    /// Firmware tables; the offset of their structures counts where the file is the table.
    pub(super) tables: Vec<Known<TableFact>>,
    /// Dumps of I/O page tables as text.
    pub(super) dumps: Vec<DumpText>,
    /// Context entries of devices, from debugfs: device, low word.
    pub(super) contexts: Vec<Known<(String, u64)>>,
    /// Dumps of tables in a log.
    pub(super) log_dumps: Vec<(iommu::log::Dump, Vec<Evidence>)>,
    /// Steps of traces.
    pub(super) steps: Vec<Known<Step>>,
    /// Points of balloon series.
    pub(super) series: Vec<Known<Point>>,
    /// Targets of balloon series: the case, where the line names one, and MiB.
    pub(super) targets: Vec<Known<(Option<String>, u64)>>,
    /// Vendors of the machine's unit.
    pub(super) vendors: Vec<Known<Vendor>>,
    /// Lines that look like a fault and are not decoded: kind, first place, count.
    pub(super) unknown: BTreeMap<String, (Evidence, u64)>,
    /// Files with such lines.
    pub(super) doubtful: BTreeSet<usize>,
    /// Kinds of facts of which more than [`MOST`] were found.
    pub(super) dropped: BTreeMap<&'static str, u64>,
    /// Remarks for the report.
    pub(super) notes: Vec<String>,
    /// Contents of each file.
    pub(super) contents: BTreeMap<usize, BTreeSet<&'static str>>,
    /// Lines without a reader: file, whether anything else of it was taken, how many, the first.
    pub(super) unread: Vec<(usize, bool, String, Evidence)>,
    /// Lines of an `/proc/iomem` that hides its addresses.
    pub(super) hidden_iomem: bool,
    /// Files of this machine: of all of them one is meant.
    pub(super) own: BTreeSet<usize>,
    /// Settings and states of this machine.
    pub(super) states: Vec<Known<State>>,
    /// Groups of reserved regions, by a place or by a whole file.
    pub(super) region_groups: BTreeMap<Place, u32>,
    /// Configurations of virtual machines that run: they have what they need.
    pub(super) running: Vec<Known<Guest>>,
}

/// The text of one device's tables.
#[derive(Clone, Debug)]
pub(super) struct DumpText {
    /// The device.
    pub(super) device: String,
    /// Lines as the kernel prints them.
    pub(super) text: String,
    /// Line numbers of the rows, by page frame.
    pub(super) rows: Vec<(u64, u64)>,
    /// The heading.
    pub(super) heading: Evidence,
    /// The line at which the dump is cut or damaged.
    pub(super) cut: Option<Evidence>,
}

/// A setting or state that only a machine shows, never a file of its.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum State {
    /// There are devices, and none is in a group. `tables`: firmware's tables of units; `None` where no firmware
    /// shows its tables.
    NoGroups { tables: Option<Vec<String>> },
    /// A group of VFIO's for a device that no unit translates for.
    NoIommuGroup { group: u32 },
    /// Type of the domain in which drivers of the host use these devices of a group.
    Domain {
        group: u32,
        domain: String,
        devices: Vec<String>,
    },
    /// VFIO's type 1 maps page by page.
    SmallMaps,
    /// Transparent huge pages are off.
    NoHugePages,
    /// A device's own TLB is off, and its unit serves such ones as far as is known.
    TlbOff { device: String },
    /// A unit has devices on several nodes. `option`: the kernel can build tables for each node, and does not.
    FarUnit {
        unit: String,
        nodes: Vec<u32>,
        option: bool,
    },
}

/// A line of a kernel or monitor.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Line {
    /// `RLIMIT_MEMLOCK (N) exceeded`.
    MemlockExceeded { limit: u64, mediated: bool },
    /// A limit that is in force: of a process or shell.
    MemlockLimit { bytes: Option<u64> },
    /// libvirt could not raise a limit.
    CannotLimit { bytes: u64 },
    /// A map that failed.
    MapFailed {
        iova: Option<u64>,
        length: Option<u64>,
        errno: i32,
        iommufd: bool,
        device: Option<String>,
    },
    /// The warning about the number of mappings.
    ManyMappings { most: u64, device: Option<String> },
    /// A group is not viable.
    NotViable {
        group: Option<u32>,
        device: Option<String>,
    },
    /// The device is in no group.
    NoGroup { device: Option<String> },
    /// The monitor's user may not open the file of the group.
    GroupFile { group: u32, device: Option<String> },
    /// Type 1 refuses a group whose interrupts are not remapped. `named`: the line says so.
    UnsafeInterrupts { device: Option<String>, named: bool },
    /// The kernel refuses the device because of a reserved region.
    Ineligible { device: Option<String> },
    /// The driver gives its width.
    Width { bits: u32, address: Option<u64> },
    /// A range that the container cannot map.
    CannotMap { first: u64, last: u64 },
    /// RMPUPDATE failed.
    RmpUpdate { pfn: u64, level: u32, code: u32 },
    /// An entry of the reverse map table that a kernel has printed.
    RmpEntry { pfn: u64, low: u64 },
    /// Memory from a pool could not be had.
    PoolEmpty { page: Option<u64> },
    /// A unit's registers read as all ones, or zero.
    UnitAbsent { address: Option<u64> },
    /// The kernel calls a table damaged.
    BadTable { table: &'static str },
    /// The kernel calls a reserved region bad.
    BadRegion { first: u64, last: u64 },
    /// The kernel misses an IOAPIC or HPET in the IVRS.
    IoapicMissing { what: String },
    /// Boot mappings that a driver took over.
    BootMappings { count: u64 },
    /// The kernel's own walk at the address of the last fault.
    SoftWalk { physical: u64 },
    /// Version of Linux.
    Linux { major: u32, minor: u32 },
    /// Version of QEMU.
    Qemu { major: u32, minor: u32 },
}

/// A member of a group.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Member {
    pub(super) group: u32,
    pub(super) device: String,
}

/// The driver of a function.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) enum Driver {
    /// Not given.
    #[default]
    Unknown,
    /// Bound to none.
    None,
    /// Bound to this one.
    Bound(String),
}

/// A PCI function.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Function {
    /// Class, subclass and interface, where known: `0x030000`.
    pub(super) class: Option<u32>,
    /// Name of class or device.
    pub(super) name: String,
    pub(super) vendor: Option<u16>,
    pub(super) driver: Driver,
    pub(super) node: Option<u32>,
    /// BARs of memory: address and bytes.
    pub(super) bars: Vec<(Option<u64>, u64)>,
    /// Extended capabilities are listed.
    pub(super) capabilities: bool,
    /// Access Control Services are among them.
    pub(super) acs: bool,
}

impl Function {
    /// A bridge to another bus: type 1 or 2 of the configuration header.
    pub(super) fn is_bridge(&self) -> bool {
        matches!(
            self.class.map(|class| class >> 8),
            Some(0x0604 | 0x0607 | 0x0609)
        )
    }

    /// A display controller.
    pub(super) fn is_display(&self) -> bool {
        self.class.map(|class| class >> 16) == Some(3)
    }
}

/// An area of a layout.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct LayoutArea {
    pub(super) case: String,
    /// The device of a BAR; `None` is RAM.
    pub(super) device: Option<String>,
    pub(super) first: u64,
    pub(super) length: u64,
}

/// A table with the place of its bytes.
#[derive(Clone, Debug)]
pub(super) struct TableFact {
    pub(super) table: FirmwareTable,
    /// The file is the table itself, so that offsets are places in it.
    pub(super) binary: bool,
}

impl Known<TableFact> {
    /// The place of a structure: an offset where the file is the table.
    pub(super) fn place(&self, offset: usize) -> Evidence {
        let evidence = &self.evidence;
        match self.fact.binary {
            true => Evidence {
                place: Place {
                    file: evidence.place.file,
                    at: At::Offset(offset as u64),
                },
                quote: format!("structure at {offset:#x} of {}", self.fact.table.signature),
            },
            false => evidence.clone(),
        }
    }
}

/// A step of a trace.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Step {
    Map { iova: u64, length: u64 },
    Unmap { iova: u64, length: u64 },
    Export { bar: u64 },
    MapFile { iova: u64, length: Option<u64> },
    Memory { on: bool },
    Dma { iova: u64, faults: Option<bool> },
}

/// A point of a series, MiB.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Point {
    pub(super) case: String,
    pub(super) second: f64,
    pub(super) actual: u64,
    pub(super) free: u64,
    pub(super) available: u64,
}

/// A vendor of an IOMMU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Vendor {
    Intel,
    Amd,
    Arm,
    Riscv,
}

impl Facts {
    /// Keeps a fact, if there is room.
    pub(super) fn push<T>(
        list: &mut Vec<Known<T>>,
        dropped: &mut BTreeMap<&'static str, u64>,
        kind: &'static str,
        fact: T,
        evidence: Evidence,
    ) {
        if list.len() < MOST {
            list.push(Known { fact, evidence });
        } else {
            *dropped.entry(kind).or_default() += 1;
        }
    }

    pub(super) fn line(&mut self, fact: Line, evidence: Evidence) {
        Self::push(
            &mut self.lines,
            &mut self.dropped,
            "log lines",
            fact,
            evidence,
        );
    }

    /// A line that looks like a fault and is not decoded.
    pub(super) fn not_decoded(&mut self, text: &str, evidence: Evidence) {
        let kind = kind_of(text);
        self.doubtful.insert(evidence.place.file);
        let full = self.unknown.len() >= MOST_UNKNOWN;
        match self.unknown.get_mut(&kind) {
            Some((_, count)) => *count += 1,
            None if full => {
                *self
                    .dropped
                    .entry("kinds of lines that are not decoded")
                    .or_default() += 1
            }
            None => {
                self.unknown.insert(kind, (evidence, 1));
            }
        }
    }

    /// Notes what a file, or a part of it, was taken for.
    pub(super) fn content(&mut self, file: usize, content: &'static str) {
        self.contents.entry(file).or_default().insert(content);
    }

    /// A known function, made where there is none.
    pub(super) fn function(&mut self, address: &str, evidence: &Evidence) -> Option<&mut Function> {
        let key = (address.to_owned(), self.source(evidence.place.file));
        if !self.functions.contains_key(&key) {
            if self.functions.len() >= MOST {
                *self.dropped.entry("PCI functions").or_default() += 1;
                return None;
            }
            let known = Known {
                fact: Function::default(),
                evidence: evidence.clone(),
            };
            self.functions.insert(key.clone(), known);
        }
        self.functions.get_mut(&key).map(|known| &mut known.fact)
    }

    /// The file that stands for all of its machine's.
    pub(super) fn source(&self, file: usize) -> usize {
        let first = self.own.first().filter(|_| self.own.contains(&file));
        first.copied().unwrap_or(file)
    }

    /// Members of the group whose reserved region this is, where that is known.
    pub(super) fn region_members(&self, region: &Evidence) -> Vec<&Known<Member>> {
        let whole = Place {
            at: At::Whole,
            ..region.place
        };
        let group = self.region_groups.get(&region.place);
        let Some(group) = group.or_else(|| self.region_groups.get(&whole)) else {
            return Vec::new();
        };
        // Files of one folder are of one machine; a number alone may be of another.
        let source = self.source(region.place.file);
        let own = self.own.contains(&source);
        let members = self.members.iter().filter(|one| one.fact.group == *group);
        let members = members.filter(|one| !own || self.source(one.evidence.place.file) == source);
        members.collect()
    }

    /// Leaves out reserved regions of this machine's groups of which no device is given to a guest: no layout has to avoid them.
    fn keep_wanted_regions(&mut self) {
        let mut reserved = std::mem::take(&mut self.reserved);
        reserved.retain(|region| {
            let own = self.own.contains(&region.evidence.place.file);
            let refused = |device: &String| {
                self.lines.iter().any(
                    |one| matches!(&one.fact, Line::Ineligible { device: Some(of) } if of == device),
                )
            };
            let mut members = self.region_members(&region.evidence).into_iter();
            !own || members.any(|one| {
                self.is_given(&one.fact.device) || refused(&one.fact.device)
            })
        });
        self.reserved = reserved;
    }

    /// Joins files: gives faults that have a number only the PCI address that a table translates it to. Two units may use one
    /// number for two devices, and a line does not name a unit of the table: then it stays a number.
    pub(super) fn translate(&mut self) {
        self.keep_wanted_regions();
        self.folds.join_files();
        for fold in &mut self.folds.folds {
            let Some((kind, id)) = fold.number() else {
                continue;
            };
            let all = self.tables.iter().flat_map(|known| {
                let devices = known.fact.table.devices(kind, id).into_iter();
                devices.map(move |(device, mapping)| (device, known, mapping.offset))
            });
            let mut names = BTreeSet::new();
            let mut evidence = Vec::new();
            for (device, known, offset) in all.take(MOST) {
                names.insert(plain(&device));
                evidence.push(known.place(offset));
            }
            if !names.is_empty() {
                fold.translated(id, names, evidence);
            }
        }
    }

    /// A function by what all files say of it: `None` where none does, or where they name different devices. What
    /// `file` itself says of the driver counts before the others.
    pub(super) fn known(&self, device: &str, file: Option<usize>) -> Option<Known<Function>> {
        let all = self
            .functions
            .range((device.to_owned(), 0)..=(device.to_owned(), usize::MAX));
        let mut all = all.map(|((_, file), known)| (*file, known));
        let (first_file, first) = all.next()?;
        let mut one = first.clone();
        let mut own = file == Some(first_file) && one.fact.driver != Driver::Unknown;
        for (other_file, other) in all {
            let other_fact = &other.fact;
            let differs = |a: Option<u32>, b: Option<u32>| matches!((a, b), (Some(a), Some(b)) if a >> 8 != b >> 8);
            let vendors =
                matches!((one.fact.vendor, other_fact.vendor), (Some(a), Some(b)) if a != b);
            if differs(one.fact.class, other_fact.class) || vendors {
                let wanted = file.and_then(|file| self.functions.get(&(device.to_owned(), file)));
                return wanted.cloned();
            }
            one.fact.class = one.fact.class.or(other_fact.class);
            one.fact.vendor = one.fact.vendor.or(other_fact.vendor);
            one.fact.node = one.fact.node.or(other_fact.node);
            if one.fact.name.is_empty() {
                one.fact.name.clone_from(&other_fact.name);
            }
            if one.fact.bars.is_empty() {
                one.fact.bars.clone_from(&other_fact.bars);
            }
            one.fact.capabilities |= other_fact.capabilities;
            one.fact.acs |= other_fact.acs;
            match (&one.fact.driver, &other_fact.driver) {
                (_, Driver::Unknown) => {}
                (Driver::Unknown, _) => {
                    one.fact.driver = other_fact.driver.clone();
                    one.evidence = other.evidence.clone();
                }
                _ if file == Some(other_file) => {
                    one.fact.driver = other_fact.driver.clone();
                    one.evidence = other.evidence.clone();
                    own = true;
                }
                (a, b) if a != b && !own => one.fact.driver = Driver::Unknown,
                _ => {}
            }
        }
        Some(one)
    }

    /// False where the input shows more than one machine, by units of two vendors or two maps of memory: then facts
    /// that name no machine, as an aperture, a map of memory or a configuration, belong to none of them.
    pub(super) fn of_one_machine(&self) -> bool {
        let vendors: BTreeSet<Vendor> = self.vendors.iter().map(|one| one.fact).collect();
        let maps = self.iomem.iter().map(|one| one.evidence.place.file);
        let maps: BTreeSet<usize> = maps.collect();
        vendors.len() < 2 && maps.len() < 2
    }

    pub(super) fn is_display(&self, device: &str) -> Option<bool> {
        let function = self.known(device, None)?.fact;
        function.class.map(|_| function.is_display())
    }

    /// The driver is one of VFIO's, by lspci or groups.
    pub(super) fn is_given(&self, device: &str) -> bool {
        let all = self.configurations.iter().chain(&self.running);
        let mut configured = all.flat_map(|one| &one.fact.devices);
        if configured.any(|one| one.address == device) {
            return true;
        }
        let function = self.known(device, None).map(|known| known.fact.driver);
        matches!(function, Some(Driver::Bound(driver)) if is_vfio(&driver))
    }
}

/// Drivers that hand a device to user space.
pub(super) fn is_vfio(driver: &str) -> bool {
    dmaspace::devices::is_vfio(driver)
}

/// The words of a line without numbers, to count lines of one kind.
fn kind_of(text: &str) -> String {
    let words = text.split_whitespace();
    let kind = words
        .filter(|word| !word.bytes().any(|byte| byte.is_ascii_digit()))
        .take(12);
    plain(&kind.collect::<Vec<_>>().join(" "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_of_lines_have_no_numbers() {
        assert_eq!(kind_of("a 12 b 0x1f c"), "a b c");
    }
}
