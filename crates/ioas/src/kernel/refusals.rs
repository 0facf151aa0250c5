//! Meaning of a kernel's error numbers, by operation and interface: pure functions.
//!
//! [`cause`](super::cause) says what a number means for a request; here it becomes an error with its
//! numbers. A number that nothing explains stays a cause, with the name of the ioctl.

use std::boxed::Box;

use iopt::RangeError;
use runs::{Iova, Span};

use super::cause::{MapCause, MapRequest, UnmapCause, map_cause, unmap_cause};
use crate::capability::{Capability, Unsupported};
use crate::errno::{Errno, Profile};
use crate::kernel_error::KernelError;
use crate::memory::ledger::Forecast;
use crate::memory::object::PinFailed;
use crate::space::error::{AttachError, DetachError, MapError, UnmapError};

/// A refused mapping, with the numbers that errors have.
#[derive(Clone, Copy, Debug)]
pub(super) struct Refused<'a> {
    /// Request that the kernel has refused.
    pub(super) request: MapRequest<'a>,
    /// Its device addresses.
    pub(super) range: Span<Iova>,
    /// Part of the range that lies in no window, as far as is known.
    pub(super) outside: Option<Span<Iova>>,
    /// Answer to whether its charge fits under the limit; `None` where no limit is known.
    pub(super) room: Option<Forecast>,
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

/// Error of a refused map.
pub(super) fn map_refused(profile: Profile, error: KernelError, asked: &Refused<'_>) -> MapError {
    let (wanted, prot, granule) = (asked.range, asked.request.prot, asked.request.granule);
    let Some(number) = errno(&error) else {
        return match error {
            KernelError::Prot { prot } => MapError::Prot { prot },
            error => MapError::Kernel(Box::new(error)),
        };
    };
    match map_cause(profile, number.0, &asked.request) {
        MapCause::Empty => MapError::Range(RangeError::Empty),
        MapCause::IovaOverflow => MapError::BeyondEnd {
            start: wanted.start,
        },
        MapCause::NoAccess => MapError::Prot { prot },
        MapCause::Unaligned => {
            let ends = [wanted.start, wanted.len, asked.request.memory.start];
            let misaligned = ends.into_iter().find(|end| end % granule.max(1) != 0);
            let value = misaligned.unwrap_or(wanted.start);
            MapError::Range(RangeError::Misaligned { value, granule })
        }
        MapCause::Outside => MapError::Reserved {
            wanted,
            reserved: asked.outside.unwrap_or(wanted),
        },
        MapCause::Overlap => MapError::Overlap {
            wanted,
            area: wanted,
        },
        MapCause::NoRoom => MapError::NoRoom { len: wanted.len },
        MapCause::TooMany => MapError::TooMany {
            wanted: asked.mappings + 1,
            most: asked.mappings,
        },
        MapCause::Memory => MapError::Pin(PinFailed::Refused(Box::new(error))),
        MapCause::Limit => match asked.room {
            Some(room) => no_memory(error, room),
            None => MapError::Kernel(Box::new(error)),
        },
        MapCause::Revoked => MapError::Revoked { range: wanted },
        _ if number == Errno::EINTR => MapError::Interrupted,
        MapCause::MemoryOverflow | MapCause::Unsupported | MapCause::Other => {
            MapError::Kernel(Box::new(error))
        }
    }
}

/// Error of a refusal for want of memory: the limit is the reason only where it would have been exceeded.
pub(super) fn no_memory(error: KernelError, room: Forecast) -> MapError {
    match room {
        Forecast::DoesNotFit(over) => MapError::OverLimit(over),
        room => MapError::NoMemory {
            room,
            cause: Box::new(error),
        },
    }
}

/// Error of a refused unmap of `range`.
pub(super) fn unmap_refused(profile: Profile, error: KernelError, range: Span<Iova>) -> UnmapError {
    let Some(number) = errno(&error) else {
        return UnmapError::Kernel(Box::new(error));
    };
    // Pieces are whole pages.
    match unmap_cause(profile, number.0, range, 1) {
        UnmapCause::Cut => UnmapError::CutsMapping {
            mapping: range,
            cause: Unsupported {
                what: Capability::UnmapPart,
                backend: profile.name(),
            },
        },
        // Only pieces are unmapped, so that none is cut.
        UnmapCause::CutOrNothing => UnmapError::Hole {
            range,
            at: range.start,
        },
        UnmapCause::Busy | UnmapCause::StillUsed => UnmapError::Held { range, held: range },
        UnmapCause::Overflow => UnmapError::BeyondEnd { start: range.start },
        UnmapCause::Unaligned | UnmapCause::Other => UnmapError::Kernel(Box::new(error)),
    }
}

/// Error of a refused attach.
pub(super) fn attach_refused(profile: Profile, error: KernelError) -> AttachError {
    match (errno(&error), profile) {
        (Some(Errno::EINVAL), Profile::Type1) | (Some(Errno::EADDRINUSE), _) => {
            AttachError::Conflict(Box::new(error))
        }
        (Some(Errno::EBUSY), _) => AttachError::Busy(Box::new(error)),
        _ => AttachError::Kernel(Box::new(error)),
    }
}

