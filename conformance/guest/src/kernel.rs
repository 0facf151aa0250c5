//! The guest's kernel: Debian's package of Linux's source, with the options of `kernel.config`.
//!
//! Debian's own kernels have no iommufd. This one has type1, iommufd with its test mocks, device
//! files of VFIO, both IOMMUs and little else, so that two cores build it in three minutes and it
//! boots in two seconds. It is built once for each version of `kernel.config` and kept, with the
//! options it was built from beside it; the source is removed afterwards.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
};

use anyhow::{Context as _, ensure};
use conformance::source;

/// The options that are on, with those that they need.
const OPTIONS: &str = include_str!("../kernel.config");

/// The kernel below `work`, if it was built from the options of today.
pub fn kept(work: &Path) -> Option<PathBuf> {
    let built_from = fs::read_to_string(options_file(work)).ok()?;
    let image = image(work);
    (built_from == OPTIONS && image.exists()).then_some(image)
}

/// Builds the kernel from the source `package` and keeps it below `work`.
///
/// # Errors
///
/// When the source cannot be unpacked, an option of ours did not survive Linux's own rules, or the
/// build fails.
pub fn build(package: &Path, work: &Path) -> anyhow::Result<PathBuf> {
    // From here on none is kept.
    if options_file(work).exists() {
        fs::remove_file(options_file(work))?;
    }
    let tree = directory(work).join("linux");
    if tree.exists() {
        fs::remove_dir_all(&tree)?;
    }
    fs::create_dir_all(&tree)?;
    source::unpack(package, &tree, &[])?;
    fs::write(tree.join("guest.config"), OPTIONS)?;
    make(&tree, &["allnoconfig", "KCONFIG_ALLCONFIG=guest.config"])?;
    let lost = lost(OPTIONS, &fs::read_to_string(tree.join(".config"))?);
    ensure!(
        lost.is_empty(),
        "Linux's rules do not allow these options: {}",
        lost.join(", ")
    );
    let jobs = thread::available_parallelism().map_or(1, usize::from);
    make(&tree, &[&format!("-j{jobs}"), "bzImage"])?;
    fs::rename(tree.join("arch/x86/boot/bzImage"), image(work))?;
    // Last: from here on it is kept.
    fs::write(options_file(work), OPTIONS)?;
    // 2 GB that nobody needs any more.
    fs::remove_dir_all(&tree)?;
    Ok(image(work))
}

/// What belongs to the guests, below the directory of the rigs.
pub fn directory(work: &Path) -> PathBuf {
    work.join("guest")
}

fn image(work: &Path) -> PathBuf {
    directory(work).join("bzImage")
}

fn options_file(work: &Path) -> PathBuf {
    directory(work).join("built-from.config")
}

fn make(tree: &Path, arguments: &[&str]) -> anyhow::Result<()> {
    let status = Command::new("make")
        .arg("--silent")
        .args(arguments)
        .current_dir(tree)
        // Of a make that this one is no part of.
        .env_remove("MAKEFLAGS")
        .stdin(Stdio::null())
        .status()
        .context("make cannot be started")?;
    ensure!(
        status.success(),
        "make {} ended with {status}",
        arguments.join(" ")
    );
    Ok(())
}

/// The options of `wanted` that did not make it into `config`.
fn lost<'a>(wanted: &'a str, config: &str) -> Vec<&'a str> {
    let found: BTreeSet<&str> = config.lines().collect();
    let options = wanted.lines().filter(|line| line.starts_with("CONFIG_"));
    options.filter(|line| !found.contains(line)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_that_did_not_survive_are_named() {
        let config = "CONFIG_A=y\n# CONFIG_B is not set\nCONFIG_C=8\nCONFIG_LONGER=y\n";
        assert!(lost("# a comment\n\nCONFIG_A=y\nCONFIG_C=8\n", config).is_empty());
        let wanted = "CONFIG_B=y\nCONFIG_C=4\nCONFIG_LONG=y\n";
        assert_eq!(lost(wanted, config), wanted.lines().collect::<Vec<_>>());
    }

    #[test]
    fn every_line_of_ours_is_an_option_or_a_comment() {
        for line in OPTIONS.lines().filter(|line| !line.is_empty()) {
            // An option that is off has no line in the result, so it could not be looked for.
            let option = line.starts_with("CONFIG_") && line.contains('=') && !line.ends_with("=n");
            assert!(option || line.starts_with("# "), "{line}");
        }
    }

    #[test]
    fn a_kernel_of_other_options_is_not_kept() {
        let work = std::env::temp_dir().join(format!("dmaspace-kernel-{}", std::process::id()));
        fs::create_dir_all(directory(&work)).unwrap();
        assert_eq!(kept(&work), None);
        fs::write(image(&work), "").unwrap();
        assert_eq!(kept(&work), None);
        fs::write(options_file(&work), "CONFIG_OTHER=y\n").unwrap();
        assert_eq!(kept(&work), None);
        fs::write(options_file(&work), OPTIONS).unwrap();
        assert_eq!(kept(&work), Some(image(&work)));
        fs::remove_dir_all(&work).unwrap();
    }
}
