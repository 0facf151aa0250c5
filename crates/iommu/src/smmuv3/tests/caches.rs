//! Caches of the model: descriptors of first levels, stream table entries, context descriptors, translations and
//! tables.
//!
//! It remembers as much as a unit may. Words of an entry that is not valid are kept one by one, and only the
//! word with V is read again (IHI 0070, 3.21.3); descriptors are kept though they lead nowhere. Its reading of
//! the structures is its own.

use std::collections::BTreeMap;
use std::vec::Vec;

use iopt::format::{ArmConfig, ArmGranule};
use iopt::walk::{Access, Translation, UpperTable, WalkCache, WalkMemory, Walker};
use iopt::{FormatId, Root};
use runs::{Iova, Span};

use super::model::{Received, Tag};

/// StreamID and SubstreamID.
pub(super) type Request = (u32, Option<u32>);

/// A translation's root, or the number of the event.
pub(super) type Looked = Result<ContextHit, u8>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ContextHit {
    pub(super) tag: Tag,
    pub(super) root: Root,
    /// Translation requests are answered.
    pub(super) ats: bool,
    /// Hardware updates: accessed flag and dirty state.
    pub(super) dirty: bool,
}

/// Range of a TLB invalidation: an address, and granules from there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Range {
    pub(super) address: u64,
    /// Granule, bytes, and Arm's level or 0; `None` for one address.
    pub(super) more: Option<(u32, u64, u64)>,
}

impl Range {
    /// Section 4.4.1.1; `None` where the form is reserved, or not offered.
    pub(super) fn decode(first: u64, second: u64, offered: bool) -> Option<Self> {
        let (number, scale) = (first >> 12 & 0x1f, first >> 20 & 0x1f);
        let (level, granule) = (second >> 8 & 3, second >> 10 & 3);
        let address = second & !0xfff;
        if granule == 0 {
            let plain = number == 0 && scale == 0 && level == 0;
            return plain.then_some(Self {
                address,
                more: None,
            });
        }
        let log2 = 10 + 2 * granule as u32;
        // Where the range is not aligned to the level, or to a granule, what is invalidated is anything.
        let aligned = match level {
            0 | 3 => log2,
            level => log2 + (log2 - 3) * (3 - level) as u32,
        };
        if !offered || (number, scale, level) == (0, 0, 0) || !address.is_multiple_of(1 << aligned)
        {
            return None;
        }
        let bytes = (number + 1) << scale << log2;
        Some(Self {
            address,
            more: Some((log2, bytes, level)),
        })
    }

    fn touches(&self, span: &Span<Iova>) -> bool {
        match self.more {
            None => span.contains(self.address),
            Some((_, bytes, _)) => span.overlaps(&Span::new(self.address, bytes)),
        }
    }

    /// True when a leaf of this level must be invalidated, of tables with this granule.
    fn concerns(&self, log2: u32, level: u8) -> bool {
        match self.more {
            None => true,
            Some((granule, _, wanted)) => {
                granule == log2 && (wanted == 0 || wanted == 3 - u64::from(level))
            }
        }
    }
}

#[derive(Debug, Default)]
pub(super) struct Caches {
    first_levels: BTreeMap<u32, u64>,
    context_levels: BTreeMap<(u32, u32), u64>,
    streams: BTreeMap<u32, [Option<u64>; 8]>,
    contexts: BTreeMap<(u32, u32), [Option<u64>; 8]>,
    /// And whether it is for all ASIDs of the VMID.
    leaves: Vec<(Tag, u32, Translation, bool)>,
    uppers: Vec<(Tag, u32, UpperTable)>,
}

