//! An address space: what devices see of memory that is pinned and charged.

use std::mem;
use std::sync::{Arc, Mutex};

use dmaspace::ioas::{HostTables, Ioas, Own};
use dmaspace::iommu::{DeviceId, DomainId};
use dmaspace::iopt::AnyTable;
use dmaspace::runs;

use crate::boundary::{Output, end, exclusive, guarded, input};
use crate::format::TableConfig;
use crate::memory::Memory;
use crate::status::{Failure, Result, Status};
use crate::table_memory::TableMemory;
use crate::translation::{Leaf, Root, leaf, prot};
use crate::unit::{Callbacks, Unit};

/// An address space over a table of ours and a unit of the caller's.
#[derive(Debug)]
pub struct Space(Mutex<Inner>);

#[derive(Debug)]
struct Inner {
    /// `None` once it was closed.
    space: Option<Ioas<Own<Arc<HostTables>>>>,
    unit: Arc<Callbacks>,
    tables: Arc<HostTables>,
}

impl Inner {
    fn open(&mut self) -> Result<&mut Ioas<Own<Arc<HostTables>>>> {
        let closed = || Failure::new(Status::Busy, "space is being destroyed");
        self.space.as_mut().ok_or_else(closed)
    }
}

/// What an address space is like now.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SpaceInfo {
    /// What the unit is told to walk. It does not change.
    pub root: Root,
    /// The sizes of leaves: bit n is set when there are leaves of 2^n bytes.
    pub page_sizes: u64,
    /// Tables that it consists of.
    pub tables: u64,
    /// Areas: what was mapped and is not unmapped.
    pub areas: u64,
    /// Areas that are unmapped, but pinned and charged until a flush succeeds.
    pub retired: u64,
    /// Attached devices.
    pub devices: u64,
}

/// Makes an empty address space, with a table as `config` says, of a format with tables of 4 KiB other
/// than "armv7-short", and `memory` as for `dmaspace_table_new`. `unit` is who walks it; the structure is
/// copied.
///
/// `*space` is the caller's, to be destroyed by `dmaspace_space_destroy`.
///
/// Fails with ARGUMENT, FORMAT or TABLE_MEMORY.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmaspace_space_new(
    config: *const TableConfig,
    memory: *const TableMemory,
    unit: *const Unit,
    space: *mut *mut Space,
) -> Status {
    guarded(|| {
        // SAFETY: what the caller passes is what the header says.
        let (config, output) = unsafe { (input(config, "config")?, Output::new(space, "space")?) };
        // SAFETY: as above.
        let memory = unsafe { TableMemory::or_taken(memory) }?;
        // SAFETY: the name is the caller's.
        let chosen = unsafe { config.chosen() }?;
        // SAFETY: the callbacks are the caller's, good until the address space is destroyed.
        let unit = unsafe { input(unit, "unit")?.callbacks(&chosen) }?;
        // SAFETY: the caller answers for that memory.
        let tables = unsafe { memory.arena::<12>(chosen.address_bits()) }?;
        let table = AnyTable::new(
            chosen.format(),
            chosen.levels(),
            chosen.sizes,
            Arc::clone(&tables),
        )?;
        let inner = Inner {
            space: Some(Ioas::new(DomainId(1), table)),
            unit: Arc::new(unit),
            tables,
        };
        output.put(Box::into_raw(Box::new(Space(Mutex::new(inner)))));
        Ok(())
    })
}

/// Has the unit let `device` see the address space. For PCI a device is `segment << 16 | bus << 8 |
/// device << 3 | function`.
///
/// Fails with ARGUMENT, BUSY or DEVICE.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmaspace_space_attach(space: *const Space, device: u32) -> Status {
    guarded(|| {
        // SAFETY: what the caller passes is what the header says.
        let space = unsafe { input(space, "space") }?;
        let inner = &mut *exclusive(&space.0, "space")?;
        let unit = Arc::clone(&inner.unit);
        Ok(inner.open()?.attach(unit, DeviceId(device))?)
    })
}

/// Has the unit take the address space away from `device`. What is mapped stays.
///
/// Fails with ARGUMENT, BUSY or DEVICE; after that the device counts as attached.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmaspace_space_detach(space: *const Space, device: u32) -> Status {
    guarded(|| {
        // SAFETY: what the caller passes is what the header says.
        let space = unsafe { input(space, "space") }?;
        let mut inner = exclusive(&space.0, "space")?;
        Ok(inner.open()?.detach(DeviceId(device))?)
    })
}

