//! The rows, in the order of the kernel's checks.

use ioas::{Errno, Mapper, Profile, ReleaseError, Tracking};
use iopt::{Interruption, Pending, Prot};
use runs::{Offset, Span};

use super::row::Row;
use super::subject::{Answer, BAD, LIMIT, MIB, NARROW, PAGE, RESERVED, Raw, Subject, Which};

/// Device address of the rows' mappings.
const IOVA: u64 = 1 << 30;
const END: u64 = u64::MAX - PAGE + 1;

fn map_at<S: Subject>(s: &mut S, p: Profile, iova: u64, part: Span<Offset>, prot: Prot) -> Answer {
    let memory = s.memory();
    let mapped = s.space().map(iova, &memory, part, prot);
    mapped.map(|()| 0).map_err(|error| match error.errno(p) {
        Some(errno) => errno,
        None => panic!("{error}: {error:?}"),
    })
}

fn map<S: Subject>(s: &mut S, p: Profile, iova: u64, len: u64) -> Answer {
    map_at(s, p, iova, Span::new(0, len), Prot::RW)
}

fn unmap<S: Subject>(s: &mut S, p: Profile, iova: u64, len: u64) -> Answer {
    let unmapped = s.space().unmap(Span::new(iova, len));
    unmapped
        .map(|unmapped| unmapped.bytes)
        .map_err(|error| match error.errno(p) {
            Some(errno) => errno,
            None => panic!("{error}: {error:?}"),
        })
}

fn release<S: Subject>(s: &mut S, p: Profile, iova: u64, len: u64) -> Answer {
    let mut answer = Ok(len);
    let mut kept = |_, cause| match cause {
        ReleaseError::Unmap(cause) => answer = cause.errno(p).map_or(Ok(0), Err),
        cause => panic!("{cause}"),
    };
    let runs = [Span::new(iova, len)];
    s.space().release(&runs, Interruption::Refused, &mut kept);
    answer
}

fn attach<S: Subject>(s: &mut S, p: Profile, which: Which) -> Answer {
    s.attach(which)
        .map(|()| 0)
        .map_err(|error| match error.errno(p) {
            Some(errno) => errno,
            None => panic!("{error}: {error:?}"),
        })
}

const fn ok(bytes: u64) -> Answer {
    Ok(bytes)
}

const fn err(errno: Errno) -> Answer {
    Err(errno)
}

/// All rows.
pub(crate) fn rows<K: Mapper, S: Subject>() -> Vec<Row<K, S>> {
    let mut rows = maps();
    rows.extend(unmaps());
    rows.extend(releases());
    rows.extend(attaches());
    rows.extend(others());
    rows
}

