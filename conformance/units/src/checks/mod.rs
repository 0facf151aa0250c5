//! Checks, each on a machine of its own.

use anyhow::ensure;
use iopt::FormatId;

use crate::{Board, Kind, Place, Rig, Seen, Unit, lives};

mod changes;
mod dump;
mod handover;
mod nvme;
mod riscv;
mod suite;
mod two_units;
mod vtd_by_hand;

/// A check.
#[derive(Debug)]
pub struct Check {
    /// Checked property.
    pub name: &'static str,
    /// Units and tables that have it; each has a machine of its own.
    pub applies: fn(Unit, Kind) -> bool,
    /// Where the machine has its memory.
    pub place: Place,
    /// Makes other choices in each round.
    pub random: bool,
    /// Finds out, on a machine that was just started.
    pub run: fn(&Rig) -> anyhow::Result<()>,
}

const fn check(
    name: &'static str,
    applies: fn(Unit, Kind) -> bool,
    run: fn(&Rig) -> anyhow::Result<()>,
) -> Check {
    Check {
        name,
        applies,
        place: Place::Near,
        random: false,
        run,
    }
}

/// Without a driver.
const fn by_hand(name: &'static str, run: fn(&Rig) -> anyhow::Result<()>) -> Check {
    check(
        name,
        |unit, kind| unit == Unit::VtdLegacy && kind.levels == 4,
        run,
    )
}

/// Check of every unit, with every table.
const fn any(name: &'static str, run: fn(&Rig) -> anyhow::Result<()>) -> Check {
    check(name, |_, _| true, run)
}

/// Check of every unit, with every table that is larger than a page: one level reaches 2 MiB, and
/// has no place for what these put at several addresses.
const fn every(name: &'static str, run: fn(&Rig) -> anyhow::Result<()>) -> Check {
    check(name, |_, kind| kind.levels > 1, run)
}

/// The same with random choices.
const fn random(name: &'static str, run: fn(&Rig) -> anyhow::Result<()>) -> Check {
    Check {
        random: true,
        ..every(name, run)
    }
}

/// All checks.
pub const CHECKS: &[Check] = &[
    by_hand(
        "by hand: everything passes while the unit is off",
        vtd_by_hand::lets_everything_pass_while_it_is_off,
    ),
    by_hand(
        "by hand: a table of ours is walked",
        vtd_by_hand::translates_through_a_table_of_ours,
    ),
    by_hand(
        "by hand: devices are kept apart",
        vtd_by_hand::keeps_devices_apart,
    ),
    by_hand("by hand: faults are recorded", vtd_by_hand::records_faults),
    by_hand(
        "by hand: what was unmapped goes on until it is invalidated",
        vtd_by_hand::goes_on_with_what_it_knows_until_it_is_notified,
    ),
    any("leaf sizes at both ends", suite::leaf_sizes),
    random("identity and scattered", suite::identity_and_scattered),
    every("read-only and write-only", suite::permissions),
    every("holes", suite::holes),
    any("two domains", suite::two_domains),
    every("stale until invalidated", suite::stale),
    every("invalidated at both ends", suite::stale_at_both_ends),
    random("split, cut, merge", changes::resize),
    random("random mixture", changes::mixture),
    Check {
        place: Place::High,
        ..random("memory from 8 TiB on", changes::mixture)
    },
    Check {
        random: true,
        ..check("lives of address spaces", is_usual, lives::life)
    },
    every("NVMe", nvme::nvme),
    every("handover of the live unit", handover::handover),
    every("walks through a dump of memory", dump::walks),
    check("growing", grows, changes::grows),
    check(
        "dirty bits",
        |unit, _| unit == Unit::VtdFirst,
        changes::dirty,
    ),
    Check {
        random: true,
        ..check(
            "dirty bits of an address space",
            |unit, _| unit == Unit::VtdFirst,
            lives::dirty,
        )
    },
    check(
        "directories",
        |unit, kind| unit.board() == Board::RiscvVirt && is_usual(unit, kind),
        riscv::directories,
    ),
    check(
        "processes",
        |unit, kind| unit == Unit::Riscv && kind.format == FormatId::RiscV,
        riscv::processes,
    ),
    check(
        "two units, on two nodes",
        |unit, kind| unit == Unit::SmmuBoth && is_usual(unit, kind),
        two_units::nodes,
    ),
    check("cost of a flush", is_usual, changes::flush_costs),
];

/// Tables that can grow by a level which the unit walks.
fn grows(unit: Unit, kind: Kind) -> bool {
    let next = Kind {
        levels: kind.levels + 1,
        ..kind
    };
    kind.format == FormatId::AmdV1 && unit.kinds().contains(&next)
}

/// The unit's usual tables.
fn is_usual(unit: Unit, kind: Kind) -> bool {
    unit.kinds().first() == Some(&kind)
}

/// Fails unless that was to be seen.
fn expect(seen: Seen, expected: Seen, what: &str) -> anyhow::Result<()> {
    ensure!(seen == expected, "{what}: {seen:?}, not {expected:?}");
    Ok(())
}
