//! The random inputs of the property tests: `cargo xtask properties`, and what CI takes.
//!
//! On a developer's machine each run of the suites takes inputs of its own. CI takes the same ones
//! each time, so that what fails there has come with the change. Here the suites are run again and
//! again, each time from another seed, and a seed that fails is named.

use std::{
    hash::{BuildHasher as _, RandomState},
    process::Command,
};

use clap::Args;

use crate::{
    cargo::{self, Repository},
    parts,
};

/// Variable with proptest's seed.
const SEED: &str = "PROPTEST_RNG_SEED";

/// The options of `cargo xtask properties`.
#[derive(Args, Clone, Debug)]
pub(crate) struct Options {
    /// How many times.
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// The seed of the first round; a random one without it.
    #[arg(long)]
    seed: Option<u64>,
    /// Only tests with this in their names.
    #[arg(value_name = "FILTER")]
    filter: Option<String>,
}

/// True when no round has failed.
pub(crate) fn run(options: &Options, repository: &Repository) -> anyhow::Result<bool> {
    let first = options.seed.unwrap_or_else(random);
    let seeds = (0..options.rounds).map(|round| first.wrapping_add(round.into()));
    let mut failed = Vec::new();
    for seed in seeds {
        println!("\n== seed {seed} ==");
        let mut command = parts::suites(repository);
        command
            .args(options.filter.iter())
            .env(SEED, seed.to_string());
        if cargo::run(&mut command).is_err() {
            failed.push(seed);
        }
    }
    for seed in &failed {
        println!("failed: cargo xtask properties --rounds 1 --seed {seed}");
    }
    println!("{} of {} rounds failed", failed.len(), options.rounds);
    Ok(failed.is_empty())
}

/// Fixes the inputs in CI, unless a seed was chosen.
pub(crate) fn settle(command: &mut Command, ci: bool) {
    if ci && std::env::var_os(SEED).is_none() {
        command.env(SEED, "1");
    }
}

fn random() -> u64 {
    RandomState::new().hash_one(0)
}
