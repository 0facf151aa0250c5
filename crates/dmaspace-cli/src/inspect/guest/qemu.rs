//! QEMU's command line: the options that decide about memory and VFIO.
//!
//! Source: QEMU 10.0 `qemu-options.hx`, `qapi/qom.json` (`MemoryBackendProperties`), `util/keyval.c`;
//! QEMU asks for transparent huge pages for all guest RAM (`ram_block_add` of `system/physmem.c`).

use std::collections::BTreeMap;

use dmaspace::topology::MOST_MEMORY;
use serde_json::Value;

use super::{
    ConfigError, Guest, Interface, Monitor, Ram, Remapped, cpus, maps_by_file, memory, page,
};
use crate::inspect::process::plain;
use crate::size;

/// Memory without `-m`.
const DEFAULT: u64 = 128 << 20;
const BACKENDS: &str =
    "memory-backend-ram, memory-backend-memfd, memory-backend-file, memory-backend-shm";
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

/// Properties of one option.
pub(crate) type Pairs = BTreeMap<String, String>;

/// The machine that QEMU makes of this line, which may have a shell's quotes. `default_pool` is the size of a
/// page of the pool that is used where none is named.
pub fn qemu_line(line: &str, default_pool: u64) -> Result<Guest, ConfigError> {
    let words = shlex::split(line).ok_or(ConfigError::Quotes)?;
    // `virsh domxml-to-native` writes the environment first.
    let mut program = words.iter().skip_while(|word| word.contains('='));
    let program = program
        .next()
        .map_or("", |path| path.rsplit('/').next().unwrap_or(path));
    if !matches!(program, "qemu" | "qemu-kvm" | "kvm") && !program.starts_with("qemu-system-") {
        return Err(ConfigError::NotQemu {
            program: plain(program),
        });
    }
    let mut found = Found::of(&words, default_pool)?;
    match found.unknown.take() {
        Some(option) => Err(ConfigError::Option { option }),
        None => found.guest(),
    }
}

/// As [`qemu_line`], of the arguments of a process that is known to be QEMU, perhaps a newer one.
pub fn qemu(arguments: &[String], default_pool: u64) -> Result<Guest, ConfigError> {
    Found::of(arguments, default_pool)?.guest()
}

/// What the options say.
#[derive(Default)]
struct Found {
    guest: Guest,
    bytes: Option<u64>,
    path: Option<String>,
    prealloc: bool,
    stopped: bool,
    libvirt: bool,
    /// The first option that no QEMU is known to have.
    unknown: Option<String>,
    /// The type of the machine, its limit of memory below 4 GiB, and whether its firmware is in flash.
    kind: Option<String>,
    most_below_4g: Option<u64>,
    flash: bool,
    objects: Vec<Ram>,
    /// Objects that are the machine's memory, and of modules plugged in.
    machine: Option<String>,
    nodes: Vec<String>,
    modules: Vec<String>,
}

impl Found {
    fn of(arguments: &[String], pool: u64) -> Result<Self, ConfigError> {
        let mut found = Self::default();
        let mut arguments = arguments.iter().map(String::as_str);
        while let Some(argument) = arguments.next() {
            // Any other word is an image of a disk.
            let Some(option) = argument.strip_prefix('-') else {
                continue;
            };
            let option = option.strip_prefix('-').unwrap_or(option);
            let is_in = |options: &str| options.split(' ').any(|known| known == option);
            if is_in(VALUED) {
                let value = arguments.next().ok_or_else(|| ConfigError::NoValue {
                    option: option.into(),
                })?;
                found.take(option, value, pool)?;
            } else if !is_in(FLAGS) {
                found.unknown.get_or_insert_with(|| plain(option));
            }
            found.prealloc |= option == "mem-prealloc";
            found.stopped |= option == "S";
        }
        Ok(found)
    }

