//! Translations at random in stretches of any length.

use std::hint::black_box;

use anyhow::ensure;
use iopt::{Format, Prot, Table};
use runs::{PageSizes, Span};

use super::{Memory, arena, plain};
use crate::peers::clock::time;
use crate::peers::places::{Geometry, random};

/// Maps `len` bytes in leaves of `page` bytes and translates addresses at random in them, each by
/// itself, in the exclusive form. Returns the nanoseconds of one for each of `rounds` samples; `None`
/// where the format has no room.
pub fn translations<F: Format, M: Memory>(
    format: F,
    page: u64,
    len: u64,
    rounds: u32,
) -> anyhow::Result<Option<Vec<f64>>> {
    let geometry = Geometry::of(&format);
    let (start, pa) = (geometry.start(page), geometry.pa());
    let Some(places) = geometry.places(page, len / page) else {
        return Ok(None);
    };
    let memory = arena::<F, M>(&format, geometry.tables(&places, page))?;
    let sizes = PageSizes::from_bits(page);
    let mut table = Table::with_page_sizes(format, memory, sizes).map_err(plain)?;
    let range = Span::new(start, len);
    table
        .map(start, &[Span::new(pa, len)], Prot::RW)
        .map_err(plain)?;
    let addresses = random(range);
    let (mut samples, mut well) = (Vec::new(), true);
    for _ in 0..rounds {
        samples.push(time(addresses.len() as u64, || {
            for at in &addresses {
                well &= black_box(table.translate(black_box(*at))).is_some();
            }
        }));
    }
    ensure!(well, "an address is not mapped");
    Ok(Some(samples))
}
