//! PCI devices and groups as sysfs shows them, without interpretation.

use std::collections::BTreeMap;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use hostmem::text_at_most;

use super::{DevicesError, Places};

/// The longest file that is read: an attribute of sysfs has at most a page.
const MOST: u64 = 1 << 20;

/// A PCI device as sysfs shows it.
pub(super) struct Device {
    pub(super) address: String,
    /// Base class, sub-class, programming interface: `0xBBSSPP`.
    pub(super) class: u32,
    pub(super) vendor: u32,
    pub(super) device: u32,
    pub(super) group: Option<u32>,
    pub(super) unit: Option<String>,
    pub(super) node: Option<u32>,
    pub(super) driver: Option<String>,
    /// The name under which VFIO has it: `vfio0`.
    pub(super) vfio: Option<String>,
}

/// A group as sysfs shows it: its name, if it has one, and the devices in it with their drivers.
pub(super) struct Group {
    pub(super) name: Option<String>,
    /// Reserved regions of type `direct`, first and last address.
    pub(super) direct: Vec<(u64, u64)>,
    pub(super) members: Vec<(String, Option<String>)>,
}

/// All that sysfs shows.
pub(super) struct SysfsView {
    /// There is nothing at all.
    pub(super) hidden: bool,
    pub(super) devices: Vec<Device>,
    pub(super) groups: BTreeMap<u32, Group>,
    /// The driver `vfio-pci` is there.
    pub(super) vfio_pci: bool,
}

pub(super) fn read(places: &Places) -> Result<SysfsView, DevicesError> {
    let bus = places.sys.join("bus/pci");
    let mut devices: Vec<_> = names(&bus.join("devices"))?
        .into_iter()
        .filter_map(|address| device(&bus.join("devices"), address))
        .collect();
    // Domains of more than four digits come last.
    devices.sort_by(|a, b| {
        let key = |device: &Device| device.address.len();
        key(a).cmp(&key(b)).then_with(|| a.address.cmp(&b.address))
    });
    let mut groups = BTreeMap::new();
    for number in devices.iter().filter_map(|device| device.group) {
        if let std::collections::btree_map::Entry::Vacant(entry) = groups.entry(number) {
            let root = places.sys.join("kernel/iommu_groups");
            entry.insert(group(&root.join(number.to_string()))?);
        }
    }
    Ok(SysfsView {
        hidden: names(&places.sys)?.is_empty(),
        devices,
        groups,
        vfio_pci: bus.join("drivers/vfio-pci").is_dir(),
    })
}

/// The names in a directory, sorted; none when it is not there.
fn names(directory: &Path) -> Result<Vec<String>, DevicesError> {
    let failed = |source| DevicesError {
        path: directory.into(),
        source,
    };
    let entries = match fs::read_dir(directory) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(failed)?,
    };
    let mut names = Vec::new();
    for entry in entries {
        names.extend(entry.map_err(failed)?.file_name().into_string());
    }
    names.sort();
    Ok(names)
}

/// A device; `None` when it is gone.
fn device(devices: &Path, address: String) -> Option<Device> {
    let path = devices.join(&address);
    let vfio = names(&path.join("vfio-dev")).ok();
    Some(Device {
        class: number(&path.join("class"))?,
        vendor: number(&path.join("vendor"))?,
        device: number(&path.join("device"))?,
        group: target(&path.join("iommu_group")).and_then(|name| name.parse().ok()),
        unit: target(&path.join("iommu")),
        // -1 when the node is not known.
        node: text(&path.join("numa_node")).and_then(|node| node.parse().ok()),
        driver: target(&path.join("driver")),
        vfio: vfio.and_then(|names| names.into_iter().next()),
        address,
    })
}

fn group(path: &Path) -> Result<Group, DevicesError> {
    let devices = path.join("devices");
    let members = names(&devices)?.into_iter().map(|name| {
        let driver = target(&devices.join(&name).join("driver"));
        (name, driver)
    });
    let regions = text(&path.join("reserved_regions")).unwrap_or_default();
    Ok(Group {
        name: text(&path.join("name")),
        direct: regions.lines().filter_map(direct).collect(),
        members: members.collect(),
    })
}

/// `0x000000007b000000 0x000000007f7fffff direct`. Another type does not keep a device from user space.
///
/// Source: Linux `Documentation/ABI/testing/sysfs-kernel-iommu_groups`, `reserved_regions`.
fn direct(line: &str) -> Option<(u64, u64)> {
    let mut words = line.split_whitespace();
    let mut address = || u64::from_str_radix(words.next()?.strip_prefix("0x")?, 16).ok();
    let range = (address()?, address()?);
    (words.next()? == "direct").then_some(range)
}

fn text(path: &Path) -> Option<String> {
    let text = text_at_most(path, MOST).ok()?;
    Some(text.trim().into())
}

/// A number like `0x8086`.
fn number(path: &Path) -> Option<u32> {
    u32::from_str_radix(text(path)?.strip_prefix("0x")?, 16).ok()
}

/// The last name of what a link leads to.
fn target(link: &Path) -> Option<String> {
    let target: PathBuf = fs::read_link(link).ok()?;
    Some(target.file_name()?.to_str()?.into())
}
