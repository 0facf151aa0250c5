//! Writes of endpoints, reported by guest address.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ioas::{HarvestError, Tracking};
use iommu::{
    DeviceId, DomainId, Fault, FlushError, NodeId, Unit, UnitAttachError, UnitCapabilities,
};
use iopt::{FormatId, Interruption, Invalidation, Root};
use proptest::prelude::*;
use runs::{GuestAddr, Span};
use virtio_iommu::wire::map_flags;
use virtio_iommu::{Status, VirtioIommuConfig};

use crate::guest::{
    Guest, HIGH, LOW, NEXT, PAGE, SoftUnit, attach, attach_with, config, detach, device_of, map,
    pages, unmap,
};

const RW: u32 = map_flags::READ | map_flags::WRITE;

/// A guest behind a unit that sets dirty bits, whose endpoint 8 is in domain 1; leaves are pages.
fn guest() -> Guest {
    let mut guest = Guest::tracking(config(), FormatId::X86_64, true);
    track(&mut guest);
    assert_eq!(guest.send(attach(8, 1)), Some(Status::Ok));
    guest
}

fn track(guest: &mut Guest) {
    let (leaf, interruption) = (Some(PAGE), Interruption::Allowed);
    let tracking = Tracking { leaf, interruption };
    guest.device.track_dirty(tracking).unwrap();
}

/// The pages of a report, and whether it is exact.
fn report(guest: &mut Guest) -> (BTreeSet<u64>, bool) {
    let mut found = BTreeSet::new();
    let mut last = None;
    let sink = &mut |run: Span<GuestAddr>| {
        assert!(run.is_aligned(PAGE) && last < Some(run.start), "{run}");
        last = Some(run.last());
        found.extend((run.start..=run.last()).step_by(PAGE as usize));
    };
    let exact = guest.device.dirty(sink).unwrap();
    (found, exact)
}

fn set<const N: usize>(pages: [u64; N]) -> (BTreeSet<u64>, bool) {
    (pages.map(|page| page * PAGE).into(), true)
}

#[test]
fn a_page_is_reported_once_at_the_address_that_the_guest_has_it_at() {
    let mut guest = guest();
    // In both regions that touch, and behind the hole.
    let requests = [
        map(1, pages(0x100, 2), NEXT.start - PAGE, RW),
        map(1, pages(0x200, 4), HIGH.start, RW),
        map(1, pages(0x300, 4), 0, map_flags::READ),
    ];
    for request in requests {
        assert_eq!(guest.send(request), Some(Status::Ok));
    }
    assert_eq!(report(&mut guest), set([]));
    assert!(guest.writes(8, 0x101 * PAGE + 8, NEXT.start + 8));
    assert!(guest.writes(8, 0x203 * PAGE, HIGH.start + 3 * PAGE));
    assert!(guest.read(8, 0x300 * PAGE).is_some());
    let (next, high) = (NEXT.start / PAGE, HIGH.start / PAGE);
    assert_eq!(report(&mut guest), set([next, high + 3]));
    assert_eq!(report(&mut guest), set([]));
    // Written again: reported again.
    assert!(guest.writes(8, 0x100 * PAGE, NEXT.start - PAGE));
    assert!(guest.writes(8, 0x203 * PAGE, HIGH.start + 3 * PAGE));
    assert_eq!(report(&mut guest), set([next - 1, high + 3]));
    guest.device.untrack_dirty();
    assert!(guest.writes(8, 0x100 * PAGE, NEXT.start - PAGE));
    assert_eq!(report(&mut guest), set([]));
}

