//! Tables that another program has written: listed, checked, compared, and one walk explained.
//!
//! They come from a file: an [image](iopt::image) of tables, a dump of memory with the address of a
//! root in it, as QEMU's `pmemsave` or a crash dump gives, or what a running kernel shows of VT-d's tables
//! in debugfs. Nothing of the engine reads them: they are walked and scanned by [`iopt::walk`], which is written from the
//! specifications, so that it finds what a unit would.
//!
//! It survives any bytes. Work is bounded by what is in the file: each table is read once for each
//! level that it stands for, however many entries lead to it, and [`Limits`] bound the rest. Reports
//! say if something was left out.

#![allow(
    unreachable_pub,
    reason = "`pub` is for other commands, tests and fuzz targets; the crate shows none of it"
)]

mod command;
mod diff;
mod event;
mod explain;
pub mod fields;
mod image;
mod kernel;
mod memory;
mod picture;
mod report;
mod survey;
#[cfg(test)]
mod tests;
mod text;
mod tree;

use std::fs::File;
use std::io::{self, BufReader, ErrorKind, Read};
use std::os::unix::fs::{FileExt, FileTypeExt};
use std::path::{Path, PathBuf};

use hostmem::{TooLong, rest_at_most};
use iopt::Root;
use iopt::image::{Image, ImageError};
use iopt::walk::{BadAddress, WalkMemory, WalkReason, Walker};
use thiserror::Error;

use kernel::KernelTables;
use memory::Dump;

pub(crate) use command::{TablesCommand, run};
pub use diff::{Change, DiffReport, Reached, diff};
pub use event::{Event, event};
pub use explain::{Explained, Outcome, Step, explain};
pub use iopt::named::{FORMATS, root};
pub use kernel::KernelTextError;
pub use report::{Finding, LeafReport, Severity, Survey};
#[cfg(test)]
pub use report::{FindingKind, RunReport};
pub use survey::{Limits, survey};
pub use tree::TreeLine;

/// An image of more bytes is not read: it would have to fit into memory.
const MOST_IMAGE_BYTES: u64 = 16 << 30;
/// An image that comes out of a pipe or a device, which no one had to store, may have fewer; and of memory
/// that a device shows, which may have no end, so many are read in all.
const MOST_STREAM_BYTES: u64 = 64 << 20;

/// Where tables are in a dump of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InDump {
    /// The root, its format and levels.
    pub root: Root,
    /// The physical address of the file's first byte.
    pub offset: u64,
    /// The bit that marks addresses of tables as encrypted, where the processor does that.
    pub encryption_bit: Option<u32>,
}

/// Why there are no tables to look at.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum TablesError {
    /// The file cannot be opened or read.
    #[error("cannot read {path}")]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// It is no image, and nothing says where in it tables are.
    #[error(
        "{path} is no image of tables: a dump of memory requires --format and --root (and --offset, if \
         it does not begin at address 0)"
    )]
    NoImage {
        /// The file.
        path: PathBuf,
    },
    /// An image does not say what a dump has to be told.
    #[error(
        "{path} is an image of tables, which contains its format and root: omit --format and --root"
    )]
    IsImage {
        /// The file.
        path: PathBuf,
    },
    /// A device is named, and the file is not what a kernel shows.
    #[error("{path} is no kernel's text of tables, of which --device chooses")]
    NoKernelText {
        /// The file.
        path: PathBuf,
    },
    /// A kernel's text is not understood, or not of the device.
    #[error("cannot decode {path}")]
    Kernel {
        /// The file.
        path: PathBuf,
        /// Error in the text.
        #[source]
        cause: KernelTextError,
    },
    /// Nothing in the dump can be read but in its order.
    #[error(
        "{path} is a pipe or a terminal: a dump of memory is read at several offsets, so it must be a file or a device"
    )]
    Pipe {
        /// The file.
        path: PathBuf,
    },
    /// The dump has no size, and its tables no end.
    #[error(
        "{path} is a device without a size, and more than {most} bytes of tables are in it: such tables \
         are read from a file"
    )]
    Endless {
        /// The file.
        path: PathBuf,
        /// The most that is read.
        most: u64,
    },
    /// The image is damaged.
    #[error("cannot decode {path}")]
    Image {
        /// The file.
        path: PathBuf,
        /// Error in the image.
        #[source]
        cause: ImageError,
    },
    /// There can be no such root.
    #[error("{path}: the root at {address:#x} {reason}")]
    Root {
        /// The file.
        path: PathBuf,
        /// The root's address.
        address: u64,
        /// Why.
        reason: WalkReason,
    },
    /// The dump does not hold the root.
    #[error("{path} holds the addresses from {offset:#x} on, and not the root at {address:#x}")]
    RootOutside {
        /// The file.
        path: PathBuf,
        /// Its first address.
        offset: u64,
        /// The root's address.
        address: u64,
    },
}

