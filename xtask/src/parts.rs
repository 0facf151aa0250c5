//! The parts of `cargo xtask test`, in the order in which they run.
//!
//! A new part is a function (in a file of its own when it is more than one command) and one
//! line in [`PARTS`]. Budgets are for two idle cores and a fresh clone: the parts without a rig take nine
//! minutes together, those with rigs thirty more.

use std::time::Duration;

use crate::{
    balloon,
    cargo::{self, Repository},
    conformance, dependencies, device, examples, fuzz, guests,
    host::Need,
    libvirt, linux, nostd,
    programs::Programs,
    runner, sanitize,
    suites::{self, Suites},
    units,
};

/// When a part runs, and what its budget counts towards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Group {
    /// Always: nothing but Rust and a C linker is needed.
    Basic,
    /// With `--all`: programs of others judge ours.
    Rig,
}

impl Group {
    /// Both, in the order of the summary.
    pub(crate) const ALL: [Self; 2] = [Self::Basic, Self::Rig];

    /// As the summary calls it.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Basic => "without rigs",
            Self::Rig => "rigs",
        }
    }

    /// The time that all parts of the group may take together.
    pub(crate) const fn budget(self) -> Duration {
        Duration::from_secs(match self {
            Self::Basic => 540,
            Self::Rig => 1800,
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
    /// When it runs.
    pub(crate) group: Group,
    /// Time that it should take at most; more is reported and is no failure, since machines differ.
    pub(crate) budget: Duration,
    /// Needs of the part.
    pub(crate) needs: &'static [Need],
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
        run,
    }
}

const FMT: Need = Need::Subcommand("fmt", "rustup component add rustfmt");
const CLIPPY: Need = Need::Subcommand("clippy", "rustup component add clippy");

/// For the tests of system calls that fail, for libvirt's schema, for fetching the emulator, and for the distribution's
/// own, whose process `inspect` looks at.
const RIG_TESTS: &[Need] = &[
    Need::Package("debian-archive-keyring"),
    Need::Package("qemu-system-x86"),
    Need::Package("strace"),
    Need::Package("libxml2-utils"),
    Need::Package("libvirt0"),
];

/// All parts. Those that take no time come first: they find most for what they cost.
pub(crate) const PARTS: &[Part] = &[
    part("fmt", Group::Basic, 5, &[FMT], fmt),
    part("dependencies", Group::Basic, 5, &[], dependencies::part),
    part("clippy", Group::Basic, 90, &[CLIPPY], clippy),
    part("docs", Group::Basic, 40, &[], docs),
    part("no-std", Group::Basic, 20, &[], nostd::part),
    part("tests", Group::Basic, 350, &[], tests),
    part("doctests", Group::Basic, 20, &[], doctests),
    part("rig-tests", Group::Rig, 120, RIG_TESTS, rig_tests),
    part(
        "compare",
        Group::Rig,
        150,
        conformance::NEEDS,
        conformance::part,
    ),
    part("units", Group::Rig, 200, units::NEEDS, units_and_examples),
    part("linux", Group::Rig, 600, linux::NEEDS, linux::part),
    part("balloon", Group::Rig, 240, linux::NEEDS, balloon::part),
    part("guests", Group::Rig, 240, guests::NEEDS, guests::part),
    part("vfio-user", Group::Rig, 75, device::NEEDS, device::part),
];

/// The rigs' own packages: their tests are needed where the rigs run.
const RIGS: [&str; 6] = [
    "dmaspace-balloon-rig",
    "dmaspace-bench",
    "dmaspace-conformance",
    "dmaspace-device-rig",
    "dmaspace-guest",
    "dmaspace-units",
];

/// Its tests skip the real QEMU where there is none, so they run among the rigs' again.
const QTEST: &str = "dmaspace-qtest";

fn fmt(repository: &Repository) -> anyhow::Result<Outcome> {
    cargo::run(&mut repository.cargo(&["fmt", "--all", "--check"]))?;
    // No members of the workspace, so named by themselves.
    let alone = [nostd::CRATE, fuzz::CRATE, sanitize::PROBE];
    for alone in alone.into_iter().chain(linux::CRATES) {
        let manifest = format!("{alone}/Cargo.toml");
        cargo::run(&mut repository.cargo(&["fmt", "--check", "--manifest-path", &manifest]))?;
    }
    Ok(Outcome::Passed)
}

fn clippy(repository: &Repository) -> anyhow::Result<Outcome> {
    let mut command = repository.cargo(&["clippy", "--workspace", "--all-targets"]);
    cargo::run(command.args(["--all-features", "--", "-D", "warnings"]))?;
    // Without `std` its locks and its tests are others.
    let mut command = repository.cargo(&["clippy", "--package", "dmaspace-ioas"]);
    cargo::run(command.args(["--all-targets", "--", "-D", "warnings"]))?;
    Ok(Outcome::Passed)
}

fn tests(repository: &Repository) -> anyhow::Result<Outcome> {
    let rigs = RIGS.map(|package| ["--exclude", package]);
    let all = ["--workspace", "--all-features"];
    // The other examples have no tests, and run where the rigs do.
    let targets = ["--lib", "--bins", "--tests", "--example=monitor"];
    let suites = Suites {
        selection: [&all, rigs.as_flattened(), &targets].concat(),
        environment: suites::settled(runner::in_ci()),
        ..Suites::default()
    };
    suites.run(repository)?;
    Ok(Outcome::Passed)
}

fn rig_tests(repository: &Repository) -> anyhow::Result<Outcome> {
    let packages = RIGS.into_iter().chain([QTEST]);
    let packages = packages.flat_map(|package| ["--package", package]);
    let path = Programs::build(repository)?.path_of_qemu(repository)?;
    let mut suites = Suites {
        selection: ["--all-features"].into_iter().chain(packages).collect(),
        environment: suites::settled(runner::in_ci()),
        ..Suites::default()
    };
    suites.environment.push(("PATH", path));
    suites.run(repository)?;
    // Left out loudly by the part `tests` where there is no strace.
    suites.selection = vec!["--workspace", "--all-features", "--test", "faults"];
    suites.filter = Some("some_of_all_system_calls");
    suites.run(repository)?;
    libvirt::judge(repository)?;
    Ok(Outcome::Passed)
}

fn units_and_examples(repository: &Repository) -> anyhow::Result<Outcome> {
    units::check(repository)?;
    examples::run(repository)?;
    Ok(Outcome::Passed)
}

fn doctests(repository: &Repository) -> anyhow::Result<Outcome> {
    let mut command = repository.cargo(&["test", "--workspace", "--all-features", "--doc"]);
    // The rigs have none, and are compiled where they run.
    command.args(RIGS.map(|package| ["--exclude", package]).as_flattened());
    cargo::run(&mut command)?;
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
