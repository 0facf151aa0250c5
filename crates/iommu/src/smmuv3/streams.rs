//! The stream table, and the context descriptors behind it: what is attached where.
//!
//! ```text
//! stream table ─StreamID─▶ STE of stage 2: table, VMID
//!                          STE of stage 1 ─▶ contexts ─PASID, or 0─▶ CD: table, ASID
//! ```
//!
//! (IHI 0070, sections 3.3.1 and 3.3.2.) A device gets context descriptors when it is first attached through
//! stage 1, as many as PASIDs are served; number 0 is for requests without one (STE.S1DSS). They stay until
//! the unit is torn down.

use iopt::{NoTables, Root, TableMemory};
use runs::{Pa, Span};

use super::capabilities::{ADDRESS, ALLOCATE, Features};
use super::entry::{Attached, CONTEXT_BITS, Context, Stream, TWO_LEVELS};
use super::table::{Entries, SPLIT};
use crate::driver::Place;
use crate::error::{NoPlace, UnitAttachError};
use crate::unit::{DeviceId, DomainId, Pasid};

/// L1STD.Span: all entries of a page.
const SPAN: u64 = SPLIT as u64 + 1;
/// L1CD.V.
const VALID: u64 = 1;

/// Attachment at a place.
#[derive(Clone, Copy, Debug)]
pub(super) struct Member {
    pub(super) place: Place,
    pub(super) there: Attached,
    pub(super) device_tlb: bool,
}

/// An entry, its context descriptor if it is one of stage 1, and what they say.
type StreamLookup<'m, M> = (Stream<'m, M>, Option<Context<'m, M>>, Attached);

/// All devices.
#[derive(Debug)]
pub(super) struct Streams {
    table: Entries,
    last: u32,
    /// How many devices have a TLB.
    device_tlbs: u32,
}

/// The context descriptors of a device.
fn contexts<M: TableMemory>(stream: &Stream<'_, M>) -> Option<Entries> {
    let word = stream.contexts()?;
    Some(Entries {
        base: word & ADDRESS & !0x3f,
        bits: (word >> CONTEXT_BITS) as u32,
        link: (word & TWO_LEVELS != 0).then_some(VALID),
    })
}

impl Streams {
    /// A table in which no device is attached.
    pub(super) fn new<M: TableMemory>(
        memory: &M,
        last: u32,
        features: Features,
    ) -> Result<Self, NoTables> {
        let (bits, link) = Self::size(last, features);
        Ok(Self {
            table: Entries::new(memory, bits, link)?,
            last,
            device_tlbs: 0,
        })
    }

    /// A table that is there already. Its contents were not read.
    pub(super) fn at(base: u64, last: u32, features: Features) -> Self {
        let (bits, link) = Self::size(last, features);
        Self {
            table: Entries::at(base, bits, link),
            last,
            device_tlbs: 0,
        }
    }

    /// Learns from the entries how many devices have a TLB.
    pub(super) fn count_device_tlbs<M: TableMemory>(&mut self, memory: &M) {
        let with_tlb = |(_, entry): &(u32, _)| Stream(*entry).has_device_tlb();
        self.device_tlbs = self.table.all(memory).filter(with_tlb).count() as u32;
    }

    fn size(last: u32, features: Features) -> (u32, Option<u64>) {
        let bits = u32::BITS - last.leading_zeros();
        (bits, features.two_level_streams().then_some(SPAN))
    }

    /// SMMU_STRTAB_BASE.
    pub(super) const fn base(&self) -> u64 {
        self.table.base & ADDRESS | ALLOCATE
    }

    /// SMMU_STRTAB_BASE_CFG.
    pub(super) const fn shape(&self) -> u32 {
        match self.table.link {
            // FMT, SPLIT.
            Some(_) => 1 << 16 | SPLIT << 6 | self.table.bits,
            None => self.table.bits,
        }
    }

    pub(super) const fn has_device_tlbs(&self) -> bool {
        self.device_tlbs != 0
    }

    /// Refuses a device for which there is no room.
    pub(super) const fn check(&self, device: DeviceId) -> Result<(), UnitAttachError> {
        let last = self.last;
        if device.0 > last {
            return Err(UnitAttachError::Beyond { device, last });
        }
        Ok(())
    }

