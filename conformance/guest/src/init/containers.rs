//! A container for the groups of each of two memory nodes, as one address space: tables lie where the
//! devices are, over memory that is pinned and charged for each.

use std::sync::Arc;

use anyhow::{Context as _, ensure};
use guest::machines::Machine;
use hostmem::Backing;
use ioas::{Endpoint, Forecast, Ioas, Ledger, MapError, Placement};
use iommu::NodeId;
use iopt::{Interruption, Prot};
use runs::Span;

use crate::{
    charges::Count,
    dma::{self, IOVA},
    edu::{BUFFER, Edu},
    limit::unprivileged,
    numa,
    pci::Device,
    program,
    semantics::counter_of,
    space::{DeviceOf, InContainer, Interface, Opened, host_memory},
};

const MIB: u64 = 1 << 20;
/// Bytes that are mapped.
const SIZE: u64 = 4 * MIB;
/// Where more is mapped.
const BEHIND: u64 = IOVA + SIZE;

/// A device that sees the memory.
pub(crate) struct User<I: Interface> {
    // Dropped in this order: its registers keep it open, and open it keeps its group attached.
    pub(crate) edu: Edu,
    device: Opened,
    attached: Arc<DeviceOf<I>>,
}

/// An address space without groups over containers of this kind.
fn space<const COMPATIBILITY: bool>() -> anyhow::Result<Ioas> {
    let open = InContainer::<COMPATIBILITY>::container_mapper;
    let space = Ioas::options().over_mappers(open)?;
    space.set_placement(Placement::PerNode)?;
    Ok(space)
}

/// Attaches a device, near `node` where one is given, and opens it.
pub(crate) fn attach<I: Interface>(
    file: &I::File,
    space: &Ioas,
    device: Device,
    node: Option<u32>,
) -> anyhow::Result<User<I>> {
    device.bind_to_vfio()?;
    let attached = Arc::new(I::attachable(file, device)?);
    space.attach(Endpoint::from(attached.clone()).near(node.map(NodeId)))?;
    let device = I::device(&attached, device)?;
    // A container that iommufd plays learns only now what it can do.
    space.refresh()?;
    let edu = Edu::new(&device)?;
    Ok(User {
        edu,
        device,
        attached,
    })
}

/// Closes the device and detaches it.
pub(crate) fn detach<I: Interface>(space: &Ioas, user: User<I>) -> anyhow::Result<()> {
    let User {
        edu,
        device,
        attached,
    } = user;
    drop(edu);
    drop(device);
    Ok(space.detach(&attached)?)
}

/// Node and number of groups of each container.
fn nodes(space: &Ioas) -> Vec<(Option<u32>, usize)> {
    let all = space.places().into_iter();
    all.map(|place| (place.node.map(|node| node.0), place.endpoints.len()))
        .collect()
}

