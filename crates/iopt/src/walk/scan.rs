//! A scan: every entry of the tables below a root, as a unit would read it.
//!
//! A walk answers for one address; a scan serves tools that list, count or compare whole tables,
//! over any memory and with nothing of the engine. It goes depth first, by ascending input address,
//! and reads each entry once. Entries that are not present are passed over.
//!
//! A table may be reached on many ways, by damage or by intent, and in arbitrary bytes their number
//! grows with the power of the levels. The scan itself only falls a level with every step down;
//! a caller that must end in bounded time [passes](ScanStep::Past) tables that it has seen, or
//! [ends](ScanStep::End) the scan.

use runs::{Run, Span};

use super::spec::{Entry, Shape, Spec, low_bits};
use super::walker::{Walker, by_format, combine};
use super::{
    BadAddress, WalkMemory, WalkReason, amdv1, arm_lpae, armv7s, dart, riscv, vtd_ss, x86_64,
};
use crate::format::{Aperture, FormatId};
use crate::prot::Prot;

/// An entry that is present, or a table that cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Visited {
    /// The first input address that the entry translates.
    pub iova: u64,
    /// It translates 2^`log2` bytes; a leaf may be larger, and takes several entries then.
    pub log2: u32,
    /// Level of its table, 0 for the smallest page.
    pub level: u8,
    /// Address of its table.
    pub table: u64,
    /// Its place in the table.
    pub index: u32,
    /// The entry; 0 where it cannot be read.
    pub word: u64,
    /// Permissions of the levels down to here together.
    pub prot: Prot,
    /// Its meaning, or the reason why every access would fault. [`WalkReason::NoMemory`] stands for
    /// the rest of the table too.
    pub says: Result<Says, WalkReason>,
}

/// Meaning of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Says {
    /// It leads to a table.
    Table {
        /// The table's address.
        address: u64,
        /// Its level.
        level: u8,
    },
    /// It is a leaf, or one of several entries of a leaf: the whole page.
    Leaf(Run),
}

/// How a scan goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScanStep {
    /// Into the table that the entry leads to, if it does.
    Into,
    /// To the entry behind it.
    Past,
    /// Not at all.
    End,
}

/// A table that the scan is in.
#[derive(Clone, Copy)]
struct Frame {
    /// The first input address that it translates, without the bits above the aperture.
    base: u64,
    table: u64,
    level: u8,
    index: u64,
    entries: u64,
    prot: Prot,
}

/// More levels than any format has.
const DEPTH: usize = 8;

impl Walker {
    /// Calls `each` for every entry that is present, from the root down, by ascending input address.
    /// Accesses are not checked against permissions; what they would be is reported.
    ///
    /// # Errors
    ///
    /// When the format has no such root, or there can be none at its address; nothing was read then.
    ///
    /// ```
    /// # use iopt::walk::{BadAddress, Says, ScanStep, WalkMemory, Walker};
    /// # use iopt::{FormatId, Root};
    /// /// VT-d second stage, 3 levels: 1 GiB at 0, another at 2 GiB.
    /// struct Page;
    /// impl WalkMemory for Page {
    ///     fn read_u64(&self, address: u64) -> Result<u64, BadAddress> {
    ///         Ok(match address {
    ///             0x1000 => 0x4000_0083,
    ///             0x1010 => 0x8000_0083,
    ///             _ => 0,
    ///         })
    ///     }
    /// }
    /// let root = Root { format: FormatId::VtdSs, address: 0x1000, levels: 3 };
    /// let mut leaves = Vec::new();
    /// Walker::new(root).scan(&Page, |entry| {
    ///     if let Ok(Says::Leaf(page)) = entry.says {
    ///         leaves.push((page.iova, page.pa, page.len));
    ///     }
    ///     ScanStep::Into
    /// })?;
    /// assert_eq!(leaves, [(0, 1 << 30, 1 << 30), (2 << 30, 2 << 30, 1 << 30)]);
    /// # Ok::<_, iopt::walk::WalkReason>(())
    /// ```
    pub fn scan(
        &self,
        memory: &(impl WalkMemory + ?Sized),
        each: impl FnMut(&Visited) -> ScanStep,
    ) -> Result<(), WalkReason> {
        by_format!(self.root().format, S => self.scan_as::<S>(memory, each))
    }

