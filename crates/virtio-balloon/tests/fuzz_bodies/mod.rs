//! Bodies of the fuzz targets; `tests/wire/hostile.rs` runs them over random bytes.
//!
//! Each takes any bytes, and panics when something does not hold. The first two bytes choose where the
//! guest's memory lies.

use runs::{GuestAddr, Span};
use virtio_balloon::{
    BalloonConfig, BitmapRecords, ByteOrder, LePfns, MemoryMap, MessageFormat, Part,
    PartialHugePages, Refusals, Region, Resolver, RunCollector, Stats, WIRE_PAGE,
};

/// One target.
pub type Target = (&'static str, fn(&[u8]));

/// All targets.
pub const TARGETS: [Target; 3] = [
    ("balloon_le_pfns", |data| message(&LePfns, data)),
    ("balloon_bitmap_records", |data| {
        message(&BitmapRecords, data)
    }),
    ("balloon_other", other),
];

/// A message through decoder, memory, collector and tracker.
fn message(format: &impl MessageFormat, data: &[u8]) {
    let (head, data) = data.split_at(data.len().min(2));
    let hole = u64::from(head.first().copied().unwrap_or(1)) << 21;
    let regions = [Span::new(0, 4 << 20), Span::new((8 << 20) + hole, 4 << 20)];
    let of_map = regions.map(Region::new);
    let map = MemoryMap::new(&of_map).expect("regions ascend");
    let mut resolver = Resolver::from(map);

    let mut refusals = Refusals::new();
    let mut named = Vec::new();
    format.decode(data, &mut refusals, |run| named.push(run));
    // Bounds of the work: 32 runs for each 8 bytes, and a refusal for each record.
    assert!(named.len() <= 4 * data.len() && refusals.total() <= 1 + data.len() as u64 / 4 * 16);

    let mut room = [Part::default(); 8];
    let mut collector = RunCollector::new(&mut room);
    let mut batches = Vec::new();
    for run in &named {
        assert!(
            Span::<GuestAddr>::checked(run.start, run.len).is_some() && run.is_aligned(WIRE_PAGE),
            "{run}"
        );
        resolver.resolve(*run, &mut refusals, |part| {
            collector.push(part, |parts| batches.push(parts.to_vec()))
        });
    }
    collector.finish(|parts| batches.push(parts.to_vec()));

    let mut words = [0; PartialHugePages::words(4 << 20, 2 << 20) as usize];
    let mut huge =
        PartialHugePages::new(regions[0], 2 << 20, &mut words).expect("whole huge pages");
    for batch in &batches {
        for pair in batch.windows(2) {
            let apart = pair[0].offsets.last() + 1 < pair[1].offsets.start;
            assert!(pair[0].region < pair[1].region || apart, "{batch:?}");
        }
        for part in batch {
            assert!(regions[part.region].covers(&map.run(part)), "{part:?}");
        }
        huge.inflate_all(batch.iter().map(|part| map.run(part)), |whole| {
            assert!(regions[0].covers(&whole) && whole.is_aligned(2 << 20))
        });
    }
    assert!(huge.whole_bytes() <= huge.bytes() && huge.bytes() <= 4 << 20);
    for part in batches.iter().flatten() {
        huge.deflate(map.run(part));
    }
    assert_eq!(huge.bytes() + huge.whole_bytes(), 0);
}

/// Input other than messages of pages: statistics and writes to the configuration space.
fn other(data: &[u8]) {
    let mut refusals = Refusals::new();
    for order in [ByteOrder::Little, ByteOrder::Big] {
        let stats = Stats::decode(data, order, &mut refusals);
        let mut buffer = [0; Stats::MOST_BYTES];
        let used = stats.encode(&mut buffer, order);
        assert_eq!(
            Stats::decode(&buffer[..used], order, &mut Refusals::new()),
            stats
        );
    }
    if let Some((offset, rest)) = data.split_first_chunk() {
        let mut config = BalloonConfig::from_bytes(rest);
        let before = config;
        config.write(u64::from_le_bytes(*offset), rest);
        config.write(u64::from(offset[0]), rest);
        config.actual = before.actual;
        config.poison_val = before.poison_val;
        assert_eq!(config, before, "the driver's fields only");
    }
}
