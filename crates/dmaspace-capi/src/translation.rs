//! What is said of addresses: stretches, runs, leaves, roots, permissions.

use dmaspace::{iopt, runs};
use iopt::Prot;

use crate::status::{Failure, Result, Status};

/// Devices may read.
pub const DMASPACE_READ: u32 = 1;
/// Devices may write.
pub const DMASPACE_WRITE: u32 = 2;
/// Devices may execute, where the format can say it.
pub const DMASPACE_EXECUTE: u32 = 4;
/// Only privileged accesses, where the format can say it.
pub const DMASPACE_PRIVILEGED: u32 = 8;
/// Accesses are forced to be coherent with the processors' caches, where the format can say it.
pub const DMASPACE_COHERENT: u32 = 16;
/// It is a device's registers, no memory.
pub const DMASPACE_DEVICE: u32 = 32;
/// It is memory that is not cached.
pub const DMASPACE_UNCACHED: u32 = 64;

const _: () = {
    assert!(DMASPACE_READ == Prot::READ.bits());
    assert!(DMASPACE_WRITE == Prot::WRITE.bits());
    assert!(DMASPACE_EXECUTE == Prot::EXECUTE.bits());
    assert!(DMASPACE_PRIVILEGED == Prot::PRIVILEGED.bits());
    assert!(DMASPACE_COHERENT == Prot::COHERENT.bits());
    assert!(DMASPACE_DEVICE == Prot::DEVICE.bits());
    assert!(DMASPACE_UNCACHED == Prot::UNCACHED.bits());
};

/// The permissions that `bits` name.
pub(crate) fn prot(bits: u32) -> Result<Prot> {
    Prot::from_bits(bits).ok_or_else(|| {
        let unknown = bits & !Prot::all().bits();
        let message = format!("permissions {bits:#x} have unknown bits {unknown:#x}");
        Failure::new(Status::Argument, message)
    })
}

/// A stretch of one address space, in bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Span {
    /// The first byte.
    pub start: u64,
    /// The length.
    pub len: u64,
}

impl<A> From<runs::Span<A>> for Span {
    fn from(span: runs::Span<A>) -> Self {
        let runs::Span { start, len, .. } = span;
        Self { start, len }
    }
}

impl<A> From<Span> for runs::Span<A> {
    fn from(span: Span) -> Self {
        Self::new(span.start, span.len)
    }
}

/// A stretch that is contiguous in both address spaces, in bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Run {
    /// The first byte, as devices say it.
    pub iova: u64,
    /// The first byte in physical memory.
    pub pa: u64,
    /// The length.
    pub len: u64,
}

impl From<runs::Run> for Run {
    fn from(run: runs::Run) -> Self {
        let runs::Run { iova, pa, len } = run;
        Self { iova, pa, len }
    }
}

/// One leaf of a table.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Leaf {
    /// Where all of it begins in both address spaces, and its size.
    pub run: Run,
    /// What devices may do there: DMASPACE_READ and so on.
    pub prot: u32,
    /// The level of its entry, 0 for the smallest page.
    pub level: u8,
}

/// What `iova` leads to, of a leaf that was looked for there.
pub(crate) fn leaf(found: Option<iopt::Leaf>, iova: u64) -> Result<Leaf> {
    let Some(leaf) = found else {
        let message = format!("nothing is mapped at {iova:#x}");
        return Err(Failure::new(Status::NotMapped, message));
    };
    Ok(Leaf {
        run: leaf.run.into(),
        prot: leaf.prot.bits(),
        level: leaf.level,
    })
}

/// Where a table begins: what a unit is told to walk it, beside the format's name.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Root {
    /// The address of the top table.
    pub address: u64,
    /// The number of levels.
    pub levels: u8,
}

impl From<iopt::Root> for Root {
    fn from(root: iopt::Root) -> Self {
        Self {
            address: root.address,
            levels: root.levels,
        }
    }
}
