//! The pages of another process, without stopping it.
//!
//! `PAGEMAP_SCAN` gives the stretches of present pages, so that holes cost next to nothing; one
//! entry of `/proc/PID/pagemap` then gives the frame of a huge page, and one each those of small pages.
//! The process goes on meanwhile: each run is what was there at some time while it
//! was read. A process that ends leaves an empty page map.
//!
//! Source: Linux `Documentation/admin-guide/mm/pagemap.rst`.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use runs::{Run, Span, Va};

use crate::source::{ENTRY_FRAME, ENTRY_PRESENT};
use crate::stretches::{Pages, Stretches};

const PAGE: u64 = 4096;
/// Entries of small pages that are read at once: 32 KiB.
const BATCH: u64 = 4096;

/// The page map of a process.
#[derive(Debug)]
pub struct ProcessPages {
    pagemap: File,
}

/// Pages that follow each other, in the address space and, where frames are shown, in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageRun {
    /// The first address.
    pub address: u64,
    /// Bytes.
    pub len: u64,
    /// The physical address; `None` where the kernel hides it, which `CAP_SYS_ADMIN` lifts.
    pub pa: Option<u64>,
    /// The pages are mapped by entries of a higher level: huge pages.
    pub huge: bool,
}

impl PageRun {
    /// The run for a device that uses the process's own addresses.
    pub fn run(&self) -> Option<Run> {
        self.pa
            .map(|pa| Run::new(self.address, Span::new(pa, self.len)))
    }

    /// Takes `next` in, where it goes on here.
    fn join(&mut self, next: &Self) -> bool {
        let follows = |pa: Option<u64>| pa.map(|pa| pa.wrapping_add(self.len)) == next.pa;
        let joins = self.huge == next.huge
            && self.address.wrapping_add(self.len) == next.address
            && follows(self.pa);
        if joins {
            self.len += next.len;
        }
        joins
    }
}

impl ProcessPages {
    /// Opens the page map of the process `pid`.
    ///
    /// # Errors
    ///
    /// When there is no such process, or it is another user's (`CAP_SYS_PTRACE` lifts that).
    pub fn open(pid: u32) -> io::Result<Self> {
        File::open(format!("/proc/{pid}/pagemap")).map(|pagemap| Self { pagemap })
    }

    /// Calls `each` for the runs of pages that are there in `range`, in order. `huge` is the size of
    /// huge pages in it: 2 MiB, or what a pool gives.
    ///
    /// # Errors
    ///
    /// When the kernel has no `PAGEMAP_SCAN` (Linux has it since 6.7), or the page map cannot be read.
    pub fn for_each(
        &self,
        range: Span<Va>,
        huge: u64,
        mut each: impl FnMut(PageRun),
    ) -> io::Result<()> {
        let mut stretches = Stretches::of(range.start, Span::new(0, range.len));
        let mut open: Option<PageRun> = None;
        let mut entries = vec![0; BATCH as usize * 8];
        while let Some(stretch) = stretches.next(&self.pagemap)? {
            let span = Span::new(range.start + stretch.span.start, stretch.span.len);
            let page = match stretch.pages {
                Pages::Absent => continue,
                Pages::Small => PAGE,
                Pages::Huge => huge.max(PAGE),
            };
            self.runs(span, page, &mut entries, &mut |run| {
                if open.as_mut().is_some_and(|open| open.join(&run)) {
                    return;
                }
                if let Some(done) = open.replace(run) {
                    each(done);
                }
            })?;
        }
        open.into_iter().for_each(each);
        Ok(())
    }

