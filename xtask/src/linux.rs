//! Code that runs inside a Linux kernel: `linux/`, and the kernels that try it.
//!
//! The Rust is a static library of `core` and our own crates, for a target without an operating system, by the
//! distribution's compiler: it has the source of `core`, which is built without vector registers, as a kernel
//! wants it. One object of it goes into a module or a kernel, beside the C of `linux/`, which is the kernel's interface. Linux's
//! own support for Rust is not used: it wants a compiler, a bindgen and a libclang of its choice, and its crate
//! `kernel` has no virtio, no balloon and no page reporting.

use std::{collections::BTreeSet, fs, path::PathBuf, process::Command};

use anyhow::{Context as _, ensure};
use cargo_metadata::{
    DependencyKind, MetadataCommand, Package,
    camino::{Utf8Path, Utf8PathBuf},
};
use clap::Args;
use serde_json::{Value, json};

use crate::{
    cargo::{self, Repository},
    conformance::{NO_SOURCE, SOURCE_MISSING},
    guests,
    host::Need,
    parts::Outcome,
    programs::Programs,
};

/// Packages that build the kernels and the module, and those in a guest.
pub(crate) const NEEDS: &[Need] = &[
    Need::Package("bc"),
    Need::Package("binutils"),
    Need::Package("bison"),
    Need::Package("busybox-static"),
    Need::Package("debian-archive-keyring"),
    Need::Package("flex"),
    Need::Package("gcc"),
    Need::Package("libc6-dev"),
    Need::Package("libelf-dev"),
    Need::Package("make"),
    Need::Package("rust-web-src"),
    Need::Package("rustc-web"),
    Need::Package("xz-utils"),
];

/// A crate of `linux/`: no member of the workspace.
struct Crate {
    /// Below the root.
    directory: &'static str,
    library: &'static str,
    /// As the compiler calls it.
    target: &'static str,
    /// Flags beside [`FLAGS`]: from where to where code may call, for one.
    flags: &'static [&'static str],
}

/// A module. User-Mode Linux lies anywhere in the memory of a process, and so do its modules.
const BALLOON: Crate = Crate {
    directory: "linux/balloon",
    library: "dmaspace_balloon",
    target: X86,
    flags: &["-Ccode-model=large"],
};

/// In the image of a kernel for x86-64.
const TABLES: Crate = Crate {
    directory: "linux/tables",
    library: "dmaspace_tables",
    target: X86,
    flags: &["-Ccode-model=kernel"],
};

/// The same in one for Arm, whose formats these are then. Where the processor looks at it, functions are called where they
/// begin, and return addresses are signed.
const ARM_TABLES: Crate = Crate {
    target: "aarch64-unknown-none-softfloat",
    flags: &["-Zbranch-protection=bti,pac-ret"],
    ..TABLES
};

/// And for RISC-V, whose kernels have no floating point either.
const RISCV_TABLES: Crate = Crate {
    target: "riscv64imac-unknown-none-elf",
    flags: &["-Ccode-model=medium"],
    ..TABLES
};

/// Versions of foreign crates, features, flags, and how kernels are linked: what each of these is built by.
const BUILT_BY: [&str; 4] = [
    "Cargo.lock",
    "Cargo.toml",
    "conformance/src/kernel/link.rs",
    "xtask/src/linux.rs",
];

/// The program that builds kernels.
const RIG: &str = "dmaspace-conformance";

/// Where these crates are.
pub(crate) const CRATES: [&str; 2] = [BALLOON.directory, TABLES.directory];

/// The distribution's compiler: one whose source of `core` is a package too.
const RUSTC: &str = "/usr/bin/rustc";
const X86: &str = "x86_64-unknown-none";
const X86_THREADS: &str = "x86_64-threads-none";

const FLAGS: [&str; 6] = [
    "-Crelocation-model=static",
    "-Cforce-unwind-tables=no",
    // One section, as from a C compiler.
    "-Zfunction-sections=no",
    // Linux has no room for longer names.
    "-Zunstable-options",
    "-Csymbol-mangling-version=legacy",
    "-Dwarnings",
];

/// Frame pointers, which lead through a stack.
const FRAMES: &str = "-Cforce-frame-pointers=yes";

/// The same checks of memory as in C: Linux, scripts/Makefile.kasan, with the offset of x86-64.
const KASAN: [&str; 4] = [
    FRAMES,
    "-Zsanitizer=kernel-address",
    "-Zsanitizer-recover=kernel-address",
    "-Cllvm-args=-asan-mapping-offset=0xdffffc0000000000 -asan-instrumentation-with-call-threshold=0 \
     -asan-stack=0 -asan-globals=0 -asan-kernel-mem-intrinsic-prefix=1",
];

