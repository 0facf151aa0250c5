//! The side of the second owner: a process of its own.

use std::fmt;
use std::fs::File;
use std::io::{BufReader, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};

use hostmem::{FrameSource, Mapping, Pinner};
use ioas::{Cause, Handover, HostMemory, Ioas, Ledger, MappedStorage, Memory};
use iommu::{
    AttachError, Capabilities, DeviceId, DomainId, Fault, FlushError, NodeId, Unit, UnitError,
};
use iopt::{AnyTable, FormatId, Interruption, Invalidation, Root, Takeover};
use runs::Span;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};

use super::super::frames::{PinNumber, Witness, Witnessed};
use super::super::job::{DEVICES, PIECE, capabilities};
use super::super::kernel;
use super::super::moment::{Marks, bands};
use super::super::report::BandState;
use super::{MOST_FILES, MOST_ITEMS, SuccessorError, read_line, words};
use crate::map::memory::{Account, counted};

/// The way to the first process. One question at a time.
pub(in super::super) struct Link(Mutex<Ends>);

struct Ends {
    input: BufReader<Box<dyn Source>>,
    output: Box<dyn Write + Send>,
}

/// What can be read, and is a file.
trait Source: Read + AsFd + Send {}

impl<T: Read + AsFd + Send> Source for T {}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Link")
    }
}

impl Link {
    pub(in super::super) fn ask(&self, question: &str) -> Result<String, SuccessorError> {
        let mut ends = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        writeln!(ends.output, "@{question}")?;
        ends.output.flush()?;
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

    /// Has `add` take in what the first process describes, from the item `line` on.
    pub(in super::super) fn items(
        &self,
        mut line: String,
        mut add: impl FnMut(&str) -> Result<(), SuccessorError>,
    ) -> Result<(), SuccessorError> {
        for _ in 0..MOST_ITEMS {
            if line == "end" {
                return Ok(());
            }
            add(&line)?;
            line = self.ask("item")?;
        }
        Err(SuccessorError::Items { most: MOST_ITEMS })
    }

    /// Asks for what is answered with files. Nothing of the answer can be in the buffer: there is none
    /// before the question.
    pub(in super::super) fn ask_for_files(
        &self,
        question: &str,
    ) -> Result<Vec<OwnedFd>, SuccessorError> {
        let mut ends = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        writeln!(ends.output, "@{question}")?;
        ends.output.flush()?;
        let mut said = [0; 16];
        let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_FILES))];
        let mut control = RecvAncillaryBuffer::new(&mut room);
        let (socket, flags) = (ends.input.get_ref().as_fd(), RecvFlags::CMSG_CLOEXEC);
        recvmsg(
            socket,
            &mut [IoSliceMut::new(&mut said)],
            &mut control,
            flags,
        )
        .map_err(std::io::Error::from)?;
        let files = control.drain().filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(files) => Some(files),
            _ => None,
        });
        Ok(files.flatten().collect())
    }
}

impl Witness for Link {
    fn pinned(&self, pin: PinNumber, memory: usize, offset: u64, run: Span) -> Result<(), Cause> {
        let (start, len) = (run.start, run.len);
        self.ask(&format!("run {} {memory} {offset} {start} {len}", pin.0))?;
        Ok(())
    }

    fn letting_go(&self, pin: PinNumber, memory: usize, part: Span) -> Result<(), Cause> {
        let (start, len) = (part.start, part.len);
        self.ask(&format!("gone {} {memory} {start} {len}", pin.0))?;
        Ok(())
    }
}

/// A unit of the first process, which stands for the machine.
struct Remote {
    link: Arc<Link>,
    number: usize,
    format: FormatId,
}

impl Remote {
    fn flush(&self, domain: DomainId, question: &str) -> Result<(), FlushError> {
        let cause = UnitError::TimedOut {
            awaited: "the first process's answer",
            rounds: 1,
        };
        match self.link.ask(question) {
            Ok(_) => Ok(()),
            Err(_) => Err(FlushError::Unit { domain, cause }),
        }
    }
}

impl Unit for Remote {
    fn capabilities(&self) -> Capabilities {
        capabilities(self.format)
    }

    fn node(&self) -> Option<NodeId> {
        None
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
        let asked = self.link.ask(&format!("detach {}", self.number));
        asked
            .map(|_| ())
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
    memories: Vec<(Mapping, Option<u64>)>,
    tables: Vec<(Mapping, u64)>,
    handover: Handover,
}

/// A memory file of the first process.
pub(in super::super) fn open(path: &str) -> Result<Mapping, SuccessorError> {
    let file = File::options().read(true).write(true).open(path);
    let file = file.map_err(|source| SuccessorError::Open {
        path: path.into(),
        source,
    })?;
    Ok(Mapping::of_file(file.into())?)
}

impl Inherited {
    /// With the first item, `line`, and all that come.
    fn learn(link: &Link, line: String) -> Result<Self, SuccessorError> {
        let mut all = Self::default();
        link.items(line, |line| all.add(line))?;
        Ok(all)
    }

