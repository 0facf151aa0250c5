//! Page sizes of the kernel's tables that change in place while devices do DMA: a call of iommufd in a kernel with our
//! patch (`linux/patches/page-sizes.c`) and our tables.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};
use guest::{
    machines::{EDU, Machine},
    start,
};
use hostmem::{Backing, Mapping};
use ioas::{
    Errno, KernelError,
    iommufd::{self, Attachable as _, BoundDevice, IoasId},
    vfio::PageTable,
};
use iopt::Prot;
use runs::{Iova, Span};
use rustix::ioctl::{Opcode, opcode};

use crate::{
    dma::{self, IOVA},
    edu::{BUFFER, Edu},
    kernel_tables, mock, numa,
    pci::Device,
    space::{Interface as _, Iommufd},
};

const PAGE: u64 = 4096;
const HUGE: u64 = 2 << 20;
const SIZE: u64 = 4 * HUGE;
/// Transfers of each device, a tenth of a second each.
const TRANSFERS: u64 = 20;
/// A page in the middle of a leaf, in front of one that was not written to.
const ODD: u64 = HUGE / PAGE + 7;
/// Where single pages are mapped, as many as tables, each in a table of its own.
const APART: u64 = 1 << 40;
const TABLES: u64 = 1000;
/// For all of them, on a host that has other work.
const PATIENCE: Duration = Duration::from_secs(600);

/// `IOMMU_IOAS_PAGE_SIZE`, and a flag of it.
const PAGE_SIZE: Opcode = opcode::none(b';', 0x95);
const CUT: u32 = 1;

/// `struct iommu_ioas_page_size`.
#[repr(C)]
struct Argument {
    size: u32,
    ioas: u32,
    flags: u32,
    reserved: u32,
    iova: u64,
    len: u64,
    largest: u64,
}

fn set(
    iommufd: &iommufd::Iommufd,
    ioas: IoasId,
    range: Span<Iova>,
    largest: u64,
    flags: u32,
) -> Result<(), KernelError> {
    let mut argument = Argument {
        size: size_of::<Argument>() as u32,
        ioas: ioas.0,
        flags,
        reserved: 0,
        iova: range.start,
        len: range.len,
        largest,
    };
    // SAFETY: the structure of this request, without an address.
    unsafe { mock::request::<PAGE_SIZE, _>(iommufd, "IOMMU_IOAS_PAGE_SIZE", &mut argument) }
}

/// Error number that the kernel is to answer with, by its words: none where it has the patch, and tables that can do it.
fn refusal() -> anyhow::Result<Option<i32>> {
    Ok(match start::has_our_tables()? {
        _ if !start::patched("page-sizes")? => Some(Errno::ENOTTY.0),
        true => None,
        false => Some(Errno::EOPNOTSUPP.0),
    })
}

/// Up to two devices copy while all pages change their sizes again and again: each finds the bytes of its page, and no
/// others. Then 4 KiB of a leaf of 2 MiB are unmapped, and are out of reach at once.
pub(crate) fn under_dma(_: &Machine) -> anyhow::Result<()> {
    let mut devices: Vec<_> = numa::devices()?.into_iter().map(|(_, it)| it).collect();
    devices.truncate(2);
    if devices.is_empty() {
        devices.push(Device(EDU));
    }
    let iommufd = Iommufd::file()?;
    let ioas = iommufd.alloc_ioas()?;
    let memory = dma::memory(Backing::Hugetlb2M, SIZE)?;
    let whole = Span::new(IOVA, SIZE);
    let bound: Vec<BoundDevice> = devices
        .iter()
        .map(|device| {
            device.bind_to_vfio()?;
            Ok(iommufd.open_device(&device.cdev()?)?)
        })
        .collect::<anyhow::Result<_>>()?;
    for device in &bound {
        device.attach(PageTable::Ioas(ioas))?;
    }
    let edus: Vec<Edu> = bound
        .iter()
        .map(|device| Edu::new(&device.device))
        .collect::<anyhow::Result<_>>()?;
    let from = Span::new(memory.address(), SIZE);
    // SAFETY: the memory outlives the mapping, and its cells are atomic.
    unsafe { iommufd.map(ioas, Some(IOVA), from, Prot::RW) }?;

    if let Some(errno) = refusal()? {
        let found = set(&iommufd, ioas, whole, PAGE, 0);
        let named = matches!(found, Err(KernelError::Refused { errno: it, .. }) if it == errno);
        ensure!(named, "error {errno} is due, not {found:?}");
        empty_tables_are_freed(&iommufd, ioas, &memory, None)?;
        iommufd.unmap(ioas, whole)?;
        return bound.iter().try_for_each(|device| Ok(device.detach()?));
    }

    let change = |range, largest, flags| set(&iommufd, ioas, range, largest, flags);
    copy_while_sizes_change(&edus, memory.cells(), &change)?;
    let hole = Span::new(IOVA + ODD * PAGE, PAGE);
    ensure!(
        iommufd.unmap(ioas, hole).is_err(),
        "a part of an area is unmapped"
    );
    change(hole, HUGE, CUT)?;
    let unmapped = iommufd.unmap(ioas, hole)?;
    ensure!(unmapped == PAGE, "{unmapped:#x} bytes unmapped");
    only_the_hole_is_out_of_reach(&edus[0], memory.cells())?;
    empty_tables_are_freed(&iommufd, ioas, &memory, Some(&change))?;
    let rest = iommufd.unmap(ioas, whole)?;
    ensure!(rest == SIZE - PAGE, "{rest:#x} bytes unmapped");
    drop(edus);
    bound.iter().try_for_each(|device| Ok(device.detach()?))
}

