//! Physical memory made of pieces.

use std::sync::atomic::AtomicU64;

use runs::{Pa, Span};

use crate::target::{BadTarget, TargetMemory};

/// Pieces of memory by physical address: a sorted list with binary search.
///
/// `O` owns a piece, or shares or borrows it: `Vec<AtomicU64>`, `Box<[AtomicU64]>`,
/// `Arc<[AtomicU64]>`, `&[AtomicU64]`. It must lend the same words at each call.
///
/// Where pieces come and go while devices run, the map goes into an
/// [`RwLock`](std::sync::RwLock), which is target memory too.
#[derive(Debug)]
pub struct RunMap<O> {
    /// Sorted by address, none of them empty, none overlapping another.
    pieces: Vec<(Span<Pa>, O)>,
}

/// Two pieces of memory have an address in common, or a piece is not at a multiple of 8 or ends
/// beyond 2^64.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}", match .piece == .there {
    true => format!("no memory can be placed at {piece}"),
    false => format!("memory at {piece} overlaps {there}"),
})]
pub struct MemoryOverlap {
    /// The piece that was refused.
    pub piece: Span<Pa>,
    /// Piece that is there already; the new piece itself when it is not well placed.
    pub there: Span<Pa>,
}

/// No pieces.
impl<O> Default for RunMap<O> {
    fn default() -> Self {
        Self { pieces: Vec::new() }
    }
}

impl<O: AsRef<[AtomicU64]>> RunMap<O> {
    /// A map of these pieces, each with the physical address of its first word. Empty pieces are
    /// left out.
    pub fn new(pieces: impl IntoIterator<Item = (u64, O)>) -> Result<Self, MemoryOverlap> {
        let mut sorted: Vec<(Span<Pa>, O)> = Vec::new();
        for (address, owner) in pieces {
            let span = Span::new(address, size_of_val(owner.as_ref()) as u64);
            if span.is_empty() {
                continue;
            }
            if address % 8 != 0 || Span::<Pa>::checked(address, span.len).is_none() {
                return Err(MemoryOverlap {
                    piece: span,
                    there: span,
                });
            }
            sorted.push((span, owner));
        }
        sorted.sort_by_key(|(span, _)| span.start);
        for pair in sorted.windows(2) {
            if let [(there, _), (piece, _)] = pair {
                if there.overlaps(piece) {
                    return Err(MemoryOverlap {
                        piece: *piece,
                        there: *there,
                    });
                }
            }
        }
        Ok(Self { pieces: sorted })
    }

    /// Adds a piece.
    pub fn insert(&mut self, address: u64, owner: O) -> Result<(), MemoryOverlap> {
        let piece = Span::new(address, size_of_val(owner.as_ref()) as u64);
        if piece.is_empty() {
            return Ok(());
        }
        if address % 8 != 0 || Span::<Pa>::checked(address, piece.len).is_none() {
            return Err(MemoryOverlap {
                piece,
                there: piece,
            });
        }
        let at = self
            .pieces
            .partition_point(|(span, _)| span.start < address);
        let before = at.checked_sub(1).and_then(|before| self.pieces.get(before));
        for (there, _) in before.into_iter().chain(self.pieces.get(at)) {
            if there.overlaps(&piece) {
                return Err(MemoryOverlap {
                    piece,
                    there: *there,
                });
            }
        }
        self.pieces.insert(at, (piece, owner));
        Ok(())
    }

    /// Takes away the piece that begins at `address`.
    pub fn remove(&mut self, address: u64) -> Option<O> {
        let at = self
            .pieces
            .binary_search_by_key(&address, |(span, _)| span.start)
            .ok()?;
        Some(self.pieces.remove(at).1)
    }

    /// The pieces, by address.
    pub fn pieces(&self) -> impl Iterator<Item = (Span<Pa>, &O)> {
        self.pieces.iter().map(|(span, owner)| (*span, owner))
    }
}

