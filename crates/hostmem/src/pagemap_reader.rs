//! Reads the page map, by several threads where there is much to read.
//!
//! Reading the entry of a huge page is one system call, whose cost is the kernel's, as is the cost of
//! copying the entries of small pages. Only more processors make it faster. [`PagemapReader`] cuts a
//! stretch of pages of one size into *chunks* and returns their entries in order. In a long stretch the
//! calling thread and its helpers read chunks in turn: each has one chunk assigned ahead, and gets the
//! next one when that one is returned. Buffers move with the chunks, so helpers need no memory beyond
//! their first buffer. Helpers start when a stretch is long enough and stop when the reader is dropped.

use std::collections::VecDeque;
use std::fs::File;
use std::hint;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvError, Sender, TryRecvError, channel};
use std::thread::{self, JoinHandle};

use runs::{Span, Va};

const PAGE: u64 = 4096;
/// Bytes of an entry.
const ENTRY: usize = 8;
/// Entries of 4 KiB pages in a chunk: 32 KiB, an eighth of a millisecond.
const SMALL: u64 = 4096;
/// The same of huge pages: each is a system call.
const HUGE: u64 = 256;
/// Chunks that are worth a helper.
const ENOUGH: u64 = 8;
/// More helpers wait for each other more than they read.
const MOST: usize = 3;
/// Times to poll for a chunk before sleeping: some ten microseconds, which waking up takes longer.
const SPINS: u32 = 4000;

/// The entries of a stretch, in order.
pub(crate) struct PagemapReader {
    file: Arc<File>,
    /// The chunk that is handed out now, and how many bytes of it are.
    chunk: Chunk,
    used: usize,
    helpers: Vec<Helper>,
    /// Reader of each of the chunks that follow, in order.
    readers: VecDeque<ReadBy>,
    /// The part of the stretch behind those chunks.
    ahead: Span<Va>,
}

/// Reader of a chunk.
enum ReadBy {
    /// The thread that asks, from this address on, when it comes to it.
    Own(Span<Va>),
    /// A helper, by number; it is at it.
    Helper(usize),
}

