//! Tables by node, against a plain model of what iommufd lets a device be attached to.
//!
//! Source of the model: Linux `iommufd.rst`; a group has one page table, a table is for units of the
//! kind of the device that it was allocated for, and one that tracks takes no device that does not.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::vec;

use super::*;
use crate::space::placement::Placement;

const IOAS: IoasId = IoasId(1);

#[derive(Default)]
struct Model {
    next: u32,
    /// Kind of unit, tracks, and whether that is on.
    tables: BTreeMap<u32, (u32, bool, bool)>,
    /// Page table of each group, and the number of its devices attached to it.
    groups: BTreeMap<u32, (PageTable, u32)>,
    /// Attaching this device fails with this number.
    fails: Option<(u32, i32)>,
    /// `(device, table)` of each table that was made.
    made: Vec<(u32, u32)>,
}

type World = RefCell<Model>;

#[derive(Clone, Copy)]
struct Device<'a> {
    world: &'a World,
    id: u32,
    group: u32,
    kind: u32,
    tracks: bool,
    near: Option<NodeId>,
}

fn refused<T>(errno: i32) -> Result<T> {
    let operation = "attach";
    Err(KernelError::Refused { operation, errno })
}

impl Attachable for Device<'_> {
    fn id(&self) -> DevId {
        DevId(self.id)
    }

    fn attach(&self, to: PageTable) -> Result<()> {
        let world = &mut *self.world.borrow_mut();
        if let Some((_, errno)) = world.fails.filter(|(id, _)| *id == self.id) {
            return refused(errno);
        }
        if let PageTable::Hwpt(HwptId(table)) = to {
            let (kind, tracks, _) = world.tables[&table];
            if kind != self.kind || tracks && !self.tracks {
                return refused(Errno::EINVAL.0);
            }
        }
        let (there, count) = world.groups.entry(self.group).or_insert((to, 0));
        if *there != to {
            return refused(Errno::EINVAL.0);
        }
        *count += 1;
        Ok(())
    }

    fn detach(&self) -> Result<()> {
        let world = &mut *self.world.borrow_mut();
        match world.groups.get_mut(&self.group) {
            Some((_, count)) if *count > 1 => *count -= 1,
            _ => drop(world.groups.remove(&self.group)),
        }
        Ok(())
    }
}

impl MakeTables for &World {
    fn make(&self, device: DevId, tracks: bool) -> Result<HwptId> {
        let world = &mut *self.borrow_mut();
        world.next += 1;
        let kind = device.0 / 100;
        world.tables.insert(world.next, (kind, tracks, false));
        world.made.push((device.0, world.next));
        Ok(HwptId(world.next))
    }

    fn track(&self, table: HwptId, on: bool) -> Result<()> {
        if let Some((_, _, tracking)) = self.borrow_mut().tables.get_mut(&table.0) {
            *tracking = on;
        }
        Ok(())
    }

    fn remove(&self, table: HwptId) {
        let world = &mut *self.borrow_mut();
        let used = |(to, _): &(PageTable, u32)| *to == PageTable::Hwpt(table);
        assert!(!world.groups.values().any(used), "EBUSY");
        assert!(world.tables.remove(&table.0).is_some(), "ENOENT");
    }
}

/// A device of a group of its own, which tracks nothing.
fn device(world: &World, id: u32, node: Option<u32>) -> Device<'_> {
    Device {
        world,
        id,
        group: id,
        kind: id / 100,
        tracks: false,
        near: node.map(NodeId),
    }
}

fn enter(tables: &mut Tables, device: Device<'_>, placement: Placement) -> Result<()> {
    let with = Entering {
        dirty: true,
        near: device.near,
        placement,
    };
    tables.enter(&device.world, &device, IOAS, device.tracks, with)
}

fn leave(tables: &mut Tables, device: Device<'_>) {
    device.detach().unwrap();
    tables.left(&device.world, device.id());
}

/// Table, node and devices of each place.
fn shown(tables: &Tables) -> Vec<(Option<u32>, Option<u32>, Vec<u32>)> {
    let places = tables.places().into_iter();
    places
        .map(|place| {
            let devices = place.devices.iter().map(|device| device.0).collect();
            let number = |table: HwptId| table.0;
            (
                place.table.map(number),
                place.node.map(|node| node.0),
                devices,
            )
        })
        .collect()
}

#[test]
fn the_kernel_shares_by_itself_unless_tables_are_by_node() {
    let world = World::default();
    let mut tables = Tables::default();
    for (id, node) in [(1, 0), (2, 1)] {
        enter(
            &mut tables,
            device(&world, id, Some(node)),
            Placement::Shared,
        )
        .unwrap();
    }
    assert_eq!(shown(&tables), [(None, Some(0), vec![1, 2])]);
    assert!(world.borrow().made.is_empty() && tables.is_blind());
}

