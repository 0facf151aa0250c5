//! The side of the first owner: starts the second process, tells it what there is, and answers for the units.

use std::ffi::OsString;
use std::io::{BufReader, Write};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use hostmem::Mapping;
use ioas::{Handover, Ioas};
use iommu::{DomainId, Unit};
use runs::{Iova, Span};

use super::{PATIENCE, SuccessorError, adopt, numbers, read_line, words};
use crate::check::Counted;
use crate::hardware::{Hardware, Tables, again, unit_of};
use crate::operations::each;
use crate::ram::PinNumber;
use crate::world::World;
use crate::{Error, PAGE};

/// Lines that wait to be read; whoever writes more waits, too.
const MOST_WAITING: usize = 64;

/// The second process. Dropped, it is ended, if it has not done that by itself.
#[derive(Debug)]
pub struct Second {
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

/// What there was when the second process owned it all.
#[derive(Clone, Copy, Debug, Default)]
pub struct Gone {
    /// Runs that went over.
    pub runs: u64,
    /// Bytes that were unpinned here.
    pub unpinned: u64,
    /// Bytes that are charged there.
    pub charged: u64,
    /// And what the kernel counts there.
    pub kernel: u64,
}

/// What the second process says of itself in the end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Left {
    /// Bytes that its ledger still charges.
    pub charged: u64,
    /// What the kernel still counts.
    pub kernel: Counted,
    /// Table pages that are in use.
    pub tables: u64,
}

/// Where another process finds a memory file of this one.
fn path(mapping: &Mapping) -> String {
    let fd = mapping.fd().map_or(-1, |fd| fd.as_raw_fd());
    format!("/proc/{}/fd/{fd}", std::process::id())
}

