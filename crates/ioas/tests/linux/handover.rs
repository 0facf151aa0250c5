//! An address space goes from one owner to the next while its device runs: within this process, and
//! from another one.

use std::fs::File;
use std::io::{BufRead, BufReader, Write, stdin};
use std::ops::ControlFlow;
use std::os::fd::AsRawFd;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use hostmem::{Backing, FrameSource, Mapping, Pinner};
use ioas::{
    HandOverError, HandedArea, HandedDomain, Handover, HostMemory, HostTables, Ioas, Ledger,
    MapError, MappedStorage, Memory, Own, TakeOverError,
};
use iommu::{BadTarget, DeviceId, DomainId, SoftwareUnit, TargetMemory, Unit};
use iopt::{AnyTable, FormatId, Interruption, Prot, Root, Takeover};
use runs::{PageSizes, Span};

use super::{AT, MIB, alone, counted, runs_of};

type Space = Ioas<Own<Arc<HostTables>>>;

const BYTES: u64 = 8 * MIB;
const BASE: u64 = 1 << 46;
const PAGE: u64 = 4096;
const GIB: u64 = 1 << 30;
const DOMAIN: DomainId = DomainId(9);
const DEVICE: DeviceId = DeviceId::pci(0, 5, 0);
/// Taken out before it changes hands.
const OUT: Span = Span::new(AT + 5 * PAGE, 2 * PAGE);

fn also(mapping: &Mapping) -> Mapping {
    let file = mapping.fd().unwrap().try_clone_to_owned().unwrap();
    Mapping::of_file(file).unwrap()
}

/// The memory files that go along: tables, and data in which each word is its offset.
fn files() -> (Mapping, Mapping) {
    let tables = Mapping::new(Backing::Memfd, MIB, None).unwrap();
    let data = Mapping::new(Backing::Memfd, BYTES, None).unwrap();
    data.populate(&mut |_| ControlFlow::Continue(())).unwrap();
    for (word, cell) in (0..).zip(data.cells()) {
        cell.store(8 * word, Ordering::Relaxed);
    }
    (tables, data)
}

/// A pinner, where that many bytes may be locked and frames are what they are.
fn pinner(bytes: u64, data: &Mapping) -> Option<Arc<Pinner>> {
    let pinner = Pinner::probe(2 << 20).unwrap();
    if pinner.room().unwrap().is_some_and(|room| room < bytes) {
        eprintln!("SKIPPED: too little may be locked here");
        return None;
    }
    if !FrameSource::detect(data).is_real() {
        eprintln!("SKIPPED: frames are hidden, and what stands in for them differs by mapping");
        return None;
    }
    Some(Arc::new(pinner))
}

fn memory(data: Mapping, pinner: &Arc<Pinner>, ledger: &Arc<Ledger>) -> Arc<Memory> {
    let object = HostMemory::new(Arc::new(data), pinner.clone(), FrameSource::Pagemap);
    Memory::new(Arc::new(object), ledger)
}

fn tables(file: &Mapping) -> Arc<HostTables> {
    Arc::new(HostTables::new(MappedStorage::over(also(file)), BASE).unwrap())
}

/// The first owner's address space: all of the memory, and a part of it for reading only.
fn first_owner(tables: Arc<HostTables>, memory: &Arc<Memory>) -> Space {
    let sizes = PageSizes::from_bits(u64::MAX);
    let table = AnyTable::new(FormatId::VtdSs, 4, sizes, tables).unwrap();
    let mut space = Ioas::new(DOMAIN, table);
    let whole = Span::new(0, BYTES);
    space.map(AT, memory, whole, Prot::RW, &mut ()).unwrap();
    let part = Span::new(MIB, 3 * MIB);
    space
        .map(AT + GIB, memory, part, Prot::READ, &mut ())
        .unwrap();
    space.take_out(OUT, Interruption::Refused, &mut ()).unwrap();
    space
}

/// Tables that were handed over, with the devices of their domains.
fn adopted(
    file: &Mapping,
    handover: &Handover,
) -> (Arc<HostTables>, Vec<AnyTable<Arc<HostTables>>>) {
    let mut takeover = Takeover::new(MappedStorage::over(also(file)), BASE).unwrap();
    let found: Vec<_> = handover
        .domains
        .iter()
        .map(|domain| {
            let (root, sizes) = (domain.root, domain.page_sizes);
            AnyTable::<Arc<HostTables>>::adopt(&mut takeover, root, sizes).unwrap()
        })
        .collect();
    let tables = Arc::new(takeover.finish());
    let open = |adopted: iopt::AnyAdopted| adopted.open(tables.clone()).unwrap();
    let opened = found.into_iter().map(open).collect();
    (tables, opened)
}

