//! What is checked, each on a machine of its own.

use anyhow::ensure;

use crate::{Rig, Seen, Unit};

mod vtd;
mod vtd_by_hand;

/// A check.
#[derive(Debug)]
pub struct Check {
    /// What holds.
    pub name: &'static str,
    /// Of which units; each has a machine of its own.
    pub units: &'static [Unit],
    /// Finds out, on a machine that was just started.
    pub run: fn(&Rig) -> anyhow::Result<()>,
}

const fn check(
    name: &'static str,
    units: &'static [Unit],
    run: fn(&Rig) -> anyhow::Result<()>,
) -> Check {
    Check { name, units, run }
}

/// Without a driver.
const BY_HAND: &[Unit] = &[Unit::VtdLegacy];
/// With the driver of VT-d.
const VTD: &[Unit] = &[Unit::VtdLegacy, Unit::VtdSecond, Unit::VtdFirst];

/// All checks.
pub const CHECKS: &[Check] = &[
    check(
        "by hand: everything passes while the unit is off",
        BY_HAND,
        vtd_by_hand::lets_everything_pass_while_it_is_off,
    ),
    check(
        "by hand: a table of ours is walked",
        BY_HAND,
        vtd_by_hand::translates_through_a_table_of_ours,
    ),
    check(
        "by hand: devices are kept apart",
        BY_HAND,
        vtd_by_hand::keeps_devices_apart,
    ),
    check(
        "by hand: faults are recorded",
        BY_HAND,
        vtd_by_hand::records_faults,
    ),
    check(
        "by hand: what was unmapped goes on until it is invalidated",
        BY_HAND,
        vtd_by_hand::goes_on_with_what_it_knows_until_it_is_told,
    ),
    check("every leaf size at both ends", VTD, vtd::every_leaf_size),
    check("devices in two domains", VTD, vtd::two_domains),
    check("faults", VTD, vtd::faults),
    check("stale until invalidated", VTD, vtd::stale),
    check("dirty bits", &[Unit::VtdFirst], vtd::dirty),
    check("a random mixture", VTD, vtd::mixture),
];

/// Fails unless that was to be seen.
fn expect(seen: Seen, expected: Seen, what: &str) -> anyhow::Result<()> {
    ensure!(seen == expected, "{what}: {seen:?}, not {expected:?}");
    Ok(())
}
