//! The limit on locked memory, as the kernel keeps it.

use std::{fs, sync::Arc, thread};

use anyhow::{Context as _, bail, ensure};
use guest::machines::EDU;
use hostmem::{Backing, Mapping};
use ioas::{Errno, Ledger, MapError, Mapper as _, OverLimit};
use iopt::Prot;
use runs::Span;
use rustix::{
    process::{Resource, Rlimit, getrlimit, setrlimit},
    thread::{CapabilitySet, capabilities, set_capabilities},
};

use crate::{
    dma::{IOVA, memory},
    pci,
    space::{Interface, Space, host_memory},
};

const LIMIT: u64 = 1 << 20;

/// More than the limit is refused, half-way through, and all of it given back: afterwards all that
/// the limit allows is there to be had, and not a page more.
pub(crate) fn exceeded<I: Interface>() -> anyhow::Result<()> {
    unprivileged(LIMIT, || try_out::<I>())
}

/// Does `what` with this limit, and without the privilege that lifts it.
pub(crate) fn unprivileged(
    limit: u64,
    what: impl FnOnce() -> anyhow::Result<()> + Send + 'static,
) -> anyhow::Result<()> {
    limited(limit, || {
        // The privilege to lock without limit is a thread's, and this one gives it up.
        let result = thread::spawn(move || {
            let mut sets = capabilities(None)?;
            sets.effective -= CapabilitySet::IPC_LOCK;
            set_capabilities(None, sets)?;
            what()
        });
        result.join().map_err(|_| anyhow::anyhow!("panicked"))?
    })?
}

/// Does `what` with this limit on locked memory.
pub(crate) fn limited<T>(limit: u64, what: impl FnOnce() -> T) -> anyhow::Result<T> {
    let before = getrlimit(Resource::Memlock);
    let (current, maximum) = (Some(limit), before.maximum.map(|most| most.max(limit)));
    setrlimit(Resource::Memlock, Rlimit { current, maximum })?;
    let done = what();
    setrlimit(Resource::Memlock, before)?;
    Ok(done)
}

/// The ledger believes in twice the limit and a page, so that the kernel is asked.
fn try_out<I: Interface>() -> anyhow::Result<()> {
    let believed = 2 * LIMIT + 4096;
    let ledger = Ledger::new("what the kernel counts", Some(believed), 0);
    let mut space = Space::<I>::with_ledger(pci::Device(EDU), ledger)?;
    let [twice, all, page] = [2 * LIMIT, LIMIT, 4096].map(|len| memory(Backing::Anon4K, len));
    let [twice, all, page] = [twice?, all?, page?];
    let before = locked()?;
    let refused = |space: &mut Space<I>, iova, mapping: &Arc<Mapping>, in_use| {
        let memory = host_memory(mapping, &space.ledger)?;
        let result = space.map(iova, &memory, Prot::RW);
        match result {
            Err(error @ MapError::OverLimit(OverLimit { needed, limit, .. })) => {
                let errno = error.errno(I::Mapper::PROFILE);
                ensure!(errno == Some(Errno::ENOMEM), "its number is {errno:?}");
                // The limit is the kernel's, not the ledger's.
                let numbers = (needed, limit, space.ledger.in_use());
                let right = (mapping.len(), LIMIT, in_use);
                ensure!(numbers == right, "{numbers:?} and not {right:?}");
                Ok(())
            }
            other => bail!("not refused for the limit's sake: {other:?}"),
        }
    };
    refused(&mut space, IOVA, &twice, 0).context("twice the limit")?;
    ensure!(
        locked()? == before,
        "{before:?} locked before, {:?} after",
        locked()?
    );
    space
        .map_host(IOVA, &all, Prot::RW)
        .context("all of the limit")?;
    ensure!(space.ledger.in_use() == LIMIT, "not charged");
    refused(&mut space, IOVA + LIMIT, &page, LIMIT).context("a page more")?;
    space.unmap(Span::new(IOVA, LIMIT))?;
    ensure!(
        locked()? == before,
        "{before:?} locked before, {:?} at the end",
        locked()?
    );
    space
        .map_host(IOVA, &page, Prot::RW)
        .context("a page after all")
}

/// Bytes that the kernel shows as locked and as pinned by this process.
fn locked() -> anyhow::Result<[u64; 2]> {
    Ok([counter("VmLck")?, counter("VmPin")?])
}

/// Bytes on one of these counters.
pub(crate) fn counter(name: &str) -> anyhow::Result<u64> {
    let status = fs::read_to_string("/proc/self/status")?;
    let mut lines = status.lines();
    let line = lines.find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    let number = line.and_then(|rest| rest.trim().strip_suffix(" kB"));
    Ok(number.context("no such counter")?.parse::<u64>()? << 10)
}
