//! The client's memory as an address space.
//!
//! # Files
//!
//! A client maps memory as a part of a file. With an IOMMU in the guest it maps and unmaps single pages of one file by
//! the thousand, so that a file is mapped into this process once and whole, when its first part is mapped, and unmapped
//! with its last. A file is identified by its device, inode and length: one that has grown is another one.
//!
//! Each file is a memory object ([`FixedRuns`]) at addresses that stand in for physical ones: a window of its length, in
//! which no other file lies. Tables hold these addresses; `vm-memory` finds the bytes behind them. Nothing is
//! pinned, because the only devices are software: they reach pages through the process's own mapping, wherever the
//! kernel moves them. So it takes no longer to map 16 GiB than to map a page.
//!
//! # Unmapping
//!
//! `Ioas::unmap` empties tables, flushes the unit, and waits for the device models' accesses
//! (`translation.rs`). Then files without a map are unmapped from this process, after device models have dropped
//! the views ([`ClientMemory::view`]) that hold them. Only then is the reply sent.
//!
//! A range is unmapped as VFIO does it: all maps in it, none cut, and nothing where there is none. The specification
//! asks for exactly one; QEMU (11.1) sends whole windows for a guest that resets its IOMMU or clears a large entry.
//!
//! # What is not trusted
//!
//! A file must lie on `tmpfs` or `hugetlbfs`, and be sealed against becoming shorter, or the program must have
//! [asked](hostmem::ShrinkWatch::install) for the signal that an access to lost pages brings. Files elsewhere are not even
//! looked at, since that may block ([`PeerFile`]). Maps, files, their bytes, and tables are bounded by [`ClientLimits`].

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::thread;
use std::time::{Duration, Instant};

use hostmem::{Mapping, PeerFile, ShrinkWatch};
use ioas::{
    AttachError, DomainIds, FixedRuns, Ioas, Ledger, Listener, Memory, TableBuilder, Tracking,
};
use iommu::{DeviceId, Fault, SoftwareConfig, SoftwareUnit, Unit as _};
use iopt::{ArenaError, FormatId, HeapTables, Interruption, Pending, PendingHarvest, Prot};
use runs::{Iova, Pa, Span};
use rustix::fs::{
    AtFlags, FileType, SealFlags, StatxFlags, fcntl_get_seals, fstat, fstatfs, statx,
};
use vm_memory::{
    FileOffset, GuestAddress, GuestMemoryMmap, GuestMemoryRegion, GuestRegionMmap, IommuMemory,
};

use crate::error::{DirtyRefusal, MapRefusal, UnmapRefusal};
use crate::translation::{Unit, UnitIommu};
use crate::unreported::Unreported;
use crate::wire::MOST_DATA;

/// The device, as the unit and its faults name it.
const DEVICE: DeviceId = DeviceId::pci(0, 0, 0);
/// The smallest page.
const PAGE: u64 = 4096;
/// Addresses for files: above what a machine has, and below what tables of every format hold.
const WINDOWS: Span<Pa> = Span::new(1 << 40, (1 << 51) - (1 << 40));
/// `f_type` of memory files of huge pages. Source: statfs(2).
const HUGETLBFS: u64 = 0x9584_58f6;

/// Limits on what a client may take of this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClientLimits {
    /// Maps at the same time (`max_dma_maps`).
    pub maps: usize,
    /// Memory files at the same time; each costs a file descriptor or two.
    pub files: usize,
    /// Bytes of these files together.
    pub file_bytes: u64,
    /// Pages of 4 KiB for tables, rounded up to a power of two.
    pub tables: u64,
    /// Time that an unmap waits for a device model's access under way.
    pub wait: Duration,
    /// Time that the client may leave a reply unread.
    pub reply: Duration,
}

impl Default for ClientLimits {
    /// 65,535 maps as the specification has it, 256 files of 16 TiB together, 16 MiB of tables, 5 seconds and 10.
    fn default() -> Self {
        Self {
            maps: 65_535,
            files: 256,
            file_bytes: 1 << 44,
            tables: 4096,
            wait: Duration::from_secs(5),
            reply: Duration::from_secs(10),
        }
    }
}

