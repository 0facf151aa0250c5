//! Files that are read whole, up to a limit.
//!
//! Devices and pipes have no size, files of `/proc` and `/sys` say 0, and none has to end: the limit is checked while
//! reading.

use std::fs::File;
use std::io::{self, ErrorKind, Read};
use std::path::Path;

use runs::Bytes;
use thiserror::Error;

/// The cause of an [`ErrorKind::FileTooLarge`] of the functions here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("it has more than {}, the most that is read", Bytes(*.most))]
pub struct TooLong {
    /// The limit, bytes.
    pub most: u64,
}

/// The bytes of the file at `path`, at most `most`.
///
/// # Errors
///
/// Errors of the file; [`TooLong`] as [`ErrorKind::FileTooLarge`], after `most + 1` bytes.
pub fn read_at_most(path: impl AsRef<Path>, most: u64) -> io::Result<Vec<u8>> {
    rest_at_most(File::open(path)?, most)
}

/// The text of the file at `path`, at most `most` bytes.
///
/// # Errors
///
/// As [`read_at_most`], and [`ErrorKind::InvalidData`] where it is no UTF-8.
pub fn text_at_most(path: impl AsRef<Path>, most: u64) -> io::Result<String> {
    let bytes = read_at_most(path, most)?;
    String::from_utf8(bytes)
        .map_err(|error| io::Error::new(ErrorKind::InvalidData, error.utf8_error()))
}

/// The rest of `from`, at most `most` bytes.
///
/// # Errors
///
/// As [`read_at_most`].
pub fn rest_at_most(from: impl Read, most: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let read = from.take(most.saturating_add(1)).read_to_end(&mut bytes)?;
    match read as u64 > most {
        true => Err(io::Error::new(ErrorKind::FileTooLarge, TooLong { most })),
        false => Ok(bytes),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_has_no_end_is_read_up_to_the_limit() {
        for endless in ["/dev/zero", "/dev/urandom"] {
            let error = read_at_most(endless, 3 << 20).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::FileTooLarge);
            assert_eq!(
                error.to_string(),
                "it has more than 3 MiB, the most that is read"
            );
        }
    }

    #[test]
    fn a_file_may_be_as_long_as_the_limit() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        std::fs::write(&path, "four").unwrap();
        assert_eq!(text_at_most(&path, 4).unwrap(), "four");
        assert_eq!(
            read_at_most(&path, 3).unwrap_err().kind(),
            ErrorKind::FileTooLarge
        );
        // Its size is said to be 0.
        assert!(
            !read_at_most("/proc/self/status", 1 << 20)
                .unwrap()
                .is_empty()
        );
        assert_eq!(
            read_at_most("/proc/self/status", 64).unwrap_err().kind(),
            ErrorKind::FileTooLarge
        );
    }

    #[test]
    fn bytes_that_are_no_text_are_no_text() {
        let error = text_at_most("/proc/self/exe", 1 << 30).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidData);
        assert_eq!(
            read_at_most("/", 1).unwrap_err().kind(),
            ErrorKind::IsADirectory
        );
    }
}
