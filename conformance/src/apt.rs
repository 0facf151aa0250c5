//! Debian packages, fetched by an apt of our own from the mirror that the machine uses. The machine's
//! own apt, and what is installed, are left alone: everything lies below one directory.

use std::{
    fs, io,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context as _, ensure};

/// Trusted keys.
const KEYS: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// An apt with its own sources, lists and cache, which believes that nothing is installed.
#[derive(Debug)]
pub struct Apt {
    directory: PathBuf,
    /// Architecture of the packages, if it is not the machine's own.
    architecture: Option<&'static str>,
}

impl Apt {
    /// Does `work` with an apt of these `suites`, and of this architecture if it is not the machine's, below `directory`, from the first of the machine's
    /// mirrors with which it succeeds.
    ///
    /// # Errors
    ///
    /// When apt's sources name no mirror of Debian, or `work` fails with the last of them.
    pub fn with<T>(
        directory: &Path,
        suites: &[&str],
        architecture: Option<&'static str>,
        mut work: impl FnMut(&Self) -> anyhow::Result<T>,
    ) -> anyhow::Result<T> {
        let mirrors = mirrors(&sources_of(Path::new("/etc/apt"))?);
        ensure!(!mirrors.is_empty(), "apt's sources name no Debian mirror");
        let mut done = Err(anyhow::anyhow!("no mirror"));
        for mirror in &mirrors {
            done = Self::new(directory, mirror, suites, architecture).and_then(|apt| work(&apt));
            if done.is_ok() {
                break;
            }
        }
        done
    }

    fn new(
        directory: &Path,
        mirror: &str,
        suites: &[&str],
        architecture: Option<&'static str>,
    ) -> anyhow::Result<Self> {
        for part in ["lists/partial", "cache/archives/partial", "parts"] {
            fs::create_dir_all(directory.join(part))?;
        }
        fs::write(directory.join("status"), "")?;
        let line = |suite: &&str| format!("deb [signed-by={KEYS}] {mirror} {suite} main\n");
        let list: String = suites.iter().map(line).collect();
        fs::write(directory.join("sources.list"), list)?;
        let apt = Self {
            directory: directory.to_owned(),
            architecture,
        };
        apt.get(&["update"])?;
        Ok(apt)
    }

    /// Fetches `package` alone.
    ///
    /// # Errors
    ///
    /// When apt cannot.
    pub fn download(&self, package: &str) -> anyhow::Result<PathBuf> {
        self.get(&["download", package])?;
        let mut packages = debs(&self.directory)?.into_iter();
        packages
            .find(|path| {
                path.file_name()
                    .is_some_and(|name| name.to_string_lossy().starts_with(package))
            })
            .context("apt-get download left no package")
    }

    /// Fetches `package`, of this suite, with everything that it needs, down to the C library.
    ///
    /// # Errors
    ///
    /// When apt cannot.
    pub fn download_with_needs(&self, package: &str, suite: &str) -> anyhow::Result<Vec<PathBuf>> {
        self.get(&[
            "install",
            "--yes",
            "--download-only",
            "--no-install-recommends",
            "--target-release",
            suite,
            package,
        ])?;
        debs(&self.directory.join("cache/archives"))
    }

    fn get(&self, arguments: &[&str]) -> anyhow::Result<()> {
        let mut command = Command::new("apt-get");
        for (name, path) in [
            ("Dir::Etc::sourcelist", "sources.list"),
            ("Dir::Etc::sourceparts", "parts"),
            ("Dir::State::lists", "lists"),
            ("Dir::State::status", "status"),
            ("Dir::Cache", "cache"),
        ] {
            let path = self.directory.join(path);
            command.arg("-o").arg(format!("{name}={}", path.display()));
        }
        for name in ["APT::Architecture", "APT::Architectures"] {
            let other = self.architecture.map(|other| format!("-o{name}={other}"));
            command.args(other);
        }
        command.args([
            // As long as a slow mirror may think about it.
            "-oAcquire::Retries=2",
            "-oAcquire::http::Timeout=30",
            // Only these directories are changed: no lock of the machine's, no privilege.
            "-oDebug::NoLocking=1",
            "-oAPT::Sandbox::User=",
            "--quiet",
        ]);
        run(command.args(arguments).current_dir(&self.directory))
    }
}

/// Unpacks `package`, of the first of these `suites`, with everything that it needs, into the directory `root`,
/// unless it is there.
///
/// # Errors
///
/// When packages cannot be fetched or unpacked.
pub fn fetch_into(root: &Path, package: &str, suites: &[&str]) -> anyhow::Result<()> {
    let complete = root.join("complete");
    if complete.exists() {
        return Ok(());
    }
    if root.exists() {
        fs::remove_dir_all(root)?;
    }
    fs::create_dir_all(root)?;
    let (apt, suite) = (root.join("apt"), suites.first().context("no suite")?);
    let packages = Apt::with(&apt, suites, None, |apt| {
        apt.download_with_needs(package, suite)
    })?;
    unpack(&packages, root)?;
    fs::remove_dir_all(apt)?;
    Ok(fs::write(complete, "")?)
}

/// Unpacks whole packages into the directory `into`.
///
/// # Errors
///
/// When one cannot be unpacked.
pub fn unpack(packages: &[PathBuf], into: &Path) -> anyhow::Result<()> {
    for package in packages {
        let mut command = Command::new("dpkg-deb");
        run(command.arg("--extract").arg(package).arg(into))?;
    }
    Ok(())
}

/// The packages in a directory.
fn debs(directory: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let entries: io::Result<Vec<_>> = fs::read_dir(directory)?.collect();
    let mut paths: Vec<_> = entries?.into_iter().map(|entry| entry.path()).collect();
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "deb"));
    paths.sort();
    Ok(paths)
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

/// Runs a program to its end, which must be a good one.
pub(crate) fn run(command: &mut Command) -> anyhow::Result<()> {
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