fn maps<K: Mapper, S: Subject>() -> Vec<Row<K, S>> {
    use Errno as E;
    let both = |name, errno| Row::new(name, err(errno), err(errno));
    vec![
        both("map: no bytes", E::EINVAL)
            .kernel(|k| k.map(IOVA, 0))
            .library(|s, p| map(s, p, IOVA, 0)),
        both("map: ends beyond 2^64", E::EOVERFLOW)
            .kernel(|k| k.map(END, 2 * PAGE))
            .library(|s, p| map(s, p, END, 2 * PAGE)),
        both("map: memory ends beyond 2^64", E::EOVERFLOW)
            .kernel(|k| k.map_at(IOVA, 2 * PAGE, END.wrapping_sub(k.memory), Prot::RW)),
        both("map: neither to read nor to write", E::EINVAL)
            .kernel(|k| k.map_at(IOVA, PAGE, 0, Prot::empty()))
            .library(|s, p| map_at(s, p, IOVA, Span::new(0, PAGE), Prot::empty())),
        both("map: device address not aligned", E::EINVAL)
            .kernel(|k| k.map(IOVA + 512, PAGE))
            .library(|s, p| map(s, p, IOVA + 512, PAGE)),
        both("map: length not aligned", E::EINVAL)
            .kernel(|k| k.map(IOVA, 512))
            .library(|s, p| map(s, p, IOVA, 512)),
        both("map: memory not aligned", E::EINVAL)
            .kernel(|k| k.map_at(IOVA, PAGE, 512, Prot::RW))
            .library(|s, p| map_at(s, p, IOVA, Span::new(512, PAGE), Prot::RW)),
        both("map: over a mapping", E::EEXIST)
            .kernel(|k: &mut Raw<K>| {
                k.map(IOVA, 4 * PAGE)
                    .and_then(|_| k.map(IOVA + 3 * PAGE, 4 * PAGE))
            })
            .library(|s: &mut S, p| {
                map(s, p, IOVA, 4 * PAGE).and_then(|_| map(s, p, IOVA + 3 * PAGE, 4 * PAGE))
            }),
        both("map: in what a device reserves", E::EINVAL)
            .kernel(|k| k.map(RESERVED.start - PAGE, 2 * PAGE))
            .library(|s, p| map(s, p, RESERVED.start - PAGE, 2 * PAGE)),
        both("map: outside of what a device translates", E::EINVAL)
            .kernel(|k| k.map((1 << 48) - PAGE, 2 * PAGE))
            .library(|s, p| map(s, p, (1 << 48) - PAGE, 2 * PAGE)),
        Row::new(
            "map: address chosen, not 0, aligned to the length",
            ok(0),
            ok(0),
        )
        .library(|s: &mut S, _| {
            let (memory, len) = (s.memory(), 4 * MIB);
            let chosen = s.space().map_anywhere(&memory, Span::new(0, len), Prot::RW);
            let iova = chosen.unwrap();
            assert!(iova != 0 && s.space().area_at(iova).is_some());
            Ok(iova % len)
        }),
        both("map: no room in what is allowed", E::ENOSPC).library(|s: &mut S, p| {
            s.space().allow(&[Span::new(IOVA, MIB)]).unwrap();
            let (memory, len) = (s.memory(), 2 * MIB);
            let chosen = s.space().map_anywhere(&memory, Span::new(0, len), Prot::RW);
            chosen.map_err(|error| error.errno(p).unwrap())
        }),
        // The limit is 8 here. Tables of ours have none.
        Row::new("map: too many mappings", err(E::ENOSPC), ok(0))
            .compatibility(ok(0))
            .kernel(|k| (0..9).try_fold(0, |_, n| k.map(IOVA + 2 * n * PAGE, PAGE)))
            .library(|s, p| (0..9).try_fold(0, |_, n| map(s, p, IOVA + 2 * n * PAGE, PAGE)))
            .own(ok(0)),
        Row::new("map: entries are given back", ok(0), ok(0))
            .kernel(|k: &mut Raw<K>| {
                (0..20).try_fold(0, |_, _| {
                    k.map(IOVA, PAGE)
                        .and_then(|_| k.unmap(IOVA, PAGE))
                        .map(|_| 0)
                })
            })
            .library(|s: &mut S, p| {
                (0..20).try_fold(0, |_, _| {
                    map(s, p, IOVA, PAGE)
                        .and_then(|_| unmap(s, p, IOVA, PAGE))
                        .map(|_| 0)
                })
            }),
        both("map: memory that cannot be pinned", E::EFAULT)
            .kernel(|k| k.map_at(IOVA, 2 * MIB, BAD - MIB, Prot::RW))
            .library(|s, p| map_at(s, p, IOVA, Span::new(BAD - MIB, 2 * MIB), Prot::RW)),
        both("map: over the limit of locked memory", E::ENOMEM)
            .kernel(|k: &mut Raw<K>| {
                k.map(IOVA, LIMIT / 2)
                    .and_then(|_| k.map(2 * IOVA, LIMIT / 2 + PAGE))
            })
            .library(|s: &mut S, p| {
                map(s, p, IOVA, LIMIT / 2).and_then(|_| {
                    map_at(
                        s,
                        p,
                        2 * IOVA,
                        Span::new(LIMIT / 2, LIMIT / 2 + PAGE),
                        Prot::RW,
                    )
                })
            }),
        Row::new(
            "map: after the limit was met, what is locked is as before",
            ok(MIB),
            ok(MIB),
        )
        .kernel(|k: &mut Raw<K>| {
            k.map(IOVA, MIB)?;
            assert_eq!(k.map(2 * IOVA, LIMIT), Err(E::ENOMEM));
            Ok(k.locked())
        })
        .library(|s: &mut S, p| {
            map(s, p, IOVA, MIB)?;
            let part = Span::new(MIB, LIMIT);
            assert_eq!(map_at(s, p, 2 * IOVA, part, Prot::RW), Err(E::ENOMEM));
            Ok(s.charged())
        }),
        Row::new(
            "map: without a device, pinned when one comes",
            ok(MIB),
            ok(MIB),
        )
        .library(|s: &mut S, p| {
            s.detach();
            map(s, p, IOVA, MIB)?;
            assert_eq!(s.charged(), 0);
            attach(s, p, Which::Usual)?;
            Ok(s.charged())
        }),
        // Tables of ours are filled from what is pinned once.
        Row::new(
            "map: a second address of the same memory",
            ok(2 * MIB),
            ok(MIB),
        )
        .kernel(|k: &mut Raw<K>| {
            k.map(IOVA, MIB)?;
            // A copy if the kernel has copies.
            k.copy(IOVA, 2 * IOVA, MIB, Prot::RW)
                .or_else(|_| k.map(2 * IOVA, MIB))?;
            Ok(k.locked())
        })
        .library(|s: &mut S, p| {
            map(s, p, IOVA, MIB)?;
            map(s, p, 2 * IOVA, MIB)?;
            Ok(s.charged())
        })
        .own(ok(MIB)),
        Row::only(
            "copy: what is not there as a whole",
            Profile::Iommufd,
            err(E::ENOENT),
        )
        .kernel(|k: &mut Raw<K>| {
            k.map(IOVA, MIB)
                .and_then(|_| k.copy(IOVA, 2 * IOVA, 2 * MIB, Prot::RW))
        }),
        Row::only(
            "copy: to write to what is only read",
            Profile::Iommufd,
            err(E::EPERM),
        )
        .kernel(|k: &mut Raw<K>| {
            k.map_at(IOVA, MIB, 0, Prot::READ)?;
            k.copy(IOVA, 2 * IOVA, MIB, Prot::RW)
        }),
    ]
}

