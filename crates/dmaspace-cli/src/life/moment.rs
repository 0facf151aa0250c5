//! The address space at one time, in a picture's resolution.

use runs::{Iova, Span};
use scenario::{Life, Marks};

use super::report::{Band, BandState};

/// Into so many stretches the addresses are divided.
const BUCKETS: u64 = 128;
const PAGE: u64 = 4096;

/// Each root's stretches now.
pub(super) fn bands(life: &Life<'_>) -> Vec<Vec<Band>> {
    (0..life.mapped_roots())
        .map(|root| bands_of(life, root))
        .collect()
}

/// The stretches of all addresses, those of the same state joined. A hole is seen however small it is, what is in
/// the balloon or dirty where it is at least half of a stretch.
fn bands_of(life: &Life<'_>, root: usize) -> Vec<Band> {
    let range = life.world.range();
    let step = (range.len / BUCKETS).max(PAGE) & !(PAGE - 1);
    let mut bands: Vec<Band> = Vec::new();
    for offset in (0..range.len).step_by(step as usize) {
        let here = Span::new(range.start + offset, step.min(range.len - offset));
        let state = state(life, root, here);
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

fn state(life: &Life<'_>, root: usize, here: Span<Iova>) -> BandState {
    let Marks {
        holes,
        balloon,
        dirty,
    } = &life.marks;
    let covered = |spans: &[Span<Iova>]| -> u64 {
        let parts = spans.iter().filter_map(|span| span.intersection(&here));
        parts.map(|part| part.len).sum()
    };
    if covered(holes) > 0 {
        return BandState::Hole;
    }
    if covered(balloon) * 2 >= here.len {
        return BandState::Balloon;
    }
    if covered(dirty) * 2 >= here.len {
        return BandState::Dirty;
    }
    // Bytes by size of leaf: sizes are powers of two.
    let mut sizes = [0u64; 64];
    life.leaves(root, here, &mut |leaf| {
        let inside = leaf.input().intersection(&here);
        let log2 = leaf.len.trailing_zeros() as usize;
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
