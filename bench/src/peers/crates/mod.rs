//! Page tables of foreign crates, each by the call that does most of the work at once. No table is in use by a
//! processor; what they return for flushing is ignored.
//!
//! The two that are fastest: of 18 rows that crates have, `page_table_multiarch` was first in seven (single pages,
//! unmapping runs, translating) and `page-table-generic` in seven (mapping runs, splitting). `aarch64-paging` was first
//! in four (unmapping whole tables, up to three times as fast), `x86_64` in none.

pub mod page_table_generic;
#[cfg(target_arch = "x86_64")]
pub mod page_table_multiarch;

use crate::peers::work::Subject;

/// All of them.
pub fn subjects() -> Vec<Box<dyn Subject>> {
    let mut all = page_table_generic::subjects();
    #[cfg(target_arch = "x86_64")]
    all.extend(page_table_multiarch::subjects());
    all
}

/// An error of a crate, which need not be one of the standard library's.
#[cold]
fn refused(error: impl std::fmt::Debug) -> anyhow::Error {
    anyhow::anyhow!("refused: {error:?}")
}