/// The data by physical address: what the device reaches.
struct Physical {
    data: Mapping,
    /// With the offset of each, by address.
    runs: Vec<(Span, u64)>,
}

impl Physical {
    fn new(data: Mapping, runs: &[Span]) -> Arc<Self> {
        let mut at = 0;
        let mut placed = Vec::new();
        for run in runs {
            placed.push((*run, at));
            at += run.len;
        }
        assert_eq!(at, BYTES);
        placed.sort_unstable();
        let runs = placed;
        Arc::new(Self { data, runs })
    }
}

impl TargetMemory for Physical {
    fn with_cells(&self, span: Span, visit: &mut dyn FnMut(&[AtomicU64])) -> Result<(), BadTarget> {
        for address in (span.start..=span.last()).step_by(8) {
            let next = self.runs.partition_point(|(run, _)| run.start <= address);
            let found = next.checked_sub(1).map(|at| self.runs[at]);
            let Some((run, offset)) = found.filter(|(run, _)| run.contains(address)) else {
                return Err(BadTarget { address });
            };
            let word = (offset + (address - run.start)) / 8;
            visit(std::slice::from_ref(&self.data.cells()[word as usize]));
        }
        Ok(())
    }
}

/// Where all of the data is, which is pinned.
fn frames(data: &Mapping) -> Vec<Span> {
    let pinner = Pinner::probe(2 << 20).unwrap();
    let memory = memory(also(data), &Arc::new(pinner), &Ledger::unlimited());
    let file = Mapping::new(Backing::Memfd, MIB, None).unwrap();
    let mut space = first_owner(tables(&file), &memory);
    space.put_back(OUT, Interruption::Refused, &mut ()).unwrap();
    let hold = space.area_at(AT).unwrap().hold().unwrap();
    let runs = runs_of(hold, Span::new(0, BYTES));
    space.close().unwrap();
    runs
}

type Machine = SoftwareUnit<Arc<HostTables>, Arc<Physical>>;

/// The device reads and writes all that it can reach, until it is stopped, without one fault.
fn run(unit: &Machine, stop: &AtomicBool, rounds: &AtomicU64) {
    let mut port = unit.port(DEVICE);
    while !stop.load(Ordering::Relaxed) {
        for offset in (0..BYTES).step_by(PAGE as usize + 8) {
            let at = AT + offset;
            let mut word = [0];
            if !OUT.contains(at) {
                port.read(at, &mut word).unwrap();
                assert_eq!(word[0], offset);
                port.write(at, &word).unwrap();
            }
            if (MIB..4 * MIB).contains(&offset) {
                port.read(AT + GIB + offset - MIB, &mut word).unwrap();
                assert_eq!(word[0], offset);
            }
        }
        rounds.fetch_add(1, Ordering::Relaxed);
    }
}

/// Runs `work` beside the device. It is given a function that waits until the device has been
/// everywhere once more.
fn beside_the_device<T>(unit: &Machine, work: impl FnOnce(&dyn Fn()) -> T) -> T {
    let (stop, rounds) = (AtomicBool::new(false), AtomicU64::new(0));
    thread::scope(|scope| {
        let device = scope.spawn(|| run(unit, &stop, &rounds));
        let done = work(&|| {
            let until = rounds.load(Ordering::Relaxed) + 2;
            while rounds.load(Ordering::Relaxed) < until {
                assert!(!device.is_finished(), "the device has met a fault");
                thread::yield_now();
            }
        });
        stop.store(true, Ordering::Relaxed);
        device.join().unwrap();
        done
    })
}

/// The new owner puts back what was out, maps and unmaps, and comes to an end.
fn goes_on(unit: &Machine, mut space: Space, memory: &Arc<Memory>, tables: &HostTables) {
    let mut port = unit.port(DEVICE);
    let mut word = [0];
    assert!(port.read(OUT.start, &mut word).is_err());
    space.put_back(OUT, Interruption::Refused, &mut ()).unwrap();
    port.read(OUT.start, &mut word).unwrap();
    assert_eq!((word[0], space.len()), (5 * PAGE, 2));
    let part = Span::new(0, 600 * PAGE);
    let at = AT + 40 * GIB;
    space.map(at, memory, part, Prot::RW, &mut ()).unwrap();
    port.read(at + 599 * PAGE, &mut word).unwrap();
    assert_eq!(word[0], 599 * PAGE);
    let range = Span::new(at, part.len);
    assert_eq!(space.unmap(range, &mut ()).unwrap().bytes, part.len);
    assert!(port.read(at, &mut word).is_err());
    assert_eq!(space.devices().collect::<Vec<_>>(), [DEVICE]);
    space.close().unwrap();
    assert!(port.read(AT, &mut word).is_err());
    assert_eq!((tables.in_use(), memory.held()), (0, 0));
    assert_eq!(memory.ledger().in_use(), 0);
}

