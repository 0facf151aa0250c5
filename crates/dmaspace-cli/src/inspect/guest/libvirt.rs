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
    ConfigError, Guest, Interface, Monitor, Ram, Remapped, SMALL, cpus, maps_by_file, memory,
    number, page,
};
use crate::inspect::process::plain;

/// Elements within elements; libvirt has fewer than ten.
const DEEPEST: usize = 64;
/// The most cells, and of what is kept for each of several elements.
const MOST: usize = MOST_NODES;
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
            Event::Text(part) => inner += &text_of(&part),
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
    shared: bool,
    /// Memory is brought in before the guest runs, by so many threads.
    immediate: bool,
    threads: Option<u32>,
    cells: Vec<Ram>,
    cells_shared: Vec<Option<bool>>,
    modules: Vec<Ram>,
    /// The type of the machine, and whether its firmware is in flash.
    kind: String,
    flash: bool,
    /// The `<memory>` of a device that is open is a module.
    module: bool,
    /// All devices use iommufd.
    iommufd: bool,
    /// The device whose element is open: a PCI device, by iommufd.
    device: Option<bool>,
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
            "/domain/memory" | "/domain/devices/memory/target/size" => self.unit = unit(),
            "/domain/os" => self.flash |= get("firmware") == Some("efi"),
            "/domain/os/loader" => self.flash |= get("type") == Some("pflash"),
            "/domain/os/type" => self.kind = get("machine").unwrap_or_default().to_owned(),
            "/domain/memoryBacking/hugepages" => self.huge = true,
            "/domain/memoryBacking/hugepages/page" => {
                let bytes = bytes(&of("size"), get("size").unwrap_or_default(), &unit())?;
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
                self.shared = known("mode", "private, shared")? == Some("shared");
            }
            "/domain/memoryBacking/allocation" => {
                let mode = known("mode", "immediate, ondemand")?;
                self.immediate = mode == Some("immediate");
                let threads = get("threads").map(|text| cpus(of("threads"), text));
                self.threads = threads.transpose()?;
            }
            "/domain/cpu/numa/cell" => {
                let bytes = bytes(&of("memory"), get("memory").unwrap_or_default(), &unit())?;
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
                match self.module {
                    true => self.modules.push(Ram::default()),
                    false => self.guest.ignored.push(format!("<memory> {model}")),
                }
            }
            "/domain/devices/hostdev" => {
                self.device = (get("type") == Some("pci")).then_some(self.iommufd);
            }
            "/domain/devices/hostdev/driver" => {
                if let (Some(device), Some(how)) = (&mut self.device, known("iommufd", "yes, no")?)
                {
                    *device = how == "yes";
                }
            }
            "/domain/devices/hostdev/source/address" => {
                let part = |name, most| based(of(name), get(name).unwrap_or("0"), &(0..=most));
                if let Some(iommufd) = self.device {
                    one_more(path, &self.guest.devices)?;
                    let (domain, bus) = (part("domain", u32::MAX.into())?, part("bus", 0xff)?);
                    let (slot, function) = (part("slot", 0x1f)?, part("function", 7)?);
                    let address = format!("{domain:04x}:{bus:02x}:{slot:02x}.{function}");
                    self.guest.devices.push(address.into());
                    // Type 1 is the slower one.
                    self.guest.interface = match (self.guest.interface, iommufd) {
                        (Some(Interface::Type1), _) | (_, false) => Some(Interface::Type1),
                        (_, true) => Some(Interface::Iommufd),
                    };
                }
            }
            _ => {}
        }
        Ok(())
    }

    fn text(&mut self, path: &str, text: &str) -> Result<(), ConfigError> {
        match path {
            "/domain/name" => self.guest.name = Some(plain(text)),
            "/domain/vcpu" => self.guest.cpus = cpus(path, text)?,
            "/domain/memory" => {
                let bytes = bytes(path, text, &self.unit)?;
                self.memory = Some(memory(path, bytes, MOST_MEMORY)?);
            }
            "/domain/devices/memory/target/size" if self.module => {
                if let Some(module) = self.modules.last_mut() {
                    let bytes = bytes(path, text, &self.unit)?;
                    module.bytes = memory(path, bytes, MOST_MEMORY)?;
                }
            }
            _ => {}
        }
        Ok(())
    }

    fn guest(mut self) -> Result<Guest, ConfigError> {
        if self.cells.is_empty() {
            let bytes = self.memory.filter(|bytes| *bytes > 0);
            let bytes = bytes.ok_or(ConfigError::NoMemory)?;
            self.cells.push(Ram {
                bytes,
                ..Ram::default()
            });
            self.cells_shared.push(None);
        }
        let begins = self.cells.iter().map(|cell| cell.bytes);
        let begins = begins.fold(0, u64::saturating_add);
        self.guest.by_file = maps_by_file(&self.kind);
        self.guest.remapped = Remapped::of(&self.kind, self.flash, begins, None);
        let modules = std::mem::take(&mut self.modules);
        let cells = std::mem::take(&mut self.cells)
            .into_iter()
            .zip(&self.cells_shared);
        let all: Vec<_> = cells.map(|(ram, shared)| (ram, *shared)).collect();
        let modules = modules.into_iter().map(|ram| (ram, None));
        for (mut ram, shared) in all.into_iter().chain(modules) {
            ram.pool_bytes = self.pool(&ram.id);
            ram.shared = shared.unwrap_or(self.shared) || self.source.as_deref() == Some("memfd");
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
fn bytes(of: &str, text: &str, unit: &str) -> Result<u64, ConfigError> {
    let scale: u64 = match unit {
        "b" | "bytes" => 1,
        "KB" => 1000,
        "k" | "KiB" => 1 << 10,
        "MB" => 1000 * 1000,
        "M" | "MiB" => 1 << 20,
        "GB" => 1000 * 1000 * 1000,
        "G" | "GiB" => 1 << 30,
        "TB" => 1000 * 1000 * 1000 * 1000,
        "T" | "TiB" => 1 << 40,
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
