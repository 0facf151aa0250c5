//! Mappings of the back ends over a kernel, against a plain model of the kernel.

use std::fs::File;
use std::sync::Arc;

use crate::plain_kernel::setup::*;
use crate::plain_kernel::*;
use ioas::{
    AttachError, Capability, Forecast, Ioas, Ledger, MapError, Mapper, Memory, OverLimit,
    PinFailed, Shares, UnmapError, pieces_needed,
};
use iopt::{Interruption, Prot};
use runs::{Iova, Offset, Span};

#[test]
fn areas_that_are_there_first_are_mapped_in_few_pieces() {
    let mut setup = setup::<false>(Some(2 * MIB));
    let memory = setup.memory(0x7000_0000_0000, GIB);
    // 1024 areas of 64 KiB go on in each other, then one elsewhere.
    for n in 0..1024 {
        let part = Span::new(n * 64 * 1024, 64 * 1024);
        setup.map(GIB + part.start, &memory, part).unwrap();
    }
    setup
        .map(3 * GIB - PAGE, &memory, Span::new(0, 4 * MIB))
        .unwrap();
    assert_eq!(setup.pieces(), []);
    setup.check();

    setup.space.attach(setup.device.clone()).unwrap();
    let ranges = setup.space.areas().into_iter().map(|area| area.range());
    let parts = [Span::new(GIB, 64 * MIB), Span::new(3 * GIB - PAGE, 4 * MIB)];
    assert_eq!(ranges.count(), 1025);
    assert_eq!(
        setup.pieces().len() as u64,
        pieces_needed(parts, Some(2 * MIB))
    );
    assert_eq!(setup.pieces().len(), 32 + 3);
    setup.check();

    // Areas stay over the last detach, and are mapped again as they were.
    let device = setup.device.clone();
    setup.space.detach(&device).unwrap();
    assert_eq!((setup.pieces(), setup.ledger.in_use()), (vec![], 0));
    setup.space.attach(device).unwrap();
    assert_eq!(setup.pieces().len(), 35);
    setup.check();
    setup.space.close().unwrap();
    assert_eq!(setup.ledger.in_use(), 0);
    assert!(setup.world.lock().unwrap().spaces[0].mappings.is_empty());
}

fn a_part_is_unmapped_only_with_permission<const IOMMUFD: bool>() {
    let mut setup = Setup::<IOMMUFD>::attached(Some(GIB));
    let memory = setup.memory(0x7000_0000_0000, 4 * GIB);
    setup.map(GIB, &memory, Span::new(0, 2 * GIB)).unwrap();
    assert_eq!(setup.pieces().len(), 2);
    setup.check();
    let part = Span::new(2 * GIB - MIB, 2 * MIB);
    let asked = setup.world.lock().unwrap().asked;
    let refused = setup.space.unmap_cutting(part, Interruption::Refused);
    let Err(UnmapError::CutsMapping { mapping, cause }) = refused else {
        panic!("{refused:?}");
    };
    assert_eq!(
        (mapping, cause.what),
        (Span::new(GIB, GIB), Capability::HitlessCut)
    );
    assert_eq!(
        setup.world.lock().unwrap().asked,
        asked,
        "the kernel was asked"
    );
    setup.check();

    let unmapped = setup
        .space
        .unmap_cutting(part, Interruption::Allowed)
        .unwrap();
    assert_eq!(unmapped.bytes, part.len);
    assert_eq!(
        setup.pieces(),
        [
            Span::new(GIB, GIB - MIB),
            Span::new(2 * GIB + MIB, GIB - MIB)
        ]
    );
    setup.check();

    // The middle of one piece.
    let part = Span::new(GIB + MIB, MIB);
    setup.space.take_out(part, Interruption::Allowed).unwrap();
    assert_eq!(setup.pieces().len(), 3);
    setup.check();
    setup.space.put_back(part, Interruption::Refused).unwrap();
    assert_eq!((setup.pieces().len(), setup.space.len()), (4, 2));
    setup.check();
    // A whole area of several pieces needs no permission.
    setup.space.unmap(Span::new(GIB, GIB)).unwrap();
    setup.check();
}

#[test]
fn a_part_of_a_containers_mapping_is_unmapped_only_with_permission() {
    a_part_is_unmapped_only_with_permission::<false>();
}

#[test]
fn a_part_of_an_iommufds_mapping_is_unmapped_only_with_permission() {
    a_part_is_unmapped_only_with_permission::<true>();
}

