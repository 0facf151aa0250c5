//! A guest's memory layout against what the host's IOMMU can map: overlaps with reserved ranges by name, ranges
//! beyond the aperture, and the nearest layout that fits.
//!
//! A monitor asks the kernel for the aperture and the reserved ranges (`VFIO_IOMMU_TYPE1_INFO_CAP_IOVA_RANGE`,
//! `IOMMU_IOAS_IOVA_RANGES`, or `reserved_regions` of the group in sysfs) and compares before it maps: a map in
//! a reserved range is EINVAL, in type 1 only when the device is attached.
//!
//! ```
//! use dmaspace::layout::{Bar, ReservedRange, check};
//!
//! let reserved = [ReservedRange::new("reserved", 0xfd_0000_0000..=0xff_ffff_ffff)];
//! let bar = Bar::new("0000:c1:00.0", 0xe0_0000_0000..=0xff_ffff_ffff);
//! let report = check(0..=u64::MAX, &reserved, &[0..=0xbfff_ffff], &[bar]);
//! assert_eq!(report.overlaps[0].range, 0xfd_0000_0000..=0xff_ffff_ffff);
//! assert_eq!(report.fitting.unwrap().bars[0].range, 0x100_0000_0000..=0x11f_ffff_ffff);
//! ```
//!
//! Sources: Linux `drivers/vfio/vfio_iommu_type1.c` (`vfio_iommu_iova_dma_valid`), `drivers/iommu/iommufd/io_pagetable.c`
//! (`iopt_check_iova`), `Documentation/ABI/testing/sysfs-kernel-iommu_groups`.

use std::ops::RangeInclusive;

/// A range of I/O virtual addresses, both ends inclusive.
pub type IovaRange = RangeInclusive<u64>;

/// Reserved ranges, areas of RAM and BARs in one check at most: the search for a fitting layout is quadratic in them.
pub const MOST_AREAS: usize = 4096;

/// A range that the host keeps from being mapped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReservedRange {
    /// Its type in sysfs: `reserved`, `msi`, `direct`, `direct-relaxable`.
    pub name: String,
    /// Its addresses.
    pub range: IovaRange,
}

impl ReservedRange {
    /// A range of this type.
    pub fn new(name: impl Into<String>, range: IovaRange) -> Self {
        Self {
            name: name.into(),
            range,
        }
    }

    /// A map may lie in it: firmware's mapping may be replaced (`IOMMU_RESV_DIRECT_RELAXABLE`).
    pub fn is_relaxable(&self) -> bool {
        self.name == "direct-relaxable"
    }
}

/// A BAR of a device in the guest's layout.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bar {
    /// The device.
    pub device: String,
    /// Its addresses.
    pub range: IovaRange,
}

impl Bar {
    /// A BAR of this device.
    pub fn new(device: impl Into<String>, range: IovaRange) -> Self {
        Self {
            device: device.into(),
            range,
        }
    }
}

/// An area of the layout, by its place in the arguments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AreaPlace {
    /// The nth area of RAM.
    Ram(usize),
    /// The nth BAR.
    Bar(usize),
}

/// An area that overlaps a reserved range.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Overlap {
    /// The area.
    pub area: AreaPlace,
    /// The place of the reserved range in the arguments.
    pub reserved: usize,
    /// The addresses that both have.
    pub range: IovaRange,
}

/// An area that lies beyond the aperture, in part or whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Beyond {
    /// The area.
    pub area: AreaPlace,
    /// The addresses that cannot be translated.
    pub range: IovaRange,
}

/// A layout that fits.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Layout {
    /// RAM, in pieces around the reserved ranges; as many bytes as were given.
    pub ram: Vec<IovaRange>,
    /// The BARs in the order in which they were given, each at a multiple of its size.
    pub bars: Vec<Bar>,
}

/// The result of a check.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LayoutReport {
    /// Overlaps with reserved ranges.
    pub overlaps: Vec<Overlap>,
    /// Areas beyond the aperture.
    pub beyond: Vec<Beyond>,
    /// The nearest layout that fits: areas that fit stay. `None` when nothing has to move, when no layout fits,
    /// or with more than [`MOST_AREAS`] areas.
    pub fitting: Option<Layout>,
}

impl LayoutReport {
    /// Everything can be mapped.
    pub fn fits(&self) -> bool {
        self.overlaps.is_empty() && self.beyond.is_empty()
    }
}

