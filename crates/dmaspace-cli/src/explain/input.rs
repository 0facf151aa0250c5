//! Files, folders, archives and compressed texts, each read as a stream.

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use dmaspace::devices::Places;
use thiserror::Error;

use super::collect;
use super::facts::Facts;
use super::finding::{At, Place, plain};
use super::read::{Text, acpi, forms};

/// Limit of an uncompressed text, bytes.
const MOST_BYTES: u64 = 1 << 40;
/// Memory that a compressed stream may ask for, KiB: the largest dictionary of `xz -9` and some more.
const MOST_DICTIONARY_KIB: u32 = 128 << 10;
/// The most files, of folders and archives together.
const MOST_FILES: usize = 65_536;
/// Compressed streams and archives within one another.
const DEEPEST: usize = 4;
/// Folders within folders.
const DEEPEST_FOLDER: usize = 16;
/// Bytes at the start by which a content is recognized.
const HEAD: usize = 512;

/// Why a file could not be read.
#[derive(Debug, Error)]
#[non_exhaustive]
pub(super) enum InputError {
    /// It cannot be opened.
    #[error("cannot open {path}")]
    Open {
        /// Its name.
        path: String,
        /// Why.
        source: io::Error,
    },
}

/// Receiver of progress: name and bytes of the file so far.
pub(super) type Progress<'a> = &'a mut dyn FnMut(&str, u64);

/// Reads files into facts.
pub(super) struct Input<'a> {
    pub(super) facts: Facts,
    pub(super) files: Vec<String>,
    /// Files that come now are of this machine.
    pub(super) own: bool,
    /// The folder that they are unpacked in, and the name of the archive.
    unpacked: Option<(String, String)>,
    progress: Progress<'a>,
}

impl<'a> Input<'a> {
    pub(super) fn new(progress: Progress<'a>) -> Self {
        Self {
            facts: Facts::default(),
            files: Vec::new(),
            own: false,
            unpacked: None,
            progress,
        }
    }

    /// A file or a folder that the user named.
    pub(super) fn path(&mut self, path: &Path) -> Result<(), InputError> {
        let open = |source| InputError::Open {
            path: plain(&path.display().to_string()),
            source,
        };
        let metadata = fs::metadata(path).map_err(open)?;
        if metadata.is_dir() {
            self.folder(path, 0).map_err(open)
        } else {
            let file = File::open(path).map_err(open)?;
            self.stream(&path.display().to_string(), file);
            Ok(())
        }
    }

    fn folder(&mut self, path: &Path, depth: usize) -> io::Result<()> {
        if depth > DEEPEST_FOLDER {
            self.note(
                &path.display().to_string(),
                "folders are nested too deep; it was left out",
            );
            return Ok(());
        }
        let mut entries: Vec<PathBuf> = fs::read_dir(path)?
            .filter_map(|entry| Some(entry.ok()?.path()))
            .take(MOST_FILES)
            .collect();
        entries.sort();
        for entry in entries {
            let name = entry.display().to_string();
            // A link may lead out of the folder, a device or a pipe does not end.
            let Ok(metadata) = fs::symlink_metadata(&entry) else {
                self.note(&name, "it cannot be read");
                continue;
            };
            if metadata.is_dir() {
                if let Err(error) = self.folder(&entry, depth + 1) {
                    self.note(&name, &crate::output::sentence(&error));
                }
            } else if metadata.is_file() {
                match File::open(&entry) {
                    Ok(file) => self.stream(&name, file),
                    Err(error) => self.note(&name, &error.to_string()),
                }
            } else {
                self.note(&name, "it is no regular file; it was left out");
            }
        }
        Ok(())
    }

    /// A remark about a file.
    pub(super) fn note(&mut self, name: &str, remark: &str) {
        const MOST_NOTES: usize = 256;
        if self.facts.notes.len() < MOST_NOTES {
            let name = self.shown(name);
            self.facts.notes.push(format!("{name}: {remark}"));
        }
    }

    /// A stream of any content.
    pub(super) fn stream(&mut self, name: &str, stream: impl Read) {
        self.content(name, Box::new(BufReader::with_capacity(1 << 18, stream)), 0);
    }

