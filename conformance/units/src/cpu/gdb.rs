//! A client of QEMU's debugger stub.
//!
//! # Protocol
//!
//! One request at a time. A request is sent as a [packet](super::packet), again if the stub asks for it,
//! at most [`TRIES`] times; then its answer comes, which is asked for again as often when its sum is
//! wrong. All of it takes no longer than the patience. When anything goes wrong but a refusal, an answer
//! may still be on its way that would be taken for that of the next request, so nothing is sent any
//! more.
//!
//! The registers' numbers differ between processors: they are taken from the description that the stub
//! gives of its target, by name.
//!
//! Source: GDB, "Remote Serial Protocol", sections "General Query Packets" (`qRcmd`,
//! `qXfer:features:read`) and "Stop Reply Packets", "Packets" (`vCont`, `p`,
//! `P`); "Target Descriptions".

use std::{
    collections::BTreeMap,
    io::{self, ErrorKind, Read as _, Write as _},
    os::unix::net::UnixStream,
    path::Path,
    time::{Duration, Instant},
};

use super::{
    packet::{self, Damage, Piece},
    target,
};

#[cfg(test)]
mod tests;

/// How long the stub may take to answer: many times what it needs.
const PATIENCE: Duration = Duration::from_secs(30);

/// How often a packet is sent, and how often a damaged one is asked for.
const TRIES: u32 = 3;

/// Bytes of a target description in one answer.
const PART: usize = 0x800;

/// The most bytes of a target description.
const LONGEST_DESCRIPTION: usize = 1 << 20;

/// Why a request was not done.
///
/// After [`Refused`](Self::Refused), [`NoRegister`](Self::NoRegister) and
/// [`NotWritten`](Self::NotWritten) the stub can be asked further.
#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    /// No stub listens there, or the connection does not work.
    #[error("the debugger stub cannot be reached for `{request}`")]
    Io {
        /// The request.
        request: String,
        /// Why.
        source: io::Error,
    },
    /// QEMU has ended, or closed the connection.
    #[error("the debugger stub is gone before it answered `{request}`")]
    Closed {
        /// The request.
        request: String,
    },
    /// No answer came in time.
    #[error("no answer to `{request}` within {after:?}")]
    TimedOut {
        /// The request.
        request: String,
        /// How long was waited.
        after: Duration,
    },
    /// The answer is damaged, also when it was sent again.
    #[error("`{request}`: {damage}")]
    Damaged {
        /// The request.
        request: String,
        /// Its damage.
        damage: String,
    },
    /// The stub does not understand what is sent, also when it is sent again.
    #[error("the debugger stub wants `{request}` again and again")]
    NotUnderstood {
        /// The request.
        request: String,
    },
    /// The stub answers with an error, or with nothing, as it does to what it does not know.
    #[error("the debugger stub refuses `{request}`: `{answer}`")]
    Refused {
        /// The request.
        request: String,
        /// Its answer.
        answer: String,
    },
    /// The answer does not fit the request.
    #[error("`{answer}` is no answer to `{request}`")]
    Garbled {
        /// The request.
        request: String,
        /// The answer.
        answer: String,
    },
    /// The processor has no register of this name, as far as the stub tells.
    #[error("the processor has no register {0}")]
    NoRegister(String),
    /// A register does not hold what was written to it.
    #[error("{register} is {found:#x}, not {wanted:#x}")]
    NotWritten {
        /// The register.
        register: String,
        /// Value written.
        wanted: u64,
        /// Value found.
        found: u64,
    },
    /// An earlier request has failed.
    #[error("`{request}` is not sent, since an earlier request failed")]
    OutOfStep {
        /// The request.
        request: String,
    },
}

type Result<T> = std::result::Result<T, Error>;

/// The connection to a stub.
#[derive(Debug)]
pub(super) struct Stub {
    stream: UnixStream,
    received: Vec<u8>,
    /// Number and bytes of each register.
    registers: BTreeMap<String, target::Register>,
    in_step: bool,
    patience: Duration,
}

impl Stub {
    /// Connects to the stub that listens at `path`, and learns which registers there are.
    pub(super) fn connect(path: &Path) -> Result<Self> {
        let stream = UnixStream::connect(path).map_err(|source| Error::Io {
            request: path.display().to_string(),
            source,
        })?;
        Self::over(stream)
    }

