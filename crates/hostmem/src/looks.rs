//! Looks at the page map, by several threads where there is much to look at.
//!
//! One look at the entry of a huge page is one system call, and what it costs is the kernel's; so
//! is copying the entries of small pages. Only more processors make it faster. [`Looks`] reads a
//! stretch of pages of one size in *rounds*: it gives each helper a chunk of what follows, reads
//! the chunk before those itself, and then hands out the entries in order. A helper is a thread that
//! reads into a buffer which goes forth and back with it, so that memory is as fixed as without
//! helpers. They come when a stretch is long enough to be worth them and go when this is dropped.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, JoinHandle};

use runs::Span;

const PAGE: u64 = 4096;
/// Bytes of an entry.
const ENTRY: usize = 8;
/// Entries of 4 KiB pages in a chunk: 16 KiB, a tenth of a millisecond.
const SMALL: u64 = 2048;
/// The same of huge pages: each is a system call.
const HUGE: u64 = 128;
/// Chunks that are worth a helper.
const ENOUGH: u64 = 8;
/// More helpers wait for each other more than they read.
const MOST: usize = 3;

/// The entries of a stretch, in order.
pub(crate) struct Looks {
    file: Arc<File>,
    /// What is handed out now, and how many bytes of it are.
    chunk: Chunk,
    used: usize,
    helpers: Vec<Helper>,
    /// Helpers that have a chunk of this round, which come next: from this one to that.
    busy: (usize, usize),
}

/// Looks at some pages that follow each other.
struct Chunk {
    /// An address in the first of the pages.
    first: u64,
    /// Bytes of a page.
    page: u64,
    count: u64,
    entries: Box<[u8]>,
    read: io::Result<()>,
}

impl Chunk {
    fn new() -> Self {
        Self::over(vec![0; SMALL as usize * ENTRY].into())
    }

    fn over(entries: Box<[u8]>) -> Self {
        Self {
            first: 0,
            page: PAGE,
            count: 0,
            entries,
            read: Ok(()),
        }
    }

    /// Takes as much of `rest`, addresses of pages of `page` bytes, as a chunk may have.
    fn take(&mut self, rest: &mut Span, page: u64) {
        let most = if page > PAGE { HUGE } else { SMALL };
        // The first may lie inside of its page.
        let begin = rest.start & !(page - 1);
        let pages = (rest.last() - begin) / page + 1;
        (self.first, self.page, self.count) = (rest.start, page, pages.min(most));
        let end = (begin + self.count * page).min(rest.start + rest.len);
        *rest = Span::new(end, rest.len - (end - rest.start));
    }

    fn filled(&self) -> usize {
        self.count as usize * ENTRY
    }

    fn read(&mut self, file: &File) {
        let filled = self.filled();
        let entries = &mut self.entries[..filled];
        self.read = if self.page > PAGE {
            let begin = self.first & !(self.page - 1);
            // Any entry of a huge page will do.
            (0..)
                .zip(entries.chunks_exact_mut(ENTRY))
                .try_for_each(|(n, entry)| {
                    file.read_exact_at(entry, (begin + n * self.page).max(self.first) / PAGE * 8)
                })
        } else {
            file.read_exact_at(entries, self.first / PAGE * 8)
        };
    }
}

/// A thread that reads chunks.
struct Helper {
    /// `None` when it shall end.
    todo: Option<Sender<Chunk>>,
    done: Receiver<Chunk>,
    thread: Option<JoinHandle<()>>,
    /// What it reads into, when it does not.
    spare: Chunk,
}

impl Helper {
    fn new(file: Arc<File>) -> io::Result<Self> {
        let (todo, chunks) = channel::<Chunk>();
        let (finished, done) = channel();
        let work = move || {
            for mut chunk in chunks {
                chunk.read(&file);
                if finished.send(chunk).is_err() {
                    return;
                }
            }
        };
        let thread = thread::Builder::new().name("page map".into()).spawn(work)?;
        Ok(Self {
            todo: Some(todo),
            done,
            thread: Some(thread),
            spare: Chunk::new(),
        })
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        self.todo = None;
        if let Some(thread) = self.thread.take() {
            // It does not panic, and if it did, nobody would be left to hear of it.
            let _ = thread.join();
        }
    }
}

impl Looks {
    pub(crate) fn new(file: File) -> Self {
        Self {
            file: Arc::new(file),
            chunk: Chunk::new(),
            used: 0,
            helpers: Vec::new(),
            busy: (0, 0),
        }
    }

