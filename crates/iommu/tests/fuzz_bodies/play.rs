//! Calls of a driver, and the properties that must hold whatever its unit does:
//!
//! * nothing panics, and no operation has more waits, or accesses to registers, than it can need;
//! * what a flush, a detach or an enable says is done was answered by the unit;
//! * what the driver says of its devices agrees with what it said before;
//! * memory that was not given to it stays as it is, and after a `tear_down` without an error, or a `new`
//!   with one, all that was is back.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use iommu::{
    DeviceId, DeviceTlb, DomainId, Driver, FlushError, Frozen, Pasid, UnitAttachError, UnitError,
    UnitMemory,
};
use iopt::{
    Cell, FormatId, Gather, HeapTables, Invalidation, Root, Table, TableMemory, format::AmdV1,
};
use runs::Span;

use super::{
    Bytes,
    hostile::{Model, ROUNDS, State, Unit},
};

/// A driver, as far as drivers differ.
pub(super) trait Subject: Driver + Sized {
    type Model: Model;
    type Config: Copy;

    /// Waits that it may take at a time; those of `enable` may be some more.
    const WAITS: u32;
    const ENABLE_WAITS: u32 = Self::WAITS;
    /// A successor learns from registers alone who is attached, so from a unit that lies.
    const ASKS_THE_UNIT: bool = false;

