//! Blocks of pages, of which commands are made.

use super::*;
use crate::commands::{Block, MOST_PAGE_COMMANDS, Room, blocks};

#[test]
fn a_large_leaf_is_named_whole() {
    let block = |level: u32, range, most| {
        let what = Invalidation::of(range, 1 << level, false);
        blocks(&what, most, &mut Room::new()).map(<[_]>::to_vec)
    };
    let part = Span::new((5 << 21) + 0x3000, 0x1000);
    let address = 5 << 21;
    assert_eq!(
        block(1, part, 18),
        Some([Block { address, mask: 9 }].into())
    );
    assert_eq!(
        block(2, part, 18),
        Some(
            [Block {
                address: 0,
                mask: 18
            }]
            .into()
        )
    );
    assert_eq!(block(2, part, 17), None);
    assert_eq!(block(1, part, 8), None);
    // The last page of all.
    let last = Span::new(!0xfff, 0x1000);
    let address = !0xfff;
    assert_eq!(
        block(0, last, 18),
        Some([Block { address, mask: 0 }].into())
    );
    // 32 pieces are few, 33 are many.
    let pieces = |count: u64| block(0, Span::new(0, count << 21), 9).map(|blocks| blocks.len());
    assert_eq!((pieces(32), pieces(64)), (Some(32), None));
    assert_eq!(32, MOST_PAGE_COMMANDS);
}

#[test]
fn blocks_cover_the_range_and_less_than_twice_of_it() {
    let mut random = fastrand::Rng::with_seed(1);
    let mut next = || random.u64(..);
    for _ in 0..200_000 {
        let bits = next() % 40;
        let first = next() >> (next() % 52) >> 12;
        let count = 1 + next() % (1 << bits);
        let Some(range) = Span::checked(first << 12, count << 12) else {
            continue;
        };
        let what = Invalidation::of(range, 1, false);
        let most = 52;
        let mut room = Room::new();
        let found = blocks(&what, most, &mut room).unwrap();
        assert!(found.len() <= 2, "{range}: {found:?}");
        let mut reached = range.start >> 12;
        let mut total = 0u128;
        for block in found.iter() {
            let (start, pages) = (block.address >> 12, 1u64 << block.mask);
            assert_eq!(start % pages, 0, "{range}: {found:?}");
            assert!(start <= reached, "{range}: {found:?}");
            reached = start + pages;
            total += u128::from(pages);
        }
        assert!(reached > range.last() >> 12, "{range}: {found:?}");
        assert!(total < 2 * u128::from(count), "{range}: {found:?}");
    }
}
