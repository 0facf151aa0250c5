//! libvirt's XML of a domain: the elements that decide about memory and VFIO.
//!
//! Source: libvirt `docs/formatdomain.rst`, "Memory Backing", "NUMA Node Tuning", "Host device assignment";
//! memory of a pool is brought in at the start (`qemuBuildMemoryBackendProps` of `src/qemu/qemu_command.c`),
//! by QEMU with as many threads as the guest has processors, unless a number is given.

use std::borrow::Cow;
use std::ops::RangeInclusive;

use dmaspace::topology::{MOST_MEMORY, MOST_NODES};
use quick_xml::Reader;
use quick_xml::events::{BytesStart, Event};

use super::{
    ConfigError, Guest, Interface, Monitor, Ram, Remapped, SMALL, added, cpus, has_variable,
    maps_by_file, memory, number, page,
};
use crate::inspect::process::plain;

/// Elements within elements; libvirt has fewer than ten.
const DEEPEST: usize = 64;
/// The most cells, and of what is kept for each of several elements.
const MOST: usize = MOST_NODES;
/// Elements that have no text of their own.
const GROUPS: [&str; 5] = [
    "/domain",
    "/domain/cpu",
    "/domain/cpu/numa",
    "/domain/devices",
    "/domain/memoryBacking",
];
/// Numbers of cells.
const CELLS: RangeInclusive<u64> = 0..=MOST_NODES as u64 - 1;

/// The machine that libvirt makes of a `<domain>`. `default_pool` is the size of a page of the pool that is
/// used where none is named.
pub fn libvirt(text: &str, default_pool: u64) -> Result<Guest, ConfigError> {
    let mut reader = Reader::from_str(text);
    let mut domain = Domain {
        default_pool,
        ..Domain::default()
    };
    // The names of the open elements, with a slash before each, and the text of the innermost.
    let (mut path, mut depth, mut inner) = (String::new(), 0, String::new());
    loop {
        let at = reader.buffer_position();
        let damaged = |source| ConfigError::Xml { at, source };
        let event = reader.read_event().map_err(damaged)?;
        match event {
            Event::Start(ref element) | Event::Empty(ref element) => {
                depth += 1;
                if depth > DEEPEST {
                    return Err(ConfigError::Deep { most: DEEPEST });
                }
                let name = plain(&text_of(element.name().as_ref()));
                if depth == 1 && name != "domain" {
                    return Err(ConfigError::NotADomain { found: name });
                }
                path += "/";
                path += &name;
                inner.clear();
                let attributes = Attributes::of(element).map_err(damaged)?;
                domain.open(&path, &attributes)?;
                if matches!(event, Event::Empty(_)) {
                    close(&mut path, &mut depth);
                }
            }
            Event::Text(part) => {
                let part = text_of(&part);
                domain.between(&path, part.trim());
                inner += &part;
            }
            Event::End(_) => {
                domain.text(&path, inner.trim())?;
                inner.clear();
                close(&mut path, &mut depth);
            }
            Event::Eof if depth == 0 => break,
            Event::Eof => {
                let missing = quick_xml::errors::SyntaxError::UnclosedTag;
                return Err(damaged(missing.into()));
            }
            _ => {}
        }
    }
    domain.guest()
}

/// A part of what was a text as a whole.
fn text_of(part: &[u8]) -> Cow<'_, str> {
    String::from_utf8_lossy(part)
}

fn close(path: &mut String, depth: &mut usize) {
    path.truncate(path.rfind('/').unwrap_or(0));
    *depth = depth.saturating_sub(1);
}

/// The attributes of an element.
struct Attributes(Vec<(String, String)>);

impl Attributes {
    fn of(element: &BytesStart<'_>) -> Result<Self, quick_xml::Error> {
        let pairs = element.attributes().map(|attribute| {
            let attribute = attribute?;
            let (key, value) = (text_of(attribute.key.as_ref()), text_of(&attribute.value));
            Ok((plain(&key), plain(&value)))
        });
        pairs.collect::<Result<_, quick_xml::Error>>().map(Self)
    }

    fn get(&self, name: &str) -> Option<&str> {
        let mut found = self.0.iter().filter(|(known, _)| known == name);
        found.next().map(|(_, value)| value.as_str())
    }
}

/// What the elements say.
#[derive(Default)]
struct Domain {
    guest: Guest,
    default_pool: u64,
    /// The unit of the size whose element is open.
    unit: String,
    memory: Option<u64>,
    /// Pages of pools: their size, and the cells that get them.
    pages: Vec<(u64, Option<Set>)>,
    huge: bool,
    source: Option<String>,
    shared: Option<bool>,
    /// Memory is brought in before the guest runs, by so many threads.
    immediate: bool,
    threads: Option<u32>,
    cells: Vec<Ram>,
    cells_shared: Vec<Option<bool>>,
    /// Modules, and bytes of all memory devices.
    modules: Vec<Module>,
    plugged: u64,
    /// The type of the machine, and whether its firmware is in flash.
    kind: String,
    flash: bool,
    /// The `<memory>` of a device that is open is a module.
    module: bool,
    /// All devices use iommufd.
    iommufd: bool,
    /// The device whose element is open, and all that VFIO gives.
    device: Option<Device>,
    devices: Vec<Device>,
    /// Arguments for QEMU.
    arguments: Vec<String>,
}

/// A module of memory.
#[derive(Default)]
struct Module {
    ram: Ram,
    /// The cell that it is plugged into.
    cell: String,
    /// Bytes of the pages that it asks for.
    pages: Option<u64>,
    shared: Option<bool>,
}

/// A device of the host.
#[derive(Default)]
struct Device {
    kind: DeviceKind,
    /// The model of a mediated one.
    model: String,
    /// Given by iommufd, as far as its element says so.
    iommufd: Option<bool>,
    address: Option<String>,
}

