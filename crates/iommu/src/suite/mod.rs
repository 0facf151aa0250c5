//! The cases that hold of every unit, over the models of the units.
//!
//! A [`Rig`] is a driver with the model of its unit, in one of the variants in which the cases are run. The cases
//! of [`every_unit`](crate::suite::every_unit) want a unit that can be broken in one way, those of
//! [`every_queue`](crate::suite::every_queue) one that takes commands from a ring. Facts of one unit alone are
//! tested beside its driver. Each file of cases has at its head the protocol that it holds drivers to.

mod broken;
mod faults;
mod flush;
mod handover;
mod order;
mod spaces;

use core::fmt;
use std::boxed::Box;
use std::string::ToString;
use std::sync::Arc;
use std::vec::Vec;

use iopt::{Cell as _, FormatId, HeapTables, TableMemory};

use crate::driver::{HardwareUnit, InMemory, Kind, Operations};
use crate::handover::{Frozen, WORDS};
use crate::ring::CommandQueue;
use crate::setup::UnitSetupError;
use prelude::*;
pub(crate) use {broken::*, faults::*, flush::*, handover::*, order::*, spaces::*};

/// Names that tests use.
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

/// The end of a wait for a model that does not answer.
pub(crate) const fn timed_out(awaited: &'static str) -> UnitError {
    let rounds = PATIENCE;
    UnitError::TimedOut { awaited, rounds }
}

/// A domain beside that of the rig, and a device.
pub(crate) const OTHER: DomainId = DomainId(8);
pub(crate) const SECOND: DeviceId = DeviceId(0x100);

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

