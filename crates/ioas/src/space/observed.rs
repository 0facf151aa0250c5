//! Operations that an observer sees.

use alloc::sync::Arc;
use core::fmt;

use iopt::Prot;
use runs::{Iova, Offset, Span};

use crate::memory::Memory;
use crate::observer::Observer;
use crate::space::error::{MapError, UnmapError};
use crate::space::{Ioas, Unmapped};

/// Operations on an address space that an [`Observer`] sees, step by step: [`Ioas::observed`].
pub struct Observed<'a> {
    pub(super) ioas: &'a Ioas,
    pub(super) observer: &'a mut dyn Observer,
}

impl fmt::Debug for Observed<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Observed").finish_non_exhaustive()
    }
}

impl Ioas {
    /// Operations that `observer` sees, step by step:
    ///
    /// ```
    /// use ioas::{Ioas, MapError, Memory, Observer, Step};
    /// use iopt::Prot;
    /// use runs::Span;
    ///
    /// struct Steps;
    ///
    /// impl Observer for Steps {
    ///     fn end(&mut self, step: Step, bytes: u64) {
    ///         println!("{step:?}: {bytes} bytes");
    ///     }
    /// }
    ///
    /// fn map(space: &Ioas, memory: &std::sync::Arc<Memory>) -> Result<(), MapError> {
    ///     space.observed(&mut Steps).map(0x10_0000, memory, Span::new(0, 1 << 20), Prot::RW)
    /// }
    /// ```
    pub fn observed<'a>(&'a self, observer: &'a mut dyn Observer) -> Observed<'a> {
        Observed {
            ioas: self,
            observer,
        }
    }
}

impl Observed<'_> {
    /// [`Ioas::map`], observed.
    ///
    /// # Errors
    ///
    /// As there.
    pub fn map(
        &mut self,
        iova: u64,
        memory: &Arc<Memory>,
        part: Span<Offset>,
        prot: Prot,
    ) -> Result<(), MapError> {
        let (ioas, observer) = (self.ioas, &mut *self.observer);
        let core = ioas.gate.read();
        ioas.op(&core).map(iova, memory, part, prot, observer)
    }

    /// [`Ioas::unmap`], observed.
    ///
    /// # Errors
    ///
    /// As there.
    pub fn unmap(&mut self, range: Span<Iova>) -> Result<Unmapped, UnmapError> {
        let (ioas, observer) = (self.ioas, &mut *self.observer);
        let core = ioas.gate.read();
        let mut gone = ioas.retired.gone();
        ioas.op(&core)
            .unmap(range, false, &mut |_| (), &mut gone, observer)
    }

    /// [`Ioas::unmap_all`], observed.
    ///
    /// # Errors
    ///
    /// As there.
    pub fn unmap_all(&mut self) -> Result<Unmapped, UnmapError> {
        let (ioas, observer) = (self.ioas, &mut *self.observer);
        let core = ioas.gate.read();
        ioas.op(&core).unmap_all(observer)
    }
}
