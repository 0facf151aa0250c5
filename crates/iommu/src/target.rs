//! The memory that devices reach.

use core::sync::atomic::AtomicU64;

use runs::{Pa, Span};

/// Memory by physical address, as a device in software reaches it once an address is translated.
///
/// The processor and devices use it at the same time, as real memory, so it consists of atomic
/// words, and a device copies them relaxed: what orders data between the two is the ring or the
/// interrupt by which they talk, not the memory.
pub trait TargetMemory {
    /// Lends the words of `span`, which begins and ends at a multiple of 8, to `visit`: in order,
    /// in pieces as large as they lie together, without a look-up for each word.
    ///
    /// An error names the first address without memory; everything before it was visited.
    ///
    /// Lent memory may be taken away again (unpinned, unmapped) only after the unit was flushed.
    fn with_cells(
        &self,
        span: Span<Pa>,
        visit: &mut dyn FnMut(&[AtomicU64]),
    ) -> Result<(), BadTarget>;
}

/// There is no memory at this physical address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("there is no memory at the physical address {address:#x}")]
pub struct BadTarget {
    /// The address.
    pub address: u64,
}

impl<D: TargetMemory + ?Sized> TargetMemory for &D {
    #[inline]
    fn with_cells(
        &self,
        span: Span<Pa>,
        visit: &mut dyn FnMut(&[AtomicU64]),
    ) -> Result<(), BadTarget> {
        (**self).with_cells(span, visit)
    }
}

#[cfg(feature = "std")]
impl<D: TargetMemory + ?Sized> TargetMemory for std::sync::Arc<D> {
    #[inline]
    fn with_cells(
        &self,
        span: Span<Pa>,
        visit: &mut dyn FnMut(&[AtomicU64]),
    ) -> Result<(), BadTarget> {
        (**self).with_cells(span, visit)
    }
}

/// For memory that comes and goes while devices run.
#[cfg(feature = "std")]
impl<D: TargetMemory + ?Sized> TargetMemory for std::sync::RwLock<D> {
    #[inline]
    fn with_cells(
        &self,
        span: Span<Pa>,
        visit: &mut dyn FnMut(&[AtomicU64]),
    ) -> Result<(), BadTarget> {
        self.read()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
            .with_cells(span, visit)
    }
}