/// The same look at accesses that nothing orders as in C: Linux, scripts/Makefile.kcsan.
const KCSAN: [&str; 3] = [
    FRAMES,
    "-Zsanitizer=thread",
    "-Cllvm-args=-tsan-compound-read-before-write=1 -tsan-distinguish-volatile=1",
];

/// The mitigations of a kernel that has them: Linux, arch/x86/Makefile.
const HARDENED_FLAGS: [&str; 6] = [
    FRAMES,
    "-Zcf-protection=branch",
    "-Zfunction-return=thunk-extern",
    "-Zretpoline-external-thunk",
    "-Zindirect-branch-cs-prefix",
    "-Cjump-tables=n",
];

/// A kernel that is a program: fast enough to be timed.
pub(crate) const UML: &str = "um";
/// That of the guests in QEMU.
pub(crate) const GUEST: &str = "guest";
/// The same with mitigations of processors' faults.
const HARDENED: &str = "hardened";
/// That in which Linux is measured.
pub(crate) const DMA: &str = "dma";
/// The same, counting the calls of its functions.
pub(crate) const TRACED: &str = "traced";
/// That in which Linux's own tests run, the same looking for mistakes, and those for Arm and RISC-V.
const TESTS: [&str; 5] = ["tests", TESTS_DEBUG, TESTS_RACES, ARM, RISCV];
const TESTS_DEBUG: &str = "tests-debug";
const TESTS_RACES: &str = "tests-races";
pub(crate) const ARM: &str = "arm";
pub(crate) const RISCV: &str = "riscv";

/// The command `cargo xtask linux`.
#[derive(Args, Clone, Debug)]
pub(crate) struct Options {
    /// The kernel: um, um-debug, guest, hardened, dma, traced, tests, tests-debug, tests-races, arm or riscv [default: um].
    #[arg(long, value_name = "NAME")]
    kernel: Option<String>,
    /// Runs Linux's own tests of I/O page tables, of iommufd and of VFIO as well, and its drivers of a disk and a network
    /// device, in the last five kernels, each with Linux's tables and with ours; an hour and more.
    #[arg(long)]
    full: bool,
    /// Only the parts of these whose names contain this, or one of several that commas part: kunit, selftests, drivers.
    #[arg(long, value_name = "NAME", requires = "full")]
    only: Option<String>,
    /// With faults in our tables, which the kernels that look for mistakes have to find: the tests fail then.
    #[arg(long, requires = "full")]
    planted: bool,
    /// With lines of `linux/patches` in both kernels, by the name of their file; may be given again.
    #[arg(
        long,
        value_name = "NAME",
        requires = "full",
        conflicts_with = "planted"
    )]
    patch: Vec<String>,
}

/// The part `linux` of the test command: the kernels of all that follow, and that what is ours in them works.
pub(crate) fn part(repository: &Repository) -> anyhow::Result<Outcome> {
    with(GUEST, repository, || guests::with_ours(repository))
}

/// The command.
pub(crate) fn command(options: &Options, repository: &Repository) -> anyhow::Result<bool> {
    let named = options.kernel.as_deref();
    if !options.full {
        return build(named.unwrap_or(UML), repository);
    }
    let planted: &[&str] = match options.planted {
        true => &["--cfg=planted"],
        false => &[],
    };
    let wanted = |kernel: &&str| {
        let looks = [TESTS_DEBUG, TESTS_RACES].contains(kernel);
        named.is_none_or(|named| named == *kernel) && (!options.planted || looks)
    };
    let kernels: Vec<&str> = TESTS.into_iter().filter(wanted).collect();
    ensure!(
        !kernels.is_empty(),
        "Linux's own tests, or a planted fault, are not for this kernel"
    );
    for kernel in kernels {
        let chosen = (options.only.as_deref(), &*options.patch);
        if !build_with(kernel, planted, repository)?
            || !guests::linux_tests(kernel, chosen, options.planted, repository)?
        {
            return Ok(false);
        }
    }
    Ok(true)
}

