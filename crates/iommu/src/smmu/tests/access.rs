//! Accesses of the model's devices: stream mapping, caches, walks and faults.

use iopt::format::{ArmConfig, ArmGranule};
use iopt::walk::{Access, UpperTable, WalkCache, WalkReason, Walker};
use iopt::{FormatId, Root};
use runs::{Run, Span};

use super::model::{Cached, Model, State, Tag};

/// Outcome of an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Seen {
    /// It went to this address, translated or not.
    Translated(u64),
    Passed(u64),
    /// It was blocked, with this bit of GFSR or FSR.
    Global(u32),
    Context(u32),
    /// A fault that has not been cleared held it up.
    HeldUp,
}

/// A tag's tables in the cache.
struct Tables<'t> {
    tag: Tag,
    all: &'t mut Vec<(Tag, UpperTable)>,
}

impl WalkCache for Tables<'_> {
    fn find(&mut self, iova: u64) -> Option<UpperTable> {
        let found = self.all.iter().filter(|(tag, table)| {
            *tag == self.tag
                && (table.iova ^ iova)
                    .checked_shr(table.span_log2)
                    .unwrap_or(0)
                    == 0
        });
        found
            .min_by_key(|(_, table)| table.level)
            .map(|found| found.1)
    }

    fn found(&mut self, table: &UpperTable) {
        self.all.push((self.tag, *table));
    }
}

impl State {
    /// Which stream mapping registers a stream comes to.
    fn map(&self, stream: u16) -> Vec<usize> {
        if self.get("IDR0") >> 27 & 1 == 0 {
            return vec![stream.into()];
        }
        let extended = self.get("CR0") >> 3 & 1 == 1;
        let matches = |n: &usize| {
            let entry = self.smr[*n];
            let (valid, bits) = match extended {
                true => (self.s2cr[*n] >> 10 & 1 == 1, 0xffff),
                false => (entry >> 31 == 1, 0x7fff),
            };
            valid && (u32::from(stream) ^ entry) & bits & !(entry >> 16) == 0
        };
        (0..self.smr.len()).filter(matches).collect()
    }

    fn global_fault(&mut self, bit: u32, stream: u16, address: u64, write: bool) -> Seen {
        let before = self.get("GFSR");
        if before != 0 {
            self.put("GFSR", before | 1 << 31);
            return Seen::Global(bit);
        }
        self.put("GFSR", 1 << bit);
        self.put("GFAR", address as u32);
        self.put("GFAR high", (address >> 32) as u32);
        self.put("GFSYNR0", u32::from(write) << 1);
        self.put("GFSYNR1", stream.into());
        Seen::Global(bit)
    }

    fn context_fault(
        &mut self,
        n: usize,
        bit: u32,
        stream: u16,
        address: u64,
        write: bool,
    ) -> Seen {
        let before = self.bank(n, "FSR");
        if before != 0 {
            self.put_bank(n, "FSR", before | 1 << 31);
            return Seen::Context(bit);
        }
        self.put_bank(n, "FSR", 1 << bit);
        self.put_bank(n, "FAR", address as u32);
        self.put_bank(n, "FAR high", (address >> 32) as u32);
        self.put_bank(n, "FSYNR0", u32::from(write) << 4);
        self.cbfrsynra[n] = stream.into();
        Seen::Context(bit)
    }

    /// PASize, where there is one, and OAS.
    fn output_bits(&self, n: usize) -> u32 {
        let size = |field: u32| [32, 36, 40, 42, 44, 48, 48, 48][field as usize & 7];
        let most = size(self.get("IDR2") >> 4 & 0xf);
        if self.version == 1 || self.cba2r[n] & 1 == 0 {
            return most;
        }
        let field = match self.tag(n).1 {
            None => self.bank(n, "TCR") >> 16,
            Some(_) => self.bank(n, "TCR2"),
        };
        size(field & 7).min(most)
    }

