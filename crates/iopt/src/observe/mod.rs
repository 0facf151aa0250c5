//! Adapters that watch table memory: counting, flushing, checking.
//!
//! Each is put around any [`TableMemory`](crate::TableMemory), or around another adapter, and
//! passes everything on; what it adds hangs on the hooks of the seam. A table over plain memory pays
//! nothing for them: their default is empty and inlined. So a table has no second type parameter for
//! what most users do not want.
//!
//! * [`Counted`] counts descents, tables looked at and entries stored;
//! * [`NonCoherent`] writes cache lines back, for units that read past the processor's caches;
//! * [`Checked`] keeps a [`MappingRecord`] of who maps which memory, and finds what should not be.

mod checked;
mod counted;
mod non_coherent;
mod record;

pub use checked::Checked;
pub use counted::{Counted, TableCounters};
pub use non_coherent::{CacheLines, NonCoherent};
pub use record::{Domain, MappingRecord, Violation};
#[cfg(feature = "alloc")]
pub use record::{HeapRecord, Violations};
