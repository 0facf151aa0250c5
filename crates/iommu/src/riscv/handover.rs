//! A live unit changes hands: see the crate's `handover.rs`.
//!
//! The description says whether the unit translates, where directory and queues lie, which devices were
//! ever attached, which format contexts have, how many bits PASIDs, and what devices' TLBs take. The last
//! ticket is where the unit has stored it. The successor compares what `capabilities` says of the formats,
//! `fctl`, `ddtp`, and of both queues base, state and, for commands, head and tail with it.

use iopt::{TABLE_BYTES, TableMemory};
use runs::Span;
use spin::Mutex;

use super::capabilities::{
    DDTP, DDTP_PPN, ENABLE, FCTL, FOREIGN, FQB, FQCSR, Features, MODE, ON, base,
};
use super::devices::Devices;
use super::faults::RECORDS;
use super::queue;
use super::{Config, Inner, ProbeError, ROOT_BYTES, RiscvIommu, Tlbs};
use crate::capabilities::reaches;
use crate::error::UnitError;
use crate::handover::{AdoptError, Frozen, Held, UnitKind};
use crate::registers::Registers;
use crate::unit::DomainId;

impl Inner {
    /// Hands all memory that the unit may use to `each`, with names; it may be gone when that returns.
    pub(super) fn for_each<M: TableMemory>(
        &self,
        memory: &M,
        each: &mut impl FnMut(&'static str, Span),
    ) {
        let mut page = |name, start| each(name, Span::new(start, TABLE_BYTES));
        self.devices.for_each_page(memory, &mut page);
        self.ring.for_each_page(&mut page);
        page("fault queue", self.faults);
        if let Some(tlbs) = &self.tlbs {
            each("empty table", Span::new(tlbs.empty, ROOT_BYTES));
        }
    }
}

impl<R: Registers, M: TableMemory> RiscvIommu<R, M> {
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
        let inner = self.inner.into_inner();
        inner.for_each(&self.memory, &mut |name, span| {
            each(Held::Structure { name, span });
        });
        let (empty, depth) = match &inner.tlbs {
            Some(tlbs) => (tlbs.empty, tlbs.depth as u64),
            None => (0, 0),
        };
        for member in inner.devices.members(&self.memory) {
            let (domain, root) = (DomainId(member.there.domain.into()), member.there.root);
            // One that is leaving has no table any more.
            if empty == 0 || root.address != empty {
                each(Held::Table { domain, root });
            }
        }
        let [root, used] = inner.devices.describe();
        let words = [
            // Bit 63: the unit is in use.
            used | u64::from(inner.ring.open) << 63,
            root,
            inner.ring.layout.entries | depth,
            inner.ring.layout.status,
            inner.faults,
            empty,
        ];
        let kind = UnitKind::Riscv;
        Ok((Frozen { kind, words }, self.registers, self.memory))
    }

    /// Takes a unit over that a predecessor has [frozen](Self::freeze), and that translates all the
    /// time. `memory` is the same memory, in which what was listed then is not handed out;
    /// configuration is as it was.
    pub fn adopt(
        registers: R,
        memory: M,
        mut config: Config,
        frozen: &Frozen,
    ) -> Result<Self, ProbeError> {
        let features = Features::read(&registers)?;
        let capabilities = features.capabilities(&config)?;
        let bits = capabilities.output_bits;
        reaches(&memory, bits).map_err(|last| ProbeError::Addresses { last, bits })?;
        config.device_bits = config.device_bits.min(24);
        let last_process = (1 << capabilities.pasid_bits) - 1;
        let inner = resume(
            (&registers, &memory),
            features,
            &config,
            last_process,
            frozen,
        )
        .map_err(ProbeError::Adopt)?;
        Ok(Self {
            registers,
            memory,
            config,
            features,
            capabilities,
            inner: Mutex::new(inner),
        })
    }
}

/// What the unit goes on using, as the description and the registers say it.
fn resume<R: Registers, M: TableMemory>(
    (registers, memory): (&R, &M),
    features: Features,
    config: &Config,
    last_process: u32,
    frozen: &Frozen,
) -> Result<Inner, AdoptError> {
    let [state, root, commands, status, faults, empty] = frozen.words(UnitKind::Riscv)?;
    let extended = features.extended().into();
    AdoptError::compare("capabilities.MSI_FLAT", extended, state >> 49, 1)?;
    let pasid_bits = last_process.trailing_ones().into();
    AdoptError::compare("bits of PASIDs", pasid_bits, state >> 50, 0x1f)?;
    let devices = Devices::adopt([root, state], features, last_process);
    let (entries, depth) = (commands & !(TABLE_BYTES - 1), commands % TABLE_BYTES);
    let tlbs = (empty != 0).then_some(Tlbs {
        depth: depth.clamp(1, 32) as usize,
        empty,
    });
    let mut inner = Inner {
        devices,
        ring: queue::new(memory, [entries, status]),
        faults,
        tlbs,
    };
    if state >> 63 == 1 {
        let found = registers.read32(FCTL).into();
        AdoptError::compare("fctl", found, 0, FOREIGN.into())?;
        // Of the numbers of levels, the one that the unit has.
        let found = registers.read64(DDTP);
        let mask = MODE | DDTP_PPN;
        let mut wanted = inner.devices.registers(memory, config.device_bits);
        let one = wanted.clone().next().unwrap_or(0);
        let same = wanted.find(|value| *value == found & mask);
        AdoptError::compare("ddtp", found, same.unwrap_or(one), mask)?;
        let wanted = base(faults, RECORDS.ilog2());
        AdoptError::compare("fqb", registers.read64(FQB), wanted, DDTP_PPN | 0x1f)?;
        let on = (ENABLE | ON).into();
        AdoptError::compare("fqcsr", registers.read32(FQCSR).into(), on, on)?;
        inner.ring.resume(registers)?;
    }
    Ok(inner)
}
