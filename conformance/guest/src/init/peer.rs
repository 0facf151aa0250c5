//! DMA from one device into the memory of another one.

use std::sync::Arc;

use anyhow::ensure;
use guest::machines::{IVSHMEM, IVSHMEM_BYTES};
use hostmem::Backing;
use ioas::{Errno, MapError, Memory, MemoryObject, PinFailed, Profile, vfio::Registers};
use iopt::Prot;
use runs::Span;

use crate::{
    dma::{IOVA, memory, open},
    edu::{BUFFER, Edu},
    objects::{DmaBuf, Peer},
    pci,
    space::{Interface, Iommufd, Space, Type1},
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
    registers: &Registers,
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
fn peer<I: Interface>() -> anyhow::Result<(Space<I>, Arc<Registers>)> {
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

/// Its memory as `object`, for the address space of `space`.
fn memory_of<I: Interface>(space: &Space<I>, object: impl MemoryObject + 'static) -> Arc<Memory> {
    Memory::new(Arc::new(object), &space.ledger)
}

/// Type 1 maps a BAR by the addresses at which this process has it.
pub(crate) fn by_address() -> anyhow::Result<()> {
    let (_peer, registers) = peer::<Type1>()?;
    let (mut space, edu) = open::<Type1>()?;
    let memory = memory_of(&space, Peer(registers.clone()));
    space.map(PEER, &memory, Prot::RW)?;
    write(&mut space, &edu, &registers)?;
    let unmapped = space.unmap(Span::new(PEER, registers.len()))?;
    ensure!(unmapped == registers.len(), "{unmapped:#x} bytes unmapped");
    Ok(())
}

/// iommufd does not, also where it plays a container.
pub(crate) fn refused<I: Interface>() -> anyhow::Result<()> {
    let (_peer, registers) = peer::<I>()?;
    let (mut space, _edu) = open::<I>()?;
    let memory = memory_of(&space, Peer(registers));
    match space.map(PEER, &memory, Prot::RW) {
        Err(error @ MapError::Pin(PinFailed::Refused(_))) => {
            let errno = error.errno(Profile::Iommufd);
            ensure!(errno == Some(Errno::EFAULT), "its number is {errno:?}");
            Ok(())
        }
        other => Err(anyhow::anyhow!(
            "not refused for the memory's sake: {other:?}"
        )),
    }
}

/// iommufd maps it by a dma-buf of the peer.
pub(crate) fn by_dma_buf() -> anyhow::Result<()> {
    let (peer, registers) = peer::<Iommufd>()?;
    let (mut space, edu) = open::<Iommufd>()?;
    let len = registers.len();
    let bar = peer.device()?.region(BAR)?;
    let file = peer.device()?.dma_buf(&bar, Span::new(0, len))?;
    let memory = memory_of(&space, DmaBuf { file, len });
    space.map(PEER, &memory, Prot::RW)?;
    write(&mut space, &edu, &registers)?;
    let unmapped = space.unmap(Span::new(PEER, len))?;
    ensure!(unmapped == len, "{unmapped:#x} bytes unmapped");
    Ok(())
}
