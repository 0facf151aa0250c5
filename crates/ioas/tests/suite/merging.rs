//! Leaves grow together again when what was released comes back, in whatever order.

use crate::common::machines::{AT, Bench, Machine, can};
use crate::common::*;
use iopt::{FormatId, Interruption};
use runs::{Iova, Span};

/// In `Bench`'s first area, of 1 GiB in one leaf.
const fn at(start: u64, len: u64) -> Span<Iova> {
    Span::new(AT + start, len)
}

/// Leaves of 4K with bytes in the 2M from `first` on.
fn small(space: &Space, first: u64) -> u64 {
    let mut leaves = 0;
    let count = |leaf: iopt::Leaf| leaves += u64::from(leaf.run.len == PAGE);
    space.with_table(|table| table.for_each_leaf(at(first, 2 * MIB), count));
    leaves
}

#[test]
fn the_page_that_comes_back_last_makes_one_leaf_of_all() {
    for format in [FormatId::VtdSs, FormatId::AmdV1] {
        let mut bench = Bench::new();
        bench.areas();
        let sizes = 1 << 12 | 1 << 21 | 1 << 30;
        let machine = Machine::new(&bench.tables, 0, can(format, sizes, true));
        machine.attach(&mut bench.space).unwrap();
        let before = bench.state();
        // In the first 2M and in the last: forwards, backwards, and to and fro.
        for first in [0, GIB - 2 * MIB] {
            for order in [1, 511, 171] {
                let page = |n: u64| at(first + n * order % 512 * PAGE, PAGE);
                let runs: Vec<Span<Iova>> = (0..512).map(page).collect();
                let never = Interruption::Refused;
                for some in runs.chunks(7) {
                    let kept = &mut |range, cause| panic!("{range}: {cause}");
                    bench.space.release(some, never, kept);
                }
                for (n, run) in (0..).zip(&runs) {
                    assert_eq!(small(&bench.space, first), n, "by {order}");
                    let failed = &mut |range, cause| panic!("{range}: {cause}");
                    bench.space.restore(&[*run], never, failed);
                }
                assert_eq!(bench.state(), before, "by {order}");
            }
        }
        bench.end();
    }
}
