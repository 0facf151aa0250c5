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

/// Tests of one program.
struct Suite {
    package: &'static str,
    /// The directory of the package's `tests`; the library's own tests without one.
    program: Option<&'static str>,
    /// Its modules; all without one.
    modules: &'static [&'static str],
}

const SUITES: [Suite; 6] = [
    Suite {
        package: "dmaspace-runs",
        program: None,
        modules: &[],
    },
    Suite {
        package: "dmaspace-iopt",
        program: None,
        modules: &[],
    },
    Suite {
        package: "dmaspace-iopt",
        program: Some("operations"),
        modules: &["any", "moved", "planned"],
    },
    Suite {
        package: "dmaspace-iopt",
        program: Some("readers"),
        modules: &["takeover"],
    },
    Suite {
        package: "dmaspace-iopt",
        program: Some("reclaim"),
        modules: &[],
    },
    Suite {
        package: "dmaspace-iopt",
        program: Some("reclaim_fences"),
        modules: &[],
    },
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
        for suite in &SUITES {
            let mut command = Command::new("cargo");
            command
                .args(suite.words())
                .current_dir(&repository.root)
                .env("MIRIFLAGS", format!("{FLAGS} {flag}"))
                .env("PROPTEST_CASES", CASES);
            match &options.filter {
                Some(filter) => command.arg(filter),
                None => command.args(suite.modules.iter().map(|module| format!("{module}::"))),
            };
            passed &= cargo::run(&mut command).is_ok();
        }
    }
    Ok(passed)
}

impl Suite {
    fn words(&self) -> Vec<&str> {
        let mut words = vec!["+nightly", "miri", "test", "--package", self.package];
        match self.program {
            Some(program) => words.extend(["--test", program]),
            None => words.push("--lib"),
        }
        words.extend(["--all-features", "--no-fail-fast", "--"]);
        words
    }
}

/// The `cargo` of rustup, which knows toolchains: that by which this program was started is one toolchain's own.
fn is_installed() -> bool {
    Command::new("cargo")
        .args(["+nightly", "miri", "--version"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn every_suite_has_its_modules() {
        let repository = Repository::find().unwrap();
        for suite in SUITES {
            let package = suite.package.strip_prefix("dmaspace-").unwrap();
            let Some(program) = suite.program else {
                assert_eq!(suite.modules, [""; 0]);
                continue;
            };
            let main = format!("crates/{package}/tests/{program}/main.rs");
            let text = fs::read_to_string(repository.root.join(&main)).unwrap();
            for module in suite.modules {
                assert!(text.contains(&format!("mod {module};")), "{main}: {module}");
            }
        }
    }

    #[test]
    fn a_suite_is_asked_for_by_program_and_module() {
        let [.., library, operations, _, _, _] = SUITES;
        let library = library.words().join(" ");
        assert!(library.ends_with("dmaspace-iopt --lib --all-features --no-fail-fast --"));
        let operations = operations.words().join(" ");
        assert!(operations.contains("--test operations --all-features"));
    }
}