    /// The page map.
    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    /// The entry of the next page of `rest`: addresses of pages of `page` bytes, up to the end of
    /// their stretch. Where a stretch ends, the entries that were read ahead end as well.
    ///
    /// # Errors
    ///
    /// When the entry cannot be read, with how many were asked for.
    #[inline]
    pub(crate) fn next(&mut self, rest: Span, page: u64) -> Result<u64, (u64, io::Error)> {
        if self.used == self.chunk.filled() {
            self.refill(rest, page)?;
        }
        let entry = self.chunk.entries.get(self.used..);
        let entry = entry.and_then(<[u8]>::first_chunk);
        self.used += ENTRY;
        Ok(entry.map_or(0, |entry| u64::from_ne_bytes(*entry)))
    }

    fn refill(&mut self, mut rest: Span, page: u64) -> Result<(), (u64, io::Error)> {
        self.used = 0;
        let (next, end) = self.busy;
        if let Some(helper) = self.helpers.get_mut(next).filter(|_| next < end) {
            self.busy.0 += 1;
            match helper.done.recv() {
                Ok(read) => helper.spare = std::mem::replace(&mut self.chunk, read),
                // It is gone; nobody else has what it was to read.
                Err(_) => self.chunk.read = Err(io::ErrorKind::BrokenPipe.into()),
            }
        } else {
            self.begin_round(&mut rest, page);
        }
        let read = std::mem::replace(&mut self.chunk.read, Ok(()));
        read.map_err(|error| (self.chunk.count, error))
    }

    /// Reads a chunk, and has the helpers read those behind it.
    fn begin_round(&mut self, rest: &mut Span, page: u64) {
        self.chunk.take(rest, page);
        if rest.len / page >= ENOUGH * self.chunk.count && self.helpers.is_empty() {
            self.hire();
        }
        let mut busy = 0;
        for helper in &mut self.helpers {
            let Some(todo) = helper.todo.as_ref().filter(|_| !rest.is_empty()) else {
                break;
            };
            let mut chunk = std::mem::replace(&mut helper.spare, Chunk::over(Box::default()));
            chunk.take(rest, page);
            if todo.send(chunk).is_err() {
                break;
            }
            busy += 1;
        }
        self.busy = (0, busy);
        self.chunk.read(&self.file);
    }

    /// Gets helpers for the other processors, as far as the system lets us have them.
    fn hire(&mut self) {
        let others = thread::available_parallelism().map_or(0, |all| all.get() - 1);
        for _ in 0..others.min(MOST) {
            match Helper::new(Arc::clone(&self.file)) {
                Ok(helper) => self.helpers.push(helper),
                Err(_) => break,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering};

    const MIB: u64 = 1 << 20;

    /// A file that looks like a page map of `pages` pages, in which each entry is its number.
    fn page_map(pages: u64) -> Looks {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("dmaspace-looks-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let entries: Vec<u8> = (0..pages).flat_map(u64::to_ne_bytes).collect();
        std::fs::write(&path, entries).unwrap();
        let file = File::open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        Looks::new(file)
    }

    /// Goes through `stretch` as whoever maps it, and looks at each entry.
    fn walk(looks: &mut Looks, stretch: Span, page: u64) {
        let mut at = stretch.start;
        let end = stretch.start + stretch.len;
        while at < end {
            let entry = looks.next(Span::new(at, end - at), page).unwrap();
            // Any entry of the page will do.
            assert_eq!(entry / (page / PAGE), at / page, "at {at:#x}");
            at = (at / page + 1) * page;
        }
    }

    #[test]
    fn every_entry_comes_once_and_in_order_whoever_read_it() {
        let mut looks = page_map(2 << 20);
        // Few, many, a whole number of rounds and not, in small and huge pages.
        let chunk = HUGE * 2 * MIB;
        for (start, len, page) in [
            (0, PAGE, PAGE),
            (7 * PAGE, 3 * SMALL * PAGE, PAGE),
            (MIB, 2 * MIB, 2 * MIB),
            (5 * PAGE, (33 * SMALL + 1) * PAGE, PAGE),
            (3 * MIB + PAGE, 11 * chunk, 2 * MIB),
            (1 << 30, 20 * chunk, 2 * MIB),
            (1 << 30, 12 * SMALL * PAGE - PAGE, PAGE),
        ] {
            walk(&mut looks, Span::new(start, len), page);
        }
        let others = thread::available_parallelism().unwrap().get() - 1;
        assert_eq!(looks.helpers.len(), others.min(MOST));
    }

    #[test]
    fn a_failure_comes_where_it_is_and_what_was_before_it_comes_before() {
        let there = 15 * SMALL + 100;
        let mut looks = page_map(there);
        let end = 40 * SMALL * PAGE;
        let mut at = 0;
        let (asked, error) = loop {
            match looks.next(Span::new(at, end - at), PAGE) {
                Ok(entry) => assert_eq!(entry, at / PAGE),
                Err(error) => break error,
            }
            at += PAGE;
        };
        assert_eq!(at / PAGE, 15 * SMALL, "the chunk that ends too early");
        assert_eq!((asked, error.kind()), (SMALL, io::ErrorKind::UnexpectedEof));
    }
}
