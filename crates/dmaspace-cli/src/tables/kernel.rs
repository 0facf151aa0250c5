//! Tables as a running kernel shows them: VT-d's, in debugfs.
//!
//! Linux with `CONFIG_INTEL_IOMMU_DEBUGFS` has a file for each device (and each of its PASIDs), older
//! kernels one for all:
//!
//! ```text
//! Device 0000:00:05.0 @0x1017f8000
//! IOVA_PFN           PML5E               PML4E               PDPE                PDE                 PTE
//! 0x0000000123400 |  0x0000000000000000  0x0000000101800003  0x0000000101801003  0x0000000180000083
//! ```
//!
//! A row is a leaf with the entries on its way; below a larger leaf columns are left out, or 0. So the tables
//! are put together again from rows: what no row names is not present, and tables without a leaf are not seen.
//! The text does not say of which of the two formats the entries are. Bit 2 tells: it is U/S in entries of
//! the first stage, which Linux always sets, and X in those of the second, which it never does.
//!
//! Source: Linux, `Documentation/ABI/testing/debugfs-intel-iommu` (domain_translation_struct) and
//! `drivers/iommu/intel/debugfs.c`; VT-d 5.0, sections 9.7 and 9.8, for the bits.

use std::collections::{HashMap, HashSet};
use std::io::{self, BufRead, Read};

use iopt::walk::{BadAddress, WalkMemory};
use iopt::{FormatId, Root};
use thiserror::Error;

/// Beginning of such a text.
pub(super) const START: &[u8] = b"Device ";

/// The most rows that are read: leaves of 4 KiB for 64 GiB.
const MOST_ROWS: u64 = 1 << 24;
/// The most lines, also of devices that are not asked for.
const MOST_LINES: u64 = 4 * MOST_ROWS;
/// The most devices and PASIDs whose tables are kept apart.
const MOST_DEVICES: usize = 1 << 16;
/// The longest line; rows have 113 bytes.
const MOST_LINE: u64 = 512;
/// Where the next table or the page is, in an entry.
const ADDRESS: u64 = 0x000f_ffff_ffff_f000;
/// Reading or writing is allowed: the entry is present.
const PRESENT: u64 = 0b11;
/// U/S in the first stage.
const USER: u64 = 1 << 2;

/// Why a kernel's text is not understood.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum KernelTextError {
    /// It cannot be read.
    #[error("it cannot be read")]
    Read(#[from] io::Error),
    /// A line is neither a device, nor a heading, nor a row.
    #[error("line {line} is no row of a leaf and its entries")]
    Line {
        /// Its number, from 1.
        line: u64,
    },
    /// A table changed while it was printed.
    #[error(
        "line {line}: the entry at {address:#x} is {entry:#x}, and in an earlier line {before:#x}: the \
         tables have changed while they were printed"
    )]
    Torn {
        /// The line's number, from 1.
        line: u64,
        /// The entry's address.
        address: u64,
        /// Its value there.
        entry: u64,
        /// Its value before.
        before: u64,
    },
    /// It has more leaves than are read.
    #[error("it has more than {MOST_ROWS} leaves")]
    Rows,
    /// It has more lines than are read.
    #[error("it has more than {most} lines")]
    Lines {
        /// The most that are read.
        most: u64,
    },
    /// It has the tables of more devices than are kept apart.
    #[error("it has the tables of more than {MOST_DEVICES} devices")]
    ManyDevices,
    /// It has no tables, or those of several devices.
    #[error("it has the tables of {}", named(.names))]
    Devices {
        /// The devices.
        names: Vec<String>,
    },
    /// It has no tables of the device that was asked for.
    #[error("it has no tables of {device}, but of {}", named(.names))]
    Device {
        /// The device asked for.
        device: String,
        /// The devices.
        names: Vec<String>,
    },
}

fn named(names: &[String]) -> String {
    const SHOWN: usize = 16;
    match names {
        [] => "no device".into(),
        all if all.len() <= SHOWN => all.join(", "),
        all => format!("{} and {} more", all[..SHOWN].join(", "), all.len() - SHOWN),
    }
}

