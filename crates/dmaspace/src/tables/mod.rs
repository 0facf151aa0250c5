//! Tables that somebody else has written: listed, checked, compared, and one walk explained.
//!
//! They come from a file: an [image](iopt::image) of tables, or a dump of memory with the address of a
//! root in it, as QEMU's `pmemsave` or a crash dump gives. Nothing of the engine reads them: they are
//! walked and scanned by [`iopt::walk`], which is written from the specifications, so that what is
//! said is what a unit would find.
//!
//! Any bytes survive. Work is bounded by what is in the file: each table is read once for each level
//! that it stands for, however many entries lead to it, and [`Limits`] bound the rest. What was left
//! out is said.

mod diff;
mod event;
mod explain;
pub mod fields;
mod memory;
mod report;
mod root;
mod survey;
mod tree;

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use iopt::Root;
use iopt::image::{Image, ImageError};
use iopt::walk::{BadAddress, WalkMemory, WalkReason, Walker};
use thiserror::Error;

use memory::Dump;

pub use diff::{Change, DiffReport, diff};
pub use event::{Event, event};
pub use explain::{Explained, Outcome, Step, explain};
pub use report::{
    Finding, FindingKind, LeafReport, LevelReport, RootReport, RunReport, Severity, Survey, Waste,
};
pub use root::{FORMATS, RootError, root};
pub use survey::{Limits, survey};
pub use tree::TreeLine;

/// An image of more bytes is not read: it would have to fit into memory.
const MOST_IMAGE_BYTES: u64 = 16 << 30;

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
        "{path} is no image of tables: for a dump of memory say --format and --root (and --offset, \
         where the dump does not begin at address 0)"
    )]
    NoImage {
        /// The file.
        path: PathBuf,
    },
    /// An image does not say what a dump has to be told.
    #[error("{path} is an image of tables, which says itself what --format and --root would")]
    IsImage {
        /// The file.
        path: PathBuf,
    },
    /// The image is larger than can be read.
    #[error("{path} has {bytes} bytes; images of up to {most} are read")]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// Its bytes.
        bytes: u64,
        /// The most.
        most: u64,
    },
    /// The image is damaged.
    #[error("{path}: {cause}")]
    Image {
        /// The file.
        path: PathBuf,
        /// What is wrong.
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
        matches!(self, Self::Image { .. })
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
}

impl TableFile {
    /// Opens an image, or with `place` a dump of memory.
    ///
    /// # Errors
    ///
    /// When it cannot be read, or is not what it was said to be.
    pub fn open(path: &Path, place: Option<InDump>) -> Result<Self, TablesError> {
        let failed = |source| TablesError::Read {
            path: path.into(),
            source,
        };
        let mut file = File::open(path).map_err(failed)?;
        let content = match place {
            Some(place) => {
                if starts_as_image(&mut file).map_err(failed)? {
                    return Err(TablesError::IsImage { path: path.into() });
                }
                Content::Dump(Dump::new(file, place.offset), place)
            }
            None => {
                let bytes = fs::metadata(path).map_err(failed)?.len();
                if !starts_as_image(&mut file).map_err(failed)? {
                    return Err(TablesError::NoImage { path: path.into() });
                }
                if bytes > MOST_IMAGE_BYTES {
                    return Err(TablesError::TooLarge {
                        path: path.into(),
                        bytes,
                        most: MOST_IMAGE_BYTES,
                    });
                }
                Content::Image(fs::read(path).map_err(failed)?)
            }
        };
        Ok(Self {
            path: path.into(),
            content,
        })
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
        };
        let tables = Tables::new(root, encryption, source);
        tables.check_root().map_err(|reason| match reason {
            WalkReason::NoMemory { .. } => TablesError::RootOutside {
                path: path(),
                offset: match &self.content {
                    Content::Dump(_, place) => place.offset,
                    Content::Image(_) => 0,
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

fn starts_as_image(file: &mut File) -> io::Result<bool> {
    let mut start = Vec::new();
    file.take(8).read_to_end(&mut start)?;
    Ok(start == b"IOPTIMG\n")
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

    /// What reads them.
    pub const fn walker(&self) -> &Walker {
        &self.walker
    }

    /// Where the tables begin.
    pub const fn root(&self) -> Root {
        self.walker.root()
    }

    /// How many tables an image holds, the root among them; `None` for a dump, which holds anything.
    pub fn stored(&self) -> Option<u64> {
        match &self.source {
            Source::Image(image) => Some(image.len() as u64),
            Source::Dump(_) => None,
        }
    }

    /// Reading the root's first entry, as far as it can be read.
    fn check_root(&self) -> Result<(), WalkReason> {
        let mut first = Ok(());
        self.walker.scan(self, |entry| {
            if let Err(reason @ WalkReason::NoMemory { .. }) = entry.says
                && entry.index == 0
            {
                first = Err(reason);
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
        }
    }

    fn read_u32(&self, address: u64) -> Result<u32, BadAddress> {
        match &self.source {
            Source::Image(image) => image.read_u32(address),
            Source::Dump(dump) => dump.read_u32(address),
        }
    }
}
