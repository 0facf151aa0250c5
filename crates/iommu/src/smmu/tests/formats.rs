//! Every format that is offered, walked by the model from the registers that the driver has written.

use std::sync::atomic::{AtomicU32, AtomicU64};

use iopt::format::{ArmConfig, ArmGranule, ArmV7s, K16, K64};
use iopt::walk::WalkMemory;
use iopt::{Format, HeapArena, TableMemory, TableOps as _};

use super::*;
use crate::handover::UnitKind;
use crate::setup::{IdRegisters, UnitProbeError};

/// AArch32 tables only, and of these only long descriptors.
const NO_AARCH64: u32 = 5 << 8 | 5 << 4 | 5;
const LONG_ONLY: u32 = 1 << 24;

/// Maps a leaf of every size at the bottom and at the top, and looks through the unit.
fn walks<F, A>(format: F, memory: A, config: Config, idr: [u32; 3])
where
    F: Format,
    A: WalkMemory + TableMemory + Send + Sync + 'static,
{
    let memory = Arc::new(memory);
    let version = if config.version == Version::V1 { 1 } else { 2 };
    let model = Model::new(memory.clone(), version, idr);
    let driver = Smmu::new(model.clone(), config).unwrap();
    let can = driver.capabilities();
    let mut table = Table::new(format, memory).unwrap();
    let root = table.root();
    let support = can.format(root.format).unwrap();
    assert!(support.levels >> root.levels & 1 == 1, "{root:?}");
    driver.enable().unwrap();
    driver.attach(DEVICE, DOMAIN, root).unwrap();
    let whole = format.aperture().spans().next().unwrap();
    let output = 1u64 << format.output_bits().min(can.output_bits);
    let mut used = 0;
    for size in support.page_sizes.iter() {
        if size > whole.len / 4 || size > output / 4 || !table.page_sizes().contains(size) {
            continue;
        }
        let low = [Span::new(output - size, size)];
        let high = [Span::new(output / 2, size)];
        let top = whole.start + (whole.len - size);
        table.map(0, &low, Prot::READ).unwrap();
        table.map(top, &high, Prot::RW).unwrap();
        for offset in [0, size / 2, size - 8] {
            let reached = Seen::Translated(output - size + offset);
            assert_eq!(model.access(STREAM, offset, false), reached, "{size:#x}");
            let reached = Seen::Translated(output / 2 + offset);
            assert_eq!(model.access(STREAM, top + offset, true), reached);
        }
        // Not allowed, and not there.
        assert_eq!(model.access(STREAM, 8, true), Seen::Context(3));
        assert_eq!(model.access(STREAM, size, false), NOT_PRESENT);
        assert_eq!(model.access(STREAM, top - 8, false), NOT_PRESENT);
        let mut gather = iopt::Gather::new();
        for start in [0, top] {
            let gone = Span::new(start, size);
            table.unmap(gone, &mut gather, &mut iopt::NoRuns).unwrap();
        }
        let stale = model.access(STREAM, 0, false);
        assert_eq!(stale, Seen::Translated(output - size), "still cached");
        let flushed = gather.flush_with(|what| driver.invalidate(DOMAIN, what));
        table.reclaim(flushed.unwrap());
        for address in [0, size - 8, top, top + size - 8] {
            assert_eq!(model.access(STREAM, address, false), NOT_PRESENT);
        }
        used += 1;
    }
    assert!(used >= 2, "{root:?}: {used} sizes");
    if let Some(beyond) = whole.last().checked_add(1) {
        assert_eq!(model.access(STREAM, beyond, false), NOT_PRESENT);
    }
    model.received();
}

