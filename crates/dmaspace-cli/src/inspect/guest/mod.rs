//! The description of a virtual machine: its memory, how it is backed, and how devices are given to it.
//!
//! It is read from what a monitor maps, which QEMU's command line completes, or before the start from QEMU's
//! command line or libvirt's XML.

mod libvirt;
mod process;
mod qemu;

use std::ops::RangeInclusive;
use std::path::Path;

use dmaspace::devices::{DevicesReport, Places};
use dmaspace::topology::{MOST_CPUS, MOST_MEMORY};
use hostmem::{ThpMode, text_at_most};
use serde::Serialize;
use thiserror::Error;

use super::process::{MOST_TEXT, plain};
use crate::devices::Names;
use crate::size::{self, SizeError};

pub use libvirt::libvirt;
pub(crate) use libvirt::libvirt_rough;
pub use process::of_areas;
pub(super) use process::of_process;
pub use qemu::qemu_line;
use qemu::{added, has_variable};
pub(crate) use qemu::{begins, logged, memory_arguments, qemu_rough};

/// Where hugetlbfs files lie: `HUGETLBFS_MAGIC` of `include/uapi/linux/magic.h`.
const HUGETLBFS: u32 = 0x9584_58f6;
/// A transparent huge page.
pub(super) const THP: u64 = 2 << 20;
/// A page of the largest pools.
pub(super) const GIANT: u64 = 1 << 30;
/// A small page.
pub(super) const SMALL: u64 = 4096;

/// A page of the largest pool that there is, of Arm and POWER: Linux `Documentation/arch/arm64/hugetlbpage.rst` and
/// `arch/powerpc/mm/book3s64/hash_utils.c`.
const LARGEST: u64 = 16 << 30;
/// Files and variables that are kept.
const MOST_UNREAD: usize = 64;
/// Numbers of processors and threads.
const CPUS: RangeInclusive<u64> = 1..=MOST_CPUS as u64;

/// True for a size that pages have.
pub(super) fn is_page(bytes: u64) -> bool {
    bytes.is_power_of_two() && (SMALL..=LARGEST).contains(&bytes)
}

/// A virtual machine.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Guest {
    /// The monitor that runs it.
    pub monitor: Monitor,
    /// Its name, where it has one.
    pub name: Option<String>,
    /// Its processors; 0 is unknown.
    pub cpus: u32,
    /// Its memory.
    pub memory: Vec<Ram>,
    /// How VFIO maps for its devices; `None` when no device is given to it.
    pub interface: Option<Interface>,
    /// The host's devices that are given to it.
    pub devices: Vec<GivenDevice>,
    /// The model of its virtual IOMMU, with which each device has an address space of its own.
    pub viommu: Option<String>,
    /// The technology that keeps its memory from the host, which maps its pages in pieces as they are shared.
    pub confidential: Option<String>,
    /// Memory that is mapped more than once while it starts.
    pub remapped: Option<Remapped>,
    /// The version of QEMU that the machine's type names, major and minor: the monitor is of this one or a newer one.
    pub machine_version: Option<(u32, u32)>,
    /// The machine is QEMU's `virt`, of Arm or RISC-V.
    #[serde(skip)]
    pub virt: bool,
    /// Memory devices that are plugged and mapped in blocks.
    #[serde(skip)]
    pub blocks: Vec<Blocks>,
    /// Its monitor is known to give iommufd shared memory by its file (`IOMMU_IOAS_MAP_FILE`): QEMU from 10.1 on.
    pub by_file: bool,
    /// Mediated devices by name: they pin on demand, not all memory.
    pub mediated: Vec<String>,
    /// The limit of the monitor's memory that libvirt sets, and that of locked memory with it, bytes.
    pub hard_limit_bytes: Option<u64>,
    /// All memory is locked, which faults it in.
    pub locked: bool,
    /// Memory nodes that it sees with memory of their own.
    #[serde(skip)]
    pub nodes: usize,
    /// Files and variables whose content was not given.
    pub unread: Vec<String>,
    /// Options are in files that were not given, so that nothing is known from the absence of one.
    #[serde(skip)]
    pub elsewhere: bool,
    /// Contiguous physical ranges of its memory; 0 is unknown. A report has them beside the guest.
    #[serde(skip)]
    pub runs: u64,
    /// Settings that are not part of the estimate.
    pub ignored: Vec<String>,
}

