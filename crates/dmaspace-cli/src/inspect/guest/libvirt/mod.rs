//! libvirt's XML of a domain: the elements that decide about memory and VFIO.
//!
//! Source: libvirt `docs/formatdomain.rst`, "Memory Backing", "NUMA Node Tuning", "Host device assignment";
//! memory of a pool is brought in at the start (`qemuBuildMemoryBackendProps` of `src/qemu/qemu_command.c`),
//! by QEMU with as many threads as the guest has processors, unless a number is given.

mod machine;
mod value;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ops::RangeInclusive;

use dmaspace::topology::MOST_MEMORY;
use quick_xml::Reader;
use quick_xml::escape::unescape;
use quick_xml::events::{BytesStart, Event};

use super::{
    Blocks, ConfigError, Guest, Ram, Reading, cpus, has_variable, memory, number, page, variables,
};
use crate::inspect::process::plain;

use value::{CELLS, Nodes, Set, based, nodes, one_more, scaled};

/// Elements within elements; libvirt has fewer than ten.
const DEEPEST: usize = 64;
/// Documents that a domain is a part of: its status, a snapshot, a checkpoint.
const AROUND: [&str; 3] = ["domstatus", "domainsnapshot", "domaincheckpoint"];
/// Hypervisors whose devices VFIO gives.
const BY_VFIO: [&str; 3] = ["kvm", "qemu", "hvf"];
/// Elements that have no text of their own.
const GROUPS: [&str; 5] = [
    "/domain",
    "/domain/cpu",
    "/domain/cpu/numa",
    "/domain/devices",
    "/domain/memoryBacking",
];
/// Numbers of buses.
const BUSES: RangeInclusive<u64> = 0..=0xff;

/// The machine that libvirt makes of a `<domain>`. `default_pool` is the size of a page of the pool that is
/// used where none is named.
pub fn libvirt(text: &str, default_pool: u64) -> Result<Guest, ConfigError> {
    read(text, default_pool, Reading::Exact)?.in_range()
}

/// As [`libvirt`], of a part of a log: what is not understood is named as ignored.
pub(crate) fn libvirt_rough(text: &str, default_pool: u64) -> Result<Guest, ConfigError> {
    read(text, default_pool, Reading::Rough)
}

fn read(text: &str, default_pool: u64, reading: Reading) -> Result<Guest, ConfigError> {
    let mut reader = Reader::from_str(text);
    let mut domain = Domain {
        default_pool,
        reading,
        ..Domain::default()
    };
    // The names of the open elements, with a slash before each, and the text of the innermost.
    let (mut path, mut depth, mut inner) = (String::new(), 0, String::new());
    // Elements around the domain's own, and whether a root has ended.
    let (mut around, mut over) = (0, false);
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
                if depth == 1 && over {
                    return Err(ConfigError::SecondRoot { found: name });
                }
                if depth == 1 && AROUND.contains(&name.as_str()) {
                    around = 1;
                    continue;
                }
                if depth == 1 && name != "domain" {
                    return Err(ConfigError::NotADomain { found: name });
                }
                path += "/";
                path += &name;
                inner.clear();
                let attributes = Attributes::of(element).map_err(damaged)?;
                let opened = domain.open(&path, &attributes);
                domain.guest.or_named(reading, opened)?;
                if matches!(event, Event::Empty(_)) {
                    let ended = domain.end(&path);
                    domain.guest.or_named(reading, ended)?;
                    close(&mut path, &mut depth);
                    over |= depth <= around;
                }
            }
            Event::Text(part) => {
                let part = text_of(&part);
                domain.between(&path, part.trim());
                inner += &part;
            }
            Event::CData(part) => inner += &text_of(&part),
            Event::GeneralRef(name) => {
                let name = text_of(&name);
                let text = format!("&{name};");
                inner += &unescape(&text).unwrap_or(Cow::Borrowed(&text));
            }
            Event::End(_) => {
                let taken = domain.text(&path, inner.trim());
                domain.guest.or_named(reading, taken)?;
                let ended = domain.end(&path);
                domain.guest.or_named(reading, ended)?;
                inner.clear();
                close(&mut path, &mut depth);
                over |= depth <= around;
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
            let value = unescape(&value).unwrap_or(Cow::Borrowed(&value));
            Ok((plain(&key), plain(&value)))
        });
        pairs.collect::<Result<_, quick_xml::Error>>().map(Self)
    }

    fn get(&self, name: &str) -> Option<&str> {
        let mut found = self.0.iter().filter(|(known, _)| known == name);
        found.next().map(|(_, value)| value.as_str())
    }
}

