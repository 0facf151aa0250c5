//! The two ways in: by `&mut`, or by `&` with claims.
//!
//! There is one set of passes, which take the form as a type. So claims cost nothing in the exclusive
//! form: they are not in the generated code. The protocol of claims is at the head of `shared.rs`.

use core::convert::Infallible;

use super::entries::Order;
use super::top::Begin;
use super::{Level, Table};
use crate::cell::Cell;
use crate::format::Format;
use crate::memory::TableMemory;

/// How an operation keeps others away: a value that its passes carry along.
pub(crate) trait Access: Copy {
    /// True when other threads change the same table meanwhile.
    const SHARED: bool;
    /// What this operation writes into the claim of a table.
    fn token(self) -> u64;

    /// Reads an entry that may lead to a table, on the way down. Relaxed where nobody else links
    /// tables meanwhile: what was linked before came here with the reference to the [`Table`]. Loads
    /// with acquire keep the compiler from holding what it knows of the memory in registers.
    #[inline(always)]
    fn follow<C: Cell>(cell: &C) -> u64 {
        if Self::SHARED {
            cell.get_acquire()
        } else {
            cell.get()
        }
    }
}

/// The operation holds the table by `&mut`: there is nobody to keep away.
#[derive(Clone, Copy)]
pub(crate) struct Exclusive;

impl Access for Exclusive {
    const SHARED: bool = false;

    fn token(self) -> u64 {
        FREE
    }
}

/// The operation claims the tables that it stores to. The number is that of its guard, which
/// nobody else inside has.
#[derive(Clone, Copy)]
pub(crate) struct Claiming(pub(crate) u32);

impl Access for Claiming {
    const SHARED: bool = true;

    #[inline(always)]
    fn token(self) -> u64 {
        u64::from(self.0) + 2
    }
}

/// Nobody has claimed the table.
const FREE: u64 = 0;
/// The table is unlinked: nobody can claim it any more.
const DEAD: u64 = 1;

/// What an operation relied on has changed before it had claimed it: it begins again. Nothing has
/// been stored.
pub(crate) struct Restart;

impl<F: Format, M: TableMemory> Table<F, M> {
    /// Claims `table`, waiting for whoever holds it.
    #[inline(always)]
    pub(crate) fn claim<P: Access>(&self, table: u64, form: P) -> Result<(), Restart> {
        if !P::SHARED {
            return Ok(());
        }
        let claim = &self.memory.meta(table).claim;
        let mut round = 0;
        loop {
            match claim.set_if(FREE, form.token()) {
                Ok(()) => return Ok(()),
                Err(DEAD) => return Err(Restart),
                Err(token) if token == form.token() => return Ok(()),
                // A claim in a broken memory may never come back: the operation says so where it
                // begins again.
                Err(_) if self.intact().is_err() => return Err(Restart),
                Err(_) => self.memory.wait(round),
            }
            round += 1;
        }
    }

    /// True when this operation may store to `table`.
    #[inline(always)]
    pub(crate) fn holds<P: Access>(&self, table: u64, form: P) -> bool {
        !P::SHARED || self.memory.meta(table).claim.get() == form.token()
    }

    /// False when a link of `table`, which was just read, may not have reached the unit yet: its
    /// writer has not given its claim back, and will tell the memory of the link before it does.
    ///
    /// Whoever maps below such a link would be done before the unit can follow it.
    #[inline(always)]
    pub(crate) fn settled<P: Access>(&self, table: Option<u64>, form: P) -> bool {
        if !P::SHARED || !M::FLUSHES {
            return true;
        }
        table.is_none_or(|table| {
            let claim = self.memory.meta(table).claim.get_acquire();
            claim == FREE || claim == form.token()
        })
    }

    /// Gives the claim on `table` back, if this operation has it.
    #[inline(always)]
    pub(crate) fn release<P: Access>(&self, table: u64, form: P) {
        if P::SHARED && self.holds(table, form) {
            self.memory.meta(table).claim.set_release(FREE);
        }
    }

    /// Marks a table as unlinked, for those who wait for its claim.
    #[inline(always)]
    pub(crate) fn bury<P: Access>(&self, table: u64, _form: P) {
        if P::SHARED {
            self.memory.meta(table).claim.set_release(DEAD);
        }
    }

    /// A table that is about to be linked can be claimed by anybody.
    #[inline(always)]
    pub(crate) fn unclaimed(&self, table: u64) {
        self.memory.meta(table).claim.set(FREE);
    }

    /// Gives all claims back that an operation took in `[at, at + todo)` before it gave up. A table
    /// that is claimed is linked, and so are all tables above it, so that every claim is found.
    /// The operation began at `begin`.
    #[cold]
    pub(crate) fn release_all<P: Access>(&self, begin: Begin, at: u64, todo: u64, form: P) {
        if P::SHARED {
            let mut release = |table, _| {
                self.release(table, form);
                Ok::<_, Infallible>(())
            };
            let Ok(()) = self.tables_in(begin.table(), (at, todo), Order::Below, &mut release);
        }
    }

    /// Claims `table` if mapping `[at, at + todo)` must store to it: at level 0 always, above where
    /// an entry is empty. False when it is not claimed.
    #[inline(always)]
    pub(crate) fn claim_to_map<V: Level, P: Access>(
        &self,
        table: u64,
        at: u64,
        todo: u64,
        form: P,
    ) -> Result<bool, Restart> {
        if !P::SHARED {
            return Ok(true);
        }
        let stores = V::N == 0
            || self
                .entries_in(table, V::N, at, todo)
                .any(|part| F::is_empty(part.cell.get()));
        if stores {
            self.claim(table, form)?;
        }
        Ok(stores)
    }
}
