//! Devices of the back ends over a kernel: windows, what they write to, another process.

use std::sync::Arc;

use crate::plain_kernel::setup::*;
use crate::plain_kernel::*;
use ioas::{
    AttachError, DetachError, Errno, Ioas, Kernel, Ledger, MapError, Tracking, TrackingError,
};
use iopt::{Pending, Prot};
use runs::Span;

const ALL: Span = Span::new(0, 1 << 48);

#[test]
fn windows_follow_the_devices() {
    fn all<const IOMMUFD: bool>() {
        let mut setup = setup::<IOMMUFD>(None);
        let memory = setup.memory(1 << 40, GIB);
        setup
            .map(0xfed0_0000, &memory, Span::new(0, 2 * MIB))
            .unwrap();
        let Err(AttachError::Reserved { area, reserved }) =
            setup.space.attach(setup.device.clone())
        else {
            panic!("an area lies in what the device reserves");
        };
        assert_eq!(
            (area, reserved),
            (Span::new(0xfed0_0000, 2 * MIB), Span::new(0xfee0_0000, MIB))
        );
        setup.space.unmap_all(&mut ()).unwrap();
        setup.space.attach(setup.device.clone()).unwrap();
        assert!(matches!(
            setup.space.attach(setup.device.clone()),
            Err(AttachError::AlreadyAttached)
        ));
        assert_eq!(
            setup.space.windows(),
            [
                Span::new(0, 0xfee0_0000),
                Span::new(0xfef0_0000, (1 << 48) - 0xfef0_0000)
            ]
        );
        let refused = setup
            .map(0xfed0_0000, &memory, Span::new(0, 2 * MIB))
            .unwrap_err();
        assert!(
            matches!(refused, MapError::Reserved { reserved, .. } if reserved == Span::new(0xfee0_0000, MIB))
        );
        setup.map(1 << 40, &memory, Span::new(0, MIB)).unwrap();
        // A second one reaches less, and an area is in the way: only the kernel knows.
        let narrow = Device {
            ranges: vec![0..=(1 << 39) - 1],
            ..Device::default()
        };
        let narrow = Arc::new(narrow);
        let refused = setup.space.attach(narrow.clone());
        assert!(
            matches!(refused, Err(AttachError::Conflict(_))),
            "{refused:?}"
        );
        setup.space.unmap_all(&mut ()).unwrap();
        setup.space.attach(narrow.clone()).unwrap();
        assert_eq!(
            setup.space.windows().last().map(|window| window.last()),
            Some((1 << 39) - 1)
        );
        setup.space.detach(&narrow).unwrap();
        assert_eq!(setup.space.detach(&narrow), Err(DetachError::Unknown));
        let open = Arc::new(Device {
            open: true,
            ..Device::default()
        });
        setup.space.attach(open.clone()).unwrap();
        let Err(DetachError::Kernel { errno, .. }) = setup.space.detach(&open) else {
            panic!("a group with an open device");
        };
        assert_eq!(errno, Errno::EBUSY);
        // Yet nothing is mapped when the space is closed.
        setup.map(GIB, &memory, Span::new(0, MIB)).unwrap();
        setup.space.close().unwrap();
        assert!(setup.world.lock().unwrap().spaces[0].mappings.is_empty());
        assert_eq!(setup.ledger.in_use(), 0);
    }
    all::<false>();
    all::<true>();
}

