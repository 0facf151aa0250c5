//! The back end over a kernel's own mappings: a container of VFIO's type 1, or iommufd.
//!
//! The kernel pins memory, charges it and fills page tables, all in one call. The ledger keeps the
//! same account, before the call, so that what cannot succeed is refused with numbers. Memory is
//! given by its address in this process, or as a memory file: an object that has neither is refused
//! by name.
//!
//! Areas that are there before the first device comes are mapped when it comes, in as few
//! [pieces](super::pieces) as the granule allows. Each later one is a piece of its own, or several.
//! When a kernel that has few entries has no more of them, pieces are merged as areas would have been
//! in the beginning, if the caller has [allowed](Kernel::set_merging) the gaps that this makes.

use std::boxed::Box;
use std::sync::Arc;
use std::vec;
use std::vec::Vec;

use iommu::NodeId;
use iopt::{Aperture, Interruption, Prot, RangeError};
use runs::Span;

use super::cause::MapRequest;
use super::error::KernelError;
use super::mapped::{Journal, Mapped, source};
use super::mapper::{Entering, Mapper, MapperInfo, Source};
use super::pieces::{Piece, Pieces, Stretch, cut, groups, stretches};
use super::refusals::{Refused, attach_refused, detach_refused, errno, map_refused};
use super::shares::{Pages, Share};
use crate::area::Area;
use crate::areas::Areas;
use crate::backend::{Backend, Capability, Unsupported};
use crate::errno::{Errno, Profile};
use crate::error::{AttachError, DetachError, MapError};
use crate::ledger::{Charge, Ledger};
use crate::observer::{Observer, Step, observed};
use crate::own::Written;
use crate::placement::Placement;
use crate::reserved::ForReleased;
use crate::windows::{outside, within};

/// The back end over the mappings of a kernel. See the module's head in the sources, and the aliases
/// for each kernel interface.
pub struct Kernel<K: Mapper> {
    pub(super) mapped: Mapped<K>,
    pub(super) devices: Vec<Arc<K::Device>>,
    pub(super) info: MapperInfo,
    pub(super) windows: Vec<Span>,
    /// The most pieces that the kernel takes.
    pub(super) most: Option<u64>,
    /// Pieces end at its multiples, bytes.
    granule: Option<u64>,
    merging: Interruption,
    pub(super) placement: Placement,
    /// What is dirty can be read.
    pub(super) bitmaps: bool,
    /// What was read as dirty, or could be written to by devices that have left, and was not harvested
    /// yet.
    pub(super) carried: Written,
}

impl<K: Mapper> core::fmt::Debug for Kernel<K> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Kernel")
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

/// What is known without a device.
const UNKNOWN: MapperInfo = MapperInfo {
    granule: 1,
    ranges: None,
    available: None,
};

impl<K: Mapper> Kernel<K> {
    /// A back end over `mapper`, to which nothing is attached and which maps nothing.
    ///
    /// Pieces end at multiples of `granule` bytes of device addresses, rounded up to a power of two
    /// of at least 4096: that is the largest stretch which can only be unmapped together. `None`:
    /// areas that go on in each other share a piece however long.
    pub fn new(mapper: K, granule: Option<u64>) -> Self {
        Self {
            mapped: Mapped {
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
            carried: Written::default(),
        }
    }

    /// Says whether pieces may be merged when the kernel has no entries left. Devices do not reach
    /// what is being merged for a moment. In the beginning they may not.
    pub(super) const fn set_merging(&mut self, merging: Interruption) {
        self.merging = merging;
    }

    pub(super) fn set_placement(&mut self, placement: Placement) -> Result<(), Unsupported> {
        match placement {
            Placement::Near(_) => return Err(Self::unsupported(Capability::TablePlacement)),
            Placement::PerNode if !K::NODE_TABLES => {
                return Err(Self::unsupported(Capability::NodeTables));
            }
            Placement::Shared | Placement::PerNode => self.placement = placement,
        }
        Ok(())
    }

    /// Who maps.
    pub const fn mapper(&self) -> &K {
        &self.mapped.mapper
    }

    /// The attached devices, or groups.
    pub fn devices(&self) -> &[Arc<K::Device>] {
        &self.devices
    }

    /// What the kernel has mapped, in order: its mappings, not the areas.
    pub fn pieces(&self) -> impl Iterator<Item = Span> + '_ {
        self.mapped.pieces.iter().map(|piece| piece.stretch.range)
    }