/// Memory below 4 GiB of a PC in QEMU. VFIO has all of it as one range, or as two around the ranges below 1 MiB
/// that the chipset shows as ROM or as RAM, so each change of these unmaps it and maps it again.
///
/// Counted with `-trace 'vfio_listener*'` in QEMU 10.0: the device itself maps it, the reset of the machine maps it
/// again, and SeaBIOS does three times. OVMF does not.
/// Source of the sizes: `pc_q35_init` and `pc_init1`, `hw/i386/pc_q35.c` and `pc_piix.c`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Remapped {
    /// Its bytes: the first ones of the memory.
    pub bytes: u64,
    /// How often it is mapped.
    pub times: u32,
}

impl Remapped {
    /// Returns the remapped memory of a machine with so much memory; `None` if it is no PC. `most` is
    /// `max-ram-below-4g`.
    fn of(machine: &str, ovmf: bool, memory: u64, most: Option<u64>) -> Option<Self> {
        const GIB: u64 = 1 << 30;
        let machine = machine.split('+').next().unwrap_or_default();
        let is = |names: &[&str]| names.iter().any(|name| machine.starts_with(name));
        let (from, below) = if is(&["q35", "pc-q35-"]) {
            (11 * GIB / 4, 2 * GIB)
        } else if machine == "pc" || is(&["pc-i440fx-"]) {
            (7 * GIB / 2, 3 * GIB)
        } else {
            return None;
        };
        let bytes = if memory >= from { below } else { memory };
        Some(Self {
            bytes: bytes.min(most.unwrap_or(u64::MAX)),
            times: if ovmf { 2 } else { 5 },
        })
    }
}

/// A memory device whose memory is plugged in blocks: virtio-mem.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Blocks {
    /// Its largest size; 0 is unknown.
    pub bytes: u64,
    /// Bytes that the guest is asked to plug.
    pub requested_bytes: u64,
    /// Bytes of a block; `None` where the monitor chooses.
    pub block_bytes: Option<u64>,
}

/// A device of the host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct GivenDevice {
    /// Its address.
    pub address: String,
    /// Its name in the system's list of PCI devices.
    pub name: Option<String>,
    /// The driver in the monitor that has it.
    pub driver: DeviceDriver,
    /// The bus of the guest that it hangs on.
    #[serde(skip)]
    pub place: BusPlace,
}

impl From<String> for GivenDevice {
    fn from(address: String) -> Self {
        Self {
            address,
            name: None,
            driver: DeviceDriver::default(),
            place: BusPlace::default(),
        }
    }
}

/// A monitor's driver for a device of the host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum DeviceDriver {
    /// The guest has it.
    #[default]
    Vfio,
    /// QEMU has it as a disk, and maps by type 1 only: `util/vfio-helpers.c`.
    Nvme,
}

/// The end of a text that is not understood.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Reading {
    /// An error.
    #[default]
    Exact,
    /// A setting that is named as ignored: of a process, perhaps of a newer QEMU, and of a log.
    Rough,
}

/// The bus that a device hangs on, by its root.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BusPlace {
    /// The guest's own root bus.
    #[default]
    Root,
    /// The bus of an expander, which has a node.
    Expander,
    /// A bus that is not defined in what was given.
    Unknown,
}

/// Monitor of a virtual machine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Monitor {
    /// QEMU, by its own command line.
    Qemu,
    /// QEMU, which libvirt started.
    Libvirt,
    /// cloud-hypervisor.
    CloudHypervisor,
    /// Firecracker.
    Firecracker,
    /// Another one.
    #[default]
    Other,
}

impl Monitor {
    /// The monitor that a program is, by its path.
    pub(crate) fn of_program(path: &str) -> Option<Self> {
        match qemu::base_name(path) {
            "cloud-hypervisor" => Some(Self::CloudHypervisor),
            "firecracker" => Some(Self::Firecracker),
            "crosvm" => Some(Self::Other),
            _ => qemu::is_program(path).then_some(Self::Qemu),
        }
    }
}

/// How VFIO maps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Interface {
    /// A container of type 1.
    Type1,
    /// An I/O address space of iommufd.
    Iommufd,
}

