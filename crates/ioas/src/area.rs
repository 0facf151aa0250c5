//! Areas, and the memory that they hold.

use alloc::boxed::Box;
use alloc::sync::Arc;

use iopt::Prot;
use runs::Span;

use crate::ledger::Charge;
use crate::object::{Cause, MemoryObject, Pinned};

/// A stretch of the address space over a part of a memory object.
#[derive(Debug)]
pub struct Area {
    pub(crate) range: Span,
    pub(crate) object: Arc<dyn MemoryObject>,
    pub(crate) offset: u64,
    pub(crate) prot: Prot,
    pub(crate) held: Held,
}

impl Area {
    /// Its device addresses.
    pub const fn range(&self) -> Span {
        self.range
    }

    /// The memory object.
    pub fn object(&self) -> &Arc<dyn MemoryObject> {
        &self.object
    }

    /// Offset in the memory object, bytes.
    pub const fn offset(&self) -> u64 {
        self.offset
    }

    /// What devices may do with it.
    pub const fn prot(&self) -> Prot {
        self.prot
    }

    /// The memory behind it, pinned.
    pub fn pinned(&self) -> &dyn Pinned {
        &*self.held.pin
    }

    /// Bytes that are charged for it.
    pub const fn charged(&self) -> u64 {
        self.held.charge.bytes()
    }
}

/// Memory that is pinned and charged.
///
/// Dropped, it is unpinned first and its charge given back after that: the order of the fields.
#[derive(Debug)]
pub(crate) struct Held {
    pub(crate) pin: Box<dyn Pinned>,
    pub(crate) charge: Charge,
}

impl Held {
    /// Unpins the memory and gives the charge back; returns the bytes that were unpinned.
    ///
    /// When unpinning fails nobody knows how much of the memory is still pinned. The kernel goes on
    /// counting that, and so does the ledger: the whole charge stays.
    pub(crate) fn release(self) -> Result<u64, Cause> {
        let Self { pin, charge } = self;
        match pin.unpin() {
            Ok(bytes) => {
                drop(charge);
                Ok(bytes)
            }
            Err(cause) => {
                charge.keep();
                Err(cause)
            }
        }
    }
}
