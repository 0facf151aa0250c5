//! The shell of every hardware driver: its state, its life cycle, and the checks that come before the unit is
//! involved.
//!
//! A driver is a [`HardwareUnit`] of its [`Kind`]. The shell holds registers, memory, configuration, what the unit can
//! do, and, under one lock of the kind that the registers name, what the driver knows of its structures and queues.
//! Each driver adds two traits: [`Operations`], the orders in which structures are written and commands given; and, for
//! kinds whose structures lie in memory, [`InMemory`], where they lie and what a successor must know of them.
//!
//! The state of a device is kept in the unit's own structure where it has one in memory: an entry that
//! was withdrawn, but not confirmed, differs from an empty one in its other bits. So drivers need no
//! allocator, and a successor finds the state there. Data that every flush needs and that lies far
//! apart in the structures is noted besides (`notes.rs`).
//!
//! 1. **New**: the registers say what the unit can do; the memory must lie within the unit's addresses;
//!    structures are taken from it. The unit is not changed. After an error nothing is taken.
//! 2. **Enable**, **disable**: the driver's orders, under the lock.
//! 3. **Attach**, **detach**, **invalidate**: PASID and root are checked here; the rest is the driver's.
//! 4. **Tear down**: the unit is disabled, then all structures are given back.
//! 5. **Freeze**: with the queue empty the unit does nothing by itself; structures and tables are listed, and
//!    the driver is gone. Memory that the unit does not use is given back.
//! 6. **Adopt**: as new, but structures are found, and compared with the description.

use core::fmt;

use iopt::{Chain, Invalidation, NoTables, Root, TABLE_BYTES, TableMemory};
use lock_api::Mutex;
use runs::{Iova, Pa, Span};

use crate::capabilities::{UnitCapabilities, reaches};
use crate::commands::CommandCounters;
use crate::error::{FlushError, UnitAttachError, UnitError};
use crate::fault::Fault;
use crate::handover::{Frozen, UnitAdoptError, UnitKind, UnitMemory, WORDS};
use crate::registers::Registers;
use crate::ring::{CommandQueue, Ring};
use crate::setup::{UnitProbeError, UnitSetupError};
use crate::unit::{DeviceId, DeviceTlb, DomainId, NodeId, Pasid, Unit};

/// A unit of hardware.
pub trait Driver: Unit {
    /// Has the unit translate. From now on a device that is not attached faults.
    ///
    /// After an error translation may be on or off; it can be called again.
    fn enable(&self) -> Result<(), UnitError>;

    /// Has the unit stop translating: devices reach all of memory again, at the addresses that they
    /// name.
    fn disable(&self) -> Result<(), UnitError>;

    /// The commands that the unit has done so far.
    fn counters(&self) -> CommandCounters;
}

/// A unit of hardware of one kind, over its registers `R` and memory `M` for what it reads and writes. Its names
/// are those of the kinds: [`Vtd`](crate::Vtd), [`AmdVi`](crate::AmdVi), [`SmmuV3`](crate::SmmuV3),
/// [`RiscvIommu`](crate::RiscvIommu), and [`Smmu`](crate::Smmu), which has no memory.
///
/// Dropping it changes nothing: the unit goes on, and its memory stays taken. See
/// [`tear_down`](Self::tear_down).
#[derive(Debug)]
pub struct HardwareUnit<K: Kind, R: Registers, M> {
    pub(crate) registers: R,
    pub(crate) memory: M,
    pub(crate) config: K::Config,
    pub(crate) features: K::Features,
    pub(crate) capabilities: UnitCapabilities,
    pub(crate) inner: Mutex<R::Lock, K::Inner>,
}

/// A kind of hardware.
pub trait Kind: Sized {
    /// Parameters that are not in the registers.
    type Config: Copy + fmt::Debug;
    /// Capabilities that the registers report.
    type Features: Copy + fmt::Debug;
    /// State of the driver: structures and queues.
    type Inner: fmt::Debug;

    /// The device addresses that are never translated.
    const RESERVED: &'static [Span<Iova>] = &[];

    /// The memory node, if it is known.
    fn node(config: &Self::Config) -> Option<NodeId>;

