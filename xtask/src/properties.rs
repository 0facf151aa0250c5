//! The random inputs of the property tests: `cargo xtask properties`, and what CI takes.
//!
//! On a developer's machine each run of the suites takes inputs of its own. CI takes the same ones
//! each time, so that what fails there has come with the change. Here the suites are run again and
//! again, each time from another seed, and a seed that fails is named.

use std::hash::{BuildHasher as _, RandomState};

use clap::Args;

use crate::{
    cargo::Repository,
    suites::{SEED, Suites},
};

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
        let suites = Suites {
            selection: vec![
                "--workspace",
                "--all-features",
                "--lib",
                "--bins",
                "--tests",
            ],
            filter: options.filter.as_deref(),
            environment: vec![(SEED, seed.to_string().into())],
        };
        if let Err(error) = suites.run(repository) {
            println!("{error:#}");
            failed.push(seed);
        }
    }
    for seed in &failed {
        println!("failed: cargo xtask properties --rounds 1 --seed {seed}");
    }
    println!("{} of {} rounds failed", failed.len(), options.rounds);
    Ok(failed.is_empty())
}

fn random() -> u64 {
    RandomState::new().hash_one(0)
}
