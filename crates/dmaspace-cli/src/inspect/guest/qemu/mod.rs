//! QEMU's command line: the options that decide about memory and VFIO.
//!
//! Source: QEMU 10.0 `qemu-options.hx`, `qapi/qom.json` (`MemoryBackendProperties`), `util/keyval.c`,
//! `docs/about/removed-features.rst`; QEMU asks for transparent huge pages for all guest RAM (`ram_block_add` of `system/physmem.c`).

mod buses;
mod command;
mod config_file;
mod devices;
mod script;
mod value;

use std::fs;

use super::{
    Blocks, ConfigError, Guest, Monitor, Ram, Reading, Remapped, cpus, memory, page, variables,
};
use crate::inspect::process::plain;
use crate::size;

use buses::Buses;
use command::command;
pub(super) use command::{base_name, is_program};
pub(crate) use command::{begins, logged};
pub(super) use value::has_variable;
use value::{Pairs, bytes, host_address, pairs, set};

/// Memory without `-m`.
const DEFAULT: u64 = 128 << 20;
const BACKENDS: &str = "memory-backend-ram, memory-backend-memfd, memory-backend-file, memory-backend-shm, \
    memory-backend-memfd-private, memory-backend-guest-memfd";
/// Threads without `prealloc-threads`: as many as the guest has processors.
const EACH: u32 = u32::MAX;
/// Properties of memory objects that do not change the estimate.
const NEUTRAL: [&str; 15] = [
    "align",
    "discard-data",
    "dump",
    "id",
    "merge",
    "offset",
    "pmem",
    "policy",
    "prealloc-context",
    "qom-type",
    "readonly",
    "reserve",
    "rom",
    "seal",
    "x-use-canonical-path-for-ramblock-id",
];

/// Options without a value that decide nothing here, of QEMU 5 to 10 (`qemu-options.hx`).
const FLAGS: &str = "alt-grab async-teardown ctrl-grab curses daemonize enable-fips enable-kvm \
    enable-sync-profile full-screen h help jitdump mem-prealloc no-acpi no-fd-bootchk no-frame no-hpet \
    no-quit no-reboot no-shutdown no-user-config nodefaults nodefconfig nographic old-param \
    only-migratable perfmap portrait preconfig S s semihosting show-cursor singlestep snapshot usb \
    version win2k-hack xen-attach xen-domid-restrict";
/// Options with a value.
const VALUED: &str = "accel acpitable action add-fd append audio audiodev balloon bios blockdev \
    boot cdrom chardev chroot compat cpu D d debugcon device dfilter display drive dtb dump-vmstate echr \
    fda fdb fsdev fw_cfg g gdb global hda hdb hdc hdd icount incoming initrd iscsi k kernel L loadvm M m \
    machine mem-path mon monitor msg mtdblock name net netdev nic numa object option-rom overcommit \
    parallel pflash pidfile plugin prom-env qmp qmp-pretty qtest qtest-log readconfig realtime rotate rtc \
    run-with runas sandbox sd seed semihosting-config serial set shim smbios smp soundhw spice tb-size \
    tpmdev trace usbdevice uuid vga virtfs vnc watchdog watchdog-action writeconfig xen-domid";

/// Options without a value that older versions had, of QEMU before 5 and of qemu-kvm.
const REMOVED_FLAGS: &str = "audio-help cirrusvga defconfig enable-kqemu enable-nesting igd-passthru kernel-kqemu \
    localtime no-kqemu no-kvm no-kvm-irqchip no-kvm-pit no-kvm-pit-reinjection no-rtc rtc-td-hack sdl std-vga \
    tdf trace-unassigned virtfs_synth vmwarevga xen-create";
/// Options with a value that they had, and `-id` of Proxmox.
const REMOVED_VALUED: &str = "bootp bt clock cpu_vendor hdachs id kvm-shadow-memory nvram osk pcidevice redir smb \
    startdate tftp virtioconsole";