    fn model(data: &mut Bytes<'_>) -> Self::Model;
    fn config(data: &mut Bytes<'_>) -> Self::Config;
    fn new(unit: Unit<Self::Model>, memory: Arc<HeapTables>, config: Self::Config) -> Option<Self>;
    fn tear_down(self) -> Result<(), UnitError>;
    /// Lets go of the unit; the driver is back after an error.
    fn freeze(self, each: &mut dyn FnMut(UnitMemory)) -> Result<Frozen, Self>;
    fn adopt(
        unit: Unit<Self::Model>,
        memory: Arc<HeapTables>,
        config: Self::Config,
        frozen: &Frozen,
        tables: &[(DomainId, Root)],
    ) -> Option<Self>;
}

/// Faults that are drained at once.
const MOST_FAULTS: u32 = 257;

/// Content of memory that is not the driver's.
const FOREIGN: u64 = 0xdead_0001_beef_0001;

/// Attachments: device, and PASID if it is by one.
type Known = BTreeMap<(u32, u32), (DomainId, Root)>;

/// How many operations went well in all plays, and how many have failed.
pub static OUTCOMES: [AtomicU64; 2] = [const { AtomicU64::new(0) }; 2];

fn count<V, E>(result: &Result<V, E>) {
    OUTCOMES[usize::from(result.is_err())].fetch_add(1, Ordering::Relaxed);
}

struct World<S: Subject> {
    unit: Unit<S::Model>,
    memory: Arc<HeapTables>,
    foreign: Vec<u64>,
    /// `None` when only the unit has said so.
    known: Option<Known>,
    /// `None` after an error.
    enabled: Option<bool>,
}

/// The play of one input.
pub(super) fn play<S: Subject>(data: &[u8]) {
    let mut head = Bytes(data);
    let tables = 16 << head.below(4);
    let Ok(memory) = HeapTables::with_tables_at(tables, 1 << 32) else {
        return;
    };
    let memory = Arc::new(memory);
    let (model, config) = (S::model(&mut head), S::config(&mut head));
    let mut world = World::<S> {
        unit: Unit::new(model, memory.clone(), head.0),
        memory,
        foreign: Vec::new(),
        known: Some(Known::new()),
        enabled: Some(false),
    };
    world.take_foreign();
    // Each round is another driver: the first one, or one that comes after a driver has left.
    for _ in 0..4 {
        if let Some(driver) = world.make(config) {
            // Memory that stays taken has no owner, and ends the run.
            if !world.drive(driver, config) || world.unit.is_used_up() {
                break;
            }
        }
    }
    world.look_at_foreign();
}

impl<S: Subject> World<S> {
    fn take_foreign(&mut self) {
        if let Ok(page) = self.memory.allocate(4096) {
            for cell in self.memory.entries(page, 512) {
                cell.set(FOREIGN);
            }
            self.foreign.push(page);
        }
    }

    fn look_at_foreign(&self) {
        for &page in &self.foreign {
            let cells = self.memory.entries(page, 512);
            assert!(cells.iter().all(|cell| cell.get() == FOREIGN), "{page:#x}");
        }
    }

    fn begin(&self) {
        self.unit.with(State::begin);
    }

    /// The operation was within bounds.
    fn end(&self, name: &str, most: u32) {
        let waits = self.unit.with(|state| state.waits);
        assert!(waits <= most * (ROUNDS + 1), "{waits} waits: {name}");
    }

    /// It said that it was done: the unit has said so too.
    fn done(&self, name: &str, needed: bool) {
        self.unit.with(|state| {
            assert!(state.answered(), "{name} is done, says the driver only");
            let told = state.posted > 0 || !needed || self.enabled != Some(true);
            assert!(told, "{name} is done, but the unit was not told");
        });
    }

    fn make(&self, config: S::Config) -> Option<S> {
        let before = self.memory.in_use();
        self.begin();
        let driver = S::new(self.unit.clone(), self.memory.clone(), config);
        self.end("new", S::WAITS);
        if driver.is_none() {
            assert_eq!(
                self.memory.in_use(),
                before,
                "memory of a driver that is none"
            );
        }
        driver
    }

    /// Operations until the bytes are used up, or the driver is gone. True when all memory is back.
    fn drive(&mut self, mut driver: S, config: S::Config) -> bool {
        loop {
            self.unit.act();
            let code = self.unit.with(State::byte);
            // 0 is what comes when there is nothing any more.
            if code == 0 || self.unit.is_used_up() {
                return self.tear_down(driver);
            }
            if code < 0xe0 {
                self.begin();
                self.operate(&driver, code);
            } else if code < 0xe8 {
                self.take_foreign();
            } else {
                match self.hand_over(driver, config) {
                    Some(successor) => driver = successor,
                    None => return false,
                }
            }
        }
    }

    fn tear_down(&mut self, driver: S) -> bool {
        self.begin();
        let result = driver.tear_down();
        self.end("tear_down", S::WAITS);
        self.unit.with(State::leave);
        self.known = Some(Known::new());
        self.enabled = Some(false);
        if result.is_ok() {
            let foreign = self.foreign.len() as u64;
            assert_eq!(self.memory.in_use(), foreign, "memory that is not back");
        }
        result.is_ok()
    }

    fn hand_over(&mut self, driver: S, config: S::Config) -> Option<S> {
        self.begin();
        let mut tables = Vec::new();
        let frozen = driver.freeze(&mut |held| {
            if let UnitMemory::Table { domain, root } = held {
                tables.push((domain, root));
            }
        });
        self.end("freeze", S::WAITS);
        let frozen = match frozen {
            Ok(frozen) => frozen,
            Err(driver) => return Some(driver),
        };
        self.done("freeze", false);
        assert_eq!(Frozen::from_bytes(&frozen.to_bytes()), Ok(frozen));
        self.begin();
        let (unit, memory) = (self.unit.clone(), self.memory.clone());
        let successor = S::adopt(unit, memory, config, &frozen, &tables);
        self.end("adopt", S::WAITS);
        if S::ASKS_THE_UNIT {
            self.known = None;
        }
        successor
    }
}

impl<S: Subject> World<S> {
    /// One operation on a driver.
    fn operate(&mut self, driver: &S, code: u8) {
        let (device, domain, pasid, address) = self.unit.with(|state| {
            let device = match state.byte() {
                0xff => 1 << 16,
                byte => u32::from(byte & 3) << 6,
            };
            let domain = match state.byte() {
                0xff => 1 << 16,
                byte => u32::from(byte & 3),
            };
            let pasid = u32::from(state.byte() & 7);
            let address = u64::from(state.byte() & 3) << 14;
            (DeviceId(device), DomainId(domain), Pasid(pasid), address)
        });
        match code % 12 {
            0 | 1 => {
                let root = self.root(driver, address);
                let result = driver.attach(device, domain, root);
                self.attached(driver, (device.0, 0), (domain, root), result);
            }
            2 => {
                let result = driver.detach(device);
                self.detached((device.0, 0), result);
            }
            3 => {
                let root = self.root(driver, address);
                let result = driver.attach_pasid(device, pasid, domain, root);
                self.attached(driver, (device.0, pasid.0), (domain, root), result);
            }
            4 => {
                let result = driver.detach_pasid(device, pasid);
                self.detached((device.0, pasid.0), result);
            }
            5 => {
                let queue_depth = (address >> 14) as u8;
                let tlb = (pasid.0 > 2).then_some(DeviceTlb { queue_depth });
                let result = driver.set_device_tlb(device, tlb);
                self.switched(driver, device, tlb, result);
            }
            6 | 7 => {
                let range = self.unit.with(|state| {
                    let (start, pages) = (u64::from(state.byte()), state.byte());
                    Span::new(start << 12 << (pages & 31), u64::from(pages) << 12)
                });
                let what = Invalidation::of(range, 1 << (pasid.0 & 3), code & 0x40 != 0);
                let result = driver.invalidate(domain, &what);
                self.flushed(domain, result, !what.is_empty());
            }
            8 => {
                let result = driver.invalidate_domain(domain);
                self.flushed(domain, result, true);
            }
            9 => self.grow(driver, domain),
            10 => {
                let mut faults = 0;
                let _ = driver.drain_faults(&mut |_| faults += 1);
                assert!(faults <= MOST_FAULTS, "{faults} faults");
            }
            _ => {
                self.enabled = if code & 0x40 == 0 {
                    let result = driver.enable();
                    count(&result);
                    self.end("enable", S::ENABLE_WAITS);
                    if result.is_ok() {
                        self.enabled = Some(true);
                        self.done("enable", true);
                    }
                    result.is_ok().then_some(true)
                } else {
                    driver.disable().is_ok().then_some(false)
                };
                return;
            }
        }
        self.end("an operation", S::WAITS);
    }

    /// A table that the driver says it takes, or nearly.
    fn root(&self, driver: &S, address: u64) -> Root {
        let formats = driver.capabilities().formats;
        let known: Vec<_> = formats.iter().flatten().collect();
        let (nth, levels) = self.unit.with(|state| (state.byte(), state.byte()));
        let Some(support) = known.get(usize::from(nth) % known.len().max(1)) else {
            let (format, levels) = (FormatId::VtdSs, 4);
            return Root {
                format,
                address,
                levels,
            };
        };
        let offered: Vec<u8> = (0..16).filter(|n| support.levels >> n & 1 == 1).collect();
        let levels = match levels {
            0xf0.. => levels & 7,
            _ => offered
                .get(usize::from(levels) % offered.len().max(1))
                .map_or(0, |n| *n),
        };
        Root {
            format: support.format,
            address,
            levels,
        }
    }

    fn attached(
        &mut self,
        driver: &S,
        key: (u32, u32),
        (domain, root): (DomainId, Root),
        result: Result<(), UnitAttachError>,
    ) {
        count(&result);
        if result.is_ok() {
            self.done("attach", false);
        }
        if let Err(UnitAttachError::Pasid { bits, .. }) = result {
            assert_eq!(bits, driver.capabilities().pasid_bits);
            assert!(key.1 == 0 || key.1 >> bits != 0, "{key:?}");
        }
        let Some(known) = &mut self.known else {
            return;
        };
        let other = |there: &(DomainId, Root)| there.0 == domain && there.1 != root;
        match result {
            Ok(()) | Err(UnitAttachError::Unit { .. }) => {
                assert!(!known.values().any(other), "{domain} has another root");
                assert_eq!(known.insert(key, (domain, root)), None, "{key:?} twice");
            }
            Err(UnitAttachError::AlreadyAttached { domain, .. }) => {
                assert_eq!(
                    known.get(&key).map(|there| there.0),
                    Some(domain),
                    "{key:?}"
                );
            }
            Err(UnitAttachError::OtherRoot { .. }) => {
                assert!(known.values().any(other), "{domain} has no other root");
            }
            Err(UnitAttachError::NotAttached { .. } | UnitAttachError::TimedOut { .. }) => {
                panic!("{key:?}: {result:?}");
            }
            Err(_) => {}
        }
    }

    fn switched(
        &self,
        driver: &S,
        device: DeviceId,
        tlb: Option<DeviceTlb>,
        result: Result<(), UnitAttachError>,
    ) {
        count(&result);
        let serves = driver.capabilities().device_tlbs;
        let Some(known) = &self.known else {
            return;
        };
        let attached = known.keys().any(|place| place.0 == device.0);
        match result {
            Err(UnitAttachError::AlreadyAttached { .. }) => assert!(attached, "{device}"),
            Err(UnitAttachError::NoDeviceTlbs { .. }) => assert!(tlb.is_some() && !serves),
            Ok(()) => assert!(tlb.is_none() || serves && !attached, "{device}"),
            Err(_) => {}
        }
    }

    fn detached(&mut self, key: (u32, u32), result: Result<(), UnitAttachError>) {
        count(&result);
        if result.is_ok() {
            self.done("detach", true);
        }
        let Some(known) = &mut self.known else {
            return;
        };
        match result {
            Ok(()) => assert!(known.remove(&key).is_some(), "{key:?} was not attached"),
            Err(UnitAttachError::NotAttached { .. }) => {
                assert!(!known.contains_key(&key), "{key:?}")
            }
            Err(UnitAttachError::Unit { .. }) => assert!(known.contains_key(&key), "{key:?}"),
            Err(_) => {}
        }
    }

    fn flushed(&self, domain: DomainId, result: Result<(), FlushError>, anything: bool) {
        count(&result);
        if result.is_ok() {
            let mut domains = self.known.iter().flat_map(Known::values);
            let here = domains.any(|there| there.0 == domain);
            self.done("a flush", anything && here);
        }
    }

    /// A table that has got a level more: its root is another one.
    fn grow(&mut self, driver: &S, domain: DomainId) {
        let levels = self.unit.with(|state| 1 + state.byte() % 5);
        let memory = HeapTables::with_tables_at(16, 2 << 32);
        let (Ok(memory), Ok(format)) = (memory, AmdV1::new(levels)) else {
            return;
        };
        let Ok(mut table) = Table::new(format, memory) else {
            return;
        };
        let mut gather = Gather::new();
        if table.grow(levels + 1, &mut gather).is_ok() {
            let result = gather.flush_with(|what| driver.invalidate(domain, what));
            if !matches!(result, Err(FlushError::Root { .. })) {
                let known = self.known.iter_mut().flat_map(Known::values_mut);
                let here = known.filter(|there| there.0 == domain);
                here.for_each(|there| there.1 = table.root());
            }
            self.flushed(domain, result.map(|_| ()), true);
        }
    }
}