/// Maps a leaf of each size in every way in which the table lets all requests read it, and looks
/// that neither its device nor one of another domain reaches it after the domain was flushed, nor after the
/// detach.
fn leaves<F, A>(format: F, memory: A)
where
    F: Format,
    A: WalkMemory + TableMemory + Send + Sync + 'static,
{
    let memory = Arc::new(memory);
    let model = Model::new(memory.clone(), 2, [IDR0, IDR1, IDR2]);
    let driver = Smmu::new(model.clone(), V2).unwrap();
    driver.enable().unwrap();
    let mut table = Table::new(format, memory.clone()).unwrap();
    let other = Table::new(format, memory).unwrap();
    driver
        .attach(DeviceId(1), DomainId(8), other.root())
        .unwrap();
    let prots = (0..=Prot::all().bits()).map(Prot::from_bits_retain);
    let prots = prots.filter(|prot| *prot & (Prot::READ | Prot::PRIVILEGED) == Prot::READ);
    for prot in prots.filter(|prot| format.leaf_bits(*prot).is_some()) {
        for size in table.page_sizes().iter().filter(|size| *size < 1 << 30) {
            for detaches in [false, true] {
                driver.attach(DEVICE, DOMAIN, table.root()).unwrap();
                table.map(0, &[Span::new(1 << 31, size)], prot).unwrap();
                let reached = || [STREAM, 1].map(|stream| model.access(stream, 0, false));
                assert_eq!(reached(), [Seen::Translated(1 << 31), NOT_PRESENT]);
                let mut gather = iopt::Gather::new();
                let page = Span::new(0, size);
                table.unmap(page, &mut gather, &mut iopt::NoRuns).unwrap();
                if detaches {
                    driver.detach(DEVICE).unwrap();
                    driver.attach(DEVICE, DOMAIN, table.root()).unwrap();
                } else {
                    driver.invalidate_domain(DOMAIN).unwrap();
                }
                assert_eq!(
                    reached(),
                    [NOT_PRESENT; 2],
                    "{format:?}, {prot}, {size:#x}, {detaches}"
                );
                table.reclaim(gather.flush_with(|_| Ok::<_, ()>(())).unwrap());
                driver.detach(DEVICE).unwrap();
            }
        }
    }
    model.received();
}

/// Room for tables below 4 GiB.
fn room<const LOG2: u32>() -> HeapArena<AtomicU64, LOG2> {
    HeapArena::with_tables_at(64, 1 << 31).unwrap()
}

#[test]
fn aarch64_tables_of_every_granule_and_input_size() {
    let idr = [IDR0, IDR1, IDR2];
    for bits in 32..=48 {
        walks(
            ArmStage1::<K4>::new(bits, 48).unwrap(),
            room::<12>(),
            V2,
            idr,
        );
        walks(
            ArmStage2::<K4>::new(bits, 48).unwrap(),
            room::<12>(),
            V2,
            idr,
        );
        walks(
            ArmStage1::<K16>::new(bits, 48).unwrap(),
            room::<14>(),
            V2,
            idr,
        );
        walks(
            ArmStage2::<K16>::new(bits, 48).unwrap(),
            room::<14>(),
            V2,
            idr,
        );
        walks(
            ArmStage1::<K64>::new(bits, 48).unwrap(),
            room::<16>(),
            V2,
            idr,
        );
        walks(
            ArmStage2::<K64>::new(bits, 48).unwrap(),
            room::<16>(),
            V2,
            idr,
        );
    }
    // With a level more than it takes.
    let deep = ArmStage2::<K4>::new(40, 48).unwrap();
    walks(deep.with_levels(4).unwrap(), room::<12>(), V2, idr);
    let deep = ArmStage2::<K64>::new(32, 48).unwrap();
    walks(deep.with_levels(2).unwrap(), room::<16>(), V2, idr);
}

#[test]
fn registers_in_pages_of_64_kib() {
    let idr1 = 1 << 31 | 2 << 28 | 8;
    let idr = [IDR0, idr1, IDR2];
    walks(ArmStage1::<K4>::new(39, 40).unwrap(), room::<12>(), V2, idr);
    walks(ArmStage2::<K4>::new(39, 40).unwrap(), room::<12>(), V2, idr);
}

