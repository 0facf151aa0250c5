//! Intel VT-d.
//!
//! Intel Virtualization Technology for Directed I/O, architecture specification (D51397), revision
//! 4.0 and later; sections are named by their titles where their numbers have changed between
//! revisions. [`Vtd`] drives one unit (one remapping hardware unit of the DMAR table) over
//! [`Registers`] and over table memory for what the unit reads.
//!
//! # Modes
//!
//! A unit works in one [`Mode`]: legacy, with second-stage tables; or scalable, where all requests go
//! through second-stage or through first-stage tables. The offered format follows from it. In scalable
//! mode requests with a PASID have tables of their own ([`Config::pasid_bits`]). A device that asks for
//! translations (ATS) is refused them until its TLB was [announced](Unit::set_device_tlb). Nested and
//! pass-through translation, page requests and interrupt remapping are not driven.
//!
//! # Orders
//!
//! **Enable** (sections "Global Command Register", "Root Table Address Register", and 6.2 on caching):
//! a queue that somebody else has left is emptied and switched off; our queue is switched on; stores
//! are flushed out of write buffers; the root table's address is written, then taken over by SRTP;
//! context cache, PASID cache and IOTLB are invalidated, in this order, as a whole; translation is
//! switched on; protected memory regions are switched off last, since until then they are what
//! protects. Translation that was on already stays on all the time. Each step waits for its status.
//!
//! **Attach**: the tables that lead to the entry, from the last to the first, then the entry, P last
//! (`structures.rs` has the order of stores). Nothing is cached of an entry that was not present, but
//! in caching mode: there the context cache (in domain 0, where such entries are kept), the PASID cache
//! and the domain's translations are invalidated (section 6.1 "Caching Mode").
//!
//! **Detach**: P is cleared, then the context entry (in scalable mode the PASID entry), the domain's
//! translations and the device's are invalidated in this order, each cache after the one that it is filled
//! from (section 6.5 "Invalidation of Translation Caches"), with all reads and writes drained; then the
//! entry is emptied. Units without draining (CAP.DRD, CAP.DWD) let requests that they have translated go
//! on. Other PASIDs of the device stay.
//!
//! **Invalidate**: `flush.rs` says what, and `commands.rs` of the crate which pages; one wait at the end of
//! all. The hint IH ("leaves only") is given when no tables were unlinked, and never in caching mode, where
//! a new table may stand where the unit remembers none.
//!
//! **TLBs in devices**: attach and flushes look at what was said of the device before. In scalable mode the
//! context entry that is there changes by one store (DTE), and the context cache is invalidated; nobody
//! has translations through it then. A device that does not answer in time (ITE) fails the batch. TLBs are
//! off while the unit is [disabled](Vtd::disable): what a device keeps over that time is not invalidated.
//!
//! **Mapping** needs stores only, but in caching mode or with write buffers (RWBF): both are reported
//! as [`caches_not_present`](Capabilities::caches_not_present).
//!
//! **Faults**: `faults.rs`. A record names a page, and no domain.
//!
//! **Handover**: the description says whether the unit translates, the mode, the bits of a PASID, the root
//! table, and pages and last ticket of the queue, where the notes on members are too (`notes.rs`). The successor compares GSTS, RTADDR, IQA, IQH and IQT with it.
//!
//! # Locks and bounds
//!
//! One spinning lock covers structures and commands: attach, detach and flushes take turns. Each holds
//! it for at most a few [bounded](Registers::wait) waits.

mod attach;
mod capabilities;
mod command;
mod config;
mod faults;
mod flush;
mod queue;
mod structures;
#[cfg(test)]
mod tests;

use core::iter::Empty;

use iopt::{Chain, Invalidation, Root, TABLE_BYTES, TableMemory};
use runs::Span;
use spin::Mutex;

use crate::capabilities::{Capabilities, reaches};
use crate::commands::{self, Block, CommandCounters};
use crate::error::{AttachError, FlushError, UnitError};
use crate::fault::Fault;
use crate::handover::{Frozen, Held, UnitKind};
use crate::notes::Notes;
use crate::registers::{Registers, wait_until};
use crate::unit::{DeviceId, DeviceTlb, DomainId, NodeId, Pasid, Unit};

