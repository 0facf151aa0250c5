//! Given runs: BARs and memory that was set aside. Nothing is pinned or charged, entries say that
//! registers are registers, and what is adjacent to RAM never becomes one leaf with it.

use std::sync::Arc;

use crate::common::machines::{ALL, AT, Machine, can};
use crate::common::*;
use ioas::{
    DomainIds, FixedRuns, Ioas, Ledger, MapError, Memory, MemoryObject, Synthetic, TableBuilder,
    Tracking, UnalignedRun, WhenUnmapped,
};
use iopt::format::{ArmConfig, ArmGranule};
use iopt::{FormatId, HeapTables, Interruption, Leaf, Prot};
use runs::{Pa, Span};

const NEVER: Interruption = Interruption::Refused;
/// Needed by some formats: Arm's groups are neither cut nor made in place.
const ALLOWED: Interruption = Interruption::Allowed;
/// Physical end of RAM and start of the BAR.
const BORDER: u64 = 64 * GIB + MIB;

const ARM: ArmConfig = ArmConfig {
    granule: ArmGranule::K4,
    input_bits: 48,
    upper: false,
};

fn bar(bar: Span<Pa>) -> Arc<Memory> {
    Memory::new(
        Arc::new(FixedRuns::bar(bar, PAGE).unwrap()),
        &Ledger::new("a counter", Some(0), 0),
    )
}

#[test]
fn a_bar_is_reached_and_not_charged() {
    let tables = Arc::new(HeapTables::with_tables(32).unwrap());
    let mut machine = Machine::new(&tables, 1, can(FormatId::VtdSs, ALL, false));
    let builder = TableBuilder::new(tables.clone(), DomainIds::new(8), [FormatId::VtdSs]);
    let mut space: Space = Ioas::over_tables(builder);
    machine.attach(&mut space).unwrap();

    let registers = bar(Span::new(BORDER, 2 * MIB));
    let part = Span::new(PAGE, 8 * PAGE);
    space.map(AT, &registers, part, Prot::RW).unwrap();
    space
        .map(2 * AT, &registers, Span::new(0, MIB), Prot::READ)
        .unwrap();
    assert_eq!(machine.read(AT), Some(BORDER + PAGE));
    assert_eq!(machine.read(2 * AT + MIB - 8), Some(BORDER + MIB - 8));
    assert_eq!((registers.charged(), registers.ledger().in_use()), (0, 0));
    // Cut, taken out, put back, unmapped: as any other memory.
    let page = Span::new(AT + 2 * PAGE, PAGE);
    space.take_out(page, NEVER).unwrap();
    assert_eq!(machine.read(page.start), None);
    space.put_back(page, NEVER).unwrap();
    assert_eq!(machine.read(page.start), Some(BORDER + 3 * PAGE));
    assert_eq!(space.unmap_all().unwrap().bytes, MIB + 8 * PAGE);
    assert_eq!((machine.read(AT), registers.held()), (None, 0));
    space.close().unwrap();
    assert_eq!(tables.in_use(), 0);
}

#[test]
fn several_runs_are_one_memory_in_the_order_of_offsets() {
    let tables = Arc::new(HeapTables::with_tables(32).unwrap());
    let space = space(FormatId::AmdV1, 4, &tables);
    let runs = [
        Span::new(7 * GIB, 3 * PAGE),
        Span::new(5 * GIB + PAGE, PAGE),
    ];
    let set_aside = unlimited(Arc::new(FixedRuns::new(runs, PAGE).unwrap()));
    let part = Span::new(2 * PAGE, 2 * PAGE);
    space.map(AT, &set_aside, part, Prot::RW).unwrap();
    let range = Span::new(AT, part.len);
    let pin = space.pin(range, Prot::READ, WhenUnmapped::Keeps).unwrap();
    let hold = &pin.holds()[0];
    let expected = [Span::new(7 * GIB + 2 * PAGE, PAGE), runs[1]];
    assert_eq!(hold.with_runs(part, |reader| read_runs(reader)), expected);
    drop(pin);
    space.close().unwrap();
}

/// Every leaf lies in one area.
fn apart(space: &Space) {
    for leaf in leaves(space) {
        let run = leaf.run.input();
        let area = space.area_at(run.start).unwrap().range();
        assert!(area.covers(&run), "{run} goes over the end of {area}");
    }
}

