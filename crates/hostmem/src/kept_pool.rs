//! Pools of huge pages that are raised for a while, and put back also when this process is killed.
//!
//! [`RaisedPool`] puts its pages back when it is dropped, and a process that is killed drops nothing:
//! the pages would stay taken from the machine. So a program may name its *keeper* ([`keep_pools_by`]), a
//! command that calls [`keep_pool`], mostly itself. From then on a pool is raised by a process of its own,
//! which puts the pages back as soon as the socket between the two is closed, however that came about.
//! Pins, memory and mappings need no keeper: the kernel releases them with the process.
//!
//! The keeper stands in a process group of its own, so that what ends a whole group does not end it. When
//! the keeper is killed, this process restores the pool itself. When both are killed, the pool stays raised.
//!
//! # Protocol
//!
//! Lines of words. The keeper is asked `raise PAGE BYTES` (bytes of a page, bytes that are wanted) and
//! answers `@added PAGES`. At the end of its input it restores the pool and answers `@restored`. Instead
//! of either it answers `@refused WHY`. Before each write to the pool it sends `@write FROM TO` (pages), so
//! that this process can complete a write that the keeper did not live to report. Lines without an `@` are
//! ignored.

use std::error::Error;
use std::ffi::OsString;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::Shutdown;
use std::ops::ControlFlow;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::OnceLock;
use std::time::Duration;

use crate::{HugeSize, PoolError, PoolWrite, RaisedPool};

/// The longest line by which a keeper is asked, bytes: `raise`, a size of pages and 64 bits have 38.
const MOST_LINE: u64 = 128;

/// How often a stop is checked for while the kernel looks for pages.
const TICK: Duration = Duration::from_millis(20);

static KEEPER: OnceLock<Vec<OsString>> = OnceLock::new();

/// Names the command, a program and its arguments, that keeps the pools of this process. The first
/// one that is named stays. Without one, pools are raised by this process itself.
pub fn keep_pools_by(command: Vec<OsString>) {
    // A second call finds a keeper, and changes nothing.
    let _ = KEEPER.set(command);
}

/// Why a pool was not raised or not put back.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KeptPoolError {
    /// The pool cannot be had.
    #[error(transparent)]
    Pool(#[from] PoolError),
    /// The keeper cannot be started.
    #[error("cannot start {program:?}, which keeps the pool")]
    Start {
        /// The program.
        program: OsString,
        /// Why not.
        source: io::Error,
    },
    /// The other process cannot be talked to.
    #[error("cannot talk to the process at the other end of the pool's socket")]
    Talk(#[from] io::Error),
    /// The keeper has ended before it was asked to, or before it answered.
    #[error(
        "the process that keeps the pool of huge pages ended with {status}; this process has restored the pool"
    )]
    KeeperEnded {
        /// How it ended.
        status: ExitStatus,
    },
    /// The keeper has ended, and this process cannot restore the pool.
    #[error(
        "the process that keeps the pool of huge pages ended with {status}, and the pool stays raised"
    )]
    StaysRaised {
        /// How it ended.
        status: ExitStatus,
        /// Why the pool cannot be restored.
        source: PoolError,
    },
    /// The other process has sent something else than what was to come.
    #[error("the process at the other end of the pool's socket says {line:?}")]
    Unexpected {
        /// What it has said.
        line: String,
    },
    /// The keeper refuses.
    #[error("{why}")]
    Refused {
        /// Its words: mostly a [`PoolError`] with its causes.
        why: String,
    },
    /// The watcher wanted to stop. The keeper puts back what it has added.
    #[error("interrupted while huge pages were added")]
    Interrupted,
}

/// A pool that has been raised; put back when dropped, and with a keeper also when this process ends.
#[derive(Debug)]
#[must_use = "the pool is put back as soon as this is dropped"]
pub struct KeptPool(Raised);

#[derive(Debug)]
enum Raised {
    Here(RaisedPool),
    Kept(Kept),
}

