//! Recorded faults.
//!
//! Faults come out oldest first, and name the device. A unit without room for one more loses it, and the driver says so
//! once; then there is room again, at every place of the log, and nothing is handed out twice.

use super::*;

pub(crate) fn faults_come_oldest_first_and_a_full_log_says_so_and_goes_on<G: Rig>(rig: &G)
where
    Driven<G>: Operations + Send + Sync,
{
    let (driver, model) = rig.attached();
    let none = (Vec::new(), 0);
    assert_eq!(drain(&driver), none);
    let log = rig.log();
    let pages = |pages: core::ops::Range<u64>| {
        let (faults, lost) = drain(&driver);
        assert!(faults.iter().all(|fault| fault.device == G::DEVICE));
        let found = faults.iter().map(|fault| fault.iova >> 12);
        assert!(found.eq(pages.clone()), "{pages:?}: {faults:?}");
        lost
    };
    // Above what a table of a rig maps.
    let first = 0x100;
    for latency in [0, 3] {
        rig.slow(&model, latency);
        for more in 1..4 {
            (first..first + log + more).for_each(|page| rig.fault(&model, page));
            assert_eq!(pages(first..first + log), 1);
            // A slow unit has room again when it has looked, as a wait makes it.
            driver.invalidate_domain(G::DOMAIN).unwrap();
            assert_eq!(drain(&driver), none);
        }
    }
    for page in first..first + 3 * log {
        rig.fault(&model, page);
        assert_eq!(pages(page..page + 1), 0);
    }
    assert_eq!(drain(&driver), none);
    G::received(&model);
}
