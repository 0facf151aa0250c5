//! Notes on devices, kept beside the unit's own structures: devices with their TLB switched on, and members of a
//! domain, where every flush needs them and they are too far apart in the structures.
//!
//! Notes are words. They lie in the page to which the unit writes its answers to waits, behind the one word that the
//! unit uses, and in further pages when that is full, each linked in the last word of the one before. So a successor
//! finds them with the page, and a driver that needs none takes no memory. The unit never reads them.
//!
//! A member is noted before its entry is present, and is removed when its entry is empty: every entry
//! that the unit may use, or have cached, is noted.

use iopt::{Cell, TABLE_BYTES, TableMemory};

use crate::error::NoPlace;
use crate::unit::DeviceTlb;

/// Words of a page; the last one is the link.
const WORDS: usize = TABLE_BYTES as usize / 8;
/// Words of the first page that are the unit's: a cache line.
const UNITS: usize = 8;
/// More pages than all devices could need with some hundred PASIDs each: a bound for damaged memory.
const MOST_PAGES: usize = 1 << 16;

/// A device, or a PASID of it, that is in a domain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Member {
    pub(crate) source: u16,
    /// 0 for requests without one.
    pub(crate) pasid: u32,
    pub(crate) domain: u16,
    /// The device's TLB, by its queue depth.
    pub(crate) tlb: Option<u8>,
}

/// Kinds, in bits 63:62; 0 is an empty place.
const MEMBER: u64 = 1 << 62;
const TLB: u64 = 2 << 62;
const KIND: u64 = 3 << 62;

impl Member {
    const fn word(self) -> u64 {
        let tlb = match self.tlb {
            Some(depth) => 1 << 57 | (depth as u64 & 0x1f) << 52,
            None => 0,
        };
        let place = self.source as u64 | (self.pasid as u64 & 0xf_ffff) << 16;
        MEMBER | tlb | (self.domain as u64) << 36 | place
    }

    fn read(word: u64) -> Option<Self> {
        (word & KIND == MEMBER).then_some(Self {
            source: word as u16,
            pasid: (word >> 16) as u32 & 0xf_ffff,
            domain: (word >> 36) as u16,
            tlb: (word >> 57 & 1 == 1).then_some((word >> 52) as u8 & 0x1f),
        })
    }
}

/// The notes.
#[derive(Debug)]
pub(crate) struct Notes {
    /// `None` where nothing is ever noted: the unit has no such page.
    first: Option<u64>,
    /// Places in use, and free ones between them.
    len: usize,
}

impl Notes {
    /// Nothing is noted in `first`, a page of which the unit uses one word.
    pub(crate) const fn new(first: Option<u64>) -> Self {
        Self { first, len: 0 }
    }

    /// Adopts a predecessor's notes.
    pub(crate) fn adopt<M: TableMemory>(memory: &M, first: Option<u64>) -> Self {
        let mut notes = Self::new(first);
        notes.len = used(notes.places(memory));
        notes
    }

    /// The pages beside the first.
    pub(crate) fn further<'m, M: TableMemory>(
        &self,
        memory: &'m M,
    ) -> impl Iterator<Item = u64> + Clone + use<'m, M> {
        self.pages(memory).skip(1)
    }

    fn pages<'m, M: TableMemory>(
        &self,
        memory: &'m M,
    ) -> impl Iterator<Item = u64> + Clone + use<'m, M> {
        let next = |page: &u64| {
            let link = memory.entries(*page, WORDS).get(WORDS - 1)?.get();
            (link != 0).then_some(link)
        };
        core::iter::successors(self.first, next).take(MOST_PAGES)
    }

    /// All places for notes.
    fn places<'m, M: TableMemory>(
        &self,
        memory: &'m M,
    ) -> impl Iterator<Item = &'m M::Cell> + Clone + use<'m, M> {
        let pages = self.pages(memory).enumerate();
        pages.flat_map(|(n, page)| {
            let first = if n == 0 { UNITS } else { 0 };
            let cells = memory.entries(page, WORDS).get(first..WORDS - 1);
            cells.unwrap_or_default().iter()
        })
    }

    fn words<'m, M: TableMemory>(
        &self,
        memory: &'m M,
    ) -> impl Iterator<Item = u64> + Clone + use<'m, M> {
        self.places(memory).take(self.len).map(Cell::get)
    }

    /// The depth of the queue in the device's TLB, if it has one that is switched on.
    pub(crate) fn tlb<M: TableMemory>(&self, memory: &M, source: u16) -> Option<u8> {
        let mut words = self.words(memory);
        let word = words.find(|word| word & KIND == TLB && *word as u16 == source);
        word.map(|word| (word >> 52) as u8 & 0x1f)
    }

    /// Notes a device's TLB, or that it is off.
    pub(crate) fn set_tlb<M: TableMemory>(
        &mut self,
        memory: &M,
        source: u16,
        tlb: Option<DeviceTlb>,
    ) -> Result<(), NoPlace> {
        self.clear(memory, |word| word & KIND == TLB && word as u16 == source);
        match tlb {
            // 32 is 0.
            Some(tlb) => {
                let depth = u64::from(tlb.queue_depth) & 0x1f;
                self.put(memory, TLB | depth << 52 | u64::from(source))
            }
            None => Ok(()),
        }
    }

    /// Notes a member.
    pub(crate) fn add<M: TableMemory>(
        &mut self,
        memory: &M,
        member: Member,
    ) -> Result<(), NoPlace> {
        self.put(memory, member.word())
    }

    /// Removes a member, if it is noted.
    pub(crate) fn remove<M: TableMemory>(&mut self, memory: &M, source: u16, pasid: u32) {
        self.clear(memory, |word| {
            Member::read(word).is_some_and(|there| (there.source, there.pasid) == (source, pasid))
        });
    }

    /// The members of a domain that are noted.
    pub(crate) fn members<'m, M: TableMemory>(
        &self,
        memory: &'m M,
        domain: u16,
    ) -> impl Iterator<Item = Member> + Clone + use<'m, M> {
        self.all(memory)
            .filter(move |member| member.domain == domain)
    }

    /// Returns the note of a device's PASID.
    pub(crate) fn member<M: TableMemory>(
        &self,
        memory: &M,
        source: u16,
        pasid: u32,
    ) -> Option<Member> {
        let mut members = self.all(memory);
        members.find(|member| (member.source, member.pasid) == (source, pasid))
    }

    /// All members.
    pub(crate) fn all<'m, M: TableMemory>(
        &self,
        memory: &'m M,
    ) -> impl Iterator<Item = Member> + Clone + use<'m, M> {
        self.words(memory).filter_map(Member::read)
    }

    /// A domain in which the device is noted, whatever the PASID.
    pub(crate) fn domain_of<M: TableMemory>(&self, memory: &M, source: u16) -> Option<u16> {
        let member = self.all(memory).find(|member| member.source == source);
        member.map(|member| member.domain)
    }

    fn put<M: TableMemory>(&mut self, memory: &M, word: u64) -> Result<(), NoPlace> {
        let free = |notes: &Self| {
            let mut places = notes.places(memory).enumerate();
            places.find(|(_, cell)| cell.get() == 0)
        };
        let mut found = free(self);
        if let (None, Some(last)) = (found, self.pages(memory).last()) {
            let page = memory.allocate(TABLE_BYTES as usize)?;
            if let Some(link) = memory.entries(last, WORDS).get(WORDS - 1) {
                link.set(page);
            }
            found = free(self);
        }
        let Some((n, cell)) = found else {
            return Err(NoPlace::Cells(self.pages(memory).last().unwrap_or(0)));
        };
        cell.set(word);
        self.len = self.len.max(n + 1);
        Ok(())
    }

    fn clear<M: TableMemory>(&mut self, memory: &M, is: impl Fn(u64) -> bool) {
        let places = self.places(memory).take(self.len);
        places
            .clone()
            .filter(|cell| is(cell.get()))
            .for_each(|cell| cell.set(0));
        self.len = used(places);
    }
}

