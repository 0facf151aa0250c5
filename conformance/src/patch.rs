//! Lines of ours that go into Linux's own files, and where: `linux/patches`, a file of C for each patch, with lines that say
//! where those behind them go.

use std::{collections::BTreeSet, fs, path::Path};

use anyhow::{Context as _, ensure};
use clap::ValueEnum;

/// A change to a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Patch {
    /// Nothing: Linux's own lines, linked anew.
    Stock,
    /// VFIO's type 1 pins page by page, as before pages that follow each other were found.
    PinsPage,
    /// It pins by folio, without a pointer for each page.
    PinsFolio,
    /// Its containers, and address spaces of iommufd, have a domain for each node, when its option is on.
    NodeDomains,
    /// Unmaps of domains return the runs of memory that they have removed, and VFIO and iommufd unpin by these.
    UnmapRuns,
    /// Leaves of domains change their sizes in place, by a call of iommufd.
    PageSizes,
    /// Files in debugfs with the I/O page tables of each device.
    TableImage,
    /// I/O page tables of a device that outlive the kernel; with [`TableImage`](Self::TableImage) before it.
    Kexec,
    /// Its DMA goes on meanwhile; with [`Kexec`](Self::Kexec) before it.
    KexecDma,
}

/// Mark before lines: a file, and the text before which they go, with `\n` for the end of a line, or its end.
const GOES: &str = "//@ ";

impl Patch {
    const fn lines(self) -> &'static str {
        match self {
            Self::Stock => "",
            Self::PinsPage => include_str!("../../linux/patches/pins-page.c"),
            Self::PinsFolio => include_str!("../../linux/patches/pins-folio.c"),
            Self::NodeDomains => include_str!("../../linux/patches/node-domains.c"),
            Self::UnmapRuns => include_str!("../../linux/patches/unmap-runs.c"),
            Self::TableImage => include_str!("../../linux/patches/table-image.c"),
            Self::PageSizes => include_str!("../../linux/patches/page-sizes.c"),
            Self::Kexec => include_str!("../../linux/patches/kexec.c"),
            Self::KexecDma => include_str!("../../linux/patches/kexec-dma.c"),
        }
    }

    /// The files of Linux in which the lines of any patch go.
    pub(crate) fn files() -> BTreeSet<&'static str> {
        let all = Self::value_variants().iter();
        let places = all.flat_map(|patch| patch.lines().split(GOES).skip(1));
        let files = places.filter_map(|place| place.split_once(", "));
        files.map(|(file, _)| file).collect()
    }

    /// Puts the lines into a tree, but for those of the file `ours`, which has taken the place of Linux's.
    pub(crate) fn apply(self, tree: &Path, ours: Option<&str>) -> anyhow::Result<()> {
        patch(tree, self.lines(), ours)
    }
}

/// Puts the lines of a patch where they go, but for those of the file `ours`.
pub(crate) fn patch(tree: &Path, patch: &str, ours: Option<&str>) -> anyhow::Result<()> {
    // Before the first place there is a comment for readers.
    for part in patch.split(GOES).skip(1) {
        let (place, lines) = part.split_once('\n').unwrap_or((part, ""));
        let (file, goes) = place.split_once(", ").context("a place without a file")?;
        if ours == Some(file) {
            continue;
        }
        let path = tree.join(file);
        let text = fs::read_to_string(&path).with_context(|| file.to_owned())?;
        let patched = match goes.strip_prefix("before: ") {
            Some(before) => {
                let before = &*before.replace("\\n", "\n");
                let once = text.split_once(before);
                let once = once.filter(|(_, tail)| !tail.contains(before));
                let (head, tail) =
                    once.with_context(|| format!("{file} has not one {before:?}"))?;
                [head, lines, before, tail].concat()
            }
            None => {
                ensure!(goes == "at its end", "{file}: {goes} is no place");
                text + lines
            }
        };
        fs::write(&path, patched)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_go_before_a_text_that_is_there_once_or_at_the_end() {
        let tree = tempfile::tempdir().unwrap();
        let file = tree.path().join("a.c");
        fs::write(&file, "one\ntwo\n").unwrap();
        let lines = "read me\n//@ b.c, at its end\nours\n//@ a.c, before: two\nnew\n//@ a.c, at its end\nlast\n\
                     //@ a.c, before: two\\nlast\nin between\n";
        patch(tree.path(), lines, Some("b.c")).unwrap();
        let patched = fs::read_to_string(&file).unwrap();
        assert_eq!(patched, "one\nnew\nin between\ntwo\nlast\n");
        for nowhere in [
            "//@ a.c, before: three\nx\n",
            "//@ a.c, before: n\nx\n",
            "//@ b.c, at its end\nx\n",
            "//@ a.c, somewhere\nx\n",
            "//@ a.c\nx\n",
        ] {
            assert!(patch(tree.path(), nowhere, None).is_err(), "{nowhere}");
        }
        assert_eq!(fs::read_to_string(&file).unwrap(), patched);
    }
}
