//! Files that something was built of, recorded beside it, so that nothing is run that they no longer say.
//!
//! A record is a text of a line for each file: a digest of its bytes and its path below the repository. It is made before
//! the build reads any of them: a file that changes during the build has changed since.

use std::{
    ffi::OsString,
    fs,
    io::ErrorKind,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, anyhow, bail, ensure};
use walkdir::WalkDir;

/// The root of the repository, which all paths are below.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// The record of these files, and of all files in these directories, below `root`.
///
/// # Errors
///
/// When one of them cannot be read.
pub fn record(root: &Path, paths: &[PathBuf]) -> anyhow::Result<String> {
    let mut lines = Vec::new();
    for path in paths {
        for entry in WalkDir::new(root.join(path)).sort_by_file_name() {
            let entry = entry?;
            if entry.file_type().is_file() {
                let below = entry.path().strip_prefix(root)?;
                let digest = digest(entry.path())?;
                lines.push(format!("{digest:016x} {}\n", below.display()));
            }
        }
    }
    ensure!(!lines.is_empty(), "nothing is built of no file");
    Ok(lines.concat())
}

/// Records what `built` was built of. From here on it is run.
///
/// # Errors
///
/// When that cannot be written.
pub fn keep(record: &str, built: &Path) -> anyhow::Result<()> {
    let beside = beside(built);
    fs::write(&beside, record).with_context(|| beside.display().to_string())
}

/// Removes the record of `built`, which is not run any more.
///
/// # Errors
///
/// When there is one that cannot be removed.
pub fn forget(built: &Path) -> anyhow::Result<()> {
    let beside = beside(built);
    match fs::remove_file(&beside) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(anyhow!(error).context(beside.display().to_string()))
        }
        _ => Ok(()),
    }
}

/// Compares the files that `built` was built of with those of today.
///
/// # Errors
///
/// When it has no record, or a file has changed, which is named.
pub fn check(root: &Path, built: &Path) -> anyhow::Result<()> {
    let name = built.display();
    let record = fs::read_to_string(beside(built))
        .with_context(|| format!("there is no record of the sources of {name}"))?;
    for line in record.lines() {
        let (then, file) = line.split_once(' ').context("a record is damaged")?;
        let now = digest(&root.join(file)).map(|digest| format!("{digest:016x}"));
        if !now.is_ok_and(|now| now == then) {
            bail!("{name} was built before {file} has changed");
        }
    }
    ensure!(!record.is_empty(), "a record is damaged");
    Ok(())
}

fn beside(built: &Path) -> PathBuf {
    let mut name = OsString::from(built);
    name.push(".inputs");
    name.into()
}

/// FNV-1a with 64 bits: changes are mistakes here, and no attacks.
fn digest(file: &Path) -> anyhow::Result<u64> {
    let bytes = fs::read(file).with_context(|| file.display().to_string())?;
    let step = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    Ok(bytes.iter().fold(0xcbf2_9ce4_8422_2325, step))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A repository with two files and a directory, and what was built of them.
    fn built() -> (tempfile::TempDir, PathBuf) {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path();
        fs::create_dir_all(root.join("linux/tables/src")).unwrap();
        for (file, text) in [
            ("Cargo.lock", "lock"),
            ("linux/tables/tables.c", "c"),
            ("linux/tables/src/lib.rs", "rust"),
            ("elsewhere", "else"),
        ] {
            fs::write(root.join(file), text).unwrap();
        }
        let paths = ["linux/tables", "Cargo.lock"].map(PathBuf::from);
        let image = root.join("bzImage-iopt");
        keep(&record(root, &paths).unwrap(), &image).unwrap();
        (directory, image)
    }

    fn refusal(root: &Path, image: &Path) -> String {
        format!("{:#}", check(root, image).unwrap_err())
    }

    #[test]
    fn what_is_built_is_run_as_long_as_its_files_are_the_same() {
        let (directory, image) = built();
        let root = directory.path();
        check(root, &image).unwrap();
        // Neither a file of nothing here, nor a file that is written anew.
        fs::write(root.join("elsewhere"), "other").unwrap();
        fs::write(root.join("linux/tables/tables.c"), "c").unwrap();
        check(root, &image).unwrap();
        for file in [
            "linux/tables/src/lib.rs",
            "linux/tables/tables.c",
            "Cargo.lock",
        ] {
            let path = root.join(file);
            let text = fs::read(&path).unwrap();
            let changed = format!("{} was built before {file} has changed", image.display());
            fs::write(&path, "changed").unwrap();
            assert_eq!(refusal(root, &image), changed);
            fs::remove_file(&path).unwrap();
            assert_eq!(refusal(root, &image), changed);
            fs::write(&path, text).unwrap();
            check(root, &image).unwrap();
        }
    }

    #[test]
    fn what_has_no_record_is_not_run() {
        let (directory, image) = built();
        let root = directory.path();
        forget(&image).unwrap();
        let said = refusal(root, &image);
        let expected = format!("there is no record of the sources of {}", image.display());
        assert!(said.starts_with(&expected), "{said}");
        // It has gone already.
        forget(&image).unwrap();
        for damaged in ["", "0\n"] {
            keep(damaged, &image).unwrap();
            assert_eq!(refusal(root, &image), "a record is damaged");
        }
        assert!(record(root, &[]).is_err());
        assert!(record(root, &["nowhere".into()]).is_err());
    }

    #[test]
    fn a_digest_is_fnv_1a() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        // From the authors' table of test vectors.
        for (text, expected) in [
            ("", 0xcbf2_9ce4_8422_2325),
            ("foobar", 0x8594_4171_f739_67e8),
        ] {
            fs::write(&path, text).unwrap();
            assert_eq!(digest(&path).unwrap(), expected, "{text}");
        }
    }
}
