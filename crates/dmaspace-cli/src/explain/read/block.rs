//! Blocks of lines: the part of the reading that depends on no line before, and runs in a second thread.

use std::io::{self, BufRead, Read as _};
use std::ops::Range;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;

use super::super::line::{Message, message};
use super::words::interest;

/// The longest line; the rest of a longer one is passed over.
pub(super) const MOST_LINE: u64 = 1 << 20;
/// Bytes after which a block ends.
const BLOCK: usize = 1 << 17;
/// Blocks that are under way at the same time.
const UNDER_WAY: usize = 4;

/// Lines with their messages.
#[derive(Debug)]
pub(super) struct Block {
    text: String,
    lines: Vec<Cut>,
    /// Bytes of the input.
    pub(super) bytes: u64,
}

/// A line: its part of the block, and what its prefix told.
#[derive(Debug)]
struct Cut {
    raw: Range<usize>,
    text: Part,
    seconds: Option<f64>,
    since_boot: bool,
    logged: bool,
    weight: u64,
    interest: u8,
}

/// The text of a message.
#[derive(Debug)]
enum Part {
    /// A part of the block.
    Within(Range<usize>),
    /// Text without colours and escapes.
    Own(String),
}

impl Block {
    /// Takes lines apart.
    pub(super) fn new(bytes: Vec<u8>) -> Self {
        let length = bytes.len() as u64;
        let text = match String::from_utf8(bytes) {
            Ok(text) => text,
            Err(error) => String::from_utf8_lossy(error.as_bytes()).into_owned(),
        };
        let mut lines = Vec::with_capacity(text.len() / 64);
        let mut at = 0;
        for line in text.split_inclusive('\n') {
            let raw = line.trim_end_matches(['\n', '\r']);
            let found = message(raw);
            let start = (found.text.as_ptr() as usize).wrapping_sub(text.as_ptr() as usize);
            let within = start..start.wrapping_add(found.text.len());
            let interest = interest(&found.text);
            let part = match found.text {
                std::borrow::Cow::Borrowed(_) => Part::Within(within),
                std::borrow::Cow::Owned(own) => Part::Own(own),
            };
            lines.push(Cut {
                raw: at..at + raw.len(),
                text: part,
                seconds: found.seconds,
                since_boot: found.since_boot,
                logged: found.logged,
                weight: found.weight,
                interest,
            });
            at += line.len();
        }
        Self {
            text,
            lines,
            bytes: length,
        }
    }

    /// Each line: as it is, its message, and the readers that it is for.
    pub(super) fn lines(&self) -> impl Iterator<Item = (&str, Message<'_>, u8)> {
        self.lines.iter().map(|line| {
            let text = match &line.text {
                Part::Within(range) => self.text.get(range.clone()).unwrap_or_default(),
                Part::Own(own) => own,
            };
            let found = Message {
                text: text.into(),
                seconds: line.seconds,
                since_boot: line.since_boot,
                logged: line.logged,
                weight: line.weight,
            };
            let raw = self.text.get(line.raw.clone()).unwrap_or_default();
            (raw, found, line.interest)
        })
    }
}

/// Reads whole lines up to the size of a block; less at the end of the input.
fn next(text: &mut impl BufRead) -> (Vec<u8>, io::Result<()>) {
    let mut bytes = Vec::with_capacity(BLOCK + 4096);
    while bytes.len() < BLOCK {
        match text.by_ref().take(MOST_LINE).read_until(b'\n', &mut bytes) {
            Ok(0) => break,
            Ok(length) => {
                let cut = bytes.last() != Some(&b'\n') && length as u64 == MOST_LINE;
                if cut {
                    bytes.push(b'\n');
                    if let Err(error) = pass_over(text) {
                        return (bytes, Err(error));
                    }
                }
            }
            Err(error) => {
                let whole = bytes.iter().rposition(|byte| *byte == b'\n');
                bytes.truncate(whole.map_or(0, |end| end + 1));
                return (bytes, Err(error));
            }
        }
    }
    (bytes, Ok(()))
}

