//! A storage that does not notice that its arena moves.
//!
//! An arena keeps pointers into its storage. A `Box` claims, each time it moves, that all accesses to its memory go
//! through it: pointers that were taken before are no longer valid then (Stacked Borrows: the move is a retag as
//! unique), however still the memory lies. A value in a `MaybeUninit` moves as bytes, and claims nothing. So pointers
//! are taken from a storage that is held here already.

use core::mem::MaybeUninit;

pub(super) struct StorageCell<S>(MaybeUninit<S>);

impl<S> StorageCell<S> {
    pub(super) const fn new(storage: S) -> Self {
        Self(MaybeUninit::new(storage))
    }

    pub(super) const fn get(&self) -> &S {
        // SAFETY: `new`, the only function that makes one, has put a value there, and it stays until the drop.
        unsafe { self.0.assume_init_ref() }
    }
}

impl<S> Drop for StorageCell<S> {
    fn drop(&mut self) {
        // SAFETY: as in `get`; it is dropped once, here, and not looked at afterwards.
        unsafe { self.0.assume_init_drop() }
    }
}
