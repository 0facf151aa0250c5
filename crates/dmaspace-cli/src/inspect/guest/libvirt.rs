//! libvirt's XML of a domain: the elements that decide about memory and VFIO.
//!
//! Source: libvirt `docs/formatdomain.rst`, "Memory Backing", "NUMA Node Tuning", "Host device assignment";
//! memory of a pool is brought in at the start (`qemuBuildMemoryBackendProps` of `src/qemu/qemu_command.c`),
//! by QEMU with as many threads as the guest has processors, unless a number is given.

use std::borrow::Cow;

use quick_xml::Reader;
use quick_xml::events::{BytesStart, Event};

use super::{ConfigError, Guest, Interface, Monitor, Ram, Remapped, maps_by_file};
use crate::inspect::process::plain;

/// Elements within elements; libvirt has fewer than ten.
const DEEPEST: usize = 64;

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
    pages: Vec<(u64, Option<String>)>,
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
        let unit = || get("unit").unwrap_or("KiB").to_owned();
        let known = |name, known: &'static str| match get(name) {
            Some(value) if !known.split(", ").any(|one| one == value) => Err(ConfigError::Value {
                of: format!("{path} {name}"),
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
                let size = bytes(path, get("size").unwrap_or_default(), &unit())?;
                self.pages.push((size, get("nodeset").map(Into::into)));
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
                let threads = get("threads").map(|text| number(path, text)).transpose()?;
                self.threads = threads.map(|threads| u32::try_from(threads).unwrap_or(u32::MAX));
            }
            "/domain/cpu/numa/cell" => {
                let size = get("memory").unwrap_or_default();
                let id = get("id").map_or_else(|| self.cells.len().to_string(), Into::into);
                let shared = known("memAccess", "private, shared")?;
                self.cells_shared.push(shared.map(|mode| mode == "shared"));
                self.cells.push(Ram {
                    id,
                    bytes: bytes(path, size, &unit())?,
                    ..Ram::default()
                });
            }
            "/domain/iommufd" => self.iommufd = get("enabled") == Some("yes"),
            "/domain/devices/memory" => {
                let model = get("model").unwrap_or("without a model");
                self.module = model == "dimm";
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
                let part = |name, zero: &'static str| {
                    let text = get(name).unwrap_or(zero);
                    text.strip_prefix("0x").unwrap_or(text)
                };
                if let Some(iommufd) = self.device {
                    let address = format!(
                        "{:0>4}:{:0>2}:{:0>2}.{}",
                        part("domain", "0"),
                        part("bus", "0"),
                        part("slot", "0"),
                        part("function", "0")
                    );
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
            "/domain/vcpu" => {
                self.guest.cpus = u32::try_from(number(path, text)?).unwrap_or(u32::MAX);
            }
            "/domain/memory" => self.memory = Some(bytes(path, text, &self.unit)?),
            "/domain/devices/memory/target/size" if self.module => {
                if let Some(module) = self.modules.last_mut() {
                    module.bytes = bytes(path, text, &self.unit)?;
                }
            }
            _ => {}
        }
        Ok(())
    }

    fn guest(mut self) -> Result<Guest, ConfigError> {
        if self.cells.is_empty() {
            let bytes = self.memory.ok_or(ConfigError::NoMemory)?;
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
        Ok(self.guest)
    }

    /// The pool of a cell: one that names it, else one that names no cell.
    fn pool(&self, cell: &str) -> Option<u64> {
        let cell = cell.parse().unwrap_or(0);
        let named = |(_, nodes): &&(u64, Option<String>)| {
            nodes.as_deref().is_some_and(|nodes| holds(nodes, cell))
        };
        let open = |(_, nodes): &&(u64, Option<String>)| nodes.is_none();
        let page = self
            .pages
            .iter()
            .find(named)
            .or(self.pages.iter().find(open));
        match page {
            Some((bytes, _)) => Some(*bytes),
            None => (self.huge && self.pages.is_empty()).then_some(self.default_pool),
        }
    }
}

/// True when `0-3,^2,7` holds the number.
fn holds(set: &str, number: u64) -> bool {
    let within = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let bounds = (first.trim().parse(), last.trim().parse());
        matches!(bounds, (Ok(first), Ok(last)) if (first..=last).contains(&number))
    };
    let excluded = |part: &str| part.trim().strip_prefix('^').is_some_and(within);
    set.split(',').any(within) && !set.split(',').any(excluded)
}

fn number(of: &str, text: &str) -> Result<u64, ConfigError> {
    text.parse().map_err(|_| ConfigError::Value {
        of: of.into(),
        value: plain(text),
        known: "numbers",
    })
}

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
    number(of, text)?
        .checked_mul(scale)
        .ok_or_else(|| ConfigError::Value {
            of: of.into(),
            value: plain(text),
            known: "sizes below 16 EiB",
        })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const POOL: u64 = 2 << 20;

    const CELLS: &str = "<domain><memory>9437184</memory>
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
        let guest = libvirt(CELLS, POOL).unwrap();
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
            let mut good = CELLS.as_bytes().to_vec();
            for (at, byte) in changes {
                let at = at.index(good.len());
                good[at] = byte;
            }
            if let Ok(guest) = libvirt(&String::from_utf8(good).unwrap(), POOL) {
                prop_assert!(guest.memory.len() <= 4);
            }
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
                "/domain/memory: \"much\" is not known; known are numbers",
            ),
            (
                "<memory unit='TiB'>18446744073709551615</memory>",
                "/domain/memory: \"18446744073709551615\" is not known; known are sizes below 16 EiB",
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
