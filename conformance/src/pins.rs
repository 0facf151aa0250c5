//! How VFIO's type 1 pins memory in a kernel: lines of ours that go into Linux's own files, and where.
//!
//! A patch is what `linux/patches` has: lines of C behind lines that say where these go.

use std::{fs, path::Path};

use anyhow::{Context as _, ensure};
use clap::ValueEnum;

/// How it pins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Pins {
    /// Page by page, as before pages that follow each other were found.
    Page,
    /// As Linux does.
    Stock,
    /// By folio, without a pointer for each page.
    Folio,
}

/// The files of Linux in which these lines go.
pub(crate) const FILES: [&str; 2] = ["drivers/vfio/vfio_iommu_type1.c", "mm/gup.c"];

/// What stands before the lines of a patch: a file, and the text before which they go, or its end.
const GOES: &str = "//@ ";

impl Pins {
    /// Puts the lines into a tree, which is Linux's own.
    pub(crate) fn apply(self, tree: &Path) -> anyhow::Result<()> {
        patch(
            tree,
            match self {
                Self::Page => include_str!("../../linux/patches/pins-page.c"),
                Self::Stock => "",
                Self::Folio => include_str!("../../linux/patches/pins-folio.c"),
            },
        )
    }
}

/// Puts the lines of a patch where they go.
fn patch(tree: &Path, patch: &str) -> anyhow::Result<()> {
    // Before the first place there is a comment for readers.
    for part in patch.split(GOES).skip(1) {
        let (place, lines) = part.split_once('\n').unwrap_or((part, ""));
        let (file, goes) = place.split_once(", ").context("a place without a file")?;
        let path = tree.join(file);
        let text = fs::read_to_string(&path).with_context(|| file.to_owned())?;
        let patched = match goes.strip_prefix("before: ") {
            Some(before) => {
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
        let lines = "read me\n//@ a.c, before: two\nnew\n//@ a.c, at its end\nlast\n";
        patch(tree.path(), lines).unwrap();
        let patched = fs::read_to_string(&file).unwrap();
        assert_eq!(patched, "one\nnew\ntwo\nlast\n");
        for nowhere in [
            "//@ a.c, before: three\nx\n",
            "//@ a.c, before: n\nx\n",
            "//@ b.c, at its end\nx\n",
            "//@ a.c, somewhere\nx\n",
            "//@ a.c\nx\n",
        ] {
            assert!(patch(tree.path(), nowhere).is_err(), "{nowhere}");
        }
        assert_eq!(fs::read_to_string(&file).unwrap(), patched);
    }
}
