//! The side of the second owner: a process of its own.

use std::fs::File;
use std::io::{BufReader, Read, Write};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hostmem::{FrameSource, Mapping, Pinner};
use ioas::{Cause, Handover, HostMemory, Ioas, Ledger, Memory};
use iommu::{
    AttachError, Capabilities, DeviceId, DomainId, Fault, FlushError, NodeId, Unit, UnitError,
};
use iopt::{Invalidation, Root};
use runs::{Iova, Offset, Pa, Span};

use super::{MOST_ITEMS, SuccessorError, adopt, numbers, read_line, words};
use crate::check::Counted;
use crate::hardware::{Kind, unit_of};
use crate::operations::INTACT;
use crate::ram::{Layout, Observer, PinNumber, Ram};
use crate::{PAGE, PIECE, sentence};

/// The way to the first process. One question at a time.
struct Link(Mutex<Ends>);

struct Ends {
    input: BufReader<Box<dyn Read + Send>>,
    output: Box<dyn Write + Send>,
}

impl Ends {
    fn say(&mut self, line: &str) -> std::io::Result<()> {
        writeln!(self.output, "@{line}")?;
        self.output.flush()
    }
}

impl Link {
    fn ends(&self) -> MutexGuard<'_, Ends> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ask(&self, question: &str) -> Result<String, SuccessorError> {
        let mut ends = self.ends();
        ends.say(question)?;
        let ended = || {
            let status = "its end of the pipe is closed".into();
            SuccessorError::Ended { status }
        };
        let line = read_line(&mut ends.input)?.ok_or_else(ended)?;
        if let Some(why) = line.strip_prefix("error ") {
            return Err(SuccessorError::Refused { why: why.into() });
        }
        let answer = line.strip_prefix("ok").map(|rest| rest.trim().to_string());
        answer.ok_or_else(|| SuccessorError::Unexpected { line })
    }

    /// What the first process describes.
    fn inherited(&self) -> Result<Inherited, SuccessorError> {
        let mut all = Inherited::default();
        for _ in 0..MOST_ITEMS {
            let line = self.ask("item")?;
            if line == "end" {
                return Ok(all);
            }
            all.add(&line)?;
        }
        Err(SuccessorError::Items { most: MOST_ITEMS })
    }
}

impl Observer for Link {
    fn pinned(
        &self,
        pin: PinNumber,
        memory: usize,
        offset: u64,
        run: Span<Pa>,
    ) -> Result<(), Cause> {
        let (start, len) = (run.start, run.len);
        self.ask(&format!("run {} {memory} {offset} {start} {len}", pin.0))?;
        Ok(())
    }

    fn releasing(&self, pin: PinNumber, memory: usize, part: Span<Offset>) -> Result<(), Cause> {
        let (start, len) = (part.start, part.len);
        self.ask(&format!("gone {} {memory} {start} {len}", pin.0))?;
        Ok(())
    }
}

/// A unit of the first process, which stands for the machine.
struct Remote {
    link: Arc<Link>,
    number: usize,
    kind: Kind,
}

impl Remote {
    fn flush(&self, domain: DomainId, question: &str) -> Result<(), FlushError> {
        let cause = UnitError::TimedOut {
            awaited: "the first process's answer",
            rounds: 1,
        };
        let asked = self.link.ask(question).map(drop);
        asked.map_err(|_| FlushError::Unit { domain, cause })
    }
}

impl Unit for Remote {
    fn capabilities(&self) -> Capabilities {
        self.kind.capabilities()
    }

    fn node(&self) -> Option<NodeId> {
        Some(self.kind.node)
    }

    fn attach(&self, device: DeviceId, domain: DomainId, _root: Root) -> Result<(), AttachError> {
        // Devices come attached, and no further ones do.
        Err(AttachError::AlreadyAttached { device, domain })
    }

    fn detach(&self, device: DeviceId) -> Result<(), AttachError> {
        let cause = UnitError::TimedOut {
            awaited: "the first process's answer",
            rounds: 1,
        };
        let asked = self
            .link
            .ask(&format!("detach {} {}", self.number, device.0));
        asked
            .map(drop)
            .map_err(|_| AttachError::Unit { device, cause })
    }