/// Maps `len` bytes from `offset` on of `memory` at `iova`, all or nothing: what nobody has mapped yet is
/// charged and pinned. `prot` is DMASPACE_READ, DMASPACE_WRITE and so on.
///
/// Fails with ARGUMENT, RANGE, OVERLAP, PROT, OVER_LIMIT, PIN, TABLE_MEMORY, FLUSH or BUSY.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmaspace_space_map(
    space: *const Space,
    iova: u64,
    memory: *const Memory,
    offset: u64,
    len: u64,
    prot: u32,
) -> Status {
    guarded(|| {
        // SAFETY: what the caller passes is what the header says.
        let (space, memory) = unsafe { (input(space, "space")?, input(memory, "memory")?) };
        let prot = self::prot(prot)?;
        let memory = exclusive(&memory.0, "memory")?;
        let part = runs::Span::new(offset, len);
        let mut inner = exclusive(&space.0, "space")?;
        Ok(inner.open()?.map(iova, &memory, part, prot, &mut ())?)
    })
}

/// Unmaps every area in a range, has the unit forget them, and then unpins what nobody else maps.
/// `*unpinned` is how many bytes that were; `unpinned` may be NULL.
///
/// Fails with ARGUMENT, RANGE, CUTS or BUSY, and nothing has changed; with FLUSH, and the areas are
/// unmapped, but their memory is pinned until `dmaspace_space_flush` succeeds; or with PIN.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmaspace_space_unmap(
    space: *const Space,
    iova: u64,
    len: u64,
    unpinned: *mut u64,
) -> Status {
    guarded(|| {
        // SAFETY: what the caller passes is what the header says.
        let (space, output) = unsafe {
            (
                input(space, "space")?,
                Output::wanted(unpinned, "unpinned")?,
            )
        };
        let mut inner = exclusive(&space.0, "space")?;
        let range = runs::Span::new(iova, len);
        let unmapped = inner.open()?.unmap(range, &mut ())?;
        if let Some(output) = output {
            output.put(unmapped.unpinned);
        }
        Ok(())
    })
}

/// Has the unit forget what was unmapped when a flush failed, and unpins it.
///
/// Fails with ARGUMENT, FLUSH, PIN or BUSY.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmaspace_space_flush(space: *const Space) -> Status {
    guarded(|| {
        // SAFETY: what the caller passes is what the header says.
        let space = unsafe { input(space, "space") }?;
        exclusive(&space.0, "space")?.open()?.flush()?;
        Ok(())
    })
}

/// The leaf that maps `iova`.
///
/// Fails with NOT_MAPPED, ARGUMENT or BUSY.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmaspace_space_translate(
    space: *const Space,
    iova: u64,
    found: *mut Leaf,
) -> Status {
    guarded(|| {
        // SAFETY: what the caller passes is what the header says.
        let (space, output) = unsafe { (input(space, "space")?, Output::new(found, "found")?) };
        let mut inner = exclusive(&space.0, "space")?;
        output.put(leaf(inner.open()?.leaf_at(iova), iova)?);
        Ok(())
    })
}

/// What the address space is like now.
///
/// Fails with ARGUMENT or BUSY.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmaspace_space_get_info(
    space: *const Space,
    info: *mut SpaceInfo,
) -> Status {
    guarded(|| {
        // SAFETY: what the caller passes is what the header says.
        let (space, output) = unsafe { (input(space, "space")?, Output::new(info, "info")?) };
        let mut inner = exclusive(&space.0, "space")?;
        let space = inner.open()?;
        let table = space.table().ok_or_else(|| {
            // It was given one, which stays.
            Failure::new(Status::Other, "the address space has no table")
        })?;
        output.put(SpaceInfo {
            root: table.root().into(),
            page_sizes: table.page_sizes().bits(),
            tables: table.tables(),
            areas: space.len() as u64,
            retired: space.retired() as u64,
            devices: space.devices().count() as u64,
        });
        Ok(())
    })
}

/// Detaches every device, unmaps and unpins everything, and frees the handle. NULL is fine.
///
/// Fails with ARGUMENT, BUSY or PANIC, and it is still there. After any other failure the handle is gone,
/// but memory that a device may still reach stays pinned for good, and its handle answers BUSY; tables and
/// the memory for them are not freed then, and the caller must not reuse them either.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmaspace_space_destroy(space: *mut Space) -> Status {
    guarded(|| {
        let mut closed = Ok(());
        let look = |space: &Space| {
            let mut inner = exclusive(&space.0, "space")?;
            if let Some(space) = inner.space.take() {
                closed = space.close();
            }
            if closed.is_err() {
                // A device may still walk what lies there.
                mem::forget(Arc::clone(&inner.tables));
            }
            Ok(())
        };
        // SAFETY: the handle is the caller's, who says that nobody uses it any more.
        unsafe { end(space, "space", look) }?;
        Ok(closed?)
    })
}
