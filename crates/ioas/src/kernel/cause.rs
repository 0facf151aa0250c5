//! Causes of an error number, by the request that it answers.
//!
//! The kernel gives one number for many causes, but it checks in a known order, and most of what it
//! checks is in the request: so the cause is the first check that the request fails, among those
//! that end in this number. Causes outside the request (other mappings, the memory itself, the
//! limit) have numbers of their own, or are all that is left.
//!
//! Source: what Linux 7.2 answers, and the order in which it checks. The caller that made the request turns
//! a cause into an error with its numbers: only it knows what is mapped, and what was charged.

use core::ops::RangeInclusive;

use iopt::Prot;
use runs::{Iova, Span};

use crate::errno::Profile;

/// Addresses in this process, or offsets in a file: where the kernel is asked to map memory from.
#[derive(Clone, Copy, Debug)]
pub(super) enum UserMemory {}

/// A request to map, and what was known when it was made.
#[derive(Clone, Copy, Debug)]
pub(super) struct MapRequest<'a> {
    /// The device address; `None` to have one found.
    pub(super) iova: Option<u64>,
    /// The memory.
    pub(super) memory: Span<UserMemory>,
    /// Access that devices have.
    pub(super) prot: Prot,
    /// It is registers of a device.
    pub(super) registers: bool,
    /// The smallest page of the IOMMU, bytes; 1 for an address space without a device.
    pub(super) granule: u64,
    /// The device addresses that can be mapped, first and last; none when that is not known.
    pub(super) windows: &'a [RangeInclusive<u64>],
}

/// Cause of a refused map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MapCause {
    /// No bytes.
    Empty,
    /// The device addresses wrap around.
    IovaOverflow,
    /// The addresses of the memory wrap around.
    MemoryOverflow,
    /// Neither reading nor writing.
    NoAccess,
    /// The device address, the memory's address or the length is no multiple of the smallest page.
    Unaligned,
    /// Not inside of one window.
    Outside,
    /// Something is mapped there.
    Overlap,
    /// No room for it in any window.
    NoRoom,
    /// The container has 65,535 mappings, and takes no more.
    TooMany,
    /// The memory, or a part of it, cannot be pinned: a hole, read-only, of a kind that is refused.
    Memory,
    /// The limit on locked memory, or no memory left for the kernel.
    Limit,
    /// The dma-buf is revoked.
    Revoked,
    /// The kernel does not know the operation, or one of its flags.
    Unsupported,
    /// The number says nothing that the request explains: for a memory file, a part past its end.
    Other,
}

/// Cause of a refused unmap. In an address space of iommufd, mappings before one that would be cut
/// are gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum UnmapCause {
    /// No bytes, or an address or length that is no multiple of the smallest page.
    Unaligned,
    /// The addresses wrap around.
    Overflow,
    /// It would cut a mapping.
    Cut,
    /// It would cut a mapping, or nothing is there.
    CutOrNothing,
    /// Another operation is under way there, or another process has it locked.
    Busy,
    /// A user of the memory in the kernel was asked to release it, and does not.
    StillUsed,
    /// The number says nothing that the request explains.
    Other,
}

/// The cause of a refused mapping.
pub(super) fn map_cause(profile: Profile, errno: i32, request: &MapRequest<'_>) -> MapCause {
    match errno {
        libc::EEXIST => MapCause::Overlap,
        libc::EFAULT => MapCause::Memory,
        libc::ENOMEM => MapCause::Limit,
        libc::ENOTTY | libc::EOPNOTSUPP | libc::E2BIG => MapCause::Unsupported,
        libc::ENOSPC if profile == Profile::Type1 => MapCause::TooMany,
        libc::ENOSPC => MapCause::NoRoom,
        // Source: Linux 7.2, `drivers/vfio/pci/vfio_pci_dmabuf.c`: what attaches to a dma-buf that is revoked.
        libc::ENODEV if profile == Profile::Iommufd && request.registers => MapCause::Revoked,
        libc::EOVERFLOW => overflow(profile, request),
        libc::EINVAL => invalid(request),
        _ => MapCause::Other,
    }
}

