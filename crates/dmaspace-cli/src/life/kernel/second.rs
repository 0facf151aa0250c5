//! The side of the second owner, over the kernel's mappings.

use std::sync::Arc;

use hostmem::Mapping;
use ioas::{HostMemory, Memory, UnmapError};
use iopt::{Interruption, Prot};
use runs::Span;

use super::super::crew::PAGE;
use super::super::successor::{Link, SuccessorError, numbers, open, words};
use super::interface::{Handed, Interface};
use crate::map::memory::counted;

/// What is taken over.
#[derive(Default)]
struct Inherited {
    memories: Vec<Mapping>,
    /// Addresses, number of the memory, offset in it, and what devices may do.
    areas: Vec<(Span, usize, u64, Prot)>,
    pieces: Vec<Span>,
}

impl Inherited {
    fn learn(link: &Link) -> Result<Self, SuccessorError> {
        let mut all = Self::default();
        link.items(link.ask("item")?, |line| all.add(line))?;
        Ok(all)
    }

    fn add(&mut self, line: &str) -> Result<(), SuccessorError> {
        let unexpected = || SuccessorError::Unexpected { line: line.into() };
        let found = words(line);
        let span = |start, len| Span::checked(start, len).ok_or_else(unexpected);
        match found.as_slice() {
            ["memory", path] => self.memories.push(open(path)?),
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

/// Takes over what an interface of the kernel maps, which `first`, the first item, names; tries to cut a
/// hole; and ends the address space.
pub(in super::super) fn own(link: &Arc<Link>, first: &str) -> Result<(), SuccessorError> {
    let found = words(first);
    let numbers = numbers(&found, 2)?;
    let interfaces = [Interface::Vfio, Interface::Iommufd].into_iter();
    let mut interfaces = interfaces.filter(|interface| found.get(1) == Some(&interface.name()));
    match interfaces.next() {
        Some(interface) => own_by(interface, link, numbers),
        None => Err(SuccessorError::Unexpected { line: first.into() }),
    }
}

fn own_by(interface: Interface, link: &Arc<Link>, numbers: Vec<u64>) -> Result<(), SuccessorError> {
    let before = counted().map_err(Box::new)?;
    let inherited = Inherited::learn(link)?;
    let files = link.ask_for_files("files")?;
    let ledger = interface.account().and_then(|account| account.ledger());
    let ledger = ledger.map_err(Box::new)?;
    let charged = ledger.in_use();
    let memory = |mapping: Mapping| {
        let host = HostMemory::new(Arc::new(mapping));
        Memory::new(Arc::new(host), &ledger)
    };
    let memories: Vec<_> = inherited.memories.into_iter().map(memory).collect();

    let (space, devices) = interface.receive(Handed { files, numbers })?;
    for (range, number, offset, prot) in inherited.areas {
        let unknown = || SuccessorError::Unexpected {
            line: format!("area of memory {number}"),
        };
        let memory = memories.get(number).ok_or_else(unknown)?;
        let part = Span::new(offset, range.len);
        space.map(range.start, memory, part, prot, &mut ())?;
    }
    space.take_over(devices, &inherited.pieces)?;
    let now = counted().map_err(Box::new)?.since(before);
    let kernel = now.locked_bytes.max(now.pinned_bytes);
    link.ask(&format!("adopted {} {kernel}", ledger.in_use() - charged))?;

    let first = inherited.pieces.first().copied().unwrap_or_default();
    let hole = Span::new(first.start + ((first.len / 2) & !(PAGE - 1)), PAGE);
    match space.take_out(hole, Interruption::Refused, &mut ()) {
        Err(UnmapError::CutsMapping { cause, .. }) => {
            link.ask(&format!("refused {} {cause}", cause.what.name()))?;
        }
        Err(error) => return Err(error.into()),
        Ok(_) => {
            let line = format!("{hole} was cut out of a mapping of the kernel");
            return Err(SuccessorError::Unexpected { line });
        }
    }
    link.ask("ending")?;
    space.close()?;
    let left = counted().map_err(Box::new)?.since(before);
    let (ledger, locked, pinned) = (
        ledger.in_use() - charged,
        left.locked_bytes,
        left.pinned_bytes,
    );
    link.ask(&format!("left {ledger} {locked} {pinned}"))?;
    Ok(())
}
