//! The side of the second owner: a process of its own.

use std::fs::File;
use std::io::{BufReader, Stdin, Stdout, stdin, stdout};
use std::sync::{Arc, Mutex, PoisonError};

use hostmem::Mapping;
use ioas::{Cause, Handover, Ioas, Ledger, Memory};
use iommu::{
    AttachError, Capabilities, DeviceId, DomainId, Fault, FlushError, NodeId, Unit, UnitError,
};
use iopt::{AnyTable, Interruption, Invalidation, Root};
use runs::Span;

use super::{hear, numbers, place, say};
use crate::faults::Faults;
use crate::hardware::{Tables, UNITS, capabilities, takeover};
use crate::object::Told;
use crate::world::{object, pinner};

/// The way to the first process. One question at a time.
struct Link(Mutex<(BufReader<Stdin>, Stdout)>);

impl Link {
    fn hear(&self) -> Result<String, Cause> {
        let mut ends = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        hear(&mut ends.0)
    }

    fn ask(&self, question: &str) -> Result<(), Cause> {
        let mut ends = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        say(&mut ends.1, question)?;
        match hear(&mut ends.0)?.as_str() {
            "ok" => Ok(()),
            other => Err(format!("the first process says `{other}`").into()),
        }
    }
}

/// A unit of the first process.
struct Remote {
    link: Arc<Link>,
    number: usize,
}

impl Remote {
    fn flush(&self, domain: DomainId, question: &str) -> Result<(), FlushError> {
        let cause = UnitError::TimedOut {
            awaited: "the first process's answer",
            rounds: 1,
        };
        let asked = self.link.ask(question);
        asked.map_err(|_| FlushError::Unit { domain, cause })
    }
}

impl Unit for Remote {
    fn capabilities(&self) -> Capabilities {
        capabilities(self.number)
    }

    fn node(&self) -> Option<NodeId> {
        Some(NodeId(UNITS[self.number].1))
    }

    fn attach(&self, device: DeviceId, domain: DomainId, _root: Root) -> Result<(), AttachError> {
        // Devices come attached, and no further ones do.
        Err(AttachError::AlreadyAttached { device, domain })
    }

    fn detach(&self, device: DeviceId) -> Result<(), AttachError> {
        // Devices stay: only who fails on the way comes here.
        let cause = UnitError::TimedOut {
            awaited: "a device that stays",
            rounds: 1,
        };
        Err(AttachError::Unit { device, cause })
    }

    fn invalidate(&self, domain: DomainId, what: &Invalidation) -> Result<(), FlushError> {
        let (levels, tables) = (what.leaf_levels(), u8::from(what.tables_unlinked()));
        let mut question = format!("invalidate {} {} {levels} {tables}", self.number, domain.0);
        for range in what.ranges() {
            question += &format!(" {} {}", range.start, range.len);
        }
        self.flush(domain, &question)
    }

    fn invalidate_domain(&self, domain: DomainId) -> Result<(), FlushError> {
        self.flush(
            domain,
            &format!("invalidate-domain {} {}", self.number, domain.0),
        )
    }

    fn drain_faults(&self, _sink: &mut dyn FnMut(Fault)) -> u64 {
        // They are the first process's affair.
        0
    }
}

#[derive(Default)]
struct Inherited {
    memories: Vec<Mapping>,
    tables: Option<Mapping>,
    hole: Span,
    handover: Handover,
}

fn open(path: &str) -> Result<Mapping, Cause> {
    let file = File::options().read(true).write(true).open(path)?;
    Ok(Mapping::of_file(file.into())?)
}

impl Inherited {
    fn learn(link: &Link) -> Result<Self, Cause> {
        let mut all = Self::default();
        loop {
            let line = link.hear()?;
            match line.split_once(' ') {
                Some(("memory", path)) => all.memories.push(open(path)?),
                Some(("tables", path)) => all.tables = Some(open(path)?),
                Some(("hole", _)) => {
                    let numbers = numbers::<u64>(&line)?;
                    let &[start, len] = numbers.as_slice() else {
                        return Err("no hole".into());
                    };
                    all.hole = Span::new(start, len);
                }
                Some(("handover", described)) => {
                    all.handover = described.parse()?;
                    return Ok(all);
                }
                _ => return Err(format!("the first process says `{line}`").into()),
            }
        }
    }
}

/// Takes an address space over from the process at the other end of the standard input and output, cuts a
/// hole and closes it, and hands the address space back.
///
/// # Errors
///
/// Whatever goes wrong; the first process then finds that this one has gone.
pub fn succeed() -> Result<(), Cause> {
    let link = Arc::new(Link(Mutex::new((BufReader::new(stdin()), stdout()))));
    let inherited = Inherited::learn(&link)?;
    let (pinner, faults, ledger) = (pinner()?, Arc::new(Faults::default()), Ledger::unlimited());
    let told: Arc<Told> = {
        let link = Arc::clone(&link);
        Arc::new(move |memory, part, pinned| {
            let what = if pinned { "pin" } else { "unpin" };
            link.ask(&format!("{what} {memory} {} {}", part.start, part.len))
        })
    };
    let memories = inherited.memories.into_iter().enumerate();
    let memories: Vec<Arc<Memory>> = memories
        .map(|(number, mapping)| {
            let object = object(number, &Arc::new(mapping), &pinner, &faults, &told);
            Memory::new(Arc::new(object), &ledger)
        })
        .collect();
    let mut takeover = takeover(inherited.tables.ok_or("no tables")?)?;
    let domains = &inherited.handover.domains;
    let mut adopted = Vec::new();
    for domain in domains {
        let (root, sizes) = (domain.root, domain.page_sizes);
        adopted.push(AnyTable::adopt(&mut takeover, root, sizes)?);
    }
    let tables = Tables::new(takeover.finish(), &faults);
    let mut taken = Vec::new();
    for (domain, adopted) in domains.iter().zip(adopted) {
        let member = |device: &DeviceId| {
            let number = place(*device) % UNITS.len();
            let link = Arc::clone(&link);
            let unit: Arc<dyn Unit> = Arc::new(Remote { link, number });
            (unit, *device)
        };
        let members = domain.devices.iter().map(member).collect();
        taken.push((adopted.open(tables.clone())?, members));
    }
    let space = Ioas::adopt(&inherited.handover, &memories, taken, None, &mut ())?;
    link.ask("adopted")?;

    let hole = inherited.hole;
    link.ask("opening")?;
    space.take_out(hole, Interruption::Refused, &mut ())?;
    link.ask("opened")?;
    space.put_back(hole, Interruption::Refused, &mut ())?;
    link.ask("closed")?;

    let leaving = space.hand_over(&memories)?;
    // Answered when the first process owns it all.
    link.ask(&format!("back {}", leaving.handover()))?;
    leaving.give_up()?;
    link.ask(&format!("left {}", ledger.in_use()))
}
