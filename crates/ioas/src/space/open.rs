//! Address spaces over what was opened: an [`Iommufd`](crate::iommufd::Iommufd), a
//! [`Type1`](crate::vfio::Type1), an [`Iommu`](crate::Iommu) or [`SoftwareIommu`](crate::SoftwareIommu), or tables of the caller's.
//!
//! Each of them decides how an address space maps, and holds the account that is charged. All address spaces
//! over one share that account.

use alloc::sync::Arc;
use alloc::vec::Vec;

use crate::capability::Unsupported;
#[cfg(any(feature = "vfio", feature = "iommufd"))]
use crate::kernel_error::KernelError;
use crate::memory::ledger::{Account, Ledger};
use crate::memory::object::Cause;
use crate::space::Ioas;
use crate::space::listener::Listener;
use crate::space::placement::Placement;

/// Opens address spaces: a handle on an interface of the kernel, or on a unit with tables of ours.
pub trait OpenSpace {
    /// An empty address space with what `options` ask for. [`IoasOptions::over_mapper`] and
    /// [`IoasOptions::over_tables`] make one.
    ///
    /// # Errors
    ///
    /// See [`OpenError`].
    fn open_space(&self, options: IoasOptions) -> Result<Ioas, OpenError>;
}

/// Failure to open an address space.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The kernel opens none.
    #[cfg(any(feature = "vfio", feature = "iommufd"))]
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// The back end lacks what was asked for.
    #[error(transparent)]
    Unsupported(#[from] Unsupported),
    /// The limit on locked memory cannot be read.
    #[error("cannot read the limit on locked memory")]
    Limit(#[source] Cause),
    /// There is no memory for page tables.
    #[error("there is no memory for page tables")]
    Tables(#[source] Cause),
}

/// Options of a new address space: [`Ioas::options`].
#[derive(Default)]
#[must_use = "nothing is opened before `over`"]
pub struct IoasOptions {
    #[cfg_attr(not(any(feature = "vfio", feature = "iommufd")), expect(dead_code))]
    pub(crate) granule: Option<u64>,
    ledger: Option<Arc<Ledger>>,
    placement: Placement,
    listeners: Vec<Arc<dyn Listener>>,
}

impl core::fmt::Debug for IoasOptions {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("IoasOptions")
            .field("ledger", &self.ledger)
            .field("placement", &self.placement)
            .field("listeners", &self.listeners.len())
            .finish_non_exhaustive()
    }
}

impl IoasOptions {
    /// Mappings of a kernel end at multiples of `bytes` of device addresses, rounded up to a power of two of
    /// at least 4096: the largest stretch that can only be unmapped, or released by a balloon, as a whole.
    /// Otherwise areas that go on in each other share a mapping however long. Tables of ours have no such
    /// stretch.
    pub fn granule(self, bytes: impl Into<Option<u64>>) -> Self {
        let granule = bytes.into();
        Self { granule, ..self }
    }

    /// Charges memory that `Ioas::map_guest` maps to `ledger` instead of the account of what was opened. A
    /// [`Memory`](crate::Memory) that was made elsewhere stays charged to the ledger it was made with.
    pub fn ledger(self, ledger: Arc<Ledger>) -> Self {
        let ledger = Some(ledger);
        Self { ledger, ..self }
    }

    /// Sets the policy for sharing page tables: see [`Ioas::set_placement`].
    pub fn placement(self, placement: Placement) -> Self {
        Self { placement, ..self }
    }

    /// Notifies `listener` of each area that comes or goes: see [`Ioas::add_listener`].
    pub fn listener(mut self, listener: Arc<dyn Listener>) -> Self {
        self.listeners.push(listener);
        self
    }

    /// An address space over `opened`.
    ///
    /// # Errors
    ///
    /// See [`OpenError`].
    pub fn over(self, opened: &(impl OpenSpace + ?Sized)) -> Result<Ioas, OpenError> {
        opened.open_space(self)
    }

    /// The same with `ledger`, unless another was asked for.
    #[cfg(all(feature = "linux", feature = "vfio", feature = "iommufd"))]
    pub(crate) fn ledger_or(
        self,
        ledger: impl FnOnce() -> Result<Arc<Ledger>, OpenError>,
    ) -> Result<Self, OpenError> {
        match self.ledger {
            Some(_) => Ok(self),
            None => Ok(self.ledger(ledger()?)),
        }
    }

    /// True when a new address space is to have a page table for each node.
    #[cfg(feature = "vfio")]
    pub(crate) fn divides(&self) -> bool {
        self.placement.divides()
    }

    pub(crate) fn set_up(self, mut space: Ioas) -> Result<Ioas, OpenError> {
        if let Some(ledger) = self.ledger {
            space.account = Account::Given(ledger);
        }
        if self.placement != Placement::default() {
            space.set_placement(self.placement)?;
        }
        for listener in self.listeners {
            space.add_listener(listener);
        }
        Ok(space)
    }
}

impl Ioas {
    /// An empty address space over `opened`, with default options.
    ///
    /// # Errors
    ///
    /// See [`OpenError`].
    pub fn over(opened: &(impl OpenSpace + ?Sized)) -> Result<Self, OpenError> {
        Self::options().over(opened)
    }

    /// Options of a new address space: another limit, listeners, placement, the kernel's granule.
    pub fn options() -> IoasOptions {
        IoasOptions::default()
    }
}
