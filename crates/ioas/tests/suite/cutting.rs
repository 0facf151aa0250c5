//! Parts of areas: unmapped exactly, or taken out for a while and put back. (Devices that go on
//! reaching all the rest meanwhile: see `conversions.rs`.)

use std::sync::Arc;

use crate::common::*;
use ioas::{Ledger, MapError, Memory, Synthetic, UnmapError};
use iopt::{FormatId, HeapTables, Interruption, Prot, ResizeError, TableMemory};
use runs::{Iova, Offset, Pa, Span};

const NEVER: Interruption = Interruption::Refused;
const AT: u64 = 64 * GIB;
/// Physical start of the memory under test.
const FRAME: u64 = 256 * GIB;

struct Bench {
    tables: Arc<HeapTables>,
    ledger: Arc<Ledger>,
    unit: Arc<FrailUnit>,
    object: Arc<Frail>,
    memory: Arc<Memory>,
    space: Space,
    frames: Vec<Span<Pa>>,
}

impl Bench {
    fn new(format: (FormatId, u8), frames: &[Span<Pa>]) -> Self {
        let tables = Arc::new(HeapTables::with_tables(64).unwrap());
        let space = space(format.0, format.1, &tables);
        let unit = Arc::new(FrailUnit::new(crate::common::unit(&tables)));
        space.attach((unit.clone(), DEVICE)).unwrap();
        let ledger = Ledger::new("a counter", None, 0);
        let object = Arc::new(Frail::new(Synthetic::new(frames.iter().copied())));
        Self {
            tables,
            unit,
            memory: Memory::new(object.clone(), &ledger),
            object,
            ledger,
            space,
            frames: frames.to_vec(),
        }
    }

    fn state(&self) -> State {
        let memory = &self.object.memory;
        State::of(&self.space, &self.ledger, &self.tables, &[memory])
    }

    fn map(&mut self, part: Span<Offset>, prot: Prot) {
        self.space
            .map(AT + part.start, &self.memory, part, prot)
            .unwrap();
    }

    fn whole(&mut self) -> Span<Offset> {
        let whole = Span::new(0, self.memory.len());
        self.map(whole, Prot::RW);
        whole
    }

    /// The frame at an offset in the object.
    fn frame(&self, mut offset: u64) -> u64 {
        for run in &self.frames {
            if offset < run.len {
                return run.start + offset;
            }
            offset -= run.len;
        }
        panic!("{offset:#x} lies behind the object");
    }

    /// Asserts that exactly `gone` is missing (offsets in the object), around all borders.
    fn check(&self, gone: &[Span<Offset>]) {
        let len = self.memory.len();
        let borders = gone
            .iter()
            .flat_map(|gone| [gone.start, gone.start + gone.len]);
        let ends = [0, 2 * MIB, 4 * MIB, GIB - 2 * MIB, GIB, GIB + 2 * MIB, len];
        for border in borders.chain(ends) {
            for offset in [border.wrapping_sub(PAGE), border, border + 5 * PAGE] {
                if offset < len {
                    let there = !gone.iter().any(|gone| gone.contains(offset));
                    let expected = there.then(|| self.frame(offset));
                    assert_eq!(self.space.translate(AT + offset), expected, "{offset:#x}");
                }
            }
        }
        let missing: u64 = gone.iter().map(|gone| gone.len).sum();
        let mapped: u64 = leaves(&self.space).iter().map(|leaf| leaf.run.len).sum();
        assert_eq!(mapped, len - missing);
        let held = (self.object.memory.pinned(), self.ledger.in_use());
        assert_eq!(held, (len - missing, len - missing));
    }

    fn end(self) {
        self.space.close().unwrap();
        assert_eq!(self.tables.in_use(), 0);
        let held = (self.object.memory.pinned(), self.ledger.in_use());
        assert_eq!(held, (0, 0));
    }
}

fn at(part: Span<Offset>) -> Span<Iova> {
    Span::new(AT + part.start, part.len)
}

/// A leaf of 1 GiB, two of 2 MiB, sixteen of 4 KiB.
fn frames() -> Vec<Span<Pa>> {
    let large = [
        Span::new(FRAME, GIB),
        Span::new(FRAME + 3 * GIB, 2 * MIB),
        Span::new(FRAME + 5 * GIB, 2 * MIB),
    ];
    let pages = (0..16).map(|n| Span::new(FRAME + 7 * GIB + (2 * n + 1) * PAGE, PAGE));
    large.into_iter().chain(pages).collect()
}

