//! The kernel and the machine are what the other tests count on.

use std::{collections::BTreeSet, fs, os::unix::fs::FileTypeExt as _, path::Path};

use anyhow::{Context as _, ensure};
use guest::machines::{EDU, IVSHMEM, Machine, NVME, Unit};

use crate::pci::{self, Device};

const DEVICES: [Device; 3] = [Device(EDU), Device(NVME), Device(IVSHMEM)];

pub(crate) fn kernel(_: &Machine) -> anyhow::Result<()> {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease")?;
    ensure!(release.starts_with("7.2."), "it is {}", release.trim());
    Ok(())
}

fn is_character_device(path: &Path) -> anyhow::Result<()> {
    let kind = fs::metadata(path).with_context(|| path.display().to_string())?;
    ensure!(
        kind.file_type().is_char_device(),
        "{} is no device",
        path.display()
    );
    Ok(())
}

pub(crate) fn device_files(_: &Machine) -> anyhow::Result<()> {
    for path in ["/dev/vfio/vfio", "/dev/iommu"] {
        is_character_device(Path::new(path))?;
    }
    Ok(())
}

/// The unit of iommufd's own tests, which has no hardware, where the kernel has it.
const MOCK: &str = "iommufd_selftest_iommu";

/// The kernel drives the unit that the machine was given, and no other.
pub(crate) fn unit(machine: &Machine) -> anyhow::Result<()> {
    let kind = machine.unit.sysfs();
    let units = pci::names(Path::new("/sys/class/iommu"))?;
    let real = units.iter().filter(|unit| !unit.starts_with(MOCK));
    let real: Vec<_> = real.collect();
    ensure!(
        real.len() == 1 && real[0].starts_with(kind),
        "the units are {units:?}, not one {kind}"
    );
    for device in DEVICES {
        let behind = device.link("iommu")?;
        ensure!(behind == *real[0], "{} is behind {behind}", device.0);
    }
    Ok(())
}

/// In scalable mode the unit offers one stage: the kernel's tables can have no other format (VT-d specification, revision
/// 5.0, section 11.4.3).
pub(crate) fn stage(machine: &Machine) -> anyhow::Result<()> {
    const SCALABLE: u64 = 1 << 43;
    const SECOND: u64 = 1 << 46;
    const FIRST: u64 = 1 << 47;
    let capabilities = fs::read_to_string("/sys/class/iommu/dmar0/intel-iommu/ecap")?;
    let capabilities = u64::from_str_radix(capabilities.trim(), 16)?;
    let stage = match machine.unit {
        Unit::IntelFirst => FIRST,
        _ => SECOND,
    };
    let offered = capabilities & (SCALABLE | SECOND | FIRST);
    ensure!(offered == SCALABLE | stage, "it offers {capabilities:#x}");
    Ok(())
}

pub(crate) fn groups(_: &Machine) -> anyhow::Result<()> {
    let mut groups = BTreeSet::new();
    for device in DEVICES {
        let companions = device.companions()?;
        ensure!(
            companions == [device.0],
            "{} is with {companions:?}",
            device.0
        );
        groups.insert(device.group()?);
    }
    ensure!(groups.len() == DEVICES.len(), "only the groups {groups:?}");
    Ok(())
}

/// Then there are a file of the group, for containers, and one of the device, for iommufd.
pub(crate) fn bind(_: &Machine) -> anyhow::Result<()> {
    for device in [Device(EDU), Device(IVSHMEM)] {
        let group = Path::new("/dev/vfio").join(device.group()?.to_string());
        ensure!(
            !group.exists(),
            "{} before the device is bound",
            group.display()
        );
        device.bind_to_vfio()?;
        is_character_device(&group)?;
        is_character_device(&device.cdev()?)?;
    }
    Ok(())
}