impl KeptPool {
    /// As [`RaisedPool::raise`]. `on` is asked while that takes its time; [`ControlFlow::Break`] ends it.
    ///
    /// # Errors
    ///
    /// [`KeptPoolError`]; the pool is then as it was, or, when interrupted, will be in a moment.
    pub fn raise(
        size: HugeSize,
        bytes: u64,
        on: &mut dyn FnMut() -> ControlFlow<()>,
    ) -> Result<Self, KeptPoolError> {
        Ok(Self(match KEEPER.get() {
            None => Raised::Here(RaisedPool::raise(size, bytes)?),
            Some(keeper) => Raised::Kept(Kept::raise(keeper, size, bytes, on)?),
        }))
    }

    /// Pages that were added.
    pub const fn added(&self) -> u64 {
        match &self.0 {
            Raised::Here(pool) => pool.added(),
            Raised::Kept(kept) => kept.added,
        }
    }

    /// Puts the pool back: see [`RaisedPool::restore`].
    ///
    /// # Errors
    ///
    /// [`KeptPoolError`].
    pub fn restore(self) -> Result<(), KeptPoolError> {
        match self.0 {
            Raised::Here(pool) => Ok(pool.restore()?),
            Raised::Kept(kept) => kept.restore(),
        }
    }
}

/// This end of a keeper's socket.
#[derive(Debug)]
struct Kept {
    keeper: Child,
    socket: BufReader<UnixStream>,
    size: HugeSize,
    added: u64,
    /// The write to the pool that the keeper has announced and not reported.
    begun: Option<PoolWrite>,
    /// Nothing is to be waited for: the pool is restored, or the keeper will do it in a while.
    leave: bool,
}

impl Drop for Kept {
    fn drop(&mut self) {
        if !self.leave {
            if let Err(error) = self.settle() {
                tracing::error!(%error, "a pool of huge pages was not restored by its keeper");
            }
        }
    }
}

impl Kept {
    fn raise(
        command: &[OsString],
        size: HugeSize,
        bytes: u64,
        on: &mut dyn FnMut() -> ControlFlow<()>,
    ) -> Result<Self, KeptPoolError> {
        let (ours, theirs) = UnixStream::pair()?;
        ours.set_read_timeout(Some(TICK))?;
        let program = command.first().cloned().unwrap_or_default();
        let keeper = Command::new(&program)
            .args(command.iter().skip(1))
            .stdin(Stdio::from(OwnedFd::from(theirs.try_clone()?)))
            .stdout(Stdio::from(OwnedFd::from(theirs)))
            .process_group(0)
            .spawn()
            .map_err(|source| KeptPoolError::Start { program, source })?;
        let mut kept = Self {
            keeper,
            socket: BufReader::new(ours),
            size,
            added: 0,
            begun: None,
            leave: false,
        };
        let page = size.bytes();
        // Where the keeper has ended already, its end is what the answer says.
        let _ = writeln!(kept.socket.get_ref(), "raise {page} {bytes}");
        let answer = kept.answer(on)?;
        let added = answer.strip_prefix("added ").and_then(|n| n.parse().ok());
        kept.added = added.ok_or(KeptPoolError::Unexpected { line: answer })?;
        Ok(kept)
    }

    fn restore(mut self) -> Result<(), KeptPoolError> {
        self.settle()
    }

    /// Has the keeper restore the pool, and waits for its end.
    fn settle(&mut self) -> Result<(), KeptPoolError> {
        // Fails where the keeper has ended, which the answer says.
        let _ = self.socket.get_ref().shutdown(Shutdown::Write);
        let answer = self.answer(&mut || ControlFlow::Continue(()))?;
        self.end()?;
        match answer.as_str() {
            "restored" => Ok(()),
            _ => Err(KeptPoolError::Unexpected { line: answer }),
        }
    }

    /// Closes the socket and waits for the keeper's end.
    fn end(&mut self) -> io::Result<ExitStatus> {
        self.leave = true;
        // Fails where the keeper has closed its end.
        let _ = self.socket.get_ref().shutdown(Shutdown::Both);
        self.keeper.wait()
    }

