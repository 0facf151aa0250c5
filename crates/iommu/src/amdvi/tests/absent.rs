//! Units that cache absent entries (Capability Header, NpCache).

use iopt::format::{AmdV1, X86_64};

use super::*;
use crate::absent::{Pages, a_map_is_seen_once_its_range_is_invalidated};

fn pages(received: Received) -> Option<Pages> {
    match received {
        Received::Pages(7, address, mask, upper) => Some((address, mask, upper)),
        // Guest tables are tagged by the device.
        Received::GuestPages(SOURCE, 0, address, mask, upper) => Some((address, mask, upper)),
        _ => None,
    }
}

#[test]
fn where_absent_entries_are_cached_a_map_is_seen_once_its_range_is_invalidated() {
    // Guest tables: GTSup, GIoSup, PASmax.
    let features = FEATURES | 1 << 4 | 1 << 48 | 15 << 32;
    for mode in [Mode::Host, Mode::Guest] {
        let memory = memory();
        let model = Model::new(memory.clone(), features);
        let config = Config {
            mode,
            caches_not_present: true,
            ..CONFIG
        };
        let driver = AmdVi::new(model.clone(), memory.clone(), config).unwrap();
        driver.enable().unwrap();
        let unit = (&driver as &dyn Unit, DEVICE, DOMAIN);
        let received = &mut || model.received().into_iter().filter_map(pages).collect();
        match mode {
            Mode::Host => {
                let table = (AmdV1::new(4).unwrap(), memory);
                a_map_is_seen_once_its_range_is_invalidated(unit, table, received);
            }
            Mode::Guest => {
                let table = (X86_64::new(4).unwrap(), memory);
                a_map_is_seen_once_its_range_is_invalidated(unit, table, received);
            }
        }
    }
}
