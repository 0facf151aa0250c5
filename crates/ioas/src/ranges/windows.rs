//! Windows for mappings: the apertures of all domains, less what is reserved.

use alloc::vec::Vec;

use iopt::Aperture;
use runs::{Iova, Span};

/// The stretches of the address space, none longer than 2^63 bytes, that lie in every one of
/// `apertures` and in none of `reserved`; in order.
pub(crate) fn windows(
    apertures: impl Iterator<Item = Aperture>,
    reserved: impl Iterator<Item = Span<Iova>>,
) -> Vec<Span<Iova>> {
    let mut windows: Vec<Span<Iova>> = Aperture::zeros(64).spans().collect();
    for aperture in apertures {
        windows = aperture
            .spans()
            .flat_map(|span| intersections(&windows, span))
            .collect();
        windows.sort_unstable();
    }
    for span in reserved {
        windows = windows
            .iter()
            .flat_map(|window| without(*window, span))
            .collect();
    }
    windows
}

/// Parts of `windows` that lie in one of `allowed`, in order.
pub(crate) fn within(windows: &[Span<Iova>], allowed: &[Span<Iova>]) -> Vec<Span<Iova>> {
    allowed
        .iter()
        .flat_map(|span| intersections(windows, *span))
        .collect()
}

fn intersections(
    windows: &[Span<Iova>],
    span: Span<Iova>,
) -> impl Iterator<Item = Span<Iova>> + '_ {
    windows
        .iter()
        .filter_map(move |window| window.intersection(&span))
}

/// `window` without `hole`: what lies before, and what lies behind.
pub(crate) fn without(window: Span<Iova>, hole: Span<Iova>) -> impl Iterator<Item = Span<Iova>> {
    let before = hole.start.clamp(window.start, window.last()) - window.start;
    let parts = if hole.overlaps(&window) {
        let behind = window.last().saturating_sub(hole.last());
        // Empty, and at 2^64, when the hole goes to the end.
        let tail = window.start.wrapping_add(window.len - behind);
        [Span::new(window.start, before), Span::new(tail, behind)]
    } else {
        [window, Span::default()]
    };
    parts.into_iter().filter(|part| !part.is_empty())
}

/// The stretch without a window that `range` has bytes in, the first one.
#[cfg(any(feature = "vfio", feature = "iommufd"))]
pub(crate) fn outside(windows: &[Span<Iova>], range: Span<Iova>) -> Option<Span<Iova>> {
    // The first address that is in no window, of those from the start of the range on.
    let mut at = range.start;
    let mut behind = 0;
    for window in windows {
        if window.start > at {
            return Span::inclusive(behind, window.start - 1);
        }
        if window.last() >= range.last() {
            return None;
        }
        behind = window.last() + 1;
        at = at.max(behind);
    }
    Span::inclusive(behind, u64::MAX).or_else(|| Span::inclusive(1, u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;

    #[test]
    fn apertures_meet_and_reserved_ranges_are_left_out() {
        let all = [Aperture::signed(48), Aperture::zeros(40)];
        let msi = Span::new(0xfee0_0000, 0x10_0000);
        let top = Span::new((1 << 40) - 0x1000, 0x2000);
        let found = windows(all.into_iter(), [msi, top].into_iter());
        let behind = 0xfef0_0000;
        assert_eq!(
            found,
            [
                Span::new(0, 0xfee0_0000),
                Span::new(behind, (1 << 40) - 0x1000 - behind)
            ]
        );
        let steered = within(&found, &[Span::new(0xfe00_0000, 0x200_0000)]);
        assert_eq!(
            steered,
            [
                Span::new(0xfe00_0000, 0xe0_0000),
                Span::new(behind, 0x110_0000)
            ]
        );
    }

    #[test]
    fn without_anything_the_whole_space_is_there() {
        let half = 1 << 63;
        assert_eq!(
            windows([].into_iter(), [].into_iter()),
            [Span::new(0, half), Span::new(half, half)]
        );
        let top = Span::new(half, half);
        assert_eq!(
            windows([].into_iter(), [Span::new(0, half)].into_iter()),
            [top]
        );
    }

    #[test]
    #[cfg(any(feature = "vfio", feature = "iommufd"))]
    fn what_is_outside_is_the_whole_gap() {
        let windows = [Span::new(0, 4), Span::new(6, 2), Span::new(8, 4)];
        let gap = |start, len| outside(&windows, Span::new(start, len));
        assert_eq!(gap(0, 4), None);
        assert_eq!(gap(6, 6), None);
        for (start, len) in [(0, 5), (4, 1), (5, 2), (3, 9)] {
            assert_eq!(gap(start, len), Some(Span::new(4, 2)), "{start}+{len}");
        }
        let top = Span::inclusive(12, u64::MAX);
        assert_eq!(gap(11, 2), top);
        assert_eq!(gap(100, 1), top);
        assert!(outside(&[], Span::new(0, 1)).is_some());
        let whole: Vec<Span<Iova>> = Aperture::zeros(64).spans().collect();
        assert_eq!(outside(&whole, Span::new(u64::MAX - 7, 8)), None);
    }

    #[test]
    fn every_way_to_take_a_hole_out() {
        for start in 0..12u64 {
            for len in 1..8 {
                let (window, hole) = (Span::new(3, 5), Span::new(start, len));
                let left: Vec<u64> = without(window, hole)
                    .flat_map(|part| part.start..part.start + part.len)
                    .collect();
                let expected: Vec<u64> = (3..8).filter(|byte| !hole.contains(*byte)).collect();
                assert_eq!(left, expected, "{hole}");
            }
        }
        let end = Span::new(u64::MAX - 9, 10);
        let holes = [Span::new(u64::MAX - 4, 5), Span::new(u64::MAX - 9, 3)];
        let left = |hole| without(end, hole).collect::<Vec<_>>();
        assert_eq!(left(holes[0]), vec![Span::new(u64::MAX - 9, 5)]);
        assert_eq!(left(holes[1]), vec![Span::new(u64::MAX - 6, 7)]);
    }
}
