//! DMA from one device into the memory of another one.

use std::{
    os::fd::AsFd as _,
    sync::{Arc, atomic::Ordering},
};

use anyhow::{bail, ensure};
use guest::machines::{IVSHMEM, IVSHMEM_BYTES};
use hostmem::Backing;
use ioas::{
    Capability, Errno, HostMemory, MapError, Memory, PinFailed, Profile, vfio::DeviceRegisters,
};
use iopt::Prot;
use runs::Span;

use crate::{
    charges::Count,
    dma::{IOVA, memory, open},
    edu::{BUFFER, Edu},
    objects::{DmaBuf, with_a_page},
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

/// Writes a buffer of memory to the peer, and looks whether it came there.
fn write<I: Interface>(
    space: &mut Space<I>,
    edu: &Edu,
    registers: &DeviceRegisters,
) -> anyhow::Result<()> {
    let memory = memory(Backing::Anon4K, 4096)?;
    space.map_host(IOVA, &memory, Prot::READ)?;
    let ends = [OFFSET - 8, OFFSET + BUFFER];
    let before = ends.map(|offset| registers.read::<u64>(offset));
    edu.read(IOVA, BUFFER)?;
    edu.write(PEER + OFFSET, BUFFER)?;
    for (offset, cell) in (OFFSET..OFFSET + BUFFER).step_by(8).zip(memory.cells()) {
        let found: u64 = registers.read(offset)?;
        let right = cell.load(std::sync::atomic::Ordering::Relaxed);
        ensure!(
            found == right,
            "{found:#x} and not {right:#x} at offset {offset:#x}"
        );
    }
    for (offset, before) in ends.into_iter().zip(before) {
        ensure!(
            registers.read::<u64>(offset)? == before?,
            "offset {offset:#x} was written"
        );
    }
    space.unmap(Span::new(IOVA, memory.len()))?;
    Ok(())
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
    write(&mut space, &edu, &registers)?;
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
    let bar = peer.device()?.region(BAR)?;
    let file = peer.device()?.dma_buf(&bar, Span::new(0, len))?;
    let memory = Memory::new(Arc::new(DmaBuf { file, len }), &space.ledger);
    space.map(PEER, &memory, Prot::RW)?;
    write(&mut space, &edu, &registers)?;
    let unmapped = space.unmap(Span::new(PEER, len))?;
    ensure!(unmapped == len, "{unmapped:#x} bytes unmapped");
    Ok(())
}
