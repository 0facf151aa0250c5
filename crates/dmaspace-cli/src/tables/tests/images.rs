//! Images and dumps of tables that the engine built.

use std::io::Write as _;
use std::path::PathBuf;

use crate::tables::image::{Mapped, build};
use crate::tables::{FORMATS, InDump, TableFile, root};
use iopt::image::Image;
use iopt::{Prot, Root};
use runs::{PageSizes, Run};
use tempfile::TempDir;

/// Mappings: input address, physical address, bytes, permissions.
pub(crate) type Maps<'a> = &'a [(u64, u64, u64, Prot)];

/// An image of a table of the format with this name, and what a unit would be told of it.
pub(crate) fn image(name: &str, maps: Maps<'_>) -> (Vec<u8>, Root) {
    image_with(name, u64::MAX, maps)
}

/// The same with leaves of up to `most` bytes.
pub(crate) fn image_with(name: &str, most: u64, maps: Maps<'_>) -> (Vec<u8>, Root) {
    let root = root(name, 0, None, None, false).unwrap();
    let maps: Vec<_> = maps
        .iter()
        .map(|&(iova, pa, len, prot)| Mapped {
            run: Run { iova, pa, len },
            prot,
        })
        .collect();
    let built = build(root, PageSizes::from_bits(u64::MAX).up_to(most), &maps).unwrap();
    (built.image, built.root)
}

/// A file with these bytes, opened.
pub(crate) struct TempImage {
    _directory: TempDir,
    pub(crate) path: PathBuf,
}

pub(crate) fn keep(bytes: &[u8]) -> TempImage {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("tables");
    let mut file = std::fs::File::create(&path).unwrap();
    file.write_all(bytes).unwrap();
    TempImage {
        _directory: directory,
        path,
    }
}

impl TempImage {
    pub(crate) fn open(&self, place: Option<InDump>) -> TableFile {
        TableFile::open(&self.path, place).unwrap()
    }
}

/// Memory as a dump has it: the image's tables where they lay, in a file that begins at the address
/// that is returned.
pub(crate) fn dump_of(image: &[u8]) -> (Vec<u8>, u64) {
    let number = |at: usize, bytes: usize| {
        let bytes = &image[at..at + bytes];
        bytes.iter().rev().fold(0u64, |n, b| n << 8 | u64::from(*b))
    };
    let (root, root_bytes, bytes) = (number(48, 8), number(56, 4), number(60, 4));
    let count = number(64, 8) as usize;
    let mut tables = vec![(root, &image[80..80 + root_bytes as usize])];
    let mut at = 80 + root_bytes as usize;
    for _ in 0..count {
        let end = at + 16 + bytes as usize;
        tables.push((number(at, 8), &image[at + 16..end]));
        at = end;
    }
    let first = tables.iter().map(|table| table.0).min().unwrap();
    let last = tables
        .iter()
        .map(|table| table.0 + table.1.len() as u64)
        .max();
    let mut dump = vec![0; (last.unwrap() - first) as usize];
    for (address, entries) in tables {
        let start = (address - first) as usize;
        dump[start..start + entries.len()].copy_from_slice(entries);
    }
    (dump, first)
}

/// Every format with something in it: pages, large leaves, and what ends in the middle of a table.
pub(crate) fn each_format(mut each: impl FnMut(&str, &[u8], Root)) {
    for name in FORMATS {
        let (image, root) = image(name, &sample(name));
        each(name, &image, root);
    }
}

/// Something that every format can map.
pub(crate) fn sample(name: &str) -> Vec<(u64, u64, u64, Prot)> {
    let page = match name {
        name if name.contains("64k") => 1 << 16,
        name if name.contains("16k") || matches!(name, "dart1" | "dart2") => 1 << 14,
        _ => 1u64 << 12,
    };
    vec![
        (16 * page, 0x4000_0000 + 16 * page, 3 * page, Prot::RW),
        (64 * page, 0x2000_0000, page, Prot::READ),
        // Large leaves where there are any: 96 MiB from 64 MiB on, to the same place.
        (64 << 20, 64 << 20, 96 << 20, Prot::RW),
        (0x2000_0000, 0x1000_0000, 16 << 20, Prot::READ),
    ]
}

/// The image, parsed.
pub(crate) fn parsed(bytes: &[u8]) -> Image<'_> {
    Image::parse(bytes).unwrap()
}
