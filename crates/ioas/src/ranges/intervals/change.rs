//! Effects of a changed leaf on the nodes above it.
//!
//! It goes upwards, level by level, and ends where the entry in the parent stays as it was. A span that
//! comes or goes between two others of its leaf leaves first and last byte of all nodes as they are;
//! where it comes, gaps have become smaller, and nothing above is looked at. Where it goes, the new gap
//! is the larger one of all that have changed, and goes up to where there is one as large.
//!
//! So no change has to find the second largest of a node's gaps. When the largest one is gone, the bound
//! above stays until a search for room has come in vain: see `gap`.

use super::node::{Child, Entry, Node, Rest, Value};
use super::room::Room;
use super::slab::{NONE, Slab};
use super::{Intervals, Position, Step};

/// Effect of a changed node on its entry in the parent.
#[derive(Clone, Copy)]
pub(super) struct Delta {
    /// The first or the last byte may be another one.
    pub(super) ends: bool,
    /// The most room in the gaps that may be new.
    pub(super) gained: Room,
}

impl<A, T, const N: usize> Intervals<A, T, N> {
    /// The entry of the node `at` of `level` in its parent.
    fn summary(&self, level: usize, at: u32) -> Entry {
        if level == 0 {
            self.leaves[at].summary(at)
        } else {
            self.inners[at].summary(at)
        }
    }

    /// The first and the last byte of the same node.
    pub(super) fn ends(&self, level: usize, at: u32) -> (u64, u64) {
        if level == 0 {
            self.leaves[at].ends()
        } else {
            self.inners[at].ends()
        }
    }

    /// The most room in one of its gaps, as far as its entries know.
    pub(super) fn most_room(&self, level: usize, at: u32) -> Room {
        if level == 0 {
            self.leaves[at].most_room()
        } else {
            self.inners[at].most_room()
        }
    }

    /// Brings entry `index` of the inner node `inner` of `level` up to date after its child changed
    /// by `delta`. `None` when the entry above is what it was.
    fn refresh(&mut self, level: usize, inner: u32, index: usize, delta: Delta) -> Option<Delta> {
        let Delta { ends, gained } = delta;
        let node = &mut self.inners[inner];
        let room = node.room(index);
        if !ends && room.suffices(gained) {
            return None;
        }
        node.set_room(index, room.max(gained));
        if !ends {
            return Some(delta);
        }
        let (at, len) = (node.at(index), node.len());
        let (start, last) = self.ends(level - 1, at);
        let node = &mut self.inners[inner];
        node.set_ends(index, start, last);
        Some(Delta {
            ends: index == 0 || index + 1 == len,
            gained: gained.max(node.room_beside(index)),
        })
    }

    /// Puts `entry` before entry `rank` of `leaf`, which is full, or gets another first or last byte.
    #[cold]
    pub(super) fn insert_and_climb(&mut self, leaf: u32, rank: usize, entry: Entry) {
        let position = self.descend(entry.start);
        let node = &self.leaves[leaf];
        let gained = match rank {
            0 if node.len() > 0 => Room::between(entry.last, node.start(0)),
            _ if rank > 0 && rank == node.len() => Room::between(node.last(rank - 1), entry.start),
            _ => Room::NONE,
        };
        let mut delta = Delta { ends: true, gained };
        let mut upper = insert_into(&mut self.leaves, leaf, rank, entry);
        for level in 1..=self.height {
            let Step { inner, child } = position.steps[level - 1];
            let child = child as usize;
            if let Some(new) = upper {
                let lower = self.inners[inner].at(child);
                let lower = self.summary(level - 1, lower);
                let new = self.summary(level - 1, new);
                self.inners[inner].set(child, lower);
                upper = insert_into(&mut self.inners, inner, child + 1, new);
            } else {
                match self.refresh(level, inner, child, delta) {
                    Some(up) => delta = up,
                    None => return,
                }
            }
        }
        if let Some(upper) = upper {
            let mut root = Node::new();
            root.insert(0, self.summary(self.height, self.root));
            root.insert(1, self.summary(self.height, upper));
            self.root = self.inners.add(root);
            self.height += 1;
        }
    }

    pub(super) fn climb_removed(&mut self, position: &Position, mut delta: Delta) {
        let mut short = self.leaves[position.leaf].len() < Node::<Value, N>::HALF;
        for level in 1..=self.height {
            let Step { inner, child } = position.steps[level - 1];
            let child = child as usize;
            if short {
                let gained = self.refill(level, inner, child);
                // Ends may have changed, too: rare enough not to find out.
                delta = Delta {
                    ends: true,
                    gained: delta.gained.max(gained),
                };
                short = self.inners[inner].len() < Node::<Child, N>::HALF;
                continue;
            }
            match self.refresh(level, inner, child, delta) {
                Some(up) => delta = up,
                None => return,
            }
        }
        if self.height == 0 && self.leaves[self.root].len() == 0 {
            self.leaves.take(self.root);
            self.root = NONE;
        } else if self.height > 0 && self.inners[self.root].len() == 1 {
            let root = self.inners.take(self.root);
            self.root = root.at(0);
            self.height -= 1;
        }
    }

    /// Fills up a child that is less than half full, at `index` of the inner node `inner` of
    /// `level`, from a neighbour, or makes one of both. Returns the most room in the gaps there.
    fn refill(&mut self, level: usize, inner: u32, index: usize) -> Room {
        // Every inner node has at least two children.
        let lower = if index + 1 < self.inners[inner].len() {
            index
        } else {
            index - 1
        };
        let (low, high) = (
            self.inners[inner].at(lower),
            self.inners[inner].at(lower + 1),
        );
        let merged = if level == 1 {
            merge_or_share(&mut self.leaves, low, high)
        } else {
            merge_or_share(&mut self.inners, low, high)
        };
        let low = self.summary(level - 1, low);
        let mut room = low.room;
        if merged {
            self.inners[inner].remove(lower + 1);
        } else {
            let high = self.summary(level - 1, high);
            room = room.max(high.room);
            self.inners[inner].set(lower + 1, high);
        }
        let node = &mut self.inners[inner];
        node.set(lower, low);
        room.max(node.room_beside(lower))
            .max(node.room_before(lower + 2))
    }
}

/// Puts `entry` before entry `i` of the node `at`. If that is full it is split first; the number of the
/// new node, to which the upper half went, is returned.
pub(super) fn insert_into<R: Rest, const N: usize>(
    nodes: &mut Slab<Node<R, N>>,
    at: u32,
    i: usize,
    entry: Entry,
) -> Option<u32> {
    if !nodes[at].is_full() {
        nodes[at].insert(i, entry);
        return None;
    }
    let upper = nodes.add(Node::new());
    nodes[upper] = nodes[at].split(upper);
    let half = Node::<R, N>::HALF;
    if i <= half {
        nodes[at].insert(i, entry);
    } else {
        nodes[upper].insert(i - half, entry);
    }
    Some(upper)
}

/// Puts the entries of two neighbours together into the lower one, if they fit, and frees the
/// upper one; otherwise each gets half of them. True when they fit.
fn merge_or_share<R: Rest, const N: usize>(
    nodes: &mut Slab<Node<R, N>>,
    lower: u32,
    upper: u32,
) -> bool {
    if nodes[lower].len() + nodes[upper].len() <= N {
        let taken = nodes.take(upper);
        nodes[lower].append(&taken);
        return true;
    }
    let mut shared = nodes[upper];
    nodes[lower].share(&mut shared);
    nodes[upper] = shared;
    false
}
