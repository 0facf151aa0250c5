//! Pins and charges: of which process, how often, and given back to the byte.

use anyhow::{Context as _, bail, ensure};
use guest::machines::{EDU, NVME};
use hostmem::Backing;
use ioas::{Ledger, MapError, UnmapError, iommufd::RlimitMode};
use iopt::{Interruption, Prot};
use runs::Span;

use crate::{
    dma::{IOVA, check, memory, open},
    edu::{BUFFER, Edu},
    limit::{counter, unprivileged},
    pci,
    semantics::counter_of,
    space::{Interface, Iommufd, Space, host_memory},
};

const MIB: u64 = 1 << 20;

/// Growth of a counter since the beginning.
pub(crate) struct Count {
    name: &'static str,
    before: u64,
}

impl Count {
    pub(crate) fn new(name: &'static str) -> anyhow::Result<Self> {
        let before = counter(name)?;
        Ok(Self { name, before })
    }

    pub(crate) fn is(&self, bytes: u64) -> anyhow::Result<()> {
        let found = counter(self.name)?.wrapping_sub(self.before);
        ensure!(
            found == bytes,
            "{} has {found:#x}, not {bytes:#x}",
            self.name
        );
        Ok(())
    }
}

/// With permission a part is taken from the device, and put back; what stays does DMA, and is charged.
pub(crate) fn cut<I: Interface>() -> anyhow::Result<()> {
    let count = Count::new(counter_of(I::COLUMN))?;
    let (mut space, edu) = open::<I>()?;
    let mapping = memory(Backing::Anon4K, 4 * MIB)?;
    space.map_host(IOVA, &mapping, Prot::RW)?;
    edu.read(IOVA, BUFFER)?;
    let part = Span::new(IOVA + MIB, MIB);
    let refused = space.ioas.unmap_cutting(part, Interruption::Refused);
    ensure!(
        matches!(refused, Err(UnmapError::CutsMapping { .. })),
        "{refused:?}"
    );
    count.is(4 * MIB)?;
    space.ioas.unmap_cutting(part, Interruption::Allowed)?;
    count.is(3 * MIB)?;
    let out = Span::new(IOVA + 3 * MIB, MIB / 2);
    space.ioas.take_out(out, Interruption::Allowed)?;
    count.is(5 * MIB / 2)?;
    // Beside, in what has gone and in what is out; then it is back.
    for iova in [part.start - BUFFER, part.start, part.last() + 1, out.start] {
        edu.write(iova, BUFFER)?;
    }
    space.ioas.put_back(out, Interruption::Refused)?;
    count.is(3 * MIB)?;
    ensure!(
        space.ledger.in_use() == 3 * MIB,
        "{:#x}",
        space.ledger.in_use()
    );
    edu.write(out.start + BUFFER, BUFFER)?;
    let words = BUFFER / 8;
    let written = [part.start - BUFFER, part.last() + 1, out.start + BUFFER];
    check(mapping.cells(), |nth| {
        let at = IOVA + nth / words * BUFFER;
        if written.contains(&at) {
            nth % words
        } else {
            nth
        }
    })?;
    space.ioas.unmap_all()?;
    count.is(0)
}

