//! An address space: what devices see of memory that is pinned and charged.

use std::sync::{Arc, Mutex};

use dmaspace::ioas::{Capabilities, Ioas};
use dmaspace::iommu::DomainId;
use dmaspace::iopt::{AnyTable, BuildError};
use dmaspace::runs;

use crate::boundary::{Output, end, exclusive, guarded, input};
use crate::format::TableConfig;
use crate::memory::Memory;
use crate::opened::Opened;
use crate::status::{Failure, Result, Status};
use crate::table_memory::TableMemory;
use crate::translation::{Leaf, Root, Span, leaf, prot};
use crate::unit::Unit;

/// An address space: over a table of this library and a unit of the caller's (`dmaspace_space_new`), over
/// an iommufd (`dmaspace_space_over_iommufd`), or over a container of VFIO's type 1
/// (`dmaspace_space_over_container`). The functions below work on each; what one cannot do it refuses with
/// UNSUPPORTED.
#[derive(Debug)]
pub struct Space(Mutex<Option<Opened>>);

impl Space {
    /// The handle of it.
    pub(crate) fn handle(opened: Opened) -> *mut Self {
        Box::into_raw(Box::new(Self(Mutex::new(Some(opened)))))
    }

    /// Has `work` use it, for this call alone.
    pub(crate) fn with<T>(&self, work: impl FnOnce(&mut Opened) -> Result<T>) -> Result<T> {
        let mut opened = exclusive(&self.0, "space")?;
        let closed = || Failure::new(Status::Busy, "space is being destroyed");
        work(opened.as_mut().ok_or_else(closed)?)
    }
}

/// It cuts mappings without a moment in which the rest is missing.
pub const DMASPACE_HITLESS_CUT: u32 = 1;
/// It unmaps any part of what was mapped, also without cutting first.
pub const DMASPACE_UNMAP_PART: u32 = 2;
/// It pins and charges memory once, at however many addresses it is.
pub const DMASPACE_SHARES_PINS: u32 = 4;
/// It tells which pages devices have written to.
pub const DMASPACE_PAGE_DIRTY: u32 = 8;
/// Its tables lie where the caller says, in leaves of the sizes that it wants.
pub const DMASPACE_TABLE_PLACEMENT: u32 = 16;

/// What it can do, in bits.
fn can(capabilities: Capabilities) -> u32 {
    [
        (capabilities.hitless_cut, DMASPACE_HITLESS_CUT),
        (capabilities.unmap_part, DMASPACE_UNMAP_PART),
        (capabilities.shares_pins, DMASPACE_SHARES_PINS),
        (capabilities.page_dirty, DMASPACE_PAGE_DIRTY),
        (capabilities.table_placement, DMASPACE_TABLE_PLACEMENT),
    ]
    .into_iter()
    .filter_map(|(can, bit)| can.then_some(bit))
    .sum()
}

/// What an address space is like now.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SpaceInfo {
    /// What the unit is told to walk. It does not change. All 0 over mappings of the kernel, which shows no
    /// tables.
    pub root: Root,
    /// The sizes of leaves: bit n is set when there are leaves of 2^n bytes; 0 over mappings of the kernel.
    pub page_sizes: u64,
    /// Tables that it consists of; 0 over mappings of the kernel.
    pub tables: u64,
    /// Areas: what was mapped and is not unmapped.
    pub areas: u64,
    /// Areas that are unmapped, but pinned and charged until a flush succeeds.
    pub retired: u64,
    /// Attached devices, or groups.
    pub devices: u64,
    /// What ends of areas must be multiples of, bytes; 1 when nothing is known yet.
    pub granule: u64,
    /// Windows: see `dmaspace_space_get_window`.
    pub windows: u64,
    /// The kernel's mappings; 0 over tables of this library.
    pub mappings: u64,
    /// The most of them that there can be; 0 without a limit.
    pub most_mappings: u64,
    /// Bytes that the kernel has pinned and charged for them.
    pub charged: u64,
    /// What it can do: DMASPACE_HITLESS_CUT and so on.
    pub can: u32,
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
        )
        .map_err(|cause| match cause {
            BuildError::TableMemory { .. } => Failure::new(Status::Format, cause.to_string()),
            cause => cause.into(),
        })?;
        let space = Ioas::new(DomainId(1), table);
        output.put(Space::handle(Opened::over_tables(
            space,
            Arc::new(unit),
            tables,
        )));
        Ok(())
    })
}

/// Has the unit let `device` see the address space. For PCI a device is `segment << 16 | bus << 8 |
/// device << 3 | function`. Over mappings of the kernel devices are attached by their files:
/// `dmaspace_space_attach_file`.
///
/// Fails with ARGUMENT, BUSY, DEVICE or UNSUPPORTED.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmaspace_space_attach(space: *const Space, device: u32) -> Status {
    guarded(|| {
        // SAFETY: what the caller passes is what the header says.
        let space = unsafe { input(space, "space") }?;
        space.with(|opened| opened.attach(device))
    })
}