impl Caches {
    pub(super) fn forget(&mut self, received: Received) {
        match received {
            Received::AllStreams => {
                self.first_levels.clear();
                self.context_levels.clear();
                self.streams.clear();
                self.contexts.clear();
            }
            Received::Stream(stream, leaf) => {
                self.streams.remove(&stream);
                self.contexts.retain(|(of, _), _| *of != stream);
                self.context_levels.retain(|(of, _), _| *of != stream);
                if !leaf {
                    self.first_levels.remove(&(stream >> 6));
                }
            }
            Received::Context(stream, pasid, leaf) => {
                self.contexts.remove(&(stream, pasid));
                if !leaf {
                    self.context_levels.remove(&(stream, pasid >> 6));
                }
            }
            Received::AllOfEl1 => {
                self.leaves.clear();
                self.uppers.clear();
            }
            Received::Asid(vmid, asid) => {
                // TLBI ASIDE1: "a non-global entry from the final level of lookup".
                let tag = (vmid, Some(asid));
                self.leaves.retain(|leaf| leaf.0 != tag || leaf.3);
                self.uppers.retain(|(of, ..)| *of != tag);
            }
            Received::Vmid(vmid) => {
                self.leaves.retain(|(of, ..)| *of != (vmid, None));
                self.uppers.retain(|(of, ..)| *of != (vmid, None));
            }
            Received::Pages(tag, range, leaf) => {
                self.leaves.retain(|leaf| {
                    let (_, log2, found, _) = leaf;
                    let page = Span::new(found.page.iova, found.page.len);
                    !is_of(leaf, tag)
                        || !range.touches(&page)
                        || !range.concerns(*log2, found.level)
                });
                self.uppers.retain(|(of, log2, table)| {
                    let span = Span::new(table.iova, 1 << table.span_log2);
                    // An entry at a higher level than the leaves leads to a table.
                    leaf || *of != tag
                        || !range.touches(&span)
                        || !range.more.is_none_or(|(granule, _, level)| {
                            granule == *log2 && (level == 0 || 3 - u64::from(table.level) <= level)
                        })
                });
            }
            Received::Device(..)
            | Received::AllOfEl2
            | Received::Sync
            | Received::Abort(_)
            | Received::Control(_) => {}
        }
    }
}

/// True if a leaf translates for a tag.
fn is_of((of, .., global): &(Tag, u32, Translation, bool), tag: Tag) -> bool {
    *of == tag || *global && of.0 == tag.0 && tag.1.is_some()
}

/// Tables of one tag.
struct Uppers<'c>(Tag, u32, &'c mut Vec<(Tag, u32, UpperTable)>);

impl WalkCache for Uppers<'_> {
    fn find(&mut self, iova: u64) -> Option<UpperTable> {
        let here = |table: &&(Tag, u32, UpperTable)| {
            table.0 == self.0
                && Span::<Iova>::new(table.2.iova, 1 << table.2.span_log2).contains(iova)
        };
        let all = self.2.iter().filter(here);
        all.map(|table| table.2).min_by_key(|table| table.level)
    }

    fn found(&mut self, table: &UpperTable) {
        self.2.push((self.0, self.1, *table));
    }
}

/// The unit's inputs: memory, tables and registers.
pub(super) struct Unit_<'m> {
    pub(super) read: &'m (dyn Fn(u64) -> u64 + Send + Sync),
    pub(super) tables: &'m (dyn WalkMemory + Send + Sync),
    pub(super) base: u64,
    pub(super) shape: u32,
    pub(super) ids: [u32; 6],
}

const C_BAD_STREAMID: u8 = 0x02;
const C_BAD_STE: u8 = 0x04;
const F_STREAM_DISABLED: u8 = 0x06;
const C_BAD_SUBSTREAMID: u8 = 0x08;
const C_BAD_CD: u8 = 0x0a;

