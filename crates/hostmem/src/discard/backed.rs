//! Backing of a mapping, as far as discarding depends on it.
//!
//! A mapping of ours is what its [`Backing`] says. Memory that other code has mapped without a
//! file may be anything but a file of its own, so `/proc/self/smaps` is asked, once: whether it
//! is private, how large its pages are, and whether it is a private copy of a file, whose pages
//! would come back with the file's bytes.
//!
//! Source: proc_pid_smaps(5), Linux `Documentation/filesystems/proc.rst`.

use std::fs::File;
use std::io::{self, BufRead, BufReader};

use runs::{Span, Va};

use super::DiscardError;
use crate::backing::Backing;
use crate::mapping::Mapping;
use crate::procfs::{self, ProcfsError};

const SMAPS: &str = "/proc/self/smaps";

/// Store of the pages, and so the call that frees them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Store {
    /// Private to this process.
    Private,
    /// Shared, in no file of ours.
    Shared,
    /// In the mapping's memory file.
    File,
}

/// Backing of a mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Backed {
    pub(crate) store: Store,
    /// Bytes of a page: what is less than one cannot be freed.
    pub(crate) page: u64,
    /// Bytes of the huge pages that may hold several of these pages.
    pub(crate) block: Option<u64>,
}

impl Backed {
    pub(crate) fn of(mapping: &Mapping) -> Result<Self, DiscardError> {
        let backing = mapping.backing();
        let page = backing.page();
        let known = |store, block| Ok(Self { store, page, block });
        if mapping.fd().is_some() {
            known(Store::File, None)
        } else if mapping.region().is_foreign() {
            let whole = Span::new(mapping.address(), mapping.len());
            let file = File::open(SMAPS).map_err(unread)?;
            Self::of_areas(BufReader::new(file), whole)
        } else {
            let largest = backing.largest_page();
            known(Store::Private, (largest > page).then_some(largest))
        }
    }

    /// Backing of the areas in `whole`, addresses. All of them must have the same.
    fn of_areas(smaps: impl BufRead, whole: Span<Va>) -> Result<Self, DiscardError> {
        let mut found: Option<Self> = None;
        let mut covered = 0;
        let mut area: Option<(Span<Va>, Store)> = None;
        for line in smaps.lines() {
            let line = line.map_err(unread)?;
            if let Some(header) = Header::of(&line) {
                if header.span.start > whole.last() {
                    break;
                }
                area = match header.span.intersection(&whole) {
                    Some(part) => Some((part, header.store()?)),
                    None => None,
                };
            } else if let (Some((part, store)), Some(page)) =
                (area, procfs::line_bytes(&line, "KernelPageSize"))
            {
                let small = page == Backing::Thp.page();
                let block = small.then_some(Backing::Thp.largest_page());
                let here = Self { store, page, block };
                if *found.get_or_insert(here) != here {
                    return Err(DiscardError::Mixed {
                        address: part.start,
                    });
                }
                covered += part.len;
            }
        }
        found
            .filter(|backed| covered == whole.len && whole.is_aligned(backed.page))
            .ok_or(DiscardError::NotMapped {
                memory: whole,
                covered,
            })
    }
}

fn unread(source: io::Error) -> DiscardError {
    let path = SMAPS.into();
    DiscardError::Probe(ProcfsError::Read { path, source })
}

/// The first line of an area: addresses, rights, offset, device, inode, path.
struct Header<'a> {
    span: Span<Va>,
    rights: &'a str,
    inode: &'a str,
    path: &'a str,
}

impl<'a> Header<'a> {
    /// `None` for a line of another kind.
    fn of(line: &'a str) -> Option<Self> {
        let mut fields = line.split_ascii_whitespace();
        let (start, end) = fields.next()?.split_once('-')?;
        let start = u64::from_str_radix(start, 16).ok()?;
        let end = u64::from_str_radix(end, 16).ok()?;
        let rights = fields.next()?;
        let inode = fields.nth(2)?;
        Some(Self {
            span: Span::checked(start, end.checked_sub(start)?)?,
            rights,
            inode,
            path: fields.next().unwrap_or_default(),
        })
    }

    fn store(&self) -> Result<Store, DiscardError> {
        // Anonymous huge pages of a pool are a file inside the kernel.
        let anonymous = self.inode == "0" || self.path == "/anon_hugepage";
        match self.rights.ends_with('s') {
            true => Ok(Store::Shared),
            false if anonymous => Ok(Store::Private),
            false => Err(DiscardError::PrivateCopy {
                address: self.span.start,
                path: self.path.into(),
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMAPS: &str = "\
7f0000000000-7f0000400000 rw-p 00000000 00:00 0 
Size:               4096 kB
KernelPageSize:        4 kB
MMUPageSize:           4 kB
VmFlags: rd wr mr mw me ac 
7f0000400000-7f0000800000 rw-p 00000000 00:0f 17                         /anon_hugepage (deleted)
KernelPageSize:     2048 kB
7f0000800000-7f0000c00000 rw-s 00000000 00:01 18                         /dev/zero (deleted)
KernelPageSize:        4 kB
7f0000c00000-7f0001000000 rw-p 00000000 fe:00 19                         /snapshot
KernelPageSize:        4 kB
7f0001000000-7f0001200000 rw-p 00000000 00:00 0                          [anon:guest]
KernelPageSize:        4 kB
7f0001200000-7f0001400000 rw-p 00000000 00:00 0 
KernelPageSize:        4 kB
";

    fn of(start: u64, len: u64) -> Result<Backed, DiscardError> {
        Backed::of_areas(SMAPS.as_bytes(), Span::new(0x7f00_0000_0000 + start, len))
    }

    #[test]
    fn areas_say_what_backs_foreign_memory() {
        let backed = |store, page, block| Backed { store, page, block };
        let private = backed(Store::Private, 4096, Some(2 << 20));
        assert_eq!(of(0x1000, 0x2000).unwrap(), private);
        assert_eq!(
            of(0x40_0000, 0x40_0000).unwrap(),
            backed(Store::Private, 2 << 20, None)
        );
        assert_eq!(
            of(0x80_0000, 0x40_0000).unwrap(),
            backed(Store::Shared, 4096, Some(2 << 20))
        );
        // The kernel joins and parts areas as it likes.
        assert_eq!(of(0x110_0000, 0x20_0000).unwrap(), private);
        assert_eq!(of(0x120_0000, 0x20_0000).unwrap(), private);
    }

    #[test]
    fn what_is_not_there_or_comes_back_is_refused_by_name() {
        let copy = of(0xc0_0000, 0x1000).unwrap_err();
        assert_eq!(
            copy.to_string(),
            "the memory at 0x7f0000c00000 is a private copy of /snapshot: discarded pages come back"
        );
        let mixed = of(0, 0x80_0000).unwrap_err();
        assert!(matches!(mixed, DiscardError::Mixed { address } if address == 0x7f00_0040_0000));
        for (start, len) in [
            (0x140_0000, 0x1000),
            (0x130_0000, 0x20_0000),
            (0x40_1000, 0x1000),
        ] {
            let error = of(start, len).unwrap_err();
            assert!(matches!(error, DiscardError::NotMapped { .. }), "{error}");
        }
    }
}
