//! The side of the first owner: starts the second process, tells it what there is, and answers for the
//! units.

use std::ffi::OsString;
use std::io::{BufReader, IoSlice, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::thread;
use std::time::Duration;

use iommu::{DeviceId, DomainId, Unit};
use runs::Span;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

use super::super::devices::SoftUnit;
use super::super::frames::{Physical, PinNumber, write};
use super::{MOST_FILES, PATIENCE, SuccessorError, numbers, read_line, words};

/// Lines that wait to be read; whoever writes more waits, too.
const MOST_WAITING: usize = 64;

/// The hardware that both owners use: units, and the memory behind them.
#[derive(Clone, Copy)]
pub(in super::super) struct Devices<'a> {
    pub(in super::super) units: &'a [(SoftUnit, DeviceId)],
    pub(in super::super) physical: &'a Physical,
}

/// The second process. Dropped, it is ended, if it has not done that by itself.
#[derive(Debug)]
pub(in super::super) struct Second {
    child: Child,
    lines: Receiver<std::io::Result<String>>,
    input: UnixStream,
}

impl Drop for Second {
    fn drop(&mut self) {
        // Without an error where it has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Second {
    /// Starts `command`: a program and its arguments.
    pub(in super::super) fn start(command: &[OsString]) -> Result<Self, SuccessorError> {
        let program = command.first().cloned().unwrap_or_default();
        let refused = |source| SuccessorError::Start {
            program: program.clone(),
            source,
        };
        let (input, theirs) = UnixStream::pair()?;
        let mut child = Command::new(&program)
            .args(command.iter().skip(1))
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::piped())
            .spawn()
            .map_err(refused)?;
        let none = || refused(std::io::ErrorKind::BrokenPipe.into());
        let output = child.stdout.take().ok_or_else(none)?;
        let (told, lines) = sync_channel(MOST_WAITING);
        // From here on the second process is ended whatever fails.
        let second = Self {
            child,
            lines,
            input,
        };
        thread::Builder::new().spawn(move || {
            let mut output = BufReader::new(output);
            while let Some(line) = read_line(&mut output).transpose() {
                let broken = line.is_err();
                if told.send(line).is_err() || broken {
                    break;
                }
            }
        })?;
        Ok(second)
    }

    fn next(&mut self) -> Result<String, SuccessorError> {
        let seconds = PATIENCE;
        loop {
            match self.lines.recv_timeout(Duration::from_secs(seconds)) {
                Ok(line) => {
                    // What the program prints besides is nobody's business.
                    if let Some(line) = line?.strip_prefix('@') {
                        return Ok(line.into());
                    }
                }
                Err(RecvTimeoutError::Timeout) => return Err(SuccessorError::Silent { seconds }),
                Err(RecvTimeoutError::Disconnected) => {
                    let status = self.child.wait()?.to_string();
                    return Err(SuccessorError::Ended { status });
                }
            }
        }
    }

    /// Answers.
    pub(in super::super) fn answer(&mut self, text: &str) -> Result<(), SuccessorError> {
        writeln!(self.input, "{text}")?;
        Ok(self.input.flush()?)
    }

    /// Answers with each of `items`.
    pub(in super::super) fn describe(&mut self, items: &[String]) -> Result<(), SuccessorError> {
        for item in items {
            self.expect("item")?;
            self.answer(&format!("ok {item}"))?;
        }
        self.expect("item")?;
        self.answer("ok end")
    }