impl Unit_<'_> {
    fn read(&self, at: u64) -> u64 {
        (self.read)(at)
    }

    /// An entry of 64 bytes through a cache of its words. `valid` is the bit of the first.
    fn entry(&self, cached: &mut [Option<u64>; 8], at: u64, valid: u64) -> [u64; 8] {
        let mut words = [0; 8];
        // The first comes last: it may be newer.
        for n in (0..8).rev() {
            let word = cached[n].unwrap_or_else(|| self.read(at + 8 * n as u64));
            if n > 0 || word & valid != 0 {
                cached[n] = Some(word);
            }
            words[n] = word;
        }
        words
    }

    fn stream(&self, caches: &mut Caches, stream: u32) -> Result<[u64; 8], u8> {
        let bits = self.shape & 0x3f;
        if u64::from(stream) >> bits != 0 {
            return Err(C_BAD_STREAMID);
        }
        let at = match self.shape >> 16 {
            0 => {
                assert_eq!(self.base & ((64 << bits) - 1), 0, "aligned");
                self.base + u64::from(stream) * 64
            }
            _ => {
                assert_eq!(self.ids[0] >> 27 & 3, 1, "two levels");
                assert_eq!(self.shape >> 6 & 0x1f, 6, "SPLIT");
                let index = stream >> 6;
                let at = self.base + u64::from(index) * 8;
                let descriptor = *caches
                    .first_levels
                    .entry(index)
                    .or_insert_with(|| self.read(at));
                match descriptor & 0x1f {
                    0 => return Err(C_BAD_STREAMID),
                    span => assert_eq!(span, 7, "64 entries"),
                }
                (descriptor & !0xfff) + u64::from(stream & 0x3f) * 64
            }
        };
        let words = self.entry(caches.streams.entry(stream).or_default(), at, 1);
        if words[0] & 1 == 0 {
            return Err(C_BAD_STE);
        }
        Ok(words)
    }

    /// Translates a request.
    pub(super) fn look_up(&self, caches: &mut Caches, (stream, pasid): Request) -> Looked {
        let ste = self.stream(caches, stream)?;
        let [idr0, idr1, ..] = self.ids;
        let ats = ste[1] >> 28 & 3 == 1;
        assert!(!ats || idr0 >> 10 & 1 == 1, "EATS");
        // S1STALLD where it may be, SHCFG, and nothing that is not known here.
        let known = 0x3f << 2 | 3 | 3 << 20 | 1 << 27 | 1 << 28 | 1 << 44;
        assert_eq!(ste[1] & !known, 0, "{:#x}", ste[1]);
        assert_eq!(
            ste[1] >> 27 & 1 == 1,
            idr0 >> 24 & 3 == 0 && idr0 >> 1 & 1 == 1,
            "S1STALLD"
        );
        assert_eq!(ste[1] >> 44 & 1, u64::from(idr1 >> 27 & 1), "SHCFG");
        assert_eq!(ste[4..], [0; 4]);
        match ste[0] >> 1 & 7 {
            0b110 => {
                assert_eq!(pasid, None, "C_BAD_SUBSTREAMID is for another test");
                Ok(self.second(&ste, ats))
            }
            0b101 => {
                let vmid = ste[2] as u16;
                assert_eq!((ste[2] >> 16, ste[3]), (0, 0), "stage 2");
                let cd = self.context(caches, stream, &ste, pasid)?;
                Ok(self.first(&cd, vmid, ats))
            }
            // Not silently: the driver has no such entries.
            other => panic!("Config {other:#b}"),
        }
    }

    fn context(
        &self,
        caches: &mut Caches,
        stream: u32,
        ste: &[u64; 8],
        pasid: Option<u32>,
    ) -> Result<[u64; 8], u8> {
        let (bits, pointer) = (ste[0] >> 59, ste[0] & 0x000f_ffff_ffff_ffc0);
        let number = match pasid {
            Some(_) if bits == 0 => return Err(C_BAD_SUBSTREAMID),
            // S1DSS.
            Some(0) => return Err(F_STREAM_DISABLED),
            Some(pasid) if u64::from(pasid) >> bits != 0 => return Err(C_BAD_SUBSTREAMID),
            Some(pasid) => pasid,
            None => 0,
        };
        assert!(bits == 0 || ste[1] & 3 == 2, "S1DSS");
        assert!(bits <= u64::from(self.ids[1] >> 6 & 0x1f), "S1CDMax");
        let at = match ste[0] >> 4 & 3 {
            0 => {
                assert_eq!(pointer & ((64 << bits) - 1), 0, "aligned");
                pointer + u64::from(number) * 64
            }
            1 => {
                assert_eq!(self.ids[0] >> 19 & 1, 1, "CD2L");
                let index = number >> 6;
                let level = caches.context_levels.entry((stream, index));
                let at = pointer + u64::from(index) * 8;
                let descriptor = *level.or_insert_with(|| self.read(at));
                if descriptor & 1 == 0 {
                    return Err(C_BAD_SUBSTREAMID);
                }
                assert_eq!(descriptor & 0xffe, 0, "reserved");
                (descriptor & !0xfff) + u64::from(number & 0x3f) * 64
            }
            other => panic!("S1Fmt {other}"),
        };
        let cached = caches.contexts.entry((stream, number)).or_default();
        let words = self.entry(cached, at, 1 << 31);
        if words[0] >> 31 & 1 == 0 {
            return Err(C_BAD_CD);
        }
        Ok(words)
    }

    fn walks(&self, attributes: u64) {
        let expected = if self.ids[0] >> 4 & 1 == 1 { 0x35 } else { 0 };
        assert_eq!(attributes & 0x3f, expected, "cacheability of walks");
    }

    /// True if dirty state is kept: as far as the unit can, where its accesses are coherent.
    fn updates(&self, both: u64) -> bool {
        let can = self.ids[0] >> 6 & 3 >= 2 && self.ids[0] >> 4 & 1 == 1;
        assert_eq!(both, if can { 3 } else { 0 }, "HA, HD");
        can
    }

    fn first(&self, cd: &[u64; 8], vmid: u16, ats: bool) -> ContextHit {
        let upper = cd[0] >> 14 & 1 == 1;
        assert_eq!(cd[0] >> 30 & 1 == 1, !upper, "one of EPD0 and EPD1");
        let half = if upper { cd[0] >> 16 } else { cd[0] };
        let log2 = match (half >> 6 & 3, upper) {
            (0, false) | (2, true) => 12,
            (1, false) | (3, true) => 16,
            (2, false) | (1, true) => 14,
            other => panic!("TG {other:?}"),
        };
        self.walks(half >> 8);
        // AA64, R, A, ASET; no AFFD, WXN, UWXN, TBI, PAN, S, ENDI.
        assert_eq!(cd[0] >> 35 & 0x1e7f, 0x1c40, "{:#x}", cd[0]);
        assert_eq!(cd[0] >> 15 & 1, 0, "ENDI");
        assert_eq!(cd[3], 0x0044_04ff, "MAIR");
        assert_eq!(cd[4..], [0; 4]);
        let ips = cd[0] >> 32 & 7;
        assert!(ips <= u64::from(self.ids[5] & 7), "IPS");
        let input_bits = 64 - (half & 0x3f) as u8;
        let ds = cd[2] >> 58 & 1 == 1;
        let config = ArmConfig {
            granule: granule(log2, ds, ips),
            input_bits,
            upper,
        };
        let table = (if upper { cd[2] } else { cd[1] }) & 0x000f_ffff_ffff_fff0;
        let levels = (u32::from(input_bits) - log2).div_ceil(log2 - 3) as u8;
        ContextHit {
            tag: (vmid, Some((cd[0] >> 48) as u16)),
            root: Root {
                format: FormatId::ArmStage1(config),
                address: table,
                levels,
            },
            ats,
            dirty: self.updates(cd[0] >> 42 & 3),
        }
    }

    fn second(&self, ste: &[u64; 8], ats: bool) -> ContextHit {
        let word = ste[2];
        let log2 = [12, 16, 14][(word >> 46 & 3) as usize];
        self.walks(word >> 40);
        // S2AA64, S2R; no S2ENDI, S2AFFD, S2PTW, S2S.
        assert_eq!(word >> 51 & 0xcf, 0b1000_0001, "{word:#x}");
        let ps = word >> 48 & 7;
        assert!(ps <= u64::from(self.ids[5] & 7), "S2PS");
        let ds = ste[3] >> 3 & 1 == 1;
        let start = word >> 38 & 3 | (ste[3] >> 2 & 1) << 2;
        // VTCR_EL2.SL0: where the walk begins, in Arm's levels.
        let level: i32 = match (log2, start) {
            (12, 0..=2) => 2 - start as i32,
            (12, 4) if ds => -1,
            (14 | 16, 0..=2) => 3 - start as i32,
            (14, 3) if ds => 0,
            other => panic!("S2SL0 {other:?}"),
        };
        let config = ArmConfig {
            granule: granule(log2, ds, ps),
            input_bits: 64 - (word >> 32 & 0x3f) as u8,
            upper: false,
        };
        ContextHit {
            tag: (word as u16, None),
            root: Root {
                format: FormatId::ArmStage2(config),
                address: ste[3] & 0x000f_ffff_ffff_fff0,
                levels: (4 - level) as u8,
            },
            ats,
            dirty: self.updates(word >> 55 & 3),
        }
    }

    /// Where a read arrives.
    pub(super) fn translate(
        &self,
        caches: &mut Caches,
        (tag, walker): (Tag, &Walker),
        iova: u64,
    ) -> Option<u64> {
        let (FormatId::ArmStage1(config) | FormatId::ArmStage2(config)) = walker.root().format
        else {
            panic!("not a table of Arm's");
        };
        let log2 = crate::arm::granule_log2(config.granule);
        let here = |leaf: &&(Tag, u32, Translation, bool)| {
            is_of(leaf, tag) && Span::<Iova>::new(leaf.2.page.iova, leaf.2.page.len).contains(iova)
        };
        if let Some((.., found, _)) = caches.leaves.iter().find(here) {
            return Some(found.page.pa + (iova - found.page.iova));
        }
        let mut uppers = Uppers(tag, log2, &mut caches.uppers);
        let memory = crate::arm::Walked {
            memory: self.tables,
            last: Default::default(),
        };
        let found = walker.walk(&memory, iova, Access::Read, &mut uppers).ok()?;
        let global = memory.is_global(walker.root().format, found.level);
        caches.leaves.push((tag, log2, found, global));
        Some(found.pa)
    }
}

fn granule(log2: u32, ds: bool, size: u64) -> ArmGranule {
    match (log2, ds) {
        (12, false) => ArmGranule::K4,
        (12, true) => ArmGranule::K4Lpa2,
        (14, false) => ArmGranule::K16,
        (14, true) => ArmGranule::K16Lpa2,
        (_, false) if size == 6 => ArmGranule::K64Lpa,
        (_, false) => ArmGranule::K64,
        (_, true) => panic!("DS with 64 KiB"),
    }
}
