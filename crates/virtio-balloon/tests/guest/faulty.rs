//! A guest's memory in which an access fails: for the tests of devices.

#![allow(dead_code, reason = "not every binary with a guest has faults")]
#![allow(unreachable_pub, reason = "the tests of other devices have it, too")]

use std::cell::Cell;

use vm_memory::bitmap::BS;
use vm_memory::guest_memory::GuestMemorySliceIterator;
use vm_memory::{GuestAddress, GuestMemory, GuestMemoryError, GuestMemoryMmap, Permissions};

/// How long memory is away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Away {
    /// For one access.
    Once,
    /// From that one on.
    Since,
}

/// `memory`, of which the access number `nth`, from 0 on, fails; looking whether something is memory is
/// one, too.
pub struct Faulty<'a> {
    memory: &'a GuestMemoryMmap,
    away: Away,
    nth: u64,
    seen: Cell<u64>,
}

impl<'a> Faulty<'a> {
    pub fn new(memory: &'a GuestMemoryMmap, nth: u64, away: Away) -> Self {
        let seen = Cell::new(0);
        Self {
            memory,
            away,
            nth,
            seen,
        }
    }

    /// True if it came to the access that fails.
    pub fn failed(&self) -> bool {
        self.seen.get() > self.nth
    }

    fn fails(&self) -> bool {
        let access = self.seen.replace(self.seen.get() + 1);
        match self.away {
            Away::Once => access == self.nth,
            Away::Since => access >= self.nth,
        }
    }
}

impl GuestMemory for Faulty<'_> {
    type PhysicalMemory = GuestMemoryMmap;
    type Bitmap = ();

    fn check_range(&self, address: GuestAddress, count: usize, access: Permissions) -> bool {
        !self.fails() && GuestMemory::check_range(self.memory, address, count, access)
    }

    fn get_slices<'a>(
        &'a self,
        address: GuestAddress,
        count: usize,
        access: Permissions,
    ) -> Result<impl GuestMemorySliceIterator<'a, BS<'a, ()>>, GuestMemoryError> {
        if self.fails() {
            return Err(GuestMemoryError::InvalidGuestAddress(address));
        }
        GuestMemory::get_slices(self.memory, address, count, access)
    }
}