/// The last of `len` bytes from `first` on.
fn last(first: u64, len: u64) -> Option<u64> {
    first.checked_add(len.wrapping_sub(1))
}

fn overflow(profile: Profile, request: &MapRequest<'_>) -> MapCause {
    let Span { start, len, .. } = request.memory;
    match request.iova {
        Some(iova) if last(iova, len).is_none() => MapCause::IovaOverflow,
        // iommufd takes neither the highest address nor the greatest length.
        Some(iova) if profile == Profile::Iommufd && iova.max(len) == u64::MAX => {
            MapCause::IovaOverflow
        }
        _ if last(start, len).is_none() => MapCause::MemoryOverflow,
        None => MapCause::NoRoom,
        Some(_) => MapCause::Other,
    }
}

fn invalid(request: &MapRequest<'_>) -> MapCause {
    let Span { start, len, .. } = request.memory;
    if len == 0 {
        return MapCause::Empty;
    }
    if !request.prot.intersects(Prot::RW) {
        return MapCause::NoAccess;
    }
    if (request.iova.unwrap_or(0) | start | len) & request.granule.wrapping_sub(1) != 0 {
        return MapCause::Unaligned;
    }
    let Some(iova) = request.iova else {
        return MapCause::Other;
    };
    let end = last(iova, len);
    let inside = |window: &RangeInclusive<u64>| {
        window.contains(&iova) && end.is_some_and(|end| window.contains(&end))
    };
    if !request.windows.is_empty() && !request.windows.iter().any(inside) {
        return MapCause::Outside;
    }
    MapCause::Other
}

