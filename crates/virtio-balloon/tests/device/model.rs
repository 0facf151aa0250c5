//! The device beside a plain set of pages, under a driver that is shuffled, slow and at times hostile.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use crate::guest::{Act, FREE, Guest, HIGH, LOW, NEXT, at, send_bulk};
use proptest::prelude::*;
use runs::{GuestAddr, Joiner, Span};
use virtio_balloon::device::{BalloonEvent, BalloonSettings, Bulk, Unrestored};
use virtio_balloon::{Features, InitBit, Queue, WIRE_PAGE};
use virtio_queue::QueueT;

/// Pages that the driver plays with: the first 32 lie in the lower region, 16 at the start of the upper.
const PAGES: u8 = 48;

/// The address of a page.
fn address(page: u8) -> u64 {
    match page {
        0..32 => FREE + u64::from(page) * WIRE_PAGE,
        _ => HIGH.start + u64::from(page - 32) * WIRE_PAGE,
    }
}

#[derive(Clone, Debug)]
enum Op {
    Inflate(Vec<u8>),
    Deflate(Vec<u8>),
    Bad(bool, u8),
    DrainInflate,
    DrainDeflate,
    Keep(BTreeSet<u8>),
    Lose(BTreeSet<u8>),
    Stick(BTreeSet<u8>),
    Write(u8),
}

fn op() -> impl Strategy<Value = Op> {
    let list = || proptest::collection::vec(0..PAGES, 1..40);
    let few = || proptest::collection::btree_set(0..PAGES, 0..4);
    prop_oneof![
        4 => list().prop_map(Op::Inflate),
        3 => list().prop_map(Op::Deflate),
        1 => any::<(bool, u8)>().prop_map(|(inflate, kind)| Op::Bad(inflate, kind)),
        3 => Just(Op::DrainInflate),
        2 => Just(Op::DrainDeflate),
        1 => few().prop_map(Op::Keep),
        1 => few().prop_map(Op::Lose),
        1 => few().prop_map(Op::Stick),
        3 => (0..PAGES).prop_map(Op::Write),
    ]
}

/// Form of messages on inflateq.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Wire {
    Pfns,
    Bulk,
    /// Page numbers, and a bitmap of those that are initialized.
    Init,
}

/// A message: its first descriptor, and the pages that it names.
type Message = (u16, BTreeSet<u64>);

/// Expected state of the device.
#[derive(Default)]
struct Model {
    /// Bytes of what backs memory.
    page: u64,
    tells: bool,
    inside: BTreeSet<u64>,
    words: BTreeMap<u64, u64>,
    kept: BTreeSet<u64>,
    lost: BTreeSet<u64>,
    stuck: BTreeSet<u64>,
    /// Bitmaps of the messages that have one, by their first descriptors: where, and of which pages.
    asked: BTreeMap<u16, (u64, Vec<u64>)>,
    inflating: VecDeque<Message>,
    deflating: VecDeque<Message>,
    /// The message that is held, and what is missing.
    held: Option<Message>,
}

fn runs(pages: &BTreeSet<u64>) -> Vec<Span<GuestAddr>> {
    let mut joiner = Joiner::new();
    let pages = pages.iter().map(|page| Span::new(*page, WIRE_PAGE));
    let mut runs: Vec<_> = pages.filter_map(|page| joiner.push(page)).collect();
    runs.extend(joiner.finish());
    runs
}

impl Model {
    /// The pages of the huge page that this page lies in.
    fn huge(&self, page: u64) -> BTreeSet<u64> {
        let start = page - page % self.page;
        (start..start + self.page)
            .step_by(WIRE_PAGE as usize)
            .collect()
    }

    /// Pages that a drain of inflateq releases, and pages that it discards; and the messages that come back.
    fn inflate(&mut self) -> (BTreeSet<u64>, BTreeSet<u64>, Vec<u16>) {
        let messages = std::mem::take(&mut self.inflating);
        let named: BTreeSet<u64> = messages
            .iter()
            .flat_map(|(_, pages)| pages)
            .copied()
            .collect();
        let mut there = named.clone();
        if self.tells {
            self.inside.extend(&named);
            there.clone_from(&self.inside);
        }
        let whole = |page: &u64| self.huge(*page).is_subset(&there);
        let released: BTreeSet<u64> = named.iter().filter(|page| whole(page)).copied().collect();
        let released: BTreeSet<u64> = released.iter().flat_map(|page| self.huge(*page)).collect();
        let free = |page: &u64| self.huge(*page).is_disjoint(&self.kept);
        let discarded: BTreeSet<u64> = released.iter().filter(|page| free(page)).copied().collect();
        for page in &discarded - &self.stuck {
            self.words.insert(page, 0);
        }
        (
            released,
            discarded,
            messages.into_iter().map(|(head, _)| head).collect(),
        )
    }

