//! The suites under a sanitizer: `cargo xtask sanitize address`, `cargo xtask sanitize thread`.
//!
//! rustc's sanitizers are not stable; `RUSTC_BOOTSTRAP` lets a stable compiler have them. The standard library
//! is the one that comes with the compiler, without a sanitizer in it: AddressSanitizer watches our own code and
//! all allocations, and ThreadSanitizer, which does not see how the standard library orders accesses, would tell of
//! races that are none; what it is told to pass over stands in [`SUPPRESSIONS`].
//!
//! A build of its own, below `target/sanitize`.

use std::fs;

use anyhow::Context as _;
use clap::{Args, ValueEnum};

use crate::cargo::{self, Repository};

/// The one target that is tried.
const TARGET: &str = "x86_64-unknown-linux-gnu";

/// The crates with `unsafe`, and those on which they stand. What needs a kernel's devices is not there.
const PACKAGES: [&str; 6] = [
    "dmaspace-runs",
    "dmaspace-iopt",
    "dmaspace-hostmem",
    "dmaspace-iommu",
    "dmaspace-virtio-balloon",
    "dmaspace-ioas",
];

/// What ThreadSanitizer passes over: the standard library's own order, which it cannot see.
const SUPPRESSIONS: &str = "\
race:std::
race:core::
race:alloc::
race:test::
";

/// AddressSanitizer makes `mlock` do nothing, and these look at what the kernel says of it.
const MLOCK: [&str; 3] = [
    "the_kernel_counts_what_is_mapped_and_no_more_after_unmap",
    "an_ordinary_user_maps_as_well",
    "mlock_is_charged_and_given_back_and_held_once",
];

/// Which sanitizer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Kind {
    /// Accesses outside of objects, after their end, and what is never freed.
    Address,
    /// Accesses of two threads of which nothing says which comes first.
    Thread,
}

/// The options of `cargo xtask sanitize`.
#[derive(Args, Clone, Debug)]
pub(crate) struct Options {
    /// Which sanitizer.
    kind: Kind,
    /// Only these packages; those with `unsafe` and what they stand on when none is named.
    #[arg(long, value_name = "PACKAGE")]
    package: Vec<String>,
    /// Only tests with this in their names.
    #[arg(value_name = "FILTER")]
    filter: Option<String>,
}

/// True when all tests have passed.
pub(crate) fn run(options: &Options, repository: &Repository) -> anyhow::Result<bool> {
    let (name, flags) = match options.kind {
        Kind::Address => ("address", "-Zsanitizer=address"),
        // The standard library was built without it, which rustc refuses otherwise.
        Kind::Thread => (
            "thread",
            "-Zsanitizer=thread -Cunsafe-allow-abi-mismatch=sanitizer",
        ),
    };
    let directory = repository
        .metadata
        .target_directory
        .join("sanitize")
        .join(name);
    fs::create_dir_all(&directory).with_context(|| format!("{directory} cannot be made"))?;
    let suppressions = directory.join("suppressions");
    fs::write(&suppressions, SUPPRESSIONS).with_context(|| format!("no {suppressions}"))?;
    let mut command = repository.cargo(&["nextest", "run", "--no-fail-fast", "--all-features"]);
    command
        .args(["--target", TARGET, "--target-dir", directory.as_str()])
        .env("RUSTC_BOOTSTRAP", "1")
        .env("RUSTFLAGS", flags)
        // The allocator refuses what cannot be had, as the system's does.
        .env(
            "ASAN_OPTIONS",
            "allocator_may_return_null=1:detect_stack_use_after_return=1",
        )
        .env("TSAN_OPTIONS", format!("suppressions={suppressions}"));
    let packages: Vec<&str> = match options.package.as_slice() {
        [] => PACKAGES.into(),
        named => named.iter().map(String::as_str).collect(),
    };
    for package in packages {
        command.args(["--package", package]);
    }
    let mut wanted = String::from("all()");
    if options.kind == Kind::Address {
        for test in MLOCK {
            wanted.push_str(&format!(" and not test(={test})"));
        }
    }
    if let Some(filter) = &options.filter {
        wanted.push_str(&format!(" and test({filter})"));
    }
    command.args(["--filter-expr", &wanted]);
    Ok(cargo::run(&mut command).is_ok())
}