fn unmaps<K: Mapper, S: Subject>() -> Vec<Row<K, S>> {
    use Errno as E;
    vec![
        Row::new("unmap: exactly a mapping", ok(MIB), ok(MIB))
            .kernel(|k| k.map(IOVA, MIB).and_then(|_| k.unmap(IOVA, MIB)))
            .library(|s, p| map(s, p, IOVA, MIB).and_then(|_| unmap(s, p, IOVA, MIB))),
        Row::new("unmap: several, with holes", ok(2 * MIB), ok(2 * MIB))
            .kernel(|k: &mut Raw<K>| {
                k.map(IOVA, MIB)?;
                k.map_at(IOVA + 2 * MIB, MIB, MIB, Prot::RW)?;
                k.unmap(IOVA - MIB, 5 * MIB)
            })
            .library(|s: &mut S, p| {
                map(s, p, IOVA, MIB)?;
                map_at(s, p, IOVA + 2 * MIB, Span::new(MIB, MIB), Prot::RW)?;
                unmap(s, p, IOVA - MIB, 5 * MIB)
            }),
        Row::new(
            "unmap: cuts a mapping at its start",
            err(E::EINVAL),
            err(E::ENOENT),
        )
        .compatibility(err(E::ENOENT))
        .kernel(|k| k.map(IOVA, MIB).and_then(|_| k.unmap(IOVA + PAGE, MIB)))
        .library(|s, p| map(s, p, IOVA, MIB).and_then(|_| unmap(s, p, IOVA + PAGE, MIB))),
        Row::new(
            "unmap: cuts a mapping at its end",
            err(E::EINVAL),
            err(E::ENOENT),
        )
        .compatibility(err(E::ENOENT))
        .kernel(|k| k.map(IOVA, MIB).and_then(|_| k.unmap(IOVA, MIB - PAGE)))
        .library(|s, p| map(s, p, IOVA, MIB).and_then(|_| unmap(s, p, IOVA, MIB - PAGE))),
        // The library changes nothing.
        Row::new(
            "unmap: what is left when the second is cut",
            ok(2 * MIB),
            ok(MIB),
        )
        .compatibility(ok(MIB))
        .kernel(|k: &mut Raw<K>| {
            k.map(IOVA, MIB)?;
            k.map(IOVA + MIB, MIB)?;
            assert!(k.unmap(IOVA, 2 * MIB - PAGE).is_err());
            k.unmap(IOVA, 2 * MIB)
        })
        .library(|s: &mut S, p| {
            map(s, p, IOVA, MIB)?;
            map(s, p, IOVA + MIB, MIB)?;
            assert!(unmap(s, p, IOVA, 2 * MIB - PAGE).is_err());
            unmap(s, p, IOVA, 2 * MIB)
        })
        .everywhere(ok(2 * MIB)),
        // The library has nothing to do then.
        Row::new("unmap: nothing is there", ok(0), err(E::ENOENT))
            .kernel(|k| k.unmap(IOVA, MIB))
            .library(|s, p| unmap(s, p, IOVA, MIB))
            .everywhere(ok(0)),
        Row::new(
            "unmap: ends beyond 2^64",
            err(E::EOVERFLOW),
            err(E::EOVERFLOW),
        )
        .kernel(|k| k.unmap(END, 2 * PAGE))
        .library(|s, p| unmap(s, p, END, 2 * PAGE)),
        Row::new("unmap: everything", ok(2 * MIB), ok(2 * MIB)).library(|s: &mut S, p| {
            map(s, p, PAGE, MIB)?;
            map(s, p, (1 << 48) - MIB, MIB)?;
            Ok(s.space().unmap_all().unwrap().bytes)
        }),
        Row::new("unmap: everything, when nothing is there", ok(0), ok(0))
            .library(|s, _| Ok(s.space().unmap_all().unwrap().bytes)),
        // A container tries ten times and then stops the kernel; the model says what we say.
        Row::new(
            "unmap: a user does not let go",
            err(E::EBUSY),
            err(E::EDEADLOCK),
        )
        .kernel(|k: &mut Raw<K>| {
            k.map(IOVA, MIB)?;
            k.hold(Span::new(IOVA, PAGE));
            k.unmap(IOVA, MIB)
        })
        .library(|s: &mut S, p| {
            map(s, p, IOVA, MIB)?;
            s.hold(Span::new(IOVA, PAGE));
            let refused = unmap(s, p, IOVA, MIB);
            assert!(s.space().area_at(IOVA).is_some() && s.charged() == MIB);
            refused
        }),
    ]
}

