//! Maps that are refused: addresses that a device cannot have, and memory over the limit.

use std::fs;

use anyhow::{Context as _, bail, ensure};
use guest::machines::{EDU, Machine};
use hostmem::Backing;
use ioas::{Ledger, MapError, iommufd::IoasId};
use iopt::Prot;

use super::{
    PAGE,
    case::{Case, Expected},
    open,
};
use crate::{
    dma::{IOVA, memory},
    limit::unprivileged,
    pci::Device,
    space::{Space, Type1, host_memory},
};

/// Bytes of the map that is refused.
const BYTES: u64 = 4 * PAGE;

/// Ends a case of a map at `start`, of which the kernel has said nothing.
fn refused(mut case: Case, start: u64, cause: &'static str) -> anyhow::Result<()> {
    let (mut space, _) = open()?;
    let pages = memory(Backing::Anon4K, BYTES)?;
    match space.map_host(start, &pages, Prot::RW) {
        Ok(()) => bail!("{start:#x} is mapped"),
        Err(error) => ensure!(
            matches!(error.downcast_ref(), Some(MapError::Reserved { .. })),
            "{error:#}"
        ),
    }
    case.text("layout.txt", &format!("guest ram {start:#x} {BYTES:#x}\n"))?;
    case.expect(Expected::new(cause));
    case.end(0, "")
}

/// A range that the group reserves for messages of interrupts, by its first line.
pub(crate) fn reserved(_: &Machine) -> anyhow::Result<()> {
    let path = Device(EDU).path("iommu_group/reserved_regions");
    let regions = fs::read_to_string(&path)?;
    let mut lines = regions.lines();
    let msi = lines.find(|line| line.ends_with("msi")).context("none")?;
    let first = msi
        .split(' ')
        .next()
        .and_then(|word| word.strip_prefix("0x"));
    let first = u64::from_str_radix(first.context("no number")?, 16)?;
    let mut case = Case::new("reserved")?;
    case.text("reserved_regions", &regions)?;
    refused(case, first - PAGE, "layout.overlaps-reserved")
}

/// Addresses that the unit's tables cannot have.
pub(crate) fn beyond_the_aperture(_: &Machine) -> anyhow::Result<()> {
    let (space, _) = open()?;
    let ranges = space.file().iova_ranges(IoasId(space.number))?.ranges;
    drop(space);
    let first = ranges.first().context("no range")?.start();
    let last = *ranges.last().context("no range")?.end();
    let mut case = Case::new("beyond-the-aperture")?;
    case.text("aperture.txt", &format!("{first:#x} {last:#x}\n"))?;
    refused(case, last - (BYTES / 2 - 1), "layout.address-width")
}

/// More memory than may be locked.
pub(crate) fn memlock(_: &Machine) -> anyhow::Result<()> {
    const LIMIT: u64 = 1 << 20;
    let mut case = Case::new("memlock")?;
    unprivileged(LIMIT, || {
        let mut space = Space::<Type1>::with_ledger(Device(EDU), Ledger::unlimited())?;
        let memory = host_memory(&memory(Backing::Anon4K, 2 * LIMIT)?, &space.ledger)?;
        let result = space.map(IOVA, &memory, Prot::RW);
        ensure!(result.is_err(), "mapped");
        Ok(())
    })?;
    case.expect(Expected::new("memlock.too-low"));
    case.end(1, "RLIMIT_MEMLOCK")
}
