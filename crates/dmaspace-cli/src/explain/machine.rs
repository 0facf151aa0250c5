//! This machine's own files: the log, the command line, groups, tables, pools, and monitors that run.
//!
//! Each file that is read is a file of the report, with its path. Nothing is changed. A file that requires root is
//! named.
//!
//! Source: Linux `Documentation/ABI/testing/dev-kmsg`, `Documentation/ABI/testing/sysfs-kernel-iommu_groups`,
//! `Documentation/ABI/testing/sysfs-firmware-acpi`, `Documentation/admin-guide/mm/hugetlbpage.rst`,
//! `Documentation/filesystems/proc.rst`.

use std::fs::File;
use std::io::{self, BufReader, ErrorKind, Read};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use dmaspace::devices::{DeviceReport, DevicesError, DevicesReport, Places, is_vfio};
use hostmem::{read_at_most, rest_at_most};

use super::facts::{Driver, Facts, Known, Member, State, Vendor};
use super::finding::{At, Evidence, Place, plain, shell};
use super::input::Input;
use crate::devices::units::{Ats, DEVICE_TLBS, UnitReport, ats, names, text, units};
use crate::inspect::Monitor;
use crate::inspect::needs::counted_pools;

/// The longest log that is read, bytes: twice the largest that a kernel is configured to keep (`LOG_BUF_SHIFT`, Linux
/// `init/Kconfig`).
const MOST_LOG: u64 = 64 << 20;
/// Room for any record: shorter ones are refused (`devkmsg_read`, Linux `kernel/printk/printk.c`).
const RECORD: usize = 8192;
/// `O_NONBLOCK` of Linux on the architectures that it is for (asm-generic/fcntl.h).
const O_NONBLOCK: i32 = 0o4000;
/// The longest other file that is read.
const MOST: u64 = 16 << 20;
/// The most monitors whose command lines are read.
const MOST_MONITORS: usize = 256;
/// Tables of ACPI that name units.
pub(super) const TABLES: [&str; 5] = ["DMAR", "IVRS", "IORT", "RIMT", "VIOT"];

/// Reads all of this machine; `proc` is where procfs is mounted.
pub(super) fn read(
    input: &mut Input<'_>,
    places: &Places,
    proc: &Path,
) -> Result<(), DevicesError> {
    input.own = true;
    let done = all(input, places, proc);
    input.own = false;
    done
}

fn all(input: &mut Input<'_>, places: &Places, proc: &Path) -> Result<(), DevicesError> {
    let devices = DevicesReport::read(places)?;
    log(input, &places.dev.join("kmsg"));
    options(input, &proc.join("cmdline"));
    whole(input, &proc.join("version"), "");
    whole(input, &proc.join("iomem"), "");
    let tables = tables(input, &places.sys.join("firmware/acpi/tables"));
    if devices.hidden {
        let why =
            "nothing is mounted there: whether there are units, groups and pools is not known";
        input.note(&places.sys.display().to_string(), why);
    } else {
        groups(input, places, &devices, tables);
        each_unit(input, places, &devices);
        pools(input, places);
        settings(input, places);
    }
    monitors(input, proc);
    Ok(())
}

/// A file of this machine with its text, as a place of evidence.
fn place(input: &mut Input<'_>, path: &Path, quote: &str) -> Evidence {
    Evidence {
        place: Place {
            file: input.file(&path.display().to_string()),
            at: At::Whole,
        },
        quote: plain(quote),
    }
}

/// Reads a file that is there; `root` says what requires root.
fn whole(input: &mut Input<'_>, path: &Path, root: &str) {
    let name = path.display().to_string();
    match read_at_most(path, MOST) {
        Ok(bytes) if bytes.is_empty() => {}
        Ok(bytes) => input.stream(&name, bytes.as_slice()),
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(error) => input.note(&name, &format!("it cannot be read{root}: {error}")),
    }
}

/// The kernel's log. Further lines of a record have keys, and no messages.
fn log(input: &mut Input<'_>, path: &Path) {
    let name = path.display().to_string();
    match kernel_log(path) {
        Ok(log) => {
            let lines = log.lines().filter(|line| !line.starts_with(' '));
            let messages: String = lines.flat_map(|line| [line, "\n"]).collect();
            if !messages.is_empty() {
                input.stream(&name, messages.as_bytes());
            }
        }
        Err(error) => {
            let why = format!(
                "the kernel's log requires root (CAP_SYSLOG), faults in it are not seen: {error}"
            );
            input.note(&name, &why);
        }
    }
}

