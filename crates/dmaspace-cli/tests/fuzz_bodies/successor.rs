//! The second process of a life, which takes over what the first one describes in lines and has in memory files.

use std::fmt::Write as _;
use std::io::{self, Write as _};
use std::net::Shutdown;
use std::os::fd::AsRawFd as _;
use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};

use dmaspace_cli::inside::succeed;
use hostmem::{Backing, Mapping};

use ioas::{HandedArea, HandedDomain, Handover, HostTables, MappedStorage};
use iommu::{DeviceId, DomainId};
use iopt::{AnyTable, FormatId, Prot, Root};
use runs::{PageSizes, Span};

use super::Bytes;

const PAGE: u64 = 4096;
/// The memory, where its frames begin, and where its page tables do.
const MEMORY: u64 = 16 * PAGE;
const FRAMES: u64 = 1 << 30;
const TABLES: u64 = 1 << 40;
const ARENA: u64 = 16 * PAGE;
/// Where the memory is mapped.
const IOVA: u64 = 1 << 20;

/// A memory file, and the path that another process finds it by.
fn file(bytes: u64) -> (Mapping, String) {
    let mapping = Mapping::new(Backing::Memfd, bytes, None).expect("there is memory");
    let fd = mapping.fd().map_or(-1, |fd| fd.as_raw_fd());
    (mapping, format!("/proc/self/fd/{fd}"))
}

/// The words of tables that map the memory, and where the root is.
fn tables() -> &'static (Vec<u64>, u64) {
    static TABLES_OF_ALL: OnceLock<(Vec<u64>, u64)> = OnceLock::new();
    TABLES_OF_ALL.get_or_init(|| {
        let mapping = Mapping::new(Backing::Memfd, ARENA, None).expect("there is memory");
        let arena = HostTables::new(MappedStorage::over(mapping), TABLES);
        let arena = Arc::new(arena.expect("it is an arena"));
        let sizes = PageSizes::from_bits(u64::MAX);
        let table = AnyTable::new(FormatId::VtdSs, 4, sizes, Arc::clone(&arena));
        let table = table.expect("there are such tables");
        let run = Span::new(FRAMES, MEMORY);
        table.map(IOVA, &[run], Prot::RW).expect("there is room");
        let cells = arena.storage().mapping().cells().iter();
        let words = cells.map(|cell| cell.load(Ordering::Relaxed)).collect();
        (words, table.root().address)
    })
}

/// Puts tables into the file, with some words that the input changes. Returns where the root is.
fn fill(file: &Mapping, bytes: &mut Bytes<'_>) -> u64 {
    let (words, root) = tables();
    for (cell, word) in file.cells().iter().zip(words) {
        cell.store(*word, Ordering::Relaxed);
    }
    for _ in 0..bytes.below(4) {
        // Where something is, mostly: at the beginning of a table.
        let (table, word) = (usize::from(bytes.u8() % 8), usize::from(bytes.u8()));
        if let Some(cell) = file.cells().get(table * 512 + word) {
            cell.fetch_xor(bytes.u64(), Ordering::Relaxed);
        }
    }
    *root
}

/// What is handed over: one domain and one area. `word N XOR` among the input's lines changes a word of it.
fn handover(root: u64, lines: &str) -> String {
    let mut handover = Handover::default();
    handover.domains.push(HandedDomain {
        id: DomainId(1),
        root: Root {
            format: FormatId::VtdSs,
            address: root,
            levels: 4,
        },
        page_sizes: PageSizes::from_bits(PAGE | 2 << 20 | 1 << 30),
        coherent: Some(false),
        devices: vec![DeviceId::pci(1, 0, 0)],
    });
    handover.areas.push(HandedArea {
        range: Span::new(IOVA, MEMORY),
        memory: 0,
        offset: 0,
        prot: Prot::RW,
        out: false,
        released: false,
        cut: [false; 2],
    });
    let mut bytes = handover.encode();
    for line in lines.lines() {
        let words: Vec<_> = line.split_whitespace().collect();
        if let ["word", nth, by] = words[..]
            && let (Ok(nth), Ok(by)) = (nth.parse::<usize>(), by.parse::<u64>())
            && let Some(word) = bytes.chunks_exact_mut(8).nth(nth)
        {
            for (byte, by) in word.iter_mut().zip(by.to_le_bytes()) {
                *byte ^= by;
            }
        }
    }
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The description of what there is, changed by the input; and then its own lines.
pub fn second(data: &[u8]) {
    let mut bytes = Bytes(data);
    let ((memory, path), (arena, tables_path)) = (file(MEMORY), file(ARENA));
    let root = fill(&arena, &mut bytes);
    let left_out = bytes.u8();
    let own = String::from_utf8_lossy(bytes.0);
    let all = [
        format!("memory {path} {FRAMES}"),
        format!("tables {tables_path} {TABLES}"),
        format!("handover {}", handover(root, &own)),
        "end".to_owned(),
    ];
    let mut lines = String::new();
    for (nr, line) in all.iter().enumerate() {
        if left_out >> nr & 1 == 0 {
            let _ = writeln!(lines, "ok {line}");
        }
    }
    // Files are ours: those of the machine are nobody's to be opened here.
    for line in own.lines() {
        let mut words: Vec<_> = line.split_whitespace().collect();
        for at in 1..words.len() {
            match words[at - 1] {
                "memory" => words[at] = &path,
                "tables" => words[at] = &tables_path,
                _ => {}
            }
        }
        let _ = writeln!(lines, "{}", words.join(" "));
    }
    // Units and the witness of pins agree to everything.
    lines += &"ok\n".repeat(64);
    let (mut first, second) = UnixStream::pair().expect("there are sockets");
    let telling = std::thread::spawn(move || {
        let _ = first.write_all(lines.as_bytes());
        let _ = first.shutdown(Shutdown::Write);
        first
    });
    let ended = succeed(second, io::sink());
    drop(telling.join());
    if data.is_empty() {
        ended.expect("a description that nobody has changed");
    }
    drop(memory);
}