    /// What the keeper says behind an `@`.
    fn answer(&mut self, on: &mut dyn FnMut() -> ControlFlow<()>) -> Result<String, KeptPoolError> {
        let mut line = String::new();
        loop {
            match self.socket.read_line(&mut line) {
                Err(error) if is_time_out(&error) => {
                    if on().is_break() {
                        self.leave = true;
                        return Err(KeptPoolError::Interrupted);
                    }
                    // What has come of the line stays in it.
                    continue;
                }
                // A keeper that ended with input unread resets the connection.
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => {
                    return Err(self.ended());
                }
                Err(error) => return Err(error.into()),
                Ok(0) => return Err(self.ended()),
                Ok(_) => {}
            }
            let words = line.trim_end().strip_prefix('@');
            if let Some(write) = words.and_then(announced) {
                self.begun = Some(write);
            } else if let Some(words) = words {
                self.begun = None;
                return match words.strip_prefix("refused ") {
                    Some(why) => {
                        self.end()?;
                        Err(KeptPoolError::Refused { why: why.into() })
                    }
                    None => Ok(words.into()),
                };
            }
            line.clear();
        }
    }

    /// The keeper has ended without an answer: restores the pool in its place.
    fn ended(&mut self) -> KeptPoolError {
        let status = match self.end() {
            Ok(status) => status,
            Err(error) => return error.into(),
        };
        let restored = RaisedPool::take_over(self.size, self.added, self.begun.take())
            .and_then(RaisedPool::restore);
        match restored {
            Ok(()) => KeptPoolError::KeeperEnded { status },
            Err(source) => KeptPoolError::StaysRaised { status, source },
        }
    }
}

/// The numbers of `write FROM TO`.
fn announced(words: &str) -> Option<PoolWrite> {
    let (from, to) = words.strip_prefix("write ")?.split_once(' ')?;
    Some(PoolWrite {
        from: from.parse().ok()?,
        to: to.parse().ok()?,
    })
}

fn is_time_out(error: &io::Error) -> bool {
    use io::ErrorKind::{TimedOut, WouldBlock};
    matches!(error.kind(), TimedOut | WouldBlock)
}

/// What a keeper does, with the socket as `input` and `output`: raises the pool, and puts it back when
/// nothing more comes.
///
/// # Errors
///
/// When it is asked for something else. What the pool refuses is reported to the other process.
pub fn keep_pool(input: impl Read, mut output: impl Write) -> Result<(), KeptPoolError> {
    let mut input = BufReader::new(input);
    let mut line = String::new();
    input.by_ref().take(MOST_LINE).read_line(&mut line)?;
    let Some((size, bytes)) = asked(line.trim_end()) else {
        return Err(KeptPoolError::Unexpected { line });
    };
    // The other process may have ended meanwhile. Then nothing is read, which changes nothing: the end
    // of the input is what counts.
    let mut say = |words: String| drop(writeln!(output, "@{words}").and_then(|()| output.flush()));
    let refused = |error: &PoolError| format!("refused {}", sentence(error).replace('\n', " "));
    let write = |PoolWrite { from, to }: PoolWrite| format!("write {from} {to}");
    let pool = match RaisedPool::raise_announced(size, bytes, &mut |change| say(write(change))) {
        Ok(pool) => pool,
        Err(error) => {
            say(refused(&error));
            return Ok(());
        }
    };
    say(format!("added {}", pool.added()));
    let _ = io::copy(&mut input, &mut io::sink());
    let restored = pool.restore_announced(&mut |change| say(write(change)));
    say(match restored {
        Ok(()) => "restored".into(),
        Err(error) => refused(&error),
    });
    Ok(())
}

/// The error with its causes, as one sentence.
fn sentence(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text += &format!(": {error}");
        cause = error.source();
    }
    text
}