fn releases<K: Mapper, S: Subject>() -> Vec<Row<K, S>> {
    vec![
        Row::new("release: a whole mapping", ok(MIB), ok(MIB))
            .library(|s, p| map(s, p, IOVA, MIB).and_then(|_| release(s, p, IOVA, MIB))),
        Row::new("release: a part", err(Errno::EINVAL), err(Errno::ENOENT))
            .library(|s, p| map(s, p, IOVA, MIB).and_then(|_| release(s, p, IOVA + PAGE, PAGE)))
            .own(ok(PAGE)),
        Row::new("restore: what is locked is as before", ok(MIB), ok(MIB)).library(
            |s: &mut S, p| {
                map(s, p, IOVA, MIB)?;
                release(s, p, IOVA, MIB)?;
                let runs = [Span::new(IOVA, MIB)];
                let failed = &mut |_, cause| panic!("{cause}");
                s.space().restore(&runs, Interruption::Refused, failed);
                Ok(s.charged())
            },
        ),
        Row::ours(
            "restore: one of two that were mapped side by side, unmapped",
            ok(MIB),
        )
        .library(|s: &mut S, p| {
            map(s, p, IOVA, MIB)?;
            map_at(s, p, IOVA + MIB, Span::new(MIB, MIB), Prot::RW)?;
            release(s, p, IOVA, 2 * MIB)?;
            let runs = [Span::new(IOVA, 2 * MIB)];
            let failed = &mut |_, cause| panic!("{cause}");
            s.space().restore(&runs, Interruption::Refused, failed);
            unmap(s, p, IOVA, MIB)
        }),
    ]
}

