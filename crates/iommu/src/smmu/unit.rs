//! The driver in the terms of the shell (`driver.rs` of the crate).

use lock_api::Mutex;

use super::bank::{self, Banks};
use super::capabilities::{ATTRIBUTES, BYPASS, CR0, EXTENDED, Features, MOST, STRICT, TRANSLATE};
use super::flush;
use super::streams::{self, Streams};
use super::{Config, Smmu, faults};
use crate::capabilities::UnitCapabilities;
use crate::commands::CommandCounters;
use crate::driver::{Kind, Operations};
use crate::error::UnitError;
use crate::fault::Fault;
use crate::registers::Registers;
use crate::setup::{UnitProbeError, UnitSetupError};
use crate::unit::NodeId;

/// An SMMU of version 1 or 2.
#[derive(Debug)]
pub struct Hardware;

#[derive(Debug)]
pub struct Inner {
    pub(super) streams: Streams,
    pub(super) banks: Banks,
    /// The registers are ours. Otherwise there is nothing to tell: no stream leads to a bank of ours.
    pub(super) open: bool,
    pub(super) counters: CommandCounters,
}

/// A register that holds something else than what was written.
pub(super) fn refused(register: &'static str, value: u32) -> UnitError {
    let value = value.into();
    UnitError::Refused { register, value }
}

impl Inner {
    /// Nothing is attached.
    pub(super) fn new() -> Self {
        Self {
            streams: [None; MOST],
            banks: [None; MOST],
            open: false,
            counters: CommandCounters::default(),
        }
    }
}

impl Kind for Hardware {
    type Config = Config;
    type Features = Features;
    type Inner = Inner;

    fn node(config: &Config) -> Option<NodeId> {
        config.node
    }

    fn counters(inner: &Inner) -> CommandCounters {
        inner.counters
    }
}

/// Features and capabilities, but for the bits of stream ids.
pub(super) fn probe<R: Registers>(
    registers: &R,
    config: &Config,
) -> Result<(Features, UnitCapabilities), UnitProbeError> {
    let features = Features::read(registers, config.version)?;
    Ok((features, features.capabilities()?))
}

impl<R: Registers> Smmu<R> {
    /// Reads what the unit can do. Only an unused stream match register is written, and gets its
    /// contents back; devices can be attached before the unit is [enabled](Self::enable).
    pub fn new(registers: R, config: Config) -> Result<Self, UnitSetupError> {
        let (mut features, capabilities) = probe(&registers, &config)?;
        features.ids = streams::bits(&registers, features, &config)?;
        Ok(Self {
            registers,
            memory: (),
            config,
            features,
            capabilities,
            inner: Mutex::new(Inner::new()),
        })
    }

    /// [Disables](Self::disable) the unit and gives its registers back.
    pub fn tear_down(self) -> Result<R, UnitError> {
        self.disable()?;
        Ok(self.registers)
    }
}

impl<R: Registers> Operations for Smmu<R> {
    fn start(&self) -> Result<(), UnitError> {
        let (registers, features) = (&self.registers, self.features);
        let Inner {
            streams,
            banks,
            open,
            counters,
        } = &mut *self.inner.lock();
        let before = registers.read32(CR0);
        let extended = if features.extended() { EXTENDED } else { 0 };
        let mode = before & ATTRIBUTES | TRANSLATE | extended;
        if !*open {
            (0..features.streams()).for_each(|n| streams::switch_off(registers, features, n));
            registers.write32(CR0, mode | before & BYPASS);
            for (n, bank) in banks.iter().enumerate().take(features.banks()) {
                match bank {
                    Some(bank) => bank.write(registers, features, n),
                    None => bank::switch_off(registers, features, n),
                }
            }
        }
        flush::invalidate_everything(registers, counters)?;
        *open = true;
        let mut result = Ok(());
        for (n, stream) in streams.iter().enumerate() {
            if let Some(stream) = stream.filter(|stream| !stream.leaving) {
                let done = streams::switch_on(registers, features, self.config.ignored, n, stream);
                result = result.and(done);
            }
        }
        registers.write32(CR0, mode);
        let there = registers.read32(CR0);
        if (there ^ mode) & (BYPASS | EXTENDED | STRICT) != 0 {
            return Err(refused("CR0", there));
        }
        result
    }

    fn stop(&self) -> Result<(), UnitError> {
        let registers = &self.registers;
        let Inner { open, counters, .. } = &mut *self.inner.lock();
        registers.write32(CR0, registers.read32(CR0) | BYPASS);
        // Translated accesses may be under way until the invalidation is complete.
        flush::invalidate_everything(registers, counters)?;
        *open = false;
        Ok(())
    }

    fn drain(&self, sink: &mut dyn FnMut(Fault)) -> u64 {
        let (registers, features) = (&self.registers, self.features);
        let ignored = self.config.ignored;
        let mut lost = 0;
        for n in 0..=features.banks() {
            let alone = self.inner.lock();
            if !alone.open {
                // The registers are not this driver's.
                return lost;
            }
            let taken = match n.checked_sub(1) {
                None => faults::take_global(registers, ignored),
                Some(n) => match &alone.banks[n] {
                    None => continue,
                    Some(bank) => {
                        faults::take_context(registers, features, (n, bank.domain), ignored)
                    }
                },
            };
            // Not under the lock: the sink may flush.
            drop(alone);
            let (fault, more) = taken;
            fault.into_iter().for_each(&mut *sink);
            lost += u64::from(more);
        }
        lost
    }
}
