//! Linux's driver of virtio's IOMMU, and the host's device at the other end: what VFIO and iommufd map
//! through it, the host finds in its tables and nothing else.

use std::{fs, path::PathBuf, sync::Arc};

use anyhow::ensure;
use guest::machines::{EDU, IVSHMEM, Machine, NVME, RESERVED};
use hostmem::{Backing, Mapping};
use iopt::Prot;
use runs::Span;

use crate::{
    dma::{IOVA, check, memory},
    host::{self, Endpoint, Held, Transfer, expect},
    pci::Device,
    space::{Interface, Space, Type1, host_memory},
};

const PAGE: u64 = 4096;
const HUGE: u64 = 2 << 20;
/// Half of the guest's huge pages.
const LARGE: u64 = 64 << 20;
/// Areas of one page each, with one page between them.
const AREAS: u64 = 2000;

/// Addresses that the host reserves are known to the kernel: it asks for each device (PROBE).
pub(crate) fn reserved(_: &Machine) -> anyhow::Result<()> {
    let line = |(first, last): (u64, u64), kind| format!("{first:#018x} {last:#018x} {kind}");
    let right = [
        line(RESERVED, "reserved"),
        line((0xfee0_0000, 0xfeef_ffff), "msi"),
    ];
    for device in [Device(EDU), Device(NVME), Device(IVSHMEM)] {
        let path: PathBuf = device.path("iommu_group/reserved_regions");
        let said = fs::read_to_string(&path)?;
        let lines: Vec<&str> = said.lines().collect();
        ensure!(lines == right, "{}: {lines:?}", device.0);
    }
    let mut space = Space::<Type1>::open(Device(EDU))?;
    let memory = memory(Backing::Anon4K, PAGE)?;
    let refused = space.map_host(RESERVED.0, &memory, Prot::RW);
    ensure!(refused.is_err(), "mapped where no device may go");
    Ok(())
}

/// 64 MiB in huge pages come to the host in a few requests, and all of it is where it should be.
pub(crate) fn large<I: Interface>() -> anyhow::Result<()> {
    let mut space = Space::<I>::open(Device(EDU))?;
    let before = host::held()?;
    let source = memory(Backing::Hugetlb2M, LARGE)?;
    let target = memory(Backing::Hugetlb2M, LARGE)?;
    space.map_host(IOVA, &source, Prot::READ)?;
    space.map_host(IOVA + LARGE, &target, Prot::RW)?;
    let now = host::held()?;
    let requests = now.mappings - before.mappings;
    // No page of 4 KiB for itself; how far huge pages lie together is the kernel's luck.
    ensure!(
        now.mapped - before.mapped == 2 * LARGE && requests <= 2 * LARGE / HUGE,
        "{before:?} before, {now:?} after"
    );
    let edu = Endpoint::at(EDU)?;
    expect(edu.read(IOVA, LARGE)?, Transfer::Done)?;
    expect(edu.write(IOVA, LARGE)?, Transfer::Fault(IOVA))?;
    // Turned by one page, so that what was there before is not right anywhere.
    let turned = LARGE - PAGE;
    expect(edu.write(IOVA + LARGE + PAGE, turned)?, Transfer::Done)?;
    expect(
        edu.read(IOVA + 2 * LARGE, 8)?,
        Transfer::Fault(IOVA + 2 * LARGE),
    )?;
    expect(edu.read(IOVA - 8, 8)?, Transfer::Fault(IOVA - 8))?;
    let page = PAGE / 8;
    check(
        target.cells(),
        |nth| if nth < page { nth } else { nth - page },
    )?;
    check(source.cells(), |nth| nth)?;
    space.unmap(Span::new(IOVA, 2 * LARGE))?;
    ensure!(
        host::held()? == before,
        "not as before: {:?}",
        host::held()?
    );
    expect(edu.read(IOVA, 8)?, Transfer::Fault(IOVA))
}