fn attaches<K: Mapper, S: Subject>() -> Vec<Row<K, S>> {
    use Errno as E;
    vec![
        Row::new(
            "attach: a mapping is where it cannot translate",
            err(E::EINVAL),
            err(E::EADDRINUSE),
        )
        .kernel(|k| k.map(NARROW, MIB).and_then(|_| k.attach(Which::Narrow)))
        .library(|s, p| map(s, p, NARROW, MIB).and_then(|_| attach(s, p, Which::Narrow))),
        Row::new("attach: refused, nothing has changed", ok(MIB), ok(MIB))
            .kernel(|k: &mut Raw<K>| {
                k.map(NARROW, MIB)?;
                assert!(k.attach(Which::Narrow).is_err());
                k.map(NARROW + MIB, MIB)?;
                k.unmap(NARROW, MIB)
            })
            .library(|s: &mut S, p| {
                map(s, p, NARROW, MIB)?;
                assert!(attach(s, p, Which::Narrow).is_err());
                map(s, p, NARROW + MIB, MIB)?;
                unmap(s, p, NARROW, MIB)
            }),
        Row::new(
            "attach: a second device, which translates less",
            err(E::EINVAL),
            err(E::EINVAL),
        )
        .kernel(|k| k.attach(Which::Narrow).and_then(|_| k.map(NARROW, MIB)))
        .library(|s, p| attach(s, p, Which::Narrow).and_then(|_| map(s, p, NARROW, MIB))),
        Row::new(
            "attach: over the limit of locked memory",
            err(E::ENOMEM),
            err(E::ENOMEM),
        )
        .library(|s: &mut S, p| {
            s.detach();
            map(s, p, IOVA, LIMIT + PAGE)?;
            let refused = attach(s, p, Which::Usual);
            assert_eq!(s.charged(), 0);
            refused
        }),
        Row::only(
            "attach: while addresses are invalid",
            Profile::Type1,
            err(E::EBUSY),
        )
        .compatibility(err(E::EINVAL))
        .kernel(|k: &mut Raw<K>| {
            k.map(IOVA, MIB)?;
            k.give_up()?;
            k.attach(Which::Second)
        }),
    ]
}