    /// The commands so far.
    fn counters(inner: &Self::Inner) -> CommandCounters;
}

/// Where a table is attached: a device's requests without a PASID, or those with one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    pub(crate) device: DeviceId,
    pub(crate) pasid: Option<Pasid>,
}

impl Place {
    pub(crate) const fn of(device: DeviceId, pasid: Option<Pasid>) -> Self {
        Self { device, pasid }
    }

    /// The PASID, and 0 for requests without one.
    pub(crate) const fn number(self) -> u32 {
        match self.pasid {
            Some(pasid) => pasid.0,
            None => 0,
        }
    }
}

/// The orders of a driver. The head of each driver's module has them.
pub trait Operations: Attachments + Flushes {
    /// [`Driver::enable`].
    fn start(&self) -> Result<(), UnitError>;

    /// [`Driver::disable`].
    fn stop(&self) -> Result<(), UnitError>;

    /// [`Unit::drain_faults`].
    fn drain(&self, sink: &mut dyn FnMut(Fault)) -> u64;
}

/// Operations that attach and detach devices.
pub trait Attachments {
    /// [`Unit::attach`]. The PASID was checked.
    fn attach_at(&self, place: Place, domain: DomainId, root: Root) -> Result<(), UnitAttachError>;

    /// [`Unit::detach`]. The PASID was checked.
    fn detach_at(&self, place: Place) -> Result<(), UnitAttachError>;

    /// Refuses a device that the unit cannot know.
    fn check_device(&self, device: DeviceId) -> Result<(), UnitAttachError> {
        let _ = device;
        Ok(())
    }

    /// [`Unit::set_device_tlb`]. The device was checked, and that the unit serves TLBs in devices.
    fn switch_device_tlb(
        &self,
        device: DeviceId,
        tlb: Option<DeviceTlb>,
    ) -> Result<(), UnitAttachError> {
        let _ = (device, tlb);
        Ok(())
    }

    /// A root of the domain, if it has devices, that is not the one that is asked for.
    fn other_root(&self, domain: DomainId, asked: Root) -> Option<Root>;
}

/// Invalidation when mappings are removed.
pub trait Flushes: Attachments {
    /// Has the unit invalidate what is named of a domain, or all of it.
    fn flush(&self, domain: DomainId, what: Option<&Invalidation>) -> Result<(), FlushError>;

    /// Has the domain's devices translate through a root from now on.
    fn change_root(&self, domain: DomainId, root: Root) -> Result<(), FlushError> {
        self.keep_root(domain, root)
    }

    /// The same for tables that do not grow: the root can only be the one that is there.
    fn keep_root(&self, domain: DomainId, root: Root) -> Result<(), FlushError> {
        same_root(self.other_root(domain, root), domain, root)
            .map_err(|cause| FlushError::Root { domain, cause })?;
        self.flush(domain, None)
    }
}

/// Refuses a root where the domain has another.
pub(crate) fn same_root(
    there: Option<Root>,
    domain: DomainId,
    asked: Root,
) -> Result<(), UnitAttachError> {
    match there {
        None => Ok(()),
        Some(there) => Err(UnitAttachError::OtherRoot {
            domain,
            there,
            asked,
        }),
    }
}

impl UnitCapabilities {
    /// The unit's number of a domain that it can have.
    pub(crate) fn tag(&self, domain: DomainId) -> Option<u16> {
        let fits = domain.0.checked_shr(self.domain_bits).unwrap_or(0) == 0;
        fits.then_some(domain.0 as u16)
    }

    /// Refuses a domain that the unit cannot have.
    pub(crate) fn check_domain(&self, domain: DomainId) -> Result<u16, UnitAttachError> {
        let bits = self.domain_bits;
        self.tag(domain)
            .ok_or(UnitAttachError::DomainId { domain, bits })
    }
}

impl<K: Kind, R: Registers, M> HardwareUnit<K, R, M> {
    /// The commands that the unit has done so far.
    pub fn counters(&self) -> CommandCounters {
        K::counters(&self.inner.lock())
    }

