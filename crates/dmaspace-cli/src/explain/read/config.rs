//! Guests' configurations: QEMU's command line and libvirt's XML, as far as causes depend on them: devices and
//! where they hang, memory and host nodes, pools, virtual IOMMU, files that were not given.
//!
//! Sources: QEMU 10.0 `qemu-options.hx`, `qapi/qom.json` (`MemoryBackendProperties`), `docs/pcie.txt`,
//! `docs/pci_expander_bridge.txt`; libvirt `docs/formatdomain.rst`, "Controllers", "NUMA Node Tuning",
//! "IOMMU devices".

use std::collections::BTreeMap;

use quick_xml::Reader;
use quick_xml::events::{BytesStart, Event};

use super::super::finding::plain;
use crate::inspect::{Pairs, address, libvirt_bytes, pairs, pool_by_name};
use crate::size;

/// The longest line or document that is read.
pub(in crate::explain) const MOST_TEXT: usize = 10 << 20;
/// The most devices, cells and memory objects.
const MOST: usize = 4096;
/// Elements within elements; libvirt has fewer than ten.
const DEEPEST: usize = 64;
/// Pages of a pool whose size is not on the line (x86-64).
const DEFAULT_POOL: u64 = 2 << 20;

/// A configuration.
#[derive(Clone, Debug, Default, PartialEq)]
pub(in crate::explain) struct Configuration {
    /// libvirt's XML, and not a command line.
    pub(in crate::explain) libvirt: bool,
    /// The host's devices.
    pub(in crate::explain) devices: Vec<ConfigDevice>,
    /// Memory at the start, bytes; `None` is not known.
    pub(in crate::explain) bytes: Option<u64>,
    /// Memory in parts.
    pub(in crate::explain) memory: Vec<Part>,
    /// Memory nodes that the guest sees.
    pub(in crate::explain) nodes: usize,
    /// The model of a virtual IOMMU.
    pub(in crate::explain) viommu: Option<String>,
    /// Some device is given by type 1.
    pub(in crate::explain) type1: bool,
    /// Some device is given by iommufd.
    pub(in crate::explain) iommufd: bool,
    /// A mediated device, by name.
    pub(in crate::explain) mediated: Option<String>,
    /// A confidential guest, by kind.
    pub(in crate::explain) confidential: Option<String>,
    /// virtio-mem devices.
    pub(in crate::explain) virtio_mem: bool,
    /// Files whose content was not given, and variables of a template.
    pub(in crate::explain) unread: Vec<String>,
    /// Files hold the tree of buses: nothing is known from its absence.
    pub(in crate::explain) buses_unread: bool,
    /// The version that the machine's type names: the monitor has it or a newer one.
    pub(in crate::explain) machine: Option<(u32, u32)>,
    /// A hard limit of memory (libvirt), bytes.
    pub(in crate::explain) hard_limit: Option<u64>,
}

/// A device of the host.
#[derive(Clone, Debug, PartialEq)]
pub(in crate::explain) struct ConfigDevice {
    pub(in crate::explain) address: String,
    pub(in crate::explain) place: BusPlace,
}

/// The bus that a device hangs on, by its root.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::explain) enum BusPlace {
    /// The guest's own root bus.
    #[default]
    Default,
    /// The bus of an expander, which has a node.
    Expander,
    /// A bus that is not defined in what was given.
    Unknown,
}

/// A part of the memory.
#[derive(Clone, Debug, Default, PartialEq)]
pub(in crate::explain) struct Part {
    pub(in crate::explain) id: String,
    pub(in crate::explain) bytes: u64,
    /// Host nodes that it is bound to.
    pub(in crate::explain) nodes: Vec<u32>,
    /// Allocation elsewhere fails: `policy=bind`, `mode='strict'`.
    pub(in crate::explain) bound: bool,
    /// Bytes of a page of its pool.
    pub(in crate::explain) pool: Option<u64>,
    pub(in crate::explain) shared: bool,
    pub(in crate::explain) prealloc: bool,
    pub(in crate::explain) threads: bool,
}

