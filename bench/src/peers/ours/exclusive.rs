//! One owner, by `&mut`.

use std::hint::black_box;
use std::sync::Arc;

use iopt::{Format, Prot, Table, TableOps as _};
use runs::{Iova, Pa, Span};

use super::alike::{alike, flush};
use super::{Access, Memory};

/// The table by `&mut`.
pub struct Exclusive<F: Format, M: Memory>(Table<F, Arc<M>>);

impl<F: Format, M: Memory> Access<F, M> for Exclusive<F, M> {
    const NAME: &'static str = "exclusive";

    fn of(table: Table<F, Arc<M>>) -> Self {
        Self(table)
    }

    alike!(table => table);
}

#[cfg(test)]
impl<F: Format, M: Memory> Exclusive<F, M> {
    /// The table, to look at.
    pub(super) fn table(&self) -> &Table<F, Arc<M>> {
        &self.0
    }
}