/// A part of a guest's memory.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Ram {
    /// QEMU's name of the memory object, or the number of libvirt's cell.
    pub id: String,
    /// Its bytes.
    pub bytes: u64,
    /// Bytes of a page of the hugetlb pool that it is from; `None` when it is from none.
    pub pool_bytes: Option<u64>,
    /// Only the name of the file tells of a pool: no such file system is mounted here.
    pub pool_by_name: bool,
    /// It is mapped shared: a memfd or another file.
    pub shared: bool,
    /// The file, where it has a path.
    pub file: Option<String>,
    /// True if it asks for transparent huge pages, false if it refuses them.
    pub asks_for_huge: Option<bool>,
    /// Threads that fault it in before the guest runs; 0 leaves that to the guest and to pins.
    pub prealloc_threads: u32,
    /// The number of threads is configured, and not the monitor's choice.
    #[serde(skip)]
    pub threads_given: bool,
    /// Nodes of the host that it is from; none where any will do.
    pub host_nodes: Vec<u32>,
    /// Pages of other nodes are refused: `policy=bind`, `mode='strict'`.
    pub bound: bool,
    /// Properties of QEMU's memory object that are not modelled, as they are written.
    #[serde(skip)]
    pub properties: Vec<(String, String)>,
}

/// The version of QEMU that a machine's type names, which introduced it: `pc-q35-10.1`.
fn version(machine: &str) -> Option<(u32, u32)> {
    // Proxmox adds a version of its own: `pc-q35-9.0+pve1`.
    let machine = machine.split('+').next().unwrap_or_default();
    let (major, minor) = machine.rsplit('-').next()?.split_once('.')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

/// Variables of a template in a text: `${NAME}`, `{{ name }}`.
fn variables(text: &str) -> impl Iterator<Item = String> {
    [("${", "}"), ("{{", "}}")]
        .into_iter()
        .flat_map(move |(open, close)| {
            let parts = text.split(open).skip(1).take(16);
            let inside = parts.filter_map(move |part| Some(part.split_once(close)?.0));
            let named = inside.filter(|inside| !inside.contains('"') && inside.len() < 64);
            named.map(move |inside| plain(&format!("{open}{inside}{close}")))
        })
}

impl Guest {
    /// Notes that a device is given to it by VFIO. If there are several ways, type 1 counts, the slower one.
    fn give(&mut self, iommufd: bool, address: Option<String>) {
        self.interface = match (self.interface, iommufd) {
            (Some(Interface::Type1), _) | (_, false) => Some(Interface::Type1),
            (_, true) => Some(Interface::Iommufd),
        };
        self.devices.extend(address.map(GivenDevice::from));
    }

    /// Notes that QEMU drives this disk by VFIO.
    fn give_disk(&mut self, address: String) {
        self.give(false, None);
        self.devices.push(GivenDevice {
            driver: DeviceDriver::Nvme,
            ..address.into()
        });
    }

    /// True if its private memory is apart from its memory objects: `guest_memfd`, as all kinds have but those that
    /// encrypt memory of the host in place.
    pub(super) fn keeps_private_memory(&self) -> bool {
        let kind = self.confidential.as_deref();
        kind.is_some_and(|kind| !["SEV", "SEV-ES", "PEF", "s390-pv"].contains(&kind))
    }

    /// Notes the type of its machine.
    fn typed(&mut self, machine: &str) {
        self.machine_version = version(machine);
        self.virt = machine == "virt" || machine.starts_with("virt-");
        // `vfio_container_dma_map`, QEMU `hw/vfio/container-base.c`.
        self.by_file = self
            .machine_version
            .is_some_and(|version| version >= (10, 1));
    }

    /// Notes what was not given: a file, or the value of a variable.
    fn lacks(&mut self, what: &str) {
        let what = plain(what);
        if self.unread.len() < MOST_UNREAD && !self.unread.contains(&what) {
            self.unread.push(what);
        }
    }

    /// Names what was not understood as ignored, where it is not to be an error.
    fn or_named(
        &mut self,
        reading: Reading,
        read: Result<(), ConfigError>,
    ) -> Result<(), ConfigError> {
        match read {
            Err(error) if reading == Reading::Rough => {
                self.ignore(&error.to_string());
                Ok(())
            }
            read => read,
        }
    }

    /// Names a setting that is not part of the estimate.
    fn ignore(&mut self, setting: &str) {
        self.ignored.push(plain(setting));
    }

    /// Fills in the names of devices, as far as they are of this machine.
    pub(crate) fn name_devices(&mut self, names: &Names) {
        let known = match self.devices.is_empty() {
            true => return,
            false => DevicesReport::read(&Places::default()).unwrap_or_default(),
        };
        for device in &mut self.devices {
            let mut known = known.devices.iter();
            let id = known.find(|known| known.address == device.address);
            device.name = id.and_then(|known| names.of(&known.id));
        }
    }

    /// Judges by its name which of its files are of a pool: of another machine nothing else is known.
    pub(crate) fn name_pools(&mut self, default_pool: u64) {
        for ram in self
            .memory
            .iter_mut()
            .filter(|ram| ram.pool_bytes.is_none())
        {
            let file = ram.file.as_deref();
            ram.pool_bytes = file.and_then(|file| pool_by_name(file, default_pool));
        }
    }

    /// Bytes of its memory.
    pub(crate) fn bytes(&self) -> u64 {
        let parts = self.memory.iter().map(|ram| ram.bytes);
        parts.fold(0, u64::saturating_add)
    }

    /// The same; `None` where no part is known.
    pub(crate) fn known_bytes(&self) -> Option<u64> {
        Some(self.bytes()).filter(|bytes| *bytes > 0)
    }
}

/// A number in a range.
fn number(
    of: impl Into<String>,
    text: &str,
    range: &RangeInclusive<u64>,
) -> Result<u64, ConfigError> {
    let number = text.parse().ok().filter(|number| range.contains(number));
    number.ok_or_else(|| ConfigError::Number {
        of: of.into(),
        value: text.into(),
        least: *range.start(),
        most: *range.end(),
    })
}

/// How many processors or threads.
fn cpus(of: impl Into<String>, text: &str) -> Result<u32, ConfigError> {
    number(of, text, &CPUS).map(|cpus| cpus as u32)
}

/// Bytes of memory, at most `most`.
fn memory(of: impl Into<String>, bytes: u64, most: u64) -> Result<u64, ConfigError> {
    match bytes <= most {
        true => Ok(bytes),
        false => Err(ConfigError::Memory {
            of: of.into(),
            bytes,
            most,
        }),
    }
}

/// Bytes of a page.
fn page(of: impl Into<String>, bytes: u64) -> Result<u64, ConfigError> {
    match is_page(bytes) {
        true => Ok(bytes),
        false => Err(ConfigError::Pages {
            of: of.into(),
            bytes,
        }),
    }
}

impl Guest {
    /// It, if all of its memory together is as much as there can be.
    fn in_range(self) -> Result<Self, ConfigError> {
        memory("all memory", self.bytes(), MOST_MEMORY).map(|_| self)
    }
}

impl Ram {
    /// The size of the pages that the kernel gives it.
    pub(super) fn page_bytes(&self, host: &Host) -> u64 {
        let asks = self.asks_for_huge;
        // A mount of tmpfs has an option of its own, which is off by default.
        let mode = match (self.shared, self.file.is_some()) {
            (_, true) => ThpMode::Never,
            (true, false) => host.shared,
            (false, false) => host.private,
        };
        let huge = match mode {
            ThpMode::Always => asks != Some(false),
            ThpMode::Madvise => asks == Some(true),
            ThpMode::Never => false,
        };
        match self.pool_bytes {
            Some(bytes) => bytes,
            None if huge && self.bytes >= THP => THP,
            None => SMALL,
        }
    }
}

/// Settings of this machine that decide about a guest's pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Host {
    /// Which private memory gets transparent huge pages.
    pub private: ThpMode,
    /// Which shared memory does.
    pub shared: ThpMode,
    /// Bytes of a page of the pool that is used where no size is named.
    pub default_pool: u64,
}

