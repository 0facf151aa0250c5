//! The caller's unit: callbacks with what it walks and what it invalidates.

use std::ffi::{c_int, c_void};
use std::sync::{Mutex, MutexGuard, PoisonError};

use dmaspace::iommu::{
    self, AttachError, Capabilities, DeviceId, DomainId, Fault, FlushError, FormatSupport, NodeId,
    UnitError,
};
use dmaspace::iopt;

use crate::format::Chosen;
use crate::status::{Failure, Result, Status};
use crate::translation::{Root, Run, Span};

/// What a unit invalidates.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Invalidation {
    /// The ranges of device addresses. They are this library's, and gone when the callback returns.
    pub ranges: *const Span,
    /// How many.
    pub count: usize,
    /// The levels of the leaves that were there: bit n for level n.
    pub leaf_levels: u32,
    /// Tables were unlinked: what the unit has cached of tables must go, too.
    pub tables_unlinked: bool,
    /// Everything of this table, and not only the ranges.
    pub everything: bool,
}

/// Has every unit that walks a table invalidate what `what` says, and returns 0 when no access that could
/// have used it is under way any more; anything else says that this has failed. It must not use the
/// handle that is in use.
pub type Flush =
    Option<unsafe extern "C" fn(context: *mut c_void, what: *const Invalidation) -> c_int>;

/// Is told of a run that devices do not reach any more.
pub type Released = Option<unsafe extern "C" fn(context: *mut c_void, run: Run)>;

/// Who walks an address space's table: the caller's IOMMU, or what stands for it. Its walks must see
/// what processors store. The callbacks return 0, or anything else when they have failed; they are called by
/// the functions of the address space, in their thread, one at a time, and must not use that address
/// space.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Unit {
    /// Passed to the callbacks. It must be good until the address space is destroyed.
    pub context: *mut c_void,
    /// Has `device` translate through the table at `root`.
    pub attach:
        Option<unsafe extern "C" fn(context: *mut c_void, device: u32, root: *const Root) -> c_int>,
    /// Has everything fault that `device` does from now on, and returns when no access through the table
    /// is under way.
    pub detach: Option<unsafe extern "C" fn(context: *mut c_void, device: u32) -> c_int>,
    /// Forgets what was unmapped: see `dmaspace_flush`.
    pub flush: Flush,
}

/// A unit whose callbacks are all there.
#[derive(Debug)]
pub(crate) struct Callbacks {
    context: *mut c_void,
    attach: unsafe extern "C" fn(*mut c_void, u32, *const Root) -> c_int,
    detach: unsafe extern "C" fn(*mut c_void, u32) -> c_int,
    flush: unsafe extern "C" fn(*mut c_void, *const Invalidation) -> c_int,
    capabilities: Capabilities,
    /// The devices that are attached, so that none is attached over.
    devices: Mutex<Vec<DeviceId>>,
}

// SAFETY: the context is only passed on. The header says that callbacks come from the thread that calls,
// and an address space, which alone knows its unit, is used by one at a time.
unsafe impl Send for Callbacks {}
// SAFETY: as above.
unsafe impl Sync for Callbacks {}

impl Unit {
    /// The unit that walks tables of the chosen format.
    ///
    /// # Safety
    ///
    /// The callbacks do what the header says, for as long as the result is there.
    pub(crate) unsafe fn callbacks(&self, chosen: &Chosen) -> Result<Callbacks> {
        let missing = |what| {
            let message = format!("unit->{what} is NULL");
            move || Failure::new(Status::Argument, message)
        };
        let capabilities = Capabilities::new().with_format(FormatSupport {
            format: chosen.format(),
            levels: 1 << chosen.levels().min(15),
            page_sizes: chosen.sizes,
        });
        Ok(Callbacks {
            context: self.context,
            attach: self.attach.ok_or_else(missing("attach"))?,
            detach: self.detach.ok_or_else(missing("detach"))?,
            flush: self.flush.ok_or_else(missing("flush"))?,
            capabilities,
            devices: Mutex::default(),
        })
    }
}

