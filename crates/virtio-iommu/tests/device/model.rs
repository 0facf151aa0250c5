//! Any sequence of requests, against a plain model of VIRTIO 1.3, 5.13.6: each answer, what every endpoint
//! reaches, and what is pinned and charged.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;

use proptest::prelude::*;
use runs::{Iova, Span};
use virtio_iommu::wire::{Request, attach_flags, map_flags};
use virtio_iommu::{Status, VirtioIommuConfig};

use crate::guest::{
    ENDPOINTS, Guest, HIGH, LAST, LOW, NEXT, PAGE, REGISTERS, RESERVED_PAGE, attach_with, config,
    detach, map, probe, unmap,
};

const BYPASS: u32 = attach_flags::BYPASS;
/// Pages of device addresses that are used: at the bottom, around x86's interrupts, and at the top.
const PLACES: [u64; 3] = [0, 0xfee0_0000 - 4 * PAGE, LAST + 1 - 8 * PAGE];
/// Starts of a mapping's memory: in a region, at the border of two, at the end of one, in a hole.
const MEMORY: [u64; 6] = [
    LOW.start + LOW.len / 2 - 2 * PAGE,
    NEXT.start - 3 * PAGE,
    NEXT.start + NEXT.len - 2 * PAGE,
    HIGH.start,
    REGISTERS.start,
    8 << 20,
];

/// One mapping.
#[derive(Clone, Copy)]
struct Mapping {
    last: u64,
    phys: u64,
    flags: u32,
}

#[derive(Default)]
struct Domain {
    bypass: bool,
    mappings: BTreeMap<u64, Mapping>,
}

/// Model of the specification.
#[derive(Default)]
struct Model {
    domains: BTreeMap<u32, Domain>,
    attached: BTreeMap<u32, u32>,
    bypass: bool,
}

/// Range that an endpoint cannot have mapped.
fn reserved(endpoint: u32) -> Option<RangeInclusive<u64>> {
    match endpoint {
        8 => Some(0xfee0_0000..=0xfeef_ffff),
        16 => Some(RESERVED_PAGE..=RESERVED_PAGE + PAGE - 1),
        _ => None,
    }
}

fn meet(a: &RangeInclusive<u64>, first: u64, last: u64) -> bool {
    *a.start() <= last && first <= *a.end()
}

/// True if all of it is memory, or all of it registers, as `registers` says; `None` if some of it is neither.
fn is_memory(first: u64, last: u64, registers: bool) -> Option<bool> {
    let pages = (first..=last).step_by(PAGE as usize);
    let mut kinds = pages.map(|page| {
        if REGISTERS.contains(page) {
            return Some(true);
        }
        let ram = [LOW, NEXT, HIGH].iter().any(|region| region.contains(page));
        ram.then_some(false)
    });
    kinds.try_fold(true, |right, kind| Some(right && kind? == registers))
}

impl Model {
    fn members(&self, domain: u32) -> impl Iterator<Item = u32> {
        let attached = self.attached.iter();
        attached
            .filter(move |(_, at)| **at == domain)
            .map(|(endpoint, _)| *endpoint)
    }

    fn leave(&mut self, endpoint: u32) {
        if let Some(domain) = self.attached.remove(&endpoint)
            && self.members(domain).next().is_none()
        {
            self.domains.remove(&domain);
        }
    }

