//! A model of the kernel call by call, and address spaces over each back end, all with the same
//! memory, devices and limit.

use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};

use ioas::{
    AttachError, DomainIds, Ioas, Ledger, Mapper, Memory, MemoryObject, PinUser, Profile,
    Synthetic, TableBuilder, WhenUnmapped,
};
use iommu::{
    DeviceId, DomainId, Fault, FlushError, NodeId, RunMap, SoftwareUnit, Unit, UnitCapabilities,
};
use iopt::{FormatId, HeapTables, Invalidation, Prot, Root};
use runs::{Iova, Span};

use super::table::{BAD, LIMIT, MEMORY, NARROW, PAGE, RESERVED, Raw, Subject, Surroundings, Which};
use crate::plain_kernel::{Device, Fake, Plain, World};

/// Address of the model's memory.
const ADDRESS: u64 = 0x7000_0000_0000;

fn device(which: Which) -> Device {
    let below = 0..=RESERVED.start - 1;
    let above = RESERVED.last() + 1;
    let end = match which {
        Which::Usual | Which::Second => 1 << 48,
        Which::Narrow => NARROW,
    };
    Device {
        ranges: vec![below, above..=end - 1],
        ..Device::default()
    }
}

fn world(profile: Profile) -> Arc<Mutex<World>> {
    let world = World::new(profile);
    let mut inside = world.lock().unwrap();
    inside.limit = LIMIT;
    inside.entries = 8;
    inside.bad.push(Span::new(ADDRESS + BAD, PAGE));
    drop(inside);
    world
}

const ALL: [Which; 3] = [Which::Usual, Which::Second, Which::Narrow];

struct InWorld(Arc<Mutex<World>>);

impl<K: Mapper> Surroundings<K> for InWorld {
    fn locked(&self) -> u64 {
        self.0.lock().unwrap().locked()
    }

    fn hold(&mut self, range: Span<Iova>) {
        self.0.lock().unwrap().held.push(range);
    }
}

/// The model, call by call.
#[allow(unsafe_code)]
pub(crate) fn raw<const IOMMUFD: bool>() -> Raw<Plain<IOMMUFD>> {
    let world = world(Plain::<IOMMUFD>::PROFILE);
    let space = Plain::new(&world, &Arc::default());
    let devices = ALL.map(device).into();
    // SAFETY: of a model.
    unsafe { Raw::new(space, devices, ADDRESS, Box::new(InWorld(world))) }
}

/// Over tables of ours.
pub(crate) struct OwnTables {
    space: Ioas,
    tables: Arc<HeapTables>,
    ledger: Arc<Ledger>,
    memory: Arc<Memory>,
    pins: Vec<ioas::ExternalPin>,
}

/// A software unit whose devices translate what [`device`] says.
struct Narrowed(SoftwareUnit<Arc<HeapTables>, RunMap<Vec<AtomicU64>>>, Which);

impl Unit for Narrowed {
    fn capabilities(&self) -> UnitCapabilities {
        let mut can = self.0.capabilities();
        can.input_bits = 48;
        can
    }

    fn node(&self) -> Option<NodeId> {
        self.0.node()
    }

    fn reserved(&self, _device: DeviceId, sink: &mut dyn FnMut(Span<Iova>)) {
        sink(RESERVED);
        if self.1 == Which::Narrow {
            sink(Span::new(NARROW, (1 << 48) - NARROW));
        }
    }

    fn attach(
        &self,
        device: DeviceId,
        domain: DomainId,
        root: Root,
    ) -> Result<(), iommu::UnitAttachError> {
        self.0.attach(device, domain, root)
    }

    fn detach(&self, device: DeviceId) -> Result<(), iommu::UnitAttachError> {
        self.0.detach(device)
    }

    fn invalidate(&self, domain: DomainId, what: &Invalidation) -> Result<(), FlushError> {
        self.0.invalidate(domain, what)
    }