/// The client's memory as a device model sees it: by device address, through the unit. It implements
/// [`vm_memory::GuestMemory`] and [`vm_memory::Bytes`], which queues of `virtio-queue` use.
pub type View = IommuMemory<GuestMemoryMmap, UnitIommu>;

/// The client's memory: its mappings, and a device model's access to them.
pub struct ClientMemory {
    space: Ioas,
    unit: Unit,
    iommu: Arc<UnitIommu>,
    tables: Arc<HeapTables>,
    limits: ClientLimits,
    view: RwLock<Arc<View>>,
    maps: Mutex<Maps>,
    unreported: Mutex<Unreported>,
}

#[derive(Default)]
struct Maps {
    /// Maps by device address.
    maps: BTreeMap<u64, Map>,
    files: BTreeMap<FileKey, MemoryFile>,
    /// Files without a map whose memory was in use for too long, or whose unmapping was not flushed.
    leaving: Vec<MemoryFile>,
}

/// A map of the client.
struct Map {
    len: u64,
    /// `None` for memory that the client does not share: a device's access to it is a fault.
    file: Option<FileKey>,
}

/// Identity of a file: device, inode, bytes.
type FileKey = (u64, u64, u64);

struct MemoryFile {
    region: Arc<GuestRegionMmap>,
    memory: Arc<Memory>,
    /// `None` for a file that cannot become shorter, and has a page for each access.
    watch: Option<ShrinkWatch>,
    maps: usize,
}

/// Amounts in use: see [`ClientMemory::counts`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Maps, with those of memory that is not shared.
    pub maps: usize,
    /// Their bytes.
    pub bytes: u64,
    /// Files, with those that could not be unmapped yet.
    pub files: usize,
    /// Pages of tables in use.
    pub tables: u64,
}

fn overlapping(maps: &BTreeMap<u64, Map>, range: Span<Iova>) -> Option<Span<Iova>> {
    let last = maps.range(..=range.last()).next_back();
    let there = last.map(|(start, map)| Span::new(*start, map.len))?;
    there.overlaps(&range).then_some(there)
}

impl ClientMemory {
    /// No memory yet.
    ///
    /// # Errors
    ///
    /// When there is no room for the tables.
    pub(crate) fn new(limits: ClientLimits) -> Result<Arc<Self>, ServerSetupError> {
        let tables = HeapTables::with_tables(limits.tables);
        let tables = Arc::new(tables.map_err(ServerSetupError::Tables)?);
        let mut config = SoftwareConfig {
            flush_timeout: limits.wait,
            ..SoftwareConfig::default()
        };
        config.capabilities.dirty_tracking = true;
        let unit = SoftwareUnit::with_config(tables.clone(), (), config);
        let builder = TableBuilder::new(tables.clone(), DomainIds::new(16), [FormatId::VtdSs]);
        let space = Ioas::over_tables(builder);
        space.attach((Arc::new(unit.clone()), DEVICE))?;
        let view = View::new(
            GuestMemoryMmap::new(),
            UnitIommu::new(unit.clone(), DEVICE, limits.wait),
            true,
            (),
        );
        let iommu = Arc::clone(view.iommu());
        space.add_listener(Arc::clone(&iommu) as Arc<dyn Listener>);
        Ok(Arc::new(Self {
            space,
            unit,
            iommu,
            tables,
            limits,
            view: RwLock::new(Arc::new(view)),
            maps: Mutex::default(),
            unreported: Mutex::default(),
        }))
    }

