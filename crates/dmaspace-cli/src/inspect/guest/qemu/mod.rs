//! QEMU's command line: the options that decide about memory and VFIO.
//!
//! Source: QEMU 10.0 `qemu-options.hx`, `qapi/qom.json` (`MemoryBackendProperties`), `util/keyval.c`,
//! `docs/about/removed-features.rst`; QEMU asks for transparent huge pages for all guest RAM (`ram_block_add` of `system/physmem.c`).

mod buses;
mod command;
mod config_file;
mod devices;
mod known;
mod machine;
mod object;
mod script;
mod value;

use std::fs;

use super::{Blocks, ConfigError, Guest, Monitor, Ram, Reading, cpus, memory, variables};
use crate::inspect::process::plain;
use crate::size;

use buses::Buses;
use command::command;
pub(super) use command::{base_name, is_program};
pub(crate) use command::{begins, logged};
use known::{DECISIVE, FLAGS, REMOVED_FLAGS, REMOVED_VALUED, VALUED};
pub(super) use value::has_variable;
use value::{Pairs, bytes, host_address, pairs};

/// Memory without `-m`.
const DEFAULT: u64 = 128 << 20;
/// Threads without `prealloc-threads`: as many as the guest has processors.
const EACH: u32 = u32::MAX;

/// The machine that QEMU makes of this line, which may have a shell's quotes. `default_pool` is the size of a
/// page of the pool that is used where none is named.
pub fn qemu_line(line: &str, default_pool: u64) -> Result<Guest, ConfigError> {
    let command = command(line)?;
    let mut found = ParsedOptions::of(&command.arguments, default_pool, Reading::Exact)?;
    found.program = command.program;
    if !command.before.is_empty() {
        let before = command.before.join(" ");
        found.guest.ignore(&format!("{before} before QEMU"));
    }
    if command.more {
        found.guest.ignore("further commands of QEMU in the text");
    }
    match found.refused.take() {
        Some(error) => Err(error),
        None => found.guest(),
    }
}

/// Reads options that libvirt adds to its own, of a guest with so many processors: devices, and objects in the place of
/// all memory. Other settings of memory are named as ignored: which part they replace is not known.
pub(super) fn added(
    arguments: &[String],
    cpus: u32,
    default_pool: u64,
) -> Result<Guest, ConfigError> {
    let mut found = ParsedOptions::of(arguments, default_pool, Reading::Rough)?;
    found.guest.cpus = cpus;
    if let Some(error) = found.refused.take() {
        found.guest.ignore(&crate::output::sentence(&error));
    }
    found.guest.viommu = found.viommu.take();
    found.guest.confidential = found.confidential();
    let nodes = std::mem::take(&mut found.nodes);
    found.back(nodes)?;
    // The buses that they name are libvirt's.
    found.buses.place(&mut found.guest);
    let size = found
        .bytes
        .map(|bytes| format!("-m {}", size::bytes(bytes)));
    let path = found.path.take().map(|path| format!("-mem-path {path}"));
    let objects = std::mem::take(&mut found.objects).into_iter();
    let objects = objects.map(|ram| format!("memory object {:?}", ram.id));
    for part in objects.chain(size).chain(path) {
        found.guest.ignore(&part);
    }
    Ok(found.guest)
}

/// As [`qemu_line`], of arguments that are known to be QEMU's: what is not understood is named as ignored.
pub(crate) fn qemu_rough(arguments: &[String], default_pool: u64) -> Guest {
    let read = || {
        let mut found = ParsedOptions::of(arguments, default_pool, Reading::Rough)?;
        if let Some(error) = found.refused.take() {
            found.guest.ignore(&crate::output::sentence(&error));
        }
        found.guest()
    };
    read().unwrap_or_else(|error: ConfigError| {
        let mut guest = Guest::default();
        guest.ignore(&format!(
            "the command line ({})",
            crate::output::sentence(&error)
        ));
        guest
    })
}

