//! The initramfs: a cpio archive with what the kernel and a program need before anything is mounted.
//!
//! Source: Linux, Documentation/driver-api/early-userspace/buffer-format.rst.

use std::{
    collections::BTreeSet,
    fs,
    io::{self, Write as _},
    path::Path,
    process::Command,
};

use cpio::newc::{Builder, trailer};

const DIRECTORY: u32 = 0o040_755;
const PROGRAM: u32 = 0o100_755;
const CHARACTER: u32 = 0o020_600;

/// An archive in the making.
#[derive(Debug, Default)]
pub struct Initramfs {
    bytes: Vec<u8>,
    entries: u32,
    /// Directories and libraries that are there.
    there: BTreeSet<String>,
}

impl Initramfs {
    /// With directories and the console.
    ///
    /// # Errors
    ///
    /// None: it is written to memory.
    pub fn new() -> io::Result<Self> {
        let mut archive = Self::default();
        for directory in ["bin", "dev", "proc", "sys", "tmp"] {
            archive.directory(directory)?;
        }
        for (name, major, minor) in [("dev/console", 5, 1), ("dev/null", 1, 3)] {
            let device = Builder::new(name).mode(CHARACTER);
            archive.entry(device.rdev_major(major).rdev_minor(minor), &[])?;
        }
        Ok(archive)
    }

    /// Adds a program under `path`, which begins below the root and whose directory is there.
    ///
    /// # Errors
    ///
    /// When it has 4 GiB or more, for which the format has no place.
    pub fn program(&mut self, path: &str, data: &[u8]) -> io::Result<()> {
        self.entry(Builder::new(path).mode(PROGRAM), data)
    }

    /// Adds a file of this machine under `path`, once, as [`program`](Self::program) does.
    ///
    /// # Errors
    ///
    /// When it cannot be read, which is named, or has 4 GiB or more.
    pub fn file(&mut self, path: &str, from: &Path) -> io::Result<()> {
        match self.there.insert(path.to_owned()) {
            true => self.program(path, &read(from)?),
            false => Ok(()),
        }
    }

    /// Adds the program that is the file `from` here, and the libraries that it is linked to, where they are here.
    ///
    /// # Errors
    ///
    /// When one of them cannot be read, which is named, or ldd(1) cannot be started.
    pub fn with_libraries(&mut self, path: &str, from: &Path) -> io::Result<()> {
        let ldd = Command::new("ldd").arg(from).output()?;
        let said = String::from_utf8_lossy(&ldd.stdout);
        // Lines of a name, an arrow, a path and an address; the loader has a path alone.
        for library in said.split_whitespace() {
            let Some(name) = library.strip_prefix('/') else {
                continue;
            };
            if self.there.insert(name.to_owned()) {
                for (end, _) in name.match_indices('/') {
                    self.directory(name.get(..end).unwrap_or_default())?;
                }
                self.program(name, &read(Path::new(library))?)?;
            }
        }
        self.program(path, &read(from)?)
    }

    /// The archive.
    ///
    /// # Errors
    ///
    /// None: it is written to memory.
    pub fn finish(self) -> io::Result<Vec<u8>> {
        trailer(self.bytes)
    }

    /// Adds a directory, once. The one that it lies in comes before.
    ///
    /// # Errors
    ///
    /// None: it is written to memory.
    pub fn directory(&mut self, path: &str) -> io::Result<()> {
        match self.there.insert(path.to_owned()) {
            true => self.entry(Builder::new(path).mode(DIRECTORY), &[]),
            false => Ok(()),
        }
    }

    fn entry(&mut self, entry: Builder, data: &[u8]) -> io::Result<()> {
        self.entries += 1;
        let len = u32::try_from(data.len()).map_err(io::Error::other)?;
        let mut writer = entry.ino(self.entries).nlink(1).write(&mut self.bytes, len);
        writer.write_all(data)?;
        writer.finish()?;
        Ok(())
    }
}

fn read(path: &Path) -> io::Result<Vec<u8>> {
    fs::read(path)
        .map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", path.display())))
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;

    use cpio::newc::Reader;

    use super::*;

    /// Name, mode, device and bytes.
    type Entry = (String, u32, (u32, u32), Vec<u8>);

    fn entries(archive: Initramfs) -> Vec<Entry> {
        let archive = archive.finish().unwrap();
        let mut rest = archive.as_slice();
        let mut entries = Vec::new();
        loop {
            let mut reader = Reader::new(rest).unwrap();
            let entry = reader.entry();
            if entry.is_trailer() {
                rest = reader.finish().unwrap();
                break;
            }
            let (name, mode) = (entry.name().to_owned(), entry.mode());
            let device = (entry.rdev_major(), entry.rdev_minor());
            let mut data = Vec::new();
            reader.read_to_end(&mut data).unwrap();
            rest = reader.finish().unwrap();
            entries.push((name, mode, device, data));
        }
        assert_eq!(rest, b"");
        entries
    }

    #[test]
    fn what_was_put_in_is_read_back_in_order() {
        let mut archive = Initramfs::new().unwrap();
        for len in 0..9 {
            let name = format!("bin/{len}");
            archive.program(&name, &vec![b'x'; len]).unwrap();
        }
        let entries = entries(archive);
        assert_eq!(entries[0], ("bin".into(), DIRECTORY, (0, 0), vec![]));
        let console = ("dev/console".into(), CHARACTER, (5, 1), vec![]);
        assert_eq!(entries[5], console);
        for (len, entry) in entries[7..].iter().enumerate() {
            let name = format!("bin/{len}");
            assert_eq!(*entry, (name, PROGRAM, (0, 0), vec![b'x'; len]));
        }
        assert_eq!(entries.len(), 16);
    }

    #[test]
    fn a_program_comes_with_its_libraries_once_below_directories_that_are_there() {
        let mut archive = Initramfs::new().unwrap();
        let this = std::env::current_exe().unwrap();
        for name in ["init", "bin/again"] {
            archive.with_libraries(name, &this).unwrap();
        }
        let entries = entries(archive);
        let names: Vec<_> = entries.iter().map(|(name, ..)| name.as_str()).collect();
        let once: BTreeSet<_> = names.iter().collect();
        assert_eq!(once.len(), names.len(), "{names:?}");
        let library = |name: &&&str| name.ends_with("/libc.so.6");
        let library = names.iter().find(library).unwrap();
        for (nr, name) in names.iter().enumerate() {
            let Some((directory, _)) = name.rsplit_once('/') else {
                continue;
            };
            assert!(names[..nr].contains(&directory), "{name} in {names:?}");
        }
        let packed = |name: &str| &entries.iter().find(|entry| entry.0 == name).unwrap().3;
        assert_eq!(*packed("bin/again"), fs::read(&this).unwrap());
        assert_eq!(*packed(library), fs::read(format!("/{library}")).unwrap());
        let refused = Initramfs::default().with_libraries("x", Path::new("/no/such"));
        assert!(refused.unwrap_err().to_string().contains("/no/such"));
    }
}
