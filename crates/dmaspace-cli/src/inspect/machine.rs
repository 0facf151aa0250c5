//! The machine as devices meet it: IOMMU units, what groups translate by, the kernel's options, nodes,
//! counters and faults; each finding with the one setting that would change it.
//!
//! Everything is read from sysfs, the kernel's command line and, where it can be opened, its log.
//! Nothing is changed.
//!
//! Source: Linux `Documentation/ABI/testing/sysfs-kernel-iommu_groups` (types of groups),
//! `Documentation/admin-guide/kernel-parameters.txt`, `Documentation/ABI/testing/sysfs-bus-event_source-devices`;
//! the capability registers: VT-d (D51397) revision 5.0, chapter 11.

use std::fs::{self, File};
use std::io::{self, BufReader, ErrorKind, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use hostmem::{read_at_most, rest_at_most, text_at_most};
use serde::Serialize;

use super::Missing;
use super::process::MOST_TEXT;
use crate::devices::Names;
use dmaspace::devices::{DevicesError, DevicesReport, Places};
use dmaspace::topology::Topology;

/// What was found.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct MachineReport {
    /// What is not known.
    pub missing: Vec<Missing>,
    /// Options of the kernel's command line that concern IOMMUs and huge pages, as they are.
    pub options: Vec<String>,
    /// The units.
    pub units: Vec<UnitReport>,
    /// The groups, by number.
    pub groups: Vec<GroupReport>,
    /// Lines of the kernel's log about faults, the newest last; as many as are kept.
    pub faults: Vec<String>,
    /// How many there were.
    pub fault_count: u64,
    /// What could be better.
    pub findings: Vec<MachineFinding>,
}

/// A unit.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct UnitReport {
    /// Its name: `dmar0`.
    pub name: String,
    /// Its memory node, from the firmware; else from its devices, where all that tell one tell the same.
    pub node: Option<u32>,
    /// How many devices it translates for.
    pub devices: u64,
    /// What it can do, as far as it is shown.
    pub can: Vec<String>,
    /// Its counters, where the kernel has them: names of events of `perf`.
    pub counters: Vec<String>,
}

/// A group.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct GroupReport {
    /// Its number.
    pub group: u32,
    /// How it translates: `DMA` (strict), `DMA-FQ` (lazy), `identity`, `unmanaged`.
    pub domain: Option<String>,
    /// Its PCI devices.
    pub devices: Vec<GroupDevice>,
}

/// A device of a group.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct GroupDevice {
    /// Its address.
    pub address: String,
    /// What it is.
    pub class: String,
    /// Vendor and device: `8086:10d3`.
    pub id: String,
    /// Its name in the system's list of PCI devices.
    pub name: Option<String>,
    /// Its node.
    pub node: Option<u32>,
    /// Its unit.
    pub unit: Option<String>,
    /// It has a TLB of its own (ATS); `None` when its configuration space cannot be read so far.
    pub ats: Option<Ats>,
}

/// A device's own TLB.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Ats {
    /// It has none.
    None,
    /// It has one, which is off.
    Off,
    /// It has one, which is on.
    On,
}

/// What could be better, and how.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct MachineFinding {
    /// What is so.
    pub finding: String,
    /// The one setting that would change it.
    pub setting: String,
}

/// What is [missing](Missing) without sysfs.
const IOMMU: &str = "IOMMU";
/// Lines of faults that are kept.
const MOST_FAULTS: usize = 20;
/// The longest log that is read, bytes: twice the largest that a kernel is configured to keep (`LOG_BUF_SHIFT`, Linux
/// `init/Kconfig`).
const MOST_LOG: u64 = 64 << 20;
/// Room for any record: shorter ones are refused (`devkmsg_read`, Linux `kernel/printk/printk.c`).
const RECORD: usize = 8192;
/// `O_NONBLOCK` of Linux on the architectures that it is for (asm-generic/fcntl.h).
const O_NONBLOCK: i32 = 0o4000;