    /// Pages that a drain of deflateq restores, call by call, and the messages that come back.
    fn deflate(&mut self) -> (Vec<BTreeSet<u64>>, Vec<u16>) {
        let mut calls = Vec::new();
        let mut back = Vec::new();
        loop {
            let fresh = self.held.is_none();
            let Some((head, pages)) = self.held.take().or_else(|| self.deflating.pop_front())
            else {
                return (calls, back);
            };
            if fresh {
                self.inside = &self.inside - &pages;
            }
            if !pages.is_empty() {
                calls.push(pages.clone());
            }
            let missing = &pages & &self.lost;
            if missing.is_empty() {
                back.push(head);
            } else {
                self.held = Some((head, missing));
                return (calls, back);
            }
        }
    }
}

/// A message that the device refuses whole, or that names nothing.
fn bad(guest: &mut Guest, queue: Queue, kind: u8) -> u16 {
    match kind % 6 {
        // Too short for a number or a header.
        0 => guest.send(queue, &[7, 7]),
        1 => guest.chain(queue, &[(LOW.len - 1, 8, false)]),
        2 => guest.chain(queue, &[(FREE + 1, 8, true)]),
        3 => guest.chain(queue, &[(FREE, u32::MAX, false), (FREE, 4, false)]),
        4 => {
            let outside = guest.buffer(&[0xff; 8]);
            guest.chain(queue, &[(outside, 8, false)])
        }
        _ => {
            // A loop.
            let head = guest.chain(queue, &[(FREE, 4, false)]);
            let table = guest.rings[at(queue)].base;
            guest.descriptor(table, head, (FREE, 4), NEXT, head);
            head
        }
    }
}

fn run(ops: Vec<Op>, page: u64, tells: bool, wire: Wire) {
    let settings = BalloonSettings {
        bulk: (wire == Wire::Bulk).then(Bulk::default),
        init_on_inflate: (wire == Wire::Init).then(|| InitBit::new(7).unwrap()),
        unrestored: Unrestored::Hold,
        ..BalloonSettings::default()
    };
    let mut guest = Guest::fresh(settings, page);
    let mut model = Model {
        page,
        tells,
        ..Model::default()
    };
    let features = guest.device.features();
    let must_tell_host = Features::MUST_TELL_HOST;
    let features = if tells {
        features
    } else {
        features.without(must_tell_host)
    };
    guest.device.negotiate(features).unwrap();

    let mut number = 0;
    for op in ops {
        let most = |messages: &VecDeque<Message>| messages.len() >= 6;
        let full = most(&model.inflating) || most(&model.deflating);
        match op {
            Op::Inflate(_) | Op::Deflate(_) | Op::Bad(..) if full => {
                drain_inflate(&mut guest, &mut model);
                drain_deflate(&mut guest, &mut model);
            }
            Op::Inflate(list) => {
                let message = match wire {
                    Wire::Init => ask(&mut guest, &mut model, &list),
                    _ => send(&mut guest, Queue::Inflate, &list, wire),
                };
                model.inflating.push_back(message);
            }
            Op::Deflate(list) => {
                let message = send(&mut guest, Queue::Deflate, &list, wire);
                model.deflating.push_back(message);
            }
            Op::Bad(inflate, kind) => {
                let (queue, messages) = match inflate {
                    true => (Queue::Inflate, &mut model.inflating),
                    false => (Queue::Deflate, &mut model.deflating),
                };
                messages.push_back((bad(&mut guest, queue, kind), BTreeSet::new()));
            }
            Op::DrainInflate => drain_inflate(&mut guest, &mut model),
            Op::DrainDeflate => drain_deflate(&mut guest, &mut model),
            Op::Keep(pages) => {
                model.kept = pages.into_iter().map(address).collect();
                guest.notes.borrow_mut().kept = runs(&model.kept);
            }
            Op::Lose(pages) => {
                model.lost = pages.into_iter().map(address).collect();
                guest.notes.borrow_mut().lost = runs(&model.lost);
            }
            Op::Stick(pages) => {
                model.stuck = pages.into_iter().map(address).collect();
                guest.notes.borrow_mut().stuck = runs(&model.stuck);
            }
            Op::Write(page) => {
                number += 1;
                guest.mark(address(page), number);
                model.words.insert(address(page), number);
            }
        }
    }
    // Each message that waits for a page is answered in the end.
    model.lost.clear();
    guest.notes.borrow_mut().lost.clear();
    drain_inflate(&mut guest, &mut model);
    drain_deflate(&mut guest, &mut model);
    assert!(model.held.is_none() && model.deflating.is_empty());
}

/// A message of page numbers that asks which of them are initialized.
fn ask(guest: &mut Guest, model: &mut Model, list: &[u8]) -> Message {
    let pages: Vec<u64> = list.iter().copied().map(address).collect();
    // A byte more than the device needs.
    let bytes = pages.len().div_ceil(8) + 1;
    let (head, bitmap) = guest.asking(pages.iter().map(|page| page / WIRE_PAGE), bytes);
    let named = pages.iter().copied().collect();
    model.asked.insert(head, (bitmap, pages));
    (head, named)
}