#[test]
fn aarch32_tables_where_there_are_no_others() {
    let short = || HeapArena::<AtomicU32, 10>::with_tables_at(256, 1 << 30).unwrap();
    for (config, idr2) in [(V1, IDR2_V1), (V2, NO_AARCH64)] {
        let idr = [IDR0, IDR1, idr2];
        walks(
            ArmStage1::<K4>::new(32, 40).unwrap(),
            room::<12>(),
            config,
            idr,
        );
        for bits in 32..=40 {
            walks(
                ArmStage2::<K4>::new(bits, 40).unwrap(),
                room::<12>(),
                config,
                idr,
            );
        }
        let deep = ArmStage2::<K4>::new(32, 40).unwrap();
        walks(deep.with_levels(3).unwrap(), room::<12>(), config, idr);
        walks(ArmV7s::<0>::new(), short(), config, idr);
    }
    // Beside AArch64 tables.
    walks(ArmV7s::<0>::new(), short(), V2, [IDR0, IDR1, IDR2]);
}

#[test]
fn tables_that_are_read_past_the_caches_are_said_to_be() {
    let idr0 = IDR0 & !(1 << 14);
    for (format, control) in [(0, 0x2000 | 1 << 23 | 16), (1, 2 << 12 | 1 << 31)] {
        let memory = memory();
        let (driver, model) = unit_with(memory.clone(), V2, [idr0, IDR1, IDR2]);
        assert!(!driver.capabilities().coherent_walks);
        driver.enable().unwrap();
        model.received();
        let (root, kept) = match format {
            0 => (first(&memory, 0).root(), u64::MAX),
            _ => (second(&memory, 40).root(), 0x8000_3f00),
        };
        driver.attach(DEVICE, DOMAIN, root).unwrap();
        let received = model.received();
        let tcr = received
            .iter()
            .find(|received| received.0 == "TCR")
            .unwrap();
        assert_eq!(tcr.2 & kept, control);
        assert_eq!(model.access(STREAM, 0, false), Seen::Translated(DATA));
    }
}

