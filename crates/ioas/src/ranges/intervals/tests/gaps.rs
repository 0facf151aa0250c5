//! The search for room beside a look at every address, and how often it may come in vain.

use alloc::vec::Vec;
use runs::Iova;

use proptest::prelude::*;

use super::super::*;

/// Disjoint, in order, below `end`.
fn windows_in(end: u64) -> impl Strategy<Value = Vec<Span<Iova>>> {
    prop::collection::vec(0..end, 0..6).prop_map(|mut ends| {
        ends.sort();
        let pairs = ends.chunks_exact(2);
        pairs
            .filter_map(|pair| Span::checked(pair[0], pair[1] - pair[0]))
            .collect()
    })
}

proptest! {
    /// A search of all nodes that finds nothing leaves bounds behind by which the next search does not even begin,
    /// after any sequence of changes.
    #[test]
    fn no_search_comes_in_vain_twice(
        spans in prop::collection::vec((0u64..2000, 1u64..20), 100..200),
        gone in prop::collection::vec(any::<prop::sample::Index>(), 0..30),
        order in 0u32..6,
    ) {
        let mut map = Intervals::<Iova, (), 8>::new();
        for (start, len) in spans {
            let _ = map.insert(Span::new(start, len), ());
        }
        let mut starts: Vec<u64> = map.spans().iter().map(|(span, ())| span.start).collect();
        for gone in gone {
            map.remove(starts.swap_remove(gone.index(starts.len())));
        }
        // Up to the end of the last span, behind which there is always room.
        let (_, last) = map.ends(map.height, map.root);
        let (len, window) = (1 << order, [Span::new(0, last + 1)]);
        while let Some(start) = map.gap(len, len, &window) {
            map.insert(Span::new(start, len), ()).unwrap();
        }
        map.check();
        prop_assert!(map.height > 0);
        prop_assert!(!map.most_room(map.height, map.root).suffices(Room::least(len, len)));
    }

    /// Every address is tried.
    #[test]
    fn a_gap_is_the_lowest_of_all_addresses_that_fit(
        spans in prop::collection::vec((0u64..250, 1u64..12), 0..60),
        top in any::<bool>(),
        wishes in prop::collection::vec((1u64..40, 0u32..7, windows_in(256)), 1..20),
    ) {
        // The last 256 addresses of all, or the first.
        let base = if top { u64::MAX - 255 } else { 0 };
        let mut map = Intervals::<Iova, (), 8>::new();
        let mut free = [true; 256];
        for (start, len) in spans {
            let len = len.min(256 - start);
            let bytes = start as usize..(start + len) as usize;
            if map.insert(Span::new(base + start, len), ()).is_ok() {
                free[bytes].fill(false);
            }
        }
        for (len, align, windows) in wishes {
            let fits = |window: &Span<Iova>, address: u64| {
                address.is_multiple_of(1 << align)
                    && window.covers(&Span::new(address, len))
                    && free[address as usize..(address + len) as usize].iter().all(|&free| free)
            };
            let lowest = (0..256).find(|&address| {
                windows.iter().any(|window| address + len <= 256 && fits(window, address))
            });
            let windows: Vec<_> = windows.iter().map(|w| Span::new(base + w.start, w.len)).collect();
            prop_assert_eq!(map.gap(len, 1 << align, &windows), lowest.map(|address| base + address));
        }
    }
}