    fn invalidate_domain(&self, domain: DomainId) -> Result<(), FlushError> {
        self.0.invalidate_domain(domain)
    }

    fn drain_faults(&self, sink: &mut dyn FnMut(Fault)) -> u64 {
        self.0.drain_faults(sink)
    }
}

impl OwnTables {
    pub(crate) fn new() -> Self {
        let tables = Arc::new(HeapTables::with_tables(256).unwrap());
        let builder = TableBuilder::new(tables.clone(), DomainIds::new(16), [FormatId::VtdSs]);
        let ledger = Ledger::new("mm->locked_vm", Some(LIMIT), 0);
        let runs = [Span::new(1 << 32, MEMORY)];
        let object: Arc<dyn MemoryObject> = Arc::new(Synthetic::new(runs).refusing(BAD));
        let mut own = Self {
            space: Ioas::over_tables(builder),
            memory: Memory::new(object, &ledger),
            tables,
            ledger,
            pins: Vec::new(),
        };
        own.attach(Which::Usual).unwrap();
        own
    }
}

struct Deaf;

impl PinUser for Deaf {
    fn drop_pins(&self, _range: Span<Iova>, _round: u32) {}
}

impl Subject for OwnTables {
    fn space(&self) -> &Ioas {
        &self.space
    }

    fn memory(&self) -> Arc<Memory> {
        self.memory.clone()
    }

    fn attach(&mut self, which: Which) -> Result<(), AttachError> {
        let none = RunMap::new([]).unwrap();
        let unit = SoftwareUnit::new(self.tables.clone(), none);
        let device = DeviceId::pci(0, which as u8, 0);
        self.space.attach((Arc::new(Narrowed(unit, which)), device))
    }

    fn detach(&mut self) {
        self.space.detach(DeviceId::pci(0, 0, 0)).unwrap();
    }

    fn hold(&mut self, range: Span<Iova>) {
        let pin = self.space.pin(range, Prot::READ, WhenUnmapped::Drops);
        self.pins.push(pin.unwrap());
        self.space.add_pin_user(Arc::new(Deaf));
    }

    fn charged(&self) -> u64 {
        self.ledger.in_use()
    }
}

/// Over a model of the kernel.
pub(crate) struct Models<K: Mapper> {
    space: Ioas,
    world: Arc<Mutex<World>>,
    devices: [Arc<K::Device>; 3],
    ledger: Arc<Ledger>,
    memory: Arc<Memory>,
}

impl<const IOMMUFD: bool> Models<Plain<IOMMUFD>> {
    pub(crate) fn new() -> Self {
        let world = world(Plain::<IOMMUFD>::PROFILE);
        let mapper = Plain::<IOMMUFD>::new(&world, &Arc::default());
        let ledger = Ledger::new("mm->locked_vm", Some(LIMIT), 0);
        let fake = Fake {
            len: MEMORY,
            address: Some(ADDRESS),
            file: None,
        };
        let mut models = Self {
            space: Ioas::over_mapper(mapper),
            memory: Memory::new(Arc::new(fake), &ledger),
            devices: ALL.map(|which| Arc::new(device(which))),
            world,
            ledger,
        };
        models.attach(Which::Usual).unwrap();
        models
    }
}

impl<const IOMMUFD: bool> Subject for Models<Plain<IOMMUFD>> {
    fn space(&self) -> &Ioas {
        &self.space
    }

    fn memory(&self) -> Arc<Memory> {
        self.memory.clone()
    }

    fn attach(&mut self, which: Which) -> Result<(), AttachError> {
        self.space.attach(self.devices[which as usize].clone())
    }

    fn detach(&mut self) {
        self.space.detach(&self.devices[0]).unwrap();
    }

    fn hold(&mut self, range: Span<Iova>) {
        self.world.lock().unwrap().held.push(range);
    }

    fn charged(&self) -> u64 {
        assert_eq!(self.ledger.in_use(), self.world.lock().unwrap().locked());
        self.ledger.in_use()
    }
}
