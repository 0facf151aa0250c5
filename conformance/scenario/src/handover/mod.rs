//! The second owner: a process that takes the address space over, goes on with it, and ends it or hands it back.
//!
//! Tables and memory are in memory files, which the second process opens through `/proc`. The units stay
//! where they are, with their devices, as hardware would: the second process reaches them by asking.
//!
//! # Protocol
//!
//! Lines of words. The second process asks, one line behind an `@`, and the first one answers with one line,
//! `ok …` or `error …`; lines without an `@` are not part of it. First the second process learns what it
//! takes over (`item`, answered until `end`), tells which frames it has pinned (`run`), and that it has
//! adopted everything (`adopted`). The first one gives up, and answers, perhaps with the hole that is to be cut.
//! From then on the second process is the owner: it asks units (`invalidate`, `detach`), and says what it is about
//! to do (`opening`, `opened`, `closing`, `closed`), so that devices know what to expect. The answer to `closed` says
//! whether it hands everything `back`; otherwise it ends the address space (`ending`). What it has then is `left`.
//!
//! # Trust
//!
//! Each process is what the other was started by or has started, with the same rights. Still, nothing that
//! one says makes the other panic or take memory without an end: lines, items and files are bounded, tables
//! are looked at before they are taken over, and memory files must be sealed. What the first one keeps for
//! the frames of the second one (`run`) grows with what that says, and with nothing else.

mod first;
mod second;

use std::io::{self, BufRead, Read as _};
use std::num::ParseIntError;

use std::sync::Arc;

use hostmem::Mapping;
use ioas::{Handover, HostTables, MappedStorage, TakenDomain};
use iommu::{DeviceId, Unit};
use iopt::{AnyTable, ErasableMemory, Takeover};
use runs::{Pa, Span};

pub use first::{Gone, Left, Second};
pub use second::succeed;

/// The domains of a handover over `files` with their first addresses, for devices of `unit`; and the tables of each
/// file, as `wrap` makes them of its memory.
fn adopt<M: ErasableMemory>(
    handover: &Handover,
    files: Vec<(Mapping, u64)>,
    unit: impl Fn(DeviceId) -> Option<Arc<dyn Unit>>,
    wrap: impl Fn(HostTables) -> M,
    again: impl Fn(&M) -> M,
) -> Result<(Vec<TakenDomain>, Vec<M>), SuccessorError> {
    let mut adopted = Vec::new();
    let mut all = Vec::new();
    for (file, base) in files {
        let inside = Span::<Pa>::checked(base, file.len());
        let mut takeover = Takeover::<_, 12>::new(MappedStorage::over(file), base)?;
        let mut here = Vec::new();
        for (number, domain) in handover.domains.iter().enumerate() {
            if inside.is_some_and(|inside| inside.contains(domain.root.address)) {
                let table = AnyTable::adopt(&mut takeover, domain.root, domain.page_sizes)?;
                here.push((number, domain, table));
            }
        }
        let tables = wrap(takeover.finish());
        for (number, domain, table) in here {
            let member = |device: &DeviceId| {
                let line = || format!("domain {} with {device}", domain.id.0);
                let unit = unit(*device).ok_or_else(|| SuccessorError::Unexpected { line: line() });
                Ok((unit?, *device))
            };
            let members = domain.devices.iter().map(member);
            let members = members.collect::<Result<Vec<_>, SuccessorError>>()?;
            adopted.push((number, (table.open(again(&tables))?, members)));
        }
        all.push(tables);
    }
    // In the order of the handover; where a root is in no file, one is missing, which is found out.
    adopted.sort_by_key(|(number, _)| *number);
    Ok((adopted.into_iter().map(|(_, taken)| taken).collect(), all))
}

/// How long the second process may be silent, in seconds: a safety net, since a loaded machine is ten times slower.
const PATIENCE: u64 = 600;

