//! Known answers: every word below is written out from the specifications' field tables.

mod amdv1;
mod arm_lpae;
mod armv7s;
mod dart;
mod riscv;
mod updates;
mod vtd_ss;
mod x86_64;

use alloc::collections::BTreeMap;
use alloc::string::ToString;
use alloc::vec::Vec;

use proptest::prelude::*;
use runs::{PageSizes, Span};

use super::spec::low_bits;
use super::*;
use crate::format::{Aperture, FormatId, Root};

/// Words at addresses; the tables are the 4 KiB pages that hold at least one.
struct Image(BTreeMap<u64, u64>);

impl Image {
    fn new(words: &[(u64, u64)]) -> Self {
        Self(words.iter().copied().collect())
    }
}

impl WalkMemory for Image {
    fn read_u64(&self, address: u64) -> Result<u64, BadAddress> {
        let page = address & !0xfff;
        if self.0.range(page..page + 0x1000).next().is_none() {
            return Err(BadAddress { address });
        }
        Ok(self.0.get(&address).copied().unwrap_or(0))
    }
}

const R: Access = Access::Read;
const W: Access = Access::Write;

fn walker(format: FormatId, address: u64, levels: u8) -> Walker {
    Walker::new(Root {
        format,
        address,
        levels,
    })
}

fn reason(walker: &Walker, image: &Image, iova: u64, access: Access) -> WalkReason {
    let fault = walker.walk(image, iova, access, &mut ()).unwrap_err();
    assert_eq!((fault.iova, fault.access), (iova, access));
    fault.reason
}

/// Keeps every table that it is given.
#[derive(Default)]
struct Tables(Vec<UpperTable>);

impl WalkCache for Tables {
    fn find(&mut self, iova: u64) -> Option<UpperTable> {
        let here = |t: &&UpperTable| (iova ^ t.iova) & !low_bits(t.span_log2) == 0;
        self.0.iter().filter(here).min_by_key(|t| t.level).copied()
    }
    fn found(&mut self, table: &UpperTable) {
        self.0.push(*table);
    }
}

#[test]
fn a_cache_of_upper_levels_gets_each_table_and_shortens_the_next_walk() {
    let image = Image::new(&[
        (0x1008, 0x2001), // read-only from here on
        (0x2008, 0x3003),
        (0x3008, 0x4003),
        (0x4008, 0x9003),
        (0x4010, 0x7003),
    ]);
    let vtd = walker(FormatId::VtdSs, 0x1000, 4);
    let mut cache = Tables::default();
    assert_eq!(
        vtd.walk(&image, 0x80_4020_1000, R, &mut cache)
            .unwrap()
            .reads,
        4
    );
    let table = |iova, span_log2, level, address| UpperTable {
        iova,
        span_log2,
        level,
        address,
        prot: Prot::READ,
    };
    assert_eq!(
        cache.0,
        [
            table(0x80_0000_0000, 39, 2, 0x2000),
            table(0x80_4000_0000, 30, 1, 0x3000),
            table(0x80_4020_0000, 21, 0, 0x4000),
        ]
    );
    let found = vtd.walk(&image, 0x80_4020_2000, R, &mut cache).unwrap();
    assert_eq!((found.pa, found.reads, found.prot), (0x7000, 1, Prot::READ));
    assert_eq!(cache.0.len(), 3);
    // A write is not allowed by what the cache says: the walk starts over and names the level.
    let fault = vtd.walk(&image, 0x80_4020_2000, W, &mut cache).unwrap_err();
    assert_eq!((fault.level, fault.reads), (3, 1));
}

/// Memory of any content: a word is a hash of its address, made to look like an entry.
struct Noise {
    seed: u64,
    flavour: u64,
}

