//! Check that one device can be used in one way now; otherwise the obstacle.

use super::{DeviceReport, DeviceState, DevicesReport, Way};

/// Obstacle to the use of a device. Nothing was opened or changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NotReady {
    /// There is no such device.
    #[error("no PCI device has the address {address:?}; `dmaspace devices` lists those there are")]
    Unknown {
        /// The requested address.
        address: String,
    },
    /// It is a bridge, firmware demands an identity mapping for it, or no IOMMU translates for it.
    #[error("{address} cannot be given to a program: {reason}")]
    Never {
        /// Its address.
        address: String,
        /// Reason, in words.
        reason: String,
    },
    /// The kernel has not the interface, or its module is not there.
    #[error("there is no {path}: `modprobe {module}`, or a kernel that has it, is needed first")]
    NoInterface {
        /// The device node that is missing.
        path: &'static str,
        /// The module that makes it.
        module: &'static str,
    },
    /// It, or others of its group, are bound to drivers of the host.
    #[error("{address} cannot be used yet: {reason}{}; as root: {}",
            together(*.group, .members), .commands.join(" && "))]
    Bind {
        /// Its address.
        address: String,
        /// Devices of the group with their drivers, in words.
        reason: String,
        /// Its group.
        group: u32,
        /// All that is in the group, and is given away together.
        members: Vec<String>,
        /// Commands after which it can be used.
        commands: Vec<String>,
    },
    /// It is bound, but there is no device node for this way.
    #[error("{address} is bound to VFIO, but has no node {node}")]
    NoNode {
        /// Its address.
        address: String,
        /// The node, and where it would come from.
        node: String,
    },
}

/// Clause for a group of more than one device.
fn together(group: u32, members: &[String]) -> String {
    match members {
        [] | [_] => String::new(),
        many => format!(
            "; group {group} is passed through as a whole: {}",
            many.join(", ")
        ),
    }
}

impl DevicesReport {
    /// The device at `address` (`0000:00:05.0`, or `00:05.0` in domain 0), if it can be used in this
    /// way now.
    ///
    /// # Errors
    ///
    /// See [`NotReady`]; the cause that would stay longest is named first.
    pub fn ready(&self, address: &str, way: Way) -> Result<&DeviceReport, NotReady> {
        let asked = address.to_ascii_lowercase();
        let is_it = |shown: &&DeviceReport| {
            let short = shown.address.strip_prefix("0000:");
            shown.address == asked || short == Some(&asked)
        };
        let device = self.devices.iter().find(is_it);
        let device = device.ok_or_else(|| NotReady::Unknown {
            address: address.into(),
        })?;
        if device.ways.contains(&way) {
            return Ok(device);
        }
        let address = device.address.clone();
        let reason = device.reason.clone();
        let (there, path, module) = match way {
            Way::Type1 => (self.vfio, "/dev/vfio/vfio", "vfio-pci"),
            Way::Compatibility | Way::Iommufd => (self.iommufd, "/dev/iommu", "iommufd"),
        };
        Err(match device.state {
            DeviceState::Bridge | DeviceState::Identity => NotReady::Never { address, reason },
            DeviceState::NoIommu => NotReady::Never {
                address,
                reason: format!("{reason}; `dmaspace devices` lists the missing steps"),
            },
            _ if !there => NotReady::NoInterface { path, module },
            DeviceState::Bind => {
                let group = device.group.unwrap_or_default();
                let known = self.groups.iter().find(|known| known.group == group);
                let members = known.map_or(&[][..], |known| &known.members);
                NotReady::Bind {
                    address,
                    reason,
                    group,
                    members: members.iter().map(|member| member.name.clone()).collect(),
                    commands: known.map_or_else(Vec::new, |known| known.bind.clone()),
                }
            }
            DeviceState::Ready | DeviceState::NoNode => NotReady::NoNode {
                address,
                node: match (way, device.group) {
                    (Way::Type1 | Way::Compatibility, Some(group)) => format!("/dev/vfio/{group}"),
                    _ => "of its own below /dev/vfio/devices (Linux 6.6, \
                          CONFIG_VFIO_DEVICE_CDEV)"
                        .into(),
                },
            },
        })
    }
}
