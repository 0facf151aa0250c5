//! The unit's memory, and its hand-over.
//!
//! The description says whether the unit translates, where directory and queues lie, which devices were
//! ever attached, which format contexts have, how many bits PASIDs, and what devices' TLBs take. The last
//! ticket is where the unit has stored it. The successor compares what `capabilities` says of the formats,
//! `fctl`, `ddtp`, and of both queues base, state and, for commands, head and tail with it.

use iopt::{Root, TABLE_BYTES, TableMemory};
use runs::{Pa, Span};

use super::Config;
use super::capabilities::{
    DDTP, DDTP_PPN, ENABLE, FCTL, FOREIGN, FQB, FQCSR, Features, MODE, ON, base,
};
use super::devices::Devices;
use super::faults::RECORDS;
use super::queue::{self, Queue};
use super::unit::{Hardware, Inner, ROOT_BYTES, Tlbs};
use crate::capabilities::UnitCapabilities;
use crate::driver::{InMemory, pages};
use crate::handover::{UnitAdoptError, UnitKind, WORDS};
use crate::registers::Registers;
use crate::ring::{Layout, Ring};
use crate::setup::{UnitProbeError, UnitSetupError};
use crate::unit::DomainId;

const fn last_process(config: &Config) -> u32 {
    (1 << config.pasid_bits) - 1
}

impl InMemory for Hardware {
    const KIND: UnitKind = UnitKind::Riscv;
    type Queue = Queue;

    fn probe<R: Registers>(
        registers: &R,
        config: &mut Config,
    ) -> Result<(Features, UnitCapabilities), UnitProbeError> {
        let features = Features::read(registers)?;
        let capabilities = features.capabilities(config)?;
        // device_id has no more.
        config.device_bits = config.device_bits.min(24);
        config.pasid_bits = capabilities.pasid_bits;
        Ok((features, capabilities))
    }

    fn build<M: TableMemory>(
        memory: &M,
        config: &Config,
        features: Features,
    ) -> Result<Inner, UnitSetupError> {
        let devices = Devices::new(memory, features, last_process(config))?;
        let [entries, status, faults] = pages(memory, |back| {
            devices.for_each_page(memory, &mut |name, page| {
                back(name, Span::new(page, TABLE_BYTES));
            });
        })?;
        Ok(Inner {
            devices,
            ring: queue::new(memory, [entries, status]),
            faults,
            tlbs: None,
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
        inner.devices.for_each_page(memory, &mut page);
        inner.ring.for_each_page(&mut page);
        page("fault queue", inner.faults);
        if let Some(tlbs) = &inner.tlbs {
            each("empty table", Span::new(tlbs.empty, ROOT_BYTES));
        }
    }

    fn for_each_table<M: TableMemory>(
        inner: &Inner,
        memory: &M,
        _config: &Config,
        each: &mut impl FnMut(DomainId, Root),
    ) {
        let empty = inner.tlbs.as_ref().map(|tlbs| tlbs.empty);
        for member in inner.devices.members(memory) {
            let (domain, root) = (DomainId(member.there.domain.into()), member.there.root);
            // One that is leaving has no table any more.
            if empty != Some(root.address) {
                each(domain, root);
            }
        }
    }

    fn describe(inner: &Inner, _config: &Config) -> [u64; WORDS] {
        let tlbs = inner.tlbs.as_ref();
        let (empty, depth) = tlbs.map_or((0, 0), |tlbs| (tlbs.empty, tlbs.depth as u64));
        let [root, used] = inner.devices.describe();
        let Layout {
            entries, status, ..
        } = inner.ring.layout;
        // Bit 63: the unit is in use.
        let state = used | u64::from(inner.ring.open) << 63;
        [state, root, entries | depth, status, inner.faults, empty]
    }

    fn resume<R: Registers, M: TableMemory>(
        (registers, memory): (&R, &M),
        config: &Config,
        features: Features,
        words: [u64; WORDS],
    ) -> Result<Inner, UnitAdoptError> {
        let [state, root, commands, status, faults, empty] = words;
        let extended = features.extended().into();
        UnitAdoptError::compare("capabilities.MSI_FLAT", extended, state >> 49, 1)?;
        let pasid_bits = config.pasid_bits.into();
        UnitAdoptError::compare("bits of PASIDs", pasid_bits, state >> 50, 0x1f)?;
        let (entries, depth) = (commands & !(TABLE_BYTES - 1), commands % TABLE_BYTES);
        let tlbs = (empty != 0).then_some(Tlbs {
            depth: depth.clamp(1, 32) as usize,
            empty,
        });
        let mut inner = Inner {
            devices: Devices::adopt([root, state], features, last_process(config)),
            ring: queue::new(memory, [entries, status]),
            faults,
            tlbs,
        };
        if state >> 63 == 1 {
            let found = registers.read32(FCTL).into();
            UnitAdoptError::compare("fctl", found, 0, FOREIGN.into())?;
            // The value for the number of levels that the unit uses.
            let found = registers.read64(DDTP);
            let mask = MODE | DDTP_PPN;
            let mut wanted = inner.devices.registers(memory, config.device_bits);
            let one = wanted.clone().next().unwrap_or(0);
            let same = wanted.find(|value| *value == found & mask);
            UnitAdoptError::compare("ddtp", found, same.unwrap_or(one), mask)?;
            let wanted = base(faults, RECORDS.ilog2());
            UnitAdoptError::compare("fqb", registers.read64(FQB), wanted, DDTP_PPN | 0x1f)?;
            let on = (ENABLE | ON).into();
            UnitAdoptError::compare("fqcsr", registers.read32(FQCSR).into(), on, on)?;
            inner.ring.resume(registers)?;
        }
        Ok(inner)
    }
}
