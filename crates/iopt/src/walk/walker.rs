//! The walker: what all formats have in common.

use runs::{PageSizes, Run};

use super::{
    Access, BadAddress, Translation, UpperTable, WalkCache, WalkFault, WalkMemory, WalkReason,
    amdv1, vtd_ss, x86_64,
};
use crate::format::{Above, Aperture, FormatId, Root};
use crate::prot::Prot;

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
    input_bits: u32,
    output_bits: u32,
    pub(super) page_sizes: PageSizes,
    pub(super) snoop_control: bool,
    privileged: bool,
}

/// One format, read from its specification.
pub(super) trait Spec {
    /// What a root with so many levels translates; `None` when there is no such root.
    fn aperture(levels: u8) -> Option<Aperture>;

    /// What `word` says at `level`.
    fn read(walker: &Walker, level: u8, word: u64) -> Result<Entry, WalkReason>;
}

/// What an entry that is present says.
pub(super) enum Entry {
    /// A table at `level`.
    Table { address: u64, level: u8, prot: Prot },
    /// A page of 2^`log2` bytes at `pa`, a multiple of the size.
    Leaf { pa: u64, log2: u32, prot: Prot },
}

impl Walker {
    /// A walker for a unit that can do what the format allows: every input address, 52 bits of
    /// output addresses, every page size, snoop control. Requests are user requests.
    pub const fn new(root: Root) -> Self {
        Self {
            root,
            input_bits: 64,
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

    /// For a unit whose input addresses have `bits` bits (VT-d, CAP.MGAW), however many the table
    /// translates.
    pub const fn with_input_bits(mut self, bits: u32) -> Self {
        self.input_bits = if bits == 0 { 1 } else { bits };
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

    /// The addresses that the unit translates through this table; `None` when its format has no
    /// root of so many levels.
    pub fn aperture(&self) -> Option<Aperture> {
        match self.root.format {
            FormatId::AmdV1 => self.aperture_as::<amdv1::AmdV1>(),
            FormatId::X86_64 => self.aperture_as::<x86_64::X86_64>(),
            FormatId::VtdSs => self.aperture_as::<vtd_ss::VtdSs>(),
        }
    }

    fn aperture_as<S: Spec>(&self) -> Option<Aperture> {
        let aperture = S::aperture(self.root.levels)?;
        Some(Aperture {
            bits: aperture.bits.min(self.input_bits),
            ..aperture
        })
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
        let Some(aperture) = self.aperture_as::<S>() else {
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
    pub(super) const fn reserved_output(&self) -> u64 {
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
pub(super) const fn shift(level: u8) -> u32 {
    12 + 9 * level as u32
}

/// A mask of the bits below `bit`.
pub(super) const fn low_bits(bit: u32) -> u64 {
    if bit >= 64 { u64::MAX } else { (1 << bit) - 1 }
}

/// True when the bits of `iova` above the aperture are what they must be.
fn translates(aperture: Aperture, iova: u64) -> bool {
    let bits = match aperture.above {
        Above::Sign => aperture.bits - 1,
        Above::Zeros | Above::Ones => aperture.bits,
    };
    let above = iova & !low_bits(bits);
    (above == 0 && aperture.above != Above::Ones)
        || (above == !low_bits(bits) && aperture.above != Above::Zeros)
}