    fn stream<'m, M: TableMemory>(&self, memory: &'m M, device: DeviceId) -> Option<Stream<'m, M>> {
        self.table.find(memory, device.0).map(Stream)
    }

    /// All attachments of a device.
    fn members_of<M: TableMemory>(
        memory: &M,
        device: DeviceId,
        stream: Stream<'_, M>,
    ) -> impl Iterator<Item = Member> {
        let device_tlb = stream.has_device_tlb();
        let member = move |pasid, there| Member {
            place: Place::of(device, pasid),
            there,
            device_tlb,
        };
        let first = contexts(&stream).into_iter().flat_map(move |contexts| {
            contexts.all(memory).filter_map(move |(number, entry)| {
                let pasid = (number != 0).then_some(Pasid(number));
                Some(member(pasid, Context(entry).read()?))
            })
        });
        let second = stream.second().map(|there| member(None, there));
        second.into_iter().chain(first)
    }

    /// All that is attached.
    pub(super) fn members<M: TableMemory>(&self, memory: &M) -> impl Iterator<Item = Member> {
        self.table
            .all(memory)
            .flat_map(move |(id, entry)| Self::members_of(memory, DeviceId(id), Stream(entry)))
    }

    /// A root of the domain that is not the one that is asked for.
    pub(super) fn other_root<M: TableMemory>(
        &self,
        memory: &M,
        domain: DomainId,
        asked: Root,
    ) -> Option<Root> {
        let mut roots = self.members(memory).map(|member| member.there);
        let other = |there: &Attached| u32::from(there.domain) == domain.0 && there.root != asked;
        roots.find(other).map(|there| there.root)
    }

    /// Refuses a place where something is attached, and a second stage beside the first.
    pub(super) fn is_free<M: TableMemory>(
        &self,
        memory: &M,
        place: Place,
        second_stage: bool,
    ) -> Result<(), UnitAttachError> {
        let device = place.device;
        let Some(stream) = self.stream(memory, device) else {
            return Ok(());
        };
        let through_second = stream.second().is_some();
        let mut members = Self::members_of(memory, device, stream);
        let Some(any) = members.next() else {
            return Ok(());
        };
        // Without a PASID comes first.
        let mut all = core::iter::once(any).chain(members);
        if let Some(member) = all.find(|member| member.place == place) {
            let domain = DomainId(member.there.domain.into());
            return Err(UnitAttachError::AlreadyAttached { device, domain });
        }
        if through_second || second_stage {
            return Err(UnitAttachError::OtherStage { device });
        }
        Ok(())
    }

    /// The entries of a place, with new tables where they are missing. After an error those that were
    /// linked stay, for the next time.
    pub(super) fn make<'m, M: TableMemory>(
        &self,
        memory: &'m M,
        place: Place,
        second_stage: bool,
        features: Features,
    ) -> Result<(Stream<'m, M>, Option<Context<'m, M>>), NoPlace> {
        let entry = self.table.make(memory, place.device.0)?;
        let stream = Stream(entry);
        if second_stage {
            return Ok((stream, None));
        }
        let contexts = match contexts(&stream) {
            Some(contexts) => contexts,
            None => {
                let link = features.two_level_contexts().then_some(VALID);
                let new = Entries::new(memory, features.pasid_bits, link)?;
                let levels = if new.link.is_some() { TWO_LEVELS } else { 0 };
                stream.set_contexts(new.base | levels | u64::from(new.bits) << CONTEXT_BITS);
                new
            }
        };
        let context = contexts.make(memory, place.number())?;
        Ok((stream, Some(Context(context))))
    }

    /// Finds the attachment at a place.
    pub(super) fn find<'m, M: TableMemory>(
        &self,
        memory: &'m M,
        place: Place,
    ) -> Option<StreamLookup<'m, M>> {
        let stream = self.stream(memory, place.device)?;
        if let (None, Some(there)) = (place.pasid, stream.second()) {
            return Some((stream, None, there));
        }
        let context = Context(contexts(&stream)?.find(memory, place.number())?);
        let there = context.read()?;
        Some((stream, Some(context), there))
    }

    /// True when the unit translates by one of the device's context descriptors.
    pub(super) fn is_used<M: TableMemory>(&self, memory: &M, stream: &Stream<'_, M>) -> bool {
        let mut all = contexts(stream).into_iter().flat_map(|all| all.all(memory));
        all.any(|(_, entry)| Context(entry).is_valid())
    }

    /// Notes whether a device has a TLB.
    pub(super) fn set_device_tlb<M: TableMemory>(
        &mut self,
        memory: &M,
        device: DeviceId,
        on: bool,
    ) -> Result<(), UnitAttachError> {
        let entry = if on {
            let made = self.table.make(memory, device.0);
            Some(made.map_err(|cause| cause.of(device))?)
        } else {
            self.table.find(memory, device.0)
        };
        let Some(stream) = entry.map(Stream) else {
            return Ok(());
        };
        if let Some(member) = Self::members_of(memory, device, Stream(stream.0)).next() {
            let domain = DomainId(member.there.domain.into());
            return Err(UnitAttachError::AlreadyAttached { device, domain });
        }
        self.device_tlbs += u32::from(on);
        self.device_tlbs -= u32::from(stream.has_device_tlb());
        stream.set_device_tlb(on);
        Ok(())
    }

    /// Hands all memory to `each`, by name.
    pub(super) fn spans<M: TableMemory>(
        &self,
        memory: &M,
        each: &mut impl FnMut(&'static str, Span<Pa>),
    ) {
        for (_, entry) in self.table.all(memory) {
            if let Some(contexts) = contexts(&Stream(entry)) {
                contexts.spans(memory, &mut |span| each("context descriptors", span));
            }
        }
        self.table
            .spans(memory, &mut |span| each("stream table", span));
    }
}