impl Host {
    /// Reads sysfs; without a setting there are no transparent huge pages.
    pub(super) fn read() -> Self {
        let mode = |name: &str| {
            let sizes = ["hugepages-2048kB/", ""];
            let texts = sizes.iter().filter_map(|size| {
                let path = format!("/sys/kernel/mm/transparent_hugepage/{size}{name}");
                text_at_most(path, MOST_TEXT).ok()
            });
            let mut chosen = texts.filter_map(|text| {
                let word = text.split(['[', ']']).nth(1)?.to_owned();
                (word != "inherit").then_some(word)
            });
            match chosen.next().as_deref() {
                Some("always" | "within_size" | "force") => ThpMode::Always,
                Some("madvise" | "advise") => ThpMode::Madvise,
                _ => ThpMode::Never,
            }
        };
        let meminfo = text_at_most("/proc/meminfo", MOST_TEXT).unwrap_or_default();
        let pool = meminfo.lines().find_map(|line| {
            let kib = line
                .strip_prefix("Hugepagesize:")?
                .trim()
                .strip_suffix("kB")?;
            kib.trim().parse::<u64>().ok()?.checked_mul(1024)
        });
        Self {
            private: mode("enabled"),
            shared: mode("shmem_enabled"),
            default_pool: pool.filter(|bytes| is_page(*bytes)).unwrap_or(THP),
        }
    }

