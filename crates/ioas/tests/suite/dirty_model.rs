//! Random sequences of operations while it is tracked what is dirty, against a plain model that knows each
//! page by itself: devices that can tell and that cannot come, write and go, users in this process hold
//! pages, areas are mapped, unmapped, released and taken out. A harvest finds exactly what could have been
//! written to since the last one.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::common::machines::{SMALL, can};
use crate::common::*;
use ioas::{
    DomainIds, ExternalPin, Ioas, Ledger, Memory, Synthetic, TableBuilder, Tracking, WhenUnmapped,
};
use iommu::{DeviceId, SoftwareConfig, SoftwareUnit};
use iopt::{FormatId, HeapTables, Interruption, Pending, Prot};
use proptest::prelude::*;
use runs::{Iova, Span};

const NEVER: Interruption = Interruption::Refused;
const AT: u64 = GIB - 8 * PAGE;
const PAGES: u64 = 32;
/// Unit of each device: keeps dirty bits, and snoops.
const UNITS: [(bool, bool); 4] = [(true, false), (false, false), (true, true), (false, true)];

#[derive(Clone, Copy, Debug)]
enum Op {
    Map(Prot),
    Unmap,
    UnmapNoting,
    Release,
    Restore,
    TakeOut,
    PutBack,
    Attach(usize),
    Detach(usize),
    Write(usize),
    Pin(Prot),
    Drop(usize),
    Harvest,
}

/// An operation on some pages.
fn op() -> impl Strategy<Value = (u64, u64, Op)> {
    let prot = || prop_oneof![3 => Just(Prot::RW), 1 => Just(Prot::READ)];
    let device = || 0..UNITS.len();
    let kind = prop_oneof![
        4 => prot().prop_map(Op::Map),
        1 => Just(Op::Unmap),
        1 => Just(Op::UnmapNoting),
        2 => Just(Op::Release),
        2 => Just(Op::Restore),
        1 => Just(Op::TakeOut),
        1 => Just(Op::PutBack),
        4 => device().prop_map(Op::Attach),
        4 => device().prop_map(Op::Detach),
        8 => device().prop_map(Op::Write),
        3 => prot().prop_map(Op::Pin),
        3 => (0..8usize).prop_map(Op::Drop),
        4 => Just(Op::Harvest),
    ];
    (0..PAGES, 1..16u64, kind).prop_map(|(start, len, kind)| (start, len.min(PAGES - start), kind))
}

#[derive(Clone, Copy, Debug, Default)]
struct Page {
    mapped: bool,
    writable: bool,
    released: bool,
    out: bool,
    /// Written by a device that tells.
    dirty: bool,
    /// Perhaps written by a device that does not tell, and that has left.
    unseen: bool,
    /// Perhaps written by a holder.
    held: bool,
}

impl Page {
    fn is_there(&self) -> bool {
        self.mapped && !self.released && !self.out
    }

    fn is_written(&self) -> bool {
        self.is_there() && self.writable
    }

    /// It is not there any more.
    fn forget(&mut self) {
        (self.dirty, self.unseen, self.held) = (false, false, false);
    }
}

fn pages(start: u64, len: u64) -> Span<Iova> {
    Span::new(AT + start * PAGE, len * PAGE)
}