    fn lock(&self) -> MutexGuard<'_, Maps> {
        self.maps.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The memory as it is now. Accesses go through the unit at any time; files that are mapped later are not in it.
    /// So a device model takes one for what it finds to be done, and drops it soon: the client's unmap waits for
    /// that, up to [`ClientLimits::wait`].
    pub fn view(&self) -> Arc<View> {
        Arc::clone(&self.view.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Passes on the faults of the device's accesses since the last call. Returns how many were lost, because too
    /// many came.
    pub fn drain_faults(&self, sink: &mut dyn FnMut(Fault)) -> u64 {
        self.unit.drain_faults(sink)
    }

    /// Numbers of maps and files, and their bytes.
    pub fn counts(&self) -> Counts {
        let maps = self.lock();
        Counts {
            maps: maps.maps.len(),
            // Memory that is not shared may fill all of the addresses.
            bytes: maps
                .maps
                .values()
                .fold(0, |bytes, map| bytes.saturating_add(map.len)),
            files: maps.files.len() + maps.leaving.len(),
            tables: self.tables.in_use(),
        }
    }

    pub(crate) const fn limits(&self) -> &ClientLimits {
        &self.limits
    }

    /// Maps `size` bytes of `file` from `offset` on at `iova`, or without a file memory that is not shared.
    pub(crate) fn map(
        &self,
        prot: Prot,
        offset: u64,
        iova: u64,
        size: u64,
        file: Option<PeerFile>,
    ) -> Result<(), MapRefusal> {
        let range = Span::<Iova>::checked(iova, size).filter(|range| range.is_aligned(PAGE));
        let end = offset.checked_add(size).filter(|_| offset % PAGE == 0);
        let (Some(range), Some(end), 1..) = (range, end, size) else {
            return Err(MapRefusal::Range { iova, size, offset });
        };
        let maps = &mut *self.lock();
        if let Some(there) = overlapping(&maps.maps, range) {
            let wanted = range;
            return Err(MapRefusal::Exists { wanted, there });
        }
        if maps.maps.len() >= self.limits.maps {
            let most = self.limits.maps;
            return Err(MapRefusal::TooMany { most });
        }
        let key = match file {
            None => None,
            Some(file) => {
                let file = file.into_memory().map_err(|file| not_memory(&file))?;
                let (key, page) = identify(&file)?;
                let len = key.2 - key.2 % page;
                if end > len {
                    let file = len;
                    return Err(MapRefusal::BeyondFile { size, offset, file });
                }
                if !maps.files.contains_key(&key) {
                    let opened = self.open(maps, file, len, page)?;
                    maps.files.insert(key, opened);
                }
                Some(key)
            }
        };
        if let Some(file) = key.and_then(|key| maps.files.get_mut(&key)) {
            let part = Span::new(offset, size);
            let mapped = self.space.map(iova, &file.memory, part, prot);
            match mapped {
                Ok(()) => file.maps += 1,
                Err(cause) => {
                    // A file that came with this map goes with it.
                    let _ = self.release(maps);
                    return Err(cause.into());
                }
            }
        }
        let len = size;
        maps.maps.insert(iova, Map { len, file: key });
        Ok(())
    }

    /// Maps a file into this process, as a whole.
    fn open(
        &self,
        maps: &Maps,
        file: OwnedFd,
        len: u64,
        page: u64,
    ) -> Result<MemoryFile, MapRefusal> {
        let there = || maps.files.values().chain(&maps.leaving);
        let most = self.limits.files;
        if there().count() >= most {
            return Err(MapRefusal::TooManyFiles { most });
        }
        let wanted = there().map(|file| file.region.len()).sum::<u64>();
        let wanted = wanted.saturating_add(len);
        let most = self.limits.file_bytes;
        if wanted > most {
            return Err(MapRefusal::TooLong { wanted, most });
        }
        let taken = there().map(|file| Span::new(file.region.start_addr().0, file.region.len()));
        let window = window(taken, len).ok_or(MapRefusal::NoWindow { len })?;
        let failed = |step| move |source| MapRefusal::File { step, source };
        // A file that has no seals has not got this one. A page of a pool may be missing at any time, whatever the seals.
        let seals = fcntl_get_seals(&file).unwrap_or(SealFlags::empty());
        let keeps = seals.contains(SealFlags::SHRINK) && page == PAGE;
        let place = FileOffset::new(File::from(file), 0);
        let region = GuestRegionMmap::from_range(GuestAddress(window), len as usize, Some(place));
        let region = region.map_err(io::Error::other);
        let region = Arc::new(region.map_err(failed("mapped"))?);
        let watch = match keeps {
            true => None,
            false => {
                let mapping = Mapping::of_guest_region(&*region).map_err(io::Error::other);
                let mapping = Arc::new(mapping.map_err(failed("watched"))?);
                let watch = ShrinkWatch::new(mapping).map_err(io::Error::other);
                let watch = watch.map_err(failed("watched"))?;
                Some(watch.ok_or(MapRefusal::CanShrink)?)
            }
        };
        let runs = FixedRuns::new([Span::new(window, len)], PAGE).map_err(io::Error::other);
        let runs = runs.map_err(failed("placed"))?;
        self.show(|backend| {
            backend
                .insert_region(region.clone())
                .map_err(io::Error::other)
        })
        .map_err(failed("placed"))?;
        Ok(MemoryFile {
            region,
            memory: Memory::new(Arc::new(runs), &Ledger::unlimited()),
            watch,
            maps: 0,
        })
    }

    /// Gives views of other memory from now on.
    fn show<E>(
        &self,
        change: impl FnOnce(&GuestMemoryMmap) -> Result<GuestMemoryMmap, E>,
    ) -> Result<(), E> {
        let mut view = self.view.write().unwrap_or_else(PoisonError::into_inner);
        let backend = change(view.get_backend())?;
        *view = Arc::new(view.with_replaced_backend(backend));
        Ok(())
    }

    /// Unmaps all maps in `size` bytes from `iova` on. Returns their number.
    pub(crate) fn unmap(&self, iova: u64, size: u64) -> Result<usize, UnmapRefusal> {
        let range = Span::<Iova>::checked(iova, size).filter(|range| !range.is_empty());
        let range = range.ok_or(UnmapRefusal::Range { iova, size })?;
        let maps = &mut *self.lock();
        let before = maps.maps.range(..iova).next_back();
        let inside = maps.maps.range(iova..=range.last());
        let all = before.into_iter().chain(inside);
        let all = all.map(|(start, map)| Span::new(*start, map.len));
        let all: Vec<Span<Iova>> = all.filter(|map| map.overlaps(&range)).collect();
        if let Some(map) = all.iter().find(|map| !range.covers(map)) {
            let map = *map;
            return Err(UnmapRefusal::Cuts { range, map });
        }
        self.remove(maps, &all)?;
        Ok(all.len())
    }

    /// Unmaps everything.
    pub(crate) fn unmap_all(&self) -> Result<(), UnmapRefusal> {
        let maps = &mut *self.lock();
        let all = maps.maps.iter();
        let all: Vec<_> = all.map(|(start, map)| Span::new(*start, map.len)).collect();
        self.remove(maps, &all)
    }

    /// Unmaps `all`, which are maps one after the other with no other between them.
    fn remove(&self, maps: &mut Maps, all: &[Span<Iova>]) -> Result<(), UnmapRefusal> {
        let shared = |map: &&Span<Iova>| {
            let map = maps.maps.get(&map.start);
            map.is_some_and(|map| map.file.is_some())
        };
        let mut mapped = all.iter().filter(shared);
        let (first, last) = (mapped.next(), mapped.next_back());
        let unmapped = match first {
            None => Ok(ioas::Unmapped::default()),
            Some(first) => {
                let last = last.unwrap_or(first);
                let hull = Span::new(first.start, last.last() - first.start + 1);
                self.space.unmap(hull)
            }
        };
        // After a flush that has failed they are in no area, but an access may still be under way.
        let flushed = match unmapped {
            Err(cause @ ioas::UnmapError::Flush(_)) => Err(cause),
            Err(cause) => return Err(cause.into()),
            Ok(_) => Ok(()),
        };
        for map in all {
            let file = maps.maps.remove(&map.start).and_then(|map| map.file);
            if let Some(file) = file.and_then(|key| maps.files.get_mut(&key)) {
                file.maps -= 1;
            }
        }
        flushed?;
        self.release(maps)
    }

    /// Unmaps files without a map from this process, after a flush that has failed before.
    fn release(&self, maps: &mut Maps) -> Result<(), UnmapRefusal> {
        if self.space.retired() > 0 {
            self.space.flush()?;
        }
        let gone: Vec<FileKey> = maps
            .files
            .iter()
            .filter(|(_, file)| file.maps == 0)
            .map(|(key, _)| *key)
            .collect();
        for key in gone {
            maps.leaving.extend(maps.files.remove(&key));
        }
        if maps.leaving.is_empty() {
            return Ok(());
        }
        for file in &maps.leaving {
            let (at, len) = (file.region.start_addr(), file.region.len());
            // One that was in use for too long has left the views already.
            let _ = self.show(|backend| backend.remove_region(at, len).map(|(rest, _)| rest));
        }
        let begun = Instant::now();
        loop {
            // The file itself holds its region once; the others are views.
            maps.leaving
                .retain(|file| Arc::strong_count(&file.region) > 1);
            if maps.leaving.is_empty() {
                return Ok(());
            }
            let waited = begun.elapsed();
            if waited >= self.limits.wait {
                let waited_ms = waited.as_millis() as u64;
                return Err(UnmapRefusal::InUse { waited_ms });
            }
            thread::sleep(Duration::from_micros(50));
        }
    }

    /// Page that an access has found missing: the offset in its file.
    pub(crate) fn lost(&self) -> Option<u64> {
        let maps = self.lock();
        let mut watches = maps.files.values().filter_map(|file| file.watch.as_ref());
        watches.find_map(ShrinkWatch::lost).map(|lost| lost.offset)
    }

    /// Tracks what the device writes to, from now on.
    pub(crate) fn track(&self) -> Result<(), DirtyRefusal> {
        let tracking = Tracking {
            leaf: Some(PAGE),
            interruption: Interruption::Refused,
        };
        self.space.track_dirty(tracking)?;
        *self.unreported() = Unreported::default();
        Ok(())
    }

    pub(crate) fn untrack(&self) {
        self.space.untrack_dirty();
        *self.unreported() = Unreported::default();
    }

    fn unreported(&self) -> MutexGuard<'_, Unreported> {
        let unreported = self.unreported.lock();
        unreported.unwrap_or_else(PoisonError::into_inner)
    }

    /// A bitmap to report: a bit for each `page` bytes of `len` bytes from `iova` on. It has a word for each 64 of them.
    pub(crate) fn bitmap(
        &self,
        iova: u64,
        len: u64,
        page: u64,
    ) -> Result<Pending<Vec<u64>>, DirtyRefusal> {
        if !self.space.tracks_dirty() {
            return Err(DirtyRefusal::NotTracked);
        }
        if !page.is_power_of_two() || page < PAGE {
            return Err(DirtyRefusal::Page { page });
        }
        let refused = DirtyRefusal::Bitmap { iova, len, page };
        let words = len.div_ceil(page).div_ceil(64);
        let fits = words > 0 && words * 8 <= MOST_DATA as u64 && iova % page == 0;
        let span = Span::<Iova>::checked(iova, len).filter(|_| fits);
        let pending = span.map(|span| Pending::new(vec![0; words as usize], span, page));
        pending.and_then(Result::ok).ok_or(refused)
    }

    /// Reports pages that the device has written to since they were reported last, as the words of `pending`. A report
    /// that is refused leaves them for the next ones.
    pub(crate) fn written(&self, mut pending: Pending<Vec<u64>>) -> Result<Vec<u64>, DirtyRefusal> {
        let span = pending.span();
        let unreported = &mut *self.unreported();
        if let Some(mut earlier) = unreported.pending.take() {
            let of = earlier.span();
            let shown = self.shown(&mut earlier);
            if let Err(refused) = shown.map(|shown| unreported.flushed(of, shown.runs())) {
                unreported.pending = Some(earlier);
                return Err(refused);
            }
        }
        unreported.mark(&mut pending);
        let pending = unreported.pending.insert(pending);
        self.space.harvest(pending)?;
        let words = self.shown(pending)?.words().to_vec();
        unreported.pending = None;
        unreported.reported(span);
        Ok(words)
    }

    /// Flushes what was harvested, and waits until it can be copied.
    fn shown<'p>(
        &self,
        pending: &'p mut Pending<Vec<u64>>,
    ) -> Result<PendingHarvest<'p, Vec<u64>>, DirtyRefusal> {
        let range = pending.span();
        let shown = self.space.show(pending)?;
        // An access that has marked its page may still be copying: it is over when the client reads the page.
        let settled = self.iommu.settle();
        settled.map_err(|waited| iommu::FlushError::Held { range, waited })?;
        Ok(shown)
    }
}

