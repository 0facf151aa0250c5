//! Folios of memory: pages that the kernel keeps, moves and frees as one.
//!
//! A pool says it itself. For others `/proc/kpageflags` marks heads and tails; a block of 2 MiB of
//! memory is one read. Folios beyond that size are those of pools.

use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::FileExt;

use super::{FolioReport, Missing, add};

const PAGE: u64 = 4096;
/// Pages of a block.
const BLOCK: u64 = 512;
/// Blocks that are read: what they hold is 64 GiB, and takes about a second. The rest is not told.
const MOST: usize = 32 << 10;
/// `KPF_COMPOUND_HEAD`, `KPF_COMPOUND_TAIL`.
const HEAD: u64 = 1 << 15;
const TAIL: u64 = 1 << 16;

pub(super) struct Folios {
    file: Option<File>,
    sizes: Vec<FolioReport>,
    /// Sizes of the folios of each block's pages, as powers of two, for blocks that were read. Runs
    /// jump between blocks, so all are kept: 16 MiB at most.
    blocks: HashMap<u64, Option<Box<[u8]>>>,
    left_out: u64,
}

impl Folios {
    pub(super) fn open() -> Self {
        Self {
            file: File::open("/proc/kpageflags").ok(),
            sizes: Vec::new(),
            blocks: HashMap::new(),
            left_out: 0,
        }
    }

    /// Memory at `pa`: of a pool with pages of `hugetlb` bytes, or mapped by huge entries, or neither.
    pub(super) fn add(&mut self, pa: u64, len: u64, hugetlb: Option<u64>, huge: bool) {
        if let Some(page) = hugetlb {
            return add(&mut self.sizes, page, len);
        }
        if huge {
            return add(&mut self.sizes, BLOCK * PAGE, len);
        }
        let mut frame = pa / PAGE;
        let end = frame + len / PAGE;
        while frame < end {
            let block = frame & !(BLOCK - 1);
            let until = end.min(block + BLOCK);
            let room = self.blocks.len() < MOST;
            let file = self.file.as_ref();
            let known = match self.blocks.get(&block) {
                Some(known) => known,
                None if room => self
                    .blocks
                    .entry(block)
                    .or_insert_with(|| file.and_then(|file| read(file, block))),
                None => &None,
            };
            match known {
                None => self.left_out += (until - frame) * PAGE,
                Some(log2) => {
                    for place in frame - block..until - block {
                        let log2 = log2.get(place as usize).copied().unwrap_or(12);
                        add(&mut self.sizes, 1 << log2, PAGE);
                    }
                }
            }
            frame = until;
        }
    }

    /// Returns the folios found.
    pub(super) fn take(&mut self) -> Result<Vec<FolioReport>, Missing> {
        if self.left_out == 0 {
            return Ok(std::mem::take(&mut self.sizes));
        }
        let left_out = runs::Bytes(self.left_out);
        Err(Missing {
            what: "folios",
            why: match self.file {
                None => "/proc/kpageflags requires root".into(),
                Some(_) => {
                    format!("too many small pages to read each: {left_out} left out")
                }
            },
        })
    }
}

/// The sizes of the folios in which the pages of a block are, as powers of two.
fn read(file: &File, block: u64) -> Option<Box<[u8]>> {
    let mut flags = vec![0; BLOCK as usize * 8];
    // The last block of the machine's memory may be shorter.
    let read = file.read_at(&mut flags, block * 8).ok()?;
    let words = flags.get(..read)?.chunks_exact(8);
    let words = words.map(|word| u64::from_ne_bytes(word.try_into().unwrap_or_default()));
    Some(sizes(&words.collect::<Vec<u64>>()))
}

/// A head and the tails behind it are one folio; of one that began before the block the part in it.
fn sizes(flags: &[u64]) -> Box<[u8]> {
    let folios = flags.chunk_by(|one, next| one & (HEAD | TAIL) != 0 && next & TAIL != 0);
    folios
        .flat_map(|folio| {
            let log2 = 12 + folio.len().ilog2() as u8;
            std::iter::repeat_n(log2, folio.len())
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_pages_that_cannot_be_looked_at_are_left_out_and_said() {
        let mut folios = Folios::open();
        folios.file = None;
        folios.add(0, BLOCK * PAGE, None, true);
        folios.add(1 << 30, 1 << 30, Some(1 << 30), false);
        let found = |page_bytes, bytes| FolioReport { page_bytes, bytes };
        let huge = [found(2 << 20, 2 << 20), found(1 << 30, 1 << 30)];
        assert_eq!(folios.take().unwrap(), huge);
        folios.add(2 << 30, PAGE, None, false);
        let missing = folios.take().unwrap_err();
        assert_eq!(missing.what, "folios");
        assert_eq!(missing.why, "/proc/kpageflags requires root");
    }

    #[test]
    fn a_page_is_of_the_folio_at_its_place_in_its_block() {
        let mut folios = Folios::open();
        folios.file = None;
        let half = BLOCK as usize / 2;
        let first = [vec![14; half], vec![12; half]].concat();
        folios.blocks.insert(BLOCK, Some(first.into()));
        let second = vec![16; BLOCK as usize];
        folios.blocks.insert(2 * BLOCK, Some(second.into()));
        // The second half of a block, and the beginning of the next.
        let pa = (BLOCK + BLOCK / 2) * PAGE;
        folios.add(pa, (BLOCK / 2 + 16) * PAGE, None, false);
        let found = |page_bytes, bytes| FolioReport { page_bytes, bytes };
        let expected = [found(4096, BLOCK / 2 * PAGE), found(64 << 10, 16 * PAGE)];
        assert_eq!(folios.take().unwrap(), expected);
    }

    #[test]
    fn heads_and_tails_are_folios() {
        let (h, t) = (HEAD, TAIL);
        let found = sizes(&[t, t, 0, h, t, t, t, h, t, 0, 0]);
        assert_eq!(*found, [13, 13, 12, 14, 14, 14, 14, 13, 13, 12, 12]);
        assert!(sizes(&[]).is_empty());
    }
}