/// The devices of each node have a container, whose table the kernel has put on the node; all reach the
/// same memory, which is locked for each container.
pub(crate) fn on_both_nodes<const COMPATIBILITY: bool>(_: &Machine) -> anyhow::Result<()> {
    let count = Count::new(counter_of(InContainer::<COMPATIBILITY>::COLUMN))?;
    let ledger = Ledger::new("what the kernel counts", Some(64 * MIB), 0);
    let mapping = dma::memory(Backing::Anon4K, SIZE)?;
    let memory = host_memory(&mapping, &ledger)?;
    let space = space::<COMPATIBILITY>()?;
    space.map(IOVA, &memory, Span::new(0, SIZE), Prot::RW)?;
    let is_charged = |bytes: u64| {
        let found = ledger.in_use();
        ensure!(
            found == bytes,
            "{found:#x} bytes are charged, not {bytes:#x}"
        );
        count.is(bytes)
    };
    is_charged(0)?;
    let devices = numa::devices()?;
    let mut users = Vec::new();
    for (nth, (node, device)) in (0..).zip(&devices) {
        users.push(attach::<InContainer<COMPATIBILITY>>(
            &(),
            &space,
            *device,
            Some(*node),
        )?);
        is_charged((nth / 2 + 1) * SIZE).with_context(|| format!("device {nth}"))?;
    }
    let found = nodes(&space);
    ensure!(found == [(Some(0), 2), (Some(1), 2)], "{found:?}");
    for (node, device) in &devices {
        let lie = numa::lie_on(*node, &numa::tables_of(*device)?);
        lie.context(device.0)?;
    }

    // Each copies through the table of its node: what one has written the next one reads.
    for (nth, user) in (0..).zip(&users) {
        user.edu.read(IOVA + nth * BUFFER, BUFFER)?;
        user.edu.write(IOVA + (nth + 1) * BUFFER, BUFFER)?;
    }
    let words = BUFFER / 8;
    let copied = |nth: u64| match nth / words <= devices.len() as u64 {
        true => nth % words,
        false => nth,
    };
    dma::check(mapping.cells(), copied)?;

    // Memory mapped later is there for both; and a part that goes is gone for both.
    let more = dma::memory(Backing::Anon4K, MIB)?;
    let later = host_memory(&more, &ledger)?;
    let whole = Span::new(0, MIB);
    let forecast = space.forecast(&later, whole);
    ensure!(forecast == Forecast::Fits { needed: 2 * MIB }, "{forecast}");
    space.map(BEHIND, &later, whole, Prot::RW)?;
    is_charged(2 * (SIZE + MIB))?;
    let gone = Span::new(IOVA, MIB);
    space.unmap_cutting(gone, Interruption::Allowed)?;
    is_charged(2 * SIZE)?;
    for (nth, user) in (0..).zip(&users) {
        user.edu.write(IOVA + nth * BUFFER, BUFFER)?;
        user.edu.write(BEHIND + nth * BUFFER, BUFFER)?;
    }
    dma::check(mapping.cells(), copied).context("what is unmapped")?;
    // Every buffer holds what the first one was filled with.
    let written = words * devices.len() as u64;
    dma::check(
        more.cells(),
        |nth| if nth < written { nth % words } else { nth },
    )
    .context("what is mapped later")?;

    // Devices that stay on a node keep its container; the last one takes it along, and its charge.
    let mut users = users.into_iter();
    for left in [2 * SIZE, SIZE, SIZE, 0] {
        let user = users.next().context("four devices")?;
        detach(&space, user)?;
        is_charged(left)?;
    }
    ensure!(nodes(&space).is_empty(), "{:?}", nodes(&space));
    space.close()?;
    is_charged(0)
}

/// The kernel's limit lets the first container pin, and not the second: neither has it then.
pub(crate) fn undone_in_both<const COMPATIBILITY: bool>(_: &Machine) -> anyhow::Result<()> {
    unprivileged(3 * MIB, || {
        let count = Count::new(counter_of(InContainer::<COMPATIBILITY>::COLUMN))?;
        // It believes in more, so that the kernel is asked.
        let ledger = Ledger::new("what the kernel counts", Some(64 * MIB), 0);
        let space = space::<COMPATIBILITY>()?;
        let mut users = Vec::new();
        for (node, device) in numa::devices()?.into_iter().step_by(2) {
            users.push(attach::<InContainer<COMPATIBILITY>>(
                &(),
                &space,
                device,
                Some(node),
            )?);
        }
        let mapping = dma::memory(Backing::Anon4K, 2 * MIB)?;
        let memory = host_memory(&mapping, &ledger)?;
        let whole = Span::new(0, 2 * MIB);
        let refused = space.map(IOVA, &memory, whole, Prot::RW);
        ensure!(
            matches!(refused, Err(MapError::OverLimit(_))),
            "{refused:?}"
        );
        let left = space.kernel_mappings().unwrap_or_default();
        ensure!(left.is_empty(), "a mapping is left: {left:?}");
        ensure!(ledger.in_use() == 0, "{:#x}", ledger.in_use());
        count.is(0)?;
        for user in &users {
            user.edu.write(IOVA, BUFFER)?;
        }
        dma::check(mapping.cells(), |nth| nth).context("what was undone")?;
        // Half of it fits twice.
        let half = Span::new(0, MIB);
        space.map(IOVA, &memory, half, Prot::RW)?;
        count.is(2 * MIB)?;
        users
            .into_iter()
            .try_for_each(|user| detach(&space, user))?;
        count.is(0)
    })
}

/// `dmaspace check` for a device of each node: a container for each, and the memory charged for each.
pub(crate) fn program(_: &Machine) -> anyhow::Result<()> {
    let devices: Vec<Device> = numa::devices()?
        .into_iter()
        .map(|(_, device)| device)
        .collect();
    let chosen = [devices[0], devices[2], devices[3]];
    chosen.iter().try_for_each(|device| device.bind_to_vfio())?;
    for (policy, domains) in [
        ("per-node", &[(Some(0), 1), (Some(1), 2)][..]),
        ("shared", &[(Some(0), 3)]),
    ] {
        program::placed_by_vfio(policy, &chosen, domains).context(policy)?;
    }
    Ok(())
}