    /// The registers, also for the unit's own interrupts, which the driver neither routes nor enables.
    ///
    /// They are programmed after [`enable`](Self::enable), which switches those of SMMUs and RISC-V off:
    ///
    /// * VT-d: FEDATA, FEADDR and FEUADDR, then FECTL.IM = 0;
    /// * AMD-Vi: EventIntEn of the control register, and MSI of the unit's PCI function; a handler clears
    ///   EventLogInt of the status register, then [drains](Unit::drain_faults);
    /// * SMMUv3: EVENTQ_IRQ_CFGn, then IRQ_CTRL;
    /// * SMMUv1/v2: none, faults are polled for, since attaches clear SCTLR.CFIE;
    /// * RISC-V: icvec and msi_cfg_tbl, then fqcsr.fie, again after each drain that has returned more than 0; a
    ///   handler clears ipsr.fip, then drains.
    pub const fn registers(&self) -> &R {
        &self.registers
    }
}

impl<K: Kind, R: Registers, M> HardwareUnit<K, R, M>
where
    Self: Operations,
{
    /// Has the unit translate. From now on a device that is not attached faults.
    ///
    /// After an error translation may be on or off; it can be called again. Faults that were not
    /// [drained](Unit::drain_faults) may be lost. The head of the driver's module says what becomes of
    /// devices meanwhile.
    pub fn enable(&self) -> Result<(), UnitError> {
        self.start()
    }

    /// Has the unit stop translating: devices reach all of memory again, at the addresses that they
    /// name. Faults that were not [drained](Unit::drain_faults) may be lost.
    pub fn disable(&self) -> Result<(), UnitError> {
        self.stop()
    }
}

impl<K: Kind, R: Registers, M> Unit for HardwareUnit<K, R, M>
where
    Self: Operations + Send + Sync,
{
    fn capabilities(&self) -> UnitCapabilities {
        self.capabilities
    }

    fn node(&self) -> Option<NodeId> {
        K::node(&self.config)
    }

    fn reserved(&self, _device: DeviceId, sink: &mut dyn FnMut(Span<Iova>)) {
        K::RESERVED.iter().copied().for_each(sink);
    }

    fn attach(
        &self,
        device: DeviceId,
        domain: DomainId,
        root: Root,
    ) -> Result<(), UnitAttachError> {
        self.attach_at(Place::of(device, None), domain, root)
    }

    fn detach(&self, device: DeviceId) -> Result<(), UnitAttachError> {
        self.detach_at(Place::of(device, None))
    }

    fn attach_pasid(
        &self,
        device: DeviceId,
        pasid: Pasid,
        domain: DomainId,
        root: Root,
    ) -> Result<(), UnitAttachError> {
        self.capabilities.check_pasid(device, pasid)?;
        self.attach_at(Place::of(device, Some(pasid)), domain, root)
    }

    fn detach_pasid(&self, device: DeviceId, pasid: Pasid) -> Result<(), UnitAttachError> {
        self.capabilities.check_pasid(device, pasid)?;
        self.detach_at(Place::of(device, Some(pasid)))
    }

    fn set_device_tlb(
        &self,
        device: DeviceId,
        tlb: Option<DeviceTlb>,
    ) -> Result<(), UnitAttachError> {
        self.check_device(device)?;
        if tlb.is_some() && !self.capabilities.device_tlbs {
            return Err(UnitAttachError::NoDeviceTlbs { device });
        }
        self.switch_device_tlb(device, tlb)
    }

    fn invalidate(&self, domain: DomainId, what: &Invalidation) -> Result<(), FlushError> {
        if let Some(root) = what.new_root() {
            return self.change_root(domain, root);
        }
        if what.is_empty() {
            return Ok(());
        }
        // With tables and no range, what the tables held is not named.
        self.flush(domain, Some(what).filter(|what| !what.ranges().is_empty()))
    }

    fn invalidate_domain(&self, domain: DomainId) -> Result<(), FlushError> {
        self.flush(domain, None)
    }

    fn drain_faults(&self, sink: &mut dyn FnMut(Fault)) -> u64 {
        self.drain(sink)
    }
}

