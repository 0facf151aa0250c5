//! `cargo xtask soak`: see the library.

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use clap::Parser;
use soak::{Settings, run};

/// Random operations of an address space beside a shadow model.
#[derive(Parser)]
struct Options {
    /// How long.
    #[arg(long, value_name = "MINUTES", default_value_t = 60)]
    minutes: u64,
    /// As long instead.
    #[arg(long, value_name = "SECONDS")]
    seconds: Option<u64>,
    /// Seed of the random numbers; another one each time by default.
    #[arg(long)]
    seed: Option<u64>,
    /// Threads that play devices.
    #[arg(long, default_value_t = 4)]
    threads: usize,
    /// Threads that change the address space.
    #[arg(long, default_value_t = 8)]
    mutators: usize,
    /// Operations between two quiet points.
    #[arg(long, value_name = "OPERATIONS", default_value_t = 10_000)]
    quiet: u64,
}

fn main() -> ExitCode {
    match soak(&Options::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(cause) => {
            eprintln!("soak: {cause:#}");
            ExitCode::from(2)
        }
    }
}

fn soak(options: &Options) -> anyhow::Result<bool> {
    let stop = Arc::new(AtomicBool::new(false));
    let wanted = Arc::clone(&stop);
    ctrlc::set_handler(move || wanted.store(true, Ordering::Relaxed))?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH)?;
    let seed = options.seed.unwrap_or(now.as_nanos() as u64);
    let seconds = options.seconds.unwrap_or(options.minutes * 60);
    let settings = Settings {
        seed,
        time: Duration::from_secs(seconds),
        threads: options.threads,
        mutators: options.mutators,
        quiet_every: options.quiet,
        clear_every: 4,
    };
    let (mutators, threads) = (options.mutators, options.threads);
    println!("seed {seed}, {mutators} mutators, {threads} threads of devices, {seconds} s");
    let outcome = run(&settings, &stop, &mut |sample| eprintln!("{sample}"))
        .map_err(anyhow::Error::from_boxed)?;
    println!("\n{}", outcome.table(24));
    println!("| operation | done | refused |\n|---|--:|--:|");
    for (name, done, refused) in &outcome.counts {
        println!("| {name} | {done} | {refused} |");
    }
    println!("\n{} accesses were to fault, and did", outcome.faulted);
    if outcome.wrong.is_empty() {
        println!("all counters are flat; nothing was wrong");
        return Ok(true);
    }
    println!("\nwrong, with seed {seed}:");
    outcome.wrong.iter().for_each(|text| println!("  {text}"));
    println!("\nthe last operations:");
    outcome.log.iter().for_each(|text| println!("  {text}"));
    Ok(false)
}