/// A part that wants the kernel of this name, and its modules.
pub(crate) fn with(
    kernel: &str,
    repository: &Repository,
    part: impl FnOnce() -> anyhow::Result<Outcome>,
) -> anyhow::Result<Outcome> {
    if !cfg!(all(target_os = "linux", target_arch = "x86_64")) {
        let reason = "the kernels are built on and for x86-64 Linux";
        return Ok(Outcome::NotRun(reason.into()));
    }
    if !build(kernel, repository)? {
        return Ok(Outcome::NotRun(SOURCE_MISSING.into()));
    }
    part()
}

/// Builds the kernel, unless it is there, and the module. False when Linux's source cannot be had.
pub(crate) fn build(kernel: &str, repository: &Repository) -> anyhow::Result<bool> {
    build_with(kernel, &[], repository)
}

/// With further `flags` for the tables.
fn build_with(kernel: &str, flags: &[&str], repository: &Repository) -> anyhow::Result<bool> {
    let own: &[&str] = match kernel {
        TESTS_DEBUG => &KASAN,
        TESTS_RACES => &KCSAN,
        HARDENED => &HARDENED_FLAGS,
        // It has another unwinder.
        DMA => &[],
        _ => &[FRAMES],
    };
    let tables = match kernel {
        ARM => ARM_TABLES,
        RISCV => RISCV_TABLES,
        TESTS_RACES => Crate {
            target: X86_THREADS,
            ..TABLES
        },
        _ => TABLES,
    };
    let programs = Programs::build(repository)?;
    let mut command = programs.command(RIG, repository);
    let work = repository.metadata.target_directory.join("conformance");
    command.arg("--work").arg(work);
    command.args(["linux", "--kernel", kernel]);
    if kernel != HARDENED && !TESTS.contains(&kernel) {
        let (object, inputs) = BALLOON.recorded(&[], &programs, repository)?;
        command.args(["--module", BALLOON.directory, "--module-object"]);
        command.arg(object).arg("--module-inputs").arg(inputs);
    }
    let (object, inputs) = tables.recorded(&[own, flags].concat(), &programs, repository)?;
    command.args(["--tables", TABLES.directory, "--tables-object"]);
    command.arg(object);
    // With further flags they are not what their files say.
    if flags.is_empty() {
        command.arg("--tables-inputs").arg(inputs);
    }
    let status = command.status();
    let status = status.context("the rig cannot be started")?;
    if status.code() == Some(NO_SOURCE) {
        return Ok(false);
    }
    ensure!(status.success(), "the module cannot be built: {status}");
    Ok(true)
}

/// Writes into a directory what [`X86_THREADS`] is: [`X86`] with a sanitizer that the compiler has for programs only.
fn describe_target(directory: &Utf8Path) -> anyhow::Result<()> {
    let mut print = Command::new(RUSTC);
    print.args(["-Zunstable-options", "--print=target-spec-json", "--target"]);
    let printed = output(print.arg(X86).env("RUSTC_BOOTSTRAP", "1"))?;
    let mut target: Value = serde_json::from_str(&printed)?;
    target["supported-sanitizers"] = json!(["thread"]);
    fs::create_dir_all(directory)?;
    fs::write(
        directory.join(X86_THREADS).with_extension("json"),
        target.to_string(),
    )?;
    Ok(())
}

impl Crate {
    /// Its Rust, as one object, and the record of its files, which is made before they are read.
    fn recorded(
        &self,
        flags: &[&str],
        programs: &Programs,
        repository: &Repository,
    ) -> anyhow::Result<(PathBuf, Utf8PathBuf)> {
        let target = &repository.metadata.target_directory;
        let record = target.join("linux").join(self.library).join("inputs");
        fs::create_dir_all(target.join("linux").join(self.library))?;
        let mut command = programs.command(RIG, repository);
        command.arg("inputs").arg("--record").arg(&record);
        cargo::run(command.args(self.inputs(repository)?))?;
        Ok((self.object(flags, repository)?, record))
    }

