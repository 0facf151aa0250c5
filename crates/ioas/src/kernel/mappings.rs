//! Mappings that a kernel has for an address space: its pieces, kept in step with the kernel.
//!
//! [`Mappings::put`] and [`Mappings::take`] are one call to the kernel each. A piece is here from the
//! moment in which the kernel maps it until the kernel has unmapped it, and holds its memory: so
//! whatever becomes of the areas, the kernel never maps memory that is gone. What is still mapped
//! when this is dropped is lost on purpose.
//!
//! Several calls that belong together are noted in a [`Journal`], by which they are undone when a
//! later one fails.

#![allow(unsafe_code)]

use std::boxed::Box;
use std::mem;
use std::sync::Arc;
use std::vec::Vec;

use iopt::Prot;
use runs::{Iova, Span};

use super::mapper::{MapSource, Mapper};
use super::pieces::{Piece, Pieces, Stretch};
use super::shares::{Pages, Share};
use crate::errno::Profile;
use crate::kernel_error::{KernelError, Result};
use crate::memory::object::MemoryObject;

/// A mapper, and what it maps.
pub(super) struct Mappings<K: Mapper> {
    pub(super) mapper: K,
    pub(super) pieces: Pieces,
}

/// Calls to the kernel that have succeeded, in order.
#[derive(Debug, Default)]
pub(super) struct Journal(Vec<Entry>);

#[derive(Debug)]
enum Entry {
    Took(Vec<Piece>),
    Put(Span<Iova>),
}

impl Entry {
    fn taken(self) -> Option<Vec<Piece>> {
        match self {
            Self::Took(pieces) => Some(pieces),
            Self::Put(_) => None,
        }
    }
}

impl Journal {
    /// The pages of the piece that was taken last, and whether it was copied.
    fn last_taken(&self) -> Option<(Arc<Pages>, bool)> {
        match self.0.last()? {
            Entry::Took(pieces) => pieces
                .last()
                .map(|piece| (Arc::clone(piece.share.pages()), piece.copied)),
            Entry::Put(_) => None,
        }
    }
}

/// Source of a mapping for this kernel. iommufd takes registers as a file only.
pub(super) fn source(
    object: &dyn MemoryObject,
    offset: u64,
    profile: Profile,
) -> Option<MapSource<'_>> {
    if profile == Profile::Iommufd {
        #[cfg(feature = "iommufd")]
        if let Some((file, base)) = object.file() {
            return Some(MapSource::File(file, base.checked_add(offset)?));
        }
        if object.is_mmio() {
            return None;
        }
    }
    let address = object.in_process()?.address().checked_add(offset)?;
    Some(MapSource::Address(address))
}

/// The kernel has made new pages for a piece, since what is copied from it keeps the old ones.
fn charge_again(piece: &mut Piece) {
    let (stretch, ledger) = (&piece.stretch, piece.stretch.memory.ledger());
    // The kernel knows the limit better: where the ledger forbids this, the books are behind.
    if let Ok(charge) = ledger.charge(stretch.charge()) {
        piece.share = Share::new(charge, stretch.part());
    }
}

impl<K: Mapper> Mappings<K> {
    /// Has the kernel map a piece.
    pub(super) fn put(&mut self, mut piece: Piece, journal: &mut Journal) -> Result<()> {
        self.put_with_pages(&mut piece)?;
        journal.0.push(Entry::Put(piece.stretch.range));
        self.note_origin(&piece);
        self.pieces.insert(piece);
        Ok(())
    }

    /// Has the kernel map a piece, which has the pages then that the kernel has for it.
    fn put_with_pages(&mut self, piece: &mut Piece) -> Result<()> {
        match self.put_now(piece)? {
            Some(pages) if Arc::ptr_eq(&pages, piece.share.pages()) => {}
            Some(pages) => piece.share = Share::of(&pages, piece.stretch.part()),
            None if piece.copied => {
                piece.copied = false;
                charge_again(piece);
            }
            None => {}
        }
        Ok(())
    }

