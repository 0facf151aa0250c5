//! One container of VFIO's type 1, or one address space of iommufd: its mappings, and the devices that
//! see them.
//!
//! The kernel pins memory, charges it and fills page tables, all in one call. The ledger keeps the
//! same account, before the call, so that what cannot succeed is refused with numbers. Memory is
//! given by its address in this process, or as a memory file: an object that has neither is refused
//! by name.
//!
//! Areas that are there before the first device comes are mapped when it comes, in as few
//! [pieces](super::pieces) as the granule allows. Each later one is a piece of its own, or several.
//! When a kernel that has few entries has no more of them, pieces are merged as areas would have been
//! in the beginning, if the caller has [allowed](crate::Ioas::set_merging) the gaps that this makes.

use std::boxed::Box;
use std::sync::Arc;
use std::vec;
use std::vec::Vec;

use iommu::NodeId;
use iopt::{Aperture, Interruption, Pending, Prot, RangeError};
use runs::{Iova, Span};

use super::cause::MapRequest;
use super::mapper::{Entering, MapSource, Mapper, MapperInfo};
use super::mappings::{Journal, Mappings, source};
use super::pieces::{Piece, Pieces, Stretch, cut, groups, stretches};
use super::refusals::{Refused, attach_refused, detach_refused, errno, map_refused, no_memory};
use super::shares::{Pages, Share};
use crate::areas::Areas;
use crate::areas::area::HeldArea;
use crate::capability::{Capability, Unsupported};
use crate::errno::{Errno, Profile};
use crate::kernel_error::KernelError;
use crate::memory::ledger::{Charge, Forecast, Ledger};
use crate::observer::{Observer, Step, observed};
use crate::ranges::windows::{outside, within};
use crate::space::backend::Capabilities;
use crate::space::dirty::{HarvestError, Harvested, TrackingError};
use crate::space::dirty_log::DirtyLog;
use crate::space::endpoint::EndpointId;
use crate::space::error::{AttachError, DetachError, MapError, UnmapError};
use crate::space::placement::{Place, Placement};
use crate::space::reservation::ForReleased;

/// One container, or one address space of iommufd.
pub(super) struct KernelSpace<K: Mapper> {
    pub(super) mapped: Mappings<K>,
    pub(super) devices: Vec<Arc<K::Device>>,
    pub(super) info: MapperInfo,
    pub(super) windows: Vec<Span<Iova>>,
    /// The most pieces that the kernel takes.
    pub(super) most: Option<u64>,
    /// Pieces end at its multiples, bytes.
    granule: Option<u64>,
    pub(super) merging: Interruption,
    pub(super) placement: Placement,
    /// Dirty pages can be read.
    pub(super) bitmaps: bool,
    /// Pages that were read as dirty, or could be written to by devices that have left, and are not harvested yet.
    pub(super) carried: DirtyLog,
}

impl<K: Mapper> core::fmt::Debug for KernelSpace<K> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("KernelSpace")
            .field("profile", &K::PROFILE)
            .field("pieces", &self.mapped.pieces.len())
            .finish_non_exhaustive()
    }
}

/// Parts that are mapped by one call each; those that are copied with the pages that they get.
pub(super) type Plan = Vec<(Stretch, Option<Arc<Pages>>)>;

/// Charges `bytes` in one step.
pub(super) fn charged(
    ledger: &Arc<Ledger>,
    bytes: u64,
    observer: &mut dyn Observer,
) -> Result<Charge, MapError> {
    observed(observer, Step::Charge, |_| {
        let charge = ledger.charge(bytes).map_err(MapError::OverLimit)?;
        Ok((charge, bytes))
    })
}

/// Answer to whether `needed` bytes fit on the account that the kernel charges; where the mapper does not know that, on
/// `ledger`, if it has a limit.
fn room<K: Mapper>(mapper: &K, ledger: &Ledger, needed: u64) -> Option<Forecast> {
    match mapper.account() {
        Some(account) => Some(account.forecast(needed)),
        None => ledger.limit().map(|_| ledger.forecast(needed)),
    }
}

/// Limits known without a device.
const UNKNOWN: MapperInfo = MapperInfo {
    granule: 1,
    ranges: None,
    available: None,
    page_sizes: None,
};

