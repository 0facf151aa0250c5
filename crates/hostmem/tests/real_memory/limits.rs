//! Limits of a user without privilege.

use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hostmem::{Backing, FrameSource, FramesError, Limits, Mapping, PinError, PinKind, Pinner};
use runs::Span;

use super::*;

/// The name by which the test program calls itself.
const CHILD: &str = "limits::as_an_ordinary_user";

#[test]
fn an_ordinary_user_meets_the_limit_with_its_numbers() {
    let _turn = turn();
    if !Limits::read().unwrap().privileged {
        return limits_without_privilege();
    }
    let mut child = Command::new("/proc/self/exe");
    child
        .args(["--exact", CHILD, "--nocapture", "--ignored"])
        .uid(65534)
        .gid(65534);
    // SAFETY: only setrlimit is called between fork and exec.
    unsafe {
        child.pre_exec(|| {
            let limit = libc::rlimit {
                rlim_cur: 8 << 20,
                rlim_max: 8 << 20,
            };
            match libc::setrlimit(libc::RLIMIT_MEMLOCK, &raw const limit) {
                0 => Ok(()),
                _ => Err(std::io::Error::last_os_error()),
            }
        });
    }
    match child.output() {
        Ok(output) => {
            eprintln!("{}", String::from_utf8_lossy(&output.stderr));
            let text = String::from_utf8_lossy(&output.stdout);
            assert!(
                output.status.success() && text.contains("1 passed"),
                "{text}"
            );
        }
        Err(error) => eprintln!("not run: cannot become another user: {error}"),
    }
}

#[test]
#[ignore = "called by an_ordinary_user_meets_the_limit_with_its_numbers"]
fn as_an_ordinary_user() {
    limits_without_privilege();
}

fn limits_without_privilege() {
    let limits = Limits::read().unwrap();
    assert!(!limits.privileged);
    let Some(limit) = limits
        .memlock
        .filter(|limit| (MIB..1 << 30).contains(limit))
    else {
        return eprintln!("not run: locked memory is limited to {:?}", limits.memlock);
    };
    let len = (limit + 2 * MIB).next_multiple_of(2 * MIB);
    let mapping = Arc::new(Mapping::new(Backing::Anon4K, len, None).unwrap());
    assert!(!is_real(&mapping));
    assert_eq!(
        FrameSource::detect(&mapping),
        FrameSource::Synthetic { seed: 0 }
    );
    let file = Mapping::new(Backing::Memfd, PAGE, None).unwrap();
    assert_eq!(FrameSource::detect(&file), FrameSource::FileOffset);

    for pinner in [
        Pinner::probe(2 * MIB).unwrap(),
        Pinner::mlock(2 * MIB).unwrap(),
    ] {
        eprintln!("{} {:?} {}", pinner.kind(), pinner.why(), pinner.counter());
        let counter = visible(&pinner);
        let before = in_use(counter);
        let error = pinner
            .pin(&mapping, Span::new(0, len), &mut on)
            .unwrap_err();
        eprintln!("{error}");
        match error {
            PinError::Limit {
                needed,
                limit: named,
                in_use,
                counter,
                ..
            } => {
                assert_eq!((needed, named, counter), (len, limit, pinner.counter()));
                assert_eq!(in_use.known, before);
                assert_eq!(in_use.others_possible, pinner.kind() == PinKind::IoUring);
            }
            error => panic!("{error}"),
        }
        assert_reaches(counter, before);
        // Memory that others of the user hold, and the ring itself, shows only on trying: all but 64 KiB is pinned,
        // then more than is left.
        let most = limit - 64 * 1024;
        let pin = match pinner.pin(&mapping, Span::new(0, most), &mut on) {
            Ok(pin) => pin,
            Err(error) => {
                eprintln!("not run: the limit is used by others: {error}");
                continue;
            }
        };
        assert_eq!(in_use(counter), before + most);
        let at = most.next_multiple_of(2 * MIB);
        let error = pinner
            .pin(&mapping, Span::new(at, 128 * 1024), &mut on)
            .unwrap_err();
        assert!(
            matches!(error, PinError::Limit { needed, .. } if needed == 128 * 1024),
            "{error}"
        );
        eprintln!("{error}");
        assert_eq!(in_use(counter), before + most);
        let mut frames = pin.runs(Span::new(0, PAGE), FrameSource::Pagemap).unwrap();
        let hidden = frames.next_batch(&mut [Span::default()]);
        assert!(
            matches!(hidden, Err(FramesError::Hidden { offset: 0 })),
            "{hidden:?}"
        );

        // All the room there is can be used; and where the kernel charges the rings too, it
        // refuses in the middle what looked possible beforehand.
        drop(pin);
        assert_reaches(counter, before);
        let room = pinner.room().unwrap().unwrap();
        assert!(
            room <= limit - before && room >= limit - before - 64 * 1024,
            "{room}"
        );
        // Rings that earlier tests have closed are uncharged some time later.
        let start = Instant::now();
        let pin = loop {
            match pinner.pin(&mapping, Span::new(0, room), &mut on) {
                Err(_) if start.elapsed() < Duration::from_secs(2) => {
                    std::thread::sleep(Duration::from_millis(5));
                }
                result => break result.unwrap(),
            }
        };
        drop(pin);
        assert_reaches(counter, before);
        let whole = pinner.pin(&mapping, Span::new(0, limit), &mut on);
        match (whole, pinner.kind()) {
            (Err(error @ PinError::Limit { .. }), PinKind::IoUring) => eprintln!("{error}"),
            (Ok(_), _) => {}
            (result, _) => panic!("{result:?}"),
        }
        assert_reaches(counter, before);
    }
}
