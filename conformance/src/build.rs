//! Builds Linux's table code and the server around it as one program.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::Context as _;

use crate::apt::run;

/// Files of Linux, below `drivers/iommu`.
const LINUX: &[&str] = &[
    "generic_pt/fmt/iommu_amdv1.c",
    "generic_pt/fmt/iommu_x86_64.c",
    "generic_pt/fmt/iommu_vtdss.c",
    "generic_pt/fmt/iommu_riscv64.c",
    "io-pgtable-arm.c",
    "io-pgtable-arm-v7s.c",
    "io-pgtable-dart.c",
];

/// Files of ours, in `linux-pt/`. Those of the second list say something about Linux's formats.
const OURS: &[&str] = &["server.c", "shim.c", "timing.c", "generic.c", "pgtable.c"];
const WRAPPERS: &[&str] = &["amdv1.c"];

/// Headers of Linux that are used as they are. Every other one that is asked for is an empty file,
/// and `shim.h` says what it would have said.
const HEADERS: &[&str] = &["linux/generic_pt", "linux/io-pgtable.h"];
/// Headers that the C library asks for too, so they must be the machine's.
const SYSTEM: &[&str] = &["linux/errno.h", "linux/limits.h"];

/// Flags of both: kernel code is written for these.
const FLAGS: &[&str] = &[
    "-std=gnu11",
    "-O2",
    "-fno-strict-aliasing",
    "-fno-strict-overflow",
    "-fno-delete-null-pointer-checks",
    "-Werror=implicit-function-declaration",
];

/// Compilers that are tried, the one that must be there first.
pub const COMPILERS: [&str; 2] = ["gcc", "clang"];
/// The same where time counts: a newer version of Clang may make faster code of this.
pub const TIMED_COMPILERS: [&str; 3] = ["gcc", "clang", "clang-16"];

/// Purpose of the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Comparisons: Linux's code checks itself as it goes.
    Compare,
    /// Timing: without its checks, and with the flags of a kernel that cost or save time. Lines
    /// can be told, so that costs can be laid at their doors.
    Time,
}

impl Purpose {
    const fn flags(self) -> &'static [&'static str] {
        match self {
            Self::Compare => &[],
            Self::Time => &[
                "-DCONFIG_DEBUG_GENERIC_PT=0",
                "-fno-pie",
                "-fcf-protection=none",
                "-fno-stack-protector",
                "-gdwarf-4",
            ],
        }
    }

    const fn link_flags(self) -> &'static [&'static str] {
        match self {
            Self::Compare => &[],
            Self::Time => &["-no-pie"],
        }
    }

    /// Where the program for this purpose lies.
    fn directory(self, compiler: &str) -> String {
        match self {
            Self::Compare => compiler.to_owned(),
            Self::Time => format!("{compiler}-timed"),
        }
    }
}

/// True when the machine has the compiler.
pub fn has(compiler: &str) -> bool {
    Command::new(compiler)
        .arg("--version")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}

/// Compiles the program from Linux's `source` into `directory`.
pub fn build(
    source: &Path,
    directory: &Path,
    compiler: &str,
    purpose: Purpose,
) -> anyhow::Result<PathBuf> {
    let work = directory.join(purpose.directory(compiler));
    if work.exists() {
        fs::remove_dir_all(&work)?;
    }
    let include = headers(source, &work)?;
    let iommu = source.join("drivers/iommu");
    let ours = Path::new(env!("CARGO_MANIFEST_DIR")).join("linux-pt");
    let files = LINUX
        .iter()
        .map(|file| (iommu.join(file), &["-w"][..]))
        .chain(WRAPPERS.iter().map(|file| (ours.join(file), &["-w"][..])))
        .chain(
            OURS.iter()
                .map(|file| (ours.join(file), &["-Wall", "-Werror"][..])),
        );
    let mut objects = Vec::new();
    for (nth, (file, warnings)) in files.enumerate() {
        let object = work.join(format!("{nth}.o"));
        let mut command = Command::new(compiler);
        command.args(FLAGS).args(purpose.flags()).args(warnings);
        // Its headers are not ours to warn of.
        command.arg("-isystem").arg(&include);
        command.arg("-isystem").arg(iommu.join("generic_pt/fmt"));
        command.arg("-include").arg(ours.join("shim.h"));
        run(command.arg("-c").arg(&file).arg("-o").arg(&object))
            .with_context(|| file.display().to_string())?;
        objects.push(object);
    }
    let program = work.join("server");
    run(Command::new(compiler)
        .args(purpose.link_flags())
        .args(&objects)
        .arg("-o")
        .arg(&program))?;
    Ok(program)
}

/// The directory of headers: Linux's own that are used, and an empty file for every other one.
fn headers(source: &Path, work: &Path) -> anyhow::Result<PathBuf> {
    let include = work.join("include");
    fs::create_dir_all(include.join("linux"))?;
    for header in HEADERS {
        let from = source.join("include").join(header);
        std::os::unix::fs::symlink(fs::canonicalize(&from)?, include.join(header))
            .with_context(|| from.display().to_string())?;
    }
    let mut asked = BTreeSet::new();
    for directory in ["drivers/iommu", "include/linux"] {
        asked_for(&source.join(directory), &mut asked)?;
    }
    for header in asked {
        let path = include.join(&header);
        if SYSTEM.contains(&header.as_str()) || path.exists() {
            continue;
        }
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent)?;
        }
        fs::write(&path, "")?;
    }
    Ok(include)
}

/// The headers that the files of a directory ask for in angle brackets.
fn asked_for(directory: &Path, asked: &mut BTreeSet<String>) -> anyhow::Result<()> {
    let entries = fs::read_dir(directory).with_context(|| directory.display().to_string())?;
    for entry in entries {
        let path = entry?.path();
        if path.is_dir() {
            asked_for(&path, asked)?;
        } else if path
            .extension()
            .is_some_and(|extension| extension == "c" || extension == "h")
        {
            asked.extend(brackets(&fs::read_to_string(&path)?));
        }
    }
    Ok(())
}

/// The names in `#include <…>`.
fn brackets(text: &str) -> impl Iterator<Item = String> {
    text.lines().filter_map(|line| {
        let line = line.trim().strip_prefix('#')?.trim_start();
        let name = line
            .strip_prefix("include")?
            .trim_start()
            .strip_prefix('<')?;
        Some(name.split_once('>')?.0.to_owned())
    })
}

#[cfg(test)]
mod tests {
    use super::brackets;

    #[test]
    fn headers_in_angle_brackets_are_found() {
        let text =
            "#include <linux/a.h>\n # include<asm/b.h> /* why */\n#include \"c.h\"\n#define d";
        assert_eq!(brackets(text).collect::<Vec<_>>(), ["linux/a.h", "asm/b.h"]);
    }
}
