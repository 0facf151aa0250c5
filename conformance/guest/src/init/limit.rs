//! The limit on locked memory, as the kernel keeps it.

use std::{fs, thread};

use anyhow::{Context as _, ensure};
use hostmem::Backing;
use ioas::iommufd::KernelError;
use iopt::Prot;
use runs::Span;
use rustix::{
    io::Errno,
    process::{Resource, Rlimit, getrlimit, setrlimit},
    thread::{CapabilitySet, capabilities, set_capabilities},
};

use crate::{
    dma::{IOVA, memory, open},
    space::Kind,
};

const LIMIT: u64 = 1 << 20;

/// More than the limit is refused, half-way through, and all of it given back: afterwards all that
/// the limit allows is there to be had, and not a page more.
pub(crate) fn exceeded(kind: Kind) -> anyhow::Result<()> {
    let before = getrlimit(Resource::Memlock);
    setrlimit(
        Resource::Memlock,
        Rlimit {
            current: Some(LIMIT),
            ..before
        },
    )?;
    // The privilege to lock without limit is a thread's, and this one gives it up.
    let result = thread::spawn(move || unprivileged(kind)).join();
    setrlimit(Resource::Memlock, before)?;
    result.map_err(|_| anyhow::anyhow!("panicked"))?
}

fn unprivileged(kind: Kind) -> anyhow::Result<()> {
    let mut sets = capabilities(None)?;
    sets.effective -= CapabilitySet::IPC_LOCK;
    set_capabilities(None, sets)?;
    let (mut space, _edu) = open(kind)?;
    let [twice, all, page] = [2 * LIMIT, LIMIT, 4096].map(|len| memory(Backing::Anon4K, len));
    let [twice, all, page] = [twice?, all?, page?];
    let before = locked()?;
    let refused = |result| match result {
        Err(KernelError::Refused { errno, .. }) if errno == Errno::NOMEM.raw_os_error() => Ok(()),
        other => Err(anyhow::anyhow!("not refused for want of memory: {other:?}")),
    };
    refused(space.map(IOVA, &twice, Prot::RW)).context("twice the limit")?;
    ensure!(
        locked()? == before,
        "{before:?} locked before, {:?} after",
        locked()?
    );
    space
        .map(IOVA, &all, Prot::RW)
        .context("all of the limit")?;
    refused(space.map(IOVA + LIMIT, &page, Prot::RW)).context("a page more")?;
    space.unmap(Span::new(IOVA, LIMIT))?;
    ensure!(
        locked()? == before,
        "{before:?} locked before, {:?} at the end",
        locked()?
    );
    space.map(IOVA, &page, Prot::RW).context("a page after all")
}

/// What the kernel shows of this process's locked and pinned memory.
fn locked() -> anyhow::Result<Vec<String>> {
    let status = fs::read_to_string("/proc/self/status")?;
    let lines = status
        .lines()
        .filter(|line| line.starts_with("VmLck") || line.starts_with("VmPin"));
    let lines: Vec<String> = lines.map(str::to_owned).collect();
    ensure!(lines.len() == 2, "VmLck and VmPin are {lines:?}");
    Ok(lines)
}