/// Every way in which a mapping goes, after a write through it.
#[test]
fn what_was_written_stays_dirty_after_its_mapping_has_gone() {
    let ways: [fn(&mut Guest); 4] = [
        |guest| assert_eq!(guest.send(unmap(1, pages(0x100, 4))), Some(Status::Ok)),
        // With a neighbour that was not written to.
        |guest| {
            assert_eq!(
                guest.send(map(1, pages(0x104, 4), LOW.start, RW)),
                Some(Status::Ok)
            );
            assert_eq!(guest.send(unmap(1, pages(0xff, 9))), Some(Status::Ok));
        },
        |guest| assert_eq!(guest.send(detach(8, 1)), Some(Status::Ok)),
        |guest| assert!(guest.device.reset()),
    ];
    for (nr, way) in ways.into_iter().enumerate() {
        let mut guest = guest();
        let at = HIGH.start / PAGE;
        assert_eq!(
            guest.send(map(1, pages(0x100, 4), HIGH.start, RW)),
            Some(Status::Ok)
        );
        assert!(guest.writes(8, 0x102 * PAGE, HIGH.start + 2 * PAGE));
        way(&mut guest);
        assert_eq!(report(&mut guest), set([at + 2]), "way {nr}");
        assert_eq!(report(&mut guest), set([]), "way {nr}");
    }
    // After an unmap of everything at once, all writable pages count.
    let mut guest = guest();
    assert_eq!(
        guest.send(map(1, pages(0x100, 4), HIGH.start, RW)),
        Some(Status::Ok)
    );
    let all = virtio_iommu::wire::Unmap {
        domain: 1,
        virt_start: 0,
        virt_end: u64::MAX,
        reserved: [0; 4],
    };
    assert_eq!(
        guest.send(virtio_iommu::wire::Request::Unmap(all)),
        Some(Status::Ok)
    );
    assert_eq!(
        report(&mut guest).0,
        set([0x1000, 0x1001, 0x1002, 0x1003]).0
    );
}

#[test]
fn an_endpoint_in_bypass_mode_is_reported_too() {
    let bypass = VirtioIommuConfig {
        bypass: Some(true),
        ..config()
    };
    let mut guest = Guest::tracking(bypass, FormatId::X86_64, true);
    track(&mut guest);
    assert_eq!(guest.send(attach_with(9, 2, 1)), Some(Status::Ok));
    assert!(guest.writes(9, HIGH.start + PAGE, HIGH.start + PAGE));
    assert_eq!(report(&mut guest), set([HIGH.start / PAGE + 1]));
}

#[test]
fn of_a_unit_that_leaves_no_trace_everything_writable_counts() {
    let mut guest = Guest::new();
    guest.device.track_dirty(Tracking::default()).unwrap();
    assert_eq!(guest.send(attach(8, 1)), Some(Status::Ok));
    assert_eq!(
        guest.send(map(1, pages(0x100, 2), HIGH.start, RW)),
        Some(Status::Ok)
    );
    assert_eq!(
        guest.send(map(1, pages(0x200, 2), 0, map_flags::READ)),
        Some(Status::Ok)
    );
    let at = HIGH.start / PAGE;
    for _ in 0..2 {
        let (found, exact) = report(&mut guest);
        assert_eq!((found, exact), (set([at, at + 1]).0, false));
    }
    assert_eq!(guest.send(unmap(1, pages(0x100, 2))), Some(Status::Ok));
    assert_eq!(report(&mut guest).0, set([at, at + 1]).0);
}

/// A unit that does not answer at times.
struct Deaf(Arc<SoftUnit>, AtomicBool);

impl Unit for Deaf {
    fn capabilities(&self) -> UnitCapabilities {
        self.0.capabilities()
    }

    fn node(&self) -> Option<NodeId> {
        self.0.node()
    }

    fn attach(
        &self,
        device: DeviceId,
        domain: DomainId,
        root: Root,
    ) -> Result<(), UnitAttachError> {
        self.0.attach(device, domain, root)
    }

    fn detach(&self, device: DeviceId) -> Result<(), UnitAttachError> {
        self.0.detach(device)
    }

    fn invalidate(&self, domain: DomainId, what: &Invalidation) -> Result<(), FlushError> {
        if self.1.load(Ordering::Relaxed) {
            let (device, busy, waited) = (device_of(8), 1, Duration::ZERO);
            return Err(FlushError::TimedOut {
                domain,
                device,
                busy,
                waited,
            });
        }
        self.0.invalidate(domain, what)
    }

    fn invalidate_domain(&self, domain: DomainId) -> Result<(), FlushError> {
        self.0.invalidate_domain(domain)
    }

    fn drain_faults(&self, sink: &mut dyn FnMut(Fault)) -> u64 {
        self.0.drain_faults(sink)
    }
}

