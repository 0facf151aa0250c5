//! The events of a simulation, in order.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, VecDeque};

use fastrand::Rng;
use iopt::walk::{Access, UpperTable, WalkCache};
use runs::{Run, Span};

use super::lru::{Key, Lru};
use super::{DeviceModel, Order, Outcome, Simulation, SimulationError};

/// Picoseconds.
type Time = u64;

/// Requests for the same page of this size wait for one walk.
const PAGE_LOG2: u32 = 12;

fn picoseconds(ns: f64) -> Time {
    (ns * 1e3).round() as Time
}

/// Next event of a request, which is named by its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// The walk that it started ends.
    Walked(usize),
    /// Its translation is with the device.
    Translated(usize),
    /// It is through.
    Done(usize),
}

pub(super) struct Machine<'a> {
    given: &'a Simulation<'a>,
    now: Time,
    /// With a number, so that what happens at the same time happens in the order it was found.
    events: BinaryHeap<Reverse<(Time, u64, Event)>>,
    found: u64,
    units: Vec<Unit>,
    devices: Vec<Device<'a>>,
    /// One for each slot of each device.
    requests: Vec<Request>,
    running: usize,
}

struct Unit {
    iotlb: Lru<Run>,
    upper: Vec<Lru<UpperTable>>,
    busy: u32,
    /// Requests whose walks wait for their turn.
    queue: VecDeque<usize>,
    /// Domain and page → the request that is walked for.
    under_way: HashMap<(usize, u64), usize>,
}

struct Device<'a> {
    model: &'a DeviceModel,
    tlb: Option<Lru<()>>,
    /// Where each stream goes on.
    next: Vec<u64>,
    random: Rng,
    /// Time of a request on the link.
    transfer: Time,
    /// When its link is free for requests of its own.
    link_free: Time,
    /// When it is free for those of peers, which go the other way.
    peer_free: Time,
    done: u64,
    counted_from: Time,
    /// The sum of what requests took.
    taken: u128,
    /// Counts that are not complete yet.
    outcome: Outcome,
    /// Complete counts; the device goes on with requests, so that others do not have it easier.
    result: Option<Outcome>,
}

#[derive(Default)]
struct Request {
    device: usize,
    iova: u64,
    started: Time,
    /// The page that was found.
    page: Option<Run>,
    /// Others that wait for its walk.
    waiting: Vec<usize>,
}

impl<'a> Machine<'a> {
    pub(super) fn new(given: &'a Simulation<'a>) -> Self {
        let units = given.units.iter().map(|unit| Unit {
            iotlb: Lru::new(unit.iotlb_entries),
            upper: unit
                .upper_entries
                .iter()
                .map(|room| Lru::new(*room))
                .collect(),
            busy: 0,
            queue: VecDeque::new(),
            under_way: HashMap::new(),
        });
        let mut seeds = Rng::with_seed(given.seed);
        let devices = given.devices.iter().map(|model| Device {
            model,
            tlb: model.tlb.map(|tlb| Lru::new(tlb.entries)),
            next: vec![0; model.streams.len()],
            random: seeds.fork(),
            transfer: on_link(model.request_bytes, model),
            link_free: 0,
            peer_free: 0,
            done: 0,
            counted_from: 0,
            taken: 0,
            outcome: Outcome::default(),
            result: None,
        });
        let slots = given
            .devices
            .iter()
            .enumerate()
            .flat_map(|(device, model)| {
                (0..model.outstanding).map(move |_| Request {
                    device,
                    ..Request::default()
                })
            });
        Self {
            given,
            now: 0,
            events: BinaryHeap::new(),
            found: 0,
            units: units.collect(),
            devices: devices.collect(),
            requests: slots.collect(),
            running: given
                .devices
                .iter()
                .filter(|device| device.outstanding > 0)
                .count(),
        }
    }

    pub(super) fn run(mut self) -> Result<Vec<Outcome>, SimulationError> {
        for request in 0..self.requests.len() {
            self.start(request)?;
        }
        while self.running > 0 {
            let Some(Reverse((time, _, event))) = self.events.pop() else {
                break;
            };
            self.now = time;
            match event {
                Event::Walked(request) => self.walked(request)?,
                Event::Translated(request) => self.transfer(request),
                Event::Done(request) => self.done(request)?,
            }
        }
        let results = self.devices.into_iter().map(|device| device.result);
        Ok(results.map(Option::unwrap_or_default).collect())
    }

