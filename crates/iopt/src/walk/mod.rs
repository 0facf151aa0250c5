//! A read-only walker: tables read from any memory, as hardware reads them.
//!
//! The walker serves a unit in software, a monitor that emulates an IOMMU over guest memory, and a
//! person with a dump and a fault. It is written from the specifications and shares nothing with
//! the [`engine`](crate::engine)'s encoders but the names of the formats: a bit that is wrong on
//! one side cannot agree with itself. It survives any bytes: the level falls with every table, so
//! there are at most as many reads as levels, and each address that it reads goes through a
//! [`WalkMemory`] that may refuse it.
//!
//! # One walk
//!
//! 1. The input address is checked against the aperture, before any read.
//! 2. The [`WalkCache`] may offer a table to start from; otherwise the walk starts at the root. A
//!    cached table whose permissions do not allow the access is not used: the walk then meets the
//!    entry that forbids it, and the fault names that one.
//! 3. Each entry is read once, and everything is decided from that one word: present, reserved
//!    bits, permissions so far, and what it leads to. Reserved bits count only in an entry that is
//!    present.
//! 4. Each table on the way is told to the cache, with the permissions that were granted down to
//!    it.
//! 5. A leaf gives the translation of its whole page, with the permissions of all levels together.
//!
//! Permissions only become fewer on the way down: reading, writing and executing must be allowed
//! by every level, and a page is for user requests only if every level says so.
//!
//! # Levels
//!
//! Level 0 is the level of the smallest page, in faults too. AMD's specification counts the same
//! levels from 1, and Intel's calls them table, directory, directory pointer, PML4 and PML5.

mod amdv1;
mod error;
#[cfg(test)]
mod tests;
mod vtd_ss;
mod x86_64;

use runs::{PageSizes, Run};

use crate::format::{Aperture, FormatId, Root};
use crate::prot::Prot;

pub use error::{WalkFault, WalkReason};

/// Memory that holds tables, as a unit sees it.
///
/// Updating accessed and dirty bits will add a compare-and-exchange, narrower formats a read of 32
/// bits; both with a default that refuses.
pub trait WalkMemory {
    /// The 64-bit little-endian word at `address`, a multiple of 8; read in one piece.
    ///
    /// Where tables change during the walk, the read must be an acquiring atomic one: what the
    /// writer stored before it linked a table is then visible to the reads that follow the link.
    fn read_u64(&self, address: u64) -> Result<u64, BadAddress>;
}

impl<M: WalkMemory + ?Sized> WalkMemory for &M {
    #[inline]
    fn read_u64(&self, address: u64) -> Result<u64, BadAddress> {
        (**self).read_u64(address)
    }
}

#[cfg(feature = "alloc")]
impl<M: WalkMemory + ?Sized> WalkMemory for alloc::sync::Arc<M> {
    #[inline]
    fn read_u64(&self, address: u64) -> Result<u64, BadAddress> {
        (**self).read_u64(address)
    }
}

/// There is no memory at this address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BadAddress {
    /// The address that was read.
    pub address: u64,
}

impl core::fmt::Display for BadAddress {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "there is no table memory at {:#x}", self.address)
    }
}

impl core::error::Error for BadAddress {}

/// What a device asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Access {
    /// It reads memory.
    Read,
    /// It writes memory.
    Write,
}

impl Access {
    /// The permission that it needs.
    #[inline]
    pub const fn needs(self) -> Prot {
        match self {
            Self::Read => Prot::READ,
            Self::Write => Prot::WRITE,
        }
    }
}

impl core::fmt::Display for Access {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(match self {
            Self::Read => "read",
            Self::Write => "write",
        })
    }
}

/// What a walk found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Translation {
    /// Physical address of the input address itself.
    pub pa: u64,
    /// The whole page: its first input address, its physical address and its size.
    pub page: Run,
    /// The level of the leaf.
    pub level: u8,
    /// What all levels together allow.
    pub prot: Prot,
    /// How many table entries were read.
    pub reads: u8,
}

