//! A QEMU that is newer than the distribution's, unpacked beside the system with a C library of its own.
//!
//! Some devices came late, `vhost-user-test-device-pci` with version 11, and so did what others do: the RISC-V IOMMU walks
//! pages of 64 KiB since. The packages come from a later release of Debian; nothing of them is installed.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use crate::{apt, kernel::Arch};

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

/// The suite that has the package, and the release that has what it needs.
const SUITE: &str = "trixie-backports";
const RELEASE: &str = "trixie";

/// The unpacked packages.
#[derive(Clone, Debug)]
pub struct NewerQemu {
    root: PathBuf,
    program: &'static str,
}

impl NewerQemu {
    /// The packages for machines of this architecture below `directory`, fetched if they are not there: 40 MB.
    ///
    /// # Errors
    ///
    /// When they cannot be fetched or unpacked.
    pub fn fetch(arch: Arch, directory: &Path) -> anyhow::Result<Self> {
        let (package, program) = match arch {
            Arch::Arm => ("qemu-system-arm", "qemu-system-aarch64"),
            Arch::RiscV => ("qemu-system-riscv", "qemu-system-riscv64"),
            Arch::X86 | Arch::Um => ("qemu-system-x86", "qemu-system-x86_64"),
        };
        let root = directory.join("newer-qemu").join(package);
        apt::fetch_into(&root, package, &[SUITE, RELEASE])?;
        Ok(Self { root, program })
    }

    /// QEMU, with its own libraries and firmware.
    pub fn command(&self) -> Command {
        let libraries = self.root.join("usr/lib/x86_64-linux-gnu");
        let mut command = Command::new(libraries.join("ld-linux-x86-64.so.2"));
        command
            .arg("--library-path")
            .arg(&libraries)
            .arg(self.root.join("usr/bin").join(self.program))
            .env("QEMU_MODULE_DIR", libraries.join("qemu"));
        for firmware in ["usr/share/qemu", "usr/share/seabios"] {
            command.arg("-L").arg(self.root.join(firmware));
        }
        command
    }
}
