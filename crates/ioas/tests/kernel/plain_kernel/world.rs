//! The model itself: mappings of containers or address spaces, checks in the kernel's order.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;
use std::sync::{Arc, Mutex};

use ioas::{Errno, MapSource, Placement, Profile};
use iommu::NodeId;
use iopt::Prot;
use runs::{Iova, Span};

use super::PAGE;

/// A device or a group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Device {
    pub(crate) ranges: Vec<RangeInclusive<u64>>,
    pub(crate) granule: u64,
    /// It tells which pages it writes to.
    pub(crate) tracks: bool,
    /// It cannot be detached now.
    pub(crate) open: bool,
}

impl Default for Device {
    fn default() -> Self {
        Self {
            ranges: vec![0..=0xfedf_ffff, 0xfef0_0000..=(1 << 48) - 1],
            granule: PAGE,
            tracks: false,
            open: false,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mapping {
    pub(crate) len: u64,
    /// Object of the pages, and the offset in it.
    pub(crate) pages: u64,
    pub(crate) offset: u64,
    /// The address in the process, or the offset in the file.
    pub(crate) address: u64,
    pub(crate) prot: Prot,
    pub(crate) from_file: bool,
    pub(crate) invalid: bool,
}

#[derive(Debug, Default)]
pub(crate) struct Address {
    pub(crate) mappings: BTreeMap<u64, Mapping>,
    pub(crate) devices: Vec<Device>,
    pub(crate) allowed: Vec<Span<Iova>>,
    pub(crate) tracking: bool,
    pub(crate) dirty: BTreeSet<u64>,
    /// Its file is closed.
    pub(crate) closed: bool,
}

/// A kernel and one user of it.
#[derive(Debug)]
pub(crate) struct World {
    pub(crate) profile: Profile,
    pub(crate) spaces: Vec<Address>,
    /// `RLIMIT_MEMLOCK`.
    pub(crate) limit: u64,
    /// `dma_entry_limit`.
    pub(crate) entries: u64,
    /// Addresses that cannot be pinned.
    pub(crate) bad: Vec<Span<Iova>>,
    /// Users in the kernel that do not let go.
    pub(crate) held: Vec<Span<Iova>>,
    next: u64,
    /// Number of maps and unmaps that were tried.
    pub(crate) asked: usize,
    /// Calls that have succeeded, in order: `true` are maps.
    pub(crate) calls: Vec<(bool, Span<Iova>)>,
    /// The calls from now on that fail with ENOMEM, by number: 0 is the next.
    pub(crate) fail: BTreeSet<usize>,
    /// The node of each device that was let in, and the policy then.
    pub(crate) entered: Vec<(Option<NodeId>, Placement)>,
}

/// The kernel's answer.
pub(crate) type Answer<T> = Result<T, Errno>;

impl World {
    pub(crate) fn new(profile: Profile) -> Arc<Mutex<Self>> {
        Arc::new(Mutex::new(Self {
            profile,
            spaces: Vec::new(),
            limit: u64::MAX,
            entries: 65_535,
            bad: Vec::new(),
            held: Vec::new(),
            next: 0,
            asked: 0,
            calls: Vec::new(),
            fail: BTreeSet::new(),
            entered: Vec::new(),
        }))
    }

    /// Bytes of `locked_vm`: of a container, every mapping; of iommufd, every page of an object that
    /// some page table needs, once.
    pub(crate) fn locked(&self) -> u64 {
        let pinned = self.spaces.iter().filter(|space| !space.devices.is_empty());
        let mappings = pinned.flat_map(|space| space.mappings.values());
        match self.profile {
            Profile::Type1 => mappings.map(|mapping| mapping.len).sum(),
            Profile::Iommufd => {
                let pages = mappings.flat_map(|mapping| {
                    let first = mapping.offset / PAGE;
                    (first..first + mapping.len / PAGE).map(|page| (mapping.pages, page))
                });
                pages.collect::<BTreeSet<_>>().len() as u64 * PAGE
            }
        }
    }

    fn fails(&mut self) -> Answer<()> {
        self.asked += 1;
        let failing = self.fail.contains(&0);
        self.fail = self
            .fail
            .iter()
            .filter_map(|call| call.checked_sub(1))
            .collect();
        if failing { Err(Errno::ENOMEM) } else { Ok(()) }
    }

    pub(crate) fn map(
        &mut self,
        space: usize,
        iova: u64,
        len: u64,
        source: MapSource<'_>,
        prot: Prot,
    ) -> Answer<()> {
        let type1 = self.profile == Profile::Type1;
        self.fails()?;
        // A container without groups has no IOMMU.
        if len == 0 || type1 && self.spaces[space].devices.is_empty() {
            return Err(Errno::EINVAL);
        }
        let start = match source {
            MapSource::Address(address) | MapSource::File(_, address) => address,
            MapSource::Copy { iova, .. } => iova,
        };
        let whole = !type1 && (iova == u64::MAX || len == u64::MAX);
        if whole || iova.checked_add(len - 1).is_none() || start.checked_add(len - 1).is_none() {
            return Err(Errno::EOVERFLOW);
        }
        if (prot & Prot::RW).is_empty() {
            return Err(Errno::EINVAL);
        }
        let here = &self.spaces[space];
        let aligned = here.alignment() - 1;
        if (iova | len | start) & aligned != 0 {
            return Err(Errno::EINVAL);
        }
        let range = Span::new(iova, len);
        if here.overlapping(range).next().is_some() {
            return Err(Errno::EEXIST);
        }
        if !here.translates(range) {
            return Err(Errno::EINVAL);
        }
        if type1 && here.mappings.len() as u64 >= self.entries {
            return Err(Errno::ENOSPC);
        }
        let mut mapping = Mapping {
            len,
            pages: self.next,
            offset: start % PAGE,
            address: start,
            prot,
            from_file: matches!(source, MapSource::File(..)),
            invalid: false,
        };
        self.next += 1;
        if let MapSource::Copy { space, iova } = source {
            let from = self.copied(space as usize, Span::new(iova, len))?;
            if prot.contains(Prot::WRITE) && !from.prot.contains(Prot::WRITE) {
                return Err(Errno::EPERM);
            }
            mapping = Mapping { prot, len, ..from };
        }
        self.spaces[space].mappings.insert(iova, mapping);
        let pinned = self.pin(space, Errno::EFAULT);
        match pinned {
            Ok(()) => self.calls.push((true, range)),
            Err(_) => drop(self.spaces[space].mappings.remove(&iova)),
        }
        pinned
    }

    /// The mapping that covers `range`, moved to where that begins. (The kernel takes several, too.)
    fn copied(&self, space: usize, range: Span<Iova>) -> Answer<Mapping> {
        let mappings = &self.spaces[space].mappings;
        let (start, from) = mappings
            .range(..=range.start)
            .next_back()
            .ok_or(Errno::ENOENT)?;
        if !Span::new(*start, from.len).covers(&range) {
            return Err(Errno::ENOENT);
        }
        let skipped = range.start - start;
        Ok(Mapping {
            offset: from.offset + skipped,
            address: from.address + skipped,
            ..*from
        })
    }

    /// Pins what is mapped in `space`, if a device is there, or says why not.
    fn pin(&self, space: usize, bad: Errno) -> Answer<()> {
        let here = &self.spaces[space];
        if here.devices.is_empty() {
            return Ok(());
        }
        let refuses = |mapping: &&Mapping| {
            let memory = Span::new(mapping.address, mapping.len);
            !mapping.from_file && self.bad.iter().any(|bad| bad.overlaps(&memory))
        };
        if here.mappings.values().any(|mapping| refuses(&mapping)) {
            return Err(bad);
        }
        if self.locked() > self.limit {
            return Err(Errno::ENOMEM);
        }
        Ok(())
    }

    pub(crate) fn unmap(&mut self, space: usize, iova: u64, len: u64) -> Answer<u64> {
        let type1 = self.profile == Profile::Type1;
        // A container without groups has no IOMMU.
        if type1 && self.spaces[space].devices.is_empty() {
            return Err(Errno::EINVAL);
        }
        self.fails()?;
        let all = !type1 && iova == 0 && len == u64::MAX;
        if len == 0 {
            return Err(Errno::EINVAL);
        }
        let Some(last) = iova.checked_add(len - 1) else {
            return Err(Errno::EOVERFLOW);
        };
        let range = Span::inclusive(iova, last).unwrap();
        if type1 && (iova | len) & (self.spaces[space].alignment() - 1) != 0 {
            return Err(Errno::EINVAL);
        }
        let inside: Vec<(u64, u64)> = self.spaces[space]
            .overlapping(range)
            .map(|(start, mapping)| (start, mapping.len))
            .collect();
        let cut = |(start, len): &(u64, u64)| !range.covers(&Span::new(*start, *len));
        if type1 && inside.iter().any(cut) {
            return Err(Errno::EINVAL);
        }
        let mut bytes = 0;
        for (start, len) in inside {
            if cut(&(start, len)) {
                return Err(Errno::ENOENT);
            }
            if self
                .held
                .iter()
                .any(|held| held.overlaps(&Span::new(start, len)))
            {
                return Err(if type1 {
                    Errno::EBUSY
                } else {
                    Errno::EDEADLOCK
                });
            }
            let here = &mut self.spaces[space];
            here.mappings.remove(&start);
            here.dirty
                .retain(|at| !Span::<Iova>::new(start, len).contains(*at));
            self.calls.push((false, Span::new(start, len)));
            bytes += len;
        }
        if bytes == 0 && !type1 && !all {
            return Err(Errno::ENOENT);
        }
        Ok(bytes)
    }

    pub(crate) fn attach(&mut self, space: usize, device: &Device) -> Answer<()> {
        let in_the_way = match self.profile {
            Profile::Type1 => Errno::EINVAL,
            Profile::Iommufd => Errno::EADDRINUSE,
        };
        if self.spaces[space]
            .mappings
            .values()
            .any(|mapping| mapping.invalid)
        {
            return Err(Errno::EBUSY);
        }
        let here = &mut self.spaces[space];
        here.devices.push(device.clone());
        let aligned = here.alignment() - 1;
        let fits = here.mappings.iter().all(|(start, mapping)| {
            (start | mapping.len) & aligned == 0 && here.translates(Span::new(*start, mapping.len))
        });
        let allowed = here.allowed.iter().all(|range| here.translates(*range));
        let attached = if fits && allowed {
            self.pin(space, Errno::EFAULT)
        } else {
            Err(in_the_way)
        };
        attached.inspect_err(|_| {
            self.spaces[space].devices.pop();
        })
    }

    pub(crate) fn detach(&mut self, space: usize, device: &Device) -> Answer<()> {
        if device.open {
            return Err(Errno::EBUSY);
        }
        // A table of iommufd, with its dirty bits, stays until it is given back.
        if self.profile == Profile::Type1 {
            self.gone(space, device);
        }
        Ok(())
    }

    /// Drops the state of a device that is detached.
    pub(crate) fn gone(&mut self, space: usize, device: &Device) {
        let type1 = self.profile == Profile::Type1;
        let here = &mut self.spaces[space];
        let place = here.devices.iter().rposition(|other| other == device);
        here.devices.remove(place.unwrap());
        if here.devices.is_empty() {
            here.dirty.clear();
            if type1 {
                here.mappings.clear();
            }
        } else if type1 && here.tracking && !device.tracks {
            // A container counts all of its memory when a group leaves that tells nothing.
            let pages = here.mappings.iter().flat_map(|(start, mapping)| {
                (0..mapping.len / PAGE).map(move |n| start + n * PAGE)
            });
            here.dirty.extend(pages);
        }
    }

    /// Offset that a device reaches at `iova`.
    pub(crate) fn translate(&self, space: usize, iova: u64) -> Option<u64> {
        let mappings = &self.spaces[space].mappings;
        let (start, mapping) = mappings.range(..=iova).next_back()?;
        let inside = iova - start;
        (inside < mapping.len).then(|| mapping.address + inside)
    }
}

impl Address {
    pub(crate) fn alignment(&self) -> u64 {
        self.devices
            .iter()
            .map(|device| device.granule)
            .max()
            .unwrap_or(1)
    }

    pub(crate) fn overlapping(&self, range: Span<Iova>) -> impl Iterator<Item = (u64, &Mapping)> {
        let there = self
            .mappings
            .iter()
            .map(|(start, mapping)| (*start, mapping));
        there.filter(move |(start, mapping)| Span::new(*start, mapping.len).overlaps(&range))
    }

    /// Every device translates all of `range`.
    pub(crate) fn translates(&self, range: Span<Iova>) -> bool {
        self.devices.iter().all(|device| {
            let mut ranges = device.ranges.iter();
            ranges.any(|window| window.contains(&range.start) && window.contains(&range.last()))
        })
    }

    pub(crate) fn ranges(&self) -> Vec<RangeInclusive<u64>> {
        let mut all = vec![0..=u64::MAX];
        for device in &self.devices {
            all = all
                .iter()
                .flat_map(|range| {
                    device.ranges.iter().filter_map(|window| {
                        let first = *range.start().max(window.start());
                        let last = *range.end().min(window.end());
                        (first <= last).then_some(first..=last)
                    })
                })
                .collect();
        }
        all
    }
}