impl Second {
    /// Starts `command`: a program and its arguments.
    fn start(command: &[OsString]) -> Result<Self, SuccessorError> {
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
                    // What the program prints besides is not part of the protocol.
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
    fn answer(&mut self, text: &str) -> Result<(), SuccessorError> {
        writeln!(self.input, "{text}")?;
        Ok(self.input.flush()?)
    }

    /// Answers with each of `items`.
    fn describe(&mut self, items: &[String]) -> Result<(), SuccessorError> {
        for item in items {
            self.told("item")?;
            self.answer(&format!("ok {item}"))?;
        }
        self.told("item")?;
        self.answer("ok end")
    }

    /// Waits until the second process says `word`, and returns the rest of the line.
    fn told(&mut self, word: &str) -> Result<String, SuccessorError> {
        let line = self.next()?;
        match line.strip_prefix(word) {
            Some(rest) if rest.is_empty() || rest.starts_with(' ') => Ok(rest.trim().into()),
            _ => Err(unexpected(line)),
        }
    }

    /// Answers for units and frames, until the second process says `until`; the rest of that line is returned,
    /// which has no answer yet.
    fn serve(&mut self, hardware: &Hardware, until: &str) -> Result<String, SuccessorError> {
        loop {
            let line = self.next()?;
            match line.split_once(' ').unwrap_or((&line, "")) {
                ("failed", why) => return Err(SuccessorError::Refused { why: why.into() }),
                (word, rest) if word == until => return Ok(rest.into()),
                _ => {
                    let done = hardware.answer_for(&line)?;
                    self.answer(&match done {
                        Ok(()) => "ok".into(),
                        Err(why) => format!("error {why}"),
                    })?;
                }
            }
        }
    }

    /// The same, where the rest are so many numbers.
    fn serve_numbers<const N: usize>(
        &mut self,
        hardware: &Hardware,
        until: &str,
    ) -> Result<[u64; N], SuccessorError> {
        let rest = self.serve(hardware, until)?;
        let found = numbers(&words(&rest), 0)?;
        let line = format!("{until} {rest}");
        found
            .try_into()
            .map_err(|_| SuccessorError::Unexpected { line })
    }

    /// Waits until it has ended by itself.
    fn end(&mut self) -> Result<(), SuccessorError> {
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

impl Hardware {
    /// What a unit, or the memory behind it, is asked for. The inner error is the unit's.
    fn answer_for(&self, line: &str) -> Result<Result<(), String>, SuccessorError> {
        let found = words(line);
        let numbers = numbers(&found, 1)?;
        let none = || unexpected(line.into());
        let unit = |number: u64| self.units.get(number as usize).ok_or_else(none);
        Ok(match (found.first(), numbers.as_slice()) {
            (Some(&"run"), &[pin, memory, offset, start, len]) => {
                let run = Span::checked(start, len).ok_or_else(none)?;
                let part = Span::checked(offset, len).ok_or_else(none)?;
                if !self.physical.has(memory as usize, part) {
                    return Err(none());
                }
                let mut theirs = self.physical.theirs();
                let added = theirs.add(PinNumber(pin), memory as usize, offset, run);
                added.map_err(|cause| cause.to_string())
            }
            (Some(&"gone"), &[pin, memory, start, len]) => {
                let part = Span::checked(start, len).ok_or_else(none)?;
                let mut theirs = self.physical.theirs();
                theirs.remove(PinNumber(pin), memory as usize, part);
                Ok(())
            }
            (Some(&"invalidate"), &[number, domain, levels, tables, ref ranges @ ..]) => {
                let ranges = ranges.chunks_exact(2).map(|pair| match pair {
                    [at, len] => Span::checked(*at, *len).ok_or_else(none),
                    _ => Err(none()),
                });
                let ranges = ranges.collect::<Result<Vec<Span<Iova>>, _>>()?;
                let (domain, levels) = (DomainId(domain as u32), levels as u32);
                let done = unit(number)?.invalidate_ranges(domain, &ranges, levels, tables != 0);
                done.map_err(|cause| cause.to_string())
            }
            (Some(&"invalidate-domain"), &[number, domain]) => {
                let done = unit(number)?.invalidate_domain(DomainId(domain as u32));
                done.map_err(|cause| cause.to_string())
            }
            (Some(&"detach"), &[number, device]) => {
                let done = unit(number)?.detach(iommu::DeviceId(device as u32));
                done.map_err(|cause| cause.to_string())
            }
            _ => return Err(none()),
        })
    }
}

impl World {
    /// The address space goes to a second process, which `command` starts and which calls
    /// [`succeed`](super::succeed): it owns everything from now on.
    ///
    /// # Errors
    ///
    /// When it does not, or when something stays charged here.
    pub fn hand_over(&mut self, command: &[OsString]) -> Result<(Second, Gone), Error> {
        self.faults.disarm();
        let started = Instant::now();
        let mut second = Second::start(command)?;
        let gone = self.hand_over_tables(&mut second)?;
        self.set_took(started.elapsed());
        self.settle();
        let (charged, kernel) = (self.charged(), self.kernel()?);
        if (charged, kernel) != (0, Counted::default()) {
            self.scene.complain(format!(
                "the owner that left has {charged} bytes charged, and the kernel counts {kernel:?}"
            ));
        }
        self.check_successor();
        Ok((second, gone))
    }

    fn hand_over_tables(&mut self, second: &mut Second) -> Result<Gone, Error> {
        let (space, memories) = (Arc::clone(&self.space), self.memories());
        let leaving = space.hand_over(&memories)?;
        let mut items = Vec::new();
        for part in &self.parts {
            let lies = part
                .layout
                .map(|lies| format!(" {} {}", lies.base, lies.chunk));
            let lies = lies.unwrap_or_default();
            items.push(format!("memory {}{lies}", path(&part.mapping)));
        }
        let hardware = &mut self.hardware;
        for tables in &hardware.tables {
            items.push(format!("tables {} {}", path(&tables.file), tables.base));
        }
        items.push(format!("handover {}", leaving.handover()));
        let roots = leaving.handover().domains.iter();
        hardware.roots = roots.map(|domain| (domain.id, domain.root)).collect();
        second.describe(&items)?;
        let [charged, kernel, tables] = second.serve_numbers(&self.hardware, "adopted")?;
        let hardware = &mut self.hardware;
        hardware.told = Some(tables);
        if !hardware.physical.same() {
            return Err(SuccessorError::OtherFrames.into());
        }
        let unpinned = leaving.give_up().map_err(Error::GiveUp)?;
        let runs = hardware.physical.runs_of_successor();
        Ok(Gone {
            runs,
            unpinned,
            charged,
            kernel,
        })
    }

    fn memories(&self) -> Vec<Arc<ioas::Memory>> {
        let parts = self.parts.iter();
        parts.map(|part| Arc::clone(&part.memory)).collect()
    }

    /// The tables as the second process has them.
    fn check_successor(&self) {
        let mut wrong = Vec::new();
        let quiet = self.scene.quiet();
        self.check_tables(&mut wrong);
        drop(quiet);
        wrong.into_iter().for_each(|text| self.scene.complain(text));
    }

    /// The second process cuts a hole and closes it: this one, or one of its choice. `see` has devices look at
    /// what there is then.
    ///
    /// # Errors
    ///
    /// When it does not, and those of `see`.
    pub fn hole_of(
        &mut self,
        second: &mut Second,
        hole: Option<Span<Iova>>,
        see: &mut dyn FnMut(&mut Self) -> Result<(), Error>,
    ) -> Result<Span<Iova>, Error> {
        let hole = hole.map(|hole| format!("ok {} {}", hole.start, hole.len));
        second.answer(&hole.unwrap_or_else(|| "ok".into()))?;
        let [start, len] = second.serve_numbers(&self.hardware, "opening")?;
        let pages = (start | len) % PAGE == 0 && len > 0;
        let hole = Span::checked(start, len).filter(|hole| pages && self.range().covers(hole));
        let hole = hole.ok_or_else(|| unexpected(format!("opening {start} {len}")))?;
        let pages = self.scene.pages_of(hole);
        let mut took = Duration::ZERO;
        for (done, next, out) in [("opened", "closing", true), ("closed", "ending", false)] {
            self.begin(pages.clone());
            let started = Instant::now();
            second.answer("ok")?;
            let told = second.serve(&self.hardware, done)?;
            took += started.elapsed();
            self.end(pages.clone(), Some(&each(|page| page.out = out)));
            if let Some(tables) = words(&told).first() {
                self.hardware.told = Some(tables.parse().map_err(SuccessorError::from)?);
            }
            self.check_successor();
            self.scene.quiet().focus = if out { vec![hole] } else { Vec::new() };
            see(self)?;
            if next == "closing" {
                second.answer("ok")?;
                second.serve(&self.hardware, next)?;
            }
        }
        self.set_took(took);
        Ok(hole)
    }

    /// The second process hands everything back, and ends.
    ///
    /// # Errors
    ///
    /// When it does not.
    pub fn take_back(&mut self, mut second: Second) -> Result<Left, Error> {
        second.answer("ok back")?;
        let handover: Handover = second.serve(&self.hardware, "back")?.parse()?;
        let memories = self.memories();
        let hardware = &mut self.hardware;
        let files = hardware.tables.iter();
        let files = files.map(|tables| Ok((again(&tables.file)?, tables.base)));
        let files = files.collect::<Result<_, ioas::Cause>>();
        let (faults, rigged) = (&self.faults, &hardware.rigged);
        let unit = |device| {
            let unit = unit_of(device).and_then(|number| rigged.get(number));
            unit.map(|unit| Arc::clone(unit) as Arc<dyn Unit>)
        };
        let wrap = |arena| Tables::new(arena, faults);
        let files = files.map_err(Error::Tables)?;
        let (taken, all) = adopt(&handover, files, unit, wrap, |tables| tables.clone())?;
        for (node, tables) in hardware.tables.iter_mut().zip(all) {
            node.tables = tables;
        }
        hardware.told = None;
        let builder = Box::new(hardware.builder());
        let space = Ioas::adopt(&handover, &memories, taken, Some(builder), &mut ());
        self.space = Arc::new(space.map_err(SuccessorError::from)?);
        self.left(second)
    }

    fn left(&mut self, mut second: Second) -> Result<Left, Error> {
        second.answer("ok")?;
        let [charged, locked_bytes, pinned_bytes, tables] =
            second.serve_numbers(&self.hardware, "left")?;
        second.answer("ok")?;
        second.end()?;
        if self.hardware.physical.runs_of_successor() > 0 {
            let text = "the second process has ended, and has runs pinned";
            self.scene.complain(text.into());
        }
        let kernel = Counted {
            locked_bytes,
            pinned_bytes,
        };
        Ok(Left {
            charged,
            kernel,
            tables,
        })
    }
}