    /// Finds out which of the guest's files are of a hugetlb pool. A file system that is not mounted here is
    /// judged by its name.
    pub(super) fn look_at_files(&self, guest: &mut Guest) {
        for ram in &mut guest.memory {
            let Some(file) = ram.file.as_deref().filter(|_| ram.pool_bytes.is_none()) else {
                continue;
            };
            let mut places = Path::new(file).ancestors();
            let found = places.find_map(|place| Some((place, rustix::fs::statfs(place).ok()?)));
            ram.pool_bytes = match found {
                Some((_, found)) if found.f_type as u32 == HUGETLBFS => {
                    Some(found.f_bsize as u64).filter(|bytes| is_page(*bytes))
                }
                // `/dev/hugepages` is a plain directory where hugetlbfs is not mounted.
                Some((place, _))
                    if pool_part(&place.to_string_lossy()).is_some()
                        && !file.starts_with("/dev/hugepages") =>
                {
                    None
                }
                _ => {
                    let named = pool_by_name(file, self.default_pool);
                    ram.pool_by_name = named.is_some();
                    named
                }
            };
        }
    }
}

/// The part of a path that tells of a pool: from a folder on whose name begins so.
fn pool_part(path: &str) -> Option<&str> {
    let mut starts = path.match_indices('/').map(|(at, _)| at + 1);
    let begins = |part: &&str| {
        part.get(..4)
            .is_some_and(|name| name.eq_ignore_ascii_case("huge"))
    };
    starts.find_map(|at| path.get(at..).filter(begins))
}

/// Bytes of a page of the pool that a path names: `/dev/hugepages1G`, `/run/hugepages/kvm/2048kB`. `default_pool` is
/// that of a name without a size, and `None` is a path of no pool.
fn pool_by_name(path: &str, default_pool: u64) -> Option<u64> {
    // Numbers of the name, in KiB where they are so large.
    const SIZES: [(&str, u64); 7] = [
        ("1048576", 1 << 30),
        ("524288", 512 << 20),
        ("2048", 2 << 20),
        ("1G", 1 << 30),
        ("512M", 512 << 20),
        ("32M", 32 << 20),
        ("2M", 2 << 20),
    ];
    let part = pool_part(path)?.to_ascii_uppercase();
    let named = SIZES.iter().find(|(name, _)| part.contains(name));
    Some(named.map_or(default_pool, |(_, bytes)| *bytes))
}

