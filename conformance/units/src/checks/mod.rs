//! What is checked, each on a machine of its own.

use anyhow::ensure;

use crate::{Qemu, Seen};

mod vtd_by_hand;

/// A check.
#[derive(Debug)]
pub struct Check {
    /// What holds.
    pub name: &'static str,
    /// Finds out; yields the number of DMAs that were checked.
    pub run: fn(&Qemu) -> anyhow::Result<u64>,
}

/// All checks.
pub const CHECKS: &[Check] = &[
    Check {
        name: "vtd_by_hand_lets_everything_pass_while_it_is_off",
        run: vtd_by_hand::lets_everything_pass_while_it_is_off,
    },
    Check {
        name: "vtd_by_hand_translates_through_a_table_of_ours",
        run: vtd_by_hand::translates_through_a_table_of_ours,
    },
    Check {
        name: "vtd_by_hand_keeps_devices_apart",
        run: vtd_by_hand::keeps_devices_apart,
    },
    Check {
        name: "vtd_by_hand_records_faults",
        run: vtd_by_hand::records_faults,
    },
    Check {
        name: "vtd_by_hand_goes_on_with_what_it_knows_until_it_is_told",
        run: vtd_by_hand::goes_on_with_what_it_knows_until_it_is_told,
    },
];

/// Fails unless that was to be seen.
fn expect(seen: Seen, expected: Seen, what: &str) -> anyhow::Result<()> {
    ensure!(seen == expected, "{what}: {seen:?}, not {expected:?}");
    Ok(())
}
