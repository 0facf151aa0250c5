//! Address spaces over one unit: their domains, and devices that move between them.

use std::sync::Arc;

use ioas::{AttachError, DomainIds, Ioas, Iommu, Memory, Synthetic, TableBuilder};
use iommu::{DomainId, Port, SoftwareConfig, SoftwareUnit, Unit as _, UnitCapabilities};
use iopt::format::{ArmConfig, ArmGranule, BreakBeforeMake};
use iopt::{FormatId, HeapTables, Interruption, Prot};
use runs::Span;

use super::common::machines::{SMALL, Tables, can, dev};
use super::common::{Echo, GIB, MIB, unlimited};

const AT: u64 = 3 * GIB;

fn iommu(tables: &Tables, capabilities: UnitCapabilities) -> Iommu<SoftwareUnit<Tables, Echo>> {
    let config = SoftwareConfig {
        capabilities,
        ..SoftwareConfig::default()
    };
    let unit = SoftwareUnit::with_config(tables.clone(), Echo, config);
    Iommu::new(Arc::new(unit), tables.clone())
}

fn tables() -> Tables {
    Arc::new(HeapTables::with_tables(64).unwrap())
}

fn frames(at: u64) -> Arc<Memory> {
    unlimited(Arc::new(Synthetic::new([Span::new(at, MIB)])))
}

fn numbers(space: &Ioas) -> Vec<(DomainId, FormatId)> {
    space.tables(|id, table| (id, table.root().format))
}

fn read(port: &mut Port<Tables, Echo>) -> Option<u64> {
    let mut word = [0];
    port.read(AT, &mut word).ok().map(|()| word[0])
}

#[test]
fn a_device_moves_between_the_address_spaces_of_a_unit() {
    let tables = tables();
    let iommu = iommu(&tables, can(FormatId::VtdSs, SMALL, false));
    let spaces = [GIB, 2 * GIB].map(|at| {
        let space = Ioas::over(&iommu.clone()).unwrap();
        space
            .map(AT, &frames(at), Span::new(0, MIB), Prot::RW)
            .unwrap();
        space
    });
    assert_eq!(spaces.each_ref().map(|space| numbers(space).len()), [0, 0]);
    for (space, n) in spaces.iter().zip(1..) {
        space.attach(iommu.device(dev(n))).unwrap();
        let id = DomainId(u32::from(n));
        assert_eq!(numbers(space), [(id, FormatId::VtdSs)]);
    }
    let mut ports = [1, 2].map(|n| iommu.unit().port(dev(n)));
    assert_eq!(ports.each_mut().map(read), [Some(GIB), Some(2 * GIB)]);

    let [first, second] = &spaces;
    let refused = second.attach(iommu.device(dev(1)));
    assert!(matches!(refused, Err(AttachError::Unit(_))), "{refused:?}");
    first.detach(dev(1)).unwrap();
    assert_eq!(ports.each_mut().map(read), [None, Some(2 * GIB)]);
    second.attach(iommu.device(dev(1))).unwrap();
    assert_eq!(ports.each_mut().map(read), [Some(2 * GIB); 2]);

    for space in spaces {
        space.close().unwrap();
    }
    assert_eq!(tables.in_use(), 0);
}

#[test]
fn numbers_of_domains_end_with_the_units_bits_and_come_back() {
    let mut can = can(FormatId::AmdV1, SMALL, false);
    can.domain_bits = 2;
    let iommu = iommu(&tables(), can);
    let attach = |n| {
        let space = Ioas::over(&iommu).unwrap();
        space.attach(iommu.device(dev(n))).map(|()| space)
    };
    let mut spaces = [1, 2, 3].map(|n| attach(n).unwrap());
    let none = attach(4).unwrap_err();
    let AttachError::Build(cause) = none else {
        panic!("{none}");
    };
    assert_eq!(cause.to_string(), "all numbers of domains are in use");
    spaces[1].detach(dev(2)).unwrap();
    spaces[1] = attach(4).unwrap();
    assert_eq!(numbers(&spaces[1]), [(DomainId(2), FormatId::AmdV1)]);
}

/// SMMUv3 lists the upper half of stage 1, which stands for the lower one too.
#[test]
fn an_address_space_over_arms_stage_1_begins_at_0() {
    let arm = |upper| {
        FormatId::ArmStage1(ArmConfig {
            granule: ArmGranule::K4,
            input_bits: 48,
            upper,
        })
    };
    let iommu = iommu(&tables(), can(arm(true), SMALL, false));
    let space = Ioas::over(&iommu).unwrap();
    space.attach(iommu.device(dev(1))).unwrap();
    space
        .map(AT, &frames(GIB), Span::new(0, MIB), Prot::RW)
        .unwrap();
    assert_eq!(numbers(&space), [(DomainId(1), arm(false))]);
    assert_eq!(read(&mut iommu.unit().port(dev(1))), Some(GIB));
}

