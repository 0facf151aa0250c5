//! QEMU's command line: the options that decide about memory and VFIO.
//!
//! Source: QEMU 10.0 `qemu-options.hx`, `qapi/qom.json` (`MemoryBackendProperties`), `util/keyval.c`,
//! `docs/about/removed-features.rst`; QEMU asks for transparent huge pages for all guest RAM (`ram_block_add` of `system/physmem.c`).

use std::collections::BTreeMap;

use dmaspace::topology::MOST_MEMORY;
use serde_json::Value;

use super::{ConfigError, Guest, Monitor, Ram, Remapped, SMALL, cpus, maps_by_file, memory, page};
use crate::inspect::process::plain;
use crate::size;

/// Memory without `-m`.
const DEFAULT: u64 = 128 << 20;
const BACKENDS: &str = "memory-backend-ram, memory-backend-memfd, memory-backend-file, memory-backend-shm, \
    memory-backend-memfd-private";
/// Threads without `prealloc-threads`: as many as the guest has processors.
const EACH: u32 = u32::MAX;
/// Properties of memory objects that do not change the estimate.
const NEUTRAL: [&str; 16] = [
    "align",
    "discard-data",
    "dump",
    "host-nodes",
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
/// Programs that run another one, which may stand before QEMU.
const WRAPPERS: [&str; 14] = [
    "chrt",
    "doas",
    "env",
    "exec",
    "ionice",
    "nice",
    "nohup",
    "numactl",
    "setsid",
    "strace",
    "sudo",
    "systemd-run",
    "taskset",
    "time",
];
/// Objects that keep a guest's memory from the host, and what they are called.
const CONFIDENTIAL: [(&str, &str); 6] = [
    ("pef-guest", "PEF"),
    ("rme-guest", "Arm CCA"),
    ("s390-pv-guest", "s390-pv"),
    ("sev-guest", "SEV"),
    ("sev-snp-guest", "SEV-SNP"),
    ("tdx-guest", "TDX"),
];

/// Bytes of the longest name of a property whose parts are properties of their own.
const LONGEST: usize = 256;

/// Properties of one option.
pub(crate) type Pairs = BTreeMap<String, String>;

/// The machine that QEMU makes of this line, which may have a shell's quotes. `default_pool` is the size of a
/// page of the pool that is used where none is named.
pub fn qemu_line(line: &str, default_pool: u64) -> Result<Guest, ConfigError> {
    let line = line.replace("\r\n", "\n");
    let mut line = command(&line).trim_end();
    // The rest of a command that goes on in a line that is not there.
    if let Some(rest) = line.strip_suffix('\\') {
        line = if rest.ends_with(char::is_whitespace) {
            rest
        } else {
            line
        };
    }
    let words = shlex::split(line).ok_or(ConfigError::Quotes)?;
    // `virsh domxml-to-native` writes the environment first.
    let assigned = words.iter().take_while(|word| word.contains('=')).count();
    let words = words.get(assigned..).unwrap_or_default();
    let program = words.first().map_or("", |path| base_name(path));
    let at = match is_qemu(program) {
        true => Some(0),
        false if WRAPPERS.contains(&program) => position(words),
        false => None,
    };
    let Some((before, arguments)) = at.and_then(|at| words.split_at_checked(at)) else {
        return Err(ConfigError::NotQemu {
            program: plain(program),
        });
    };
    let mut found = ParsedOptions::of(arguments.get(1..).unwrap_or_default(), default_pool)?;
    if !before.is_empty() {
        let before = before.join(" ");
        found.guest.ignore(&format!("{before} before QEMU"));
    }
    match found.refused.take() {
        Some(error) => Err(error),
        None => found.guest(),
    }
}

/// The command in a text: behind a shell's prompt, and behind lines of libvirt's log that are before it.
fn command(text: &str) -> &str {
    // The second one would be a comment in a shell's words.
    let prompts = ["$ ", "# "];
    let unprompted = |text: &'_ str| -> usize {
        let space = text.len() - text.trim_start().len();
        let rest = text.trim_start();
        space
            + prompts
                .iter()
                .find(|prompt| rest.starts_with(**prompt))
                .map_or(0, |prompt| prompt.len())
    };
    let mut at = 0;
    for line in text.split_inclusive('\n') {
        let begin = unprompted(line);
        let word = line
            .get(begin..)
            .and_then(|line| line.split_whitespace().next());
        let begins = |word: &str| {
            let name = base_name(word);
            word.contains('=') || is_qemu(name) || WRAPPERS.contains(&name)
        };
        if word.is_some_and(begins) {
            return text.get(at + begin..).unwrap_or(text);
        }
        at += line.len();
    }
    text.get(unprompted(text)..).unwrap_or(text)
}