    fn invalidate(&self, domain: DomainId, what: &Invalidation) -> Result<(), FlushError> {
        if let Some(asked) = what.new_root() {
            let (format, levels) = (asked.format, asked.levels);
            // Tables of a life are as tall as they can become.
            let cause = AttachError::Levels {
                format,
                levels,
                offered: 0,
            };
            return Err(FlushError::Root { domain, cause });
        }
        let (levels, tables) = (what.leaf_levels(), u8::from(what.tables_unlinked()));
        let mut question = format!("invalidate {} {} {levels} {tables}", self.number, domain.0);
        for range in what.ranges() {
            question += &format!(" {} {}", range.start, range.len);
        }
        self.flush(domain, &question)
    }

    fn invalidate_domain(&self, domain: DomainId) -> Result<(), FlushError> {
        let question = format!("invalidate-domain {} {}", self.number, domain.0);
        self.flush(domain, &question)
    }

    fn drain_faults(&self, _sink: &mut dyn FnMut(Fault)) -> u64 {
        // They are the first process's affair.
        0
    }
}

/// What is taken over.
#[derive(Default)]
struct Inherited {
    memories: Vec<(Mapping, Option<Layout>)>,
    tables: Vec<(Mapping, u64)>,
    handover: Handover,
}

/// A memory file of the first process.
fn open(path: &str) -> Result<Mapping, SuccessorError> {
    let file = File::options().read(true).write(true).open(path);
    let file = file.map_err(|source| SuccessorError::Open {
        path: path.into(),
        source,
    })?;
    Ok(Mapping::of_file(file.into())?)
}

impl Inherited {
    fn add(&mut self, line: &str) -> Result<(), SuccessorError> {
        let unexpected = || SuccessorError::Unexpected { line: line.into() };
        let found = words(line);
        match found.as_slice() {
            ["memory", path, lies @ ..] => {
                let (file, lies) = (open(path)?, numbers(lies, 0)?);
                let lies = match *lies.as_slice() {
                    [] => None,
                    [base] => Some((base, 0)),
                    [base, chunk] => Some((base, chunk)),
                    _ => return Err(unexpected()),
                };
                let layout = |(base, chunk): (u64, u64)| {
                    let whole = Span::<Pa>::checked(base, file.len()).is_some();
                    let fits = chunk == 0 || chunk.is_power_of_two() && chunk <= file.len();
                    let layout = Layout::new(base, file.len(), chunk);
                    (whole && fits).then_some(layout).ok_or_else(unexpected)
                };
                let layout = lies.map(layout).transpose()?;
                self.memories.push((file, layout));
            }
            ["tables", path, base] => self.tables.push((open(path)?, base.parse()?)),
            ["handover", described] => self.handover = described.parse()?,
            _ => return Err(unexpected()),
        }
        Ok(())
    }
}

/// Takes over an address space from the process at the other end of `input` and `output`, cuts a hole and
/// closes it, and ends the address space or hands it back: to be called by the program that
/// [`World::hand_over`](crate::World::hand_over) starts.
///
/// # Errors
///
/// See [`SuccessorError`]; the first process is told as well.
pub fn succeed(
    input: impl Read + Send + 'static,
    output: impl Write + Send + 'static,
) -> Result<(), SuccessorError> {
    let link = Arc::new(Link(Mutex::new(Ends {
        input: BufReader::new(Box::new(input)),
        output: Box::new(output),
    })));
    let result = own(&link);
    if let Err(error) = &result {
        let said = sentence(error).replace('\n', " ");
        // A process that has gone needs not to be told.
        let _ = link.ends().say(&format!("failed {said}"));
    }
    result
}