impl TablesError {
    /// True when the file was there, but is damaged.
    pub const fn is_damage(&self) -> bool {
        use KernelTextError::{Line, Torn};
        matches!(
            self,
            Self::Image { .. }
                | Self::Kernel {
                    cause: Line { .. } | Torn { .. },
                    ..
                }
        )
    }
}

/// A file with tables in it.
#[derive(Debug)]
pub struct TableFile {
    path: PathBuf,
    content: Content,
}

#[derive(Debug)]
enum Content {
    Image(Vec<u8>),
    Dump(Dump, InDump),
    Kernel(KernelTables),
}

/// Kind of a file, by its first bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Start {
    Image,
    Kernel,
    Other,
}

impl TableFile {
    /// Opens an image, what a kernel shows of one device, or with `place` a dump of memory.
    ///
    /// # Errors
    ///
    /// When it cannot be read, or is not what it was said to be.
    pub fn open(path: &Path, place: Option<InDump>) -> Result<Self, TablesError> {
        let failed = |source| TablesError::Read {
            path: path.into(),
            source,
        };
        let (start, file) = opened(path).map_err(failed)?;
        let content = match (place, Start::of(&start)) {
            (Some(_), Start::Image) => return Err(TablesError::IsImage { path: path.into() }),
            (Some(place), _) => {
                if matches!(file.read_at(&mut [0], 0), Err(error) if error.kind() == ErrorKind::NotSeekable)
                {
                    return Err(TablesError::Pipe { path: path.into() });
                }
                let kind = file.metadata().map_err(failed)?.file_type();
                let sized = kind.is_file() || kind.is_block_device();
                let most = (!sized).then_some(MOST_STREAM_BYTES);
                Content::Dump(Dump::new(file, place.offset, most), place)
            }
            (None, Start::Image) => Content::Image(whole_image(&start, file).map_err(failed)?),
            (None, Start::Kernel) => Content::Kernel(kernel_text(path, &start, file, None)?),
            (None, Start::Other) => return Err(TablesError::NoImage { path: path.into() }),
        };
        Ok(Self {
            path: path.into(),
            content,
        })
    }

    /// Reads what a kernel shows of the tables of one device, from text that has been read already; `name` is the
    /// file's, for errors.
    ///
    /// # Errors
    ///
    /// When it is no such text.
    pub fn of_kernel_text(name: &str, text: impl io::BufRead) -> Result<Self, TablesError> {
        let path = PathBuf::from(name);
        match KernelTables::read(text, None) {
            Ok(tables) => Ok(Self {
                path,
                content: Content::Kernel(tables),
            }),
            Err(cause) => Err(TablesError::Kernel { path, cause }),
        }
    }

    /// Opens what a kernel shows of VT-d's tables (`/sys/kernel/debug/iommu/intel/DEVICE/
    /// domain_translation_struct`): those of `device`, a PCI address with `/PASID` behind it or without;
    /// `None` when it is of one only.
    ///
    /// # Errors
    ///
    /// When it cannot be read, is not such a text, or not one of that device alone.
    pub fn open_kernel_text(path: &Path, device: Option<&str>) -> Result<Self, TablesError> {
        let failed = |source| TablesError::Read {
            path: path.into(),
            source,
        };
        let (start, file) = opened(path).map_err(failed)?;
        if Start::of(&start) != Start::Kernel {
            return Err(TablesError::NoKernelText { path: path.into() });
        }
        Ok(Self {
            path: path.into(),
            content: Content::Kernel(kernel_text(path, &start, file, device)?),
        })
    }

    /// All tables in it: [`survey()`].
    ///
    /// # Errors
    ///
    /// Errors of [`tables`](Self::tables), and tables in a device that have no end.
    pub fn survey(&self, limits: Limits) -> Result<Survey, TablesError> {
        let tables = self.tables()?;
        let found = survey(&tables, limits);
        match tables.exhausted() {
            false => Ok(found),
            true => Err(TablesError::Endless {
                path: self.path.clone(),
                most: MOST_STREAM_BYTES,
            }),
        }
    }

    /// The tables in it.
    ///
    /// # Errors
    ///
    /// When the image is damaged, or there can be no root where it was said to be.
    pub fn tables(&self) -> Result<Tables<'_>, TablesError> {
        let path = || self.path.clone();
        let (source, root, encryption) = match &self.content {
            Content::Image(bytes) => {
                let image = Image::parse(bytes).map_err(|cause| TablesError::Image {
                    path: path(),
                    cause,
                })?;
                (Source::Image(image), image.root(), image.encryption_bit())
            }
            Content::Dump(dump, place) => (Source::Dump(dump), place.root, place.encryption_bit),
            Content::Kernel(tables) => (Source::Kernel(tables), tables.root(), None),
        };
        let tables = Tables::new(root, encryption, source);
        tables.check_root().map_err(|reason| match reason {
            WalkReason::NoMemory { .. } => TablesError::RootOutside {
                path: path(),
                offset: match &self.content {
                    Content::Dump(_, place) => place.offset,
                    Content::Image(_) | Content::Kernel(_) => 0,
                },
                address: root.address,
            },
            reason => TablesError::Root {
                path: path(),
                address: root.address,
                reason,
            },
        })?;
        Ok(tables)
    }
}

