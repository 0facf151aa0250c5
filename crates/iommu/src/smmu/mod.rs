//! Arm's SMMU, versions 1 and 2.
//!
//! Arm System Memory Management Unit Architecture Specification (IHI 0062), versions 1 and 2; section
//! numbers in the files are those of issue B. [`Smmu`] drives the non-secure
//! side of one unit over [`Registers`]. Everything that it tells the unit is in registers, so it takes no
//! memory.
//!
//! A device is a stream, and [`DeviceId`] its stream id. A domain with devices on the unit has a context
//! bank, which all its devices share. It walks stage 1 tables, with stage 2 bypassed, or stage 2 tables:
//! ARMv7 short descriptors ([`FormatId::ArmV7s`](iopt::FormatId::ArmV7s)), and Arm's long descriptors of
//! 4, 16 and 64 KiB as far as IDR0 and IDR2 offer them. Units without AArch64 tables read those of 4 KiB
//! in the way of AArch32: stage 1 with 32 input bits, stage 2 with up to 40. Memory types are where
//! [`ArmStage1`](iopt::format::ArmStage1) looks for them by default.
//!
//! Nested translation, TTBR1, stalled faults, interrupts, the secure side, extended stream mapping
//! registers (EXSMRGS), and the supplement of 64 KiB tables to version 1 are not driven. Errata of
//! implementations are not known here: what needs a bit in SACR or ACTLR is set by whoever knows the unit.
//!
//! # Orders
//!
//! **Enable** (10.6.3 CR0): all streams are switched off, so that they fault; CR0 without a change of
//! CLIENTPD, since EXIDENABLE changes what stream registers mean; context banks; everything is invalidated
//! (TLBIALLH, TLBIALLNSNH, TLBGSYNC), for tags may have been somebody else's; the streams of attached
//! devices are switched on; CLIENTPD is cleared, and CR0 read again, so that it has arrived. So devices
//! that passed until now pass until they are translated, and what somebody else had translated faults from
//! the beginning. On a unit that is enabled already only the last three happen, and translation stays on
//! all the time.
//!
//! **Attach**: the context bank, if the domain has none yet (`bank.rs`); then the stream (`streams.rs`).
//! Nothing is invalidated: a tag that is free has nothing cached.
//!
//! **Detach**: the stream is switched off; all of the domain is invalidated, and complete (`tlb.rs`);
//! the bank is switched off when it was its last stream.
//!
//! **Invalidate**: `tlb.rs` says which commands; one sync at the end of all.
//!
//! **Mapping** needs stores only: what is not present is not cached.
//!
//! **Handover**: `handover.rs`.
//!
//! **Faults**: `faults.rs`. Those of a domain that were not drained when its last device leaves are
//! forgotten.
//!
//! # Locks and bounds
//!
//! One spinning lock covers everything: a flush is at most
//! [`MOST_PAGE_COMMANDS`](crate::MOST_PAGE_COMMANDS) stores and one [bounded](Registers::wait) wait, and
//! the global registers are one anyway. No operation has more than one wait.
//!
//! # How it was tried
//!
//! No emulator models this unit. The tests use scripted registers and a small model that was written from
//! the specification and walks with [`iopt::walk`].

mod bank;
mod capabilities;
mod config;
mod faults;
mod handover;
mod streams;
#[cfg(test)]
mod tests;
mod tlb;

use iopt::{Invalidation, Root};
use spin::Mutex;

use crate::capabilities::Capabilities;
use crate::commands::CommandCounters;
use crate::error::{AttachError, FlushError, UnitError};
use crate::fault::Fault;
use crate::registers::Registers;
use crate::unit::{DeviceId, DomainId, NodeId, Unit};

use bank::{Bank, Banks};
use capabilities::{
    ATTRIBUTES, BYPASS, CR0, EXTENDED, Features, MOST, STRICT, Scheme, Shape, TRANSLATE,
};
use streams::{Stream, Streams};
use tlb::Tlb;

pub use config::{Config, ProbeError, Version};

