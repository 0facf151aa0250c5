//! Who the rows are tried on: a model of the kernel call by call, and address spaces over each back
//! end, all with the same memory, devices and limit.

use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};

use ioas::{
    AttachError, Backend, Builder, DomainIds, Errno, Ioas, Kernel, KernelError, Ledger, Mapper,
    Memory, MemoryObject, Own, PinUser, Profile, Shares, Source, Synthetic, WhenUnmapped,
};
use iommu::{
    Capabilities, DeviceId, DomainId, Fault, FlushError, NodeId, RunMap, SoftwareUnit, Unit,
};
use iopt::{FormatId, HeapTables, Invalidation, Prot, Root};
use runs::Span;

use crate::plain_kernel::{Device, Fake, PAGE, Plain, World};

/// What an operation returns: bytes, or the kernel's number.
pub(crate) type Answer = Result<u64, Errno>;

pub(crate) const MIB: u64 = 1 << 20;
/// The limit on locked memory.
pub(crate) const LIMIT: u64 = 16 * MIB;
/// What no device translates.
pub(crate) const RESERVED: Span = Span::new(0xfee0_0000, MIB);
/// What [`Which::Narrow`] translates ends here.
pub(crate) const NARROW: u64 = 1 << 32;
/// A page that cannot be pinned, by its offset in [`Raw::GOOD`] or a [`Subject::memory`].
pub(crate) const BAD: u64 = 64 * MIB;

/// A device: the usual one, or one that translates only 4 GiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Which {
    Usual,
    Narrow,
}