/// The cause of a refused unmapping of `iova`; `granule` as in [`MapRequest`].
pub(super) fn unmap_cause(
    profile: Profile,
    errno: i32,
    iova: Span<Iova>,
    granule: u64,
) -> UnmapCause {
    match (errno, profile) {
        (libc::EOVERFLOW, _) => UnmapCause::Overflow,
        (libc::EINVAL, _) if iova.is_empty() || !iova.is_aligned(granule) => UnmapCause::Unaligned,
        (libc::EINVAL, _) if Span::<Iova>::checked(iova.start, iova.len).is_none() => {
            UnmapCause::Overflow
        }
        (libc::EINVAL, Profile::Type1) => UnmapCause::Cut,
        // A container returns it only when iommufd plays it.
        (libc::ENOENT, _) => UnmapCause::CutOrNothing,
        (libc::EBUSY, _) => UnmapCause::Busy,
        (libc::EDEADLOCK, _) => UnmapCause::StillUsed,
        _ => UnmapCause::Other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WINDOWS: [RangeInclusive<u64>; 2] = [0..=0xfedf_ffff, 0xfef0_0000..=(1 << 39) - 1];
    const GOOD: MapRequest<'static> = MapRequest {
        iova: Some(1 << 32),
        memory: Span::new(0x7f00_0000_0000, 2 << 20),
        prot: Prot::RW,
        registers: false,
        granule: 4096,
        windows: &WINDOWS,
    };

    fn with(change: impl FnOnce(&mut MapRequest<'static>)) -> MapRequest<'static> {
        let mut request = GOOD;
        change(&mut request);
        request
    }

    #[test]
    fn a_request_that_breaks_one_rule_has_that_cause() {
        use MapCause::*;
        let top = u64::MAX - 0xfff;
        let rows = [
            (libc::EINVAL, Empty, with(|r| r.memory.len = 0)),
            (libc::EINVAL, NoAccess, with(|r| r.prot = Prot::empty())),
            (
                libc::EINVAL,
                Unaligned,
                with(|r| r.iova = Some(0x1_0000_0800)),
            ),
            (libc::EINVAL, Unaligned, with(|r| r.memory.start += 8)),
            (libc::EINVAL, Unaligned, with(|r| r.memory.len -= 1)),
            (libc::EINVAL, Outside, with(|r| r.iova = Some(0xfee0_0000))),
            (libc::EINVAL, Outside, with(|r| r.iova = Some(0xfedf_f000))),
            (
                libc::EINVAL,
                Outside,
                with(|r| r.iova = Some((1 << 39) - 4096)),
            ),
            (libc::EINVAL, Outside, with(|r| r.iova = Some(top))),
            (libc::EINVAL, Other, GOOD),
            (
                libc::EINVAL,
                Other,
                with(|r| (r.iova, r.windows) = (Some(top), &[])),
            ),
            (libc::EINVAL, Other, with(|r| r.iova = None)),
            (libc::EOVERFLOW, IovaOverflow, with(|r| r.iova = Some(top))),
            (
                libc::EOVERFLOW,
                MemoryOverflow,
                with(|r| r.memory.start = top),
            ),
            (libc::EOVERFLOW, Other, GOOD),
            (libc::EEXIST, Overlap, GOOD),
            (libc::EFAULT, Memory, GOOD),
            (libc::ENOMEM, Limit, GOOD),
            (libc::EIO, Other, GOOD),
        ];
        for (errno, expected, request) in rows {
            for profile in [Profile::Type1, Profile::Iommufd] {
                assert_eq!(map_cause(profile, errno, &request), expected, "{request:?}");
            }
        }
    }

    #[test]
    fn the_two_profiles_differ_where_the_kernel_does() {
        let both = |errno, request: &MapRequest<'_>| {
            [Profile::Type1, Profile::Iommufd].map(|profile| map_cause(profile, errno, request))
        };
        use MapCause::*;
        assert_eq!(both(libc::ENOSPC, &GOOD), [TooMany, NoRoom]);
        assert_eq!(both(libc::EOPNOTSUPP, &GOOD), [Unsupported; 2]);
        let registers = with(|r| r.registers = true);
        assert_eq!(both(libc::ENODEV, &registers), [Other, Revoked]);
        assert_eq!(both(libc::ENODEV, &GOOD), [Other; 2]);
        let all = with(|r| (r.iova, r.memory) = (Some(0), Span::new(0, u64::MAX)));
        assert_eq!(both(libc::EOVERFLOW, &all), [Other, IovaOverflow]);
        // Half of the address space is more than iommufd looks for room.
        let long = with(|r| (r.iova, r.memory.start, r.memory.len) = (None, 0, 1 << 63));
        assert_eq!(both(libc::EOVERFLOW, &long)[1], NoRoom);
        // Without a device there is no page to be aligned to.
        let odd = with(|r| (r.granule, r.memory.len) = (1, 4097));
        assert_eq!(both(libc::EINVAL, &odd)[1], Other);
    }

    #[test]
    fn an_unmapping_that_cuts_is_distinguished_where_the_kernel_does() {
        use UnmapCause::*;
        let cause = |errno, iova| {
            [Profile::Type1, Profile::Iommufd]
                .map(|profile| unmap_cause(profile, errno, iova, 4096))
        };
        let part = Span::new(1 << 32, 4096);
        assert_eq!(cause(libc::EINVAL, part), [Cut, Other]);
        assert_eq!(cause(libc::ENOENT, part), [CutOrNothing; 2]);
        assert_eq!(cause(libc::EBUSY, part), [Busy; 2]);
        assert_eq!(cause(libc::EDEADLOCK, part), [StillUsed; 2]);
        assert_eq!(cause(libc::EINVAL, Span::new(1 << 32, 0)), [Unaligned; 2]);
        assert_eq!(cause(libc::EINVAL, Span::new(8, 4096)), [Unaligned; 2]);
        let beyond = Span::new(u64::MAX - 0xfff, 0x2000);
        assert_eq!(cause(libc::EINVAL, beyond), [Overflow; 2]);
        assert_eq!(cause(libc::EOVERFLOW, beyond), [Overflow; 2]);
    }
}
