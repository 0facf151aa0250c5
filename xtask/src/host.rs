//! Offers of the machine: Debian packages, and parts of Cargo that may be left out.

use std::{
    collections::BTreeSet,
    process::{Command, Stdio},
};

use anyhow::{Context as _, ensure};

use crate::cargo;

/// Something that a part needs and that a machine may lack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Need {
    /// A Debian package.
    Package(&'static str),
    /// A Cargo subcommand, and the command that installs it.
    Subcommand(&'static str, &'static str),
}

/// The machine, as a seam: tests put another one in its place.
pub(crate) trait Host {
    /// Which of these packages are not installed.
    fn missing(&mut self, packages: &BTreeSet<&'static str>) -> BTreeSet<&'static str>;
    /// Installs the packages; asks no question.
    fn install(&mut self, packages: &BTreeSet<&'static str>) -> anyhow::Result<()>;
    /// True when Cargo has the subcommand.
    fn has_subcommand(&mut self, name: &str) -> bool;
}

/// A Debian machine. On any other one every package counts as missing.
pub(crate) struct Debian;

impl Host for Debian {
    fn missing(&mut self, packages: &BTreeSet<&'static str>) -> BTreeSet<&'static str> {
        let installed = |package: &&&str| {
            let format = "--showformat=${db:Status-Status}";
            said("dpkg-query", &["--show", format, package]) == "installed"
        };
        packages.iter().filter(|p| !installed(p)).copied().collect()
    }

    fn install(&mut self, packages: &BTreeSet<&'static str>) -> anyhow::Result<()> {
        ensure!(
            is_root(),
            "packages are installed by root only; as root: apt-get install {}",
            packages.iter().copied().collect::<Vec<_>>().join(" ")
        );
        apt_get(&["update"])?;
        let install = ["install", "--yes", "--no-install-recommends"];
        let packages: Vec<&str> = packages.iter().copied().collect();
        apt_get(&[&install[..], &packages].concat())
    }

    fn has_subcommand(&mut self, name: &str) -> bool {
        cargo::has_subcommand(name)
    }
}

/// Output of a program; nothing when it fails.
fn said(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .output();
    let output = output.ok().filter(|output| output.status.success());
    output.map_or_else(String::new, |output| {
        String::from_utf8_lossy(&output.stdout).into_owned()
    })
}

fn apt_get(args: &[&str]) -> anyhow::Result<()> {
    cargo::run(
        Command::new("apt-get")
            .args(["-o", "DPkg::Lock::Timeout=120", "--quiet"])
            .args(args)
            .env("DEBIAN_FRONTEND", "noninteractive")
            .stdin(Stdio::null()),
    )
    .context("apt-get failed")
}

fn is_root() -> bool {
    Command::new("id")
        .arg("-u")
        .output()
        .is_ok_and(|out| out.stdout.trim_ascii() == b"0")
}
