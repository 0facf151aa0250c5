//! The device directory, and what is attached through it.

use iopt::{Chain, TableMemory};

use super::capabilities::{Features, OFF, page_number};
use super::directory::Directory;
use super::entry::{Attached, Context, Device, Holds, Process};
use crate::error::NoPlace;

/// The device directory. It always has three levels of pages, of which the unit is shown the last ones.
#[derive(Debug)]
pub(super) struct Devices {
    directory: Directory,
    /// The first and the last device that was ever attached: what a search looks at.
    used: Option<(u32, u32)>,
    /// The highest process id.
    last_process: u32,
}

/// An address space that is attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Member {
    pub(super) device: u32,
    /// The process id, of those with a PASID.
    pub(super) process: Option<u32>,
    /// The device has a TLB, and its answers are taken.
    pub(super) tlb: bool,
    pub(super) there: Attached,
}

impl Devices {
    /// A directory without devices. After an error nothing is taken.
    pub(super) fn new<M: TableMemory>(
        memory: &M,
        features: Features,
        last_process: u32,
    ) -> Result<Self, NoPlace> {
        let directory = Directory::new(memory, LEVELS, leaf_bits(features))?;
        let devices = Self {
            directory,
            used: None,
            last_process,
        };
        // The pages of each number of levels.
        match directory.make(memory, 0) {
            Ok(_) => Ok(devices),
            Err(cause) => {
                let mut chain = Chain::empty();
                devices.for_each_page(memory, &mut |_, page| chain.push(memory, page));
                memory.reclaim(chain);
                Err(cause)
            }
        }
    }

    /// Candidate values of `ddtp`, from the fewest levels that hold ids of `bits` bits on.
    pub(super) fn registers<'m, M: TableMemory>(
        &self,
        memory: &'m M,
        bits: u32,
    ) -> impl Iterator<Item = u64> + Clone + 'm {
        let directory = self.directory;
        let holds = move |levels: u32| directory.leaf_bits + 9 * (levels - 1) >= bits;
        (1..=3)
            .filter(move |n| holds(*n))
            .filter_map(move |levels| {
                // 1LVL is 2, and so on.
                let mode = OFF + 1 + u64::from(levels);
                Some(page_number(directory.below(memory, levels)?) | mode)
            })
    }

    /// The device's context, if there is a page for it.
    pub(super) fn find<'m, M: TableMemory>(
        &self,
        memory: &'m M,
        device: u32,
    ) -> Option<Device<'m, M>> {
        let cells = self.directory.find(memory, device)?;
        Some(Device(Context { memory, cells }))
    }

    /// The device's context.
    pub(super) fn make<'m, M: TableMemory>(
        &mut self,
        memory: &'m M,
        device: u32,
    ) -> Result<Device<'m, M>, NoPlace> {
        let cells = self.directory.make(memory, device)?;
        let (first, last) = self.used.unwrap_or((device, device));
        self.used = Some((first.min(device), last.max(device)));
        Ok(Device(Context { memory, cells }))
    }

    /// All that is attached.
    pub(super) fn members<'m, M: TableMemory>(
        &self,
        memory: &'m M,
    ) -> impl Iterator<Item = Member> + Clone + 'm {
        let (directory, last_process) = (self.directory, self.last_process);
        self.used
            .into_iter()
            .flat_map(move |(first, last)| directory.contexts(memory, first, last))
            .flat_map(move |(device, cells)| {
                let context = Device(Context { memory, cells });
                let tlb = context.has_tlb() && context.0.is_valid();
                let (table, directory) = match context.holds() {
                    Holds::Nothing => (None, None),
                    Holds::Table(there) => (Some((None, there)), None),
                    Holds::Processes(directory) => (None, Some(directory)),
                };
                let processes = directory.into_iter().flat_map(move |directory| {
                    processes(memory, directory, last_process)
                        .map(|(process, there)| ((process != 0).then_some(process), there))
                });
                table
                    .into_iter()
                    .chain(processes)
                    .map(move |(process, there)| Member {
                        device,
                        process,
                        tlb,
                        there,
                    })
            })
    }

    /// True when nothing but one process is attached.
    pub(super) fn is_last<M: TableMemory>(&self, memory: &M, directory: Directory) -> bool {
        processes(memory, directory, self.last_process)
            .nth(1)
            .is_none()
    }

    /// Hands all pages to `each` with their names, those of process directories too; a page may be gone when
    /// it returns.
    pub(super) fn for_each_page<M: TableMemory>(
        &self,
        memory: &M,
        each: &mut impl FnMut(&'static str, u64),
    ) {
        if let Some((first, last)) = self.used {
            for (_, cells) in self.directory.contexts(memory, first, last) {
                if let Holds::Processes(directory) = Device(Context { memory, cells }).holds() {
                    directory.for_each_page(memory, &mut |page| each("process directory", page));
                }
            }
        }
        let directory = &self.directory;
        directory.for_each_page(memory, &mut |page| each("device directory", page));
    }

    /// Describes the directory for a successor: the first page, and one word with the first and the last device ever
    /// attached, a bit that is set if there was one (bit 48), a bit that is set if contexts are extended (bit 49), and
    /// the bits of PASIDs (from bit 50 on).
    pub(super) fn describe(&self) -> [u64; 2] {
        let used = self.used.map_or(0, |(first, last)| {
            u64::from(first) | u64::from(last) << 24 | 1 << 48
        });
        let extended = u64::from(self.directory.leaf_bits == EXTENDED) << 49;
        let pasid_bits = u64::from(self.last_process.trailing_ones()) << 50;
        [self.directory.root, used | extended | pasid_bits]
    }

    /// A directory that is there already, with what [`describe`](Self::describe) says.
    pub(super) const fn adopt(
        [root, used]: [u64; 2],
        features: Features,
        last_process: u32,
    ) -> Self {
        let used = match used >> 48 & 1 {
            1 => Some((used as u32 & 0xff_ffff, (used >> 24) as u32 & 0xff_ffff)),
            _ => None,
        };
        Self {
            directory: Directory {
                root,
                levels: LEVELS,
                leaf_bits: leaf_bits(features),
            },
            used,
            last_process,
        }
    }
}

/// Levels of the device directory.
const LEVELS: u32 = 3;

/// DDI\[0\]: a context has 64 bytes in the extended format, 32 in the base format.
const fn leaf_bits(features: Features) -> u32 {
    if features.extended() { EXTENDED } else { 7 }
}
const EXTENDED: u32 = 6;

/// Address spaces attached below one device, by PASID.
fn processes<M: TableMemory>(
    memory: &M,
    directory: Directory,
    last: u32,
) -> impl Iterator<Item = (u32, Attached)> + Clone + '_ {
    directory
        .contexts(memory, 0, last)
        .filter_map(move |(process, cells)| {
            let there = Process(Context { memory, cells }).read()?;
            Some((process, there))
        })
}
