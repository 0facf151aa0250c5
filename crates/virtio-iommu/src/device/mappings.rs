//! MAP and UNMAP (VIRTIO 1.3, 5.13.6.5 and 5.13.6.6).
//!
//! A mapping is the result of one MAP request. The areas of the domain's address space are the record of
//! it: one for each region of the guest's memory that it meets, and nearly always one. The start of a
//! second one is a *joint*, at which no UNMAP may begin or end.

use std::sync::Arc;

use ioas::{Ioas, MapError, Memory, UnmapError};
use iopt::{Prot, TableMapError};
use runs::{Iova, Offset, Span};

use super::{Domain, VirtioIommu};
use crate::config::MemoryRegion;
use crate::domains::Domains;
use crate::features;
use crate::refusal::RequestError;
use crate::wire::{Map, Unmap, map_flags};

/// Part of a mapping that lies in one region.
struct Part<'a> {
    iova: u64,
    memory: &'a Arc<Memory>,
    /// Offset and length in the memory.
    part: Span<Offset>,
}

impl<D: Domains> VirtioIommu<D> {
    /// MAP (5.13.6.5).
    pub(super) fn map(&mut self, request: &Map) -> Result<(), RequestError> {
        let known = match self.has(features::MMIO) {
            true => map_flags::READ | map_flags::WRITE | map_flags::MMIO,
            false => map_flags::READ | map_flags::WRITE,
        };
        let unknown = request.flags & !known;
        if unknown != 0 {
            return Err(RequestError::Flags { unknown });
        }
        let there = paged(&self.domains, request.domain)?;
        let range = self.range(request)?;
        let mmio = request.flags & map_flags::MMIO != 0;
        let parts = parts(&self.memory, request, range, mmio)?;
        self.permitted(request.domain, range)?;
        let most = self.config.most_mappings;
        let wanted = there.len() + parts.len();
        if wanted > most {
            return Err(RequestError::Mappings { wanted, most });
        }
        let Some(Domain {
            space: Some(space),
            joints,
            ..
        }) = self.domains.get_mut(&request.domain)
        else {
            return Ok(());
        };
        let prot = prot(request.flags);
        let mapped = map_all(space, &parts, prot);
        let dirty = self.dirty.as_mut();
        let dirty = dirty.filter(|_| prot.contains(Prot::WRITE));
        if let (Err((cause, nr)), Some(dirty)) = (&mapped, dirty) {
            // Parts that were mapped for a moment.
            let there = nr + usize::from(!is_refused_before(cause));
            for part in parts.iter().take(there) {
                dirty.keep(part.memory, part.part, &self.memory);
            }
        }
        mapped.map_err(|(cause, _)| RequestError::Map(cause))?;
        joints.extend(parts.iter().skip(1).map(|part| part.iova));
        Ok(())
    }

    /// The range that is to be mapped, if it consists of whole pages in what can be mapped.
    fn range(&self, request: &Map) -> Result<Span<Iova>, RequestError> {
        let granule = self.config.granule();
        let (start, end) = (request.virt_start, request.virt_end);
        let behind = end.wrapping_add(1);
        let ends = [start, request.phys_start, behind].into_iter();
        if let Some(value) = ends.into_iter().find(|end| end & (granule - 1) != 0) {
            return Err(RequestError::Misaligned { value, granule });
        }
        if end < start {
            return Err(RequestError::Order { start, end });
        }
        let input = self.config.input();
        if !input.contains(&start) || !input.contains(&end) {
            return Err(RequestError::Input { start, end });
        }
        // All 2^64 bytes: no guest has that much memory.
        let (start, end) = (request.phys_start, request.phys_start.wrapping_sub(1));
        Span::inclusive(request.virt_start, request.virt_end)
            .ok_or(RequestError::NotMemory { start, end })
    }

    /// Refuses what is reserved for an endpoint of the domain.
    fn permitted(&self, domain: u32, range: Span<Iova>) -> Result<(), RequestError> {
        let endpoints = self.endpoints.iter();
        let mut members = endpoints.filter(|(_, known)| known.domain == Some(domain));
        let meets = |known: &super::Known| {
            let mut reserved = known.reserved.iter();
            reserved.any(|part| part.overlaps(range.start, range.last()))
        };
        match members.find(|(_, known)| meets(known)) {
            Some((&endpoint, _)) => Err(RequestError::ReservedRange { range, endpoint }),
            None => Ok(()),
        }
    }