/// Sets the largest leaf of a range, with flags of the call.
type Change<'a> = &'a dyn Fn(Span<Iova>, u64, u32) -> Result<(), KernelError>;

/// Devices copy the first half of even pages to the second: the first device from the beginning on, the second from the middle on.
fn copy_while_sizes_change(
    edus: &[Edu],
    cells: &[AtomicU64],
    change: Change<'_>,
) -> anyhow::Result<()> {
    let whole = Span::new(IOVA, SIZE);
    let part = Span::new(IOVA + 5 * PAGE, HUGE + 3 * PAGE);
    let parts = edus.len() as u64;
    let page = |device: u64, nth: u64| {
        (device * SIZE / PAGE / parts) + 2 * (nth * 23 % (SIZE / PAGE / parts / 2))
    };
    let done = AtomicU64::new(0);
    let changes = thread::scope(|scope| {
        let copying: Vec<_> = (0..)
            .zip(edus)
            .map(|(device, edu)| {
                let (done, page) = (&done, &page);
                scope.spawn(move || {
                    let copied = (0..TRANSFERS).try_for_each(|nth| {
                        let at = IOVA + page(device, nth) * PAGE;
                        edu.read(at, BUFFER)?;
                        edu.write(at + BUFFER, BUFFER)
                    });
                    done.fetch_add(1, Ordering::Relaxed);
                    copied
                })
            })
            .collect();
        let (start, mut changes) = (Instant::now(), 0u64);
        let mut change_all = || {
            while done.load(Ordering::Relaxed) < parts {
                ensure!(start.elapsed() < PATIENCE, "no end of transfers");
                for (range, largest) in [(whole, PAGE), (whole, HUGE), (part, PAGE), (whole, HUGE)]
                {
                    change(range, largest, 0).with_context(|| format!("{range}, {largest:#x}"))?;
                    changes += 1;
                }
            }
            Ok(())
        };
        let changed = change_all();
        for copying in copying {
            copying.join().ok().context("a panic")??;
        }
        changed.map(|()| changes)
    })?;
    println!("{changes} changes of page sizes");
    let copied = |at: u64| {
        let mut all = (0..parts).flat_map(|device| (0..TRANSFERS).map(move |nth| (device, nth)));
        all.any(|(device, nth)| page(device, nth) == at)
    };
    dma::check(cells, |nth| {
        let in_second_half = nth * 8 % PAGE >= BUFFER;
        if in_second_half && copied(nth * 8 / PAGE) {
            nth - BUFFER / 8
        } else {
            nth
        }
    })
}

/// Pages that were mapped apart leave empty tables, which a call of a large range frees, where there is one.
fn empty_tables_are_freed(
    iommufd: &iommufd::Iommufd,
    ioas: IoasId,
    memory: &Mapping,
    change: Option<Change<'_>>,
) -> anyhow::Result<()> {
    let before = kernel_tables::pages()?;
    let page = Span::new(memory.address(), PAGE);
    let apart = |nth: u64| APART + nth * HUGE;
    for nth in 0..TABLES {
        // SAFETY: the memory outlives the mapping, and its cells are atomic.
        unsafe { iommufd.map(ioas, Some(apart(nth)), page, Prot::RW) }?;
    }
    let mapped = kernel_tables::pages()?;
    for nth in 0..TABLES {
        iommufd.unmap(ioas, Span::new(apart(nth), PAGE))?;
    }
    let unmapped = kernel_tables::pages()?;
    println!("pages of tables: {before}, mapped {mapped}, unmapped {unmapped}");
    ensure!(
        mapped >= before + TABLES && unmapped >= before + TABLES,
        "{before} pages of tables, {mapped} when mapped, {unmapped} when unmapped"
    );
    let Some(change) = change else {
        return Ok(());
    };
    change(Span::new(0, 1 << 47), 0, 0)?;
    let freed = kernel_tables::pages()?;
    println!("pages of tables when freed: {freed}");
    // A root that has grown stays.
    ensure!(freed <= before + 2, "{freed} pages, and {before} before");
    Ok(())
}

/// A device reads the page behind the hole, and writes to the hole and to that page.
fn only_the_hole_is_out_of_reach(edu: &Edu, cells: &[AtomicU64]) -> anyhow::Result<()> {
    let at = IOVA + ODD * PAGE;
    edu.read(at + PAGE, BUFFER)?;
    edu.write(at, BUFFER)?;
    edu.write(at + PAGE + BUFFER, BUFFER)?;
    let cell = |at: u64| cells[(at / 8) as usize].load(Ordering::Relaxed);
    for at in (0..BUFFER).step_by(8) {
        let page = ODD * PAGE + at;
        ensure!(
            cell(page) != cell(page + PAGE),
            "what is unmapped was written to"
        );
        let [from, to] = [0, BUFFER].map(|half| cell(page + PAGE + half));
        ensure!(from == to, "the page behind has {to:#x} and not {from:#x}");
    }
    Ok(())
}
