//! Attach and detach. The head of the module has the orders.

use iopt::Root;

use super::Smmu;
use super::bank::{self, Bank};
use super::capabilities::{Scheme, Shape};
use super::flush::Tlb;
use super::streams::{self, Stream};
use super::unit::Inner;
use crate::driver::{Attachments, Place, same_root};
use crate::error::UnitAttachError;
use crate::registers::Registers;
use crate::unit::{DeviceId, DomainId};

impl<R: Registers> Smmu<R> {
    /// The stream's id, without the bits that are not compared.
    fn stream(&self, device: DeviceId) -> Result<u16, UnitAttachError> {
        let id = device.0 & !u32::from(self.config.ignored);
        let last = self.features.ids;
        match u16::try_from(id) {
            Ok(id) if id & !last == 0 => Ok(id),
            _ => Err(UnitAttachError::Beyond {
                device,
                last: last.into(),
            }),
        }
    }

    /// How the unit reads a root that it can walk.
    pub(super) fn shape(&self, root: &Root) -> Result<Shape, UnitAttachError> {
        self.capabilities.check(root)?;
        let Root {
            format,
            address,
            levels,
        } = *root;
        let shape = self.features.shape(format);
        let shape = shape.ok_or(UnitAttachError::Format { format })?;
        // The levels follow from the input bits, or in stage 2 must fit them.
        let possible = self.features.levels(shape);
        if !possible.contains(&levels.into()) {
            return Err(UnitAttachError::Levels {
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
            return Err(UnitAttachError::RootAddress { address, bits });
        }
        Ok(shape)
    }
}

impl<R: Registers> Attachments for Smmu<R> {
    fn attach_at(&self, place: Place, domain: DomainId, root: Root) -> Result<(), UnitAttachError> {
        let device = place.device;
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
            return Err(UnitAttachError::AlreadyAttached { device, domain });
        }
        let no_room = |what, available: usize| UnitAttachError::NoRoom {
            device,
            what,
            available: available as u32,
        };
        let place = streams::free(streams, features, id)
            .ok_or_else(|| no_room("stream mapping registers", features.streams()))?;
        let bank = match bank::of_domain(banks, domain) {
            Some((n, there)) => {
                let other = Some(there.root).filter(|there| *there != root);
                same_root(other, domain, root)?;
                n
            }
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
        done.map_err(|cause| UnitAttachError::Unit { device, cause })
    }

    fn detach_at(&self, place: Place) -> Result<(), UnitAttachError> {
        let device = place.device;
        let id = self.stream(device)?;
        let (registers, features) = (&self.registers, self.features);
        let Inner {
            streams,
            banks,
            open,
            counters,
        } = &mut *self.inner.lock();
        let Some((place, stream)) = streams::find(streams, id) else {
            return Err(UnitAttachError::NotAttached { device });
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
                    .invalidate_all(counters)
                    .map_err(|cause| UnitAttachError::Unit { device, cause })?;
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

    fn other_root(&self, domain: DomainId, asked: Root) -> Option<Root> {
        let banks = &self.inner.lock().banks;
        let there = bank::of_domain(banks, domain).map(|(_, bank)| bank.root);
        there.filter(|there| *there != asked)
    }
}
