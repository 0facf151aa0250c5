//! The side of the second owner: a process of its own.

use std::fs::File;
use std::io::{BufReader, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hostmem::{FrameSource, Limits, Mapping, Pinner};
use ioas::iommufd::{BoundDevice, DevId, IoasId, Iommufd, Owner, RlimitMode, Space, SpaceMapper};
use ioas::vfio::{Container, ContainerMapper, Device, Group, Type1};
use ioas::{Cause, Endpoint, Handover, HostMemory, Ioas, Ledger, Memory, UnmapError};
use iommu::{
    AttachError, Capabilities, DeviceId, DomainId, Fault, FlushError, NodeId, Unit, UnitError,
};
use iopt::{Invalidation, Prot, Root};
use runs::{Iova, Offset, Pa, Span};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};

use super::{Handed, MOST_FILES, MOST_ITEMS, SuccessorError, adopt, numbers, read_line, words};
use crate::check::Counted;
use crate::hardware::{Kind, unit_of};
use crate::operations::INTACT;
use crate::ram::{Layout, Observer, PinNumber, Ram};
use crate::{PAGE, PIECE, sentence};

/// The way to the first process. One question at a time.
struct Link(Mutex<Ends>);

struct Ends {
    input: BufReader<Box<dyn Source>>,
    output: Box<dyn Write + Send>,
}

/// What can be read, and is a file.
trait Source: Read + AsFd + Send {}

impl<T: Read + AsFd + Send> Source for T {}

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

    /// Asks for what is answered with files. Nothing of the answer can be in the buffer: there is none
    /// before the question.
    fn ask_for_files(&self, question: &str) -> Result<Vec<OwnedFd>, SuccessorError> {
        let mut ends = self.ends();
        ends.say(question)?;
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
    /// The interface of the kernel that maps, and numbers in its files.
    interface: Option<(String, Vec<u64>)>,
    memories: Vec<(Mapping, Option<Layout>)>,
    tables: Vec<(Mapping, u64)>,
    handover: Handover,
    /// Of the kernel: addresses, number of the memory, offset in it, and what devices may do.
    areas: Vec<(Span<Iova>, usize, u64, Prot)>,
    pieces: Vec<Span<Iova>>,
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
        let span = |start, len| Span::checked(start, len).ok_or_else(unexpected);
        let found = words(line);
        match found.as_slice() {
            ["interface", name, numbers @ ..] => {
                let numbers = super::numbers(numbers, 0)?;
                self.interface = Some(((*name).into(), numbers));
            }
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
            ["area", ..] => {
                let [start, len, memory, offset, prot] = *numbers(&found, 1)?.as_slice() else {
                    return Err(unexpected());
                };
                let prot = Prot::from_bits(prot as u32).ok_or_else(unexpected)?;
                self.areas
                    .push((span(start, len)?, memory as usize, offset, prot));
            }
            ["piece", start, len] => self.pieces.push(span(start.parse()?, len.parse()?)?),
            _ => return Err(unexpected()),
        }
        Ok(())
    }
}

/// Takes over an address space from the process at the other end of `input` and `output`, cuts a hole and
/// closes it, and ends the address space or hands it back: to be called by the program that
/// [`World::hand_over`](crate::World::hand_over) starts, with a Unix socket as its standard input.
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
        let said = sentence(error).replace('\n', " ");
        // A process that has gone needs not to be told.
        let _ = link.ends().say(&format!("failed {said}"));
    }
    result
}

fn own(link: &Arc<Link>) -> Result<(), SuccessorError> {
    let before = Counted::now()?;
    let mut inherited = link.inherited()?;
    let taken = match inherited.interface.take() {
        Some((name, numbers)) => over_kernel(link, &name, numbers, inherited)?,
        None => over_tables(link, inherited)?,
    };
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
    /// The areas of tables of ours, and the mappings of a kernel.
    pieces: Vec<Span<Iova>>,
}

