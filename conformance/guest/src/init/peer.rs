//! DMA from one device into the memory of another one.

use std::{
    os::fd::AsFd as _,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use anyhow::{Context as _, bail, ensure};
use guest::machines::{IVSHMEM, IVSHMEM_BYTES};
use hostmem::{Backing, Mapping};
use ioas::{
    Capability, Errno, HostMemory, MapError, Memory, PinFailed, Profile,
    vfio::{DeviceRegisters, PeerBar, VfioDevice, config},
};
use iopt::Prot;
use runs::Span;

use crate::{
    charges::Count,
    dma::{IOVA, check, memory, open},
    edu::{BUFFER, Edu},
    objects::with_a_page,
    pci,
    semantics::{counter_of, table::PAGE},
    space::{Compatibility, Interface, Iommufd, Space, Type1},
};

/// The BAR that is memory.
const BAR: u32 = 2;
/// Where it is mapped.
const PEER: u64 = IOVA + (1 << 30);
/// Where in it the device writes.
const OFFSET: u64 = IVSHMEM_BYTES / 2 + 0x800;

/// The offsets that the device writes to, and those beside them.
fn target() -> impl Iterator<Item = u64> {
    (OFFSET - 8..OFFSET + BUFFER + 8).step_by(8)
}

/// The device writes a buffer of memory to the BAR at `bar`; which word is at each offset then is for `expected` to say, by
/// the words of the memory. It was 0 before.
fn write_to<I: Interface>(
    space: &mut Space<I>,
    edu: &Edu,
    registers: &DeviceRegisters,
    bar: u64,
    expected: impl Fn(u64, &[AtomicU64]) -> u64,
) -> anyhow::Result<()> {
    let memory = memory(Backing::Anon4K, 4096)?;
    space.map_host(IOVA, &memory, Prot::READ)?;
    for offset in target() {
        registers.write(offset, 0u64)?;
    }
    edu.read(IOVA, BUFFER)?;
    edu.write(bar + OFFSET, BUFFER)?;
    for offset in target() {
        let found: u64 = registers.read(offset)?;
        let right = expected(offset, memory.cells());
        ensure!(
            found == right,
            "{found:#x} and not {right:#x} at offset {offset:#x}"
        );
    }
    space.unmap(Span::new(IOVA, memory.len()))?;
    Ok(())
}

/// A write of the device to the BAR at `bar` comes there, and nothing comes beside it.
fn reaches<I: Interface>(
    space: &mut Space<I>,
    edu: &Edu,
    registers: &DeviceRegisters,
    bar: u64,
) -> anyhow::Result<()> {
    write_to(space, edu, registers, bar, |offset, cells| {
        let nth = offset.wrapping_sub(OFFSET) / 8;
        let inside = cells.get(nth as usize).filter(|_| nth < BUFFER / 8);
        inside.map_or(0, |cell| cell.load(Ordering::Relaxed))
    })
    .with_context(|| format!("the BAR at {bar:#x}"))
}

/// Nothing of it comes there.
fn misses<I: Interface>(
    space: &mut Space<I>,
    edu: &Edu,
    registers: &DeviceRegisters,
    bar: u64,
) -> anyhow::Result<()> {
    write_to(space, edu, registers, bar, |_, _| 0)
        .with_context(|| format!("nothing should be at {bar:#x}"))
}

/// The peer with its BAR.
fn peer<I: Interface>() -> anyhow::Result<(Space<I>, Arc<DeviceRegisters>)> {
    let peer = Space::open(pci::Device(IVSHMEM))?;
    let bar = peer.device()?.region(BAR)?;
    ensure!(
        bar.len == IVSHMEM_BYTES,
        "BAR {BAR} has {:#x} bytes",
        bar.len
    );
    let registers = peer.device()?.map(&bar, Span::new(0, bar.len))?;
    Ok((peer, Arc::new(registers)))
}

/// Type 1 maps a BAR by the addresses at which this process has it.
pub(crate) fn by_address() -> anyhow::Result<()> {
    let (_peer, registers) = peer::<Type1>()?;
    let (mut space, edu) = open::<Type1>()?;
    let memory = Memory::new(registers.clone(), &space.ledger);
    space.map(PEER, &memory, Prot::RW)?;
    reaches(&mut space, &edu, &registers, PEER)?;
    let unmapped = space.unmap(Span::new(PEER, registers.len()))?;
    ensure!(unmapped == registers.len(), "{unmapped:#x} bytes unmapped");
    Ok(())
}

/// A page of registers between others of one memory is not charged, by the kernel and by the library, and is mapped with
/// them by one call.
pub(crate) fn not_charged() -> anyhow::Result<()> {
    const LEN: u64 = 1 << 20;
    let (peer, registers) = peer::<Type1>()?;
    // Source: Linux, drivers/vfio/pci: the index of a region is in the bits from 40 on.
    let bar = u64::from(BAR) << 40;
    let mapping = with_a_page(peer.device()?.as_fd(), bar, LEN, LEN / 2)?;
    let object = HostMemory::new(mapping.clone()).with_registers([Span::new(LEN / 2, PAGE)]);
    let count = Count::new(counter_of(Type1::COLUMN))?;
    let (mut space, edu) = open::<Type1>()?;
    let memory = Memory::new(Arc::new(object), &space.ledger);
    space.map(IOVA, &memory, Prot::RW)?;
    count.is(LEN - PAGE)?;
    let charged = space.ledger.in_use();
    ensure!(charged == LEN - PAGE, "{charged:#x} bytes are charged");
    // From before it into it, and from there behind it.
    let cells = mapping.cells();
    let word = |at: u64| &cells[(at / 8) as usize];
    for (from, to) in [(0, LEN / 2), (LEN / 2, LEN / 2 + PAGE)] {
        word(from).store(to | 1, Ordering::Relaxed);
        edu.read(IOVA + from, 8)?;
        edu.write(IOVA + to, 8)?;
        let found = word(to).load(Ordering::Relaxed);
        ensure!(found == to | 1, "{found:#x} at {to:#x}");
    }
    let found: u64 = registers.read(0)?;
    ensure!(
        found == (LEN / 2 + PAGE) | 1,
        "the registers have {found:#x}"
    );
    space.unmap(Span::new(IOVA, LEN))?;
    count.is(0)?;
    ensure!(space.ledger.in_use() == 0, "something stays charged");
    Ok(())
}

/// Result of mapping the registers of the peer by their address.
fn try_address<I: Interface>() -> anyhow::Result<Result<(), MapError>> {
    let (_peer, registers) = peer::<I>()?;
    let (mut space, _edu) = open::<I>()?;
    let memory = Memory::new(registers, &space.ledger);
    Ok(space.map(PEER, &memory, Prot::RW))
}

/// iommufd does not, where it plays a container.
pub(crate) fn refused_by_the_kernel() -> anyhow::Result<()> {
    match try_address::<Compatibility>()? {
        Err(error @ MapError::Pin(PinFailed::Refused(_))) => {
            let errno = error.errno(Profile::Type1);
            ensure!(errno == Some(Errno::EFAULT), "its number is {errno:?}");
            Ok(())
        }
        other => bail!("not refused for the memory's sake: {other:?}"),
    }
}

/// iommufd's refusal is known, and has a name.
pub(crate) fn refused_by_name() -> anyhow::Result<()> {
    match try_address::<Iommufd>()? {
        Err(MapError::Unsupported(refused)) => {
            ensure!(refused.what == Capability::FixedRuns, "{refused}");
            Ok(())
        }
        other => bail!("not refused by name: {other:?}"),
    }
}

/// iommufd maps it by a dma-buf of the peer.
pub(crate) fn by_dma_buf() -> anyhow::Result<()> {
    let (peer, registers) = peer::<Iommufd>()?;
    let (mut space, edu) = open::<Iommufd>()?;
    let len = registers.len();
    let memory = buffer(&space, peer.device()?, len)?;
    space.map(PEER, &memory, Prot::RW)?;
    reaches(&mut space, &edu, &registers, PEER)?;
    let unmapped = space.unmap(Span::new(PEER, len))?;
    ensure!(unmapped == len, "{unmapped:#x} bytes unmapped");
    Ok(())
}

/// A new dma-buf over the whole BAR.
fn buffer(space: &Space<Iommufd>, peer: &VfioDevice, len: u64) -> anyhow::Result<Arc<Memory>> {
    let buffer = peer.dma_buf(&peer.region(BAR)?, Span::new(0, len))?;
    Ok(Memory::new(Arc::new(buffer), &space.ledger))
}

/// Writes the command register of the peer, as a guest's driver does.
fn decode(peer: &VfioDevice, on: bool) -> anyhow::Result<()> {
    let config = peer.config()?;
    let command: u16 = peer.read(&config, config::COMMAND)?;
    let command = match on {
        true => command | config::COMMAND_MEMORY,
        false => command & !config::COMMAND_MEMORY,
    };
    peer.write(&config, config::COMMAND, command)?;
    ensure!(peer.decodes_memory()? == on, "decoding is not {on}");
    Ok(())
}

/// Memory of the same address space, which is mapped all along: the device copies its first half to the second.
struct Beside {
    memory: Arc<Mapping>,
}

impl Beside {
    /// Where it is mapped.
    const AT: u64 = PEER + (1 << 30);

    fn new(space: &mut Space<Iommufd>) -> anyhow::Result<Self> {
        let memory = memory(Backing::Anon4K, 2 * BUFFER)?;
        space.map_host(Self::AT, &memory, Prot::RW)?;
        Ok(Self { memory })
    }

    fn is_reached(&self, edu: &Edu) -> anyhow::Result<()> {
        let (from, to) = self.memory.cells().split_at((BUFFER / 8) as usize);
        to.iter().for_each(|cell| cell.store(0, Ordering::Relaxed));
        edu.read(Self::AT, BUFFER)?;
        edu.write(Self::AT + BUFFER, BUFFER)?;
        check(from, |nth| nth).context("memory beside the BAR")?;
        check(to, |nth| nth).context("memory beside the BAR, where it was copied to")
    }
}

/// The BAR follows the command register of its device: it is out of reach while memory decoding is off, and mapped again
/// when that is on.
pub(crate) fn follows_the_command_register() -> anyhow::Result<()> {
    let (peer, registers) = peer::<Iommufd>()?;
    let (mut space, edu) = open::<Iommufd>()?;
    let (device, len) = (Arc::clone(peer.attached()?), registers.len());
    let region = device.device.region(BAR)?;
    let beside = Beside::new(&mut space)?;
    let mut bar = PeerBar::new(&space.ioas, &device, &region, Span::new(0, len), PEER);
    ensure!(bar.follow()? && bar.is_mapped(), "decoding is off at first");
    for _ in 0..3 {
        reaches(&mut space, &edu, &registers, PEER)?;
        beside.is_reached(&edu)?;
        decode(&device.device, false)?;
        ensure!(!bar.follow()? && !bar.is_mapped(), "it is mapped");
        ensure!(space.ioas.area_at(PEER).is_none(), "an area is left");
        edu.write(PEER + OFFSET, BUFFER)?;
        beside.is_reached(&edu)?;
        decode(&device.device, true)?;
        misses(&mut space, &edu, &registers, PEER)?;
        ensure!(bar.follow()? && bar.is_mapped(), "it is not mapped");
    }
    // Once it is mapped it is not touched.
    let before = space.ioas.area_at(PEER).context("no area")?;
    ensure!(bar.follow()?, "it is not mapped");
    let after = space.ioas.area_at(PEER).context("no area")?;
    ensure!(
        Arc::ptr_eq(before.memory(), after.memory()),
        "it was mapped anew"
    );
    let moved = PEER + len;
    ensure!(bar.move_to(moved)?, "it is not mapped at {moved:#x}");
    misses(&mut space, &edu, &registers, PEER)?;
    reaches(&mut space, &edu, &registers, moved)?;
    drop(bar);
    misses(&mut space, &edu, &registers, moved)?;
    beside.is_reached(&edu)?;
    let areas = space.ioas.areas();
    ensure!(areas.len() == 1, "{areas:?} is left");
    Ok(())
}

/// A dma-buf that was revoked and is not any more: what was mapped by it stays dead, and it is mapped anew, elsewhere too.
pub(crate) fn stays_dead() -> anyhow::Result<()> {
    let (peer, registers) = peer::<Iommufd>()?;
    let (mut space, edu) = open::<Iommufd>()?;
    let (device, len) = (Arc::clone(peer.attached()?), registers.len());
    let elsewhere = PEER + len;
    let beside = Beside::new(&mut space)?;
    let old = buffer(&space, &device.device, len)?;
    space.map(PEER, &old, Prot::RW)?;
    reaches(&mut space, &edu, &registers, PEER)?;
    decode(&device.device, false)?;
    let new = buffer(&space, &device.device, len)?;
    for memory in [&old, &new] {
        match space.map(elsewhere, memory, Prot::RW) {
            Err(MapError::Revoked { range }) if range == Span::new(elsewhere, len) => {}
            other => bail!("not refused by name: {other:?}"),
        }
    }
    beside.is_reached(&edu)?;
    decode(&device.device, true)?;
    misses(&mut space, &edu, &registers, PEER)?;
    // A copy of what is dead would be, too.
    space.map(elsewhere, &old, Prot::RW)?;
    reaches(&mut space, &edu, &registers, elsewhere)?;
    misses(&mut space, &edu, &registers, PEER)?;
    space.unmap(Span::new(PEER, len))?;
    for memory in [&old, &new] {
        space.map(PEER, memory, Prot::RW)?;
        reaches(&mut space, &edu, &registers, PEER)?;
        let unmapped = space.unmap(Span::new(PEER, len))?;
        ensure!(unmapped == len, "{unmapped:#x} bytes unmapped");
    }
    // Off and on without a look in between, as a reset does: the register does not show it.
    let region = device.device.region(BAR)?;
    let mut bar = PeerBar::new(&space.ioas, &device, &region, Span::new(0, len), PEER);
    ensure!(bar.follow()?, "decoding is off");
    decode(&device.device, false)?;
    decode(&device.device, true)?;
    for at in [PEER, elsewhere] {
        misses(&mut space, &edu, &registers, at)?;
    }
    ensure!(bar.renew()?, "it is not mapped");
    reaches(&mut space, &edu, &registers, PEER)?;
    misses(&mut space, &edu, &registers, elsewhere)?;
    beside.is_reached(&edu)
}
