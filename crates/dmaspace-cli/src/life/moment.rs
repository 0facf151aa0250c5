//! The address space at one time, in a picture's resolution.

use iopt::AnyTable;
use runs::Span;

use super::report::{Band, BandState};

/// Into so many stretches the addresses are divided.
const BUCKETS: u64 = 128;
const PAGE: u64 = 4096;

/// What is known of addresses besides the table.
#[derive(Clone, Debug, Default)]
pub(super) struct Marks {
    pub(super) holes: Vec<Span>,
    pub(super) balloon: Vec<Span>,
    pub(super) dirty: Vec<Span>,
}

/// The stretches of `range`, those of the same state joined. A hole is seen however small it is, what is in
/// the balloon or dirty where it is at least half of a stretch.
pub(super) fn bands(table: &AnyTable, range: Span, marks: &Marks) -> Vec<Band> {
    let step = (range.len / BUCKETS).max(PAGE) & !(PAGE - 1);
    let mut bands: Vec<Band> = Vec::new();
    for offset in (0..range.len).step_by(step as usize) {
        let here = Span::new(range.start + offset, step.min(range.len - offset));
        let state = state(table, here, marks);
        match bands.last_mut() {
            Some(band) if band.state == state => band.len_bytes += here.len,
            _ => bands.push(Band {
                iova: here.start,
                len_bytes: here.len,
                state,
            }),
        }
    }
    bands
}

fn state(table: &AnyTable, here: Span, marks: &Marks) -> BandState {
    let covered = |spans: &[Span]| -> u64 {
        let parts = spans.iter().filter_map(|span| span.intersection(&here));
        parts.map(|part| part.len).sum()
    };
    if covered(&marks.holes) > 0 {
        return BandState::Hole;
    }
    if covered(&marks.balloon) * 2 >= here.len {
        return BandState::Balloon;
    }
    if covered(&marks.dirty) * 2 >= here.len {
        return BandState::Dirty;
    }
    // Bytes by size of leaf: sizes are powers of two.
    let mut sizes = [0u64; 64];
    table.for_each_leaf(here, |leaf| {
        let inside = leaf.run.input().intersection(&here);
        let log2 = leaf.run.len.trailing_zeros() as usize;
        if let (Some(size), Some(inside)) = (sizes.get_mut(log2), inside) {
            *size += inside.len;
        }
    });
    let most = sizes.iter().enumerate().max_by_key(|(_, bytes)| **bytes);
    match most {
        Some((log2, bytes)) if *bytes > 0 => BandState::Mapped {
            leaf_bytes: 1 << log2,
        },
        _ => BandState::Absent,
    }
}