#[test]
fn an_area_in_a_common_piece_is_not_unmapped_alone() {
    let mut setup = setup::<false>(None);
    let memory = setup.memory(0x7000_0000_0000, GIB);
    for n in 0..4 {
        setup
            .map(GIB + n * MIB, &memory, Span::new(n * MIB, MIB))
            .unwrap();
    }
    setup.space.attach(setup.device.clone()).unwrap();
    assert_eq!(setup.pieces(), [Span::new(GIB, 4 * MIB)]);
    let area = Span::new(GIB + MIB, MIB);
    let refused = setup.space.unmap(area).unwrap_err();
    let mapping = Span::<Iova>::new(GIB, 4 * MIB);
    assert_eq!(
        refused.to_string(),
        format!("{mapping} is one mapping, which cannot be cut")
    );
    let cause = std::error::Error::source(&refused).map(ToString::to_string);
    let expected = "VFIO type1 cannot unmap a part of a mapping";
    assert_eq!(cause.as_deref(), Some(expected));
    assert_eq!(setup.space.len(), 4);
    setup.check();
    setup
        .space
        .unmap_cutting(area, Interruption::Allowed)
        .unwrap();
    assert_eq!(setup.space.len(), 3);
    setup.check();
}

#[test]
fn when_entries_run_out_pieces_are_merged_with_permission() {
    let mut setup = Setup::<false>::attached(Some(GIB));
    setup.world.lock().unwrap().entries = 100;
    let memory = setup.memory(0x7000_0000_0000, GIB);
    setup.space.detach(&setup.device.clone()).unwrap();
    setup.space.attach(setup.device.clone()).unwrap();
    let part = |n: u64| Span::new(n * PAGE, PAGE);
    for n in 0..100 {
        setup.map(GIB + n * PAGE, &memory, part(n)).unwrap();
    }
    let refused = setup.map(GIB + 100 * PAGE, &memory, part(100));
    assert!(
        matches!(
            refused,
            Err(MapError::TooMany {
                wanted: 101,
                most: 100
            })
        ),
        "{refused:?}"
    );
    assert_eq!(setup.space.len(), 100);
    setup.check();

    setup.space.set_merging(Interruption::Allowed);
    for n in 100..1000 {
        setup.map(GIB + n * PAGE, &memory, part(n)).unwrap();
    }
    assert_eq!(setup.space.len(), 1000);
    assert!(setup.pieces().len() <= 100);
    setup.check();
    // Pages that go on in nothing cannot be merged.
    for n in 0..99 {
        let _ = setup.map(4 * GIB + 2 * n * PAGE, &memory, part(n));
    }
    let refused = setup.map(8 * GIB, &memory, part(0));
    assert!(
        matches!(refused, Err(MapError::TooMany { most: 100, .. })),
        "{refused:?}"
    );
    setup.check();
}

#[test]
fn what_the_kernel_refuses_leaves_everything_as_it_was() {
    fn all<const IOMMUFD: bool>() {
        // The n-th call fails: a map of three pieces, a cut, an unmap of everything.
        for fails in 0..3 {
            let mut setup = Setup::<IOMMUFD>::attached(Some(MIB));
            let memory = setup.memory(0x7000_0000_0000, GIB);
            setup.map(GIB, &memory, Span::new(0, 2 * MIB)).unwrap();
            let before = setup.pieces();
            setup.world.lock().unwrap().fail.insert(fails);
            let refused = setup.map(2 * GIB, &memory, Span::new(4 * MIB, 3 * MIB));
            let room = Forecast::Fits { needed: MIB };
            assert!(
                matches!(&refused, Err(MapError::NoMemory { room: here, .. }) if *here == room),
                "{refused:?}"
            );
            assert_eq!((setup.pieces(), setup.space.len()), (before, 1));
            setup.check();
        }
        // Unmap and map of each end of two pieces, and the middle: five calls.
        for fails in 0..5 {
            let mut setup = Setup::<IOMMUFD>::attached(Some(MIB));
            let memory = setup.memory(0x7000_0000_0000, GIB);
            setup.map(GIB, &memory, Span::new(0, 3 * MIB)).unwrap();
            let before = setup.pieces();
            setup.world.lock().unwrap().fail.insert(fails);
            let part = Span::new(GIB + MIB / 2, 2 * MIB);
            let refused = setup.space.unmap_cutting(part, Interruption::Allowed);
            assert!(
                matches!(refused, Err(UnmapError::Kernel(_))),
                "{fails}: {refused:?}"
            );
            assert_eq!((setup.pieces(), setup.space.len()), (before, 1), "{fails}");
            setup.check();
            setup.world.lock().unwrap().fail.clear();
            setup.space.unmap_all().unwrap();
            setup.check();
        }
        // Attaching with three pieces to map.
        for fails in 0..3 {
            let mut setup = setup::<IOMMUFD>(Some(MIB));
            let memory = setup.memory(0x7000_0000_0000, GIB);
            setup.map(GIB, &memory, Span::new(0, 3 * MIB)).unwrap();
            setup.world.lock().unwrap().fail.insert(fails);
            let refused = setup.space.attach(setup.device.clone());
            assert!(
                matches!(refused, Err(AttachError::Replay { .. })),
                "{refused:?}"
            );
            assert!(setup.space.endpoints().is_empty());
            setup.check();
            setup.space.attach(setup.device.clone()).unwrap();
            setup.check();
        }
    }
    all::<false>();
    all::<true>();
}