/// Places up to the last one that is not empty.
fn used<'c, C: Cell + 'c>(places: impl Iterator<Item = &'c C>) -> usize {
    let used = places.enumerate().filter(|(_, cell)| cell.get() != 0);
    used.last().map_or(0, |(n, _)| n + 1)
}

#[cfg(test)]
mod tests {
    use std::vec::Vec;

    use iopt::HeapTables;

    use super::*;

    fn member(n: u32) -> Member {
        Member {
            source: (n % 7) as u16 * 0x2421,
            pasid: 0xf_ffff - n,
            domain: n as u16 % 3,
            tlb: (n & 1 == 0).then_some(n as u8 & 0x1f),
        }
    }

    #[test]
    fn what_is_noted_is_found_again_also_by_a_successor() {
        let memory = HeapTables::with_tables(16).unwrap();
        let first = memory.allocate(4096).unwrap();
        // Word written by the unit.
        memory.entries(first, WORDS)[0].set(u64::MAX);
        let mut notes = Notes::new(Some(first));
        let depth = |queue_depth| Some(DeviceTlb { queue_depth });
        notes.set_tlb(&memory, 0xffff, depth(32)).unwrap();
        notes.set_tlb(&memory, 0xfffe, depth(31)).unwrap();
        // Three pages.
        (0..1200).for_each(|n| notes.add(&memory, member(n)).unwrap());
        assert_eq!(memory.in_use(), 3);
        for n in (0..1200).filter(|n| n % 5 != 0) {
            notes.remove(&memory, member(n).source, member(n).pasid);
        }
        let again = Notes::adopt(&memory, Some(first));
        assert_eq!((again.len, again.further(&memory).count()), (notes.len, 2));
        for domain in 0..3 {
            let left = (0..1200).filter(|n| n % 5 == 0).map(member);
            let left: Vec<_> = left.filter(|member| member.domain == domain).collect();
            assert_eq!(again.members(&memory, domain).collect::<Vec<_>>(), left);
        }
        assert_eq!(again.tlb(&memory, 0xffff), Some(0));
        assert_eq!(again.tlb(&memory, 0xfffe), Some(31));
        assert_eq!(again.tlb(&memory, 0x2421), None);
        assert_eq!(again.domain_of(&memory, 0), Some(0));
        assert_eq!(again.domain_of(&memory, 0xffff), None);
        // Free places come first.
        let mut notes = again;
        (0..960).for_each(|n| notes.add(&memory, member(n)).unwrap());
        assert_eq!(memory.in_use(), 3);
        assert_eq!(memory.entries(first, WORDS)[0].get(), u64::MAX);
    }

    #[test]
    fn without_a_page_or_memory_nothing_is_noted() {
        let memory = HeapTables::with_tables(16).unwrap();
        let mut nowhere = Notes::new(None);
        assert_eq!(nowhere.members(&memory, 0).count(), 0);
        let first = memory.allocate(4096).unwrap();
        while memory.allocate(4096).is_ok() {}
        assert!(nowhere.add(&memory, member(0)).is_err());
        let mut notes = Notes::new(Some(first));
        let most = WORDS - 1 - UNITS;
        (0..most as u32).for_each(|n| notes.add(&memory, member(n)).unwrap());
        assert!(notes.add(&memory, member(9999)).is_err());
        notes.remove(&memory, member(0).source, member(0).pasid);
        notes.add(&memory, member(9999)).unwrap();
    }
}
