//! The walker: what all formats have in common.

use runs::{PageSizes, Run};

use super::{
    Access, BadAddress, Translation, UpperTable, WalkCache, WalkFault, WalkMemory, WalkReason,
    amdv1, arm_lpae, armv7s, riscv, vtd_ss, x86_64,
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
    pub(super) privileged: bool,
    pub(super) single_privilege: bool,
    pub(super) sets_accessed: bool,
    pub(super) sets_dirty: bool,
    pub(super) svpbmt: bool,
    pub(super) supervisor_user_access: bool,
    pub(super) access_flag: bool,
}

/// One format, read from its specification.
pub(super) trait Spec {
    /// Each level's permissions are looked at when it is read; otherwise all of them together,
    /// when the leaf is.
    const CHECKS_EACH_LEVEL: bool = true;

    /// The shape of the walker's tables; `None` when the format has no such root.
    fn shape(walker: &Walker) -> Option<Shape>;

    /// What `word`, met at `level` on the way to `iova`, says.
    fn read(walker: &Walker, iova: u64, level: u8, word: u64) -> Result<Entry, WalkReason>;
}

/// How the tables below one root are laid out.
#[derive(Clone, Copy)]
pub(super) struct Shape {
    /// What the root translates.
    pub(super) aperture: Aperture,
    /// The smallest page, as a power of two.
    pub(super) page_log2: u32,
    /// Bits of the input address that index a table below the root. The root takes all that the
    /// aperture has left.
    pub(super) index_bits: u32,
    /// Bytes of an entry, as a power of two: 3, or 2.
    pub(super) entry_log2: u32,
    /// The root's address is a multiple of this power of two.
    pub(super) root_log2: u32,
}

impl Shape {
    /// Pages of 4 KiB, tables of 512 entries of 8 bytes, and a root that is not larger.
    pub(super) const fn of_512(aperture: Aperture) -> Self {
        Self {
            aperture,
            page_log2: 12,
            index_bits: 9,
            entry_log2: 3,
            root_log2: 12,
        }
    }

    /// Bytes that one entry at `level` translates, as a power of two.
    pub(super) const fn shift(&self, level: u8) -> u32 {
        self.page_log2 + self.index_bits * level as u32
    }

    /// Bytes that a table at `level`, below the root, translates, as a power of two.
    const fn span_log2(&self, level: u8) -> u32 {
        let log2 = self.shift(level) + self.index_bits;
        if log2 > 64 { 64 } else { log2 }
    }

    /// Offset in bytes of the entry for `iova` in its table.
    fn offset(&self, level: u8, top: u8, iova: u64) -> u64 {
        let index = (iova & low_bits(self.aperture.bits)) >> self.shift(level).min(63);
        let index = if level == top {
            index
        } else {
            index & low_bits(self.index_bits)
        };
        index << self.entry_log2
    }
}

/// A format that has no walker yet: no root of it can be walked.
struct NoSpec;

impl Spec for NoSpec {
    fn shape(_walker: &Walker) -> Option<Shape> {
        None
    }
    fn read(_: &Walker, _: u64, _: u8, _: u64) -> Result<Entry, WalkReason> {
        Err(WalkReason::NotPresent)
    }
}

/// What an entry that is present says.
pub(super) enum Entry {
    /// A table at `level`.
    Table { address: u64, level: u8, prot: Prot },
    /// A page of 2^`log2` bytes at `pa`, a multiple of the size.
    Leaf { pa: u64, log2: u32, prot: Prot },
}