#[test]
fn limits_and_bad_memory_are_named_with_numbers() {
    fn all<const IOMMUFD: bool>() {
        let mut setup = Setup::<IOMMUFD>::attached(None);
        setup.ledger = Ledger::new("mm->locked_vm", Some(8 * MIB), MIB);
        let memory = setup.memory(0x7000_0000_0000, GIB);
        let asked = setup.world.lock().unwrap().asked;
        let over = setup.map(GIB, &memory, Span::new(0, 8 * MIB)).unwrap_err();
        let text = "needs 8 MiB, 8 MiB allowed, 1 MiB in use (mm->locked_vm): 1 MiB short; RLIMIT_MEMLOCK, which \
         counts this process, is raised by `ulimit -l` or LimitMEMLOCK=, and lifted by CAP_IPC_LOCK";
        assert_eq!(over.to_string(), text);
        assert_eq!(
            setup.world.lock().unwrap().asked,
            asked,
            "the kernel was asked"
        );
        // The limit was lowered, of which the ledger does not know.
        setup.world.lock().unwrap().limit = 2 * MIB;
        let over = setup.map(GIB, &memory, Span::new(0, 4 * MIB)).unwrap_err();
        let counter = ["mm->locked_vm", "user->locked_vm"][usize::from(IOMMUFD)];
        let expected = OverLimit {
            needed: 4 * MIB,
            limit: 2 * MIB,
            in_use: 0,
            counter,
        };
        assert!(
            matches!(over, MapError::OverLimit(over) if over == expected),
            "{over}"
        );
        assert_eq!(setup.ledger.in_use(), MIB);
        setup
            .world
            .lock()
            .unwrap()
            .bad
            .push(Span::new(0x7000_0000_1000, PAGE));
        let bad = setup.map(GIB, &memory, Span::new(0, MIB)).unwrap_err();
        assert!(matches!(bad, MapError::Pin(PinFailed::Refused(_))), "{bad}");
        let neither = Fake {
            len: MIB,
            address: None,
            file: None,
        };
        let neither = Memory::new(Arc::new(neither), &setup.ledger);
        let refused = setup.map(GIB, &neither, Span::new(0, MIB)).unwrap_err();
        let MapError::Unsupported(refused) = refused else {
            panic!("{refused}");
        };
        assert_eq!(refused.what, Capability::FixedRuns);
        let none = setup
            .space
            .map(GIB, &memory, Span::new(0, MIB), Prot::empty());
        assert!(matches!(none, Err(MapError::Prot { .. })));
        assert_eq!((setup.space.len(), setup.ledger.in_use()), (0, MIB));
    }
    all::<false>();
    all::<true>();
}