use capabilities::{
    Features, GSTS, IQH, IQT, PMEN, PROTECT, PROTECTED, QUEUE, RTADDR, SCALABLE, SET_ROOT,
    TRANSLATION,
};
use command::Command;
use queue::Commands;
use structures::{Structures, page};

pub use config::{Config, Mode, ProbeError};

/// One VT-d unit, over its registers `R` and memory `M` for root table, context tables and queue.
///
/// `M` gives pages of 4 KiB with 64-bit cells, at addresses below the unit's `host_bits`. For units
/// without [coherent walks](Capabilities::coherent_walks) it must write lines back
/// ([`iopt::observe::NonCoherent`]), as the memory of the page tables must.
///
/// Dropping it changes nothing: the unit goes on, and its memory stays taken. See
/// [`tear_down`](Self::tear_down).
#[derive(Debug)]
pub struct Vtd<R, M> {
    registers: R,
    memory: M,
    config: Config,
    features: Features,
    capabilities: Capabilities,
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Inner {
    structures: Structures,
    ring: Commands,
    notes: Notes,
}

impl Inner {
    /// All pages that the driver has taken, with their names.
    fn for_each_page<M: TableMemory>(&self, memory: &M, each: &mut impl FnMut(&'static str, u64)) {
        self.structures.for_each(memory, each);
        // Each page is asked for the next one before it may be gone.
        self.notes
            .further(memory)
            .for_each(|page| each("notes of members", page));
        self.ring.for_each_page(each);
    }
}

/// What stands for requests without a PASID: the PASID that context entries assign to them (RID_PASID).
const NO_PASID: u32 = 0;

/// Where message-signalled interrupts are written: never translated (section 3.14 "Handling Requests
/// to Interrupt Address Range").
const INTERRUPTS: Span = Span::new(0xfee0_0000, 1 << 20);

impl<R: Registers, M: TableMemory> Vtd<R, M> {
    /// Looks what the unit can do, and takes memory for it. The unit is not changed yet; devices can
    /// be attached before it is [enabled](Self::enable).
    pub fn new(registers: R, memory: M, config: Config) -> Result<Self, ProbeError> {
        const {
            assert!(
                <M::Cell as iopt::Cell>::BYTES == 8,
                "structures have 64-bit words"
            );
        }
        let features = Features::read(&registers)?;
        let capabilities = features.capabilities(&config)?;
        let bits = 52;
        reaches(&memory, bits).map_err(|last| ProbeError::Addresses { last, bits })?;
        let structures = Structures::new(&memory, &config).map_err(ProbeError::Memory)?;
        let mut taken = Chain::empty();
        taken.push(&memory, structures.root);
        let mut take = || {
            let page = page(&memory)?;
            taken.push(&memory, page);
            Ok(page)
        };
        let pages = match features.queue() {
            true => take().and_then(|entries| Ok([entries, take()?])),
            false => Ok([0; 2]),
        };
        let pages = match pages {
            Ok(pages) => pages,
            Err(cause) => {
                memory.reclaim(taken);
                return Err(ProbeError::Memory(cause));
            }
        };
        let ring = queue::new(pages, config.mode, features, 0);
        let notes = Notes::new(ring.layout.answers());
        Ok(Self {
            registers,
            memory,
            config,
            features,
            capabilities,
            inner: Mutex::new(Inner {
                structures,
                ring,
                notes,
            }),
        })
    }

