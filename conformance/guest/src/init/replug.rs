//! A device that goes and comes back finds its mappings.

use std::fs;

use anyhow::ensure;
use guest::machines::EDU;
use hostmem::Backing;
use iopt::Prot;
use runs::Span;

use crate::{
    dma::{IOVA, check, memory},
    edu::{BUFFER, Edu},
    limit::counter,
    pci,
    semantics::counter_of,
    space::{Interface, Space},
};

/// Bytes of each memory, which lie one behind the other.
const SIZE: u64 = 1 << 20;

/// Takes the device off the bus, and looks for it again.
fn off_and_on() -> anyhow::Result<()> {
    let device = pci::Device(EDU);
    fs::write(device.path("remove"), "1")?;
    ensure!(!device.path("").exists(), "it is on the bus still");
    fs::write("/sys/bus/pci/rescan", "1")?;
    ensure!(device.path("").exists(), "it did not come back");
    Ok(())
}

/// The device does DMA, goes, and does DMA again when it is back: areas stay meanwhile, and nothing
/// is pinned. `on_the_bus`: it is closed only, else it is also gone from the bus.
pub(crate) fn comes_back<I: Interface>(on_the_bus: bool) -> anyhow::Result<()> {
    let device = pci::Device(EDU);
    let mut space = Space::<I>::open(device)?;
    let memories = [0, 1, 2].map(|_| memory(Backing::Anon4K, SIZE));
    let [source, target, late] = memories;
    let [source, target, late] = [source?, target?, late?];
    let before = counter(counter_of(I::COLUMN))?;
    let locked = || anyhow::Ok(counter(counter_of(I::COLUMN))? - before);

    space.map_host(IOVA, &source, Prot::READ)?;
    space.map_host(IOVA + SIZE, &target, Prot::RW)?;
    let edu = Edu::new(space.device()?)?;
    edu.read(IOVA, BUFFER)?;
    edu.write(IOVA + SIZE, BUFFER)?;
    ensure!(locked()? == 2 * SIZE, "{:#x} bytes locked", locked()?);
    drop(edu);

    space.unplug()?;
    ensure!(space.ioas.len() == 2, "{:?}", space.ioas);
    ensure!(
        space.ioas.kernel_mappings().unwrap_or_default().is_empty(),
        "still mapped"
    );
    ensure!(locked()? == 0, "{:#x} bytes locked", locked()?);
    if !on_the_bus {
        off_and_on()?;
    }
    space.map_host(IOVA + 2 * SIZE, &late, Prot::RW)?;

    space.plug(device)?;
    ensure!(locked()? == 3 * SIZE, "{:#x} bytes locked", locked()?);
    let edu = Edu::new(space.device()?)?;
    edu.read(IOVA + SIZE / 2, BUFFER)?;
    edu.write(IOVA + SIZE + BUFFER, BUFFER)?;
    edu.write(IOVA + 2 * SIZE, BUFFER)?;
    let half = SIZE / 2 / 8;
    let words = BUFFER / 8;
    check(source.cells(), |nth| nth)?;
    check(target.cells(), |nth| match nth / words {
        0 => nth,
        1 => nth - words + half,
        _ => nth,
    })?;
    check(
        late.cells(),
        |nth| {
            if nth < words { nth + half } else { nth }
        },
    )?;
    let unmapped = space.unmap(Span::new(IOVA, 3 * SIZE))?;
    ensure!(unmapped == 3 * SIZE, "{unmapped:#x} bytes unmapped");
    ensure!(locked()? == 0, "{:#x} bytes locked", locked()?);
    Ok(())
}