impl<K: Mapper> KernelSpace<K> {
    /// Over `mapper`, to which nothing is attached and which maps nothing; see [`Kernel::new`](super::Kernel::new).
    pub(super) fn new(mapper: K, granule: Option<u64>) -> Self {
        Self {
            mapped: Mappings {
                mapper,
                pieces: Pieces::default(),
            },
            devices: Vec::new(),
            info: UNKNOWN,
            windows: Aperture::zeros(64).spans().collect(),
            most: None,
            granule: granule.map(|bytes| {
                bytes
                    .max(4096)
                    .checked_next_power_of_two()
                    .unwrap_or(1 << 63)
            }),
            merging: Interruption::Refused,
            placement: Placement::default(),
            bitmaps: false,
            carried: DirtyLog::default(),
        }
    }

    /// The kernel interface that maps.
    pub(super) const fn mapper(&self) -> &K {
        &self.mapped.mapper
    }

    /// Ranges that the kernel has mapped, in order: its mappings, not the areas.
    pub(super) fn pieces(&self) -> impl Iterator<Item = Span<Iova>> + '_ {
        self.mapped.pieces.iter().map(|piece| piece.stretch.range)
    }

    /// Bytes that the kernel has charged for its mappings; what is copied from others is charged there.
    pub(super) fn charged(&self) -> u64 {
        let fresh = self.mapped.pieces.iter().filter(|piece| !piece.copied);
        fresh.map(|piece| piece.stretch.charge()).sum()
    }

    pub(super) const fn unsupported(what: Capability) -> Unsupported {
        Unsupported {
            what,
            backend: K::PROFILE.name(),
        }
    }

    /// Learns what can be mapped now.
    pub(super) fn learn(&mut self) -> Result<(), KernelError> {
        self.info = if self.devices.is_empty() {
            UNKNOWN
        } else {
            self.mapped.mapper.info()?
        };
        let used = self.mapped.pieces.len();
        self.most = self.info.available.map(|more| more.saturating_add(used));
        let whole: Vec<Span<Iova>> = Aperture::zeros(64).spans().collect();
        self.windows = match &self.info.ranges {
            None => whole,
            Some(ranges) => {
                let span = |range: &core::ops::RangeInclusive<u64>| {
                    Span::inclusive(*range.start(), *range.end())
                };
                let spans: Option<Vec<Span<Iova>>> = ranges.iter().map(span).collect();
                let mut windows = spans.map_or(whole.clone(), |spans| within(&whole, &spans));
                windows.sort_unstable();
                windows
            }
        };
        Ok(())
    }

    /// Mapping of `area`, if the kernel can map it.
    pub(super) fn mappable(area: &HeldArea) -> Result<Stretch, MapError> {
        let prot = area.prot;
        if !Prot::RW.contains(prot) {
            return Err(MapError::Prot { prot });
        }
        let stretch = Stretch::of(area);
        Self::check_source(&stretch)?;
        Ok(stretch)
    }

    /// Refuses memory that the kernel cannot map.
    pub(super) fn check_source(stretch: &Stretch) -> Result<(), MapError> {
        match source(&**stretch.memory.object(), stretch.offset, K::PROFILE) {
            Some(_) => Ok(()),
            None => Err(MapError::Unsupported(Self::unsupported(
                Capability::FixedRuns,
            ))),
        }
    }

    /// The parts in which a stretch is mapped, for which there are entries.
    fn plan(&mut self, stretch: &Stretch) -> Result<Plan, MapError> {
        Self::check_source(stretch)?;
        let mut plan = Vec::new();
        for range in cut(stretch.range, self.granule) {
            self.mapped.plan(&stretch.at(range), &mut plan);
        }
        self.make_room(plan.len() as u64)?;
        Ok(plan)
    }

    /// Maps a part of a plan, which takes its charge out of `charge`.
    fn map_part(
        &mut self,
        part: &Stretch,
        shared: Option<&Arc<Pages>>,
        charge: &mut Charge,
        journal: &mut Journal,
        observer: &mut dyn Observer,
    ) -> Result<(), MapError> {
        let share = match shared {
            Some(pages) => Share::of(pages, part.part()),
            None => Share::new(charge.split(part.charge()), part.part()),
        };
        let piece = Piece {
            stretch: part.clone(),
            share,
            copied: shared.is_some(),
        };
        observed(observer, Step::FillTables, |_| {
            let put = self.mapped.put(piece, journal);
            put.map_err(|error| self.explain(error, part))?;
            Ok(((), part.range.len))
        })
    }

    /// Error of the kernel's refusal to map `part`, which is not charged any more.
    fn explain(&mut self, error: KernelError, part: &Stretch) -> MapError {
        // Windows change as other devices come and go.
        let _ = self.learn();
        let ledger = part.memory.ledger();
        let object = &**part.memory.object();
        let memory = match source(object, part.offset, K::PROFILE) {
            Some(MapSource::Address(start) | MapSource::File(_, start)) => start,
            _ => part.offset,
        };
        let asked = Refused {
            request: MapRequest {
                iova: Some(part.range.start),
                memory: Span::new(memory, part.range.len),
                prot: part.prot,
                registers: object.is_mmio(),
                granule: self.info.granule,
                windows: self.info.ranges.as_deref().unwrap_or_default(),
            },
            range: part.range,
            outside: outside(&self.windows, part.range),
            room: match errno(&error) {
                Some(Errno::ENOMEM) => room(self.mapper(), ledger, part.charge()),
                _ => None,
            },
            mappings: self.mapped.pieces.len(),
        };
        map_refused(K::PROFILE, error, &asked)
    }

    /// Sees to it that `more` pieces find entries.
    fn make_room(&mut self, more: u64) -> Result<(), MapError> {
        let Some(most) = self.most else {
            return Ok(());
        };
        let fits = |pieces: &Pieces| pieces.len() + more <= most;
        if !fits(&self.mapped.pieces) && self.merging == Interruption::Allowed {
            self.merge_pieces()?;
        }
        if fits(&self.mapped.pieces) {
            return Ok(());
        }
        let wanted = self.mapped.pieces.len() + more;
        Err(MapError::TooMany { wanted, most })
    }

    /// Has pieces that go on in each other between multiples of the granule be one. Each of them is
    /// missing for a moment.
    fn merge_pieces(&mut self) -> Result<(), MapError> {
        for group in groups(&self.mapped.pieces, self.granule) {
            // A range that is mapped anew has no dirty bits.
            let read = self.carry(group.range);
            read.map_err(|error| MapError::Kernel(Box::new(error)))?;
            let mut journal = Journal::default();
            let merged = self.mapped.merge(&group, &mut journal);
            if let Err(error) = merged {
                self.mapped.undo(journal);
                return Err(self.explain(error, &group));
            }
        }
        Ok(())
    }

    /// Lets a device in, and, if it is the first, maps all areas and charges those that are released.
    pub(super) fn enter(
        &mut self,
        device: Arc<K::Device>,
        dirty: bool,
        near: Option<NodeId>,
        areas: &Areas,
    ) -> Result<ForReleased, AttachError> {
        if self.devices.iter().any(|other| Arc::ptr_eq(other, &device)) {
            return Err(AttachError::AlreadyAttached);
        }
        let refused = |error| attach_refused(K::PROFILE, error);
        let with = Entering {
            dirty,
            near,
            placement: self.placement,
        };
        self.mapped.mapper.enter(&device, with).map_err(refused)?;
        let first = self.devices.is_empty();
        self.devices.push(Arc::clone(&device));
        let mut journal = Journal::default();
        let entered = self.learn().map_err(refused).and_then(|()| {
            // The mapper does it for a later device, since starting clears what is dirty.
            if dirty && first {
                self.bitmaps = self.mapped.mapper.set_tracking(true).is_ok();
            }
            if !first {
                return Ok(ForReleased::default());
            }
            // Unmaps pieces that could not be unmapped when the last device left.
            self.unmap_everything().map_err(refused)?;
            let charged = self.charge_released(areas)?;
            self.map_all(areas, &mut journal)?;
            Ok(charged)
        });
        if entered.is_err() {
            // It was attached for a moment, and what it wrote is not known.
            if dirty {
                self.carry_unseen();
            }
            self.mapped.undo(journal);
            self.devices.pop();
            let _ = self.mapped.mapper.leave(&device);
            self.mapped.mapper.left(&device);
            self.left();
        }
        entered
    }

    /// Charges what released areas keep of these mappings.
    pub(super) fn charge_released(&self, areas: &Areas) -> Result<ForReleased, AttachError> {
        let charged = areas.charge_released(self.mapper().shares().is_none().then_some(1));
        charged.map_err(|(area, cause)| AttachError::Replay { area, cause })
    }

    fn map_all(&mut self, areas: &Areas, journal: &mut Journal) -> Result<(), AttachError> {
        for stretch in stretches(areas) {
            let area = stretch.range;
            if let Some(reserved) = outside(&self.windows, area) {
                return Err(AttachError::Reserved { area, reserved });
            }
            let granule = self.info.granule;
            let mapped = if area.is_aligned(granule) {
                map_stretch(&mut [(self, journal)], &stretch, &mut ())
            } else {
                let misaligned = area.start % granule != 0;
                let value = if misaligned { area.start } else { area.len };
                Err(MapError::Range(RangeError::Misaligned { value, granule }))
            };
            mapped.map_err(|cause| AttachError::Replay { area, cause })?;
        }
        Ok(())
    }

    /// Index of the device among its devices.
    pub(super) fn place_of(&self, endpoint: EndpointId) -> Option<usize> {
        let mut devices = self.devices.iter();
        devices.position(|device| EndpointId::from(device) == endpoint)
    }

    /// Lets a device go. With the last one the kernel maps nothing any more. With `dirty`, what it wrote
    /// to is carried until it is harvested.
    pub(super) fn detach(&mut self, endpoint: EndpointId, dirty: bool) -> Result<(), DetachError> {
        let place = self.place_of(endpoint).ok_or(DetachError::Unknown)?;
        let device = &Arc::clone(&self.devices[place]);
        let blind = dirty && self.is_blind();
        // No device of a group that can leave its container is open, so that none writes after this.
        if dirty && !blind && K::PROFILE == Profile::Type1 {
            let read = self.carry_all();
            read.map_err(|error| detach_refused(&error))?;
        }
        let left = self.mapped.mapper.leave(device);
        left.map_err(|error| detach_refused(&error))?;
        // A device of iommufd may write until it is detached.
        if blind || (dirty && K::PROFILE == Profile::Iommufd && self.carry_all().is_err()) {
            self.carry_unseen();
        }
        self.mapped.mapper.left(device);
        self.devices.remove(place);
        self.left();
        Ok(())
    }

    /// A device has left.
    fn left(&mut self) {
        if self.devices.is_empty() {
            let starts: Vec<u64> = self.pieces().map(|range| range.start).collect();
            // A container without groups has no mappings, and takes no calls. (One that iommufd
            // plays has, and does.)
            if let Err(error) = self.unmap_everything() {
                if K::PROFILE == Profile::Type1 && errno(&error) == Some(Errno::EINVAL) {
                    self.mapped.remove(&starts);
                }
            }
        }
        // If it is not learned, the windows are narrower than they could be.
        let _ = self.learn();
    }

    pub(super) fn unmap_everything(&mut self) -> Result<(), KernelError> {
        let mut pieces = self.pieces();
        let Some(first) = pieces.next() else {
            return Ok(());
        };
        let last = pieces.last().unwrap_or(first);
        // Pieces never cover all of 2^64.
        let all = Span::inclusive(first.start, last.last()).unwrap_or(first);
        self.mapped.take(all, &mut Journal::default())
    }

    /// Ranges that devices may write to: the pieces with bytes in `span`.
    pub(super) fn writable(&self, span: Span<Iova>) -> Vec<Span<Iova>> {
        let pieces = self.mapped.pieces.overlapping(span.start, span.last());
        let writable = pieces.filter(|piece| piece.stretch.prot.contains(Prot::WRITE));
        writable.map(|piece| piece.stretch.range).collect()
    }

    /// Counts everything that devices may write to as written to, since no bits say what was.
    pub(super) fn carry_unseen(&mut self) {
        for half in Aperture::zeros(64).spans() {
            let writable = self.writable(half);
            let pieces = writable.into_iter();
            pieces.for_each(|piece| self.carried.add_unseen(piece));
        }
    }

    /// [Carries](Self::carry) what is dirty anywhere.
    fn carry_all(&mut self) -> Result<(), KernelError> {
        let mut halves = Aperture::zeros(64).spans();
        halves.try_for_each(|half| self.carry(half))
    }

    /// Reads what is dirty in `span`, with calls that cut no piece if this kernel wants that. The kernel
    /// drops it with that; here it stays until it is harvested, or unmapped.
    pub(super) fn carry(&mut self, span: Span<Iova>) -> Result<(), KernelError> {
        if !self.bitmaps {
            return Ok(());
        }
        for piece in self.writable(span) {
            let page = self.info.granule.max(1);
            let here = piece
                .intersection(&span)
                .filter(|_| K::PROFILE == Profile::Iommufd);
            let asked = here.and_then(|here| {
                let (first, last) = (here.start & !(page - 1), here.last() | (page - 1));
                Span::inclusive(first, last)
            });
            let asked = asked.unwrap_or(piece);
            let pages = asked.len / page;
            let mut bitmap = vec![0; pages.div_ceil(64) as usize];
            self.mapped.mapper.dirty(asked, page, &mut bitmap)?;
            let dirty = runs::bitmap::runs(&bitmap).filter(|bits| bits.start < pages);
            dirty.for_each(|bits| {
                let len = bits.end.min(pages) - bits.start;
                let run = Span::new(asked.start + bits.start * page, len * page);
                self.carried.add(run);
            });
        }
        Ok(())
    }

    /// Capabilities that every one of them has.
    pub(super) const LEAST: Capabilities = Capabilities {
        backend: K::PROFILE.name(),
        hitless_cut: false,
        unmap_part: false,
        shares_pins: false,
        page_dirty: false,
        fixed_runs: false,
        table_placement: false,
        node_tables: false,
        most_mappings: None,
    };

    pub(super) fn allow(&mut self, ranges: &[Span<Iova>]) -> Result<(), MapError> {
        let allowed = self.mapped.mapper.allow(ranges);
        allowed.map_err(|error| match errno(&error) {
            Some(Errno::EADDRINUSE | Errno::EINVAL) => MapError::Allowed {
                range: ranges.first().copied().unwrap_or_default(),
            },
            _ => MapError::Kernel(Box::new(error)),
        })
    }

    /// Areas need no cut of the kernel's: what has to be mapped anew is, when a part is emptied.
    pub(super) fn cut(&mut self, at: u64, interruption: Interruption) -> Result<(), UnmapError> {
        match self.mapped.pieces.at(at) {
            Some(piece) if piece.start < at && interruption == Interruption::Refused => {
                Err(Self::cuts(piece, Capability::HitlessCut))
            }
            _ => Ok(()),
        }
    }

    pub(super) fn track(&mut self) -> Result<(), TrackingError> {
        if self.devices.is_empty() {
            return Ok(());
        }
        match self.mapped.mapper.set_tracking(true) {
            Ok(()) => self.bitmaps = true,
            // Then it is not known, and everything counts as written to.
            Err(KernelError::Refused { .. }) => self.bitmaps = false,
            Err(error) => return Err(TrackingError::Kernel(Box::new(error))),
        }
        Ok(())
    }

    pub(super) fn untrack(&mut self) {
        self.carried.clear();
        if core::mem::take(&mut self.bitmaps) {
            // It is not read any more, tracked or not.
            let _ = self.mapped.mapper.set_tracking(false);
        }
    }

    pub(super) fn harvest(
        &mut self,
        pending: &mut Pending<&mut [u64]>,
    ) -> Result<Harvested, HarvestError> {
        let span = pending.span();
        let read = self.carry(span);
        let mut found = self.carried.take(span, &mut |run| pending.mark(run));
        read.map_err(|error| HarvestError::Kernel(Box::new(error)))?;
        if !self.bitmaps {
            let writable = self.writable(span).into_iter();
            writable.for_each(|piece| pending.mark(piece));
        }
        found.blind |= self.is_blind();
        Ok(found)
    }

    pub(super) fn is_blind(&self) -> bool {
        !self.devices.is_empty() && (!self.bitmaps || self.mapper().is_blind())
    }

    pub(super) fn places(&self) -> Vec<Place> {
        let mappings = self.mapped.pieces.len();
        if self.devices.is_empty() && mappings == 0 {
            return Vec::new();
        }
        let mut places = self.mapper().places(&self.devices).unwrap_or_default();
        if places.is_empty() {
            places.push(Place {
                endpoints: self.devices.iter().map(EndpointId::from).collect(),
                ..Place::default()
            });
        }
        if let Some(first) = places.first_mut() {
            (first.mappings, first.charged) = (mappings, self.charged());
        }
        places
    }

    pub(super) fn give_up(
        &mut self,
        tracked: bool,
        areas: &mut Areas,
    ) -> Result<Vec<Span<Iova>>, KernelError> {
        if !self.mapped.can_move() {
            return Err(KernelError::NoSource);
        }
        self.mapped.mapper.give_up_addresses()?;
        if tracked {
            self.carry_unseen();
        }
        let pieces: Vec<Span<Iova>> = self.pieces().collect();
        let starts: Vec<u64> = pieces.iter().map(|range| range.start).collect();
        // The kernel knows no address of this process any more.
        self.mapped.remove(&starts);
        self.devices.clear();
        areas.keep_only(None);
        let _ = self.learn();
        Ok(pieces)
    }

    pub(super) fn take_over(
        &mut self,
        devices: Vec<Arc<K::Device>>,
        pieces: &[Span<Iova>],
        areas: &mut Areas,
    ) -> Result<(), AttachError> {
        let all: Vec<Stretch> = stretches(areas).collect();
        let mut taken = Vec::with_capacity(pieces.len());
        for range in pieces {
            let failed = |cause| AttachError::Replay {
                area: *range,
                cause,
            };
            let at = all.partition_point(|stretch| stretch.range.last() < range.last());
            let whole = all.get(at).filter(|stretch| stretch.range.covers(range));
            let stretch = whole.ok_or(AttachError::NoArea { mapping: *range })?;
            let stretch = stretch.at(*range);
            Self::check_source(&stretch).map_err(failed)?;
            let charge = stretch.memory.ledger().charge(stretch.charge());
            let charge = charge.map_err(|over| failed(MapError::OverLimit(over)))?;
            taken.push(Piece {
                share: Share::new(charge, stretch.part()),
                stretch,
                copied: false,
            });
        }
        let charged = self.charge_released(areas)?;
        let refused = |error| attach_refused(K::PROFILE, error);
        let first = taken.first().map(|piece| piece.stretch.clone());
        let needed = taken.iter().map(|piece| piece.stretch.charge()).sum();
        let mapped = &mut self.mapped;
        let taken = mapped.take_over(&devices, taken);
        taken.map_err(|error| match (errno(&error), first) {
            (Some(Errno::ENOMEM), Some(first)) => {
                match room(&mapped.mapper, first.memory.ledger(), needed) {
                    // iommufd counts as when the process before has mapped it, also for one that has the privilege now.
                    None | Some(Forecast::Fits { .. }) => refused(error),
                    Some(room) => AttachError::Replay {
                        area: first.range,
                        cause: no_memory(error, room),
                    },
                }
            }
            _ => refused(error),
        })?;
        self.devices = devices;
        areas.keep(charged);
        self.learn().map_err(refused)
    }

    /// Unmaps everything. Devices that cannot be detached, like those of a group that are open,
    /// reach nothing then.
    pub(super) fn leave(&mut self) -> Result<(), DetachError> {
        let unmapped = self.unmap_everything();
        unmapped.map_err(|error| detach_refused(&error))?;
        for device in core::mem::take(&mut self.devices) {
            let _ = self.mapped.mapper.leave(&device);
            self.mapped.mapper.left(&device);
        }
        let _ = self.learn();
        Ok(())
    }
}