impl<K: Kind, R: Registers, M> Driver for HardwareUnit<K, R, M>
where
    Self: Operations + Send + Sync,
{
    fn enable(&self) -> Result<(), UnitError> {
        self.start()
    }

    fn disable(&self) -> Result<(), UnitError> {
        self.stop()
    }

    fn counters(&self) -> CommandCounters {
        self.counters()
    }
}

/// A kind whose structures and command queue lie in memory.
pub trait InMemory: Kind {
    /// Kind of unit whose descriptions it adopts.
    const KIND: UnitKind;
    /// Its command queue.
    type Queue: CommandQueue;

    /// Reads the unit's capabilities. A configuration that asks for more than there can be is cut.
    fn probe<R: Registers>(
        registers: &R,
        config: &mut Self::Config,
    ) -> Result<(Self::Features, UnitCapabilities), UnitProbeError>;

    /// Structures in which nothing is attached, and a queue. After an error nothing is taken.
    fn build<M: TableMemory>(
        memory: &M,
        config: &Self::Config,
        features: Self::Features,
    ) -> Result<Self::Inner, UnitSetupError>;

    /// The command queue.
    fn ring(inner: &mut Self::Inner) -> &mut Ring<Self::Queue>;

    /// Hands all memory that the unit may use to `each`, by name; it may be gone when that returns.
    fn for_each_structure<M: TableMemory>(
        inner: &Self::Inner,
        memory: &M,
        config: &Self::Config,
        each: &mut impl FnMut(&'static str, Span<Pa>),
    );

    /// Hands the pages that only the driver uses, and that its successor makes anew, to `each`.
    fn for_each_own_page(inner: &Self::Inner, each: &mut impl FnMut(u64)) {
        let _ = (inner, each);
    }

    /// Hands each table through which a device translates to `each`.
    fn for_each_table<M: TableMemory>(
        inner: &Self::Inner,
        memory: &M,
        config: &Self::Config,
        each: &mut impl FnMut(DomainId, Root),
    );

    /// Describes the unit's state for a successor.
    fn describe(inner: &Self::Inner, config: &Self::Config) -> [u64; WORDS];

    /// Rebuilds the state of a unit that stayed in use, from the description and the registers.
    fn resume<R: Registers, M: TableMemory>(
        unit: (&R, &M),
        config: &Self::Config,
        features: Self::Features,
        words: [u64; WORDS],
    ) -> Result<Self::Inner, UnitAdoptError>;
}

/// So many pages, or none; `taken` hands what was taken before to its argument, to go back with them.
pub(crate) fn pages<const N: usize, M: TableMemory>(
    memory: &M,
    taken: impl FnOnce(&mut dyn FnMut(&'static str, Span<Pa>)),
) -> Result<[u64; N], NoTables> {
    let mut pages = [0; N];
    for n in 0..N {
        match memory.allocate(TABLE_BYTES as usize) {
            Ok(page) => pages[n] = page,
            Err(cause) => {
                let mut back = Back::new(memory);
                taken(&mut |_, span| back.push(span));
                pages[..n].iter().for_each(|page| back.page(*page));
                back.reclaim();
                return Err(cause);
            }
        }
    }
    Ok(pages)
}

/// Memory on its way back.
pub(crate) struct Back<'m, M> {
    memory: &'m M,
    chain: Chain,
}

impl<'m, M: TableMemory> Back<'m, M> {
    pub(crate) fn new(memory: &'m M) -> Self {
        let chain = Chain::empty();
        Self { memory, chain }
    }

    /// A stretch, in pieces of the size of the memory's tables.
    pub(crate) fn push(&mut self, span: Span<Pa>) {
        for offset in (0..span.len).step_by(M::TABLE_BYTES as usize) {
            self.chain.push(self.memory, span.start + offset);
        }
    }

    pub(crate) fn page(&mut self, page: u64) {
        self.push(Span::new(page, TABLE_BYTES));
    }

    pub(crate) fn reclaim(self) {
        self.memory.reclaim(self.chain);
    }
}

impl<K: InMemory, R: Registers, M: TableMemory> HardwareUnit<K, R, M> {
    /// Reads what the unit can do, and takes memory for it. The unit is not changed yet; devices can
    /// be attached before it is [enabled](Self::enable).
    pub fn new(registers: R, memory: M, config: K::Config) -> Result<Self, UnitSetupError> {
        const {
            assert!(
                <M::Cell as iopt::Cell>::BYTES == 8,
                "structures have 64-bit words"
            );
        }
        Self::over(registers, memory, config, |_, memory, config, features| {
            K::build(memory, config, features)
        })
    }

    /// Takes a unit over that a predecessor has [frozen](Self::freeze), and that translates all the
    /// time. `memory` is the same memory, in which what was listed then is not handed out;
    /// configuration is as it was.
    pub fn adopt(
        registers: R,
        memory: M,
        config: K::Config,
        frozen: &Frozen,
    ) -> Result<Self, UnitAdoptError> {
        let resume = |registers: &R, memory: &M, config: &K::Config, features| {
            let words = frozen.words(K::KIND)?;
            K::resume((registers, memory), config, features, words)
        };
        Self::over(registers, memory, config, resume)
    }

    fn over<E: From<UnitSetupError>>(
        registers: R,
        memory: M,
        mut config: K::Config,
        inner: impl FnOnce(&R, &M, &K::Config, K::Features) -> Result<K::Inner, E>,
    ) -> Result<Self, E> {
        let probed = K::probe(&registers, &mut config);
        let (features, capabilities) = probed.map_err(UnitSetupError::Probe)?;
        let bits = capabilities.output_bits;
        reaches(&memory, bits).map_err(|last| UnitSetupError::Addresses { last, bits })?;
        let inner = inner(&registers, &memory, &config, features)?;
        Ok(Self {
            registers,
            memory,
            config,
            features,
            capabilities,
            inner: Mutex::new(inner),
        })
    }

    /// The memory for structures and queues.
    pub const fn memory(&self) -> &M {
        &self.memory
    }

    /// Has the unit do commands, and waits until they are complete.
    pub(crate) fn issue(
        &self,
        ring: &mut Ring<K::Queue>,
        commands: impl IntoIterator<Item = <K::Queue as CommandQueue>::Command>,
    ) -> Result<(), UnitError> {
        ring.issue((&self.registers, &self.memory), commands)
    }

    /// Releases the unit, which goes on translating, for a successor to [adopt](Self::adopt):
    /// waits until all commands are complete, and hands what the unit still uses to `each`.
    ///
    /// With an error the driver comes back, and nothing has changed.
    #[expect(clippy::result_large_err, reason = "a driver is moved now and then")]
    pub fn freeze(
        self,
        each: &mut dyn FnMut(UnitMemory),
    ) -> Result<(Frozen, R, M), (Self, UnitError)> {
        // With the queue empty, what follows is about a unit that does nothing by itself.
        let quiet = self.issue(K::ring(&mut self.inner.lock()), None);
        if let Err(cause) = quiet {
            return Err((self, cause));
        }
        let (memory, config, inner) = (self.memory, self.config, self.inner.into_inner());
        K::for_each_structure(&inner, &memory, &config, &mut |name, span| {
            each(UnitMemory::Structure { name, span });
        });
        K::for_each_table(&inner, &memory, &config, &mut |domain, root| {
            each(UnitMemory::Table { domain, root });
        });
        let (kind, words) = (K::KIND, K::describe(&inner, &config));
        let mut back = Back::new(&memory);
        K::for_each_own_page(&inner, &mut |page| back.page(page));
        back.reclaim();
        Ok((Frozen { kind, words }, self.registers, memory))
    }
}

impl<K: InMemory, R: Registers, M: TableMemory> HardwareUnit<K, R, M>
where
    Self: Operations,
{
    /// [Disables](Self::disable) the unit and gives its memory back. After an error the memory stays
    /// taken, since the unit may still read it; who wants to try again calls `disable` before.
    pub fn tear_down(self) -> Result<(R, M), UnitError> {
        self.disable()?;
        let (memory, config, inner) = (self.memory, self.config, self.inner.into_inner());
        let mut back = Back::new(&memory);
        K::for_each_structure(&inner, &memory, &config, &mut |_, span| back.push(span));
        K::for_each_own_page(&inner, &mut |page| back.page(page));
        back.reclaim();
        Ok((self.registers, memory))
    }
}
