//! Lines of the guest that measures, in nanoseconds of its clock.
//!
//! The clock counts instructions: QEMU lets [`NS`] of them pass with each instruction that a processor of the guest
//! executes, and a halted processor costs nothing. Processors take turns, so while all of [`THREADS`] execute, each of
//! them sees as many times its own instructions pass.

use std::{fmt, str::FromStr};

use hostmem::Backing;

/// Nanoseconds of an instruction, as a power of two. The kernel's benchmark rounds to 100 ns, so there are several; but
/// not so many that a tick of the kernel comes often.
pub const SHIFT: u32 = 4;
/// Nanoseconds of an instruction.
pub const NS: u64 = 1 << SHIFT;
/// Threads that map and unmap at a time. There are as many processors as the most.
pub const THREADS: [u32; 2] = [1, 10];
/// Bytes of a buffer: those of rows O2-12 to O2-22.
pub const SIZES: [u64; 11] = {
    let mut sizes = [4096; 11];
    let mut nth = 0;
    while nth < sizes.len() {
        sizes[nth] <<= nth;
        nth += 1;
    }
    sizes
};
/// How long threads map and unmap for a sample, in seconds of the guest: the least that the kernel's benchmark takes.
pub const SECONDS: u32 = 1;
/// How often all is measured.
pub const REPEATS: u32 = 5;

/// Implementation of map and unmap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Who {
    /// Linux's DMA API, in a domain without translation.
    Direct,
    /// Linux's DMA API, through the IOMMU.
    Linux,
    /// `ioas::Dma`, through a driver of the library's.
    Ours,
    /// `ioas::Dma`, with the library's unit in software.
    Software,
}

/// Each with its name.
const WHO: [(&str, Who); 4] = [
    ("direct", Who::Direct),
    ("linux", Who::Linux),
    ("ours", Who::Ours),
    ("software", Who::Software),
];

/// A measurement: nanoseconds of an operation, the mean of many of each thread.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sample {
    /// Implementation.
    pub who: Who,
    /// True if flushes come later.
    pub lazy: bool,
    /// Threads at a time.
    pub threads: u32,
    /// Bytes of a buffer.
    pub size: u64,
    /// A map, with the reading of the clock.
    pub map: f64,
    /// An unmap, with the reading of the clock.
    pub unmap: f64,
}

/// Memory that is pinned and mapped: its name, what it is, and how many bytes.
pub type Kind = (&'static str, Backing, u64);

/// All that is measured.
pub const SPACES: [Kind; 9] = [
    ("4k", Backing::Anon4K, 64 << 10),
    ("4k", Backing::Anon4K, 2 << 20),
    ("4k", Backing::Anon4K, 64 << 20),
    (FOLIOS_64K, Backing::Thp, 64 << 20),
    ("thp", Backing::Thp, 2 << 20),
    ("thp", Backing::Thp, 64 << 20),
    ("memfd", Backing::Memfd, 64 << 20),
    ("hugetlb-2m", Backing::Hugetlb2M, 64 << 20),
    ("hugetlb-1g", Backing::Hugetlb1G, 1 << 30),
];

/// Transparent huge pages of 64 KiB and no larger ones.
pub const FOLIOS_64K: &str = "thp-64k";

/// Interface that pins and maps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// VFIO's type 1.
    Type1,
    /// An address space of iommufd.
    Iommufd,
    /// An `ioas::Ioas` with tables of its own.
    Ours,
}

impl Way {
    /// Each with its name.
    pub const ALL: [(&str, Self); 3] = [
        ("type1", Self::Type1),
        ("iommufd", Self::Iommufd),
        ("ours", Self::Ours),
    ];
}

/// Times of an address space, nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SpaceSample {
    /// Interface.
    pub way: Way,
    /// The memory: one of [`SPACES`].
    pub kind: Kind,
    /// Each page was written to before.
    pub present: bool,
    /// Writing to each page, where it is.
    pub touch: f64,
    /// Pinning and mapping.
    pub map: f64,
    /// Unmapping and unpinning.
    pub unmap: f64,
}

/// A line.
#[derive(Clone, Debug, PartialEq)]
pub enum Said {
    /// So many instructions took as many nanoseconds.
    Clock(u64, u64),
    /// Two readings of the clock with nothing in between, nanoseconds, as [`Who::Ours`] has them.
    Empty(f64),
    /// A sample.
    Sample(Sample),
    /// Zeroing a page by the processor's string instruction, nanoseconds.
    Zero(f64),
    /// An address space's sample.
    Space(SpaceSample),
    /// A function of the kernel was called so often, and took so many nanoseconds in all, when this mapped and unmapped
    /// that memory.
    Called(Way, Kind, String, u64, f64),
    /// It failed, and why.
    Failed(String),
    /// All is measured, and the guest powers off.
    Done,
}