/// Maps a stretch, which may be many areas, in each of `spaces`, part by part: charged for all of them in one
/// step. They cut it into the same parts. After an error, the journals have what is to be undone.
pub(super) fn map_stretch<K: Mapper>(
    spaces: &mut [(&mut KernelSpace<K>, &mut Journal)],
    stretch: &Stretch,
    observer: &mut dyn Observer,
) -> Result<(), MapError> {
    let plans = spaces.iter_mut().map(|(space, _)| space.plan(stretch));
    let plans = plans.collect::<Result<Vec<_>, _>>()?;
    let fresh = plans.iter().flatten();
    let fresh = fresh.filter(|(_, shared)| shared.is_none());
    let bytes = fresh.map(|(part, _)| part.charge());
    let bytes = bytes.fold(0, u64::saturating_add);
    let mut charge = charged(stretch.memory.ledger(), bytes, observer)?;
    let mut done = 0;
    for nth in 0..plans.first().map_or(0, Vec::len) {
        let mut len = 0;
        for ((space, journal), plan) in spaces.iter_mut().zip(&plans) {
            if let Some((part, shared)) = plan.get(nth) {
                space.map_part(part, shared.as_ref(), &mut charge, journal, observer)?;
                len = part.range.len;
            }
        }
        done += len;
        if observer.progress(Step::FillTables, done).is_break() {
            return Err(MapError::Interrupted);
        }
    }
    Ok(())
}
