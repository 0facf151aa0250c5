//! The description of a virtual machine: its memory, how it is backed, and how devices are given to it.
//!
//! It is read from what a monitor maps, which QEMU's command line completes, or before the start from QEMU's
//! command line or libvirt's XML.

mod error;
mod host;
mod libvirt;
mod process;
mod qemu;

use std::ops::RangeInclusive;

use dmaspace::devices::{DevicesReport, Places};
use dmaspace::topology::{MOST_CPUS, MOST_MEMORY};
use hostmem::ThpMode;
use serde::Serialize;

use super::process::plain;
use crate::devices::Names;
use crate::size::is_page;

use error::ConfigError;
pub use host::Host;
use host::pool_by_name;
pub use libvirt::libvirt;
pub(crate) use libvirt::libvirt_rough;
pub use process::of_areas;
pub(super) use process::of_process;
pub use qemu::qemu_line;
use qemu::{added, has_variable};
pub(crate) use qemu::{begins, logged, memory_arguments, qemu_rough};

/// A transparent huge page.
pub(super) const THP: u64 = 2 << 20;
/// A page of the largest pools.
pub(super) const GIANT: u64 = 1 << 30;
/// A small page.
pub(super) const SMALL: u64 = 4096;

/// Files and variables that are kept.
const MOST_UNREAD: usize = 64;
/// Numbers of processors and threads.
const CPUS: RangeInclusive<u64> = 1..=MOST_CPUS as u64;

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
                self.ignore(&crate::output::sentence(&error));
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

#[cfg(test)]
mod tests {
    use super::Guest;
    use crate::inspect::StartReport;
    use crate::inspect::start::tests::{HOST, speeds};
    use crate::size::is_page;

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
}