/// What the areas hold.
const HELD: u64 = BYTES - 2 * PAGE;

#[test]
fn an_address_space_changes_hands_while_its_device_runs() {
    let _turn = alone();
    let (table_file, data) = files();
    let Some(pinner) = pinner(3 * BYTES, &data) else {
        return;
    };
    let before = counted(&pinner);
    let ledgers = [(); 2].map(|()| Ledger::new("a counter", Some(2 * BYTES), 0));
    let memories = ledgers
        .each_ref()
        .map(|ledger| memory(also(&data), &pinner, ledger));
    let mut old = first_owner(tables(&table_file), &memories[0]);
    assert_eq!(counted(&pinner), before + HELD);

    let runs = frames(&data);
    let unit = Machine::new(tables(&table_file), Physical::new(also(&data), &runs));
    let shared: Arc<dyn Unit> = Arc::new(unit.clone());
    old.attach(shared.clone(), DEVICE).unwrap();
    let (new, new_tables) = beside_the_device(&unit, |wait| {
        wait();
        let leaving = old.hand_over(&memories[..1]).unwrap();
        let handover = leaving.handover().clone();
        let (new_tables, mut opened) = adopted(&table_file, &handover);
        let taken = vec![(opened.remove(0), vec![(shared.clone(), DEVICE)])];
        let new = Ioas::adopt(&handover, &memories[1..], taken, None, &mut ()).unwrap();
        // Both are charged, and both have pinned it.
        let in_use = ledgers.each_ref().map(|ledger| ledger.in_use());
        assert_eq!(in_use, [HELD, HELD]);
        assert_eq!(counted(&pinner), before + 2 * HELD);
        wait();
        assert_eq!(leaving.give_up().unwrap(), HELD);
        assert_eq!((old.len(), old.domains().count()), (0, 0));
        drop(old);
        let in_use = ledgers.each_ref().map(|ledger| ledger.in_use());
        assert_eq!(in_use, [0, HELD]);
        assert_eq!(counted(&pinner), before + HELD);
        wait();
        let again = new
            .areas()
            .map(|area| (area.range(), area.prot(), area.is_out()));
        let expected = handover.areas.iter();
        assert!(again.eq(expected.map(|area| (area.range, area.prot, area.out))));
        (new, new_tables)
    });
    goes_on(&unit, new, &memories[1], &new_tables);
    assert_eq!(counted(&pinner), before);
}

