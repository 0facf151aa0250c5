//! Dirty pages: on the units of QEMU, which do not report them, and on the mocks of iommufd's own
//! tests, which do. And memory that drivers in the kernel hold.

use std::sync::Arc;

use anyhow::{bail, ensure};
use guest::machines::EDU;
use hostmem::Backing;
use ioas::{
    Errno, Ioas, KernelError, Ledger, Tracking, UnmapError,
    iommufd::{self, IoasId, SpaceMapper},
    vfio::VfioDevice,
};
use iopt::{Pending, Prot};
use runs::{Iova, Span};

use crate::{
    dma::{IOVA, memory, open},
    edu::BUFFER,
    mock::{APERTURE, Access, Mock, Queue},
    pci,
    space::{Interface, Iommufd, host_memory},
};

const PAGE: u64 = 4096;
/// Bytes of each memory.
const SIZE: u64 = 1 << 20;

/// Dirty memory in `span`, and whether some device cannot tell.
fn harvest(ioas: &Ioas, span: Span<Iova>) -> anyhow::Result<(Vec<Span<Iova>>, bool)> {
    let words = (span.len / PAGE).div_ceil(64) as usize;
    let mut pending = Pending::new(vec![0; words], span, PAGE)?;
    let found = ioas.harvest(&mut pending)?;
    let shown = ioas.show(&mut pending)?;
    Ok((shown.runs().collect(), found.blind))
}

/// A unit that cannot tell: all that the device may write to counts as written to, and that is said.
pub(crate) fn blind<I: Interface>() -> anyhow::Result<()> {
    let (mut space, edu) = open::<I>()?;
    let [read, written] = [
        memory(Backing::Anon4K, SIZE)?,
        memory(Backing::Anon4K, SIZE)?,
    ];
    space.map_host(IOVA, &read, Prot::READ)?;
    space.map_host(IOVA + SIZE, &written, Prot::RW)?;
    ensure!(!space.ioas.capabilities().page_dirty, "it can tell");
    space.ioas.track_dirty(Tracking::default())?;
    edu.read(IOVA, BUFFER)?;
    edu.write(IOVA + SIZE, BUFFER)?;
    for _ in 0..2 {
        let found = harvest(&space.ioas, Span::new(IOVA, 4 * SIZE))?;
        let right = (vec![Span::new(IOVA + SIZE, SIZE)], true);
        ensure!(found == right, "{found:?} and not {right:?}");
    }
    space.ioas.untrack_dirty();
    let unmapped = space.unmap(Span::new(IOVA, 2 * SIZE))?;
    ensure!(unmapped == 2 * SIZE, "{unmapped:#x} bytes unmapped");
    Ok(())
}

/// iommufd refuses a page table that tells what is dirty for a unit that cannot.
pub(crate) fn no_table() -> anyhow::Result<()> {
    let iommufd = iommufd::Iommufd::open()?;
    let ioas = iommufd.alloc_ioas()?;
    let device = pci::Device(EDU);
    device.bind_to_vfio()?;
    let (_device, id) = VfioDevice::open_cdev(&device.cdev()?, &iommufd)?;
    ensure!(!iommufd.hw_info(id)?.dirty_tracking, "it says that it can");
    match iommufd.alloc_hwpt(id, ioas, true) {
        Err(KernelError::Refused { errno, .. }) if errno == Errno::EOPNOTSUPP.0 => Ok(()),
        other => bail!("{other:?}"),
    }
}

/// An address space with a mock, and where memory is mapped for it to be written.
struct Mocked {
    owner: iommufd::Iommufd,
    ioas: Ioas,
    number: IoasId,
    mock: Arc<Mock>,
    mapped: Span<Iova>,
}

impl Mocked {
    fn new() -> anyhow::Result<Self> {
        let owner = Iommufd::file()?;
        let mapper = SpaceMapper::<Mock>::for_devices(&owner)?;
        // A large leaf is dirty as a whole.
        mapper.set_huge_pages(false)?;
        let number = mapper.id();
        let ioas = Ioas::over_mapper(mapper);
        let mock = Arc::new(Mock::new(&owner, true)?);
        ioas.attach(mock.clone())?;
        let mapping = memory(Backing::Anon4K, SIZE)?;
        let memory = host_memory(&mapping, &Ledger::unlimited())?;
        let mapped = Span::new(APERTURE.0 + SIZE, SIZE);
        ioas.map(mapped.start, &memory, Span::new(0, SIZE), Prot::RW)?;
        Ok(Self {
            owner,
            ioas,
            number,
            mock,
            mapped,
        })
    }

    /// The mock writes to these pages.
    fn write(&self, pages: &[u64]) -> anyhow::Result<()> {
        let mut bits = [0; (SIZE / PAGE / 64) as usize];
        for page in pages {
            bits[(page / 64) as usize] |= 1 << (page % 64);
        }
        let written = self.mock.write(self.mapped.start, PAGE, &bits)?;
        ensure!(written == pages.len() as u64, "{written} pages written");
        Ok(())
    }