/// The elements that were read.
#[derive(Default)]
struct Domain {
    guest: Guest,
    reading: Reading,
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
    /// Memory is of blocks of 256 MiB, as on POWER, and not of 1 MiB.
    blocks: bool,
    /// The `<memory>` of a device that is open is a module, or is plugged in blocks.
    module: bool,
    in_blocks: bool,
    /// All devices use iommufd.
    iommufd: bool,
    /// The device whose element is open, and all that VFIO gives.
    device: Option<Device>,
    devices: Vec<Device>,
    /// Nodes of the host for each cell, and for all memory.
    memnodes: BTreeMap<u64, Nodes>,
    tune: Option<Nodes>,
    /// Controllers of PCI by number.
    controller: Option<(u64, Controller)>,
    controllers: BTreeMap<u64, Controller>,
    /// Arguments for QEMU.
    arguments: Vec<String>,
}

/// A controller of PCI.
#[derive(Clone, Copy, Default)]
struct Controller {
    /// It is an expander, which has a memory node.
    expander: bool,
    /// The bus that it hangs on.
    above: Option<u64>,
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
    /// The bus of the guest.
    bus: Option<u64>,
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
        for (_, value) in &attributes.0 {
            variables(value).for_each(|variable| self.guest.lacks(&variable));
        }
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
            | "/domain/devices/memory/target/block"
            | "/domain/devices/memory/target/requested"
            | "/domain/devices/memory/source/pagesize"
            | "/domain/memtune/hard_limit" => self.unit = unit(),
            "/domain/numatune/memory" => {
                self.tune = get("nodeset").map(|text| nodes(text, get("mode")))
            }
            "/domain/numatune/memnode" => {
                let cell = get("cellid").map(|text| number(of("cellid"), text, &CELLS));
                if let (Some(cell), Some(text)) = (cell.transpose()?, get("nodeset")) {
                    self.memnodes.insert(cell, nodes(text, get("mode")));
                }
            }
            "/domain/devices/controller" if get("type") == Some("pci") => {
                let index = get("index").map_or(Ok(0), |text| based(of("index"), text, &BUSES))?;
                let model = get("model").unwrap_or_default();
                let controller = Controller {
                    expander: matches!(model, "pcie-expander-bus" | "pci-expander-bus"),
                    above: (index != 0).then_some(0),
                };
                self.controller = Some((index, controller));
            }
            "/domain/devices/controller/address" => {
                if let (Some((_, controller)), Some(bus)) = (&mut self.controller, get("bus")) {
                    controller.above = Some(based(of("bus"), bus, &BUSES)?);
                }
            }
            "/domain/devices/hostdev/address" | "/domain/devices/interface/address" => {
                if let (Some(device), Some(bus)) = (&mut self.device, get("bus")) {
                    device.bus = Some(based(of("bus"), bus, &BUSES)?);
                }
            }
            // Another process maps the guest's memory.
            "/domain/devices/filesystem/driver" if get("type") == Some("virtiofs") => {
                one_more(path, &self.guest.ignored)?;
                self.guest.ignore("<filesystem> virtiofs");
            }
            "/domain/memoryBacking/locked" => {
                self.guest.locked = true;
                self.guest.ignore("<locked>");
            }
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
            "/domain" => {
                if let Some(kind) = get("type").filter(|kind| !BY_VFIO.contains(kind)) {
                    self.guest.ignore(&format!(
                        "a domain of {kind}, which gives devices without VFIO"
                    ));
                }
            }
            "/domain/os" => self.flash |= get("firmware") == Some("efi"),
            "/domain/os/loader" => self.flash |= get("type") == Some("pflash"),
            "/domain/os/type" => {
                self.kind = get("machine").unwrap_or_default().to_owned();
                self.blocks = get("arch").is_some_and(|arch| arch.starts_with("ppc64"));
            }
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
                self.in_blocks = model == "virtio-mem";
                one_more(path, &self.modules)?;
                one_more(path, &self.guest.ignored)?;
                if self.in_blocks {
                    self.guest.blocks.push(Blocks::default());
                }
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
            // A function of the network's pool that a running guest has.
            "/domain/devices/interface/actual" if get("type") == Some("hostdev") => {
                if let Some(device) = &mut self.device {
                    device.kind = DeviceKind::Pci;
                }
            }
            "/domain/devices/hostdev/driver" if get("name") == Some("kvm") => {
                self.guest.ignore("<hostdev> by KVM and not by VFIO");
                self.device = None;
            }
            "/domain/devices/hostdev/driver" | "/domain/devices/interface/driver" => {
                if let (Some(device), Some(how)) = (&mut self.device, get("iommufd")) {
                    if device.kind != DeviceKind::Other {
                        known("iommufd", "yes, no")?;
                        device.iommufd = Some(how == "yes");
                    }
                }
            }
            // A network may be a pool of functions: libvirt `docs/formatnetwork.rst`, `<forward mode='hostdev'>`.
            "/domain/devices/interface/source" => {
                let network = get("network").filter(|name| *name != "default");
                if let Some(name) = network {
                    one_more(path, &self.guest.ignored)?;
                    let text = format!(
                        "interface of network {name:?}, which may give a function of the host"
                    );
                    self.guest.ignore(&text);
                }
            }
            "/domain/devices/hostdev/source/address"
            | "/domain/devices/interface/source/address"
            | "/domain/devices/interface/actual/source/address"
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
                        self.guest.mediated.push(id.to_owned());
                    }
                    _ => {}
                }
            }
            _ => return self.foreign(path, attributes),
        }
        Ok(())
    }

    /// The device whose element is open, where its memory is plugged in blocks.
    fn blocks(&mut self) -> Option<&mut Blocks> {
        let last = self.guest.blocks.last_mut();
        last.filter(|_| self.in_blocks)
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
                let bytes =
                    scaled(path, text, &self.unit).inspect_err(|_| self.guest.lacks(text))?;
                self.memory = Some(memory(path, bytes, MOST_MEMORY)?);
            }
            "/domain/memtune/hard_limit" => {
                self.guest.hard_limit_bytes = Some(scaled(path, text, &self.unit)?);
            }
            "/domain/devices/memory/target/size" => {
                let bytes = scaled(path, text, &self.unit)?;
                let bytes = memory(path, bytes, MOST_MEMORY)?;
                self.plugged = self.plugged.saturating_add(bytes);
                if let Some(module) = self.modules.last_mut().filter(|_| self.module) {
                    module.ram.bytes = bytes;
                }
                if let Some(blocks) = self.blocks() {
                    blocks.bytes = bytes;
                }
            }
            "/domain/devices/memory/target/block" => {
                let bytes = scaled(path, text, &self.unit).ok();
                if let Some(blocks) = self.blocks() {
                    blocks.block_bytes = bytes.filter(|bytes| *bytes > 0);
                }
            }
            "/domain/devices/memory/target/requested" => {
                let bytes = scaled(path, text, &self.unit).unwrap_or(0);
                if let Some(blocks) = self.blocks() {
                    blocks.requested_bytes = bytes;
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
            _ => {}
        }
        Ok(())
    }

    /// An element ends, with a text or without.
    fn end(&mut self, path: &str) -> Result<(), ConfigError> {
        match path {
            "/domain/devices/controller" => {
                if let Some((index, controller)) = self.controller.take() {
                    self.controllers.insert(index, controller);
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
}

#[cfg(test)]
mod tests;
