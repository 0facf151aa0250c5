//! Every input and output size of Arm's tables, for each granule and both stages.

use iopt::format::{ArmStage1, ArmStage2, Granule, K4, K4Lpa2, K16, K16Lpa2, K64, K64Lpa};
use iopt::{Format, Gather, HeapArena, NoRuns, Prot, Table, TableOps as _, WideCell};
use runs::{Run, Span};

use super::{Tables, root_tables};

/// The first and the last page, and a leaf of every size at the ends of input and output addresses.
fn ends<F: Format, A: Tables>(format: F) {
    // New each time: a root of several tables needs them side by side.
    let memory = &A::room_for(32, 32);
    let mut table = Table::new(format, memory).unwrap();
    let whole = format.aperture().spans().next().unwrap();
    let outputs = 1u64 << format.output_bits();
    let most = whole.len.min(outputs) / 2;
    let sizes: Vec<u64> = table
        .page_sizes()
        .iter()
        .filter(|size| *size <= most)
        .collect();
    for &size in &sizes {
        let last = whole.start + (whole.len - size);
        let leaves = [
            Run::new(whole.start, Span::new(outputs - size, size)),
            Run::new(last, Span::new(0, size)),
        ];
        for leaf in leaves {
            let output = Span::new(leaf.pa, size);
            table.map(leaf.iova, &[output], Prot::RW).unwrap();
            assert_eq!(table.leaf_at(leaf.input().last()).unwrap().run, leaf);
        }
        if size == sizes[0] {
            assert_eq!(table.leaves(whole).count(), 2);
        }
        assert_eq!(table.translate(whole.start.wrapping_sub(1)), None);
        assert_eq!(table.translate(whole.start.wrapping_add(whole.len)), None);
        for leaf in leaves {
            let mut gather = Gather::new();
            table.unmap(leaf.input(), &mut gather, &mut NoRuns).unwrap();
            let flushed = gather.flush_with(|_| Ok::<_, ()>(())).unwrap();
            table.reclaim(flushed);
            assert_eq!(table.translate(leaf.input().last()), None);
        }
        assert_eq!(memory.used(), root_tables(&format));
    }
    // Pages, and at least one size of block.
    assert!(sizes.len() >= 2, "{sizes:?}");
    let beyond = Span::new(outputs, 1 << F::GRANULE_LOG2);
    assert!(table.map(whole.start, &[beyond], Prot::RW).is_err());
    let (gather, memory) = table.tear_down();
    memory.reclaim(gather.never_walked().into_tables());
    assert_eq!(memory.used(), 0);
}

/// How many configurations there are.
fn every_size<G: Granule, A: Tables>() -> u32 {
    let mut count = 0;
    for input in 0..=64 {
        for output in 0..=64 {
            if let Ok(format) = ArmStage1::<G>::new(input, output) {
                ends::<_, A>(format);
                ends::<_, A>(format.upper());
                count += 1;
            }
            if let Ok(format) = ArmStage2::<G>::new(input, output) {
                ends::<_, A>(format);
                count += 1;
            }
        }
    }
    count
}

#[test]
fn arm_tables_of_every_granule_input_and_output_size() {
    // 32 to 48 bits on both sides; to 52 where entries have them. Both stages.
    assert_eq!(every_size::<K4, HeapArena<WideCell, 12>>(), 2 * 17 * 17);
    assert_eq!(every_size::<K4Lpa2, HeapArena<WideCell, 12>>(), 2 * 21 * 21);
    assert_eq!(every_size::<K16, HeapArena<WideCell, 14>>(), 2 * 17 * 17);
    assert_eq!(
        every_size::<K16Lpa2, HeapArena<WideCell, 14>>(),
        2 * 21 * 21
    );
    // Stage 1 with 64 KiB: 52 input bits also without 52 output bits.
    assert_eq!(every_size::<K64, HeapArena<WideCell, 16>>(), (21 + 17) * 17);
    assert_eq!(every_size::<K64Lpa, HeapArena<WideCell, 16>>(), 2 * 21 * 21);
}