#[test]
fn iommufd_charges_memory_once_wherever_it_is() {
    let world = World::new(Plain::<true>::PROFILE);
    let shares: Arc<Shares> = Arc::default();
    let ledger = Ledger::new("user->locked_vm", Some(GIB), 0);
    let mut spaces: Vec<Ioas> = (0..2)
        .map(|_| Ioas::over_mapper(Plain::<true>::new(&world, &shares)))
        .collect();
    for space in &mut spaces {
        space.attach(Arc::<Device>::default()).unwrap();
        assert!(space.capabilities().shares_pins);
    }
    let (address, file) = (None, Some(File::open("/dev/null").unwrap()));
    let memory = Memory::new(
        Arc::new(Fake {
            len: GIB,
            address,
            file,
        }),
        &ledger,
    );
    let map = |space: usize, iova, part: Span<Offset>, prot| {
        spaces[space].map(iova, &memory, part, prot).unwrap();
        let world = world.lock().unwrap();
        assert_eq!(ledger.in_use(), world.locked());
        ledger.in_use()
    };
    assert_eq!(map(0, GIB, Span::new(4 * MIB, 4 * MIB), Prot::RW), 4 * MIB);
    assert_eq!(
        map(0, 2 * GIB, Span::new(5 * MIB, MIB), Prot::READ),
        4 * MIB
    );
    // A part of it is there, before and behind are not.
    assert_eq!(
        map(1, 2 * GIB, Span::new(2 * MIB, 8 * MIB), Prot::RW),
        8 * MIB
    );
    // To be written, it cannot be copied from what is only read.
    assert_eq!(
        map(1, 3 * GIB, Span::new(16 * MIB, MIB), Prot::READ),
        9 * MIB
    );
    assert_eq!(
        map(1, 4 * GIB, Span::new(16 * MIB, MIB), Prot::RW),
        10 * MIB
    );
    // A copied mapping stays when the first goes, and its charge with it.
    spaces[0].unmap_all().unwrap();
    let found = world.lock().unwrap().translate(1, 2 * GIB + 3 * MIB);
    assert_eq!(found, Some(5 * MIB));
    assert!(ledger.in_use() >= world.lock().unwrap().locked());
    for space in spaces {
        space.close().unwrap();
    }
    assert_eq!((ledger.in_use(), world.lock().unwrap().locked()), (0, 0));
}

/// The kernel copies a revoked dma-buf as it copies any other mapping, and nothing is translated then.
#[test]
fn registers_are_mapped_by_their_file_each_time() {
    let world = World::new(Plain::<true>::PROFILE);
    let shares: Arc<Shares> = Arc::default();
    let ledger = Ledger::unlimited();
    let spaces: Vec<Ioas> = (0..2)
        .map(|_| Ioas::over_mapper(Plain::<true>::new(&world, &shares)))
        .collect();
    let file = File::open("/dev/null").unwrap();
    let registers = Memory::new(Arc::new(Registers { len: MIB, file }), &ledger);
    let whole = Span::new(0, MIB);
    for (space, iova) in [(0, GIB), (0, 2 * GIB), (1, GIB)] {
        if iova == GIB {
            spaces[space].attach(Arc::<Device>::default()).unwrap();
        }
        spaces[space]
            .map(iova, &registers, whole, Prot::RW)
            .unwrap();
    }
    {
        let world = world.lock().unwrap();
        let found = [(0, GIB), (0, 2 * GIB), (1, GIB)]
            .map(|(space, iova)| world.spaces[space].mappings[&iova]);
        assert!(found.iter().all(|mapping| mapping.from_file), "{found:?}");
        // A copy would have the pages of what it is copied from.
        let pages = found.map(|mapping| mapping.pages);
        assert!(pages[0] != pages[1] && pages[0] != pages[2], "{pages:?}");
    }
    // iommufd takes another process' memory files, but no dma-buf.
    let refused = spaces[0].give_up();
    assert!(
        matches!(refused, Err(ioas::KernelError::NoSource)),
        "{refused:?}"
    );
    for space in spaces {
        space.close().unwrap();
    }
    assert!(
        world
            .lock()
            .unwrap()
            .spaces
            .iter()
            .all(|space| space.mappings.is_empty())
    );
}

#[test]
fn what_was_copied_is_copied_again_when_an_unmap_stops_half_way() {
    let mut setup = Setup::<true>::attached(None);
    let memory = setup.memory(1 << 40, GIB);
    // The copy lies below what it is copied from.
    for at in [3 * GIB, 2 * GIB] {
        setup.map(at, &memory, Span::new(0, MIB)).unwrap();
    }
    setup.map(4 * GIB, &memory, Span::new(MIB, MIB)).unwrap();
    assert_eq!(setup.ledger.in_use(), 2 * MIB);
    let held = Span::new(4 * GIB, PAGE);
    setup.world.lock().unwrap().held.push(held);
    // The kernel unmaps in order: both are gone when it comes to what is held.
    setup.world.lock().unwrap().calls.clear();
    setup.space.unmap_all().unwrap_err();
    let calls = setup.world.lock().unwrap().calls.clone();
    let gone = calls.iter().filter(|(map, _)| !map).count();
    assert_eq!((gone, calls.len()), (2, 4), "{calls:x?}");
    setup.check();
    assert_eq!(setup.ledger.in_use(), 2 * MIB);
    setup.world.lock().unwrap().held.clear();
    setup.space.unmap_all().unwrap();
    setup.check();
}