/// Entries of pages that follow each other.
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

    /// Is to read `pages`, addresses of pages of `page` bytes.
    fn take(&mut self, pages: Span<Va>, page: u64) {
        let begin = pages.start & !(page - 1);
        (self.first, self.page) = (pages.start, page);
        self.count = (pages.last() - begin) / page + 1;
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

/// Pages of a chunk, at most.
const fn most(page: u64) -> u64 {
    if page > PAGE { HUGE } else { SMALL }
}

/// Cuts off as much as a chunk may have.
fn cut(rest: &mut Span<Va>, page: u64) -> Span<Va> {
    // The first may lie inside of its page.
    let begin = rest.start & !(page - 1);
    let len = (begin + most(page) * page - rest.start).min(rest.len);
    let pages = Span::new(rest.start, len);
    *rest = Span::new(rest.start + len, rest.len - len);
    pages
}

/// Waits for a chunk: awake at first, since it often comes soon.
fn receive(chunks: &Receiver<Chunk>) -> Result<Chunk, RecvError> {
    for _ in 0..SPINS {
        match chunks.try_recv() {
            Ok(chunk) => return Ok(chunk),
            Err(TryRecvError::Empty) => hint::spin_loop(),
            Err(TryRecvError::Disconnected) => return Err(RecvError),
        }
    }
    chunks.recv()
}

/// A thread that reads chunks.
struct Helper {
    /// `None` when it shall end.
    todo: Option<Sender<Chunk>>,
    done: Receiver<Chunk>,
    thread: Option<JoinHandle<()>>,
    /// Buffer of the next chunk, while it does not read.
    spare: Chunk,
}

impl Helper {
    fn new(file: Arc<File>) -> io::Result<Self> {
        let (todo, chunks) = channel::<Chunk>();
        let (finished, done) = channel();
        let work = move || {
            while let Ok(mut chunk) = receive(&chunks) {
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
            // It does not panic, and if it did, there is no caller left to report it to.
            let _ = thread.join();
        }
    }
}

impl PagemapReader {
    pub(crate) fn new(file: File) -> Self {
        Self {
            file: Arc::new(file),
            chunk: Chunk::new(),
            used: 0,
            helpers: Vec::new(),
            readers: VecDeque::new(),
            ahead: Span::default(),
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
    pub(crate) fn next(&mut self, rest: Span<Va>, page: u64) -> Result<u64, (u64, io::Error)> {
        if self.used == self.chunk.filled() {
            self.refill(rest, page)?;
        }
        let entry = self.chunk.entries.get(self.used..);
        let entry = entry.and_then(<[u8]>::first_chunk);
        self.used += ENTRY;
        Ok(entry.map_or(0, |entry| u64::from_ne_bytes(*entry)))
    }

    fn refill(&mut self, rest: Span<Va>, page: u64) -> Result<(), (u64, io::Error)> {
        self.used = 0;
        if self.readers.is_empty() {
            self.ahead = rest;
            self.begin(page);
        }
        match self.readers.pop_front() {
            Some(ReadBy::Own(pages)) => {
                self.assign_own(page);
                self.chunk.take(pages, page);
                self.chunk.read(&self.file);
            }
            Some(ReadBy::Helper(number)) => {
                let helper = &mut self.helpers[number];
                match receive(&helper.done) {
                    Ok(read) => helper.spare = std::mem::replace(&mut self.chunk, read),
                    // It is gone, and no other thread reads its chunk.
                    Err(_) => self.chunk.read = Err(io::ErrorKind::BrokenPipe.into()),
                }
                self.assign(number, page);
            }
            None => {}
        }
        let read = std::mem::replace(&mut self.chunk.read, Ok(()));
        read.map_err(|error| {
            // The next call begins anew where this one failed.
            self.readers.clear();
            self.helpers.clear();
            (std::mem::take(&mut self.chunk.count), error)
        })
    }

    /// Assigns a chunk to each thread.
    fn begin(&mut self, page: u64) {
        if self.ahead.len / page >= ENOUGH * most(page) && self.helpers.is_empty() {
            self.start_helpers();
        }
        self.assign_own(page);
        for number in 0..self.helpers.len() {
            self.assign(number, page);
        }
    }

    fn assign_own(&mut self, page: u64) {
        if !self.ahead.is_empty() {
            let pages = cut(&mut self.ahead, page);
            self.readers.push_back(ReadBy::Own(pages));
        }
    }

    fn assign(&mut self, number: usize, page: u64) {
        let helper = &mut self.helpers[number];
        let Some(todo) = helper.todo.as_ref().filter(|_| !self.ahead.is_empty()) else {
            return;
        };
        let mut chunk = std::mem::replace(&mut helper.spare, Chunk::over(Box::default()));
        chunk.take(cut(&mut self.ahead, page), page);
        // If it is gone, receiving its chunk fails.
        let _ = todo.send(chunk);
        self.readers.push_back(ReadBy::Helper(number));
    }

    /// Gets helpers for the other processors, as far as the system lets us have them.
    fn start_helpers(&mut self) {
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

    /// A file that reader like a page map of `pages` pages, in which each entry is its number.
    fn page_map(pages: u64) -> PagemapReader {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("dmaspace-pagemap-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let entries: Vec<u8> = (0..pages).flat_map(u64::to_ne_bytes).collect();
        std::fs::write(&path, entries).unwrap();
        let file = File::open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        PagemapReader::new(file)
    }

    /// Goes through `stretch` and checks each entry.
    fn walk(reader: &mut PagemapReader, stretch: Span<Va>, page: u64) {
        let mut at = stretch.start;
        let end = stretch.start + stretch.len;
        while at < end {
            let entry = reader.next(Span::new(at, end - at), page).unwrap();
            // Any entry of the page will do.
            assert_eq!(entry / (page / PAGE), at / page, "at {at:#x}");
            at = (at / page + 1) * page;
        }
    }

    #[test]
    fn every_entry_comes_once_and_in_order_whoever_read_it() {
        let mut reader = page_map(2 << 20);
        // Few, many, a whole number of rounds and not, in small and huge pages.
        let chunk = HUGE * 2 * MIB;
        for (start, len, page) in [
            (0, PAGE, PAGE),
            (7 * PAGE, 3 * SMALL * PAGE, PAGE),
            (MIB, 2 * MIB, 2 * MIB),
            (5 * PAGE, (33 * SMALL + 1) * PAGE, PAGE),
            (3 * MIB + PAGE, 11 * chunk, 2 * MIB),
            (1 << 30, 13 * chunk, 2 * MIB),
            (1 << 30, 12 * SMALL * PAGE - PAGE, PAGE),
        ] {
            walk(&mut reader, Span::new(start, len), page);
        }
        let others = thread::available_parallelism().unwrap().get() - 1;
        assert_eq!(reader.helpers.len(), others.min(MOST));
    }

    #[test]
    fn a_failure_comes_where_it_is_and_what_was_before_it_comes_before() {
        let there = 15 * SMALL + 100;
        let mut reader = page_map(there);
        let end = 40 * SMALL * PAGE;
        let mut at = 0;
        let (asked, error) = loop {
            match reader.next(Span::new(at, end - at), PAGE) {
                Ok(entry) => assert_eq!(entry, at / PAGE),
                Err(error) => break error,
            }
            at += PAGE;
        };
        assert_eq!(at / PAGE, 15 * SMALL, "the chunk that ends too early");
        assert_eq!((asked, error.kind()), (SMALL, io::ErrorKind::UnexpectedEof));
        // Asked again it says the same, and goes on from wherever it is asked.
        assert!(reader.next(Span::new(at, end - at), PAGE).is_err());
        walk(
            &mut reader,
            Span::new(7 * PAGE, there * PAGE - 7 * PAGE),
            PAGE,
        );
    }
}
