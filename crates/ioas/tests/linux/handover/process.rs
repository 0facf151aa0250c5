//! From another process, which is gone in the end.

use std::fs::File;
use std::io::{BufRead, BufReader, Write, stdin};
use std::os::fd::AsRawFd;
use std::process::{Command, Stdio};

use ioas::{HandedArea, HandedDomain};
use iommu::Unit;
use iopt::Root;

use super::*;

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
    let space = first_owner(tables(&table_file), &memory);
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
        let [out, low, high] = [area.out, area.cut[0], area.cut[1]].map(u64::from);
        assert!(!area.released);
        println!(
            "area {} {} {} {prot} {out} {low} {high}",
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
            "handover::process::the_owner_before",
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
            ("area", &[start, len, offset, prot, out, low, high]) => {
                handover.areas.push(HandedArea {
                    range: Span::new(start, len),
                    memory: 0,
                    offset,
                    prot: Prot::from_bits(prot as u32).unwrap(),
                    out: out == 1,
                    released: false,
                    cut: [low == 1, high == 1],
                })
            }
            ("pinned", &[pinned]) => break pinned,
            other => panic!("{other:?}"),
        }
    };
    assert!(pinned >= HELD);
    // Model of hardware that the old owner has set up, and that outlives it.
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
        let new = Ioas::adopt(&handover, memories, taken, None).unwrap();
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
