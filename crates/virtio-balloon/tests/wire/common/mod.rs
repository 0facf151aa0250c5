//! Shared parts of the suites: any format, whole transfers, and sets of pages.

#![allow(dead_code, reason = "the bench uses a part of it")]

pub(crate) mod patterns;

use std::collections::BTreeSet;

use runs::{GuestAddr, Joiner, Span};
use virtio_balloon::{
    BitmapRecords, EncodeError, GuestPage, LePfns, MOST_MESSAGE_BYTES, MessageFormat,
    MessageSource, Refusals, Stretches, WIRE_PAGE,
};

/// Either format.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Any {
    Pfns,
    Bitmap,
}

pub(crate) const ALL: [Any; 2] = [Any::Pfns, Any::Bitmap];

pub(crate) const PAGES: [GuestPage; 3] =
    [GuestPage::SIZE_4K, GuestPage::SIZE_16K, GuestPage::SIZE_64K];

impl Any {
    pub(crate) fn encode<I: Iterator<Item = Span<GuestAddr>>>(
        self,
        source: &mut MessageSource<I>,
        message: &mut [u8],
    ) -> Result<usize, EncodeError> {
        match self {
            Self::Pfns => LePfns.encode(source, message),
            Self::Bitmap => BitmapRecords.encode(source, message),
        }
    }

    pub(crate) fn decode(
        self,
        message: &[u8],
        refusals: &mut Refusals,
        sink: impl FnMut(Span<GuestAddr>),
    ) {
        match self {
            Self::Pfns => LePfns.decode(message, refusals, sink),
            Self::Bitmap => BitmapRecords.decode(message, refusals, sink),
        }
    }

    /// As [`encode`](Self::encode), from a bitmap, by words where the format can.
    pub(crate) fn encode_bitmap(
        self,
        source: &mut MessageSource<Stretches<'_>>,
        message: &mut [u8],
    ) -> Result<usize, EncodeError> {
        match self {
            Self::Bitmap => BitmapRecords.encode_bitmap(source, message),
            Self::Pfns => LePfns.encode(source, message),
        }
    }

    /// The buffer of a usual message: Linux sends 256 page numbers in one.
    pub(crate) fn usual(self) -> usize {
        match self {
            Self::Pfns => 1024,
            Self::Bitmap => MOST_MESSAGE_BYTES,
        }
    }

    /// The shortest buffer that holds a record of any kind.
    pub(crate) fn shortest(self) -> usize {
        match self {
            Self::Pfns => 4,
            Self::Bitmap => 24,
        }
    }
}

/// All messages for these runs, in a buffer of this size.
pub(crate) fn messages(
    format: Any,
    page: GuestPage,
    runs: &[Span<GuestAddr>],
    buffer: usize,
) -> Vec<Vec<u8>> {
    let mut source = MessageSource::new(runs.iter().copied(), page);
    let mut message = vec![0xaa; buffer];
    let mut all = Vec::new();
    loop {
        let used = format.encode(&mut source, &mut message).unwrap();
        if used == 0 {
            return all;
        }
        all.push(message[..used].to_vec());
    }
}

/// The runs of these messages as they come, and what was refused.
pub(crate) fn decoded(format: Any, messages: &[Vec<u8>]) -> (Vec<Span<GuestAddr>>, Refusals) {
    let mut refusals = Refusals::new();
    let mut found = Vec::new();
    for message in messages {
        format.decode(message, &mut refusals, |run| found.push(run));
    }
    (found, refusals)
}

/// Neighbours merged, in the order given.
pub(crate) fn joined(runs: &[Span<GuestAddr>]) -> Vec<Span<GuestAddr>> {
    let mut joiner = Joiner::new();
    let mut out: Vec<_> = runs.iter().filter_map(|run| joiner.push(*run)).collect();
    out.extend(joiner.finish());
    out
}

/// The runs of a set of guest pages.
pub(crate) fn runs_of(pages: &BTreeSet<u64>, page: GuestPage) -> Vec<Span<GuestAddr>> {
    let pages: Vec<_> = pages
        .iter()
        .map(|nr| Span::new(nr << page.shift(), page.bytes()))
        .collect();
    joined(&pages)
}

/// A run by its first page and pages, of 4 KiB.
pub(crate) fn pages(first: u64, pages: u64) -> Span<GuestAddr> {
    Span::new(first * WIRE_PAGE, pages * WIRE_PAGE)
}
