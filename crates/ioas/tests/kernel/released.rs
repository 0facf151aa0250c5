//! The charge of what is released: kept while devices are there, for all areas or none.

use std::fs::File;
use std::sync::Arc;

use crate::plain_kernel::setup::*;
use crate::plain_kernel::*;
use ioas::{AttachError, Ioas, Ledger, MapError, Memory, ReleaseError};
use iopt::{Interruption, Prot};
use runs::{Iova, Span};

const ALLOWED: Interruption = Interruption::Allowed;
/// Pages of each area; as much lies between two of them.
const PAGES: u64 = 4;
const LEN: u64 = PAGES * PAGE;
const AREAS: u64 = 5;

const fn area(n: u64) -> Span<Iova> {
    Span::new(GIB + 2 * n * LEN, LEN)
}

/// The last page of each area.
fn released() -> Vec<Span<Iova>> {
    let last = |n| Span::new(area(n).last() + 1 - PAGE, PAGE);
    (0..AREAS).map(last).collect()
}

fn release(space: &Ioas, ranges: &[Span<Iova>]) {
    let mut refused = |range, cause: ReleaseError| panic!("{range}: {cause}");
    space.release(ranges, ALLOWED, &mut refused);
}

fn restore(space: &Ioas, ranges: &[Span<Iova>]) {
    let mut failed = |range, cause: MapError| panic!("{range}: {cause}");
    space.restore(ranges, ALLOWED, &mut failed);
}

/// Areas of which a page each was released before the first device came, under a limit of what
/// mapping all of them is charged.
fn noted<const IOMMUFD: bool>(file: bool) -> (Setup<IOMMUFD>, Arc<Memory>) {
    let mut setup = setup::<IOMMUFD>(None);
    setup.ledger = Ledger::new("a counter", Some(AREAS * LEN), 0);
    let file = file.then(|| File::open("/dev/null").unwrap());
    let object = Fake {
        len: GIB,
        address: Some(1 << 40),
        file,
    };
    let memory = Memory::new(Arc::new(object), &setup.ledger);
    for n in 0..AREAS {
        let part = Span::new(2 * n * LEN, LEN);
        setup.map(area(n).start, &memory, part).unwrap();
    }
    release(&setup.space, &released());
    assert_eq!(setup.ledger.in_use(), 0);
    (setup, memory)
}

#[test]
fn a_device_that_comes_later_has_the_charge_of_released_areas_kept() {
    fn all<const IOMMUFD: bool>() {
        let (setup, _memory) = noted::<IOMMUFD>(false);
        for _ in 0..2 {
            setup.space.attach(setup.device.clone()).unwrap();
            let mapped = AREAS * (LEN - PAGE);
            assert_eq!(setup.world.lock().unwrap().locked(), mapped);
            assert_eq!(setup.ledger.in_use(), AREAS * LEN);
            // One more device changes nothing.
            let second = Arc::new(Device::default());
            setup.space.attach(second.clone()).unwrap();
            setup.space.detach(&second).unwrap();
            assert_eq!(setup.ledger.in_use(), AREAS * LEN);
            // No charge is kept without a device.
            setup.space.detach(&setup.device).unwrap();
            assert_eq!(setup.ledger.in_use(), 0);
        }
        setup.space.attach(setup.device.clone()).unwrap();
        // There is room for nothing else, and they come back.
        assert!(setup.ledger.charge(1).is_err());
        restore(&setup.space, &released());
        setup.check();
        assert_eq!(setup.ledger.in_use(), AREAS * LEN);
    }
    all::<false>();
    all::<true>();
}

#[test]
fn a_limit_that_refuses_any_of_them_leaves_the_address_space_without_a_device() {
    fn all<const IOMMUFD: bool>() {
        for room in (0..AREAS * LEN).step_by(PAGE as usize) {
            let (setup, _memory) = noted::<IOMMUFD>(false);
            let others = setup.ledger.charge(AREAS * LEN - room).unwrap();
            let Err(AttachError::Replay { area, cause }) = setup.space.attach(setup.device.clone())
            else {
                panic!("{room:#x} bytes are not enough");
            };
            assert!(matches!(cause, MapError::OverLimit(_)), "{area}: {cause}");
            assert_eq!(setup.ledger.in_use(), others.bytes(), "{room:#x}");
            assert_eq!(setup.space.endpoints().len(), 0);
            assert!(setup.world.lock().unwrap().spaces[0].devices.is_empty());
            assert_eq!(setup.pieces(), []);
            drop(others);
            setup.space.attach(setup.device.clone()).unwrap();
            assert_eq!(setup.ledger.in_use(), AREAS * LEN);
        }
    }
    all::<false>();
    all::<true>();
}

