//! What programs under a sanitizer are linked with: the C files beside this one.
//!
//! The linker puts functions of theirs in the place of others (`--wrap`), those of the C library and those of the
//! standard library that `edges.c` knows. The names of the latter hold hashes and are looked for in the library.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, ensure};
use cargo_metadata::camino::Utf8Path;

use crate::cargo;

/// The macro of `edges.c` for each function of the standard library, and what only its name contains.
const EDGES: [(&str, &str); 10] = [
    (
        "MUTEX_LOCK_CONTENDED",
        "sync5mutex5futexNtB2_5Mutex14lock_contended",
    ),
    (
        "RWLOCK_READ_CONTENDED",
        "sync6rwlock5futexNtB2_6RwLock14read_contended",
    ),
    (
        "RWLOCK_WRITE_CONTENDED",
        "sync6rwlock5futexNtB2_6RwLock15write_contended",
    ),
    ("CONDVAR_WAIT", "sync7condvar5futexNtB2_7Condvar4wait"),
    (
        "CONDVAR_WAIT_TIMEOUT",
        "sync7condvar5futexNtB2_7Condvar12wait_timeout",
    ),
    ("BARRIER_WAIT", "sync7barrierNtB5_7Barrier4wait"),
    ("ONCE_CALL", "sync4once5futexNtB5_4Once4call"),
    ("ONCE_COMPLETED", "sync4once5futexNtB4_15CompletionGuard"),
    (
        "SCOPE_THREAD_ENDED",
        "thread6scopedNtB2_9ScopeData29decrement_num_running_threads",
    ),
    (
        "THREAD_FORGET",
        "thread6thread5InnerNtNtBM_5alloc6SystemE9drop_slow",
    ),
];

/// Flags of rustc that have memory really locked.
pub(super) fn locked(sources: &Path, directory: &Utf8Path) -> anyhow::Result<Vec<String>> {
    let object = compile(&sources.join("locked.c"), directory, &[])?;
    Ok(flags(object, ["mlock", "munlock"]))
}

/// Flags of rustc that tell ThreadSanitizer of the standard library for `target`.
pub(super) fn edges(
    sources: &Path,
    directory: &Utf8Path,
    target: &str,
) -> anyhow::Result<Vec<String>> {
    let library = library(target)?;
    let bytes = fs::read(&library).with_context(|| library.display().to_string())?;
    let names = symbols(&bytes)?;
    let macros: Vec<String> = EDGES
        .iter()
        .zip(&names)
        .map(|((macro_name, _), name)| format!("-D{macro_name}=\"{name}\""))
        .collect();
    let object = compile(&sources.join("edges.c"), directory, &macros)?;
    let wrapped = names.iter().map(String::as_str);
    Ok(flags(object, wrapped.chain(["__tsan_atomic64_fetch_sub"])))
}

/// The name of each function of [`EDGES`] in the library; an error when it has none, or two.
fn symbols(library: &[u8]) -> anyhow::Result<Vec<String>> {
    let mut found = vec![BTreeSet::new(); EDGES.len()];
    // What is left between two zeros is also text of other kinds, in which names stand one behind the other.
    let in_names = |byte: &u8| byte.is_ascii_alphanumeric() || *byte == b'_';
    let names = library
        .split(|byte| *byte == 0)
        .filter(|name| name.starts_with(b"_RNv") && name.iter().all(in_names))
        .filter_map(|name| str::from_utf8(name).ok());
    for name in names {
        for ((_, part), found) in EDGES.iter().zip(&mut found) {
            if name.contains(part) {
                found.insert(name.to_owned());
            }
        }
    }
    EDGES
        .iter()
        .zip(found)
        .map(|((_, part), mut found)| {
            ensure!(
                found.len() == 1,
                "the standard library has {} functions like {part}, and edges.c was written for one: \
                 it needs a look with this compiler",
                found.len()
            );
            Ok(found.pop_first().unwrap_or_default())
        })
        .collect()
}

/// The standard library of the compiler, for `target`.
fn library(target: &str) -> anyhow::Result<PathBuf> {
    let output = Command::new("rustc")
        .args(["--print", "target-libdir", "--target", target])
        .output()
        .context("rustc cannot be started")?;
    let directory = PathBuf::from(String::from_utf8(output.stdout)?.trim());
    let entries = fs::read_dir(&directory).with_context(|| directory.display().to_string())?;
    let is_std = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.starts_with("libstd-") && name.ends_with(".rlib")
    };
    let library = entries.flatten().map(|entry| entry.path()).find(is_std);
    library.with_context(|| format!("no standard library in {}", directory.display()))
}

/// Compiles a file in C, and returns the object file.
fn compile(source: &Path, directory: &Utf8Path, macros: &[String]) -> anyhow::Result<String> {
    let name = source.file_stem().unwrap_or_default().to_string_lossy();
    let object = directory.join(format!("{name}.o")).into_string();
    cargo::run(
        Command::new("cc")
            // What is wrapped may unwind.
            .args(["-c", "-O1", "-fexceptions", "-Wall", "-Wextra", "-Werror"])
            .args(macros)
            .arg(source)
            .args(["-o", &object]),
    )?;
    Ok(object)
}

/// Flags of rustc: to link with `object`, and to wrap these functions.
fn flags<'n>(object: String, wrapped: impl IntoIterator<Item = &'n str>) -> Vec<String> {
    let wrapped = wrapped
        .into_iter()
        .map(|name| format!("-Clink-arg=-Wl,--wrap={name}"));
    [format!("-Clink-arg={object}")]
        .into_iter()
        .chain(wrapped)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_standard_library_has_each_function_once() {
        let library = library(super::super::TARGET).unwrap();
        let names = symbols(&fs::read(library).unwrap()).unwrap();
        assert_eq!(names.len(), EDGES.len());
        let error = symbols(b"\0_RNv\0").unwrap_err().to_string();
        assert!(error.contains("has 0 functions like sync5mutex"), "{error}");
    }
}
