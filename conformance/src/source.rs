//! Linux's source, fetched by apt from the mirror that the machine uses, and unpacked as far as
//! it is needed. Everything lies below the target directory; a second run fetches nothing. The
//! package stays there too: the guest's kernel is built from it.

use std::{
    fs, io,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context as _, bail, ensure};

/// The package, and the suite of the mirror that has it.
const PACKAGE: &str = "linux-source-7.2";
const SUITE: &str = "trixie-backports";

/// What is unpacked, below the archive's top directory.
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
    let sources = sources_of(Path::new("/etc/apt"))?;
    let mirrors = mirrors(&sources);
    ensure!(
        !mirrors.is_empty(),
        "apt's sources name no Debian mirror, and {PACKAGE} comes from one"
    );
    let mut fetched = Err(anyhow::anyhow!("no mirror"));
    for mirror in &mirrors {
        fetched = download(directory, mirror);
        if fetched.is_ok() {
            break;
        }
    }
    // Whole, or not there.
    fs::rename(fetched?, &package).context("the package cannot be put in its place")?;
    Ok(package)
}

/// The contents of apt's source lists.
fn sources_of(etc: &Path) -> anyhow::Result<Vec<String>> {
    let mut files = vec![etc.join("sources.list")];
    if let Ok(directory) = fs::read_dir(etc.join("sources.list.d")) {
        let listed: Result<Vec<_>, _> = directory.map(|entry| entry.map(|e| e.path())).collect();
        files.extend(listed?);
    }
    let mut contents = Vec::new();
    for file in files {
        match fs::read_to_string(&file) {
            Ok(text) => contents.push(text),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error).with_context(|| file.display().to_string()),
        }
    }
    Ok(contents)
}

/// The addresses in apt's source lists, of either style, at which Debian itself is mirrored.
fn mirrors(sources: &[String]) -> Vec<String> {
    let lines = sources.iter().flat_map(|text| text.lines());
    let words = lines
        .map(str::trim)
        .filter(|line| !line.starts_with('#'))
        .flat_map(str::split_whitespace);
    let mut found: Vec<String> = Vec::new();
    for word in words {
        let word = word.trim_end_matches('/');
        let mirror = word.contains("://") && word.ends_with("/debian");
        if mirror && !found.iter().any(|known| known == word) {
            found.push(word.to_owned());
        }
    }
    found
}

/// Fetches the package with an apt of our own, which leaves the machine's alone.
fn download(directory: &Path, mirror: &str) -> anyhow::Result<PathBuf> {
    let apt = directory.join("apt");
    for part in ["lists/partial", "cache/archives/partial", "parts"] {
        fs::create_dir_all(apt.join(part))?;
    }
    let keys = "/usr/share/keyrings/debian-archive-keyring.gpg";
    let list = apt.join("sources.list");
    fs::write(
        &list,
        format!("deb [signed-by={keys}] {mirror} {SUITE} main\n"),
    )?;
    let apt_get = |arguments: &[&str]| {
        let mut command = Command::new("apt-get");
        for (name, path) in [
            ("Dir::Etc::sourcelist", "sources.list"),
            ("Dir::Etc::sourceparts", "parts"),
            ("Dir::State::lists", "lists"),
            ("Dir::Cache", "cache"),
        ] {
            command
                .arg("-o")
                .arg(format!("{name}={}", apt.join(path).display()));
        }
        // As long as a slow mirror may think about it.
        command.args([
            "-o",
            "Acquire::Retries=2",
            "-o",
            "Acquire::http::Timeout=30",
            "--quiet",
        ]);
        run(command.args(arguments).current_dir(&apt))
    };
    apt_get(&["update"])?;
    apt_get(&["download", PACKAGE])?;
    let package = fs::read_dir(&apt)?
        .filter_map(Result::ok)
        .map(|entry| entry.path());
    package
        .filter(|path| path.extension().is_some_and(|extension| extension == "deb"))
        .find(|path| {
            path.file_name()
                .is_some_and(|name| name.to_string_lossy().starts_with(PACKAGE))
        })
        .context("apt-get download left no package")
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

fn run(command: &mut Command) -> anyhow::Result<()> {
    let program = command.get_program().to_string_lossy().into_owned();
    let status = command
        .stdin(Stdio::null())
        .status()
        .with_context(|| format!("{program} cannot be started"))?;
    ensure!(status.success(), "{program} ended with {status}");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::mirrors;

    #[test]
    fn mirrors_are_found_in_both_styles_of_source_lists() {
        let old = "# deb http://old.example/debian x main\n\
                   deb [arch=amd64] http://one.example/debian bookworm main\n\
                   deb http://one.example/debian-security bookworm-security main\n\
                   deb https://tools.example/apt tools main\n";
        let new = "Types: deb\nURIs: https://two.example/debian/ \nSuites: trixie\n\
                   URIs: http://one.example/debian\n";
        let found = mirrors(&[old.to_owned(), new.to_owned()]);
        assert_eq!(
            found,
            ["http://one.example/debian", "https://two.example/debian"]
        );
    }

    #[test]
    fn lists_without_debian_give_no_mirror() {
        assert!(mirrors(&["deb http://archive.example/ubuntu noble main".to_owned()]).is_empty());
        assert!(mirrors(&[]).is_empty());
    }
}
