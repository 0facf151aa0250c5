//! Undefined behaviour of safe programs: small suites of the crates at the bottom in Miri.
//!
//! Miri interprets a program, and checks each access against a model of which pointers may be used when: Stacked
//! Borrows, its default, or Tree Borrows. Each suite runs in both. A program is hundreds of times slower there, so the
//! suites are few, and large counts in them are small under `cfg(miri)`. What is no Rust is left out: inline
//! assembly, `membarrier`.
//!
//! Miri comes with nightly toolchains only.

use std::process::{Command, Stdio};

use anyhow::ensure;
use clap::Args;

use crate::cargo::{self, Repository};

const INSTALL: &str = "rustup toolchain install nightly --component miri --component rust-src";

/// The models, and how Miri is asked for them.
const MODELS: [(&str, &str); 2] = [
    ("Stacked Borrows", ""),
    ("Tree Borrows", "-Zmiri-tree-borrows"),
];

/// Files and the environment as they are: proptest reads both.
const FLAGS: &str = "-Zmiri-disable-isolation";

/// Random inputs of a property, where its test does not say how many.
const CASES: &str = "4";

/// Package, what of it, and which tests of that: all without one.
const SUITES: [(&str, &[&str], &[&str]); 6] = [
    ("dmaspace-runs", &["--lib"], &[]),
    ("dmaspace-iopt", &["--lib"], &[]),
    (
        "dmaspace-iopt",
        &["--test", "operations"],
        &["any::", "moved::", "planned::"],
    ),
    ("dmaspace-iopt", &["--test", "readers"], &["takeover::"]),
    ("dmaspace-iopt", &["--test", "reclaim"], &[]),
    ("dmaspace-iopt", &["--test", "reclaim_fences"], &[]),
];

/// The options of `cargo xtask miri`.
#[derive(Args, Clone, Debug)]
pub(crate) struct Options {
    /// Only tests with this in their names.
    #[arg(value_name = "FILTER")]
    filter: Option<String>,
}

/// True when all tests have passed, in both models.
pub(crate) fn run(options: &Options, repository: &Repository) -> anyhow::Result<bool> {
    ensure!(
        is_installed(),
        "NOT RUN: there is no nightly toolchain with Miri: `{INSTALL}`"
    );
    let mut passed = true;
    for (model, flag) in MODELS {
        println!("\n== {model} ==");
        for (package, program, tests) in SUITES {
            // The `cargo` of rustup, which knows toolchains: that by which this program was started is one
            // toolchain's own.
            let mut command = Command::new("cargo");
            command
                .args(["+nightly", "miri", "test", "--package", package])
                .args(program)
                .args(["--all-features", "--no-fail-fast", "--"])
                .current_dir(&repository.root)
                .env("MIRIFLAGS", format!("{FLAGS} {flag}"))
                .env("PROPTEST_CASES", CASES);
            match &options.filter {
                Some(filter) => command.arg(filter),
                None => command.args(tests),
            };
            passed &= cargo::run(&mut command).is_ok();
        }
    }
    Ok(passed)
}

fn is_installed() -> bool {
    Command::new("cargo")
        .args(["+nightly", "miri", "--version"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}
