//! Many threads, by `&`; here one at a time.

use std::hint::black_box;
use std::sync::Arc;

use iopt::reclaim::{DefaultReclaim, Reclaim};
use iopt::{Format, Prot, SharedTable, Table, TableOps as _};
use runs::{Iova, Pa, Span};

use super::alike::{alike, flush};
use super::{Access, Memory};

/// The table that threads share.
pub struct Shared<F: Format, M: Memory, R = DefaultReclaim>(SharedTable<F, Arc<M>, R>);

impl<F: Format, M: Memory, R: Reclaim + Default + 'static> Access<F, M> for Shared<F, M, R> {
    const NAME: &'static str = "shared";
    const SETS: u64 = 2;

    fn of(table: Table<F, Arc<M>>) -> Self {
        Self(SharedTable::with_reclaim(table, R::default()))
    }

    alike!(table => table.enter());
}
