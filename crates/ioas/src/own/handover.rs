//! An address space over tables of ours goes to another process, while devices run.
//!
//! Tables lie in a memory file, as the memory of the areas does, so that the new owner has the same
//! pages. Units go on walking the same tables and are not reprogrammed.
//!
//! 1. The old owner calls [`Ioas::hand_over`]: what waits is flushed, and all that is not in the
//!    files is a [`Handover`], plain values. As long as the [`Leaving`] is there nothing changes.
//! 2. The new owner maps the files, adopts the tables ([`iopt::Takeover`]) and calls
//!    [`Ioas::adopt`]: the memory of all areas is charged and pinned for it too, and its runs are
//!    compared with the leaves. It stores to no table.
//! 3. The old owner calls [`Leaving::give_up`]: it drops tables and devices and unpins its memory.
//!    Pages are pinned at every moment, for a while by both. If the new owner has failed, the old
//!    one drops the `Leaving` and goes on.
//!
//! The two must not be owners at once: the new one changes nothing before the old one has given up.

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::fmt;

use iommu::{DeviceId, DomainId, FlushError};
use iopt::{Prot, Root};
use runs::{Iova, PageSizes, Span};

use super::Domain;
use crate::lock::WriteGuard;
use crate::memory::Memory;
use crate::space::dirty::Tracking;
use crate::space::error::UnmapError;
use crate::space::{Core, Ioas};

/// State that a new owner needs besides tables and memory: plain values, to be carried over as the caller likes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Handover {
    /// The domains.
    pub domains: Vec<HandedDomain>,
    /// The first domain stays without devices.
    pub kept: bool,
    /// The areas, in order.
    pub areas: Vec<HandedArea>,
    /// To which addresses are chosen: see [`Ioas::allow`].
    pub allowed: Vec<Span<Iova>>,
    /// Ranges that devices have written to, or could, that are in no table, and ranges that users in the process hold
    /// to write to, or did; as far as they are not harvested yet. In no order.
    pub written: Vec<Span<Iova>>,
    /// Dirty tracking, if on. Other writes that were not harvested yet are in the tables.
    pub tracking: Option<Tracking>,
}

/// A domain of a [`Handover`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HandedDomain {
    /// The number that units know it by.
    pub id: DomainId,
    /// Address of its table, and its kind.
    pub root: Root,
    /// The sizes of its leaves.
    pub page_sizes: PageSizes,
    /// Answer of its units to "DMA is forced to be coherent"; `None` when the caller has built the table and answers
    /// for that.
    pub coherent: Option<bool>,
    /// Its devices.
    pub devices: Vec<DeviceId>,
}

/// An area of a [`Handover`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HandedArea {
    /// Its device addresses.
    pub range: Span<Iova>,
    /// Number of its memory among those that [`Ioas::hand_over`] was given.
    pub memory: usize,
    /// Offset in that memory, bytes.
    pub offset: u64,
    /// Access that devices have.
    pub prot: Prot,
    /// It is taken out.
    pub out: bool,
    /// It is released.
    pub released: bool,
    /// It was cut, at its first byte and behind its last, out of what one call has mapped: there it is
    /// joined again with its neighbour when both are back.
    pub cut: [bool; 2],
}

/// Failure of a hand-over: the address space is as it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum HandOverError {
    /// A unit did not answer in time to the flush of what was unmapped.
    #[error(transparent)]
    Flush(FlushError),
    /// The back end's tables are not ours: a kernel's mappings go by [`Ioas::give_up`].
    #[error("{backend} cannot hand over tables")]
    Backend {
        /// Its name.
        backend: &'static str,
    },
    /// An area's memory is none of those that were given.
    #[error("the memory of the area {area} is not among the memories handed over")]
    Memory {
        /// The area.
        area: Span<Iova>,
    },
}

/// An address space on its way to another process. Dropped, it stays here, and nothing has happened.
#[must_use = "unless it gives up, the address space stays here"]
pub struct Leaving<'a> {
    ioas: &'a Ioas,
    core: WriteGuard<'a, Core>,
    handover: Handover,
}

impl fmt::Debug for Leaving<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Leaving")
            .field("handover", &self.handover)
            .finish_non_exhaustive()
    }
}

impl Leaving<'_> {
    /// State for the new owner.
    pub const fn handover(&self) -> &Handover {
        &self.handover
    }

    /// The new owner has taken over: drops domains and devices, which are its now, and releases the
    /// memory of all areas once every listener has invalidated it. What external pins hold stays
    /// pinned until they are dropped. Returns the bytes that were unpinned.
    ///
    /// If no process has taken over, devices reach memory that is not pinned.
    ///
    /// # Errors
    ///
    /// [`UnmapError::Flush`] when a listener does not invalidate in time, and [`UnmapError::Unpin`]. The
    /// devices are the new owner's in any case; memory waits for [`Ioas::flush`].
    pub fn give_up(self) -> Result<u64, UnmapError> {
        let Self { ioas, mut core, .. } = self;
        // Dropping a table keeps its memory, and no device is detached.
        if let Some(own) = core.own() {
            own.domains.clear();
            own.reserved.clear();
            own.kept = false;
        }
        let mut gone = ioas.retired.gone();
        {
            let state = &mut *ioas.state.lock();
            for (range, area) in state.areas.extract_inside(0, u64::MAX) {
                gone.add(range, area.hold);
            }
            state.taken.clear();
        }
        ioas.op(&core).flush_gone(&mut gone, &mut ())
    }
}

impl Ioas {
    /// Begins to give an address space over tables of ours to another process, with `memories`, all those
    /// of its areas. See [`Leaving`]; tables and memory must be in files that the other process has too.
    /// Every other operation waits as long as the `Leaving` exists.
    ///
    /// # Errors
    ///
    /// See [`HandOverError`].
    pub fn hand_over(&self, memories: &[Arc<Memory>]) -> Result<Leaving<'_>, HandOverError> {
        let mut core = self.gate.write();
        let settled = self.retired.settle(&*core.backend);
        settled.map_err(HandOverError::Flush)?;
        let state = self.state.lock();
        let number = |memory: &Arc<Memory>| {
            let mut all = memories.iter();
            all.position(|other| Arc::ptr_eq(other, memory))
        };
        let mut areas = Vec::with_capacity(state.areas.0.len());
        for area in state.areas.iter() {
            let range = area.range;
            areas.push(HandedArea {
                range,
                memory: number(&area.memory).ok_or(HandOverError::Memory { area: range })?,
                offset: area.offset,
                prot: area.prot,
                out: area.out,
                released: area.released,
                cut: area.cut,
            });
        }
        drop(state);
        let domain = |domain: &Domain| {
            let table = &domain.table;
            let devices = domain.devices.0.iter();
            HandedDomain {
                id: domain.id,
                root: table.root(),
                page_sizes: table.page_sizes(),
                coherent: domain.coherent,
                devices: devices.map(|member| member.device).collect(),
            }
        };
        let (allowed, tracking) = (core.allowed.clone(), core.tracking);
        let backend = core.backend.capabilities().backend;
        let own = core.own().ok_or(HandOverError::Backend { backend })?;
        let mut written = own.written();
        for half in iopt::Aperture::zeros(64).spans() {
            self.externals.written(half, |range| written.push(range));
        }
        let handover = Handover {
            domains: own.domains.iter().map(domain).collect(),
            kept: own.kept,
            areas,
            allowed,
            written,
            tracking,
        };
        Ok(Leaving {
            ioas: self,
            core,
            handover,
        })
    }
}
