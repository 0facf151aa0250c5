//! Choice of the page table that a device of an address space uses.
//!
//! The kernel makes a table for an address space by itself, on the node of the first device that comes,
//! and has all devices share it that can. A table that is made on purpose lies on the node of the device
//! that it is made for. One is made
//!
//! - for devices that tell what they write to, as the kernel's own do not keep that;
//! - under a [`Placement`] that divides by node, for the devices of each node.
//!
//! It goes with its last device. All tables map what the address space maps: pinned and charged once.
//! A group has one table: a device of which another one of its group is attached already goes where
//! that one is, whatever node it says.

use std::vec::Vec;

use iommu::NodeId;

use super::{Attachable, DevId, HwptId, IoasId, Iommufd};
use crate::errno::Errno;
use crate::kernel::vfio::PageTable;
use crate::kernel::{Entering, KernelError, Result};

/// Page tables of an address space, as the kernel makes them on request.
pub(super) trait MakeTables {
    /// A table for devices like this one; see [`Iommufd::alloc_hwpt`].
    fn make(&self, device: DevId, tracks: bool) -> Result<HwptId>;

    /// Starts or stops tracking.
    fn track(&self, table: HwptId, on: bool) -> Result<()>;

    /// Removes a table that no device uses.
    fn remove(&self, table: HwptId);
}

impl MakeTables for (&Iommufd, IoasId) {
    fn make(&self, device: DevId, tracks: bool) -> Result<HwptId> {
        self.0.alloc_hwpt(device, self.1, tracks)
    }

    fn track(&self, table: HwptId, on: bool) -> Result<()> {
        self.0.set_dirty_tracking(table, on)
    }

    fn remove(&self, table: HwptId) {
        let _ = self.0.destroy_hwpt(table);
    }
}

/// A page table of an address space, and its devices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct TablePlace {
    /// Its number; `None`: those that the kernel has made by itself.
    pub(super) table: Option<HwptId>,
    /// The node of its devices: of the first of which one is known. One that was made on purpose lies
    /// there, if the node has memory.
    pub(super) node: Option<NodeId>,
    /// It keeps what devices write to.
    pub(super) tracks: bool,
    /// Its devices.
    pub(super) devices: Vec<DevId>,
}

/// A device, and where it is.
#[derive(Debug)]
struct Member {
    device: DevId,
    near: Option<NodeId>,
    table: Option<HwptId>,
    tracks: bool,
}

/// The devices of an address space with their page tables.
#[derive(Debug, Default)]
pub(super) struct Tables(Vec<Member>);

impl Tables {
    /// The page tables, in the order in which devices came to them.
    pub(super) fn places(&self) -> Vec<TablePlace> {
        let mut places: Vec<TablePlace> = Vec::new();
        for member in &self.0 {
            match places.iter_mut().find(|place| place.table == member.table) {
                Some(place) => {
                    place.node = place.node.or(member.near);
                    place.devices.push(member.device);
                }
                None => places.push(TablePlace {
                    table: member.table,
                    node: member.near,
                    tracks: member.tracks,
                    devices: Vec::from([member.device]),
                }),
            }
        }
        places
    }

    /// Page tables that track dirty pages.
    pub(super) fn tracked(&self) -> impl Iterator<Item = HwptId> {
        let places = self.places().into_iter().filter(|place| place.tracks);
        places.filter_map(|place| place.table)
    }

    /// True when some device writes without leaving a trace.
    pub(super) fn is_blind(&self) -> bool {
        self.0.iter().any(|member| !member.tracks)
    }

    /// Attaches a device of the address space `ioas` to a page table that suits it, or to a new one.
    /// With `tracks` its unit can keep what it writes to.
    pub(super) fn enter<D: Attachable>(
        &mut self,
        kernel: &impl MakeTables,
        device: &D,
        ioas: IoasId,
        tracks: bool,
        with: Entering,
    ) -> Result<()> {
        let (table, tracks) = if tracks || with.placement.divides() {
            self.enter_made(kernel, device, ioas, tracks, with)?
        } else {
            device.attach(PageTable::Ioas(ioas))?;
            (None, false)
        };
        self.0.push(Member {
            device: device.id(),
            near: with.near,
            table,
            tracks,
        });
        Ok(())
    }

    /// The table to which it was attached, and whether that tracks.
    fn enter_made<D: Attachable>(
        &self,
        kernel: &impl MakeTables,
        device: &D,
        ioas: IoasId,
        tracks: bool,
        with: Entering,
    ) -> Result<(Option<HwptId>, bool)> {
        let suits = |place: &TablePlace| {
            place.tracks == tracks && with.placement.joins(place.node, with.near)
        };
        let made = |place: &TablePlace| Some((place.table?, place.tracks));
        let (suitable, others): (Vec<_>, Vec<_>) = self.places().into_iter().partition(suits);
        if let Some((table, tracks)) = first_that_takes(device, suitable.iter().filter_map(made))? {
            return Ok((Some(table), tracks));
        }
        let table = kernel.make(device.id(), tracks)?;
        let tracked = if tracks && with.dirty {
            kernel.track(table, true)
        } else {
            Ok(())
        };
        let Err(cause) = tracked.and_then(|()| device.attach(PageTable::Hwpt(table))) else {
            return Ok((Some(table), tracks));
        };
        kernel.remove(table);
        // Its group may be elsewhere already, and is never divided.
        if !is_einval(&cause) {
            return Err(cause);
        }
        match first_that_takes(device, others.iter().filter_map(made))? {
            Some((table, tracks)) => Ok((Some(table), tracks)),
            // The one of the kernel's own that its group has, or none.
            None if self.0.iter().any(|member| member.table.is_none()) => {
                device.attach(PageTable::Ioas(ioas)).map_err(|_| cause)?;
                Ok((None, false))
            }
            None => Err(cause),
        }
    }

    /// A device has been detached: a table that was made for it and has no other goes.
    pub(super) fn left(&mut self, kernel: &impl MakeTables, device: DevId) {
        let Some(place) = self.0.iter().position(|member| member.device == device) else {
            return;
        };
        let left = self.0.remove(place).table;
        let used = self.0.iter().any(|member| member.table == left);
        if let Some(table) = left.filter(|_| !used) {
            kernel.remove(table);
        }
    }

    /// A device comes with a table of the process before.
    pub(super) fn taken_over(&mut self, device: DevId) {
        self.0.push(Member {
            device,
            near: None,
            table: None,
            tracks: false,
        });
    }
}

/// Attaches a device to the first of these tables that is for units of its kind, and open to its group.
fn first_that_takes<D: Attachable>(
    device: &D,
    tables: impl Iterator<Item = (HwptId, bool)>,
) -> Result<Option<(HwptId, bool)>> {
    for (table, tracks) in tables {
        match device.attach(PageTable::Hwpt(table)) {
            Ok(()) => return Ok(Some((table, tracks))),
            Err(cause) if is_einval(&cause) => {}
            Err(cause) => return Err(cause),
        }
    }
    Ok(None)
}

/// `EINVAL`: a table for another kind of unit, or one that the group does not have.
fn is_einval(error: &KernelError) -> bool {
    matches!(error, KernelError::Refused { errno, .. } if Errno(*errno) == Errno::EINVAL)
}

#[cfg(test)]
mod tests;