/// Why a machine's configuration cannot be understood.
#[derive(Debug, Error)]
pub enum ConfigError {
    /// A quote does not close.
    #[error("the command line has a quote that does not close")]
    Quotes,
    /// The first word names another program.
    #[error(
        "{program:?} is not QEMU: the command line begins with qemu-system-ARCH, qemu-kvm or kvm"
    )]
    NotQemu {
        /// Its name.
        program: String,
    },
    /// An option of another program.
    #[error("-{option} is not an option of QEMU")]
    Option {
        /// Without `-`.
        option: String,
    },
    /// A word that begins with another character than the hyphen, as text processors write it.
    #[error("{word:?} begins with a dash that is no hyphen; an option begins with -")]
    Dash {
        /// The word.
        word: String,
    },
    /// The last option.
    #[error("-{option} needs a value")]
    NoValue {
        /// The option.
        option: String,
    },
    /// A size that is none.
    #[error("{of}: {value:?} is no size")]
    Size {
        /// The option or element.
        of: String,
        /// Its value.
        value: String,
        /// Why.
        source: SizeError,
    },
    /// A value that is not known.
    #[error("{of}: {value:?} is not known; known are {known}")]
    Value {
        /// The option or element.
        of: String,
        /// Its value.
        value: String,
        /// The known values.
        known: &'static str,
    },
    /// A number that is none, or out of its range.
    #[error("{of}: {value:?} is no number from {least} to {most}")]
    Number {
        /// The option or element.
        of: String,
        /// Its value.
        value: String,
        /// The smallest.
        least: u64,
        /// The largest.
        most: u64,
    },
    /// More memory than there can be.
    #[error("{of}: {} is more than {}", size::bytes(*.bytes), size::bytes(*.most))]
    Memory {
        /// The option or element.
        of: String,
        /// Its value; 64 bits at most.
        bytes: u64,
        /// The most.
        most: u64,
    },
    /// Pages of no size that pages have.
    #[error("{of}: {} is no size of pages, which have a power of two from {} to {}",
        size::bytes(*.bytes), size::bytes(SMALL), size::bytes(LARGEST))]
    Pages {
        /// The option or element.
        of: String,
        /// Its value.
        bytes: u64,
    },
    /// No address of a PCI device.
    #[error("{of}: {value:?} is no PCI address like 0000:01:00.0")]
    Address {
        /// The option or element.
        of: String,
        /// Its value.
        value: String,
    },
    /// More of something than there can be.
    #[error("there are more than {most} of {of}")]
    Many {
        /// The element.
        of: String,
        /// The most.
        most: usize,
    },
    /// An object's properties are no JSON.
    #[error("-{option}: the value is damaged JSON")]
    Json {
        /// The option.
        option: String,
        /// Where.
        source: serde_json::Error,
    },
    /// A memory object is used and not defined.
    #[error("memory object {id:?} is used, and no -object defines it")]
    NoObject {
        /// Its name.
        id: String,
    },
    /// The memory is not on the line.
    #[error("the line says nothing of memory, and {variable} stands for options that may")]
    Elsewhere {
        /// The variable.
        variable: String,
    },
    /// The text is no XML.
    #[error("the XML is damaged near byte {at}")]
    Xml {
        /// Where.
        at: u64,
        /// The error in the XML.
        source: quick_xml::Error,
    },
    /// The root is another element.
    #[error("the root element is <{found}>; libvirt's is <domain>")]
    NotADomain {
        /// Its name.
        found: String,
    },
    /// More than one document.
    #[error("the XML has a second root element, <{found}>")]
    SecondRoot {
        /// Its name.
        found: String,
    },
    /// Elements within elements.
    #[error("elements are nested deeper than {most}")]
    Deep {
        /// As deep as is read.
        most: usize,
    },
    /// There is no memory.
    #[error("there is no <memory> with a size")]
    NoMemory,
}

#[cfg(test)]
mod tests {
    use super::{Guest, is_page, pool_by_name};
    use crate::inspect::StartReport;
    use crate::inspect::start::tests::{HOST, speeds};

    /// Numbers at the borders of ranges.
    pub(super) const NUMBERS: [u64; 12] = [
        0,
        1,
        2,
        3,
        64,
        255,
        1 << 10,
        1 << 16,
        1 << 32,
        1 << 56,
        1 << 63,
        u64::MAX,
    ];

    /// Predicts for a machine that was understood.
    pub(super) fn predict(guest: &Guest) {
        let sizes = guest.memory.iter().map(|ram| ram.page_bytes(&HOST));
        assert!(sizes.clone().all(is_page), "{guest:?}");
        for speeds in [None, Some(&speeds())] {
            let (report, _) = StartReport::of(guest, &HOST, None, speeds);
            assert!(report.pages <= guest.bytes() / 4096 + guest.memory.len() as u64);
        }
    }

    #[test]
    fn pools_are_known_by_name() {
        for (path, page) in [
            ("/dev/hugepages", Some(4096)),
            ("/dev/hugepages1G/libvirt", Some(1 << 30)),
            ("/run/hugepages/kvm/1048576kB", Some(1 << 30)),
            ("/run/hugepages/kvm/2048kB", Some(2 << 20)),
            ("/hugepages2M/", Some(2 << 20)),
            ("/mnt/huge", Some(4096)),
            ("/mnt/huge1g/vm", Some(1 << 30)),
            ("/mnt/Huge_1GB", Some(1 << 30)),
            ("/home/u/vm-1G-huge.img", None),
            ("/home/u1G/hugepages", Some(4096)),
            ("/dev/shm/1G", None),
        ] {
            assert_eq!(pool_by_name(path, 4096), page, "{path}");
        }
    }

    #[test]
    fn pages_are_powers_of_two_up_to_the_largest() {
        for bytes in [4 << 10, 64 << 10, 2 << 20, 512 << 20, 1 << 30, 16 << 30] {
            assert!(is_page(bytes), "{bytes}");
        }
        for bytes in [0, 1, 2048, 12 << 10, 3 << 20, 32 << 30, u64::MAX] {
            assert!(!is_page(bytes), "{bytes}");
        }
    }
}
