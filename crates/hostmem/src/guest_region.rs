//! A region of vm-memory's guest memory as a mapping.

use std::any::Any;
use std::io;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::Arc;

use thiserror::Error;
use vm_memory::bitmap::Bitmap;
use vm_memory::{GuestMemoryRegion, GuestRegionMmap};

use crate::mapping::{Mapping, MappingError};

/// Failure to use a region of guest memory as a mapping.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum GuestRegionError {
    /// It is not mapped for reading and writing.
    #[error("guest memory is not mapped for reading and writing (PROT_… {prot:#x})")]
    Protection {
        /// As `mmap` received it (`PROT_…`).
        prot: i32,
    },
    /// Its memory file cannot be used.
    #[error("the memory file of guest memory cannot be used")]
    File(#[source] io::Error),
    /// It is not made of whole pages.
    #[error(transparent)]
    Mapping(#[from] MappingError),
}

impl Mapping {
    /// A region of guest memory as a mapping, which holds the region: dropping the `GuestMemoryMmap`
    /// unmaps nothing. Offsets are those in the region.
    ///
    /// ```
    /// use std::sync::Arc;
    /// use hostmem::{Discard, Mapping};
    /// use runs::Span;
    /// use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap};
    ///
    /// let guest = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(1 << 30), 1 << 20)])?;
    /// guest.write_obj(7u64, GuestAddress((1 << 30) + 0x3000))?;
    /// for region in guest.iter() {
    ///     let discard = Discard::new(Arc::new(Mapping::of_guest_region(region)?))?;
    ///     discard.discard(&[Span::new(0x2000, 0x2000)], &mut |part, why| println!("{part}: {why}"))?;
    /// }
    /// assert_eq!(guest.read_obj::<u64>(GuestAddress((1 << 30) + 0x3000))?, 0);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// See [`GuestRegionError`].
    pub fn of_guest_region<B: Bitmap + Send + Sync + 'static>(
        region: &GuestRegionMmap<B>,
    ) -> Result<Self, GuestRegionError> {
        const ACCESS: i32 = libc::PROT_READ | libc::PROT_WRITE;
        let mmap = region.get_mmap();
        let prot = mmap.prot();
        let start = NonNull::new(mmap.as_ptr()).filter(|_| prot & ACCESS == ACCESS);
        let start = start.ok_or(GuestRegionError::Protection { prot })?;
        // A private mapping has pages of its own.
        let shared = mmap.flags() & libc::MAP_TYPE == libc::MAP_SHARED;
        let file = mmap.file_offset().filter(|_| shared).map(|file| {
            let own = file.file().try_clone();
            own.map(|own| (OwnedFd::from(own), file.start()))
        });
        let file = file.transpose().map_err(GuestRegionError::File)?;
        let owner: Arc<dyn Any + Send + Sync> = mmap.clone();
        // SAFETY: the owner is the region, which stays mapped as it is until it is dropped. vm-memory
        // treats it as memory that changes at any time: it accesses it through raw pointers, one word
        // by one volatile access and more by copies, and makes references to atomic cells only.
        Ok(unsafe { Self::foreign(owner, start, region.len(), file) }?)
    }
}