/// Takes the address space away from `device`. What is mapped stays; the kernel unmaps and unpins it while
/// no device is attached. A group leaves its container only when all its devices are closed.
///
/// Fails with ARGUMENT, BUSY or DEVICE; after that the device counts as attached.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmaspace_space_detach(space: *const Space, device: u32) -> Status {
    guarded(|| {
        // SAFETY: what the caller passes is what the header says.
        let space = unsafe { input(space, "space") }?;
        space.with(|opened| opened.detach(device))
    })
}

/// Maps `len` bytes from `offset` on of `memory` at `iova`, all or nothing: what nobody has mapped yet is
/// charged and pinned. `prot` is DMASPACE_READ, DMASPACE_WRITE and so on; the kernel maps for these two
/// only. Before its first device it only notes what is mapped, and pins when that comes.
///
/// Fails with ARGUMENT, RANGE, OVERLAP, PROT, OVER_LIMIT, PIN, TABLE_MEMORY, TOO_MANY, SYSTEM, FLUSH or BUSY.
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
        let mut memory = exclusive(&memory.0, "memory")?;
        let part = runs::Span::new(offset, len);
        space.with(|opened| {
            let memory = memory.charged_to(opened.counted)?;
            Ok(opened.space.map(iova, &memory, part, prot, &mut ())?)
        })
    })
}

/// Unmaps every area in a range, has the unit invalidate them, and then unpins what no other space maps.
/// `*unpinned` is how many bytes that were, 0 where the kernel unpins; `unpinned` may be NULL.
///
/// Fails with ARGUMENT, RANGE, CUTS, SYSTEM or BUSY, and nothing has changed; with FLUSH, and the areas are
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
        let range = runs::Span::new(iova, len);
        let unmapped = space.with(|opened| Ok(opened.space.unmap(range, &mut ())?))?;
        if let Some(output) = output {
            output.put(unmapped.unpinned);
        }
        Ok(())
    })
}

/// Has the unit invalidate what was unmapped when a flush failed, and unpins it.
///
/// Fails with ARGUMENT, FLUSH, PIN or BUSY.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmaspace_space_flush(space: *const Space) -> Status {
    guarded(|| {
        // SAFETY: what the caller passes is what the header says.
        let space = unsafe { input(space, "space") }?;
        space.with(|opened| Ok(opened.space.flush()?))?;
        Ok(())
    })
}

/// The leaf that maps `iova`.
///
/// Fails with NOT_MAPPED, ARGUMENT, BUSY or, over mappings of the kernel, UNSUPPORTED.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmaspace_space_translate(
    space: *const Space,
    iova: u64,
    found: *mut Leaf,
) -> Status {
    guarded(|| {
        // SAFETY: what the caller passes is what the header says.
        let (space, output) = unsafe { (input(space, "space")?, Output::new(found, "found")?) };
        let found = space.with(|opened| {
            opened.shows_tables()?;
            leaf(opened.space.leaf_at(iova), iova)
        })?;
        output.put(found);
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
        output.put(space.with(|opened| Ok(info_of(opened)))?);
        Ok(())
    })
}

fn info_of(opened: &Opened) -> SpaceInfo {
    let space = &opened.space;
    let places = space.places();
    let mut info = SpaceInfo {
        areas: space.len() as u64,
        retired: space.retired() as u64,
        devices: places
            .iter()
            .map(|place| place.endpoints.len() as u64)
            .sum(),
        granule: space.granule(),
        windows: space.windows().len() as u64,
        mappings: places.iter().map(|place| place.mappings).sum(),
        most_mappings: space.capabilities().most_mappings.unwrap_or(0),
        charged: places.iter().map(|place| place.charged).sum(),
        can: can(space.capabilities()),
        ..SpaceInfo::default()
    };
    space.with_table(|table| {
        info.root = table.root().into();
        info.page_sizes = table.page_sizes().bits();
        info.tables = table.tables();
    });
    info
}

/// The window `index`, from 0 on: device addresses that can be mapped, with the devices that are attached
/// now. They are in order; stretches of more than 2^63 bytes come in two.
///
/// Fails with ARGUMENT, also when there is no such window, or BUSY.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmaspace_space_get_window(
    space: *const Space,
    index: usize,
    window: *mut Span,
) -> Status {
    guarded(|| {
        // SAFETY: what the caller passes is what the header says.
        let (space, output) = unsafe { (input(space, "space")?, Output::new(window, "window")?) };
        let windows = space.with(|opened| Ok(opened.space.windows()))?;
        let none = || {
            let message = format!("there are {} windows, and no window {index}", windows.len());
            Failure::new(Status::Argument, message)
        };
        output.put((*windows.get(index).ok_or_else(none)?).into());
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
            if let Some(opened) = exclusive(&space.0, "space")?.take() {
                closed = opened.close();
            }
            Ok(())
        };
        // SAFETY: the handle is the caller's, who says that nobody uses it any more.
        unsafe { end(space, "space", look) }?;
        Ok(closed?)
    })
}
