//! Where the balloon's pages come from: memory of this process, pinned, by its physical addresses.
//!
//! Memory comes in chunks of 2 MiB, each asked for as one huge page. A chunk that got one is a block of
//! 2 MiB to the driver; of one that did not, its runs are cut into smaller blocks. What the driver gives
//! back is unpinned and discarded at once, in whole runs, so that the guest has it again; so is what it
//! has no use for. Nothing is asked for when the guest would be left with less than a reserve: the
//! balloon is not to have anything killed.

use std::collections::BTreeMap;
use std::fs;
use std::ops::ControlFlow;
use std::sync::Arc;

use hostmem::{Backing, Discard, Mapping, Pin, Pinner};
use runs::{GuestAddr, Offset, Span};
use virtio_balloon::driver::GuestPages;
use virtio_balloon::{GuestPage, Stats, Tag};

use super::GuestError;
use super::dma::runs_of;

const CHUNK: u64 = 2 << 20;

/// A part of a chunk that is contiguous in memory.
#[derive(Clone, Copy, Debug)]
struct Part {
    chunk: u64,
    offset: u64,
    len: u64,
}

/// 2 MiB of this process.
struct Chunk {
    pin: Pin,
    discard: Discard,
    /// Bytes that are still pinned.
    bytes: u64,
}

/// The guest's pages, as far as this process can get them.
pub(super) struct ProcessPages {
    pinner: Pinner,
    /// All RAM of the guest.
    span: Span<GuestAddr>,
    /// What the guest is left with in any case, bytes.
    reserve: u64,
    chunks: BTreeMap<u64, Chunk>,
    next: u64,
    /// All that is pinned, by physical address.
    parts: BTreeMap<u64, Part>,
    /// Those parts of it that are not in the balloon, by physical address.
    free: BTreeMap<u64, u64>,
    /// What went wrong last where nothing could be said.
    pub(super) cause: Option<GuestError>,
}

impl ProcessPages {
    pub(super) fn new(pinner: Pinner, reserve: u64) -> Result<Self, GuestError> {
        Ok(Self {
            pinner,
            span: ram()?,
            reserve,
            chunks: BTreeMap::new(),
            next: 0,
            parts: BTreeMap::new(),
            free: BTreeMap::new(),
            cause: None,
        })
    }

    /// Gives the guest back what is not in the balloon.
    pub(super) fn trim(&mut self) {
        while let Some((start, len)) = self.free.pop_first() {
            self.let_go(Span::new(start, len));
        }
    }

    /// One more chunk. False when there is none.
    fn grow(&mut self) -> Result<bool, GuestError> {
        if meminfo("MemAvailable")?.saturating_sub(CHUNK) < self.reserve {
            return Ok(false);
        }
        let mapping = Mapping::new(Backing::Thp, CHUNK, None).map_err(GuestError::other)?;
        let mapping = Arc::new(mapping);
        let whole = Span::new(0, CHUNK);
        let goes_on = &mut |_| ControlFlow::Continue(());
        let pin = self.pinner.pin(&mapping, whole, goes_on);
        let pin = pin.map_err(GuestError::other)?;
        let discard = Discard::new(mapping).map_err(GuestError::other)?;
        let (chunk, mut offset) = (self.next, 0);
        let (parts, free) = (&mut self.parts, &mut self.free);
        runs_of(&pin, whole, &mut |run| {
            let len = run.len;
            parts.insert(run.start, Part { chunk, offset, len });
            free.insert(run.start, len);
            offset += len;
        })?;
        self.next += 1;
        let bytes = CHUNK;
        self.chunks.insert(
            chunk,
            Chunk {
                pin,
                discard,
                bytes,
            },
        );
        Ok(true)
    }

    /// A free block of `bytes` on a boundary of its size.
    fn find(&mut self, bytes: u64) -> Option<u64> {
        let (start, len, at) = self.free.iter().find_map(|(start, len)| {
            let at = start.checked_next_multiple_of(bytes)?;
            let end = at.checked_add(bytes)?;
            (end <= start + len).then_some((*start, *len, at))
        })?;
        self.free.remove(&start);
        if at > start {
            self.free.insert(start, at - start);
        }
        let end = at + bytes;
        if start + len > end {
            self.free.insert(end, start + len - end);
        }
        Some(at)
    }

    /// Unpins and discards what is pinned of `run`.
    fn let_go(&mut self, run: Span<GuestAddr>) {
        let mut at = run.start;
        let end = run.start + run.len;
        while at < end {
            let Some((&start, &part)) = self.parts.range(..=at).next_back() else {
                return;
            };
            let there = Span::<GuestAddr>::new(start, part.len);
            let Some(inside) = there.intersection(&Span::new(at, end - at)) else {
                return;
            };
            self.parts.remove(&start);
            let before = inside.start - start;
            let after = part.len - before - inside.len;
            if before > 0 {
                self.parts.insert(
                    start,
                    Part {
                        len: before,
                        ..part
                    },
                );
            }
            if after > 0 {
                let offset = part.offset + before + inside.len;
                let rest = Part {
                    offset,
                    len: after,
                    ..part
                };
                self.parts.insert(inside.start + inside.len, rest);
            }
            self.give(part.chunk, Span::new(part.offset + before, inside.len));
            at = inside.start + inside.len;
        }
    }

    /// Gives a part of a chunk back to the guest: with the last of it the whole chunk goes.
    fn give(&mut self, number: u64, part: Span<Offset>) {
        let Some(chunk) = self.chunks.get_mut(&number) else {
            return;
        };
        chunk.bytes -= part.len;
        if chunk.bytes == 0 {
            // Unpinned and unmapped.
            self.chunks.remove(&number);
            return;
        }
        let given = chunk.pin.release(part).map_err(GuestError::other);
        let given = given.and_then(|()| {
            let discarded = chunk.discard.discard(&[part], &mut |_, _| ());
            discarded.map(|_| ()).map_err(GuestError::other)
        });
        // It stays with this process, until the rest of the chunk goes.
        self.cause = given.err().or(self.cause.take());
    }
}