    /// The files and directories that it is built of, below the root: its own, those of the crates that it depends on, and
    /// [`BUILT_BY`].
    fn inputs(&self, repository: &Repository) -> anyhow::Result<BTreeSet<Utf8PathBuf>> {
        let mut inputs: BTreeSet<Utf8PathBuf> = BUILT_BY.map(Utf8PathBuf::from).into();
        let directory = Utf8Path::new(self.directory);
        for entry in repository.root.join(directory).read_dir()? {
            let name = entry?.file_name().into_string();
            let name = name.ok().context("a name is no text")?;
            // A copy of the workspace's, which Cargo changes.
            if name != "Cargo.lock" {
                inputs.insert(directory.join(name));
            }
        }
        let own = MetadataCommand::new()
            .manifest_path(repository.root.join(directory).join("Cargo.toml"))
            .no_deps()
            .exec()?;
        let mut open: Vec<&Package> = own.packages.iter().collect();
        while let Some(package) = open.pop() {
            let built_of = package
                .dependencies
                .iter()
                .filter(|dependency| dependency.kind != DependencyKind::Development);
            for path in built_of.filter_map(|dependency| dependency.path.as_ref()) {
                let mut members = repository.metadata.packages.iter();
                let member = members.find(|member| member.manifest_path.parent() == Some(path));
                let member = member.with_context(|| format!("{path} is no crate of ours"))?;
                let below = path.strip_prefix(&repository.root);
                let below = below.unwrap_or(path);
                if inputs.insert(below.join("src")) {
                    inputs.insert(below.join("Cargo.toml"));
                    open.push(member);
                }
            }
        }
        Ok(inputs)
    }

    /// Its Rust, as one object.
    fn object(&self, flags: &[&str], repository: &Repository) -> anyhow::Result<PathBuf> {
        let directory = repository.root.join(self.directory);
        // The same versions of foreign crates as in the workspace; Cargo drops those not needed.
        fs::copy(
            repository.root.join("Cargo.lock"),
            directory.join("Cargo.lock"),
        )
        .context("the workspace's Cargo.lock cannot be copied")?;
        let target = repository.metadata.target_directory.join("linux");
        let target = target.join(self.library);
        if self.target == X86_THREADS {
            describe_target(&target)?;
        }
        let manifest = format!("{}/Cargo.toml", self.directory);
        let mut build = repository.cargo(&["build", "--release", "--manifest-path", &manifest]);
        build.args(["-Zbuild-std=core", "--target", self.target]);
        let flags = [&FLAGS[..], self.flags, flags].concat();
        build
            .env("CARGO_TARGET_DIR", &target)
            .env("RUST_TARGET_PATH", &target)
            .env("CARGO_ENCODED_RUSTFLAGS", flags.join("\u{1f}"))
            .env_remove("RUSTFLAGS")
            .env_remove("CARGO_BUILD_TARGET")
            .env("RUSTC", RUSTC)
            // The distribution's compiler is a stable one, and this is what it allows only so.
            .env("RUSTC_BOOTSTRAP", "1");
        cargo::run(&mut build)?;
        let built = target.join(self.target).join("release");
        let library = built.join(format!("lib{}.a", self.library));
        let members = output(Command::new("ar").arg("t").arg(&library))?;
        let member = members.lines().find(|name| name.starts_with(self.library));
        let member = member.context("the library has no object of ours")?;
        // Parts of `core` are in it, by link-time optimization; memcpy and memset are the kernel's.
        let mut extract = Command::new("ar");
        let extract = extract.args(["x", library.as_str(), member]);
        output(extract.current_dir(&built))?;
        let object = built.join("driver.o");
        fs::rename(built.join(member), &object)?;
        Ok(object.into())
    }
}

fn output(command: &mut Command) -> anyhow::Result<String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command.output().with_context(|| name.clone())?;
    ensure!(
        output.status.success(),
        "{name} ended with {}",
        output.status
    );
    Ok(String::from_utf8(output.stdout)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_crate_in_a_kernel_is_built_of_its_own_files_and_of_those_it_depends_on() {
        let repository = Repository::find().unwrap();
        for (of, names) in [
            (
                TABLES,
                &[
                    "Cargo.lock",
                    "crates/iopt/Cargo.toml",
                    "crates/iopt/src",
                    "crates/runs/src",
                    "linux/tables/Cargo.toml",
                    "linux/tables/io-pgtable-arm.c",
                    "linux/tables/src",
                    "xtask/src/linux.rs",
                ][..],
            ),
            (
                BALLOON,
                &[
                    "crates/runs/src",
                    "crates/virtio-balloon/Cargo.toml",
                    "crates/virtio-balloon/src",
                    "linux/balloon/balloon.c",
                    "linux/balloon/src",
                ],
            ),
        ] {
            let inputs = of.inputs(&repository).unwrap();
            for name in names {
                assert!(inputs.contains(Utf8Path::new(name)), "{name}: {inputs:?}");
            }
            let there = |input: &Utf8PathBuf| repository.root.join(input).exists();
            assert!(inputs.iter().all(there), "{inputs:?}");
            let copy = Utf8Path::new(of.directory).join("Cargo.lock");
            assert!(!inputs.contains(&copy), "{inputs:?}");
        }
    }
}
