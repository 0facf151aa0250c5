//! The unit's memory, and its hand-over. The head of the driver lists the contents of the description.

use iopt::{Root, TABLE_BYTES, TableMemory};
use runs::{Pa, Span};

use super::capabilities::{Features, GSTS, IQA, IQH, IQT, QUEUE, RTADDR, SCALABLE, TRANSLATION};
use super::queue::{self, Queue};
use super::structures::Structures;
use super::unit::{Hardware, Inner};
use super::{Config, Mode};
use crate::capabilities::UnitCapabilities;
use crate::driver::{InMemory, pages};
use crate::handover::{UnitAdoptError, UnitKind, WORDS};
use crate::notes::Notes;
use crate::registers::Registers;
use crate::ring::{Layout, Ring};
use crate::setup::{UnitProbeError, UnitSetupError};
use crate::unit::DomainId;

impl InMemory for Hardware {
    const KIND: UnitKind = UnitKind::Vtd;
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
        features: Features,
    ) -> Result<Inner, UnitSetupError> {
        let structures = Structures::new(memory, config)?;
        let queue = match features.queue() {
            true => pages(memory, |back| {
                back("root table", Span::new(structures.root, TABLE_BYTES));
            })?,
            false => [0; 2],
        };
        let ring = queue::new(queue, config.mode, features, 0);
        Ok(Inner {
            structures,
            notes: Notes::new(ring.layout.answers()),
            ring,
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
        let mut page = |name, start| each(name, Span::new(start, TABLE_BYTES));
        inner.structures.for_each(memory, &mut page);
        // Each page is asked for the next one before it may be gone.
        let further = inner.notes.further(memory);
        further.for_each(|start| page("notes of members", start));
        inner.ring.for_each_page(&mut page);
    }

    fn for_each_table<M: TableMemory>(
        inner: &Inner,
        memory: &M,
        _config: &Config,
        each: &mut impl FnMut(DomainId, Root),
    ) {
        inner.structures.search(memory, |there| {
            each(DomainId(there.domain.into()), there.root);
            None::<()>
        });
    }

    /// Bit 0 whether the unit is in use, from bit 8 on the mode, from bit 16 on the bits of a PASID; the root
    /// table; descriptors and status, 0 without a queue; the last ticket.
    fn describe(inner: &Inner, config: &Config) -> [u64; WORDS] {
        let Inner {
            structures, ring, ..
        } = inner;
        let Layout {
            entries, status, ..
        } = ring.layout;
        let bits = u64::from(config.pasid_bits);
        let state = u64::from(ring.open) | (config.mode as u64) << 8 | bits << 16;
        [state, structures.root, entries, status, ring.ticket, 0]
    }

    fn resume<R: Registers, M: TableMemory>(
        (registers, memory): (&R, &M),
        config: &Config,
        features: Features,
        words: [u64; WORDS],
    ) -> Result<Inner, UnitAdoptError> {
        let [state, root, entries, status, ticket, _] = words;
        let Config {
            mode, pasid_bits, ..
        } = *config;
        UnitAdoptError::compare("the mode", mode as u64, state >> 8, 0xff)?;
        UnitAdoptError::compare("bits of a PASID", pasid_bits.into(), state >> 16, u64::MAX)?;
        let queued = entries != 0;
        UnitAdoptError::compare("ECAP.QI", features.queue().into(), queued.into(), 1)?;
        let mut ring = queue::new([entries, status], mode, features, ticket);
        ring.open = state & 1 != 0;
        if ring.open {
            let on = TRANSLATION | if queued { QUEUE } else { 0 };
            let status = registers.read32(GSTS);
            UnitAdoptError::compare("GSTS", status.into(), on.into(), on.into())?;
            let scalable = if mode == Mode::Legacy { 0 } else { SCALABLE };
            let found = registers.read64(RTADDR);
            UnitAdoptError::compare("RTADDR", found, root | scalable, u64::MAX)?;
        }
        if ring.open && queued {
            let found = registers.read64(IQA);
            UnitAdoptError::compare("IQA", found, ring.queue.base(entries), u64::MAX)?;
            let (head, tail) = (registers.read64(IQH), registers.read64(IQT));
            UnitAdoptError::compare("IQH", head, tail, u64::MAX)?;
            ring.tail = ring.head(registers);
        }
        let structures = Structures {
            root,
            mode,
            pasid_bits,
        };
        let notes = Notes::adopt(memory, ring.layout.answers());
        Ok(Inner {
            structures,
            ring,
            notes,
        })
    }
}
