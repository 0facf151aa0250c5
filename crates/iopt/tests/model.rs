//! The model suite over all formats.

#[macro_use]
mod suite;

use iopt::HeapTables;
use iopt::format::{AmdV1, VtdSs, X86_64};
use proptest::prelude::*;
use runs::PageSizes;
use suite::{World, op};

const ALL: PageSizes = PageSizes::from_bits(u64::MAX);
const SMALL: PageSizes = PageSizes::from_bits(1 << 12);
const FROM_2M: PageSizes = PageSizes::from_bits(1 << 21 | 1 << 30);

suite!(amdv1, AmdV1::new(4).unwrap(), ALL);
suite!(
    amdv1_3_levels,
    AmdV1::new(3).unwrap(),
    PageSizes::from_bits(1 << 12 | 1 << 16 | 1 << 20 | 1 << 21)
);
suite!(amdv1_5_levels, AmdV1::new(5).unwrap(), SMALL);
suite!(amdv1_6_levels, AmdV1::new(6).unwrap(), ALL);
suite!(x86_64, X86_64::new(4).unwrap(), ALL);
suite!(x86_64_5_levels, X86_64::new(5).unwrap(), ALL);
suite!(vtd_ss_3_levels, VtdSs::new(3).unwrap(), ALL);
suite!(vtd_ss, VtdSs::new(4).unwrap(), ALL);
suite!(vtd_ss_5_levels, VtdSs::new(5).unwrap(), FROM_2M);