/// The bitmaps that came back say which pages were discarded, and hold zeros.
fn look_at_bitmaps(
    guest: &Guest,
    model: &mut Model,
    written: &[(u16, u32)],
    zeroed: &BTreeSet<u64>,
) {
    for (head, bytes) in written {
        let Some((bitmap, pages)) = model.asked.remove(head) else {
            assert_eq!(*bytes, 0);
            continue;
        };
        assert_eq!(*bytes as usize, pages.len().div_ceil(8));
        let mut expected = vec![0; *bytes as usize];
        for (nr, page) in pages.iter().enumerate() {
            expected[nr / 8] |= u8::from(zeroed.contains(page)) << (nr % 8);
            assert!(!zeroed.contains(page) || guest.word(*page) == 0);
        }
        // Nothing is written behind it.
        expected.push(0xa5);
        assert_eq!(guest.read(bitmap, expected.len()), expected);
    }
}

fn send(guest: &mut Guest, queue: Queue, list: &[u8], wire: Wire) -> Message {
    let pages: BTreeSet<u64> = list.iter().copied().map(address).collect();
    let head = match wire == Wire::Bulk {
        true => send_bulk(guest, queue, &runs(&pages)),
        // In the order of the list, with what comes twice.
        false => guest.pfns(queue, list.iter().map(|page| address(*page) / WIRE_PAGE)),
    };
    (head, pages)
}

fn drain_inflate(guest: &mut Guest, model: &mut Model) {
    guest.watch(Queue::Inflate);
    let index = guest.rings[0].queue.next_used();
    let before = guest.device.counters();
    let (released, discarded, heads) = model.inflate();
    let drained = guest.drain(Queue::Inflate);
    assert_eq!(usize::from(drained.used), heads.len());
    assert_eq!(drained.notify, !heads.is_empty());
    let used = guest.notes.borrow().used.clone();
    assert!(
        used.iter().all(|used| *used == index),
        "nothing is used before"
    );
    // Devices are asked once for all, before the one call that discards; each run once.
    let mut expected = Vec::new();
    if !released.is_empty() {
        expected.push(Act::Release(runs(&released)));
    }
    let cut: Vec<Span<GuestAddr>> = runs(&discarded);
    if !cut.is_empty() {
        expected.push(Act::Discard(cut.clone()));
    }
    let mut acts = guest.acts();
    let told = |event: &BalloonEvent| {
        matches!(
            event,
            BalloonEvent::Kept { .. } | BalloonEvent::NotDiscarded { .. }
        )
    };
    acts.retain(|act| !matches!(act, Act::Event(event) if told(event)));
    assert_eq!(acts, expected);
    let after = guest.device.counters();
    assert_eq!(after.discards - before.discards, cut.len() as u64);
    let zeroed = &discarded - &model.stuck;
    assert_eq!(
        after.discarded - before.discarded,
        zeroed.len() as u64 * WIRE_PAGE
    );
    let written = guest.written(Queue::Inflate);
    assert!(written.iter().map(|(head, _)| head).eq(&heads));
    look_at_bitmaps(guest, model, &written, &zeroed);
    look(guest, model);
}

fn drain_deflate(guest: &mut Guest, model: &mut Model) {
    guest.watch(Queue::Deflate);
    let (calls, heads) = model.deflate();
    let drained = guest.drain(Queue::Deflate);
    assert_eq!(usize::from(drained.used), heads.len());
    assert_eq!(drained.held, model.held.is_some());
    let mut acts = guest.acts();
    acts.retain(|act| !matches!(act, Act::Event(BalloonEvent::NotRestored { .. })));
    let expected: Vec<_> = calls
        .iter()
        .map(|pages| Act::Restore(runs(pages)))
        .collect();
    assert_eq!(acts, expected);
    assert_eq!(guest.used(Queue::Deflate), heads);
    look(guest, model);
}

/// Every page holds what it should.
fn look(guest: &Guest, model: &Model) {
    for page in (0..PAGES).map(address) {
        let expected = model.words.get(&page).copied().unwrap_or(0);
        assert_eq!(guest.word(page), expected, "{page:#x}");
    }
    if model.page > WIRE_PAGE && model.tells {
        let whole = |page: &&u64| !model.huge(**page).is_subset(&model.inside);
        let waiting = model.inside.iter().filter(whole).count() as u64;
        assert_eq!(guest.device.waiting(), waiting * WIRE_PAGE);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    #[test]
    fn it_is_a_plain_set_of_pages(
        ops in proptest::collection::vec(op(), 1..80),
        page in prop_oneof![Just(WIRE_PAGE), Just(4 * WIRE_PAGE)],
        tells in any::<bool>(),
        wire in prop_oneof![Just(Wire::Pfns), Just(Wire::Bulk), Just(Wire::Init)],
    ) {
        run(ops, page, tells, wire);
    }
}
