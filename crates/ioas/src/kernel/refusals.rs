//! What a kernel's error numbers mean, by operation and interface: pure functions.
//!
//! What can be known before the kernel is asked was checked before. So a number tells what only the
//! kernel knows: that a limit or somebody else was in the way, or that memory is not what it seemed.
//! A number that says nothing of that kind stays a cause, with the name of the ioctl.

use std::boxed::Box;

use iopt::RangeError;
use runs::Span;

use super::error::KernelError;
use crate::backend::{Capability, Unsupported};
use crate::errno::{Errno, Profile};
use crate::error::{AttachError, DetachError, MapError, UnmapError};
use crate::ledger::OverLimit;
use crate::object::PinFailed;

/// What was to be mapped.
#[derive(Clone, Copy, Debug)]
pub(super) struct MapRequest {
    /// Device addresses.
    pub(super) range: Span,
    /// What its ends must be multiples of, bytes.
    pub(super) granule: u64,
    /// What of the range lies in no window, as far as is known.
    pub(super) outside: Option<Span>,
    /// What the ledger says to it; `None` without a limit.
    pub(super) over: Option<OverLimit>,
    /// Mappings that there are.
    pub(super) mappings: u64,
}

/// The number, when the kernel gave one.
pub(super) const fn errno(error: &KernelError) -> Option<Errno> {
    match error {
        KernelError::Refused { errno, .. } => Some(Errno(*errno)),
        _ => None,
    }
}

/// Why a map was refused.
pub(super) fn map_refused(profile: Profile, error: KernelError, request: &MapRequest) -> MapError {
    let wanted = request.range;
    match (errno(&error), profile) {
        (Some(Errno::EEXIST), _) => MapError::Overlap {
            wanted,
            area: wanted,
        },
        (Some(Errno::ENOMEM), _) => match request.over {
            Some(over) => MapError::OverLimit(over),
            None => MapError::Kernel(Box::new(error)),
        },
        (Some(Errno::EFAULT), _) => MapError::Pin(PinFailed::Refused(Box::new(error))),
        (Some(Errno::EINTR), _) => MapError::Interrupted,
        (Some(Errno::ENOSPC), Profile::Type1) => MapError::TooMany {
            wanted: request.mappings + 1,
            most: request.mappings,
        },
        (Some(Errno::ENOSPC), Profile::Iommufd) => MapError::NoRoom { len: wanted.len },
        (Some(Errno::EOVERFLOW), _) => MapError::BeyondEnd {
            start: wanted.start,
        },
        (Some(Errno::EINVAL | Errno::EADDRINUSE), _) => match request.outside {
            Some(reserved) => MapError::Reserved { wanted, reserved },
            None if !wanted.is_aligned(request.granule) => {
                MapError::Range(RangeError::Misaligned {
                    value: wanted.start,
                    granule: request.granule,
                })
            }
            None => MapError::Kernel(Box::new(error)),
        },
        _ => match error {
            KernelError::Prot { prot } => MapError::Prot { prot },
            error => MapError::Kernel(Box::new(error)),
        },
    }
}

/// Why an unmap of `range` was refused.
pub(super) fn unmap_refused(profile: Profile, error: KernelError, range: Span) -> UnmapError {
    let cuts = UnmapError::CutsMapping {
        mapping: range,
        cause: Unsupported {
            what: Capability::UnmapPart,
            backend: profile.name(),
        },
    };
    match (errno(&error), profile) {
        (Some(Errno::EINVAL), _) if Span::checked(range.start, range.len).is_none() => {
            UnmapError::BeyondEnd { start: range.start }
        }
        (Some(Errno::EINVAL), Profile::Type1) => cuts,
        // Of a container that iommufd plays too.
        (Some(Errno::ENOENT), _) => UnmapError::Hole {
            range,
            at: range.start,
        },
        (Some(Errno::EBUSY | Errno::EDEADLOCK), _) => UnmapError::Held { range, held: range },
        (Some(Errno::EOVERFLOW), _) => UnmapError::BeyondEnd { start: range.start },
        _ => UnmapError::Kernel(Box::new(error)),
    }
}

