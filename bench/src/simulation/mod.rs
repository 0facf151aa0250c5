//! Devices that do DMA through IOMMU units, event by event, in simulated time.
//!
//! A [`Simulation`] is given devices, units and tables. The tables are real: the engine of [`iopt`]
//! has filled them, and [`Walker`](iopt::walk::Walker) reads them, entry by entry, as the software
//! unit does. How often a unit misses, how many entries it reads and how many of them lie on another
//! node comes out of that and of simulated caches; only how long things take is put in.
//!
//! # What happens to a request
//!
//! 1. A device keeps as many requests under way as it has slots. Each goes to one of its streams,
//!    picked at random, and there to the next address or to a random one.
//! 2. A device with a TLB of its own looks there first. A hit goes on to step 5.
//! 3. The unit looks into its IOTLB. A hit goes on to step 5.
//! 4. Otherwise the tables are walked. A request for a page (of 4 KiB) that is being walked for
//!    already waits for that walk. At most so many walks go on at the same time, others wait for
//!    their turn, and look into the IOTLB once more when it comes. A walk starts at the lowest table
//!    that the unit's caches of upper levels know; it takes the time of its reads, each local or
//!    remote by the nodes of unit and table. The translation goes into the IOTLB with the size of
//!    its leaf, and the answer takes the unit's own time besides.
//! 5. The data takes the link of the device, one request after the other, and with a peer that
//!    peer's link too. The request ends when it is through, or, if that is later, after the device's
//!    latency: the time from the start of the transfer to its answer.
//!
//! All caches keep what was used last, whole, without sets. A device with one slot and no latency is
//! what translates and transfers by turns; many slots and a latency are what reads with many
//! requests under way: both forms of the model in `docs/numa.md` are the same machine.
//!
//! Times are picoseconds in 64 bits. The same inputs and seed give the same outcome, bit by bit.

mod lru;
mod machine;
mod tables;

use std::collections::BTreeMap;

use iopt::walk::WalkFault;
use runs::{Iova, Span};

pub use tables::{Domain, DomainError};

/// Input of a simulation.
#[derive(Debug)]
pub struct Simulation<'a> {
    /// The units.
    pub units: Vec<UnitModel>,
    /// The devices.
    pub devices: Vec<DeviceModel>,
    /// The tables, by which devices are translated for.
    pub domains: Vec<&'a Domain>,
    /// How long reads of table entries take.
    pub reads: ReadTimes,
    /// Seed of random choices.
    pub seed: u64,
    /// Requests of each device before counting starts.
    pub warm_up: u64,
    /// Requests of each device that are counted.
    pub requests: u64,
}

/// How long a unit takes to read one table entry, in nanoseconds.
#[derive(Clone, Debug, PartialEq)]
pub struct ReadTimes {
    /// From memory of its own node, and where one of both nodes is not known.
    pub local_ns: f64,
    /// From memory of another node.
    pub remote_ns: f64,
    /// For pairs of a unit's node and a table's, where that is not `remote_ns`.
    pub pairs: BTreeMap<(u32, u32), f64>,
}

impl ReadTimes {
    /// Two nodes, or all equally far.
    pub const fn new(local_ns: f64, remote_ns: f64) -> Self {
        Self {
            local_ns,
            remote_ns,
            pairs: BTreeMap::new(),
        }
    }
}

/// An IOMMU unit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct UnitModel {
    /// Its node.
    pub node: Option<u32>,
    /// Translations that it keeps, of pages of any size.
    pub iotlb_entries: u32,
    /// Tables that it keeps by level: the first are those of level 0, which have the smallest pages.
    pub upper_entries: [u32; 5],
    /// Walks at the same time.
    pub walks: u32,
    /// Time of a miss besides its reads, in nanoseconds; no walk of others waits for it.
    pub miss_ns: f64,
}

/// A device.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceModel {
    /// The place of its unit.
    pub unit: usize,
    /// The place of its domain.
    pub domain: usize,
    /// Bytes of a request: a power of two up to 4096. Requests lie at multiples of it.
    pub request_bytes: u64,
    /// Requests under way; 0 for a device that asks for nothing, a peer of others.
    pub outstanding: u32,
    /// Throughput of its link, bytes a second.
    pub link_bytes_per_second: f64,
    /// From the start of a transfer to its answer, in nanoseconds; 0 for writes, which have none.
    pub latency_ns: f64,
    /// A TLB of its own (ATS).
    pub tlb: Option<DeviceTlb>,
    /// Where its streams go: whole requests each.
    pub streams: Vec<Span<Iova>>,
    /// How it goes through a stream.
    pub order: Order,
    /// The device whose memory the data goes to; `None` for memory of the host.
    pub peer: Option<usize>,
}

/// A TLB in a device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DeviceTlb {
    /// Translations that it keeps.
    pub entries: u32,
    /// Time of a translation that it has, in nanoseconds.
    pub hit_ns: f64,
}