    /// UNMAP (5.13.6.6).
    pub(super) fn unmap(&mut self, request: &Unmap) -> Result<(), RequestError> {
        let &Unmap {
            domain,
            virt_start: start,
            virt_end: end,
            reserved,
        } = request;
        if reserved != [0; 4] {
            return Err(RequestError::Reserved);
        }
        paged(&self.domains, domain)?;
        if end < start {
            return Err(RequestError::Order { start, end });
        }
        let Some(Domain {
            space: Some(space),
            joints,
            ..
        }) = self.domains.get_mut(&domain)
        else {
            return Ok(());
        };
        let behind = end.checked_add(1);
        if joints.contains(&start) || behind.is_some_and(|behind| joints.contains(&behind)) {
            return Err(RequestError::Cuts { start, end });
        }
        let range = Span::inclusive(start, end);
        let unmapped = match (&mut self.dirty, range) {
            (Some(dirty), _) => dirty.unmap(space, range, &self.memory),
            (None, Some(range)) => space.unmap(range),
            (None, None) => space.unmap_all(),
        };
        // In these two cases the areas are gone all the same.
        if let Ok(_) | Err(UnmapError::Flush(_) | UnmapError::Unpin(_)) = unmapped {
            let mut left = joints.split_off(&start);
            if let Some(behind) = behind {
                joints.append(&mut left.split_off(&behind));
            }
        }
        unmapped.map(|_| ()).map_err(RequestError::Unmap)
    }
}

/// The address space of a domain that has one of its own.
fn paged(
    domains: &std::collections::BTreeMap<u32, Domain>,
    domain: u32,
) -> Result<&Ioas, RequestError> {
    let there = domains
        .get(&domain)
        .ok_or(RequestError::NoDomain { domain })?;
    there.space.as_ref().ok_or(RequestError::Bypass { domain })
}

/// The permissions that flags ask for.
fn prot(flags: u32) -> Prot {
    let mut prot = Prot::empty();
    prot.set(Prot::READ, flags & map_flags::READ != 0);
    prot.set(Prot::WRITE, flags & map_flags::WRITE != 0);
    prot
}

/// Parts of regions at the guest's physical addresses, region by region without a hole.
fn parts<'a>(
    memory: &'a [MemoryRegion],
    request: &Map,
    range: Span<Iova>,
    mmio: bool,
) -> Result<Vec<Part<'a>>, RequestError> {
    let start = request.phys_start;
    let end = start.wrapping_add(range.len - 1);
    let refused = RequestError::NotMemory { start, end };
    let Some(phys) = Span::checked(start, range.len) else {
        return Err(refused);
    };
    let first = memory.partition_point(|region| region.span().last() < start);
    let mut parts = Vec::new();
    let mut done = 0;
    for region in memory.get(first..).unwrap_or(&[]) {
        let span = region.span();
        let Some(here) = phys.intersection(&span) else {
            break;
        };
        if here.start - start != done {
            break;
        }
        if region.memory.object().is_mmio() != mmio {
            return Err(RequestError::MemoryType { region: span });
        }
        parts.push(Part {
            iova: range.start + done,
            memory: &region.memory,
            part: Span::new(here.start - span.start, here.len),
        });
        done += here.len;
    }
    if done == range.len {
        Ok(parts)
    } else {
        Err(refused)
    }
}

/// Returns true if nothing was mapped, not even for a moment.
const fn is_refused_before(cause: &MapError) -> bool {
    matches!(
        cause,
        MapError::Range(_)
            | MapError::Part { .. }
            | MapError::Overlap { .. }
            | MapError::BeyondEnd { .. }
            | MapError::Reserved { .. }
            | MapError::Unsupported(_)
            | MapError::Prot { .. }
            | MapError::OverLimit(_)
            | MapError::Pin(_)
    )
}

/// Maps all parts, or none; then with the error comes how many were mapped before.
fn map_all(space: &Ioas, parts: &[Part<'_>], prot: Prot) -> Result<(), (MapError, usize)> {
    for (nr, part) in parts.iter().enumerate() {
        if let Err(cause) = map_part(space, part, prot) {
            for before in parts.iter().take(nr) {
                // The monitor must learn why the map failed. If a unit does not take notice, the memory is retired.
                let _ = space.unmap(Span::new(before.iova, before.part.len));
            }
            return Err((cause, nr));
        }
    }
    Ok(())
}

fn map_part(space: &Ioas, part: &Part<'_>, prot: Prot) -> Result<(), MapError> {
    let map = |prot| space.map(part.iova, part.memory, part.part, prot);
    match map(prot) {
        // If nothing can only be written, it may be read too (5.13.6.5.2).
        Err(MapError::Prot { .. } | MapError::Table(TableMapError::Prot { .. }))
            if prot == Prot::WRITE =>
        {
            map(Prot::RW)
        }
        mapped => mapped,
    }
}