/// `$body` with `$spec` as the specification of the format. One arm a format.
macro_rules! by_format {
    ($format:expr, $spec:ident => $body:expr) => {
        match $format {
            FormatId::AmdV1 => {
                type $spec = amdv1::AmdV1;
                $body
            }
            FormatId::X86_64 => {
                type $spec = x86_64::X86_64;
                $body
            }
            FormatId::VtdSs => {
                type $spec = vtd_ss::VtdSs;
                $body
            }
            FormatId::ArmStage1(_) | FormatId::ArmStage2(_) => {
                type $spec = arm_lpae::ArmLpae;
                $body
            }
            FormatId::ArmV7s => {
                type $spec = armv7s::ArmV7s;
                $body
            }
            FormatId::RiscV => {
                type $spec = riscv::RiscV<false>;
                $body
            }
            FormatId::RiscVG => {
                type $spec = riscv::RiscV<true>;
                $body
            }
            _ => {
                type $spec = NoSpec;
                $body
            }
        }
    };
}

impl Walker {
    /// A walker for a unit that can do what the format allows: every input address, all bits of
    /// output addresses, every page size, snoop control. Requests are user requests.
    pub const fn new(root: Root) -> Self {
        Self {
            root,
            input_bits: 64,
            output_bits: widest(root.format),
            page_sizes: PageSizes::from_log2_range(12, 63),
            snoop_control: true,
            privileged: false,
            single_privilege: false,
            sets_accessed: true,
            sets_dirty: true,
            svpbmt: true,
            supervisor_user_access: true,
            access_flag: true,
        }
    }

