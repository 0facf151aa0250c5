//! Every container is charged: told before, and kept for what is released.

use super::{ALL, Bench, group, node};
use crate::plain_kernel::PAGE;
use crate::plain_kernel::setup::*;
use ioas::{AttachError, Endpoint, Forecast, MapError, ReleaseError};
use iopt::Interruption;
use runs::Span;

#[test]
fn the_double_charge_is_reported_before_and_refused_before_anything_is_touched() {
    let (mut bench, _) = Bench::with(&[0, 1], 3 * MIB);
    let memory = bench.memory(GIB);
    let forecast = bench.space.forecast(&memory, ALL);
    assert_eq!(
        forecast.to_string(),
        "needs 4 MiB, 3 MiB allowed, 0 bytes in use (mm->locked_vm): 1 MiB short; RLIMIT_MEMLOCK, which \
         counts this process, is raised by `ulimit -l` or LimitMEMLOCK=, and lifted by CAP_IPC_LOCK"
    );
    let half = Span::new(0, MIB);
    let fits = bench.space.forecast(&memory, half);
    assert_eq!(fits, Forecast::Fits { needed: 2 * MIB });
    let Err(MapError::OverLimit(over)) = bench.map(GIB, &memory, ALL) else {
        panic!("twice the memory is more than the limit");
    };
    assert_eq!(
        (over.needed, over.limit, over.in_use),
        (4 * MIB, 3 * MIB, 0)
    );
    assert_eq!(bench.world.lock().unwrap().asked, 0, "the kernel was asked");
    bench.map(GIB, &memory, half).unwrap();
    bench.check();
    assert_eq!(bench.ledger.steps(), 1, "one step for both");
    // A third one does not fit, and is not there.
    bench
        .map(2 * GIB, &memory, Span::new(MIB, MIB / 2))
        .unwrap();
    let Err(AttachError::Replay { cause, .. }) =
        bench.space.attach(Endpoint::from(group()).near(node(2)))
    else {
        panic!("a third container is over the limit");
    };
    assert!(matches!(cause, MapError::OverLimit(_)), "{cause:?}");
    assert_eq!(bench.nodes(), [(Some(0), 1), (Some(1), 1)]);
    bench.check();
}

/// Type 1 charges each mapping of the same page, and so wants each charge again.
#[test]
fn areas_that_share_released_memory_keep_a_charge_each() {
    let pages = |first: u64, count: u64| Span::new(first * PAGE, count * PAGE);
    let areas = [(168, pages(60, 56)), (109, pages(28, 50))];
    let charged = (56 + 50) * PAGE;
    let (mut bench, _) = Bench::with(&[0], charged);
    let memory = bench.memory(GIB);
    // Page 77 of the memory is released at both addresses.
    let gone = [(185, 39), (126, 33)].map(|(at, count)| Span::new(GIB + at * PAGE, count * PAGE));
    let allowed = Interruption::Allowed;
    for ((at, part), gone) in areas.into_iter().zip(gone) {
        bench.map(GIB + at * PAGE, &memory, part).unwrap();
        let mut refused = |range, cause: ReleaseError| panic!("{range}: {cause}");
        bench.space.release(&[gone], allowed, &mut refused);
        bench.check();
    }
    assert_eq!(bench.ledger.in_use(), charged);
    // The charge is kept for these areas: no other map of their memory can use it.
    let forecast = bench.space.forecast(&memory, pages(77, 1));
    assert!(
        matches!(forecast, Forecast::DoesNotFit(over) if over.needed == PAGE),
        "{forecast}"
    );
    let mut failed = |range, cause: MapError| panic!("{range}: {cause}");
    bench.space.restore(&gone, allowed, &mut failed);
    bench.check();
    assert_eq!((bench.ledger.in_use(), bench.space.len()), (charged, 2));
}

#[test]
fn what_is_released_keeps_its_charge_for_every_container() {
    let (mut bench, groups) = Bench::with(&[0, 1], 8 * MIB);
    let memory = bench.memory(GIB);
    bench.map(GIB, &memory, ALL).unwrap();
    let part = [Span::new(GIB + MIB / 2, MIB)];
    let mut refused = |range, cause: ReleaseError| panic!("{range}: {cause}");
    let allowed = Interruption::Allowed;
    bench.space.release(&part, allowed, &mut refused);
    bench.check();
    assert_eq!(bench.ledger.in_use(), 2 * ALL.len);
    // One more container, for which it is kept too; one less.
    let third = group();
    bench
        .space
        .attach(Endpoint::from(third.clone()).near(node(2)))
        .unwrap();
    bench.check();
    assert_eq!(bench.ledger.in_use(), 3 * ALL.len);
    let other = bench.ledger.charge(2 * MIB).unwrap();
    let fourth = bench.space.attach(Endpoint::from(group()).near(node(3)));
    assert!(
        matches!(fourth, Err(AttachError::Replay { .. })),
        "{fourth:?}"
    );
    bench.space.detach(&groups[1]).unwrap();
    drop(other);
    bench.check();
    // Others have taken all that is left.
    let other = bench
        .ledger
        .charge(8 * MIB - bench.ledger.in_use())
        .unwrap();
    let mut failed = |range, cause: MapError| panic!("{range}: {cause}");
    bench.space.restore(&part, allowed, &mut failed);
    drop(other);
    bench.check();
    assert_eq!(bench.space.len(), 1);
    // Released in quarters, which are joined, and cut anew.
    let quarters = [0, 1, 2, 3].map(|n| Span::new(GIB + n * MIB / 2, MIB / 2));
    for quarter in &quarters {
        bench.space.release(&[*quarter], allowed, &mut refused);
        bench.check();
    }
    for quarter in [1, 3, 0, 2].map(|n| quarters[n]) {
        bench.space.restore(&[quarter], allowed, &mut failed);
        bench.check();
    }
    bench.space.unmap_all().unwrap();
    assert_eq!(bench.ledger.in_use(), 0);
}