/// Arguments of a monitor's process without those that decide nothing about its memory and the host's devices: names of
/// guests, users, disks and networks. `None` of another program.
pub(crate) fn memory_arguments(words: &[String]) -> Option<Vec<String>> {
    const KEPT: &str = "m machine M numa object mem-path mem-prealloc smp overcommit device readconfig enable-kvm accel";
    const DEVICES: [&str; 9] = [
        "vfio",
        "iommu",
        "smmu",
        "pxb",
        "port",
        "bridge",
        "dimm",
        "virtio-mem",
        "xio3130",
    ];
    let (program, rest) = words.split_first()?;
    let monitor = Monitor::of_program(program)?;
    let mut kept = vec![base_name(program).to_owned()];
    if monitor != Monitor::Qemu {
        return Some(kept);
    }
    let mut rest = rest.iter().peekable();
    while let Some(word) = rest.next() {
        let option = word.trim_start_matches('-');
        let value = rest.next_if(|value| !value.starts_with('-'));
        if !word.starts_with('-') || !KEPT.split_whitespace().any(|known| known == option) {
            continue;
        }
        let concerns = |value: &str| match option {
            "device" => DEVICES.iter().any(|kind| value.contains(kind)),
            // Secrets and networks are objects, too.
            "object" => ["memory-backend", "iommufd", "-guest"]
                .iter()
                .any(|kind| value.contains(kind)),
            _ => true,
        };
        if value.is_none_or(|value| concerns(value)) {
            kept.push(word.clone());
            kept.extend(value.cloned());
        }
    }
    Some(kept)
}

/// The options that were read.
#[derive(Default)]
struct ParsedOptions {
    guest: Guest,
    reading: Reading,
    /// The program's name, where it is known: the machine that it makes by default depends on it.
    program: String,
    /// A variable stands for options.
    variable: Option<String>,
    /// Memory objects that are not brought in before the start, whatever `-mem-prealloc` says.
    lazy: Vec<String>,
    bytes: Option<u64>,
    /// The size is given and not understood.
    unknown: bool,
    path: Option<String>,
    prealloc: bool,
    stopped: bool,
    libvirt: bool,
    /// The first word that QEMU does not know and that may decide about memory or devices.
    refused: Option<ConfigError>,
    /// The type of the machine, its limit of memory below 4 GiB, and whether its firmware is in flash.
    kind: Option<String>,
    most_below_4g: Option<u64>,
    flash: bool,
    objects: Vec<Ram>,
    /// Objects that are the machine's memory, and of modules plugged in.
    machine: Option<String>,
    nodes: Vec<String>,
    modules: Vec<String>,
    /// Devices that plug memory in blocks, with the names of their objects.
    blocks: Vec<(String, Blocks)>,
    /// The object that keeps the machine's memory from the host, and all that can: name and kind.
    protection: Option<String>,
    protections: Vec<(String, String)>,
    /// Devices that are virtual IOMMUs.
    viommu: Option<String>,
    buses: Buses,
}

impl ParsedOptions {
    fn of(arguments: &[String], pool: u64, reading: Reading) -> Result<Self, ConfigError> {
        let mut found = Self {
            reading,
            ..Self::default()
        };
        let mut arguments = arguments.iter().map(String::as_str).peekable();
        while let Some(argument) = arguments.next() {
            let Some(option) = argument.strip_prefix('-') else {
                // A shell's next command.
                if matches!(argument, "|" | "||" | "&" | "&&" | ";") {
                    break;
                }
                found.word(argument);
                continue;
            };
            let option = option.strip_prefix('-').unwrap_or(option);
            let is_in = |options: &str| options.split_whitespace().any(|known| known == option);
            if is_in(VALUED) || is_in(REMOVED_VALUED) {
                let value = arguments.next().ok_or_else(|| ConfigError::NoValue {
                    option: option.into(),
                });
                let taken = value.and_then(|value| found.take(option, value, pool));
                if taken.is_err() {
                    found.unknown |= option == "m";
                }
                found.guest.or_named(reading, taken)?;
            } else if !is_in(FLAGS) && !is_in(REMOVED_FLAGS) {
                let value = arguments.next_if(|word| !word.starts_with('-'));
                found.unknown(option, value.unwrap_or_default());
            }
            found.prealloc |= option == "mem-prealloc";
            found.stopped |= option == "S";
        }
        Ok(found)
    }

