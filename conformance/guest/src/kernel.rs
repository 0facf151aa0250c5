//! The guest's kernels: Debian's package of Linux's source, with the options of `kernel.config`, or of
//! `dma.config`.
//!
//! Debian's own kernels have no iommufd. That of the [tests](TESTS) has type1, iommufd with its test mocks, device
//! files of VFIO, both IOMMUs and little else, so that two cores build it in three minutes and it
//! boots in two seconds. That in which the DMA API is [measured](DMA) is built for speed and not for size. A kernel is
//! built once for each version of its options and kept, with the options it was built from beside it; the source is
//! removed afterwards.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
};

use anyhow::{Context as _, ensure};
use conformance::source;

/// A kernel.
#[derive(Clone, Copy, Debug)]
pub struct Kernel {
    /// The file that it is kept as.
    name: &'static str,
    /// The options that are on, with those that they need.
    options: &'static str,
}

/// That of the tests.
pub const TESTS: Kernel = Kernel {
    name: "bzImage",
    options: include_str!("../kernel.config"),
};

/// That in which the DMA API is measured.
pub const DMA: Kernel = Kernel {
    name: "dma.bzImage",
    options: include_str!("../dma.config"),
};

impl Kernel {
    /// The kernel below `work`, if it was built from the options of today.
    pub fn kept(&self, work: &Path) -> Option<PathBuf> {
        let built_from = fs::read_to_string(self.options_file(work)).ok()?;
        let image = self.image(work);
        (built_from == self.options && image.exists()).then_some(image)
    }

    /// Builds the kernel from the source `package` and keeps it below `work`.
    ///
    /// # Errors
    ///
    /// When the source cannot be unpacked, an option of ours did not survive Linux's own rules, or the
    /// build fails.
    pub fn build(&self, package: &Path, work: &Path) -> anyhow::Result<PathBuf> {
        // From here on none is kept.
        if self.options_file(work).exists() {
            fs::remove_file(self.options_file(work))?;
        }
        let tree = directory(work).join("linux");
        if tree.exists() {
            fs::remove_dir_all(&tree)?;
        }
        fs::create_dir_all(&tree)?;
        source::unpack(package, &tree, &[])?;
        fs::write(tree.join("guest.config"), self.options)?;
        make(&tree, &["allnoconfig", "KCONFIG_ALLCONFIG=guest.config"])?;
        let lost = lost(self.options, &fs::read_to_string(tree.join(".config"))?);
        ensure!(
            lost.is_empty(),
            "Linux's rules do not allow these options: {}",
            lost.join(", ")
        );
        let jobs = thread::available_parallelism().map_or(1, usize::from);
        make(&tree, &[&format!("-j{jobs}"), "bzImage"])?;
        fs::rename(tree.join("arch/x86/boot/bzImage"), self.image(work))?;
        // Last: from here on it is kept.
        fs::write(self.options_file(work), self.options)?;
        // 2 GB that are not needed any more.
        fs::remove_dir_all(&tree)?;
        Ok(self.image(work))
    }

    fn image(&self, work: &Path) -> PathBuf {
        directory(work).join(self.name)
    }

    fn options_file(&self, work: &Path) -> PathBuf {
        let name = self.name.replace("bzImage", "built-from.config");
        directory(work).join(name)
    }
}

/// What belongs to the guests, below the directory of the rigs.
pub fn directory(work: &Path) -> PathBuf {
    work.join("guest")
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
        let options = [TESTS, DMA].map(|kernel| kernel.options.lines());
        for line in options
            .into_iter()
            .flatten()
            .filter(|line| !line.is_empty())
        {
            // An option that is off has no line in the result, so it could not be looked for.
            let option = line.starts_with("CONFIG_") && line.contains('=') && !line.ends_with("=n");
            assert!(option || line.starts_with("# "), "{line}");
        }
    }

    #[test]
    fn a_kernel_of_other_options_is_not_kept() {
        let work = std::env::temp_dir().join(format!("dmaspace-kernel-{}", std::process::id()));
        fs::create_dir_all(directory(&work)).unwrap();
        assert_eq!(TESTS.kept(&work), None);
        fs::write(TESTS.image(&work), "").unwrap();
        assert_eq!(TESTS.kept(&work), None);
        fs::write(TESTS.options_file(&work), "CONFIG_OTHER=y\n").unwrap();
        assert_eq!(TESTS.kept(&work), None);
        fs::write(TESTS.options_file(&work), TESTS.options).unwrap();
        assert_eq!(TESTS.kept(&work), Some(TESTS.image(&work)));
        assert_eq!(DMA.kept(&work), None);
        fs::remove_dir_all(&work).unwrap();
    }
}