/// Failure to make a server.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServerSetupError {
    /// No room for tables.
    #[error("no room for page tables")]
    Tables(#[source] ArenaError),
    /// The software unit refuses.
    #[error(transparent)]
    Attach(#[from] AttachError),
    /// A socket or an event cannot be set up.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// Identity of a file, and its page.
fn identify(file: &OwnedFd) -> Result<(FileKey, u64), MapRefusal> {
    let failed = |errno: rustix::io::Errno| MapRefusal::File {
        step: "looked at",
        source: errno.into(),
    };
    let about = fstat(file).map_err(failed)?;
    let system = fstatfs(file).map_err(failed)?;
    let page = match system.f_type as u64 {
        HUGETLBFS => (system.f_bsize as u64).max(PAGE),
        _ => PAGE,
    };
    let key = (about.st_dev, about.st_ino, about.st_size as u64);
    Ok((key, page))
}

/// The refusal of a file that is none of memory, with its type. Its file system is not asked, which may block: the kernel's
/// own knowledge will do (`AT_STATX_DONT_SYNC`, and no field is wanted).
fn not_memory(file: &PeerFile) -> MapRefusal {
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    let about = statx(file, "", flags, StatxFlags::empty());
    let mode = about.map_or(0, |about| about.stx_mode.into());
    let kind = match FileType::from_raw_mode(mode) {
        FileType::RegularFile => "a file of a file system that is no memory",
        FileType::Directory => "a directory",
        FileType::Socket => "a socket",
        FileType::Fifo => "a pipe",
        FileType::CharacterDevice => "a character device",
        FileType::BlockDevice => "a block device",
        _ => "a file without a type",
    };
    MapRefusal::NotMemory { kind }
}

/// The lowest room for `len` bytes beside `taken`, so that large leaves are possible.
fn window(taken: impl Iterator<Item = Span<Pa>>, len: u64) -> Option<u64> {
    let align = if len >= 1 << 30 { 1 << 30 } else { 2 << 20 };
    let mut taken: Vec<Span<Pa>> = taken.collect();
    taken.sort_by_key(|span| span.start);
    let mut start = WINDOWS.start;
    for there in taken {
        // A multiple of 1 GiB may lie behind several small files.
        if start.checked_add(len)? <= there.start {
            break;
        }
        start = (there.last() + 1).next_multiple_of(align);
    }
    let end = start.checked_add(len)?;
    (end <= WINDOWS.last() + 1).then_some(start)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const GIB: u64 = 1 << 30;

    /// The lowest multiple of the alignment at which `len` bytes lie beside `taken`.
    fn model(taken: &[Span<Pa>], len: u64) -> Option<u64> {
        let align = if len >= GIB { GIB } else { 2 << 20 };
        let ends = taken.iter().map(|span| span.last() + 1);
        let starts = ends.chain([WINDOWS.start]);
        let starts = starts.map(|start| start.next_multiple_of(align));
        let windows = starts.map(|start| Span::<Pa>::new(start, len));
        let free = windows.filter(|window| WINDOWS.covers(window));
        let free = free.filter(|window| !taken.iter().any(|span| span.overlaps(window)));
        free.map(|window| window.start).min()
    }

    /// Lengths of files: whole pages, small and large.
    fn lengths() -> impl Strategy<Value = u64> {
        let units = prop_oneof![Just(PAGE), Just(2 << 20), Just(GIB), Just(1 << 45)];
        (units, 1..6_u64, 0..2_u64).prop_map(|(unit, count, more)| unit * count + more * PAGE)
    }

    proptest! {
        #[test]
        fn files_that_come_and_go_lie_beside_each_other_and_as_low_as_they_can(
            steps in prop::collection::vec((lengths(), any::<prop::sample::Index>(), 0..3), 1..60),
        ) {
            let mut taken: Vec<Span<Pa>> = Vec::new();
            for (len, which, leave) in steps {
                if leave == 0 && !taken.is_empty() {
                    taken.swap_remove(which.index(taken.len()));
                }
                let found = window(taken.iter().copied(), len);
                prop_assert_eq!(found, model(&taken, len), "{} beside {:?}", len, taken);
                taken.extend(found.map(|start| Span::new(start, len)));
            }
        }
    }
}