fn check(ops: &[(u64, u64, Op)]) {
    let tables = Arc::new(HeapTables::with_tables(256).unwrap());
    // No two pages go on in each other: each is a leaf, and dirty by itself.
    let frames = (0..PAGES).map(|n| Span::new((2 * n + 1) * PAGE, PAGE));
    let memory = Memory::new(Arc::new(Synthetic::new(frames)), &Ledger::unlimited());
    let builder = TableBuilder::new(tables.clone(), DomainIds::new(8), [FormatId::VtdSs]);
    let space = Ioas::over_tables(builder);
    space.track_dirty(Tracking::default()).unwrap();
    let units = UNITS.map(|(tells, snoops)| {
        let mut capabilities = can(FormatId::VtdSs, SMALL, snoops);
        capabilities.dirty_tracking = tells;
        let config = SoftwareConfig {
            capabilities,
            ..SoftwareConfig::default()
        };
        Arc::new(SoftwareUnit::with_config(tables.clone(), Echo, config))
    });
    let device = |n: usize| DeviceId::pci(0, n as u8, 0);
    let mut attached = [false; UNITS.len()];
    let mut model = [Page::default(); PAGES as usize];
    let mut pins: Vec<(ExternalPin, Prot, Span<Iova>)> = Vec::new();

    for (start, len, op) in ops {
        let range = pages(*start, *len);
        let here = &mut model[*start as usize..(start + len) as usize];
        let covered = here.iter().all(|page| page.mapped);
        let blind = (0..UNITS.len()).any(|n| attached[n] && !UNITS[n].0);
        let written_by_pins = |range: Span<Iova>| -> BTreeSet<u64> {
            let writers = pins
                .iter()
                .filter(|(_, prot, _)| prot.contains(Prot::WRITE));
            let held = writers.filter_map(|(.., held)| held.intersection(&range));
            held.flat_map(|held| (held.start..=held.last()).step_by(PAGE as usize))
                .collect()
        };
        match *op {
            Op::Map(prot) => {
                let part = Span::new(start * PAGE, range.len);
                let mapped = space.map(range.start, &memory, part, prot);
                assert_eq!(mapped.is_ok(), here.iter().all(|page| !page.mapped));
                for page in here.iter_mut().filter(|_| mapped.is_ok()) {
                    page.mapped = true;
                    page.writable = prot.contains(Prot::WRITE);
                }
            }
            Op::Unmap => {
                space.unmap_cutting(range, NEVER).unwrap();
                here.fill(Page::default());
            }
            Op::UnmapNoting => {
                let Some(range) = space.area_at(range.start).map(|area| area.range()) else {
                    continue;
                };
                let mut pending = Pending::new([0u64; 1], range, PAGE).unwrap();
                space.unmap_noting(range, &mut pending).unwrap();
                let shown = space.show(&mut pending).unwrap();
                let found: Vec<Span<Iova>> = shown.runs().collect();
                shown.acknowledge();
                let pinned = written_by_pins(range);
                for at in (range.start..=range.last()).step_by(PAGE as usize) {
                    let page = &mut model[((at - AT) / PAGE) as usize];
                    // Released pages and pages that are out count too while some device is blind: its writes are not
                    // known.
                    let unknown = blind && page.writable;
                    let right = page.dirty || page.unseen || page.held || pinned.contains(&at);
                    let noted = found.iter().any(|run| run.contains(at));
                    assert!(noted == right || (noted && unknown), "{at:#x}: {page:?}");
                    assert!(noted || !(blind && page.is_written()), "{at:#x}: {page:?}");
                    *page = Page::default();
                }
            }
            Op::Release => {
                let held = pins.iter().any(|(.., held)| held.overlaps(&range));
                let mut kept = 0;
                space.release(&[range], NEVER, &mut |_, _| kept += 1);
                assert_eq!(kept == 0, covered && !held);
                for page in here.iter_mut().filter(|_| kept == 0) {
                    page.released = true;
                    page.forget();
                }
            }
            Op::Restore => {
                let failed = &mut |range, cause| panic!("{range}: {cause}");
                space.restore(&[range], NEVER, failed);
                here.iter_mut().for_each(|page| page.released = false);
            }
            Op::TakeOut => {
                let taken = space.take_out(range, NEVER);
                assert_eq!(taken.is_ok(), covered);
                for page in here.iter_mut().filter(|_| covered) {
                    page.out = true;
                    page.forget();
                }
            }
            Op::PutBack => {
                if space.put_back(range, NEVER).is_ok() {
                    here.iter_mut().for_each(|page| page.out = false);
                }
            }
            Op::Attach(n) => {
                let unit = units[n].clone();
                assert_eq!(space.attach((unit, device(n))).is_ok(), !attached[n]);
                attached[n] = true;
            }
            Op::Detach(n) => {
                assert_eq!(space.detach(device(n)).is_ok(), attached[n]);
                if attached[n] && !UNITS[n].0 {
                    for page in model.iter_mut().filter(|page| page.is_written()) {
                        page.unseen = true;
                    }
                }
                attached[n] = false;
            }
            Op::Write(n) => {
                let page = &mut model[*start as usize];
                let written = units[n].port(device(n)).write(range.start, &[1]);
                assert_eq!(written.is_ok(), attached[n] && page.is_written());
                page.dirty |= written.is_ok() && UNITS[n].0;
            }
            Op::Pin(prot) => {
                let pin = space.pin(range, prot, WhenUnmapped::Keeps);
                let permitted =
                    |page: &Page| page.is_there() && (page.writable || !prot.contains(Prot::WRITE));
                assert_eq!(pin.is_ok(), here.iter().all(permitted));
                pins.extend(pin.map(|pin| (pin, prot, range)));
            }
            Op::Drop(n) => {
                if n < pins.len() {
                    let (pin, prot, range) = pins.swap_remove(n);
                    drop(pin);
                    let first = ((range.start - AT) / PAGE) as usize;
                    let held = &mut model[first..first + (range.len / PAGE) as usize];
                    let writes = prot.contains(Prot::WRITE);
                    held.iter_mut().for_each(|page| page.held |= writes);
                }
            }
            Op::Harvest => {
                let mut pending = Pending::new([0u64; 1], range, PAGE).unwrap();
                let harvested = space.harvest(&mut pending).unwrap();
                let shown = space.show(&mut pending).unwrap();
                let found: Vec<Span<Iova>> = shown.runs().collect();
                shown.acknowledge();
                let pinned = written_by_pins(range);
                let unseen = here.iter().any(|page| page.unseen);
                assert_eq!(harvested.blind, blind || unseen);
                for (page, at) in here.iter_mut().zip((range.start..).step_by(PAGE as usize)) {
                    let right = page.dirty
                        || page.unseen
                        || page.held
                        || pinned.contains(&at)
                        || (blind && page.is_written());
                    let told = found.iter().any(|run| run.contains(at));
                    assert_eq!(told, right, "{at:#x}: {page:?}");
                    page.forget();
                }
            }
        }
    }
    drop(pins);
    space.close().unwrap();
    assert_eq!(tables.in_use(), 0);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn a_harvest_finds_what_could_be_written_since_the_last(
        ops in prop::collection::vec(op(), 1..48),
    ) {
        check(&ops);
    }
}