/// A file, and its first bytes, which are read: a pipe has them once.
fn opened(path: &Path) -> io::Result<(Vec<u8>, File)> {
    let file = File::open(path)?;
    let mut start = Vec::new();
    (&file).take(8).read_to_end(&mut start)?;
    Ok((start, file))
}

impl Start {
    fn of(start: &[u8]) -> Self {
        match start {
            b"IOPTIMG\n" => Self::Image,
            start if start.starts_with(kernel::START) => Self::Kernel,
            _ => Self::Other,
        }
    }
}

/// All bytes of an image. One that has a size tells it before it is read; a pipe or a device has none.
fn whole_image(start: &[u8], file: File) -> io::Result<Vec<u8>> {
    let known = file.metadata()?;
    let most = match known.is_file() {
        true => MOST_IMAGE_BYTES,
        false => MOST_STREAM_BYTES,
    };
    if known.len() > most {
        return Err(io::Error::new(ErrorKind::FileTooLarge, TooLong { most }));
    }
    rest_at_most(start.chain(file), most)
}

fn kernel_text(
    path: &Path,
    start: &[u8],
    file: File,
    device: Option<&str>,
) -> Result<KernelTables, TablesError> {
    let text = BufReader::new(start.chain(file));
    KernelTables::read(text, device).map_err(|cause| TablesError::Kernel {
        path: path.into(),
        cause,
    })
}

/// The tables of a file.
#[derive(Clone, Copy, Debug)]
pub struct Tables<'a> {
    walker: Walker,
    source: Source<'a>,
    /// The root table, without the bit of encryption.
    first: u64,
}

#[derive(Clone, Copy, Debug)]
enum Source<'a> {
    Image(Image<'a>),
    Dump(&'a Dump),
    Kernel(&'a KernelTables),
}

impl<'a> Tables<'a> {
    fn new(root: Root, encryption: Option<u32>, source: Source<'a>) -> Self {
        let bit = encryption.filter(|bit| *bit < 64);
        let walker = Walker::new(root);
        Self {
            walker: match bit {
                Some(bit) => walker.with_encryption_bit(bit),
                None => walker,
            },
            source,
            first: root.address & !bit.map_or(0, |bit| 1 << bit),
        }
    }

    /// The tables of an image.
    pub fn of_image(image: Image<'a>) -> Self {
        Self::new(image.root(), image.encryption_bit(), Source::Image(image))
    }

    /// The walker that reads them.
    pub const fn walker(&self) -> &Walker {
        &self.walker
    }

    /// Where the tables begin.
    pub const fn root(&self) -> Root {
        self.walker.root()
    }

    /// How many tables an image holds, the root among them; `None` for a dump, which holds anything, and
    /// for what a kernel shows, which names those that lead to a leaf.
    pub fn stored(&self) -> Option<u64> {
        match &self.source {
            Source::Image(image) => Some(image.len() as u64),
            Source::Dump(_) | Source::Kernel(_) => None,
        }
    }

    /// True when a dump without a size has more tables than are read.
    fn exhausted(&self) -> bool {
        matches!(self.source, Source::Dump(dump) if dump.exhausted())
    }

    /// Reading the root's first entry, as far as it can be read.
    fn check_root(&self) -> Result<(), WalkReason> {
        let mut first = Ok(());
        self.walker.scan(self, |entry| {
            match entry.says {
                Err(reason @ WalkReason::NoMemory { .. }) if entry.index == 0 => {
                    first = Err(reason);
                }
                _ => {}
            }
            iopt::walk::ScanStep::End
        })?;
        first
    }
}

impl WalkMemory for Tables<'_> {
    fn read_u64(&self, address: u64) -> Result<u64, BadAddress> {
        match &self.source {
            Source::Image(image) => image.read_u64(address),
            Source::Dump(dump) => dump.read_u64(address),
            Source::Kernel(tables) => tables.read_u64(address),
        }
    }

    fn read_u32(&self, address: u64) -> Result<u32, BadAddress> {
        match &self.source {
            Source::Image(image) => image.read_u32(address),
            Source::Dump(dump) => dump.read_u32(address),
            Source::Kernel(tables) => tables.read_u32(address),
        }
    }
}
