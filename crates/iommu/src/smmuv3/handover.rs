//! The unit's memory, and its hand-over. The head of the driver lists the contents of the description.
//!
//! Notes on domains belong to the driver, and follow from the attachments: they are dropped with the predecessor, and
//! the successor makes its own.

use iopt::{Root, TABLE_BYTES, TableMemory};
use runs::{Pa, Span};

use super::Config;
use super::capabilities::{
    ADDRESS, CMDQEN, CR0ACK, EVENTQ_BASE, EVENTQEN, Features, SMMUEN, STRTAB_BASE, STRTAB_BASE_CFG,
};
use super::domains::{Domains, Shape};
use super::faults::Events;
use super::queue::{self, Queue};
use super::streams::Streams;
use super::unit::{Hardware, Inner};
use crate::capabilities::UnitCapabilities;
use crate::driver::{Back, InMemory, pages};
use crate::handover::{UnitAdoptError, UnitKind, WORDS};
use crate::registers::Registers;
use crate::ring::{Layout, Ring};
use crate::setup::{UnitProbeError, UnitSetupError};
use crate::unit::DomainId;

fn last_device(config: &Config, features: Features) -> u32 {
    config.last_device.min(features.last_stream())
}

/// A page of events, of 32 bytes each.
fn event_queue(entries: u64, features: Features) -> Events {
    let log2 = features.queue_log2(16, 7);
    Events { entries, log2 }
}

impl InMemory for Hardware {
    const KIND: UnitKind = UnitKind::SmmuV3;
    type Queue = Queue;

    fn probe<R: Registers>(
        registers: &R,
        config: &mut Config,
    ) -> Result<(Features, UnitCapabilities), UnitProbeError> {
        let features = Features::read(registers, config)?;
        Ok((features, features.capabilities(config)?))
    }

    fn build<M: TableMemory>(
        memory: &M,
        config: &Config,
        features: Features,
    ) -> Result<Inner, UnitSetupError> {
        let streams = Streams::new(memory, last_device(config, features), features)?;
        let [commands, status, events] =
            pages(memory, |mut back| streams.spans(memory, &mut back))?;
        Ok(Inner {
            streams,
            domains: Domains::default(),
            ring: queue::new([commands, status], features, 0),
            events: event_queue(events, features),
        })
    }

    fn ring(inner: &mut Inner) -> &mut Ring<Queue> {
        &mut inner.ring
    }

    fn for_each_structure<M: TableMemory>(
        inner: &Inner,
        memory: &M,
        _config: &Config,
        each: &mut impl FnMut(&'static str, Span<Pa>),
    ) {
        inner.streams.spans(memory, each);
        let mut page = |name, start| each(name, Span::new(start, TABLE_BYTES));
        inner.ring.for_each_page(&mut page);
        page("event queue", inner.events.entries);
    }

    fn for_each_own_page(inner: &Inner, each: &mut impl FnMut(u64)) {
        inner.domains.pages().for_each(each);
    }

    fn for_each_table<M: TableMemory>(
        inner: &Inner,
        memory: &M,
        _config: &Config,
        each: &mut impl FnMut(DomainId, Root),
    ) {
        for member in inner.streams.members(memory) {
            each(DomainId(member.there.domain.into()), member.there.root);
        }
    }

    fn describe(inner: &Inner, _config: &Config) -> [u64; WORDS] {
        let Inner {
            streams,
            ring,
            events,
            ..
        } = inner;
        let Layout {
            entries, status, ..
        } = ring.layout;
        // Bit 0: the unit is in use. From bit 32 on: the stream table's shape.
        let state = u64::from(ring.open) | u64::from(streams.shape()) << 32;
        let base = streams.base() & ADDRESS;
        [state, base, entries, status, events.entries, ring.ticket]
    }

    fn resume<R: Registers, M: TableMemory>(
        (registers, memory): (&R, &M),
        config: &Config,
        features: Features,
        words: [u64; WORDS],
    ) -> Result<Inner, UnitAdoptError> {
        let [state, base, commands, status, events, ticket] = words;
        let mut ring = queue::new([commands, status], features, ticket);
        let events = event_queue(events, features);
        let mut streams = Streams::at(base, last_device(config, features), features);
        let shape = streams.shape().into();
        UnitAdoptError::compare("the stream table's shape", shape, state >> 32, !0)?;
        if state & 1 != 0 {
            let on = u64::from(SMMUEN | EVENTQEN | CMDQEN);
            let found = registers.read32(CR0ACK).into();
            UnitAdoptError::compare("SMMU_CR0ACK", found, on, on)?;
            let found = registers.read64(STRTAB_BASE);
            UnitAdoptError::compare("SMMU_STRTAB_BASE", found, base, ADDRESS)?;
            let found = registers.read32(STRTAB_BASE_CFG).into();
            UnitAdoptError::compare("SMMU_STRTAB_BASE_CFG", found, streams.shape().into(), !0)?;
            let found = registers.read64(EVENTQ_BASE);
            UnitAdoptError::compare("SMMU_EVENTQ_BASE", found, events.base(), ADDRESS)?;
            ring.resume(registers)?;
        }
        streams.count_device_tlbs(memory);
        let mut domains = Domains::default();
        for member in streams.members(memory) {
            let shape = Shape::of(member.there.root.format);
            if let Err(cause) = domains.set(memory, member.there.domain, shape) {
                let mut back = Back::new(memory);
                domains.pages().for_each(|page| back.page(page));
                back.reclaim();
                return Err(UnitSetupError::NoTables(cause).into());
            }
        }
        Ok(Inner {
            streams,
            domains,
            ring,
            events,
        })
    }
}