    fn answer(&mut self, request: &Request) -> Status {
        match *request {
            Request::Attach(it) => {
                if !ENDPOINTS.contains(&it.endpoint) {
                    return Status::NoEnt;
                }
                let bypass = it.flags & BYPASS != 0;
                if let Some(there) = self.domains.get(&it.domain) {
                    if there.bypass != bypass {
                        return Status::Inval;
                    }
                    let mut mappings = there.mappings.iter();
                    let reserved = reserved(it.endpoint);
                    if self.attached.get(&it.endpoint) != Some(&it.domain)
                        && mappings.any(|(first, it)| {
                            reserved
                                .as_ref()
                                .is_some_and(|part| meet(part, *first, it.last))
                        })
                    {
                        return Status::Unsupp;
                    }
                }
                if self.attached.get(&it.endpoint) != Some(&it.domain) {
                    self.leave(it.endpoint);
                    self.attached.insert(it.endpoint, it.domain);
                    self.domains.entry(it.domain).or_default().bypass = bypass;
                }
                Status::Ok
            }
            Request::Detach(it) if !ENDPOINTS.contains(&it.endpoint) => Status::NoEnt,
            Request::Detach(it) if self.attached.get(&it.endpoint) != Some(&it.domain) => {
                Status::Inval
            }
            Request::Detach(it) => {
                self.leave(it.endpoint);
                Status::Ok
            }
            Request::Map(it) => {
                let Some(there) = self.domains.get(&it.domain) else {
                    return Status::NoEnt;
                };
                if there.bypass {
                    return Status::Inval;
                }
                let (first, last) = (it.virt_start, it.virt_end);
                if last > LAST {
                    return Status::Range;
                }
                let phys_last = it.phys_start + (last - first);
                let registers = it.flags & map_flags::MMIO != 0;
                // The first page that is no memory, or of the other kind, is what is answered.
                let kinds = (0..=(last - first) / PAGE).map(|page| {
                    let at = it.phys_start + page * PAGE;
                    is_memory(at, at, registers)
                });
                match kinds.into_iter().find(|kind| *kind != Some(true)) {
                    Some(None) => return Status::Fault,
                    Some(_) => return Status::Inval,
                    None => {}
                }
                assert_eq!(is_memory(it.phys_start, phys_last, registers), Some(true));
                let is_reserved = |id| reserved(id).is_some_and(|part| meet(&part, first, last));
                let is_reserved = self.members(it.domain).any(is_reserved);
                let mut mappings = there.mappings.iter();
                if is_reserved
                    || mappings.any(|(start, it)| meet(&(*start..=it.last), first, last))
                    || it.flags & (map_flags::READ | map_flags::WRITE) == 0
                {
                    return Status::Inval;
                }
                let mapping = Mapping {
                    last,
                    phys: it.phys_start,
                    flags: it.flags,
                };
                let there = self.domains.get_mut(&it.domain).unwrap();
                there.mappings.insert(first, mapping);
                Status::Ok
            }
            Request::Unmap(it) => {
                let Some(there) = self.domains.get_mut(&it.domain) else {
                    return Status::NoEnt;
                };
                if there.bypass {
                    return Status::Inval;
                }
                let range = it.virt_start..=it.virt_end;
                let affected = |start: &u64, it: &Mapping| meet(&range, *start, it.last);
                let cut = |(start, it): (&u64, &Mapping)| {
                    affected(start, it) && !(range.contains(start) && range.contains(&it.last))
                };
                if there.mappings.iter().any(cut) {
                    return Status::Range;
                }
                there.mappings.retain(|start, it| !affected(start, it));
                Status::Ok
            }
            Request::Probe(it) if ENDPOINTS.contains(&it.endpoint) => Status::Ok,
            Request::Probe(_) => Status::NoEnt,
        }
    }

    /// Returns true if an endpoint sees the guest's memory as it is.
    fn sees_all(&self, endpoint: u32) -> bool {
        match self.attached.get(&endpoint) {
            Some(domain) => self.domains[domain].bypass,
            None => self.bypass,
        }
    }

    /// Address that an access of an endpoint reaches, and the access allowed there.
    fn translate(&self, endpoint: u32, iova: u64) -> Option<(u64, u32)> {
        let rw = map_flags::READ | map_flags::WRITE;
        if self.sees_all(endpoint) {
            let page = iova & !(PAGE - 1);
            let there = [LOW, NEXT, HIGH, REGISTERS]
                .iter()
                .any(|part| part.contains(page));
            return there.then_some((iova, rw));
        }
        let domain = self.domains.get(self.attached.get(&endpoint)?)?;
        let (start, it) = domain.mappings.range(..=iova).next_back()?;
        (iova <= it.last).then_some((it.phys + (iova - start), it.flags))
    }

    /// Bytes of the guest's memory that are pinned, each once.
    fn pinned(&self) -> u64 {
        if ENDPOINTS.iter().any(|endpoint| self.sees_all(*endpoint)) {
            return LOW.len + NEXT.len + HIGH.len;
        }
        let mut pages = BTreeSet::new();
        for (start, it) in self.domains.values().flat_map(|domain| &domain.mappings) {
            if it.flags & map_flags::MMIO == 0 {
                pages.extend((it.phys..=it.phys + (it.last - start)).step_by(PAGE as usize));
            }
        }
        pages.len() as u64 * PAGE
    }
}

