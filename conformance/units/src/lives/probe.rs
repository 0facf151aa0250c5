//! Devices at and around all edges, in both directions, and the faults of their unit.

use anyhow::{Context as _, ensure};
use ioas::FaultPlace;
use iommu::{Fault, Unit as _};
use iopt::walk::Access;
use qtest::{
    edu::Edu,
    nvme::{Ring, Status},
};
use runs::{Iova, Span};
use shadow::{PAGE, Page};

use super::world::{HOME, World, home_at, iova_of, pages, pages_of};
use crate::{DEVICES, NVME, SERIAL, id, qemu::Denied};

/// Bytes of an access.
const BYTES: u64 = 64;
/// Pages that are looked at after a step, beside its edges: any.
const ANYWHERE: usize = 2;
/// Edges that are looked at after a step.
const EDGES: usize = 8;

/// One command of so many is made where nothing is mapped.
const FLOODS: u64 = 8;

/// Faults of which some may be lost.
const FLOOD: u64 = 64;

/// Expectation of a device at a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Find {
    /// The device is in no address space.
    Nothing,
    /// Nothing is mapped; where the page has led before.
    Hole(Option<u64>),
    /// Memory at this address, for writing or for reading only.
    There(u64, bool),
}

impl World<'_> {
    /// Devices of an address space look at both sides of all edges of `changed`, and elsewhere.
    pub(super) fn probe(&mut self, number: usize, changed: &[Span<Iova>]) -> anyhow::Result<()> {
        let mut looked = Vec::new();
        for range in changed {
            let inside = pages_of(*range);
            // First the pages inside, which were reached before.
            looked.extend([inside.start, inside.end - 1, inside.end]);
            looked.extend(inside.start.checked_sub(1));
        }
        self.random.shuffle(&mut looked);
        looked.truncate(EDGES);
        for page in looked {
            let device = self.regular(number, page);
            self.look(device, number, page)?;
        }
        for _ in 0..ANYWHERE {
            let device = self.random.usize(..DEVICES.len());
            let page = self.random.usize(..pages());
            self.look(device, number, page)?;
        }
        Ok(())
    }

    /// Devices of an address space come to pages at both ends of ranges that are about to change, so that their unit
    /// has them in its caches. Those that look at the edges afterwards are the same.
    pub(super) fn warm(&mut self, number: usize, changing: &[Span<Iova>]) -> anyhow::Result<()> {
        for range in changing.iter().take(EDGES / 2) {
            let inside = pages_of(*range);
            for page in [inside.start, inside.end - 1] {
                let device = self.regular(number, page);
                self.look(device, number, page)?;
            }
        }
        Ok(())
    }

    /// The device of an address space that looks at a page, always the same while devices stay.
    fn regular(&mut self, number: usize, page: usize) -> usize {
        let mine = |device: &usize| self.places[*device] == Some(number);
        let mine: Vec<usize> = (0..DEVICES.len()).filter(mine).collect();
        match mine.len() {
            0 => self.random.usize(..DEVICES.len()),
            count => mine[page % count],
        }
    }

    /// A device looks at a page of its address space, or of `number` if it has none.
    fn look(&mut self, device: usize, number: usize, page: usize) -> anyhow::Result<()> {
        let number = self.places[device].unwrap_or(number);
        if page >= pages() || self.spaces[number].stale[page] {
            return Ok(());
        }
        let find = self.find(device, number, page);
        let what = || format!("device {device} at page {page} of space {number}: {find:x?}");
        if device == NVME {
            return self.command(number, page, find).with_context(what);
        }
        let offset = if self.random.bool() { 0 } else { PAGE - BYTES };
        self.read(device, page, offset, find).with_context(what)?;
        self.write(device, number, page, offset, find)
            .with_context(what)
    }

    fn find(&self, device: usize, number: usize, page: usize) -> Find {
        let space = &self.spaces[number];
        match space.shadow[page].filter(Page::is_there) {
            _ if self.places[device].is_none() => Find::Nothing,
            Some(there) => Find::There(self.address(there.memory), there.write),
            None => Find::Hole(space.led[page].map(|memory| self.address(memory))),
        }
    }

    /// An `edu` reads, and shows what it has read where every device can write.
    fn read(&mut self, device: usize, page: usize, offset: u64, find: Find) -> anyhow::Result<()> {
        let machine = self.rig.machine();
        let (wanted, before) = (self.rig.bytes(BYTES), self.rig.bytes(BYTES));
        if let Find::There(address, _) = find {
            machine.write(address + offset, &wanted)?;
        }
        let home = home_at(self.rig);
        machine.write(home, &before)?;
        let iova = iova_of(page) + offset;
        self.edu(device)?.read(iova, 0, BYTES)?;
        let access = match find {
            Find::There(..) => None,
            _ => Some(Access::Read),
        };
        self.faults(device, iova, access, find, false)?;
        if find == Find::Nothing {
            return Ok(());
        }
        self.edu(device)?.write(HOME, 0, BYTES)?;
        self.faults(device, HOME, None, Find::There(home, true), false)?;
        let mut found = vec![0; BYTES as usize];
        machine.read(home, &mut found)?;
        ensure!(found != before, "bytes that were read have not arrived");
        ensure!(
            access.is_some() || found == wanted,
            "{found:x?} was read, not {wanted:x?}"
        );
        self.counts.bytes += 2 * BYTES;
        self.rig.add_copies(1);
        Ok(())
    }

    /// An `edu` writes what it has read where every device can read.
    fn write(
        &mut self,
        device: usize,
        number: usize,
        page: usize,
        offset: u64,
        find: Find,
    ) -> anyhow::Result<()> {
        let machine = self.rig.machine();
        let (wanted, before) = (self.rig.bytes(BYTES), self.rig.bytes(BYTES));
        let home = home_at(self.rig);
        machine.write(home, &wanted)?;
        if find != Find::Nothing {
            self.edu(device)?.read(HOME, 0, BYTES)?;
            self.faults(device, HOME, None, Find::There(home, true), false)?;
        }
        let there = match find {
            Find::Nothing => None,
            Find::Hole(led) => led,
            Find::There(address, _) => Some(address),
        };
        if let Some(address) = there {
            machine.write(address + offset, &before)?;
        }
        let iova = iova_of(page) + offset;
        self.edu(device)?.write(iova, 0, BYTES)?;
        let may = matches!(find, Find::There(_, true));
        // The read before has put the leaf into the unit's cache.
        let access = (!may).then_some(Access::Write);
        self.faults(device, iova, access, find, true)?;
        if let Some(address) = there {
            let mut found = vec![0; BYTES as usize];
            machine.read(address + offset, &mut found)?;
            let expected = if may { &wanted } else { &before };
            ensure!(
                found == *expected,
                "{found:x?} is there after a write, not {expected:x?}"
            );
        }
        self.spaces[number].written[page] |= may;
        self.counts.bytes += 2 * BYTES;
        self.rig.add_copies(1);
        Ok(())
    }

    /// The NVMe controller writes who it is: a command from one ring, an answer to the other, and a page of data.
    fn command(&mut self, number: usize, page: usize, find: Find) -> anyhow::Result<()> {
        let machine = self.rig.machine();
        let home = home_at(self.rig);
        // It writes in words, each of which faults where nothing is mapped.
        let floods = matches!(find, Find::Hole(_)) && self.random.u64(..FLOODS) > 0;
        if find == Find::Nothing || floods {
            return Ok(());
        }
        if self.nvme.is_none() {
            let ring = |nth: u64| Ring {
                address: home + nth * PAGE,
                device: HOME + nth * PAGE,
            };
            for nth in [1, 2] {
                machine.memset(ring(nth).address, PAGE, 0)?;
            }
            self.nvme = Some(self.rig.nvme(ring(1), ring(2))?);
        }
        let there = match find {
            Find::Nothing => None,
            Find::Hole(led) => led,
            Find::There(address, _) => Some(address),
        };
        if let Some(address) = there {
            machine.memset(address, PAGE, 0xee)?;
        }
        let iova = iova_of(page);
        let nvme = self.nvme.as_mut().context("no controller")?;
        let status = nvme.identify(iova)?;
        ensure!(status == Status::SUCCESS, "{status:?}");
        let may = matches!(find, Find::There(_, true));
        self.faults(NVME, iova, (!may).then_some(Access::Write), find, true)?;
        if let Some(address) = there {
            let mut found = [0; SERIAL.len()];
            machine.read(address + 4, &mut found)?;
            ensure!(
                (found == *SERIAL) == may,
                "{found:x?} is there after a command"
            );
        }
        self.spaces[number].written[page] |= may;
        self.counts.bytes += PAGE;
        self.rig.add_copies(1);
        Ok(())
    }

    fn edu(&self, device: usize) -> anyhow::Result<Edu<'_>> {
        self.rig.edu(device)
    }

    /// The unit has recorded that it has blocked `access`, as far as QEMU tells it, and nothing else.
    fn faults(
        &mut self,
        device: usize,
        iova: u64,
        access: Option<Access>,
        find: Find,
        cached: bool,
    ) -> anyhow::Result<()> {
        let mut faults: Vec<Fault> = Vec::new();
        let lost = self
            .iommu
            .unit()
            .drain_faults(&mut |fault| faults.push(fault));
        // A controller that writes a page in words has a fault for each, until the log is full.
        ensure!(
            lost == 0 || device == NVME && faults.len() as u64 >= FLOOD,
            "{lost} faults were lost beside {}",
            faults.len()
        );
        let tells = self.rig.unit().tells();
        let told = match find {
            Find::Nothing => tells.strangers,
            Find::Hole(_) => true,
            Find::There(..) => match tells.denied {
                Denied::Recorded => true,
                Denied::RecordedUncached => !cached,
            },
        };
        let Some(access) = access else {
            ensure!(faults.is_empty(), "{faults:x?}");
            return Ok(());
        };
        ensure!(
            !told || !faults.is_empty(),
            "no fault for {access} of {iova:#x}"
        );
        for fault in &faults {
            ensure!(
                fault.device == id(device)
                    && (!tells.address
                        || find == Find::Nothing
                        || fault.iova & !0xfff == iova & !0xfff)
                    && (!tells.access || find == Find::Nothing || fault.access == Some(access)),
                "{access} of {iova:#x}: {fault}"
            );
        }
        for fault in &faults {
            self.locate(device, fault, find)?;
        }
        self.counts.faults += faults.len() as u64;
        Ok(())
    }

    /// The address space of the device, and no other, knows the fault and the areas at it.
    fn locate(&self, device: usize, fault: &Fault, find: Find) -> anyhow::Result<()> {
        for (number, space) in self.spaces.iter().enumerate() {
            let located = space.ioas.locate(*fault);
            let here = self.places[device] == Some(number);
            ensure!(located.is_some() == here, "space {number} has {located:?}");
            let Some(located) = located.filter(|_| self.rig.unit().tells().address) else {
                continue;
            };
            let right = match (&located.place, find) {
                (FaultPlace::Area(area), Find::There(..)) => area.range().contains(fault.iova),
                // Taken out or released.
                (FaultPlace::Area(area), _) => area.is_out() || area.is_released(),
                (FaultPlace::Hole { .. }, find) => !matches!(find, Find::There(..)),
            };
            ensure!(right, "{located}");
        }
        Ok(())
    }
}
