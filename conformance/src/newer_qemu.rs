//! A QEMU that is newer than the distribution's, unpacked beside the system with a C library of its own.
//!
//! Some devices came late: `vhost-user-test-device-pci` is there from version 11 on. The packages come
//! from a later release of Debian; nothing of them is installed.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use crate::apt;

/// What all machines have. Software emulation, whatever the machine offers: results are the same everywhere.
pub const MACHINE: &[&str] = &[
    "-nodefaults",
    "-no-user-config",
    "-no-reboot",
    "-display",
    "none",
    "-machine",
    "q35",
    "-accel",
    "tcg",
    "-smp",
    "2",
];

/// The package, the suite that has it, and the release that has what it needs.
const PACKAGE: &str = "qemu-system-x86";
const SUITE: &str = "trixie-backports";
const RELEASE: &str = "trixie";

/// The unpacked packages.
#[derive(Clone, Debug)]
pub struct NewerQemu {
    root: PathBuf,
}

impl NewerQemu {
    /// The packages below `directory`, fetched if they are not there: 40 MB.
    ///
    /// # Errors
    ///
    /// When they cannot be fetched or unpacked.
    pub fn fetch(directory: &Path) -> anyhow::Result<Self> {
        let root = directory.join("newer-qemu");
        apt::fetch_into(&root, PACKAGE, &[SUITE, RELEASE])?;
        Ok(Self { root })
    }

    /// QEMU for x86-64 machines, with its own libraries and firmware.
    pub fn command(&self) -> Command {
        let libraries = self.root.join("usr/lib/x86_64-linux-gnu");
        let mut command = Command::new(libraries.join("ld-linux-x86-64.so.2"));
        command
            .arg("--library-path")
            .arg(&libraries)
            .arg(self.root.join("usr/bin/qemu-system-x86_64"))
            .env("QEMU_MODULE_DIR", libraries.join("qemu"));
        for firmware in ["usr/share/qemu", "usr/share/seabios"] {
            command.arg("-L").arg(self.root.join(firmware));
        }
        command
    }
}