/// A register that does not follow: the unit, the switch that breaks and mends it, and what is awaited in vain when
/// it is enabled, and disabled.
pub(crate) type Stuck<G> = (
    (Driven<G>, <G as Rig>::Model),
    Box<dyn Fn(&<G as Rig>::Model, bool)>,
    [Option<&'static str>; 2],
);

/// A flush of a range of leaves at these levels, with tables unlinked or not, and what the unit receives.
pub(crate) type FlushRow<G> = (Span<Iova>, u32, bool, Vec<<G as Rig>::Received>);

/// A unit, a table's format and levels, whether pages beside those of a gather stay mapped, and the commands of each
/// gather of `gathers`.
pub(crate) type Costs<G> = (G, FormatId, u8, bool, [u64; 9]);

/// A driver and the model of its unit.
pub(crate) trait Rig: Sized
where
    Driven<Self>: Operations + Send + Sync,
{
    type Kind: Kind;
    type Model: Registers + Clone + Send + Sync;
    type Memory: Clone + Send + Sync;
    /// A command or a write, as the model notes it.
    type Received: Clone + PartialEq + fmt::Debug;

    /// The device that is attached, and its domain.
    const DEVICE: DeviceId;
    const DOMAIN: DomainId;

    /// A rig of each variant.
    fn variants() -> Vec<Self>;

    /// A driver and its unit, not enabled yet.
    fn unit(&self) -> (Driven<Self>, Self::Model);

    /// A table that the unit walks.
    fn root(&self) -> Root;

    /// Everything that the unit has received since the last call, without tickets.
    fn received(model: &Self::Model) -> Vec<Self::Received>;

    /// The tag and the root through which requests of a device go.
    fn found(
        &self,
        model: &Self::Model,
        device: DeviceId,
        pasid: Option<Pasid>,
    ) -> Option<(u32, Root)>;

    /// The tag of a device's translations in a domain.
    fn tag(&self, device: DeviceId, domain: DomainId) -> u32 {
        let _ = device;
        domain.0
    }

    fn break_down(&self, model: &Self::Model, how: Breakage);

    /// Each answer takes so many rounds from now on.
    fn slow(&self, model: &Self::Model, rounds: u32);

    /// The name of an answer that does not come: to a flush of the domain, and to a detach.
    fn awaited(&self) -> &'static str;

    /// Registers that do not follow.
    fn stuck(&self) -> Vec<Stuck<Self>>;

    /// Devices, domains and roots that the unit cannot have.
    fn refused(&self) -> Vec<(DeviceId, DomainId, Root, UnitAttachError)>;

    /// The addresses that no device translates: first and last.
    fn reserved(&self) -> &'static [(u64, u64)] {
        &[]
    }

    /// Has the device read a page that it may not.
    fn fault(&self, model: &Self::Model, page: u64);

    /// How many faults the unit keeps before it loses one.
    fn log(&self) -> u64;

    /// A table of each stage that flushes tell apart.
    fn stages(&self) -> Vec<Root> {
        [self.root()].into()
    }

    /// Flushes of the domain with a table of [`stages`](Self::stages), and their commands.
    fn flushes(&self, root: Root) -> Vec<FlushRow<Self>>;

    /// Commands of a flush of all of a domain with such a table.
    fn whole(&self, root: Root, domain: DomainId) -> Vec<Self::Received>;

    /// The driver knows which domains have devices, and flushes no other.
    fn knows_members(&self) -> bool {
        true
    }

    /// Costs of gathers.
    fn costs(&self) -> Vec<Costs<Self>>;

    /// Memory for tables that the unit walks, where the model does, and the model that walks them.
    fn walking(&self, model: Self::Model) -> (Arc<HeapTables>, Self::Model) {
        let tables = HeapTables::with_tables_at(4096, 1 << 40).unwrap();
        (Arc::new(tables), model)
    }

    /// True when the device reaches an address by what the unit may have cached, after it has received this.
    fn reaches(
        &self,
        model: &Self::Model,
        received: &[Self::Received],
        place: (DeviceId, DomainId),
        iova: u64,
    ) -> bool;

    /// A unit that translates.
    fn enabled(&self) -> (Driven<Self>, Self::Model) {
        let (driver, model) = self.unit();
        crate::Driver::enable(&driver).unwrap();
        Self::received(&model);
        (driver, model)
    }

    /// The same, with the device.
    fn attached(&self) -> (Driven<Self>, Self::Model) {
        let (driver, model) = self.enabled();
        let (device, domain) = (Self::DEVICE, Self::DOMAIN);
        driver.attach(device, domain, self.root()).unwrap();
        self.is_there(&model);
        Self::received(&model);
        (driver, model)
    }

    /// The device is found in its domain.
    fn is_there(&self, model: &Self::Model) {
        let there = (self.tag(Self::DEVICE, Self::DOMAIN), self.root());
        assert_eq!(self.found(model, Self::DEVICE, None), Some(there));
    }

    fn timed_out(&self) -> UnitError {
        timed_out(self.awaited())
    }
}

/// The TLB of a device.
pub(crate) const TLB: DeviceTlb = DeviceTlb { queue_depth: 2 };

