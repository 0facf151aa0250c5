//! A unit in software.
//!
//! It does what a device's IOMMU does, as far as a program can see it: it walks tables in memory
//! with [`Walker`], keeps translations in an IOTLB and tables in a cache of upper levels, both
//! tagged by domain, and so shows what was not flushed. Each device thread owns a [`Port`].
//!
//! # The flush protocol
//!
//! The promise: when a flush returns, no access uses a translation or a table that was taken away
//! before the flush began. Three rules make it true.
//!
//! **Guard.** A port has a turn number, odd while it is inside an access. An access (look-up or
//! walk, and the copy of at most 2 MiB of data) lies between
//!
//! ```text
//! port:     turn := odd;  fence SeqCst;  read context, caches, tables;  copy;  turn := even (release)
//! flusher:  empty entries, unlink tables;  fence SeqCst;  remove from caches;  fence SeqCst;
//!           read turns (acquire);  wait until each odd one has changed
//! ```
//!
//! The two fences that face each other, the port's and the flusher's second one, are those of the store-buffer pattern:
//! either the flusher sees the odd turn, and waits for this access to end; or the port's fence is later, and then all
//! its reads see the tables emptied and the caches cleaned. Data that an access copied before it left is visible to the
//! flusher, since it acquires what the port released. With a barrier that the flusher executes for all threads (see
//! [`iopt::reclaim`]) a read of 8 bytes takes 11 ns and not 17; but each flush then interrupts the processors of all of
//! them, 8 µs where two map and unmap, and a driver that unmaps strictly flushes for each buffer.
//!
//! **Clock.** Flushers clean one after the other, and the flush clock is odd meanwhile. A walk
//! reads the clock before its first look into a cache or a table. It may insert what it found only
//! under the lock of the set concerned, and only if the clock was even at its start and is still
//! the same then:
//!
//! * a walk that began before the cleaning, and comes to a set after it was cleaned, gets the
//!   set's lock from the flusher and so sees a clock that has moved on: it inserts nothing. If it
//!   comes to the set before, the flusher finds what it inserted;
//! * a walk that began during the cleaning may have met a cached table that was still to be
//!   removed, and more tables below it: it inserts nothing at all;
//! * a walk that began after it (reading the even clock acquires all the cleaning) has met nothing
//!   that was taken away.
//!
//! So nothing that a flush has removed is ever inserted again. That a walk may still *use* it is
//! the guard's affair.
//!
//! **Context.** A port keeps a copy of its device's context (root and domain) with the context's
//! generation, and looks at the generation inside its guard, at each access. A detach takes the
//! context away, raises the generation, and waits for the device's ports by the same pattern; then
//! it removes the domain's cached entries if this was its last device. The device stays a member of
//! its domain until the wait has succeeded, so that flushes of the domain wait for it too.
//!
//! The context also changes when the domain's table has grown: then it is replaced, and the flush
//! waits for the ports before it cleans, since an access that had looked at the context before would
//! insert what it found through the old root.
//!
//! A port that is created, or a device that is attached, after the flusher has collected the turns
//! got the registry's lock after it, and so sees everything that the flusher had done.
//!
//! # Accessed and dirty bits
//!
//! A unit whose [`UnitCapabilities::dirty_tracking`] is set marks entries as it walks, each by one
//! compare-and-exchange (see [`iopt::walk`]); tables must be writable then. A cached translation of a
//! clean leaf serves no write: the first one walks again and marks the leaf before a byte is written.
//! A leaf that was cleaned in its table but not flushed is not marked again while it is cached, as by
//! hardware.
//!
//! # What it is not
//!
//! It knows no PASID; requests are user requests.

mod cache;
mod faults;
mod port;
mod registry;
mod slot;
#[cfg(test)]
mod tests;

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use iopt::walk::{WalkMemory, Walker};
use iopt::{FormatId, Invalidation, Root};
use runs::{Iova, PageSizes, Span};

use crate::capabilities::{FormatSupport, UnitCapabilities};
use crate::error::{FlushError, UnitAttachError};
use crate::fault::Fault;
use crate::unit::{DeviceId, DomainId, NodeId, Unit};

use cache::Cache;
use faults::FaultLog;
use registry::{Busy, Registry};

pub use cache::CacheShape;
pub use port::{Aborted, Port};
pub use slot::AccessCounters;