/// A table below the root, as a unit may keep it in a cache of upper levels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UpperTable {
    /// The first input address that the table translates.
    pub iova: u64,
    /// It translates 2^`span_log2` bytes of input addresses.
    pub span_log2: u32,
    /// Its level.
    pub level: u8,
    /// Its address.
    pub address: u64,
    /// What the entries above it allow.
    pub prot: Prot,
}

impl UpperTable {
    /// How many bytes, as a power of two, a table at `level` translates. 64 stands for everything.
    pub const fn span_log2(level: u8) -> u32 {
        let log2 = shift(level) + 9;
        if log2 > 64 { 64 } else { log2 }
    }
}

/// A unit's cache of upper levels.
///
/// `()` is the unit that has none.
pub trait WalkCache {
    /// The lowest table known that translates `iova`.
    fn find(&mut self, iova: u64) -> Option<UpperTable>;

    /// Notes a table that the walk came to. The root is not told.
    fn found(&mut self, table: &UpperTable);
}

impl WalkCache for () {
    #[inline]
    fn find(&mut self, _iova: u64) -> Option<UpperTable> {
        None
    }

    #[inline]
    fn found(&mut self, _table: &UpperTable) {}
}

impl<C: WalkCache + ?Sized> WalkCache for &mut C {
    #[inline]
    fn find(&mut self, iova: u64) -> Option<UpperTable> {
        (**self).find(iova)
    }

    #[inline]
    fn found(&mut self, table: &UpperTable) {
        (**self).found(table);
    }
}

/// Walks one table the way a unit with given abilities does.
///
/// ```
/// use iopt::walk::{Access, BadAddress, WalkMemory, Walker};
/// use iopt::{FormatId, Root};
///
/// /// VT-d second stage, 3 levels, all in one page: the 1 GiB at 0 is at 0x4000_0000.
/// struct Page;
/// impl WalkMemory for Page {
///     fn read_u64(&self, address: u64) -> Result<u64, BadAddress> {
///         match address {
///             0x1000 => Ok(0x4000_0000 | 1 << 7 | 1), // page size, read
///             0x1008..0x2000 => Ok(0),
///             _ => Err(BadAddress { address }),
///         }
///     }
/// }
///
/// let root = Root { format: FormatId::VtdSs, address: 0x1000, levels: 3 };
/// let walker = Walker::new(root);
/// let found = walker.walk(&Page, 0x12_3456, Access::Read, &mut ()).unwrap();
/// assert_eq!(found.pa, 0x4012_3456);
/// assert_eq!(found.page.len, 1 << 30);
/// let fault = walker.walk(&Page, 0x12_3456, Access::Write, &mut ()).unwrap_err();
/// assert_eq!(
///     fault.to_string(),
///     "write of 0x123456: the entry 0x40000081 of the table at 0x1000 (level 2) leaves only r--"
/// );
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Walker {
    root: Root,
    output_bits: u32,
    page_sizes: PageSizes,
    snoop_control: bool,
    privileged: bool,
}

/// One format, read from its specification.
trait Spec {
    /// What a root with so many levels translates; `None` when there is no such root.
    fn aperture(levels: u8) -> Option<Aperture>;

    /// What `word` says at `level`.
    fn read(walker: &Walker, level: u8, word: u64) -> Result<Entry, WalkReason>;
}

/// What an entry that is present says.
enum Entry {
    /// A table at `level`.
    Table { address: u64, level: u8, prot: Prot },
    /// A page of 2^`log2` bytes at `pa`, a multiple of the size.
    Leaf { pa: u64, log2: u32, prot: Prot },
}

impl Walker {
    /// A walker for a unit that can do what the format allows: 52 bits of output addresses, every
    /// page size, snoop control. Requests are user requests.
    pub const fn new(root: Root) -> Self {
        Self {
            root,
            output_bits: 52,
            page_sizes: PageSizes::from_log2_range(12, 63),
            snoop_control: true,
            privileged: false,
        }
    }