    /// The stub at the other end of `stream`.
    pub(super) fn over(stream: UnixStream) -> Result<Self> {
        let mut stub = Self::unasked(stream);
        // Descriptions are sent only to a client that says that it knows them.
        stub.ask("qSupported:xmlRegisters=i386,arm,riscv")?;
        let whole = stub.description("target.xml")?;
        let parts = target::parts(&whole)
            .into_iter()
            .map(|name| stub.description(&name));
        let parts = parts.collect::<Result<Vec<_>>>()?;
        stub.registers = target::registers(&parts);
        Ok(stub)
    }

    /// A stub of which nothing is known.
    const fn unasked(stream: UnixStream) -> Self {
        Self {
            stream,
            received: Vec::new(),
            registers: BTreeMap::new(),
            in_step: true,
            patience: PATIENCE,
        }
    }

    /// Value of a register.
    pub(super) fn register(&mut self, name: &str) -> Result<u64> {
        let register = self.find(name)?;
        let request = format!("p{:x}", register.number);
        let answer = self.ask(&request)?;
        let bytes = packet::unhex(&answer).filter(|bytes| bytes.len() == register.bytes);
        match bytes {
            Some(bytes) => Ok(target::value(&bytes)),
            None => Err(garbled(&request, &answer)),
        }
    }

    /// Writes a register, and makes sure that it holds what was written: the stub says nothing when it
    /// does not write one.
    pub(super) fn set_register(&mut self, name: &str, value: u64) -> Result<()> {
        let register = self.find(name)?;
        let bytes = value.to_le_bytes();
        let bytes = bytes.get(..register.bytes).unwrap_or(&bytes);
        let request = format!("P{:x}={}", register.number, packet::hex(bytes));
        self.order(&request)?;
        let found = self.register(name)?;
        if found != value {
            return Err(Error::NotWritten {
                register: name.into(),
                wanted: value,
                found,
            });
        }
        Ok(())
    }

    /// Has the first processor do one instruction; others stand still.
    pub(super) fn step(&mut self) -> Result<()> {
        const STEP: &str = "vCont;s:1";
        let answer = self.ask(STEP)?;
        // It stopped by itself (S, T), and did not end.
        if !matches!(answer.first(), Some(b'S' | b'T')) {
            return Err(garbled(STEP, &answer));
        }
        Ok(())
    }

    /// Has QEMU's monitor do a command, and yields what it prints.
    pub(super) fn monitor(&mut self, command: &str) -> Result<String> {
        let request = format!("qRcmd,{}", packet::hex(command.as_bytes()));
        let mut printed = Vec::new();
        let mut answer = self.ask(&request)?;
        // Any number of pieces of what it prints, then the end.
        while answer != b"OK" {
            let piece = answer.strip_prefix(b"O").and_then(packet::unhex);
            let Some(piece) = piece.filter(|_| printed.len() <= packet::LONGEST) else {
                self.in_step = false;
                return Err(garbled(command, &answer));
            };
            printed.extend(piece);
            let deadline = Instant::now() + self.patience;
            answer = self.in_step(command, |stub| stub.answer(deadline))?;
        }
        Ok(String::from_utf8_lossy(&printed).into_owned())
    }

    fn find(&self, name: &str) -> Result<target::Register> {
        let register = self.registers.get(name).copied();
        register.ok_or_else(|| Error::NoRegister(name.into()))
    }

    /// A file of the description of the target.
    fn description(&mut self, name: &str) -> Result<String> {
        let mut text = Vec::new();
        loop {
            let request = format!("qXfer:features:read:{name}:{:x},{PART:x}", text.len());
            let answer = self.ask(&request)?;
            let (last, part) = match answer.split_first() {
                Some((b'm', part)) if !part.is_empty() => (false, part),
                Some((b'l', part)) => (true, part),
                _ => return Err(garbled(&request, &answer)),
            };
            text.extend(part);
            if last {
                return Ok(String::from_utf8_lossy(&text).into_owned());
            }
            if text.len() > LONGEST_DESCRIPTION {
                return Err(garbled(&request, b"a description without an end"));
            }
        }
    }

    /// A request that is done or not.
    fn order(&mut self, request: &str) -> Result<()> {
        let answer = self.ask(request)?;
        if answer != b"OK" {
            return Err(garbled(request, &answer));
        }
        Ok(())
    }