/// Compares areas of RAM and BARs with the aperture and the reserved ranges. Ranges that are empty are ignored.
/// Overlaps with `direct-relaxable` ranges do not count.
pub fn check(
    aperture: IovaRange,
    reserved: &[ReservedRange],
    ram: &[IovaRange],
    bars: &[Bar],
) -> LayoutReport {
    let rams = ram.iter().enumerate();
    let areas = rams.map(|(nth, range)| (AreaPlace::Ram(nth), range));
    let of_bars = bars.iter().enumerate();
    let areas = areas.chain(of_bars.map(|(nth, bar)| (AreaPlace::Bar(nth), &bar.range)));
    let mut report = LayoutReport::default();
    for (area, range) in areas {
        for (nth, kept) in reserved.iter().enumerate() {
            if kept.is_relaxable() {
                continue;
            }
            if let Some(range) = common(range, &kept.range) {
                report.overlaps.push(Overlap {
                    area,
                    reserved: nth,
                    range,
                });
            }
        }
        report.beyond.extend(
            outside(range, &aperture)
                .into_iter()
                .flatten()
                .map(|range| Beyond { area, range }),
        );
    }
    let count = reserved.len() + ram.len() + bars.len();
    if !report.fits() && count <= MOST_AREAS {
        report.fitting = fitting(&aperture, reserved, ram, bars, &report);
    }
    report
}

/// The addresses that both have.
fn common(a: &IovaRange, b: &IovaRange) -> Option<IovaRange> {
    let range = *a.start().max(b.start())..=*a.end().min(b.end());
    (!range.is_empty()).then_some(range)
}

/// The parts of `range` below and above the aperture.
fn outside(range: &IovaRange, aperture: &IovaRange) -> [Option<IovaRange>; 2] {
    let below = aperture
        .start()
        .checked_sub(1)
        .and_then(|last| common(range, &(0..=last)));
    let above = aperture
        .end()
        .checked_add(1)
        .and_then(|first| common(range, &(first..=u64::MAX)));
    [below, above]
}

fn fitting(
    aperture: &IovaRange,
    reserved: &[ReservedRange],
    ram: &[IovaRange],
    bars: &[Bar],
    report: &LayoutReport,
) -> Option<Layout> {
    let moves = |area: AreaPlace| {
        let mut overlaps = report.overlaps.iter().map(|one| one.area);
        let mut beyond = report.beyond.iter().map(|one| one.area);
        overlaps.any(|one| one == area) || beyond.any(|one| one == area)
    };
    let hard = reserved.iter().filter(|one| !one.is_relaxable());
    let mut taken: Vec<IovaRange> = hard.map(|one| one.range.clone()).collect();
    // Areas that fit stay, RAM and BARs.
    for (nth, range) in ram.iter().enumerate() {
        if !moves(AreaPlace::Ram(nth)) && !range.is_empty() {
            taken.push(range.clone());
        }
    }
    for (nth, bar) in bars.iter().enumerate() {
        if !moves(AreaPlace::Bar(nth)) && !bar.range.is_empty() {
            taken.push(bar.range.clone());
        }
    }
    let mut layout = Layout::default();
    for (nth, range) in ram.iter().enumerate() {
        if range.is_empty() {
            continue;
        }
        if !moves(AreaPlace::Ram(nth)) {
            layout.ram.push(range.clone());
            continue;
        }
        // As many bytes, from the same address upwards, around everything that is taken.
        let mut left = u128::from(*range.end()) - u128::from(*range.start()) + 1;
        let mut from = (*range.start()).max(*aperture.start());
        while left > 0 {
            let free = next_free(from, aperture, &taken)?;
            let room = u128::from(*free.end()) - u128::from(*free.start()) + 1;
            let size = room.min(left);
            let last = u64::try_from(u128::from(*free.start()) + size - 1).ok()?;
            layout.ram.push(*free.start()..=last);
            taken.push(*free.start()..=last);
            left -= size;
            if left > 0 {
                from = last.checked_add(1)?;
            }
        }
    }
    for (nth, bar) in bars.iter().enumerate() {
        if !moves(AreaPlace::Bar(nth)) || bar.range.is_empty() {
            layout.bars.push(bar.clone());
            continue;
        }
        let size = (bar.range.end() - bar.range.start()).checked_add(1)?;
        let above = place(size, *bar.range.start(), aperture, &taken);
        let range = above.or_else(|| place(size, *aperture.start(), aperture, &taken))?;
        taken.push(range.clone());
        layout.bars.push(Bar::new(bar.device.clone(), range));
    }
    Some(layout)
}

/// The first free range from `from` on, up to the next one that is taken.
fn next_free(from: u64, aperture: &IovaRange, taken: &[IovaRange]) -> Option<IovaRange> {
    let mut first = from;
    // Each round passes a range that is taken.
    for _ in 0..=taken.len() {
        if first > *aperture.end() {
            return None;
        }
        match taken.iter().find(|range| range.contains(&first)) {
            Some(range) => first = range.end().checked_add(1)?,
            None => {
                let after = taken.iter().map(|range| *range.start());
                let next = after.filter(|start| *start > first).min();
                let last = next.map_or(u64::MAX, |next| next - 1).min(*aperture.end());
                return Some(first..=last);
            }
        }
    }
    None
}