    /// Has the unit translate. From now on a device that is not attached faults.
    ///
    /// After an error translation may be on or off; it can be called again.
    pub fn enable(&self) -> Result<(), UnitError> {
        let registers = &self.registers;
        let Inner {
            structures, ring, ..
        } = &mut *self.inner.lock();
        self.close_queue()?;
        ring.set_up(registers)?;
        ring.open = true;
        queue::flush_writes(registers, self.features)?;
        let mode = match self.config.mode {
            Mode::Legacy => 0,
            Mode::ScalableSecond | Mode::ScalableFirst => SCALABLE,
        };
        registers.write64(RTADDR, structures.root | mode);
        queue::command(registers, SET_ROOT, true, "GSTS.RTPS = 1")?;
        let all = [
            Some(Command::AllContexts),
            self.all_pasids(),
            Some(Command::All),
        ];
        self.issue(ring, all.into_iter().flatten())?;
        queue::command(registers, TRANSLATION, true, "GSTS.TES = 1")?;
        if self.features.protected_memory() {
            registers.write32(PMEN, registers.read32(PMEN) & !PROTECT);
            wait_until(registers, "PMEN.PRS = 0", || {
                Ok(registers.read32(PMEN) & PROTECTED == 0)
            })?;
        }
        Ok(())
    }

    /// Has the unit stop translating: devices reach all of memory again, at the addresses that they
    /// name.
    pub fn disable(&self) -> Result<(), UnitError> {
        let ring = &mut self.inner.lock().ring;
        queue::command(&self.registers, TRANSLATION, false, "GSTS.TES = 0")?;
        self.close_queue()?;
        ring.open = false;
        Ok(())
    }

    /// [Disables](Self::disable) the unit and gives its memory back. After an error the memory stays
    /// taken, since the unit may still read it; who wants to try again calls `disable` before.
    pub fn tear_down(self) -> Result<(R, M), UnitError> {
        self.disable()?;
        let inner = self.inner.into_inner();
        let mut chain = Chain::empty();
        let memory = self.memory;
        inner.for_each_page(&memory, &mut |_, page| chain.push(&memory, page));
        memory.reclaim(chain);
        Ok((self.registers, memory))
    }

    /// Lets go of the unit, which goes on translating, for a successor to [adopt](Self::adopt):
    /// waits until all commands are complete, and hands what the unit still uses to `each`.
    ///
    /// With an error the driver comes back, and nothing has changed.
    #[expect(clippy::result_large_err, reason = "a driver is moved now and then")]
    pub fn freeze(self, each: &mut dyn FnMut(Held)) -> Result<(Frozen, R, M), (Self, UnitError)> {
        // With the queue empty, what follows is about a unit that does nothing by itself.
        let quiet = self.issue(&mut self.inner.lock().ring, core::iter::empty());
        if let Err(cause) = quiet {
            return Err((self, cause));
        }
        let inner = self.inner.into_inner();
        inner.for_each_page(&self.memory, &mut |name, start| {
            let span = Span::new(start, TABLE_BYTES);
            each(Held::Structure { name, span });
        });
        inner.structures.search(&self.memory, |there| {
            let (domain, root) = (DomainId(there.domain.into()), there.root);
            each(Held::Table { domain, root });
            None::<()>
        });
        let words = inner.ring.describe(&inner.structures);
        let kind = UnitKind::Vtd;
        Ok((Frozen { kind, words }, self.registers, self.memory))
    }

    /// Takes a unit over that a predecessor has [frozen](Self::freeze), and that translates all the
    /// time. `memory` is the same memory, in which what was listed then is not handed out;
    /// configuration is as it was.
    pub fn adopt(
        registers: R,
        memory: M,
        config: Config,
        frozen: &Frozen,
    ) -> Result<Self, ProbeError> {
        let features = Features::read(&registers)?;
        let capabilities = features.capabilities(&config)?;
        let bits = 52;
        reaches(&memory, bits).map_err(|last| ProbeError::Addresses { last, bits })?;
        let words = frozen.words(UnitKind::Vtd).map_err(ProbeError::Adopt)?;
        let (root, ring) =
            Commands::adopt(&registers, words, &config, features).map_err(ProbeError::Adopt)?;
        let structures = Structures {
            root,
            mode: config.mode,
            pasid_bits: config.pasid_bits,
        };
        let notes = Notes::adopt(&memory, ring.layout.answers());
        Ok(Self {
            registers,
            memory,
            config,
            features,
            capabilities,
            inner: Mutex::new(Inner {
                structures,
                ring,
                notes,
            }),
        })
    }