#[test]
fn what_is_not_the_same_is_refused_and_the_old_owner_goes_on() {
    let _turn = alone();
    let (table_file, data) = files();
    let Some(pinner) = pinner(3 * BYTES, &data) else {
        return;
    };
    let before = counted(&pinner);
    let first = memory(also(&data), &pinner, &Ledger::unlimited());
    let mut old = first_owner(tables(&table_file), &first);
    let runs = frames(&data);
    let unit = Machine::new(tables(&table_file), Physical::new(also(&data), &runs));
    let unit: Arc<dyn Unit> = Arc::new(unit);
    old.attach(unit.clone(), DEVICE).unwrap();
    let none = old.hand_over(&[]).unwrap_err();
    let area = Span::new(AT, OUT.start - AT);
    assert_eq!(none, HandOverError::Memory { area });

    let leaving = old.hand_over(std::slice::from_ref(&first)).unwrap();
    let handover = leaving.handover().clone();
    let ledger = Ledger::new("a counter", Some(BYTES), 0);
    let second = memory(also(&data), &pinner, &ledger);
    let with = |change: &dyn Fn(&mut Handover), memory: &Arc<Memory>, devices: &[DeviceId]| {
        let (_, mut opened) = adopted(&table_file, &handover);
        let devices = devices.iter().map(|device| (unit.clone(), *device));
        let taken = vec![(opened.remove(0), devices.collect())];
        let mut handover = handover.clone();
        change(&mut handover);
        let memories = std::slice::from_ref(memory);
        let refused = Ioas::adopt(&handover, memories, taken, None, &mut ()).unwrap_err();
        // Whatever it was: nothing is charged or pinned for the new owner.
        assert_eq!(
            (memory.ledger().in_use(), memory.held()),
            (0, 0),
            "{refused}"
        );
        assert_eq!(counted(&pinner), before + HELD, "{refused}");
        refused
    };
    let but = |change: &dyn Fn(&mut Handover)| with(change, &second, &[DEVICE]);

    let (_, other) = files();
    let other = memory(other, &pinner, &Ledger::unlimited());
    let refused = with(&|_| (), &other, &[DEVICE]);
    assert!(
        matches!(refused, TakeOverError::Differs { iova: AT, table: Some((pa, _)), .. } if pa == runs[0].start),
        "{refused}"
    );
    let refused = with(&|_| (), &second, &[]);
    assert!(
        matches!(refused, TakeOverError::Device { device: DEVICE, .. }),
        "{refused}"
    );
    let small = memory(
        also(&data),
        &pinner,
        &Ledger::new("a counter", Some(BYTES / 2), 0),
    );
    let refused = with(&|_| (), &small, &[DEVICE]);
    assert!(
        matches!(
            refused,
            TakeOverError::Hold {
                cause: MapError::OverLimit(_),
                ..
            }
        ),
        "{refused}"
    );
    let refused = but(&|handover| handover.domains.clear());
    assert!(
        matches!(
            refused,
            TakeOverError::Domains {
                described: 0,
                given: 1
            }
        ),
        "{refused}"
    );
    let refused = but(&|handover| handover.domains[0].root.address += PAGE);
    assert!(matches!(refused, TakeOverError::Table { .. }), "{refused}");
    let refused = but(&|handover| handover.areas[2].memory = 1);
    assert!(
        matches!(refused, TakeOverError::Area(area) if area.memory == 1),
        "{refused}"
    );
    let refused = but(&|handover| handover.areas[2].offset = BYTES - PAGE);
    assert!(matches!(refused, TakeOverError::Area(_)), "{refused}");
    let refused = but(&|handover| handover.areas[1].range.start -= PAGE);
    assert!(matches!(refused, TakeOverError::Area(_)), "{refused}");
    // An area that the tables do not have, one that they have with other permissions, one of other
    // pages of the same memory, and one that they have and that is not described.
    let refused = but(&|handover| handover.areas[1].out = false);
    assert!(
        matches!(refused, TakeOverError::Differs { iova, table: None, .. } if iova == OUT.start),
        "{refused}"
    );
    let refused = but(&|handover| {
        handover.areas[0].range.len = BYTES;
        handover.areas.drain(1..3);
    });
    assert!(
        matches!(refused, TakeOverError::Differs { iova, table: None, .. } if iova == OUT.start),
        "{refused}"
    );
    let refused = but(&|handover| handover.areas[3].prot = Prot::RW);
    assert!(
        matches!(refused, TakeOverError::Differs { iova, table: Some((_, Prot::READ)), .. } if iova == AT + GIB),
        "{refused}"
    );
    let refused = but(&|handover| handover.areas[3].offset += PAGE);
    assert!(
        matches!(refused, TakeOverError::Differs { .. }),
        "{refused}"
    );
    let refused = but(&|handover| handover.areas.truncate(3));
    assert!(
        matches!(refused, TakeOverError::More { mapped, areas, .. } if mapped == areas + 3 * MIB),
        "{refused}"
    );

    drop(leaving);
    old.put_back(OUT, Interruption::Refused, &mut ()).unwrap();
    assert_eq!(old.unmap_all(&mut ()).unwrap().areas, 2);
    old.close().unwrap();
    assert_eq!(counted(&pinner), before);
}

/// A descriptor of the process that has started this one.
fn passed(variable: &str) -> Mapping {
    let path = std::env::var(variable).unwrap();
    let file = File::options().read(true).write(true).open(path).unwrap();
    Mapping::of_file(file.into()).unwrap()
}

