//! What all drivers' tests share: the cases that hold of every unit, over the models of the units.
//!
//! A [`Rig`] is a driver with the model of its unit, in one of the variants in which the cases are run. The cases
//! of [`every_unit`](crate::suite::every_unit) want a unit that can be broken in one way, those of
//! [`every_queue`](crate::suite::every_queue) one that takes commands from a ring. What only one unit has is tested
//! beside its driver.

use core::fmt;
use std::string::ToString;
use std::sync::Arc;
use std::vec::Vec;

use iopt::{Cell as _, HeapTables, TableMemory};

use crate::driver::{HardwareUnit, InMemory, Kind, Operations};
use crate::handover::{Frozen, WORDS};
use crate::ring::CommandQueue;
use crate::setup::UnitSetupError;
use prelude::*;

/// What a test names.
pub(crate) mod prelude {
    pub(crate) use iopt::{Chain, Invalidation, Root};
    pub(crate) use runs::{Iova, Span};

    pub(crate) use crate::capabilities::UnitCapabilities;
    pub(crate) use crate::commands::CommandCounters;
    pub(crate) use crate::error::{FlushError, UnitAttachError, UnitError};
    pub(crate) use crate::fault::Fault;
    pub(crate) use crate::handover::UnitMemory;
    pub(crate) use crate::registers::Registers;
    pub(crate) use crate::unit::{DeviceId, DeviceTlb, DomainId, Pasid, Unit};

    pub(crate) use super::{drain, timed_out};
}

/// How many rounds a driver of a model may wait.
pub(crate) const PATIENCE: u32 = 50;

/// What a wait for a model that does not answer ends with.
pub(crate) const fn timed_out(awaited: &'static str) -> UnitError {
    let rounds = PATIENCE;
    UnitError::TimedOut { awaited, rounds }
}

/// All faults, and how many were lost.
pub(crate) fn drain(unit: &impl Unit) -> (Vec<Fault>, u64) {
    let mut faults = Vec::new();
    let lost = unit.drain_faults(&mut |fault| faults.push(fault));
    (faults, lost)
}

/// How a model is broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Breakage {
    /// It is in order.
    None,
    /// Waits are consumed, and never complete.
    Mute,
    /// Commands are not looked at.
    Deaf,
    /// It does not stop translating.
    Stuck,
}

/// The driver of a rig.
type Driven<G> = HardwareUnit<<G as Rig>::Kind, <G as Rig>::Model, <G as Rig>::Memory>;

/// A driver and the model of its unit.
pub(crate) trait Rig: Sized
where
    Driven<Self>: Operations + Send + Sync,
{
    type Kind: Kind;
    type Model: Registers + Clone + Send + Sync;
    type Memory: Clone + Send + Sync;
    /// What the model notes that it has received.
    type Received: PartialEq + fmt::Debug;

    /// The device that is attached, and its domain.
    const DEVICE: DeviceId;
    const DOMAIN: DomainId;

    /// A rig of each variant.
    fn variants() -> Vec<Self>;

    /// A driver and its unit, not enabled yet.
    fn unit(&self) -> (Driven<Self>, Self::Model);

    /// A table that the unit walks.
    fn root(&self) -> Root;

    /// What the unit has received since the last call, without tickets.
    fn received(model: &Self::Model) -> Vec<Self::Received>;

    /// The domain and the root through which requests of a device go.
    fn found(&self, model: &Self::Model, device: DeviceId) -> Option<(u32, u64)>;

    fn break_down(&self, model: &Self::Model, how: Breakage);

    /// What is awaited when a wait is not answered: of a flush of the domain, and of a detach.
    fn awaited(&self) -> &'static str;

    /// What a detach says to the unit, if the case is to compare it.
    fn detached(&self) -> Option<Vec<Self::Received>>;

    /// A unit that translates.
    fn enabled(&self) -> (Driven<Self>, Self::Model) {
        let (driver, model) = self.unit();
        driver.enable().unwrap();
        Self::received(&model);
        (driver, model)
    }

    /// The same, with the device.
    fn attached(&self) -> (Driven<Self>, Self::Model) {
        let (driver, model) = self.enabled();
        let (device, domain) = (Self::DEVICE, Self::DOMAIN);
        driver.attach(device, domain, self.root()).unwrap();
        assert_eq!(
            self.found(&model, device),
            Some((domain.0, self.root().address))
        );
        Self::received(&model);
        (driver, model)
    }

    fn timed_out(&self) -> UnitError {
        timed_out(self.awaited())
    }
}

