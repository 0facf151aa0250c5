//! The charge of released areas, as domains come and go.

use crate::common::machines::{AT, Bench, Machine, SMALL, can};
use crate::common::*;
use ioas::{AttachError, MapError, ReleaseError};
use iopt::{FormatId, Interruption, TableMemory as _};
use runs::{Iova, Span};

const NEVER: Interruption = Interruption::Refused;
const LEN: u64 = 4 * PAGE;
const AREAS: u64 = 4;

/// Areas of which a page each was released before the first device came.
fn noted() -> (Bench, Machine, Vec<Span<Iova>>) {
    let mut bench = Bench::new();
    for n in 0..AREAS {
        bench.map(AT + n * MIB, Span::new(n * MIB, LEN)).unwrap();
    }
    let page = |n| Span::new(AT + n * MIB + PAGE, PAGE);
    let pages: Vec<Span<Iova>> = (0..AREAS).map(page).collect();
    let mut refused = |range, cause: ReleaseError| panic!("{range}: {cause}");
    bench.space.release(&pages, NEVER, &mut refused);
    assert_eq!(bench.ledger.in_use(), 0);
    let machine = Machine::new(&bench.tables, 0, can(FormatId::VtdSs, SMALL, true));
    (bench, machine, pages)
}

#[test]
fn a_first_domain_keeps_the_charge_of_all_released_areas_or_does_not_come() {
    let (mut bench, machine, pages) = noted();
    let before = bench.state();
    for room in (0..AREAS * LEN).step_by(PAGE as usize) {
        let others = bench.ledger.charge(4 * GIB - room).unwrap();
        let attached = machine.attach(&mut bench.space);
        assert!(
            matches!(
                attached,
                Err(AttachError::Replay {
                    cause: MapError::OverLimit(_),
                    ..
                })
            ),
            "{room:#x}: {attached:?}"
        );
        assert_eq!(bench.ledger.in_use(), others.bytes());
        drop(others);
        assert_eq!(bench.state(), before);
        assert_eq!(bench.memory.reserved(), 0);
    }
    // Neither does it when refused after that.
    let mut refused = 0;
    for left in 0.. {
        let others = bench.tables.reserve(128 - left).unwrap();
        let attached = machine.attach(&mut bench.space);
        bench.tables.give_back(others);
        if attached.is_ok() {
            break;
        }
        assert_eq!(bench.state(), before);
        assert_eq!(bench.memory.reserved(), 0);
        refused += 1;
    }
    assert!(refused > 4, "{refused}");
    assert_eq!(bench.memory.reserved(), AREAS * PAGE);
    assert_eq!(bench.ledger.in_use(), AREAS * LEN);
    let others = bench.ledger.charge(4 * GIB - AREAS * LEN).unwrap();
    let mut failed = |range, cause: MapError| panic!("{range}: {cause}");
    bench.space.restore(&pages, NEVER, &mut failed);
    drop(others);
    bench.end();
}

#[test]
fn what_is_taken_out_gives_its_charge_back_and_needs_it_again() {
    let (mut bench, machine, pages) = noted();
    machine.attach(&mut bench.space).unwrap();
    let page = pages[2];
    let before = bench.state();
    bench.space.take_out(page, NEVER).unwrap();
    assert_eq!(bench.ledger.in_use(), AREAS * LEN - PAGE);
    let others = bench.ledger.charge(4 * GIB - bench.ledger.in_use());
    let refused = bench.space.put_back(page, NEVER);
    assert!(
        matches!(refused, Err(MapError::OverLimit(_))),
        "{refused:?}"
    );
    assert!(bench.space.area_at(page.start).unwrap().is_out());
    drop(others);
    bench.space.put_back(page, NEVER).unwrap();
    assert_eq!(bench.state(), before);
    bench.end();
}
