//! A run of memory is released and restored, as a balloon does it, while the device works beside it.

use std::sync::atomic::Ordering;

use anyhow::{Context as _, ensure};
use guest::machines::EDU;
use hostmem::{Backing, Discard};
use ioas::{Ledger, OverLimit, ReleaseError, UnmapError};
use iopt::{Interruption, Prot};
use runs::{Offset, Span};

use crate::{
    charges::Count,
    dma::{IOVA, memory},
    edu::{BUFFER, Edu},
    pci,
    semantics::counter_of,
    space::{Interface, Space, host_memory},
};

const MIB: u64 = 1 << 20;
/// The kernel maps the memory in pieces of so many bytes, so that each can go without the others.
const PIECE: u64 = 2 * MIB;
const SIZE: u64 = 4 * PIECE;
/// The piece that goes.
const GONE: Span<Offset> = Span::new(PIECE, PIECE);
/// Transfers beside it while it comes and goes.
const TRANSFERS: u64 = 16;

/// Released memory is not reached, restored memory is, with the pages that it has then; and memory
/// beside it is reached at every moment.
pub(crate) fn and_restore<I: Interface>() -> anyhow::Result<()> {
    let count = Count::new(counter_of(I::COLUMN))?;
    let ledger = Ledger::new("what may be mapped", Some(SIZE), 0);
    let mut space = Space::<I>::new(I::file()?, Some(PIECE), pci::Device(EDU), ledger)?;
    let edu = Edu::new(space.device()?)?;
    let mapping = memory(Backing::Anon4K, SIZE)?;
    let discard = Discard::new(mapping.clone())?;
    space.map_host(IOVA, &mapping, Prot::RW)?;
    let cell = |at: u64| &mapping.cells()[(at / 8) as usize];
    let (before, behind) = (GONE.start - BUFFER, GONE.last() + 1);
    // The unit has looked at the run, and at both sides of it.
    for at in [before, GONE.start, behind] {
        edu.read(IOVA + at, BUFFER)?;
    }

    // A part of a piece: refused by name, and nothing has changed.
    let part = Span::new(IOVA + GONE.start, 0x1000);
    let mut kept = Vec::new();
    let mut keep = |range, cause| kept.push((range, cause));
    space
        .ioas
        .release(&[part], Interruption::Refused, &mut keep);
    let named = matches!(
        &kept[..],
        [(range, ReleaseError::Unmap(UnmapError::CutsMapping { .. }))] if *range == part
    );
    ensure!(named, "a part of a piece: {kept:?}");
    count.is(SIZE)?;
    edu.read(IOVA + before, BUFFER)?;
    edu.write(IOVA + GONE.start, BUFFER)?;
    ensure!(
        value(cell(GONE.start)) == value(cell(before)),
        "the piece is not as it was"
    );

    release(&mut space)?;
    count.is(SIZE - PIECE)?;
    ensure!(space.ledger.in_use() == SIZE, "the charge has gone");
    let page = host_memory(&memory(Backing::Anon4K, 0x1000)?, &space.ledger)?;
    let taken = space.map(IOVA + SIZE, &page, Prot::RW);
    ensure!(
        matches!(&taken, Err(ioas::MapError::OverLimit(OverLimit { .. }))),
        "what is kept for it can be had: {taken:?}"
    );
    discard.discard(&[GONE], &mut |_, _| ())?;
    for at in [GONE.start, GONE.start + MIB, GONE.start + PIECE - BUFFER] {
        edu.write(IOVA + at, BUFFER)?;
    }
    let reached = (GONE.start..GONE.start + PIECE)
        .step_by(8)
        .find(|at| value(cell(*at)) != 0);
    ensure!(reached.is_none(), "reached at {reached:x?}");

    restore(&mut space)?;
    count.is(SIZE)?;
    ensure!(space.ledger.in_use() == SIZE, "not charged as before");
    // There are other pages now, and the device sees those.
    for (nth, at) in [GONE.start, GONE.start + PIECE - BUFFER]
        .into_iter()
        .enumerate()
    {
        let fresh = 0x5eed_0000 + nth as u64;
        cell(at).store(fresh, Ordering::Relaxed);
        edu.read(IOVA + at, BUFFER)?;
        edu.write(IOVA + behind, BUFFER)?;
        ensure!(value(cell(behind)) == fresh, "from what is back");
        edu.read(IOVA + before, BUFFER)?;
        edu.write(IOVA + at, BUFFER)?;
        ensure!(value(cell(at)) == value(cell(before)), "to what is back");
    }

    // Not one transfer beside it is lost, whatever moment it meets.
    let mut rounds = 0u64;
    for nth in 0..TRANSFERS {
        let (from, to) = [(before, behind), (behind, before)][nth as usize % 2];
        cell(from).store(!nth, Ordering::Relaxed);
        let mut again = || {
            rounds += 1;
            release(&mut space)?;
            discard.discard(&[GONE], &mut |_, _| ())?;
            restore(&mut space)
        };
        edu.read_while(IOVA + from, BUFFER, &mut again)?;
        edu.write_while(IOVA + to, BUFFER, &mut again)?;
        let found = value(cell(to));
        ensure!(found == !nth, "transfer {nth} beside: {found:#x}");
    }
    ensure!(rounds >= 2 * TRANSFERS, "{rounds} rounds");
    count.is(SIZE)?;
    let unmapped = space.unmap(Span::new(IOVA, SIZE))?;
    ensure!(unmapped == SIZE, "{unmapped:#x} bytes unmapped");
    count.is(0)
}

fn value(cell: &std::sync::atomic::AtomicU64) -> u64 {
    cell.load(Ordering::Relaxed)
}

/// The piece goes, without a moment in which others are missing.
fn release<I: Interface>(space: &mut Space<I>) -> anyhow::Result<()> {
    let (run, mut kept) = (Span::new(IOVA + GONE.start, GONE.len), None);
    let mut keep = |_, cause| kept = Some(cause);
    space.ioas.release(&[run], Interruption::Refused, &mut keep);
    kept.map_or(Ok(()), |cause| Err(cause).context("kept"))
}

/// It comes back, likewise.
fn restore<I: Interface>(space: &mut Space<I>) -> anyhow::Result<()> {
    let (run, mut failed) = (Span::new(IOVA + GONE.start, GONE.len), None);
    let mut fail = |_, cause| failed = Some(cause);
    space.ioas.restore(&[run], Interruption::Refused, &mut fail);
    failed.map_or(Ok(()), |cause| Err(cause).context("not restored"))
}
