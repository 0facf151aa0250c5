//! Every operation beside a plain list of spans, and the invariants of the tree after each.

mod gaps;

use alloc::collections::BTreeMap;
use alloc::string::ToString;
use alloc::vec::Vec;
use runs::Iova;

use proptest::prelude::*;

use super::node::Rest;
use super::*;

impl<A, T, const N: usize> Intervals<A, T, N> {
    /// Panics unless every invariant of the module holds.
    fn check(&self) {
        let mut leaves = Vec::new();
        let mut inners = 0;
        if self.root == NONE {
            assert_eq!((self.height, self.len), (0, 0), "no root");
        } else {
            self.check_below(self.height, self.root, &mut leaves, &mut inners);
        }
        for (i, &leaf) in leaves.iter().enumerate() {
            let next = leaves.get(i + 1).copied().unwrap_or(NONE);
            assert_eq!(self.leaves[leaf].next(), next, "the chain of leaves");
        }
        let spans: usize = leaves.iter().map(|&leaf| self.leaves[leaf].len()).sum();
        assert_eq!(spans, self.len, "number of spans");
        assert_eq!(self.leaves.in_use(), leaves.len(), "leaves in use");
        assert_eq!(self.inners.in_use(), inners, "inner nodes in use");
        assert_eq!(self.values.in_use(), self.len, "values in use");
    }

    /// The entry of a node in its parent, with the most room that there is, from the spans below it alone.
    fn check_below(
        &self,
        level: usize,
        at: u32,
        leaves: &mut Vec<u32>,
        inners: &mut usize,
    ) -> Entry {
        if level == 0 {
            leaves.push(at);
            let leaf = &self.leaves[at];
            for i in 0..leaf.len() {
                let value = self.values[leaf.at(i)].value();
                assert!(value.is_some(), "a span without a value");
            }
            return self.check_node(leaf, at, 1);
        }
        *inners += 1;
        let inner = &self.inners[at];
        let mut rooms = Room::NONE;
        for i in 0..inner.len() {
            let below = self.check_below(level - 1, inner.at(i), leaves, inners);
            let entry = inner.entry(i);
            let ends = |entry: Entry| (entry.start, entry.last, entry.at);
            assert_eq!(ends(entry), ends(below), "entry {i} on level {level}");
            // Not even more room than the child itself says, which a search would have to go by.
            let said = self.most_room(level - 1, inner.at(i));
            assert!(said.suffices(below.room), "node below {i} on level {level}");
            assert!(entry.room.suffices(said), "room {i} on level {level}");
            rooms = rooms.max(below.room);
        }
        let node = self.check_node(inner, at, 2);
        // Not what the entries say, but what there is.
        let between = (1..inner.len()).map(|i| inner.room_before(i));
        Entry {
            room: between.fold(rooms, Room::max),
            ..node
        }
    }

    fn check_node<R: Rest>(&self, node: &Node<R, N>, at: u32, least: usize) -> Entry {
        node.check();
        let least = if at == self.root { least } else { N / 2 };
        assert!((least..=N).contains(&node.len()), "{} entries", node.len());
        let rooms = (0..node.len()).map(|i| match i {
            0 => node.room(0),
            _ => node
                .room(i)
                .max(Room::between(node.last(i - 1), node.start(i))),
        });
        Entry {
            start: node.start(0),
            last: node.last(node.len() - 1),
            room: rooms.fold(Room::NONE, Room::max),
            at,
        }
    }

    fn spans(&self) -> Vec<(Span<A>, T)>
    where
        T: Copy,
    {
        let all = self.overlapping(0, u64::MAX);
        all.map(|(span, &value)| (span, value)).collect()
    }
}

/// The same as a list in no order.
#[derive(Default)]
struct Plain(Vec<(Span<Iova>, u32)>);

impl Plain {
    fn overlapping(&self, first: u64, last: u64) -> Vec<(Span<Iova>, u32)> {
        let touches = |&(span, _): &(Span<Iova>, u32)| span.start <= last && first <= span.last();
        let mut found: Vec<_> = self.0.iter().copied().filter(touches).collect();
        found.sort();
        found
    }

    fn insert(&mut self, span: Span<Iova>, value: u32) -> Result<(), InsertError<Iova>> {
        if span.len == 0 || u128::from(span.start) + u128::from(span.len) > 1 << 64 {
            return Err(InsertError::Malformed { span });
        }
        if let Some(&(first, _)) = self.overlapping(span.start, span.last()).first() {
            return Err(InsertError::Overlap {
                wanted: span,
                first,
            });
        }
        self.0.push((span, value));
        Ok(())
    }