#[test]
fn a_kernel_that_refuses_a_step_of_an_attach_leaves_nothing_kept() {
    fn all<const IOMMUFD: bool>() {
        let mut failed = 0;
        for nth in 0.. {
            let (setup, _memory) = noted::<IOMMUFD>(false);
            setup.world.lock().unwrap().fail = [nth].into();
            if setup.space.attach(setup.device.clone()).is_ok() {
                break;
            }
            failed += 1;
            setup.world.lock().unwrap().fail.clear();
            assert_eq!(setup.ledger.in_use(), 0, "{nth}");
            setup.space.attach(setup.device.clone()).unwrap();
            assert_eq!(setup.ledger.in_use(), AREAS * LEN, "{nth}");
        }
        assert_eq!(failed, AREAS);
    }
    all::<false>();
    all::<true>();
}

#[test]
fn what_is_kept_goes_to_the_process_that_takes_over() {
    fn all<const IOMMUFD: bool>() {
        let (old, _memory) = noted::<IOMMUFD>(true);
        old.space.attach(old.device.clone()).unwrap();
        let pieces = old.space.give_up().unwrap();
        assert_eq!(old.ledger.in_use(), 0);
        let (mut new, _other) = noted::<IOMMUFD>(true);
        let mut mapper = Plain::<IOMMUFD>::new(&old.world, &Arc::default());
        mapper.space = 0;
        let space = Ioas::over_mapper(mapper);
        for area in new.space.areas() {
            let (range, part) = (area.range(), area.part());
            let prot = Prot::RW;
            space.map(range.start, area.memory(), part, prot).unwrap();
        }
        release(&space, &released());
        (new.space, new.world) = (space, old.world.clone());
        for room in (0..AREAS * LEN).step_by(PAGE as usize) {
            let others = new.ledger.charge(AREAS * LEN - room).unwrap();
            let taken = new
                .space
                .take_over(vec![old.device.clone().into()], &pieces);
            assert!(
                matches!(
                    taken,
                    Err(AttachError::Replay {
                        cause: MapError::OverLimit(_),
                        ..
                    })
                ),
                "{room:#x}: {taken:?}"
            );
            assert_eq!(new.ledger.in_use(), others.bytes());
        }
        new.space
            .take_over(vec![old.device.clone().into()], &pieces)
            .unwrap();
        assert_eq!(new.ledger.in_use(), AREAS * LEN);
        restore(&new.space, &released());
        assert_eq!(new.world.lock().unwrap().locked(), AREAS * LEN);
        assert_eq!(new.ledger.in_use(), AREAS * LEN);
    }
    all::<false>();
    all::<true>();
}

#[test]
fn what_is_taken_out_keeps_no_charge_and_comes_back_if_the_limit_allows() {
    fn all<const IOMMUFD: bool>() {
        let (setup, _memory) = noted::<IOMMUFD>(false);
        setup.space.attach(setup.device.clone()).unwrap();
        let page = released()[1];
        for _ in 0..2 {
            setup.space.take_out(page, ALLOWED).unwrap();
            assert_eq!(setup.ledger.in_use(), AREAS * LEN - PAGE);
            // Also of one that comes later.
            setup.space.detach(&setup.device).unwrap();
            setup.space.attach(setup.device.clone()).unwrap();
            assert_eq!(setup.ledger.in_use(), AREAS * LEN - PAGE);
            let others = setup.ledger.charge(PAGE).unwrap();
            let refused = setup.space.put_back(page, ALLOWED);
            assert!(
                matches!(refused, Err(MapError::OverLimit(_))),
                "{refused:?}"
            );
            assert!(setup.space.area_at(page.start).unwrap().is_out());
            drop(others);
            setup.space.put_back(page, ALLOWED).unwrap();
            assert_eq!(setup.ledger.in_use(), AREAS * LEN);
            assert!(setup.ledger.charge(1).is_err());
        }
        restore(&setup.space, &released());
        setup.check();
    }
    all::<false>();
    all::<true>();
}
