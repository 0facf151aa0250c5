//! Where a batch works, in tables of any shape: what the head of [`work`](crate::peers::work) says, as
//! addresses.
//!
//! Formats whose addresses do not reach [`IOVA`] or [`PA`] begin lower. Where tables of the leaves'
//! level are so short that the range of an operation does not fit into half of one (256 pages of
//! ARMv7), it reaches from the middle of one to the middle of the next. Where there is one such table
//! only (its sections), it is divided among the operations, and each has one half of its part.

use iopt::Format;
use runs::{Iova, Span};

use crate::peers::work::{IOVA, PA};

/// Operations of a batch that each map or unmap a single page.
pub const SINGLES: u64 = 64;
/// Operations of a batch of up to [`SHORT`] pages each.
pub const RANGES: u64 = 8;
/// The most pages for which there are several operations in a batch.
pub const SHORT: u64 = 512;
/// Addresses that are translated in a batch.
pub const TRANSLATIONS: u64 = 4096;

/// Parameters of a format that places depend on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Bits of an input address.
    pub input_bits: u32,
    /// Bits of an output address.
    pub output_bits: u32,
    /// Levels, the lowest first: bytes that an entry and that a table spans, as powers of two.
    pub levels: Vec<(u32, u32)>,
    /// Bytes of an entry.
    pub entry_bytes: usize,
}

/// The places of a batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Places {
    /// One range for each operation.
    pub ranges: Vec<Span<Iova>>,
    /// Mappings beside, where tables are to be half full.
    pub beside: Vec<Span<Iova>>,
    /// A page below, which keeps the upper tables.
    pub keeper: Option<Span<Iova>>,
    /// The physical address of every range.
    pub pa: u64,
}

impl Places {
    /// A page in each of the tables that the ranges lie in, the first one of those beside them.
    pub fn behind(&self, page: u64) -> Vec<Span<Iova>> {
        let first = |span: &Span<Iova>| Span::new(span.start, page);
        if self.ranges.iter().all(|range| range.len == page) {
            // Single pages, all in one table: behind the last of them, not between.
            self.beside.last().map(first).into_iter().collect()
        } else {
            self.beside.iter().map(first).collect()
        }
    }
}

impl Geometry {
    /// The geometry of a format as it is configured.
    pub fn of<F: Format>(format: &F) -> Self {
        let levels = (0..usize::from(format.levels())).map(|level| {
            let entry = F::shift(level);
            (entry, entry + format.entries(level).trailing_zeros())
        });
        Self {
            input_bits: format.aperture().bits,
            output_bits: format.output_bits(),
            levels: levels.collect(),
            entry_bytes: F::ENTRY_BYTES,
        }
    }

    /// The level at which leaves of `page` bytes lie.
    pub fn level(&self, page: u64) -> usize {
        let fits = |&(entry, _): &(u32, u32)| 1u64 << entry <= page;
        self.levels.iter().rposition(fits).unwrap_or(0)
    }

    /// Bytes that a table with leaves of `page` bytes spans.
    pub fn table(&self, page: u64) -> u64 {
        1 << self.levels.get(self.level(page)).map_or(0, |level| level.1)
    }

    /// The physical address at which things begin.
    pub fn pa(&self) -> u64 {
        PA.min(1 << (self.output_bits - 1))
    }

    /// Where the work begins with leaves of `page` bytes: in a table of its own.
    pub fn start(&self, page: u64) -> u64 {
        let quarter = 1 << (self.input_bits - 2);
        let start = IOVA.min(quarter).next_multiple_of(self.table(page));
        if start >> self.input_bits == 0 {
            start
        } else {
            0
        }
    }

    /// The places of a batch of operations on `count` pages of `page` bytes each; `None` where the
    /// address space has no room for them.
    pub fn places(&self, page: u64, count: u64) -> Option<Places> {
        let (all, table) = (1u64 << self.input_bits, self.table(page));
        let len = page.checked_mul(count)?;
        let mut start = self.start(page);
        let mut beside = Vec::new();
        let ranges: Vec<Span<Iova>> = if count == 1 {
            beside.extend((0..SINGLES).map(|n| Span::new(start + (2 * n + 1) * page, page)));
            let at = |n| Span::new(start + 2 * n * page, page);
            (0..SINGLES).map(at).collect()
        } else if count <= SHORT {
            // From `step` to `step`, each range begins `skip` bytes in.
            let (step, skip) = if start + RANGES * table > all {
                start = 0;
                (all / RANGES, 0)
            } else if 2 * len <= table {
                (table, 0)
            } else {
                ((table / 2 + len).next_multiple_of(table), table / 2)
            };
            let part = |n| start + n * step;
            for n in 0..RANGES {
                if skip > 0 {
                    beside.push(Span::new(part(n), skip));
                }
                let from = if skip == 0 { step / 2 } else { skip + len };
                beside.push(Span::new(part(n) + from, step - from));
            }
            let at = |n| Span::new(part(n) + skip, len);
            (0..RANGES).map(at).collect()
        } else {
            if start.checked_add(len).is_none_or(|end| end > all) {
                start = 0;
            }
            vec![Span::new(start, len)]
        };
        beside.retain(|span| span.len > 0);
        let end = ranges.iter().chain(&beside).map(Span::last).max()?;
        let pa = self.pa();
        let fits = end < all
            && pa
                .checked_add(len)
                .is_some_and(|end| end <= 1 << self.output_bits);
        // Below everything, so in another table where there is more than one.
        let first = ranges.iter().chain(&beside).map(|span| span.start).min()?;
        fits.then(|| Places {
            keeper: first.checked_sub(page).map(|at| Span::new(at, page)),
            ranges,
            beside,
            pa,
        })
    }