impl<O: AsRef<[AtomicU64]>> TargetMemory for RunMap<O> {
    fn with_cells(
        &self,
        mut span: Span<Pa>,
        visit: &mut dyn FnMut(&[AtomicU64]),
    ) -> Result<(), BadTarget> {
        let bad = |address| Err(BadTarget { address });
        if !span.is_aligned(8) {
            return bad(span.start);
        }
        let first = self
            .pieces
            .partition_point(|(there, _)| there.last() < span.start);
        for (there, owner) in self.pieces.get(first..).unwrap_or(&[]) {
            if span.is_empty() {
                break;
            }
            if !there.contains(span.start) {
                return bad(span.start);
            }
            let offset = span.start - there.start;
            let len = span.len.min(there.len - offset);
            let words = (offset / 8) as usize..((offset + len) / 8) as usize;
            let Some(cells) = owner.as_ref().get(words) else {
                return bad(span.start);
            };
            visit(cells);
            span = Span::new(span.start.wrapping_add(len), span.len - len);
        }
        if span.is_empty() {
            Ok(())
        } else {
            bad(span.start)
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use super::*;

    fn words(first: u64, count: u64) -> Vec<AtomicU64> {
        (first..first + count).map(AtomicU64::new).collect()
    }

    fn read(map: &impl TargetMemory, span: Span<Pa>) -> (Vec<u64>, Result<(), BadTarget>) {
        let mut seen = Vec::new();
        let result = map.with_cells(span, &mut |cells| {
            seen.extend(cells.iter().map(|cell| cell.load(Ordering::Relaxed)));
        });
        (seen, result)
    }

    #[test]
    fn adjacent_pieces_are_one_memory_and_a_gap_is_named() {
        let map = RunMap::new([(0x40, words(8, 8)), (0, words(0, 8)), (0x100, words(32, 1))]);
        let map = map.unwrap();
        assert_eq!(read(&map, Span::new(0x38, 0x18)), (vec![7, 8, 9], Ok(())));
        let (seen, result) = read(&map, Span::new(0x70, 0x98));
        assert_eq!(
            (seen, result),
            (vec![14, 15], Err(BadTarget { address: 0x80 }))
        );
        assert_eq!(read(&map, Span::new(0x100, 8)).0, [32]);
        assert_eq!(
            read(&map, Span::new(0x108, 8)).1,
            Err(BadTarget { address: 0x108 })
        );
        assert_eq!(read(&map, Span::new(4, 8)).1, Err(BadTarget { address: 4 }));
    }

    #[test]
    fn pieces_never_overlap_and_come_and_go() {
        assert!(RunMap::new([(0, words(0, 8)), (0x38, words(0, 8))]).is_err());
        assert!(RunMap::new([(4, words(0, 8))]).is_err());
        assert!(RunMap::new([(u64::MAX - 7, words(0, 2))]).is_err());
        let mut map = RunMap::new([(0x40, words(0, 8))]).unwrap();
        for address in [8, 0x40, 0x78] {
            let refused = map.insert(address, words(0, 8)).unwrap_err();
            assert_eq!(refused.there, Span::new(0x40, 0x40));
        }
        // Between words, and beyond the end.
        for (address, count) in [(0x84, 1), (u64::MAX - 7, 2)] {
            let piece = Span::new(address, 8 * count);
            let refused = MemoryOverlap {
                piece,
                there: piece,
            };
            assert_eq!(map.insert(address, words(0, count)), Err(refused));
        }
        map.insert(0x84, Vec::new()).unwrap();
        assert_eq!(map.pieces().count(), 1);
        map.insert(0x80, words(8, 8)).unwrap();
        map.insert(0, words(8, 8)).unwrap();
        assert_eq!(map.pieces().count(), 3);
        assert!(map.remove(0x48).is_none());
        assert!(map.remove(0x40).is_some());
        assert_eq!(
            read(&map, Span::new(0x38, 16)).1,
            Err(BadTarget { address: 0x40 })
        );
    }
}