/// The third of eight pieces meets the limit: none of them is there afterwards.
pub(crate) fn in_the_middle<I: Interface + 'static>() -> anyhow::Result<()> {
    unprivileged(5 * MIB, || {
        let count = Count::new(counter_of(I::COLUMN))?;
        let ledger = Ledger::new(count.name, Some(64 * MIB), 0);
        let mut space = Space::<I>::new(I::file()?, Some(2 * MIB), pci::Device(EDU), ledger)?;
        let mapping = memory(Backing::Anon4K, 16 * MIB)?;
        let memory = host_memory(&mapping, &space.ledger)?;
        let refused = space.map(IOVA, &memory, Prot::RW);
        ensure!(
            matches!(refused, Err(MapError::OverLimit(_))),
            "{refused:?}"
        );
        let pieces = space.ioas.kernel_mappings().unwrap_or_default().len();
        ensure!((pieces, space.ioas.len()) == (0, 0), "{pieces} pieces");
        ensure!(space.ledger.in_use() == 0, "{:#x}", space.ledger.in_use());
        count.is(0)?;
        let part = Span::new(0, 4 * MIB);
        space.ioas.map(IOVA, &memory, part, Prot::RW)?;
        count.is(4 * MIB)?;
        let edu = Edu::new(space.device()?)?;
        edu.read(IOVA, BUFFER)?;
        edu.write(IOVA + 3 * MIB, BUFFER)?;
        let (from, words) = (3 * MIB / 8, BUFFER / 8);
        check(mapping.cells(), |nth| {
            if (from..from + words).contains(&nth) {
                nth - from
            } else {
                nth
            }
        })
    })
}

/// The same memory in two address spaces, which is charged so many times. When it is unmapped in the
/// first, the second has it still.
fn in_two<I: Interface>(files: [I::File; 2], times: u64) -> anyhow::Result<()> {
    let count = Count::new(counter_of(I::COLUMN))?;
    let ledger = Ledger::new(count.name, Some(64 * MIB), 0);
    let mapping = memory(Backing::Memfd, MIB)?;
    let memory = host_memory(&mapping, &ledger)?;
    let [first, second] = files;
    let mut first = Space::<I>::new(first, None, pci::Device(NVME), ledger.clone())?;
    let mut second = Space::<I>::new(second, None, pci::Device(EDU), ledger.clone())?;
    first.map(IOVA, &memory, Prot::RW)?;
    second.map(2 * IOVA, &memory, Prot::RW)?;
    count.is(times * MIB)?;
    ensure!(ledger.in_use() == times * MIB, "{:#x}", ledger.in_use());
    first.unmap(Span::new(IOVA, MIB))?;
    count.is(MIB)?;
    ensure!(ledger.in_use() == MIB, "{:#x}", ledger.in_use());
    let edu = Edu::new(second.device()?)?;
    edu.read(2 * IOVA, BUFFER)?;
    edu.write(2 * IOVA + BUFFER, BUFFER)?;
    let words = BUFFER / 8;
    check(mapping.cells(), |nth| {
        if nth / words == 1 { nth - words } else { nth }
    })?;
    second.unmap(Span::new(2 * IOVA, MIB))?;
    count.is(0)
}

/// Each container charges for itself.
pub(crate) fn twice<I: Interface>() -> anyhow::Result<()> {
    in_two::<I>([I::file()?, I::file()?], 2)
}

/// Address spaces of one iommufd share what is pinned.
pub(crate) fn once() -> anyhow::Result<()> {
    let owner = Iommufd::file()?;
    in_two::<Iommufd>([owner.clone(), owner], 1)
}

/// iommufd can count against the limit of the process instead of that of its user.
pub(crate) fn by_process() -> anyhow::Result<()> {
    unprivileged(MIB, || {
        let count = Count::new("VmLck")?;
        for (mode, counted) in [(RlimitMode::User, 0), (RlimitMode::Process, MIB)] {
            let owner = Iommufd::file()?;
            owner.set_rlimit_mode(mode)?;
            let ledger = Ledger::new(count.name, Some(64 * MIB), 0);
            let mut space = Space::<Iommufd>::new(owner, None, pci::Device(EDU), ledger)?;
            space.map_host(IOVA, &memory(Backing::Anon4K, MIB)?, Prot::RW)?;
            count.is(counted).with_context(|| format!("{mode:?}"))?;
            let page = memory(Backing::Anon4K, 4096)?;
            let Err(_) = space.map_host(2 * IOVA, &page, Prot::RW) else {
                bail!("a page more than the limit, {mode:?}");
            };
        }
        Ok(())
    })
}