/// The log as far as it is kept, without waiting for more: a record, or of a file a piece, is one read.
pub(super) fn kernel_log(path: &Path) -> io::Result<String> {
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

fn options(input: &mut Input<'_>, path: &Path) {
    match text(path) {
        Some(line) => {
            let evidence = place(input, path, &line);
            let file = evidence.place.file;
            input.facts.content(file, "kernel command line");
            let fact = plain(&line);
            input.facts.command_lines.push(Known { fact, evidence });
        }
        None => input.note(&path.display().to_string(), "it cannot be read"),
    }
}

/// The names of the tables of units, where firmware shows tables.
fn tables(input: &mut Input<'_>, folder: &Path) -> Option<Vec<String>> {
    let all = names(folder);
    let of_units = all.iter().filter(|name| TABLES.contains(&name.as_str()));
    let of_units: Vec<_> = of_units.cloned().collect();
    for name in &of_units {
        whole(input, &folder.join(name), ", which requires root");
    }
    (!all.is_empty()).then_some(of_units)
}

fn groups(
    input: &mut Input<'_>,
    places: &Places,
    devices: &DevicesReport,
    tables: Option<Vec<String>>,
) {
    let root = places.sys.join("kernel/iommu_groups");
    let translated = devices.groups.iter().any(|group| !group.no_iommu);
    if !translated && !devices.devices.is_empty() {
        let evidence = place(input, &root, "no group of an IOMMU");
        let fact = State::NoGroups { tables };
        input.facts.states.push(Known { fact, evidence });
    }
    for group in &devices.groups {
        let folder = root.join(group.group.to_string());
        if group.no_iommu {
            let evidence = place(input, &folder.join("name"), "vfio-noiommu");
            let fact = State::NoIommuGroup { group: group.group };
            input.facts.states.push(Known { fact, evidence });
            continue;
        }
        let own = devices.devices.iter();
        let own = own.filter(|device| device.group == Some(group.group));
        let own: Vec<&DeviceReport> = own.collect();
        for device in &own {
            let path = folder.join("devices").join(&device.address);
            let line = format!("{} {}", device.class, device.id);
            let evidence = place(input, &path, &line);
            let device = device.address.clone();
            let group = group.group;
            let member = Member { group, device };
            let facts = &mut input.facts;
            Facts::push(
                &mut facts.members,
                &mut facts.dropped,
                "members",
                member,
                evidence,
            );
        }
        whole(input, &folder.join("reserved_regions"), "");
        // In a guest's domain the group's own type says nothing.
        let hosts = own.iter().filter(|device| {
            let driver = device.driver.as_deref();
            driver.is_some_and(|driver| !is_vfio(driver) && driver != "pcieport")
        });
        let hosts: Vec<String> = hosts.map(|device| device.address.clone()).collect();
        let path = folder.join("type");
        if let Some(domain) = text(&path).filter(|_| !hosts.is_empty()) {
            let evidence = place(input, &path, &domain);
            let fact = State::Domain {
                group: group.group,
                domain,
                devices: hosts,
            };
            input.facts.states.push(Known { fact, evidence });
        }
    }
    for device in &devices.devices {
        function(input, places, device);
    }
}

fn function(input: &mut Input<'_>, places: &Places, device: &DeviceReport) {
    let path = places.sys.join("bus/pci/devices").join(&device.address);
    let evidence = match &device.driver {
        Some(driver) => place(input, &path.join("driver"), driver),
        None => place(input, &path, "no driver"),
    };
    if let Some(function) = input.facts.function(&device.address, &evidence) {
        function.class = u32::from_str_radix(&device.class_code, 16).ok();
        let vendor = device.id.split(':').next().unwrap_or_default();
        function.vendor = u16::from_str_radix(vendor, 16).ok();
        function.node = device.node;
        function.driver = match &device.driver {
            Some(driver) => Driver::Bound(driver.clone()),
            None => Driver::None,
        };
    }
}

fn each_unit(input: &mut Input<'_>, places: &Places, devices: &DevicesReport) {
    let option = places.sys.join("module/iommu/parameters/node_domains");
    let option = text(&option);
    let mut hidden = false;
    for unit in units(places, devices) {
        let path = places.sys.join("class/iommu").join(&unit.name);
        let vendor = match unit.name.get(..4).unwrap_or_default() {
            "dmar" => Some(Vendor::Intel),
            "ivhd" => Some(Vendor::Amd),
            "smmu" | "arm-" => Some(Vendor::Arm),
            "risc" => Some(Vendor::Riscv),
            _ => None,
        };
        if let Some(fact) = vendor {
            let evidence = place(input, &path, &unit.name);
            input.facts.vendors.push(Known { fact, evidence });
        }
        if let Some(bits) = unit.address_bits.filter(|bits| *bits < 64) {
            let cap = path.join("intel-iommu/cap");
            let evidence = place(input, &cap, &format!("addresses of {bits} bits (MGAW)"));
            let fact = (0, (1 << bits) - 1);
            input.facts.apertures.push(Known { fact, evidence });
        }
        // An option of `linux/patches/node-domains.c`, which few kernels have.
        let by_node = option.as_deref().is_some_and(|on| on == "Y");
        if unit.device_nodes.len() > 1 && !by_node {
            let evidence = place(input, &path, &format!("nodes {:?}", unit.device_nodes));
            let fact = State::FarUnit {
                unit: unit.name.clone(),
                nodes: unit.device_nodes.clone(),
                option: option.is_some(),
            };
            input.facts.states.push(Known { fact, evidence });
        }
        hidden |= tlbs(input, places, devices, &unit);
    }
    if hidden {
        let name = places.sys.join("bus/pci/devices").display().to_string();
        let why = "whether devices' own TLBs (ATS) are on is not known: configuration space beyond 64 bytes requires root \
                   (CAP_SYS_ADMIN)";
        input.note(&name, why);
    }
}

/// TLBs that are off though the unit serves them; true where a configuration space is hidden.
fn tlbs(
    input: &mut Input<'_>,
    places: &Places,
    devices: &DevicesReport,
    unit: &UnitReport,
) -> bool {
    if unit.address_bits.is_some() && !unit.can.contains(&DEVICE_TLBS) {
        return false;
    }
    let mut hidden = false;
    let own = devices.devices.iter();
    for device in own.filter(|device| device.unit.as_ref() == Some(&unit.name)) {
        let path = places.sys.join("bus/pci/devices").join(&device.address);
        match ats(&path) {
            None => hidden = true,
            Some(Ats::None | Ats::On) => {}
            Some(Ats::Off) => {
                let evidence = place(input, &path.join("config"), "ATS: Enable is 0");
                let device = device.address.clone();
                let fact = State::TlbOff { device };
                input.facts.states.push(Known { fact, evidence });
            }
        }
    }
    hidden
}

/// Free huge pages, of all nodes together and of each.
fn pools(input: &mut Input<'_>, places: &Places) {
    for (path, fact) in counted_pools(&places.sys) {
        let evidence = place(input, &path, &fact.free.to_string());
        input.facts.pools.push(Known { fact, evidence });
    }
}

fn settings(input: &mut Input<'_>, places: &Places) {
    let small = "module/vfio_iommu_type1/parameters/disable_hugepages";
    let huge = "kernel/mm/transparent_hugepage/enabled";
    for (path, state) in [(small, State::SmallMaps), (huge, State::NoHugePages)] {
        let path = places.sys.join(path);
        let found = text(&path).filter(|value| value == "Y" || value.contains("[never]"));
        if let Some(value) = found {
            let evidence = place(input, &path, &value);
            let known = Known {
                fact: state,
                evidence,
            };
            input.facts.states.push(known);
        }
    }
}

/// Command lines of QEMU, and limits, of virtual machines that run.
fn monitors(input: &mut Input<'_>, proc: &Path) {
    let processes = names(proc).into_iter();
    let processes = processes.filter(|name| name.bytes().all(|byte| byte.is_ascii_digit()));
    let mut found = 0;
    for process in processes {
        let path = proc.join(&process).join("cmdline");
        let Ok(line) = read_at_most(&path, MOST) else {
            continue;
        };
        let words = line.split(|byte| *byte == 0);
        let words = words.map(|word| String::from_utf8_lossy(word).into_owned());
        let words: Vec<String> = words.filter(|word| !word.is_empty()).collect();
        let program = words.first().map(String::as_str).unwrap_or_default();
        let Some(monitor) = Monitor::of_program(program) else {
            continue;
        };
        let program = program.rsplit('/').next().unwrap_or_default();
        found += 1;
        if found > MOST_MONITORS {
            input.note(
                &proc.display().to_string(),
                "more monitors run than are read",
            );
            return;
        }
        if monitor == Monitor::Qemu {
            let before = input.facts.configurations.len();
            let name = path.display().to_string();
            input.stream(&name, format!("{}\n", shell(&words)).as_bytes());
            let running = input.facts.configurations.split_off(before);
            input.facts.running.extend(running);
        }
        let limits = proc.join(&process).join("limits");
        let limit = text(&limits).and_then(|all| {
            let mut lines = all.lines().map(str::to_owned);
            lines.find(|line| line.starts_with("Max locked memory"))
        });
        if let Some(limit) = limit {
            let words: Vec<_> = limit.split_whitespace().skip(3).collect();
            let limit = words.first().copied().unwrap_or_default();
            let unit = words.get(2).copied().unwrap_or_default();
            let why = format!("{program} runs with a limit of locked memory of {limit} {unit}");
            input.note(&limits.display().to_string(), why.trim_end());
        }
    }
}

#[cfg(test)]
mod tests;