    /// For a unit whose output addresses have `bits` bits; the bits above are reserved in entries.
    /// More than 52 is taken as 52, fewer than 12 as 12.
    pub const fn with_output_bits(mut self, bits: u32) -> Self {
        self.output_bits = match bits {
            0..12 => 12,
            12..=52 => bits,
            _ => 52,
        };
        self
    }

    /// For a unit that knows only these leaf sizes.
    pub const fn with_page_sizes(mut self, sizes: PageSizes) -> Self {
        self.page_sizes = sizes;
        self
    }

    /// For a unit with or without snoop control (VT-d, ECAP.SC): without it the snoop bit of a
    /// second-stage leaf is reserved.
    pub const fn with_snoop_control(mut self, on: bool) -> Self {
        self.snoop_control = on;
        self
    }

    /// For requests with a PASID and the privileged-mode bit: pages for privileged requests are
    /// open to them (x86-64).
    pub const fn with_privileged_requests(mut self, on: bool) -> Self {
        self.privileged = on;
        self
    }

    /// What it walks.
    pub const fn root(&self) -> Root {
        self.root
    }

    /// The addresses that the table translates; `None` when its format has no root of so many
    /// levels.
    pub fn aperture(&self) -> Option<Aperture> {
        match self.root.format {
            FormatId::AmdV1 => amdv1::AmdV1::aperture(self.root.levels),
            FormatId::X86_64 => x86_64::X86_64::aperture(self.root.levels),
            FormatId::VtdSs => vtd_ss::VtdSs::aperture(self.root.levels),
        }
    }

    /// Translates `iova` for one access.
    pub fn walk(
        &self,
        memory: &(impl WalkMemory + ?Sized),
        iova: u64,
        access: Access,
        cache: &mut impl WalkCache,
    ) -> Result<Translation, WalkFault> {
        match self.root.format {
            FormatId::AmdV1 => self.walk_as::<amdv1::AmdV1>(memory, iova, access, cache),
            FormatId::X86_64 => self.walk_as::<x86_64::X86_64>(memory, iova, access, cache),
            FormatId::VtdSs => self.walk_as::<vtd_ss::VtdSs>(memory, iova, access, cache),
        }
    }