    /// What the unit was told so far.
    pub fn counters(&self) -> CommandCounters {
        self.inner.lock().ring.counters
    }

    /// The registers.
    pub const fn registers(&self) -> &R {
        &self.registers
    }

    /// The memory for structures and queue.
    pub const fn memory(&self) -> &M {
        &self.memory
    }

    #[cfg(test)]
    fn root(&self) -> u64 {
        self.inner.lock().structures.root
    }

    /// Empties the queue, whoever's it is, and switches it off (section "Queued Invalidation
    /// Interface": only then its address may change).
    fn close_queue(&self) -> Result<(), UnitError> {
        let registers = &self.registers;
        if registers.read32(GSTS) & QUEUE == 0 {
            return Ok(());
        }
        wait_until(registers, "IQH = IQT", || {
            Ok(registers.read64(IQH) == registers.read64(IQT))
        })?;
        queue::command(registers, QUEUE, false, "GSTS.QIES = 0")
    }
}

impl<R, M> Unit for Vtd<R, M>
where
    R: Registers + Send + Sync,
    M: TableMemory + Send + Sync,
{
    fn capabilities(&self) -> Capabilities {
        self.capabilities
    }

    fn node(&self) -> Option<NodeId> {
        self.config.node
    }

    fn reserved(&self, _device: DeviceId, sink: &mut dyn FnMut(Span)) {
        sink(INTERRUPTS);
    }

    fn attach(&self, device: DeviceId, domain: DomainId, root: Root) -> Result<(), AttachError> {
        self.do_attach(device, NO_PASID, domain, root)
    }

    fn detach(&self, device: DeviceId) -> Result<(), AttachError> {
        self.do_detach(device, NO_PASID)
    }

    fn attach_pasid(
        &self,
        device: DeviceId,
        pasid: Pasid,
        domain: DomainId,
        root: Root,
    ) -> Result<(), AttachError> {
        self.capabilities.check_pasid(device, pasid)?;
        self.do_attach(device, pasid.0, domain, root)
    }

    fn detach_pasid(&self, device: DeviceId, pasid: Pasid) -> Result<(), AttachError> {
        self.capabilities.check_pasid(device, pasid)?;
        self.do_detach(device, pasid.0)
    }

    fn set_device_tlb(&self, device: DeviceId, tlb: Option<DeviceTlb>) -> Result<(), AttachError> {
        self.do_set_device_tlb(device, tlb)
    }

    fn invalidate(&self, domain: DomainId, what: &Invalidation) -> Result<(), FlushError> {
        let Some(tag) = self.tag(domain) else {
            // No device can be in it.
            return Ok(());
        };
        if let Some(root) = what.new_root() {
            self.check_root(domain, tag, root)?;
            return self.invalidate_domain(domain);
        }
        if what.is_empty() {
            return Ok(());
        }
        // With tables and no range, what the tables held is not named.
        let mask = self
            .features
            .page_mask()
            .filter(|_| !what.ranges().is_empty());
        let blocks = mask.and_then(|most| commands::blocks(what, most));
        let leaf_only = !what.tables_unlinked() && !self.features.caching_mode();
        self.flush(domain, tag, blocks, leaf_only)
    }

    fn invalidate_domain(&self, domain: DomainId) -> Result<(), FlushError> {
        match self.tag(domain) {
            Some(tag) => self.flush(domain, tag, None::<Empty<Block>>, false),
            None => Ok(()),
        }
    }

    fn drain_faults(&self, sink: &mut dyn FnMut(Fault)) -> u64 {
        let (registers, features) = (&self.registers, self.features);
        let (first, records) = faults::pending(registers, features).unwrap_or((0, 0));
        for n in 0..records {
            let alone = self.inner.lock();
            let fault = faults::take(registers, features, first + n, self.config.segment);
            // Not under the lock: the sink may flush.
            drop(alone);
            fault.into_iter().for_each(&mut *sink);
        }
        let _alone = self.inner.lock();
        u64::from(faults::take_overflow(registers))
    }
}