    /// A word that is no option is an image of a disk, unless it stands for something else.
    fn word(&mut self, word: &str) {
        if word.starts_with([
            '\u{2010}', '\u{2011}', '\u{2012}', '\u{2013}', '\u{2014}', '\u{2212}',
        ]) {
            let word = plain(word);
            self.refused.get_or_insert(ConfigError::Dash { word });
        } else if has_variable(word) {
            self.variable.get_or_insert_with(|| plain(word));
            self.guest
                .ignore(&format!("{word} in the place of options"));
        }
    }

    /// An option that no QEMU is known to have.
    fn unknown(&mut self, option: &str, value: &str) {
        let decides = |part: &str| DECISIVE.iter().any(|known| part.starts_with(known));
        match option.split(['-', '_']).any(decides) {
            true => {
                let option = plain(option);
                self.refused.get_or_insert(ConfigError::Option { option });
            }
            false => self.guest.ignore(format!("-{option} {value}").trim_end()),
        }
    }

    fn take(&mut self, option: &str, value: &str, pool: u64) -> Result<(), ConfigError> {
        variables(value).for_each(|variable| self.guest.lacks(&variable));
        let implied = match option {
            "readconfig" => return self.config_file(value, pool),
            // A property of a device or an object.
            "set" => {
                self.guest.ignore(&format!("-set {value}"));
                return Ok(());
            }
            "pcidevice" => {
                self.guest
                    .ignore(&format!("-pcidevice {value}, by KVM and not by VFIO"));
                return Ok(());
            }
            "blockdev" | "netdev" | "overcommit" | "realtime" => "driver",
            "m" => "size",
            "machine" | "M" | "numa" => "type",
            "object" => "qom-type",
            "device" => "driver",
            "smp" => "cpus",
            "name" => "guest",
            "drive" => "file",
            "mem-path" => {
                self.path = Some(plain(value));
                return Ok(());
            }
            _ => return Ok(()),
        };
        match pairs(option, value, implied) {
            // Disks and networks are known by few of theirs.
            Err(error) if matches!(option, "blockdev" | "netdev") => {
                self.guest.ignore(&crate::output::sentence(&error));
                Ok(())
            }
            pairs => self.apply(option, pairs?, pool),
        }
    }

    /// Reads a file of `-readconfig`, if it is of this machine; else it is named.
    fn config_file(&mut self, path: &str, pool: u64) -> Result<(), ConfigError> {
        let is_file = || fs::metadata(path).is_ok_and(|found| found.is_file());
        let read = || hostmem::text_at_most(path, config_file::MOST).ok();
        let here = self.reading == Reading::Exact && is_file();
        let sections = here.then(read).flatten();
        let Some(sections) = sections.and_then(|text| config_file::sections(&text)) else {
            self.guest.elsewhere = true;
            self.guest.lacks(path);
            self.guest
                .ignore(&format!("-readconfig {path}, which is not read"));
            return Ok(());
        };
        for section in sections {
            let option = match section.option.as_str() {
                "memory" => "m",
                "smp-opts" => "smp",
                option => option,
            };
            self.apply(option, section.pairs, pool)?;
        }
        Ok(())
    }

