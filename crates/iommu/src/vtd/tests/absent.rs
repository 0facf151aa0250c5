//! Caching mode, and write buffers.

use iopt::format::{VtdSs, X86_64};

use super::*;
use crate::absent::{Pages, a_map_is_seen_once_its_range_is_invalidated};

fn pages(received: Received) -> Option<Pages> {
    match received {
        Received::Iotlb(3, 7, Some((address, mask, hint)))
        | Received::PasidIotlb(3, 7, 0, Some((address, mask, hint))) => {
            Some((address, mask, !hint))
        }
        Received::Iotlb(2, 7, None) | Received::PasidIotlb(2, 7, 0, None) => Some((0, 52, true)),
        _ => None,
    }
}

#[test]
fn in_caching_mode_a_map_is_seen_once_its_range_is_invalidated() {
    let caching = CAP | CACHING_MODE;
    for (mode, cap) in [
        (Mode::Legacy, caching),
        (Mode::Legacy, caching & !PAGE_SELECTIVE),
        (Mode::ScalableSecond, caching),
        (Mode::ScalableFirst, caching | 1 << 56),
    ] {
        let memory = memory();
        let model = Model::new(memory.clone(), cap, ECAP | SCALABLE_BOTH);
        let config = Config {
            mode,
            ..Config::default()
        };
        let driver = Vtd::new(model.clone(), memory.clone(), config).unwrap();
        driver.enable().unwrap();
        let unit = (&driver as &dyn Unit, DEVICE, DOMAIN);
        let received = &mut || model.received().into_iter().filter_map(pages).collect();
        match mode {
            Mode::ScalableFirst => {
                let table = (X86_64::new(4).unwrap(), memory);
                a_map_is_seen_once_its_range_is_invalidated(unit, table, received);
            }
            Mode::Legacy | Mode::ScalableSecond => {
                let table = (VtdSs::new(4).unwrap(), memory);
                a_map_is_seen_once_its_range_is_invalidated(unit, table, received);
            }
        }
    }
}

#[test]
fn write_buffers_are_flushed_before_a_map_is_invalidated() {
    let (driver, model) = enabled(CAP | WRITE_BUFFERS, ECAP, Mode::Legacy);
    assert!(driver.capabilities().caches_not_present);
    driver.attach(DEVICE, DOMAIN, root(0x1000, 4)).unwrap();
    received(&model);
    let mapped = Invalidation::mapped(Span::new(0x5000, 0x1000));
    driver.invalidate(DOMAIN, &mapped).unwrap();
    let told = received(&model);
    assert_eq!(told.first(), Some(&Received::WriteBuffers), "{told:?}");
}