#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum DeviceKind {
    Pci,
    Mediated,
    /// A disk that QEMU drives by VFIO.
    Disk,
    /// A device that needs no VFIO.
    #[default]
    Other,
}

impl Domain {
    fn open(&mut self, path: &str, attributes: &Attributes) -> Result<(), ConfigError> {
        let get = |name: &str| attributes.get(name);
        let of = |name: &str| format!("{path} {name}");
        let unit = || get("unit").unwrap_or("KiB").to_owned();
        let known = |name, known: &'static str| match get(name) {
            Some(value) if !known.split(", ").any(|one| one == value) => Err(ConfigError::Value {
                of: of(name),
                value: value.into(),
                known,
            }),
            value => Ok(value),
        };
        match path {
            "/domain/memory"
            | "/domain/devices/memory/target/size"
            | "/domain/devices/memory/source/pagesize" => self.unit = unit(),
            // Another process maps the guest's memory.
            "/domain/devices/filesystem/driver" if get("type") == Some("virtiofs") => {
                one_more(path, &self.guest.ignored)?;
                self.guest.ignore("<filesystem> virtiofs");
            }
            "/domain/memoryBacking/locked" => self.guest.ignore("<locked>"),
            "/domain/launchSecurity" => {
                self.guest.confidential = Some(match get("type").unwrap_or_default() {
                    "sev" => "SEV".into(),
                    "sev-snp" => "SEV-SNP".into(),
                    "tdx" => "TDX".into(),
                    kind => kind.into(),
                });
            }
            "/domain/devices/iommu" => {
                self.guest.viommu = Some(get("model").unwrap_or("without a model").into());
            }
            "/domain/os" => self.flash |= get("firmware") == Some("efi"),
            "/domain/os/loader" => self.flash |= get("type") == Some("pflash"),
            "/domain/os/type" => self.kind = get("machine").unwrap_or_default().to_owned(),
            "/domain/memoryBacking/hugepages" => self.huge = true,
            "/domain/memoryBacking/hugepages/page" => {
                let bytes = scaled(&of("size"), get("size").unwrap_or_default(), &unit())?;
                let cells = get("nodeset").map(|text| {
                    Set::of(text).ok_or_else(|| ConfigError::Value {
                        of: of("nodeset"),
                        value: text.into(),
                        known: "sets of cells like 0-3,^2, of 1024 cells",
                    })
                });
                one_more(path, &self.pages)?;
                self.pages
                    .push((page(of("size"), bytes)?, cells.transpose()?));
            }
            "/domain/memoryBacking/source" => {
                self.source = known("type", "anonymous, file, memfd")?.map(Into::into);
            }
            "/domain/memoryBacking/access" => {
                self.shared = known("mode", "private, shared")?.map(|mode| mode == "shared");
            }
            "/domain/memoryBacking/allocation" => {
                let mode = known("mode", "immediate, ondemand")?;
                self.immediate = mode == Some("immediate");
                let threads = get("threads").map(|text| cpus(of("threads"), text));
                self.threads = threads.transpose()?;
            }
            "/domain/cpu/numa/cell" => {
                let bytes = scaled(&of("memory"), get("memory").unwrap_or_default(), &unit())?;
                one_more(path, &self.cells)?;
                let id = get("id").map(|text| number(of("id"), text, &CELLS));
                let id = id.transpose()?.unwrap_or(self.cells.len() as u64);
                let shared = known("memAccess", "private, shared")?;
                self.cells_shared.push(shared.map(|mode| mode == "shared"));
                self.cells.push(Ram {
                    id: id.to_string(),
                    bytes: memory(of("memory"), bytes, MOST_MEMORY)?,
                    ..Ram::default()
                });
            }
            "/domain/iommufd" => self.iommufd = get("enabled") == Some("yes"),
            "/domain/devices/memory" => {
                let model = get("model").unwrap_or("without a model");
                self.module = model == "dimm";
                one_more(path, &self.modules)?;
                one_more(path, &self.guest.ignored)?;
                let shared = known("access", "private, shared")?;
                match self.module {
                    true => self.modules.push(Module {
                        shared: shared.map(|mode| mode == "shared"),
                        ..Module::default()
                    }),
                    false => self.guest.ignore(&format!("<memory> {model}")),
                }
            }
            "/domain/devices/hostdev" | "/domain/devices/interface" | "/domain/devices/disk" => {
                let (_, element) = path.rsplit_once('/').unwrap_or_default();
                let kind = match (element, get("type").unwrap_or_default()) {
                    ("hostdev", "pci") | ("interface", "hostdev") => DeviceKind::Pci,
                    ("hostdev", "mdev") => DeviceKind::Mediated,
                    ("disk", "nvme") => DeviceKind::Disk,
                    // Memory that other processes or the kernel map.
                    (_, kind @ ("vdpa" | "vhostuser" | "vhostvdpa")) => {
                        one_more(path, &self.guest.ignored)?;
                        self.guest.ignore(&format!("<{element}> {kind}"));
                        DeviceKind::Other
                    }
                    _ => DeviceKind::Other,
                };
                self.device = Some(Device {
                    kind,
                    model: get("model").unwrap_or("vfio-pci").into(),
                    ..Device::default()
                });
            }
            "/domain/devices/hostdev/driver" | "/domain/devices/interface/driver" => {
                if let (Some(device), Some(how)) = (&mut self.device, get("iommufd")) {
                    if device.kind != DeviceKind::Other {
                        known("iommufd", "yes, no")?;
                        device.iommufd = Some(how == "yes");
                    }
                }
            }
            "/domain/devices/hostdev/source/address"
            | "/domain/devices/interface/source/address"
            | "/domain/devices/disk/source/address" => {
                let part = |name, most| based(of(name), get(name).unwrap_or("0"), &(0..=most));
                match &mut self.device {
                    Some(device) if matches!(device.kind, DeviceKind::Pci | DeviceKind::Disk) => {
                        let (domain, bus) = (part("domain", u32::MAX.into())?, part("bus", 0xff)?);
                        let (slot, function) = (part("slot", 0x1f)?, part("function", 7)?);
                        let address = format!("{domain:04x}:{bus:02x}:{slot:02x}.{function}");
                        one_more(path, &self.devices)?;
                        device.address = Some(address);
                    }
                    Some(device) if device.kind == DeviceKind::Mediated => {
                        one_more(path, &self.guest.ignored)?;
                        one_more(path, &self.devices)?;
                        let (id, model) = (get("uuid").unwrap_or_default(), &device.model);
                        let text = format!("mediated device {id} of {model}, which pins on demand");
                        self.guest.ignore(&text);
                    }
                    _ => {}
                }
            }
            _ => return self.foreign(path, attributes),
        }
        Ok(())
    }

    /// A template's text in the place of elements.
    fn between(&mut self, path: &str, text: &str) {
        if GROUPS.contains(&path) && (has_variable(text) || text.contains("{%")) {
            self.guest
                .ignore(&format!("{text} in the place of elements of {path}"));
        }
    }

    /// Elements of QEMU's namespace, whose prefix is the document's choice.
    fn foreign(&mut self, path: &str, attributes: &Attributes) -> Result<(), ConfigError> {
        let rest = path.strip_prefix("/domain/");
        let Some((prefix, rest)) = rest.and_then(|path| path.split_once(':')) else {
            return Ok(());
        };
        let argument = rest.strip_prefix("commandline/");
        let argument = argument.and_then(|name| name.strip_prefix(prefix));
        if argument == Some(":arg") {
            one_more(path, &self.arguments)?;
            let value = attributes.get("value").map(str::to_owned);
            self.arguments.extend(value);
        } else if rest.starts_with("override/") && rest.ends_with(":property") {
            one_more(path, &self.guest.ignored)?;
            let name = attributes.get("name").unwrap_or_default();
            self.guest.ignore(&format!("{name} of <{prefix}:override>"));
        }
        Ok(())
    }

    fn text(&mut self, path: &str, text: &str) -> Result<(), ConfigError> {
        match path {
            "/domain/name" => self.guest.name = Some(plain(text)),
            "/domain/vcpu" => self.guest.cpus = cpus(path, text)?,
            "/domain/memory" => {
                let bytes = scaled(path, text, &self.unit)?;
                self.memory = Some(memory(path, bytes, MOST_MEMORY)?);
            }
            "/domain/devices/memory/target/size" => {
                let bytes = scaled(path, text, &self.unit)?;
                let bytes = memory(path, bytes, MOST_MEMORY)?;
                self.plugged = self.plugged.saturating_add(bytes);
                if let Some(module) = self.modules.last_mut().filter(|_| self.module) {
                    module.ram.bytes = bytes;
                }
            }
            "/domain/devices/memory/target/node" => {
                if let Some(module) = self.modules.last_mut().filter(|_| self.module) {
                    module.cell = plain(text);
                }
            }
            "/domain/devices/memory/source/pagesize" => {
                if let Some(module) = self.modules.last_mut().filter(|_| self.module) {
                    module.pages = Some(page(path, scaled(path, text, &self.unit)?)?);
                }
            }
            "/domain/devices/hostdev" | "/domain/devices/interface" | "/domain/devices/disk" => {
                let device = self.device.take().unwrap_or_default();
                if device.kind == DeviceKind::Other {
                    return Ok(());
                }
                if device.address.is_none() && device.kind != DeviceKind::Mediated {
                    one_more(path, &self.guest.ignored)?;
                    self.guest.ignore(&format!("{path} without an address"));
                }
                one_more(path, &self.devices)?;
                self.devices.push(device);
            }
            _ => {}
        }
        Ok(())
    }

    fn guest(mut self) -> Result<Guest, ConfigError> {
        for device in std::mem::take(&mut self.devices) {
            match (device.kind, device.address) {
                (DeviceKind::Disk, Some(address)) => self.guest.give_disk(address),
                (_, address) => {
                    let iommufd = device.iommufd.unwrap_or(self.iommufd);
                    self.guest.give(iommufd, address);
                }
            }
        }
        self.add();
        if self.cells.is_empty() && self.guest.memory.is_empty() {
            // Without cells, memory devices are a part of all memory; with them, cells are what is left.
            let bytes = self.memory.map(|bytes| bytes.saturating_sub(self.plugged));
            let bytes = bytes.filter(|bytes| *bytes > 0);
            let bytes = bytes.ok_or(ConfigError::NoMemory)?;
            self.cells.push(Ram {
                bytes,
                ..Ram::default()
            });
            self.cells_shared.push(None);
        }
        let begins = self.cells.iter().map(|cell| cell.bytes);
        let begins = begins.fold(self.guest.bytes(), u64::saturating_add);
        self.guest.by_file = maps_by_file(&self.kind);
        self.guest.remapped = Remapped::of(&self.kind, self.flash, begins, None);
        let modules = std::mem::take(&mut self.modules);
        let cells = std::mem::take(&mut self.cells)
            .into_iter()
            .zip(&self.cells_shared);
        let all: Vec<_> = cells.map(|(ram, shared)| (ram, *shared)).collect();
        let cells = all.into_iter().map(|(mut ram, shared)| {
            ram.pool_bytes = self.pool(&ram.id);
            (ram, shared)
        });
        let modules = modules.into_iter().map(|mut module| {
            module.ram.pool_bytes = match module.pages {
                Some(bytes) => Some(bytes).filter(|bytes| *bytes > SMALL),
                None => self.pool(&module.cell),
            };
            (module.ram, module.shared)
        });
        let parts: Vec<_> = cells.chain(modules).collect();
        for (mut ram, shared) in parts {
            let memfd = self.source.as_deref() == Some("memfd");
            ram.shared = shared.or(self.shared).unwrap_or(memfd);
            if self.source.as_deref() == Some("file") && ram.pool_bytes.is_none() {
                // `memory_backing_dir` of qemu.conf.
                ram.file = Some("/var/lib/libvirt/qemu/ram".into());
            }
            ram.asks_for_huge = Some(true);
            if self.immediate || ram.pool_bytes.is_some() {
                ram.prealloc_threads = self.threads.unwrap_or(self.guest.cpus).max(1);
            }
            self.guest.memory.push(ram);
        }
        self.guest.monitor = Monitor::Libvirt;
        self.guest.in_range()
    }

    /// Adds what arguments for QEMU give.
    fn add(&mut self) {
        let arguments = std::mem::take(&mut self.arguments);
        match added(&arguments, self.guest.cpus, self.default_pool) {
            Ok(added) => {
                // Cells have memory of their own.
                match self.cells.is_empty() {
                    true => self.guest.memory = added.memory,
                    false => {
                        for ram in added.memory {
                            self.guest.ignore(&format!("memory object {:?}", ram.id));
                        }
                    }
                }
                self.guest.devices.extend(added.devices);
                if let Some(interface) = added.interface {
                    self.guest.give(interface == Interface::Iommufd, None);
                }
                self.guest.ignored.extend(added.ignored);
                self.guest.viommu = self.guest.viommu.take().or(added.viommu);
                self.guest.confidential = self.guest.confidential.take().or(added.confidential);
            }
            Err(error) => self.guest.ignore(&format!("arguments for QEMU ({error})")),
        }
    }

    /// The pool of a cell: one that names it, else one that names no cell.
    fn pool(&self, cell: &str) -> Option<u64> {
        let cell = cell.parse().unwrap_or(0);
        let named = |(_, cells): &&(u64, Option<Set>)| {
            cells.as_ref().is_some_and(|cells| cells.holds(cell))
        };
        let open = |(_, cells): &&(u64, Option<Set>)| cells.is_none();
        let page = self
            .pages
            .iter()
            .find(named)
            .or(self.pages.iter().find(open));
        match page {
            // Small pages are those of no pool.
            Some((bytes, _)) => Some(*bytes).filter(|bytes| *bytes > SMALL),
            None => (self.huge && self.pages.is_empty()).then_some(self.default_pool),
        }
    }
}

