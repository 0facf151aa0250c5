//! Configuration of a device: see [`VirtioIommuConfig`].

use std::collections::BTreeSet;
use std::ops::RangeInclusive;
use std::sync::Arc;

use ioas::Memory;
use runs::{GuestAddr, Iova, Span};

use crate::features;
use crate::wire::{ConfigSpace, RESERVED_BYTES, ReservedKind, ReservedMemory};

/// Offered features and limits of a device, and its endpoints.
#[derive(Clone, Debug)]
pub struct VirtioIommuConfig {
    /// `page_size_mask` (5.13.4): the lowest bit is the granularity of mappings, at least that of the
    /// back end; the others are hints about sizes that are cheap.
    pub page_sizes: u64,
    /// The addresses that can be mapped, first and last, if they are fewer than all: what the tables of the
    /// back end reach.
    pub input: Option<RangeInclusive<u64>>,
    /// The numbers that a domain may have, first and last, if they are fewer than all.
    pub domains: Option<RangeInclusive<u32>>,
    /// `probe_size`: bytes of the properties of an endpoint. 0 when the driver cannot ask for any.
    pub probe_bytes: u32,
    /// True if endpoints without a domain are in bypass mode at first: they reach the guest's whole memory at its own
    /// addresses, and it is pinned for them. `None` when the driver has no say (then they reach nothing) and there are
    /// no bypass domains.
    pub bypass: Option<bool>,
    /// True when registers among the guest's [regions](MemoryRegion) can be mapped.
    pub mmio: bool,
    /// The endpoints.
    pub endpoints: Vec<EndpointConfig>,
    /// The most domains at a time.
    pub most_domains: usize,
    /// The most mappings of a domain, counted for each region that they meet.
    pub most_mappings: usize,
}

impl Default for VirtioIommuConfig {
    /// Pages of 4 KiB, no endpoints; an endpoint without a domain reaches nothing. There may be 4096
    /// domains of a million mappings each.
    fn default() -> Self {
        Self {
            page_sizes: !0xfff,
            input: None,
            domains: None,
            probe_bytes: 512,
            bypass: Some(false),
            mmio: false,
            endpoints: Vec::new(),
            most_domains: 4096,
            most_mappings: 1 << 20,
        }
    }
}

/// A device of the guest whose DMA is translated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EndpointConfig {
    /// Its number, which the guest learns elsewhere: from ACPI's table VIOT, or the device tree.
    pub id: u32,
    /// Ranges that it cannot have mapped, besides the reserved ones of its back end.
    pub reserved: Vec<ReservedMemory>,
}

impl EndpointConfig {
    /// An endpoint for which nothing is reserved but what its back end does.
    pub const fn new(id: u32) -> Self {
        let reserved = Vec::new();
        Self { id, reserved }
    }
}

/// A part of the guest's physical address space.
#[derive(Clone, Debug)]
pub struct MemoryRegion {
    /// The first address.
    pub start: u64,
    /// Memory of the region, or registers if its [object](Memory::object) says so.
    pub memory: Arc<Memory>,
}

impl MemoryRegion {
    /// `memory` at `start`.
    pub const fn new(start: u64, memory: Arc<Memory>) -> Self {
        Self { start, memory }
    }

    pub(crate) fn span(&self) -> Span<GuestAddr> {
        Span::new(self.start, self.memory.len())
    }

    pub(crate) fn is(&self, other: &Self) -> bool {
        self.start == other.start && Arc::ptr_eq(&self.memory, &other.memory)
    }
}

/// Refusal of a device, an endpoint, or memory. Nothing has changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// No bit is set in the mask of page sizes (5.13.4.2).
    #[error("there are no page sizes")]
    PageSizes,
    /// A range whose last element lies before the first.
    #[error("the range from {first:#x} to {last:#x} ends before it begins")]
    Range {
        /// The first.
        first: u64,
        /// The last.
        last: u64,
    },
    /// Two endpoints have the same number.
    #[error("there is an endpoint {id} already")]
    Endpoint {
        /// The number.
        id: u32,
    },
    /// Two reserved ranges of an endpoint overlap (5.13.6.8.1).
    #[error("two reserved ranges of endpoint {id} overlap at {at:#x}")]
    Overlap {
        /// The endpoint.
        id: u32,
        /// The first common address.
        at: u64,
    },
    /// An endpoint has more than one range for interrupts (5.13.6.8.1).
    #[error("endpoint {id} has more than one range for interrupts")]
    Msi {
        /// The endpoint.
        id: u32,
    },
    /// There is no room for an endpoint's properties (5.13.6.7).
    #[error("properties of endpoint {id} have {needed} bytes, and there is room for {room}")]
    Probe {
        /// The endpoint.
        id: u32,
        /// Their bytes.
        needed: usize,
        /// [`VirtioIommuConfig::probe_bytes`].
        room: u32,
    },
    /// A region is empty, ends beyond 2^64, or overlaps another one.
    #[error("the region {region} is empty, overlaps another one, or ends beyond 2^64")]
    Region {
        /// Its guest addresses.
        region: Span<GuestAddr>,
    },
}

impl VirtioIommuConfig {
    /// The features that a device of this kind offers (5.13.3).
    pub fn features(&self) -> u64 {
        let offered = [
            (self.input.is_some(), features::INPUT_RANGE),
            (self.domains.is_some(), features::DOMAIN_RANGE),
            (true, features::MAP_UNMAP),
            (self.probe_bytes > 0, features::PROBE),
            (self.mmio, features::MMIO),
            (self.bypass.is_some(), features::BYPASS_CONFIG),
        ];
        let offered = offered.into_iter().filter(|(there, _)| *there);
        offered.fold(0, |all, (_, feature)| all | feature)
    }

