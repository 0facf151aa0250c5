//! Capabilities of a unit.

use iopt::format::BreakBeforeMake;
use iopt::{FormatId, Root, TableMemory};
use runs::PageSizes;

use crate::arm;
use crate::error::UnitAttachError;
use crate::unit::{DeviceId, Pasid};

/// Capabilities of a unit, in the terms in which tables are built.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct UnitCapabilities {
    /// The formats that it walks, in no order; `None` are places left over.
    pub formats: [Option<FormatSupport>; 12],
    /// Bits of an output address.
    pub output_bits: u32,
    /// Bits of an input address; a table may translate more, but nothing above is reached.
    pub input_bits: u32,
    /// Bits of a domain's number.
    pub domain_bits: u32,
    /// Bits of a PASID; 0 where requests with one are not translated.
    pub pasid_bits: u32,
    /// Translation requests of devices are answered, and their TLBs invalidated
    /// ([`Unit::set_device_tlb`](crate::Unit::set_device_tlb)).
    pub device_tlbs: bool,
    /// It reads tables through the processor's caches; otherwise stores to tables must be flushed
    /// to memory.
    pub coherent_walks: bool,
    /// It sets accessed and dirty bits in leaves.
    pub dirty_tracking: bool,
    /// It can force accesses to be coherent ([`Prot::COHERENT`](iopt::Prot::COHERENT)).
    pub snoop_control: bool,
    /// The stores of a map are not enough: the unit remembers entries that were not present (VT-d: CAP.CM, section 6.1
    /// "Caching Mode"; AMD 48882: Capability Offset 00h, Capability Header, NpCache), or buffers stores (VT-d: CAP.RWBF,
    /// section 6.8 "Write Buffer Flushing").
    ///
    /// After a map, and before the device uses the addresses, [`Unit::invalidate`](crate::Unit::invalidate) of
    /// [`Invalidation::mapped`](iopt::Invalidation::mapped) has the unit see it: the drivers flush write buffers first, and
    /// invalidate entries above the leaves too. [`invalidate_domain`](crate::Unit::invalidate_domain) does so as well, and
    /// costs the domain all its cached translations. An attach does it for what is mapped before.
    pub caches_not_present: bool,
    /// Demand of the unit when an entry's size changes while it is in use.
    pub break_before_make: BreakBeforeMake,
}

/// How a unit supports one format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FormatSupport {
    /// The format.
    pub format: FormatId,
    /// The numbers of levels: bit *n* for *n* levels.
    pub levels: u16,
    /// The leaf sizes.
    pub page_sizes: PageSizes,
}

impl UnitCapabilities {
    /// A unit with full 64-bit input, 52-bit output and 16-bit domains, coherent walks, and nothing
    /// else: no format yet.
    pub const fn new() -> Self {
        Self {
            formats: [None; 12],
            output_bits: 52,
            input_bits: 64,
            domain_bits: 16,
            pasid_bits: 0,
            device_tlbs: false,
            coherent_walks: true,
            dirty_tracking: false,
            snoop_control: false,
            caches_not_present: false,
            break_before_make: BreakBeforeMake::NotNeeded,
        }
    }

    /// Adds a format, or replaces what was said of it. A thirteenth format is left out.
    pub fn with_format(mut self, support: FormatSupport) -> Self {
        let place = |slot: &&mut Option<FormatSupport>| {
            slot.is_none_or(|there| there.format == support.format)
        };
        if let Some(slot) = self.formats.iter_mut().find(place) {
            *slot = Some(support);
        }
        self
    }

    /// How the unit supports `format`, with the numbers of levels that its tables can have; `None` when it
    /// does not. An entry for Arm's long descriptors covers tables of fewer input bits too, and an entry
    /// for the upper half covers the lower.
    pub fn format(&self, format: FormatId) -> Option<FormatSupport> {
        let mut all = self.formats.iter().flatten();
        let support = all.find(|support| arm::covers(support.format, format))?;
        Some(FormatSupport {
            format,
            levels: support.levels & arm::levels(format),
            ..*support
        })
    }

    /// Refuses a root that the unit cannot walk. Every unit's `attach` begins with this.
    pub fn check(&self, root: &Root) -> Result<(), UnitAttachError> {
        let Root {
            format,
            address,
            levels,
        } = *root;
        let Some(support) = self.format(format) else {
            return Err(UnitAttachError::Format { format });
        };
        if levels >= 16 || support.levels >> levels & 1 == 0 {
            return Err(UnitAttachError::Levels {
                format,
                levels,
                offered: support.levels,
            });
        }
        if address & 0xfff != 0 || address >> self.output_bits.min(63) != 0 {
            return Err(UnitAttachError::RootAddress {
                address,
                bits: self.output_bits,
            });
        }
        Ok(())
    }
}

impl UnitCapabilities {
    /// Refuses a PASID that the unit does not take.
    pub(crate) fn check_pasid(
        &self,
        device: DeviceId,
        pasid: Pasid,
    ) -> Result<(), UnitAttachError> {
        let bits = self.pasid_bits;
        if pasid.0 == 0 || pasid.0 >> bits.min(31) != 0 {
            return Err(UnitAttachError::Pasid {
                device,
                pasid,
                bits,
            });
        }
        Ok(())
    }
}

/// Refuses memory beyond addresses of so many bits, as a unit's structures and registers hold them: its last
/// address is the error.
pub(crate) fn reaches<M: TableMemory>(memory: &M, bits: u32) -> Result<(), u64> {
    let last = memory.last_address();
    if last >> bits.min(63) != 0 {
        return Err(last);
    }
    Ok(())
}

impl Default for UnitCapabilities {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use iopt::format::{ArmConfig, ArmGranule};

    use super::*;

    #[test]
    fn a_table_of_three_levels_is_refused_where_the_unit_needs_four() {
        let format = FormatId::VtdSs;
        let root = |levels| Root {
            format,
            address: 1 << 30,
            levels,
        };
        let mut unit = UnitCapabilities::new().with_format(FormatSupport {
            format,
            levels: 1 << 4,
            page_sizes: PageSizes::from_bits(1 << 12),
        });
        unit.output_bits = 48;
        assert_eq!(unit.check(&root(4)), Ok(()));
        assert_eq!(
            unit.check(&root(3)),
            Err(UnitAttachError::Levels {
                format,
                levels: 3,
                offered: 1 << 4
            })
        );
    }

    #[test]
    fn arm_tables_of_fewer_input_bits_are_supported_too() {
        let config = |granule, input_bits, upper| ArmConfig {
            granule,
            input_bits,
            upper,
        };
        let most = FormatId::ArmStage1(config(ArmGranule::K16, 40, false));
        let unit = UnitCapabilities::new().with_format(FormatSupport {
            format: most,
            levels: 1 << 2 | 1 << 3,
            page_sizes: PageSizes::from_bits(1 << 14),
        });
        let there = |config| unit.format(FormatId::ArmStage1(config)).is_some();
        assert!(there(config(ArmGranule::K16, 40, false)));
        assert!(there(config(ArmGranule::K16, 32, false)));
        assert!(!there(config(ArmGranule::K16, 41, false)));
        assert!(!there(config(ArmGranule::K16, 40, true)));
        assert!(!there(config(ArmGranule::K4, 32, false)));
        let second = FormatId::ArmStage2(config(ArmGranule::K16, 40, false));
        assert_eq!(unit.format(second), None);
    }
}
