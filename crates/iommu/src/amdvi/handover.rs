//! Handing a live unit over. `handover.rs` of the crate says how, and the head of the driver what is in the
//! description.

use iopt::{TABLE_BYTES, TableMemory};
use runs::Span;
use spin::Mutex;

use super::capabilities::{CONTROL, DEVICE_TABLE, EVENTS, Features, RING_LENGTH, TRANSLATE};
use super::faults::Log;
use super::queue;
use super::table::DeviceTable;
use super::{AmdVi, Config, Inner, Mode, ProbeError, guest};
use crate::capabilities::reaches;
use crate::error::UnitError;
use crate::handover::{AdoptError, Frozen, Held, UnitKind};
use crate::notes::Notes;
use crate::registers::Registers;
use crate::ring::Layout;
use crate::unit::DomainId;

impl<R: Registers, M: TableMemory> AmdVi<R, M> {
    /// Lets go of the unit, which goes on translating, for a successor to [adopt](Self::adopt):
    /// waits until all commands are complete, and hands what the unit still uses to `each`.
    ///
    /// With an error the driver comes back, and nothing has changed.
    #[expect(clippy::result_large_err, reason = "a driver is moved now and then")]
    pub fn freeze(self, each: &mut dyn FnMut(Held)) -> Result<(Frozen, R, M), (Self, UnitError)> {
        // With the buffer empty, what follows is about a unit that does nothing by itself.
        let quiet = {
            let ring = &mut self.inner.lock().ring;
            ring.issue((&self.registers, &self.memory), None)
        };
        if let Err(cause) = quiet {
            return Err((self, cause));
        }
        let Inner { table, ring, notes } = self.inner.into_inner();
        let page = |start| Span::new(start, TABLE_BYTES);
        let mut structure = |name, span| each(Held::Structure { name, span });
        structure("device table", table.span());
        ring.for_each_page(&mut |name, start| structure(name, page(start)));
        let log = ring.queue.log.entries;
        structure("event log", page(log));
        for start in notes.further(&self.memory) {
            structure("notes of members", page(start));
        }
        for (_, there) in table.attached(&self.memory) {
            let (domain, root) = (DomainId(there.domain.into()), there.root);
            each(Held::Table { domain, root });
        }
        let levels = guest::levels(self.config.pasid_bits);
        for (_, first) in table.guests(&self.memory) {
            guest::for_each_page(&self.memory, first, levels, &mut |start| {
                let (name, span) = ("guest CR3 table", page(start));
                each(Held::Structure { name, span });
            });
        }
        if self.config.mode == Mode::Guest {
            for member in notes.all(&self.memory) {
                if let Some(root) = guest::root_of(&self.memory, &table, levels, member) {
                    let domain = DomainId(member.domain.into());
                    each(Held::Table { domain, root });
                }
            }
        }
        // Bit 63: the unit is in use. From bit 40 on the mode, from 48 on the bits of a PASID.
        let used = table.describe() | u64::from(ring.open) << 63 | self.config.describe();
        let Layout {
            entries, status, ..
        } = ring.layout;
        let words = [used, table.base, entries, status, log, ring.ticket];
        let kind = UnitKind::AmdVi;
        Ok((Frozen { kind, words }, self.registers, self.memory))
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
        let features = Features::read(&registers)?;
        let capabilities = features.capabilities(&config)?;
        let bits = 52;
        reaches(&memory, bits).map_err(|last| ProbeError::Addresses { last, bits })?;
        let inner =
            Self::resume(&registers, &memory, &config, frozen).map_err(ProbeError::Adopt)?;
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
        config: &Config,
        frozen: &Frozen,
    ) -> Result<Inner, AdoptError> {
        let words = frozen.words(UnitKind::AmdVi)?;
        let [used, base, entries, status, log, ticket] = words;
        let (mode, bits) = (config.describe() >> 40 & 0xff, config.pasid_bits.into());
        AdoptError::compare("the mode", mode, used >> 40, 0xff)?;
        AdoptError::compare("bits of a PASID", bits, used >> 48, 0xff)?;
        let table = DeviceTable::adopt(base, config.last_device, used);
        let log = Log {
            entries: log,
            segment: config.segment,
        };
        let (log_base, mut ring) = (log.entries, queue::new([entries, status], log, ticket));
        if used >> 63 == 1 {
            let on = registers.read64(CONTROL);
            AdoptError::compare("Control", on, TRANSLATE, TRANSLATE)?;
            let found = registers.read64(DEVICE_TABLE);
            AdoptError::compare("Device Table Base", found, table.register(), !0)?;
            let found = registers.read64(EVENTS);
            AdoptError::compare("Event Log Base", found, log_base | RING_LENGTH, !0)?;
            ring.resume(registers)?;
        }
        let notes = Notes::adopt(memory, Some(status));
        Ok(Inner { table, ring, notes })
    }
}
