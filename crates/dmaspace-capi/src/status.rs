//! What functions answer: a code, and a sentence for people.

use std::cell::RefCell;
use std::error::Error;
use std::ffi::{CString, c_char};

use dmaspace::iopt::named::RootError;
use dmaspace::{hostmem, ioas, iommu, iopt};

/// What a function answers. Failures are negative; `dmaspace_last_error` has the sentence.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// It is done.
    Ok = 0,
    /// A pointer is NULL or not aligned, a text is no UTF-8, a flag is not known, or a number is out of
    /// its bounds.
    Argument = -1,
    /// There is no such format, or it has no such table.
    Format = -2,
    /// The memory for tables is used up, or is none for tables of this format.
    TableMemory = -3,
    /// The range has no bytes, is no multiple of the smallest page, or lies outside of what is
    /// translated or of the memory.
    Range = -4,
    /// Something is mapped there.
    Overlap = -5,
    /// Nothing is mapped there, or not everywhere.
    NotMapped = -6,
    /// An end of the range lies inside a leaf or an area, or inside a mapping that the kernel does not
    /// cut.
    Cuts = -7,
    /// The format cannot express the permissions.
    Prot = -8,
    /// The limit on locked memory.
    OverLimit = -9,
    /// The memory cannot be pinned, its physical addresses cannot be found, or it cannot be unpinned.
    Pin = -10,
    /// The unit did not invalidate what was requested: the caller's callback has failed.
    Flush = -11,
    /// The device was not attached or detached.
    Device = -12,
    /// The handle is in use, by another thread or by the caller of this callback; or the memory is
    /// mapped still, or held by somebody who does not let go.
    Busy = -13,
    /// The operating system refuses.
    System = -14,
    /// A bug of this library. The handle must not be used any more; it is not freed.
    Panic = -15,
    /// Another failure; the sentence says which.
    Other = -16,
    /// Address spaces of this kind cannot do that; the sentence names the kind, and what.
    Unsupported = -17,
    /// The kernel has as many mappings as it can have.
    TooMany = -18,
}

/// Why something was refused: the code and the sentence.
#[derive(Debug)]
pub struct Failure {
    pub(crate) status: Status,
    pub(crate) message: String,
}

/// What the inside of a function returns.
pub(crate) type Result<T> = std::result::Result<T, Failure>;

impl Failure {
    pub(crate) fn new(status: Status, message: impl Into<String>) -> Self {
        let message = message.into();
        Self { status, message }
    }

    /// With the sentence of an error and of what caused it.
    pub(crate) fn of(status: Status, error: &dyn Error) -> Self {
        let mut message = error.to_string();
        let mut source = error.source();
        while let Some(cause) = source {
            message = format!("{message}: {cause}");
            source = cause.source();
        }
        Self { status, message }
    }
}

/// A failure with the code that `$status` finds for an error of this type.
macro_rules! failures {
    ($($error:ty => |$name:ident| $status:expr;)*) => {
        $(
            impl From<$error> for Failure {
                fn from(error: $error) -> Self {
                    let $name = &error;
                    Self::of($status, &error)
                }
            }
        )*
    };
}

failures! {
    RootError => |_error| Status::Format;
    iopt::ArenaError => |_error| Status::TableMemory;
    iopt::BuildError => |error| match error {
        iopt::BuildError::NoTables(_)
        | iopt::BuildError::Broken(_)
        | iopt::BuildError::TableMemory { .. }
        | iopt::BuildError::TableAddress { .. } => Status::TableMemory,
        _ => Status::Format,
    };
    iopt::TableMapError => |error| of_map(error);
    iopt::TableUnmapError => |error| of_unmap(error);
    hostmem::MappingError => |_error| Status::Argument;
    hostmem::PinnerError => |_error| Status::System;
    iommu::FlushError => |_error| Status::Flush;
    ioas::KernelError => |error| of_kernel(error);
    ioas::MapError => |error| of_space_map(error);
    ioas::UnmapError => |error| of_space_unmap(error);
    ioas::AttachError => |error| match error {
        ioas::AttachError::Reserved { .. } | ioas::AttachError::Conflict(_) => Status::Range,
        ioas::AttachError::Replay { cause, .. } => of_space_map(cause),
        _ => Status::Device,
    };
    ioas::DetachError => |_error| Status::Device;
    ioas::CloseError => |error| match error {
        ioas::CloseError::Unmap(cause) => of_space_unmap(cause),
        ioas::CloseError::Detach(_) => Status::Device,
        _ => Status::Other,
    };
    ioas::ReleaseError => |error| match error {
        ioas::ReleaseError::Unmap(cause) => of_space_unmap(cause),
        ioas::ReleaseError::SetAside(cause) => of_space_map(cause),
        _ => Status::Other,
    };
    ioas::PinError => |error| match error {
        ioas::PinError::Range(_) => Status::Range,
        ioas::PinError::NotThere { .. } => Status::NotMapped,
        ioas::PinError::Prot { .. } => Status::Prot,
        ioas::PinError::Memory(cause) => of_space_map(cause),
        _ => Status::Other,
    };
    ioas::TrackingError => |error| match error {
        ioas::TrackingError::Unsupported(_) => Status::Unsupported,
        ioas::TrackingError::Kernel(_) => Status::System,
        ioas::TrackingError::Split(cause) => of_resize(cause),
        ioas::TrackingError::Clear(cause) => of_harvest(cause),
        ioas::TrackingError::Flush(_) => Status::Flush,
        _ => Status::Other,
    };
    ioas::HarvestError => |error| of_harvest(error);
    iopt::PendingError => |error| match error {
        iopt::PendingError::Span(_) => Status::Range,
        _ => Status::Argument,
    };
    hostmem::LimitsError => |_error| Status::System;
}

