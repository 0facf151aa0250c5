//! What the machine offers: Debian packages, and parts of Cargo that may be left out.

use std::{
    collections::BTreeSet,
    fs,
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

/// Packages that must not be older than this, and come from the distribution's backports where its own
/// are.
const LEAST: &[(&str, &str)] = &[
    ("qemu-system-arm", "1:10"),
    ("qemu-system-riscv", "1:10"),
    ("qemu-system-x86", "1:10"),
];

fn least(package: &str) -> Option<&'static str> {
    let mut least = LEAST.iter();
    least
        .find(|(name, _)| *name == package)
        .map(|(_, version)| *version)
}

/// A package with the version that it must have, for people.
pub(crate) fn described(package: &str) -> String {
    match least(package) {
        Some(version) => format!("{package} (>= {version})"),
        None => package.to_owned(),
    }
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
            let format = "--showformat=${db:Status-Status} ${Version}";
            let said = said("dpkg-query", &["--show", format, package]);
            match said.split_once(' ') {
                Some(("installed", version)) => recent_enough(package, version),
                _ => false,
            }
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
        let candidate = |package: &str| {
            let policy = said("apt-cache", &["policy", package]);
            let mut lines = policy.lines().map(str::trim);
            lines.find_map(|line| line.strip_prefix("Candidate: ").map(ToOwned::to_owned))
        };
        let own = |package: &&str| {
            candidate(package).is_some_and(|version| recent_enough(package, &version))
        };
        let (any, recent): (Vec<&str>, Vec<&str>) = packages
            .iter()
            .partition(|package| least(package).is_none());
        let install = ["install", "--yes", "--no-install-recommends"];
        if !any.is_empty() {
            apt_get(&[&install[..], &any].concat())?;
        }
        // A candidate may be of the backports already, and need others of them.
        let done = recent.is_empty()
            || recent.iter().all(own) && apt_get(&[&install[..], &recent].concat()).is_ok();
        if !done {
            let suite = add_backports()?;
            apt_get(&["update"])?;
            apt_get(&[&install[..], &["--target-release", &suite], &recent].concat())?;
        }
        Ok(())
    }

    fn has_subcommand(&mut self, name: &str) -> bool {
        cargo::has_subcommand(name)
    }
}

fn recent_enough(package: &str, version: &str) -> bool {
    least(package).is_none_or(|least| {
        Command::new("dpkg")
            .args(["--compare-versions", version, "ge", least])
            .status()
            .is_ok_and(|status| status.success())
    })
}

/// Adds the suite of backports to apt's sources, from the mirror that is among them already. The suite.
fn add_backports() -> anyhow::Result<String> {
    let release = fs::read_to_string("/etc/os-release").context("/etc/os-release")?;
    let mut lines = release.lines();
    let codename = lines.find_map(|line| line.strip_prefix("VERSION_CODENAME="));
    let codename = codename.context("/etc/os-release names no release")?;
    let suite = format!("{codename}-backports");
    // `apt-get indextargets` knows both styles of source lists.
    let format = [
        "indextargets",
        "--format",
        "$(REPO_URI) $(RELEASE)",
        "Created-By: Packages",
    ];
    let targets = said("apt-get", &format);
    let mut targets = targets.lines().filter_map(|line| line.split_once(' '));
    let (mirror, _) = targets
        .find(|(_, release)| *release == codename)
        .with_context(|| format!("apt's sources have no {codename}"))?;
    let list = "/etc/apt/sources.list.d/dmaspace-backports.list";
    fs::write(list, format!("deb {mirror} {suite} main\n")).context(list)?;
    Ok(suite)
}

/// What a program says; nothing when it fails.
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