    /// Maps a piece; returns the pages that a copied one comes from.
    fn put_now(&mut self, piece: &Piece) -> Result<Option<Arc<Pages>>> {
        let Stretch {
            range,
            memory,
            offset,
            prot,
        } = &piece.stretch;
        let writable = prot.contains(Prot::WRITE);
        let part = piece.stretch.part();
        let shares = self.mapper.shares().cloned();
        // Locked over the call: what is copied from stays where it is.
        let origins = shares.as_ref().map(|shares| shares.0.lock());
        let copy = origins
            .as_ref()
            .filter(|_| piece.copied)
            .and_then(|origins| {
                let (len, origin) = origins.first(memory, writable, part);
                origin.filter(|_| len == part.len)
            });
        let (source, pages) = match copy {
            Some((source, pages)) => (Some(source), Some(pages)),
            None => (source(&**memory.object(), *offset, K::PROFILE), None),
        };
        let Some(source) = source else {
            // Looked at before; the answer does not change.
            return Err(KernelError::NoSource);
        };
        // SAFETY: the piece holds the memory object, which has promised with `ProcessMemory` how
        // its memory stays and is accessed. The piece stays until the kernel has unmapped it.
        unsafe { self.mapper.map(*range, source, *prot) }?;
        Ok(pages)
    }

    /// Has the kernel unmap the pieces in `range`, which cuts none, with one call.
    pub(super) fn take(&mut self, range: Span<Iova>, journal: &mut Journal) -> Result<()> {
        let inside: Vec<u64> = self
            .pieces
            .overlapping(range.start, range.last())
            .map(|piece| piece.stretch.range.start)
            .collect();
        if inside.is_empty() {
            return Ok(());
        }
        if let Err(cause) = self.mapper.unmap(range) {
            if K::PROFILE == Profile::Iommufd {
                // Pieces before the one that it did not like may be gone.
                self.put_again(&inside);
            }
            return Err(cause);
        }
        let taken = self.remove(&inside);
        journal.0.push(Entry::Took(taken));
        Ok(())
    }

    /// Maps what of these pieces is not mapped any more. Where that fails it is not known whether the
    /// kernel maps them, so that they stay in the books.
    fn put_again(&mut self, starts: &[u64]) {
        for mut piece in self.remove(starts) {
            let copies = !piece.copied && Arc::strong_count(piece.share.pages()) > 1;
            if self.put_with_pages(&mut piece).is_ok() && copies {
                charge_again(&mut piece);
            }
            self.note_origin(&piece);
            self.pieces.insert(piece);
        }
    }

    /// Others can be copied from this piece, if it is not copied itself and has memory. Registers of a device cost no
    /// pin, and the kernel takes a revoked dma-buf of them out of the tables for good, but not the mapping: a copy
    /// would translate nothing, without an error.
    ///
    /// Source: Linux 7.2, `drivers/iommu/iommufd/pages.c`, `iopt_revoke_notify` and `iopt_area_fill_domains`.
    fn note_origin(&self, piece: &Piece) {
        let can_be_copied = !piece.copied && !piece.stretch.memory.object().is_mmio();
        if let (Some(shares), true) = (self.mapper.shares(), can_be_copied) {
            let (stretch, at) = (&piece.stretch, piece.stretch.range.start);
            let writable = stretch.prot.contains(Prot::WRITE);
            let place = (self.mapper.number(), at);
            let mut origins = shares.0.lock();
            let pages = piece.share.pages();
            origins.add(&stretch.memory, writable, stretch.part(), place, pages);
        }
    }

