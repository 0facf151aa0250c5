//! The suites under a sanitizer: `cargo xtask sanitize address`, `cargo xtask sanitize thread`.
//!
//! rustc's sanitizers are not stable; `RUSTC_BOOTSTRAP` lets a stable compiler have them. The standard library
//! is the one that comes with the compiler, without a sanitizer in it. AddressSanitizer watches our own code and
//! all allocations. ThreadSanitizer is told by `edges.c` how the library orders threads.
//!
//! A build of its own, below `target/sanitize`. What it is linked with is made anew each time, but Cargo does not see
//! that: after a change of the C files `target/sanitize` is to be removed.

mod linked;

use std::{fs, path::Path, process::Command};

use anyhow::{Context as _, ensure};
use cargo_metadata::camino::Utf8Path;
use clap::{Args, ValueEnum};

use crate::cargo::{self, Repository};

/// The one target that is tried.
const TARGET: &str = "x86_64-unknown-linux-gnu";

/// The crates with `unsafe`, and those beside them.
const PACKAGES: [&str; 10] = [
    "dmaspace-runs",
    "dmaspace-iopt",
    "dmaspace-hostmem",
    "dmaspace-iommu",
    "dmaspace-virtio-balloon",
    "dmaspace-ioas",
    "dmaspace-virtio-iommu",
    "dmaspace",
    "dmaspace-vhost",
    "dmaspace-capi",
];

/// The crates up to `ioas` of which a test has more than one thread. `dmaspace-cli` and `qtest` by name: `--package`.
const THREADED: [&str; 4] = [
    "dmaspace-iopt",
    "dmaspace-hostmem",
    "dmaspace-iommu",
    "dmaspace-ioas",
];
/// Their test programs in which one does, beside units.
const THREADED_TESTS: [&str; 6] = [
    "operations",
    "readers",
    "real_memory",
    "suite",
    "linux",
    "handover",
];

/// What ThreadSanitizer passes over, by names that no function of ours has.
const SUPPRESSIONS: &str = "\
# The test harness, which has no sanitizer in it, hands a test to its thread and waits for it in a channel.
race:Mutex<core::option::Option<test::run_test
race:test::event::CompletedTest
# The last thread of a scope frees its counter; the library does that without a sanitizer, our thread with one.
race:alloc::sync::Arc<std::thread::scoped::ScopeData>
";

/// Random inputs of a property, where its test does not say how many: an eighth of what is usual.
const CASES: &str = "32";

/// Which sanitizer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Kind {
    /// Accesses outside of objects, and after their end.
    Address,
    /// Accesses of two threads of which nothing says which comes first.
    Thread,
}

/// The options of `cargo xtask sanitize`.
#[derive(Args, Clone, Debug)]
pub(crate) struct Options {
    /// Which sanitizer.
    kind: Kind,
    /// Only these packages, with all of their tests.
    #[arg(long, value_name = "PACKAGE")]
    package: Vec<String>,
    /// Builds only.
    #[arg(long)]
    no_run: bool,
    /// Only tests with this in their names.
    #[arg(value_name = "FILTER")]
    filter: Option<String>,
}

/// True when all tests have passed.
pub(crate) fn run(options: &Options, repository: &Repository) -> anyhow::Result<bool> {
    let name = match options.kind {
        Kind::Address => "address",
        Kind::Thread => "thread",
    };
    let sanitize = repository.metadata.target_directory.join("sanitize");
    let directory = sanitize.join(name);
    fs::create_dir_all(&directory).with_context(|| format!("{directory} cannot be made"))?;
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/sanitize");
    let mut flags = vec![format!("-Zsanitizer={name}")];
    flags.extend(linked::locked(&sources, &directory)?);
    if options.kind == Kind::Thread {
        // The standard library was built without it, which rustc refuses otherwise.
        flags.push("-Cunsafe-allow-abi-mismatch=sanitizer".into());
        flags.extend(linked::edges(&sources, &directory, TARGET)?);
        let symbolizer = Command::new("llvm-symbolizer").arg("--version").output();
        symbolizer
            .context("llvm-symbolizer tells the functions of a race (Debian package llvm)")?;
    }
    let suppressions = directory.join("suppressions");
    fs::write(&suppressions, SUPPRESSIONS).with_context(|| format!("no {suppressions}"))?;
    // The allocator refuses what cannot be had, as the system's does.
    let options_of_both = "allocator_may_return_null=1";
    let environment = [
        (
            "ASAN_OPTIONS",
            // What a device may still reach is never freed, on purpose, and tests of failures have that happen.
            format!("{options_of_both}:detect_stack_use_after_return=1:detect_leaks=0"),
        ),
        (
            "TSAN_OPTIONS",
            format!("{options_of_both}:suppressions={suppressions}"),
        ),
    ];
    probe(options.kind, &sources, &directory, &flags, &environment)?;
    let mut command = repository.cargo(&["nextest", "run", "--all-features"]);
    command
        .args(["--target", TARGET, "--target-dir", directory.as_str()])
        .env("RUSTC_BOOTSTRAP", "1")
        .env("CARGO_ENCODED_RUSTFLAGS", flags.join("\x1f"))
        .env("PROPTEST_CASES", CASES)
        .envs(environment);
    match (options.package.as_slice(), options.kind) {
        ([], Kind::Address) => select(&mut command, "--package", PACKAGES),
        ([], Kind::Thread) => {
            select(&mut command, "--package", THREADED);
            select(command.arg("--lib"), "--test", THREADED_TESTS);
        }
        (named, _) => select(&mut command, "--package", named),
    }
    if options.no_run {
        command.arg("--no-run");
    } else {
        command.arg("--no-fail-fast");
        if options.kind == Kind::Address {
            // Programs in C that are linked without the sanitizer.
            command.args(["--filterset", "not test(/^example::the_c_example/)"]);
        }
        command.args(&options.filter);
    }
    Ok(cargo::run(&mut command).is_ok())
}

/// What a program without errors and one with errors come to: a sanitizer that sees nothing proves nothing, and one
/// that sees what is not there with this compiler's library is to be told more in `edges.c`.
fn probe(
    kind: Kind,
    sources: &Path,
    directory: &Utf8Path,
    flags: &[String],
    environment: &[(&str, String); 2],
) -> anyhow::Result<()> {
    let program = directory.join("probe");
    cargo::run(
        Command::new("rustc")
            .env("RUSTC_BOOTSTRAP", "1")
            .args(["--edition", "2024", "-g", "--target", TARGET])
            .args(flags)
            .arg(sources.join("probe.rs"))
            .args(["-o", program.as_str()]),
    )?;
    let (error, seen) = match kind {
        Kind::Address => ("outside", "heap-buffer-overflow"),
        Kind::Thread => ("race", "data race"),
    };
    let output = Command::new(&program).arg(error).output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(
        !output.status.success() && said.contains(seen),
        "the sanitizer does not see the error of `probe {error}`: {said}"
    );
    let environment = environment.iter().cloned();
    cargo::run(Command::new(&program).arg("ordered").envs(environment))
        .context("without an error of ours")
}

/// Adds `option` for each value.
fn select<V: AsRef<str>>(command: &mut Command, option: &str, values: impl IntoIterator<Item = V>) {
    for value in values {
        command.args([option, value.as_ref()]);
    }
}