#[test]
fn pages_that_others_have_copied_are_charged_once_more_when_they_are_mapped_anew() {
    // An unmap that stops half way, and a cut that fails after the first call.
    for cut in [false, true] {
        let world = World::new(Plain::<true>::PROFILE);
        let shares: Arc<Shares> = Arc::default();
        let ledger = Ledger::new("user->locked_vm", Some(GIB), 0);
        let space = || Ioas::over_mapper(Plain::<true>::new(&world, &shares));
        let (first, second) = (space(), space());
        let (address, file) = (None, Some(File::open("/dev/null").unwrap()));
        let len = GIB;
        let memory = Memory::new(Arc::new(Fake { len, address, file }), &ledger);
        for space in [&first, &second] {
            space.attach(Arc::<Device>::default()).unwrap();
            let part = Span::new(0, 4 * MIB);
            let mapped = space.map(GIB, &memory, part, Prot::RW);
            mapped.unwrap();
        }
        let part = Span::new(4 * MIB, MIB);
        let mapped = first.map(4 * GIB, &memory, part, Prot::RW);
        mapped.unwrap();
        let charged = || (ledger.in_use(), world.lock().unwrap().locked());
        assert_eq!(charged(), (5 * MIB, 5 * MIB));
        if cut {
            world.lock().unwrap().fail.insert(1);
            let part = Span::new(GIB + MIB, MIB);
            let refused = first.unmap_cutting(part, Interruption::Allowed);
            refused.unwrap_err();
        } else {
            let held = Span::new(4 * GIB, PAGE);
            world.lock().unwrap().held.push(held);
            first.unmap_all().unwrap_err();
            world.lock().unwrap().held.clear();
        }
        // The copy keeps the pages that it has.
        assert_eq!(charged(), (9 * MIB, 9 * MIB), "{cut}");
        for space in [first, second] {
            space.close().unwrap();
        }
        assert_eq!(charged(), (0, 0));
    }
}

#[test]
fn two_containers_charge_twice() {
    let world = World::new(Plain::<false>::PROFILE);
    let ledger = Ledger::new("mm->locked_vm", Some(3 * MIB), 0);
    let fake = Fake {
        len: GIB,
        address: Some(1 << 40),
        file: None,
    };
    let memory = Memory::new(Arc::new(fake), &ledger);
    let mut spaces: Vec<Ioas> = Vec::new();
    for n in 1..=2 {
        let mapper = Plain::<false>::new(&world, &Arc::default());
        let space = Ioas::over_mapper(mapper);
        space.attach(Arc::<Device>::default()).unwrap();
        assert!(!space.capabilities().shares_pins);
        space
            .map(GIB, &memory, Span::new(0, MIB), Prot::RW)
            .unwrap();
        assert_eq!(
            (ledger.in_use(), world.lock().unwrap().locked()),
            (n * MIB, n * MIB)
        );
        spaces.push(space);
    }
    // The same twice in one container, too.
    spaces[0]
        .map(2 * GIB, &memory, Span::new(0, MIB), Prot::RW)
        .unwrap();
    let over = spaces[0].map(3 * GIB, &memory, Span::new(0, MIB), Prot::RW);
    assert!(matches!(over, Err(MapError::OverLimit(_))));
}

#[test]
#[cfg(feature = "linux")]
fn memory_of_the_host_is_given_by_its_address_or_as_its_file() {
    use hostmem::{Backing, FrameSource, Mapping, Pinner};
    use ioas::HostMemory;

    fn mapped<const IOMMUFD: bool>(backing: Backing) -> (u64, Found) {
        let mapping = Arc::new(Mapping::new(backing, 2 * MIB, None).unwrap());
        let (address, frames) = (mapping.address(), FrameSource::detect(&mapping));
        let pinner = Arc::new(Pinner::mlock(2 * MIB).unwrap());
        let object = HostMemory::with_pinner(mapping, pinner.clone(), frames);
        let mut setup = Setup::<IOMMUFD>::attached(None);
        let memory = Memory::new(Arc::new(object), &setup.ledger);
        setup.map(GIB, &memory, Span::new(MIB, MIB)).unwrap();
        assert_eq!(setup.ledger.in_use(), MIB);
        let found = setup.world.lock().unwrap().spaces[0].mappings[&GIB];
        (address, found)
    }
    type Found = crate::plain_kernel::Mapping;

    for backing in [Backing::Anon4K, Backing::Memfd] {
        let (address, found) = mapped::<false>(backing);
        assert_eq!((found.address, found.from_file), (address + MIB, false));
    }
    let (address, found) = mapped::<true>(Backing::Anon4K);
    assert_eq!((found.address, found.from_file), (address + MIB, false));
    let (_, found) = mapped::<true>(Backing::Memfd);
    assert_eq!((found.address, found.from_file), (MIB, true));
}