impl fmt::Display for Said {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Clock(instructions, ns) => write!(f, "clock {instructions} {ns}"),
            Self::Empty(ns) => write!(f, "empty {ns}"),
            Self::Sample(sample) => {
                let mut names = WHO.iter().filter(|(_, who)| *who == sample.who);
                let who = names.next().map_or("", |(name, _)| name);
                let Sample {
                    lazy,
                    threads,
                    size,
                    map,
                    unmap,
                    ..
                } = sample;
                write!(f, "sample {who} {lazy} {threads} {size} {map} {unmap}")
            }
            Self::Zero(ns) => write!(f, "zero {ns}"),
            Self::Space(sample) => {
                let mut names = Way::ALL.iter().filter(|(_, way)| *way == sample.way);
                let way = names.next().map_or("", |(name, _)| name);
                let SpaceSample {
                    kind: (memory, _, size),
                    present,
                    touch,
                    map,
                    unmap,
                    ..
                } = sample;
                write!(
                    f,
                    "space {way} {memory} {size} {present} {touch} {map} {unmap}"
                )
            }
            Self::Called(way, (memory, _, size), function, hits, ns) => {
                let mut names = Way::ALL.iter().filter(|(_, known)| known == way);
                let way = names.next().map_or("", |(name, _)| name);
                write!(f, "called {way} {memory} {size} {function} {hits} {ns}")
            }
            Self::Failed(why) => write!(f, "FAILED {}", why.replace('\n', "; ")),
            Self::Done => f.write_str("done"),
        }
    }
}

impl Said {
    /// Reads a line; `None` for anything else, such as what firmware says.
    pub fn parse(line: &str) -> Option<Self> {
        let line = line.trim_end();
        if let Some(why) = line.strip_prefix("FAILED ") {
            return Some(Self::Failed(why.to_owned()));
        }
        let mut words = line.split(' ');
        Some(match words.next()? {
            "clock" => Self::Clock(next(&mut words)?, next(&mut words)?),
            "empty" => Self::Empty(next(&mut words)?),
            "sample" => {
                let name = words.next()?;
                Self::Sample(Sample {
                    who: WHO.iter().find(|(known, _)| *known == name)?.1,
                    lazy: next(&mut words)?,
                    threads: next(&mut words)?,
                    size: next(&mut words)?,
                    map: next(&mut words)?,
                    unmap: next(&mut words)?,
                })
            }
            "zero" => Self::Zero(next(&mut words)?),
            "called" => {
                let (way, kind) = way_and_kind(&mut words)?;
                let function = words.next()?.to_owned();
                let (hits, ns) = (next(&mut words)?, next(&mut words)?);
                Self::Called(way, kind, function, hits, ns)
            }
            "space" => {
                let (way, kind) = way_and_kind(&mut words)?;
                Self::Space(SpaceSample {
                    way,
                    kind,
                    present: next(&mut words)?,
                    touch: next(&mut words)?,
                    map: next(&mut words)?,
                    unmap: next(&mut words)?,
                })
            }
            "done" => Self::Done,
            _ => return None,
        })
    }
}

fn way_and_kind<'a>(words: &mut impl Iterator<Item = &'a str>) -> Option<(Way, Kind)> {
    let name = words.next()?;
    let way = Way::ALL.iter().find(|(known, _)| *known == name)?.1;
    let (name, size) = (words.next()?, next(words)?);
    let mut kinds = SPACES.into_iter();
    let kind = kinds.find(|kind| (kind.0, kind.2) == (name, size))?;
    Some((way, kind))
}

fn next<'a, T: FromStr>(words: &mut impl Iterator<Item = &'a str>) -> Option<T> {
    words.next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_read_as_it_was_written() {
        for who in WHO {
            let sample = Sample {
                who: who.1,
                lazy: true,
                threads: 10,
                size: 4096,
                map: 0.5,
                unmap: 1234.0,
            };
            for said in [
                Said::Sample(sample),
                Said::Clock(2, 32),
                Said::Empty(1.25),
                Said::Failed("why not".into()),
                Said::Done,
            ] {
                assert_eq!(Said::parse(&format!("{said}\r\n")), Some(said));
            }
        }
        for (way, kind) in Way::ALL.into_iter().zip(SPACES) {
            let said = Said::Space(SpaceSample {
                way: way.1,
                kind,
                present: true,
                touch: 1.5,
                map: 2.0,
                unmap: 3.0,
            });
            assert_eq!(Said::parse(&said.to_string()), Some(said));
            let said = Said::Called(way.1, kind, "follow_page_mask".into(), 16, 0.5);
            assert_eq!(Said::parse(&said.to_string()), Some(said));
        }
        assert_eq!(Said::parse("zero 4.5"), Some(Said::Zero(4.5)));
        for other in ["", "SeaBIOS (version 1.16)", "sample linux true 1"] {
            assert_eq!(Said::parse(other), None, "{other}");
        }
    }
}
