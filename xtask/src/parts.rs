//! The parts of `cargo xtask test`, in the order in which they run.
//!
//! A new part is a function (in a file of its own when it is more than one command) and one
//! line in [`PARTS`]. Budgets are for two cores: build, lints and docs five minutes together,
//! the suites four, the rigs against what others wrote two, QEMU's units four, the balloon
//! with a stock guest and with QEMU 70 seconds; the kernel of the guests, which is built once and kept, three and a half.

use std::{process::Command, time::Duration};

use crate::{
    balloon,
    cargo::{self, Repository},
    conformance, dependencies, examples, fuzz, graph, guests, header,
    host::Need,
    libvirt, nostd, origins, properties, runner, units, unsafety,
};

/// What a part counts towards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Group {
    /// Build, lints and docs.
    Build,
    /// The suites.
    Suite,
    /// Rigs against what others wrote.
    Rig,
    /// QEMU's emulated units.
    Unit,
    /// A stock guest's balloon, and QEMU's.
    Balloon,
    /// The kernel of the guests.
    Kernel,
}

impl Group {
    /// All, in the order of the summary.
    pub(crate) const ALL: [Self; 6] = [
        Self::Build,
        Self::Suite,
        Self::Rig,
        Self::Unit,
        Self::Balloon,
        Self::Kernel,
    ];

    /// As the summary calls it.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Build => "build, lints, docs",
            Self::Suite => "suites",
            Self::Rig => "rigs",
            Self::Unit => "emulated units",
            Self::Balloon => "balloon",
            Self::Kernel => "guest kernel",
        }
    }

    /// The time that all parts of the group may take together.
    pub(crate) const fn budget(self) -> Duration {
        Duration::from_secs(match self {
            Self::Build => 300,
            Self::Suite => 240,
            Self::Rig => 120,
            Self::Unit => 240,
            Self::Balloon => 70,
            Self::Kernel => 210,
        })
    }
}

/// How a part ended that did not fail.
pub(crate) enum Outcome {
    /// All of it passed.
    Passed,
    /// It cannot run on this machine, for the reason given.
    NotRun(String),
}

/// One part of the test command.
pub(crate) struct Part {
    /// As `--only` takes it.
    pub(crate) name: &'static str,
    /// What it counts towards.
    pub(crate) group: Group,
    /// What it should take at most; more is told, not failed, since machines differ.
    pub(crate) budget: Duration,
    /// What the machine must have.
    pub(crate) needs: &'static [Need],
    /// Whether the whole may pass on a CI machine without it.
    pub(crate) optional: bool,
    /// The part itself; an error is a failure.
    pub(crate) run: fn(&Repository) -> anyhow::Result<Outcome>,
}

const fn part(
    name: &'static str,
    group: Group,
    seconds: u64,
    needs: &'static [Need],
    run: fn(&Repository) -> anyhow::Result<Outcome>,
) -> Part {
    Part {
        name,
        group,
        budget: Duration::from_secs(seconds),
        needs,
        optional: false,
        run,
    }
}

const FMT: Need = Need::Subcommand("fmt", "rustup component add rustfmt");
const CLIPPY: Need = Need::Subcommand("clippy", "rustup component add clippy");

/// All parts. Those that take no time come first: they tell most for what they cost.
pub(crate) const PARTS: &[Part] = &[
    part("fmt", Group::Build, 5, &[FMT], fmt),
    part("crate-graph", Group::Build, 3, &[], graph::part),
    part("dependencies", Group::Build, 5, &[], dependencies::part),
    part("origins", Group::Build, 5, &[], origins::part),
    part("unsafe", Group::Build, 2, &[], unsafety::part),
    part("clippy", Group::Build, 110, &[CLIPPY], clippy),
    part("release", Group::Build, 75, &[], release),
    part("docs", Group::Build, 50, &[], docs),
    part("no-std", Group::Build, 25, &[], nostd::part),
    part("header", Group::Build, 20, &[], header::part),
    part("tests", Group::Suite, 210, &[], tests),
    part(
        "system-calls",
        Group::Suite,
        15,
        &[Need::Package("strace")],
        system_calls,
    ),
    part("doctests", Group::Suite, 15, &[], doctests),
    part(
        "compare",
        Group::Rig,
        45,
        conformance::NEEDS,
        conformance::part,
    ),
    part("libvirt", Group::Rig, 5, libvirt::NEEDS, libvirt::part),
    part("units", Group::Unit, 220, units::NEEDS, units::part),
    part("balloon", Group::Balloon, 40, balloon::NEEDS, balloon::part),
    part(
        "balloon-qemu",
        Group::Balloon,
        30,
        units::BALLOON_NEEDS,
        units::balloon_part,
    ),
    part("examples", Group::Unit, 20, units::NEEDS, examples::part),
    part(
        "guest-kernel",
        Group::Kernel,
        210,
        guests::KERNEL_NEEDS,
        guests::kernel_part,
    ),
    part("guests", Group::Rig, 70, guests::NEEDS, guests::part),
];