/// Why the address space did not go to a second process, or did not come to its end there.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SuccessorError {
    /// The second process cannot be started.
    #[error("cannot start {program:?}")]
    Start {
        /// The program.
        program: std::ffi::OsString,
        /// Why not.
        source: io::Error,
    },
    /// The other process cannot be talked to.
    #[error("cannot talk to the other process")]
    Talk(#[from] io::Error),
    /// The other process has ended too early.
    #[error("the other process has ended: {status}")]
    Ended {
        /// How; what is known of it.
        status: String,
    },
    /// The other process says nothing.
    #[error("the other process has said nothing for {seconds} s")]
    Silent {
        /// How long that was.
        seconds: u64,
    },
    /// The other process has said something else than what was to come.
    #[error("the other process says {line:?}")]
    Unexpected {
        /// What it has said.
        line: String,
    },
    /// The other process describes more than any world has.
    #[error("the other process describes more than {most} memories, domains and areas")]
    Items {
        /// How many may be.
        most: usize,
    },
    /// A number in a line is none.
    #[error("a number that the other process says")]
    Number(#[from] ParseIntError),
    /// The other process refuses.
    #[error("the other process says: {why}")]
    Refused {
        /// Its words.
        why: String,
    },
    /// A memory file cannot be opened.
    #[error("cannot open the memory file {path}")]
    Open {
        /// Its path.
        path: String,
        /// Why not.
        source: io::Error,
    },
    /// A memory file cannot be mapped.
    #[error("cannot map a memory file")]
    Mapping(#[from] hostmem::MappingError),
    /// Memory cannot be pinned at all.
    #[error("cannot pin memory")]
    Pinner(#[from] hostmem::PinnerError),
    /// The limits on locked memory are not known.
    #[error("cannot learn the limits on locked memory")]
    Limits(#[from] hostmem::LimitsError),
    /// The ledger cannot be had.
    #[error("cannot learn what pins are charged to")]
    Ledger(#[source] ioas::Cause),
    /// The tables' memory cannot be used.
    #[error("cannot use the memory of the tables")]
    Arena(#[from] iopt::ArenaError),
    /// The tables are damaged.
    #[error("cannot take the tables over")]
    Tables(#[from] iopt::AdoptError),
    /// The address space is not what was described.
    #[error("cannot take the address space over")]
    TakeOver(#[from] ioas::TakeOverError),
    /// The address space cannot be handed back.
    #[error("cannot hand the address space back")]
    HandBack(#[from] ioas::HandOverError),
    /// The frames that the second process has pinned are not those of the first.
    #[error("the second process has pinned other frames than the first")]
    OtherFrames,
    /// What is described as a handover is none.
    #[error("the description of the address space cannot be read")]
    Handover(#[from] ioas::DecodeError),
    /// A hole cannot be cut.
    #[error("cannot take a page out")]
    TakeOut(#[from] ioas::UnmapError),
    /// The hole cannot be closed.
    #[error("cannot put the page back")]
    PutBack(#[from] ioas::MapError),
    /// The address space does not come to an end.
    #[error("cannot close the address space")]
    Close(#[from] ioas::CloseError),
}

/// The longest line, bytes: an invalidation names its ranges, of which a gather keeps few.
const MOST_LINE: u64 = 1 << 20;

/// The next line, without its end; `None` when there is no further one.
fn read_line(input: &mut impl BufRead) -> io::Result<Option<String>> {
    let mut line = String::new();
    let read = input.take(MOST_LINE).read_line(&mut line)?;
    if read as u64 == MOST_LINE && !line.ends_with('\n') {
        let why = format!("a line has more than {MOST_LINE} bytes");
        return Err(io::Error::new(io::ErrorKind::InvalidData, why));
    }
    Ok((read > 0).then(|| line.trim_end().into()))
}

/// The most items of a description: a world has some dozens.
const MOST_ITEMS: usize = 1 << 16;

/// The words of a line.
fn words(line: &str) -> Vec<&str> {
    line.split_whitespace().collect()
}

/// The numbers among words, from `first` on.
fn numbers(words: &[&str], first: usize) -> Result<Vec<u64>, SuccessorError> {
    let words = words.iter().skip(first);
    Ok(words.map(|word| word.parse()).collect::<Result<_, _>>()?)
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn a_line_has_an_end() {
        let mut input: &[u8] = b"item\n\nlast";
        for expected in [Some("item"), Some(""), Some("last"), None, None] {
            assert_eq!(read_line(&mut input).unwrap().as_deref(), expected);
        }
        let endless = io::repeat(b'1');
        let error = read_line(&mut io::BufReader::new(endless)).unwrap_err();
        assert_eq!(error.to_string(), "a line has more than 1048576 bytes");
    }

    #[test]
    fn any_bytes_of_the_first_process_are_refused() {
        let said = [
            "",
            "ok",
            "ok end",
            "ok item",
            "nonsense",
            "ok memory",
            "ok memory /dev/null",
            "ok tables /dev/zero 0",
            "ok handover",
            "ok handover 00",
            "ok handover x",
            "error no",
            "\u{0}\u{7f}",
        ];
        let said = said.iter().map(|said| said.as_bytes());
        for said in said.chain([&b"\xff\n"[..]]) {
            let (mut first, second) = UnixStream::pair().unwrap();
            first.write_all(said).unwrap();
            drop(first);
            assert!(succeed(second, io::sink()).is_err(), "{said:?}");
        }
    }
}