    /// Looks whether these pages are dirty, and no others.
    fn look(&mut self, pages: &[Span<Iova>]) -> anyhow::Result<()> {
        let around = Span::new(self.mapped.start - SIZE, 4 * SIZE);
        let right: Vec<Span<Iova>> = pages
            .iter()
            .map(|pages| Span::new(self.mapped.start + pages.start * PAGE, pages.len * PAGE))
            .collect();
        let found = harvest(&self.ioas, around)?;
        ensure!(found == (right.clone(), false), "{found:?}, not {right:?}");
        Ok(())
    }
}

/// Writes are reported once, exactly; also those to unmapped memory.
pub(crate) fn dirty() -> anyhow::Result<()> {
    let mut mocked = Mocked::new()?;
    ensure!(mocked.ioas.capabilities().page_dirty, "it cannot tell");
    mocked.ioas.track_dirty(Tracking::default())?;
    mocked.look(&[])?;
    mocked.write(&[0, 3, 4, 64, 255])?;
    mocked.look(&[
        Span::new(0, 1),
        Span::new(3, 2),
        Span::new(64, 1),
        Span::new(255, 1),
    ])?;
    mocked.look(&[])?;
    // Half of it is asked for; the other half is there later.
    mocked.write(&[7, 200])?;
    let half = Span::new(mocked.mapped.start, SIZE / 2);
    let (found, _) = harvest(&mocked.ioas, half)?;
    ensure!(
        found == [Span::new(half.start + 7 * PAGE, PAGE)],
        "{found:?}"
    );
    mocked.look(&[Span::new(200, 1)])?;
    mocked.write(&[9])?;
    let (all, page) = (
        mocked.mapped,
        Span::new(mocked.mapped.start + 9 * PAGE, PAGE),
    );
    let mut pending = Pending::new(vec![0; 4], all, PAGE)?;
    mocked.ioas.unmap_noting(all, &mut pending)?;
    let shown: Vec<Span<Iova>> = mocked.ioas.show(&mut pending)?.runs().collect();
    ensure!(shown == [page], "{shown:?}");
    mocked.ioas.untrack_dirty();
    Ok(())
}

/// A second device, which cannot tell, makes everything dirty, once more after it has gone; then the
/// first one tells again.
pub(crate) fn one_is_blind() -> anyhow::Result<()> {
    let mut mocked = Mocked::new()?;
    mocked.ioas.track_dirty(Tracking::default())?;
    let second = Arc::new(Mock::new(&mocked.owner, false)?);
    mocked.ioas.attach(second.clone())?;
    ensure!(!mocked.ioas.capabilities().page_dirty, "both can tell");
    mocked.write(&[5])?;
    let found = harvest(&mocked.ioas, mocked.mapped)?;
    ensure!(found == (vec![mocked.mapped], true), "{found:?}");
    mocked.ioas.detach(&second)?;
    let found = harvest(&mocked.ioas, mocked.mapped)?;
    ensure!(found == (vec![mocked.mapped], true), "{found:?}");
    mocked.write(&[6])?;
    mocked.look(&[Span::new(6, 1)])
}

/// Drivers in the kernel let go of their pages before an unmap of them has ended.
pub(crate) fn users_let_go() -> anyhow::Result<()> {
    let mocked = Mocked::new()?;
    let access = Access::new(&mocked.owner, mocked.number)?;
    let pages = Span::new(mocked.mapped.start + 3 * PAGE, 2 * PAGE);
    let [first, second] = [access.pin(pages)?, access.pin(pages)?];
    access.unpin(first)?;
    mocked.ioas.unmap(mocked.mapped)?;
    match access.unpin(second) {
        Err(KernelError::Refused { errno, .. }) if errno == Errno::ENOENT.0 => Ok(()),
        other => bail!("it held on: {other:?}"),
    }
}

/// Memory with a queue of the hardware is not unmapped: the error has a name, and nothing has
/// changed.
pub(crate) fn queues_hold_on() -> anyhow::Result<()> {
    let mut mocked = Mocked::new()?;
    let owner = mocked.owner.clone();
    let page = Span::new(mocked.mapped.start + 3 * PAGE, PAGE);
    let space = mocked.number;
    let queue = Queue::new(&owner, &mocked.mock, space, page)?;
    let refused = mocked.ioas.unmap(mocked.mapped);
    ensure!(
        matches!(refused, Err(UnmapError::Held { range, .. }) if range == mocked.mapped),
        "{refused:?}"
    );
    ensure!(
        mocked.ioas.area_at(page.start).is_some(),
        "the area is gone"
    );
    mocked.ioas.track_dirty(Tracking::default())?;
    mocked.write(&[3])?;
    mocked.look(&[Span::new(3, 1)])?;
    queue.remove()?;
    let unmapped = mocked.ioas.unmap(mocked.mapped)?;
    ensure!(unmapped.bytes == SIZE, "{unmapped:?}");
    Ok(())
}