/// Words of a command line from QEMU's name on; `None` where there is none.
pub(in crate::explain) fn qemu_words(line: &str) -> Option<Vec<String>> {
    let words = shlex::split(line)?;
    let at = words.iter().position(|word| is_qemu(word))?;
    // Only what may stand before it: variables, a prompt, programs with their options.
    let before = words.get(..at)?;
    let named = |word: &String| {
        word.contains('=')
            || [
                "$", "#", "sudo", "exec", "env", "taskset", "numactl", "nice", "chrt",
            ]
            .contains(&word.as_str())
    };
    let opened = before.first().is_none_or(named);
    let options = words
        .get(at + 1..)?
        .iter()
        .any(|word| word.starts_with('-'));
    (opened && options).then(|| words.get(at..).map(<[String]>::to_vec))?
}

/// True for `qemu-system-x86_64`, with a path or without.
fn is_qemu(word: &str) -> bool {
    let name = word.rsplit('/').next().unwrap_or(word);
    let system = name.strip_prefix("qemu-system-").is_some_and(|rest| {
        !rest.is_empty()
            && rest
                .bytes()
                .all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
    });
    system || matches!(name, "qemu-kvm" | "kvm" | "qemu")
}

/// True where a line may begin a command line of QEMU that goes on in the next one.
pub(in crate::explain) fn begins(line: &str) -> bool {
    line.split_whitespace()
        .take(12)
        .any(|word| is_qemu(word.trim_matches('"')))
        || line.split_whitespace().next().is_some_and(|word| {
            word.contains('=') && word.starts_with(|c: char| c.is_ascii_uppercase())
        })
}

/// The configuration of a command line.
pub(in crate::explain) fn qemu(words: &[String]) -> Configuration {
    let mut found = Qemu::default();
    let mut words = words.iter().skip(1).map(String::as_str).peekable();
    while let Some(word) = words.next() {
        let Some(option) = word.strip_prefix('-') else {
            continue;
        };
        let option = option.strip_prefix('-').unwrap_or(option);
        let value = match words.peek() {
            Some(next) if !next.starts_with('-') => words.next(),
            _ => None,
        };
        found.take(option, value.unwrap_or_default());
    }
    found.configuration()
}

#[derive(Default)]
struct Qemu {
    new: Configuration,
    size: Option<u64>,
    path: Option<String>,
    prealloc: bool,
    threads: bool,
    objects: BTreeMap<String, Part>,
    used: Vec<String>,
    /// Buses: id of a bridge or port, and the bus that it hangs on; expanders have none.
    buses: BTreeMap<String, Option<String>>,
    hanging: Vec<(String, Option<String>)>,
}

impl Qemu {
    fn take(&mut self, option: &str, value: &str) {
        for variable in variables(value) {
            self.unread(variable);
        }
        let implied = match option {
            "m" => "size",
            "machine" | "M" | "numa" => "type",
            "object" => "qom-type",
            "device" => "driver",
            "readconfig" => {
                self.new.buses_unread = true;
                return self.unread(value.to_owned());
            }
            "mem-path" => {
                self.path = Some(value.to_owned());
                return;
            }
            "mem-prealloc" => {
                self.prealloc = true;
                return;
            }
            _ => return,
        };
        let Ok(pairs) = pairs(option, value, implied) else {
            return;
        };
        let get = |name: &str| pairs.get(name).map(String::as_str);
        match option {
            "m" => self.size = get("size").and_then(mebibytes).or(self.size),
            "machine" | "M" => {
                self.used.extend(get("memory-backend").map(str::to_owned));
                self.new.machine = get("type").and_then(version).or(self.new.machine);
                if get("iommu").is_some() {
                    self.new.viommu = get("iommu").map(str::to_owned);
                }
                if let Some(id) = get("confidential-guest-support") {
                    self.new.confidential.get_or_insert_with(|| plain(id));
                }
            }
            "numa" if get("type") == Some("node") => {
                self.used.extend(get("memdev").map(str::to_owned));
                let memory = get("memdev").is_some() || get("mem").is_some();
                self.new.nodes += usize::from(memory);
            }
            "object" => self.object(&pairs),
            "device" => self.device(&pairs),
            _ => {}
        }
    }