/// How a [`SoftwareUnit`] is made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SoftwareConfig {
    /// Capabilities of the unit: see [`SoftwareUnit::full_capabilities`].
    pub capabilities: UnitCapabilities,
    /// The memory node that it says it belongs to.
    pub node: Option<NodeId>,
    /// The IOTLB: leaves of all sizes.
    pub iotlb: CacheShape,
    /// The cache of upper levels.
    pub upper: CacheShape,
    /// How many faults are kept until they are drained.
    pub fault_log: usize,
    /// How long a flush or a detach waits for accesses under way.
    pub flush_timeout: Duration,
    /// Removes a translation only if its level is among those that an invalidation names, as units
    /// with level hints do (SMMUv3's TTL). A gather that names the levels of the new leaves instead
    /// of the old ones is found out. Without it, whatever overlaps is removed.
    pub level_hints: bool,
}

impl Default for SoftwareConfig {
    /// All formats, 64 × 4 translations, 16 × 4 tables, 256 faults, 5 seconds, level hints.
    fn default() -> Self {
        Self {
            capabilities: full_capabilities(),
            node: None,
            iotlb: CacheShape { sets: 64, ways: 4 },
            upper: CacheShape { sets: 16, ways: 4 },
            fault_log: 256,
            flush_timeout: Duration::from_secs(5),
            level_hints: true,
        }
    }
}

/// Work done by flushes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct FlushCounters {
    /// Flushes, of ranges and of whole domains.
    pub flushes: u64,
    /// Translations and tables that they removed from the caches.
    pub removed: u64,
    /// Flushes that had to wait for an access under way.
    pub waits: u64,
}

/// A unit in software, over table memory `T` and data memory `D`. Clones are the same unit.
pub struct SoftwareUnit<T, D> {
    shared: Arc<Shared<T, D>>,
}

/// State shared by the unit and its ports.
struct Shared<T, D> {
    tables: T,
    data: D,
    config: SoftwareConfig,
    iotlb: Cache,
    upper: Cache,
    clock: FlushClock,
    registry: Registry,
    faults: FaultLog,
    flushes: AtomicU64,
    removed: AtomicU64,
    waits: AtomicU64,
}

/// The flush clock of the protocol.
#[derive(Default)]
struct FlushClock {
    time: AtomicU64,
    cleaning: Mutex<()>,
}

impl FlushClock {
    /// The time, for a walk that begins now. Odd: it may insert nothing.
    #[inline]
    fn now(&self) -> u64 {
        self.time.load(Ordering::Acquire)
    }

    /// Cleans caches, one cleaner at a time, while the clock is odd.
    fn clean<R>(&self, clean: impl FnOnce() -> R) -> R {
        let _alone = self.cleaning.lock().unwrap_or_else(PoisonError::into_inner);
        let time = self.time.load(Ordering::Relaxed);
        self.time.store(time + 1, Ordering::SeqCst);
        let result = clean();
        self.time.store(time + 2, Ordering::Release);
        result
    }
}

/// Everything that the walker can read.
fn full_capabilities() -> UnitCapabilities {
    let large = PageSizes::from_bits(1 << 12 | 1 << 21 | 1 << 30);
    let any = PageSizes::from_log2_range(12, 52);
    let mut capabilities = UnitCapabilities::new();
    capabilities.snoop_control = true;
    capabilities.domain_bits = 32;
    [
        (FormatId::AmdV1, 0b111_1110, any),
        (FormatId::X86_64, 0b11_0000, large),
        (FormatId::VtdSs, 0b11_1000, large),
    ]
    .into_iter()
    .fold(capabilities, |all, (format, levels, page_sizes)| {
        all.with_format(FormatSupport {
            format,
            levels,
            page_sizes,
        })
    })
}

impl<T, D> SoftwareUnit<T, D> {
    /// A unit that reads tables in `tables` and moves data in `data`.
    pub fn new(tables: T, data: D) -> Self {
        Self::with_config(tables, data, SoftwareConfig::default())
    }

    /// A unit with its own sizes and abilities.
    pub fn with_config(tables: T, data: D, config: SoftwareConfig) -> Self {
        Self {
            shared: Arc::new(Shared {
                tables,
                data,
                iotlb: Cache::new(config.iotlb),
                upper: Cache::new(config.upper),
                clock: FlushClock::default(),
                registry: Registry::default(),
                faults: FaultLog::new(config.fault_log),
                flushes: AtomicU64::new(0),
                removed: AtomicU64::new(0),
                waits: AtomicU64::new(0),
                config,
            }),
        }
    }