/// One SMMU of version 1 or 2, over its registers `R`. What it knows of up to 128 streams and 128 context
/// banks is in it, some 6 KiB.
///
/// Dropping it changes nothing: the unit goes on. See [`tear_down`](Self::tear_down).
#[derive(Debug)]
pub struct Smmu<R> {
    registers: R,
    config: Config,
    features: Features,
    /// The bits that a stream id can have.
    stream_bits: u16,
    capabilities: Capabilities,
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Inner {
    streams: Streams,
    banks: Banks,
    /// The registers are ours. Otherwise there is nothing to tell: no stream leads to a bank of ours.
    open: bool,
    counters: CommandCounters,
}

/// A register that holds something else than what was written.
fn refused(register: &'static str, value: u32) -> UnitError {
    let value = value.into();
    UnitError::Refused { register, value }
}

impl Inner {
    /// Nothing is attached.
    fn new() -> Self {
        Self {
            streams: [None; MOST],
            banks: [None; MOST],
            open: false,
            counters: CommandCounters::default(),
        }
    }
}

impl<R: Registers> Smmu<R> {
    /// Looks what the unit can do. Only a stream match register that nobody uses is written, and gets its
    /// contents back; devices can be attached before the unit is [enabled](Self::enable).
    pub fn new(registers: R, config: Config) -> Result<Self, ProbeError> {
        let features = Features::read(&registers, config.version)?;
        let capabilities = features.capabilities()?;
        let stream_bits = streams::bits(&registers, features, &config)?;
        Ok(Self {
            registers,
            config,
            features,
            stream_bits,
            capabilities,
            inner: Mutex::new(Inner::new()),
        })
    }