    fn unread(&mut self, file: String) {
        if self.new.unread.len() < MOST && !self.new.unread.contains(&file) {
            self.new.unread.push(plain(&file));
        }
    }

    fn object(&mut self, pairs: &Pairs) {
        let get = |name: &str| pairs.get(name).map(String::as_str);
        let kind = get("qom-type").unwrap_or_default();
        for (name, told) in [
            ("tdx-guest", "TDX"),
            ("sev-snp-guest", "SEV-SNP"),
            ("sev-guest", "SEV"),
        ] {
            if kind == name {
                self.new.confidential = Some(told.into());
            }
        }
        let Some(backend) = kind.strip_prefix("memory-backend-") else {
            return;
        };
        let on = |name: &str| matches!(get(name), Some("on" | "true" | "yes" | "y"));
        let path = get("mem-path");
        let pool = match get("hugetlbsize").and_then(bytes) {
            Some(page) => Some(page),
            None if on("hugetlb") => Some(DEFAULT_POOL),
            None => path.and_then(|path| pool_by_name(path, DEFAULT_POOL)),
        };
        let part = Part {
            id: get("id").map(plain).unwrap_or_default(),
            bytes: get("size").and_then(bytes).unwrap_or(0),
            nodes: get("host-nodes").map(set).unwrap_or_default(),
            bound: get("policy") == Some("bind"),
            pool,
            shared: on("share")
                || matches!(backend, "memfd" | "shm") && get("share") != Some("off"),
            prealloc: on("prealloc"),
            threads: get("prealloc-threads").is_some(),
        };
        if self.objects.len() < MOST {
            self.objects.insert(part.id.clone(), part);
        }
    }

    fn device(&mut self, pairs: &Pairs) {
        let get = |name: &str| pairs.get(name).map(String::as_str);
        let driver = get("driver").unwrap_or_default();
        let bus = get("bus").map(str::to_owned);
        match driver {
            "intel-iommu" | "amd-iommu" | "arm-smmuv3" => self.new.viommu = Some(driver.into()),
            driver if driver.starts_with("virtio-iommu") => self.new.viommu = Some(driver.into()),
            "pxb-pcie" | "pxb" | "pxb-cxl" => {
                self.buses.extend(get("id").map(|id| (id.to_owned(), None)));
            }
            driver if driver.starts_with("virtio-mem") => self.new.virtio_mem = true,
            "vfio-pci" | "vfio-pci-nohotplug" => {
                let iommufd = get("iommufd").is_some();
                self.new.iommufd |= iommufd;
                self.new.type1 |= !iommufd;
                if let Some(host) = get("host").and_then(address) {
                    if self.hanging.len() < MOST {
                        self.hanging.push((host, bus));
                    }
                } else if let Some(path) = get("sysfsdev") {
                    let name = path.rsplit('/').next().unwrap_or(path);
                    match address(name) {
                        Some(host) if self.hanging.len() < MOST => self.hanging.push((host, bus)),
                        _ => self.new.mediated = Some(plain(name)),
                    }
                }
            }
            _ if get("id").is_some()
                && (driver.contains("port")
                    || driver.contains("bridge")
                    || driver.starts_with("x3130")
                    || driver == "xio3130-downstream") =>
            {
                let room = self.buses.len() < MOST;
                let id = get("id").filter(|_| room).map(str::to_owned);
                let above = Some(bus.unwrap_or_else(|| "pcie.0".into()));
                self.buses.extend(id.map(|id| (id, above)));
            }
            "pc-dimm" => self.used.extend(get("memdev").map(str::to_owned)),
            _ => {}
        }
    }