/// Areas one by one, each of which the host has as one, and their end in one call.
pub(crate) fn many<I: Interface>() -> anyhow::Result<()> {
    let mut space = Space::<I>::open(Device(EDU))?;
    let before = host::held()?;
    let mapping = memory(Backing::Anon4K, AREAS * PAGE)?;
    let all = host_memory(&mapping, &space.ledger)?;
    let at = |nth: u64| IOVA + 2 * PAGE * nth;
    for nth in 0..AREAS {
        // From the last page to the first.
        let page = Span::new((AREAS - 1 - nth) * PAGE, PAGE);
        space.ioas.map(at(nth), &all, page, Prot::RW)?;
    }
    let now = host::held()?;
    let right = Held {
        mappings: before.mappings + AREAS,
        mapped: before.mapped + AREAS * PAGE,
        ..now
    };
    ensure!(now == right, "{now:?} and not {right:?}");
    let edu = Endpoint::at(EDU)?;
    let last = AREAS - 1;
    expect(edu.read(at(0), PAGE)?, Transfer::Done)?;
    expect(edu.write(at(last), PAGE)?, Transfer::Done)?;
    expect(edu.read(at(0) + PAGE, 8)?, Transfer::Fault(at(0) + PAGE))?;
    let page = PAGE / 8;
    check(mapping.cells(), |nth| {
        if nth < page { nth + last * page } else { nth }
    })?;
    space.unmap(Span::new(IOVA, 2 * PAGE * AREAS))?;
    ensure!(
        host::held()? == before,
        "not as before: {:?}",
        host::held()?
    );
    Ok(())
}

/// Two devices of two address spaces see two memories at one address; in one address space they see the
/// same, and the one that leaves sees nothing of it any more.
pub(crate) fn two_devices<I: Interface>() -> anyhow::Result<()> {
    let (edu, nvme) = (Endpoint::at(EDU)?, Endpoint::at(NVME)?);
    let [mine, theirs] = [
        memory(Backing::Anon4K, 2 * PAGE)?,
        memory(Backing::Thp, LARGE)?,
    ];
    let mut space = Space::<I>::open(Device(EDU))?;
    space.map_host(IOVA, &mine, Prot::RW)?;
    let apart = {
        let mut other = Space::<I>::open(Device(NVME))?;
        other.map_host(IOVA, &theirs, Prot::RW)?;
        expect(edu.read(IOVA + PAGE, PAGE)?, Transfer::Done)?;
        expect(nvme.read(IOVA, PAGE)?, Transfer::Done)?;
        expect(edu.write(IOVA, PAGE)?, Transfer::Done)?;
        expect(nvme.write(IOVA + LARGE - PAGE, PAGE)?, Transfer::Done)?;
        let beyond = IOVA + 2 * PAGE;
        expect(edu.read(beyond, 8)?, Transfer::Fault(beyond))?;
        host::held()?
    };
    copied(&mine, 0, 1)?;
    copied(&theirs, LARGE / PAGE - 1, 0)?;
    expect(nvme.read(IOVA, 8)?, Transfer::Fault(IOVA))?;
    let device = Device(NVME);
    let attached = space.attachable(device)?;
    space.ioas.attach(attached.clone())?;
    let opened = I::device(&attached, device)?;
    let together = host::held()?;
    ensure!(
        together.domains < apart.domains && together.mapped == 2 * PAGE,
        "{apart:?} apart, {together:?} together"
    );
    expect(nvme.read(IOVA + PAGE, PAGE)?, Transfer::Done)?;
    expect(nvme.write(IOVA, PAGE)?, Transfer::Done)?;
    drop(opened);
    space.ioas.detach(&attached)?;
    drop(attached);
    expect(nvme.read(IOVA, 8)?, Transfer::Fault(IOVA))?;
    expect(edu.read(IOVA, 8)?, Transfer::Done)?;
    copied(&mine, 0, 1)
}

/// Looks whether page `to` is a copy of page `from`, and the others are what they were.
fn copied(memory: &Arc<Mapping>, to: u64, from: u64) -> anyhow::Result<()> {
    let page = PAGE / 8;
    check(memory.cells(), |nth| match nth / page == to {
        true => nth % page + from * page,
        false => nth,
    })
}

/// State without an address space: nothing is mapped, nothing is charged.
pub(crate) fn empty(_: &Machine) -> anyhow::Result<()> {
    let held = host::held()?;
    let right = Held {
        mappings: 0,
        mapped: 0,
        charged: 0,
        ..held
    };
    ensure!(held == right, "{held:?}");
    Ok(())
}