    /// Answers, with files that the second process may use from now on.
    pub(in super::super) fn answer_with(
        &mut self,
        text: &str,
        files: &[OwnedFd],
    ) -> Result<(), SuccessorError> {
        let files: Vec<_> = files.iter().map(|file| file.as_fd()).collect();
        let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_FILES))];
        let mut control = SendAncillaryBuffer::new(&mut room);
        if !control.push(SendAncillaryMessage::ScmRights(&files)) {
            return Err(std::io::Error::from(std::io::ErrorKind::ArgumentListTooLong).into());
        }
        let text = format!("{text}\n");
        let said = [IoSlice::new(text.as_bytes())];
        sendmsg(&self.input, &said, &mut control, SendFlags::empty())
            .map_err(std::io::Error::from)?;
        Ok(())
    }

    /// Waits until the second process says `word`, and returns the rest of the line.
    pub(in super::super) fn told(&mut self, word: &str) -> Result<String, SuccessorError> {
        let line = self.next()?;
        match line.strip_prefix(word) {
            Some(rest) if rest.is_empty() || rest.starts_with(' ') => Ok(rest.trim().into()),
            _ => Err(unexpected(line)),
        }
    }

    /// The same, where the rest are numbers.
    pub(in super::super) fn told_numbers(
        &mut self,
        word: &str,
    ) -> Result<Vec<u64>, SuccessorError> {
        let rest = self.told(word)?;
        numbers(&words(&rest), 0)
    }

    fn expect(&mut self, word: &str) -> Result<(), SuccessorError> {
        let line = self.next()?;
        match line == word {
            true => Ok(()),
            false => Err(unexpected(line)),
        }
    }

    /// Answers for units and frames, until the second process says `until`, whose other words are
    /// returned. That has no answer yet.
    pub(in super::super) fn serve(
        &mut self,
        devices: Devices<'_>,
        until: &str,
    ) -> Result<Vec<u64>, SuccessorError> {
        loop {
            let line = self.next()?;
            let found = words(&line);
            match found.first() {
                Some(&"failed") => {
                    let why = line.trim_start_matches("failed").trim().into();
                    return Err(SuccessorError::Refused { why });
                }
                Some(word) if *word == until => return numbers(&found, 1),
                _ => {
                    let done = devices.do_what(&line)?;
                    self.answer(&match done {
                        Ok(()) => "ok".into(),
                        Err(why) => format!("error {why}"),
                    })?;
                }
            }
        }
    }

    /// Waits until it has ended by itself.
    pub(in super::super) fn end(&mut self) -> Result<(), SuccessorError> {
        match self.next() {
            Err(SuccessorError::Ended { status }) if status == "exit status: 0" => Ok(()),
            Err(error) => Err(error),
            Ok(line) => Err(unexpected(line)),
        }
    }
}

fn unexpected(line: String) -> SuccessorError {
    match line.strip_prefix("failed ") {
        Some(why) => SuccessorError::Refused { why: why.into() },
        None => SuccessorError::Unexpected { line },
    }
}

impl Devices<'_> {
    /// What a unit, or the memory behind it, is asked for. The inner error is the unit's.
    fn do_what(self, line: &str) -> Result<Result<(), String>, SuccessorError> {
        let found = words(line);
        let numbers = numbers(&found, 1)?;
        let unit = |number: u64| self.units.get(number as usize);
        let done = match (found.first(), numbers.as_slice()) {
            (Some(&"run"), &[pin, memory, offset, start, len]) => {
                let run = Span::checked(start, len).ok_or_else(|| unexpected(line.into()))?;
                let mut theirs = write(self.physical.theirs());
                let added = theirs.add(PinNumber(pin), memory as usize, offset, run);
                added.map_err(|cause| cause.to_string())
            }
            (Some(&"gone"), &[pin, memory, start, len]) => {
                let part = Span::checked(start, len).ok_or_else(|| unexpected(line.into()))?;
                let mut theirs = write(self.physical.theirs());
                theirs.remove(PinNumber(pin), memory as usize, part);
                Ok(())
            }
            (Some(&"invalidate"), &[number, domain, levels, tables, ref ranges @ ..]) => {
                let Some((unit, _)) = unit(number) else {
                    return Err(unexpected(line.into()));
                };
                let (pairs, _) = ranges.as_chunks::<2>();
                let ranges = pairs.iter().map(|[at, len]| Span::checked(*at, *len));
                let ranges: Option<Vec<Span>> = ranges.collect();
                let ranges = ranges.ok_or_else(|| unexpected(line.into()))?;
                let domain = DomainId(domain as u32);
                let done = unit.invalidate_ranges(domain, &ranges, levels as u32, tables != 0);
                done.map_err(|cause| cause.to_string())
            }
            (Some(&"invalidate-domain"), &[number, domain]) => match unit(number) {
                Some((unit, _)) => {
                    let done = unit.invalidate_domain(DomainId(domain as u32));
                    done.map_err(|cause| cause.to_string())
                }
                None => return Err(unexpected(line.into())),
            },
            (Some(&"detach"), &[number]) => match unit(number) {
                Some((unit, device)) => unit.detach(*device).map_err(|cause| cause.to_string()),
                None => return Err(unexpected(line.into())),
            },
            _ => return Err(unexpected(line.into())),
        };
        Ok(done)
    }
}
