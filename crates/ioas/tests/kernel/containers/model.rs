//! A container for each node beside one container for all: random sequences of operations on both.

use std::sync::Arc;

use super::{Bench, group, node};
use crate::plain_kernel::setup::*;
use crate::plain_kernel::*;
use ioas::{Endpoint, EndpointId, Ioas, Memory, Place, Tracking};
use iopt::{Interruption, Pending, Prot};
use proptest::prelude::*;
use runs::{Iova, Span};

/// Operation on two spaces alike.
#[derive(Clone, Debug)]
enum Op {
    Map(u64, u64, u64),
    Unmap(u64, u64),
    Release(u64, u64),
    Restore(u64, u64),
    Attach(usize),
    Detach(usize),
    Write(usize, u64),
    Harvest,
}

const PAGES: u64 = 256;
/// The nodes of the groups.
const NODES: [Option<u32>; 5] = [Some(0), Some(1), Some(0), Some(2), None];

fn op() -> impl Strategy<Value = Op> {
    let pages = || 0..PAGES;
    let range = || (pages(), 1..100u64);
    let groups = || 0..NODES.len();
    prop_oneof![
        4 => (pages(), pages(), 1..100u64).prop_map(|(at, from, len)| Op::Map(at, from, len)),
        2 => range().prop_map(|(at, len)| Op::Unmap(at, len)),
        2 => range().prop_map(|(at, len)| Op::Release(at, len)),
        2 => range().prop_map(|(at, len)| Op::Restore(at, len)),
        3 => groups().prop_map(Op::Attach),
        2 => groups().prop_map(Op::Detach),
        4 => (groups(), pages()).prop_map(|(n, page)| Op::Write(n, page)),
        2 => Just(Op::Harvest),
    ]
}

/// Results that both kinds of address space have in common.
fn common(space: &Ioas, memory: &Arc<Memory>, op: &Op) -> String {
    let range = |at: u64, len: u64| Span::new(GIB + at * PAGE, len.min(PAGES - at) * PAGE);
    let allowed = Interruption::Allowed;
    let mut refused = 0;
    match *op {
        Op::Map(at, from, len) => {
            let range = range(at, len);
            let part = Span::new(from * PAGE, range.len);
            let mapped = space.map(range.start, memory, part, Prot::RW);
            mapped.is_ok().to_string()
        }
        Op::Unmap(at, len) => {
            let gone = space.unmap_cutting(range(at, len), allowed);
            format!("{:?}", gone.map(|gone| gone.bytes))
        }
        Op::Release(at, len) => {
            let range = [range(at, len)];
            space.release(&range, allowed, &mut |_, _| refused += 1);
            refused.to_string()
        }
        Op::Restore(at, len) => {
            let range = [range(at, len)];
            space.restore(&range, allowed, &mut |_, _| refused += 1);
            refused.to_string()
        }
        Op::Harvest => {
            let span = Span::new(GIB, PAGES * PAGE);
            let mut pending = Pending::new(vec![0u64; 4], span, PAGE).unwrap();
            space.harvest(&mut pending).unwrap();
            let shown = space.show(&mut pending).unwrap();
            let found: Vec<Span<Iova>> = shown.runs().collect();
            shown.acknowledge();
            format!("{found:?}")
        }
        Op::Attach(_) | Op::Detach(_) | Op::Write(..) => String::new(),
    }
}

/// The model's container in which the group is.
fn container_of(bench: &Bench, group: &Arc<Device>) -> usize {
    let has = |place: &Place| place.endpoints.contains(&EndpointId::from(group));
    let found = bench.space.places().into_iter().find(has);
    found.unwrap().number.unwrap() as usize
}

fn write(world: &std::sync::Mutex<World>, space: usize, page: u64) {
    let mut world = world.lock().unwrap();
    let at = GIB + page * PAGE;
    if world.translate(space, at).is_some() {
        world.spaces[space].dirty.insert(at);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    /// A container for each node says what one for all says, after any sequence of operations; what is
    /// dirty is the union, and what is charged is charged for each.
    #[test]
    fn per_node_equals_shared(
        granule in prop_oneof![Just(None), Just(Some(PAGE)), Just(Some(16 * PAGE))],
        ops in prop::collection::vec(op(), 1..60),
    ) {
        let shared = setup::<false>(granule);
        let bench = Bench::new(granule, u64::MAX);
        let groups = NODES.map(|_| group());
        let memories = [shared.memory(1 << 40, GIB), bench.memory(GIB)];
        shared.space.track_dirty(Tracking::default()).unwrap();
        bench.space.track_dirty(Tracking::default()).unwrap();
        let mut attached = [false; NODES.len()];
        for op in std::iter::once(Op::Attach(0)).chain(ops) {
            match op {
                Op::Attach(n) if !attached[n] => {
                    shared.space.attach(groups[n].clone()).unwrap();
                    bench.space.attach(Endpoint::from(groups[n].clone()).near(NODES[n].and_then(node))).unwrap();
                    attached[n] = true;
                }
                Op::Detach(n) if attached[n] => {
                    shared.space.detach(&groups[n]).unwrap();
                    bench.space.detach(&groups[n]).unwrap();
                    attached[n] = false;
                }
                Op::Write(n, page) if attached[n] => {
                    write(&shared.world, 0, page);
                    write(&bench.world, container_of(&bench, &groups[n]), page);
                }
                _ => {
                    let said = common(&shared.space, &memories[0], &op);
                    let here = common(&bench.space, &memories[1], &op);
                    prop_assert_eq!(said, here, "{:?}", op);
                }
            }
            bench.check();
            let containers = bench.spaces().len() as u64;
            prop_assert_eq!(bench.ledger.in_use(), containers * shared.ledger.in_use());
        }
        let worlds = (shared.world.lock().unwrap(), bench.world.lock().unwrap());
        for space in bench.spaces() {
            for page in 0..PAGES {
                let at = GIB + page * PAGE;
                prop_assert_eq!(worlds.0.translate(0, at), worlds.1.translate(space, at));
            }
        }
        drop(worlds);
        let harvested = [
            common(&shared.space, &memories[0], &Op::Harvest),
            common(&bench.space, &memories[1], &Op::Harvest),
        ];
        prop_assert_eq!(&harvested[0], &harvested[1]);
        bench.space.close().unwrap();
        prop_assert_eq!(bench.ledger.in_use(), 0);
    }
}