    fn walk_as<S: Spec>(
        &self,
        memory: &(impl WalkMemory + ?Sized),
        iova: u64,
        access: Access,
        cache: &mut impl WalkCache,
    ) -> Result<Translation, WalkFault> {
        let root = self.root;
        let mut at = WalkFault {
            iova,
            access,
            level: root.levels.saturating_sub(1),
            table: root.address,
            entry: 0,
            reads: 0,
            reason: WalkReason::NotPresent,
        };
        let Some(aperture) = S::aperture(root.levels) else {
            return Err(at.because(WalkReason::Levels {
                format: root.format,
                levels: root.levels,
            }));
        };
        if !translates(aperture, iova) {
            return Err(at.because(WalkReason::OutsideAperture { aperture }));
        }
        if root.address & 0xfff != 0 || root.address >> self.output_bits != 0 {
            return Err(at.because(self.bad_output(root.address)));
        }

        let mut granted = Prot::RW | Prot::EXECUTE;
        let usable =
            |table: &UpperTable| table.level < root.levels && self.allows(table.prot, access);
        if let Some(table) = cache.find(iova).filter(usable) {
            (at.table, at.level, granted) = (table.address, table.level, table.prot);
        }

        loop {
            let index = iova >> shift(at.level) & 0x1ff;
            at.entry = 0;
            at.reads += 1;
            at.entry = memory
                .read_u64(at.table.wrapping_add(index * 8))
                .map_err(|BadAddress { address }| at.because(WalkReason::NoMemory { address }))?;
            let entry = S::read(self, at.level, at.entry).map_err(|reason| at.because(reason))?;
            let (Entry::Table { prot, .. } | Entry::Leaf { prot, .. }) = entry;
            granted = combine(granted, prot);
            if !self.allows(granted, access) {
                return Err(at.because(WalkReason::Denied { granted }));
            }
            match entry {
                Entry::Table { address, level, .. } => {
                    // A format file never yields a level that does not fall; this is what keeps
                    // the loop finite, so it is checked where the loop is.
                    if level >= at.level {
                        return Err(at.because(WalkReason::NextLevel { next: level }));
                    }
                    // Skipped levels index with zero only (AMD; the others never skip).
                    let span_log2 = UpperTable::span_log2(level);
                    let skipped = low_bits(shift(at.level)) & !low_bits(span_log2);
                    if iova & skipped != 0 {
                        return Err(at.because(WalkReason::SkippedBits {
                            bits: iova & skipped,
                        }));
                    }
                    if address >> self.output_bits != 0 {
                        return Err(at.because(self.bad_output(address)));
                    }
                    (at.table, at.level) = (address, level);
                    let first = iova & !low_bits(span_log2);
                    let prot = granted;
                    cache.found(&UpperTable {
                        iova: first,
                        span_log2,
                        level,
                        address,
                        prot,
                    });
                }
                Entry::Leaf { pa, log2, .. } => {
                    let offset = low_bits(log2);
                    if (pa | offset) >> self.output_bits != 0 {
                        return Err(at.because(self.bad_output(pa | offset)));
                    }
                    if !self.page_sizes.contains(offset.wrapping_add(1)) {
                        return Err(at.because(WalkReason::PageSize { log2 }));
                    }
                    return Ok(Translation {
                        pa: pa | iova & offset,
                        page: Run::new(iova & !offset, pa, offset + 1),
                        level: at.level,
                        prot: granted,
                        reads: at.reads,
                    });
                }
            }
        }
    }

    /// True when `granted` is enough for `access`.
    #[inline]
    fn allows(&self, granted: Prot, access: Access) -> bool {
        granted.contains(access.needs()) && (self.privileged || !granted.contains(Prot::PRIVILEGED))
    }

    const fn bad_output(&self, address: u64) -> WalkReason {
        WalkReason::BadOutput {
            address,
            bits: self.output_bits,
        }
    }

    /// The address bits that are reserved because the unit's addresses are narrower.
    #[inline]
    const fn reserved_output(&self) -> u64 {
        low_bits(52) & !low_bits(self.output_bits)
    }
}

/// What two levels allow together. Force-coherent is a property of the leaf.
fn combine(above: Prot, here: Prot) -> Prot {
    let both = Prot::RW | Prot::EXECUTE;
    (above & here & both) | ((above | here) & Prot::PRIVILEGED) | (here & Prot::COHERENT)
}

/// Bytes that one entry at `level` translates, as a power of two: all formats here index each
/// level with 9 bits, above 12 bits of offset.
const fn shift(level: u8) -> u32 {
    12 + 9 * level as u32
}

/// A mask of the bits below `bit`.
const fn low_bits(bit: u32) -> u64 {
    if bit >= 64 { u64::MAX } else { (1 << bit) - 1 }
}

/// True when `iova` has only bits that the aperture has, or repeats its sign bit above them.
fn translates(aperture: Aperture, iova: u64) -> bool {
    let bits = if aperture.sign_extended {
        aperture.bits - 1
    } else {
        aperture.bits
    };
    let above = iova & !low_bits(bits);
    above == 0 || (aperture.sign_extended && above == !low_bits(bits))
}

/// The software unit reads tables where the engine keeps them.
impl<S: crate::arena::Storage> WalkMemory for crate::arena::Arena<S> {
    #[inline]
    fn read_u64(&self, address: u64) -> Result<u64, BadAddress> {
        self.read(address).ok_or(BadAddress { address })
    }
}