#[test]
fn capabilities_are_those_of_the_registers() {
    let can =
        |config, idr| Smmu::new(Model::new(memory(), 2, idr), config).map(|d| d.capabilities());
    let list = |can: &UnitCapabilities| -> Vec<_> {
        let formats = can.formats.iter().flatten();
        formats
            .map(|it| {
                let bits = match it.format {
                    FormatId::ArmStage1(config) | FormatId::ArmStage2(config) => config.input_bits,
                    _ => 32,
                };
                (it.format.name(), bits, it.levels)
            })
            .collect()
    };
    let all = can(V2, [IDR0, IDR1, IDR2]).unwrap();
    assert_eq!(
        list(&all),
        [
            ("arm-s1-4k", 48, 1 << 3 | 1 << 4),
            ("arm-s2-4k", 48, 1 << 2 | 1 << 3 | 1 << 4),
            ("arm-s1-16k", 48, 1 << 2 | 1 << 3 | 1 << 4),
            ("arm-s2-16k", 48, 1 << 2 | 1 << 3),
            ("arm-s1-64k", 48, 1 << 2 | 1 << 3),
            ("arm-s2-64k", 48, 1 << 1 | 1 << 2 | 1 << 3),
            ("armv7-short", 32, 1 << 2),
        ]
    );
    assert_eq!(
        (all.input_bits, all.output_bits, all.domain_bits),
        (48, 48, 32)
    );
    assert_eq!((all.pasid_bits, all.device_tlbs), (0, false));
    assert!(all.coherent_walks && !all.dirty_tracking && !all.caches_not_present);
    let groups = all
        .format(all.formats[0].unwrap().format)
        .unwrap()
        .page_sizes;
    assert!(
        [12, 16, 21, 25, 30, 34]
            .iter()
            .all(|log2| groups.contains(1 << log2))
    );

    // Stage 1 only, 40 bits on the bus, 36 behind it, 16 KiB only.
    let idr0 = IDR0 & !(1 << 29) | 2 << 24;
    let some = can(V2, [idr0, IDR1, 1 << 13 | 2 << 8 | 5 << 4 | 1]).unwrap();
    assert_eq!(list(&some), [("arm-s1-16k", 40, 1 << 2 | 1 << 3)]);
    assert_eq!((some.input_bits, some.output_bits), (40, 36));
    // Stage 2 of 40 bits has no fourth level: its output addresses are too narrow for one.
    let some = can(V2, [IDR0 & !(1 << 30) | 2 << 24, IDR1, 1 << 12 | 0x222]).unwrap();
    assert_eq!(list(&some), [("arm-s2-4k", 40, 1 << 2 | 1 << 3)]);
    // Version 1, with and without short descriptors.
    let old = [
        ("arm-s1-4k", 32, 1 << 3),
        ("arm-s2-4k", 40, 1 << 2 | 1 << 3),
        ("armv7-short", 32, 1 << 2),
    ];
    let some = can(V1, [IDR0, IDR1, IDR2_V1]).unwrap();
    assert_eq!(list(&some), old);
    let some = can(V1, [IDR0 | LONG_ONLY, IDR1, IDR2_V1]).unwrap();
    assert_eq!(list(&some), old[..2]);
    // Granule fields of version 2 mean nothing to version 1.
    assert_eq!(list(&can(V1, [IDR0, IDR1, IDR2]).unwrap()), old);

    let config = |input_bits| ArmConfig {
        granule: ArmGranule::K4,
        input_bits,
        upper: false,
    };
    assert_eq!(all.format(FormatId::ArmStage1(config(49))), None);

    let (idr0, idr2) = (IDR0 | 2 << 24, 5);
    let kind = UnitKind::Smmu;
    let read = |(first, second): (u32, (&'static str, u32))| {
        IdRegisters::two(("IDR0", first.into()), (second.0, second.1.into()))
    };
    let none = UnitProbeError::Tables {
        kind,
        read: read((idr0, ("IDR2", idr2))),
    };
    let none = Err(none.into());
    assert_eq!(can(V2, [idr0, IDR1, idr2]), none);
    let none = UnitProbeError::NoRoom {
        streams: 16,
        banks: 0,
    };
    assert_eq!(can(V2, [IDR0, IDR1 & !0xff, IDR2]), Err(none.into()));
    // No more banks than pages for them.
    let narrow = Smmu::new(Model::new(memory(), 2, [IDR0, 6, IDR2]), V2).unwrap();
    assert_eq!(narrow.features.banks(), 2);
    let (idr0, idr1) = (u32::MAX, u32::MAX);
    let nothing = UnitProbeError::NoUnit {
        kind,
        read: read((idr0, ("IDR1", idr1))),
    };
    let nobody = Smmu::new(NoUnit, V2).err();
    assert_eq!(nobody, Some(nothing.into()));
}

/// Registers without a driver.
struct NoUnit;

impl Registers for NoUnit {
    type Lock = crate::SpinLock;

    fn read32(&self, _offset: usize) -> u32 {
        u32::MAX
    }
    fn write32(&self, _offset: usize, _value: u32) {}
    fn read64(&self, _offset: usize) -> u64 {
        u64::MAX
    }
    fn write64(&self, _offset: usize, _value: u64) {}
    fn wait(&self, _round: u32) -> bool {
        false
    }
}

#[test]
fn no_leaf_that_a_table_can_hold_outlives_the_flush_of_its_domain_or_the_detach() {
    let narrow = || HeapArena::<AtomicU32, 10>::with_tables_at(64, 1 << 30).unwrap();
    leaves(<ArmV7s>::new(), narrow());
    leaves(<ArmV7s>::new().with_shareable(false), narrow());
    let first = ArmStage1::<K4>::new(48, 48).unwrap();
    leaves(first, room::<12>());
    leaves(ArmStage1::<K16>::new(48, 48).unwrap(), room::<14>());
    leaves(ArmStage1::<K64>::new(48, 48).unwrap(), room::<16>());
    leaves(ArmStage2::<K4>::new(40, 48).unwrap(), room::<12>());
}
