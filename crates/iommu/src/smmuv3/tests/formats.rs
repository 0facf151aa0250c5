//! Features in registers, and how the unit finds each table.

use iopt::format::{
    ArmStage1, ArmStage2, BreakBeforeMake, Granule, K4, K4Lpa2, K16, K16Lpa2, K64, K64Lpa,
};
use iopt::{Format, walk::Walker};
use runs::PageSizes;

use super::*;
use crate::handover::UnitKind;
use crate::setup::{IdRegisters, UnitProbeError, UnitSetupError};

fn ids(idr0: u32, idr3: u32, idr5: u32) -> [u32; 6] {
    [idr0, IDR1, 0, idr3, 0, idr5]
}

/// DS, VAX = 52 bits, OAS = 52 bits.
const WIDE: u32 = 6 | 7 << 4 | 1 << 7 | 1 << 10;

#[test]
fn capabilities_are_those_of_the_registers() {
    let can = |ids| {
        // Also a unit of 32 bits reaches it.
        let low = Arc::new(HeapTables::with_tables_at(64, 1 << 30).unwrap());
        let driver = SmmuV3::new(Model::new(low.clone(), ids), low, CONFIG);
        driver.unwrap().capabilities()
    };
    let all = can(IDS);
    assert_eq!(
        (all.domain_bits, all.input_bits, all.output_bits),
        (16, 64, 48)
    );
    assert!(all.coherent_walks && all.dirty_tracking && !all.snoop_control);
    assert_eq!((all.pasid_bits, all.device_tlbs), (0, false));
    let offers = |can: &UnitCapabilities, format: fn(ArmConfig) -> FormatId, config| {
        can.format(format(config)).map(|support| support.levels)
    };
    let (first, second) = (FormatId::ArmStage1, FormatId::ArmStage2);
    assert_eq!(
        offers(&all, first, config(ArmGranule::K4, 48)),
        Some(1 << 4)
    );
    assert_eq!(
        offers(&all, first, config(ArmGranule::K4, 39)),
        Some(1 << 3)
    );
    assert_eq!(
        offers(&all, second, config(ArmGranule::K4, 40)),
        Some(0b1_1000)
    );
    assert_eq!(offers(&all, first, config(ArmGranule::K4, 49)), None);
    assert_eq!(offers(&all, first, config(ArmGranule::K4Lpa2, 39)), None);
    let sizes = |can: &UnitCapabilities, granule| {
        let format = FormatId::ArmStage1(config(granule, 39));
        can.format(format).map(|support| support.page_sizes)
    };
    let four = PageSizes::from_bits(1 << 12 | 1 << 16 | 1 << 21 | 1 << 25 | 1 << 30 | 1 << 34);
    assert_eq!(sizes(&all, ArmGranule::K4), Some(four));
    // One stage each, one granule each.
    for (stages, one) in [(0b10, true), (0b01, false)] {
        for bit in [4, 5, 6] {
            let can = can(ids(IDR0 & !3 | stages, IDR3, 5 | 1 << bit));
            let format = can.formats.iter().flatten().collect::<Vec<_>>();
            let [support] = format[..] else {
                panic!("{format:?}");
            };
            assert_eq!(matches!(support.format, FormatId::ArmStage1(_)), one);
        }
    }
    // Where stage 2 may begin depends on the output addresses; its input is no wider.
    for (size, bits, levels) in [(0, 32, 3), (4, 44, 4), (5, 48, 4)] {
        let can = can(ids(IDR0, IDR3, size | 7 << 4));
        let four = config(ArmGranule::K4, bits);
        let offered = offers(&can, second, four).unwrap();
        assert!(
            offered >> levels & 1 == 1 && offered >> (levels + 1) == 0,
            "{bits}"
        );
        assert_eq!(offers(&can, second, config(ArmGranule::K4, bits + 1)), None);
    }
    // 42 bits leave only what begins a level lower.
    let narrow = can(ids(IDR0, IDR3, 3 | 7 << 4));
    assert_eq!(
        offers(&narrow, second, config(ArmGranule::K4, 42)),
        Some(0b1000)
    );
    let wide = can(ids(IDR0, IDR3, WIDE));
    assert_eq!(wide.formats.iter().flatten().count(), 12);
    assert_eq!(wide.output_bits, 52);
    assert_eq!(
        offers(&wide, first, config(ArmGranule::K4Lpa2, 52)),
        Some(1 << 5)
    );
    assert_eq!(
        offers(&wide, first, config(ArmGranule::K64, 52)),
        Some(1 << 3)
    );
    // Eight bits of one kind are eight bits.
    for bit in [12, 18] {
        assert_eq!(can(ids(IDR0 & !(1 << bit), IDR3, IDR5)).domain_bits, 8);
    }
    assert_eq!(can(ids(IDR0 & !(1 << 18 | 1), IDR3, IDR5)).domain_bits, 16);
    for (level, expected) in [
        (0, BreakBeforeMake::Always),
        (1, BreakBeforeMake::Marked),
        (2, BreakBeforeMake::NotNeeded),
    ] {
        let can = can(ids(IDR0, level << 11, IDR5));
        assert_eq!(can.break_before_make, expected);
    }
    // Dirty state wants HTTU 2 and coherent accesses.
    for (bits, dirty) in [(1 << 4, false), (1 << 6 | 1 << 4, false), (2 << 6, false)] {
        let can = can(ids(IDR0 & !(1 << 4 | 3 << 6) | bits, IDR3, IDR5));
        assert_eq!(can.dirty_tracking, dirty);
        assert_eq!(can.coherent_walks, bits & 1 << 4 != 0);
    }
}

