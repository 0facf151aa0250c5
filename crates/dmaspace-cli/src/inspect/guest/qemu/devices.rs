//! Devices of the host in QEMU's options.

use super::super::{Blocks, ConfigError};
use super::ParsedOptions;
use super::command::base_name;
use super::value::{Pairs, address, bytes, has_variable, host_address};
use crate::inspect::process::plain;

impl ParsedOptions {
    /// Takes a device.
    pub(super) fn device(&mut self, mut pairs: Pairs) -> Result<(), ConfigError> {
        let driver = pairs.remove("driver").unwrap_or_default();
        self.buses.add(&driver, &pairs);
        match driver.as_str() {
            "vfio-pci" | "vfio-pci-nohotplug" | "vfio-ap" | "vfio-ccw" => {
                let host = match pairs.remove("host") {
                    Some(host) if has_variable(&host) => {
                        self.guest.ignore(&format!("{driver}: the device {host}"));
                        self.guest.give(pairs.contains_key("iommufd"), None);
                        return Ok(());
                    }
                    Some(host) => Some(host_address(&format!("device {driver}, host"), &host)?),
                    None => None,
                };
                // A PCI device's folder has the name of its address, that of a mediated one its UUID.
                let folder = pairs.remove("sysfsdev");
                let folder = folder
                    .as_deref()
                    .map(|path| base_name(path.trim_end_matches('/')));
                let host = host.or_else(|| folder.and_then(address));
                if host.is_none() {
                    let id = pairs
                        .get("id")
                        .map(|id| format!(" {id}"))
                        .unwrap_or_default();
                    let text = match (folder, pairs.get("fd")) {
                        (Some(name), _) => {
                            self.guest.mediated.push(plain(name));
                            format!("{driver}{id}: mediated device {name}, which pins on demand")
                        }
                        (None, Some(fd)) => format!("{driver}{id}: a device by fd={fd}"),
                        (None, None) => format!("{driver}{id}: no device is named"),
                    };
                    self.guest.ignore(&text);
                }
                if host.is_some() {
                    let at = self.guest.devices.len();
                    self.buses.hang(at, pairs.remove("bus"));
                }
                self.guest.give(pairs.contains_key("iommufd"), host);
            }
            // Devices of the platform's bus.
            name if name.starts_with("vfio-") && !name.starts_with("vfio-user") => {
                let host = pairs.remove("host").unwrap_or_default();
                self.guest
                    .ignore(&format!("{driver} {host}, which is no PCI device"));
                self.guest.give(pairs.contains_key("iommufd"), None);
            }
            "pci-assign" | "kvm-pci-assign" => {
                let host = pairs.remove("host").unwrap_or_default();
                self.guest
                    .ignore(&format!("{driver} {host}, by KVM and not by VFIO"));
            }
            "pc-dimm" => self.modules.extend(pairs.remove("memdev")),
            "intel-iommu" | "amd-iommu" | "arm-smmuv3" | "riscv-iommu-pci" | "riscv-iommu-sys" => {
                self.viommu = Some(driver);
            }
            name if name.starts_with("virtio-iommu") => self.viommu = Some(driver),
            // Other memory, and devices whose memory other processes or the kernel map.
            name if ["memdev", "volatile-memdev", "persistent-memdev"]
                .iter()
                .any(|property| pairs.contains_key(*property))
                || ["vhost-user", "vhost-vdpa", "vfio-", "xen-pci-passthrough"]
                    .iter()
                    .any(|kind| name.starts_with(kind))
                || has_variable(name) =>
            {
                if name.starts_with("virtio-mem") {
                    let size = |name: &str| bytes(name, pairs.get(name)?).ok();
                    let blocks = Blocks {
                        bytes: 0,
                        requested_bytes: size("requested-size").unwrap_or(0),
                        block_bytes: size("block-size").filter(|bytes| *bytes > 0),
                    };
                    let object = pairs.get("memdev").cloned().unwrap_or_default();
                    self.blocks.push((object, blocks));
                }
                self.guest.ignore(name);
            }
            _ => {}
        }
        Ok(())
    }

    /// Disks that QEMU drives by VFIO, and those of other processes.
    pub(super) fn block(&mut self, mut pairs: Pairs) -> Result<(), ConfigError> {
        let driver = pairs.remove("driver").unwrap_or_default();
        // A format may have its file in line.
        let inner = pairs.remove("file.driver").unwrap_or_default();
        for (driver, device) in [(driver, "device"), (inner, "file.device")] {
            match (driver.as_str(), pairs.get(device)) {
                ("nvme", Some(host)) => {
                    let host = host_address("blockdev nvme, device", host)?;
                    self.guest.give_disk(host);
                }
                (name, _) if name.starts_with("virtio-blk-v") || name == "nvme-io_uring" => {
                    self.guest.ignore(&format!("-blockdev {name}"));
                }
                _ => {}
            }
        }
        Ok(())
    }
}