/// A set of cells: `0-3,^2,7`. Those behind a `^` are in none of the rest.
struct Set {
    within: Vec<RangeInclusive<u64>>,
    without: Vec<RangeInclusive<u64>>,
}

impl Set {
    fn of(text: &str) -> Option<Self> {
        let (mut within, mut without) = (Vec::new(), Vec::new());
        for part in text.split(',').map(str::trim) {
            let (into, part) = match part.strip_prefix('^') {
                Some(part) => (&mut without, part),
                None => (&mut within, part),
            };
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let cell = |text: &str| number("", text.trim(), &CELLS).ok();
            into.push(cell(first)?..=cell(last)?);
        }
        Some(Self { within, without })
    }

    fn holds(&self, cell: u64) -> bool {
        let any = |ranges: &[RangeInclusive<u64>]| ranges.iter().any(|range| range.contains(&cell));
        any(&self.within) && !any(&self.without)
    }
}

/// There is room for one more.
fn one_more<T>(of: &str, all: &[T]) -> Result<(), ConfigError> {
    match all.len() < MOST {
        true => Ok(()),
        false => Err(ConfigError::Many {
            of: of.into(),
            most: MOST,
        }),
    }
}

/// A number in a range: hexadecimal behind `0x`, octal behind `0`. Source: libvirt `virPCIDeviceAddressParseXML`, by
/// `virStrToLong_uip` with base 0.
fn based(of: String, text: &str, range: &RangeInclusive<u64>) -> Result<u64, ConfigError> {
    let (digits, radix) = match (text.strip_prefix("0x"), text.strip_prefix('0')) {
        (Some(digits), _) => (digits, 16),
        (None, Some(digits)) if !digits.is_empty() => (digits, 8),
        (None, _) => (text, 10),
    };
    let known = digits.bytes().all(|digit| digit.is_ascii_hexdigit());
    let number = u64::from_str_radix(digits, radix).ok().filter(|_| known);
    let number = number.filter(|number| range.contains(number));
    number.ok_or_else(|| ConfigError::Number {
        of,
        value: text.into(),
        least: *range.start(),
        most: *range.end(),
    })
}

