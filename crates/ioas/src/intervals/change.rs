//! What a change of a leaf does to the nodes above it.
//!
//! It goes upwards, level by level, and ends where the entry in the parent stays as it was. Each
//! level tells the next which gaps it has lost and gained. Only when the largest one may be gone,
//! or nodes were split, shared or merged, are all entries of a node looked at.

use super::node::{Delta, Entry, Inside, Node};
use super::room::Room;
use super::slab::{NONE, Slab};
use super::{Intervals, Position, Step};

/// What an insertion has done to a node.
pub(super) enum Inserted {
    /// Its gaps have changed like this, or in an unknown way.
    Within(Option<Delta>),
    /// The upper half went to this new node.
    Split(u32),
}

impl<T, const N: usize> Intervals<T, N> {
    /// The entry of the node `at` of `level` in its parent.
    pub(super) fn summary(&self, level: usize, at: u32) -> Entry {
        if level == 0 {
            self.leaves[at].summary(at)
        } else {
            self.inners[at].summary(at)
        }
    }

    /// Brings entry `index` of the inner node `inner` of `level` up to date after its child changed
    /// by `delta`, or in an unknown way. `None` when the entry is what it was.
    fn refresh(
        &mut self,
        level: usize,
        inner: u32,
        index: usize,
        delta: Option<Delta>,
    ) -> Option<Delta> {
        let before = self.inners[inner].entry(index);
        let now = match delta {
            None => self.summary(level - 1, before.at),
            Some(delta) if level == 1 => self.leaves[before.at].summary_after(before, delta),
            Some(delta) => self.inners[before.at].summary_after(before, delta),
        };
        (now != before).then(|| self.inners[inner].replace(index, now))
    }

    pub(super) fn climb_inserted(&mut self, position: &Position, mut inserted: Inserted) {
        for level in 1..=self.height {
            let Step { inner, child } = position.steps[level - 1];
            let child = child as usize;
            inserted = match inserted {
                Inserted::Within(delta) => match self.refresh(level, inner, child, delta) {
                    Some(delta) => Inserted::Within(Some(delta)),
                    None => return,
                },
                Inserted::Split(upper) => {
                    let lower = self.inners[inner].at(child);
                    let lower = self.summary(level - 1, lower);
                    let upper = self.summary(level - 1, upper);
                    self.inners[inner].set(child, lower);
                    match insert_into(&mut self.inners, inner, child + 1, upper) {
                        // The lower half's entry has changed too.
                        Inserted::Within(_) => Inserted::Within(None),
                        split => split,
                    }
                }
            };
        }
        if let Inserted::Split(upper) = inserted {
            let mut root = Node::new();
            root.insert(0, self.summary(self.height, self.root));
            root.insert(1, self.summary(self.height, upper));
            self.root = self.inners.add(root);
            self.height += 1;
        }
    }

    pub(super) fn climb_removed(&mut self, position: &Position, delta: Delta) {
        let mut delta = Some(delta);
        let mut short = self.leaves[position.leaf].len() < Node::<(), N>::HALF;
        for level in 1..=self.height {
            let Step { inner, child } = position.steps[level - 1];
            let child = child as usize;
            if short {
                self.refill(level, inner, child);
                delta = None;
                short = self.inners[inner].len() < Node::<Room, N>::HALF;
                continue;
            }
            match self.refresh(level, inner, child, delta) {
                Some(up) => delta = Some(up),
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
    /// `level`, from a neighbour, or makes one of both.
    fn refill(&mut self, level: usize, inner: u32, index: usize) {
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
        if merged {
            self.inners[inner].remove(lower + 1);
        } else {
            let high = self.summary(level - 1, high);
            self.inners[inner].set(lower + 1, high);
        }
        self.inners[inner].set(lower, low);
    }
}

/// Puts `entry` before entry `i` of the node `at`, which is split if it is full.
pub(super) fn insert_into<G: Inside, const N: usize>(
    nodes: &mut Slab<Node<G, N>>,
    at: u32,
    i: usize,
    entry: Entry,
) -> Inserted {
    if !nodes[at].is_full() {
        return Inserted::Within(Some(nodes[at].insert(i, entry)));
    }
    let upper = nodes.add(Node::new());
    nodes[upper] = nodes[at].split(upper);
    let half = Node::<G, N>::HALF;
    if i <= half {
        nodes[at].insert(i, entry);
    } else {
        nodes[upper].insert(i - half, entry);
    }
    Inserted::Split(upper)
}

/// Puts the entries of two neighbours together into the lower one, if they fit, and frees the
/// upper one; otherwise each gets half of them. True when they fit.
fn merge_or_share<G: Inside, const N: usize>(
    nodes: &mut Slab<Node<G, N>>,
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
