//! The seam to back ends, and operations that not all of them have: see [`Backend`].

use alloc::vec::Vec;
use core::any::Any;

use iommu::FlushError;
use iopt::{Interruption, Invalidation, Pending, ResizeError};
use runs::{Iova, PageSizes, Span};

use crate::areas::Areas;
use crate::areas::area::HeldArea;
use crate::capability::{Capability, Unsupported};
#[cfg(any(feature = "vfio", feature = "iommufd"))]
use crate::kernel_error::KernelError;
use crate::observer::Observer;
use crate::ranges::extents::Extent;
use crate::space::dirty::{HarvestError, Harvested, Tracking, TrackingError};
use crate::space::endpoint::{Endpoint, EndpointId};
use crate::space::error::{AttachError, DetachError, MapError, UnmapError};
use crate::space::flush::Retired;
use crate::space::placement::{Place, Placement};

/// Abilities of a back end that others lack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// The back end's name.
    pub backend: &'static str,
    /// Cuts mappings without a moment in which the rest is missing.
    pub hitless_cut: bool,
    /// Unmaps any part of what was mapped, also without cutting first.
    pub unmap_part: bool,
    /// Pins and charges memory once, at however many addresses it is.
    pub shares_pins: bool,
    /// Tells which pages devices have written to.
    pub page_dirty: bool,
    /// Maps given physical runs, like another device's BAR.
    pub fixed_runs: bool,
    /// Page tables lie where the caller says, in leaves of the sizes that it wants.
    pub table_placement: bool,
    /// Has a page table for the devices of each node, over memory that is pinned and charged once.
    pub node_tables: bool,
    /// The most mappings that it takes; `None` without a limit.
    pub most_mappings: Option<u64>,
}

impl Capabilities {
    /// Capabilities that it lacks.
    pub fn missing(&self) -> impl Iterator<Item = Capability> + use<> {
        [
            (self.hitless_cut, Capability::HitlessCut),
            (self.unmap_part, Capability::UnmapPart),
            (self.shares_pins, Capability::SharesPins),
            (self.page_dirty, Capability::PageDirty),
            (self.fixed_runs, Capability::FixedRuns),
            (self.table_placement, Capability::TablePlacement),
            (self.node_tables, Capability::NodeTables),
        ]
        .into_iter()
        .filter_map(|(can, capability)| (!can).then_some(capability))
    }
}