fn device(which: Which) -> Device {
    let below = 0..=RESERVED.start - 1;
    let above = RESERVED.last() + 1;
    let end = match which {
        Which::Usual => 1 << 48,
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
    inside
        .bad
        .push(Span::new(Raw::<Plain<false>>::GOOD + BAD, PAGE));
    drop(inside);
    world
}

/// A kernel, call by call: one space with one device, and another one.
pub(crate) struct Raw<K: Mapper> {
    pub(crate) spaces: [K; 2],
    pub(crate) devices: [K::Device; 2],
    world: Arc<Mutex<World>>,
}

impl<K: Mapper> Raw<K> {
    /// The address of memory.
    pub(crate) const GOOD: u64 = 0x7000_0000_0000;
}

impl<const IOMMUFD: bool> Raw<Plain<IOMMUFD>> {
    pub(crate) fn new(profile: Profile) -> Self {
        let world = world(profile);
        let shares: Arc<Shares> = Arc::default();
        let mut raw = Self {
            spaces: [Plain::new(&world, &shares), Plain::new(&world, &shares)],
            devices: [device(Which::Usual), device(Which::Narrow)],
            world,
        };
        raw.attach(Which::Usual).unwrap();
        raw
    }
}

fn answer<T>(result: Result<T, KernelError>, ok: impl FnOnce(T) -> u64) -> Answer {
    result.map(ok).map_err(|error| match error {
        KernelError::Refused { errno, .. } => Errno(errno),
        error => panic!("{error}"),
    })
}

impl<K: Mapper> Raw<K> {
    pub(crate) fn attach(&mut self, which: Which) -> Answer {
        let device = &self.devices[which as usize];
        answer(self.spaces[0].enter(device, false), |()| 0)
    }

    pub(crate) fn map(&mut self, iova: u64, len: u64) -> Answer {
        self.map_at(iova, len, 0, Prot::RW)
    }

    /// Maps memory from `offset` on.
    #[allow(unsafe_code)]
    pub(crate) fn map_at(&mut self, iova: u64, len: u64, offset: u64, prot: Prot) -> Answer {
        let source = Source::Address(Self::GOOD.wrapping_add(offset));
        // SAFETY: of a model; it follows no address.
        let mapped = unsafe { self.spaces[0].map(Span::new(iova, len), source, prot) };
        answer(mapped, |()| 0)
    }

    /// Copies what the first space maps at `from` to `iova`, there too.
    #[allow(unsafe_code)]
    pub(crate) fn copy(&mut self, from: u64, iova: u64, len: u64, prot: Prot) -> Answer {
        let space = self.spaces[0].number();
        let source = Source::Copy { space, iova: from };
        // SAFETY: a copy has no address.
        let mapped = unsafe { self.spaces[0].map(Span::new(iova, len), source, prot) };
        answer(mapped, |()| 0)
    }

    pub(crate) fn unmap(&mut self, iova: u64, len: u64) -> Answer {
        answer(self.spaces[0].unmap(Span::new(iova, len)), |bytes| bytes)
    }

    pub(crate) fn dirty(&mut self, iova: u64, len: u64) -> Answer {
        let mut bitmap = [0; 4];
        let read = self.spaces[0].dirty(Span::new(iova, len), PAGE, &mut bitmap);
        answer(read, |()| {
            bitmap.iter().map(|word| u64::from(word.count_ones())).sum()
        })
    }

    pub(crate) fn track(&mut self) -> Answer {
        answer(self.spaces[0].set_tracking(true), |()| 0)
    }

    pub(crate) fn give_up(&mut self) -> Answer {
        answer(self.spaces[0].give_up_addresses(), |()| 0)
    }

    #[allow(unsafe_code)]
    pub(crate) fn take_over(&mut self, iova: u64, len: u64) -> Answer {
        let there = (Span::new(iova, len), Source::Address(Self::GOOD));
        // SAFETY: of a model; it follows no address.
        answer(unsafe { self.spaces[0].take_over(&[], &[there]) }, |()| 0)
    }

    pub(crate) fn allow(&mut self, range: Span) -> Answer {
        answer(self.spaces[0].allow(&[range]), |()| 0)
    }

    pub(crate) fn locked(&self) -> u64 {
        self.world.lock().unwrap().locked()
    }

    pub(crate) fn hold(&self, range: Span) {
        self.world.lock().unwrap().held.push(range);
    }
}

/// An address space over some back end.
pub(crate) trait Subject {
    type Backend: Backend;

    fn space(&mut self) -> &mut Ioas<Self::Backend>;
    /// 128 MiB, of which the page at [`BAD`] cannot be pinned.
    fn memory(&self) -> Arc<Memory>;
    fn attach(&mut self, which: Which) -> Result<(), AttachError>;
    fn detach(&mut self);
    /// Somebody uses `range` and does not let go.
    fn hold(&mut self, range: Span);
    /// Bytes that are charged.
    fn charged(&self) -> u64;
}

/// Over tables of ours.
pub(crate) struct OwnTables {
    space: Ioas<Own<Arc<HeapTables>>>,
    tables: Arc<HeapTables>,
    ledger: Arc<Ledger>,
    memory: Arc<Memory>,
    pins: Vec<ioas::ExternalPin>,
}

/// A software unit whose devices translate what [`device`] says.
struct Narrowed(SoftwareUnit<Arc<HeapTables>, RunMap<Vec<AtomicU64>>>, Which);

impl Unit for Narrowed {
    fn capabilities(&self) -> Capabilities {
        let mut can = self.0.capabilities();
        can.input_bits = 48;
        can
    }

    fn node(&self) -> Option<NodeId> {
        self.0.node()
    }

    fn reserved(&self, _device: DeviceId, sink: &mut dyn FnMut(Span)) {
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
    ) -> Result<(), iommu::AttachError> {
        self.0.attach(device, domain, root)
    }

    fn detach(&self, device: DeviceId) -> Result<(), iommu::AttachError> {
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
        let builder = Builder::new(tables.clone(), DomainIds::new(16), [FormatId::VtdSs]);
        let ledger = Ledger::new("mm->locked_vm", Some(LIMIT), 0);
        let runs = [Span::new(1 << 32, 128 * MIB)];
        let object: Arc<dyn MemoryObject> = Arc::new(Synthetic::new(runs).refusing(BAD));
        let mut own = Self {
            space: Ioas::with_builder(builder),
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
    fn let_go(&self, _range: Span, _round: u32) {}
}

impl Subject for OwnTables {
    type Backend = Own<Arc<HeapTables>>;

    fn space(&mut self) -> &mut Ioas<Self::Backend> {
        &mut self.space
    }

    fn memory(&self) -> Arc<Memory> {
        self.memory.clone()
    }

    fn attach(&mut self, which: Which) -> Result<(), AttachError> {
        let none = RunMap::new([]).unwrap();
        let unit = SoftwareUnit::new(self.tables.clone(), none);
        let device = DeviceId::pci(0, which as u8, 0);
        self.space.attach(Arc::new(Narrowed(unit, which)), device)
    }

    fn detach(&mut self) {
        self.space.detach(DeviceId::pci(0, 0, 0)).unwrap();
    }

    fn hold(&mut self, range: Span) {
        let pin = self.space.pin(range, Prot::READ, WhenUnmapped::LetsGo);
        self.pins.push(pin.unwrap());
        self.space.add_pin_user(Arc::new(Deaf));
    }

    fn charged(&self) -> u64 {
        self.ledger.in_use()
    }
}

/// Over a model of the kernel.
pub(crate) struct Models<K: Mapper> {
    space: Ioas<Kernel<K>>,
    world: Arc<Mutex<World>>,
    devices: [Arc<K::Device>; 2],
    ledger: Arc<Ledger>,
    memory: Arc<Memory>,
}

impl<const IOMMUFD: bool> Models<Plain<IOMMUFD>> {
    pub(crate) fn new() -> Self {
        let world = world(Plain::<IOMMUFD>::PROFILE);
        let mapper = Plain::new(&world, &Arc::default());
        let ledger = Ledger::new("mm->locked_vm", Some(LIMIT), 0);
        let fake = Fake {
            len: 128 * MIB,
            address: Some(Raw::<Plain<IOMMUFD>>::GOOD),
            file: None,
        };
        let mut models = Self {
            space: Ioas::over_kernel(Kernel::new(mapper, None)),
            memory: Memory::new(Arc::new(fake), &ledger),
            devices: [Which::Usual, Which::Narrow].map(|which| Arc::new(device(which))),
            world,
            ledger,
        };
        models.attach(Which::Usual).unwrap();
        models
    }
}

impl<const IOMMUFD: bool> Subject for Models<Plain<IOMMUFD>> {
    type Backend = Kernel<Plain<IOMMUFD>>;

    fn space(&mut self) -> &mut Ioas<Self::Backend> {
        &mut self.space
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

    fn hold(&mut self, range: Span) {
        self.world.lock().unwrap().held.push(range);
    }

    fn charged(&self) -> u64 {
        assert_eq!(self.ledger.in_use(), self.world.lock().unwrap().locked());
        self.ledger.in_use()
    }
}