    /// For a unit whose output addresses have `bits` bits; the bits above are reserved in entries.
    /// More than the format has is taken as that, fewer than 12 as 12.
    pub const fn with_output_bits(mut self, bits: u32) -> Self {
        let widest = widest(self.root.format);
        self.output_bits = if bits < 12 {
            12
        } else if bits > widest {
            widest
        } else {
            bits
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
    /// open to them (x86-64, Arm stage 1). Where privileged and other requests differ in what they
    /// may execute, the walk says it for these.
    pub const fn with_privileged_requests(mut self, on: bool) -> Self {
        self.privileged = on;
        self
    }

    /// For a translation regime with one privilege level (Arm stage 1 of EL2 without E2H, and EL3;
    /// an SMMU's STE.STRW says so). There is no upper half of the address space then.
    pub const fn with_single_privilege(mut self, on: bool) -> Self {
        self.single_privilege = on;
        self
    }

    /// For a unit that sets the access flag by itself, or not (Arm, HA; RISC-V, SADE and GADE):
    /// without it a leaf whose flag is 0 faults.
    ///
    /// The walker reads only. Where the unit must set the flag, whoever walks for it does so.
    pub const fn with_hardware_accessed(mut self, on: bool) -> Self {
        self.sets_accessed = on;
        self
    }

    /// For a unit that keeps dirty state by itself, or not (Arm, HD; RISC-V, SADE and GADE): without it a leaf that is
    /// writable but clean is read-only.
    ///
    /// The walker reads only. Where the unit must mark the leaf, whoever walks for it does so.
    pub const fn with_hardware_dirty(mut self, on: bool) -> Self {
        self.sets_dirty = on;
        self
    }

    /// For a unit with or without Svpbmt (RISC-V): without it bits 62:61 of an entry are reserved.
    pub const fn with_svpbmt(mut self, on: bool) -> Self {
        self.svpbmt = on;
        self
    }

    /// For privileged requests that may read and write user pages, or not (RISC-V, SUM).
    pub const fn with_supervisor_user_access(mut self, on: bool) -> Self {
        self.supervisor_user_access = on;
        self
    }

    /// For a unit where AP\[0\] of a short descriptor is the access flag, or a permission (ARMv7,
    /// SCTLR.AFE).
    pub const fn with_access_flag(mut self, on: bool) -> Self {
        self.access_flag = on;
        self
    }

    /// What it walks.
    pub const fn root(&self) -> Root {
        self.root
    }

    /// The addresses that the unit translates through this table; `None` when its format has no
    /// root of so many levels.
    pub fn aperture(&self) -> Option<Aperture> {
        Some(self.narrow(self.shape()?.aperture))
    }

    fn shape(&self) -> Option<Shape> {
        by_format!(self.root.format, S => S::shape(self))
    }

    /// What is left of a table's aperture for the unit's input addresses.
    fn narrow(&self, aperture: Aperture) -> Aperture {
        Aperture {
            bits: aperture.bits.min(self.input_bits),
            ..aperture
        }
    }

    /// How many bytes, as a power of two, a table at `level` below the root translates; 64 stands
    /// for everything. `None` when the format has no such root, or no such table under it.
    pub fn span_log2(&self, level: u8) -> Option<u32> {
        let shape = self.shape()?;
        (level.checked_add(1)? < self.root.levels).then(|| shape.span_log2(level))
    }

    /// Translates `iova` for one access.
    pub fn walk(
        &self,
        memory: &(impl WalkMemory + ?Sized),
        iova: u64,
        access: Access,
        cache: &mut impl WalkCache,
    ) -> Result<Translation, WalkFault> {
        by_format!(self.root.format, S => self.walk_as::<S>(memory, iova, access, cache))
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
        let Some(shape) = S::shape(self) else {
            return Err(at.because(WalkReason::Levels {
                format: root.format,
                levels: root.levels,
            }));
        };
        let aperture = self.narrow(shape.aperture);
        if !translates(aperture, iova) {
            return Err(at.because(WalkReason::OutsideAperture { aperture }));
        }
        if root.address & low_bits(shape.root_log2) != 0 || root.address >> self.output_bits != 0 {
            return Err(at.because(self.bad_output(root.address)));
        }

        let mut granted = Prot::RW | Prot::EXECUTE;
        let usable =
            |table: &UpperTable| table.level < root.levels && self.allows(table.prot, access);
        if let Some(table) = cache.find(iova).filter(usable) {
            (at.table, at.level, granted) = (table.address, table.level, table.prot);
        }

        loop {
            let offset = shape.offset(at.level, root.levels - 1, iova);
            let address = at.table.wrapping_add(offset);
            at.entry = 0;
            at.reads += 1;
            let entry = if shape.entry_log2 == 2 {
                memory.read_u32(address).map(u64::from)
            } else {
                memory.read_u64(address)
            };
            at.entry = entry
                .map_err(|BadAddress { address }| at.because(WalkReason::NoMemory { address }))?;
            let entry =
                S::read(self, iova, at.level, at.entry).map_err(|reason| at.because(reason))?;
            let (Entry::Table { prot, .. } | Entry::Leaf { prot, .. }) = entry;
            granted = combine(granted, prot);
            let checked = S::CHECKS_EACH_LEVEL || matches!(entry, Entry::Leaf { .. });
            if checked && !self.allows(granted, access) {
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
                    let span_log2 = shape.span_log2(level);
                    let skipped = low_bits(shape.shift(at.level)) & !low_bits(span_log2);
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

    pub(super) const fn output_bits(&self) -> u32 {
        self.output_bits
    }

    pub(super) const fn bad_output(&self, address: u64) -> WalkReason {
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

/// Bits of the output addresses that a format can hold.
const fn widest(format: FormatId) -> u32 {
    match format {
        // Privileged Architecture, "Sv39": a page number of 44 bits.
        FormatId::RiscV | FormatId::RiscVG => 56,
        // DDI 0406C, B3.5.1: a supersection with its extended base address.
        FormatId::ArmV7s => 40,
        _ => 52,
    }
}

/// What two levels allow together. Force-coherent and device are properties of the leaf.
fn combine(above: Prot, here: Prot) -> Prot {
    let both = Prot::RW | Prot::EXECUTE;
    (above & here & both)
        | ((above | here) & Prot::PRIVILEGED)
        | (here & (Prot::COHERENT | Prot::DEVICE | Prot::UNCACHED))
}

/// Bytes that one entry at `level` translates, as a power of two, in the formats that index each
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