/// A change of a description, and which register is found to differ then.
pub(crate) type Change = (fn(&mut [u64; WORDS]), &'static str);

/// The same of the unit: done again, it is taken back.
pub(crate) type StateChange<M> = (fn(&M), &'static str);

/// A request's PASID, and the tag and the root that it has found.
pub(crate) type Seen = (Option<Pasid>, Option<(u32, Root)>);

/// A rig whose unit takes commands from a ring.
pub(crate) trait QueueRig: Rig<Memory = Arc<HeapTables>, Kind: InMemory>
where
    Driven<Self>: Operations + Send + Sync,
{
    fn config(&self) -> <Self::Kind as Kind>::Config;

    /// How many places of the ring can be filled.
    fn room(&self) -> u32;

    /// Tables of other shapes and stages that the unit walks.
    fn other_roots(&self) -> Vec<Root> {
        Vec::new()
    }

    /// Another root of the same shape.
    fn other_root(&self) -> Root {
        let Root { address, .. } = self.root();
        Root {
            address: address ^ 0x30_0000,
            ..self.root()
        }
    }

    /// Commands when one of the device's tables is attached, the first or not.
    fn attaching(&self, space: (DomainId, Option<Pasid>), first: bool) -> Vec<Self::Received>;

    /// Commands when one of the device's tables is detached, the last or not.
    fn detaching(
        &self,
        root: Root,
        space: (DomainId, Option<Pasid>),
        last: bool,
    ) -> Vec<Self::Received>;

    /// Units with other numbers of PASIDs, and the pages that a device's table and that of its last PASID take.
    fn pasid_tables(&self) -> Vec<(Self, u64)>;

    /// Has the device make requests with these PASIDs all the time.
    fn watch(&self, model: &Self::Model, pasids: &[Option<Pasid>]) {
        let _ = (model, pasids);
    }

    /// Tables that watched requests have found at any time.
    fn seen(&self, model: &Self::Model) -> Vec<Seen> {
        let _ = model;
        Vec::new()
    }

    /// True when the unit answers translation requests of a device.
    fn serves_tlb(&self, model: &Self::Model, device: DeviceId) -> bool;

    /// The command between those for the unit and those for devices.
    fn barrier(&self) -> Option<Self::Received>;

    /// The command for 2^`mask` pages in the device's TLB, which has the depth of [`TLB`].
    fn in_device(&self, pasid: Option<Pasid>, address: u64, mask: u32) -> Self::Received;

    /// The same as [`detaching`](Self::detaching), of a device with a TLB.
    fn detaching_with_tlb(
        &self,
        root: Root,
        space: (DomainId, Option<Pasid>),
        last: bool,
    ) -> Vec<Self::Received> {
        let mut received = self.detaching(root, space, last);
        let wait = received.pop();
        received.extend(self.barrier());
        received.push(self.in_device(space.1, 0, 52));
        received.extend(wait);
        received
    }

    /// Commands when the TLB of a device that was attached is switched.
    fn switching(&self) -> Vec<Self::Received> {
        Vec::new()
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

    /// Further checks of a unit that has stopped, by what it has received, and of its driver.
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
    /// Changes of the unit, each of which takes itself back, and the register that differs meanwhile.
    fn other_states(&self) -> Vec<StateChange<Self::Model>> {
        Vec::new()
    }
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
            before_it_is_enabled_nothing_is_sent_and_devices_are_there_afterwards
            attaching_refuses_by_name_and_changes_nothing
            a_root_that_a_domain_cannot_have_is_refused_and_the_old_one_stays
            a_wait_that_is_not_answered_ends_and_fails_the_flush
            each_register_that_does_not_follow_is_named
            faults_come_oldest_first_and_a_full_log_says_so_and_goes_on
            one_gather_costs_one_wait_and_nothing_of_it_is_left
            ranges_levels_and_tables_are_said_as_the_unit_has_them
            nothing_is_flushed_where_nothing_can_be_cached
        }
    };
}

/// The cases of every unit, and those of units with a ring of commands.
macro_rules! every_queue {
    ($rig:ty) => {
        $crate::suite::every_unit!($rig);
        $crate::suite::every_unit! { $rig:
            a_device_is_found_when_attached_and_not_any_more_when_detached
            an_attach_that_is_not_answered_leaves_no_translation
            without_memory_nothing_is_taken_and_nothing_is_attached
            tearing_down_gives_every_page_back
            memory_beyond_the_units_addresses_is_refused_by_name
            address_spaces_of_one_device_come_and_go_alone
            tables_of_pasids_are_as_large_as_their_number_asks
            a_devices_tlb_is_invalidated_after_the_unit
            tlbs_are_refused_by_name_where_they_cannot_be_served
            a_queue_that_is_not_emptied_fills_and_says_so
            a_unit_that_stops_fails_one_flush_and_serves_the_next
            no_batch_waits_for_what_fresh_memory_holds
            a_successor_goes_on_in_the_queue_and_with_the_devices
            a_successor_knows_all_address_spaces_and_tlbs
            a_unit_that_does_not_answer_is_not_frozen
            a_successor_takes_no_old_ticket_for_an_answer
        }
    };
}

pub(crate) use {every_queue, every_unit};