    /// Bytes that the kernel has charged for its mappings; what is copied from others is charged there.
    pub fn charged(&self) -> u64 {
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
    pub(super) fn refresh(&mut self) -> Result<(), KernelError> {
        self.info = if self.devices.is_empty() {
            UNKNOWN
        } else {
            self.mapped.mapper.info()?
        };
        let used = self.mapped.pieces.len();
        self.most = self.info.available.map(|more| more.saturating_add(used));
        let whole: Vec<Span> = Aperture::zeros(64).spans().collect();
        self.windows = match &self.info.ranges {
            None => whole,
            Some(ranges) => {
                let span = |range: &core::ops::RangeInclusive<u64>| {
                    Span::inclusive(*range.start(), *range.end())
                };
                let spans: Option<Vec<Span>> = ranges.iter().map(span).collect();
                let mut windows = spans.map_or(whole.clone(), |spans| within(&whole, &spans));
                windows.sort_unstable();
                windows
            }
        };
        Ok(())
    }

    /// What of `area` is mapped, if the kernel can be told of it.
    pub(super) fn mappable(area: &Area) -> Result<Stretch, MapError> {
        let prot = area.prot;
        if !Prot::RW.contains(prot) {
            return Err(MapError::Prot { prot });
        }
        let stretch = Stretch::of(area);
        Self::check_source(&stretch)?;
        Ok(stretch)
    }

    /// Refuses memory that the kernel cannot be told of.
    pub(super) fn check_source(stretch: &Stretch) -> Result<(), MapError> {
        match source(&**stretch.memory.object(), stretch.offset, K::PROFILE) {
            Some(_) => Ok(()),
            None => Err(MapError::Unsupported(Self::unsupported(
                Capability::GivenRuns,
            ))),
        }
    }

    /// Maps a stretch, which may be many areas, in pieces. After an error, `journal` has what is to
    /// be undone.
    pub(super) fn map_stretch(
        &mut self,
        stretch: &Stretch,
        journal: &mut Journal,
        observer: &mut dyn Observer,
    ) -> Result<(), MapError> {
        let plan = self.plan(stretch)?;
        let fresh = plan.iter().filter(|(_, shared)| shared.is_none());
        let bytes = fresh.map(|(part, _)| part.charge()).sum();
        let mut charge = charged(stretch.memory.ledger(), bytes, observer)?;
        let mut done = 0;
        for (part, shared) in &plan {
            self.map_part(part, shared.as_ref(), &mut charge, journal, observer)?;
            done += part.range.len;
            if observer.progress(Step::FillTables, done).is_break() {
                return Err(MapError::Interrupted);
            }
        }
        Ok(())
    }

    /// The parts in which a stretch is mapped, for which there are entries.
    pub(super) fn plan(&mut self, stretch: &Stretch) -> Result<Plan, MapError> {
        Self::check_source(stretch)?;
        let mut plan = Vec::new();
        for range in cut(stretch.range, self.granule) {
            self.mapped.plan(&stretch.at(range), &mut plan);
        }
        self.make_room(plan.len() as u64)?;
        Ok(plan)
    }

    /// Maps a part of a plan, which takes its charge out of `charge`.
    pub(super) fn map_part(
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

    /// Why the kernel did not map `part`, which is not charged any more.
    fn explain(&mut self, error: KernelError, part: &Stretch) -> MapError {
        // Windows change as other devices come and go.
        let _ = self.refresh();
        let ledger = part.memory.ledger();
        let object = &**part.memory.object();
        let memory = match source(object, part.offset, K::PROFILE) {
            Some(Source::Address(start) | Source::File(_, start)) => start,
            _ => part.offset,
        };
        let asked = Refused {
            request: MapRequest {
                iova: Some(part.range.start),
                memory: Span::new(memory, part.range.len),
                prot: part.prot,
                granule: self.info.granule,
                windows: self.info.ranges.as_deref().unwrap_or_default(),
            },
            range: part.range,
            outside: outside(&self.windows, part.range),
            over: ledger.over(part.charge()),
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
            // What is mapped anew has no dirty bits.
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
        let entered = self.refresh().map_err(refused).and_then(|()| {
            // Of a later device the mapper sees to it: starting forgets what is dirty.
            if dirty && first {
                self.bitmaps = self.mapped.mapper.set_tracking(true).is_ok();
            }
            if !first {
                return Ok(ForReleased::default());
            }
            // What could not be unmapped when the last device went.
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
        let charged = areas.charge_released(self.times_charged());
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
                self.map_stretch(&stretch, journal, &mut ())
            } else {
                let misaligned = area.start % granule != 0;
                let value = if misaligned { area.start } else { area.len };
                Err(MapError::Range(RangeError::Misaligned { value, granule }))
            };
            mapped.map_err(|cause| AttachError::Replay { area, cause })?;
        }
        Ok(())
    }

    /// Lets a device go. With the last one the kernel maps nothing any more. With `dirty`, what it wrote
    /// to is carried until it is harvested.
    pub(super) fn let_go(
        &mut self,
        device: &Arc<K::Device>,
        dirty: bool,
    ) -> Result<(), DetachError> {
        let place = self
            .devices
            .iter()
            .position(|other| Arc::ptr_eq(other, device));
        let place = place.ok_or(DetachError::Unknown)?;
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
            if let Err(error) = self.unmap_everything()
                && K::PROFILE == Profile::Type1
                && errno(&error) == Some(Errno::EINVAL)
            {
                self.mapped.forget(&starts);
            }
        }
        // If it is not learned, the windows are narrower than they could be.
        let _ = self.refresh();
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

    /// What devices may write to: the pieces with bytes in `span`.
    pub(super) fn writable(&self, span: Span) -> Vec<Span> {
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
    pub(super) fn carry(&mut self, span: Span) -> Result<(), KernelError> {
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
            for bits in dirty {
                let len = bits.end.min(pages) - bits.start;
                let run = Span::new(asked.start + bits.start * page, len * page);
                self.carried.add(run);
            }
        }
        Ok(())
    }
}