    fn content(&mut self, name: &str, mut stream: Box<dyn BufRead + '_>, depth: usize) {
        let mut head = Vec::new();
        if let Err(error) = stream.by_ref().take(HEAD as u64).read_to_end(&mut head) {
            return self.note(name, &format!("it cannot be read: {error}"));
        }
        if head.is_empty() {
            return self.note(name, "it is empty");
        }
        let kind = kind(&head);
        let whole = io::Cursor::new(head).chain(stream);
        if depth >= DEEPEST && !matches!(kind, Kind::Text | Kind::Table | Kind::Binary) {
            return self.note(name, "archives are nested too deep; it was left out");
        }
        match kind {
            Kind::Gzip => {
                let stream = flate2::bufread::MultiGzDecoder::new(whole);
                self.content(name, Box::new(BufReader::new(stream)), depth + 1);
            }
            Kind::Xz => {
                let stream = lzma_rust2::XzReader::new_mem_limit(whole, true, MOST_DICTIONARY_KIB);
                self.content(name, Box::new(BufReader::new(stream)), depth + 1);
            }
            Kind::Zstd => match ruzstd::decoding::StreamingDecoder::new(whole) {
                Ok(stream) => self.content(name, Box::new(BufReader::new(stream)), depth + 1),
                Err(error) => self.note(name, &format!("it is no zstd stream: {error}")),
            },
            Kind::Tar => self.archive(name, whole, depth),
            Kind::Table => self.table(name, whole),
            Kind::Text => self.text(name, whole),
            Kind::Binary => self.note(name, "it is binary and none of the tables that are read"),
        }
    }

    fn archive(&mut self, name: &str, stream: impl Read, depth: usize) {
        let mut archive = tar::Archive::new(stream);
        let entries = match archive.entries() {
            Ok(entries) => entries,
            Err(error) => return self.note(name, &format!("the archive is damaged: {error}")),
        };
        let mut machine = None;
        for entry in entries {
            let mut entry = match entry {
                Ok(entry) => entry,
                Err(error) => return self.note(name, &format!("the archive is damaged: {error}")),
            };
            if self.files.len() >= MOST_FILES {
                return self.note(name, "it has too many files; the rest was left out");
            }
            let path = String::from_utf8_lossy(&entry.path_bytes()).into_owned();
            if let Some(machine) = &mut machine {
                if let Err(error) = unpack(machine, &path, &mut entry) {
                    return self.note(name, &format!("{path} cannot be unpacked: {error}"));
                }
                continue;
            }
            if path == collect::MARK {
                machine = match tempfile::tempdir() {
                    Ok(folder) => Some(Unpacked {
                        folder,
                        bytes: 0,
                        files: 0,
                    }),
                    Err(error) => {
                        return self.note(name, &format!("it cannot be unpacked: {error}"));
                    }
                };
                continue;
            }
            if !entry.header().entry_type().is_file() {
                continue;
            }
            let path = plain(&path);
            self.content(&path, Box::new(BufReader::new(entry)), depth + 1);
        }
        if let Some(Unpacked { folder, .. }) = machine {
            self.machine(name, folder.path());
        }
    }

    /// A machine that was collected: the archive's folder stands for `/`.
    fn machine(&mut self, name: &str, root: &Path) {
        let places = Places {
            sys: root.join("sys"),
            dev: root.join("dev"),
        };
        self.unpacked = Some((root.display().to_string(), name.to_owned()));
        if let Err(error) = super::machine::read(self, &places, &root.join("proc")) {
            self.note(name, &crate::output::sentence(&error));
        }
        self.unpacked = None;
    }

    /// The name of a file as it is shown: one that was unpacked lies in its archive.
    fn shown(&self, name: &str) -> String {
        let inner = self.unpacked.as_ref().and_then(|(folder, archive)| {
            Some(format!("{archive}:{}", name.strip_prefix(folder.as_str())?))
        });
        plain(inner.as_deref().unwrap_or(name))
    }

    pub(super) fn file(&mut self, name: &str) -> usize {
        let file = self.files.len();
        self.files.push(self.shown(name));
        if self.own {
            self.facts.own.insert(file);
        }
        if let Some(group) = forms::group_of_regions(name) {
            let at = At::Whole;
            self.facts.region_groups.insert(Place { file, at }, group);
        }
        file
    }

    fn table(&mut self, name: &str, stream: impl Read) {
        let file = self.file(name);
        let mut bytes = Vec::new();
        // A number in a head decides nothing: as many bytes as are there, up to a bound.
        match stream.take(acpi::MOST_TABLE as u64).read_to_end(&mut bytes) {
            Ok(_) => acpi::take(&mut self.facts, file, None, &bytes),
            Err(error) => self.note(name, &format!("it cannot be read: {error}")),
        }
    }

    fn text(&mut self, name: &str, stream: impl BufRead) {
        let file = self.file(name);
        let shown = self.files.get(file).cloned().unwrap_or_default();
        let progress = &mut *self.progress;
        let reader = Text::new(&mut self.facts, file);
        let result = reader.read(stream.take(MOST_BYTES), &mut |bytes| {
            progress(&shown, bytes)
        });
        if let Err(error) = result {
            self.note(name, &format!("it was read up to a damage: {error}"));
        }
        if !self.facts.contents.contains_key(&file)
            && !self.facts.doubtful.contains(&file)
            && !self.facts.unread.iter().any(|one| one.0 == file)
        {
            self.note(name, "nothing in it is about device memory");
        }
    }
}

/// A collected machine while it is unpacked.
struct Unpacked {
    folder: tempfile::TempDir,
    bytes: u64,
    files: usize,
}