    fn after(&mut self, delay: Time, event: Event) {
        self.found += 1;
        self.events
            .push(Reverse((self.now + delay, self.found, event)));
    }

    /// A slot is free: its next request.
    fn start(&mut self, slot: usize) -> Result<(), SimulationError> {
        let request = &mut self.requests[slot];
        let device = &mut self.devices[request.device];
        request.iova = device.next_address();
        request.started = self.now;
        request.page = None;
        let (iova, domain) = (request.iova, device.model.domain);
        let kept = device.tlb.as_mut().and_then(|tlb| tlb.find(domain, iova));
        if let (Some(()), Some(tlb)) = (kept, device.model.tlb) {
            device.outcome.device_tlb_hits += 1;
            self.after(picoseconds(tlb.hit_ns), Event::Translated(slot));
            return Ok(());
        }
        self.ask(slot)
    }

    /// The unit is asked.
    fn ask(&mut self, slot: usize) -> Result<(), SimulationError> {
        let request = &self.requests[slot];
        let (place, iova) = (request.device, request.iova);
        let model = self.devices[place].model;
        let unit = &mut self.units[model.unit];
        let page = (model.domain, iova >> PAGE_LOG2);
        if let Some(page) = unit.iotlb.find(model.domain, iova) {
            self.requests[slot].page = Some(page);
            self.devices[place].outcome.iotlb_hits += 1;
            self.after(0, Event::Translated(slot));
        } else if let Some(walked) = unit.under_way.get(&page) {
            self.requests[*walked].waiting.push(slot);
            self.devices[place].outcome.joined += 1;
        } else {
            unit.under_way.insert(page, slot);
            if unit.busy < self.given.units[model.unit].walks {
                self.walk(slot)?;
            } else {
                unit.queue.push_back(slot);
            }
        }
        Ok(())
    }

    /// The tables are walked for a request, which takes until its event.
    fn walk(&mut self, slot: usize) -> Result<(), SimulationError> {
        let request = &mut self.requests[slot];
        let device = &mut self.devices[request.device];
        let domain = self.given.domains[device.model.domain];
        let unit = &mut self.units[device.model.unit];
        unit.busy += 1;
        let mut upper = Upper {
            levels: &mut unit.upper,
            domain: device.model.domain,
        };
        let memory = domain.watched();
        let walked = domain
            .walker()
            .walk(&memory, request.iova, Access::Read, &mut upper)
            .map_err(|fault| SimulationError::Fault {
                device: request.device,
                fault,
            })?;
        request.page = Some(walked.page);
        let from = self.given.units[device.model.unit].node;
        let mut taken = 0.0;
        device.outcome.walks += 1;
        for node in memory.into_nodes() {
            let reads = &self.given.reads;
            if let Some(pair) = from.zip(node).filter(|(from, node)| from != node) {
                device.outcome.remote_reads += 1;
                taken += reads.pairs.get(&pair).unwrap_or(&reads.remote_ns);
            } else {
                device.outcome.local_reads += 1;
                taken += reads.local_ns;
            }
        }
        self.after(picoseconds(taken), Event::Walked(slot));
        Ok(())
    }

    /// A walk has ended: everybody who waits for it goes on, and the next walk starts.
    fn walked(&mut self, slot: usize) -> Result<(), SimulationError> {
        let request = &mut self.requests[slot];
        let (page, waiting) = (request.page, std::mem::take(&mut request.waiting));
        let model = self.devices[request.device].model;
        let unit = &mut self.units[model.unit];
        unit.under_way
            .remove(&(model.domain, request.iova >> PAGE_LOG2));
        if let Some(page) = page {
            unit.iotlb.insert(key(model.domain, page), page);
        }
        unit.busy -= 1;
        let own = picoseconds(self.given.units[model.unit].miss_ns);
        self.after(own, Event::Translated(slot));
        for other in waiting {
            self.requests[other].page = page;
            self.after(own, Event::Translated(other));
        }
        while self.units[model.unit].busy < self.given.units[model.unit].walks {
            let Some(next) = self.units[model.unit].queue.pop_front() else {
                break;
            };
            self.turn(next)?;
        }
        Ok(())
    }

