//! Handing a live unit over ([`crate::handover`](crate::Frozen) says how).
//!
//! Everything is in registers, but for the numbers of the domains: a bank is tagged with its own. So the
//! successor is given the tables that were listed, in the order in which they were listed (bank by bank,
//! once for each device), and compares CR0, and TTBR0, TCR and CBAR of each bank that a stream leads to,
//! with them. The description says whether the unit is in use, and which bits stream ids have.
//!
//! Before the list is made everything is invalidated, so what was detached without an answer is gone.

use iopt::Root;
use lock_api::Mutex;

use super::bank::{self, Bank};
use super::capabilities::{BYPASS, CR0, EXTENDED, STRICT};
use super::unit::Inner;
use super::{Config, Smmu, flush, streams};
use crate::error::UnitError;
use crate::handover::{Frozen, UnitAdoptError, UnitKind, UnitMemory, WORDS};
use crate::registers::Registers;
use crate::setup::UnitSetupError;
use crate::unit::DomainId;

impl<R: Registers> Smmu<R> {
    /// Releases the unit, which goes on translating, for a successor to [adopt](Self::adopt), and hands
    /// the tables that the unit still uses to `each`. A unit that is not enabled uses none, and its
    /// successor attaches devices anew.
    ///
    /// With an error the driver comes back, and nothing has changed.
    #[expect(clippy::result_large_err, reason = "a driver is moved now and then")]
    pub fn freeze(
        self,
        each: &mut dyn FnMut(UnitMemory),
    ) -> Result<(Frozen, R), (Self, UnitError)> {
        let quiet = {
            let Inner { open, counters, .. } = &mut *self.inner.lock();
            match open {
                true => flush::invalidate_everything(&self.registers, counters),
                false => Ok(()),
            }
        };
        if let Err(cause) = quiet {
            return Err((self, cause));
        }
        let Inner {
            streams,
            banks,
            open,
            ..
        } = self.inner.into_inner();
        for (n, bank) in banks.iter().enumerate().filter(|_| open) {
            let Some(Bank { domain, root, .. }) = *bank else {
                continue;
            };
            let on = streams.iter().flatten().filter(|stream| !stream.leaving);
            let devices = on.filter(|stream| usize::from(stream.bank) == n).count();
            (0..devices).for_each(|_| each(UnitMemory::Table { domain, root }));
            if devices == 0 {
                bank::switch_off(&self.registers, self.features, n);
            }
        }
        let mut words = [0; WORDS];
        words[0] = u64::from(open)
            | u64::from(self.features.ids) << 16
            | u64::from(self.config.ignored) << 32;
        let kind = UnitKind::Smmu;
        Ok((Frozen { kind, words }, self.registers))
    }

    /// Takes a unit over that a predecessor has [frozen](Self::freeze), and that translates all the time.
    /// `tables` are those that were listed, in that order; configuration is as it was.
    pub fn adopt(
        registers: R,
        config: Config,
        frozen: &Frozen,
        tables: impl IntoIterator<Item = (DomainId, Root)>,
    ) -> Result<Self, UnitAdoptError> {
        let (mut features, capabilities) =
            super::unit::probe(&registers, &config).map_err(UnitSetupError::Probe)?;
        let words = frozen.words(UnitKind::Smmu)?;
        let state = words[0];
        UnitAdoptError::compare("the ignored bits", config.ignored.into(), state >> 32, !0)?;
        features.ids = (state >> 16) as u16;
        let mut unit = Self {
            registers,
            memory: (),
            config,
            features,
            capabilities,
            inner: Mutex::new(Inner::new()),
        };
        if state & 1 == 1 {
            let inner = unit.resume(tables.into_iter())?;
            unit.inner = Mutex::new(inner);
        }
        Ok(unit)
    }

    /// Rebuilds the state of a unit that stayed in use, from the registers and the listed tables.
    fn resume(
        &self,
        tables: impl Iterator<Item = (DomainId, Root)>,
    ) -> Result<Inner, UnitAdoptError> {
        let (registers, features) = (&self.registers, self.features);
        let mut inner = Inner::new();
        inner.open = true;
        let mode = STRICT | if features.extended() { EXTENDED } else { 0 };
        let found = registers.read32(CR0);
        let mask = BYPASS | EXTENDED | STRICT;
        UnitAdoptError::compare("CR0", found.into(), mode.into(), mask.into())?;
        let mut members = [0; super::capabilities::MOST];
        for (n, place) in inner
            .streams
            .iter_mut()
            .enumerate()
            .take(features.streams())
        {
            *place = streams::read(registers, features, n);
            if let Some(stream) = *place {
                let bank = usize::from(stream.bank);
                let last = features.banks() as u64 - 1;
                UnitAdoptError::compare("S2CR.CBNDX", bank as u64, last.min(bank as u64), !0)?;
                members[bank] += 1;
            }
        }
        let mut tables = tables.peekable();
        for (n, members) in members.into_iter().enumerate().filter(|(_, m)| *m != 0) {
            let found = bank::base(registers, features, n);
            let other = UnitAdoptError::Register {
                name: "TTBR0",
                wanted: tables.peek().map_or(0, |(_, root)| root.address),
                found,
            };
            let (domain, root) = tables.next().ok_or(other)?;
            let shape = self.shape(&root).map_err(|_| other)?;
            let mut bank = Bank::new(domain, root, shape);
            bank.compare(registers, features, n)?;
            bank.members = members;
            inner.banks[n] = Some(bank);
            // Once for each device.
            while tables.next_if(|listed| listed.0 == domain).is_some() {}
        }
        Ok(inner)
    }
}