fn of_kernel(error: &ioas::KernelError) -> Status {
    match error {
        ioas::KernelError::Prot { .. } => Status::Prot,
        ioas::KernelError::NoSource => Status::Unsupported,
        _ => Status::System,
    }
}

fn of_space_map(error: &ioas::MapError) -> Status {
    match error {
        ioas::MapError::Range(_)
        | ioas::MapError::Part { .. }
        | ioas::MapError::BeyondEnd { .. }
        | ioas::MapError::Reserved { .. } => Status::Range,
        ioas::MapError::Overlap { .. } => Status::Overlap,
        ioas::MapError::Prot { .. } => Status::Prot,
        ioas::MapError::OverLimit(_) => Status::OverLimit,
        ioas::MapError::Pin(_) | ioas::MapError::Runs(_) | ioas::MapError::RunsDiffer { .. } => {
            Status::Pin
        }
        ioas::MapError::Table(cause) => of_map(cause),
        ioas::MapError::Flush(_) => Status::Flush,
        ioas::MapError::Unsupported(_) => Status::Unsupported,
        ioas::MapError::TooMany { .. } => Status::TooMany,
        ioas::MapError::Kernel(_) => Status::System,
        _ => Status::Other,
    }
}

fn of_map(error: &iopt::TableMapError) -> Status {
    match error {
        iopt::TableMapError::Range(_)
        | iopt::TableMapError::OutputTooWide { .. }
        | iopt::TableMapError::PageSize(_) => Status::Range,
        iopt::TableMapError::Overlap { .. } => Status::Overlap,
        iopt::TableMapError::Prot { .. } => Status::Prot,
        iopt::TableMapError::NoTables(_) | iopt::TableMapError::Broken(_) => Status::TableMemory,
    }
}

fn of_unmap(error: &iopt::TableUnmapError) -> Status {
    match error {
        iopt::TableUnmapError::Range(_) | iopt::TableUnmapError::PageSize(_) => Status::Range,
        iopt::TableUnmapError::InsideLeaf { .. } | iopt::TableUnmapError::OtherSize { .. } => {
            Status::Cuts
        }
        iopt::TableUnmapError::Hole { .. } => Status::NotMapped,
        iopt::TableUnmapError::DirtyWanted | iopt::TableUnmapError::DirtyNotKept { .. } => {
            Status::Other
        }
        iopt::TableUnmapError::Broken(_) => Status::TableMemory,
    }
}

fn of_space_unmap(error: &ioas::UnmapError) -> Status {
    match error {
        ioas::UnmapError::CutsArea { .. } | ioas::UnmapError::CutsMapping { .. } => Status::Cuts,
        ioas::UnmapError::Hole { .. } => Status::NotMapped,
        ioas::UnmapError::BeyondEnd { .. } => Status::Range,
        ioas::UnmapError::Table(cause) => of_unmap(cause),
        ioas::UnmapError::Flush(_) => Status::Flush,
        ioas::UnmapError::Unpin(_) => Status::Pin,
        ioas::UnmapError::Held { .. } => Status::Busy,
        ioas::UnmapError::Kernel(_) => Status::System,
        ioas::UnmapError::Cut(cause) => of_resize(cause),
        _ => Status::Other,
    }
}

fn of_resize(error: &iopt::ResizeError<iommu::FlushError>) -> Status {
    match error {
        iopt::ResizeError::Range(_) | iopt::ResizeError::PageSize(_) => Status::Range,
        iopt::ResizeError::BreakBeforeMake { .. } => Status::Cuts,
        iopt::ResizeError::NoTables(_) | iopt::ResizeError::Broken(_) => Status::TableMemory,
        iopt::ResizeError::Flush(_) => Status::Flush,
        iopt::ResizeError::Unmap(cause) => of_unmap(cause),
        iopt::ResizeError::Foreign { .. } => Status::Other,
    }
}

const fn of_harvest(error: &ioas::HarvestError) -> Status {
    match error {
        ioas::HarvestError::Kernel(_) => Status::System,
        ioas::HarvestError::Flush(_) => Status::Flush,
        _ => Status::Other,
    }
}

thread_local! {
    static LAST: RefCell<CString> = RefCell::default();
}

/// A sentence as C reads it.
pub(crate) fn text(message: &str) -> CString {
    let mut bytes = message.as_bytes().to_vec();
    bytes.retain(|byte| *byte != 0);
    // Without a NUL it is one.
    CString::new(bytes).unwrap_or_default()
}

/// Notes the sentence of this thread's last failure.
pub(crate) fn note(message: &str) {
    // While the thread ends there is nobody left to read it.
    let _ = LAST.try_with(|last| last.replace(text(message)));
}

/// The sentence about the last failure of a function in this thread, with numbers; empty when there was
/// none. It is this library's, and stays until the next failure in this thread.
#[unsafe(no_mangle)]
pub extern "C" fn dmaspace_last_error() -> *const c_char {
    let last = LAST.try_with(|last| last.borrow().as_ptr());
    last.unwrap_or(c"".as_ptr())
}

/// The version of this library, like "0.2.0". It is this library's, and stays.
#[unsafe(no_mangle)]
pub extern "C" fn dmaspace_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}