    /// The places of operations on 1 MiB each, aligned to it, in the sizes of the format's choice.
    pub fn chosen(&self) -> Option<Places> {
        let (granule, table) = self.levels.first().copied()?;
        let len = 1u64 << 20;
        // Where a table of the lowest level is no longer than that, it is one entry of the next.
        if 1 << table > len {
            self.places(1 << granule, len >> granule)
        } else {
            self.places(len, 1)
        }
    }

    /// How many tables the places need at most, with leaves of `page` bytes.
    pub fn tables(&self, places: &Places, page: u64) -> u64 {
        let level = self.level(page);
        let all = places.ranges.iter().chain(&places.beside);
        let of = |span: &Span<Iova>| {
            let upper = self.levels.iter().skip(level);
            upper.map(|(_, table)| (span.len >> table) + 2).sum::<u64>()
        };
        all.map(of).sum::<u64>() + 64
    }
}

/// Addresses at random in `span`, always the same.
pub fn random(span: Span<Iova>) -> Vec<u64> {
    let mut random = fastrand::Rng::with_seed(1);
    let next = |_| span.start + random.u64(..span.len);
    (0..TRANSLATIONS).map(next).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;
    use iopt::format::{ArmStage1, ArmV7s, K64, VtdSs};

    const M1: u64 = 1 << 20;

    #[test]
    fn work_lies_where_its_description_says() {
        let geometry = Geometry::of(&VtdSs::new(4).unwrap());
        let single = geometry.places(4096, 1).unwrap();
        assert_eq!(single.ranges.len(), 64);
        assert_eq!(single.ranges[3], Span::new(IOVA + 6 * 4096, 4096));
        assert_eq!(single.keeper, Some(Span::new(IOVA - 4096, 4096)));
        let ranges = geometry.places(4096, 256).unwrap();
        assert_eq!(ranges.ranges[2], Span::new(IOVA + 4 * M1, M1));
        assert_eq!(ranges.beside[2], Span::new(IOVA + 5 * M1, M1));
        let long = geometry.places(4096, 1 << 18).unwrap();
        assert_eq!(long.ranges, [Span::new(IOVA, 1 << 30)]);
        assert_eq!((long.pa, long.beside.len()), (PA, 0));
        assert_eq!(geometry.chosen().unwrap(), ranges);
    }

    #[test]
    fn short_tables_and_small_address_spaces_have_places_too() {
        let geometry = Geometry::of(&<ArmV7s>::new());
        // As long as a table: from middle to middle.
        let ranges = geometry.places(4096, 256).unwrap();
        assert_eq!(ranges.ranges[1], Span::new((1 << 30) + 5 * M1 / 2, M1));
        assert_eq!(ranges.beside[2], Span::new((1 << 30) + 2 * M1, M1 / 2));
        assert_eq!(ranges.beside[3], Span::new((1 << 30) + 7 * M1 / 2, M1 / 2));
        // One table for all.
        let sections = geometry.places(M1, 256).unwrap();
        assert_eq!(sections.ranges[7], Span::new(7 << 29, 1 << 28));
        assert_eq!(
            sections.beside[7],
            Span::new((7 << 29) + (1 << 28), 1 << 28)
        );
        assert!(geometry.places(M1, 2048).is_some());
        assert!(geometry.places(M1, 4096).is_none());
        assert_eq!(geometry.chosen().unwrap().ranges.len(), 64);
        // Tables that are longer than the first address.
        let geometry = Geometry::of(&ArmStage1::<K64>::new(48, 48).unwrap());
        let blocks = geometry.places(512 * M1, 256).unwrap();
        assert_eq!(blocks.ranges[0].start, 4 << 40);
        assert!(blocks.ranges.iter().all(|range| range.last() >> 48 == 0));
    }

    #[test]
    fn ranges_and_what_lies_beside_never_overlap() {
        for geometry in [
            Geometry::of(&<ArmV7s>::new()),
            Geometry::of(&VtdSs::new(4).unwrap()),
        ] {
            for count in [1, 7, 256, 512] {
                let places = geometry.places(4096, count).unwrap();
                let mut all = [places.ranges, places.beside].concat();
                all.sort_by_key(|span| span.start);
                assert!(all.windows(2).all(|two| two[0].last() < two[1].start));
            }
        }
    }

    #[test]
    fn random_addresses_are_in_the_span_and_differ() {
        let span = Span::new(IOVA, 1 << 30);
        let mut addresses = random(span);
        assert!(addresses.iter().all(|at| span.contains(*at)));
        addresses.sort_unstable();
        addresses.dedup();
        assert!(addresses.len() > 4000);
    }
}