#[test]
fn exactly_what_is_named_is_cut_out_of_leaves_of_any_size() {
    let small = GIB + 4 * MIB;
    for format in FORMATS {
        for part in [
            // Start, middle and end of the leaf of 1 GiB, in pages of each size.
            Span::new(0, PAGE),
            Span::new(0, 2 * MIB),
            Span::new(512 * MIB + 7 * PAGE, 3 * PAGE),
            Span::new(512 * MIB, 2 * MIB),
            Span::new(100 * PAGE, 700 * MIB),
            Span::new(GIB - PAGE, PAGE),
            Span::new(GIB - 2 * MIB, 2 * MIB),
            Span::new(0, GIB),
            // The same with one of 2 MiB, of 4 KiB, and over both.
            Span::new(GIB, PAGE),
            Span::new(GIB + MIB, 5 * PAGE),
            Span::new(GIB + 2 * MIB - PAGE, PAGE),
            Span::new(GIB, 2 * MIB),
            Span::new(small, PAGE),
            Span::new(small + 5 * PAGE, 2 * PAGE),
            Span::new(small + 15 * PAGE, PAGE),
            Span::new(GIB - PAGE, 2 * PAGE),
            Span::new(GIB - 3 * PAGE, 4 * MIB + 10 * PAGE),
            Span::new(PAGE, small),
        ] {
            let mut bench = Bench::new(format, &frames());
            let whole = bench.whole();
            bench.check(&[]);
            let unmapped = bench.space.unmap_cutting(at(part), NEVER).unwrap();
            assert_eq!(
                (unmapped.areas, unmapped.bytes, unmapped.unpinned),
                (1, part.len, part.len)
            );
            bench.check(&[part]);
            let ends = [part.start > 0, part.start + part.len < whole.len];
            let areas = ends.into_iter().filter(|rest| *rest).count();
            assert_eq!(bench.space.len(), areas, "{part}");
            // Nothing is left of it: it can be mapped again, and everything unmapped in one.
            bench.map(part, Prot::RW);
            bench.check(&[]);
            assert_eq!(bench.space.unmap(at(whole)).unwrap().bytes, whole.len);
            assert_eq!(bench.tables.in_use(), 1);
            bench.end();
        }
    }
}

#[test]
fn a_page_of_4_kib_out_of_1_gib_leaves_the_fewest_leaves() {
    for (format, count) in [
        (FORMATS[0], 511 + 511),
        (FORMATS[1], 511 + 511),
        (FORMATS[2], 18),
    ] {
        let mut bench = Bench::new(format, &[Span::new(FRAME, GIB)]);
        bench.whole();
        let page = Span::new(0, PAGE);
        bench.space.unmap_cutting(at(page), NEVER).unwrap();
        assert_eq!(leaves(&bench.space).len(), count);
        bench.end();
    }
}

#[test]
fn a_cut_that_is_refused_changes_no_translation_and_no_area() {
    for format in FORMATS {
        let mut bench = Bench::new(format, &frames());
        bench.whole();
        let before = bench.state();
        let part = Span::new(MIB + PAGE, 900 * MIB);
        // Not at a page.
        for odd in [Span::new(AT + 1, PAGE), Span::new(AT, PAGE + 8)] {
            let refused = bench.space.unmap_cutting(odd, NEVER);
            assert!(
                matches!(refused, Err(UnmapError::CutsArea { .. })),
                "{refused:?}"
            );
            assert_eq!(bench.state(), before);
        }
        // Each table in turn is missing: translations stay, leaves may be smaller.
        let mut refused = 0;
        for left in 0.. {
            let taken = 64 - bench.tables.in_use() - left;
            let reserve = bench.tables.reserve(taken).unwrap();
            let result = bench.space.take_out(at(part), NEVER);
            bench.tables.give_back(reserve);
            match result {
                Ok(bytes) => {
                    assert_eq!(bytes, part.len);
                    break;
                }
                Err(UnmapError::Cut(ResizeError::NoTables(_))) => {}
                Err(other) => panic!("{other}"),
            }
            bench.check(&[]);
            assert_eq!(bench.space.len(), 1);
            refused += 1;
        }
        assert!(refused >= 2, "{refused}");
        bench.space.put_back(at(part), NEVER).unwrap();
        assert_eq!(bench.state(), before);

        // A deaf unit: at the first cut, at the second (the first is done then), at the flush of
        // what was unmapped.
        for _ in 0..2 {
            bench.unit.invalidates.set([0]);
            let failed = bench.space.take_out(at(part), NEVER);
            let Err(UnmapError::Cut(ResizeError::Flush(_))) = failed else {
                panic!("{failed:?}");
            };
            bench.check(&[]);
            assert_eq!(bench.space.len(), 1);
            bench.unit.invalidates.set(None);
            bench.space.flush().unwrap();
        }
        bench.unit.invalidates.set([0]);
        let failed = bench.space.take_out(at(part), NEVER);
        assert!(matches!(failed, Err(UnmapError::Flush(_))), "{failed:?}");
        assert_eq!(bench.space.retired(), 1);
        assert_eq!(bench.object.memory.pinned(), before.pinned);
        // It is out, and comes back when the unit hears.
        bench.space.put_back(at(part), NEVER).unwrap();
        assert_eq!(bench.state(), before);
        bench.end();
    }
}