#[test]
fn two_units_that_share_numbers_share_address_spaces() {
    let tables = tables();
    let [first, second] = [FormatId::VtdSs, FormatId::AmdV1].map(|format| {
        let config = SoftwareConfig {
            capabilities: can(format, SMALL, false),
            ..SoftwareConfig::default()
        };
        Arc::new(SoftwareUnit::with_config(tables.clone(), Echo, config))
    });
    let formats = [FormatId::AmdV1, FormatId::VtdSs];
    let builder = TableBuilder::new(tables.clone(), DomainIds::new(16), formats);
    let first = Iommu::with_builder(first, builder.clone());
    let second = Iommu::with_builder(second, builder);

    let space = Ioas::over(&first).unwrap();
    space.attach(first.device(dev(1))).unwrap();
    space.attach(second.device(dev(2))).unwrap();
    let other = Ioas::over(&second).unwrap();
    other.attach(second.device(dev(3))).unwrap();
    let domain = |id, format| (DomainId(id), format);
    assert_eq!(
        numbers(&space),
        [domain(1, FormatId::VtdSs), domain(2, FormatId::AmdV1)]
    );
    assert_eq!(numbers(&other), [domain(3, FormatId::AmdV1)]);
    space
        .map(AT, &frames(GIB), Span::new(0, MIB), Prot::RW)
        .unwrap();
    let units = [(&first, 1), (&second, 2), (&second, 3)];
    let seen = units.map(|(iommu, n)| read(&mut iommu.unit().port(dev(n))));
    assert_eq!(seen, [Some(GIB), Some(GIB), None]);
}

/// The address space of the device names the areas at a fault, and no other does; a flood is as long as the log.
#[test]
fn a_fault_is_located_in_the_address_space_of_its_device() {
    let iommu = iommu(&tables(), can(FormatId::VtdSs, SMALL, false));
    let [space, other] = [(); 2].map(|()| Ioas::over(&iommu).unwrap());
    space.attach(iommu.device(dev(1))).unwrap();
    other.attach(iommu.device(dev(2))).unwrap();
    let mut port = iommu.unit().port(dev(1));
    let mut fault = |iova: u64, write: bool| {
        let done = match write {
            true => port.write(iova, &[0]),
            false => port.read(iova, &mut [0]),
        };
        assert!(done.is_err());
        let mut located = Vec::new();
        iommu.unit().drain_faults(&mut |fault| {
            assert!(other.locate(fault).is_none());
            located.push(space.locate(fault).unwrap());
        });
        assert_eq!(located.len(), 1);
        let text = located[0].to_string();
        text.split_once("; ").unwrap().1.to_owned()
    };
    assert_eq!(fault(AT, false), "nothing is mapped");
    let memory = frames(GIB);
    let part = Span::new(0, MIB);
    space.map(AT, &memory, part, Prot::READ).unwrap();
    space.map(AT + 3 * MIB, &memory, part, Prot::READ).unwrap();
    let area = Span::<runs::Iova>::new(AT, MIB);
    let next = Span::<runs::Iova>::new(AT + 3 * MIB, MIB);
    assert_eq!(fault(AT + 8, true), format!("in the area {area}, r--"));
    let below = format!("1 MiB before the area {area}");
    assert_eq!(fault(AT - MIB, false), below);
    let between = format!("right behind the area {area}, 2 MiB before the area {next}");
    assert_eq!(fault(AT + MIB, false), between);
    let above = format!("4 KiB behind the area {next}");
    assert_eq!(fault(AT + 4 * MIB + 4096, false), above);
    let released = Span::new(AT, 4096);
    space.release(&[released], Interruption::Refused, &mut |range, why| {
        panic!("{range} is kept: {why}")
    });
    let text = format!("in the area {released}, r--, released");
    assert_eq!(fault(AT, false), text);

    for _ in 0..100_000 {
        assert!(port.read(0, &mut [0]).is_err());
    }
    let mut count = 0;
    let lost = iommu
        .unit()
        .drain_faults(&mut |fault| count += u64::from(space.locate(fault).is_some()));
    assert_eq!(count + lost, 100_000);
    assert!(count < 10_000, "{count} faults are kept");
}

/// Arm's tables are built for what the unit demands when a leaf changes its size (`IDR3.BBML`), and a unit that demands
/// more has tables of its own.
#[test]
fn a_table_is_built_for_its_units_demands() {
    let arm = FormatId::ArmStage1(ArmConfig {
        granule: ArmGranule::K4,
        input_bits: 48,
        upper: true,
    });
    let tables = tables();
    let demanding = |demand| {
        let mut can = can(arm, SMALL, false);
        can.break_before_make = demand;
        iommu(&tables, can)
    };
    let lenient = demanding(BreakBeforeMake::NotNeeded);
    let strict = demanding(BreakBeforeMake::Always);
    let memory = unlimited(Arc::new(Synthetic::new([Span::new(GIB, 2 * MIB)])));
    let cut = Span::new(AT + MIB, MIB);
    for (iommu, other, cuts, places) in
        [(&lenient, &strict, true, 2), (&strict, &lenient, false, 1)]
    {
        let space = Ioas::over(iommu).unwrap();
        space.attach(iommu.device(dev(1))).unwrap();
        space
            .map(AT, &memory, Span::new(0, 2 * MIB), Prot::RW)
            .unwrap();
        let done = space.unmap_cutting(cut, Interruption::Refused);
        assert_eq!(done.is_ok(), cuts, "{done:?}");
        space.attach(other.device(dev(2))).unwrap();
        assert_eq!(space.places().len(), places);
        space.close().unwrap();
    }
}