impl MachineReport {
    /// Reads what the kernel shows; `proc` is where procfs is mounted.
    ///
    /// # Errors
    ///
    /// When a directory that is there cannot be read.
    pub fn read(places: &Places, proc: &Path) -> Result<Self, DevicesError> {
        let devices = DevicesReport::read(places)?;
        let mut report = Self::default();
        if devices.hidden {
            let sys = places.sys.display();
            let why =
                format!("nothing is mounted at {sys}, where the kernel shows units and groups");
            report.missing.push(missing(IOMMU, &why));
        }
        let line = text(&proc.join("cmdline"));
        if line.is_none() {
            report.missing.push(missing(
                "options",
                "the kernel's command line cannot be read",
            ));
        }
        report.options = options(&line.unwrap_or_default());
        let topology = Topology::read(places);
        if let Err(error) = &topology {
            report.missing.push(missing("nodes", &error.to_string()));
        }
        report.units = units(places, &devices, topology.ok().as_ref());
        report.groups = groups(places, &devices);
        if report
            .groups
            .iter()
            .flat_map(|group| &group.devices)
            .any(|device| device.ats.is_none())
        {
            report.missing.push(missing(
                "ATS",
                "configuration space beyond the first 64 bytes requires root (CAP_SYS_ADMIN)",
            ));
        }
        report.findings = findings(&report, &devices, places);
        match kernel_log(&places.dev.join("kmsg")) {
            Ok(log) => report.add_log(&log),
            Err(error) => report.missing.push(missing(
                "faults",
                &format!(
                    "the kernel's log cannot be read, which requires CAP_SYSLOG (root): {error}"
                ),
            )),
        }
        Ok(report)
    }

    /// Fills in the names of devices.
    pub(crate) fn name_devices(&mut self, names: &Names) {
        let devices = self.groups.iter_mut().flat_map(|group| &mut group.devices);
        devices.for_each(|device| device.name = names.of(&device.id));
    }

    /// False where the kernel does not show whether there is an IOMMU.
    pub fn knows_units(&self) -> bool {
        self.missing.iter().all(|missing| missing.what != IOMMU)
    }

    fn add_log(&mut self, log: &str) {
        for line in log.lines().filter(|line| is_fault(line)) {
            self.fault_count += 1;
            if self.faults.len() == MOST_FAULTS {
                self.faults.remove(0);
            }
            self.faults.push(line.trim().into());
        }
        if self.fault_count > 0 {
            self.findings.push(MachineFinding {
                finding: format!("the kernel's log contains {} DMA faults", self.fault_count),
                setting: "dmaspace tables walk, over the tables of the device that faults".into(),
            });
        }
    }
}

/// What the kernel has kept of its log, without waiting for more: a record, or of a file a piece, is one
/// read.
///
/// Source: Linux `Documentation/ABI/testing/dev-kmsg`.
fn kernel_log(path: &Path) -> io::Result<String> {
    let file = File::options()
        .read(true)
        .custom_flags(O_NONBLOCK)
        .open(path)?;
    let log = rest_at_most(BufReader::with_capacity(RECORD, Log(file)), MOST_LOG)?;
    Ok(String::from_utf8_lossy(&log).into_owned())
}

/// The log, with an end where nothing more is in it.
struct Log(File);

impl Read for Log {
    fn read(&mut self, room: &mut [u8]) -> io::Result<usize> {
        loop {
            match self.0.read(room) {
                // Records that were overwritten meanwhile.
                Err(error) if error.kind() == ErrorKind::BrokenPipe => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(0),
                read => return read,
            }
        }
    }
}

/// What drivers of units write when a device faults.
fn is_fault(line: &str) -> bool {
    [
        "DMAR: [",
        "DMAR:[",
        "IO_PAGE_FAULT",
        "arm-smmu",
        "Unhandled context fault",
    ]
    .iter()
    .any(|start| line.contains(start))
        && (line.contains("ault") || line.contains("FAULT") || line.contains("event 0x"))
}

fn missing(what: &'static str, why: &str) -> Missing {
    Missing {
        what,
        why: why.into(),
    }
}

fn text(path: &Path) -> Option<String> {
    let text = text_at_most(path, MOST_TEXT).ok()?;
    Some(text.trim().into())
}

fn names(path: &Path) -> Vec<String> {
    let entries = fs::read_dir(path).into_iter().flatten().flatten();
    let mut names: Vec<_> = entries
        .filter_map(|entry| entry.file_name().into_string().ok())
        .collect();
    names.sort();
    names
}