    /// The turn of a request that has waited to be walked for. A large page may have come meanwhile.
    fn turn(&mut self, slot: usize) -> Result<(), SimulationError> {
        let request = &self.requests[slot];
        let (place, iova) = (request.device, request.iova);
        let model = self.devices[place].model;
        let unit = &mut self.units[model.unit];
        let Some(page) = unit.iotlb.find(model.domain, iova) else {
            return self.walk(slot);
        };
        unit.under_way.remove(&(model.domain, iova >> PAGE_LOG2));
        self.devices[place].outcome.iotlb_hits += 1;
        for request in std::mem::take(&mut self.requests[slot].waiting)
            .into_iter()
            .chain([slot])
        {
            self.requests[request].page = Some(page);
            self.after(0, Event::Translated(request));
        }
        Ok(())
    }

    /// The data goes over the links.
    fn transfer(&mut self, slot: usize) {
        let request = &self.requests[slot];
        let place = request.device;
        let device = &mut self.devices[place];
        if let (Some(tlb), Some(page)) = (&mut device.tlb, request.page) {
            tlb.insert(key(device.model.domain, page), ());
        }
        let model = device.model;
        let (mut start, mut takes) = (self.now.max(device.link_free), device.transfer);
        if let Some(peer) = model.peer.map(|peer| &self.devices[peer]) {
            start = start.max(peer.peer_free);
            takes = takes.max(on_link(model.request_bytes, peer.model));
        }
        let end = start + takes;
        self.devices[place].link_free = end;
        if let Some(peer) = model.peer {
            self.devices[peer].peer_free = end;
        }
        let done = end.max(start + picoseconds(model.latency_ns));
        self.after(done - self.now, Event::Done(slot));
    }

    fn done(&mut self, slot: usize) -> Result<(), SimulationError> {
        let request = &self.requests[slot];
        let device = &mut self.devices[request.device];
        device.done += 1;
        device.taken += u128::from(self.now - request.started);
        if device.done == self.given.warm_up {
            device.outcome = Outcome::default();
            device.taken = 0;
            device.counted_from = self.now;
        }
        let requests = self.given.requests;
        if device.done == self.given.warm_up + requests {
            let picoseconds = (self.now - device.counted_from).max(1) as f64;
            let bytes = (requests * device.model.request_bytes) as f64;
            device.result = Some(Outcome {
                bytes_per_second: bytes / (picoseconds * 1e-12),
                requests,
                mean_ns: device.taken as f64 / requests as f64 / 1e3,
                ..device.outcome
            });
            self.running -= 1;
        }
        self.start(slot)
    }
}

/// Returns the time of a request on the link of a device.
fn on_link(bytes: u64, device: &DeviceModel) -> Time {
    picoseconds(bytes as f64 * 1e9 / device.link_bytes_per_second)
}

fn key(domain: usize, page: Run) -> Key {
    Key {
        domain,
        first: page.iova,
        log2: page.len.trailing_zeros(),
    }
}

impl Device<'_> {
    fn next_address(&mut self) -> u64 {
        let streams = &self.model.streams;
        let stream = self.random.usize(..streams.len());
        let Span { start, len, .. } = streams[stream];
        let bytes = self.model.request_bytes;
        match self.model.order {
            Order::Random => start + self.random.u64(..len / bytes) * bytes,
            Order::Sequential => {
                let offset = self.next[stream];
                let next = offset + bytes;
                self.next[stream] = if next < len { next } else { 0 };
                start + offset
            }
        }
    }
}

/// A unit's cache of upper levels, as the walker asks it.
struct Upper<'a> {
    levels: &'a mut [Lru<UpperTable>],
    domain: usize,
}

impl WalkCache for Upper<'_> {
    fn find(&mut self, iova: u64) -> Option<UpperTable> {
        let domain = self.domain;
        self.levels
            .iter_mut()
            .find_map(|level| level.find(domain, iova))
    }

    fn found(&mut self, table: &UpperTable) {
        let key = Key {
            domain: self.domain,
            first: table.iova,
            log2: table.span_log2,
        };
        if let Some(level) = self.levels.get_mut(usize::from(table.level)) {
            level.insert(key, *table);
        }
    }
}