    fn place(&self, bus: Option<&str>) -> BusPlace {
        let mut bus = bus.unwrap_or("pcie.0");
        for _ in 0..64 {
            // `rp1`, `rp1.0`
            let name = self.buses.contains_key(bus).then_some(bus);
            let name = name.or_else(|| {
                bus.strip_suffix(".0")
                    .filter(|id| self.buses.contains_key(*id))
            });
            match name.and_then(|name| self.buses.get(name)) {
                Some(None) => return BusPlace::Expander,
                Some(Some(above)) => bus = above,
                None if matches!(bus, "pcie.0" | "pci.0") => return BusPlace::Default,
                None => return BusPlace::Unknown,
            }
        }
        BusPlace::Unknown
    }

    fn configuration(mut self) -> Configuration {
        let mut devices = Vec::new();
        for (address, bus) in &self.hanging {
            devices.push(ConfigDevice {
                address: address.clone(),
                place: self.place(bus.as_deref()),
            });
        }
        self.new.devices = devices;
        for id in std::mem::take(&mut self.used) {
            if let Some(mut part) = self.objects.remove(&id) {
                if part.bytes == 0 {
                    part.bytes = self.size.unwrap_or(0);
                }
                part.prealloc |= self.prealloc;
                self.new.memory.push(part);
            }
        }
        if self.new.memory.is_empty() {
            let pool = self.path.as_deref();
            let pool = pool.and_then(|path| pool_by_name(path, DEFAULT_POOL));
            self.new.memory.push(Part {
                bytes: self.size.unwrap_or(128 << 20),
                pool,
                prealloc: self.prealloc,
                threads: self.threads,
                ..Part::default()
            });
        }
        let sum = self
            .new
            .memory
            .iter()
            .fold(0u64, |sum, part| sum.saturating_add(part.bytes));
        self.new.bytes = Some(sum).filter(|bytes| *bytes > 0);
        self.new
    }
}

/// `-m 1024` is MiB, `-m 1G` is not.
fn mebibytes(text: &str) -> Option<u64> {
    match text.bytes().last()?.is_ascii_digit() {
        true => bytes(&format!("{text}M")),
        false => bytes(text),
    }
}

fn bytes(text: &str) -> Option<u64> {
    size::parse(text).ok()
}

/// `0`, `0-1`, `[0,1]`, `0,2`.
fn set(text: &str) -> Vec<u32> {
    let mut nodes = Vec::new();
    for part in text.trim_matches(['[', ']']).split(',') {
        let (first, last) = part
            .trim()
            .split_once('-')
            .unwrap_or((part.trim(), part.trim()));
        let (Ok(first), Ok(last)) = (first.parse::<u32>(), last.parse::<u32>()) else {
            continue;
        };
        nodes.extend((first..=last.min(first.saturating_add(1023))).take(1024));
        if nodes.len() > 1024 {
            break;
        }
    }
    nodes
}