    /// A request and the data of its answer.
    fn ask(&mut self, request: &str) -> Result<Vec<u8>> {
        let deadline = Instant::now() + self.patience;
        let answer = self.in_step(request, |stub| {
            stub.send(request, deadline)?;
            stub.answer(deadline)
        })?;
        if answer.is_empty() || (answer.len() == 3 && answer[0] == b'E') {
            return Err(Error::Refused {
                request: shown(request.as_bytes()),
                answer: shown(&answer),
            });
        }
        Ok(answer)
    }

    /// Does what leaves the connection out of step when it fails.
    fn in_step<T>(
        &mut self,
        request: &str,
        exchange: impl FnOnce(&mut Self) -> std::result::Result<T, Broken>,
    ) -> Result<T> {
        if !self.in_step {
            let request = shown(request.as_bytes());
            return Err(Error::OutOfStep { request });
        }
        self.in_step = false;
        let done = exchange(self).map_err(|broken| broken.of(request, self.patience))?;
        self.in_step = true;
        Ok(done)
    }

    /// Sends a packet until it is understood.
    fn send(&mut self, data: &str, deadline: Instant) -> std::result::Result<(), Broken> {
        let bytes = packet::encode(data.as_bytes());
        for _ in 0..TRIES {
            self.write(&bytes, deadline)?;
            match self.piece(deadline)? {
                Ok(Piece::Acknowledged) => return Ok(()),
                Ok(Piece::Again) => {}
                Ok(Piece::Packet(data)) => return Err(Broken::Unasked(data)),
                Err(damage) => return Err(Broken::Damaged(damage)),
            }
        }
        Err(Broken::NotUnderstood)
    }

    /// The data of the next packet, which is acknowledged.
    fn answer(&mut self, deadline: Instant) -> std::result::Result<Vec<u8>, Broken> {
        let mut tries = 0;
        loop {
            match self.piece(deadline)? {
                Ok(Piece::Packet(data)) => {
                    self.write(b"+", deadline)?;
                    return Ok(data);
                }
                Ok(_) => {}
                Err(damage) => {
                    tries += 1;
                    if tries == TRIES {
                        return Err(Broken::Damaged(damage));
                    }
                    self.write(b"-", deadline)?;
                }
            }
        }
    }

    fn piece(
        &mut self,
        deadline: Instant,
    ) -> std::result::Result<std::result::Result<Piece, Damage>, Broken> {
        let mut bytes = [0; 8 << 10];
        loop {
            if let Some(piece) = packet::take(&mut self.received) {
                return Ok(piece);
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

    fn write(&mut self, mut rest: &[u8], deadline: Instant) -> std::result::Result<(), Broken> {
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
}

/// Why there is no answer.
enum Broken {
    Closed,
    TimedOut,
    Damaged(Damage),
    NotUnderstood,
    Unasked(Vec<u8>),
    Io(io::Error),
}

impl Broken {
    fn of(self, request: &str, after: Duration) -> Error {
        let shown = shown(request.as_bytes());
        match self {
            Self::Closed => Error::Closed { request: shown },
            Self::TimedOut => Error::TimedOut {
                request: shown,
                after,
            },
            Self::Damaged(damage) => Error::Damaged {
                request: shown,
                damage: damage.to_string(),
            },
            Self::NotUnderstood => Error::NotUnderstood { request: shown },
            Self::Unasked(data) => garbled(request, &data),
            Self::Io(source) => Error::Io {
                request: shown,
                source,
            },
        }
    }
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

/// The time that is left, and is not nothing.
fn left(deadline: Instant) -> std::result::Result<Duration, Broken> {
    match deadline.saturating_duration_since(Instant::now()) {
        Duration::ZERO => Err(Broken::TimedOut),
        left => Ok(left),
    }
}

fn garbled(request: &str, answer: &[u8]) -> Error {
    Error::Garbled {
        request: shown(request.as_bytes()),
        answer: shown(answer),
    }
}

/// So much of a request or an answer as an error shows.
fn shown(bytes: &[u8]) -> String {
    const MOST: usize = 80;
    let end = bytes.len().min(MOST);
    bytes[..end].escape_ascii().to_string()
}