    fn remove(&mut self, start: u64) -> Option<(Span<Iova>, u32)> {
        let at = self.0.iter().position(|(span, _)| span.start == start)?;
        Some(self.0.swap_remove(at))
    }

    /// The lowest address that fits is the first aligned one of a window, or behind a span.
    fn gap(&self, len: u64, align: u64, windows: &[Span<Iova>]) -> Option<u64> {
        let wide = u128::from;
        let mut fitting = Vec::new();
        for window in windows {
            let end = wide(window.start) + wide(window.len);
            let behind = self.0.iter().map(|(span, _)| wide(span.last()) + 1);
            for from in behind.chain([wide(window.start)]) {
                let address = from.next_multiple_of(wide(align));
                if address < wide(window.start) || address + wide(len) > end {
                    continue;
                }
                let (first, last) = (address as u64, (address + wide(len) - 1) as u64);
                if self.overlapping(first, last).is_empty() {
                    fitting.push(first);
                }
            }
        }
        fitting.into_iter().min()
    }
}

#[derive(Clone, Debug)]
enum Op {
    Insert(Span<Iova>),
    Remove(u64),
    /// The span that is the n-th of so many.
    RemoveNth(prop::sample::Index),
    At(u64),
    Overlapping(u64, u64),
    Change(u64, u64, usize),
    Extract(u64, u64, usize),
    Gap(u64, u32, Vec<Span<Iova>>),
}

/// Addresses around 0 and around the end of 2^64, and few of all others.
fn address() -> impl Strategy<Value = u64> {
    prop_oneof![
        12 => 0u64..200,
        12 => (0u64..200).prop_map(|back| u64::MAX - back),
        1 => any::<u64>(),
    ]
}

fn length() -> impl Strategy<Value = u64> {
    prop_oneof![
        20 => 1u64..6,
        4 => 0u64..60,
        1 => any::<u64>(),
        1 => Just(u64::MAX),
    ]
}

fn span_of() -> impl Strategy<Value = Span<Iova>> {
    let from = (address(), length()).prop_map(|(start, len)| Span::new(start, len));
    // Often up to the very end.
    let to_the_end = (1u64..6).prop_map(|len| Span::new(u64::MAX - len + 1, len));
    prop_oneof![30 => from, 1 => to_the_end]
}

/// Disjoint, in order.
fn windows() -> impl Strategy<Value = Vec<Span<Iova>>> {
    prop::collection::vec(address(), 0..8).prop_map(|mut ends| {
        ends.sort();
        ends.dedup();
        let pairs = ends.chunks_exact(2);
        pairs
            .filter_map(|pair| Span::inclusive(pair[0], pair[1]))
            .collect()
    })
}

fn op() -> impl Strategy<Value = Op> {
    let range = || (address(), address()).prop_map(|(a, b)| (a.min(b), a.max(b)));
    prop_oneof![
        40 => span_of().prop_map(Op::Insert),
        4 => address().prop_map(Op::Remove),
        14 => any::<prop::sample::Index>().prop_map(Op::RemoveNth),
        8 => address().prop_map(Op::At),
        4 => range().prop_map(|(first, last)| Op::Overlapping(first, last)),
        2 => (range(), 0usize..9).prop_map(|((first, last), n)| Op::Change(first, last, n)),
        1 => (range(), 0usize..9).prop_map(|((first, last), n)| Op::Extract(first, last, n)),
        8 => (length(), 0u32..64, windows()).prop_map(|(len, align, windows)| {
            Op::Gap(len.max(1), if align < 32 { align % 5 } else { align }, windows)
        }),
    ]
}