impl GuestPages for ProcessPages {
    fn page(&self) -> GuestPage {
        GuestPage::SIZE_4K
    }

    fn span(&self) -> Span<GuestAddr> {
        self.span
    }

    fn take(&mut self, bytes: u64) -> Option<u64> {
        loop {
            if let Some(at) = self.find(bytes) {
                return Some(at);
            }
            // What is there in pieces goes first: the driver asks for smaller blocks next.
            let in_pieces: u64 = self.free.values().sum();
            if bytes > CHUNK || in_pieces >= bytes {
                return None;
            }
            match self.grow() {
                Ok(true) => {}
                Ok(false) => return None,
                Err(cause) => {
                    self.cause = Some(cause);
                    return None;
                }
            }
        }
    }

    fn give_back(&mut self, run: Span<GuestAddr>) {
        self.let_go(run);
    }

    /// The kernel goes on managing them: they belong to this process.
    fn stats(&mut self) -> Stats {
        stats()
    }
}

/// From the first to the last byte of RAM: `/proc/iomem`, which shows addresses to root.
fn ram() -> Result<Span<GuestAddr>, GuestError> {
    let text = fs::read_to_string("/proc/iomem").map_err(GuestError::other)?;
    let end = ram_end(&text).ok_or(GuestError::Unprivileged)?;
    Ok(Span::new(0, end))
}

fn ram_end(iomem: &str) -> Option<u64> {
    let ranges = iomem.lines().filter_map(|line| {
        let (range, name) = line.split_once(" : ")?;
        let (_, last) = range.split_once('-')?;
        let last = u64::from_str_radix(last, 16).ok()?;
        (name == "System RAM").then_some(last + 1)
    });
    ranges.max().filter(|end| *end > 1)
}

/// A line of `/proc/meminfo`, in bytes.
pub(super) fn meminfo(name: &str) -> Result<u64, GuestError> {
    let text = fs::read_to_string("/proc/meminfo").map_err(GuestError::other)?;
    field(&text, &format!("{name}:"))
        .map(|kib| kib << 10)
        .ok_or_else(|| GuestError::other(format!("/proc/meminfo has no {name}")))
}

/// The number behind `name` at the beginning of a line.
fn field(text: &str, name: &str) -> Option<u64> {
    let mut lines = text.lines();
    lines.find_map(|line| {
        let mut words = line.split_whitespace();
        (words.next() == Some(name)).then(|| words.next()?.parse().ok())?
    })
}

/// What the kernel says of its memory (VIRTIO 1.3, 5.5.6.4); what it does not say is left out.
fn stats() -> Stats {
    let text = |path| fs::read_to_string(path).unwrap_or_default();
    let (meminfo, vmstat) = (text("/proc/meminfo"), text("/proc/vmstat"));
    let memory = |name: &str| field(&meminfo, name).map(|kib| kib << 10);
    let count = |name: &str| field(&vmstat, name);
    let pages = |name: &str| count(name).map(|pages| pages << 12);
    let stalls = ["allocstall_dma", "allocstall_dma32", "allocstall_normal"];
    let stalls = stalls
        .into_iter()
        .chain(["allocstall_movable"])
        .filter_map(count);
    let mut stats = Stats::default();
    for (tag, value) in [
        (Tag::SwapIn, pages("pswpin")),
        (Tag::SwapOut, pages("pswpout")),
        (Tag::MajorFaults, count("pgmajfault")),
        (Tag::MinorFaults, count("pgfault")),
        (Tag::FreeMemory, memory("MemFree:")),
        (Tag::TotalMemory, memory("MemTotal:")),
        (Tag::AvailableMemory, memory("MemAvailable:")),
        (Tag::DiskCaches, memory("Cached:")),
        (Tag::HugetlbAllocations, count("htlb_buddy_alloc_success")),
        (Tag::HugetlbFailures, count("htlb_buddy_alloc_fail")),
        (Tag::OomKills, count("oom_kill")),
        (Tag::AllocationStalls, stalls.reduce(|a, b| a + b)),
        (Tag::AsyncScanned, pages("pgscan_kswapd")),
        (Tag::DirectScanned, pages("pgscan_direct")),
        (Tag::AsyncReclaimed, pages("pgsteal_kswapd")),
        (Tag::DirectReclaimed, pages("pgsteal_direct")),
    ] {
        if let Some(value) = value {
            stats.set(tag, value);
        }
    }
    stats
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ram_ends_where_its_last_range_does() {
        let text = "00000000-00000fff : Reserved\n00001000-0009fbff : System RAM\n\
                    00100000-7ffdcfff : System RAM\n  01000000-01afffff : Kernel code\n\
                    b0000000-bfffffff : PCI ECAM 0000 [bus 00-ff]\n";
        assert_eq!(ram_end(text), Some(0x7ffd_d000));
        // What others than root see.
        assert_eq!(ram_end("00000000-00000000 : System RAM\n"), None);
        assert_eq!(ram_end(""), None);
    }

    #[test]
    fn fields_are_found_by_their_whole_name() {
        let text = "pgfault 12\npgmajfault 3\nMemFree:   44 kB\n";
        assert_eq!(field(text, "pgfault"), Some(12));
        assert_eq!(field(text, "pgmajfault"), Some(3));
        assert_eq!(field(text, "MemFree:"), Some(44));
        assert_eq!(field(text, "Mem"), None);
    }
}
