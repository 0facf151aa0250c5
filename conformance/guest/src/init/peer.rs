//! DMA from one device into the memory of another one.

use std::{os::fd::AsFd as _, sync::Arc};

use anyhow::{Context as _, ensure};
use guest::machines::{IVSHMEM, IVSHMEM_BYTES};
use hostmem::Backing;
use ioas::{iommufd::KernelError, vfio::Registers};
use iopt::Prot;
use runs::Span;
use rustix::io::Errno;

use crate::{
    dma::{IOVA, memory, open},
    edu::{BUFFER, Edu},
    pci,
    space::{Kind, Space},
};

/// The BAR that is memory.
const BAR: u32 = 2;
/// Where it is mapped.
const PEER: u64 = IOVA + (1 << 30);
/// Where in it the device writes.
const OFFSET: u64 = IVSHMEM_BYTES / 2 + 0x800;

/// Writes a buffer of memory to the peer, and looks whether it came there.
fn write(space: &mut Space, edu: &Edu, registers: &Registers) -> anyhow::Result<()> {
    let memory = memory(Backing::Anon4K, 4096)?;
    space.map(IOVA, &memory, Prot::READ)?;
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
fn peer(kind: Kind) -> anyhow::Result<(Space, Arc<Registers>)> {
    let peer = Space::open(kind, pci::Device(IVSHMEM))?;
    let bar = peer.device().region(BAR)?;
    ensure!(
        bar.len == IVSHMEM_BYTES,
        "BAR {BAR} has {:#x} bytes",
        bar.len
    );
    let registers = peer.device().map(&bar, Span::new(0, bar.len))?;
    Ok((peer, Arc::new(registers)))
}

/// Type 1 maps a BAR by the addresses at which this process has it.
pub(crate) fn by_address() -> anyhow::Result<()> {
    let (_peer, registers) = peer(Kind::Type1)?;
    let (mut space, edu) = open(Kind::Type1)?;
    space.map_registers(PEER, &registers)?;
    write(&mut space, &edu, &registers)?;
    let unmapped = space.unmap(Span::new(PEER, registers.len()))?;
    ensure!(unmapped == registers.len(), "{unmapped:#x} bytes unmapped");
    Ok(())
}

/// iommufd does not, also where it plays a container.
pub(crate) fn refused(kind: Kind) -> anyhow::Result<()> {
    let (_peer, registers) = peer(kind)?;
    let (mut space, _edu) = open(kind)?;
    match space.map_registers(PEER, &registers) {
        Err(KernelError::Refused { errno, .. }) if errno == Errno::FAULT.raw_os_error() => Ok(()),
        other => Err(anyhow::anyhow!(
            "not refused for the memory's sake: {other:?}"
        )),
    }
}

/// iommufd maps it by a dma-buf of the peer.
pub(crate) fn by_dma_buf() -> anyhow::Result<()> {
    let (peer, registers) = peer(Kind::Iommufd)?;
    let (mut space, edu) = open(Kind::Iommufd)?;
    let whole = Span::new(0, registers.len());
    let buffer = peer.device().dma_buf(&peer.device().region(BAR)?, whole)?;
    let (iommufd, ioas) = space.iommufd().context("no iommufd")?;
    iommufd.map_file(ioas, Some(PEER), buffer.as_fd(), whole, Prot::RW)?;
    write(&mut space, &edu, &registers)?;
    let unmapped = space.unmap(Span::new(PEER, whole.len))?;
    ensure!(unmapped == whole.len, "{unmapped:#x} bytes unmapped");
    Ok(())
}