/// The tables of one device.
#[derive(Debug, Default)]
pub(super) struct KernelTables {
    /// Its address, with `/` and the PASID behind it, if the tables are of one.
    name: String,
    root: u64,
    /// Entries that are present, by their addresses.
    entries: HashMap<u64, u64>,
    /// Pages in which entries are.
    tables: HashSet<u64>,
    levels: u8,
    /// All entries so far are for user mode.
    user: bool,
}

impl KernelTables {
    /// Reads the tables of `device`, or of the only one that the text has.
    pub(super) fn read(text: impl BufRead, device: Option<&str>) -> Result<Self, KernelTextError> {
        let mut all = sections(text, device, MOST_LINES)?;
        let wanted = |name: &str| device.is_none_or(|device| is(name, device));
        let mut found = all.iter().enumerate().filter(|(_, one)| wanted(&one.name));
        match (found.next(), found.next()) {
            (Some((nth, _)), None) => Ok(all.swap_remove(nth)),
            (first, _) => {
                let names = all.iter().map(|one| one.name.clone()).collect();
                Err(match device {
                    Some(device) if first.is_none() => KernelTextError::Device {
                        device: device.into(),
                        names,
                    },
                    _ => KernelTextError::Devices { names },
                })
            }
        }
    }

    fn new(name: String, root: u64) -> Self {
        Self {
            name,
            root,
            tables: HashSet::from([root & ADDRESS]),
            user: true,
            ..Self::default()
        }
    }

    /// Where the tables begin. Without a leaf they are taken to be of the second stage, of 4 levels.
    pub(super) fn root(&self) -> Root {
        let first_stage = self.user && !self.entries.is_empty();
        Root {
            format: if first_stage {
                FormatId::X86_64
            } else {
                FormatId::VtdSs
            },
            address: self.root,
            levels: if self.levels == 0 { 4 } else { self.levels },
        }
    }

    /// A leaf and the entries on its way; `None` when they do not fit together, or those before.
    fn row(&mut self, pfn: u64, entries: &[u64]) -> Option<Result<(), Conflict>> {
        // The columns are levels 5, 4, …; the topmost that the tables have is not empty.
        let last = entries.iter().rposition(|entry| *entry != 0)?;
        let entries = entries.get(..=last)?;
        let above = entries.iter().take_while(|entry| **entry == 0).count();
        let levels = 5u8.checked_sub(u8::try_from(above).ok()?)?;
        let way = entries.get(above..).filter(|way| !way.is_empty())?;
        let leaf_level = levels.checked_sub(u8::try_from(way.len()).ok()?)?;
        let aligned = pfn.trailing_zeros() >= 9 * u32::from(leaf_level);
        if levels < 3 || !aligned || (self.levels != 0 && self.levels != levels) {
            return None;
        }
        self.levels = levels;
        let mut table = self.root & ADDRESS;
        for (level, entry) in (leaf_level..levels).rev().zip(way) {
            if entry & PRESENT == 0 {
                return None;
            }
            let address = table + (pfn >> (9 * level) & 0x1ff) * 8;
            self.tables.insert(table);
            self.user &= entry & USER != 0;
            let before = *self.entries.entry(address).or_insert(*entry);
            if before != *entry {
                return Some(Err(Conflict {
                    address,
                    entry: *entry,
                    before,
                }));
            }
            table = entry & ADDRESS;
        }
        Some(Ok(()))
    }
}

struct Conflict {
    address: u64,
    entry: u64,
    before: u64,
}

/// True when tables of this name are those of `device`, given with its PASID or without.
fn is(name: &str, device: &str) -> bool {
    name == device || name.split_once('/').is_some_and(|(name, _)| name == device)
}