#[test]
fn registers_beside_ram_never_become_one_leaf_with_it() {
    let formats = [
        (FormatId::RiscV, 4),
        (FormatId::ArmStage2(ARM), 4),
        FORMATS[0],
        FORMATS[1],
        FORMATS[2],
    ];
    // 32 KiB on each side make up one group of 64 KiB, 1 MiB one large page.
    for (half, (format, levels)) in [32 << 10, MIB]
        .into_iter()
        .flat_map(|half| formats.map(|format| (half, format)))
    {
        let tables = Arc::new(HeapTables::with_tables(64).unwrap());
        let space = space(format, levels, &tables);
        let ram = unlimited(Arc::new(Synthetic::new([Span::new(64 * GIB, half)])));
        let registers = bar(Span::new(64 * GIB + half, half));
        let (whole, at) = (Span::new(0, half), AT + half);
        space.map(AT, &ram, whole, Prot::RW).unwrap();
        space.map(at, &registers, whole, Prot::RW).unwrap();
        apart(&space);
        let before = leaves(&space);
        for end in [at - PAGE, at] {
            let page = Span::new(end, PAGE);
            space.take_out(page, ALLOWED).unwrap();
            space.put_back(page, ALLOWED).unwrap();
            apart(&space);
        }
        assert_eq!(space.len(), 2);
        let after = leaves(&space);
        assert_eq!(after, before, "{format} {half:#x}");
        // Splitting for dirty tracking, and merging afterwards.
        let small = Tracking {
            leaf: Some(PAGE),
            interruption: ALLOWED,
        };
        if space.track_dirty(small).is_ok() {
            space.untrack_dirty();
        }
        apart(&space);
        space.close().unwrap();
        assert_eq!(tables.in_use(), 0);
    }
}

fn attributes(space: &Space, iova: u64) -> Prot {
    space.leaf_at(iova).map(|leaf: Leaf| leaf.prot).unwrap() - Prot::RW
}

#[test]
fn registers_are_device_memory_where_a_format_has_memory_types() {
    let formats = [
        (FormatId::ArmStage1(ARM), 4, Prot::DEVICE),
        (FormatId::ArmStage2(ARM), 4, Prot::DEVICE),
        (FormatId::VtdSs, 4, Prot::empty()),
        (FormatId::AmdV1, 4, Prot::empty()),
        (FormatId::X86_64, 4, Prot::empty()),
    ];
    for (format, levels, typed) in formats {
        let tables = Arc::new(HeapTables::with_tables(64).unwrap());
        let space = space(format, levels, &tables);
        let ram = unlimited(Arc::new(Synthetic::new([Span::new(GIB, MIB)])));
        let set_aside = unlimited(Arc::new(
            FixedRuns::new([Span::new(2 * GIB, MIB)], PAGE).unwrap(),
        ));
        let whole = Span::new(0, MIB);
        for (n, memory) in [&ram, &set_aside, &bar(Span::new(3 * GIB, MIB))]
            .into_iter()
            .enumerate()
        {
            let at = AT + n as u64 * GIB;
            space.map(at, memory, whole, Prot::RW).unwrap();
        }
        let found = [0, 1, 2].map(|n| attributes(&space, AT + n * GIB));
        let none = Prot::empty();
        assert_eq!(found, [none, none, typed], "{format}");
        space.close().unwrap();
    }
}

#[test]
fn registers_are_not_forced_to_be_coherent() {
    let tables = Arc::new(HeapTables::with_tables(64).unwrap());
    let machine = Machine::new(&tables, 1, can(FormatId::VtdSs, ALL, true));
    let builder = TableBuilder::new(tables.clone(), DomainIds::new(8), [FormatId::VtdSs]);
    let mut space: Space = Ioas::over_tables(builder);
    let ram = unlimited(Arc::new(Synthetic::new([Span::new(GIB, MIB)])));
    let whole = Span::new(0, MIB);
    space.map(AT, &ram, whole, Prot::RW).unwrap();
    let registers = bar(Span::new(3 * GIB, MIB));
    space.map(2 * AT, &registers, whole, Prot::RW).unwrap();
    machine.attach(&mut space).unwrap();
    assert_eq!(attributes(&space, AT), Prot::COHERENT);
    assert_eq!(attributes(&space, 2 * AT), Prot::empty());
    space.close().unwrap();
}

#[test]
fn runs_that_are_no_pages_are_refused() {
    let page = PAGE;
    for (runs, page) in [
        (vec![Span::new(GIB, PAGE), Span::new(2 * GIB, 100)], page),
        (vec![Span::new(GIB + 8, PAGE)], page),
        (vec![Span::new(GIB, 0)], page),
        (vec![Span::new(GIB, PAGE)], 16 * PAGE),
        (vec![Span::new(u64::MAX - PAGE + 1, 2 * PAGE)], page),
        (vec![Span::new(0, 1 << 63); 2], page),
        (vec![Span::new(GIB, PAGE)], 0),
        (vec![Span::new(GIB, PAGE)], 3),
    ] {
        let run = *runs.last().unwrap();
        let refused = FixedRuns::new(runs.clone(), page).map(|given| given.len());
        assert_eq!(refused, Err(UnalignedRun { run, page }), "{runs:?}");
    }
    // Pages that are smaller than the table's are its own to refuse.
    let tables = Arc::new(HeapTables::with_tables(8).unwrap());
    let space = space(FormatId::VtdSs, 4, &tables);
    let odd = FixedRuns::new([Span::new(GIB + 512, PAGE)], 512).unwrap();
    let odd = unlimited(Arc::new(odd));
    let refused = space.map(AT, &odd, Span::new(0, PAGE), Prot::RW);
    assert!(matches!(refused, Err(MapError::Table(_))), "{refused:?}");
}