/// Runs `ops` on both, compares what they say, and checks the tree after each.
fn run<const N: usize>(ops: Vec<Op>) {
    let mut map = Intervals::<Iova, u32, N>::new();
    let mut plain = Plain::default();
    for (value, op) in ops.into_iter().enumerate() {
        let value = value as u32;
        match op {
            Op::Insert(span) => {
                assert_eq!(map.insert(span, value), plain.insert(span, value));
            }
            Op::Remove(start) => assert_eq!(map.remove(start), plain.remove(start)),
            Op::RemoveNth(n) if !plain.0.is_empty() => {
                let start = n.get(&plain.0).0.start;
                assert_eq!(map.remove(start), plain.remove(start));
            }
            Op::RemoveNth(_) => {}
            Op::At(address) => {
                let there = plain.overlapping(address, address).first().copied();
                assert_eq!(map.at(address).map(|(span, &value)| (span, value)), there);
                if let Some((span, changed)) = map.at_mut(address) {
                    *changed = value;
                    plain.remove(span.start);
                    plain.0.push((span, value));
                }
            }
            Op::Overlapping(first, last) => {
                let found = map
                    .overlapping(first, last)
                    .map(|(span, &value)| (span, value));
                let found: Vec<_> = found.collect();
                assert_eq!(found, plain.overlapping(first, last));
                let one = map.first_overlap(first, last);
                assert_eq!(
                    one.map(|(span, &value)| (span, value)),
                    found.first().copied()
                );
            }
            Op::Change(first, last, count) => {
                let touched = plain.overlapping(first, last);
                let mut seen = Vec::new();
                let result = map.try_for_each_mut(first, last, |span, changed| {
                    seen.push((span, *changed));
                    *changed = value;
                    if seen.len() > count {
                        Err(count)
                    } else {
                        Ok(())
                    }
                });
                assert_eq!(
                    result,
                    if touched.len() > count {
                        Err(count)
                    } else {
                        Ok(())
                    }
                );
                assert_eq!(seen, touched[..touched.len().min(count + 1)]);
                for (span, _) in seen {
                    plain.remove(span.start);
                    plain.0.push((span, value));
                }
            }
            Op::Extract(first, last, count) => {
                let inside = plain.overlapping(first, last).into_iter();
                let inside = inside.filter(|(span, _)| first <= span.start && span.last() <= last);
                let inside: Vec<_> = inside.take(count).collect();
                assert_eq!(
                    map.extract_inside(first, last)
                        .take(count)
                        .collect::<Vec<_>>(),
                    inside
                );
                for (span, _) in inside {
                    plain.remove(span.start);
                }
            }
            Op::Gap(len, align, windows) => {
                let align = 1 << align;
                let found = map.gap(len, align, &windows);
                assert_eq!(
                    found,
                    plain.gap(len, align, &windows),
                    "{len} {align:#x} {windows:?}"
                );
            }
        }
        assert_eq!(map.len(), plain.0.len());
        assert_eq!(map.is_empty(), plain.0.is_empty());
        map.check();
    }
    assert_eq!(map.spans(), plain.overlapping(0, u64::MAX));
    let taken: Vec<_> = map.extract_inside(0, u64::MAX).collect();
    assert_eq!(taken, plain.overlapping(0, u64::MAX));
    map.check();
}

proptest! {
    #[test]
    fn small_nodes_agree_with_a_list(ops in prop::collection::vec(op(), 0..250)) {
        run::<8>(ops);
    }

    #[test]
    fn nodes_of_ten_agree_with_a_list(ops in prop::collection::vec(op(), 0..250)) {
        run::<10>(ops);
    }

    #[test]
    fn nodes_of_many_lines_agree_with_a_list(ops in prop::collection::vec(op(), 0..400)) {
        run::<64>(ops);
    }
}

/// The numbers below `count`, each once, in an order without a pattern that a tree could like.
fn shuffled(count: u64) -> Vec<u64> {
    let mut numbers: Vec<u64> = (0..count).collect();
    let mut state = 1u64;
    for i in (1..numbers.len()).rev() {
        // Knuth's constants for a linear congruential generator (MMIX).
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        numbers.swap(i, (state >> 33) as usize % (i + 1));
    }
    numbers
}