fn others<K: Mapper, S: Subject>() -> Vec<Row<K, S>> {
    use Errno as E;
    let type1 = Profile::Type1;
    vec![
        // iommufd has no such operation, also where it plays a container.
        Row::only("update: nothing is there", type1, err(E::ENOENT))
            .compatibility(err(E::EINVAL))
            .kernel(|k| k.take_over(IOVA, MIB)),
        Row::only("update: addresses are valid", type1, err(E::EINVAL))
            .kernel(|k| k.map(IOVA, MIB).and_then(|_| k.take_over(IOVA, MIB))),
        Row::only("update: another size", type1, err(E::EINVAL)).kernel(|k: &mut Raw<K>| {
            k.map(IOVA, MIB)?;
            k.give_up()?;
            k.take_over(IOVA, MIB / 2)
        }),
        Row::only(
            "change of process: memory that is no file",
            Profile::Iommufd,
            err(E::EINVAL),
        )
        .kernel(|k| k.map(IOVA, MIB).and_then(|_| k.take_over(IOVA, MIB))),
        Row::new(
            "dirty: a device that cannot tell",
            ok(0),
            err(E::EOPNOTSUPP),
        )
        .compatibility(err(E::ENOTTY))
        .kernel(|k| k.track()),
        Row::only("dirty: everything, when a group cannot tell", type1, ok(16))
            .compatibility(err(E::ENOTTY))
            .kernel(|k: &mut Raw<K>| {
                k.map(IOVA, 16 * PAGE)?;
                k.track()?;
                k.dirty(IOVA, 16 * PAGE)
            }),
        Row::only("dirty: before tracking", type1, err(E::EINVAL))
            .compatibility(err(E::ENOTTY))
            .kernel(|k: &mut Raw<K>| {
                k.map(IOVA, 16 * PAGE)
                    .and_then(|_| k.dirty(IOVA, 16 * PAGE))
            }),
        Row::only("dirty: cuts a mapping", type1, err(E::EINVAL))
            .compatibility(err(E::ENOTTY))
            .kernel(|k: &mut Raw<K>| {
                k.map(IOVA, 16 * PAGE)?;
                k.track()?;
                k.dirty(IOVA, 8 * PAGE)
            }),
        // A device that cannot tell.
        Row::ours(
            "dirty: what a device could write, after it has left",
            ok(16),
        )
        .library(|s: &mut S, p| {
            map(s, p, IOVA, 16 * PAGE)?;
            map_at(s, p, IOVA + MIB, Span::new(MIB, PAGE), Prot::READ)?;
            s.space().track_dirty(Tracking::default()).unwrap();
            s.detach();
            let all = Span::new(IOVA, 2 * MIB);
            let mut pending = Pending::new([0u64; 8], all, PAGE).unwrap();
            assert!(s.space().harvest(&mut pending).unwrap().blind);
            let shown = s.space().show(&mut pending).unwrap();
            let pages = shown.runs().map(|run| run.len / PAGE).sum();
            shown.acknowledge();
            s.space().harvest(&mut pending).unwrap();
            assert_eq!(s.space().show(&mut pending).unwrap().runs().count(), 0);
            Ok(pages)
        }),
        Row::new("windows: what can be mapped", ok(2), ok(2))
            .kernel(|k: &mut Raw<K>| {
                let info = k.space.info().unwrap();
                assert_eq!(info.granule, PAGE);
                Ok(info.ranges.unwrap().len() as u64)
            })
            .library(|s: &mut S, _| {
                let windows = s.space().windows();
                assert_eq!(windows[0], Span::new(0, RESERVED.start));
                assert_eq!(windows[1].start, RESERVED.last() + 1);
                Ok(windows.len() as u64)
            }),
        Row::only(
            "allow: what a device reserves",
            Profile::Iommufd,
            err(E::EADDRINUSE),
        )
        .kernel(|k| k.allow(RESERVED)),
        Row::only(
            "allow: a range without bytes",
            Profile::Iommufd,
            err(E::EINVAL),
        )
        .library(|s: &mut S, p| {
            let refused = s.space().allow(&[Span::new(IOVA, 0)]);
            refused.map(|()| 0).map_err(|error| error.errno(p).unwrap())
        }),
        Row::only(
            "allow: ranges that overlap",
            Profile::Iommufd,
            err(E::EINVAL),
        )
        .library(|s: &mut S, p| {
            let ranges = [Span::new(IOVA, MIB), Span::new(IOVA + PAGE, MIB)];
            let refused = s.space().allow(&ranges);
            refused.map(|()| 0).map_err(|error| error.errno(p).unwrap())
        }),
    ]
}
