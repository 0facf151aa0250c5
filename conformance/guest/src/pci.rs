//! PCI devices as sysfs shows them, and which driver has them.
//!
//! Source: Linux, Documentation/ABI/testing/sysfs-bus-pci.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, ensure};

/// A device by its address: `0000:00:05.0`.
#[derive(Clone, Copy, Debug)]
pub struct Device(pub &'static str);

impl Device {
    /// A file or link of the device.
    pub fn path(self, name: &str) -> PathBuf {
        Path::new("/sys/bus/pci/devices").join(self.0).join(name)
    }

    /// The last part of what a link of the device leads to.
    pub fn link(self, name: &str) -> anyhow::Result<String> {
        let path = self.path(name);
        let target = fs::read_link(&path).with_context(|| path.display().to_string())?;
        let last = target.file_name().context("a link to the root")?;
        Ok(last.to_string_lossy().into_owned())
    }

    /// The number of its group.
    pub fn group(self) -> anyhow::Result<u32> {
        Ok(self.link("iommu_group")?.parse()?)
    }

    /// The addresses of all devices of its group.
    pub fn companions(self) -> anyhow::Result<Vec<String>> {
        names(&self.path("iommu_group/devices"))
    }

    /// Gives it to `vfio-pci`.
    ///
    /// # Errors
    ///
    /// When another driver has it or takes it.
    pub fn bind_to_vfio(self) -> anyhow::Result<()> {
        self.bind("vfio-pci")
    }

    /// Gives it to the driver of this name.
    ///
    /// # Errors
    ///
    /// When another driver has it or takes it.
    pub fn bind(self, wanted: &str) -> anyhow::Result<()> {
        if self.link("driver").is_ok_and(|driver| driver == wanted) {
            return Ok(());
        }
        ensure!(!self.path("driver").exists(), "{} has a driver", self.0);
        fs::write(self.path("driver_override"), wanted)?;
        fs::write("/sys/bus/pci/drivers_probe", self.0)?;
        let driver = self.link("driver").context("no driver took it")?;
        ensure!(driver == wanted, "{} went to {driver}", self.0);
        Ok(())
    }

    /// Takes it from the driver that has it, if one has.
    pub fn unbind(self) -> anyhow::Result<()> {
        let driver = self.path("driver");
        if driver.exists() {
            fs::write(driver.join("unbind"), self.0)?;
        }
        Ok(())
    }

    /// Its file of its own, which iommufd takes: there once `vfio-pci` has it.
    pub fn cdev(self) -> anyhow::Result<PathBuf> {
        let names = names(&self.path("vfio-dev"))?;
        let name = names.first().context("no file of its own")?;
        Ok(Path::new("/dev/vfio/devices").join(name))
    }
}

/// Names in a directory, in order.
pub fn names(directory: &Path) -> anyhow::Result<Vec<String>> {
    let entries = fs::read_dir(directory).with_context(|| directory.display().to_string())?;
    let mut names = entries
        .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
        .collect::<anyhow::Result<Vec<_>>>()?;
    names.sort();
    Ok(names)
}