    /// Takes pieces out of the books. Those that others are copied from come first.
    pub(super) fn remove(&mut self, starts: &[u64]) -> Vec<Piece> {
        let shares = self.mapper.shares().cloned();
        let mut origins = shares.as_ref().map(|shares| shares.0.lock());
        let number = self.mapper.number();
        let mut taken = Vec::with_capacity(starts.len());
        for start in starts {
            let Some(piece) = self.pieces.remove(*start) else {
                continue;
            };
            if let Some(origins) = &mut origins {
                let stretch = &piece.stretch;
                let writable = stretch.prot.contains(Prot::WRITE);
                origins.remove(&stretch.memory, writable, stretch.offset, (number, *start));
            }
            taken.push(piece);
        }
        taken.sort_by_key(|piece| piece.copied);
        taken
    }

    /// Maps of a piece only the ranges in `rest`, which share its charge.
    pub(super) fn shrink(
        &mut self,
        piece: &Stretch,
        rest: &[Span<Iova>],
        journal: &mut Journal,
    ) -> Result<()> {
        self.take(piece.range, journal)?;
        let Some((pages, copied)) = journal.last_taken() else {
            return Ok(());
        };
        for range in rest {
            let stretch = piece.at(*range);
            let stays = Piece {
                share: Share::of(&pages, stretch.part()),
                stretch,
                copied,
            };
            self.put(stays, journal)?;
        }
        Ok(())
    }

    /// Maps as one piece what is several now.
    pub(super) fn merge(&mut self, group: &Stretch, journal: &mut Journal) -> Result<()> {
        self.take(group.range, journal)?;
        // Nothing more is charged: what the pieces are charged goes over to the whole below.
        let Ok(nothing) = group.memory.ledger().charge(0) else {
            return Err(KernelError::NoSource);
        };
        let whole = Piece {
            stretch: group.clone(),
            share: Share::new(nothing, group.part()),
            copied: false,
        };
        let pages = Arc::clone(whole.share.pages());
        self.put(whole, journal)?;
        let whole = Share::of(&pages, group.part());
        let taken = mem::take(&mut journal.0).into_iter();
        for piece in taken.filter_map(Entry::taken).flatten() {
            whole.add_charge(piece.share.take_charge(piece.stretch.charge()));
        }
        Ok(())
    }

    /// Undoes what is in the journal, last things first. What cannot be mapped again is no piece any
    /// more.
    pub(super) fn undo(&mut self, journal: Journal) {
        for entry in journal.0.into_iter().rev() {
            let mut unread = Journal::default();
            match entry {
                Entry::Put(range) => drop(self.take(range, &mut unread)),
                Entry::Took(pieces) => {
                    for mut piece in pieces {
                        let copies = !piece.copied && Arc::strong_count(piece.share.pages()) > 1;
                        if copies {
                            charge_again(&mut piece);
                        }
                        let _ = self.put(piece, &mut unread);
                    }
                }
            }
        }
    }

    /// `stretch`, in the parts that can be copied, with their pages, and those that cannot.
    pub(super) fn plan(&self, stretch: &Stretch, plan: &mut Vec<(Stretch, Option<Arc<Pages>>)>) {
        let Some(shares) = self.mapper.shares() else {
            plan.push((stretch.clone(), None));
            return;
        };
        let origins = shares.0.lock();
        let writable = stretch.prot.contains(Prot::WRITE);
        let mut rest = stretch.clone();
        loop {
            let (len, copy) = origins.first(&rest.memory, writable, rest.part());
            let here = rest.at(Span::new(rest.range.start, len));
            plan.push((here, copy.map(|(_, pages)| pages)));
            if len >= rest.range.len {
                return;
            }
            rest = rest.at(Span::new(rest.range.start + len, rest.range.len - len));
        }
    }