/// What an interface of the kernel maps.
fn over_kernel(
    link: &Link,
    name: &str,
    numbers: Vec<u64>,
    inherited: Inherited,
) -> Result<Taken, SuccessorError> {
    let (name, mode) = match name {
        "vfio" => ("vfio", RlimitMode::Process),
        "iommufd" => ("iommufd", RlimitMode::User),
        _ => {
            let line = format!("interface {name}");
            return Err(SuccessorError::Unexpected { line });
        }
    };
    let files = link.ask_for_files("files")?;
    let limits = Limits::read()?;
    let ledger = Ledger::of_counter(mode.counter(&limits), &limits)?;
    let charged = ledger.in_use();
    let memory = |(mapping, _)| {
        let host = HostMemory::new(Arc::new(mapping));
        Memory::new(Arc::new(host), &ledger)
    };
    let memories: Vec<_> = inherited.memories.into_iter().map(memory).collect();
    let (space, devices) = receive(Handed {
        name,
        files,
        numbers,
    })?;
    for (range, number, offset, prot) in inherited.areas {
        let unknown = || SuccessorError::Unexpected {
            line: format!("area of memory {number}"),
        };
        let memory = memories.get(number).ok_or_else(unknown)?;
        let part = Span::new(offset, range.len);
        space.map(range.start, memory, part, prot, &mut ())?;
    }
    space.take_over(devices, &inherited.pieces)?;
    Ok(Taken {
        space,
        ledger,
        charged,
        memories,
        in_use: Box::new(|| 0),
        pieces: inherited.pieces,
    })
}

/// An empty address space, and what is to be attached, from what another process has handed over.
fn receive(handed: Handed) -> Result<(Ioas, Vec<Endpoint>), SuccessorError> {
    let found = handed.files.len();
    let mut files = handed.files.into_iter();
    let first = files.next().ok_or(SuccessorError::Files { found })?;
    if handed.name == "vfio" {
        let mapper = ContainerMapper::new(Container::from_fd(first)?);
        let groups = files.map(|group| Arc::new(Group::from_fd(group)).into());
        let space = Ioas::over_kernel(Type1::new(mapper, None));
        return Ok((space, groups.collect()));
    }
    let mut numbers = handed.numbers.into_iter();
    let ioas = numbers.next().ok_or(SuccessorError::Files { found })?;
    let owner = Owner::new(Iommufd::from_fd(first));
    let mapper = SpaceMapper::existing(&owner, IoasId(ioas as u32));
    let devices = files.zip(numbers).map(|(device, id)| {
        let (device, id) = (Device::from_fd(device), DevId(id as u32));
        Arc::new(BoundDevice { device, id }).into()
    });
    let space = Ioas::over_kernel(Space::new(mapper, None));
    Ok((space, devices.collect()))
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

/// Cuts `hole` out, and puts it back; or tells why it cannot be. Devices go on with the rest. Returns what is to be
/// done then.
fn cut(
    link: &Link,
    space: &Ioas,
    hole: Span<Iova>,
    in_use: &dyn Fn() -> u64,
) -> Result<String, SuccessorError> {
    let kernel = space.kernel_mappings().is_some();
    if !kernel {
        link.ask(&format!("opening {} {}", hole.start, hole.len))?;
    }
    match space.take_out(hole, INTACT, &mut ()) {
        Err(UnmapError::CutsMapping { cause, .. }) => {
            return link.ask(&format!("refused {} {cause}", cause.what.name()));
        }
        Err(error) => return Err(error.into()),
        Ok(_) if kernel => {
            let line = format!("{hole} was cut out of a mapping of the kernel");
            return Err(SuccessorError::Unexpected { line });
        }
        Ok(_) => {}
    }
    link.ask(&format!("opened {}", in_use()))?;
    link.ask("closing")?;
    space.put_back(hole, INTACT, &mut ())?;
    link.ask(&format!("closed {}", in_use()))
}
