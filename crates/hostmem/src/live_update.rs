//! Memory files that outlive the kernel.
//!
//! Linux replaces a running kernel by the next one (`kexec`) and hands on what it was asked to preserve: the pages of
//! a memory file stay where they are, so that tables which lead to them stay right. Processes end, and with them
//! mappings, pins and charges.
//!
//! 1. A [`LiveUpdate::create`]d session is given files, each with a number ([`preserve`](LiveUpdate::preserve)). From then on they
//!    have all their pages, and neither grow nor shrink; dropping the session ends that.
//! 2. The process, still with the session, loads the next kernel (kexec_file_load(2)) and starts it (reboot(2)).
//! 3. In the next kernel a process asks for the session by its name ([`retrieve`](LiveUpdate::retrieve)), and for each file by its
//!    number ([`take`](LiveUpdate::take)), and [`finish`](LiveUpdate::finish)es.
//!
//! Both kernels need `CONFIG_LIVEUPDATE`, and `kho=on liveupdate=on` on their command lines. Linux 7.2 preserves memory
//! files of tmpfs, huge folios included; none of hugetlbfs, and nothing of VFIO and iommufd, so no device may do DMA meanwhile.
//!
//! Source: Linux 7.2, Documentation/core-api/liveupdate.rst, Documentation/mm/memfd_preservation.rst,
//! include/uapi/linux/liveupdate.h.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};

use thiserror::Error;

use crate::sys::{self, SESSION_NAME};

/// The orchestrator.
const DEVICE: &str = "/dev/liveupdate";

/// A session: files that are preserved together.
#[derive(Debug)]
pub struct LiveUpdate {
    session: OwnedFd,
}

/// Failure to pass files on to the next kernel.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum LiveUpdateError {
    /// The kernel has no orchestrator, it is off, or another process has it.
    #[error(
        "cannot open {DEVICE}, which a kernel with CONFIG_LIVEUPDATE has when it is started with kho=on liveupdate=on"
    )]
    Device(#[source] io::Error),
    /// A session cannot have this name.
    #[error("a session's name has 1 to {} bytes, none of them zero: {name:?}", SESSION_NAME - 1)]
    Name {
        /// The name.
        name: String,
    },
    /// There is a session of this name already, or there was none in the kernel before.
    #[error("session {name:?}")]
    Session {
        /// Its name.
        name: String,
        /// `EEXIST`, or `ENOENT`.
        source: io::Error,
    },
    /// The kernel preserves no files of this kind.
    #[error("Linux cannot preserve {file} across a live update")]
    Kind {
        /// The kernel's name for the file: `/dev/iommu`, `/memfd:name`; with the size of its pages if these are
        /// hugetlb's.
        file: String,
    },
    /// The kernel does not preserve this file.
    #[error("file {number}, {file}, is not preserved")]
    Preserve {
        /// The number it should have had.
        number: u64,
        /// The kernel's name for it.
        file: String,
        /// `EEXIST` for a number that another file has, `EBUSY` for a file that is preserved already, `EOPNOTSUPP` for an
        /// unknown seal, `ENOMEM`.
        source: io::Error,
    },
    /// The kernel before has preserved no file of this number in this session, or it cannot be restored.
    #[error("file {number} of the session")]
    Take {
        /// The number.
        number: u64,
        /// `ENOENT`, or why it was not restored.
        source: io::Error,
    },
    /// The session does not end.
    #[error("the session cannot be finished")]
    Finish(#[source] io::Error),
}

impl LiveUpdate {
    /// Begins a session that is known by `name` in the next kernel.
    ///
    /// # Errors
    ///
    /// [`LiveUpdateError::Device`], `Name`, and `Session` when there is one of this name.
    pub fn create(name: &str) -> Result<Self, LiveUpdateError> {
        Self::open(name, sys::CREATE_SESSION)
    }

    /// The session that a process of the kernel before has created. There is one chance: a session that is
    /// dropped is finished, and what was not taken is lost.
    ///
    /// # Errors
    ///
    /// [`LiveUpdateError::Device`], `Name`, and `Session` when there was none of this name, or it was retrieved before.
    pub fn retrieve(name: &str) -> Result<Self, LiveUpdateError> {
        Self::open(name, sys::RETRIEVE_SESSION)
    }

    fn open(name: &str, request: u8) -> Result<Self, LiveUpdateError> {
        let named = || name.to_owned();
        let mut bytes = [0; SESSION_NAME];
        // The last byte stays zero.
        let room = bytes[..SESSION_NAME - 1].get_mut(..name.len());
        match room {
            Some(room) if !name.is_empty() && !name.contains('\0') => {
                room.copy_from_slice(name.as_bytes())
            }
            _ => return Err(LiveUpdateError::Name { name: named() }),
        }
        let device = File::options().read(true).write(true).open(DEVICE);
        let device = device.map_err(LiveUpdateError::Device)?;
        match sys::session(device.as_fd(), request, bytes) {
            Ok(session) => Ok(Self { session }),
            Err(source) => Err(LiveUpdateError::Session {
                name: named(),
                source,
            }),
        }
    }

    /// Preserves a file, with what is in it when this kernel ends, under a number of the caller's choice.
    ///
    /// # Errors
    ///
    /// [`LiveUpdateError::Kind`], `Preserve`.
    pub fn preserve(&self, number: u64, file: impl AsFd) -> Result<(), LiveUpdateError> {
        let file = file.as_fd();
        sys::preserve(self.session.as_fd(), file, number).map_err(|source| {
            match (source.raw_os_error(), called(file)) {
                (Some(libc::ENOENT), file) => LiveUpdateError::Kind { file },
                (_, file) => LiveUpdateError::Preserve {
                    number,
                    file,
                    source,
                },
            }
        })
    }

    /// The file of this number.
    ///
    /// # Errors
    ///
    /// [`LiveUpdateError::Take`].
    pub fn take(&self, number: u64) -> Result<OwnedFd, LiveUpdateError> {
        let taken = sys::take_preserved(self.session.as_fd(), number);
        taken.map_err(|source| LiveUpdateError::Take { number, source })
    }

    /// Ends the session when its files were taken: the kernel has done its part.
    ///
    /// # Errors
    ///
    /// [`LiveUpdateError::Finish`].
    pub fn finish(self) -> Result<(), LiveUpdateError> {
        sys::finish_session(self.session.as_fd()).map_err(LiveUpdateError::Finish)
    }
}

/// The kernel's name for a file.
fn called(file: BorrowedFd<'_>) -> String {
    let link = format!("/proc/self/fd/{}", file.as_raw_fd());
    let name =
        fs::read_link(link).map_or_else(|_| "a file".into(), |name| name.display().to_string());
    match sys::huge_page(file) {
        Ok(Some(bytes)) => format!("{name}, of hugetlb pages of {} MiB", bytes >> 20),
        _ => name,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_are_none_are_refused_before_the_kernel_is_asked() {
        for name in ["", "a\0b", &"n".repeat(SESSION_NAME)] {
            let refused = LiveUpdate::create(name);
            assert!(
                matches!(refused, Err(LiveUpdateError::Name { .. })),
                "{refused:?}"
            );
        }
    }

    #[test]
    fn files_are_called_as_the_kernel_calls_them() {
        let file = sys::memory_file(4096, None).unwrap();
        let name = called(file.as_fd());
        assert!(name.starts_with("/memfd:"), "{name}");
    }
}