#[test]
fn what_cannot_be_driven_is_refused_by_name() {
    let refused = |ids: [u32; 6]| {
        let memory = memory();
        let driver = SmmuV3::new(Model::new(memory.clone(), ids), memory.clone(), CONFIG);
        assert_eq!(memory.in_use(), 0);
        driver.err().unwrap()
    };
    let idr0 = u32::MAX;
    let kind = UnitKind::SmmuV3;
    let read = |name, value: u32| IdRegisters::one(name, value.into());
    let nobody = UnitProbeError::NoUnit {
        kind,
        read: read("SMMU_IDR0", idr0),
    };
    assert_eq!(refused([idr0; 6]), nobody.into());
    let idr0 = IDR0 | 2 << 24;
    assert_eq!(
        refused(ids(idr0, 0, IDR5)),
        UnitProbeError::StallsAlways {
            read: read("SMMU_IDR0", idr0)
        }
        .into()
    );
    let no_tables = |idr0: u32, idr5: u32| {
        let read = IdRegisters::two(("SMMU_IDR0", idr0.into()), ("SMMU_IDR5", idr5.into()));
        UnitSetupError::Probe(UnitProbeError::Tables { kind, read })
    };
    // No AArch64 tables, big-endian ones, no stage, no granule.
    for idr0 in [IDR0 & !(1 << 3), IDR0 | 1 << 21, IDR0 & !3] {
        let idr5 = IDR5;
        assert_eq!(refused(ids(idr0, 0, idr5)), no_tables(idr0, idr5));
    }
    let (idr0, idr5) = (IDR0, 5);
    assert_eq!(refused(ids(idr0, 0, idr5)), no_tables(idr0, idr5));
    for idr1 in [IDR1 | 1 << 29, IDR1 | 1 << 30, IDR1 & !(0x1f << 21)] {
        let ids = [IDR0, idr1, 0, 0, 0, IDR5];
        let queues = UnitProbeError::Queues {
            read: read("SMMU_IDR1", idr1),
        };
        assert_eq!(refused(ids), queues.into());
    }
}