#[test]
fn what_is_out_stays_noted_until_it_is_put_back_or_unmapped() {
    for format in FORMATS {
        let mut bench = Bench::new(format, &frames());
        let whole = bench.whole();
        let before = bench.state();
        let one = Span::new(3 * MIB, MIB);
        let two = Span::new(8 * MIB, PAGE);
        let both = Span::inclusive(one.start, two.last()).unwrap();
        let out = |bench: &mut Bench, part| bench.space.take_out(at(part), NEVER).unwrap();
        assert_eq!(out(&mut bench, one), one.len);
        assert_eq!(out(&mut bench, two), two.len);
        bench.check(&[one, two]);
        assert_eq!(bench.space.len(), 5);
        let outs: Vec<Span<Iova>> = bench
            .space
            .areas()
            .into_iter()
            .filter(|area| area.is_out() && area.memory().first_held(area.part()).is_none())
            .map(|area| area.range())
            .collect();
        assert_eq!(outs, [at(one), at(two)]);
        // The place is taken.
        let page = Span::new(0, PAGE);
        let taken = bench
            .space
            .map(AT + one.start, &bench.memory, page, Prot::RW);
        assert!(matches!(taken, Err(MapError::Overlap { .. })));
        // Once more, and over them.
        assert_eq!(out(&mut bench, one), 0);
        assert_eq!(out(&mut bench, both), both.len - one.len - two.len);
        bench.check(&[both]);

        // Only as a whole, and only what was out.
        for part in [
            Span::new(one.start, PAGE),
            Span::new(one.start + PAGE, both.len),
        ] {
            let refused = bench.space.put_back(at(part), NEVER);
            assert!(
                matches!(refused, Err(MapError::NotOut { .. })),
                "{refused:?}"
            );
            bench.check(&[both]);
        }
        bench.space.put_back(at(two), NEVER).unwrap();
        bench.space.put_back(at(two), NEVER).unwrap();
        bench.check(&[Span::new(one.start, both.len - two.len)]);
        bench.space.put_back(at(whole), NEVER).unwrap();
        assert_eq!(bench.state(), before);
        assert_eq!(bench.space.len(), 1);

        // Out, and then unmapped.
        out(&mut bench, one);
        let unmapped = bench.space.unmap_cutting(at(both), NEVER).unwrap();
        assert_eq!((unmapped.areas, unmapped.bytes), (2, both.len));
        assert_eq!(unmapped.unpinned, both.len - one.len);
        // There is nothing left that could go out.
        let missing = bench.space.take_out(at(whole), NEVER);
        assert!(
            matches!(missing, Err(UnmapError::Hole { at, .. }) if at == AT + both.start),
            "{missing:?}"
        );
        bench.space.put_back(at(whole), NEVER).unwrap();
        bench.check(&[both]);
        let beyond = Span::new(u64::MAX - PAGE + 1, 2 * PAGE);
        assert!(bench.space.take_out(beyond, NEVER).is_err());
        assert!(bench.space.put_back(beyond, NEVER).is_err());
        bench.end();
    }
}

