//! Each step of iommufd fails once: afterwards everything is as it was before.
//!
//! `/proc/thread-self/fail-nth` has the n-th step of this thread fail that is made for it
//! (`CONFIG_FAULT_INJECTION`): those of iommufd, as it is built for its own tests. What is read there
//! afterwards is how many steps were left to go, 0 when one has failed.

use std::{fs, sync::Arc};

use anyhow::{Context as _, bail, ensure};
use guest::machines::EDU;
use hostmem::Backing;
use ioas::{Ledger, Memory};
use iopt::{Interruption, Prot};
use runs::{Iova, Span};

use crate::{
    charges::Count,
    dma::{IOVA, check, memory},
    edu::{BUFFER, Edu},
    pci,
    semantics::{counter_of, table::Column},
    space::{Interface, Space, host_memory},
};

const FAIL: &str = "/proc/thread-self/fail-nth";
const MIB: u64 = 1 << 20;
/// More steps than any operation has.
const MOST: u32 = 1000;

/// State that must not change.
#[derive(Debug, PartialEq, Eq)]
struct State {
    areas: Vec<Span<Iova>>,
    pieces: Vec<Span<Iova>>,
    charged: u64,
}

struct Tried<I: Interface> {
    space: Space<I>,
    count: Count,
}

impl<I: Interface> Tried<I> {
    /// The state, in which the ledger agrees with the kernel.
    fn state(&self) -> anyhow::Result<State> {
        let charged = self.space.ledger.in_use();
        self.count.is(charged)?;
        Ok(State {
            areas: self
                .space
                .ioas
                .areas()
                .iter()
                .map(|area| area.range())
                .collect(),
            pieces: self.space.ioas.kernel_mappings().unwrap_or_default(),
            charged,
        })
    }

    /// Has each step of `operation` fail once, and looks whether anything has changed then. After it has
    /// succeeded, `undo` is done. Returns how many failed.
    fn try_out<T, E: std::error::Error + Send + Sync + 'static>(
        &mut self,
        mut operation: impl FnMut(&mut Space<I>) -> Result<T, E>,
        mut undo: impl FnMut(&mut Space<I>) -> anyhow::Result<()>,
    ) -> anyhow::Result<u32> {
        let before = self.state()?;
        let mut failed = 0;
        for nth in 1..MOST {
            fs::write(FAIL, nth.to_string())?;
            let result = operation(&mut self.space);
            let left: u32 = fs::read_to_string(FAIL)?.trim().parse()?;
            fs::write(FAIL, "0")?;
            match result {
                // Some steps have a second way.
                Ok(_) => undo(&mut self.space).with_context(|| format!("after step {nth}"))?,
                Err(error) if left > 0 => {
                    return Err(error).with_context(|| format!("before step {nth}"));
                }
                Err(_) => failed += 1,
            }
            let after = self.state().with_context(|| format!("step {nth}"))?;
            ensure!(after == before, "step {nth}: {after:?}, before: {before:?}");
            if left > 0 {
                return Ok(failed);
            }
        }
        bail!("no end of steps")
    }
}

/// Maps of several pieces, cuts and attaching, with a failure in each step.
pub(crate) fn everywhere<I: Interface>() -> anyhow::Result<()> {
    let count = Count::new(counter_of(I::COLUMN))?;
    let ledger = Ledger::new("what the kernel counts", Some(64 * MIB), 0);
    let device = pci::Device(EDU);
    let space = Space::<I>::new(I::file()?, Some(MIB), device, ledger)?;
    let mapping = memory(Backing::Anon4K, 4 * MIB)?;
    let memory = host_memory(&mapping, &space.ledger)?;
    let half = Span::new(0, 2 * MIB);
    space.ioas.map(IOVA, &memory, half, Prot::RW)?;
    let mut tried = Tried { space, count };

    let there = Span::new(IOVA + (1 << 30), 2 * MIB);
    let other = half.start + half.len;
    let map = |space: &mut Space<I>, memory: &Arc<Memory>| {
        let part = Span::new(other, there.len);
        space.ioas.map(there.start, memory, part, Prot::RW)
    };
    let of_map = tried.try_out(
        |space| map(space, &memory),
        |space| Ok(space.unmap(there).map(|_| ())?),
    )?;

    // Both ends cut a piece.
    let part = Span::new(IOVA + MIB / 2, MIB);
    let of_cut = tried.try_out(
        |space| space.ioas.unmap_cutting(part, Interruption::Allowed),
        |space| {
            space.ioas.unmap_all()?;
            Ok(space.ioas.map(IOVA, &memory, half, Prot::RW)?)
        },
    )?;

    tried.space.unplug()?;
    let attached = tried.space.attachable(device)?;
    let of_attach = tried.try_out(
        |space| space.ioas.attach(attached.clone()),
        |space| Ok(space.ioas.detach(&attached)?),
    )?;
    println!(
        "guest-init: steps that failed: {of_map} of a map, {of_cut} of a cut, {of_attach} of attaching"
    );
    // In a container that iommufd plays all is done when a device is opened.
    let least = if I::COLUMN == Column::Iommufd { 4 } else { 0 };
    ensure!(
        of_map >= 4 && of_cut >= 4 && of_attach >= least,
        "{of_map} steps of a map, {of_cut} of a cut, {of_attach} of attaching"
    );
    drop(attached);

    let space = &mut tried.space;
    space.plug(device)?;
    let edu = Edu::new(space.device()?)?;
    edu.read(IOVA, BUFFER)?;
    edu.write(IOVA + half.len - BUFFER, BUFFER)?;
    let (from, words) = ((half.len - BUFFER) / 8, BUFFER / 8);
    check(mapping.cells(), |nth| {
        if (from..from + words).contains(&nth) {
            nth - from
        } else {
            nth
        }
    })?;
    space.ioas.unmap_all()?;
    tried.count.is(0)
}