/// Every table that the unit offers is found by it as it is, and detached as it was attached.
#[test]
fn every_table_is_reported_as_it_is() {
    fn granule<G: Granule>(driver: &Driver, model: &Model) -> u32 {
        let mut count = 0;
        for bits in 32..=52 {
            let address = if G::ADDRESS_BITS == 52 {
                0xf_1234_5678_0000
            } else {
                0x1234_5678_0000
            };
            let mut roots = Vec::new();
            if let Ok(table) = ArmStage1::<G>::new(bits, G::ADDRESS_BITS) {
                for table in [table, table.upper()] {
                    roots.push((table.id(), table.levels()));
                }
            }
            if let Ok(table) = ArmStage2::<G>::new(bits, G::ADDRESS_BITS) {
                let all = (1..=5).filter_map(|n| table.with_levels(n).ok());
                roots.extend(all.map(|table| (table.id(), table.levels())));
            }
            for (format, levels) in roots {
                // Roots side by side are aligned to all of them.
                let root = Root {
                    format,
                    address,
                    levels,
                };
                driver.attach(DEVICE, DOMAIN, root).unwrap();
                assert_eq!(found(model.look_up(STREAM, None)), Some((7, root)));
                // The walker knows such a root.
                assert!(Walker::new(root).aperture().is_some(), "{root:?}");
                driver.detach(DEVICE).unwrap();
                count += 1;
            }
        }
        count
    }
    let (driver, model) = enabled_with(ids(IDR0, IDR3, WIDE), CONFIG);
    let counts = [
        granule::<K4>(&driver, &model),
        granule::<K16>(&driver, &model),
        granule::<K64>(&driver, &model),
        granule::<K4Lpa2>(&driver, &model),
        granule::<K16Lpa2>(&driver, &model),
        granule::<K64Lpa>(&driver, &model),
    ];
    assert!(counts.iter().all(|count| *count > 50), "{counts:?}");
    model.received();
}

#[test]
fn what_the_unit_cannot_do_is_not_asked_of_it() {
    // Nothing coherent, no HTTU, no override of types, no stalls, eight bits, one level, one stage.
    for stages in [0b01, 0b10] {
        let plain = [
            stages | 1 << 3 | 2 << 21 | 1 << 24,
            16 | 3 << 16 | 3 << 21,
            0,
            0,
            0,
            IDR5,
        ];
        let (driver, model) = enabled_with(plain, CONFIG);
        let (root, tag) = match stages {
            0b01 => (second(0x1000), (0xff, None)),
            _ => (root(0x1000), (0, Some(0xff))),
        };
        driver.attach(DEVICE, DomainId(0xff), root).unwrap();
        let looked = model.look_up(STREAM, None).unwrap();
        assert_eq!((looked.tag, looked.root, looked.dirty), (tag, root, false));
        driver.invalidate_domain(DomainId(0xff)).unwrap();
        driver.detach(DEVICE).unwrap();
        model.received();
    }
}

/// OAS, but no more than tables of the granules that there are hold.
#[test]
fn memory_beyond_the_units_addresses_is_refused_by_name() {
    // OAS of 48 and 52 bits; tables of 4 KiB, with DS, of 64 KiB.
    for (idr5, bits) in [
        (5 | 1 << 4, 48),
        (6 | 1 << 4, 48),
        (6 | 1 << 4 | 1 << 7, 52),
        (5 | 1 << 6, 48),
        (6 | 1 << 6, 52),
    ] {
        let ids = ids(IDR0, IDR3, idr5);
        let at = |base| {
            let memory = Arc::new(HeapTables::with_tables_at(64, base).unwrap());
            let driver = SmmuV3::new(Model::new(memory.clone(), ids), memory.clone(), CONFIG);
            driver.map(|_| ()).map_err(|error| (error, memory.in_use()))
        };
        let (pages, last) = (64 << 12, (1 << bits) + (64 << 12) - 1);
        assert_eq!(at((1 << bits) - pages), Ok(()), "{idr5:#x}");
        let refused = UnitSetupError::Addresses { last, bits };
        assert_eq!(at(1 << bits), Err((refused, 0)), "{idr5:#x}");
    }
}