/// Unpacks an entry of a collected machine. Nothing outside of the folder is written or read, whatever the entry says:
/// a link keeps only the last name that it leads to.
fn unpack(
    machine: &mut Unpacked,
    path: &str,
    entry: &mut tar::Entry<'_, impl Read>,
) -> io::Result<()> {
    const MOST_UNPACKED: u64 = 256 << 20;
    let damaged = |why: &str| Err(io::Error::new(io::ErrorKind::InvalidData, why.to_owned()));
    let Some(inner) = collect::inner(path.as_ref()) else {
        return damaged("it leads out of the archive");
    };
    machine.files += 1;
    machine.bytes = machine.bytes.saturating_add(entry.size());
    if machine.files > MOST_FILES || machine.bytes > MOST_UNPACKED {
        return damaged("the archive is too large");
    }
    let place = machine.folder.path().join(inner);
    let kind = entry.header().entry_type();
    let above = if kind.is_dir() {
        Some(place.as_path())
    } else {
        place.parent()
    };
    above.map_or(Ok(()), fs::create_dir_all)?;
    if kind.is_file() {
        io::copy(entry, &mut File::create_new(place)?)?;
    } else if kind.is_symlink() {
        let target = entry.link_name()?;
        if let Some(name) = target.as_deref().and_then(Path::file_name) {
            std::os::unix::fs::symlink(name, place)?;
        }
    }
    Ok(())
}

/// A content, by its first bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Gzip,
    Xz,
    Zstd,
    Tar,
    Table,
    Text,
    Binary,
}

/// Sources: RFC 1952, section 2.3.1; the .xz file format 1.2.1, section 2.1.1.1; RFC 8878, section 3.1.1; POSIX
/// `pax`, "ustar Interchange Format".
fn kind(head: &[u8]) -> Kind {
    if head.starts_with(&[0x1f, 0x8b]) {
        Kind::Gzip
    } else if head.starts_with(b"\xfd7zXZ\0") {
        Kind::Xz
    } else if head.starts_with(&[0x28, 0xb5, 0x2f, 0xfd]) {
        Kind::Zstd
    } else if head.get(257..262) == Some(b"ustar") {
        Kind::Tar
    } else if acpi::is_table(head) {
        Kind::Table
    } else {
        // Text has no null bytes, but lines of /proc/PID/cmdline do not come here.
        let nulls = head.iter().filter(|byte| **byte == 0).count();
        match nulls {
            0 => Kind::Text,
            _ => Kind::Binary,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(bytes: &[u8]) -> (Facts, Vec<String>) {
        let mut progress = |_: &str, _: u64| {};
        let mut input = Input::new(&mut progress);
        input.stream("x", bytes);
        (input.facts, input.files)
    }

    const TEXT: &[u8] = b"vfio_pin_pages_remote: RLIMIT_MEMLOCK (65536) exceeded\n";

    #[test]
    fn compressed_texts_and_archives_are_read_as_they_are() {
        use std::io::Write as _;
        let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        gzip.write_all(TEXT).unwrap();
        let mut tar = tar::Builder::new(Vec::new());
        let mut header = tar::Header::new_ustar();
        header.set_size(TEXT.len() as u64);
        header.set_cksum();
        tar.append_data(&mut header, "logs/dmesg.txt", TEXT)
            .unwrap();
        let tar = tar.into_inner().unwrap();
        let mut both = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        both.write_all(&tar).unwrap();
        // `xz -0` and `zstd` of "A\n", written down: readers of ours need no writers.
        for bytes in [
            TEXT.to_vec(),
            gzip.finish().unwrap(),
            tar,
            both.finish().unwrap(),
        ] {
            let (facts, files) = read(&bytes);
            assert_eq!(facts.lines.len(), 1, "{files:?} {:?}", facts.notes);
        }
    }

    #[test]
    fn contents_that_are_not_read_are_named() {
        for (bytes, remark) in [
            (&b""[..], "empty"),
            (b"\x7fELF\0\0\0", "binary"),
            (b"\x1f\x8b\x08\0damaged", "cannot be read"),
            (b"\xfd7zXZ\0damaged", "cannot be read"),
            (b"\x28\xb5\x2f\xfd", "zstd"),
        ] {
            let (facts, _) = read(bytes);
            assert_eq!(facts.notes.len(), 1, "{remark}: {:?}", facts.notes);
            assert!(facts.notes[0].contains(remark), "{:?}", facts.notes);
        }
    }

    #[test]
    fn a_wrong_start_is_no_reason_to_panic() {
        for kind in [
            &b"\x1f\x8b"[..],
            b"\xfd7zXZ\0",
            b"\x28\xb5\x2f\xfd",
            b"DMAR\x30\0\0\0",
        ] {
            for length in 0..64usize {
                for byte in [0, 1, 0x7f, 0xff] {
                    let mut bytes = kind.to_vec();
                    bytes.extend(std::iter::repeat_n(byte, length));
                    read(&bytes);
                }
            }
        }
    }
}