#[test]
fn what_cannot_be_put_back_is_out_still() {
    let mut bench = Bench::new(FORMATS[0], &frames());
    let whole = bench.whole();
    let before = bench.state();
    let parts = [0, 2, 4].map(|n| Span::new(n * MIB, MIB));
    for part in parts {
        bench.space.take_out(at(part), NEVER).unwrap();
    }
    for n in 0..3 {
        bench.object.pins.set([n]);
        let refused = bench.space.put_back(at(whole), NEVER);
        assert!(matches!(refused, Err(MapError::Pin(_))), "{refused:?}");
        // Earlier parts are back.
        bench.check(&parts[n as usize..]);
        for part in &parts[..n as usize] {
            bench.space.take_out(at(*part), NEVER).unwrap();
        }
        bench.check(&parts);
    }
    bench.object.pins.set(None);
    bench.object.reads.set([1]);
    let refused = bench.space.put_back(at(parts[1]), NEVER);
    assert!(matches!(refused, Err(MapError::Runs(_))), "{refused:?}");
    bench.check(&parts);
    bench.object.reads.set(None);
    bench.space.put_back(at(whole), NEVER).unwrap();
    assert_eq!(bench.state(), before);
    bench.end();
}

#[test]
fn areas_are_joined_only_where_they_were_cut() {
    let mut bench = Bench::new(FORMATS[0], &[Span::new(FRAME, 8 * MIB)]);
    let parts = [0, 1, 2, 3].map(|n| Span::new(n * MIB, MIB));
    for (part, prot) in parts
        .into_iter()
        .zip([Prot::RW, Prot::READ, Prot::RW, Prot::RW])
    {
        bench.map(part, prot);
    }
    // Goes on in address and permissions, but not in the memory; and in other memory.
    let other = unlimited(Arc::new(Synthetic::new([Span::new(2 * FRAME, 8 * MIB)])));
    for (n, memory, from) in [(4, bench.memory.clone(), 6), (5, other, 7)] {
        let part = Span::new(from * MIB, MIB);
        bench
            .space
            .map(AT + n * MIB, &memory, part, Prot::RW)
            .unwrap();
    }
    let prots = |bench: &Bench| -> Vec<(u64, Prot)> {
        let leaves = leaves(&bench.space);
        let pages = leaves.iter().flat_map(|leaf| {
            let frames = leaf.run.pa..leaf.run.pa + leaf.run.len;
            frames
                .step_by(PAGE as usize)
                .map(|frame| (frame, leaf.prot))
        });
        pages.collect()
    };
    let before = prots(&bench);
    let middle = Span::new(MIB / 2, 5 * MIB);
    bench.space.take_out(at(middle), NEVER).unwrap();
    bench.space.put_back(at(middle), NEVER).unwrap();
    assert_eq!(prots(&bench), before);
    let areas: Vec<Span<Iova>> = bench
        .space
        .areas()
        .into_iter()
        .map(|area| area.range())
        .collect();
    let mapped = [0, 1, 2, 3, 4, 5].map(|n| at(Span::new(n * MIB, MIB)));
    assert_eq!(areas, mapped);
    let prots: Vec<Prot> = bench
        .space
        .areas()
        .into_iter()
        .map(|area| area.prot())
        .collect();
    let mut right = [Prot::RW; 6];
    right[1] = Prot::READ;
    assert_eq!(prots, right);
    // A range mapped by one call is unmapped by one call.
    for range in mapped {
        assert_eq!(bench.space.unmap(range).unwrap().bytes, MIB);
    }
    bench.end();
}

#[test]
fn what_is_mapped_where_something_was_cut_off_stays_apart_from_the_rest() {
    for gone in [0, 1, 2] {
        let mut bench = Bench::new(FORMATS[0], &[Span::new(FRAME, 8 * MIB)]);
        let whole = Span::new(0, 3 * MIB);
        bench.map(whole, Prot::RW);
        let part = Span::new(gone * MIB, MIB);
        bench.space.unmap_cutting(at(part), NEVER).unwrap();
        bench.map(part, Prot::RW);
        // Out and back, released and restored, over all borders.
        bench.space.take_out(at(whole), NEVER).unwrap();
        bench.space.put_back(at(whole), NEVER).unwrap();
        let refused = &mut |range, cause| panic!("{range}: {cause}");
        bench.space.release(&[at(whole)], NEVER, refused);
        let failed = &mut |range, cause| panic!("{range}: {cause}");
        bench.space.restore(&[at(whole)], NEVER, failed);
        assert_eq!(bench.space.len(), if gone == 1 { 3 } else { 2 });
        assert_eq!(bench.space.unmap(at(part)).unwrap().bytes, MIB);
        let rest = bench.space.unmap(at(whole)).unwrap();
        assert_eq!(rest.bytes, 2 * MIB);
        bench.end();
    }
}
