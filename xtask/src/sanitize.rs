//! The suites under a sanitizer: `cargo xtask sanitize address`, `cargo xtask sanitize thread`.
//!
//! rustc's sanitizers are not stable; `RUSTC_BOOTSTRAP` lets a stable compiler have them. The standard library
//! is built with the sanitizer as well (`-Zbuild-std`), from the toolchain's component `rust-src`: else
//! ThreadSanitizer would not know of its locks. A build of its own, below `target/sanitize`.

use std::{fs, path::Path, process::Command};

use anyhow::{Context as _, ensure};
use cargo_metadata::camino::Utf8Path;
use clap::{Args, ValueEnum};

use crate::cargo::{self, Repository};

/// The errors that a sanitizer has to see, below the root.
pub(crate) const PROBE: &str = "xtask/probe";

/// The one target that is tried.
const TARGET: &str = "x86_64-unknown-linux-gnu";

/// The crates with `unsafe`, and those above them.
const PACKAGES: [&str; 10] = [
    "dmaspace-runs",
    "dmaspace-iopt",
    "dmaspace-hostmem",
    "dmaspace-iommu",
    "dmaspace-virtio-balloon",
    "dmaspace-ioas",
    "dmaspace-virtio-iommu",
    "dmaspace",
    "dmaspace-vfio-user",
    "dmaspace-cli",
];

/// The crates of which a test has more than one thread, and their test programs in which one does, beside units.
/// `qtest` by name: `--package`.
const THREADED: [&str; 5] = [
    "dmaspace-iopt",
    "dmaspace-hostmem",
    "dmaspace-iommu",
    "dmaspace-ioas",
    "dmaspace-cli",
];
const THREADED_TESTS: [&str; 9] = [
    "operations",
    "readers",
    "reclaim",
    "reclaim_fences",
    "real_memory",
    "suite",
    "linux",
    "handover",
    "check",
];

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

impl Kind {
    /// As rustc calls it, and what it says of the error in [`PROBE`].
    const fn names(self) -> (&'static str, &'static str) {
        match self {
            Self::Address => ("address", "heap-buffer-overflow"),
            Self::Thread => ("thread", "data race"),
        }
    }
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
    ensure_sources()?;
    let (name, _) = options.kind.names();
    let sanitize = repository.metadata.target_directory.join("sanitize");
    let directory = sanitize.join(name);
    fs::create_dir_all(&directory).with_context(|| format!("{directory} cannot be made"))?;
    // Fences in the place of a barrier that no sanitizer knows: `iopt::reclaim`.
    let flags = [
        format!("-Zsanitizer={name}"),
        "--cfg=dmaspace_fences".into(),
    ];
    let flags: Vec<String> = flags.into_iter().chain(locked(&directory)?).collect();
    let sanitized = |words: &[&str]| {
        let mut command = repository.cargo(words);
        command
            .args(["-Zbuild-std", "--target", TARGET])
            .args(["--target-dir", directory.as_str()])
            // Else the standard library, as all that is foreign, is slower than what it serves.
            .args(["--config", "profile.dev.package.\"*\".opt-level=1"])
            .args(["--config", "profile.dev.debug=\"line-tables-only\""])
            .env("RUSTC_BOOTSTRAP", "1")
            .env("CARGO_ENCODED_RUSTFLAGS", flags.join("\x1f"))
            // The allocator refuses what cannot be had, as the system's does. What a device may still reach is
            // never freed, on purpose. Signals are for the tests that raise them.
            .env(
                "ASAN_OPTIONS",
                "allocator_may_return_null=1:detect_stack_use_after_return=1:detect_leaks=0:handle_sigbus=0",
            )
            .env("TSAN_OPTIONS", "allocator_may_return_null=1:handle_sigbus=0");
        command
    };
    let manifest = format!("{PROBE}/Cargo.toml");
    probe(
        options.kind,
        &mut sanitized(&["run", "--manifest-path", &manifest]),
    )?;
    let mut command = sanitized(&["nextest", "run", "--all-features"]);
    command.env("PROPTEST_CASES", CASES);
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
        command.arg("--no-fail-fast").args(&options.filter);
    }
    Ok(cargo::run(&mut command).is_ok())
}

/// Fails when the toolchain lacks its standard library's source.
fn ensure_sources() -> anyhow::Result<()> {
    let output = Command::new("rustc").args(["--print", "sysroot"]).output();
    let sysroot = String::from_utf8(output.context("rustc cannot be started")?.stdout)?;
    let sources = Path::new(sysroot.trim()).join("lib/rustlib/src/rust/library");
    ensure!(
        sources.is_dir(),
        "the source of the standard library is missing: `rustup component add rust-src`"
    );
    Ok(())
}

/// Flags of rustc that have memory really locked (`locked.c`).
fn locked(directory: &Utf8Path) -> anyhow::Result<[String; 3]> {
    let object = directory.join("locked.o");
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/src/locked.c");
    cargo::run(Command::new("cc").args(["-c", "-O1", source, "-o", object.as_str()]))?;
    let wrap = |name: &str| format!("-Clink-arg=-Wl,--wrap={name}");
    Ok([
        format!("-Clink-arg={object}"),
        wrap("mlock"),
        wrap("munlock"),
    ])
}

/// Fails when the sanitizer does not see the planted error of its kind.
fn probe(kind: Kind, command: &mut Command) -> anyhow::Result<()> {
    let (name, seen) = kind.names();
    println!("== a planted error ==");
    let output = command.args(["--", name]).output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(
        !output.status.success() && said.contains(seen),
        "the sanitizer does not see the error of `{PROBE} {name}`: {said}"
    );
    Ok(())
}

/// Adds `option` for each value.
fn select<V: AsRef<str>>(command: &mut Command, option: &str, values: impl IntoIterator<Item = V>) {
    for value in values {
        command.args([option, value.as_ref()]);
    }
}