    fn add(&mut self, line: &str) -> Result<(), SuccessorError> {
        let unexpected = || SuccessorError::Unexpected { line: line.into() };
        let found = words(line);
        match found.as_slice() {
            ["memory", path] => self.memories.push((open(path)?, None)),
            ["memory", path, base] => self.memories.push((open(path)?, Some(base.parse()?))),
            ["tables", path, base] => self.tables.push((open(path)?, base.parse()?)),
            ["handover", described] => self.handover = described.parse()?,
            _ => return Err(unexpected()),
        }
        Ok(())
    }
}

/// Takes over an address space from the process at the other end of `input` and `output`, cuts a hole and
/// closes it, and ends the address space: the second half of a `LifeJob`, to be called
/// by the program that the job starts with a Unix socket as its standard input.
///
/// # Errors
///
/// See [`SuccessorError`]; the first process is told as well.
pub fn succeed(
    input: impl Read + AsFd + Send + 'static,
    output: impl Write + Send + 'static,
) -> Result<(), SuccessorError> {
    let link = Arc::new(Link(Mutex::new(Ends {
        input: BufReader::new(Box::new(input)),
        output: Box::new(output),
    })));
    let result = own(&link);
    if let Err(error) = &result {
        let mut ends = link.0.lock().unwrap_or_else(PoisonError::into_inner);
        let said = crate::sentence(error).replace('\n', " ");
        // Whoever has gone needs not to be told.
        let _ = writeln!(ends.output, "@failed {said}").and_then(|()| ends.output.flush());
    }
    result
}

fn own(link: &Arc<Link>) -> Result<(), SuccessorError> {
    let first = link.ask("item")?;
    if first.starts_with("interface ") {
        return kernel::own(link, &first);
    }
    let before = counted().map_err(Box::new)?;
    let inherited = Inherited::learn(link, first)?;
    let pinner = Pinner::probe(PIECE)?;
    let account = Account::of_pinner(&pinner).map_err(Box::new)?;
    let ledger = account.ledger().map_err(Box::new)?;
    let charged = ledger.in_use();
    let pinner = Arc::new(pinner);
    let memories = memories(inherited.memories, &pinner, link, &ledger);
    let mut arenas = Vec::new();
    let mut taken = Vec::new();
    let domains = inherited.handover.domains.iter();
    for (domain, (file, base)) in domains.zip(inherited.tables) {
        // Each unit has one device.
        let number = DEVICES
            .iter()
            .position(|device| domain.devices.contains(device));
        let number = number.ok_or_else(|| SuccessorError::Unexpected {
            line: format!("domain {} with {:?}", domain.id.0, domain.devices),
        })?;
        let mut takeover = Takeover::<_, 12>::new(MappedStorage::over(file), base)?;
        let (root, sizes) = (domain.root, domain.page_sizes);
        let adopted = AnyTable::adopt(&mut takeover, root, sizes)?;
        let arena = Arc::new(takeover.finish());
        let table = adopted.open(Arc::clone(&arena))?;
        let remote = Remote {
            link: Arc::clone(link),
            number,
            format: root.format,
        };
        let unit: Arc<dyn Unit> = Arc::new(remote);
        let devices = domain
            .devices
            .iter()
            .map(|device| (Arc::clone(&unit), *device));
        taken.push((table, devices.collect()));
        arenas.push(arena);
    }
    let space = Ioas::adopt(&inherited.handover, &memories, taken, None, &mut ())?;
    drop(memories);
    link.ask(&format!("adopted {}", ledger.in_use() - charged))?;

    let areas = space.areas().into_iter().map(|area| area.range());
    let areas: Vec<Span> = areas.collect();
    hole(link, &space, &areas)?;
    link.ask("ending")?;
    space.close()?;
    let tables: u64 = arenas.iter().map(|arena| arena.in_use()).sum();
    let left = counted().map_err(Box::new)?.since(before);
    link.ask(&format!(
        "left {} {} {} {tables}",
        ledger.in_use() - charged,
        left.locked_bytes,
        left.pinned_bytes
    ))?;
    Ok(())
}

fn memories(
    mappings: Vec<(Mapping, Option<u64>)>,
    pinner: &Arc<Pinner>,
    link: &Arc<Link>,
    ledger: &Arc<Ledger>,
) -> Vec<Arc<Memory>> {
    let numbered = mappings.into_iter().enumerate();
    let memory = |(number, (mapping, base)): (usize, (Mapping, Option<u64>))| {
        let source = match base {
            Some(_) => FrameSource::FileOffset,
            None => FrameSource::Pagemap,
        };
        let host = HostMemory::with_pinner(Arc::new(mapping), Arc::clone(pinner), source);
        let witness = Arc::clone(link) as Arc<dyn Witness>;
        let object = Witnessed::new(host, number, base, witness);
        Memory::new(Arc::new(object), ledger)
    };
    numbered.map(memory).collect()
}

/// Cuts the page in the middle of the first area out, and puts it back. Devices go on with the rest.
fn hole(link: &Link, space: &Ioas, areas: &[Span]) -> Result<(), SuccessorError> {
    let first = areas.first().copied().unwrap_or_default();
    let hole = Span::new(first.start + ((first.len / 2) & !4095), 4096);
    link.ask(&format!("opening {} {}", hole.start, hole.len))?;
    space.take_out(hole, Interruption::Refused, &mut ())?;
    link.ask("opened")?;
    link.ask("closing")?;
    space.put_back(hole, Interruption::Refused, &mut ())?;
    let tables: u64 = space.tables(|_, table| table.tables()).iter().sum();
    link.ask(&format!("closed {tables}"))?;
    // What is drawn of it.
    let len = areas.iter().map(|area| area.len).sum();
    let range = Span::new(first.start, len);
    let mut question = String::from("bands");
    let drawn = space.tables(|_, table| bands(table, range, &Marks::default()));
    for (root, bands) in drawn.into_iter().enumerate() {
        for band in bands {
            let leaf = match band.state {
                BandState::Mapped { leaf_bytes } => leaf_bytes,
                _ => 0,
            };
            question += &format!(" {root} {} {} {leaf}", band.iova, band.len_bytes);
        }
    }
    link.ask(&question)?;
    Ok(())
}