/// `pc-q35-6.2`, `virt-9.0`.
fn version(machine: &str) -> Option<(u32, u32)> {
    let (major, minor) = machine.rsplit('-').next()?.split_once('.')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

/// Variables of a template: `${NAME}`, `{{ name }}`.
fn variables(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    for (open, close) in [("${", "}"), ("{{", "}}")] {
        for part in text.split(open).skip(1).take(16) {
            let inside = part.split_once(close).map(|(inside, _)| inside);
            let inside = inside.filter(|inside| !inside.contains('"') && inside.len() < 64);
            found.extend(inside.map(|inside| format!("{open}{inside}{close}")));
        }
    }
    found
}

/// The configuration of a `<domain>`; `None` where the XML is damaged or another one.
pub(in crate::explain) fn libvirt(text: &str) -> Option<Configuration> {
    let mut reader = Reader::from_str(text);
    let mut domain = Domain::default();
    let (mut path, mut depth, mut inner) = (Vec::<String>::new(), 0usize, String::new());
    loop {
        match reader.read_event().ok()? {
            Event::Start(element) => {
                depth += 1;
                if depth > DEEPEST {
                    return None;
                }
                path.push(plain(&String::from_utf8_lossy(element.name().as_ref())));
                inner.clear();
                domain.open(&path, &attributes(&element)?);
            }
            Event::Empty(element) => {
                path.push(plain(&String::from_utf8_lossy(element.name().as_ref())));
                domain.open(&path, &attributes(&element)?);
                domain.close(&path, "");
                path.pop();
            }
            Event::Text(part) => inner += &String::from_utf8_lossy(&part),
            Event::End(_) => {
                domain.close(&path, inner.trim());
                inner.clear();
                path.pop();
                depth = depth.saturating_sub(1);
            }
            Event::Eof if depth == 0 => break,
            Event::Eof => return None,
            _ => {}
        }
    }
    domain.configuration()
}

type Attributes = BTreeMap<String, String>;

fn attributes(element: &BytesStart<'_>) -> Option<Attributes> {
    let pairs = element.attributes().map(|attribute| {
        let attribute = attribute.ok()?;
        let key = String::from_utf8_lossy(attribute.key.as_ref()).into_owned();
        Some((
            plain(&key),
            plain(&String::from_utf8_lossy(&attribute.value)),
        ))
    });
    pairs.collect()
}

#[derive(Default)]
struct Domain {
    new: Configuration,
    is_domain: bool,
    unit: String,
    memory: Option<u64>,
    cells: Vec<Part>,
    /// Pages of pools: bytes, and the cells that have them.
    pages: Vec<(u64, Option<Vec<u32>>)>,
    huge: bool,
    shared: bool,
    immediate: bool,
    memnodes: BTreeMap<u32, (Vec<u32>, bool)>,
    /// Nodes of all memory.
    tune: Option<(Vec<u32>, bool)>,
    all_iommufd: bool,
    device: Option<OpenDevice>,
    /// Controllers by index: expander with a node, or the bus that it hangs on.
    controllers: BTreeMap<u64, Controller>,
    controller: Option<(u64, Controller)>,
    hanging: Vec<(String, Option<u64>)>,
    arguments: Vec<String>,
}

#[derive(Default)]
struct OpenDevice {
    pci: bool,
    mdev: bool,
    iommufd: Option<bool>,
    address: Option<String>,
    bus: Option<u64>,
}

#[derive(Clone, Copy, Default)]
struct Controller {
    expander: bool,
    above: Option<u64>,
}

impl Domain {
    fn open(&mut self, path: &[String], get: &Attributes) {
        let names: Vec<&str> = path.iter().map(String::as_str).collect();
        let get = |name: &str| get.get(name).map(String::as_str);
        for variable in path
            .len()
            .checked_sub(1)
            .into_iter()
            .flat_map(|_| ["memory", "value", "file", "host"])
        {
            if let Some(value) = get(variable) {
                self.new.unread.extend(variables(value));
            }
        }
        self.unit = get("unit").unwrap_or("KiB").to_owned();
        match names.as_slice() {
            ["domain"] => self.is_domain = true,
            ["domain", "iommufd"] => self.all_iommufd = get("enabled") == Some("yes"),
            ["domain", "os", "type"] => self.new.machine = get("machine").and_then(version),
            ["domain", "memoryBacking", "hugepages"] => self.huge = true,
            ["domain", "memoryBacking", "hugepages", "page"] => {
                if let Some(page) =
                    get("size").and_then(|size| sized(size, get("unit").unwrap_or("KiB")))
                {
                    self.pages.push((page, get("nodeset").map(set)));
                }
            }
            ["domain", "memoryBacking", "access"] => self.shared = get("mode") == Some("shared"),
            ["domain", "memoryBacking", "allocation"] => {
                self.immediate = get("mode") == Some("immediate")
            }
            ["domain", "numatune", "memory"] => {
                if let Some(nodes) = get("nodeset") {
                    self.tune = Some((set(nodes), get("mode").is_none_or(|mode| mode == "strict")));
                }
            }
            ["domain", "numatune", "memnode"] => {
                if let (Some(Ok(cell)), Some(nodes)) =
                    (get("cellid").map(str::parse), get("nodeset"))
                {
                    let strict = get("mode").is_none_or(|mode| mode == "strict");
                    self.memnodes.insert(cell, (set(nodes), strict));
                }
            }
            ["domain", "cpu", "numa", "cell"] if self.cells.len() < MOST => {
                let unit = get("unit").unwrap_or("KiB");
                self.cells.push(Part {
                    id: get("id").unwrap_or_default().to_owned(),
                    bytes: get("memory")
                        .and_then(|memory| sized(memory, unit))
                        .unwrap_or(0),
                    shared: get("memAccess") == Some("shared"),
                    ..Part::default()
                });
            }
            ["domain", "launchSecurity"] => self.new.confidential = get("type").map(str::to_owned),
            ["domain", "devices", "iommu"] => self.new.viommu = get("model").map(str::to_owned),
            ["domain", "devices", "memory"] => {
                self.new.virtio_mem |= get("model") == Some("virtio-mem")
            }
            ["domain", "devices", "controller"] if get("type") == Some("pci") => {
                let index = get("index")
                    .and_then(super::super::facts::number)
                    .unwrap_or(0);
                let model = get("model").unwrap_or_default();
                let controller = Controller {
                    expander: matches!(model, "pcie-expander-bus" | "pci-expander-bus"),
                    above: (index != 0).then_some(0),
                };
                self.controller = Some((index, controller));
            }
            ["domain", "devices", "controller", "address"] => {
                if let (Some((_, controller)), Some(bus)) = (&mut self.controller, get("bus")) {
                    controller.above = super::super::facts::number(bus);
                }
            }
            ["domain", "devices", "hostdev"] => {
                self.device = Some(OpenDevice {
                    pci: get("type") == Some("pci"),
                    mdev: get("type") == Some("mdev"),
                    ..OpenDevice::default()
                });
            }
            ["domain", "devices", "interface"] if get("type") == Some("hostdev") => {
                self.device = Some(OpenDevice {
                    pci: true,
                    ..OpenDevice::default()
                });
            }
            ["domain", "devices", "hostdev" | "interface", "driver"] => {
                if let Some(device) = &mut self.device {
                    device.iommufd = get("iommufd").map(|value| value == "yes");
                }
            }
            [
                "domain",
                "devices",
                "hostdev" | "interface",
                "source",
                "address",
            ] => {
                let Some(device) = &mut self.device else {
                    return;
                };
                if device.mdev {
                    self.new.mediated = get("uuid").map(str::to_owned);
                }
                let part = |name: &str| get(name).and_then(super::super::facts::number);
                if let (true, Some(bus)) = (device.pci, part("bus")) {
                    let (domain, slot) = (part("domain").unwrap_or(0), part("slot").unwrap_or(0));
                    let function = part("function").unwrap_or(0);
                    device.address =
                        address(&format!("{domain:04x}:{bus:02x}:{slot:02x}.{function:x}"));
                }
            }
            ["domain", "devices", "hostdev" | "interface", "address"] => {
                if let Some(device) = &mut self.device {
                    device.bus = get("bus").and_then(super::super::facts::number);
                }
            }
            ["domain", "qemu:commandline", "qemu:arg"] if self.arguments.len() < MOST => {
                self.arguments.extend(get("value").map(str::to_owned));
            }
            _ => {}
        }
    }

    fn close(&mut self, path: &[String], text: &str) {
        let names: Vec<&str> = path.iter().map(String::as_str).collect();
        match names.as_slice() {
            ["domain", "memory"] => {
                self.memory = sized(text, &self.unit);
                if self.memory.is_none() && !text.is_empty() {
                    self.new.unread.push(plain(text));
                }
            }
            ["domain", "memtune", "hard_limit"] => self.new.hard_limit = sized(text, &self.unit),
            ["domain", "devices", "controller"] => {
                let open = self.controller.take();
                let room = self.controllers.len() < MOST;
                self.controllers.extend(open.filter(|_| room));
            }
            ["domain", "devices", "hostdev" | "interface"] => {
                let device = self.device.take();
                if let Some(device) = device.filter(|device| device.pci || device.mdev) {
                    let iommufd = device.iommufd.unwrap_or(self.all_iommufd);
                    self.new.iommufd |= iommufd;
                    self.new.type1 |= !iommufd;
                    if let Some(address) = device.address.filter(|_| self.hanging.len() < MOST) {
                        self.hanging.push((address, device.bus));
                    }
                }
            }
            _ => {}
        }
    }

    fn place(&self, bus: Option<u64>) -> BusPlace {
        let mut bus = bus.unwrap_or(0);
        for _ in 0..64 {
            match self.controllers.get(&bus) {
                Some(Controller { expander: true, .. }) => return BusPlace::Expander,
                Some(Controller {
                    above: Some(above), ..
                }) if *above != bus => bus = *above,
                None if bus != 0 => return BusPlace::Unknown,
                _ => return BusPlace::Default,
            }
        }
        BusPlace::Unknown
    }

    fn configuration(mut self) -> Option<Configuration> {
        if !self.is_domain {
            return None;
        }
        self.new.libvirt = true;
        let devices = self.hanging.iter().map(|(address, bus)| ConfigDevice {
            address: address.clone(),
            place: self.place(*bus),
        });
        self.new.devices = devices.collect();
        self.new.nodes = self.cells.len();
        let mut cells = std::mem::take(&mut self.cells);
        if cells.is_empty() {
            cells.push(Part {
                bytes: self.memory.unwrap_or(0),
                ..Part::default()
            });
        }
        for (nth, cell) in (0u32..).zip(&mut cells) {
            let id = cell.id.parse().unwrap_or(nth);
            let page = self
                .pages
                .iter()
                .find(|(_, cells)| cells.as_ref().is_none_or(|cells| cells.contains(&id)));
            cell.pool = match page {
                Some((page, _)) => Some(*page),
                None => (self.huge && self.pages.is_empty()).then_some(DEFAULT_POOL),
            };
            cell.prealloc = cell.pool.is_some() || self.immediate;
            cell.threads = true;
            cell.shared |= self.shared;
            let bound = self.memnodes.get(&id).or(self.tune.as_ref());
            if let Some((nodes, strict)) = bound {
                cell.nodes.clone_from(nodes);
                cell.bound = *strict;
            }
        }
        let sum = cells
            .iter()
            .fold(0u64, |sum, cell| sum.saturating_add(cell.bytes));
        self.new.bytes = self.memory.or(Some(sum)).filter(|bytes| *bytes > 0);
        self.new.memory = cells;
        if !self.arguments.is_empty() {
            self.arguments.insert(0, "qemu".into());
            let more = qemu(&self.arguments);
            self.new.viommu = self.new.viommu.or(more.viommu);
            self.new.type1 |= more.type1;
            self.new.iommufd |= more.iommufd;
            self.new.unread.extend(more.unread);
            // Their buses are libvirt's, by names.
            let devices = more.devices.into_iter().map(|device| ConfigDevice {
                place: BusPlace::Unknown,
                ..device
            });
            self.new.devices.extend(devices);
        }
        Some(self.new)
    }
}

/// `8`, unit `GiB`.
fn sized(text: &str, unit: &str) -> Option<u64> {
    libvirt_bytes("memory", text.trim(), unit).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of_line(line: &str) -> Configuration {
        qemu(&qemu_words(line).unwrap())
    }

    #[test]
    fn lines_have_memory_devices_and_buses() {
        let new = of_line(
            "sudo qemu-system-x86_64 -machine pc-q35-6.2 -m 4G -object memory-backend-memfd,id=a,size=2G,hugetlb=on,\
             hugetlbsize=1G,prealloc=on,host-nodes=1,policy=bind -object memory-backend-ram,id=b,size=2G \
             -numa node,memdev=a -numa node,memdev=b -device pxb-pcie,id=x,bus_nr=32,numa_node=1 \
             -device pcie-root-port,id=rp,bus=x -device vfio-pci,host=01:00.0,bus=rp -device vfio-pci,host=02:00.0 \
             -device intel-iommu",
        );
        assert_eq!(new.bytes, Some(4 << 30));
        assert_eq!(new.machine, Some((6, 2)));
        assert_eq!(
            (new.memory[0].nodes.as_slice(), new.memory[0].bound),
            (&[1][..], true)
        );
        assert_eq!(new.memory[0].pool, Some(1 << 30));
        assert_eq!(new.devices[0].place, BusPlace::Expander);
        assert_eq!(new.devices[1].place, BusPlace::Default);
        assert_eq!(new.viommu.as_deref(), Some("intel-iommu"));
        assert!(new.type1 && !new.iommufd);
    }

    #[test]
    fn messages_of_qemu_are_no_command_lines() {
        assert_eq!(
            qemu_words("qemu-system-x86_64: -device vfio-pci,host=b0:00.0: warning: x"),
            None
        );
        assert_eq!(qemu_words("the kvm -m 4G line"), None);
        assert!(qemu_words("LC_ALL=C PATH=/bin /usr/bin/kvm -m 4G").is_some());
    }

    #[test]
    fn domains_have_cells_nodes_and_places() {
        let new = libvirt(
            "<domain type='kvm'><memory unit='GiB'>8</memory><cpu><numa><cell id='0' memory='4' unit='GiB'/>\
             <cell id='1' memory='4' unit='GiB'/></numa></cpu><numatune><memnode cellid='1' mode='strict' nodeset='1'/>\
             </numatune><devices><controller type='pci' index='0' model='pcie-root'/>\
             <controller type='pci' index='1' model='pcie-expander-bus'><target busNr='254'><node>1</node></target></controller>\
             <controller type='pci' index='2' model='pcie-root-port'><address type='pci' bus='0x01'/></controller>\
             <hostdev mode='subsystem' type='pci'><source><address domain='0' bus='0x41' slot='0' function='0'/></source>\
             <address type='pci' bus='0x02'/></hostdev><hostdev mode='subsystem' type='pci'><source>\
             <address domain='0' bus='0x61' slot='0' function='0'/></source></hostdev><iommu model='intel'/></devices></domain>",
        )
        .unwrap();
        assert_eq!((new.bytes, new.nodes), (Some(8 << 30), 2));
        assert_eq!(new.memory[1].nodes, [1]);
        assert!(new.memory[0].nodes.is_empty());
        assert_eq!(new.devices[0].place, BusPlace::Expander);
        assert_eq!(new.devices[1].place, BusPlace::Default);
        assert_eq!(new.viommu.as_deref(), Some("intel"));
    }

    #[test]
    fn files_and_variables_that_were_not_given_are_named() {
        assert_eq!(
            of_line("kvm -readconfig /etc/a.cfg -m ${MEM}").unread,
            ["/etc/a.cfg", "${MEM}"]
        );
        let new = libvirt("<domain><memory>VM_MEM</memory></domain>").unwrap();
        assert_eq!(new.unread, ["VM_MEM"]);
        assert_eq!(libvirt("<network/>"), None);
        assert_eq!(libvirt("<domain><memory>"), None);
    }
}
