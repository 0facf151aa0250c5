//! Refused parts of messages, by name, with numbers, and counted.
//!
//! The queue goes on, whatever a driver sends: invalid records are left out and counted here. A
//! wrong record is left out alone wherever the next one can be found behind it; where that is in
//! doubt, the rest of the message is left out, too.

use runs::{GuestAddr, Span};

/// Why a message, or a part of one, was not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// Shorter than the header, or not a multiple of the format's unit. Whole units are taken.
    #[error("{bytes} bytes are not whole units of {unit}")]
    Length {
        /// Bytes of the message, or of its data.
        bytes: usize,
        /// Bytes of the header or of a unit.
        unit: usize,
    },
    /// Longer than messages may be. Nothing of it is taken.
    #[error("a message of {bytes} bytes, {most} are allowed")]
    TooLong {
        /// Its bytes.
        bytes: usize,
        /// The most.
        most: usize,
    },
    /// The header states another length than the message has. Nothing of it is taken.
    #[error("the header states {stated} and the message has {found}")]
    Stated {
        /// The stated length.
        stated: u64,
        /// The actual length.
        found: u64,
    },
    /// The header's command, flags or id are not those of this queue. Nothing of it is taken.
    #[error("a header of {found:#x}, which is no message of this queue")]
    Header {
        /// The header's first four bytes, as a little-endian number.
        found: u32,
    },
    /// A record ends behind the message. The rest is left out.
    #[error("the record at byte {at} needs {bytes} bytes, {left} are left")]
    Record {
        /// Where it begins, in bytes of the message.
        at: usize,
        /// Its bytes.
        bytes: usize,
        /// The bytes that there are.
        left: usize,
    },
    /// A bitmap's length is not a multiple of 8. The rest is left out.
    #[error("the record at byte {at} has a bitmap of {bytes} bytes, not of whole words")]
    Bitmap {
        /// Where its record begins, in bytes of the message.
        at: usize,
        /// Its bytes.
        bytes: usize,
    },
    /// A page size that the format does not have.
    #[error("the record at byte {at} has pages of 2^{shift} bytes, which the format has not")]
    Shift {
        /// Where its record begins, in bytes of the message.
        at: usize,
        /// The size as a power of two.
        shift: u32,
    },
    /// The address or length of a buffer of pages is not a multiple of 4 KiB.
    #[error("buffer {nr} of a chain of pages has wrong bits: {word:#x}")]
    Bits {
        /// Its place in the chain, from 0.
        nr: usize,
        /// The address or length.
        word: u64,
    },
    /// A buffer of no pages.
    #[error("buffer {nr} of a chain of pages is empty")]
    Empty {
        /// Its place in the chain, from 0.
        nr: usize,
    },
    /// Pages beyond the last address.
    #[error("{pages} pages from {start:#x} go beyond the last address")]
    Wraps {
        /// The first address.
        start: u64,
        /// The pages, of 4 KiB.
        pages: u64,
    },
    /// No byte of the run is memory of the guest.
    #[error("{run} is no memory of the guest")]
    OutsideRam {
        /// The run.
        run: Span<GuestAddr>,
    },
    /// A part of the run is not memory of the guest: it lies across a hole, or over an end. The rest
    /// of it is taken.
    #[error("{bytes} bytes of {run} are no memory of the guest")]
    Hole {
        /// The run.
        run: Span<GuestAddr>,
        /// Bytes that are not memory.
        bytes: u64,
    },
    /// A chain of descriptors that does not end, leaves its table, is longer than the queue or than
    /// 2^32 bytes, or cannot be read. Nothing of it is taken.
    #[error("the chain from descriptor {head} cannot be followed to its end")]
    Chain {
        /// Its first descriptor.
        head: u16,
    },
    /// A buffer to be written where one to be read is wanted, or the other way around. Nothing of a
    /// message is taken then; of a chain whose buffers are the pages, this buffer is left out.
    #[error("the buffer of {len} bytes at {address:#x} has the wrong direction")]
    Direction {
        /// The buffer's address.
        address: u64,
        /// Its bytes.
        len: u32,
    },
    /// A buffer that is not memory of the guest. Nothing of the message is taken.
    #[error("the buffer of {len} bytes at {address:#x} is no memory of the guest")]
    Buffer {
        /// Its address.
        address: u64,
        /// Its bytes.
        len: u32,
    },
    /// No buffer to be written behind the page numbers, where the device is to say which pages it has initialized
    /// ([`InitBit`](crate::InitBit)). Nothing of the message is taken.
    #[error("no buffer to be written behind {pages} page numbers")]
    NoBitmap {
        /// Page numbers of the message.
        pages: u64,
    },
    /// A buffer that is too short for a bit for each page number. Nothing of the message is taken.
    #[error("{bytes} bytes to be written behind {pages} page numbers, which need {needed}")]
    ShortBitmap {
        /// Page numbers of the message.
        pages: u64,
        /// Bytes to be written.
        bytes: u64,
        /// Bytes that are needed.
        needed: u64,
    },
    /// The queue names a descriptor that it does not have. It cannot be given back.
    #[error("descriptor {head} of a queue that has {size}")]
    Head {
        /// The named descriptor.
        head: u16,
        /// Its descriptors.
        size: u16,
    },
    /// A second buffer for statistics, where there is one already: that goes back.
    #[error("descriptor {head} is a second buffer for statistics")]
    Spare {
        /// The second one's first descriptor.
        head: u16,
    },
}