    fn scan_as<S: Spec>(
        &self,
        memory: &(impl WalkMemory + ?Sized),
        mut each: impl FnMut(&Visited) -> ScanStep,
    ) -> Result<(), WalkReason> {
        let root = self.root();
        let (format, levels) = (root.format, root.levels);
        let shape = S::shape(self).ok_or(WalkReason::Levels { format, levels })?;
        let address = root.address & !self.encryption;
        if address & low_bits(shape.root_log2) != 0 || address >> self.output_bits() != 0 {
            return Err(self.bad_output(root.address));
        }
        let aperture = self.narrow(shape.aperture);
        let top = Frame {
            base: 0,
            table: address,
            level: levels - 1,
            index: 0,
            entries: entries_of_root(&shape, aperture, levels - 1),
            prot: Prot::RW | Prot::EXECUTE,
        };
        let mut way = [top; DEPTH];
        let mut depth = 1usize;
        while let Some(frame) = depth.checked_sub(1).and_then(|last| way.get_mut(last)) {
            if frame.index >= frame.entries {
                depth -= 1;
                continue;
            }
            let here = *frame;
            frame.index += 1;
            let Some(visited) = self.visit::<S>(memory, &shape, aperture, &here) else {
                continue;
            };
            if matches!(visited.says, Err(WalkReason::NoMemory { .. })) {
                frame.index = frame.entries;
            }
            match (each(&visited), visited.says) {
                (ScanStep::End, _) => return Ok(()),
                (ScanStep::Into, Ok(Says::Table { address, level })) => {
                    let below = Frame {
                        base: here.base + (here.index << shape.shift(here.level)),
                        table: address,
                        level,
                        index: 0,
                        entries: 1 << shape.index_bits,
                        prot: visited.prot,
                    };
                    // Levels fall, so there is always room.
                    if let Some(slot) = way.get_mut(depth) {
                        *slot = below;
                        depth += 1;
                    }
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// The next entry of `frame`; `None` when it is not present.
    #[inline]
    fn visit<S: Spec>(
        &self,
        memory: &(impl WalkMemory + ?Sized),
        shape: &Shape,
        aperture: Aperture,
        frame: &Frame,
    ) -> Option<Visited> {
        let stripped = frame.base + (frame.index << shape.shift(frame.level));
        // The unit may take fewer address bits than the tables translate.
        if stripped & !low_bits(aperture.bits) != 0 {
            return None;
        }
        let place = frame.table.wrapping_add(frame.index << shape.entry_log2);
        let read = if shape.entry_log2 == 2 {
            memory.read_u32(place).map(u64::from)
        } else {
            memory.read_u64(place)
        };
        let iova = aperture.extend(stripped);
        let mut visited = Visited {
            iova,
            log2: shape.shift(frame.level),
            level: frame.level,
            table: frame.table,
            index: frame.index as u32,
            word: 0,
            prot: frame.prot,
            says: Err(WalkReason::NotPresent),
        };
        let says = match read {
            Err(BadAddress { address }) => Err(WalkReason::NoMemory { address }),
            Ok(word) => {
                visited.word = word;
                S::read(self, iova, frame.level, word).and_then(|entry| {
                    self.check_target(frame.level, &entry)?;
                    Ok(entry)
                })
            }
        };
        visited.says = match says {
            Err(WalkReason::NotPresent) => return None,
            Err(reason) => Err(reason),
            Ok(Entry::Table {
                address,
                level,
                prot,
            }) => {
                visited.prot = combine(frame.prot, prot);
                let address = address & !self.encryption;
                Ok(Says::Table { address, level })
            }
            Ok(Entry::Leaf { pa, log2, prot }) => {
                visited.prot = combine(frame.prot, prot);
                let within = low_bits(log2);
                Ok(Says::Leaf(Run::new(
                    iova & !within,
                    Span::new(pa, within + 1),
                )))
            }
        };
        Some(visited)
    }
}

/// The root takes all address bits that the levels below leave.
fn entries_of_root(shape: &Shape, aperture: Aperture, level: u8) -> u64 {
    let bits = aperture.bits.saturating_sub(shape.shift(level));
    1 << bits.min(63)
}
