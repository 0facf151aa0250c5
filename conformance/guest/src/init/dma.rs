//! DMA by `edu` through the kernel's tables: it reaches what is mapped, and nothing else.

use std::{
    fs::OpenOptions,
    io::{Read as _, Seek as _, SeekFrom},
    ops::ControlFlow,
    os::unix::fs::OpenOptionsExt as _,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

use anyhow::{Context as _, bail, ensure};
use guest::machines::{EDU, Machine, Unit, bdf};
use hostmem::{Backing, Mapping};
use iopt::Prot;
use runs::Span;
use rustix::fs::OFlags;

use crate::{
    charges::Count,
    edu::{BUFFER, Edu},
    host::Endpoint,
    kernel_tables, pci,
    semantics::counter_of,
    space::{Interface, Space, Type1},
};

/// Where memory is mapped: above 4 GiB, where the machine has nothing of its own.
pub(crate) const IOVA: u64 = 0x1_2340_0000;

/// Bytes of the memory: two huge pages.
const SIZE: u64 = 4 << 20;

/// How often the device tries to make the kernel tell of a fault: half a minute and more.
const PATIENCE: u32 = 100;

/// Memory that is there, and holds a number of its own in each cell.
pub(crate) fn memory(backing: Backing, len: u64) -> anyhow::Result<Arc<Mapping>> {
    let memory = Mapping::new(backing, len, None)?;
    memory.populate(&mut |_| ControlFlow::Continue(()))?;
    for (nth, cell) in (0..).zip(memory.cells()) {
        cell.store(pattern(nth), Ordering::Relaxed);
    }
    Ok(Arc::new(memory))
}

/// Value of cell `nth` at first: no two are the same.
fn pattern(nth: u64) -> u64 {
    (nth + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// Opens `edu` with an empty address space.
pub(crate) fn open<I: Interface>() -> anyhow::Result<(Space<I>, Edu)> {
    let space = Space::open(pci::Device(EDU))?;
    let edu = Edu::new(space.device()?)?;
    Ok((space, edu))
}

/// Looks whether memory is as `expected` says: from which cell the number in each cell comes.
pub(crate) fn check(cells: &[AtomicU64], expected: impl Fn(u64) -> u64) -> anyhow::Result<()> {
    for (nth, cell) in (0..).zip(cells) {
        let (found, right) = (cell.load(Ordering::Relaxed), pattern(expected(nth)));
        ensure!(
            found == right,
            "{found:#x} and not {right:#x} at offset {:#x}",
            nth * 8
        );
    }
    Ok(())
}

/// The device copies from and to the ends of the memory and across the border of two pages, small
/// and huge ones; all bytes are looked at, those beside too.
pub(crate) fn copies<I: Interface>(backing: Backing) -> anyhow::Result<()> {
    let (mut space, edu) = open::<I>()?;
    let memory = memory(backing, SIZE)?;
    space.map_host(IOVA, &memory, Prot::RW)?;
    // From, to, length; no two overlap.
    let copies = [
        (0, SIZE - BUFFER, BUFFER),
        (SIZE / 2 - BUFFER / 2, 0x10_0800, BUFFER),
        (0x30_0008, 0x2000, 24),
    ];
    for (from, to, len) in copies {
        edu.read(IOVA + from, len)?;
        edu.write(IOVA + to, len)?;
    }
    check(memory.cells(), |nth| {
        let copied = copies
            .iter()
            .find(|(_, to, len)| (*to..to + len).contains(&(nth * 8)));
        copied.map_or(nth, |(from, to, _)| nth - to / 8 + from / 8)
    })?;
    let unmapped = space.unmap(Span::new(IOVA, SIZE))?;
    ensure!(unmapped == SIZE, "{unmapped:#x} bytes unmapped");
    Ok(())
}

/// Unmapped memory is out of reach at once, and no longer charged; memory beside it stays both.
pub(crate) fn unmap<I: Interface>(machine: &Machine) -> anyhow::Result<()> {
    let count = Count::new(counter_of(I::COLUMN))?;
    let (mut space, edu) = open::<I>()?;
    let [gone, stays] = [
        memory(Backing::Anon4K, SIZE)?,
        memory(Backing::Anon4K, SIZE)?,
    ];
    space.map_host(IOVA, &gone, Prot::RW)?;
    space.map_host(IOVA + SIZE, &stays, Prot::RW)?;
    // The unit has looked at both.
    edu.read(IOVA + 0x1000, BUFFER)?;
    edu.write(IOVA, BUFFER)?;
    edu.write(IOVA + SIZE, BUFFER)?;
    let unmap = || Ok(space.unmap(Span::new(IOVA, SIZE))?);
    let unmapped = kernel_tables::unmapping_runs(machine, unmap)?;
    ensure!(unmapped == SIZE, "{unmapped:#x} bytes unmapped");
    count.is(SIZE)?;
    edu.write(IOVA + 0x2000, BUFFER)?;
    edu.write(IOVA + SIZE + 0x2000, BUFFER)?;
    let copied = |nth: u64, at: u64| (at / 8..(at + BUFFER) / 8).contains(&nth);
    check(
        gone.cells(),
        |nth| if copied(nth, 0) { nth + 512 } else { nth },
    )
    .context("what was unmapped")?;
    check(stays.cells(), |nth| match nth {
        _ if copied(nth, 0) => nth + 512,
        _ if copied(nth, 0x2000) => nth - 512,
        _ => nth,
    })
    .context("what stayed")
}

/// A device reads what it may not write.
pub(crate) fn read_only<I: Interface>() -> anyhow::Result<()> {
    let (mut space, edu) = open::<I>()?;
    let [source, target] = [
        memory(Backing::Anon4K, SIZE)?,
        memory(Backing::Anon4K, SIZE)?,
    ];
    space.map_host(IOVA, &source, Prot::READ)?;
    space.map_host(IOVA + SIZE, &target, Prot::RW)?;
    edu.read(IOVA + 0x1000, BUFFER)?;
    edu.write(IOVA, BUFFER)?;
    edu.write(IOVA + SIZE, BUFFER)?;
    check(source.cells(), |nth| nth).context("what is read-only")?;
    check(target.cells(), |nth| {
        if nth < BUFFER / 8 { nth + 512 } else { nth }
    })
    .context("what is not")
}

/// The unit tells the kernel which device went where, and the kernel says so: not always, since it
/// says only a few things within some seconds, so the device tries again.
pub(crate) fn fault(machine: &Machine) -> anyhow::Result<()> {
    let (_space, edu) = open::<Type1>()?;
    let mut log = OpenOptions::new()
        .read(true)
        .custom_flags(OFlags::NONBLOCK.bits() as i32)
        .open("/dev/kmsg")?;
    log.seek(SeekFrom::End(0))?;
    let device = match machine.unit {
        Unit::Virtio => format!("EP {} ", Endpoint::at(EDU)?.number()),
        Unit::RiscV => format!("devid: {:#x} ", bdf(EDU).context("no address")?),
        _ => EDU.trim_start_matches("0000:").to_owned(),
    };
    let address = format!("{IOVA:x}");
    let mut said = String::new();
    for _ in 0..PATIENCE {
        edu.write(IOVA, 8)?;
        thread::sleep(Duration::from_millis(200));
        // One message at a time, until there is none.
        let mut message = [0; 8192];
        while let Ok(len) = log.read(&mut message) {
            said.push_str(&String::from_utf8_lossy(&message[..len]));
        }
        let tells = |line: &str| line.contains(&device) && line.contains(&address);
        if said.lines().any(tells) {
            return Ok(());
        }
    }
    bail!("no fault, but: {said}")
}