impl Refusal {
    /// Names of all causes, in the order of [`Refusals::counts`].
    pub const NAMES: [&'static str; 19] = [
        "length",
        "too long",
        "stated length",
        "header",
        "record",
        "bitmap",
        "page size",
        "bits",
        "empty",
        "wraps",
        "outside memory",
        "hole",
        "chain",
        "direction",
        "buffer outside memory",
        "no such descriptor",
        "spare statistics",
        "no initialized bitmap",
        "short initialized bitmap",
    ];

    /// The cause's place in [`NAMES`](Self::NAMES).
    pub const fn index(&self) -> usize {
        match self {
            Self::Length { .. } => 0,
            Self::TooLong { .. } => 1,
            Self::Stated { .. } => 2,
            Self::Header { .. } => 3,
            Self::Record { .. } => 4,
            Self::Bitmap { .. } => 5,
            Self::Shift { .. } => 6,
            Self::Bits { .. } => 7,
            Self::Empty { .. } => 8,
            Self::Wraps { .. } => 9,
            Self::OutsideRam { .. } => 10,
            Self::Hole { .. } => 11,
            Self::Chain { .. } => 12,
            Self::Direction { .. } => 13,
            Self::Buffer { .. } => 14,
            Self::Head { .. } => 15,
            Self::Spare { .. } => 16,
            Self::NoBitmap { .. } => 17,
            Self::ShortBitmap { .. } => 18,
        }
    }
}

/// Refusals by cause, and the latest of them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Refusals {
    counts: [u64; Refusal::NAMES.len()],
    latest: Option<Refusal>,
}

impl Refusals {
    /// None yet.
    pub const fn new() -> Self {
        Self {
            counts: [0; Refusal::NAMES.len()],
            latest: None,
        }
    }

    /// Counts one.
    #[cold]
    pub fn add(&mut self, refusal: Refusal) {
        let count = &mut self.counts[refusal.index()];
        *count = count.saturating_add(1);
        self.latest = Some(refusal);
    }

    /// Counts what `other` has counted after all that is here.
    pub fn append(&mut self, other: &Self) {
        for (count, more) in self.counts.iter_mut().zip(other.counts) {
            *count = count.saturating_add(more);
        }
        self.latest = other.latest.or(self.latest);
    }

    /// How many of each cause, in the order of [`Refusal::NAMES`].
    pub const fn counts(&self) -> &[u64; Refusal::NAMES.len()] {
        &self.counts
    }

    /// How many.
    pub fn total(&self) -> u64 {
        self.counts
            .iter()
            .fold(0, |sum, count| sum.saturating_add(*count))
    }

    /// The latest.
    pub const fn latest(&self) -> Option<Refusal> {
        self.latest
    }
}
