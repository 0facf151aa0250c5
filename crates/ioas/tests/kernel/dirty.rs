//! Writes of devices when they leave, and when the kernel maps something anew: on models of the kernel, which drop
//! dirty bits with a mapping, and with the last device.

use std::sync::Arc;

use crate::containers::{Bench, node};
use crate::plain_kernel::setup::*;
use crate::plain_kernel::*;
use ioas::{Endpoint, Ioas, Memory, Tracking};
use iopt::{Interruption, Pending, Prot};
use runs::{Iova, Span};

/// Range mapped for writing; as much again behind it is only read.
const WRITABLE: Span<Iova> = Span::new(GIB, MIB);
const ALLOWED: Interruption = Interruption::Allowed;

fn harvest(space: &Ioas) -> (Vec<Span<Iova>>, u64, bool) {
    let span = Span::new(GIB, 4 * MIB);
    let mut pending = Pending::new(vec![0; 16], span, PAGE).unwrap();
    let found = space.harvest(&mut pending).unwrap();
    let shown = space.show(&mut pending).unwrap();
    (shown.runs().collect(), found.bytes, found.blind)
}

const fn page(n: u64) -> Span<Iova> {
    Span::new(GIB + n * PAGE, PAGE)
}

fn device(tracks: bool) -> Arc<Device> {
    Arc::new(Device {
        tracks,
        ..Device::default()
    })
}

/// With a device, and tracking.
fn tracked<const IOMMUFD: bool>(tracks: bool) -> (Setup<IOMMUFD>, Arc<Memory>) {
    let mut setup = setup::<IOMMUFD>(None);
    setup.device = device(tracks);
    setup.space.attach(setup.device.clone()).unwrap();
    let memory = setup.memory(1 << 40, GIB);
    map(&mut setup, &memory);
    setup.space.track_dirty(Tracking::default()).unwrap();
    (setup, memory)
}

fn map<const IOMMUFD: bool>(setup: &mut Setup<IOMMUFD>, memory: &Arc<Memory>) {
    setup.map(GIB, memory, Span::new(0, MIB)).unwrap();
    let (behind, part) = (GIB + MIB, Span::new(MIB, MIB));
    setup.space.map(behind, memory, part, Prot::READ).unwrap();
}

fn write<const IOMMUFD: bool>(setup: &Setup<IOMMUFD>, n: u64) {
    let mut world = setup.world.lock().unwrap();
    world.spaces[0].dirty.insert(page(n).start);
}

#[test]
fn what_a_device_that_cannot_tell_could_write_counts_once_more_when_it_has_left() {
    fn all<const IOMMUFD: bool>() {
        // The last one.
        let (mut setup, _memory) = tracked::<IOMMUFD>(false);
        let everything = (vec![WRITABLE], 0, true);
        setup.space.detach(&setup.device).unwrap();
        assert_eq!(harvest(&setup.space), everything);
        assert_eq!(harvest(&setup.space), (vec![], 0, false));
        // It comes and goes without a harvest.
        setup.space.attach(setup.device.clone()).unwrap();
        setup.space.detach(&setup.device).unwrap();
        assert_eq!(harvest(&setup.space), everything);
        // Unmapped ranges are reported by the unmap or not at all.
        for noting in [true, false] {
            setup.space.attach(setup.device.clone()).unwrap();
            setup.space.detach(&setup.device).unwrap();
            let mut pending = Pending::new(vec![0; 16], WRITABLE, PAGE).unwrap();
            match noting {
                true => setup.space.unmap_noting(WRITABLE, &mut pending).unwrap(),
                false => setup.space.unmap(WRITABLE).unwrap(),
            };
            let shown = setup.space.show(&mut pending).unwrap();
            let right = if noting { vec![WRITABLE] } else { vec![] };
            assert_eq!(shown.runs().collect::<Vec<_>>(), right);
            assert_eq!(harvest(&setup.space), (vec![], 0, false));
            let part = Span::new(0, MIB);
            setup.map(GIB, &_memory, part).unwrap();
        }
        // Nothing is noted while dirty pages are not tracked.
        setup.space.attach(setup.device.clone()).unwrap();
        setup.space.untrack_dirty();
        setup.space.detach(&setup.device).unwrap();
        setup.space.track_dirty(Tracking::default()).unwrap();
        assert_eq!(harvest(&setup.space), (vec![], 0, false));

        // One of two; the other can tell, and goes on.
        let (setup, _memory) = tracked::<IOMMUFD>(true);
        let second = device(false);
        setup.space.attach(second.clone()).unwrap();
        setup.space.detach(&second).unwrap();
        let (runs, _, blind) = harvest(&setup.space);
        assert_eq!((runs, blind), (vec![WRITABLE], true));
        write(&setup, 6);
        assert_eq!(harvest(&setup.space), (vec![page(6)], PAGE, false));
    }
    all::<false>();
    all::<true>();
}