#[test]
fn after_a_unit_has_not_answered_all_that_it_may_write_to_counts() {
    let mut guest = Guest::tracking(config(), FormatId::X86_64, true);
    let deaf = Arc::new(Deaf(guest.unit.clone(), AtomicBool::new(false)));
    let units = &mut guest.device.back_end().units;
    units.insert(8, deaf.clone(), device_of(8));
    track(&mut guest);
    let at = HIGH.start / PAGE;
    assert_eq!(guest.send(attach(8, 1)), Some(Status::Ok));
    assert_eq!(
        guest.send(map(1, pages(0x100, 3), HIGH.start, RW)),
        Some(Status::Ok)
    );
    assert_eq!(guest.send(map(1, pages(0x200, 2), 0, RW)), Some(Status::Ok));
    assert!(guest.writes(8, 0x101 * PAGE, HIGH.start + PAGE));
    deaf.1.store(true, Ordering::Relaxed);
    // An unmap that is not flushed.
    assert_eq!(guest.send(unmap(1, pages(0x200, 2))), Some(Status::DevErr));
    let refused = guest.device.dirty(&mut |run| panic!("{run}"));
    assert!(
        matches!(refused, Err(HarvestError::Flush(_))),
        "{refused:?}"
    );
    deaf.1.store(false, Ordering::Relaxed);
    let all = (set([0, 1, at, at + 1, at + 2]).0, false);
    assert_eq!(report(&mut guest), all);
    // An unmapped page can be written to until it is flushed, and could be until the last report.
    assert_eq!(report(&mut guest), all);
    guest.device.space_of(8).unwrap().flush().unwrap();
    assert_eq!(report(&mut guest), all);
    let mapped = (set([at, at + 1, at + 2]).0, false);
    assert_eq!(report(&mut guest), mapped);
    // All mapped pages count until tracking begins anew.
    track(&mut guest);
    assert!(guest.writes(8, 0x100 * PAGE, HIGH.start));
    assert_eq!(report(&mut guest), set([at]));
}

#[derive(Clone, Debug)]
enum Step {
    Map(u64, u64, u64),
    Unmap(u64, u64),
    Write(u64),
    Move(u32),
    Leave,
    Report,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => (0..32u64, 0..24u64, 1..6u64).prop_map(|(at, from, count)| Step::Map(at, from, count)),
        2 => (0..32u64, 1..12u64).prop_map(|(at, count)| Step::Unmap(at, count)),
        6 => (0..40u64).prop_map(Step::Write),
        1 => (1..3u32).prop_map(Step::Move),
        1 => Just(Step::Leave),
        2 => Just(Step::Report),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]
    /// Against a plain set of the pages that were written since the last report.
    #[test]
    fn a_report_is_what_was_written_since_the_last(steps in prop::collection::vec(step(), 0..60)) {
        let mut guest = guest();
        let mut written = BTreeSet::new();
        let mut domain = 1;
        // A map that fails at its second region was there for a moment.
        let mut perhaps = BTreeSet::new();
        for step in steps.into_iter().chain([Step::Report]) {
            match step {
                Step::Map(at, from, count) => {
                    // Around the border of two regions.
                    let phys = NEXT.start + from * PAGE - 8 * PAGE;
                    let answer = guest.send(map(domain, pages(at, count), phys, RW));
                    if answer != Some(Status::Ok) && phys < NEXT.start {
                        perhaps.extend((phys..NEXT.start).step_by(PAGE as usize));
                    }
                }
                Step::Unmap(at, count) => drop(guest.send(unmap(domain, pages(at, count)))),
                Step::Write(page) => {
                    if let Some(at) = guest.read(8, page * PAGE) {
                        prop_assert!(guest.writes(8, page * PAGE, at));
                        written.insert(at / PAGE * PAGE);
                    }
                }
                Step::Move(to) => {
                    guest.send(attach(8, to));
                    domain = to;
                }
                Step::Leave => drop(guest.send(detach(8, domain))),
                Step::Report => {
                    let (found, told) = report(&mut guest);
                    prop_assert!(told && found.is_superset(&written), "{found:x?} {written:x?}");
                    let more: Vec<u64> = found.difference(&written).copied().collect();
                    prop_assert!(more.iter().all(|page| perhaps.contains(page)), "{more:x?}");
                    perhaps.clear();
                    written.clear();
                }
            }
        }
    }
}
