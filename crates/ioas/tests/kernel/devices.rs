//! Devices of the back ends over a kernel: windows, what they write to, another process.

use std::sync::Arc;

use crate::plain_kernel::setup::*;
use crate::plain_kernel::*;
use ioas::{
    AttachError, Capability, DetachError, Endpoint, Errno, Forecast, Ioas, Ledger, MapError,
    Memory, Placement, Tracking, TrackingError,
};
use iommu::NodeId;
use iopt::{Pending, Prot};
use runs::{Iova, Span};

const ALL: Span<Iova> = Span::new(0, 1 << 48);

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
        setup.space.unmap_all().unwrap();
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
        setup.space.unmap_all().unwrap();
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
    fn harvest<const IOMMUFD: bool>(
        setup: &mut Setup<IOMMUFD>,
        span: Span<Iova>,
    ) -> (Vec<Span<Iova>>, bool) {
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
            .map(2 * GIB, &memory, Span::new(0, MIB), Prot::READ)
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
            .unmap_noting(Span::new(GIB, 2 * MIB), &mut pending)
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
            .map(2 * GIB, &memory, Span::new(0, MIB), Prot::READ)
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
    let mut new = Setup::<false> {
        space: Ioas::options().granule(MIB).over_mapper(mapper).unwrap(),
        world: old.world.clone(),
        ledger: Ledger::new("mm->locked_vm", Some(GIB), 0),
        device: old.device.clone(),
    };
    let moved = new.memory(2 << 40, GIB);
    new.map(GIB, &moved, Span::new(0, 2 * MIB)).unwrap();
    let hole = new
        .space
        .take_over(vec![new.device.clone().into()], &pieces);
    assert!(matches!(hole, Err(AttachError::NoArea { .. })), "{hole:?}");
    assert_eq!(new.ledger.in_use(), 0);
    new.map(GIB + 2 * MIB, &moved, Span::new(2 * MIB, MIB))
        .unwrap();
    new.space
        .take_over(vec![new.device.clone().into()], &pieces)
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
    new.space.unmap(ALL).unwrap();
    new.check();

    // iommufd moves files only.
    let mut old = Setup::<true>::attached(None);
    let memory = old.memory(1 << 40, GIB);
    old.map(GIB, &memory, Span::new(0, MIB)).unwrap();
    assert!(old.space.give_up().is_err());
    old.check();
}

#[test]
fn a_container_per_node_and_its_double_charge() {
    let mut first = Setup::<false>::attached(None);
    for placement in [Placement::PerNode, Placement::Near(NodeId(1))] {
        let what = match placement {
            Placement::PerNode => Capability::NodeTables,
            _ => Capability::TablePlacement,
        };
        let refused = first.space.set_placement(placement).unwrap_err();
        assert_eq!(refused.what, what);
        assert_eq!(first.space.placement(), Placement::Shared);
        assert!(
            first
                .space
                .capabilities()
                .missing()
                .any(|lack| lack == what)
        );
    }
    // The other way to the same effect: a container for the devices of each node, over one memory.
    let ledger = Ledger::new("mm->locked_vm", Some(3 * MIB), 0);
    let object = Fake {
        len: 2 * MIB,
        address: Some(1 << 40),
        file: None,
    };
    let memory = Memory::new(Arc::new(object), &ledger);
    let whole = Span::new(0, 2 * MIB);
    let mapper = Plain::<false>::new(&first.world, &Arc::default());
    let mut second = Ioas::over_mapper(mapper);
    second.attach(Arc::new(Device::default())).unwrap();
    let map = |space: &Ioas, whole| space.map(GIB, &memory, whole, Prot::RW);
    map(&mut first.space, whole).unwrap();
    // The forecast counts it once more, as the kernel does.
    let forecast = memory.forecast(whole);
    assert_eq!(
        forecast.to_string(),
        "needs 2 MiB, 3 MiB allowed, 2 MiB in use (mm->locked_vm): 1 MiB short; RLIMIT_MEMLOCK, which \
         counts this process, is raised by `ulimit -l` or LimitMEMLOCK=, and lifted by CAP_IPC_LOCK"
    );
    let refused = map(&mut second, whole).unwrap_err();
    assert!(matches!(refused, MapError::OverLimit(_)), "{refused:?}");
    let half = Span::new(0, MIB);
    assert_eq!(memory.forecast(half), Forecast::Fits { needed: MIB });
    map(&mut second, half).unwrap();
    assert_eq!(
        (ledger.in_use(), first.world.lock().unwrap().locked()),
        (3 * MIB, 3 * MIB)
    );
    second.unmap_all().unwrap();
    first.space.unmap_all().unwrap();
    assert_eq!(ledger.in_use(), 0);
}

#[test]
fn iommufd_has_a_table_per_node_in_one_address_space() {
    let mut setup = Setup::<true>::attached(None);
    setup.space.set_placement(Placement::PerNode).unwrap();
    assert!(setup.space.capabilities().node_tables);
    let near = setup
        .space
        .set_placement(Placement::Near(NodeId(0)))
        .unwrap_err();
    assert_eq!(near.what, Capability::TablePlacement);
    assert_eq!(setup.space.placement(), Placement::PerNode);
    let memory = setup.memory(1 << 40, GIB);
    setup.map(GIB, &memory, Span::new(0, MIB)).unwrap();
    // Node and policy are passed to the kernel, and memory is charged as before.
    let other = Arc::new(Device::default());
    setup
        .space
        .attach(Endpoint::from(other.clone()).near(Some(NodeId(1))))
        .unwrap();
    let entered = setup.world.lock().unwrap().entered.clone();
    assert_eq!(
        entered,
        [
            (None, Placement::Shared),
            (Some(NodeId(1)), Placement::PerNode)
        ]
    );
    assert_eq!(setup.ledger.in_use(), MIB);
    setup.check();
    setup.space.detach(&other).unwrap();
    setup.check();
}
