//! Absent entries as a unit remembers them, for the tests of drivers of such units.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::vec::Vec;

use iopt::walk::{Access, Walker};
use iopt::{Format, HeapTables, Invalidation, Prot, Root, Table, TableOps as _};
use runs::Span;

use crate::unit::{DeviceId, DomainId, Unit};

/// An invalidation as a unit received it: the address, 2^this pages, and whether entries above the leaves go too.
pub(crate) type Pages = (u64, u32, bool);

/// Absent entries of tables with levels of 9 bits, by level and address.
#[derive(Default)]
struct AbsentEntries(BTreeSet<(u8, u64)>);

const fn shift(level: u8) -> u32 {
    12 + 9 * level as u32
}

impl AbsentEntries {
    /// Returns the target of an access. Entries remembered as absent are not looked up again.
    fn access(&mut self, memory: &HeapTables, root: Root, iova: u64) -> Option<u64> {
        let remembered = |level| self.0.contains(&(level, iova >> shift(level)));
        if (0..root.levels).any(remembered) {
            return None;
        }
        match Walker::new(root).walk(memory, iova, Access::Read, &mut ()) {
            Ok(found) => Some(found.pa),
            Err(fault) => {
                let absent = [0, fault.level].map(|level| (level, iova >> shift(level)));
                self.0.extend(absent);
                None
            }
        }
    }

    fn invalidate(&mut self, (first, mask, upper): Pages) {
        self.0.retain(|(level, place)| {
            let common = (12 + mask).max(shift(*level));
            let differ = (place << shift(*level) ^ first).checked_shr(common);
            differ.unwrap_or(0) != 0 || *level > 0 && !upper
        });
    }
}

/// A map is seen by the unit behind a driver once its range is invalidated, and not before: `received` says what the unit
/// has received since the last call.
pub(crate) fn a_map_is_seen_once_its_range_is_invalidated<F: Format>(
    (unit, device, domain): (&dyn Unit, DeviceId, DomainId),
    (format, memory): (F, Arc<HeapTables>),
    received: &mut dyn FnMut() -> Vec<Pages>,
) {
    assert!(unit.capabilities().caches_not_present);
    let mut table = Table::new(format, memory.clone()).unwrap();
    let root = table.root();
    unit.attach(device, domain, root).unwrap();
    received();
    let mut absent = AbsentEntries::default();
    // Under no table, beside it, under two tables that are there and three that are not, and large.
    for (iova, len) in [
        (0x20_0000, 0x1000),
        (0x20_1000, 0x3000),
        (0x3f_f000, 0x40_2000),
        (5 << 30, 0x40_0000),
    ] {
        let range = Span::new(iova, len);
        let pages = [iova, (iova + len / 2) & !0xfff, range.last() & !0xfff];
        let mut arrive = |iova| absent.access(&memory, root, iova);
        assert_eq!(pages.map(&mut arrive), [None; 3]);
        let run = Span::new(1 << 40 | iova, len);
        table.map(iova, &[run], Prot::RW).unwrap();
        assert_eq!(pages.map(&mut arrive), [None; 3], "remembered");
        unit.invalidate(domain, &Invalidation::mapped(range))
            .unwrap();
        let told = received();
        assert!(!told.is_empty());
        told.into_iter().for_each(|pages| absent.invalidate(pages));
        let arrived = pages.map(|iova| absent.access(&memory, root, iova));
        assert_eq!(arrived, pages.map(|iova| Some(1 << 40 | iova)), "{range}");
    }
    unit.detach(device).unwrap();
    received();
    drop(table.tear_down());
}