/// Reads up to the end of a line that is too long.
fn pass_over(text: &mut impl BufRead) -> io::Result<()> {
    loop {
        let part = text.fill_buf()?;
        let end = part.iter().position(|byte| *byte == b'\n');
        let length = part.len();
        match end {
            Some(end) => {
                text.consume(end + 1);
                return Ok(());
            }
            None if length == 0 => return Ok(()),
            None => text.consume(length),
        }
    }
}

/// Reads all lines block by block, in their order; those before an error, too.
pub(super) fn each(mut text: impl BufRead, mut take: impl FnMut(Block)) -> io::Result<()> {
    let (first, mut result) = next(&mut text);
    if first.len() < BLOCK {
        take(Block::new(first));
        return result;
    }
    thread::scope(|scope| {
        let (give, work) = sync_channel(UNDER_WAY);
        let (done, ready) = sync_channel(UNDER_WAY);
        let second = thread::Builder::new().spawn_scoped(scope, move || cut(&work, &done));
        let alone = second.is_err();
        let (mut bytes, mut under_way) = (first, 0);
        loop {
            let more = bytes.len() >= BLOCK && result.is_ok();
            if alone {
                take(Block::new(bytes));
            } else if give.send(bytes).is_err() {
                break;
            } else {
                under_way += 1;
            }
            if under_way == UNDER_WAY {
                let Ok(block) = ready.recv() else { break };
                take(block);
                under_way -= 1;
            }
            if !more {
                break;
            }
            (bytes, result) = next(&mut text);
        }
        drop(give);
        ready.into_iter().for_each(take);
        result
    })
}

/// The second thread.
fn cut(work: &Receiver<Vec<u8>>, done: &SyncSender<Block>) {
    for bytes in work {
        if done.send(Block::new(bytes)).is_err() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::words::UNIT;
    use super::*;

    fn lines(text: &[u8]) -> Vec<String> {
        let mut lines = Vec::new();
        let take = |block: Block| lines.extend(block.lines().map(|(raw, ..)| raw.to_owned()));
        each(text, take).unwrap();
        lines
    }

    #[test]
    fn lines_of_many_blocks_come_in_their_order() {
        let text: String = (0..200_000)
            .map(|n| format!("[ 1.5] line {n}\r\n"))
            .collect();
        let found = lines(text.as_bytes());
        assert_eq!(found.len(), 200_000);
        let wrong = (0..)
            .zip(&found)
            .find(|(n, line)| **line != format!("[ 1.5] line {n}"));
        assert_eq!(wrong, None);
    }

    #[test]
    fn lines_without_an_end_and_long_ones_are_lines() {
        assert_eq!(lines(b"a\n\nb"), ["a", "", "b"]);
        assert_eq!(lines(b""), [""; 0]);
        assert_eq!(lines(b"\xff\xc3\nb\n"), ["\u{fffd}\u{fffd}", "b"]);
        let mut long = vec![b'x'; 3 << 20];
        long.extend(b"\nb\n");
        let found = lines(&long);
        assert_eq!(
            found.iter().map(String::len).collect::<Vec<_>>(),
            [1 << 20, 1]
        );
    }

    #[test]
    fn a_line_that_an_error_cuts_is_left_out() {
        struct Broken;
        impl io::Read for Broken {
            fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
                Err(io::Error::other("damage"))
            }
        }
        for times in [1, 100_000] {
            let text = "a line\n".repeat(times) + "cut";
            let text = io::BufReader::new(text.as_bytes().chain(Broken));
            let mut count = 0;
            assert!(each(text, |block| count += block.lines().count()).is_err());
            assert_eq!(count, times);
        }
    }

    #[test]
    fn messages_are_parts_of_their_lines() {
        let text = "[    1.5] DMAR: x\n\x1b[31m[    2.5] DMAR: y\x1b[0m\n";
        let block = Block::new(text.as_bytes().to_vec());
        let found: Vec<_> = block
            .lines()
            .map(|(_, found, interest)| (found.text.into_owned(), found.seconds, interest & UNIT))
            .collect();
        let right = [("DMAR: x", Some(1.5)), ("DMAR: y", Some(2.5))];
        assert_eq!(
            found,
            right.map(|(text, time)| (text.to_owned(), time, UNIT))
        );
    }
}