impl WalkMemory for Noise {
    fn read_u64(&self, address: u64) -> Result<u64, BadAddress> {
        let mut x = address ^ self.seed;
        for _ in 0..2 {
            x = (x ^ x >> 31).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        }
        if x >> 60 == 0 {
            return Err(BadAddress { address });
        }
        // Mostly present and permitted, with few reserved bits, so that walks get far.
        Ok(match self.flavour {
            0 => x,
            1 => x & 0x000f_ffff_ffff_ffff | 0x6000_0000_0000_0007,
            2 => x & 0x001f_ffff_ffff_ffff | 0x441,
            3 => x & 0x003f_ffff_ffff_fc0f | 1,
            4 => x & 0x0000_003f_ffff_fc03 | (x >> 60) << 52 | 0x000f_f000_0000_0001,
            _ => x & 0x0000_0fff_ffff_f6ff | 0x6000_0000_0000_0007,
        })
    }
}

/// Every format that has a walker; those of Arm and DART with so many input bits.
fn every_format(input_bits: u8) -> Vec<FormatId> {
    use crate::format::{ArmConfig, ArmGranule as G, DartConfig, DartVersion as V};
    // Mostly sizes that there are.
    let input_bits = if input_bits < 200 {
        input_bits % 54
    } else {
        input_bits
    };
    let mut formats = FormatId::ALL.to_vec();
    formats.extend([FormatId::ArmV7s, FormatId::RiscV, FormatId::RiscVG]);
    for granule in [G::K4, G::K4Lpa2, G::K16, G::K16Lpa2, G::K64, G::K64Lpa] {
        for upper in [false, true] {
            let config = ArmConfig {
                granule,
                input_bits,
                upper,
            };
            formats.extend([FormatId::ArmStage1(config), FormatId::ArmStage2(config)]);
        }
    }
    for (version, page_log2) in [(V::V1, 12), (V::V1, 14), (V::V2, 14), (V::V2, 12)] {
        formats.push(FormatId::Dart(DartConfig {
            version,
            page_log2,
            input_bits,
        }));
    }
    formats
}

proptest! {
    #[test]
    fn any_bytes_give_a_page_or_a_fault_within_as_many_reads_as_levels(
        seed: u64,
        flavour in 0..6u64,
        iova: u64,
        near in 0..64u32,
        levels in 0..9u8,
        arm_bits: u8,
        address in prop_oneof![any::<u64>(), (0..1u64 << 40).prop_map(|page| page << 12)],
        bits in 0..70u32,
        write: bool,
    ) {
        let memory = Noise { seed, flavour };
        let access = if write { W } else { R };
        let iova = iova >> near;
        for format in every_format(arm_bits) {
            let walker = walker(format, address, levels).with_output_bits(bits);
            let mut cache = Tables::default();
            let found = walker.walk(&memory, iova, access, &mut cache);
            for table in &cache.0 {
                prop_assert!((iova ^ table.iova) & !low_bits(table.span_log2) == 0);
                prop_assert!(table.level < levels);
            }
            match found {
                Ok(found) => {
                    prop_assert!(found.reads <= levels && found.reads > 0);
                    prop_assert!(found.page.len.is_power_of_two());
                    prop_assert_eq!((found.page.pa | found.page.iova) & (found.page.len - 1), 0);
                    prop_assert!(found.page.input().covers(&found.open));
                    prop_assert!(found.open.contains(iova));
                    let partly = matches!(format, FormatId::Dart(_));
                    prop_assert!(partly || found.open == found.page.input());
                    prop_assert_eq!(found.pa - found.page.pa, iova - found.page.iova);
                    prop_assert!(found.prot.contains(access.needs()));
                    // Starting from the lowest table that was met gives the same.
                    let again = walker.walk(&memory, iova, access, &mut cache).unwrap();
                    prop_assert_eq!(Translation { reads: found.reads, ..again }, found);
                    prop_assert_eq!(again.reads, 1);
                }
                Err(fault) => {
                    prop_assert!(fault.reads <= levels);
                    prop_assert!(!fault.to_string().is_empty());
                }
            }
        }
    }
}
