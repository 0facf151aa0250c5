//! Damaged entries, as the processor and as `iopt`'s walker read them.
//!
//! The walker is written from the specification, and so is QEMU. Of a table that is right, a few bits of
//! one entry on the way to an address are turned over; then both are asked where the address leads.

use iopt::TableOps as _;
use std::sync::atomic::Ordering;

use anyhow::{Context as _, ensure};
use fastrand::Rng;
use iopt::{
    Format, Gather, Prot, Table,
    format::Entry,
    walk::{Access, BadAddress, WalkMemory, Walker},
};
use runs::{Iova, Pa, Span};

use super::{
    Architecture,
    processor::{Processor, Tables},
};

/// Damaged entries of each size of leaf.
const EACH: u64 = 400;

/// The machine's memory: tables, and zeros behind them.
struct Memory<'t, const LOG2: u32> {
    tables: &'t Tables<LOG2>,
    zeros: Span<Pa>,
}

impl<const LOG2: u32> WalkMemory for Memory<'_, LOG2> {
    fn read_u64(&self, address: u64) -> Result<u64, BadAddress> {
        let zero = self.zeros.contains(address).then_some(0);
        let word = self.tables.read(address).or(zero);
        word.ok_or(BadAddress { address })
    }
}

/// Loads by a processor that walks `table`, in which nothing is mapped yet, and by `walker`, set up as the
/// processor is, agree about damaged entries, `but` for the words that QEMU reads against the specification.
pub(super) fn all<F: Format, const LOG2: u32>(
    processor: &Processor,
    architecture: Architecture,
    tables: &Tables<LOG2>,
    table: &mut Table<F, &Tables<LOG2>>,
    walker: Walker,
    but: fn(u64) -> bool,
) -> anyhow::Result<()> {
    let memory = Memory {
        tables,
        zeros: architecture.data(),
    };
    let mut random = Rng::with_seed(processor.round());
    let aperture: Vec<Span<Iova>> = table.format().aperture().spans().collect();
    for size in table.page_sizes().iter() {
        for nth in 0..EACH {
            let span = aperture[nth as usize % aperture.len()];
            let iova = span.start + random.u64(..span.len / size) * size;
            // A leaf that is taken for a table leads to zeros, if there is so much memory.
            let pa = memory.zeros.start.next_multiple_of(size);
            table.map(iova, &[Span::new(pa, size)], Prot::RW)?;
            let path = path(table, tables, iova);
            let (level, entry, word) = *random.choice(&path).context("no path")?;
            let flips = (0..1 + random.u64(..3)).fold(0, |bits, _| bits | 1 << random.u64(..64));
            let damaged = word ^ flips;
            let elsewhere = match F::decode(level, damaged) {
                Entry::Table(to) => !tables.contains(to) && !memory.zeros.contains(to),
                Entry::Empty | Entry::Leaf { .. } => false,
            };
            if !elsewhere && !but(damaged) {
                let cells = tables.storage().mapping().cells();
                let cell = &cells[((entry - tables.base()) / 8) as usize];
                cell.store(damaged, Ordering::Relaxed);
                let address = iova + random.u64(..size);
                let walked = walker.walk(&memory, address, Access::Read, &mut ());
                let found = processor.translate(address)?;
                cell.store(word, Ordering::Relaxed);
                ensure!(
                    found == walked.as_ref().ok().map(|to| to.pa),
                    "{address:#x} with {damaged:#x} for {word:#x} at level {level}, size {size:#x}: the \
                     processor finds {found:x?}, the walker {walked:x?}"
                );
            }
            let mut gather = Gather::new();
            table.unmap(Span::new(iova, size), &mut gather, &mut iopt::NoRuns)?;
            table.reclaim(gather.never_walked());
        }
    }
    Ok(())
}

/// The entries on the way to a leaf: level, address, word.
fn path<F: Format, const LOG2: u32>(
    table: &Table<F, &Tables<LOG2>>,
    tables: &Tables<LOG2>,
    iova: u64,
) -> Vec<(usize, u64, u64)> {
    let mut path = Vec::new();
    let mut at = table.root().address;
    for level in (0..usize::from(table.format().levels())).rev() {
        let entries = table.format().entries(level) as u64;
        let entry = at + 8 * (iova >> F::shift(level) & (entries - 1));
        let word = tables.read(entry).unwrap_or(0);
        path.push((level, entry, word));
        let Entry::Table(below) = F::decode(level, word) else {
            break;
        };
        at = below;
    }
    path
}
