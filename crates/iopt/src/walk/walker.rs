//! The walker: what all formats have in common.

use runs::{PageSizes, Run, Span};

use super::spec::{Entry, Shape, Spec, low_bits};
use super::{
    Access, BadAddress, Translation, UpperTable, WalkCache, WalkFault, WalkMemory, WalkReason,
    amdv1, arm_lpae, armv7s, dart, riscv, update, vtd_ss, x86_64,
};
use crate::format::{Above, Aperture, DartVersion, FormatId, Root};
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
    pub(super) updates: bool,
    /// The encryption bit, or 0.
    pub(super) encryption: u64,
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
            FormatId::Dart(_) => {
                type $spec = dart::Dart;
                $body
            }
        }
    };
}

pub(super) use by_format;

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
            updates: false,
            encryption: 0,
        }
    }

    /// For a unit of a processor that encrypts memory, with its C-bit (APM volume 2, section 7.10.1).
    /// It is not part of the address of a table, in the root and in entries. In the address of a
    /// page it stays, whatever the unit's width: what lies there is to be read as encrypted.
    pub const fn with_encryption_bit(mut self, bit: u32) -> Self {
        self.encryption = if bit < 64 { 1 << bit } else { 0 };
        self
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

    /// For a unit that marks entries as accessed, or not: AMD's host tables, DTE.HAD; VT-d's second
    /// stage, SSADE; Arm, HA; RISC-V, SADE and GADE. Guest tables and VT-d's first stage are always
    /// marked. Where it does not, an Arm or RISC-V leaf that is not marked faults.
    ///
    /// It is only written with [`with_updates`](Self::with_updates).
    pub const fn with_hardware_accessed(mut self, on: bool) -> Self {
        self.sets_accessed = on;
        self
    }

    /// For a unit that marks leaves as dirty, or not: AMD's host tables, DTE.HAD; VT-d's second
    /// stage, SSADE; Arm, HD; RISC-V, SADE and GADE. Guest tables and VT-d's first stage are always
    /// marked. Where it does not, an Arm or RISC-V leaf that is writable but clean is read-only.
    /// Arm's and RISC-V's units mark leaves as dirty only where they also mark them as
    /// [accessed](Self::with_hardware_accessed).
    ///
    /// It is only written with [`with_updates`](Self::with_updates).
    pub const fn with_hardware_dirty(mut self, on: bool) -> Self {
        self.sets_dirty = on;
        self
    }

    /// Sets whether the walk itself marks entries as accessed and dirty, as far as the unit does
    /// so, by [`WalkMemory::compare_exchange_u64`]; the [module](super#updates) says which and
    /// when. A new walker only reads.
    ///
    /// ```
    /// use std::cell::Cell;
    /// use iopt::walk::{Access, BadAddress, WalkMemory, Walker};
    /// use iopt::{FormatId, Root};
    ///
    /// /// One AMD host page at 0 that can be read and written.
    /// struct Page(Cell<u64>);
    /// impl WalkMemory for Page {
    ///     fn read_u64(&self, _: u64) -> Result<u64, BadAddress> {
    ///         Ok(self.0.get())
    ///     }
    ///     fn compare_exchange_u64(
    ///         &self, _: u64, old: u64, new: u64,
    ///     ) -> Result<Result<(), u64>, BadAddress> {
    ///         let found = self.0.get();
    ///         if found != old {
    ///             return Ok(Err(found));
    ///         }
    ///         self.0.set(new);
    ///         Ok(Ok(()))
    ///     }
    /// }
    ///
    /// let page = Page(Cell::new(0x6000_0000_0000_5001));
    /// let root = Root { format: FormatId::AmdV1, address: 0x1000, levels: 1 };
    /// let walker = Walker::new(root).with_updates(true);
    /// assert!(walker.walk(&page, 0, Access::Read, &mut ()).unwrap().clean);
    /// assert_eq!(page.0.get(), 0x6000_0000_0000_5021); // A
    /// assert!(!walker.walk(&page, 0, Access::Write, &mut ()).unwrap().clean);
    /// assert_eq!(page.0.get(), 0x6000_0000_0000_5061); // A and D
    /// ```
    pub const fn with_updates(mut self, on: bool) -> Self {
        self.updates = on;
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

    /// The root that it walks.
    pub const fn root(&self) -> Root {
        self.root
    }

    /// The addresses that the unit translates through this table; `None` when its format has no
    /// root of so many levels.
    pub fn aperture(&self) -> Option<Aperture> {
        Some(self.narrow(self.shape()?.aperture))
    }

    pub(super) fn shape(&self) -> Option<Shape> {
        by_format!(self.root.format, S => S::shape(self))
    }

    /// Cuts a table's aperture to the unit's input addresses.
    pub(super) fn narrow(&self, aperture: Aperture) -> Aperture {
        Aperture {
            bits: aperture.bits.min(self.input_bits),
            ..aperture
        }
    }

    /// Bytes of an entry, 4 or 8; `None` when the format has no root of so many levels.
    pub fn entry_bytes(&self) -> Option<u64> {
        Some(1 << self.shape()?.entry_log2)
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
            table: root.address & !self.encryption,
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
        if at.table & low_bits(shape.root_log2) != 0 || at.table >> self.output_bits != 0 {
            return Err(at.because(self.bad_output(root.address)));
        }

        let mut retries = update::RETRIES;
        let mut granted = Prot::RW | Prot::EXECUTE;
        let usable =
            |table: &UpperTable| table.level < root.levels && self.allows(table.prot, access);
        if let Some(table) = cache.find(iova).filter(usable) {
            (at.table, at.level, granted) = (table.address, table.level, table.prot);
        }

        loop {
            let offset = shape.offset(at.level, root.levels - 1, iova);
            let place = at.table.wrapping_add(offset);
            at.entry = 0;
            at.reads += 1;
            let entry = if shape.entry_log2 == 2 {
                memory.read_u32(place).map(u64::from)
            } else {
                memory.read_u64(place)
            };
            at.entry = entry
                .map_err(|BadAddress { address }| at.because(WalkReason::NoMemory { address }))?;
            let entry =
                S::read(self, iova, at.level, at.entry).map_err(|reason| at.because(reason))?;
            let (Entry::Table { prot, .. } | Entry::Leaf { prot, .. }) = entry;
            // Not `granted` before the entry is done with: it may be read again.
            let prot = combine(granted, prot);
            let leaf = matches!(entry, Entry::Leaf { .. });
            if (S::CHECKS_EACH_LEVEL || leaf) && !self.allows(prot, access) {
                return Err(at.because(WalkReason::Denied { granted: prot }));
            }
            let marked = S::marked(self, at.level, leaf, at.entry, access);
            match entry {
                Entry::Table { address, level, .. } => {
                    let address = address & !self.encryption;
                    // Skipped levels index with zero only (AMD; the others never skip).
                    let span_log2 = shape.span_log2(level);
                    let skipped = low_bits(shape.shift(at.level)) & !low_bits(span_log2);
                    if iova & skipped != 0 {
                        return Err(at.because(WalkReason::SkippedBits {
                            bits: iova & skipped,
                        }));
                    }
                    self.check_target(at.level, &entry)
                        .map_err(|reason| at.because(reason))?;
                    if !self.mark(memory, &shape, &at, place, marked, &mut retries)? {
                        continue;
                    }
                    (at.table, at.level, granted) = (address, level, prot);
                    let first = iova & !low_bits(span_log2);
                    cache.found(&UpperTable {
                        iova: first,
                        span_log2,
                        level,
                        address,
                        prot,
                    });
                }
                Entry::Leaf { pa, log2, .. } => {
                    let within = low_bits(log2);
                    let (first, last) = S::open(self, at.entry, log2);
                    if !(first..=last).contains(&(iova & within)) {
                        return Err(at.because(WalkReason::SubPage { first, last }));
                    }
                    self.check_target(at.level, &entry)
                        .map_err(|reason| at.because(reason))?;
                    if !self.mark(memory, &shape, &at, place, marked, &mut retries)? {
                        continue;
                    }
                    return Ok(Translation {
                        pa: pa | iova & within,
                        page: Run::new(iova & !within, Span::new(pa, within + 1)),
                        open: Span::new((iova & !within) + first, last - first + 1),
                        level: at.level,
                        prot,
                        clean: S::marked(self, at.level, true, marked, Access::Write) != marked,
                        reads: at.reads,
                    });
                }
            }
        }
    }

    /// Checks that the target of an entry at `level` is allowed.
    pub(super) fn check_target(&self, level: u8, entry: &Entry) -> Result<(), WalkReason> {
        match *entry {
            // A format file never yields a level that does not fall; this is what keeps walks and
            // scans finite, so it is checked on every way down.
            Entry::Table { level: next, .. } if next >= level => {
                Err(WalkReason::NextLevel { next })
            }
            Entry::Table { address, .. }
                if (address & !self.encryption) >> self.output_bits != 0 =>
            {
                Err(self.bad_output(address & !self.encryption))
            }
            Entry::Table { .. } => Ok(()),
            Entry::Leaf { pa, log2, .. } => {
                let within = low_bits(log2);
                if ((pa & !self.encryption) | within) >> self.output_bits != 0 {
                    Err(self.bad_output(pa | within))
                } else if !self.page_sizes.contains(within.wrapping_add(1)) {
                    Err(WalkReason::PageSize { log2 })
                } else {
                    Ok(())
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
        low_bits(52) & !low_bits(self.output_bits) & !self.encryption
    }
}

/// Bits of the output addresses that a format can hold.
const fn widest(format: FormatId) -> u32 {
    match format {
        // Privileged Architecture, "Sv39": a page number of 44 bits.
        FormatId::RiscV | FormatId::RiscVG => 56,
        // DDI 0406C, B3.5.1: a supersection with its extended base address.
        FormatId::ArmV7s => 40,
        // From Linux's driver of these units (`apple-dart.c`).
        FormatId::Dart(config) => match config.version {
            DartVersion::V1 => 36,
            DartVersion::V2 => 42,
        },
        // AMD 48882, section 2.2.3; VT-d (D51397), sections 9.7 and 9.8; DDI 0487, chapter D8, LPA
        // and LPA2.
        FormatId::AmdV1
        | FormatId::X86_64
        | FormatId::VtdSs
        | FormatId::ArmStage1(_)
        | FormatId::ArmStage2(_) => 52,
    }
}

/// Permissions of two levels together. Force-coherent and device are properties of the leaf.
pub(super) fn combine(above: Prot, here: Prot) -> Prot {
    let both = Prot::RW | Prot::EXECUTE;
    (above & here & both)
        | ((above | here) & Prot::PRIVILEGED)
        | (here & (Prot::COHERENT | Prot::DEVICE | Prot::UNCACHED))
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
