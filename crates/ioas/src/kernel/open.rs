//! Address spaces over mappers.

use super::{Kernel, KernelError, Mapper};
use crate::space::Ioas;
use crate::space::open::{IoasOptions, OpenError};

impl IoasOptions {
    /// An address space over `mapper`, to which nothing is attached and which maps nothing.
    ///
    /// # Errors
    ///
    /// [`OpenError::Unsupported`].
    pub fn over_mapper<K: Mapper>(self, mapper: K) -> Result<Ioas, OpenError> {
        let kernel = Kernel::new(mapper, self.granule);
        self.set_up(Ioas::over_kernel(kernel))
    }

    /// An address space over mappers that `open` opens when they are needed: one when the first device is
    /// attached, and under [`Placement::PerNode`](crate::Placement::PerNode) one for the devices of each memory node. Each is closed
    /// with its last device. Such an address space is not handed over.
    ///
    /// # Errors
    ///
    /// [`OpenError::Unsupported`].
    pub fn over_mappers<K: Mapper>(
        self,
        open: impl Fn() -> Result<K, KernelError> + Send + 'static,
    ) -> Result<Ioas, OpenError> {
        let kernel = Kernel::opening(open, self.granule);
        self.set_up(Ioas::over_kernel(kernel))
    }
}

impl Ioas {
    /// An empty address space over `mapper`, a kernel's interface, to which nothing is attached and which
    /// maps nothing.
    pub fn over_mapper(mapper: impl Mapper) -> Self {
        Self::over_kernel(Kernel::new(mapper, None))
    }
}
