//! Messages of the balloon, from runs to runs.

use core::hint::black_box;

use runs::{GuestAddr, Span};
use virtio_balloon::{
    BulkFormat, Format, GuestPage, LePfns, MemoryMap, Part, PartialHugePages, Refusals, Region,
    RunCollector, Source,
};

use crate::require;

/// Step 12: every format, memory and collector.
pub(crate) fn messages() -> Result<(), i32> {
    let page = GuestPage::SIZE_4K;
    let taken = black_box([
        Span::new(0x20_0000, 0x42_0000),
        Span::new(0x100_3000, 0x1000),
    ]);
    let mut message = [0; 8192];
    let mut source = Source::new(taken, page);
    let used = LePfns.encode(&mut source, &mut message).map_err(|_| 12)?;
    comes_back(taken, |refusals, sink| {
        LePfns.decode(&message[..used], refusals, sink)
    })?;
    for format in BulkFormat::ALL {
        let mut source = Source::new(taken, page);
        let used = format
            .encode(page, &mut source, &mut message)
            .map_err(|_| 12)?;
        comes_back(taken, |refusals, sink| {
            format.decode(&message[..used], refusals, sink)
        })?;
    }
    Ok(())
}

fn comes_back(
    taken: [Span<GuestAddr>; 2],
    decode: impl FnOnce(&mut Refusals, &mut dyn FnMut(Span<GuestAddr>)),
) -> Result<(), i32> {
    let regions = [Region::new(Span::new(0, 32 << 20))];
    let map = MemoryMap::new(&regions).map_err(|_| 12)?;
    let mut refusals = Refusals::new();
    let mut outside = Refusals::new();
    let mut room = [Part::default(); 16];
    let mut collector = RunCollector::new(&mut room);
    let mut spilled = 0;
    decode(&mut refusals, &mut |run| {
        map.resolve(run, &mut outside, |part| {
            collector.push(part, |_| spilled += 1)
        });
    });
    let mut same = false;
    collector.finish(|parts| same = parts.iter().map(|part| map.run(part)).eq(taken));
    require(
        12,
        same && spilled == 0 && refusals.total() + outside.total() == 0,
    )
}

/// Step 13: a huge page is whole when its last part comes.
pub(crate) fn huge_pages() -> Result<(), i32> {
    let mut memory = [0; 18];
    let region = Span::new(2 << 20, 4 << 20);
    let mut huge = PartialHugePages::new(region, 2 << 20, &mut memory).map_err(|_| 13)?;
    let mut whole = Span::default();
    huge.inflate(Span::new(2 << 20, 0x1000), |run| whole = run);
    require(13, whole.is_empty())?;
    huge.inflate(Span::new(0x20_1000, 0x1f_f000), |run| whole = run);
    require(13, whole == Span::new(2 << 20, 2 << 20))
}