    /// The pages of `page` bytes of a stretch.
    fn runs(
        &self,
        span: Span<Va>,
        page: u64,
        entries: &mut [u8],
        each: &mut impl FnMut(PageRun),
    ) -> io::Result<()> {
        let end = span.start + span.len;
        let mut at = span.start;
        while at < end {
            // Small pages many at a time; of a huge page any entry will do.
            let count = if page == PAGE {
                ((end - at) / PAGE).clamp(1, BATCH)
            } else {
                1
            };
            let bytes = entries.get_mut(..count as usize * 8).unwrap_or_default();
            let read = self.pagemap.read_at(bytes, at / PAGE * 8)?;
            if read < 8 {
                // The process has ended.
                return Ok(());
            }
            for entry in bytes.get(..read).unwrap_or_default().chunks_exact(8) {
                let entry = u64::from_ne_bytes(entry.try_into().unwrap_or_default());
                let next = ((at / page + 1) * page).min(end);
                let frame = entry & ENTRY_FRAME;
                if entry & ENTRY_PRESENT != 0 {
                    each(PageRun {
                        address: at,
                        len: next - at,
                        pa: (frame != 0).then(|| frame * PAGE),
                        huge: page > PAGE,
                    });
                }
                at = next;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backing::Backing;
    use crate::mapping::Mapping;
    use std::ops::ControlFlow;
    use std::sync::atomic::Ordering;

    fn runs(of: &Mapping) -> Vec<PageRun> {
        let pages = ProcessPages::open(std::process::id()).unwrap();
        let mut found = Vec::new();
        let range = Span::new(of.address(), of.len());
        pages
            .for_each(range, 2 << 20, |run| found.push(run))
            .unwrap();
        found
    }

    #[test]
    fn what_was_touched_is_there_and_nothing_else() {
        // 256 MiB, of which three pages are there.
        let memory = Mapping::new(Backing::Anon4K, 1 << 28, None).unwrap();
        assert_eq!(runs(&memory), []);
        let pages = [0, 5, 1 << 15];
        for page in pages {
            memory.cells()[page * 512].store(1, Ordering::Relaxed);
        }
        let found = runs(&memory);
        let addresses: Vec<_> = found.iter().map(|run| run.address).collect();
        assert_eq!(
            addresses,
            pages.map(|page| memory.address() + page as u64 * PAGE)
        );
        assert!(
            found.iter().all(|run| run.len == PAGE && !run.huge),
            "{found:?}"
        );
    }

    #[test]
    fn runs_are_contiguous_and_make_up_all() {
        let memory = Mapping::new(Backing::Anon4K, 8 << 20, None).unwrap();
        memory.populate(&mut |_| ControlFlow::Continue(())).unwrap();
        let found = runs(&memory);
        assert_eq!(found.iter().map(|run| run.len).sum::<u64>(), 8 << 20);
        for pair in found.windows(2) {
            let [one, next] = pair else { continue };
            assert_eq!(one.address + one.len, next.address);
            let joined = one.pa.is_some_and(|pa| next.pa == Some(pa + one.len));
            assert!(!joined, "{pair:?}");
        }
    }

    /// A page map in a file.
    fn page_map(entries: &[u64]) -> ProcessPages {
        let mut pagemap = tempfile::tempfile().unwrap();
        let bytes: Vec<u8> = entries
            .iter()
            .flat_map(|entry| entry.to_ne_bytes())
            .collect();
        std::io::Write::write_all(&mut pagemap, &bytes).unwrap();
        ProcessPages { pagemap }
    }

    #[test]
    fn a_stretch_that_begins_within_a_huge_page_ends_with_it() {
        const HUGE: u64 = 4 * PAGE;
        // Two huge pages, which do not follow each other in memory.
        let frames = [8, 9, 10, 11, 100, 101, 102, 103];
        let pages = page_map(&frames.map(|frame| ENTRY_PRESENT | frame));
        let mut found = Vec::new();
        let mut entries = vec![0; BATCH as usize * 8];
        let span = Span::new(PAGE, 6 * PAGE);
        pages
            .runs(span, HUGE, &mut entries, &mut |run| found.push(run))
            .unwrap();
        let run = |page: u64, pages: u64, frame: u64| PageRun {
            address: page * PAGE,
            len: pages * PAGE,
            pa: Some(frame * PAGE),
            huge: true,
        };
        assert_eq!(found, [run(1, 3, 9), run(4, 3, 100)]);
    }

    #[test]
    fn a_process_that_is_not_there_is_an_error() {
        // Above every limit on process numbers.
        assert!(ProcessPages::open(u32::MAX).is_err());
    }
}