    fn take(&mut self, option: &str, value: &str, pool: u64) -> Result<(), ConfigError> {
        let implied = match option {
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
        let mut pairs = pairs(option, value, implied)?;
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
                    self.bytes = Some(bytes("-m", &format!("{value}{unit}"))?);
                }
            }
            "machine" | "M" => {
                self.machine = text("memory-backend").or(self.machine.take());
                self.kind = text("type").or(self.kind.take());
                self.flash |= text("pflash0").is_some();
                if let Some(most) = text("max-ram-below-4g") {
                    let of = "-machine max-ram-below-4g";
                    self.most_below_4g = Some(memory(of, bytes(of, &most)?, 4 << 30)?);
                }
            }
            "drive" => self.flash |= text("if").is_some_and(|kind| kind == "pflash"),
            "numa" => self.nodes.extend(text("memdev")),
            "smp" => {
                let number = text("cpus").map(|number| cpus("-smp cpus", &number));
                self.guest.cpus = number.transpose()?.unwrap_or(0);
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
            "vfio-pci" | "vfio-pci-nohotplug" => {
                let interface = match pairs.contains_key("iommufd") {
                    true => Interface::Iommufd,
                    false => Interface::Type1,
                };
                // Type 1 is the slower one.
                self.guest.interface = match self.guest.interface {
                    Some(Interface::Type1) => Some(Interface::Type1),
                    _ => Some(interface),
                };
                if let Some(host) = pairs.remove("host") {
                    let address = address(&host).ok_or_else(|| ConfigError::Address {
                        of: format!("-device {driver}, host"),
                        value: host,
                    })?;
                    self.guest.devices.push(address.into());
                }
            }
            "pc-dimm" => self.modules.extend(pairs.remove("memdev")),
            driver if pairs.contains_key("memdev") => self.guest.ignored.push(driver.into()),
            _ => {}
        }
        Ok(())
    }

    fn object(&mut self, mut pairs: Pairs, pool: u64) -> Result<(), ConfigError> {
        let kind = pairs.remove("qom-type").unwrap_or_default();
        self.libvirt |= pairs.get("id").is_some_and(|id| id == "masterKey0");
        let Some(backend) = kind.strip_prefix("memory-backend-") else {
            return Ok(());
        };
        let shared = match backend {
            "ram" | "file" => false,
            "memfd" | "shm" => true,
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

    fn guest(mut self) -> Result<Guest, ConfigError> {
        let machine: Vec<_> = match self.machine.take() {
            Some(id) => vec![id],
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
        for id in machine.into_iter().chain(self.modules) {
            let at = self.objects.iter().position(|ram| ram.id == id);
            let ram = at.map(|at| self.objects.remove(at));
            let mut ram = ram.ok_or(ConfigError::NoObject { id })?;
            if ram.bytes == 0 {
                ram.bytes = self.bytes.unwrap_or(DEFAULT);
            }
            if self.prealloc && ram.prealloc_threads == 0 || ram.prealloc_threads == EACH {
                ram.prealloc_threads = cpus;
            }
            self.guest.memory.push(ram);
        }
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

fn bytes(of: &str, value: &str) -> Result<u64, ConfigError> {
    let bytes = size::parse(value).map_err(|source| ConfigError::Size {
        of: of.into(),
        value: value.into(),
        source,
    })?;
    memory(of, bytes, MOST_MEMORY)
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
        let scalar = |value: Value| match value {
            Value::String(text) => text,
            other => other.to_string(),
        };
        let pairs = object.into_iter();
        return Ok(pairs
            .map(|(name, value)| (plain(&name), plain(&scalar(value))))
            .collect());
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
            ("qemu -m", "-m needs a value"),
            ("qemu -m 4X", "-m: \"4X\" is no size"),
            (
                "qemu -object memory-backend-disk,id=a",
                "-object: \"memory-backend-disk\" is not known; known are memory-backend-ram, \
                 memory-backend-memfd, memory-backend-file, memory-backend-shm",
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