/// Beginnings of the parts of names of options that may decide about memory or devices.
const DECISIVE: [&str; 7] = ["dev", "huge", "mem", "numa", "object", "ram", "vfio"];
/// Objects that keep a guest's memory from the host, and what they are called.
const CONFIDENTIAL: [(&str, &str); 6] = [
    ("pef-guest", "PEF"),
    ("rme-guest", "Arm CCA"),
    ("s390-pv-guest", "s390-pv"),
    ("sev-guest", "SEV"),
    ("sev-snp-guest", "SEV-SNP"),
    ("tdx-guest", "TDX"),
];

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
        found.guest.ignore(&error.to_string());
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
            found.guest.ignore(&error.to_string());
        }
        found.guest()
    };
    read().unwrap_or_else(|error: ConfigError| {
        let mut guest = Guest::default();
        guest.ignore(&format!("the command line ({error})"));
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
                self.guest.ignore(&error.to_string());
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

    fn object(&mut self, mut pairs: Pairs, pool: u64) -> Result<(), ConfigError> {
        let kind = pairs.remove("qom-type").unwrap_or_default();
        self.libvirt |= pairs.get("id").is_some_and(|id| id == "masterKey0");
        if let Some((_, told)) = CONFIDENTIAL.iter().find(|(known, _)| *known == kind) {
            let id = pairs.remove("id").unwrap_or_default();
            // Bit 2 of the policy encrypts registers too: AMD SEV API, `SEV_POLICY_ES`.
            let policy = pairs.remove("policy").unwrap_or_default();
            let policy = match policy.strip_prefix("0x") {
                Some(digits) => u64::from_str_radix(digits, 16).ok(),
                None => policy.parse().ok(),
            };
            let registers = *told == "SEV" && policy.is_some_and(|policy| policy & 4 != 0);
            let told = if registers { "SEV-ES" } else { told };
            self.protections.push((id, told.into()));
            return Ok(());
        }
        if has_variable(&kind) {
            self.guest.ignore(&format!("-object {kind}"));
        }
        let Some(backend) = kind.strip_prefix("memory-backend-") else {
            return Ok(());
        };
        let shared = match backend {
            "ram" | "file" => false,
            "memfd" | "shm" | "memfd-private" | "guest-memfd" => true,
            // Pages of SGX are not mapped for devices.
            "epc" => {
                let id = pairs.remove("id").unwrap_or_default();
                self.guest.ignore(&format!("memory object {id:?} ({kind})"));
                return Ok(());
            }
            _ => {
                return Err(ConfigError::Value {
                    of: "-object".into(),
                    value: kind,
                    known: BACKENDS,
                });
            }
        };
        let of = |name: &str| format!("-object {kind}, {name}");
        let told = pairs.contains_key("prealloc");
        let mut flag = |name: &str, default| match pairs.remove(name).as_deref() {
            None => Ok(default),
            Some("on" | "yes" | "true" | "y") => Ok(true),
            Some("off" | "no" | "false" | "n") => Ok(false),
            Some(value) => Err(ConfigError::Value {
                of: of(name),
                value: value.into(),
                known: "on, off",
            }),
        };
        let (shared, huge) = (flag("share", shared)?, flag("hugetlb", false)?);
        let prealloc = flag("prealloc", false)?;
        let size = |value: Option<String>, name| match value {
            None => Ok(None),
            Some(value) => bytes(&of(name), &value).map(Some),
        };
        let bytes = size(pairs.remove("hugetlbsize"), "hugetlbsize")?;
        let pages = bytes.map(|bytes| page(of("hugetlbsize"), bytes));
        let pages = pages.transpose()?;
        let threads = match pairs.remove("prealloc-threads") {
            None => EACH,
            Some(value) => cpus(of("prealloc-threads"), &value)?,
        };
        let mut host_nodes: Vec<u32> = Vec::new();
        pairs.retain(|name, value| {
            let is_node = name.starts_with("host-nodes");
            host_nodes.extend(is_node.then(|| set(value)).into_iter().flatten());
            !is_node
        });
        host_nodes.sort_unstable();
        host_nodes.dedup();
        let modelled = ["id", "size", "mem-path"];
        let properties = pairs
            .iter()
            .filter(|(name, _)| !modelled.contains(&name.as_str()));
        let properties: Vec<_> = properties
            .map(|(name, value)| (name.clone(), value.clone()))
            .collect();
        let ram = Ram {
            id: pairs.get("id").cloned().unwrap_or_default(),
            bytes: size(pairs.remove("size"), "size")?.unwrap_or_default(),
            pool_bytes: huge.then(|| pages.unwrap_or(pool)),
            shared,
            file: pairs.remove("mem-path"),
            asks_for_huge: Some(true),
            prealloc_threads: if prealloc { threads } else { 0 },
            threads_given: threads != EACH,
            bound: pairs.get("policy").is_some_and(|policy| policy == "bind"),
            host_nodes,
            properties,
            ..Ram::default()
        };
        if told && !prealloc {
            self.lazy.push(ram.id.clone());
        }
        let unknown = pairs
            .into_keys()
            .filter(|name| !NEUTRAL.contains(&name.as_str()));
        let named = unknown.map(|name| format!("{name} of {:?}", ram.id));
        self.guest.ignored.extend(named);
        self.objects.push(ram);
        Ok(())
    }

    /// Makes these objects the guest's memory.
    fn back(&mut self, ids: impl IntoIterator<Item = String>) -> Result<(), ConfigError> {
        for id in ids {
            let at = self.objects.iter().position(|ram| ram.id == id);
            let Some(mut ram) = at.map(|at| self.objects.remove(at)) else {
                self.guest
                    .or_named(self.reading, Err(ConfigError::NoObject { id }))?;
                continue;
            };
            if ram.bytes == 0 {
                ram.bytes = self.bytes.unwrap_or(DEFAULT);
            }
            let wanted = self.prealloc && !self.lazy.contains(&ram.id);
            if wanted && ram.prealloc_threads == 0 || ram.prealloc_threads == EACH {
                ram.prealloc_threads = self.guest.cpus.max(1);
            }
            // `-mem-prealloc` names them: `qemu_process_sugar_options`, `system/vl.c`.
            ram.threads_given |= self.prealloc;
            self.guest.memory.push(ram);
        }
        Ok(())
    }

    fn guest(mut self) -> Result<Guest, ConfigError> {
        self.guest.viommu = self.viommu.take();
        self.guest.confidential = self.confidential();
        let by_machine = self.machine.is_some();
        let machine: Vec<_> = match self.machine.take() {
            Some(id) => {
                // A file that is not read may define it; the machine has as much as `-m` says.
                if self.guest.elsewhere && !self.objects.iter().any(|ram| ram.id == id) {
                    self.guest
                        .ignore(&format!("memory object {id:?}, which may be in that file"));
                    self.objects.push(Ram {
                        id: id.clone(),
                        asks_for_huge: Some(true),
                        ..Ram::default()
                    });
                }
                vec![id]
            }
            None => std::mem::take(&mut self.nodes),
        };
        let by_nodes = !by_machine && !machine.is_empty();
        let cpus = self.guest.cpus.max(1);
        let default = default_bytes(&self.program, self.kind.as_deref());
        if machine.is_empty() && !self.unknown && self.bytes.unwrap_or(default) > 0 {
            // Options that are not here may say how much there is.
            if let (None, Some(variable), Reading::Exact) =
                (self.bytes, self.variable.take(), self.reading)
            {
                return Err(ConfigError::Elsewhere { variable });
            }
            self.guest.memory.push(Ram {
                bytes: self.bytes.unwrap_or(default),
                file: self.path.take(),
                asks_for_huge: Some(true),
                prealloc_threads: if self.prealloc { cpus } else { 0 },
                threads_given: self.prealloc,
                ..Ram::default()
            });
        }
        self.back(machine)?;
        let nodes = self.guest.bytes();
        // `numa_complete_configuration`, QEMU `hw/core/numa.c`.
        if let Some(bytes) = self.bytes.filter(|bytes| by_nodes && *bytes != nodes) {
            let (bytes, nodes) = (size::bytes(bytes), size::bytes(nodes));
            self.guest.ignore(&format!(
                "-m {bytes}, which is not the {nodes} of the nodes: QEMU refuses that"
            ));
        }
        let modules = std::mem::take(&mut self.modules);
        self.back(modules)?;
        for (object, mut blocks) in std::mem::take(&mut self.blocks) {
            let object = self.objects.iter().find(|ram| ram.id == object);
            blocks.bytes = object.map_or(0, |ram| ram.bytes);
            self.guest.blocks.push(blocks);
        }
        let unused = self
            .objects
            .iter()
            .map(|ram| format!("memory object {:?}", ram.id));
        self.guest.ignored.extend(unused);
        // Modules come behind what the machine begins with.
        let begins = self.bytes.unwrap_or_else(|| self.guest.bytes());
        let kind = self.kind.as_deref().unwrap_or("pc");
        self.guest.typed(kind);
        self.buses.place(&mut self.guest);
        self.guest.remapped = Remapped::of(kind, self.flash, begins, self.most_below_4g);
        self.guest.monitor = match self.libvirt && self.stopped {
            true => Monitor::Libvirt,
            false => Monitor::Qemu,
        };
        match self.reading {
            Reading::Exact => self.guest.in_range(),
            Reading::Rough => Ok(self.guest),
        }
    }
}

/// Memory of a machine without `-m`: `default_ram_size` of QEMU 10.0 `hw/*/`, 128 MiB where it has none (`hw/core/machine.c`);
/// the boards of the Raspberry Pi have what their revision says.
fn default_bytes(program: &str, machine: Option<&str>) -> u64 {
    const MIB: u64 = 1 << 20;
    let target = program.rsplit('-').next().unwrap_or_default();
    let machine = machine.unwrap_or(match target {
        "ppc64" | "ppc64le" => "pseries",
        "loongarch64" => "loongarch",
        "hppa" => "hppa",
        _ => "",
    });
    let is = |names: &[&str]| {
        let mut names = names.iter();
        names.any(|name| machine == *name || machine.starts_with(&format!("{name}-")))
    };
    match target {
        _ if machine == "none" => 0,
        _ if is(&["raspi4b"]) => 2048 * MIB,
        _ if is(&[
            "sbsa-ref",
            "raspi2b",
            "raspi3b",
            "powernv",
            "powernv8",
            "powernv9",
            "powernv10",
        ]) =>
        {
            1024 * MIB
        }
        "loongarch64" => 1024 * MIB,
        _ if is(&["pseries", "raspi0", "raspi1ap", "raspi3ap"]) => 512 * MIB,
        "hppa" => 512 * MIB,
        _ => DEFAULT,
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