/// The seam to what translates: tables of ours, or a kernel that has its own.
///
/// An [`Ioas`](crate::Ioas) keeps the areas and everything that is said about them; a [`Backend`]
/// has devices reach their memory. It is chosen by a value at run time, so each call is a virtual one;
/// the calls are for ranges, never for an entry. What each promises, in this order:
///
/// 1. The address space asks [`check`](Backend::check) before it touches anything, and looks itself
///    that areas never overlap.
/// 2. [`map`](Backend::map) has devices reach an area, all or nothing: it charges and pins its
///    memory, or has a kernel do so. Without a device it may do nothing: then attaching one does the
///    same for all areas, all or nothing too.
/// 3. [`empty`](Backend::empty) takes whole areas from devices, all or none. Where a mapping of the
///    back end reaches over an end, [`cut`](Backend::cut) has come before, or the caller allows a
///    moment in which the rest is missing; otherwise it is refused by name.
/// 4. The holds of what was emptied go to [`Retired`]. Only when [`flush`](Backend::flush) has
///    succeeded, and every listener has invalidated it too, they are released. A back end whose `empty`
///    returns when no device reaches the memory any more has nothing to flush.
/// 5. [`leave`](Backend::leave) comes last. If it fails, the memory of all areas is lost on purpose.
///
/// A back end serves the address space that owns it. Calls by `&self` come from several threads at once,
/// for ranges that are disjoint; calls by `&mut self` come alone. What only one kind of back end has, its
/// address space finds by [`as_any`](Backend::as_any).
///
/// `owned` is a range around the one that a call empties, from which other operations are kept for as long as
/// this one is under way, with its flush: what translates only addresses in there can be given back.
///
/// # What not every back end can do
///
/// [`Capabilities`] says by name what a back end can do. What it cannot is refused with
/// [`Unsupported`]. It is never imitated with a moment of missing translation, unless the caller
/// says [`Interruption::Allowed`].
pub(crate) trait Backend: Send + Sync + 'static {
    /// Capabilities of the back end.
    fn capabilities(&self) -> Capabilities;

    /// Alignment of the ends of areas, bytes; 1 when nothing is known yet.
    fn granule(&self) -> u64;

    /// Windows for mappings, in order; stretches of more than 2^63 bytes come in two.
    fn windows(&self) -> Vec<Span<Iova>>;

    /// The `len` bytes from `iova` on, if devices can translate all of them. `len` is not 0.
    ///
    /// # Errors
    ///
    /// [`MapError::Range`], [`MapError::BeyondEnd`], [`MapError::Reserved`].
    fn check(&self, iova: u64, len: u64) -> Result<Span<Iova>, MapError>;

    /// Sees to it that `ranges`, which are in order and do not overlap, stay possible when devices
    /// come, if it can do that. No ranges: nothing is promised.
    ///
    /// # Errors
    ///
    /// [`MapError::Allowed`], when a device is attached that cannot translate one of them;
    /// [`MapError::Kernel`].
    fn allow(&mut self, ranges: &[Span<Iova>]) -> Result<(), MapError> {
        let _ = ranges;
        Ok(())
    }

    /// Has all devices reach `area`, all or nothing.
    ///
    /// If it fails but a device may still reach some of the memory, the hold is in `retired`, or
    /// left in the area, which then stays. `owned` is asked for when something is to be emptied again.
    ///
    /// # Errors
    ///
    /// See [`MapError`].
    fn map(
        &self,
        area: &mut HeldArea,
        owned: &dyn Fn() -> Extent,
        retired: &Retired,
        observer: &mut dyn Observer,
    ) -> Result<(), MapError>;

    /// Takes everything in `range`, which cuts no area, from all devices, all or nothing. With it come, if there
    /// are areas in the range, what these reach over and what is `owned`. `note` receives what devices have written
    /// to, while that is tracked.
    ///
    /// # Errors
    ///
    /// See [`UnmapError`].
    fn empty(
        &self,
        range: Extent,
        areas: Option<(Extent, Extent)>,
        interruption: Interruption,
        note: &mut dyn FnMut(Span<Iova>),
    ) -> Result<(), UnmapError>;

    /// Makes it possible to empty what lies on one side of `at` alone, a multiple of the granule.
    ///
    /// # Errors
    ///
    /// [`UnmapError::Cut`]; [`UnmapError::CutsMapping`].
    fn cut(&self, at: u64, interruption: Interruption) -> Result<(), UnmapError>;

    /// True when a device, or a domain without one, has areas mapped.
    fn is_live(&self) -> bool;

    /// Number of charges of a mapping by itself, whatever else maps or holds its memory: for a kernel
    /// that does not [share pins](Capabilities::shares_pins), the number of its page tables that are
    /// each filled by a call of their own. `None`: memory is charged once.
    fn times_charged(&self) -> Option<u64> {
        None
    }

    /// Sets aside what mapping `range` takes besides pins and charge, tables for instance, however
    /// scattered the memory is then. All or nothing; what is set aside for one range is used for no
    /// other.
    ///
    /// # Errors
    ///
    /// [`MapError::Table`].
    fn set_aside(&self, range: Span<Iova>) -> Result<(), MapError> {
        let _ = range;
        Ok(())
    }

    /// Gives back what was set aside for `range`, or for a range around it.
    fn give_back(&self, range: Span<Iova>) {
        let _ = range;
    }

    /// [`map`](Self::map) of an area for whose return charge and tables were kept. After an error
    /// they still are.
    ///
    /// # Errors
    ///
    /// As [`map`](Self::map).
    fn map_again(
        &self,
        area: &mut HeldArea,
        owned: &dyn Fn() -> Extent,
        retired: &Retired,
        observer: &mut dyn Observer,
    ) -> Result<(), MapError>;

    /// Makes the leaves in `range` ones of at most `size` bytes. A back end without
    /// [`Capabilities::table_placement`] leaves them as they are.
    ///
    /// # Errors
    ///
    /// When that is not possible; leaves say the same as before.
    fn split(
        &self,
        range: Span<Iova>,
        size: u64,
        interruption: Interruption,
    ) -> Result<(), ResizeError<FlushError>> {
        let _ = (range, size, interruption);
        Ok(())
    }

    /// Gives the leaves around `range`, which lies in `area`, the largest sizes that are possible in
    /// the area; see [`split`](Self::split).
    ///
    /// # Errors
    ///
    /// When that is not possible; leaves say the same as before.
    fn merge(
        &self,
        range: Span<Iova>,
        area: Span<Iova>,
        interruption: Interruption,
    ) -> Result<(), ResizeError<FlushError>> {
        let _ = (range, area, interruption);
        Ok(())
    }

    /// True when something was left for a later [flush](Self::flush).
    fn waits(&self) -> bool {
        false
    }

    /// Leaves entries emptied until now for a later [flush](Self::flush).
    fn leave_gathered(&self) {}

    /// Gives back the tables that are flushed and that no thread reads any more.
    fn give_back_tables(&self) {}

    /// True when something must be [flushed](Self::flush) before `range` is mapped.
    fn waits_in(&self, range: Span<Iova>) -> bool {
        let _ = range;
        false
    }

    /// Returns when no device reaches what was emptied before, by whichever thread. After an error all of
    /// that is still to come.
    ///
    /// # Errors
    ///
    /// When a unit or listener does not answer in time.
    fn flush(&self) -> Result<(), FlushError> {
        Ok(())
    }

    /// Begins to track what devices write to, as far as it is possible. Splitting leaves and
    /// clearing what was written before is done by the caller.
    ///
    /// # Errors
    ///
    /// [`TrackingError::Unsupported`], [`TrackingError::Kernel`].
    fn track(&mut self, tracking: Tracking) -> Result<(), TrackingError>;

    /// Ends it.
    fn untrack(&mut self);

    /// Moves what devices have written to into `pending`, as far as it lies in its span, where devices may
    /// write to areas at `writable`.
    ///
    /// # Errors
    ///
    /// When it cannot be learned; what was found before is in the bitmap.
    fn harvest(
        &self,
        writable: &[Span<Iova>],
        pending: &mut Pending<&mut [u64]>,
    ) -> Result<Harvested, HarvestError>;

    /// Flushes what units keep of the dirty state of the harvested pages.
    ///
    /// # Errors
    ///
    /// When a unit does not answer in time.
    fn show(&self, what: &Invalidation) -> Result<(), FlushError> {
        let _ = what;
        Ok(())
    }

    /// True when a device writes without leaving a trace.
    fn is_blind(&self) -> bool;

    /// Takes all areas from all devices for good. When it succeeds, no device reaches any memory.
    ///
    /// # Errors
    ///
    /// The error of the first device that stays.
    fn leave(&mut self, areas: &mut Areas, retired: &Retired) -> Result<(), DetachError>;

    /// Gives back what is left when there are no areas and no devices.
    fn end(&mut self) {}

    /// Lets an endpoint in: all areas are mapped for it first, all or nothing. With `dirty` it is
    /// tracked what devices write to.
    ///
    /// # Errors
    ///
    /// See [`AttachError`]. Nothing has changed then.
    fn attach(
        &mut self,
        endpoint: Endpoint,
        dirty: bool,
        areas: &mut Areas,
    ) -> Result<(), AttachError>;

    /// Takes all areas from an endpoint, and with the last one the pins of all areas. With `dirty`,
    /// what it could write without leaving a trace counts as written to.
    ///
    /// # Errors
    ///
    /// See [`DetachError`].
    fn detach(
        &mut self,
        endpoint: EndpointId,
        dirty: bool,
        areas: &mut Areas,
        retired: &Retired,
    ) -> Result<(), DetachError>;

    /// The page tables, with their nodes and endpoints.
    fn places(&self) -> Vec<Place>;

    /// Sets the policy for sharing page tables from now on.
    ///
    /// # Errors
    ///
    /// When it cannot have tables there.
    fn set_placement(&mut self, placement: Placement) -> Result<(), Unsupported>;

    /// Policy for sharing page tables.
    fn placement(&self) -> Placement;

    /// Says whether mappings may be merged, each missing for a moment, when there is no entry left
    /// for another one.
    fn set_merging(&mut self, merging: Interruption) {
        let _ = merging;
    }

    /// Learns again what can be mapped.
    ///
    /// # Errors
    ///
    /// The kernel's. What was known stays known.
    #[cfg(any(feature = "vfio", feature = "iommufd"))]
    fn refresh(&mut self) -> Result<(), KernelError> {
        Ok(())
    }

    /// Gives the mappings of one container or address space of a kernel to another process; see
    /// [`Ioas::give_up`](crate::Ioas::give_up).
    ///
    /// # Errors
    ///
    /// The kernel's. Nothing has changed then.
    #[cfg(any(feature = "vfio", feature = "iommufd"))]
    fn give_up(
        &mut self,
        tracked: bool,
        areas: &mut Areas,
    ) -> Result<Vec<Span<Iova>>, KernelError> {
        let _ = (tracked, areas);
        Err(KernelError::NoSource)
    }

    /// Takes over what another process has given up; see [`Ioas::take_over`](crate::Ioas::take_over).
    ///
    /// # Errors
    ///
    /// See [`AttachError`]. Nothing is mapped then.
    #[cfg(any(feature = "vfio", feature = "iommufd"))]
    fn take_over(
        &mut self,
        endpoints: Vec<Endpoint>,
        mappings: &[Span<Iova>],
        areas: &mut Areas,
    ) -> Result<(), AttachError> {
        let _ = (endpoints, mappings, areas);
        let backend = self.capabilities().backend;
        Err(AttachError::Endpoint { backend })
    }

    /// The mappings that a kernel has, in order; they are not the areas. `None`: tables are ours.
    fn mappings(&self) -> Option<Vec<Span<Iova>>> {
        None
    }

    /// Sizes of pages that all endpoints translate; `None` when that is not known.
    fn page_sizes(&self) -> Option<PageSizes>;

    /// Itself, for what only this kind of back end has.
    fn as_any(&self) -> &dyn Any;

    /// The same, alone.
    fn as_any_mut(&mut self) -> &mut dyn Any;
}
