//! The back end over the `VfioOps` of the crate `vfio-ioctls`, whose calls go to the plain model of a container.

#![allow(
    unsafe_code,
    reason = "the trait is unsafe; the model follows no address"
)]

use std::any::Any;
use std::path::Path;
use std::sync::{Arc, Mutex};

use ioas::vfio::VfioOpsMapper;
use ioas::{Capability, Errno, Ioas, KernelError, Ledger, MapError, MapSource, Memory, Profile};
use iopt::Prot;
use runs::{Iova, Span};
use vfio_ioctls::{VfioDevice, VfioError, VfioOps};
use vmm_sys_util::errno::Error as Number;

use crate::plain_kernel::{Address, Device, Fake, PAGE, World};

/// `VfioContainer` over the model.
struct Container(Arc<Mutex<World>>);

impl VfioOps for Container {
    unsafe fn vfio_dma_map(&self, iova: u64, size: usize, at: *mut u8) -> vfio_ioctls::Result<()> {
        let source = MapSource::Address(at as u64);
        let mut world = self.0.lock().unwrap();
        let mapped = world.map(0, iova, size as u64, source, Prot::RW);
        mapped.map_err(|errno| VfioError::IommuDmaMap(Number::new(errno.0)))
    }

    fn vfio_dma_unmap(&self, iova: u64, size: usize) -> vfio_ioctls::Result<()> {
        let unmapped = self.0.lock().unwrap().unmap(0, iova, size as u64);
        match unmapped.map_err(|errno| VfioError::IommuDmaUnmap(Number::new(errno.0)))? {
            bytes if bytes == size as u64 => Ok(()),
            _ => Err(VfioError::InvalidDmaUnmapSize),
        }
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// A monitor's type around a `VfioDevice`.
struct Opened;

struct Monitor {
    world: Arc<Mutex<World>>,
    space: Ioas,
    ledger: Arc<Ledger>,
    memory: Arc<Memory>,
    device: Arc<Opened>,
}

const ADDRESS: u64 = 1 << 40;

fn monitor(limit: u64) -> Monitor {
    let world = World::new(Profile::Type1);
    world.lock().unwrap().spaces.push(Address::default());
    let mapper = VfioOpsMapper::<Opened>::new(Arc::new(Container(world.clone())));
    let ledger = Ledger::new("mm->locked_vm", Some(limit), 0);
    let (len, address, file) = (64 * PAGE, Some(ADDRESS), None);
    let memory = Memory::new(Arc::new(Fake { len, address, file }), &ledger);
    Monitor {
        space: Ioas::over_mapper(mapper),
        device: Arc::new(Opened),
        world,
        ledger,
        memory,
    }
}

impl Monitor {
    /// `VfioDevice::new` brings the group in, then the address space has it.
    fn open(&self) {
        let attached = self.world.lock().unwrap().attach(0, &Device::default());
        attached.unwrap();
        self.space.attach(self.device.clone()).unwrap();
    }

    fn drop_device(&self) {
        let left = self.world.lock().unwrap().detach(0, &Device::default());
        left.unwrap();
    }

    fn map(&self, page: u64, from: u64, pages: u64) -> Result<(), MapError> {
        let part = Span::new(from * PAGE, pages * PAGE);
        let at = (1 << 32) + page * PAGE;
        self.space.map(at, &self.memory, part, Prot::RW)
    }

    fn unmap(&self, page: u64, pages: u64) -> Result<u64, ioas::UnmapError> {
        let range = Span::new((1 << 32) + page * PAGE, pages * PAGE);
        self.space.unmap(range).map(|unmapped| unmapped.bytes)
    }

    /// The model maps what the address space believes, with the memory of its areas, and charges as much.
    fn check(&self) {
        let world = self.world.lock().unwrap();
        let mappings = world.spaces[0].mappings.iter();
        let there: Vec<Span<Iova>> = mappings
            .map(|(start, mapping)| Span::new(*start, mapping.len))
            .collect();
        assert_eq!(there, self.space.kernel_mappings().unwrap());
        assert_eq!(world.locked(), self.ledger.in_use());
        for area in self.space.areas() {
            for at in (0..area.range().len).step_by(PAGE as usize) {
                let found = world.translate(0, area.range().start + at);
                assert_eq!(found, Some(ADDRESS + area.part().start + at));
            }
        }
    }
}

/// A container that has lost its groups has no mappings any more, and the crate reports fewer bytes than were mapped.
#[test]
fn a_mapping_that_the_kernel_has_dropped_is_unmapped() {
    let monitor = monitor(64 * PAGE);
    monitor.open();
    monitor.map(0, 0, 4).unwrap();
    monitor.world.lock().unwrap().spaces[0].mappings.clear();
    monitor.unmap(0, 4).unwrap();
    assert_eq!(monitor.ledger.in_use(), 0);
    monitor.check();
}

#[test]
fn a_device_of_the_crate_opens_only_over_its_own_types() {
    let foreign = Arc::new(Container(World::new(Profile::Type1)));
    let path = Path::new("/sys/bus/pci/devices/0000:00:00.0");
    let opened = VfioDevice::new(path, foreign, false);
    assert!(matches!(opened.err(), Some(VfioError::DowncastVfioOps)));
}

#[test]
fn what_a_monitor_maps_is_mapped_by_the_crate_within_the_limit() {
    let monitor = monitor(16 * PAGE);
    monitor.map(0, 0, 4).unwrap();
    monitor.map(4, 4, 4).unwrap();
    assert_eq!(monitor.world.lock().unwrap().asked, 0, "no device yet");
    monitor.open();
    monitor.map(20, 2, 3).unwrap();
    monitor.check();
    // Both areas that were there first are one mapping, and the gap behind them is no error.
    assert_eq!(monitor.space.kernel_mappings().unwrap().len(), 2);

    let asked = monitor.world.lock().unwrap().asked;
    let refused = monitor.map(40, 0, 6).unwrap_err();
    let MapError::OverLimit(over) = refused else {
        panic!("{refused}");
    };
    assert_eq!((over.needed, over.in_use), (6 * PAGE, 11 * PAGE));
    let overlap = monitor.map(21, 0, 1).unwrap_err();
    assert!(matches!(overlap, MapError::Overlap { .. }), "{overlap}");
    assert_eq!(
        monitor.world.lock().unwrap().asked,
        asked,
        "the kernel was not asked"
    );

    // A range of several mappings with a gap between.
    assert_eq!(monitor.unmap(0, 23).unwrap(), 11 * PAGE);
    monitor.check();
    monitor.space.detach(&monitor.device).unwrap();
    monitor.space.close().unwrap();
    assert_eq!(monitor.ledger.in_use(), 0);
}

#[test]
fn what_the_crate_has_no_call_for_is_refused_by_name() {
    let monitor = monitor(u64::MAX);
    monitor.open();
    let part = Span::new(0, PAGE);
    let read = monitor
        .space
        .map(1 << 32, &monitor.memory, part, Prot::READ);
    assert!(matches!(read, Err(MapError::Prot { prot: Prot::READ })));
    monitor.check();
    // The pages that cannot be mapped are known when the kernel says so.
    let at = 0xfee0_0000;
    let msi = monitor.space.map(at, &monitor.memory, part, Prot::RW);
    let Err(MapError::Kernel(cause)) = msi else {
        panic!("{msi:?}");
    };
    let cause = cause.downcast_ref::<KernelError>();
    assert!(matches!(cause, Some(KernelError::Refused { errno, .. }) if *errno == Errno::EINVAL.0));
    monitor
        .world
        .lock()
        .unwrap()
        .bad
        .push(Span::new(ADDRESS, PAGE));
    assert!(matches!(monitor.map(0, 0, 1), Err(MapError::Pin(_))));
    let missing: Vec<_> = monitor.space.capabilities().missing().collect();
    assert!(missing.contains(&Capability::UnmapPart), "{missing:?}");
    monitor.map(0, 1, 1).unwrap();
    let refused = monitor.space.give_up().unwrap_err();
    assert!(matches!(refused, KernelError::Refused { errno, .. } if errno == Errno::EOPNOTSUPP.0));
}

/// It maps nothing, and says so without a number.
struct Refusing;

impl VfioOps for Refusing {
    unsafe fn vfio_dma_map(&self, _: u64, _: usize, _: *mut u8) -> vfio_ioctls::Result<()> {
        Err(VfioError::InvalidPath)
    }
}

#[test]
fn an_error_without_a_number_keeps_its_cause() {
    let Monitor { memory, device, .. } = monitor(u64::MAX);
    let mapper = VfioOpsMapper::<Opened>::new(Arc::new(Refusing));
    let space = Ioas::over_mapper(mapper);
    space.attach(device).unwrap();
    let refused = space.map(1 << 32, &memory, Span::new(0, PAGE), Prot::RW);
    let Err(MapError::Kernel(cause)) = refused else {
        panic!("{refused:?}");
    };
    let Some(KernelError::Mapper(cause)) = cause.downcast_ref() else {
        panic!("{cause}");
    };
    let cause = cause.downcast_ref();
    assert!(matches!(cause, Some(VfioError::InvalidPath)));
    assert_eq!(memory.ledger().in_use(), 0);
}

#[test]
fn a_device_that_was_dropped_too_early_has_left_nothing() {
    let monitor = monitor(u64::MAX);
    monitor.open();
    monitor.map(0, 0, 2).unwrap();
    monitor.map(8, 2, 2).unwrap();
    // Its group leaves the container first, which takes all mappings away.
    monitor.drop_device();
    monitor.space.detach(&monitor.device).unwrap();
    assert_eq!(monitor.space.kernel_mappings().unwrap(), []);
    monitor.unmap(8, 2).unwrap();
    monitor.open();
    monitor.map(9, 0, 4).unwrap();
    monitor.check();
    assert_eq!(monitor.unmap(0, 16).unwrap(), 6 * PAGE);
    monitor.check();
}

#[test]
fn each_call_that_fails_once_is_undone() {
    for nth in 0..8 {
        let monitor = monitor(u64::MAX);
        monitor.open();
        for page in 0..3 {
            monitor.map(page * 4, page * 2, 2).unwrap();
        }
        let before = monitor.space.areas().len();
        monitor.world.lock().unwrap().fail.insert(nth);
        let unmapped = monitor.unmap(0, 10);
        assert_eq!(unmapped.is_err(), nth < 3, "call {nth}: {unmapped:?}");
        let after = if nth < 3 { before } else { 0 };
        assert_eq!(monitor.space.areas().len(), after);
        monitor.check();
        let mapped = monitor.map(100, 0, 1);
        assert_eq!(mapped.is_err(), nth == 3, "call {nth}: {mapped:?}");
        monitor.check();
    }
}

#[test]
fn any_order_of_operations_agrees_with_the_model() {
    let mut random = fastrand::Rng::with_seed(28);
    for _ in 0..200 {
        let monitor = monitor(48 * PAGE);
        let mut open = false;
        for _ in 0..60 {
            let (page, pages) = (random.u64(0..64), random.u64(1..12));
            match random.u8(0..10) {
                0 if open => {
                    monitor.space.detach(&monitor.device).unwrap();
                    monitor.drop_device();
                    open = false;
                }
                0 => {
                    let joined = monitor.world.lock().unwrap().attach(0, &Device::default());
                    joined.unwrap();
                    open = monitor.space.attach(monitor.device.clone()).is_ok();
                    if !open {
                        monitor.drop_device();
                    }
                }
                1..5 => drop(monitor.unmap(page, pages)),
                5 => drop(
                    monitor
                        .world
                        .lock()
                        .unwrap()
                        .fail
                        .insert(random.usize(0..4)),
                ),
                _ => drop(monitor.map(page, random.u64(0..52), pages)),
            }
            monitor.world.lock().unwrap().fail.retain(|_| open);
            if open {
                monitor.check();
            }
        }
    }
}