/// The page's size and the bytes of `raise PAGE BYTES`.
fn asked(line: &str) -> Option<(HugeSize, u64)> {
    let (page, bytes) = line.strip_prefix("raise ")?.split_once(' ')?;
    let page: u64 = page.parse().ok()?;
    let sizes = [HugeSize::TwoMiB, HugeSize::OneGiB];
    let size = sizes.into_iter().find(|size| size.bytes() == page)?;
    Some((size, bytes.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn on() -> ControlFlow<()> {
        ControlFlow::Continue(())
    }

    fn kept(script: &str, on: &mut dyn FnMut() -> ControlFlow<()>) -> Result<Kept, KeptPoolError> {
        let command = ["/bin/sh", "-c", script].map(OsString::from);
        Kept::raise(&command, HugeSize::TwoMiB, 5 << 20, on)
    }

    #[test]
    fn what_a_keeper_says_is_what_its_pool_says() {
        let script = "read a; test \"$a\" = 'raise 2097152 5242880' && echo noise; echo '@added 3'; \
                      read b; echo @restored";
        let pool = KeptPool(Raised::Kept(kept(script, &mut on).unwrap()));
        assert_eq!(pool.added(), 3);
        pool.restore().unwrap();
        let refusals = [
            ("read a; echo @refused too few", "too few"),
            ("read a; echo @added many", "says \"added many\""),
            (
                "read a; echo hello; kill -9 $$",
                "ended with signal: 9 (SIGKILL); this process has restored the pool",
            ),
        ];
        for (script, said) in refusals {
            let error = kept(script, &mut on).unwrap_err().to_string();
            assert!(error.ends_with(said), "{error}");
        }
        let gone = kept("read a; echo '@added 0'", &mut on).unwrap().restore();
        assert!(
            matches!(gone, Err(KeptPoolError::KeeperEnded { .. })),
            "{gone:?}"
        );
        // An announced write is no answer, and is over with the next answer.
        let script = "read a; echo '@write 3 5'; echo '@added 2'; read b; echo @restored";
        let pool = kept(script, &mut on).unwrap();
        assert_eq!((pool.added, pool.begun), (2, None));
        pool.restore().unwrap();
        // More pages than any pool holds: a total below both numbers leaves nothing to restore.
        let begun = "read a; echo '@write 9000000000000 9000000000005'; kill -9 $$";
        let error = kept(begun, &mut on).unwrap_err();
        assert!(
            matches!(
                error,
                KeptPoolError::KeeperEnded { .. } | KeptPoolError::StaysRaised { .. }
            ),
            "{error:?}"
        );
    }

    #[test]
    fn whoever_wants_to_stop_does_not_wait_for_the_kernel() {
        let mut asked = 0;
        let mut stop = || {
            asked += 1;
            match asked {
                3 => ControlFlow::Break(()),
                _ => ControlFlow::Continue(()),
            }
        };
        // Half a line came: it is no answer yet.
        let error = kept("printf @add; read a; read b", &mut stop).unwrap_err();
        assert!(matches!(error, KeptPoolError::Interrupted), "{error:?}");
        assert_eq!(asked, 3);
    }

    #[test]
    fn a_keeper_takes_nothing_but_what_it_is_for() {
        for line in [
            "",
            "raise",
            "raise 4096 1\n",
            "raise 2097152 x\n",
            "lower 2097152 1\n",
        ] {
            let mut said = Vec::new();
            let error = keep_pool(line.as_bytes(), &mut said).unwrap_err();
            assert!(matches!(error, KeptPoolError::Unexpected { .. }), "{line}");
            assert!(said.is_empty(), "{line}");
        }
        let endless = keep_pool(io::repeat(b'r'), io::sink()).unwrap_err();
        assert!(
            matches!(&endless, KeptPoolError::Unexpected { line } if line.len() == 128),
            "{endless}"
        );
        let mut said = Vec::new();
        keep_pool(&b"raise 2097152 0\n"[..], &mut said).unwrap();
        let said = String::from_utf8(said).unwrap();
        assert!(
            said == "@added 0\n@restored\n" || said.starts_with("@refused"),
            "{said}"
        );
        let mut said = Vec::new();
        keep_pool(&b"raise 2097152 1125899906842624\n"[..], &mut said).unwrap();
        assert!(said.starts_with(b"@refused "));
    }
}
