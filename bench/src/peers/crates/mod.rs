//! Page tables of foreign crates, each by the call that does most of the work at once: what a user
//! who wants it to be fast writes. No table is in use by a processor; what they return for flushing
//! is ignored.

pub mod aarch64_paging;
pub mod page_table_generic;
#[cfg(target_arch = "x86_64")]
pub mod page_table_multiarch;
pub mod x86_64;

use crate::peers::work::Subject;

/// All of them.
pub fn subjects() -> Vec<Box<dyn Subject>> {
    let mut all = x86_64::subjects();
    all.extend(aarch64_paging::subjects());
    #[cfg(target_arch = "x86_64")]
    all.extend(page_table_multiarch::subjects());
    all.extend(page_table_generic::subjects());
    all
}

/// An error of a crate, which need not be one of the standard library's.
#[cold]
fn refused(error: impl std::fmt::Debug) -> anyhow::Error {
    anyhow::anyhow!("refused: {error:?}")
}