    /// The table that a bank leads to, from its registers alone; and bits of an entry's span at the
    /// lowest level, and more at each above.
    fn root(&self, n: usize) -> (Root, u32, u32) {
        let base = u64::from(self.bank(n, "TTBR0 high")) << 32 | u64::from(self.bank(n, "TTBR0"));
        let control = self.bank(n, "TCR");
        let second = self.cbar[n] >> 16 & 3 == 0;
        let first_only = (self.get("IDR1") >> 16 & 0xff) as usize;
        assert!(second || n >= first_only, "bank {n} only knows stage 2");
        let long64 = self.version == 2 && self.cba2r[n] & 1 == 1;
        if !second {
            assert_eq!(self.cbar[n] >> 16 & 3, 1, "stage 2 is bypassed");
            assert_eq!(self.cbar[n] & 0xff, 0, "VMID");
        }
        if !long64 && !second && control >> 31 == 0 {
            assert_eq!(control & 7, 0, "TTBCR.N");
            assert_eq!(self.bank(n, "SCTLR") & 0b111, 0b101, "AFE, no TRE");
            let root = Root {
                format: FormatId::ArmV7s,
                address: base & 0xffff_c000,
                levels: 2,
            };
            return (root, 12, 8);
        }
        let (granule, page) = match control >> 14 & 3 {
            _ if !long64 => (ArmGranule::K4, 12),
            0 => (ArmGranule::K4, 12),
            1 => (ArmGranule::K64, 16),
            _ => (ArmGranule::K16, 14),
        };
        let offered = match (long64, page) {
            (false, _) => self.get("IDR0") >> 24 & 3 < 2,
            (true, 12) => self.get("IDR2") >> 12 & 1 == 1,
            (true, 14) => self.get("IDR2") >> 13 & 1 == 1,
            (true, _) => self.get("IDR2") >> 14 & 1 == 1,
        };
        assert!(offered, "{granule:?}");
        let input_bits = match (long64, second) {
            (true, _) => 64 - (control & 0x3f),
            (false, false) => 32 - (control & 7),
            (false, true) => {
                assert_eq!(control >> 4 & 1, control >> 3 & 1, "S");
                // Four bits with a sign.
                (32 - ((control << 28) as i32 >> 28)) as u32
            }
        };
        let config = ArmConfig {
            granule,
            input_bits: input_bits as u8,
            upper: false,
        };
        let stride = page - 3;
        let (format, levels) = if second {
            // Start levels 2, 1, 0 with 4 KiB, and 3, 2, 1 with more.
            let most = if page == 12 { 2 } else { 3 };
            let start = most - (control >> 6 & 3);
            (FormatId::ArmStage2(config), 4 - start)
        } else {
            assert_eq!(control >> 23 & 1, 1, "EPD1");
            if self.version == 2 {
                assert_eq!(self.bank(n, "TCR2") >> 15 & 7, 7, "SEP");
            }
            let mair = [self.bank(n, "MAIR0"), self.bank(n, "MAIR1")];
            assert_eq!(mair, [0x44_04ff, 0]);
            let levels = (input_bits - page).div_ceil(stride);
            (FormatId::ArmStage1(config), levels)
        };
        let root = Root {
            format,
            address: base & 0xffff_ffff_ffff,
            levels: levels as u8,
        };
        (root, page, stride)
    }
}

impl Model {
    /// An access by a device.
    pub(super) fn access(&self, stream: u16, address: u64, write: bool) -> Seen {
        let state = &mut *self.state();
        if state.get("CR0") & 1 == 1 {
            return Seen::Passed(address);
        }
        let s2cr = match state.map(stream)[..] {
            [n] => state.s2cr[n],
            [] if state.get("CR0") >> 10 & 1 == 0 => return Seen::Passed(address),
            [] => return state.global_fault(1, stream, address, write),
            _ => return state.global_fault(2, stream, address, write),
        };
        let n = (s2cr & 0xff) as usize;
        match s2cr >> 16 & 3 {
            0 if n < state.banks.len() => {}
            0 => return state.global_fault(3, stream, address, write),
            1 => return Seen::Passed(address),
            _ => return state.global_fault(0, stream, address, write),
        }
        let mode = state.bank(n, "SCTLR");
        if mode & 1 == 0 {
            return Seen::Passed(address);
        }
        // HUPCF.
        if state.bank(n, "FSR") != 0 && mode >> 8 & 1 == 0 {
            return Seen::HeldUp;
        }
        let (root, page, stride) = state.root(n);
        let tag = state.tag(n);
        let hit = |it: &&Cached| it.is_of(tag) && it.page.input().contains(address);
        if let Some(found) = state
            .cached
            .iter()
            .find(hit)
            .filter(|it| it.write || !write)
        {
            return Seen::Translated(found.page.pa + (address - found.page.iova));
        }
        let output = state.output_bits(n);
        let walker = Walker::new(root)
            .with_hardware_accessed(false)
            .with_hardware_dirty(false)
            .with_output_bits(output);
        let access = if write { Access::Write } else { Access::Read };
        let mut tables = Tables {
            tag,
            all: &mut state.tables,
        };
        let memory = crate::arm::Walked {
            memory: &*self.memory,
            last: Default::default(),
        };
        match walker.walk(&memory, address, access, &mut tables) {
            Ok(found) => {
                let global = memory.is_global(root.format, found.level);
                // Each entry of a group for itself.
                let size = 1u64 << (page + stride * u32::from(found.level));
                let start = address & !(size - 1);
                let pa = found.pa - (address - start);
                let write = found.prot.contains(iopt::Prot::WRITE);
                let page = Run::new(start, Span::new(pa, size));
                state.cached.push(Cached {
                    tag,
                    page,
                    write,
                    global,
                });
                Seen::Translated(found.pa)
            }
            Err(fault) => {
                let bit = match fault.reason {
                    WalkReason::NotPresent | WalkReason::OutsideAperture { .. } => 1,
                    WalkReason::AccessFlag => 2,
                    WalkReason::Denied { .. } => 3,
                    WalkReason::BadOutput { .. } => 7,
                    WalkReason::NoMemory { .. } => 4,
                    other => panic!("{other:?}"),
                };
                state.context_fault(n, bit, stream, address, write)
            }
        }
    }
}
