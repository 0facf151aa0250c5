//! Mappings of memory by address spaces that can copy from each other.
//!
//! The first mapping of a byte of a [`Memory`] is its *origin*: the kernel pins and charges it for
//! this one. Further ones are copied from it, in the same or another address space, as long as it is
//! there. Read-only origins are kept apart, since what is written to cannot be copied from them.
//!
//! A mapping and all that is copied from it share the kernel's object of pages ([`Pages`]): a page is
//! charged for as long as one of them has it.

use core::ops::Bound::{Excluded, Included};
use std::collections::BTreeMap;
use std::sync::{Arc, Weak};
use std::vec::Vec;

use runs::{Offset, Span};

use super::mapper::MapSource;
use crate::lock::Mutex;
use crate::memory::Memory;
use crate::memory::ledger::Charge;

/// The origins of all address spaces of one owner.
#[derive(Debug, Default)]
pub struct Shares(pub(super) Mutex<Origins>);

/// Origins by memory, whether devices may write, and offset. Those of one memory are disjoint.
#[derive(Debug, Default)]
pub(super) struct Origins(BTreeMap<(usize, bool, u64), Origin>);

#[derive(Debug)]
pub(super) struct Origin {
    len: u64,
    space: u32,
    iova: u64,
    pages: Weak<Pages>,
}

/// The pages of a mapping and of those that are copied from it, with what they are charged.
#[derive(Debug)]
pub(super) struct Pages(Mutex<Used>);

#[derive(Debug)]
struct Used {
    charge: Charge,
    /// Part of each mapping, by offset in the memory: most pages have one mapping.
    parts: Vec<Span<Offset>>,
}

impl Used {
    /// Bytes that some mapping has.
    fn bytes(&mut self) -> u64 {
        self.parts.sort_unstable();
        let mut behind = 0;
        let new = self.parts.iter().map(|part| {
            let (start, end) = (part.start.max(behind), part.start + part.len);
            behind = behind.max(end);
            end.saturating_sub(start)
        });
        new.sum()
    }
}

/// A part of the pages, of one mapping. Dropped, it gives back what no other one has.
#[derive(Debug)]
pub(super) struct Share {
    pages: Arc<Pages>,
    part: Span<Offset>,
}

impl Share {
    /// New pages, which only this part is of.
    pub(super) fn new(charge: Charge, part: Span<Offset>) -> Self {
        let parts = Vec::new();
        Self::of(&Arc::new(Pages(Mutex::new(Used { charge, parts }))), part)
    }

    /// A part of pages that are there.
    pub(super) fn of(pages: &Arc<Pages>, part: Span<Offset>) -> Self {
        pages.0.lock().parts.push(part);
        Self {
            pages: Arc::clone(pages),
            part,
        }
    }

    pub(super) const fn pages(&self) -> &Arc<Pages> {
        &self.pages
    }

    /// Takes `bytes` of the charge away.
    pub(super) fn take_charge(&self, bytes: u64) -> Charge {
        self.pages.0.lock().charge.split(bytes)
    }

    /// Adds to the charge.
    pub(super) fn add_charge(&self, charge: Charge) {
        self.pages.0.lock().charge.join(charge);
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        let mut used = self.pages.0.lock();
        if let Some(place) = used.parts.iter().position(|part| *part == self.part) {
            used.parts.swap_remove(place);
        }
        let bytes = used.bytes();
        used.charge.shrink_to(bytes);
    }
}

/// The address of a memory, which its mappings keep alive.
fn key(memory: &Arc<Memory>) -> usize {
    Arc::as_ptr(memory).addr()
}

impl Origins {
    /// Notes that `space` maps `part` of `memory` at `iova`, and has charged `pages` for it.
    pub(super) fn add(
        &mut self,
        memory: &Arc<Memory>,
        writable: bool,
        part: Span<Offset>,
        (space, iova): (u32, u64),
        pages: &Arc<Pages>,
    ) {
        let origin = Origin {
            len: part.len,
            space,
            iova,
            pages: Arc::downgrade(pages),
        };
        self.0.insert((key(memory), writable, part.start), origin);
    }

    /// Forgets the origin at `offset`, if it is that of `space` at `iova`.
    pub(super) fn remove(
        &mut self,
        memory: &Arc<Memory>,
        writable: bool,
        offset: u64,
        (space, iova): (u32, u64),
    ) {
        let key = (key(memory), writable, offset);
        let ours = |origin: &Origin| (origin.space, origin.iova) == (space, iova);
        if self.0.get(&key).is_some_and(ours) {
            self.0.remove(&key);
        }
    }

    /// Mapping of the first bytes of `part`: the number of bytes, and, if they can be copied, their source and pages. A
    /// writable origin serves readers too.
    pub(super) fn first(
        &self,
        memory: &Arc<Memory>,
        writable: bool,
        part: Span<Offset>,
    ) -> (u64, Option<(MapSource<'static>, Arc<Pages>)>) {
        let memory = key(memory);
        let mut fresh = part.len;
        for kind in [true, false] {
            if writable && !kind {
                continue;
            }
            let last = (memory, kind, part.start);
            let before = self.0.range((memory, kind, 0)..=last).next_back();
            let here = before.filter(|((.., offset), origin)| part.start - offset < origin.len);
            if let Some((&(.., offset), origin)) = here {
                if let Some(pages) = origin.pages.upgrade() {
                    let source = MapSource::Copy {
                        space: origin.space,
                        iova: origin.iova + (part.start - offset),
                    };
                    let len = part.len.min(offset + origin.len - part.start);
                    return (len, Some((source, pages)));
                }
            }
            // The search goes on after the first byte: the piece there cannot be copied, so that there is always
            // progress.
            let behind = (Excluded(last), Included((memory, kind, part.last())));
            if let Some((&(_, _, offset), _)) = self.0.range(behind).next() {
                fresh = fresh.min(offset - part.start);
            }
        }
        (fresh, None)
    }
}