/// Action of a driver.
#[derive(Clone, Debug)]
enum Step {
    Request(Request),
    Bypass(bool),
    Reset,
}

fn range() -> impl Strategy<Value = Span<Iova>> {
    let place = prop::sample::select(&PLACES[..]);
    (place, 0..8u64, 1..5u64)
        .prop_map(|(place, first, count)| Span::new(place + first * PAGE, count * PAGE))
}

fn step() -> impl Strategy<Value = Step> {
    let endpoint = prop::sample::select(&[8, 8, 9, 16, 16, 7][..]);
    let domain = 1..4u32;
    let attach = (endpoint.clone(), domain.clone(), prop::bool::weighted(0.15))
        .prop_map(|(endpoint, domain, bypass)| attach_with(endpoint, domain, u32::from(bypass)));
    let detach =
        (endpoint.clone(), domain.clone()).prop_map(|(endpoint, domain)| detach(endpoint, domain));
    let flags = prop::sample::select(&[1, 2, 3, 3, 3, 7, 0][..]);
    let phys = (prop::sample::select(&MEMORY[..]), 0..3u64);
    let map = (domain.clone(), range(), phys, flags)
        .prop_map(|(domain, range, phys, flags)| map(domain, range, phys.0 + phys.1 * PAGE, flags));
    let wide = prop::sample::select(&PLACES[..]).prop_map(|place| Span::new(place, 12 * PAGE));
    let unmap = (domain, prop_oneof![3 => range(), 1 => wide])
        .prop_map(|(domain, range)| unmap(domain, range));
    prop_oneof![
        6 => attach.prop_map(Step::Request),
        2 => detach.prop_map(Step::Request),
        12 => map.prop_map(Step::Request),
        6 => unmap.prop_map(Step::Request),
        1 => endpoint.prop_map(probe).prop_map(Step::Request),
        1 => any::<bool>().prop_map(Step::Bypass),
        1 => Just(Step::Reset),
    ]
}

/// Every endpoint reaches what it should, and nothing else.
fn compare(guest: &Guest, model: &Model) {
    for endpoint in ENDPOINTS {
        for page in PLACES
            .iter()
            .flat_map(|place| (0..12).map(move |nr| place + nr * PAGE))
        {
            let iova = page + 8 * (page / PAGE % 512);
            let expected = model.translate(endpoint, iova);
            let place = format!("{endpoint} at {iova:#x}");
            let read = expected.filter(|(_, flags)| flags & map_flags::READ != 0);
            assert_eq!(
                guest.read(endpoint, iova),
                read.map(|(at, _)| at),
                "{place}"
            );
            let write = expected.filter(|(_, flags)| flags & map_flags::WRITE != 0);
            let at = expected.map_or(0, |(at, _)| at);
            assert_eq!(guest.writes(endpoint, iova, at), write.is_some(), "{place}");
        }
    }
    let pinned = model.pinned();
    assert_eq!((guest.pinned(), guest.ledger.in_use()), (pinned, pinned));
    assert!(guest.device.domains().eq(model.domains.keys().copied()));
}

fn play(steps: Vec<Step>, bypass: bool) {
    let config = VirtioIommuConfig {
        bypass: Some(bypass),
        ..config()
    };
    let mut guest = Guest::with(config, iopt::FormatId::VtdSs);
    let mut model = Model {
        bypass,
        ..Model::default()
    };
    for step in steps {
        match step {
            Step::Request(request) => {
                let expected = model.answer(&request);
                assert_eq!(guest.send(request), Some(expected), "{request:?}");
            }
            Step::Bypass(bypass) => {
                guest.device.write_config(36, &[u8::from(bypass)]);
                model.bypass = bypass;
            }
            Step::Reset => {
                assert!(guest.device.reset());
                guest.device.ack_features(guest.device.features()).unwrap();
                (model.domains, model.attached) = Default::default();
            }
        }
        compare(&guest, &model);
    }
    guest.device.write_config(36, &[0]);
    assert!(guest.device.reset());
    guest.assert_all_back();
    assert!(guest.device.back_end().failed.is_empty());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn any_requests_have_the_answers_and_effects_of_the_specification(
        steps in prop::collection::vec(step(), 1..40),
        bypass in any::<bool>(),
    ) {
        play(steps, bypass);
    }
}