/// A change of a description, and which register is found to differ then.
pub(crate) type Change = (fn(&mut [u64; WORDS]), &'static str);

/// A rig whose unit takes commands from a ring.
pub(crate) trait QueueRig: Rig<Memory = Arc<HeapTables>, Kind: InMemory>
where
    Driven<Self>: Operations + Send + Sync,
{
    fn config(&self) -> <Self::Kind as Kind>::Config;

    /// How many places of the ring can be filled.
    fn room(&self) -> u32;

    /// Attaching gives commands.
    fn attach_commands(&self) -> bool;

    /// Each answer takes so many rounds from now on.
    fn slow(&self, model: &Self::Model, rounds: u32) {
        let _ = (model, rounds);
    }

    /// The errors at which the unit stops: a number, and how the name in the error begins.
    fn stops(&self) -> Vec<(u32, &'static str)>;

    /// Has the unit stop with an error at the command of this number, counted from the next, and says which
    /// number that is in the ring; `None` mends it.
    fn stop(&self, model: &Self::Model, at: Option<(u32, u32)>) -> u32;

    /// True for the first word of a wait.
    fn is_wait(&self, word: u64) -> bool;

    /// True for what a command for pages says to the unit.
    fn is_pages(received: &Self::Received) -> bool;

    /// Compares what else the unit's error at a command says.
    fn check_record(&self, error: u32, nth: u32, record: u64);

    /// What else holds when the unit has stopped: what it has received, and its driver.
    fn check_stopped(&self, received: &[Self::Received], driver: &Driven<Self>) {
        let _ = (received, driver);
    }

    /// Flushes two pages, which are two commands.
    fn two_pages(
        &self,
        flush: &mut dyn FnMut(&Invalidation) -> Result<(), FlushError>,
    ) -> Result<(), FlushError> {
        flush(&Invalidation::of(Span::new(0xf000, 0x2000), 1, false))
    }

    /// A driver over memory of these addresses.
    fn over(&self, memory: Arc<HeapTables>) -> Result<Driven<Self>, UnitSetupError>;

    /// Changes that are found; and the register by which a unit is found that was disabled.
    fn other_words(&self) -> Vec<Change>;
    fn when_off(&self) -> &'static str;

    /// The unit's structures and queues, by name.
    fn structures(&self) -> Vec<&'static str>;
}

/// The cases of every unit.
macro_rules! every_unit {
    ($rig:ty: $($case:ident)*) => {
        $(
            #[test]
            fn $case() {
                <$rig as $crate::suite::Rig>::variants().iter().for_each($crate::suite::$case);
            }
        )*
    };
    ($rig:ty) => {
        $crate::suite::every_unit! { $rig:
            a_wait_that_is_not_answered_ends_and_fails_the_flush
            before_it_is_enabled_nothing_is_sent_and_devices_are_there_afterwards
            attaching_refuses_by_name_and_changes_nothing
        }
    };
}

/// Those, and the cases of every unit with a ring of commands.
macro_rules! every_queue {
    ($rig:ty) => {
        $crate::suite::every_unit!($rig);
        $crate::suite::every_unit! { $rig:
            an_attach_that_is_not_answered_leaves_no_translation
            a_queue_that_is_not_emptied_fills_and_says_so
            a_unit_that_stops_fails_one_flush_and_serves_the_next
            a_successor_goes_on_in_the_queue_and_with_the_devices
            a_unit_that_does_not_answer_is_not_frozen
            a_successor_takes_no_old_ticket_for_an_answer
            no_batch_waits_for_what_fresh_memory_holds
            tearing_down_gives_every_page_back
            memory_beyond_the_units_addresses_is_refused_by_name
        }
    };
}

pub(crate) use {every_queue, every_unit};

fn failed<V: fmt::Debug>(result: Result<V, FlushError>) -> UnitError {
    match result {
        Err(FlushError::Unit { cause, .. }) => cause,
        other => panic!("{other:?}"),
    }
}

pub(crate) fn a_wait_that_is_not_answered_ends_and_fails_the_flush<G: Rig>(rig: &G)
where
    Driven<G>: Operations + Send + Sync,
{
    let (device, domain) = (G::DEVICE, G::DOMAIN);
    let (driver, model) = rig.attached();
    rig.break_down(&model, Breakage::Mute);
    let (cause, before) = (rig.timed_out(), driver.counters());
    let expected = Err(FlushError::Unit { domain, cause });
    assert_eq!(driver.invalidate_domain(domain), expected);
    // A detach that was not answered leaves the device without translation, and attached.
    let expected = Err(UnitAttachError::Unit { device, cause });
    assert_eq!(driver.detach(device), expected);
    let after = driver.counters();
    assert_eq!(after.batches - before.batches, 2);
    let done = |counters: CommandCounters| (counters.commands, counters.waits);
    assert_eq!(
        done(after),
        done(before),
        "what was not answered is not done"
    );
    assert_eq!(rig.found(&model, G::DEVICE), None);
    assert!(matches!(
        driver.attach(device, domain, rig.root()),
        Err(UnitAttachError::AlreadyAttached { .. })
    ));
    rig.break_down(&model, Breakage::None);
    G::received(&model);
    driver.detach(device).unwrap();
    if let Some(expected) = rig.detached() {
        let received = G::received(&model);
        assert_eq!(received[received.len() - expected.len()..], expected);
    }
    let gone = Err(UnitAttachError::NotAttached { device });
    assert_eq!(driver.detach(device), gone);
    driver.attach(device, domain, rig.root()).unwrap();
    assert_eq!(
        rig.found(&model, G::DEVICE),
        Some((domain.0, rig.root().address))
    );
}

pub(crate) fn before_it_is_enabled_nothing_is_sent_and_devices_are_there_afterwards<G: Rig>(rig: &G)
where
    Driven<G>: Operations + Send + Sync,
{
    let (driver, model) = rig.unit();
    G::received(&model);
    let other = DeviceId(5);
    for device in [G::DEVICE, other] {
        driver.attach(device, G::DOMAIN, rig.root()).unwrap();
    }
    driver.detach(other).unwrap();
    driver.invalidate_domain(G::DOMAIN).unwrap();
    assert_eq!(G::received(&model), []);
    assert_eq!(driver.counters(), CommandCounters::default());
    driver.enable().unwrap();
    assert_eq!(
        rig.found(&model, G::DEVICE),
        Some((G::DOMAIN.0, rig.root().address))
    );
    assert_eq!(rig.found(&model, other), None);
    assert_ne!(driver.counters(), CommandCounters::default());
    assert_eq!(crate::Driver::counters(&driver), driver.counters());
}

pub(crate) fn attaching_refuses_by_name_and_changes_nothing<G: Rig>(rig: &G)
where
    Driven<G>: Operations + Send + Sync,
{
    let (driver, model) = rig.attached();
    let (device, domain, good) = (G::DEVICE, G::DOMAIN, rig.root());
    let other = DeviceId(0x100);
    let refused = |device, domain, root| driver.attach(device, domain, root).unwrap_err();
    assert_eq!(
        refused(device, DomainId(8), good),
        UnitAttachError::AlreadyAttached { device, domain }
    );
    let asked = Root {
        address: good.address ^ 1 << 20,
        ..good
    };
    let there = good;
    assert_eq!(
        refused(other, domain, asked),
        UnitAttachError::OtherRoot {
            domain,
            there,
            asked
        }
    );
    let bits = driver.capabilities().domain_bits;
    if let Some(beyond) = 1u32.checked_shl(bits) {
        let domain = DomainId(beyond | 7);
        let expected = UnitAttachError::DomainId { domain, bits };
        assert_eq!(refused(other, domain, good), expected);
    }
    let deep = Root { levels: 7, ..good };
    assert!(matches!(
        refused(other, domain, deep),
        UnitAttachError::Levels { .. }
    ));
    let far = Root {
        address: 1 << 56,
        ..good
    };
    assert!(matches!(
        refused(other, domain, far),
        UnitAttachError::RootAddress { .. }
    ));
    let device = other;
    let gone = Err(UnitAttachError::NotAttached { device });
    assert_eq!(driver.detach(device), gone);
    assert_eq!(rig.found(&model, G::DEVICE), Some((domain.0, good.address)));
    assert_eq!(G::received(&model), []);
}

pub(crate) fn an_attach_that_is_not_answered_leaves_no_translation<G: QueueRig>(rig: &G)
where
    Driven<G>: Operations + Send + Sync,
{
    if !rig.attach_commands() {
        return;
    }
    for how in [Breakage::Mute, Breakage::Deaf] {
        let (driver, model) = rig.enabled();
        rig.break_down(&model, how);
        let failed = driver.attach(G::DEVICE, G::DOMAIN, rig.root());
        assert!(matches!(failed, Err(UnitAttachError::Unit { .. })));
        assert_eq!(rig.found(&model, G::DEVICE), None);
        rig.break_down(&model, Breakage::None);
        driver.detach(G::DEVICE).unwrap();
        driver.attach(G::DEVICE, G::DOMAIN, rig.root()).unwrap();
        assert_eq!(
            rig.found(&model, G::DEVICE),
            Some((G::DOMAIN.0, rig.root().address))
        );
    }
}

pub(crate) fn a_queue_that_is_not_emptied_fills_and_says_so<G: QueueRig>(rig: &G)
where
    Driven<G>: Operations + Send + Sync,
{
    let (driver, model) = rig.attached();
    rig.break_down(&model, Breakage::Deaf);
    // A command and a wait each.
    let (full, free) = (rig.room() / 2, rig.room() % 2);
    for _ in 0..full {
        let cause = failed(driver.invalidate_domain(G::DOMAIN));
        assert_eq!(cause, rig.timed_out());
    }
    let cause = failed(driver.invalidate_domain(G::DOMAIN));
    let needed = 2;
    assert_eq!(cause, UnitError::QueueFull { needed, free });
    // Late answers are no answers to the next flush, which gets its own.
    rig.break_down(&model, Breakage::None);
    driver.invalidate_domain(G::DOMAIN).unwrap();
    assert_eq!(G::received(&model).len() as u32, 2 * full + 2);
    // And around the end of the ring.
    for _ in 0..300 {
        driver.invalidate_domain(G::DOMAIN).unwrap();
    }
    assert_eq!(G::received(&model).len(), 600);
}

pub(crate) fn a_unit_that_stops_fails_one_flush_and_serves_the_next<G: QueueRig>(rig: &G)
where
    Driven<G>: Operations + Send + Sync,
{
    for (stop, name) in rig.stops() {
        for (at, latency) in [(0, 0), (1, 0), (2, 0), (0, 5), (1, 5), (2, 5)] {
            let (driver, model) = rig.attached();
            let before = driver.counters();
            rig.slow(&model, latency);
            let nth = rig.stop(&model, Some((stop, at)));
            let mut flush = |what: &Invalidation| driver.invalidate(G::DOMAIN, what);
            let cause = failed(rig.two_pages(&mut flush));
            let UnitError::Command {
                error,
                command,
                record,
            } = cause
            else {
                panic!("{cause}");
            };
            assert!(error.starts_with(name), "{error}, not {name}");
            assert_eq!(rig.is_wait(command[0]), at == 2, "{cause}");
            rig.check_record(stop, nth, record);
            let received = G::received(&model);
            let pages = received
                .iter()
                .filter(|received| G::is_pages(received))
                .count();
            assert_eq!(pages as u32, at);
            rig.check_stopped(&received, &driver);
            rig.stop(&model, None);
            rig.two_pages(&mut flush).unwrap();
            assert_eq!(G::received(&model).len(), 3);
            let after = driver.counters();
            assert_eq!(after.batches - before.batches, 2);
            assert_eq!(after.commands - before.commands, 2, "of the second");
            assert_eq!(after.waits - before.waits, 1);
        }
    }
}

/// What a driver lists when it is frozen: structures by name, their pages, and tables.
type Listed = (Vec<&'static str>, u64, Vec<(DomainId, Root)>);

fn freeze<G: QueueRig>(driver: Driven<G>) -> (Frozen, Arc<HeapTables>, Listed)
where
    Driven<G>: Operations + Send + Sync,
{
    let (mut names, mut pages, mut tables) = (Vec::new(), 0, Vec::new());
    let frozen = driver.freeze(&mut |held| match held {
        UnitMemory::Structure { name, span } => {
            names.push(name);
            pages += span.len / 4096;
        }
        UnitMemory::Table { domain, root } => tables.push((domain, root)),
    });
    let (frozen, _, memory) = frozen.map_err(|(_, cause)| cause).unwrap();
    names.sort_unstable();
    names.dedup();
    let frozen = Frozen::from_bytes(&frozen.to_bytes()).unwrap();
    (frozen, memory, (names, pages, tables))
}

pub(crate) fn a_successor_goes_on_in_the_queue_and_with_the_devices<G: QueueRig>(rig: &G)
where
    Driven<G>: Operations + Send + Sync,
{
    let (driver, model) = rig.attached();
    driver.invalidate_domain(G::DOMAIN).unwrap();
    G::received(&model);
    let (frozen, memory, (names, pages, tables)) = freeze::<G>(driver);
    assert_eq!(tables, [(G::DOMAIN, rig.root())]);
    let mut expected = rig.structures();
    expected.sort_unstable();
    assert_eq!((names, pages), (expected, memory.in_use()));
    assert_eq!(G::received(&model).len(), 1, "a wait");

    let adopt = |frozen: &Frozen| {
        Driven::<G>::adopt(model.clone(), memory.clone(), rig.config(), frozen)
            .map_err(|error| error.to_string())
    };
    let differs = |frozen: &Frozen, name: &str| {
        let error = adopt(frozen).err().expect("it is another");
        assert!(error.starts_with(&std::format!("{name} is ")), "{error}");
    };
    for (change, name) in rig.other_words() {
        let mut other = frozen;
        change(&mut other.words);
        differs(&other, name);
    }
    let heir = adopt(&frozen).unwrap();
    assert_eq!(G::received(&model), []);
    assert!(matches!(
        heir.attach(G::DEVICE, G::DOMAIN, rig.root()),
        Err(UnitAttachError::AlreadyAttached { .. })
    ));
    heir.invalidate_domain(G::DOMAIN).unwrap();
    assert_eq!(heir.counters().waits, 1);
    heir.detach(G::DEVICE).unwrap();
    assert_eq!(rig.found(&model, G::DEVICE), None);
    assert!(heir.tear_down().is_ok());
    G::received(&model);
    assert_eq!(memory.in_use(), 0);
    differs(&frozen, rig.when_off());
}

pub(crate) fn a_unit_that_does_not_answer_is_not_frozen<G: QueueRig>(rig: &G)
where
    Driven<G>: Operations + Send + Sync,
{
    for how in [Breakage::Mute, Breakage::Deaf] {
        let (driver, model) = rig.attached();
        rig.break_down(&model, how);
        let frozen = driver.freeze(&mut |_| panic!("nothing is listed"));
        let Err((driver, cause)) = frozen else {
            panic!("frozen");
        };
        assert_eq!(cause, rig.timed_out());
        rig.break_down(&model, Breakage::None);
        driver.detach(G::DEVICE).unwrap();
        G::received(&model);
    }
}

pub(crate) fn a_successor_takes_no_old_ticket_for_an_answer<G: QueueRig>(rig: &G)
where
    Driven<G>: Operations + Send + Sync,
{
    let (driver, model) = rig.attached();
    driver.disable().unwrap();
    let (frozen, memory, _) = freeze::<G>(driver);
    let heir = Driven::<G>::adopt(model.clone(), memory, rig.config(), &frozen);
    let heir = heir.map_err(|error| error.to_string()).unwrap();
    rig.break_down(&model, Breakage::Mute);
    let silent = heir.enable();
    assert!(matches!(silent, Err(UnitError::TimedOut { .. })));
    rig.break_down(&model, Breakage::None);
    heir.enable().unwrap();
    // Nor is a unit that is off handed over as one that is on, or without its devices.
    assert_eq!(
        rig.found(&model, G::DEVICE),
        Some((G::DOMAIN.0, rig.root().address))
    );
    G::received(&model);
}

/// The first ticket follows the last, and not 0.
pub(crate) fn no_batch_waits_for_what_fresh_memory_holds<G: QueueRig>(rig: &G)
where
    Driven<G>: Operations + Send + Sync,
{
    let (driver, model) = rig.attached();
    {
        let mut inner = driver.inner.lock();
        let ring = <G::Kind as InMemory>::ring(&mut inner);
        ring.ticket = <<G::Kind as InMemory>::Queue as CommandQueue>::TICKET;
        if let Some(answers) = ring.layout.answers() {
            driver.memory().entries(answers, 1)[0].set(0);
        }
    }
    rig.break_down(&model, Breakage::Mute);
    let silent = failed(driver.invalidate_domain(G::DOMAIN));
    assert_eq!(silent, rig.timed_out());
    rig.break_down(&model, Breakage::None);
    driver.invalidate_domain(G::DOMAIN).unwrap();
    driver.detach(G::DEVICE).unwrap();
    G::received(&model);
}

pub(crate) fn tearing_down_gives_every_page_back<G: QueueRig>(rig: &G)
where
    Driven<G>: Operations + Send + Sync,
{
    let (driver, model) = rig.attached();
    let memory = driver.memory().clone();
    for device in [0x0000, 0x00ff, 0x0100, 0x0200, 0x03ff] {
        let device = DeviceId(device);
        driver.attach(device, G::DOMAIN, rig.root()).unwrap();
    }
    assert!(memory.in_use() > 3);
    rig.break_down(&model, Breakage::Stuck);
    assert!(matches!(driver.disable(), Err(UnitError::TimedOut { .. })));
    rig.break_down(&model, Breakage::None);
    assert!(driver.tear_down().is_ok());
    assert_eq!(memory.in_use(), 0);
    G::received(&model);
}

/// The unit would take the address for another, or cannot reach it.
pub(crate) fn memory_beyond_the_units_addresses_is_refused_by_name<G: QueueRig>(rig: &G)
where
    Driven<G>: Operations + Send + Sync,
{
    let (driver, _) = rig.unit();
    let bits = driver.capabilities().output_bits;
    if bits > 52 {
        // There is no such memory to test with, and the structures have no such words.
        return;
    }
    let high = Arc::new(HeapTables::with_tables_at(64, 1 << bits).unwrap());
    let refused = rig.over(high.clone()).err().map(|error| error.to_string());
    let last = high.last_address();
    let text = std::format!("memory up to {last:#x} for a unit with addresses of {bits} bits");
    assert_eq!(refused, Some(text));
    assert_eq!(high.in_use(), 0);
}