    /// Has the unit translate. From now on a device that is not attached faults.
    ///
    /// After an error translation may be on or off; it can be called again. A device whose stream was
    /// refused faults, all others are translated.
    pub fn enable(&self) -> Result<(), UnitError> {
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
        tlb::forget_everything(registers, counters)?;
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

    /// Has the unit stop translating: devices reach all of memory again, at the addresses that they
    /// name.
    pub fn disable(&self) -> Result<(), UnitError> {
        let registers = &self.registers;
        let Inner { open, counters, .. } = &mut *self.inner.lock();
        registers.write32(CR0, registers.read32(CR0) | BYPASS);
        // Until then accesses that were translated may be under way.
        tlb::forget_everything(registers, counters)?;
        *open = false;
        Ok(())
    }

    /// [Disables](Self::disable) the unit and gives its registers back.
    pub fn tear_down(self) -> Result<R, UnitError> {
        self.disable()?;
        Ok(self.registers)
    }

    /// What the unit was told so far.
    pub fn counters(&self) -> CommandCounters {
        self.inner.lock().counters
    }

    /// The registers.
    pub const fn registers(&self) -> &R {
        &self.registers
    }

    /// The stream's id, without the bits that are not compared.
    fn stream(&self, device: DeviceId) -> Result<u16, AttachError> {
        let id = device.0 & !u32::from(self.config.ignored);
        let last = self.stream_bits;
        match u16::try_from(id) {
            Ok(id) if id & !last == 0 => Ok(id),
            _ => Err(AttachError::Beyond {
                device,
                last: last.into(),
            }),
        }
    }

    /// How the unit reads a root that it can walk.
    fn shape(&self, root: &Root) -> Result<Shape, AttachError> {
        self.capabilities.check(root)?;
        let Root {
            format,
            address,
            levels,
        } = *root;
        let shape = self.features.shape(format);
        let shape = shape.ok_or(AttachError::Format { format })?;
        // The levels follow from the input bits, or in stage 2 must fit them.
        let possible = self.features.levels(shape);
        if !possible.contains(&levels.into()) {
            return Err(AttachError::Levels {
                format,
                levels,
                offered: possible.fold(0, |all, levels| all | 1 << levels),
            });
        }
        let (entry, bits) = match shape.scheme {
            Scheme::Short => (4, 32),
            Scheme::Long => (8, 40),
            Scheme::Long64 => (8, 48),
        };
        let top = shape.shift(u32::from(levels) - 1);
        let bytes = entry << (shape.input_bits - top);
        if address & (bytes - 1) != 0 || address >> bits != 0 {
            let bits = self.capabilities.output_bits.min(bits);
            return Err(AttachError::RootAddress { address, bits });
        }
        Ok(shape)
    }

    fn do_attach(&self, device: DeviceId, domain: DomainId, root: Root) -> Result<(), AttachError> {
        let shape = self.shape(&root)?;
        let id = self.stream(device)?;
        let (registers, features) = (&self.registers, self.features);
        let Inner {
            streams,
            banks,
            open,
            ..
        } = &mut *self.inner.lock();
        if let Some((_, there)) = streams::find(streams, id) {
            // A stream always has a bank.
            let domain = banks[usize::from(there.bank)].map_or(domain, |bank| bank.domain);
            return Err(AttachError::AlreadyAttached { device, domain });
        }
        let no_room = |what, available: usize| AttachError::NoRoom {
            device,
            what,
            available: available as u32,
        };
        let place = streams::free(streams, features, id)
            .ok_or_else(|| no_room("stream mapping registers", features.streams()))?;
        let bank = match bank::of_domain(banks, domain) {
            Some((_, there)) if there.root != root => {
                return Err(AttachError::OtherRoot {
                    domain,
                    there: there.root,
                    asked: root,
                });
            }
            Some((n, _)) => n,
            None => {
                let n = bank::free(banks, features, shape.second).ok_or_else(|| {
                    let others = if shape.second {
                        0
                    } else {
                        features.second_only()
                    };
                    no_room("context banks for this stage", features.banks() - others)
                })?;
                let bank = Bank::new(domain, root, shape);
                if *open {
                    bank.write(registers, features, n);
                }
                banks[n] = Some(bank);
                n
            }
        };
        if let Some(bank) = &mut banks[bank] {
            bank.members += 1;
        }
        let mut stream = Stream {
            id,
            bank: bank as u8,
            leaving: false,
        };
        let done = match open {
            true => streams::switch_on(registers, features, self.config.ignored, place, stream),
            false => Ok(()),
        };
        stream.leaving = done.is_err();
        streams[place] = Some(stream);
        done.map_err(|cause| AttachError::Unit { device, cause })
    }

    fn do_detach(&self, device: DeviceId) -> Result<(), AttachError> {
        let id = self.stream(device)?;
        let (registers, features) = (&self.registers, self.features);
        let Inner {
            streams,
            banks,
            open,
            counters,
        } = &mut *self.inner.lock();
        let Some((place, stream)) = streams::find(streams, id) else {
            return Err(AttachError::NotAttached { device });
        };
        let n = usize::from(stream.bank);
        let slot = &mut banks[n];
        if let Some(bank) = slot {
            if *open {
                streams::switch_off(registers, features, place);
                streams[place] = Some(Stream {
                    leaving: true,
                    ..stream
                });
                Tlb::new(registers, features, n, bank.shape)
                    .forget_all(counters)
                    .map_err(|cause| AttachError::Unit { device, cause })?;
            }
            bank.members -= 1;
            if bank.members == 0 {
                if *open {
                    bank::switch_off(registers, features, n);
                }
                *slot = None;
            }
        }
        streams[place] = None;
        Ok(())
    }

    /// Has the unit forget all of a domain, or what is named.
    fn flush(&self, domain: DomainId, what: Option<&Invalidation>) -> Result<(), FlushError> {
        let Inner {
            banks,
            open,
            counters,
            ..
        } = &mut *self.inner.lock();
        let Some((n, bank)) = bank::of_domain(banks, domain) else {
            return Ok(());
        };
        let asked = what.and_then(Invalidation::new_root);
        if let Some(asked) = asked.filter(|asked| *asked != bank.root) {
            // Tables in Arm's formats do not grow.
            let there = bank.root;
            let cause = AttachError::OtherRoot {
                domain,
                there,
                asked,
            };
            return Err(FlushError::Root { domain, cause });
        }
        if !*open {
            return Ok(());
        }
        let tlb = Tlb::new(&self.registers, self.features, n, bank.shape);
        match what {
            Some(what) if asked.is_none() => tlb.forget(what, counters),
            _ => tlb.forget_all(counters),
        }
        .map_err(|cause| FlushError::Unit { domain, cause })
    }
}

impl<R: Registers + Send + Sync> Unit for Smmu<R> {
    fn capabilities(&self) -> Capabilities {
        self.capabilities
    }

    fn node(&self) -> Option<NodeId> {
        self.config.node
    }

    fn attach(&self, device: DeviceId, domain: DomainId, root: Root) -> Result<(), AttachError> {
        self.do_attach(device, domain, root)
    }

    fn detach(&self, device: DeviceId) -> Result<(), AttachError> {
        self.do_detach(device)
    }

    fn invalidate(&self, domain: DomainId, what: &Invalidation) -> Result<(), FlushError> {
        if what.is_empty() {
            return Ok(());
        }
        self.flush(domain, Some(what))
    }

    fn invalidate_domain(&self, domain: DomainId) -> Result<(), FlushError> {
        self.flush(domain, None)
    }

    fn drain_faults(&self, sink: &mut dyn FnMut(Fault)) -> u64 {
        let (registers, features) = (&self.registers, self.features);
        let ignored = self.config.ignored;
        let mut lost = 0;
        for n in 0..=features.banks() {
            let alone = self.inner.lock();
            if !alone.open {
                // The registers are somebody else's, or nobody's.
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