/// Why a device was not attached.
pub(super) fn attach_refused(profile: Profile, error: KernelError) -> AttachError {
    match (errno(&error), profile) {
        (Some(Errno::EINVAL), Profile::Type1) | (Some(Errno::EADDRINUSE), _) => {
            AttachError::Conflict(Box::new(error))
        }
        (Some(Errno::EBUSY), _) => AttachError::Busy(Box::new(error)),
        _ => AttachError::Kernel(Box::new(error)),
    }
}

/// Why a device was not detached.
pub(super) fn detach_refused(error: &KernelError) -> DetachError {
    match error {
        KernelError::Refused { operation, errno } => DetachError::Kernel {
            operation,
            errno: Errno(*errno),
        },
        // Detaching has no answer that could be wrong, and opens nothing.
        _ => DetachError::Unknown,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec::Vec;

    const PROFILES: [Profile; 2] = [Profile::Type1, Profile::Iommufd];
    const NAMED: [Errno; 15] = [
        Errno::EPERM,
        Errno::ENOENT,
        Errno::EINTR,
        Errno::ENOMEM,
        Errno::EFAULT,
        Errno::EBUSY,
        Errno::EEXIST,
        Errno::ENODEV,
        Errno::EINVAL,
        Errno::ENOTTY,
        Errno::ENOSPC,
        Errno::EDEADLOCK,
        Errno::EOVERFLOW,
        Errno::EOPNOTSUPP,
        Errno::EADDRINUSE,
    ];

    fn refusal(errno: Errno) -> KernelError {
        let (operation, errno) = ("AN_IOCTL", errno.0);
        KernelError::Refused { operation, errno }
    }

    fn request() -> MapRequest {
        MapRequest {
            range: Span::new(0x10_0000, 0x2000),
            granule: 0x1000,
            outside: None,
            over: Some(OverLimit {
                needed: 0x2000,
                limit: 0x8000,
                in_use: 0x7000,
                counter: "mm->locked_vm",
            }),
            mappings: 65_535,
        }
    }

    /// The rows in which `same` does not hold: profile, number.
    fn others<T>(
        refused: impl Fn(Profile, Errno) -> T,
        same: impl Fn(&T, Profile, Errno) -> bool,
    ) -> Vec<(Profile, Errno)> {
        let all = PROFILES
            .iter()
            .flat_map(|profile| NAMED.map(|errno| (*profile, errno)));
        all.filter(|(profile, errno)| !same(&refused(*profile, *errno), *profile, *errno))
            .collect()
    }

    #[test]
    fn every_number_of_a_map_has_its_name() {
        use MapError::*;
        let map = |profile, errno| map_refused(profile, refusal(errno), &request());
        for profile in PROFILES {
            let map = |errno| map(profile, errno);
            let wanted = request().range;
            assert!(matches!(map(Errno::EEXIST), Overlap { area, .. } if area == wanted));
            assert!(matches!(map(Errno::ENOMEM), OverLimit(over) if over.in_use == 0x7000));
            assert!(matches!(map(Errno::EFAULT), Pin(PinFailed::Refused(_))));
            assert!(matches!(map(Errno::EINTR), Interrupted));
            assert!(matches!(
                map(Errno::EOVERFLOW),
                BeyondEnd { start: 0x10_0000 }
            ));
            let unlimited = MapRequest {
                over: None,
                ..request()
            };
            let cause = map_refused(profile, refusal(Errno::ENOMEM), &unlimited);
            assert!(matches!(cause, Kernel(_)));
            // What is not well formed depends on what was asked for.
            let gap = Span::new(0x10_1000, 0x1000);
            let outside = MapRequest {
                outside: Some(gap),
                ..request()
            };
            let cause = map_refused(profile, refusal(Errno::EINVAL), &outside);
            assert!(matches!(cause, Reserved { reserved, .. } if reserved == gap));
            let misaligned = MapRequest {
                granule: 0x4000,
                ..request()
            };
            let cause = map_refused(profile, refusal(Errno::EINVAL), &misaligned);
            assert!(matches!(
                cause,
                Range(RangeError::Misaligned {
                    granule: 0x4000,
                    ..
                })
            ));
            let more = KernelError::Prot {
                prot: iopt::Prot::COHERENT,
            };
            assert!(matches!(
                map_refused(profile, more, &request()),
                Prot { .. }
            ));
        }
        let entries = map(Profile::Type1, Errno::ENOSPC);
        assert!(matches!(
            entries,
            TooMany {
                wanted: 65_536,
                most: 65_535
            }
        ));
        let room = map(Profile::Iommufd, Errno::ENOSPC);
        assert!(matches!(room, NoRoom { len: 0x2000 }));
        // And back: what has a name has the number that it came from.
        let same = |error: &MapError, profile, errno| error.errno(profile) == Some(errno);
        let nameless = [
            Errno::EPERM,
            Errno::ENOENT,
            Errno::EBUSY,
            Errno::ENODEV,
            Errno::EINVAL,
            Errno::ENOTTY,
            Errno::EDEADLOCK,
            Errno::EOPNOTSUPP,
            Errno::EADDRINUSE,
        ];
        let expected: Vec<_> = PROFILES
            .iter()
            .flat_map(|profile| nameless.map(|errno| (*profile, errno)))
            .collect();
        assert_eq!(others(map, same), expected);
        for (profile, errno) in expected {
            assert!(
                matches!(map(profile, errno), Kernel(_)),
                "{profile:?} {errno}"
            );
        }
    }

    #[test]
    fn every_number_of_an_unmap_has_its_name() {
        use UnmapError::*;
        let range = Span::new(0x1000, 0x1000);
        let unmap = |profile, errno| unmap_refused(profile, refusal(errno), range);
        let cut = unmap(Profile::Type1, Errno::EINVAL);
        assert!(matches!(cut, CutsMapping { mapping, .. } if mapping == range));
        let ill = Span::new(u64::MAX - 0xfff, 0x2000);
        let beyond = unmap_refused(Profile::Type1, refusal(Errno::EINVAL), ill);
        assert!(matches!(beyond, BeyondEnd { .. }));
        assert_eq!(beyond.errno(Profile::Type1), Some(Errno::EINVAL));
        for profile in PROFILES {
            assert!(matches!(
                unmap(profile, Errno::ENOENT),
                Hole { at: 0x1000, .. }
            ));
            assert!(matches!(unmap(profile, Errno::EDEADLOCK), Held { .. }));
            assert!(matches!(unmap(profile, Errno::EBUSY), Held { .. }));
        }
        let ill_formed = unmap(Profile::Iommufd, Errno::EOVERFLOW);
        assert!(matches!(ill_formed, BeyondEnd { start: 0x1000 }));
        let same = |error: &UnmapError, profile, errno| {
            error.errno(profile) == Some(errno) || matches!(error, Kernel(_))
        };
        // Two numbers each for one name, and one that only the other interface has.
        let expected = [
            (Profile::Type1, Errno::EDEADLOCK),
            (Profile::Type1, Errno::EOVERFLOW),
            (Profile::Iommufd, Errno::EBUSY),
        ];
        assert_eq!(others(unmap, same), expected);
    }

    #[test]
    fn every_number_of_an_attach_has_its_name() {
        use AttachError::*;
        let attach = |profile, errno| attach_refused(profile, refusal(errno));
        assert!(matches!(attach(Profile::Type1, Errno::EINVAL), Conflict(_)));
        assert!(matches!(attach(Profile::Iommufd, Errno::EINVAL), Kernel(_)));
        for profile in PROFILES {
            assert!(matches!(attach(profile, Errno::EADDRINUSE), Conflict(_)));
            assert!(matches!(attach(profile, Errno::EBUSY), Busy(_)));
        }
        let same = |error: &AttachError, profile, errno| {
            error.errno(profile) == Some(errno) || matches!(error, Kernel(_))
        };
        let expected = [(Profile::Type1, Errno::EADDRINUSE)];
        assert_eq!(others(attach, same), expected);
        let busy = detach_refused(&refusal(Errno::EBUSY));
        assert!(matches!(
            busy,
            DetachError::Kernel {
                errno: Errno::EBUSY,
                ..
            }
        ));
    }

    #[test]
    fn numbers_are_those_of_this_machine() {
        use libc::*;
        let here = [
            EPERM, ENOENT, EINTR, ENOMEM, EFAULT, EBUSY, EEXIST, ENODEV, EINVAL, ENOTTY, ENOSPC,
            EDEADLK, EOVERFLOW, EOPNOTSUPP, EADDRINUSE,
        ];
        assert_eq!(NAMED.map(|errno| errno.0), here);
        assert!(NAMED.iter().all(|errno| errno.name().is_some()));
    }
}
