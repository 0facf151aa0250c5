//! Linux's source, fetched by apt from the mirror that the machine uses, and unpacked as far as
//! it is needed. Everything lies below the target directory; a second run fetches nothing. The
//! package stays there too: the guest's kernel is built from it.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context as _, bail};

use crate::apt::Apt;

/// The package, and the suite of the mirror that has it.
pub(crate) const PACKAGE: &str = "linux-source-7.2";
const SUITE: &str = "trixie-backports";

/// Files to unpack, below the archive's top directory.
const PATHS: &[&str] = &[
    "drivers/iommu/generic_pt",
    "drivers/iommu/io-pgtable-arm.c",
    "drivers/iommu/io-pgtable-arm.h",
    "drivers/iommu/io-pgtable-arm-v7s.c",
    "drivers/iommu/io-pgtable-dart.c",
    "drivers/iommu/iommu-pages.h",
    "include/linux/generic_pt",
    "include/linux/io-pgtable.h",
];

/// Linux's source below `directory`, as far as the compare test needs it; fetched if it is not
/// there.
pub fn fetch(directory: &Path) -> anyhow::Result<PathBuf> {
    let source = directory.join(PACKAGE);
    if source.join("complete").exists() {
        return Ok(source);
    }
    let package = package(directory)?;
    if source.exists() {
        fs::remove_dir_all(&source)?;
    }
    fs::create_dir_all(&source)?;
    unpack(&package, &source, PATHS)?;
    fs::write(source.join("complete"), "")?;
    Ok(source)
}

/// The package below `directory`, fetched if it is not there.
pub fn package(directory: &Path) -> anyhow::Result<PathBuf> {
    let package = directory.join(format!("{PACKAGE}.deb"));
    if package.exists() {
        return Ok(package);
    }
    let apt = directory.join("apt");
    let fetched = Apt::with(&apt, &[SUITE], None, |apt| apt.download(PACKAGE));
    // Whole, or not there.
    fs::rename(fetched?, &package).context("the package cannot be put in its place")?;
    Ok(package)
}

/// Unpacks these files and directories of the source, or all of it when none is named, into the
/// directory `into`. The package holds an archive, which is read once, as it comes.
pub fn unpack(package: &Path, into: &Path, paths: &[&str]) -> anyhow::Result<()> {
    let mut outer = Command::new("dpkg-deb")
        .arg("--fsys-tarfile")
        .arg(package)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .context("dpkg-deb cannot be started")?;
    let outer_archive = outer.stdout.take().context("dpkg-deb has no output")?;
    let mut inner = Command::new("tar")
        .args(["--extract", "--to-stdout", "--file=-"])
        .arg(format!("./usr/src/{PACKAGE}.tar.xz"))
        .stdin(outer_archive)
        .stdout(Stdio::piped())
        .spawn()
        .context("tar cannot be started")?;
    let inner_archive = inner.stdout.take().context("tar has no output")?;
    let status = Command::new("tar")
        .args(["--extract", "--xz", "--file=-", "--strip-components=1"])
        .arg("--directory")
        .arg(into)
        .args(paths.iter().map(|path| format!("{PACKAGE}/{path}")))
        .stdin(inner_archive)
        .status()
        .context("tar cannot be started")?;
    let (inner, outer) = (inner.wait()?, outer.wait()?);
    if !(status.success() && inner.success() && outer.success()) {
        bail!("{} cannot be unpacked", package.display());
    }
    Ok(())
}