    /// All that a software unit can do: every format with every number of levels, 52 bits of
    /// output addresses, snoop control, 32-bit domains. A configuration may offer less; or more, as
    /// dirty tracking, which costs a second walk for each leaf that is written to.
    pub fn full_capabilities() -> UnitCapabilities {
        full_capabilities()
    }

    /// A port by which `device` accesses memory; one for each thread that plays the device. The
    /// device may be attached before or after.
    pub fn port(&self, device: DeviceId) -> Port<T, D> {
        let (device, slot) = self.shared.registry.open(device);
        Port::new(self.shared.clone(), device, slot)
    }

    /// The table memory.
    pub fn tables(&self) -> &T {
        &self.shared.tables
    }

    /// The data memory.
    pub fn data(&self) -> &D {
        &self.shared.data
    }

    /// Sum of the counters of all devices. Busy ports are read while they count.
    pub fn counters(&self) -> AccessCounters {
        self.shared.registry.counters(None)
    }

    /// Counters of a device.
    pub fn device_counters(&self, device: DeviceId) -> AccessCounters {
        self.shared.registry.counters(Some(device))
    }

    /// Work done by flushes so far.
    pub fn flush_counters(&self) -> FlushCounters {
        FlushCounters {
            flushes: self.shared.flushes.load(Ordering::Relaxed),
            removed: self.shared.removed.load(Ordering::Relaxed),
            waits: self.shared.waits.load(Ordering::Relaxed),
        }
    }

    /// [`Unit::invalidate`] in plain terms, for a program that emulates another unit's commands:
    /// `leaf_levels` has bit *n* for level *n*; `tables` removes the domain's cached tables too.
    /// No range at all, with `tables`, stands for everything.
    pub fn invalidate_ranges(
        &self,
        domain: DomainId,
        ranges: &[Span<Iova>],
        leaf_levels: u32,
        tables: bool,
    ) -> Result<(), FlushError> {
        if ranges.is_empty() && !tables {
            return Ok(());
        }
        let shared = &*self.shared;
        let everything = ranges.is_empty();
        let levels = match leaf_levels {
            // Nothing named restricts nothing.
            0 => u64::MAX,
            _ if !shared.config.level_hints => u64::MAX,
            named => u64::from(named),
        };
        let possible = shared.leaf_sizes(domain);
        shared.flush(domain, || {
            // Tables first: the order is of no matter while the clock is odd.
            let mut removed = if tables {
                shared.upper.remove_domain(domain)
            } else {
                0
            };
            if everything {
                removed += shared.iotlb.remove_domain(domain);
            }
            for range in ranges.iter().filter(|range| !range.is_empty()) {
                removed += shared.iotlb.remove(domain, *range, levels, possible);
            }
            removed
        })
    }
}

impl<T, D> Shared<T, D> {
    /// All leaf sizes that the domain's translations can have; 0 for a domain without devices.
    fn leaf_sizes(&self, domain: DomainId) -> u64 {
        let support = |root: Root| self.config.capabilities.format(root.format);
        self.registry
            .root(domain)
            .and_then(support)
            .map_or(u64::MAX << 12, |support| support.page_sizes.bits())
    }

    /// The walker for a root, if the unit can walk it.
    fn walker(&self, root: Root) -> Result<Walker, UnitAttachError> {
        let capabilities = &self.config.capabilities;
        capabilities.check(&root)?;
        let sizes = capabilities
            .format(root.format)
            .map_or(PageSizes::NONE, |s| s.page_sizes);
        let tracks = capabilities.dirty_tracking;
        Ok(Walker::new(root)
            .with_hardware_accessed(tracks)
            .with_hardware_dirty(tracks)
            .with_updates(true)
            .with_input_bits(capabilities.input_bits)
            .with_output_bits(capabilities.output_bits)
            .with_page_sizes(sizes)
            .with_snoop_control(capabilities.snoop_control))
    }

    /// Has the domain's devices walk from another root. When it returns, no access through the old
    /// one is under way that could still put something into a cache.
    fn set_root(&self, domain: DomainId, root: Root) -> Result<(), FlushError> {
        let walker = self
            .walker(root)
            .map_err(|cause| FlushError::Root { domain, cause })?;
        self.registry.set_root(domain, walker);
        fence(Ordering::SeqCst);
        self.wait_in(domain, self.registry.busy_in(domain))
    }