#[test]
fn each_node_has_a_table_that_was_made_for_a_device_of_it_and_goes_with_the_last() {
    let world = World::default();
    let mut tables = Tables::default();
    let nodes = [Some(1), Some(0), None, Some(1), Some(0), None];
    let devices: Vec<_> = (1..)
        .zip(nodes)
        .map(|(id, node)| device(&world, id, node))
        .collect();
    for device in &devices {
        enter(&mut tables, *device, Placement::PerNode).unwrap();
    }
    let expected = [
        (Some(1), Some(1), vec![1, 4]),
        (Some(2), Some(0), vec![2, 5]),
        (Some(3), None, vec![3, 6]),
    ];
    assert_eq!(shown(&tables), expected);
    assert_eq!(world.borrow().made, [(1, 1), (2, 2), (3, 3)]);
    // The device that a table was made for leaves; a later device joins all the same.
    leave(&mut tables, devices[0]);
    assert_eq!(shown(&tables)[2], (Some(1), Some(1), vec![4]));
    enter(&mut tables, devices[0], Placement::PerNode).unwrap();
    assert_eq!(world.borrow().tables.len(), 3);
    leave(&mut tables, devices[3]);
    leave(&mut tables, devices[0]);
    assert_eq!(
        world.borrow().tables.keys().copied().collect::<Vec<_>>(),
        [2, 3]
    );
    for at in [1, 2, 4, 5] {
        leave(&mut tables, devices[at]);
    }
    assert!(world.borrow().tables.is_empty() && tables.places().is_empty());
}

#[test]
fn units_of_another_kind_and_devices_that_track_have_tables_of_their_own() {
    let world = World::default();
    let mut tables = Tables::default();
    let tracks = |id, node| Device {
        tracks: true,
        ..device(&world, id, Some(node))
    };
    for device in [
        device(&world, 1, Some(0)),
        device(&world, 101, Some(0)),
        tracks(2, 0),
        tracks(3, 1),
        tracks(4, 0),
    ] {
        enter(&mut tables, device, Placement::PerNode).unwrap();
    }
    let expected = [
        (Some(1), Some(0), vec![1]),
        (Some(2), Some(0), vec![101]),
        (Some(3), Some(0), vec![2, 4]),
        (Some(4), Some(1), vec![3]),
    ];
    assert_eq!(shown(&tables), expected);
    assert_eq!(tables.tracked().collect::<Vec<_>>(), [HwptId(3), HwptId(4)]);
    // It is on from the beginning where it can be.
    let on = |table| world.borrow().tables[&table].2;
    assert_eq!([1, 2, 3, 4].map(on), [false, false, true, true]);
    // Without nodes those that track share one.
    let mut shared = Tables::default();
    enter(&mut shared, tracks(5, 0), Placement::Shared).unwrap();
    enter(&mut shared, tracks(6, 1), Placement::Shared).unwrap();
    assert_eq!(shown(&shared), [(Some(5), Some(0), vec![5, 6])]);
    assert!(!shared.is_blind());
}

#[test]
fn a_group_is_never_divided() {
    let world = World::default();
    let mut tables = Tables::default();
    let of_group = |id, node| Device {
        group: 7,
        ..device(&world, id, Some(node))
    };
    enter(&mut tables, of_group(1, 0), Placement::PerNode).unwrap();
    enter(&mut tables, of_group(2, 1), Placement::PerNode).unwrap();
    assert_eq!(shown(&tables), [(Some(1), Some(0), vec![1, 2])]);
    assert_eq!(
        world.borrow().tables.len(),
        1,
        "the one that was tried is gone"
    );
    leave(&mut tables, of_group(1, 0));
    // The remaining device says where they are.
    assert_eq!(shown(&tables), [(Some(1), Some(1), vec![2])]);
}

#[test]
fn a_group_in_a_table_of_the_kernels_own_is_not_divided_by_a_policy_that_comes_later() {
    let world = World::default();
    let mut tables = Tables::default();
    let of_group = |id, node| Device {
        group: 7,
        ..device(&world, id, Some(node))
    };
    enter(&mut tables, of_group(1, 0), Placement::Shared).unwrap();
    enter(&mut tables, of_group(2, 1), Placement::PerNode).unwrap();
    // Another group goes by the policy.
    enter(&mut tables, device(&world, 3, Some(1)), Placement::PerNode).unwrap();
    let made = Some(world.borrow().next);
    assert_eq!(
        shown(&tables),
        [(None, Some(0), vec![1, 2]), (made, Some(1), vec![3])]
    );
    assert_eq!(world.borrow().tables.len(), 1);
}

#[test]
fn a_device_that_is_not_attached_leaves_nothing_behind() {
    let world = World::default();
    let mut tables = Tables::default();
    enter(&mut tables, device(&world, 1, Some(0)), Placement::PerNode).unwrap();
    for errno in [Errno::EBUSY, Errno::EINVAL] {
        for (id, node) in [(2, 1), (3, 0)] {
            world.borrow_mut().fails = Some((id, errno.0));
            let refused = enter(
                &mut tables,
                device(&world, id, Some(node)),
                Placement::PerNode,
            );
            let expected = errno.0;
            assert!(
                matches!(refused, Err(KernelError::Refused { errno, .. }) if errno == expected),
                "{refused:?}"
            );
            assert_eq!(shown(&tables), [(Some(1), Some(0), vec![1])]);
            assert_eq!(world.borrow().tables.len(), 1);
        }
    }
}
