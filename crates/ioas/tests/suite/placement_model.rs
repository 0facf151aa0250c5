//! A root for each node beside one root for all: random sequences of operations on both.

use crate::common::nodes::*;
use crate::common::*;
use ioas::{Placement, Tracking};
use iopt::{Pending, Prot};
use proptest::prelude::*;
use runs::{Iova, Span};

/// Operation on two spaces alike.
#[derive(Clone, Debug)]
enum Op {
    Map(u64, u64, u64),
    Unmap(u64, u64),
    Cut(u64, u64),
    Attach(usize),
    Detach(usize),
    Write(usize, u64),
    Harvest,
}

const PAGES: u64 = 2048;

fn op() -> impl Strategy<Value = Op> {
    let pages = || 0..PAGES;
    prop_oneof![
        4 => (pages(), pages(), 1..800u64).prop_map(|(at, from, len)| Op::Map(at, from, len)),
        2 => (pages(), 1..900u64).prop_map(|(at, len)| Op::Unmap(at, len)),
        2 => (pages(), 1..64u64).prop_map(|(at, len)| Op::Cut(at, len)),
        3 => (0..6usize).prop_map(Op::Attach),
        1 => (0..6usize).prop_map(Op::Detach),
        4 => (0..6usize, pages()).prop_map(|(n, page)| Op::Write(n, page)),
        2 => Just(Op::Harvest),
    ]
}

fn harvest(space: &mut Space) -> Vec<Span<Iova>> {
    let span = Span::new(AT, PAGES * PAGE);
    let mut pending = Pending::new(vec![0u64; 32], span, PAGE).unwrap();
    space.harvest(&mut pending).unwrap();
    let shown = space.show(&mut pending).unwrap();
    let found = shown.runs().collect();
    shown.acknowledge();
    found
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// A root for each node says what one root for all says, after any sequence of operations; what is
    /// dirty is the union.
    #[test]
    fn per_node_equals_shared(ops in prop::collection::vec(op(), 1..40)) {
        let mut benches = [Placement::Shared, Placement::PerNode]
            .map(|placement| Bench::new(3, placement));
        let machines = benches.each_ref().map(|bench| {
            // Two devices on each of two nodes, one on the third, one nowhere.
            let nodes = [node(0), node(1), node(0), node(1), node(2), None];
            (0..).zip(nodes).map(|(n, at)| bench.machine(n, at)).collect::<Vec<_>>()
        });
        let tracking = Tracking { leaf: Some(PAGE), ..Tracking::default() };
        for bench in &mut benches {
            bench.space.track_dirty(tracking).unwrap();
        }
        let mut attached = [false; 6];
        for op in ops {
            let mut said: Vec<String> = Vec::new();
            for (bench, machines) in benches.iter_mut().zip(&machines) {
                let space = &mut bench.space;
                let range = |at: u64, len: u64| Span::new(AT + at * PAGE, len.min(PAGES - at) * PAGE);
                said.push(match op {
                    Op::Map(at, from, len) => {
                        let range = range(at, len);
                        let part = Span::new(from * PAGE, range.len);
                        let done = space.map(range.start, &bench.memory, part, Prot::RW);
                        format!("{}", done.is_ok())
                    }
                    Op::Unmap(at, len) => {
                        format!("{:?}", space.unmap(range(at, len)).ok())
                    }
                    Op::Cut(at, len) => {
                        let cut = space.unmap_cutting(
                            range(at, len),
                            iopt::Interruption::Refused);
                        format!("{:?}", cut.ok())
                    }
                    Op::Attach(n) => {
                        let machine = &machines[n];
                        format!("{}", space.attach((machine.unit.clone(), machine.device)).is_ok())
                    }
                    Op::Detach(n) => format!("{}", space.detach(machines[n].device).is_ok()),
                    Op::Write(n, page) => format!("{}", machines[n].write(AT + page * PAGE)),
                    Op::Harvest => format!("{:?}", harvest(space)),
                });
            }
            prop_assert_eq!(&said[0], &said[1], "{:?}", op);
            match op {
                Op::Attach(n) => attached[n] = true,
                Op::Detach(n) => attached[n] = false,
                _ => {}
            }
        }
        let ledgers = benches.each_ref().map(|bench| bench.ledger.in_use());
        prop_assert_eq!(ledgers[0], ledgers[1]);
        for page in 0..PAGES {
            let iova = AT + page * PAGE + 8;
            let first = machines[0][0].read(iova).filter(|_| attached[0]);
            for n in (0..6).filter(|n| attached[*n]) {
                let seen = machines.each_ref().map(|machines| machines[n].read(iova));
                prop_assert_eq!(seen[0], seen[1], "device {} at {:#x}", n, iova);
                if attached[0] {
                    prop_assert_eq!(seen[0], first);
                }
            }
        }
        let [shared, per_node] = &mut benches;
        prop_assert_eq!(harvest(&mut shared.space), harvest(&mut per_node.space));
        for bench in benches {
            bench.end();
        }
    }
}