impl Callbacks {
    fn devices(&self) -> MutexGuard<'_, Vec<DeviceId>> {
        self.devices.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn forget(&self, domain: DomainId, what: &Invalidation) -> std::result::Result<(), FlushError> {
        // SAFETY: the caller's callback, with its context; `what` is there until it returns.
        match unsafe { (self.flush)(self.context, what) } {
            0 => Ok(()),
            code => Err(FlushError::Unit {
                domain,
                cause: refused("the answer of the flush callback", code),
            }),
        }
    }
}

/// What a callback has answered instead of 0.
const fn refused(register: &'static str, code: c_int) -> UnitError {
    UnitError::Refused {
        register,
        value: code as u32 as u64,
    }
}

impl iommu::Unit for Callbacks {
    fn capabilities(&self) -> Capabilities {
        self.capabilities
    }

    fn node(&self) -> Option<NodeId> {
        None
    }

    fn attach(
        &self,
        device: DeviceId,
        domain: DomainId,
        root: iopt::Root,
    ) -> std::result::Result<(), AttachError> {
        let mut devices = self.devices();
        if devices.contains(&device) {
            return Err(AttachError::AlreadyAttached { device, domain });
        }
        let root = Root::from(root);
        // SAFETY: the caller's callback, with its context; `root` is there until it returns.
        match unsafe { (self.attach)(self.context, device.0, &raw const root) } {
            0 => {
                devices.push(device);
                Ok(())
            }
            code => Err(AttachError::Unit {
                device,
                cause: refused("the answer of the attach callback", code),
            }),
        }
    }

    fn detach(&self, device: DeviceId) -> std::result::Result<(), AttachError> {
        // SAFETY: the caller's callback, with its context.
        match unsafe { (self.detach)(self.context, device.0) } {
            0 => {
                self.devices().retain(|attached| *attached != device);
                Ok(())
            }
            code => Err(AttachError::Unit {
                device,
                cause: refused("the answer of the detach callback", code),
            }),
        }
    }

    fn invalidate(
        &self,
        domain: DomainId,
        what: &iopt::Invalidation,
    ) -> std::result::Result<(), FlushError> {
        with_ranges(what, |what| self.forget(domain, what))
    }

    fn invalidate_domain(&self, domain: DomainId) -> std::result::Result<(), FlushError> {
        let everything = Invalidation {
            ranges: std::ptr::null(),
            count: 0,
            leaf_levels: u32::MAX,
            tables_unlinked: true,
            everything: true,
        };
        self.forget(domain, &everything)
    }

    fn drain_faults(&self, _sink: &mut dyn FnMut(Fault)) -> u64 {
        0
    }
}

/// Lends `what` as C reads it.
fn with_ranges<T>(what: &iopt::Invalidation, visit: impl FnOnce(&Invalidation) -> T) -> T {
    let ranges: Vec<Span> = what.ranges().iter().map(|range| (*range).into()).collect();
    visit(&Invalidation {
        ranges: ranges.as_ptr(),
        count: ranges.len(),
        leaf_levels: what.leaf_levels(),
        tables_unlinked: what.tables_unlinked(),
        everything: what.new_root().is_some(),
    })
}

/// The callbacks of one call on a table.
pub(crate) struct Caller {
    flush: Flush,
    released: Released,
    context: *mut c_void,
}

impl Caller {
    /// # Safety
    ///
    /// The callbacks do what the header says, as long as this is there.
    pub(crate) const unsafe fn new(flush: Flush, released: Released, context: *mut c_void) -> Self {
        Self {
            flush,
            released,
            context,
        }
    }

    /// Without a callback there is no unit that could remember.
    pub(crate) fn flush(&self, what: &iopt::Invalidation) -> Result<()> {
        let Some(flush) = self.flush else {
            return Ok(());
        };
        // SAFETY: promised to `new`; what is lent is there until the callback returns.
        match with_ranges(what, |what| unsafe { flush(self.context, what) }) {
            0 => Ok(()),
            code => {
                let message = format!("the flush callback has answered {code}");
                Err(Failure::new(Status::Flush, message))
            }
        }
    }

    pub(crate) fn released(&self, run: Run) {
        if let Some(released) = self.released {
            // SAFETY: promised to `new`.
            unsafe { released(self.context, run) }
        }
    }
}