/// Failure of a detach.
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
    use crate::memory::ledger::Ledger;
    use std::string::ToString;
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

    fn asked() -> Refused<'static> {
        Refused {
            request: MapRequest {
                iova: Some(0x10_0000),
                memory: Span::new(0x7000_0000, 0x2000),
                prot: iopt::Prot::RW,
                registers: false,
                granule: 0x1000,
                windows: &[],
            },
            range: Span::new(0x10_0000, 0x2000),
            outside: None,
            room: Some(Ledger::new("mm->locked_vm", Some(0x8000), 0x7000).forecast(0x2000)),
            mappings: 65_535,
        }
    }

    fn with(change: impl FnOnce(&mut Refused<'static>)) -> Refused<'static> {
        let mut refused = asked();
        change(&mut refused);
        refused
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
        let map = |profile, errno| map_refused(profile, refusal(errno), &asked());
        for profile in PROFILES {
            let invalid = |asked| map_refused(profile, refusal(Errno::EINVAL), &asked);
            let map = |errno| map(profile, errno);
            let wanted = asked().range;
            assert!(matches!(map(Errno::EEXIST), Overlap { area, .. } if area == wanted));
            assert!(matches!(map(Errno::ENOMEM), OverLimit(over) if over.in_use == 0x7000));
            assert!(matches!(map(Errno::EFAULT), Pin(PinFailed::Refused(_))));
            assert!(matches!(map(Errno::EINTR), Interrupted));
            let unlimited = with(|asked| asked.room = None);
            let cause = map_refused(profile, refusal(Errno::ENOMEM), &unlimited);
            assert!(matches!(cause, Kernel(_)));
            let top = with(|asked| asked.request.iova = Some(u64::MAX - 0xfff));
            let cause = map_refused(profile, refusal(Errno::EOVERFLOW), &top);
            assert!(matches!(cause, BeyondEnd { start: 0x10_0000 }));
            // The cause of a malformed request depends on the request.
            let gap = Span::new(0x10_1000, 0x1000);
            let windows: &[_] = &[0..=0x10_0fff];
            let cause = invalid(Refused {
                request: MapRequest {
                    windows,
                    ..asked().request
                },
                outside: Some(gap),
                ..asked()
            });
            assert!(matches!(cause, Reserved { reserved, .. } if reserved == gap));
            let cause = invalid(with(|asked| asked.request.granule = 0x4000));
            let expected = RangeError::Misaligned {
                value: 0x2000,
                granule: 0x4000,
            };
            assert!(matches!(cause, Range(cause) if cause == expected));
            let cause = invalid(with(|asked| asked.request.prot = iopt::Prot::empty()));
            assert!(matches!(cause, Prot { .. }));
            let cause = invalid(with(|asked| asked.request.memory.len = 0));
            assert!(matches!(cause, Range(RangeError::Empty)));
            assert!(matches!(invalid(asked()), Kernel(_)));
        }
        let entries = map(Profile::Type1, Errno::ENOSPC);
        assert!(matches!(
            entries,
            TooMany {
                wanted: 65_536,
                most: 65_535
            }
        ));
        let registers = with(|asked| asked.request.registers = true);
        let revoked = map_refused(Profile::Iommufd, refusal(Errno::ENODEV), &registers);
        assert!(matches!(revoked, Revoked { range } if range == asked().range));
        assert_eq!(revoked.errno(Profile::Iommufd), Some(Errno::ENODEV));
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
            Errno::EOVERFLOW,
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
    fn the_limit_is_named_only_where_it_is_exceeded() {
        let map = |ledger: &Ledger, needed| {
            let asked = with(|asked| asked.room = Some(ledger.forecast(needed)));
            map_refused(Profile::Iommufd, refusal(Errno::ENOMEM), &asked)
        };
        let mm = Ledger::new("mm->locked_vm", Some(0x8000), 0x7000);
        let over = map(&mm, 0x2000);
        assert!(matches!(over, MapError::OverLimit(over) if over.missing() == 0x1000));
        let user = Ledger::of_user("user->locked_vm", Some(0x8000), 0x7000);
        let over = map(&user, 0x2000);
        assert!(matches!(over, MapError::OverLimit(over) if over.counter == user.counter()));
        let unlimited = Ledger::new("mm->pinned_vm", None, 0x7000);
        let room = "the kernel has no memory to map 4 KiB; no limit on locked memory is exceeded";
        let others = "the kernel has no memory to map 4 KiB, or other processes of this user hold more than 0 bytes \
             (user->locked_vm)";
        for (ledger, said) in [(&mm, room), (&unlimited, room), (&user, others)] {
            let none = map(ledger, 0x1000);
            assert_eq!(none.to_string(), said);
            assert_eq!(none.errno(Profile::Iommufd), Some(Errno::ENOMEM));
            let source = core::error::Error::source(&none);
            let kernel = source.and_then(|source| source.downcast_ref::<KernelError>());
            assert_eq!(kernel.and_then(errno), Some(Errno::ENOMEM));
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
        // Older kernels; newer ones say EOVERFLOW.
        let beyond = unmap_refused(Profile::Type1, refusal(Errno::EINVAL), ill);
        assert!(matches!(beyond, BeyondEnd { .. }));
        assert_eq!(beyond.errno(Profile::Type1), Some(Errno::EOVERFLOW));
        for profile in PROFILES {
            assert!(matches!(
                unmap(profile, Errno::ENOENT),
                Hole { at: 0x1000, .. }
            ));
            assert!(matches!(unmap(profile, Errno::EDEADLOCK), Held { .. }));
            assert!(matches!(unmap(profile, Errno::EBUSY), Held { .. }));
            let ill_formed = unmap(profile, Errno::EOVERFLOW);
            assert!(matches!(ill_formed, BeyondEnd { start: 0x1000 }));
        }
        let same = |error: &UnmapError, profile, errno| {
            error.errno(profile) == Some(errno) || matches!(error, Kernel(_))
        };
        // Two numbers for one name.
        let expected = [
            (Profile::Type1, Errno::EDEADLOCK),
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
