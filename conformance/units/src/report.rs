//! Results of the checks, as a document: `docs/conformance.md`.
//!
//! It has no times, and all choices are made from the same seeds each time: with the same QEMU the
//! document is the same.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
};

use runs::PageSizes;

use crate::{Board, Unit, checks::CHECKS, lives::Counts, qemu::Kind};

/// Result of one check.
#[derive(Clone, Debug)]
pub struct Done {
    /// Its unit.
    pub unit: Unit,
    /// Its tables.
    pub kind: Kind,
    /// Its name.
    pub check: &'static str,
    /// Copies by DMA.
    pub copies: u64,
    /// How many went through leaves of each size.
    pub leaves: BTreeMap<u64, u64>,
    /// Costs of flushes: which, commands, waits.
    pub costs: Vec<(&'static str, u64, u64)>,
    /// Counts of a life, if it was one.
    pub life: Option<Counts>,
}

/// Results of a run.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// The programs, by what they say of their versions.
    pub programs: Vec<(Board, String)>,
    /// Checks of units.
    pub done: Vec<Done>,
}

impl Report {
    /// The document.
    pub fn document(&self) -> String {
        let mut text = String::from(HEAD);
        for (board, version) in &self.programs {
            let _ = writeln!(text, "- `{}`: {version}", board.program());
        }
        let copies: u64 = self.done.iter().map(|done| done.copies).sum();
        let _ = write!(
            text,
            "\n{} checks with {copies} copies by DMA; not one translation differs.\n{UNITS}",
            self.done.len()
        );
        for unit in Unit::ALL {
            self.unit(unit, &mut text);
        }
        text.push_str(EACH);
        for check in CHECKS {
            let done = self.done.iter().filter(|done| done.check == check.name);
            let copies: Vec<u64> = done.map(|done| done.copies).collect();
            if !copies.is_empty() {
                let (tables, copies) = (copies.len(), copies.iter().sum::<u64>());
                let _ = writeln!(text, "| {} | {tables} | {copies} |", check.name);
            }
        }
        text.push_str(LIVES);
        for done in &self.done {
            if let Some(life) = done.life {
                let unit = done.unit.name();
                let _ = writeln!(text, "| {unit} | {life} |");
            }
        }
        text.push_str(COSTS);
        let mut costs = Vec::<(String, Vec<&str>)>::new();
        for done in self.done.iter().filter(|done| !done.costs.is_empty()) {
            let of = done.costs.iter();
            let cells: String = of
                .map(|(_, commands, waits)| format!(" {commands}/{waits} |"))
                .collect();
            together(&mut costs, cells, done.unit.name());
        }
        for (cells, units) in &costs {
            let _ = writeln!(text, "| {} |{cells}", units.join(", "));
        }
        text.push_str(NOT_MODELLED);
        text
    }

    /// One unit: a row for the tables that have the same leaves.
    fn unit(&self, unit: Unit, text: &mut String) {
        let done: Vec<&Done> = self.done.iter().filter(|done| done.unit == unit).collect();
        let mut kinds = Vec::new();
        for one in &done {
            if !kinds.contains(&one.kind) {
                kinds.push(one.kind);
            }
        }
        let mut rows = Vec::<(String, Vec<Kind>)>::new();
        for kind in kinds {
            let of = done.iter().filter(|one| one.kind == kind);
            let leaves = of.flat_map(|one| one.leaves.keys().copied()).collect();
            together(&mut rows, sizes(&leaves), kind);
        }
        for (leaves, kinds) in rows {
            let of = done.iter().filter(|one| kinds.contains(&one.kind));
            let (checks, copies) = of.fold((0, 0), |sum, one| (sum.0 + 1, sum.1 + one.copies));
            let (unit, kinds) = (unit.name(), kinds.iter().map(Kind::to_string));
            let kinds = kinds.collect::<Vec<_>>().join("; ");
            let _ = writeln!(
                text,
                "| {unit} | {kinds} | {checks} | {copies} | {leaves} |"
            );
        }
    }
}

/// Adds `value` to the others of the same `key`.
fn together<K: PartialEq, V>(all: &mut Vec<(K, Vec<V>)>, key: K, value: V) {
    match all.iter_mut().find(|(known, _)| *known == key) {
        Some((_, values)) => values.push(value),
        None => all.push((key, vec![value])),
    }
}

/// `4K–1G (3)`: of leaves, and how many.
fn sizes(leaves: &BTreeSet<u64>) -> String {
    let size = |bytes: &u64| PageSizes::from_bits(*bytes).to_string();
    match (leaves.first(), leaves.last(), leaves.len()) {
        (Some(only), _, 1) => size(only),
        (Some(least), Some(most), 2) => format!("{}, {}", size(least), size(most)),
        (Some(least), Some(most), count) => {
            format!("{}–{} ({count})", size(least), size(most))
        }
        _ => String::new(),
    }
}

const HEAD: &str = "\
# Conformance

`cargo xtask units --document` writes this document; the test command compares it with its results.

Devices do DMA through tables of `iopt` and drivers of `iommu` on QEMU's emulated IOMMUs. A copy is a DMA that reads random
bytes and one that writes them; leaves have their sizes and how many. [The checks](../conformance/units/README.md).

";

const UNITS: &str = "
## Units

| unit | tables | checks | copies | leaves |
|---|---|---|---|---|
";

const EACH: &str = "
## Checks

| check | tables | copies |
|---|---|---|
";

const LIVES: &str = "
## Lives of address spaces

Two address spaces over one driver, three devices that move between them, two nodes' memory. A step is a random operation; some meet
a command queue that is deaf or stops, and fail.

| unit | steps | failed | drivers | bytes by DMA | faults |
|---|---|---|---|---|---|
";

const COSTS: &str = "
## Cost of a flush

Commands/waits of three unmaps, as the driver counts them.

| units | 1 page | 256 scattered | 1 GiB |
|---|---|---|---|
";

const NOT_MODELLED: &str = "
## What QEMU does not model

| what | covered by |
|---|---|
| Arm's SMMU, versions 1 and 2 | a model from the specification (`crates/iommu/src/smmu/tests`) |
| x86-64 tables of 5 levels, in VT-d's first stage and AMD's v2 | QEMU's processors (`cargo xtask units --processors`) |
| ARMv7 short descriptors, Svpbmt | QEMU's processors |
| 52-bit addresses of Arm | QEMU's processors; contiguous groups by known answers |
| VT-d's second stage with 5 levels, concatenated roots of Arm's stage 2, DART | Linux's table code (`cargo xtask conformance`) |
| contiguous hints of Arm | known answers (`crates/iopt/tests/known_answers/arm_lpae`); units ignore them and translate |
| accessed and dirty bits, except VT-d's first stage | the software unit (`crates/iommu/src/software/tests/dirty.rs`) and walkers with updates |
| two units of VT-d or AMD-Vi on one machine | two SMMUv3 |
| PASIDs, devices' TLBs, AMD's guest tables | models in the tests of each driver |
| addresses and flags in AMD's event log, denied accesses to cached leaves | a model (`crates/iommu/src/amdvi/tests/broken.rs`) |
| units that answer late, wrongly or not at all | scripted registers and hostile units, in the tests of each driver |
";