/// A size in bytes; what has no room in 64 bits is all that have.
///
/// Source: libvirt `docs/formatdomain.rst`, "Memory Allocation"; `virScaleInteger`.
pub(crate) fn scaled(of: &str, text: &str, unit: &str) -> Result<u64, ConfigError> {
    let scale: u64 = match unit.to_ascii_lowercase().as_str() {
        "b" | "byte" | "bytes" => 1,
        "kb" => 1000,
        "" | "k" | "kib" => 1 << 10,
        "mb" => 1000 * 1000,
        "m" | "mib" => 1 << 20,
        "gb" => 1000 * 1000 * 1000,
        "g" | "gib" => 1 << 30,
        "tb" => 1000 * 1000 * 1000 * 1000,
        "t" | "tib" => 1 << 40,
        "pb" => 1000 * 1000 * 1000 * 1000 * 1000,
        "p" | "pib" => 1 << 50,
        "eb" => 1000 * 1000 * 1000 * 1000 * 1000 * 1000,
        "e" | "eib" => 1 << 60,
        _ => {
            return Err(ConfigError::Value {
                of: format!("{of} unit"),
                value: plain(unit),
                known: "bytes, KB, KiB, MB, MiB, GB, GiB, TB, TiB",
            });
        }
    };
    Ok(number(of, text, &(0..=u64::MAX))?.saturating_mul(scale))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::tests::{NUMBERS, predict};
    use super::*;

    const POOL: u64 = 2 << 20;

    const MACHINE: &str = "<domain><memory>9437184</memory>
            <memoryBacking><hugepages>
              <page size='2' unit='MiB'/><page size='1' unit='GiB' nodeset='1-3,^2'/>
            </hugepages></memoryBacking>
            <cpu><numa>
              <cell id='0' cpus='0' memory='4194304' unit='KiB'/>
              <cell id='1' cpus='1' memory='4' unit='GiB' memAccess='shared'/>
              <cell id='2' cpus='2' memory='0'/>
            </numa></cpu>
            <devices>
              <memory model='dimm'><target><size unit='GiB'>1</size><node>0</node></target></memory>
              <memory model='virtio-mem'><target><size unit='GiB'>8</size></target></memory>
            </devices></domain>";

    fn parsed(inner: &str) -> Guest {
        libvirt(&format!("<domain type='kvm'>{inner}</domain>"), POOL).unwrap()
    }

    #[test]
    fn memory_is_backed_as_memory_backing_says() {
        let plain = Ram {
            bytes: 4 << 30,
            asks_for_huge: Some(true),
            ..Ram::default()
        };
        for (backing, ram) in [
            ("", plain.clone()),
            (
                "<hugepages/>",
                Ram {
                    pool_bytes: Some(2 << 20),
                    prealloc_threads: 6,
                    ..plain.clone()
                },
            ),
            (
                "<hugepages><page size='1' unit='G' nodeset='0'/></hugepages>",
                Ram {
                    pool_bytes: Some(1 << 30),
                    prealloc_threads: 6,
                    ..plain.clone()
                },
            ),
            (
                "<source type='memfd'/><allocation mode='immediate' threads='8'/>",
                Ram {
                    shared: true,
                    prealloc_threads: 8,
                    ..plain.clone()
                },
            ),
            (
                "<source type='file'/><access mode='shared'/><allocation mode='ondemand'/>",
                Ram {
                    shared: true,
                    file: Some("/var/lib/libvirt/qemu/ram".into()),
                    ..plain.clone()
                },
            ),
        ] {
            let guest = parsed(&format!(
                "<name>web</name><memory unit='GiB'>4</memory><vcpu>6</vcpu>\
                 <memoryBacking>{backing}</memoryBacking>"
            ));
            assert_eq!(guest.memory, [ram], "{backing}");
            let known = (guest.name.as_deref(), guest.monitor);
            assert_eq!(known, (Some("web"), Monitor::Libvirt));
        }
    }

    #[test]
    fn cells_have_pages_of_their_own_and_modules_are_added() {
        let guest = libvirt(MACHINE, POOL).unwrap();
        let found = guest
            .memory
            .iter()
            .map(|ram| (ram.bytes, ram.pool_bytes, ram.shared));
        let found: Vec<_> = found.collect();
        let (small, giant) = (Some(2 << 20), Some(1 << 30));
        let expected = [
            (4 << 30, small, false),
            (4 << 30, giant, true),
            (0, small, false),
            (1 << 30, small, false),
        ];
        assert_eq!(found, expected);
        assert_eq!(guest.ignored, ["<memory> virtio-mem"]);
    }

    #[test]
    fn memory_below_4_gib_of_a_pc_is_mapped_several_times() {
        let memory = "<memory unit='GiB'>8</memory>";
        let kind = |name: &str| format!("<type machine='{name}'>hvm</type>");
        let (q35, flash) = (kind("pc-q35-10.0"), "<loader type='pflash'>/x</loader>");
        for (os, expected) in [
            (format!("<os>{q35}</os>"), Some(5)),
            (format!("<os firmware='efi'>{q35}</os>"), Some(2)),
            (format!("<os>{q35}{flash}</os>"), Some(2)),
            (format!("<os>{}</os>", kind("virt-10.0")), None),
            (String::new(), None),
        ] {
            let found = parsed(&format!("{memory}{os}")).remapped;
            let expected = expected.map(|times| Remapped {
                bytes: 2 << 30,
                times,
            });
            assert_eq!(found, expected, "{os}");
        }
    }

    #[test]
    fn devices_are_given_by_type_1_unless_all_have_iommufd() {
        let device = |driver: &str| {
            format!(
                "<hostdev mode='subsystem' type='pci' managed='yes'>{driver}<source>\
                 <address domain='0x0000' bus='0x1' slot='0x00' function='0x1'/></source></hostdev>"
            )
        };
        let by = |devices: &str| {
            let guest = parsed(&format!(
                "<memory>4096</memory><devices>{devices}</devices>"
            ));
            (guest.devices, guest.interface)
        };
        let iommufd = device("<driver name='vfio' iommufd='yes'/>");
        let one = || vec!["0000:01:00.1".to_owned().into()];
        assert_eq!(by(&iommufd), (one(), Some(Interface::Iommufd)));
        let (both, interface) = by(&(device("") + &iommufd));
        assert_eq!((both.len(), interface), (2, Some(Interface::Type1)));
        assert_eq!(by("<hostdev type='usb'/>"), (vec![], None));
    }

    #[test]
    fn interfaces_and_disks_are_devices_too() {
        let address = |bus| format!("<source><address type='pci' bus='{bus}'/></source>");
        let place = "<address type='pci' bus='0x09' slot='0x04'/>";
        for (devices, addresses, interface, ignored) in [
            (
                format!("<interface type='hostdev' managed='yes'>{}{place}</interface>", address(4)),
                &["0000:04:00.0"][..],
                Some(Interface::Type1),
                &[][..],
            ),
            (
                format!("<interface type='bridge'>{place}</interface><disk type='file'>{place}</disk>"),
                &[],
                None,
                &[],
            ),
            // Elements are in any order.
            (
                format!("<interface type='hostdev'>{}<driver iommufd='yes'/></interface>", address(4)),
                &["0000:04:00.0"],
                Some(Interface::Iommufd),
                &[],
            ),
            (
                format!("<disk type='nvme'>{}</disk>", address(5)),
                &["0000:05:00.0"],
                Some(Interface::Type1),
                &[],
            ),
            (
                "<hostdev type='mdev' model='vfio-ap'><source><address uuid='a-b'/></source></hostdev>".into(),
                &[],
                Some(Interface::Type1),
                &["mediated device a-b of vfio-ap, which pins on demand"],
            ),
            (
                "<hostdev type='pci'><source/></hostdev>".into(),
                &[],
                Some(Interface::Type1),
                &["/domain/devices/hostdev without an address"],
            ),
            (
                "<interface type='vdpa'><source dev='/dev/vhost-vdpa-0'/></interface>\
                 <interface type='vhostuser'/><filesystem><driver type='virtiofs'/></filesystem>"
                    .into(),
                &[],
                None,
                &["<interface> vdpa", "<interface> vhostuser", "<filesystem> virtiofs"],
            ),
        ] {
            let guest = parsed(&format!("<memory>4096</memory><devices>{devices}</devices>"));
            let found = guest.devices.iter().map(|device| device.address.as_str());
            assert_eq!(found.collect::<Vec<_>>(), addresses, "{devices}");
            assert_eq!(guest.interface, interface, "{devices}");
            assert_eq!(guest.ignored, ignored, "{devices}");
        }
        let domain = "<memory>4096</memory><devices><hostdev type='pci'><source><address bus='1'/></source>\
            </hostdev></devices><iommufd enabled='yes'/>";
        assert_eq!(parsed(domain).interface, Some(Interface::Iommufd));
    }

    #[test]
    fn modules_have_pages_of_their_own_and_are_a_part_of_all_memory() {
        let module = |source: &str| {
            format!(
                "<memory model='dimm' access='shared'>{source}<target><size unit='GiB'>1</size>\
                 <node>1</node></target></memory>"
            )
        };
        let pages = "<memoryBacking><hugepages><page size='1' unit='G' nodeset='1'/></hugepages></memoryBacking>";
        let small = "<source><pagesize unit='KiB'>2048</pagesize></source>";
        let other = "<memory model='nvdimm'><target><size unit='GiB'>1</size></target></memory>";
        let guest = parsed(&format!(
            "<memory unit='GiB'>4</memory>{pages}<devices>{}{}{other}</devices>",
            module(small),
            module("")
        ));
        let found = guest
            .memory
            .iter()
            .map(|ram| (ram.bytes, ram.pool_bytes, ram.shared));
        let expected = [
            (1 << 30, None, false),
            (1 << 30, Some(2 << 20), true),
            (1 << 30, Some(1 << 30), true),
        ];
        assert_eq!(found.collect::<Vec<_>>(), expected);
        assert_eq!(guest.ignored, ["<memory> nvdimm"]);
    }

    #[test]
    fn memory_of_a_memfd_may_be_private() {
        for (backing, shared) in [
            ("<source type='memfd'/>", true),
            ("<source type='memfd'/><access mode='private'/>", false),
            ("<access mode='shared'/>", true),
        ] {
            let guest = parsed(&format!(
                "<memory>4096</memory><memoryBacking>{backing}<locked/></memoryBacking>"
            ));
            assert_eq!(guest.memory[0].shared, shared, "{backing}");
            assert_eq!(guest.ignored, ["<locked>"]);
        }
    }

    #[test]
    fn units_are_as_libvirt_reads_them() {
        for (unit, bytes) in [
            ("unit='G'", 4 << 30),
            ("unit='gib'", 4 << 30),
            ("unit=''", 4 << 10),
            ("", 4 << 10),
            ("unit='MB'", 4_000_000),
            ("unit='PiB'", 4 << 50),
            ("unit='Byte'", 4),
        ] {
            assert_eq!(
                parsed(&format!("<memory {unit}>4</memory>")).bytes(),
                bytes,
                "{unit}"
            );
        }
    }

    #[test]
    fn arguments_for_qemu_are_read() {
        let with = |arguments: &[&str], rest: &str| {
            let arguments = arguments
                .iter()
                .map(|value| format!("<q:arg value='{value}'/>"));
            let arguments: String = arguments.collect();
            parsed(&format!(
                "<memory unit='GiB'>2</memory><vcpu>3</vcpu>{rest}<q:commandline>{arguments}</q:commandline>"
            ))
        };
        let guest = with(
            &[
                "-device",
                "vfio-pci,host=02:00.0",
                "-device",
                "intel-iommu",
                "-new",
            ],
            "",
        );
        assert_eq!(guest.devices, ["0000:02:00.0".to_owned().into()]);
        assert_eq!(guest.interface, Some(Interface::Type1));
        assert_eq!(guest.viommu.as_deref(), Some("intel-iommu"));
        assert_eq!(
            (guest.bytes(), guest.ignored),
            (2 << 30, vec!["-new".into()])
        );
        let object = [
            "-object",
            "memory-backend-file,id=m,size=2G,mem-path=/dev/hugepages,share=on,prealloc=on",
            "-numa",
            "node,memdev=m",
        ];
        let guest = with(&object, "");
        let [ram] = &guest.memory[..] else {
            panic!("{guest:?}");
        };
        assert_eq!(
            (ram.bytes, ram.shared, ram.prealloc_threads),
            (2 << 30, true, 3)
        );
        let cell = "<cpu><numa><cell memory='2' unit='GiB'/></numa></cpu>";
        let guest = with(&object, cell);
        assert_eq!((guest.bytes(), guest.memory.len()), (2 << 30, 1));
        assert_eq!(guest.ignored, ["memory object \"m\""]);
        let guest = with(&["-device", "vfio-pci,host=x", "-m", "1G"], "");
        assert_eq!(
            guest.ignored,
            [
                "arguments for QEMU (-device vfio-pci, host: \"x\" is no PCI address like 0000:01:00.0)"
            ]
        );
        let property = "<q:override><q:device alias='a'><q:frontend><q:property name='x-b' type='bool' value='true'/>\
            </q:frontend></q:device></q:override>";
        assert_eq!(with(&[], property).ignored, ["x-b of <q:override>"]);
    }

    #[test]
    fn variables_in_the_place_of_elements_are_named() {
        let guest = parsed(
            "<memory>4096</memory>{{ backing }}<devices>\n ${CARDS} <disk/>{% if x %}<name>$X</name></devices>",
        );
        let expected = [
            "{{ backing }} in the place of elements of /domain",
            "${CARDS} in the place of elements of /domain/devices",
            "{% if x %} in the place of elements of /domain/devices",
        ];
        assert_eq!(guest.ignored, expected);
    }

    #[test]
    fn a_virtual_iommu_and_a_confidential_guest_are_named() {
        let guest = parsed(
            "<memory>4096</memory><launchSecurity type='sev-snp'/><devices><iommu model='virtio'/></devices>",
        );
        assert_eq!(guest.viommu.as_deref(), Some("virtio"));
        assert_eq!(guest.confidential.as_deref(), Some("SEV-SNP"));
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

        /// Any text, and a good one with some bytes changed, is understood or refused.
        #[test]
        fn no_text_is_a_panic(
            any in any::<String>(),
            changes in prop::collection::vec((any::<prop::sample::Index>(), 0x20u8..0x7f), 1..6),
        ) {
            let _ = libvirt(&any, POOL);
            let mut good = MACHINE.as_bytes().to_vec();
            for (at, byte) in changes {
                let at = at.index(good.len());
                good[at] = byte;
            }
            if let Ok(guest) = libvirt(&String::from_utf8(good).unwrap(), POOL) {
                prop_assert!(guest.memory.len() <= 4);
                predict(&guest);
            }
        }

        /// Each number is one of a machine, or refused.
        #[test]
        fn no_number_is_a_panic(
            numbers in prop::collection::vec(prop_oneof![prop::sample::select(&NUMBERS[..]), any::<u64>()], 16),
            unit in prop::sample::select(vec!["b", "KiB", "MiB", "GiB", "TiB"]),
        ) {
            let [pages, cell, more, memory, id, small, threads, cpus, size, node, domain, bus, slot, function, _, _] =
                numbers[..] else { unreachable!() };
            let xml = format!("<domain><memory unit='{unit}'>{memory}</memory><vcpu>{cpus}</vcpu>
                <memoryBacking>
                  <hugepages><page size='{pages}' unit='{unit}' nodeset='{cell}-{more}'/></hugepages>
                  <allocation mode='immediate' threads='{threads}'/>
                </memoryBacking>
                <cpu><numa><cell id='{id}' memory='{small}' unit='{unit}'/></numa></cpu>
                <devices>
                  <memory model='dimm'><target><size unit='{unit}'>{size}</size><node>{node}</node></target></memory>
                  <hostdev type='pci'><source>
                    <address domain='{domain}' bus='{bus}' slot='{slot}' function='{function}'/>
                  </source></hostdev>
                </devices></domain>");
            match libvirt(&xml, POOL) {
                Ok(guest) => predict(&guest),
                Err(error) => prop_assert!(error.to_string().contains(|c: char| c.is_ascii_digit())),
            }
        }
    }

    #[test]
    fn small_pages_are_of_no_pool() {
        let pages = "<hugepages><page size='4' unit='KiB'/></hugepages>";
        let guest = parsed(&format!(
            "<memory>4096</memory><memoryBacking>{pages}</memoryBacking>"
        ));
        let [ram] = &guest.memory[..] else {
            panic!("{guest:?}");
        };
        assert_eq!((ram.pool_bytes, ram.prealloc_threads), (None, 0));
    }

    #[test]
    fn a_set_holds_what_it_names_and_not_what_it_excludes() {
        for (text, held) in [
            ("0", &[0][..]),
            ("1-3,^2", &[1, 3]),
            ("^1,0-2", &[0, 2]),
            (" 0 , 3-4", &[0, 3, 4]),
            ("3-1", &[]),
        ] {
            let set = Set::of(text).unwrap();
            let found: Vec<_> = (0..6).filter(|cell| set.holds(*cell)).collect();
            assert_eq!(found, held, "{text}");
        }
        for none in ["", "x", "1-", "0,,1", "^", "1024", "0-1024"] {
            assert!(Set::of(none).is_none(), "{none}");
        }
    }

    #[test]
    fn an_address_is_of_numbers_as_c_writes_them() {
        let of = |address: &str| {
            let device =
                format!("<hostdev type='pci'><source><address {address}/></source></hostdev>");
            libvirt(
                &format!("<domain><memory>4096</memory><devices>{device}</devices></domain>"),
                POOL,
            )
            .map(|guest| guest.devices[0].address.clone())
            .map_err(|error| error.to_string())
        };
        for (text, address) in [
            ("", "0000:00:00.0"),
            (
                "domain='0x10000' bus='0x0a' slot='0x1f' function='7'",
                "10000:0a:1f.7",
            ),
            ("bus='10' slot='010'", "0000:0a:08.0"),
        ] {
            assert_eq!(of(text).as_deref(), Ok(address), "{text}");
        }
        for (text, said) in [
            (
                "domain='0x100000000'",
                "domain: \"0x100000000\" is no number from 0 to 4294967295",
            ),
            ("bus='256'", "bus: \"256\" is no number from 0 to 255"),
            ("slot='0x20'", "slot: \"0x20\" is no number from 0 to 31"),
            ("function='8'", "function: \"8\" is no number from 0 to 7"),
            ("function='08'", "function: \"08\" is no number from 0 to 7"),
            ("bus='0x+1'", "bus: \"0x+1\" is no number from 0 to 255"),
            ("bus=''", "bus: \"\" is no number from 0 to 255"),
        ] {
            let expected = format!("/domain/devices/hostdev/source/address {said}");
            assert_eq!(of(text), Err(expected), "{text}");
        }
    }

    #[test]
    fn there_are_as_many_of_each_element_as_there_are_cells() {
        for (before, element, after, path) in [
            (
                "<memoryBacking><hugepages>",
                "<page size='2' unit='MiB' nodeset='0'/>",
                "</hugepages></memoryBacking>",
                "/domain/memoryBacking/hugepages/page",
            ),
            (
                "<cpu><numa>",
                "<cell memory='4096'/>",
                "</numa></cpu>",
                "/domain/cpu/numa/cell",
            ),
            (
                "<devices>",
                "<memory model='dimm'/>",
                "</devices>",
                "/domain/devices/memory",
            ),
            (
                "<devices>",
                "<memory model='sgx-epc'/>",
                "</devices>",
                "/domain/devices/memory",
            ),
            (
                "<devices>",
                "<hostdev type='pci'><source><address/></source></hostdev>",
                "</devices>",
                "/domain/devices/hostdev/source/address",
            ),
        ] {
            let of = |count| {
                let all = element.repeat(count);
                libvirt(
                    &format!("<domain><memory>4096</memory>{before}{all}{after}</domain>"),
                    POOL,
                )
            };
            of(1024).unwrap();
            let error = of(1025).unwrap_err().to_string();
            assert_eq!(error, format!("there are more than 1024 of {path}"));
        }
    }

    #[test]
    fn what_is_not_understood_is_refused_by_name() {
        let deep = "<a>".repeat(64);
        for (inner, said) in [
            ("", "there is no <memory> with a size"),
            (
                "<memory unit='XiB'>1</memory>",
                "/domain/memory unit: \"XiB\" is not known; \
                 known are bytes, KB, KiB, MB, MiB, GB, GiB, TB, TiB",
            ),
            (
                "<memory>much</memory>",
                "/domain/memory: \"much\" is no number from 0 to 18446744073709551615",
            ),
            (
                "<memory unit='TiB'>18446744073709551615</memory>",
                "/domain/memory: 16.0 EiB is more than 64 PiB",
            ),
            ("<memory>0</memory>", "there is no <memory> with a size"),
            (
                "<cpu><numa><cell memory='65537' unit='TiB'/></numa></cpu>",
                "/domain/cpu/numa/cell memory: 64.0 PiB is more than 64 PiB",
            ),
            (
                "<cpu><numa><cell memory='65536' unit='TiB'/><cell memory='1'/></numa></cpu>",
                "all memory: 64.0 PiB is more than 64 PiB",
            ),
            (
                "<memory>1</memory><devices><memory model='dimm'><target>\
                 <size unit='TiB'>99999</size></target></memory></devices>",
                "/domain/devices/memory/target/size: 97.7 PiB is more than 64 PiB",
            ),
            (
                "<cpu><numa><cell id='1024' memory='4096'/></numa></cpu>",
                "/domain/cpu/numa/cell id: \"1024\" is no number from 0 to 1023",
            ),
            (
                "<memoryBacking><hugepages><page size='0'/></hugepages></memoryBacking>",
                "/domain/memoryBacking/hugepages/page size: 0 B is no size of pages, which have a power of two \
                 from 4 KiB to 16 GiB",
            ),
            (
                "<memoryBacking><hugepages><page size='3'/></hugepages></memoryBacking>",
                "/domain/memoryBacking/hugepages/page size: 3 KiB is no size of pages, which have a power of two \
                 from 4 KiB to 16 GiB",
            ),
            (
                "<memoryBacking><hugepages><page size='32' unit='G'/></hugepages></memoryBacking>",
                "/domain/memoryBacking/hugepages/page size: 32 GiB is no size of pages, which have a power of two \
                 from 4 KiB to 16 GiB",
            ),
            (
                "<memoryBacking><hugepages><page size='2048' nodeset='0-x'/></hugepages></memoryBacking>",
                "/domain/memoryBacking/hugepages/page nodeset: \"0-x\" is not known; \
                 known are sets of cells like 0-3,^2, of 1024 cells",
            ),
            (
                "<memoryBacking><allocation threads='0'/></memoryBacking>",
                "/domain/memoryBacking/allocation threads: \"0\" is no number from 1 to 65536",
            ),
            (
                "<vcpu>65537</vcpu>",
                "/domain/vcpu: \"65537\" is no number from 1 to 65536",
            ),
            (
                "<memoryBacking><source type='disk'/></memoryBacking>",
                "/domain/memoryBacking/source type: \"disk\" is not known; \
                 known are anonymous, file, memfd",
            ),
            ("<memory", "the XML is damaged near byte 24"),
            (&deep, "elements are nested deeper than 64"),
        ] {
            let error = libvirt(&format!("<domain>{inner}</domain>"), POOL).unwrap_err();
            assert_eq!(error.to_string(), said, "{inner}");
        }
        let error = libvirt("<network/>", POOL).unwrap_err().to_string();
        assert_eq!(
            error,
            "the root element is <network>; libvirt's is <domain>"
        );
        let open = libvirt("<domain><memory>4</memory>", POOL).unwrap_err();
        assert!(open.to_string().starts_with("the XML is damaged"), "{open}");
    }
}
