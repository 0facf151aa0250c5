//! The machine that all elements together make: cells and modules with their pools and nodes, and devices with their
//! buses.

use super::value::Set;
use super::{BUSES, Controller, DeviceKind, Domain};
use crate::inspect::guest::{
    BusPlace, ConfigError, Guest, Interface, Monitor, Ram, Remapped, SMALL, added,
};

impl Domain {
    /// The guest, or the reason that there is none.
    pub(super) fn guest(mut self) -> Result<Guest, ConfigError> {
        self.give_devices();
        self.guest.nodes = self.cells.len();
        // `qemuDomainGetMemorySizeAlignment` of libvirt's `src/qemu/qemu_domain.c`.
        let block = if self.blocks { 256 << 20 } else { 1 << 20 };
        let whole = |bytes: u64| bytes.checked_next_multiple_of(block).unwrap_or(bytes);
        self.memory = self.memory.map(whole);
        self.cells
            .iter_mut()
            .for_each(|cell| cell.bytes = whole(cell.bytes));
        self.add();
        if self.cells.is_empty() && self.guest.memory.is_empty() {
            // Without cells, memory devices are a part of all memory; with them, cells are what is left.
            let bytes = self.memory.map(|bytes| bytes.saturating_sub(self.plugged));
            match bytes.filter(|bytes| *bytes > 0) {
                Some(bytes) => {
                    self.cells.push(Ram {
                        bytes,
                        ..Ram::default()
                    });
                    self.cells_shared.push(None);
                }
                None => self
                    .guest
                    .or_named(self.reading, Err(ConfigError::NoMemory))?,
            }
        }
        let begins = self.cells.iter().map(|cell| cell.bytes);
        let begins = begins.fold(self.guest.bytes(), u64::saturating_add);
        self.guest.typed(&self.kind);
        self.guest.remapped = Remapped::of(&self.kind, self.flash, begins, None);
        self.give_memory();
        self.guest.monitor = Monitor::Libvirt;
        Ok(self.guest)
    }

    /// Gives the guest its devices, each with its place.
    fn give_devices(&mut self) {
        for device in std::mem::take(&mut self.devices) {
            let place = self.place(device.bus);
            match (device.kind, device.address) {
                (DeviceKind::Disk, Some(address)) => self.guest.give_disk(address),
                (_, address) => {
                    let iommufd = device.iommufd.unwrap_or(self.iommufd);
                    let given = address.is_some();
                    self.guest.give(iommufd, address);
                    if let Some(last) = self.guest.devices.last_mut().filter(|_| given) {
                        last.place = place;
                    }
                }
            }
        }
    }

    /// Gives the guest its memory: cells first, then modules.
    fn give_memory(&mut self) {
        let modules = std::mem::take(&mut self.modules);
        let cells = std::mem::take(&mut self.cells)
            .into_iter()
            .zip(&self.cells_shared);
        let all: Vec<_> = cells.map(|(ram, shared)| (ram, *shared)).collect();
        let cells = all.into_iter().map(|(mut ram, shared)| {
            ram.pool_bytes = self.pool(&ram.id);
            let cell = ram.id.parse().unwrap_or(0);
            let nodes = self.memnodes.get(&cell).or(self.tune.as_ref());
            let nodes = nodes.cloned().unwrap_or_default();
            (ram.host_nodes, ram.bound) = (nodes.set, nodes.bound);
            (ram, shared)
        });
        let modules = modules.into_iter().map(|mut module| {
            module.ram.pool_bytes = match module.pages {
                Some(bytes) => Some(bytes).filter(|bytes| *bytes > SMALL),
                None => self.pool(&module.cell),
            };
            (module.ram, module.shared)
        });
        let parts: Vec<_> = cells.chain(modules).collect();
        for (mut ram, shared) in parts {
            let memfd = self.source.as_deref() == Some("memfd");
            ram.shared = shared.or(self.shared).unwrap_or(memfd);
            if self.source.as_deref() == Some("file") && ram.pool_bytes.is_none() {
                // `memory_backing_dir` of qemu.conf.
                ram.file = Some("/var/lib/libvirt/qemu/ram".into());
            }
            if ram.bytes == 0 {
                continue;
            }
            ram.asks_for_huge = Some(true);
            if self.immediate || ram.pool_bytes.is_some() {
                ram.prealloc_threads = self.threads.unwrap_or(self.guest.cpus).max(1);
                ram.threads_given = self.threads.is_some();
            }
            self.guest.memory.push(ram);
        }
    }

    /// The root of the bus that a device hangs on.
    fn place(&self, bus: Option<u64>) -> BusPlace {
        let mut bus = bus.unwrap_or(0);
        // As many as there are numbers: a ring ends, too.
        for _ in BUSES {
            match self.controllers.get(&bus) {
                Some(Controller { expander: true, .. }) => return BusPlace::Expander,
                Some(Controller {
                    above: Some(above), ..
                }) if *above != bus => bus = *above,
                None if bus != 0 => return BusPlace::Unknown,
                _ => return BusPlace::Root,
            }
        }
        BusPlace::Unknown
    }

    /// Adds what arguments for QEMU give.
    fn add(&mut self) {
        let arguments = std::mem::take(&mut self.arguments);
        match added(&arguments, self.guest.cpus, self.default_pool) {
            Ok(added) => {
                // Cells have memory of their own.
                match self.cells.is_empty() {
                    true => self.guest.memory = added.memory,
                    false => {
                        for ram in added.memory {
                            self.guest.ignore(&format!("memory object {:?}", ram.id));
                        }
                    }
                }
                self.guest.devices.extend(added.devices);
                self.guest.mediated.extend(added.mediated);
                self.guest.locked |= added.locked;
                self.guest.elsewhere |= added.elsewhere;
                added.unread.iter().for_each(|what| self.guest.lacks(what));
                if let Some(interface) = added.interface {
                    self.guest.give(interface == Interface::Iommufd, None);
                }
                self.guest.ignored.extend(added.ignored);
                self.guest.viommu = self.guest.viommu.take().or(added.viommu);
                self.guest.confidential = self.guest.confidential.take().or(added.confidential);
            }
            Err(error) => {
                let cause = crate::output::sentence(&error);
                self.guest.ignore(&format!("arguments for QEMU ({cause})"));
            }
        }
    }

    /// The pool of a cell: one that names it, else one that names no cell.
    fn pool(&self, cell: &str) -> Option<u64> {
        let cell = cell.parse().unwrap_or(0);
        let named = |(_, cells): &&(u64, Option<Set>)| {
            cells.as_ref().is_some_and(|cells| cells.holds(cell))
        };
        let open = |(_, cells): &&(u64, Option<Set>)| cells.is_none();
        let page = self
            .pages
            .iter()
            .find(named)
            .or(self.pages.iter().find(open));
        match page {
            // Small pages are those of no pool.
            Some((bytes, _)) => Some(*bytes).filter(|bytes| *bytes > SMALL),
            None => (self.huge && self.pages.is_empty()).then_some(self.default_pool),
        }
    }
}