/// A program without its folder.
fn base_name(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

fn is_qemu(program: &str) -> bool {
    let variable = has_variable(program) && program.to_ascii_lowercase().contains("qemu");
    variable || matches!(program, "qemu" | "qemu-kvm" | "kvm" | "kvm-spice") || is_system(program)
}

/// `qemu-system-x86_64`, `qemu-lite-system-x86_64`
fn is_system(program: &str) -> bool {
    program.starts_with("qemu-") && program.contains("-system-")
}

/// The place of QEMU behind a program that runs it: `qemu` alone may be a user or a group.
fn position(words: &[String]) -> Option<usize> {
    let find = |is: fn(&str) -> bool| words.iter().position(|word| is(base_name(word)));
    find(|name| is_system(name) || name == "qemu-kvm").or_else(|| find(is_qemu))
}

/// Reads options that libvirt adds to its own, of a guest with so many processors: devices, and objects in the place of
/// all memory. Other settings of memory are named as ignored: which part they replace is not known.
pub(super) fn added(
    arguments: &[String],
    cpus: u32,
    default_pool: u64,
) -> Result<Guest, ConfigError> {
    let mut found = ParsedOptions::of(arguments, default_pool)?;
    found.guest.cpus = cpus;
    if let Some(error) = found.refused.take() {
        found.guest.ignore(&error.to_string());
    }
    found.guest.viommu = found.viommu.take();
    found.guest.confidential = found.confidential();
    let nodes = std::mem::take(&mut found.nodes);
    found.back(nodes)?;
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

/// As [`qemu_line`], of the arguments of a process that is known to be QEMU, perhaps a newer one.
pub fn qemu(arguments: &[String], default_pool: u64) -> Result<Guest, ConfigError> {
    let mut found = ParsedOptions::of(arguments, default_pool)?;
    if let Some(error) = found.refused.take() {
        found.guest.ignore(&error.to_string());
    }
    found.guest()
}

/// What the options say.
#[derive(Default)]
struct ParsedOptions {
    guest: Guest,
    bytes: Option<u64>,
    path: Option<String>,
    prealloc: bool,
    stopped: bool,
    libvirt: bool,
    /// The first word that QEMU does not know and that may decide about memory or devices.
    refused: Option<ConfigError>,
    /// Options are in files, which are not read.
    unread: bool,
    /// The type of the machine, its limit of memory below 4 GiB, and whether its firmware is in flash.
    kind: Option<String>,
    most_below_4g: Option<u64>,
    flash: bool,
    objects: Vec<Ram>,
    /// Objects that are the machine's memory, and of modules plugged in.
    machine: Option<String>,
    nodes: Vec<String>,
    modules: Vec<String>,
    /// The object that keeps the machine's memory from the host, and all that can: name and kind.
    protection: Option<String>,
    protections: Vec<(String, String)>,
    /// Devices that are virtual IOMMUs.
    viommu: Option<String>,
}

impl ParsedOptions {
    fn of(arguments: &[String], pool: u64) -> Result<Self, ConfigError> {
        let mut found = Self::default();
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
                })?;
                found.take(option, value, pool)?;
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
        } else if has_variable(word) || word.contains("...") || word.contains('\u{2026}') {
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
        let implied = match option {
            "readconfig" => {
                self.unread = true;
                self.guest
                    .ignore(&format!("-readconfig {value}, which is not read"));
                return Ok(());
            }
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
        let mut pairs = match pairs(option, value, implied) {
            // Disks and networks are known by few of theirs.
            Err(error) if matches!(option, "blockdev" | "netdev") => {
                self.guest.ignore(&error.to_string());
                return Ok(());
            }
            pairs => pairs?,
        };
        let mut text = |name: &str| pairs.remove(name);
        match option {
            // Without a unit it is MiB.
            "m" => {
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
                    self.guest.ignore(&format!("-{option} {name}={value}"));
                }
            }
            "numa" => self.nodes.extend(text("memdev")),
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
            _ => self.object(pairs, pool)?,
        }
        Ok(())
    }

    fn device(&mut self, mut pairs: Pairs) -> Result<(), ConfigError> {
        let driver = pairs.remove("driver").unwrap_or_default();
        match driver.as_str() {
            "vfio-pci" | "vfio-pci-nohotplug" | "vfio-ap" | "vfio-ccw" => {
                let host = match pairs.remove("host") {
                    Some(host) => Some(host_address(&format!("device {driver}, host"), &host)?),
                    None => None,
                };
                // A PCI device's folder has the name of its address, that of a mediated one its UUID.
                let folder = pairs.remove("sysfsdev");
                let folder = folder
                    .as_deref()
                    .map(|path| base_name(path.trim_end_matches('/')));
                let host = host.or_else(|| folder.and_then(address));
                if host.is_none() {
                    let id = pairs
                        .get("id")
                        .map(|id| format!(" {id}"))
                        .unwrap_or_default();
                    let text = match (folder, pairs.get("fd")) {
                        (Some(name), _) => {
                            format!("{driver}{id}: mediated device {name}, which pins on demand")
                        }
                        (None, Some(fd)) => format!("{driver}{id}: a device by fd={fd}"),
                        (None, None) => format!("{driver}{id}: no device is named"),
                    };
                    self.guest.ignore(&text);
                }
                self.guest.give(pairs.contains_key("iommufd"), host);
            }
            "pci-assign" | "kvm-pci-assign" => {
                let host = pairs.remove("host").unwrap_or_default();
                self.guest
                    .ignore(&format!("{driver} {host}, by KVM and not by VFIO"));
            }
            "pc-dimm" => self.modules.extend(pairs.remove("memdev")),
            "intel-iommu" | "amd-iommu" | "arm-smmuv3" | "riscv-iommu-pci" | "riscv-iommu-sys" => {
                self.viommu = Some(driver);
            }
            name if name.starts_with("virtio-iommu") => self.viommu = Some(driver),
            // Other memory, and devices whose memory other processes or the kernel map.
            name if ["memdev", "volatile-memdev", "persistent-memdev"]
                .iter()
                .any(|property| pairs.contains_key(*property))
                || ["vhost-user", "vhost-vdpa", "vfio-", "xen-pci-passthrough"]
                    .iter()
                    .any(|kind| name.starts_with(kind))
                || has_variable(name) =>
            {
                self.guest.ignore(name);
            }
            _ => {}
        }
        Ok(())
    }

    /// Disks that QEMU drives by VFIO, and those of other processes.
    fn block(&mut self, mut pairs: Pairs) -> Result<(), ConfigError> {
        let driver = pairs.remove("driver").unwrap_or_default();
        // A format may have its file in line.
        let inner = pairs.remove("file.driver").unwrap_or_default();
        for (driver, device) in [(driver, "device"), (inner, "file.device")] {
            match (driver.as_str(), pairs.get(device)) {
                ("nvme", Some(host)) => {
                    let host = host_address("blockdev nvme, device", host)?;
                    self.guest.give_disk(host);
                }
                (name, _) if name.starts_with("virtio-blk-v") || name == "nvme-io_uring" => {
                    self.guest.ignore(&format!("-blockdev {name}"));
                }
                _ => {}
            }
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
            "memfd" | "shm" | "memfd-private" => true,
            // Pages of SGX are not mapped for devices.
            "epc" => return Ok(()),
            _ => {
                return Err(ConfigError::Value {
                    of: "-object".into(),
                    value: kind,
                    known: BACKENDS,
                });
            }
        };
        let of = |name: &str| format!("-object {kind}, {name}");
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
        let ram = Ram {
            id: pairs.get("id").cloned().unwrap_or_default(),
            bytes: size(pairs.remove("size"), "size")?.unwrap_or_default(),
            pool_bytes: huge.then(|| pages.unwrap_or(pool)),
            shared,
            file: pairs.remove("mem-path"),
            asks_for_huge: Some(true),
            prealloc_threads: if prealloc { threads } else { 0 },
        };
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
            let ram = at.map(|at| self.objects.remove(at));
            let mut ram = ram.ok_or(ConfigError::NoObject { id })?;
            if ram.bytes == 0 {
                ram.bytes = self.bytes.unwrap_or(DEFAULT);
            }
            if self.prealloc && ram.prealloc_threads == 0 || ram.prealloc_threads == EACH {
                ram.prealloc_threads = self.guest.cpus.max(1);
            }
            self.guest.memory.push(ram);
        }
        Ok(())
    }

    fn guest(mut self) -> Result<Guest, ConfigError> {
        self.guest.viommu = self.viommu.take();
        self.guest.confidential = self.confidential();
        let machine: Vec<_> = match self.machine.take() {
            Some(id) => {
                // A file that is not read may define it; the machine has as much as `-m` says.
                if self.unread && !self.objects.iter().any(|ram| ram.id == id) {
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
        let cpus = self.guest.cpus.max(1);
        if machine.is_empty() {
            self.guest.memory.push(Ram {
                bytes: self.bytes.unwrap_or(DEFAULT),
                file: self.path.take(),
                asks_for_huge: Some(true),
                prealloc_threads: if self.prealloc { cpus } else { 0 },
                ..Ram::default()
            });
        }
        let modules = std::mem::take(&mut self.modules);
        self.back(machine.into_iter().chain(modules))?;
        let unused = self
            .objects
            .iter()
            .map(|ram| format!("memory object {:?}", ram.id));
        self.guest.ignored.extend(unused);
        // Modules come behind what the machine begins with.
        let begins = self.bytes.unwrap_or_else(|| self.guest.bytes());
        let kind = self.kind.as_deref().unwrap_or("pc");
        self.guest.by_file = maps_by_file(kind);
        self.guest.remapped = Remapped::of(kind, self.flash, begins, self.most_below_4g);
        self.guest.monitor = match self.libvirt && self.stopped {
            true => Monitor::Libvirt,
            false => Monitor::Qemu,
        };
        self.guest.in_range()
    }
}

/// A size as QEMU reads it, up to whole pages.
fn bytes(of: &str, value: &str) -> Result<u64, ConfigError> {
    let bytes = match scaled(value).and_then(|bytes| bytes.checked_next_multiple_of(SMALL)) {
        Some(bytes) if bytes > 0 => bytes,
        // No size, or more than 64 bits.
        _ => size::parse(value).map_err(|source| ConfigError::Size {
            of: of.into(),
            value: value.into(),
            source,
        })?,
    };
    memory(of, bytes, MOST_MEMORY)
}

/// `4G`, `1.5g`, `0x1000`, `1P`. Source: QEMU `do_strtosz`, `util/cutils.c`.
fn scaled(text: &str) -> Option<u64> {
    let decimal = |digits: &str| digits.bytes().all(|digit| digit.is_ascii_digit());
    if let Some(digits) = text.strip_prefix("0x") {
        return u64::from_str_radix(digits, 16).ok();
    }
    let last = text.chars().next_back()?;
    let shift = match last.to_ascii_lowercase() {
        'k' => 10,
        'm' => 20,
        'g' => 30,
        't' => 40,
        'p' => 50,
        'e' => 60,
        _ => 0,
    };
    let number = text
        .strip_suffix(|c: char| c.is_ascii_alphabetic())
        .unwrap_or(text);
    if shift == 0 && !matches!(last, 'b' | 'B' | '0'..='9') {
        return None;
    }
    let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
    if whole.is_empty() || !decimal(whole) || !decimal(fraction) || fraction.len() > 18 {
        return None;
    }
    let tenths = 10u128.checked_pow(u32::try_from(fraction.len()).ok()?)?;
    let whole = whole.parse::<u64>().ok()?.checked_mul(1 << shift)?;
    let fraction = (u128::from(fraction.parse::<u64>().ok()?) << shift) / tenths;
    whole.checked_add(u64::try_from(fraction).ok()?)
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

/// True for a text with a variable of a shell or of a template: `$NAME`, `${NAME}`, `{{ name }}`, `<NAME>`, `@NAME@`.
pub(super) fn has_variable(text: &str) -> bool {
    let enclosed = |open, close| text.starts_with(open) && text.ends_with(close) && text.len() > 2;
    text.contains('$') || text.contains("{{") || enclosed('<', '>') || enclosed('@', '@')
}

/// The address of a host's device in the value of an option.
fn host_address(of: &str, host: &str) -> Result<String, ConfigError> {
    address(host).ok_or_else(|| ConfigError::Address {
        of: format!("-{of}"),
        value: host.into(),
    })
}

/// `0000:01:00.0`, or `01:00.0` in domain 0, as the host lists it. Source: QEMU `set_pci_host_devaddr`,
/// `hw/core/qdev-properties-system.c`.
pub(crate) fn address(text: &str) -> Option<String> {
    let hex = |text: &str, most: u64| {
        let digits = !text.is_empty() && text.bytes().all(|digit| digit.is_ascii_hexdigit());
        let number = u64::from_str_radix(text, 16).ok().filter(|_| digits);
        number.filter(|number| *number <= most)
    };
    let (place, function) = text.split_once('.')?;
    let (place, slot) = place.rsplit_once(':')?;
    let (domain, bus) = place.split_once(':').unwrap_or(("0", place));
    let (domain, bus) = (hex(domain, u32::MAX.into())?, hex(bus, 0xff)?);
    let (slot, function) = (hex(slot, 0x1f)?, hex(function, 7)?);
    Some(format!("{domain:04x}:{bus:02x}:{slot:02x}.{function}"))
}

/// The properties of an option: JSON, or names and values with commas between them, where two commas stand for
/// one of the value. A first value without a name is that of `implied`; any other name without a value is on.
pub(crate) fn pairs(option: &str, text: &str, implied: &str) -> Result<Pairs, ConfigError> {
    if text.starts_with('{') {
        let object: serde_json::Map<String, Value> =
            serde_json::from_str(text).map_err(|source| ConfigError::Json {
                option: option.into(),
                source,
            })?;
        let mut pairs = Pairs::new();
        // Objects within are names with dots between, as in the other form. The parser limits their depth.
        let mut left: Vec<_> = object.into_iter().collect();
        while let Some((name, value)) = left.pop() {
            let value = match value {
                Value::Object(inner) if name.len() <= LONGEST => {
                    left.extend(
                        inner
                            .into_iter()
                            .map(|(part, value)| (format!("{name}.{part}"), value)),
                    );
                    continue;
                }
                Value::String(text) => text,
                other => other.to_string(),
            };
            pairs.insert(plain(&name), plain(&value));
        }
        return Ok(pairs);
    }
    let (mut parts, mut part) = (Vec::new(), String::new());
    let mut characters = text.chars().peekable();
    while let Some(c) = characters.next() {
        match c {
            ',' if characters.next_if_eq(&',').is_none() => parts.push(std::mem::take(&mut part)),
            c => part.push(c),
        }
    }
    parts.push(part);
    let named = parts
        .iter()
        .enumerate()
        .map(|(nth, part)| match part.split_once('=') {
            Some((name, value)) => (plain(name), plain(value)),
            None if nth == 0 => (implied.into(), plain(part)),
            None => (plain(part), "on".into()),
        });
    Ok(named.collect())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::Interface;
    use super::super::tests::{NUMBERS, predict};
    use super::*;

    const POOL: u64 = 2 << 20;

    const LIBVIRT: &str = r#"/usr/bin/qemu-system-x86_64 -name guest=web,debug-threads=on -S
            -object '{"qom-type":"secret","id":"masterKey0","format":"raw","file":"/x"}'
            -machine pc-q35-10.0,memory-backend=pc.ram -m size=4194304k
            -object '{"qom-type":"memory-backend-memfd","id":"pc.ram","hugetlb":true,
                      "hugetlbsize":2097152,"prealloc":true,"prealloc-threads":2,"size":4294967296}'
            -device '{"driver":"vfio-pci","host":"0000:01:00.0","id":"hostdev0","bus":"pci.5"}'"#;

    fn parsed(line: &str) -> Guest {
        qemu_line(line, POOL).unwrap()
    }

    #[test]
    fn a_machine_of_10_1_is_of_a_qemu_that_maps_by_file() {
        for (machine, by_file) in [
            ("q35", false),
            ("pc-q35-10.0", false),
            ("pc-q35-10.1", true),
            ("virt-11.0", true),
            ("pc-q35-rhel9.6.0", false),
        ] {
            let guest = qemu_line(&format!("qemu -machine {machine}"), 2 << 20).unwrap();
            assert_eq!(guest.by_file, by_file, "{machine}");
        }
    }

    #[test]
    fn memory_is_what_m_says_or_the_objects_that_are_used() {
        for (line, bytes) in [
            ("qemu-system-x86_64", 128 << 20),
            ("qemu-system-x86_64 -m 4096", 4 << 30),
            ("qemu-system-x86_64 -m 4G,slots=2,maxmem=8G", 4 << 30),
            ("qemu-system-x86_64 --m size=512M", 512 << 20),
            (
                "LC_ALL=C /usr/bin/kvm -append '-m 1' -m 1G disk.img",
                1 << 30,
            ),
            ("qemu -append -m -m 1G", 1 << 30),
        ] {
            let ram = Ram {
                bytes,
                asks_for_huge: Some(true),
                ..Ram::default()
            };
            assert_eq!(parsed(line).memory, [ram], "{line}");
        }
        let guest = parsed(
            "qemu -m 3G -object memory-backend-memfd,id=a,size=1G,hugetlb=on,hugetlbsize=1G \
             -object memory-backend-ram,id=b,size=2G,prealloc=on,prealloc-threads=4,host-nodes=0 \
             -object memory-backend-file,id=c,size=1G,mem-path=/dev/hugepages/a,,b,share=on,x=1 \
             -object memory-backend-shm,id=d,size=1G -object rng-random,id=rng \
             -numa node,memdev=a -numa node,memdev=b -device pc-dimm,memdev=c",
        );
        let expected = [
            Ram {
                id: "a".into(),
                bytes: 1 << 30,
                pool_bytes: Some(1 << 30),
                shared: true,
                ..Ram::default()
            },
            Ram {
                id: "b".into(),
                bytes: 2 << 30,
                prealloc_threads: 4,
                ..Ram::default()
            },
            Ram {
                id: "c".into(),
                bytes: 1 << 30,
                shared: true,
                file: Some("/dev/hugepages/a,b".into()),
                ..Ram::default()
            },
        ];
        let expected = expected.map(|ram| Ram {
            asks_for_huge: Some(true),
            ..ram
        });
        assert_eq!(guest.memory, expected);
        assert_eq!(guest.ignored, ["x of \"c\"", "memory object \"d\""]);
        assert_eq!(guest.bytes(), 4 << 30);
    }

    #[test]
    fn older_options_bring_all_memory_in() {
        let guest = parsed("qemu -m 1G -smp 4,cores=4 -mem-path /dev/hugepages -mem-prealloc");
        let [ram] = &guest.memory[..] else {
            panic!("{guest:?}");
        };
        assert_eq!(ram.file.as_deref(), Some("/dev/hugepages"));
        assert_eq!(ram.prealloc_threads, 4);
        // So does one that names no threads, wherever `-smp` is.
        let object = "-object memory-backend-ram,id=a,size=1G,prealloc=on -numa node,memdev=a";
        let guest = parsed(&format!("qemu {object} -smp 4"));
        assert_eq!(guest.memory[0].prealloc_threads, 4);
    }

    #[test]
    fn devices_are_given_by_type_1_unless_all_have_iommufd() {
        let both =
            "-device vfio-pci,host=01:00.0,iommufd=iommufd0 -device vfio-pci,host=0001:02:00.1";
        let guest = parsed(&format!("qemu {both}"));
        let devices = ["0000:01:00.0", "0001:02:00.1"].map(|host| host.to_owned().into());
        assert_eq!(guest.devices, devices);
        assert_eq!(guest.interface, Some(Interface::Type1));
        let guest = parsed("qemu -device vfio-pci,host=01:00.0,iommufd=iommufd0");
        assert_eq!(guest.interface, Some(Interface::Iommufd));
        assert_eq!(parsed("qemu -device virtio-net-pci").interface, None);
    }

    #[test]
    fn memory_below_4_gib_of_a_pc_is_mapped_several_times() {
        const GIB: u64 = 1 << 30;
        let flash = "-drive if=pflash,file=/x";
        for (line, expected) in [
            ("-m 1G", Some((GIB, 5))),
            ("-m 8G", Some((3 * GIB, 5))),
            ("-m 3G -machine pc-i440fx-10.0", Some((3 * GIB, 5))),
            ("-m 8G -M pc,max-ram-below-4g=1G", Some((GIB, 5))),
            ("-m 8G -machine q35", Some((2 * GIB, 5))),
            ("-m 2560M -machine pc-q35-10.0", Some((2560 << 20, 5))),
            ("-m 2816M -machine q35", Some((2 * GIB, 5))),
            (
                "-m 8G -machine q35,pflash0=code -machine memory-backend=a -object memory-backend-ram,id=a",
                Some((2 * GIB, 2)),
            ),
            (&format!("-m 8G -machine q35 {flash}"), Some((2 * GIB, 2))),
            ("-m 8G -machine virt", None),
            ("-m 8G -machine microvm", None),
        ] {
            let found = parsed(&format!("qemu {line}")).remapped;
            let found = found.map(|low| (low.bytes, low.times));
            assert_eq!(found, expected, "{line}");
        }
    }

    #[test]
    fn options_of_other_versions_decide_nothing() {
        let guest = parsed(
            "kvm -id 7 -parameter -redir tcp:3389::3389 -no-kvm -usbdevice mouse -tdf -localtime -m 512 -startdate now \
             -std-vga -newest value -m 1G disk.raw",
        );
        assert_eq!(guest.bytes(), 1 << 30);
        assert_eq!(guest.ignored, ["-parameter", "-newest value"]);
        let running = ["qemu", "-m", "1G", "-newest-mem", "1"].map(str::to_owned);
        let guest = qemu(&running, POOL).unwrap();
        assert_eq!(guest.ignored, ["-newest-mem is not an option of QEMU"]);
    }

    #[test]
    fn settings_elsewhere_are_named() {
        for (line, bytes, ignored) in [
            (
                "-readconfig a.cfg -set device.hostdev0.x-vga=on",
                128 << 20,
                &[
                    "-readconfig a.cfg, which is not read",
                    "-set device.hostdev0.x-vga=on",
                ][..],
            ),
            (
                "-readconfig a.cfg -m 1G -machine q35,memory-backend=mem0",
                1 << 30,
                &[
                    "-readconfig a.cfg, which is not read",
                    "memory object \"mem0\", which may be in that file",
                ],
            ),
            (
                "-m 1G $MORE -device ${CARD} -object ${OBJECT} disk.img ... | tee log",
                1 << 30,
                &[
                    "$MORE in the place of options",
                    "${CARD}",
                    "-object ${OBJECT}",
                    "... in the place of options",
                ],
            ),
            (
                "-m 1G -overcommit mem-lock=on -realtime mlock=off",
                1 << 30,
                &["-overcommit mem-lock=on"],
            ),
        ] {
            let guest = parsed(&format!("qemu {line}"));
            assert_eq!(guest.bytes(), bytes, "{line}");
            assert_eq!(guest.ignored, ignored, "{line}");
        }
    }

    #[test]
    fn programs_before_qemu_are_named() {
        for (line, ignored) in [
            ("$ qemu-system-x86_64 -m 1G", &[][..]),
            ("# A=1 /usr/libexec/qemu-kvm -m 1G", &[]),
            ("qemu-lite-system-x86_64 -m 1G", &[]),
            ("2024-01-01 1:00: it's up\nA=1 \\\n/bin/kvm -m 1G", &[]),
            (
                "sudo -u qemu taskset -c 0-3 ./qemu-system-aarch64 -m 1G",
                &["sudo -u qemu taskset -c 0-3 before QEMU"],
            ),
            ("${QEMU} -m 1G \\\r\n -smp 2 \\\n", &[]),
            ("A=1 numactl -m 0 kvm -m 1G", &["numactl -m 0 before QEMU"]),
        ] {
            let guest = parsed(line);
            assert_eq!(guest.bytes(), 1 << 30, "{line}");
            assert_eq!(guest.ignored, ignored, "{line}");
        }
    }

    #[test]
    fn sizes_are_as_qemu_reads_them() {
        for (size, bytes) in [
            ("1.5G", 3 << 29),
            ("0.5g", 512 << 20),
            ("1048576k", 1 << 30),
            ("4097b", 8192),
            ("size=1024,slots=2,maxmem=1T", 1 << 30),
            ("0", 128 << 20),
            ("1P", 1 << 50),
        ] {
            assert_eq!(parsed(&format!("qemu -m {size}")).bytes(), bytes, "{size}");
        }
        let object =
            "qemu -object memory-backend-ram,id=a,size=0x40000000 -machine memory-backend=a";
        assert_eq!(parsed(object).bytes(), 1 << 30);
        let machine = "qemu -machine q35,memory.size=2G,smp.cpus=3";
        let guest = parsed(machine);
        assert_eq!((guest.bytes(), guest.cpus), (2 << 30, 3));
        let json = r#"qemu -machine '{"type":"q35","memory":{"size":"2G"},"smp":{"cpus":3}}'"#;
        let guest = parsed(json);
        assert_eq!((guest.bytes(), guest.cpus), (2 << 30, 3));
        for (smp, cpus) in [
            ("sockets=2,cores=4,threads=2", 16),
            ("maxcpus=6", 6),
            ("2,cores=4", 2),
        ] {
            assert_eq!(parsed(&format!("qemu -smp {smp}")).cpus, cpus, "{smp}");
        }
        for none in [
            "1..5G",
            ".5G",
            "1.5X",
            "1.G5",
            "99999999999E",
            "0x",
            "1.0000000000000000001G",
        ] {
            qemu_line(&format!("qemu -m {none}"), POOL).unwrap_err();
        }
    }

    #[test]
    fn devices_without_an_address_are_named() {
        for (device, interface, address, ignored) in [
            (
                "-device vfio-pci,sysfsdev=/sys/bus/pci/devices/0000:03:00.0/",
                Some(Interface::Type1),
                Some("0000:03:00.0"),
                None,
            ),
            (
                "-device vfio-pci,id=gpu,sysfsdev=/sys/bus/mdev/devices/a-b",
                Some(Interface::Type1),
                None,
                Some("vfio-pci gpu: mediated device a-b, which pins on demand"),
            ),
            (
                r#"-device '{"driver":"vfio-pci","fd":"9","id":"nic","iommufd":"i"}'"#,
                Some(Interface::Iommufd),
                None,
                Some("vfio-pci nic: a device by fd=9"),
            ),
            (
                "-device vfio-pci",
                Some(Interface::Type1),
                None,
                Some("vfio-pci: no device is named"),
            ),
            (
                "-device pci-assign,host=04:00.0",
                None,
                None,
                Some("pci-assign 04:00.0, by KVM and not by VFIO"),
            ),
            (
                "-pcidevice host=04:00.0",
                None,
                None,
                Some("-pcidevice host=04:00.0, by KVM and not by VFIO"),
            ),
            (
                "-drive file=nvme://0000:44:00.0/1,if=none",
                Some(Interface::Type1),
                Some("0000:44:00.0"),
                None,
            ),
            (
                r#"-blockdev '{"driver":"raw","file":{"driver":"nvme","device":"45:00.0"}}'"#,
                Some(Interface::Type1),
                Some("0000:45:00.0"),
                None,
            ),
            (
                "-blockdev '{'",
                None,
                None,
                Some("-blockdev: the value is damaged JSON"),
            ),
            (
                "-netdev vhost-vdpa,vhostdev=/dev/vhost-vdpa-0,id=n",
                None,
                None,
                Some("-netdev vhost-vdpa"),
            ),
            (
                "-netdev type=vhost-user,id=n",
                None,
                None,
                Some("-netdev vhost-user"),
            ),
            (
                "-device vhost-user-fs-pci,tag=a",
                None,
                None,
                Some("vhost-user-fs-pci"),
            ),
            (
                "-device vfio-user-pci,socket=a",
                None,
                None,
                Some("vfio-user-pci"),
            ),
            (
                "-device cxl-type3,volatile-memdev=a",
                None,
                None,
                Some("cxl-type3"),
            ),
        ] {
            let guest = parsed(&format!("qemu {device}"));
            let addresses = guest.devices.iter().map(|device| device.address.as_str());
            assert_eq!(guest.interface, interface, "{device}");
            assert_eq!(
                addresses.collect::<Vec<_>>(),
                Vec::from_iter(address),
                "{device}"
            );
            assert_eq!(guest.ignored, Vec::from_iter(ignored), "{device}");
        }
    }

    #[test]
    fn a_virtual_iommu_is_named() {
        for (line, model) in [
            ("-device intel-iommu,intremap=on", Some("intel-iommu")),
            ("-device virtio-iommu-pci", Some("virtio-iommu-pci")),
            ("-machine virt,iommu=smmuv3", Some("smmuv3")),
            ("-machine q35,iommu=on", Some("intel-iommu")),
            ("-machine virt,iommu=none", None),
        ] {
            assert_eq!(
                parsed(&format!("qemu {line}")).viommu.as_deref(),
                model,
                "{line}"
            );
        }
    }

    #[test]
    fn a_guest_is_confidential_by_the_object_that_its_machine_names() {
        for (line, kind, ignored) in [
            (
                "-machine q35,confidential-guest-support=t -object tdx-guest,id=t",
                Some("TDX"),
                None,
            ),
            (
                "-machine q35,memory-encryption=s -object sev-guest,id=s,policy=0x1",
                Some("SEV"),
                None,
            ),
            (
                "-object sev-guest,id=s,policy=5 -machine q35,confidential-guest-support=s",
                Some("SEV-ES"),
                None,
            ),
            ("-machine q35,confidential-guest-support=s", Some("s"), None),
            (
                "-object sev-snp-guest,id=s",
                None,
                Some("object \"s\" (SEV-SNP)"),
            ),
        ] {
            let guest = parsed(&format!("qemu {line}"));
            assert_eq!(guest.confidential.as_deref(), kind, "{line}");
            assert_eq!(guest.ignored, Vec::from_iter(ignored), "{line}");
        }
        let private = parsed(
            "qemu -machine q35,confidential-guest-support=s,memory-backend=m -object sev-snp-guest,id=s \
             -object memory-backend-memfd-private,id=m,size=1G",
        );
        assert!(private.keeps_private_memory());
        assert_eq!(private.bytes(), 1 << 30);
    }

    #[test]
    fn an_address_is_as_the_host_lists_it() {
        for (text, found) in [
            ("01:00.0", Some("0000:01:00.0")),
            ("1:A.7", Some("0000:01:0a.7")),
            ("10000:ff:1f.7", Some("10000:ff:1f.7")),
            ("100:00.0", None),
            ("01:00.8", None),
            ("01:00", None),
            ("00.0", None),
            ("1:2:3:4.0", None),
            ("+1:00.0", None),
            (":00.0", None),
        ] {
            assert_eq!(address(text).as_deref(), found, "{text}");
        }
    }

    #[test]
    fn libvirt_is_known_by_what_it_adds() {
        let guest = parsed(LIBVIRT);
        assert_eq!(guest.monitor, Monitor::Libvirt);
        assert_eq!(guest.name.as_deref(), Some("web"));
        let ram = Ram {
            id: "pc.ram".into(),
            bytes: 4 << 30,
            pool_bytes: Some(2 << 20),
            shared: true,
            file: None,
            asks_for_huge: Some(true),
            prealloc_threads: 2,
        };
        assert_eq!(guest.memory, [ram]);
        assert_eq!(guest.interface, Some(Interface::Type1));
        assert_eq!(guest.ignored, [] as [&str; 0]);
        assert_eq!(parsed("qemu -S -name web").monitor, Monitor::Qemu);
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

        /// Any text, and a good one with some bytes changed, is understood or refused.
        #[test]
        fn no_text_is_a_panic(
            any in any::<String>(),
            changes in prop::collection::vec((any::<prop::sample::Index>(), 0x20u8..0x7f), 1..6),
        ) {
            let _ = qemu_line(&any, POOL);
            let mut good = LIBVIRT.as_bytes().to_vec();
            for (at, byte) in changes {
                let at = at.index(good.len());
                good[at] = byte;
            }
            if let Ok(guest) = qemu_line(&String::from_utf8(good).unwrap(), POOL) {
                prop_assert_eq!(guest.memory.len(), 1);
                predict(&guest);
            }
        }

        /// Each number is one of a machine, or refused.
        #[test]
        fn no_number_is_a_panic(
            numbers in prop::collection::vec(prop_oneof![prop::sample::select(&NUMBERS[..]), any::<u64>()], 9),
            unit in prop::sample::select(vec!["", "K", "M", "G", "T"]),
        ) {
            let [memory, below, cpus, size, page, threads, bus, slot, function] = numbers[..] else { unreachable!() };
            let line = format!("qemu -m {memory}{unit} -machine q35,max-ram-below-4g={below}{unit} -smp {cpus} \
                -object memory-backend-memfd,id=a,size={size}{unit},hugetlb=on,hugetlbsize={page}{unit},\
                prealloc=on,prealloc-threads={threads} -numa node,memdev=a \
                -device vfio-pci,host={bus:x}:{slot:x}.{function:x}");
            match qemu_line(&line, POOL) {
                Ok(guest) => predict(&guest),
                Err(error) => prop_assert!(error.to_string().contains(|c: char| c.is_ascii_digit())),
            }
        }
    }

    #[test]
    fn what_is_not_understood_is_refused_by_name() {
        for (line, said) in [
            (
                "qemu 'a",
                "the command line has a quote that does not close",
            ),
            (
                "/bin/foo -m 4G",
                "\"foo\" is not QEMU: the command line begins with qemu-system-ARCH, qemu-kvm or kvm",
            ),
            ("qemu -m 4G -ram 1G", "-ram is not an option of QEMU"),
            ("qemu -m 4G --vfio", "-vfio is not an option of QEMU"),
            (
                "qemu \u{2013}m 4G",
                "\"\u{2013}m\" begins with a dash that is no hyphen; an option begins with -",
            ),
            (
                "qemu -drive file=nvme://disk/1",
                "-drive: \"disk\" is no PCI address like 0000:01:00.0",
            ),
            (
                "sudo -i",
                "\"sudo\" is not QEMU: the command line begins with qemu-system-ARCH, qemu-kvm or kvm",
            ),
            ("qemu -m ${MEMORY}", "-m: \"${MEMORY}\" is no size"),
            ("qemu -m", "-m needs a value"),
            ("qemu -m 4X", "-m: \"4X\" is no size"),
            (
                "qemu -object memory-backend-disk,id=a",
                "-object: \"memory-backend-disk\" is not known; known are memory-backend-ram, \
                 memory-backend-memfd, memory-backend-file, memory-backend-shm, memory-backend-memfd-private",
            ),
            (
                "qemu -object memory-backend-ram,share=maybe",
                "-object memory-backend-ram, share: \"maybe\" is not known; known are on, off",
            ),
            (
                "qemu -object memory-backend-ram,prealloc-threads=-1",
                "-object memory-backend-ram, prealloc-threads: \"-1\" is no number from 1 to 65536",
            ),
            (
                "qemu -object memory-backend-ram,prealloc-threads=4294967295",
                "-object memory-backend-ram, prealloc-threads: \"4294967295\" is no number from 1 to 65536",
            ),
            (
                "qemu -object memory-backend-memfd,hugetlb=on,hugetlbsize=12K",
                "-object memory-backend-memfd, hugetlbsize: 12 KiB is no size of pages, which have a power of \
                 two from 4 KiB to 16 GiB",
            ),
            ("qemu -m 65537T", "-m: 64.0 PiB is more than 64 PiB"),
            (
                "qemu -object memory-backend-ram,size=65536T,id=a -object memory-backend-ram,size=4K,id=b \
                 -numa node,memdev=a -numa node,memdev=b",
                "all memory: 64.0 PiB is more than 64 PiB",
            ),
            (
                "qemu -machine q35,max-ram-below-4g=5G",
                "-machine max-ram-below-4g: 5 GiB is more than 4 GiB",
            ),
            (
                "qemu -smp 0",
                "-smp cpus: \"0\" is no number from 1 to 65536",
            ),
            (
                "qemu -smp many",
                "-smp cpus: \"many\" is no number from 1 to 65536",
            ),
            (
                "qemu -device vfio-pci,host=01:20.0",
                "-device vfio-pci, host: \"01:20.0\" is no PCI address like 0000:01:00.0",
            ),
            (
                "qemu -object '{\"a\"'",
                "-object: the value is damaged JSON",
            ),
            (
                "qemu -machine q35,memory-backend=ram",
                "memory object \"ram\" is used, and no -object defines it",
            ),
        ] {
            let error = qemu_line(line, POOL).unwrap_err();
            assert_eq!(error.to_string(), said, "{line}");
        }
    }
}