fn own(link: &Arc<Link>) -> Result<(), SuccessorError> {
    let before = Counted::now()?;
    let inherited = link.inherited()?;
    let taken = over_tables(link, inherited)?;
    let Taken {
        space,
        ledger,
        charged,
        memories,
        in_use,
        pieces,
    } = taken;
    let now = Counted::now()?.since(before).most();
    let tables = in_use();
    let hole = link.ask(&format!(
        "adopted {} {now} {tables}",
        ledger.in_use() - charged
    ))?;
    let hole = match *numbers(&words(&hole), 0)?.as_slice() {
        [start, len] => Span::checked(start, len).unwrap_or_default(),
        _ => {
            let first = pieces.first().copied().unwrap_or_default();
            Span::new(first.start + ((first.len / 2) & !(PAGE - 1)), PAGE)
        }
    };
    if cut(link, &space, hole, &*in_use)? == "back" {
        let leaving = space.hand_over(&memories)?;
        // Answered when the first process owns it all.
        link.ask(&format!("back {}", leaving.handover()))?;
        leaving.give_up()?;
    } else {
        drop(memories);
        link.ask("ending")?;
        space.close()?;
    }
    let left = Counted::now()?.since(before);
    let (locked, pinned) = (left.locked_bytes, left.pinned_bytes);
    let (ledger, tables) = (ledger.in_use() - charged, in_use());
    link.ask(&format!("left {ledger} {locked} {pinned} {tables}"))?;
    Ok(())
}

/// An address space that was taken over.
struct Taken {
    space: Ioas,
    ledger: Arc<Ledger>,
    /// What was charged before.
    charged: u64,
    memories: Vec<Arc<Memory>>,
    /// Table pages in use.
    in_use: Box<dyn Fn() -> u64>,
    /// The areas.
    pieces: Vec<Span<Iova>>,
}

/// Tables of ours, with units of the first process.
fn over_tables(link: &Arc<Link>, inherited: Inherited) -> Result<Taken, SuccessorError> {
    let pinner = Pinner::probe(PIECE)?;
    let ledger = Ledger::of_counter(pinner.counter(), &pinner.limits())?;
    let (charged, pinner) = (ledger.in_use(), Arc::new(pinner));
    let numbered = inherited.memories.into_iter().enumerate();
    let memory = |(number, (mapping, layout)): (usize, (Mapping, Option<Layout>))| {
        let source = match layout {
            Some(_) => FrameSource::FileOffset,
            None => FrameSource::Pagemap,
        };
        let (mapping, pinner) = (Arc::new(mapping), Arc::clone(&pinner));
        let ram = Ram {
            inner: HostMemory::with_pinner(mapping, pinner, source),
            number,
            layout,
            faults: Arc::default(),
            observer: Arc::clone(link) as _,
            pins: AtomicU64::new(0),
        };
        Memory::new(Arc::new(ram), &ledger)
    };
    let memories: Vec<Arc<Memory>> = numbered.map(memory).collect();
    let handover = inherited.handover;
    // Of a device its unit is known, and of a unit what its domains show.
    let unit = |device: DeviceId| {
        let domains = handover.domains.iter();
        let domain = domains
            .clone()
            .find(|domain| domain.devices.contains(&device))?;
        let (number, kind) = (
            unit_of(device)?,
            Kind {
                format: domain.root.format,
                node: NodeId(0),
                coherent: domain.coherent == Some(true),
            },
        );
        let link = Arc::clone(link);
        Some(Arc::new(Remote { link, number, kind }) as Arc<dyn Unit>)
    };
    let (taken, arenas) = adopt(&handover, inherited.tables, unit, Arc::new, Arc::clone)?;
    let space = Ioas::adopt(&handover, &memories, taken, None, &mut ())?;
    let areas = space.areas();
    Ok(Taken {
        pieces: areas.iter().map(|area| area.range()).collect(),
        space,
        ledger,
        charged,
        memories,
        in_use: Box::new(move || arenas.iter().map(|arena| arena.in_use()).sum()),
    })
}

/// Cuts `hole` out, and puts it back. Devices go on with the rest. Returns what is to be done then.
fn cut(
    link: &Link,
    space: &Ioas,
    hole: Span<Iova>,
    in_use: &dyn Fn() -> u64,
) -> Result<String, SuccessorError> {
    link.ask(&format!("opening {} {}", hole.start, hole.len))?;
    space.take_out(hole, INTACT, &mut ())?;
    link.ask(&format!("opened {}", in_use()))?;
    link.ask("closing")?;
    space.put_back(hole, INTACT, &mut ())?;
    link.ask(&format!("closed {}", in_use()))
}
