//! The unit's memory, and its hand-over. The head of the driver lists the contents of the description.

use iopt::{Root, TABLE_BYTES, TableMemory};
use runs::{Pa, Span};

use super::capabilities::{CONTROL, DEVICE_TABLE, EVENTS, Features, RING, RING_LENGTH, TRANSLATE};
use super::faults::Log;
use super::queue::{self, Queue};
use super::table::DeviceTable;
use super::unit::{Hardware, Inner};
use super::{Config, Mode, guest};
use crate::capabilities::UnitCapabilities;
use crate::driver::{InMemory, pages};
use crate::handover::{UnitAdoptError, UnitKind, WORDS};
use crate::notes::Notes;
use crate::registers::Registers;
use crate::ring::{Layout, Ring};
use crate::setup::{UnitProbeError, UnitSetupError};
use crate::unit::DomainId;

impl InMemory for Hardware {
    const KIND: UnitKind = UnitKind::AmdVi;
    type Queue = Queue;

    fn probe<R: Registers>(
        registers: &R,
        config: &mut Config,
    ) -> Result<(Features, UnitCapabilities), UnitProbeError> {
        let features = Features::read(registers)?;
        Ok((features, features.capabilities(config)?))
    }

    fn build<M: TableMemory>(
        memory: &M,
        config: &Config,
        _features: Features,
    ) -> Result<Inner, UnitSetupError> {
        let table = DeviceTable::new(memory, config.last_device)?;
        let [entries, status, log] = pages(memory, |back| back("device table", table.span()))?;
        let log = Log {
            entries: log,
            segment: config.segment,
            head: 0,
        };
        Ok(Inner {
            table,
            ring: queue::new([entries, status], log, 0),
            notes: Notes::new(Some(status)),
        })
    }

    fn ring(inner: &mut Inner) -> &mut Ring<Queue> {
        &mut inner.ring
    }

    fn for_each_structure<M: TableMemory>(
        inner: &Inner,
        memory: &M,
        config: &Config,
        each: &mut impl FnMut(&'static str, Span<Pa>),
    ) {
        let Inner { table, ring, notes } = inner;
        let mut page = |name, start| each(name, Span::new(start, TABLE_BYTES));
        let levels = guest::levels(config.pasid_bits);
        for (_, first) in table.guests(memory) {
            guest::for_each_page(memory, first, levels, &mut |start| {
                page("guest CR3 table", start);
            });
        }
        // Each page is asked for the next one before it may be gone.
        let further = notes.further(memory);
        further.for_each(|start| page("notes of members", start));
        ring.for_each_page(&mut page);
        page("event log", ring.queue.log.entries);
        each("device table", table.span());
    }

    fn for_each_table<M: TableMemory>(
        inner: &Inner,
        memory: &M,
        config: &Config,
        each: &mut impl FnMut(DomainId, Root),
    ) {
        let Inner { table, notes, .. } = inner;
        for (_, there) in table.attached(memory) {
            each(DomainId(there.domain.into()), there.root);
        }
        let levels = guest::levels(config.pasid_bits);
        let members = (config.mode == Mode::Guest).then(|| notes.all(memory));
        for member in members.into_iter().flatten() {
            if let Some(root) = guest::root_of(memory, table, levels, member) {
                each(DomainId(member.domain.into()), root);
            }
        }
    }

    fn describe(inner: &Inner, config: &Config) -> [u64; WORDS] {
        let Inner { table, ring, .. } = inner;
        let Layout {
            entries, status, ..
        } = ring.layout;
        // Bit 63: the unit is in use. From bit 40 on the mode, from 48 on the bits of a PASID.
        let used = table.describe() | u64::from(ring.open) << 63 | config.describe();
        // A page, and where it is to be read on.
        let log = ring.queue.log.entries | ring.queue.log.head as u64;
        [used, table.base, entries, status, log, ring.ticket]
    }

    fn resume<R: Registers, M: TableMemory>(
        (registers, memory): (&R, &M),
        config: &Config,
        _features: Features,
        words: [u64; WORDS],
    ) -> Result<Inner, UnitAdoptError> {
        let [used, base, entries, status, log, ticket] = words;
        let events = log & !(TABLE_BYTES - 1);
        let (mode, bits) = (config.describe() >> 40 & 0xff, config.pasid_bits.into());
        UnitAdoptError::compare("the mode", mode, used >> 40, 0xff)?;
        UnitAdoptError::compare("bits of a PASID", bits, used >> 48, 0xff)?;
        let table = DeviceTable::adopt(base, config.last_device, used);
        let log = Log {
            entries: events,
            segment: config.segment,
            head: log as usize % RING,
        };
        let mut ring = queue::new([entries, status], log, ticket);
        if used >> 63 == 1 {
            let on = registers.read64(CONTROL);
            UnitAdoptError::compare("Control", on, TRANSLATE, TRANSLATE)?;
            let found = registers.read64(DEVICE_TABLE);
            UnitAdoptError::compare("Device Table Base", found, table.register(), !0)?;
            let found = registers.read64(EVENTS);
            UnitAdoptError::compare("Event Log Base", found, events | RING_LENGTH, !0)?;
            ring.resume(registers)?;
        }
        let notes = Notes::adopt(memory, Some(status));
        Ok(Inner { table, ring, notes })
    }
}
