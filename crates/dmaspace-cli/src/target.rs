//! The file that a result goes to.
//!
//! It is checked before the job starts, so that a job whose result cannot be kept never starts. A
//! regular file is then written beside its place, without a name where the file system can do that,
//! and moved there when it is whole: neither a full disk nor a killed process leaves half a file or a
//! broken old one. A pipe or a character device is written straight.

use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, Write};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt as _, PermissionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use rustix::fs::{AtFlags, CWD, OFlags, linkat};

use crate::stop::Stop;

/// A place that could be written to when it was looked at.
#[derive(Debug)]
pub(crate) struct Target {
    /// As the user wrote it.
    name: PathBuf,
    way: Way,
}

#[derive(Debug)]
enum Way {
    Straight(File),
    Beside {
        /// Where the file will lie: the name, with symbolic links followed.
        path: PathBuf,
        directory: PathBuf,
        /// Permissions of the file that is there already.
        permissions: Option<Permissions>,
    },
}

impl Target {
    /// Looks whether something can be written there, and changes nothing.
    pub(crate) fn new(name: &Path) -> Result<Self> {
        let shown = name.display();
        let way = match fs::metadata(name) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Way::beside(name, None),
            Err(error) => Err(error.into()),
            Ok(there) if there.is_dir() => bail!("{shown} is a directory: name a file"),
            // A disk is never meant, and its contents would be lost.
            Ok(there) if there.file_type().is_block_device() => {
                bail!("{shown} is a block device: name a file")
            }
            Ok(there) if there.is_file() => open(name)
                .and_then(|_| fs::canonicalize(name).map_err(Into::into))
                .and_then(|path| Way::beside(&path, Some(there.permissions()))),
            Ok(_) => open(name).map(Way::Straight),
        };
        Ok(Self {
            name: name.into(),
            way: way.with_context(|| format!("cannot write {shown}"))?,
        })
    }

    /// Writes all bytes, or leaves what was there as it was.
    pub(crate) fn write(self, bytes: &(impl AsRef<[u8]> + ?Sized), stop: &Stop) -> Result<()> {
        let bytes = bytes.as_ref();
        let result = match self.way {
            Way::Straight(mut file) => file.write_all(bytes),
            Way::Beside {
                path,
                directory,
                permissions,
            } => {
                // A signal must not leave the temporary file behind.
                let (result, _) =
                    stop.shielded(|| write_beside(bytes, &path, &directory, permissions));
                result
            }
        };
        result.with_context(|| format!("cannot write {}", self.name.display()))
    }
}

impl Way {
    fn beside(path: &Path, permissions: Option<Permissions>) -> Result<Self> {
        if path.file_name().is_none() || path.as_os_str().as_encoded_bytes().ends_with(b"/") {
            bail!("it is no name of a file");
        }
        let directory = match path.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        };
        if !directory.is_dir() {
            bail!("there is no directory {}", directory.display());
        }
        // The only sure way to know; the file has no name and goes when it is closed.
        tempfile::tempfile_in(directory)
            .with_context(|| format!("no file can be made in {}", directory.display()))?;
        Ok(Self::Beside {
            path: path.into(),
            directory: directory.into(),
            permissions,
        })
    }
}

fn open(name: &Path) -> Result<File> {
    Ok(OpenOptions::new().write(true).open(name)?)
}

fn write_beside(
    bytes: &[u8],
    path: &Path,
    directory: &Path,
    permissions: Option<Permissions>,
) -> io::Result<()> {
    let mut beside = tempfile::Builder::new();
    // As if made by open(2): less what the umask takes.
    let mode = Permissions::from_mode(0o666);
    beside.prefix(".dmaspace-").permissions(mode.clone());
    let fill = |file: &mut File| {
        file.write_all(bytes)?;
        if let Some(permissions) = permissions.clone() {
            file.set_permissions(permissions)?;
        }
        // Some file systems notice only now that they are full.
        file.sync_all()
    };
    // Without a name until it is whole: then nothing is left of it when this process is killed.
    let nameless = File::options()
        .write(true)
        .mode(mode.mode())
        .custom_flags(OFlags::TMPFILE.bits() as i32)
        .open(directory);
    let Ok(mut file) = nameless else {
        // Not every file system can do that.
        let mut file = beside.tempfile_in(directory)?;
        fill(file.as_file_mut())?;
        file.persist(path).map_err(|error| error.error)?;
        return Ok(());
    };
    fill(&mut file)?;
    let open = format!("/proc/self/fd/{}", file.as_raw_fd());
    let link = |name: &Path| Ok(linkat(CWD, &open, CWD, name, AtFlags::SYMLINK_FOLLOW)?);
    let named = beside.make_in(directory, link)?;
    named.persist(path).map_err(|error| error.error)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stop() -> Stop {
        Stop::for_tests(false)
    }

    fn refusal(name: &Path) -> String {
        format!("{:#}", Target::new(name).unwrap_err())
    }

    #[test]
    fn a_new_file_and_an_old_one_are_written_whole() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a.svg");
        let target = Target::new(&path).unwrap();
        assert!(!path.exists(), "looking leaves nothing");
        target.write("one", &stop()).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "one");
        fs::set_permissions(&path, Permissions::from_mode(0o640)).unwrap();
        Target::new(&path).unwrap().write("two", &stop()).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "two");
        let mode = fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o640);
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_link_stays_a_link() {
        let directory = tempfile::tempdir().unwrap();
        let (path, link) = (directory.path().join("a"), directory.path().join("b"));
        fs::write(&path, "old").unwrap();
        std::os::unix::fs::symlink(&path, &link).unwrap();
        Target::new(&link).unwrap().write("new", &stop()).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "new");
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
    }

    #[test]
    fn what_cannot_be_written_is_refused_beforehand() {
        let directory = tempfile::tempdir().unwrap();
        let shown = directory.path().display().to_string();
        assert_eq!(
            refusal(directory.path()),
            format!("{shown} is a directory: name a file")
        );
        assert_eq!(
            refusal(&directory.path().join("no/a.svg")),
            format!("cannot write {shown}/no/a.svg: there is no directory {shown}/no")
        );
        assert_eq!(
            refusal(&directory.path().join("new/")),
            format!("cannot write {shown}/new/: it is no name of a file")
        );
        fs::write(directory.path().join("file"), "").unwrap();
        assert!(refusal(&directory.path().join("file/a.svg")).contains("Not a directory"));
        assert_eq!(
            refusal(Path::new("")),
            "cannot write : it is no name of a file"
        );
    }

    #[test]
    fn a_full_device_is_reported() {
        let target = Target::new(Path::new("/dev/full")).unwrap();
        let error = format!("{:#}", target.write("x", &stop()).unwrap_err());
        assert!(
            error.starts_with("cannot write /dev/full: No space left on device"),
            "{error}"
        );
    }
}
