//! Physical memory as the devices reach it: this process reaches a frame only where it is mapped.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use hostmem::Mapping;
use ioas::{Hold, RunReader};
use iommu::{MemoryOverlap, RunMap};
use runs::Span;

use super::JobError;

/// A part of a mapping that is one physical run.
#[derive(Debug)]
pub(super) struct Piece {
    mapping: Arc<Mapping>,
    /// First and last word.
    words: std::ops::Range<usize>,
}

impl Piece {
    pub(super) fn new(mapping: &Arc<Mapping>, offset: u64, len: u64) -> Self {
        let words = (offset / 8) as usize..((offset + len) / 8) as usize;
        Self {
            mapping: Arc::clone(mapping),
            words,
        }
    }
}

impl AsRef<[AtomicU64]> for Piece {
    fn as_ref(&self) -> &[AtomicU64] {
        self.mapping.cells().get(self.words.clone()).unwrap_or(&[])
    }
}

/// Which physical addresses are which bytes of `mapping`, learnt from its pin and not from any page
/// table: a wrong entry in a table must lead to wrong data.
pub(super) fn of_pin(mapping: &Arc<Mapping>, hold: &Hold) -> Result<RunMap<Piece>, JobError> {
    hold.with_runs(hold.part(), |reader| {
        read(mapping, hold.part().start, reader)
    })
}

fn read(
    mapping: &Arc<Mapping>,
    mut offset: u64,
    reader: &mut dyn RunReader,
) -> Result<RunMap<Piece>, JobError> {
    let mut batch = vec![Span::default(); 4096];
    let mut pieces = Vec::new();
    loop {
        let count = reader.next_batch(&mut batch).map_err(JobError::Runs)?;
        if count == 0 {
            break;
        }
        for run in &batch[..count] {
            pieces.push((run.start, Piece::new(mapping, offset, run.len)));
            offset += run.len;
        }
    }
    RunMap::new(pieces).map_err(|cause: MemoryOverlap| JobError::Runs(cause.into()))
}
