//! The program, the C library and their documents below a prefix, as a package has them.

use std::{
    env, fs,
    os::unix::fs as unix,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, ensure};
use cargo_metadata::semver::Version;

use crate::{
    cargo::{self, Repository},
    host::Need,
    parts::Outcome,
    programs::Programs,
};

const LIBRARY: &str = "libdmaspace_capi";
/// Tells the build script of `dmaspace-capi` the SONAME.
const SONAME: &str = "DMASPACE_SONAME";
/// What a static library of Rust needs of glibc and gcc: `rustc --print native-static-libs`.
pub(crate) const STATIC: &str = "-lgcc_s -lutil -lrt -lpthread -lm -ldl -lc";

/// Where to.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Directory with bin, lib, include and share; $DESTDIR stands before it, as packages have it
    #[arg(long, default_value = "/usr/local")]
    prefix: PathBuf,
}

/// Builds and installs.
pub(crate) fn run(options: &Options, repository: &Repository) -> anyhow::Result<bool> {
    let stage = env::var_os("DESTDIR").filter(|stage| !stage.is_empty());
    let stage = stage.unwrap_or_else(|| "/".into());
    let packages = ["-pdmaspace-cli", "-pdmaspace-capi"];
    let wanted = [&packages[..], &["--lib", "--example=manuals"]].concat();
    let (_, soname) = version(repository)?;
    let programs = Programs::optimized(&wanted, &[(SONAME, &soname)], repository)?;
    install(&programs, repository, &options.prefix, Path::new(&stage))?;
    Ok(true)
}

/// What the part needs.
pub(crate) const NEEDS: &[Need] = &[Need::Package("pkg-config")];

/// The part `install`: a C program is built by pkg-config from what was installed, and runs. What is installed is what
/// the rigs start.
pub(crate) fn part(repository: &Repository) -> anyhow::Result<Outcome> {
    let prefix = repository.metadata.target_directory.join("install");
    match fs::remove_dir_all(&prefix) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error.into()),
        _ => {}
    }
    let (_, soname) = version(repository)?;
    let programs = Programs::in_environment(&[(SONAME, &soname)], repository)?;
    install(&programs, repository, prefix.as_std_path(), Path::new("/"))?;
    let build = |linking: &str| -> anyhow::Result<Command> {
        let mut pkg_config = Command::new("pkg-config");
        pkg_config.env("PKG_CONFIG_PATH", prefix.join("lib/pkgconfig"));
        pkg_config.args(["--cflags", "--libs", linking, "dmaspace"]);
        let flags = pkg_config.output().context("pkg-config")?;
        ensure!(flags.status.success(), "pkg-config: {}", flags.status);
        let program = prefix.join("map");
        let mut gcc = Command::new("gcc");
        gcc.current_dir(&repository.root);
        gcc.args(["-std=c11", "examples/c/map.c", "-o"])
            .arg(&program);
        gcc.args(String::from_utf8(flags.stdout)?.split_whitespace());
        gcc.arg(format!("-Wl,-rpath,{}", prefix.join("lib")));
        cargo::run(&mut gcc)?;
        Ok(Command::new(program))
    };
    // Each without what it must not need: the link is for building only, and an archive is in the program.
    let library = prefix.join("lib").join(LIBRARY).with_extension("so");
    let mut linked = build("--shared")?;
    let soname = fs::read_link(&library).context("no link to the library")?;
    fs::remove_file(&library)?;
    cargo::run(&mut linked)?;
    fs::remove_file(library.with_file_name(soname.to_string_lossy()))?;
    cargo::run(&mut build("--static")?)?;
    Ok(Outcome::Passed)
}

/// The version of the library, and its SONAME.
fn version(repository: &Repository) -> anyhow::Result<(&Version, String)> {
    let mut packages = repository.metadata.packages.iter();
    let library = packages.find(|package| package.name.as_str() == "dmaspace-capi");
    let version = &library.context("no package dmaspace-capi")?.version;
    Ok((version, format!("{LIBRARY}.so.{}", compatible(version))))
}

fn install(
    programs: &Programs,
    repository: &Repository,
    prefix: &Path,
    stage: &Path,
) -> anyhow::Result<()> {
    ensure!(prefix.is_absolute(), "{}: not absolute", prefix.display());
    let (version, soname) = version(repository)?;
    // An absolute path would replace what it is joined to.
    let below = stage.join(prefix.strip_prefix("/").unwrap_or(prefix));
    let header = repository
        .metadata
        .workspace_root
        .join("crates/dmaspace-capi/include/dmaspace.h");
    let files = [
        (programs.path("dmaspace"), "bin/dmaspace".to_owned()),
        (
            programs.path(&format!("{LIBRARY}.so")),
            format!("lib/{soname}"),
        ),
        (
            programs.path(&format!("{LIBRARY}.a")),
            format!("lib/{LIBRARY}.a"),
        ),
        (header, "include/dmaspace.h".to_owned()),
    ];
    for (from, to) in files {
        write(&below.join(to), |to| fs::copy(&from, to).map(|_| ()))?;
    }
    let link = below.join(format!("lib/{LIBRARY}.so"));
    write(&link, |link| unix::symlink(&soname, link))?;
    let description = below.join("lib/pkgconfig/dmaspace.pc");
    write(&description, |to| {
        fs::write(to, pkg_config(prefix, version))
    })?;

    let mut manuals = programs.example("manuals", repository);
    cargo::run(manuals.arg(below.join("share")))
}

/// Makes a file in place of one that is there.
fn write(to: &Path, make: impl FnOnce(&Path) -> std::io::Result<()>) -> anyhow::Result<()> {
    let all = || {
        fs::create_dir_all(to.parent().unwrap_or(to))?;
        // A library in use keeps its file.
        if to.symlink_metadata().is_ok() {
            fs::remove_file(to)?;
        }
        make(to)
    };
    all().with_context(|| to.display().to_string())?;
    println!("{}", to.display());
    Ok(())
}

/// The part of a version that programs linked to it depend on: before 1.0 each minor one is incompatible.
fn compatible(version: &Version) -> String {
    match version.major {
        0 => format!("0.{}", version.minor),
        major => major.to_string(),
    }
}

fn pkg_config(prefix: &Path, version: &Version) -> String {
    let prefix = prefix.display();
    format!(
        "prefix={prefix}\nlibdir=${{prefix}}/lib\nincludedir=${{prefix}}/include\n\n\
         Name: dmaspace\nDescription: Device memory: address spaces and I/O page tables\n\
         Version: {version}\nCflags: -I${{includedir}}\n\
         Libs: -L${{libdir}} -ldmaspace_capi\nLibs.private: {STATIC}\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_soname_changes_with_what_is_incompatible() {
        for (version, compatible_with) in [("0.1.7", "0.1"), ("0.2.0", "0.2"), ("1.3.0", "1")] {
            assert_eq!(compatible(&version.parse().unwrap()), compatible_with);
        }
    }
}