/// How a device goes through a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// From its begin to its end, and again.
    Sequential,
    /// To a random place each time.
    Random,
}

/// Result of one device.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Outcome {
    /// Throughput, bytes a second.
    pub bytes_per_second: f64,
    /// Requests that were counted.
    pub requests: u64,
    /// Requests found in the device's own TLB.
    pub device_tlb_hits: u64,
    /// Found in the unit's IOTLB.
    pub iotlb_hits: u64,
    /// Requests that waited for a walk that was under way for another request.
    pub joined: u64,
    /// Walked for.
    pub walks: u64,
    /// Table entries that these walks read from the unit's node, or with a node not known.
    pub local_reads: u64,
    /// Table entries that they read from other nodes.
    pub remote_reads: u64,
    /// From its begin to its end, on average, in nanoseconds.
    pub mean_ns: f64,
}

impl Outcome {
    /// Table entries read for a request.
    pub fn reads_per_request(&self) -> f64 {
        (self.local_reads + self.remote_reads) as f64 / self.requests.max(1) as f64
    }

    /// The part of them that was on another node, 0 to 1.
    pub fn remote_share(&self) -> f64 {
        self.remote_reads as f64 / (self.local_reads + self.remote_reads).max(1) as f64
    }
}

/// Why a simulation came to no end.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SimulationError {
    /// Something cannot be simulated.
    #[error("{what} {place}: {why}")]
    Input {
        /// `unit`, `device`, or what else.
        what: &'static str,
        /// Its place.
        place: usize,
        /// The error.
        why: &'static str,
    },
    /// A device asked for what is not mapped.
    #[error("device {device}: {fault}")]
    Fault {
        /// Its place.
        device: usize,
        /// Fault of the walk.
        fault: WalkFault,
    },
}

impl Simulation<'_> {
    /// Runs until each device has done its requests; one outcome for each, in their order.
    /// That of a device without slots is empty.
    ///
    /// # Errors
    ///
    /// When something cannot be simulated, or a device asks for what is not mapped.
    pub fn run(&self) -> Result<Vec<Outcome>, SimulationError> {
        self.check()?;
        machine::Machine::new(self).run()
    }

    fn check(&self) -> Result<(), SimulationError> {
        let wrong = |what, place, why| Err(SimulationError::Input { what, place, why });
        // A second is more than anything takes, and far from the end of the clock.
        let time = |ns: f64| (0.0..1e9).contains(&ns);
        for (place, unit) in self.units.iter().enumerate() {
            let caches = unit.upper_entries.iter().chain([&unit.iotlb_entries]);
            if caches.max().is_some_and(|most| *most > lru::MOST) {
                return wrong("unit", place, "a cache has at most 4096 entries");
            }
            if !(1..=4096).contains(&unit.walks) || !time(unit.miss_ns) {
                return wrong(
                    "unit",
                    place,
                    "walks are 1 to 4096, and take less than a second",
                );
            }
        }
        let pairs = self.reads.pairs.values();
        let mut reads = pairs.chain([&self.reads.local_ns, &self.reads.remote_ns]);
        if !reads.all(|ns| time(*ns)) {
            return wrong("reads", 0, "they take less than a second");
        }
        if self.requests == 0 || self.requests.max(self.warm_up) > 1 << 32 {
            return wrong("requests", 0, "some are counted, and at most 2^32");
        }
        for (place, device) in self.devices.iter().enumerate() {
            let wrong = |why| wrong("device", place, why);
            if device.unit >= self.units.len() || device.domain >= self.domains.len() {
                return wrong("its unit or domain is not there");
            }
            if device.peer.is_some_and(|peer| peer >= self.devices.len()) {
                return wrong("its peer is not there");
            }
            let bytes = device.request_bytes;
            if !bytes.is_power_of_two() || bytes > 4096 {
                return wrong("requests have a power of two of bytes, up to 4096");
            }
            if device.outstanding > 4096 || !time(device.latency_ns) {
                return wrong("it has at most 4096 slots, and a latency of less than a second");
            }
            if !(1.0..1e15).contains(&device.link_bytes_per_second) {
                return wrong("its link carries 1 to 10^15 bytes a second");
            }
            if device
                .tlb
                .is_some_and(|tlb| tlb.entries > lru::MOST || !time(tlb.hit_ns))
            {
                return wrong("its TLB has at most 4096 entries and takes less than a second");
            }
            let whole = |stream: &Span<Iova>| {
                stream.len >= bytes
                    && (stream.start | stream.len) & (bytes - 1) == 0
                    && stream.start.checked_add(stream.len).is_some()
            };
            if device.streams.is_empty() || !device.streams.iter().all(whole) {
                return wrong("it has streams, of whole requests");
            }
        }
        Ok(())
    }
}