    /// Bytes of a page of the granularity.
    pub(crate) const fn granule(&self) -> u64 {
        1 << self.page_sizes.trailing_zeros()
    }

    pub(crate) fn input(&self) -> RangeInclusive<u64> {
        self.input.clone().unwrap_or(0..=u64::MAX)
    }

    pub(crate) fn domains(&self) -> RangeInclusive<u32> {
        self.domains.clone().unwrap_or(0..=u32::MAX)
    }

    pub(crate) fn space(&self, bypass: bool) -> ConfigSpace {
        ConfigSpace {
            page_sizes: self.page_sizes,
            input: self.input(),
            domains: self.domains(),
            probe_bytes: self.probe_bytes,
            bypass,
        }
    }

    /// Refuses what is no device, whatever its endpoints are.
    pub(crate) fn check(&self) -> Result<(), ConfigError> {
        if self.page_sizes == 0 {
            return Err(ConfigError::PageSizes);
        }
        let (input, domains) = (self.input(), self.domains());
        check_range(*input.start(), *input.end())?;
        check_range((*domains.start()).into(), (*domains.end()).into())?;
        let mut ids = BTreeSet::new();
        match self.endpoints.iter().find(|known| !ids.insert(known.id)) {
            Some(twice) => Err(ConfigError::Endpoint { id: twice.id }),
            None => Ok(()),
        }
    }

    /// Ranges that an endpoint cannot have mapped, in order: those of the monitor, and further ones of the back end.
    pub(crate) fn reserved(
        &self,
        endpoint: &EndpointConfig,
        of_back_end: &[Span<Iova>],
    ) -> Result<Vec<ReservedMemory>, ConfigError> {
        let id = endpoint.id;
        let mut all = endpoint.reserved.clone();
        for ReservedMemory { range, .. } in &all {
            check_range(*range.start(), *range.end())?;
        }
        let msi = all.iter().filter(|part| part.kind == ReservedKind::Msi);
        if msi.count() > 1 {
            return Err(ConfigError::Msi { id });
        }
        all.sort_by_key(|part| *part.range.start());
        for pair in all.windows(2) {
            if let [before, next] = pair {
                if next.range.start() <= before.range.end() {
                    let at = *next.range.start();
                    return Err(ConfigError::Overlap { id, at });
                }
            }
        }
        for span in of_back_end.iter().filter(|span| !span.is_empty()) {
            add_around(&mut all, span.start, span.last());
        }
        let needed = all.len() * RESERVED_BYTES;
        let room = self.probe_bytes;
        if room > 0 && needed > room as usize {
            return Err(ConfigError::Probe { id, needed, room });
        }
        Ok(all)
    }
}

const fn check_range(first: u64, last: u64) -> Result<(), ConfigError> {
    if first > last {
        return Err(ConfigError::Range { first, last });
    }
    Ok(())
}

/// Adds what of the range is not reserved yet.
fn add_around(all: &mut Vec<ReservedMemory>, first: u64, last: u64) {
    let mut fresh = Vec::new();
    // Start of the rest that is not covered; `None` when all is.
    let mut at = Some(first);
    for part in &*all {
        let Some(from) = at.filter(|from| *from <= last) else {
            break;
        };
        let (start, end) = (*part.range.start(), *part.range.end());
        if start > from {
            let before = (start - 1).min(last);
            fresh.push(from..=before);
        }
        if end >= from {
            at = end.checked_add(1);
        }
    }
    if let Some(from) = at.filter(|from| *from <= last) {
        fresh.push(from..=last);
    }
    let kind = ReservedKind::Reserved;
    all.extend(
        fresh
            .into_iter()
            .map(|range| ReservedMemory { kind, range }),
    );
    all.sort_by_key(|part| *part.range.start());
}

/// Sorts regions, and refuses what cannot be memory.
pub(crate) fn sorted(mut regions: Vec<MemoryRegion>) -> Result<Vec<MemoryRegion>, ConfigError> {
    regions.sort_by_key(|region| region.start);
    let mut free = Some(0);
    for region in &regions {
        let region = region.span();
        let whole =
            Span::<GuestAddr>::checked(region.start, region.len).filter(|span| !span.is_empty());
        let fits = free.is_some_and(|free| free <= region.start);
        if whole.is_none() || !fits {
            return Err(ConfigError::Region { region });
        }
        free = region.last().checked_add(1);
    }
    Ok(regions)
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn reserved(range: RangeInclusive<u64>) -> ReservedMemory {
        let kind = ReservedKind::Reserved;
        ReservedMemory { kind, range }
    }

    #[test]
    fn what_the_back_end_reserves_is_added_around_what_the_monitor_says() {
        let config = VirtioIommuConfig::default();
        let mut endpoint = EndpointConfig::new(1);
        endpoint.reserved = vec![reserved(100..=199), ReservedMemory::X86_MSI];
        let of_back_end = [
            Span::new(0xfee0_0000, 0x10_0000),
            Span::new(50, 1000),
            Span::new(u64::MAX - 9, 10),
            Span::new(120, 5),
        ];
        assert_eq!(
            config.reserved(&endpoint, &of_back_end),
            Ok(vec![
                reserved(50..=99),
                reserved(100..=199),
                reserved(200..=1049),
                ReservedMemory::X86_MSI,
                reserved(u64::MAX - 9..=u64::MAX),
            ])
        );
        endpoint.reserved = vec![reserved(0..=u64::MAX)];
        let all = config.reserved(&endpoint, &of_back_end);
        assert_eq!(all, Ok(endpoint.reserved.clone()));
    }
}