    fn flush(&self, domain: DomainId, clean: impl FnOnce() -> u64) -> Result<(), FlushError> {
        // The caller's stores to the tables come before the cleaning.
        fence(Ordering::SeqCst);
        let removed = self.clock.clean(clean);
        fence(Ordering::SeqCst);
        let busy = self.registry.busy_in(domain);
        self.flushes.fetch_add(1, Ordering::Relaxed);
        self.removed.fetch_add(removed, Ordering::Relaxed);
        if !busy.is_empty() {
            self.waits.fetch_add(1, Ordering::Relaxed);
        }
        self.wait_in(domain, busy)
    }

    /// [`wait`](Self::wait) for a flush of `domain`.
    fn wait_in(&self, domain: DomainId, busy: Vec<Busy>) -> Result<(), FlushError> {
        self.wait(busy)
            .map_err(|(device, busy, waited)| FlushError::TimedOut {
                domain,
                device,
                busy,
                waited,
            })
    }

    /// Waits until all of these accesses are over. The error is the first device that is still
    /// busy, the number of busy ports, and the time waited.
    fn wait(&self, mut busy: Vec<Busy>) -> Result<(), (DeviceId, u32, Duration)> {
        let mut begun = None;
        let mut rounds = 0u32;
        loop {
            busy.retain(|access| !access.is_over());
            let Some(first) = busy.first() else {
                return Ok(());
            };
            // Most accesses are over in less time than it takes to ask for the time.
            rounds = rounds.saturating_add(1);
            if rounds < 200 {
                std::hint::spin_loop();
                continue;
            }
            let waited = begun.get_or_insert_with(Instant::now).elapsed();
            if waited >= self.config.flush_timeout {
                return Err((first.device, busy.len() as u32, waited));
            }
            std::thread::yield_now();
        }
    }
}

impl<T, D> Unit for SoftwareUnit<T, D>
where
    T: WalkMemory + Send + Sync,
    D: Send + Sync,
{
    fn capabilities(&self) -> UnitCapabilities {
        self.shared.config.capabilities
    }

    fn node(&self) -> Option<NodeId> {
        self.shared.config.node
    }

    fn attach(
        &self,
        device: DeviceId,
        domain: DomainId,
        root: Root,
    ) -> Result<(), UnitAttachError> {
        let walker = self.shared.walker(root)?;
        let bits = self.shared.config.capabilities.domain_bits;
        if domain.0.checked_shr(bits).unwrap_or(0) != 0 {
            return Err(UnitAttachError::DomainId { domain, bits });
        }
        self.shared.registry.attach(device, domain, walker)
    }

    fn detach(&self, device: DeviceId) -> Result<(), UnitAttachError> {
        let shared = &*self.shared;
        let leaving = shared.registry.begin_detach(device)?;
        fence(Ordering::SeqCst);
        shared
            .wait(leaving.busy())
            .map_err(|(device, busy, waited)| UnitAttachError::TimedOut {
                device,
                busy,
                waited,
            })?;
        // The last device is gone, and no device can attach to the domain meanwhile: no walk of the
        // domain is under way that could insert.
        shared.registry.finish_detach(leaving, |domain| {
            let clean = || shared.upper.remove_domain(domain) + shared.iotlb.remove_domain(domain);
            let removed = shared.clock.clean(clean);
            shared.removed.fetch_add(removed, Ordering::Relaxed);
        });
        Ok(())
    }

    fn invalidate(&self, domain: DomainId, what: &Invalidation) -> Result<(), FlushError> {
        if let Some(root) = what.new_root() {
            self.shared.set_root(domain, root)?;
            return self.invalidate_domain(domain);
        }
        self.invalidate_ranges(
            domain,
            what.ranges(),
            what.leaf_levels(),
            what.tables_unlinked(),
        )
    }

    fn invalidate_domain(&self, domain: DomainId) -> Result<(), FlushError> {
        self.invalidate_ranges(domain, &[], 0, true)
    }

    fn drain_faults(&self, sink: &mut dyn FnMut(Fault)) -> u64 {
        self.shared.faults.drain(sink)
    }
}

impl<T, D> Clone for SoftwareUnit<T, D> {
    fn clone(&self) -> Self {
        Self {
            shared: self.shared.clone(),
        }
    }
}

impl<T, D> fmt::Debug for SoftwareUnit<T, D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SoftwareUnit")
            .field("config", &self.shared.config)
            .field("counters", &self.counters())
            .field("flushes", &self.flush_counters())
            .finish_non_exhaustive()
    }
}
