//! A QEMU that is newer than the distribution's, unpacked beside the system with a C library of its own.
//!
//! Some devices came late, `vhost-user-test-device-pci` with version 11, and so did what others do: the RISC-V IOMMU walks
//! pages of 64 KiB since. The packages come from a later release of Debian; nothing of them is installed.

use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::Context as _;

use crate::{apt, initramfs::Initramfs, kernel::Arch};

/// Arguments of all machines. Software emulation, whatever the machine offers: results are the same everywhere.
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
    program: PathBuf,
    /// The unpacked packages.
    root: PathBuf,
    name: &'static str,
}

impl NewerQemu {
    /// Directory, below that of the rigs, of programs that have QEMU's own names.
    pub const PROGRAMS: &str = "newer-qemu/bin";

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
        fs::create_dir_all(directory.join(Self::PROGRAMS))?;
        let directory = directory.canonicalize()?;
        let root = directory.join("newer-qemu").join(package);
        apt::fetch_into(&root, package, &[SUITE, RELEASE])?;
        let path = directory.join(Self::PROGRAMS).join(program);
        let script = script(&root, program);
        // Others may be starting it.
        if fs::read_to_string(&path).ok().as_ref() != Some(&script) {
            let new = path.with_extension(std::process::id().to_string());
            fs::write(&new, script).with_context(|| new.display().to_string())?;
            fs::set_permissions(&new, fs::Permissions::from_mode(0o755))?;
            fs::rename(&new, &path)?;
        }
        Ok(Self {
            program: path,
            root,
            name: program,
        })
    }

    /// Packs it for a guest: `qemu/ld.so`, which starts `qemu/qemu`, its libraries in `qemu/lib`, its
    /// firmware in `qemu/share`.
    ///
    /// # Errors
    ///
    /// When a file cannot be read, which is named, or the loader cannot be started.
    pub fn pack(&self, archive: &mut Initramfs) -> anyhow::Result<()> {
        let libraries = self.root.join("usr/lib/x86_64-linux-gnu");
        let loader = libraries.join("ld-linux-x86-64.so.2");
        let qemu = self.root.join("usr/bin").join(self.name);
        for directory in ["qemu", "qemu/lib", "qemu/share"] {
            archive.directory(directory)?;
        }
        archive.file("qemu/ld.so", &loader)?;
        archive.file("qemu/qemu", &qemu)?;
        for firmware in ["bios-256k.bin", "kvmvapic.bin"] {
            let places =
                ["seabios", "qemu"].map(|at| self.root.join("usr/share").join(at).join(firmware));
            let there = places
                .iter()
                .find(|path| path.exists())
                .with_context(|| format!("no {firmware}"))?;
            archive.file(&format!("qemu/share/{firmware}"), there)?;
        }
        let listed = Command::new(&loader)
            .arg("--library-path")
            .arg(&libraries)
            .arg("--list")
            .arg(&qemu)
            .output()?;
        // A name, an arrow, a path and an address.
        let said = String::from_utf8_lossy(&listed.stdout);
        for path in said
            .split_whitespace()
            .filter(|word| word.starts_with('/'))
            .map(Path::new)
        {
            if let Some(name) = path.file_name().filter(|_| path.starts_with(&libraries)) {
                archive.file(&format!("qemu/lib/{}", name.to_string_lossy()), path)?;
            }
        }
        Ok(())
    }

    /// A program that starts it.
    pub fn program(&self) -> &Path {
        &self.program
    }

    /// The command of that program.
    pub fn command(&self) -> Command {
        Command::new(&self.program)
    }
}

/// QEMU becomes the script's process, with its own libraries and firmware.
fn script(root: &Path, program: &str) -> String {
    let root = root.display();
    format!(
        "#!/bin/sh\n\
         export QEMU_MODULE_DIR='{root}/usr/lib/x86_64-linux-gnu/qemu'\n\
         exec '{root}/usr/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2' \\\n  \
         --library-path '{root}/usr/lib/x86_64-linux-gnu' '{root}/usr/bin/{program}' \\\n  \
         -L '{root}/usr/share/qemu' -L '{root}/usr/share/seabios' \"$@\"\n"
    )
}
