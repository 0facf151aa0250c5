//! More areas than a container has entries.

use std::{
    ops::ControlFlow,
    sync::{Arc, atomic::Ordering},
};

use anyhow::{Context as _, bail, ensure};
use guest::machines::EDU;
use hostmem::{Backing, Mapping};
use ioas::UnmapError;
use iopt::{Interruption, Prot};
use runs::Span;

use crate::{
    dma::IOVA,
    edu::Edu,
    pci,
    space::{Interface, Iommufd, Space, Type1, host_memory},
};

const AREAS: u64 = 100_000;
const PAGE: u64 = 4096;

/// Where the device writes, in areas: the first and last, and around the 65,535th.
const LOOKED_AT: [u64; 5] = [0, 65_534, 65_535, 65_536, AREAS - 1];

/// The device writes to some areas what it reads in others, and all of that arrives.
fn try_dma<I: Interface>(space: &Space<I>, mapping: &Mapping, round: u64) -> anyhow::Result<()> {
    let edu = Edu::new(space.device()?)?;
    let cell = |area: u64, nth: u64| &mapping.cells()[(area * 512 + nth) as usize];
    // Beside what is looked at: the area in the middle holds what is written.
    let from = AREAS / 2;
    for area in LOOKED_AT {
        let value = round << 32 | area;
        cell(from, 0).store(value, Ordering::Relaxed);
        edu.read(IOVA + from * PAGE, 8)?;
        edu.write(IOVA + area * PAGE + 8, 8)?;
        let found = cell(area, 1).load(Ordering::Relaxed);
        ensure!(found == value, "{found:#x} in area {area}, not {value:#x}");
        ensure!(
            cell(area, 2).load(Ordering::Relaxed) == 0,
            "behind it in area {area}"
        );
    }
    Ok(())
}

/// An address space with all areas, each of a page, which go on in each other.
fn mapped<I: Interface>() -> anyhow::Result<(Space<I>, Arc<Mapping>)> {
    let space = Space::<I>::open(pci::Device(EDU))?;
    space.ioas.set_merging(Interruption::Allowed);
    let size = (AREAS * PAGE).next_multiple_of(2 << 20);
    let mapping = Arc::new(Mapping::new(Backing::Thp, size, None)?);
    mapping.populate(&mut |_| ControlFlow::Continue(()))?;
    let memory = host_memory(&mapping, &space.ledger)?;
    for area in 0..AREAS {
        let part = Span::new(area * PAGE, PAGE);
        space
            .ioas
            .map(IOVA + part.start, &memory, part, Prot::RW)
            .with_context(|| format!("area {area}"))?;
    }
    ensure!(space.ioas.len() as u64 == AREAS, "{:?}", space.ioas);
    Ok((space, mapping))
}

fn unmap_all<I: Interface>(space: &mut Space<I>) -> anyhow::Result<()> {
    let unmapped = space.ioas.unmap_all()?;
    ensure!(
        (unmapped.areas, unmapped.bytes) == (AREAS, AREAS * PAGE),
        "{unmapped:?}"
    );
    Ok(())
}

/// A container takes them in fewer mappings, and in one when they are there before the device.
pub(crate) fn merged() -> anyhow::Result<()> {
    let (mut space, mapping) = mapped::<Type1>()?;
    let pieces =
        |space: &Space<Type1>| space.ioas.kernel_mappings().unwrap_or_default().len() as u64;
    let available = |space: &Space<Type1>| {
        space.ioas.refresh()?;
        let most = space.ioas.capabilities().most_mappings;
        anyhow::Ok(most.context("the kernel does not tell")? - pieces(space))
    };
    // The container is full once; then all of it is one.
    let most = 65_535;
    let expected = 1 + AREAS - most;
    ensure!(
        pieces(&space) == expected,
        "{} and not {expected} pieces",
        pieces(&space)
    );
    ensure!(
        available(&space)? == most - expected,
        "{} mappings left",
        available(&space)?
    );
    try_dma(&space, &mapping, 1)?;
    // One that is merged does not go alone.
    let one = space.ioas.unmap(Span::new(IOVA + PAGE, PAGE));
    match one {
        Err(UnmapError::CutsMapping { mapping, .. }) => {
            let first = Span::new(IOVA, most * PAGE);
            ensure!(mapping == first, "it cuts {mapping}");
        }
        other => bail!("{other:?}"),
    }
    space.unplug()?;
    space.plug(pci::Device(EDU))?;
    ensure!(pieces(&space) == 1, "{} pieces", pieces(&space));
    ensure!(
        available(&space)? == most - 1,
        "{} mappings left",
        available(&space)?
    );
    try_dma(&space, &mapping, 2)?;
    unmap_all(&mut space)?;
    ensure!(
        available(&space)? == most,
        "{} mappings left",
        available(&space)?
    );
    Ok(())
}

/// iommufd has no limit.
pub(crate) fn all() -> anyhow::Result<()> {
    let (mut space, mapping) = mapped::<Iommufd>()?;
    let pieces = space.ioas.kernel_mappings().unwrap_or_default().len() as u64;
    ensure!(pieces == AREAS, "{pieces} pieces");
    try_dma(&space, &mapping, 1)?;
    unmap_all(&mut space)
}
