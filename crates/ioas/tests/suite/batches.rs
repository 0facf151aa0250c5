//! Ends of a reader's batches, or of pins, play no role for the leaves.

use std::ops::ControlFlow;
use std::sync::Arc;

use crate::common::*;
use ioas::{FixedRuns, MemoryObject, RunReader, Synthetic, WhenUnmapped};
use iopt::{HeapTables, Leaf, Prot};
use proptest::prelude::*;
use runs::{Joiner, Pa, Span};

/// Leaves of a table that gets the same runs joined, all at once.
fn in_one_batch(format: (iopt::FormatId, u8), iova: u64, runs: &[Span<Pa>]) -> Vec<Leaf> {
    let tables = Arc::new(HeapTables::with_tables(64).unwrap());
    let table = table(format.0, format.1, &tables);
    let mut joiner = Joiner::new();
    let mut joined: Vec<Span<Pa>> = runs.iter().filter_map(|run| joiner.push(*run)).collect();
    joined.extend(joiner.finish());
    table.map(iova, &joined, Prot::RW).unwrap();
    leaves_of(&table)
}

fn through_a_space(
    format: (iopt::FormatId, u8),
    iova: u64,
    memory: Arc<dyn MemoryObject>,
) -> Vec<Leaf> {
    let tables = Arc::new(HeapTables::with_tables(64).unwrap());
    let space = space(format.0, format.1, &tables);
    let memory = unlimited(memory);
    let part = Span::new(0, memory.len());
    space.map(iova, &memory, part, Prot::RW).unwrap();
    leaves(&space)
}

#[test]
fn a_run_across_the_border_of_two_batches_keeps_its_large_leaf() {
    // 3840 scattered pages, then 2 MiB page by page: 256 of them in the first batch of 4096. Then
    // 1000 more, and a single page at the end that goes on where nothing ended.
    let scattered = |n: u64| Span::new(0x8000_0000 + n * 2 * PAGE, PAGE);
    let mut runs: Vec<Span<Pa>> = (0..3840).map(scattered).collect();
    runs.extend((0..512).map(|n| Span::new(0x4000_0000 + n * PAGE, PAGE)));
    runs.extend((4000..5001).map(scattered));
    // At 15 MiB in the object.
    let iova = GIB + MIB;
    for format in FORMATS {
        let memory: Arc<dyn MemoryObject> = Arc::new(Synthetic::new(runs.iter().copied()));
        let found = through_a_space(format, iova, memory);
        let large: Vec<_> = found
            .iter()
            .filter(|leaf| leaf.run.len >= 2 * MIB)
            .collect();
        assert_eq!(large.len(), 1, "{format:?}");
        assert_eq!(large[0].run.pa, 0x4000_0000);
        assert_eq!(found, in_one_batch(format, iova, &runs), "{format:?}");
    }
}

/// Runs as `reader` has them, in batches of three, not joined any further.
fn as_read(reader: &mut dyn RunReader) -> Vec<Span<Pa>> {
    let (mut batch, mut runs) = ([Span::default(); 3], Vec::new());
    loop {
        match reader.next_batch(&mut batch).unwrap() {
            0 => return runs,
            count => runs.extend_from_slice(&batch[..count]),
        }
    }
}

#[test]
fn a_run_across_the_border_of_two_pins_keeps_its_large_leaf() {
    // 4 MiB page by page, and two scattered pages. The first 257 pages are pinned before the rest.
    let mut runs: Vec<Span<Pa>> = (0..1024)
        .map(|n| Span::new(0x4000_0000 + n * PAGE, PAGE))
        .collect();
    runs.extend([Span::new(0x8000_0000, PAGE), Span::new(0x9000_0000, PAGE)]);
    let joined = [Span::new(0x4000_0000, 4 * MIB), runs[1024], runs[1025]];
    for format in FORMATS {
        let tables = Arc::new(HeapTables::with_tables(64).unwrap());
        let space = space(format.0, format.1, &tables);
        let memory = unlimited(Arc::new(Synthetic::new(runs.iter().copied())));
        let map = |iova, part| space.map(iova, &memory, part, Prot::RW);
        map(4 * GIB, Span::new(0, 257 * PAGE)).unwrap();
        let whole = Span::new(0, memory.len());
        map(GIB, whole).unwrap();
        let found: Vec<Leaf> = leaves(&space)
            .into_iter()
            .filter(|leaf| leaf.run.iova < 4 * GIB)
            .collect();
        assert_eq!(found, in_one_batch(format, GIB, &runs), "{format:?}");
        let range = Span::new(GIB, whole.len);
        let pin = space.pin(range, Prot::READ, WhenUnmapped::Keeps).unwrap();
        assert_eq!(pin.holds()[0].with_runs(whole, as_read), joined);
        drop(pin);
        space.close().unwrap();
    }
}

#[test]
fn given_runs_that_are_neighbours_are_one_from_the_beginning() {
    let runs = [(GIB, 3 * PAGE), (GIB + 3 * PAGE, PAGE), (5 * GIB, PAGE)];
    let runs = runs.map(|(start, len)| Span::<Pa>::new(start, len));
    let given = FixedRuns::new(runs, PAGE).unwrap();
    let part = Span::new(PAGE, 4 * PAGE);
    let pin = given.pin(part, &mut |_| ControlFlow::Continue(())).unwrap();
    let found = as_read(&mut *pin.runs(part).unwrap());
    assert_eq!(found, [Span::new(GIB + PAGE, 3 * PAGE), runs[2]]);
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 100,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn leaves_do_not_depend_on_batches_or_pieces(
        // Length in pages; whether it goes on where the one before ended.
        runs in prop::collection::vec((1u64..700, any::<bool>()), 1..12),
        batches in prop::collection::vec(1usize..9, 1..4),
        piece in prop::sample::select(vec![1u64, 16, 100, 512, 1 << 30]),
        iova in prop::sample::select(vec![0, PAGE, MIB, 2 * MIB, GIB - MIB]),
        format in prop::sample::select(FORMATS.to_vec()),
    ) {
        let mut at = 0x4000_0000;
        let mut spans = Vec::new();
        for (pages, goes_on) in runs {
            if !goes_on {
                at += 16 * MIB - at % (2 * MIB);
            }
            spans.push(Span::new(at, pages * PAGE));
            at += pages * PAGE;
        }
        let mut memory = Frail::new(Synthetic::new(spans.iter().copied()));
        memory.batches = batches;
        memory.piece = piece * PAGE;
        let found = through_a_space(format, iova, Arc::new(memory));
        prop_assert_eq!(found, in_one_batch(format, iova, &spans));
    }
}
