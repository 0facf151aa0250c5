//! Words out of a dump of memory, a block at a time.
//!
//! A dump may be as large as a machine's memory, of which tables are little: nothing is read but the
//! blocks in which tables lie, and few are kept.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use iopt::walk::{BadAddress, WalkMemory};

/// Bytes of a block; no entry lies in two.
const BLOCK: u64 = 4096;
/// Blocks that are kept: 16 MiB.
const MOST: usize = 4096;

/// A file whose bytes are memory from some address on.
#[derive(Debug)]
pub(super) struct Dump {
    file: File,
    /// Physical address of the file's first byte.
    offset: u64,
    /// Blocks by the first byte's place in the file; bytes behind the file's end are missing.
    blocks: RefCell<HashMap<u64, Box<[u8]>>>,
    /// Blocks that may still be read; `None` without a bound.
    left: Cell<Option<u64>>,
    exhausted: Cell<bool>,
}

impl Dump {
    /// `most` bounds the bytes that are read of a file without an end.
    pub(super) fn new(file: File, offset: u64, most: Option<u64>) -> Self {
        Self {
            file,
            offset,
            blocks: RefCell::default(),
            left: Cell::new(most.map(|most| most / BLOCK)),
            exhausted: Cell::new(false),
        }
    }

    /// True when more was to be read than may be: what was found is a part.
    pub(super) fn exhausted(&self) -> bool {
        self.exhausted.get()
    }

    fn bytes<const N: usize>(&self, address: u64) -> Option<[u8; N]> {
        let place = address.checked_sub(self.offset)?;
        let (start, within) = (place & !(BLOCK - 1), (place % BLOCK) as usize);
        let mut blocks = self.blocks.borrow_mut();
        if !blocks.contains_key(&start) {
            match self.left.get() {
                Some(0) => {
                    self.exhausted.set(true);
                    return None;
                }
                left => self.left.set(left.map(|left| left - 1)),
            }
            if blocks.len() >= MOST {
                blocks.clear();
            }
            // Blocks that cannot be read are empty.
            blocks.insert(start, self.block(start).unwrap_or_default());
        }
        let found = blocks.get(&start)?.get(within..within + N)?;
        found.try_into().ok()
    }

    fn block(&self, start: u64) -> io::Result<Box<[u8]>> {
        let mut bytes = vec![0; BLOCK as usize];
        let mut filled = 0;
        while let Some(rest) = bytes.get_mut(filled..).filter(|rest| !rest.is_empty()) {
            match self.file.read_at(rest, start + filled as u64) {
                Ok(0) => break,
                Ok(read) => filled += read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        bytes.truncate(filled);
        Ok(bytes.into())
    }
}

impl WalkMemory for Dump {
    fn read_u64(&self, address: u64) -> Result<u64, BadAddress> {
        let bytes = self.bytes(address).ok_or(BadAddress { address })?;
        Ok(u64::from_le_bytes(bytes))
    }

    fn read_u32(&self, address: u64) -> Result<u32, BadAddress> {
        let bytes = self.bytes(address).ok_or(BadAddress { address })?;
        Ok(u32::from_le_bytes(bytes))
    }
}
