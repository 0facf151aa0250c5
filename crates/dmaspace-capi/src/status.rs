//! What functions answer: a code, and a sentence for people.

use std::cell::RefCell;
use std::error::Error;
use std::ffi::{CString, c_char};

use dmaspace::tables::RootError;
use dmaspace::{hostmem, ioas, iopt};

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
    /// An end of the range lies inside a leaf or an area.
    Cuts = -7,
    /// The format cannot express the permissions.
    Prot = -8,
    /// The limit on locked memory.
    OverLimit = -9,
    /// The memory cannot be pinned, its physical addresses cannot be found, or it cannot be unpinned.
    Pin = -10,
    /// The unit has not forgotten what it was told to: the caller's callback has failed.
    Flush = -11,
    /// The device was not attached or detached.
    Device = -12,
    /// The handle is in use, by another thread or by the caller of this callback; or the memory is
    /// mapped still.
    Busy = -13,
    /// The operating system refuses.
    System = -14,
    /// A bug of this library. The handle must not be used any more; it is not freed.
    Panic = -15,
    /// Another failure; the sentence says which.
    Other = -16,
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
        | iopt::BuildError::TableMemory { .. }
        | iopt::BuildError::TableAddress { .. } => Status::TableMemory,
        _ => Status::Format,
    };
    iopt::MapError => |error| of_map(error);
    iopt::UnmapError => |error| of_unmap(error);
    hostmem::MapError => |_error| Status::Argument;
    ioas::MapError => |error| match error {
        ioas::MapError::Range(_)
        | ioas::MapError::Part { .. }
        | ioas::MapError::BeyondEnd { .. }
        | ioas::MapError::Reserved { .. } => Status::Range,
        ioas::MapError::Overlap { .. } => Status::Overlap,
        ioas::MapError::Prot { .. } => Status::Prot,
        ioas::MapError::OverLimit(_) => Status::OverLimit,
        ioas::MapError::Pin(_)
        | ioas::MapError::Runs(_)
        | ioas::MapError::RunsDiffer { .. } => Status::Pin,
        ioas::MapError::Table(cause) => of_map(cause),
        ioas::MapError::Flush(_) => Status::Flush,
        _ => Status::Other,
    };
    ioas::UnmapError => |error| of_space_unmap(error);
    ioas::AttachError => |_error| Status::Device;
    ioas::DetachError => |_error| Status::Device;
    ioas::CloseError => |error| match error {
        ioas::CloseError::Unmap(cause) => of_space_unmap(cause),
        ioas::CloseError::Detach(_) => Status::Device,
        _ => Status::Other,
    };
}

fn of_map(error: &iopt::MapError) -> Status {
    match error {
        iopt::MapError::Range(_)
        | iopt::MapError::OutputTooWide { .. }
        | iopt::MapError::PageSize(_) => Status::Range,
        iopt::MapError::Overlap { .. } => Status::Overlap,
        iopt::MapError::Prot { .. } => Status::Prot,
        iopt::MapError::NoTables(_) => Status::TableMemory,
    }
}

fn of_unmap(error: &iopt::UnmapError) -> Status {
    match error {
        iopt::UnmapError::Range(_) | iopt::UnmapError::PageSize(_) => Status::Range,
        iopt::UnmapError::InsideLeaf { .. } | iopt::UnmapError::OtherSize { .. } => Status::Cuts,
        iopt::UnmapError::Hole { .. } => Status::NotMapped,
        iopt::UnmapError::DirtyWanted | iopt::UnmapError::DirtyNotKept { .. } => Status::Other,
    }
}

fn of_space_unmap(error: &ioas::UnmapError) -> Status {
    match error {
        ioas::UnmapError::CutsArea { .. } => Status::Cuts,
        ioas::UnmapError::Hole { .. } => Status::NotMapped,
        ioas::UnmapError::BeyondEnd { .. } => Status::Range,
        ioas::UnmapError::Table(cause) => of_unmap(cause),
        ioas::UnmapError::Flush(_) => Status::Flush,
        ioas::UnmapError::Unpin(_) => Status::Pin,
        _ => Status::Other,
    }
}

thread_local! {
    static LAST: RefCell<CString> = RefCell::default();
}

/// Notes the sentence of this thread's last failure.
pub(crate) fn note(message: String) {
    let mut bytes = message.into_bytes();
    bytes.retain(|byte| *byte != 0);
    // Without a NUL it is one; while the thread ends there is nobody left to read it.
    let text = CString::new(bytes).unwrap_or_default();
    let _ = LAST.try_with(|last| last.replace(text));
}

/// The sentence about the last failure of a function in this thread, with numbers; empty when there was
/// none. It is this library's, and stays until the next failure in this thread.
#[unsafe(no_mangle)]
pub extern "C" fn dmaspace_last_error() -> *const c_char {
    let last = LAST.try_with(|last| last.borrow().as_ptr());
    last.unwrap_or(c"".as_ptr())
}

/// The version of this library, like "0.1.0". It is this library's, and stays.
#[unsafe(no_mangle)]
pub extern "C" fn dmaspace_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}
