//! The machine's PCI devices: which can be assigned, how, and with which steps.
//!
//! An IOMMU isolates groups of devices, not single devices. A group is never divided: a device can
//! be used when every device of its group is bound to a driver of VFIO, or to none, or to one that
//! leaves DMA to the owner of the group. A reason given for one device therefore names the others.
//!
//! Everything is read from sysfs and from the names of device nodes; nothing is opened or changed.
//!
//! Source: Linux `Documentation/driver-api/vfio.rst`, `Documentation/ABI/testing/sysfs-bus-pci`,
//! `Documentation/ABI/testing/sysfs-kernel-iommu_groups`.

mod judge;
mod ready;
mod sysfs;

use std::io;
use std::path::PathBuf;

use serde::Serialize;

pub use judge::{is_vfio, keeps};
pub use ready::NotReady;

/// Directories in which the kernel shows devices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Places {
    /// Mount point of sysfs.
    pub sys: PathBuf,
    /// Directory of the device nodes.
    pub dev: PathBuf,
}

impl Default for Places {
    /// `/sys` and `/dev`.
    fn default() -> Self {
        Self {
            sys: "/sys".into(),
            dev: "/dev".into(),
        }
    }
}

/// Failure to read what the kernel shows.
#[derive(Debug, thiserror::Error)]
#[error("cannot read {path}")]
pub struct DevicesError {
    /// The directory.
    pub path: PathBuf,
    /// Cause.
    pub source: io::Error,
}

/// All PCI devices.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct DevicesReport {
    /// Nothing is where sysfs should be: whether there are devices and units is not known.
    pub hidden: bool,
    /// `/dev/vfio/vfio` is there: containers of VFIO's type 1.
    pub vfio: bool,
    /// `/dev/iommu` is there: iommufd.
    pub iommufd: bool,
    /// The devices, by address.
    pub devices: Vec<DeviceReport>,
    /// The groups that they are in, by number.
    pub groups: Vec<GroupReport>,
}

/// One PCI device.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct DeviceReport {
    /// Domain, bus, device and function: `0000:00:05.0`.
    pub address: String,
    /// Class of the device, in words.
    pub class: String,
    /// Base class, sub-class and programming interface, six hexadecimal digits.
    pub class_code: String,
    /// Vendor and device, four hexadecimal digits each: `1b36:0010`.
    pub id: String,
    /// Its group; `None` when no IOMMU translates for it.
    pub group: Option<u32>,
    /// The IOMMU unit that translates for it: `dmar0`.
    pub unit: Option<String>,
    /// Its memory node, when the firmware tells.
    pub node: Option<u32>,
    /// The driver that it is bound to.
    pub driver: Option<String>,
    /// State: usable or not.
    pub state: DeviceState,
    /// The same in words, with the cause.
    pub reason: String,
    /// Ways to use it now.
    pub ways: Vec<Way>,
    /// Its own node, for iommufd: `/dev/vfio/devices/vfio0`.
    pub cdev: Option<PathBuf>,
}

/// State of a device: ready for use or not.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum DeviceState {
    /// Now.
    Ready,
    /// When it, or others of its group, have been bound to another driver.
    Bind,
    /// Its drivers are right, but there is no device node for it.
    NoNode,
    /// Firmware demands an identity mapping for its group, with which Linux refuses it to user space.
    Identity,
    /// It is a bridge: it stays with the host, even when the devices behind it are given away.
    Bridge,
    /// No IOMMU translates for it.
    #[default]
    NoIommu,
}

/// A way to use a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Way {
    /// Its group, in a container of VFIO's type 1.
    Type1,
    /// Its group, in an open `/dev/iommu` that plays the container.
    Compatibility,
    /// Its own node, bound to iommufd.
    Iommufd,
}

impl Way {
    /// `vfio`, `vfio on iommufd`, `iommufd`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Type1 => "vfio",
            Self::Compatibility => "vfio on iommufd",
            Self::Iommufd => "iommufd",
        }
    }
}

/// A group.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct GroupReport {
    /// Its number.
    pub group: u32,
    /// VFIO can have it: no driver does DMA for one of its devices.
    pub viable: bool,
    /// It is only called a group: there is no IOMMU, and its device reaches all memory.
    pub no_iommu: bool,
    /// All that is in it, also from other buses.
    pub members: Vec<Member>,
    /// Reserved regions of type `direct`, first and last address: firmware demands that they stay mapped to
    /// themselves, so that Linux refuses all of the group to user space. `direct-relaxable` ones are not among them.
    pub direct: Vec<(u64, u64)>,
    /// Commands for root, in order, after which all of it can be used.
    pub bind: Vec<String>,
}

/// A device of a group.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Member {
    /// Its name on its bus.
    pub name: String,
    /// The driver that it is bound to.
    pub driver: Option<String>,
    /// The driver does DMA, which keeps VFIO from the whole group.
    pub blocks: bool,
}

impl DevicesReport {
    /// Reads what the kernel shows. A machine without a PCI bus has no devices, which is no error.
    ///
    /// # Errors
    ///
    /// When a directory that is there cannot be read. A device that goes away meanwhile is left
    /// out, or shown without what is not known of it.
    pub fn read(places: &Places) -> Result<Self, DevicesError> {
        Ok(judge::judge(sysfs::read(places)?, places))
    }

    /// The memory node of a group: of its first device, by address, of which one is known.
    pub fn node_of_group(&self, group: u32) -> Option<u32> {
        let inside = self
            .devices
            .iter()
            .filter(|device| device.group == Some(group));
        inside.filter_map(|device| device.node).next()
    }
}
