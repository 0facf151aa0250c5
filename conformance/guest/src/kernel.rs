//! The guests' kernels: what they are built from.
//!
//! Debian's own kernels have no iommufd. That of the tests, [`GUEST`](conformance::kernel::GUEST), has type1, iommufd
//! with its test mocks, device files of VFIO, both IOMMUs and little else, so that two cores build it in three minutes
//! and it boots in two seconds. That in which the DMA API is [measured](DMA) is built for speed and not for size.

use std::path::{Path, PathBuf};

use conformance::kernel::{Arch, Kernel};

/// That in which the DMA API is measured.
pub const DMA: Kernel = Kernel {
    name: "dma",
    arch: Arch::X86,
    options: include_str!("../dma.config"),
};

/// What belongs to the guests, below the directory of the rigs.
pub fn directory(work: &Path) -> PathBuf {
    work.join("guest")
}

#[cfg(test)]
mod tests {
    use conformance::kernel::WITH_MODULES;

    use super::*;

    #[test]
    fn every_line_of_ours_is_an_option_or_a_comment() {
        for kernel in WITH_MODULES.into_iter().chain([DMA]) {
            for line in kernel.options.lines().filter(|line| !line.is_empty()) {
                // An option that is off has no line in the result, so it could not be looked for.
                let on = line.contains('=') && !line.ends_with("=n");
                let option = line.starts_with("CONFIG_") && on;
                assert!(option || line.starts_with("# "), "{line}");
            }
        }
    }
}