fn fmt(repository: &Repository) -> anyhow::Result<Outcome> {
    cargo::run(&mut repository.cargo(&["fmt", "--all", "--check"]))?;
    // No members of the workspace, so named by themselves.
    for alone in [nostd::CRATE, fuzz::CRATE, header::CRATE] {
        let manifest = format!("{alone}/Cargo.toml");
        cargo::run(&mut repository.cargo(&["fmt", "--check", "--manifest-path", &manifest]))?;
    }
    Ok(Outcome::Passed)
}

fn clippy(repository: &Repository) -> anyhow::Result<Outcome> {
    let mut command = repository.cargo(&["clippy", "--workspace", "--all-targets"]);
    cargo::run(command.args(["--all-features", "--", "-D", "warnings"]))?;
    Ok(Outcome::Passed)
}

/// The program as a user builds it.
fn release(repository: &Repository) -> anyhow::Result<Outcome> {
    cargo::run(&mut repository.cargo(&["build", "--release", "--package", "dmaspace-cli"]))?;
    Ok(Outcome::Passed)
}

/// All tests but the doctests, by nextest where it is installed: it runs them side by side.
pub(crate) fn suites(repository: &Repository) -> Command {
    let everything = ["--workspace", "--all-features"];
    let mut command = if cargo::has_subcommand("nextest") {
        repository.cargo(&["nextest", "run", "--no-fail-fast"])
    } else {
        let targets = ["--lib", "--bins", "--tests", "--examples"];
        let mut command = repository.cargo(&["test", "--no-fail-fast"]);
        command.args(targets);
        command
    };
    command.args(everything);
    command
}

fn tests(repository: &Repository) -> anyhow::Result<Outcome> {
    let mut command = suites(repository);
    properties::settle(&mut command, runner::in_ci());
    cargo::run(&mut command)?;
    Ok(Outcome::Passed)
}

/// What the suites leave out, loudly, where there is no strace.
fn system_calls(repository: &Repository) -> anyhow::Result<Outcome> {
    let mut command = suites(repository);
    command.arg("some_of_all_system_calls");
    properties::settle(&mut command, runner::in_ci());
    cargo::run(&mut command)?;
    Ok(Outcome::Passed)
}

fn doctests(repository: &Repository) -> anyhow::Result<Outcome> {
    cargo::run(&mut repository.cargo(&["test", "--workspace", "--all-features", "--doc"]))?;
    Ok(Outcome::Passed)
}

fn docs(repository: &Repository) -> anyhow::Result<Outcome> {
    let mut command = repository.cargo(&["doc", "--workspace", "--all-features", "--no-deps"]);
    cargo::run(command.env("RUSTDOCFLAGS", "-D warnings"))?;
    Ok(Outcome::Passed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_of_a_group_stay_within_its_budget() {
        for group in Group::ALL {
            let sum: Duration = PARTS
                .iter()
                .filter(|part| part.group == group)
                .map(|part| part.budget)
                .sum();
            assert!(sum <= group.budget(), "{group:?}: {sum:?}");
        }
    }

    #[test]
    fn no_two_parts_have_the_same_name() {
        for (i, part) in PARTS.iter().enumerate() {
            assert!(PARTS[..i].iter().all(|other| other.name != part.name));
        }
    }
}