#[test]
fn dirty_pages_come_once_each_and_blind_devices_dirty_everything() {
    fn harvest<const IOMMUFD: bool>(setup: &mut Setup<IOMMUFD>, span: Span) -> (Vec<Span>, bool) {
        let mut pending = Pending::new(vec![0; 64], span, PAGE).unwrap();
        let found = setup.space.harvest(&mut pending).unwrap();
        let shown = setup.space.show(&mut pending).unwrap();
        (shown.runs().collect(), found.blind)
    }
    fn all<const IOMMUFD: bool>() {
        let mut setup = setup::<IOMMUFD>(Some(MIB));
        setup.device = Arc::new(Device {
            tracks: true,
            ..Device::default()
        });
        setup.space.attach(setup.device.clone()).unwrap();
        let memory = setup.memory(1 << 40, GIB);
        setup.map(GIB, &memory, Span::new(0, 2 * MIB)).unwrap();
        setup
            .space
            .map(2 * GIB, &memory, Span::new(0, MIB), Prot::READ, &mut ())
            .unwrap();
        let leaf = Tracking {
            leaf: Some(PAGE),
            ..Tracking::default()
        };
        let refused = setup.space.track_dirty(leaf);
        assert!(
            matches!(refused, Err(TrackingError::Unsupported(_))),
            "{refused:?}"
        );
        setup.space.track_dirty(Tracking::default()).unwrap();
        let write = |setup: &Setup<IOMMUFD>, at: u64| {
            setup.world.lock().unwrap().spaces[0].dirty.insert(at);
        };
        write(&setup, GIB + PAGE);
        write(&setup, GIB + MIB - PAGE);
        // Half of a piece is asked for; the other half is kept, whatever the kernel reads at once.
        let half = MIB / 2;
        let first = harvest(&mut setup, Span::new(GIB, half));
        assert_eq!(first, (vec![Span::new(GIB + PAGE, PAGE)], false));
        assert_eq!(harvest(&mut setup, Span::new(GIB, half)).0, []);
        let second = harvest(&mut setup, Span::new(GIB + half, MIB));
        assert_eq!(second.0, [Span::new(GIB + MIB - PAGE, PAGE)]);
        // An unmap tells too.
        write(&setup, GIB + MIB);
        let mut pending = Pending::new(vec![0; 64], Span::new(GIB, 2 * MIB), PAGE).unwrap();
        setup
            .space
            .unmap_noting(Span::new(GIB, 2 * MIB), &mut pending, &mut ())
            .unwrap();
        let shown = setup.space.show(&mut pending).unwrap();
        assert_eq!(
            shown.runs().collect::<Vec<_>>(),
            [Span::new(GIB + MIB, PAGE)]
        );
        drop(shown);
        setup.space.untrack_dirty();

        let mut setup = Setup::<IOMMUFD>::attached(None);
        let memory = setup.memory(1 << 40, GIB);
        setup.map(GIB, &memory, Span::new(0, MIB)).unwrap();
        setup
            .space
            .map(2 * GIB, &memory, Span::new(0, MIB), Prot::READ, &mut ())
            .unwrap();
        setup.space.track_dirty(Tracking::default()).unwrap();
        assert!(!setup.space.capabilities().page_dirty);
        let all = harvest(&mut setup, Span::new(GIB, MIB));
        assert_eq!(all, (vec![Span::new(GIB, MIB)], true));
        assert_eq!(harvest(&mut setup, Span::new(2 * GIB, MIB)).0, []);
    }
    all::<false>();
    all::<true>();
}

#[test]
fn another_process_takes_over_while_devices_go_on() {
    let mut old = Setup::<false>::attached(Some(MIB));
    let memory = old.memory(1 << 40, GIB);
    old.map(GIB, &memory, Span::new(0, 3 * MIB)).unwrap();
    let pieces = old.space.give_up().unwrap();
    assert_eq!((pieces.len(), old.ledger.in_use()), (3, 0));
    // The container with all groups, and the same memory elsewhere.
    let mut mapper = Plain::<false>::new(&old.world, &Arc::default());
    mapper.space = 0;
    let mut new = Setup {
        space: Ioas::over_kernel(Kernel::new(mapper, Some(MIB))),
        world: old.world.clone(),
        ledger: Ledger::new("mm->locked_vm", Some(GIB), 0),
        device: old.device.clone(),
    };
    let moved = new.memory(2 << 40, GIB);
    new.map(GIB, &moved, Span::new(0, 2 * MIB)).unwrap();
    let hole = new.space.take_over(vec![new.device.clone()], &pieces);
    assert!(matches!(hole, Err(AttachError::NoArea { .. })), "{hole:?}");
    assert_eq!(new.ledger.in_use(), 0);
    new.map(GIB + 2 * MIB, &moved, Span::new(2 * MIB, MIB))
        .unwrap();
    new.space
        .take_over(vec![new.device.clone()], &pieces)
        .unwrap();
    new.check();
    assert_eq!(new.ledger.in_use(), 3 * MIB);
    let unmaps = |world: &World| world.calls.iter().filter(|(map, _)| !map).count();
    assert_eq!(
        unmaps(&old.world.lock().unwrap()),
        0,
        "devices lost their memory"
    );
    drop(old.space);
    assert_eq!(
        unmaps(&new.world.lock().unwrap()),
        0,
        "the old owner unmapped"
    );
    new.space.unmap(ALL, &mut ()).unwrap();
    new.check();

    // iommufd moves files only.
    let mut old = Setup::<true>::attached(None);
    let memory = old.memory(1 << 40, GIB);
    old.map(GIB, &memory, Span::new(0, MIB)).unwrap();
    assert!(old.space.give_up().is_err());
    old.check();
}
