//! One command at a time, and its answer.
//!
//! # Protocol
//!
//! A command is sent when nothing is left over from the one before. Then lines are read until its
//! answer comes; interrupts on the way are noted. Both together take no longer than the patience. When
//! anything goes wrong but a refusal, an answer may still be on its way that would be taken for that
//! of the next command. So nothing is sent any more: the link is out of step for good.

use std::{
    io::{self, ErrorKind, Read as _, Write as _},
    os::unix::net::UnixStream,
    time::{Duration, Instant},
};

use crate::{
    error::{Error, shown},
    irq::{Irq, Lines},
    process::Process,
    wire::{self, Line},
};

/// The longest line that QEMU may send: more than the longest answer that is asked for.
const LONGEST: usize = 128 << 10;

/// The connection to a QEMU.
#[derive(Debug)]
pub(crate) struct Link {
    stream: UnixStream,
    /// Bytes that were received and are not used yet.
    received: Vec<u8>,
    /// Where in it the search for the end of a line goes on.
    searched: usize,
    pub(crate) lines: Lines,
    in_step: bool,
    /// Last, so that the connection is closed first.
    pub(crate) process: Option<Process>,
}

/// Why no line was read.
enum Broken {
    Closed,
    TimedOut,
    TooLong,
    Io(io::Error),
}

impl From<io::Error> for Broken {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            ErrorKind::WouldBlock | ErrorKind::TimedOut => Self::TimedOut,
            ErrorKind::BrokenPipe | ErrorKind::ConnectionReset => Self::Closed,
            _ => Self::Io(error),
        }
    }
}

impl Link {
    pub(crate) const fn new(stream: UnixStream, process: Option<Process>) -> Self {
        Self {
            stream,
            received: Vec::new(),
            searched: 0,
            lines: Lines::new(),
            in_step: true,
            process,
        }
    }

    /// Sends a command; yields what its answer says after `OK`.
    pub(crate) fn command(&mut self, command: &str, patience: Duration) -> Result<String, Error> {
        if command.contains(['\n', '\0']) {
            let command = shown(command);
            return Err(Error::Command { command });
        }
        if !self.in_step {
            let command = shown(command);
            return Err(Error::OutOfStep { command });
        }
        let deadline = Instant::now() + patience;
        self.in_step = false;
        self.hear_rest()?;
        let failed = |link: &mut Self, broken| link.failed(command, patience, broken);
        if let Err(broken) = self.send(command, deadline) {
            return Err(failed(self, broken));
        }
        loop {
            let text = match self.line(deadline) {
                Ok(text) => text,
                Err(broken) => return Err(failed(self, broken)),
            };
            match wire::line(&text) {
                Some(Line::Done(answer)) => {
                    self.in_step = true;
                    return Ok(answer.to_owned());
                }
                Some(Line::Refused(answer)) => {
                    self.in_step = true;
                    return Err(Error::Refused {
                        command: shown(command),
                        answer: answer.to_owned(),
                    });
                }
                Some(Line::Irq(irq)) => self.lines.note(irq),
                None => return Err(garbled(command, &text)),
            }
        }
    }

    /// The next change of a line, waiting for it if there is none yet.
    pub(crate) fn wait_irq(&mut self, patience: Duration) -> Result<Option<Irq>, Error> {
        const WAITING: &str = "waiting for an interrupt";
        if let Some(irq) = self.lines.take() {
            return Ok(Some(irq));
        }
        if !self.in_step {
            let command = WAITING.into();
            return Err(Error::OutOfStep { command });
        }
        let text = match self.line(Instant::now() + patience) {
            Ok(text) => text,
            // Half a line may have come; it stays.
            Err(Broken::TimedOut) => return Ok(None),
            Err(broken) => {
                self.in_step = false;
                return Err(self.failed(WAITING, patience, broken));
            }
        };
        let Some(Line::Irq(irq)) = wire::line(&text) else {
            self.in_step = false;
            return Err(garbled("", &text));
        };
        self.lines.note(irq);
        Ok(self.lines.take())
    }

    /// Handles the lines since the last answer: interrupts, and nothing else.
    fn hear_rest(&mut self) -> Result<(), Error> {
        while let Some(text) = self.received_line() {
            let Some(Line::Irq(irq)) = wire::line(&text) else {
                return Err(garbled("", &text));
            };
            self.lines.note(irq);
        }
        Ok(())
    }

    fn send(&mut self, command: &str, deadline: Instant) -> Result<(), Broken> {
        let line = format!("{command}\n");
        let mut rest = line.as_bytes();
        while !rest.is_empty() {
            self.stream.set_write_timeout(Some(left(deadline)?))?;
            match self.stream.write(rest) {
                Ok(count) => rest = &rest[count..],
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// The next line, without its end.
    fn line(&mut self, deadline: Instant) -> Result<String, Broken> {
        let mut bytes = [0; 16 << 10];
        loop {
            if let Some(line) = self.received_line() {
                return Ok(line);
            }
            if self.received.len() > LONGEST {
                return Err(Broken::TooLong);
            }
            self.stream.set_read_timeout(Some(left(deadline)?))?;
            match self.stream.read(&mut bytes) {
                Ok(0) => return Err(Broken::Closed),
                Ok(count) => self.received.extend(&bytes[..count]),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// A line that was received already.
    fn received_line(&mut self) -> Option<String> {
        let rest = &self.received[self.searched..];
        let Some(end) = rest.iter().position(|&byte| byte == b'\n') else {
            self.searched = self.received.len();
            return None;
        };
        let line: Vec<u8> = self.received.drain(..=self.searched + end).collect();
        self.searched = 0;
        let line = String::from_utf8_lossy(&line);
        Some(line.trim_end_matches(['\n', '\r']).to_owned())
    }

    fn failed(&mut self, command: &str, after: Duration, broken: Broken) -> Error {
        let command = shown(command);
        match broken {
            Broken::TimedOut => Error::TimedOut { command, after },
            Broken::Io(source) => Error::Io { command, source },
            Broken::TooLong => garbled(
                &command,
                &String::from_utf8_lossy(&self.received[..LONGEST]),
            ),
            Broken::Closed => {
                let status = self.process.as_mut().and_then(Process::ended);
                let said = self.process.as_ref().map(Process::said);
                Error::Died {
                    command,
                    status,
                    said: said.unwrap_or_default(),
                }
            }
        }
    }
}

fn garbled(command: &str, answer: &str) -> Error {
    Error::Garbled {
        command: shown(command),
        answer: shown(answer),
    }
}

/// The time that is left, and is not nothing.
fn left(deadline: Instant) -> Result<Duration, Broken> {
    match deadline.saturating_duration_since(Instant::now()) {
        Duration::ZERO => Err(Broken::TimedOut),
        left => Ok(left),
    }
}