/// The tables of all devices, out of `most` lines; only the names of those that are not wanted.
fn sections(
    mut text: impl BufRead,
    wanted: Option<&str>,
    most: u64,
) -> Result<Vec<KernelTables>, KernelTextError> {
    let mut all: Vec<KernelTables> = Vec::new();
    let mut bytes = Vec::new();
    let mut rows = 0;
    for line in 1.. {
        if line > most {
            return Err(KernelTextError::Lines { most });
        }
        bytes.clear();
        if text
            .by_ref()
            .take(MOST_LINE)
            .read_until(b'\n', &mut bytes)?
            == 0
        {
            break;
        }
        let wrong = KernelTextError::Line { line };
        let Ok(words) = std::str::from_utf8(&bytes).map(str::trim) else {
            return Err(wrong);
        };
        if let Some(device) = words.strip_prefix("Device ") {
            let (name, root) = heading(device).ok_or(wrong)?;
            if all.len() == MOST_DEVICES {
                return Err(KernelTextError::ManyDevices);
            }
            all.push(KernelTables::new(name, root));
        } else if !words.is_empty() && !words.starts_with("IOVA_PFN") {
            let Some(tables) = all.last_mut() else {
                return Err(wrong);
            };
            if wanted.is_some_and(|wanted| !is(&tables.name, wanted)) {
                continue;
            }
            rows += 1;
            if rows > MOST_ROWS {
                return Err(KernelTextError::Rows);
            }
            let (pfn, count, entries) = row(words).ok_or(KernelTextError::Line { line })?;
            let entries = entries.get(..count).unwrap_or_default();
            match tables.row(pfn, entries).ok_or(wrong)? {
                Ok(()) => {}
                Err(Conflict {
                    address,
                    entry,
                    before,
                }) => {
                    return Err(KernelTextError::Torn {
                        line,
                        address,
                        entry,
                        before,
                    });
                }
            }
        }
    }
    Ok(all)
}

/// `0000:00:0a.0 @0x1083d1000`, `0000:00:0a.0 with pasid 2 @0x1083d1000`: name and root.
fn heading(words: &str) -> Option<(String, u64)> {
    let (name, root) = words.split_once('@')?;
    // It is printed; what a terminal would obey is in no name.
    let mut name = name
        .split_whitespace()
        .filter(|word| word.bytes().all(|byte| byte.is_ascii_graphic()));
    let device = name.next()?;
    let pasid = match (name.next(), name.next(), name.next()) {
        (None, ..) => String::new(),
        (Some("with"), Some("pasid"), Some(pasid)) => format!("/{pasid}"),
        _ => return None,
    };
    Some((format!("{device}{pasid}"), number(root)?))
}

/// The page frame and the entries of a row, 3 to 5.
fn row(words: &str) -> Option<(u64, usize, [u64; 5])> {
    let (pfn, columns) = words.split_once('|')?;
    let mut entries = [0; 5];
    let mut count = 0;
    for column in columns.split_whitespace() {
        *entries.get_mut(count)? = number(column)?;
        count += 1;
    }
    let pfn = number(pfn.trim())?;
    // No address has more than 57 bits.
    (count >= 3 && pfn >> 45 == 0).then_some((pfn, count, entries))
}

/// `0x` and hexadecimal digits.
fn number(text: &str) -> Option<u64> {
    let digits = text.strip_prefix("0x")?;
    let plain = digits.bytes().all(|digit| digit.is_ascii_hexdigit());
    u64::from_str_radix(digits, 16).ok().filter(|_| plain)
}

impl WalkMemory for KernelTables {
    fn read_u64(&self, address: u64) -> Result<u64, BadAddress> {
        match self.entries.get(&address) {
            Some(entry) => Ok(*entry),
            None if self.tables.contains(&(address & ADDRESS)) => Ok(0),
            None => Err(BadAddress { address }),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::BufReader;

    use super::*;

    #[test]
    fn a_text_of_lines_that_say_nothing_has_an_end() {
        let start = &b"Device 0000:00:05.0 @0x1000000\n"[..];
        let endless = BufReader::new(start.chain(io::repeat(b'\n')));
        let refused = sections(endless, None, 1000).unwrap_err();
        assert!(
            matches!(refused, KernelTextError::Lines { most: 1000 }),
            "{refused}"
        );
        // The rows of others, too.
        let rows = "0x0 |\t0x0\t0x1001003\t0x1002003\t0x1003003\t0x200001001\n".repeat(1000);
        let text = start.chain(rows.as_bytes());
        let refused = sections(text, Some("0000:00:06.0"), 1000).unwrap_err();
        assert!(
            matches!(refused, KernelTextError::Lines { most: 1000 }),
            "{refused}"
        );
    }
}
