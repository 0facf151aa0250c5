//! What was checked, as text and as a document.

use std::collections::BTreeMap;

use crate::{Kind, Unit};

/// What one check found.
#[derive(Clone, Debug)]
pub struct Done {
    /// Of which unit.
    pub unit: Unit,
    /// With which tables.
    pub kind: Kind,
    /// What.
    pub check: &'static str,
    /// Copies by DMA.
    pub copies: u64,
    /// How many went through leaves of each size.
    pub leaves: BTreeMap<u64, u64>,
    /// What flushes took: which, commands, waits.
    pub costs: Vec<(&'static str, u64, u64)>,
}
