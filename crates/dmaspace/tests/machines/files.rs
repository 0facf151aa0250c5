//! The files of a made-up machine: `/sys`, `/dev` and `/proc` as far as they are looked at.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use dmaspace::devices::Places;
use tempfile::TempDir;

/// A directory that stands for `/`.
pub(crate) struct Files(TempDir);

impl Files {
    pub(crate) fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    pub(crate) fn path(&self, path: &str) -> PathBuf {
        self.0.path().join(path)
    }

    pub(crate) fn directory(&self, path: &str) -> &Self {
        fs::create_dir_all(self.path(path)).unwrap();
        self
    }

    /// With the directories that it lies in.
    fn new_at(&self, path: &str) -> PathBuf {
        let path = self.path(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        path
    }

    pub(crate) fn file(&self, path: &str, content: impl AsRef<[u8]>) -> &Self {
        fs::write(self.new_at(path), content).unwrap();
        self
    }

    pub(crate) fn link(&self, path: &str, target: impl AsRef<Path>) {
        symlink(target, self.new_at(path)).unwrap();
    }

    /// Files that each PCI device has in its directory.
    pub(crate) fn pci(&self, directory: &str, class: u32, node: i32) {
        self.file(&format!("{directory}/class"), format!("{class:#08x}\n"))
            .file(&format!("{directory}/vendor"), "0x8086\n")
            .file(&format!("{directory}/device"), "0x10d3\n")
            .file(&format!("{directory}/numa_node"), format!("{node}\n"));
    }

    pub(crate) fn places(&self) -> Places {
        Places {
            sys: self.path("sys"),
            dev: self.path("dev"),
        }
    }
}
