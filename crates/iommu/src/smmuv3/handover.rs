//! Handing the unit over while it translates (`crate::handover`).
//!
//! What is noted of domains is the driver's own, and follows from what is attached: it goes with the
//! predecessor, and the successor makes its own.

use iopt::{Chain, TABLE_BYTES, TableMemory};
use runs::Span;
use spin::Mutex;

use super::capabilities::{
    ADDRESS, CMDQEN, CR0ACK, EVENTQ_BASE, EVENTQEN, Features, SMMUEN, STRTAB_BASE, STRTAB_BASE_CFG,
};
use super::domains::{Domains, Shape};
use super::queue;
use super::streams::Streams;
use super::{Config, Inner, ProbeError, SmmuV3};
use crate::capabilities::reaches;
use crate::error::UnitError;
use crate::handover::{AdoptError, Frozen, Held, UnitKind};
use crate::registers::Registers;
use crate::unit::DomainId;

impl<R: Registers, M: TableMemory> SmmuV3<R, M> {
    /// Lets go of the unit, which goes on translating, for a successor to [adopt](Self::adopt):
    /// waits until all commands are complete, and hands what the unit still uses to `each`.
    ///
    /// With an error the driver comes back, and nothing has changed.
    #[expect(clippy::result_large_err, reason = "a driver is moved now and then")]
    pub fn freeze(self, each: &mut dyn FnMut(Held)) -> Result<(Frozen, R, M), (Self, UnitError)> {
        // With the queue empty, what follows is about a unit that does nothing by itself.
        let quiet = {
            let ring = &mut self.inner.lock().ring;
            ring.issue((&self.registers, &self.memory), None)
        };
        if let Err(cause) = quiet {
            return Err((self, cause));
        }
        let Inner {
            streams,
            domains,
            ring,
            events,
        } = self.inner.into_inner();
        let memory = self.memory;
        streams.spans(&memory, &mut |name, span| {
            each(Held::Structure { name, span })
        });
        let mut page = |name, start| {
            let span = Span::new(start, TABLE_BYTES);
            each(Held::Structure { name, span });
        };
        ring.for_each_page(&mut page);
        page("event queue", events.entries);
        for member in streams.members(&memory) {
            let (domain, root) = (DomainId(member.there.domain.into()), member.there.root);
            each(Held::Table { domain, root });
        }
        let mut chain = Chain::empty();
        domains.pages().for_each(|page| chain.push(&memory, page));
        memory.reclaim(chain);
        let words = [
            // Bit 0: the unit is in use. From bit 32 on: the stream table's shape.
            u64::from(ring.open) | u64::from(streams.shape()) << 32,
            streams.base() & ADDRESS,
            ring.layout.entries,
            ring.layout.status,
            events.entries,
            ring.ticket,
        ];
        let kind = UnitKind::SmmuV3;
        Ok((Frozen { kind, words }, self.registers, memory))
    }

    /// Takes a unit over that a predecessor has [frozen](Self::freeze), and that translates all the
    /// time. `memory` is the same memory, in which what was listed then is not handed out;
    /// configuration is as it was.
    pub fn adopt(
        registers: R,
        memory: M,
        config: Config,
        frozen: &Frozen,
    ) -> Result<Self, ProbeError> {
        let features = Features::read(&registers, &config)?;
        let capabilities = features.capabilities(&config)?;
        let bits = 52;
        reaches(&memory, bits).map_err(|last| ProbeError::Addresses { last, bits })?;
        let resumed = Self::resume(&registers, &memory, (&config, features), frozen);
        let mut inner = resumed.map_err(ProbeError::Adopt)?;
        let Inner {
            streams, domains, ..
        } = &mut inner;
        for member in streams.members(&memory) {
            let shape = Shape::of(member.there.root.format);
            if let Err(cause) = domains.set(&memory, member.there.domain, shape) {
                let mut chain = Chain::empty();
                domains.pages().for_each(|page| chain.push(&memory, page));
                memory.reclaim(chain);
                return Err(ProbeError::Memory(cause));
            }
        }
        Ok(Self {
            registers,
            memory,
            config,
            features,
            capabilities,
            inner: Mutex::new(inner),
        })
    }

    /// What the unit goes on using, as the description and the registers say it.
    fn resume(
        registers: &R,
        memory: &M,
        (config, features): (&Config, Features),
        frozen: &Frozen,
    ) -> Result<Inner, AdoptError> {
        let words = frozen.words(UnitKind::SmmuV3)?;
        let [state, base, commands, status, events, ticket] = words;
        let mut ring = queue::new([commands, status], features, ticket);
        let events = Self::events(events, features);
        let last = Self::last_device(config, features);
        let mut streams = Streams::at(base, last, features);
        let shape = streams.shape().into();
        AdoptError::compare("the stream table's shape", shape, state >> 32, !0)?;
        if state & 1 != 0 {
            let on = u64::from(SMMUEN | EVENTQEN | CMDQEN);
            let found = registers.read32(CR0ACK).into();
            AdoptError::compare("SMMU_CR0ACK", found, on, on)?;
            let found = registers.read64(STRTAB_BASE);
            AdoptError::compare("SMMU_STRTAB_BASE", found, base, ADDRESS)?;
            let found = registers.read32(STRTAB_BASE_CFG).into();
            AdoptError::compare("SMMU_STRTAB_BASE_CFG", found, streams.shape().into(), !0)?;
            let found = registers.read64(EVENTQ_BASE);
            AdoptError::compare("SMMU_EVENTQ_BASE", found, events.base(), ADDRESS)?;
            ring.resume(registers)?;
        }
        streams.count_device_tlbs(memory);
        Ok(Inner {
            streams,
            domains: Domains::default(),
            ring,
            events,
        })
    }
}