    /// The pieces at `starts` are what has stayed of a larger one, whose pages they have. If others
    /// are copied from these, the kernel has charged what stays once more.
    pub(super) fn part_pages(&mut self, starts: &[u64]) {
        let pieces = self.remove(starts);
        let fresh = || pieces.iter().filter(|piece| !piece.copied);
        let has_copies = |piece: &Piece| {
            let pages = piece.share.pages();
            let ours = fresh().filter(|other| Arc::ptr_eq(other.share.pages(), pages));
            !piece.copied && Arc::strong_count(pages) > ours.count()
        };
        let charged_again: Vec<bool> = pieces.iter().map(has_copies).collect();
        for (mut piece, again) in pieces.into_iter().zip(charged_again) {
            if again {
                charge_again(&mut piece);
            }
            self.note_origin(&piece);
            self.pieces.insert(piece);
        }
    }

    /// True when another process could take over all of it.
    pub(super) fn can_move(&self) -> bool {
        let mut pieces = self.pieces.iter();
        pieces.all(|piece| {
            let object = &**piece.stretch.memory.object();
            match K::PROFILE {
                Profile::Type1 => true,
                Profile::Iommufd => {
                    // Not a dma-buf's.
                    !object.is_mmio()
                        && matches!(source(object, 0, K::PROFILE), Some(MapSource::File(..)))
                }
            }
        })
    }

    /// Takes over what another process has mapped: each piece's memory is at another address.
    pub(super) fn take_over(
        &mut self,
        devices: &[Arc<K::Device>],
        pieces: Vec<Piece>,
    ) -> Result<()> {
        let mut mappings = Vec::with_capacity(pieces.len());
        for piece in &pieces {
            let stretch = &piece.stretch;
            let source = source(&**stretch.memory.object(), stretch.offset, K::PROFILE);
            mappings.push((stretch.range, source.ok_or(KernelError::NoSource)?));
        }
        // SAFETY: as for `put_now`. After an error a container may know some of the addresses, so
        // that the pieces stay for good. iommufd has taken over all or nothing, and only files.
        if let Err(cause) = unsafe { self.mapper.take_over(devices, &mappings) } {
            drop(mappings);
            if K::PROFILE == Profile::Type1 {
                mem::forget(pieces);
            }
            return Err(cause);
        }
        drop(mappings);
        for piece in pieces {
            self.pieces.insert(piece);
        }
        Ok(())
    }
}

impl<K: Mapper> Drop for Mappings<K> {
    fn drop(&mut self) {
        if !self.pieces.is_empty() {
            Box::leak(Box::new(mem::take(&mut self.pieces)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::fixed::FixedRuns;
    use crate::memory::object::{PinFailed, Pinned, ProcessMemory};
    use core::ops::ControlFlow;
    use runs::Offset;

    /// Registers that this process has mapped.
    #[derive(Debug)]
    struct Mappings;

    impl MemoryObject for Mappings {
        fn len(&self) -> u64 {
            0x1000
        }

        fn charge(&self, _: Span<Offset>) -> u64 {
            0
        }

        fn is_mmio(&self) -> bool {
            true
        }

        fn pin(
            &self,
            _: Span<Offset>,
            _: &mut dyn FnMut(u64) -> ControlFlow<()>,
        ) -> core::result::Result<Box<dyn Pinned>, PinFailed> {
            Err(PinFailed::Interrupted)
        }

        fn in_process(&self) -> Option<ProcessMemory> {
            // SAFETY: no code but this test has the address.
            Some(unsafe { ProcessMemory::new(0x7000) })
        }
    }

    #[test]
    fn a_kernel_gets_registers_only_in_the_way_that_it_takes() {
        let bar = FixedRuns::bar(Span::new(0xfe00_0000, 0x1000), 0x1000);
        let bar = bar.unwrap_or_else(|error| unreachable!("{error}"));
        for profile in [Profile::Type1, Profile::Iommufd] {
            assert!(source(&bar, 0, profile).is_none());
        }
        let found = source(&Mappings, 0x10, Profile::Type1);
        assert!(matches!(found, Some(MapSource::Address(0x7010))));
        assert!(source(&Mappings, 0x10, Profile::Iommufd).is_none());
    }
}