#[test]
fn the_last_device_leaves_what_it_wrote_to_behind() {
    fn all<const IOMMUFD: bool>() {
        let (setup, _memory) = tracked::<IOMMUFD>(true);
        write(&setup, 3);
        write(&setup, 4);
        setup.space.detach(&setup.device).unwrap();
        let right = Span::new(page(3).start, 2 * PAGE);
        assert_eq!(harvest(&setup.space), (vec![right], 2 * PAGE, false));
        assert_eq!(harvest(&setup.space), (vec![], 0, false));
    }
    all::<false>();
    all::<true>();
}

#[test]
fn a_device_that_was_refused_half_way_may_have_written_to_what_was_mapped() {
    fn all<const IOMMUFD: bool>() {
        let mut setup = setup::<IOMMUFD>(None);
        let memory = setup.memory(1 << 40, GIB);
        map(&mut setup, &memory);
        setup.space.track_dirty(Tracking::default()).unwrap();
        // The first mapping was made, the second was not.
        setup.world.lock().unwrap().fail = [1].into();
        setup.space.attach(setup.device.clone()).unwrap_err();
        assert_eq!(harvest(&setup.space), (vec![WRITABLE], 0, true));
        setup.check();
    }
    all::<false>();
    all::<true>();
}

#[test]
fn what_goes_to_another_process_counts_as_written_to() {
    let (setup, _memory) = tracked::<false>(true);
    setup.space.give_up().unwrap();
    assert_eq!(harvest(&setup.space), (vec![WRITABLE], 0, true));
}

#[test]
fn what_was_dirty_stays_so_when_the_kernel_does_not_unmap_it() {
    fn all<const IOMMUFD: bool>() {
        let (setup, _memory) = tracked::<IOMMUFD>(true);
        write(&setup, 3);
        setup.world.lock().unwrap().held.push(page(9));
        setup.space.unmap(WRITABLE).unwrap_err();
        assert_eq!(harvest(&setup.space), (vec![page(3)], PAGE, false));
    }
    all::<false>();
    all::<true>();
}

#[test]
fn what_was_dirty_stays_so_when_a_mapping_is_cut_or_merged() {
    fn all<const IOMMUFD: bool>() {
        let (setup, _memory) = tracked::<IOMMUFD>(true);
        let dirty = [3, 100, 120, 200];
        dirty.into_iter().for_each(|n| write(&setup, n));
        // One of them goes.
        let middle = Span::new(page(90).start, 20 * PAGE);
        let gone = setup.space.unmap_cutting(middle, ALLOWED);
        assert_eq!(gone.unwrap().bytes, 20 * PAGE);
        let rest = vec![page(3), page(120), page(200)];
        assert_eq!(harvest(&setup.space), (rest, 3 * PAGE, false));
    }
    all::<false>();
    all::<true>();

    // A container has few entries: what goes on in each other is mapped anew as one.
    let mut setup = setup::<false>(None);
    setup.device = device(true);
    setup.world.lock().unwrap().entries = 2;
    setup.space.set_merging(ALLOWED);
    setup.space.attach(setup.device.clone()).unwrap();
    setup.space.track_dirty(Tracking::default()).unwrap();
    let memory = setup.memory(1 << 40, GIB);
    for n in 0..2 {
        let part = Span::new(n * MIB, MIB);
        setup.map(GIB + n * MIB, &memory, part).unwrap();
    }
    write(&setup, 7);
    write(&setup, 300);
    setup.map(8 * GIB, &memory, Span::new(0, MIB)).unwrap();
    assert_eq!(setup.pieces().len(), 2);
    let right = (vec![page(7), page(300)], 2 * PAGE, false);
    assert_eq!(harvest(&setup.space), right);
}

#[test]
fn a_container_that_closes_leaves_what_its_groups_could_write_to_behind() {
    let bench = Bench::new(None, GIB);
    let memory = bench.memory(GIB);
    let part = Span::new(0, MIB);
    bench.space.map(GIB, &memory, part, Prot::RW).unwrap();
    bench.space.track_dirty(Tracking::default()).unwrap();
    let groups = [device(true), device(false)];
    for (n, group) in groups.iter().enumerate() {
        let near = node(n as u32);
        bench
            .space
            .attach(Endpoint::from(group.clone()).near(near))
            .unwrap();
    }
    bench.space.detach(&groups[1]).unwrap();
    assert_eq!(bench.spaces().len(), 1);
    assert_eq!(harvest(&bench.space), (vec![WRITABLE], 0, true));
    assert_eq!(harvest(&bench.space), (vec![], 0, false));
    // Also when it was opened for a group that was refused.
    let (behind, part) = (GIB + MIB, Span::new(2 * MIB, MIB));
    bench.space.map(behind, &memory, part, Prot::READ).unwrap();
    bench.world.lock().unwrap().fail = [1].into();
    let refused = bench
        .space
        .attach(Endpoint::from(groups[1].clone()).near(node(1)));
    refused.unwrap_err();
    assert_eq!(bench.spaces().len(), 1);
    assert_eq!(harvest(&bench.space), (vec![WRITABLE], 0, true));
}