    /// Takes the properties of an option.
    fn apply(&mut self, option: &str, mut pairs: Pairs, pool: u64) -> Result<(), ConfigError> {
        let mut text = |name: &str| pairs.remove(name);
        match option {
            // Without a unit it is MiB.
            "m" => {
                let known = |name: &&String| ["size", "slots", "maxmem"].contains(&name.as_str());
                if let Some(value) = pairs.keys().find(|name| !known(name)) {
                    return Err(ConfigError::Value {
                        of: "-m".into(),
                        value: value.clone(),
                        known: "size, slots, maxmem",
                    });
                }
                let mut text = |name: &str| pairs.remove(name);
                if let Some(value) = text("size") {
                    let unit = if value.ends_with(|c: char| c.is_ascii_digit()) {
                        "M"
                    } else {
                        ""
                    };
                    // None is what the machine has without the option.
                    self.bytes = match value.trim_matches('0').is_empty() {
                        true => None,
                        false => Some(bytes("-m", &format!("{value}{unit}"))?),
                    };
                }
            }
            "machine" | "M" => {
                self.machine = text("memory-backend").or(self.machine.take());
                self.kind = text("type").or(self.kind.take());
                self.flash |= text("pflash0").is_some();
                let protection = text("confidential-guest-support");
                let protection = protection.or_else(|| text("memory-encryption"));
                self.protection = protection.or(self.protection.take());
                let viommu = match text("iommu").as_deref() {
                    None | Some("off" | "none") => None,
                    // The only one when there was no choice.
                    Some("on") => Some("intel-iommu".to_owned()),
                    Some(model) => Some(model.to_owned()),
                };
                self.viommu = viommu.or(self.viommu.take());
                if let Some(value) = text("memory.size") {
                    self.bytes = Some(bytes("-machine memory.size", &value)?);
                }
                if let Some(number) = text("smp.cpus") {
                    self.guest.cpus = cpus("-machine smp.cpus", &number)?;
                }
                if let Some(most) = text("max-ram-below-4g") {
                    let of = "-machine max-ram-below-4g";
                    self.most_below_4g = Some(memory(of, bytes(of, &most)?, 4 << 30)?);
                }
            }
            "drive" => {
                self.flash |= text("if").is_some_and(|kind| kind == "pflash");
                // `nvme://0000:44:00.0/1`
                let file = text("file").unwrap_or_default();
                let host = file
                    .strip_prefix("nvme://")
                    .and_then(|rest| rest.split('/').next());
                if let Some(host) = host {
                    self.guest.give_disk(host_address(option, host)?);
                }
            }
            "blockdev" => self.block(pairs)?,
            "netdev" => {
                let kind = text("driver").or_else(|| text("type")).unwrap_or_default();
                if matches!(kind.as_str(), "vhost-user" | "vhost-vdpa") {
                    self.guest.ignore(&format!("-netdev {kind}"));
                }
            }
            "overcommit" | "realtime" => {
                let names = ["mem-lock", "mlock"];
                let locked = names.into_iter().find_map(|name| Some((name, text(name)?)));
                if let Some((name, value)) = locked.filter(|(_, value)| value != "off") {
                    self.guest.locked = true;
                    self.guest.ignore(&format!("-{option} {name}={value}"));
                }
            }
            "numa" => {
                let is_node = text("type").is_some_and(|kind| kind == "node");
                let (object, own) = (text("memdev"), text("mem"));
                let has_memory = is_node && (object.is_some() || own.is_some());
                self.guest.nodes += usize::from(has_memory);
                self.nodes.extend(object.filter(|_| is_node));
            }
            "smp" => {
                let number = text("cpus").map(|number| cpus("-smp cpus", &number));
                self.guest.cpus = match number.transpose()? {
                    Some(number) => number,
                    None => product(&mut pairs)?,
                };
            }
            "name" => {
                self.libvirt |= text("debug-threads").is_some();
                self.guest.name = text("guest");
            }
            "device" => self.device(pairs)?,
            "object" => self.object(pairs, pool)?,
            // A file may have any other.
            _ => {}
        }
        Ok(())
    }

    /// The technology that keeps the machine's memory from the host, by the object that the machine names; one
    /// that it does not name does nothing.
    fn confidential(&mut self) -> Option<String> {
        let named = self.protection.take();
        let all = std::mem::take(&mut self.protections);
        let mut kind = None;
        for (id, told) in all {
            match named.as_ref() == Some(&id) {
                true => kind = Some(told),
                false => self.guest.ignore(&format!("object {id:?} ({told})")),
            }
        }
        kind.or(named)
    }
}

/// Processors of `-smp sockets=2,cores=4`.
fn product(pairs: &mut Pairs) -> Result<u32, ConfigError> {
    let levels = [
        "drawers", "books", "sockets", "dies", "clusters", "modules", "cores", "threads",
    ];
    let mut all = None;
    for level in levels {
        if let Some(number) = pairs.remove(level) {
            let number = cpus(format!("-smp {level}"), &number)?;
            all = Some(all.unwrap_or(1u32).saturating_mul(number));
        }
    }
    match all {
        Some(all) => cpus("-smp", &all.to_string()),
        None => pairs
            .remove("maxcpus")
            .map_or(Ok(0), |number| cpus("-smp maxcpus", &number)),
    }
}

#[cfg(test)]
mod tests;