/// A free range of `size` bytes, aligned to the next power of two, as a BAR's is.
fn place(size: u64, from: u64, aperture: &IovaRange, taken: &[IovaRange]) -> Option<IovaRange> {
    let align = size.checked_next_power_of_two()?;
    let mut first = from.checked_next_multiple_of(align)?;
    for _ in 0..=taken.len() {
        let range = first..=first.checked_add(size - 1)?;
        if *range.end() > *aperture.end() {
            return None;
        }
        let before = first < *aperture.start();
        match taken.iter().find(|one| common(one, &range).is_some()) {
            None if before => first = aperture.start().checked_next_multiple_of(align)?,
            None => return Some(range),
            Some(one) => {
                first = one.end().checked_add(1)?.checked_next_multiple_of(align)?;
            }
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn amd() -> [ReservedRange; 2] {
        [
            ReservedRange::new("msi", 0xfee0_0000..=0xfeef_ffff),
            ReservedRange::new("reserved", 1012 * GIB..=1024 * GIB - 1),
        ]
    }

    #[test]
    fn memory_goes_around_the_reserved_range_with_as_many_bytes() {
        let ram = [4 * GIB..=1027 * GIB - 1];
        let report = check(0..=u64::MAX, &amd(), &ram, &[]);
        assert_eq!(report.overlaps.len(), 1);
        assert_eq!(report.overlaps[0].range, 1012 * GIB..=1024 * GIB - 1);
        let fitting = report.fitting.unwrap();
        assert_eq!(
            fitting.ram,
            [4 * GIB..=1012 * GIB - 1, 1024 * GIB..=1039 * GIB - 1]
        );
        assert!(check(0..=u64::MAX, &amd(), &fitting.ram, &[]).fits());
    }

    #[test]
    fn a_bar_moves_to_a_multiple_of_its_size_and_the_others_stay() {
        let bars = [
            Bar::new("0000:01:00.0", 512 * GIB..=640 * GIB - 1),
            Bar::new("0000:c1:00.0", 896 * GIB..=1024 * GIB - 1),
        ];
        let report = check(0..=u64::MAX, &amd(), &[], &bars);
        assert_eq!(report.overlaps[0].area, AreaPlace::Bar(1));
        let fitting = report.fitting.unwrap();
        assert_eq!(fitting.bars[0], bars[0]);
        assert_eq!(fitting.bars[1].range, 1024 * GIB..=1152 * GIB - 1);
    }

    #[test]
    fn areas_beyond_the_aperture_move_below_or_cannot() {
        let aperture = 0..=(1u64 << 39) - 1;
        let bar = [Bar::new(
            "0000:01:00.0",
            0x3820_0000_0000..=0x3820_0fff_ffff,
        )];
        let report = check(aperture.clone(), &[], &[0..=GIB - 1], &bar);
        assert_eq!(report.beyond[0].range, bar[0].range.clone());
        assert_eq!(
            report.fitting.unwrap().bars[0].range,
            GIB..=GIB + 0xfff_ffff
        );
        let whole = check(aperture.clone(), &[], &[0..=(1 << 39)], &[]);
        assert_eq!(whole.beyond[0].range, 1 << 39..=1 << 39);
        assert_eq!(whole.fitting, None);
    }

    #[test]
    fn relaxable_and_touching_ranges_are_no_overlaps() {
        let reserved = [ReservedRange::new("direct-relaxable", 0..=0xfff)];
        assert!(check(0..=u64::MAX, &reserved, &[0..=0xffff], &[]).fits());
        let ram = [4 * GIB..=1012 * GIB - 1, 1024 * GIB..=u64::MAX];
        assert!(check(0..=u64::MAX, &amd(), &ram, &[]).fits());
    }

    #[test]
    #[expect(clippy::reversed_empty_ranges)]
    fn any_ranges_are_checked_without_a_panic() {
        let edges = [0, 1, 0xfff, GIB, 1 << 39, u64::MAX - 1, u64::MAX];
        let ranges = || edges.iter().flat_map(|a| edges.map(|b| *a..=b));
        for a in ranges() {
            for b in ranges() {
                let reserved = [ReservedRange::new("reserved", a.clone())];
                let bars = [Bar::new("x", b.clone())];
                for aperture in [0..=u64::MAX, 1..=GIB, 5..=4] {
                    let report = check(aperture, &reserved, std::slice::from_ref(&b), &bars);
                    assert!(report.fits() || !b.is_empty());
                }
            }
        }
    }
}