fn options(line: &str) -> Vec<String> {
    const NAMES: [&str; 14] = [
        "iommu",
        "intel_iommu",
        "amd_iommu",
        "arm-smmu",
        "iommu.strict",
        "iommu.passthrough",
        "iommu.forcedac",
        "hugepages",
        "hugepagesz",
        "default_hugepagesz",
        "transparent_hugepage",
        "vfio_iommu_type1.disable_hugepages",
        "pci",
        "swiotlb",
    ];
    line.split_whitespace()
        .filter(|word| NAMES.contains(&word.split('=').next().unwrap_or_default()))
        .map(String::from)
        .collect()
}

fn units(places: &Places, devices: &DevicesReport, topology: Option<&Topology>) -> Vec<UnitReport> {
    let mut all = names(&places.sys.join("class/iommu"));
    all.extend(
        devices
            .devices
            .iter()
            .filter_map(|device| device.unit.clone()),
    );
    all.sort();
    all.dedup();
    all.into_iter()
        .map(|name| {
            let path = places.sys.join("class/iommu").join(&name);
            let own = devices
                .devices
                .iter()
                .filter(|device| device.unit.as_ref() == Some(&name));
            let mut nodes: Vec<_> = own.clone().filter_map(|device| device.node).collect();
            nodes.sort_unstable();
            nodes.dedup();
            let events = places
                .sys
                .join("bus/event_source/devices")
                .join(&name)
                .join("events");
            let placed = topology.into_iter().flat_map(Topology::units);
            let placed = placed
                .filter(|unit| unit.name == name)
                .find_map(|unit| unit.node);
            UnitReport {
                node: placed.or(match nodes.as_slice() {
                    [node] => Some(*node),
                    _ => None,
                }),
                devices: own.count() as u64,
                can: intel(&path.join("intel-iommu")),
                counters: names(&events),
                name,
            }
        })
        .collect()
}

/// VT-d's capability registers. Chapter 11: CAP.SLLPS 37:34, CAP.ND 2:0, ECAP.SC 7, ECAP.DT 2,
/// ECAP.C 0, ECAP.SMTS 43, ECAP.PASID 40, ECAP.SSADS 45.
fn intel(path: &Path) -> Vec<String> {
    let number = |name| u64::from_str_radix(&text(&path.join(name))?, 16).ok();
    let (Some(cap), Some(ecap)) = (number("cap"), number("ecap")) else {
        return Vec::new();
    };
    let bit = |word: u64, n: u32| word >> n & 1 == 1;
    [
        (bit(cap, 34), "2 MiB pages"),
        (bit(cap, 35), "1 GiB pages"),
        (bit(ecap, 0), "coherent table walks"),
        (bit(ecap, 2), "device TLBs"),
        (bit(ecap, 7), "snoop control"),
        (bit(ecap, 43), "scalable mode"),
        (bit(ecap, 40), "PASIDs"),
        (bit(ecap, 45), "dirty bits in second-stage tables"),
    ]
    .into_iter()
    .filter(|(can, _)| *can)
    .map(|(_, what)| what.into())
    .collect()
}

fn groups(places: &Places, devices: &DevicesReport) -> Vec<GroupReport> {
    devices
        .groups
        .iter()
        .map(|group| {
            let path = places
                .sys
                .join("kernel/iommu_groups")
                .join(group.group.to_string());
            let own = devices
                .devices
                .iter()
                .filter(|device| device.group == Some(group.group));
            GroupReport {
                group: group.group,
                domain: text(&path.join("type")),
                devices: own
                    .map(|device| GroupDevice {
                        address: device.address.clone(),
                        class: device.class.clone(),
                        id: device.id.clone(),
                        name: None,
                        node: device.node,
                        unit: device.unit.clone(),
                        ats: ats(&places.sys.join("bus/pci/devices").join(&device.address)),
                    })
                    .collect(),
            }
        })
        .collect()
}