#[test]
fn a_million_areas_come_and_go_in_any_order() {
    const COUNT: u64 = 1_000_000;
    let order = shuffled(COUNT);
    let mut map = Intervals::<Iova, u32>::new();
    // Pages with a page between them.
    for &n in &order {
        map.insert(Span::new(n << 13, 1 << 12), n as u32).unwrap();
    }
    map.check();
    assert_eq!(map.len(), COUNT as usize);
    for &n in order.iter().step_by(16) {
        let there = map.at((n << 13) + 0xfff).unwrap();
        assert_eq!(there, (Span::new(n << 13, 1 << 12), &(n as u32)));
        assert_eq!(map.at((n << 13) + 0x1000), None);
    }
    // One page fits everywhere, two only behind the last one.
    let window = [Span::new(0x5000, u64::MAX - 0x5000)];
    assert_eq!(map.gap(1 << 12, 1 << 12, &window), Some(0x5000));
    assert_eq!(
        map.gap(2 << 12, 1 << 12, &window),
        Some((COUNT << 13) - 0x1000)
    );
    assert_eq!(map.gap(2 << 12, 1 << 14, &window), Some(COUNT << 13));
    // A hole in the middle is found, until it is filled.
    let hole = 2 * (COUNT / 4);
    assert!(map.remove(hole << 13).is_some());
    let found = map.gap(3 << 12, 1 << 12, &window).unwrap();
    assert_eq!(found, (hole << 13) - 0x1000);
    map.insert(Span::new(found, 3 << 12), 7).unwrap();
    assert_eq!(
        map.gap(2 << 12, 1 << 12, &window),
        Some((COUNT << 13) - 0x1000)
    );
    map.remove(found).unwrap();
    map.insert(Span::new(hole << 13, 1 << 12), hole as u32)
        .unwrap();

    // Half of them one by one, the others in order.
    let (some, others) = order.split_at(order.len() / 2);
    for &n in some {
        assert_eq!(map.remove(n << 13).map(|(_, value)| value), Some(n as u32));
    }
    map.check();
    let (mut next, mut left) = (0, others.len());
    for (span, value) in map.extract_inside(0, u64::MAX) {
        assert_eq!(span, Span::new(u64::from(value) << 13, 1 << 12));
        assert!(span.start >= next);
        next = span.start + span.len;
        left -= 1;
    }
    assert_eq!(left, 0);
    map.check();
    assert!(map.is_empty());
}

#[test]
fn thousands_of_areas_agree_with_a_btreemap() {
    let mut map = Intervals::<Iova, u64, 8>::new();
    let mut plain = BTreeMap::new();
    // Up and down a few times, with lengths that leave gaps of all sizes.
    for round in 0..6u64 {
        for n in shuffled(4000) {
            let start = n * 100;
            if (n ^ round) % 3 == 0 {
                let removed = map.remove(start).map(|(span, value)| (span.len, value));
                assert_eq!(removed, plain.remove(&start));
            } else if let Ok(()) = map.insert(Span::new(start, 1 + n * 7 % 100), round) {
                assert_eq!(plain.insert(start, (1 + n * 7 % 100, round)), None);
            } else {
                assert!(plain.contains_key(&start));
            }
            if n % 64 == 0 {
                map.check();
            }
        }
        let spans = map.overlapping(0, u64::MAX);
        let spans = spans.map(|(span, &value)| (span.start, (span.len, value)));
        assert!(spans.eq(plain.iter().map(|(&start, &value)| (start, value))));
    }
}

#[test]
fn values_are_dropped_once_and_refused_ones_at_once() {
    use alloc::rc::Rc;

    let value = Rc::new(());
    let mut map = Intervals::<Iova, Rc<()>, 8>::new();
    for n in 0..100 {
        map.insert(Span::new(n * 2, 1), Rc::clone(&value)).unwrap();
    }
    let refused = map.insert(Span::new(0, 100), Rc::clone(&value));
    assert_eq!(
        refused.unwrap_err().to_string(),
        "0x0+0x64 overlaps 0x0+0x1"
    );
    assert_eq!(Rc::strong_count(&value), 101);
    for n in 0..50 {
        map.remove(n * 2).unwrap();
    }
    assert_eq!(Rc::strong_count(&value), 51);
    drop(map);
    assert_eq!(Rc::strong_count(&value), 1);
}

#[test]
fn the_whole_space_but_one_byte_is_a_span() {
    let mut map = Intervals::<Iova, u8>::new();
    assert_eq!(map.gap(u64::MAX, 1, &[Span::new(0, u64::MAX)]), Some(0));
    map.insert(Span::new(1, u64::MAX), 1).unwrap();
    assert_eq!(map.at(0), None);
    assert_eq!(map.at(u64::MAX), Some((Span::new(1, u64::MAX), &1)));
    let window = [Span::new(0, u64::MAX)];
    assert_eq!(map.gap(1, 1 << 63, &window), Some(0));
    assert_eq!(map.gap(2, 1, &window), None);
    map.insert(Span::new(0, 1), 2).unwrap();
    assert_eq!(map.gap(1, 1, &window), None);
    assert_eq!(map.remove(1), Some((Span::new(1, u64::MAX), 1)));
    assert_eq!(map.gap(1, 1 << 63, &window), Some(1 << 63));
    assert_eq!(map.gap(0, 1, &window), None, "no bytes");
    assert_eq!(map.gap(1, 3, &window), None, "no power of two");
}