#[test]
#[ignore = "the first half of the test below, which runs it in a process of its own"]
fn the_owner_before() {
    let (table_file, data) = (passed("TABLES"), passed("DATA"));
    let pinner = Arc::new(Pinner::probe(2 << 20).unwrap());
    let ledger = Ledger::new("a counter", None, 0);
    let memory = memory(also(&data), &pinner, &ledger);
    let mut space = first_owner(tables(&table_file), &memory);
    println!();
    for run in frames(&data) {
        println!("run {} {}", run.start, run.len);
    }
    let leaving = space.hand_over(std::slice::from_ref(&memory)).unwrap();
    for HandedDomain { root, id, .. } in &leaving.handover().domains {
        println!("domain {} {} {}", id.0, root.address, root.levels);
    }
    for area in &leaving.handover().areas {
        let (range, prot) = (area.range, area.prot.bits());
        let out = u64::from(area.out);
        println!(
            "area {} {} {} {prot} {out}",
            range.start, range.len, area.offset
        );
    }
    println!("pinned {}", counted(&pinner));
    // The new owner says when.
    let mut line = String::new();
    stdin().read_line(&mut line).unwrap();
    assert_eq!(line, "go\n");
    println!("unpinned {}", leaving.give_up().unwrap());
    println!("pinned {}", counted(&pinner));
    drop(space);
}

/// Ends a process that has not come to its end when the test does.
struct Ends(std::process::Child);

impl Drop for Ends {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn an_address_space_comes_from_another_process_while_its_device_runs() {
    let _turn = alone();
    let (table_file, data) = files();
    let Some(pinner) = pinner(3 * BYTES, &data) else {
        return;
    };
    let path = |mapping: &Mapping| {
        let fd = mapping.fd().unwrap().as_raw_fd();
        format!("/proc/{}/fd/{fd}", std::process::id())
    };
    let child = Command::new(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "handover::the_owner_before",
            "--ignored",
            "--nocapture",
        ])
        .env("TABLES", path(&table_file))
        .env("DATA", path(&data))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut old = Ends(child);
    let mut lines = BufReader::new(old.0.stdout.take().unwrap()).lines();
    let mut next = || -> (String, Vec<u64>) {
        loop {
            let line = lines.next().expect("the old owner has failed").unwrap();
            let mut words = line.split_whitespace();
            let word = words.next().unwrap_or_default();
            if ["run", "domain", "area", "pinned", "unpinned"].contains(&word) {
                return (
                    word.into(),
                    words.map(|word| word.parse().unwrap()).collect(),
                );
            }
        }
    };
    let mut runs = Vec::new();
    let mut handover = Handover {
        kept: true,
        ..Handover::default()
    };
    let pinned = loop {
        let (what, numbers) = next();
        match (&*what, &*numbers) {
            ("run", &[start, len]) => runs.push(Span::new(start, len)),
            ("domain", &[id, address, levels]) => handover.domains.push(HandedDomain {
                id: DomainId(id as u32),
                root: Root {
                    format: FormatId::VtdSs,
                    address,
                    levels: levels as u8,
                },
                page_sizes: PageSizes::from_bits(u64::MAX),
                coherent: None,
                devices: Vec::new(),
            }),
            ("area", &[start, len, offset, prot, out]) => handover.areas.push(HandedArea {
                range: Span::new(start, len),
                memory: 0,
                offset,
                prot: Prot::from_bits(prot as u32).unwrap(),
                out: out == 1,
            }),
            ("pinned", &[pinned]) => break pinned,
            other => panic!("{other:?}"),
        }
    };
    assert!(pinned >= HELD);
    // The hardware: it was told by the old owner, and outlives it.
    let root = handover.domains[0].root;
    let unit = Machine::new(tables(&table_file), Physical::new(also(&data), &runs));
    unit.attach(DEVICE, DOMAIN, root).unwrap();

    let before = counted(&pinner);
    let ledger = Ledger::new("a counter", Some(BYTES), 0);
    let here = memory(also(&data), &pinner, &ledger);
    let (new, new_tables) = beside_the_device(&unit, |wait| {
        wait();
        let (new_tables, mut opened) = adopted(&table_file, &handover);
        let shared: Arc<dyn Unit> = Arc::new(unit.clone());
        let taken = vec![(opened.remove(0), vec![(shared, DEVICE)])];
        let memories = std::slice::from_ref(&here);
        let new = Ioas::adopt(&handover, memories, taken, None, &mut ()).unwrap();
        assert_eq!((ledger.in_use(), counted(&pinner)), (HELD, before + HELD));
        wait();
        old.0.stdin.take().unwrap().write_all(b"go\n").unwrap();
        assert_eq!(next(), ("unpinned".into(), vec![HELD]));
        let (_, left) = next();
        assert_eq!(left, [pinned - HELD], "the old owner has let go");
        assert!(old.0.wait().unwrap().success());
        wait();
        (new, new_tables)
    });
    goes_on(&unit, new, &here, &new_tables);
    assert_eq!(counted(&pinner), before);
}