/// PCI Express Base Specification: extended capabilities begin at 0x100, ATS has the number 0xf
/// (section 10.5.1 "ATS Extended Capability"); its control register is at 6, bit 15 is Enable.
fn ats(device: &Path) -> Option<Ats> {
    let bytes = read_at_most(device.join("config"), MOST_TEXT).ok()?;
    if bytes.len() <= 64 {
        return None;
    }
    let word = |at: usize| Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?));
    let mut at = 0x100;
    // As many as fit; a list that leads back ends, too.
    for _ in 0..(4096 - 0x100) / 8 {
        let Some(head) = word(at).filter(|head| !matches!(*head, 0 | u32::MAX)) else {
            break;
        };
        if head & 0xffff == 0xf {
            let control = word(at + 4)? >> 16;
            return Some(if control >> 15 == 1 {
                Ats::On
            } else {
                Ats::Off
            });
        }
        match (head >> 20) as usize & !3 {
            next if next >= 0x100 => at = next,
            _ => break,
        }
    }
    Some(Ats::None)
}

fn findings(
    report: &MachineReport,
    devices: &DevicesReport,
    places: &Places,
) -> Vec<MachineFinding> {
    let mut found = Vec::new();
    let mut say = |finding: String, setting: &str| {
        found.push(MachineFinding {
            finding,
            setting: setting.into(),
        });
    };
    let in_groups = devices.groups.iter().any(|group| !group.no_iommu);
    if !in_groups && !devices.hidden {
        say(
            "no IOMMU translates for any device: no device can be passed through".into(),
            "VT-d, AMD-Vi or SMMU in the firmware, and intel_iommu=on on the kernel's command line",
        );
    }
    if devices.groups.iter().any(|group| group.no_iommu) {
        say(
            "VFIO passes devices through without an IOMMU: they reach all memory".into(),
            "vfio.enable_unsafe_noiommu_mode=0",
        );
    }
    let count = |domain: &str| {
        let groups = report
            .groups
            .iter()
            .filter(|group| group.domain.as_deref() == Some(domain));
        groups.count()
    };
    match count("DMA") {
        0 => {}
        strict => say(
            format!(
                "{strict} groups flush strictly: each unmap of a driver of the host waits for its \
                 invalidation"
            ),
            "iommu.strict=0 on the kernel's command line, or DMA-FQ in a group's `type` (lazy: memory \
             stays reachable a little longer)",
        ),
    }
    match count("identity") {
        0 => {}
        open => say(
            format!("{open} groups are not translated: their devices reach all memory"),
            "iommu.passthrough=0 on the kernel's command line, or DMA in a group's `type`",
        ),
    }
    let type1 = places.sys.join("module/vfio_iommu_type1/parameters");
    let small = text(&type1.join("disable_hugepages"));
    if small.is_some_and(|small| small == "Y") {
        say(
            "VFIO maps page by page: tables are 512 times as large".into(),
            "vfio_iommu_type1.disable_hugepages=0",
        );
    }
    let thp = text(&places.sys.join("kernel/mm/transparent_hugepage/enabled"));
    if thp.is_some_and(|thp| thp.contains("[never]")) {
        say(
            "transparent huge pages are off: memory comes in pages of 4 KiB".into(),
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        );
    }
    for group in &report.groups {
        for device in &group.devices {
            if device.ats == Some(Ats::Off) {
                say(
                    format!("the device TLB (ATS) of {} is off", device.address),
                    "remove pci=noats from the kernel's command line; the unit must support device TLBs",
                );
            }
        }
    }
    // An option of `linux/patches/node-domains.c`, which few kernels have.
    let option = text(&places.sys.join("module/iommu/parameters/node_domains"));
    let (far, setting) = match option.as_deref() {
        Some(on) => (on == "N", "iommu.node_domains=1"),
        None => (true, "a root per node (`dmaspace numa`)"),
    };
    for unit in report.units.iter().filter(|_| far) {
        let own = devices
            .devices
            .iter()
            .filter(|device| device.unit.as_ref() == Some(&unit.name));
        let mut nodes: Vec<_> = own.filter_map(|device| device.node).collect();
        nodes.sort_unstable();
        nodes.dedup();
        if nodes.len() > 1 {
            say(
                format!(
                    "{} serves devices of the nodes {nodes:?}: its tables are far from some",
                    unit.name
                ),
                setting,
            );
        }
    }
    found
}
