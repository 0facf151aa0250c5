//! Stop, copy and resume with a client that has them: QEMU's (11.1) has none.

use std::sync::atomic::Ordering;
use std::time::Duration;

use dmaspace_vfio_user::ClientLimits;
use vm_memory::{GuestAddress, GuestMemory as _, Permissions};

use crate::client::*;
use crate::engine::STORE;

const GET: u32 = 1 << 16;
const SET: u32 = 1 << 17;
const PROBE: u32 = 1 << 18;
const STOP: u32 = 1;
const RUNNING: u32 = 2;
const STOP_COPY: u32 = 3;
const RESUMING: u32 = 4;

fn go(client: &mut Client, state: u32) -> u32 {
    let payload = words(&[16, 2 | SET, state, u32::MAX]);
    let (error, reply) = client.ask(FEATURE, &payload, &[]);
    if error == 0 {
        assert_eq!(reply, payload);
    }
    error
}

fn state(client: &mut Client) -> u32 {
    let (error, reply) = client.ask(FEATURE, &words(&[16, 2 | GET]), &[]);
    assert_eq!(error, 0);
    u32::from_ne_bytes(reply[8..12].try_into().unwrap())
}

fn read(client: &mut Client, size: u32) -> Result<Vec<u8>, u32> {
    let (error, reply) = client.ask(MIG_READ, &words(&[8 + size, size]), &[]);
    match error {
        0 => Ok(reply[8..].to_vec()),
        error => Err(error),
    }
}

fn write(client: &mut Client, data: &[u8]) -> u32 {
    let len = data.len() as u32;
    let payload = [words(&[8 + len, len]), data.to_vec()].concat();
    client.ask(MIG_WRITE, &payload, &[]).0
}

#[test]
fn a_device_is_stopped_copied_and_resumed_elsewhere() {
    let (source, target) = (
        Bench::new(1, ClientLimits::default()),
        Bench::new(1, ClientLimits::default()),
    );
    let mut from = source.client();
    let (_, flags) = from.ask(FEATURE, &words(&[16, 1 | GET]), &[]);
    assert_eq!(flags, [words(&[16, 1 | GET]), longs(&[1])].concat());
    assert_eq!(state(&mut from), RUNNING);
    assert_eq!(from.write(0, 0, b"register"), 0);
    // From running, through stop.
    assert_eq!(go(&mut from, STOP_COPY), 0);
    assert!(source.engine.stopped.load(Ordering::Relaxed));
    let mut data = Vec::new();
    loop {
        let piece = read(&mut from, 20).unwrap();
        data.extend_from_slice(&piece);
        if piece.len() < 20 {
            break;
        }
    }
    assert_eq!(data.len(), 32);
    assert_eq!(read(&mut from, 20), Ok(vec![]));
    // Another copy begins at its beginning, wherever the one before was left.
    for size in [20, 32] {
        assert_eq!(go(&mut from, STOP), 0);
        assert_eq!(go(&mut from, STOP_COPY), 0);
        assert_eq!(read(&mut from, size).unwrap(), data[..size as usize]);
    }

    let mut to = target.client();
    assert_eq!(go(&mut to, RESUMING), 0);
    for piece in data.chunks(5) {
        assert_eq!(write(&mut to, piece), 0);
    }
    assert_eq!(go(&mut to, RUNNING), 0);
    assert!(!target.engine.stopped.load(Ordering::Relaxed));
    assert_eq!(to.read(0, 0, 8).unwrap(), b"register");

    // The source goes on when the client leaves it.
    drop((from, to));
    let engine = source.engine.clone();
    source.end();
    assert!(!engine.stopped.load(Ordering::Relaxed));
    target.end();
}

#[test]
fn a_state_that_the_device_does_not_take_leaves_it_stopped_with_its_own() {
    let bench = Bench::new(1, ClientLimits::default());
    let mut client = bench.client();
    assert_eq!(client.write(0, 0, b"register"), 0);
    assert_eq!(go(&mut client, RESUMING), 0);
    assert_eq!(write(&mut client, &[1; 31]), 0);
    assert_eq!(go(&mut client, RUNNING), EINVAL);
    assert!(bench.engine.refusal().contains("31 bytes"));
    assert_eq!(state(&mut client), STOP);
    assert_eq!(client.read(0, 0, 8).unwrap(), b"register");
    assert_eq!(go(&mut client, RUNNING), 0);
    // More than any state has.
    assert_eq!(go(&mut client, RESUMING), 0);
    let piece = vec![0; 1 << 20];
    for _ in 0..4 {
        assert_eq!(write(&mut client, &piece), 0);
    }
    assert_eq!(write(&mut client, &[0]), EINVAL);
    assert!(bench.engine.refusal().contains("are allowed"));
    // A reset has it run again.
    assert_eq!(client.ask(RESET, &[], &[]).0, 0);
    assert_eq!(state(&mut client), RUNNING);
    assert!(!bench.engine.stopped.load(Ordering::Relaxed));
    drop(client);
    bench.end();
}

#[test]
fn what_one_client_has_tracked_is_not_tracked_for_the_next() {
    let bench = Bench::new(2, ClientLimits::default());
    let file = memory_file(PAGE);
    let start = [words(&[64, 6 | SET]), longs(&[4096]), words(&[0, 0])].concat();
    let report = [words(&[64, 8 | GET]), longs(&[0, PAGE, PAGE])].concat();
    let mut client = bench.client();
    assert_eq!(client.map(&file, 0, 0, PAGE), 0);
    assert_eq!(client.ask(FEATURE, &start, &[]).0, 0);
    assert!(client.dma(STORE, 0, 8));
    let (error, reply) = client.ask(FEATURE, &report, &[]);
    assert_eq!((error, reply.ends_with(&longs(&[1]))), (0, true));
    drop(client);
    let mut next = bench.client();
    assert_eq!(next.map(&file, 0, 0, PAGE), 0);
    assert_eq!(next.ask(FEATURE, &report, &[]).0, EINVAL);
    assert!(bench.engine.refusal().contains("DMA logging is off"));
    drop(next);
    bench.end();
}

/// Asks for a bit for each `page` bytes of `len` bytes from `iova` on.
fn report(client: &mut Client, argsz: u32, [iova, len, page]: [u64; 3]) -> Result<Vec<u64>, u32> {
    let ask = [words(&[argsz, 8 | GET]), longs(&[iova, len, page])].concat();
    match client.ask(FEATURE, &ask, &[]) {
        (0, reply) => {
            let bits = reply[32..].chunks(8).map(|word| word.try_into().unwrap());
            Ok(bits.map(u64::from_ne_bytes).collect())
        }
        (error, _) => Err(error),
    }
}

#[test]
fn a_refused_report_is_in_the_next_ones() {
    let limits = ClientLimits {
        wait: Duration::from_millis(100),
        ..ClientLimits::default()
    };
    let bench = Bench::new(1, limits);
    let file = memory_file(64 * PAGE);
    let start = [words(&[64, 6 | SET]), longs(&[PAGE]), words(&[0, 0])].concat();
    let mut client = bench.client();
    assert_eq!(client.map(&file, 0, 0, 64 * PAGE), 0);
    assert_eq!(client.ask(FEATURE, &start, &[]).0, 0);
    // No room for the reply.
    let all = [0, 64 * PAGE, PAGE];
    assert!(client.dma(STORE, PAGE, 8));
    assert_eq!(report(&mut client, 39, all), Err(EINVAL));
    assert!(bench.engine.refusal().contains("39"));
    assert_eq!(report(&mut client, 40, all), Ok(vec![1 << 1]));
    // An access that does not end.
    let (view, at) = (bench.memory.view(), GuestAddress(5 * PAGE));
    let access = view.get_slices(at, 8, Permissions::Write).unwrap();
    assert_eq!(report(&mut client, 64, all), Err(EINVAL));
    bench.engine.refusal();
    assert!(client.dma(STORE, 40 * PAGE, 8));
    // Part of that is asked for while it goes on: nothing is lost of the rest.
    let low = [0, 16 * PAGE, 4 * PAGE];
    assert_eq!(report(&mut client, 64, low), Err(EINVAL));
    bench.engine.refusal();
    drop(access);
    assert_eq!(report(&mut client, 64, low), Ok(vec![0b10]));
    assert_eq!(report(&mut client, 64, all), Ok(vec![1 << 40]));
    assert_eq!(report(&mut client, 64, all), Ok(vec![0]));
    // Written to again, it is dirty again.
    assert!(client.dma(STORE, 5 * PAGE, 8));
    assert_eq!(report(&mut client, 64, all), Ok(vec![1 << 5]));
    // Tracking that begins anew, or has ended, begins with nothing.
    for again in [&start[..], &words(&[64, 7 | SET])] {
        let access = view.get_slices(at, 8, Permissions::Write).unwrap();
        assert_eq!(report(&mut client, 64, all), Err(EINVAL));
        bench.engine.refusal();
        drop(access);
        assert_eq!(client.ask(FEATURE, again, &[]).0, 0);
        assert_eq!(client.ask(FEATURE, &start, &[]).0, 0);
        assert_eq!(report(&mut client, 64, all), Ok(vec![0]));
    }
    drop((view, client));
    bench.end();
}

#[test]
fn what_is_not_offered_is_refused_by_name() {
    let bench = Bench::new(1, ClientLimits::default());
    let mut client = bench.client();
    for to in [0, 5, 6, 7, 8, u32::MAX] {
        assert_eq!(go(&mut client, to), EINVAL);
        let refusal = bench.engine.refusal();
        assert_eq!(
            refusal,
            format!("no way from the migration state 2 to {to}")
        );
    }
    assert_eq!(read(&mut client, 8), Err(EINVAL));
    assert!(
        bench
            .engine
            .refusal()
            .contains("no migration data in the state 2")
    );
    assert_eq!(write(&mut client, &[0]), EINVAL);
    bench.engine.refusal();
    for (feature, methods, error) in [
        (1, PROBE | GET, 0),
        (1, PROBE | SET, ENOTSUP),
        (2, PROBE | GET | SET, 0),
        (6, PROBE | SET, 0),
        (8, PROBE | GET, 0),
        (0, PROBE, ENOTSUP),
        (3, GET, ENOTSUP),
        (1, SET, ENOTSUP),
        (1, GET | SET, ENOTSUP),
        (1, 0, ENOTSUP),
        (8, SET, ENOTSUP),
        (0xffff, PROBE, ENOTSUP),
    ] {
        let (found, _) = client.ask(FEATURE, &words(&[64, feature | methods]), &[]);
        assert_eq!(found, error, "{feature} {methods:#x}");
    }
    // Tracking with ranges that do not come, pages that are none, bitmaps that are too long.
    let start =
        |page, ranges: u32| [words(&[64, 6 | SET]), longs(&[page]), words(&[ranges, 0])].concat();
    for wrong in [
        start(4096, 1),
        start(4096, u32::MAX),
        start(0, 0),
        start(4097, 0),
    ] {
        assert_eq!(client.ask(FEATURE, &wrong, &[]).0, EINVAL);
    }
    assert_eq!(client.ask(FEATURE, &start(4096, 0), &[]).0, 0);
    for (iova, len, page) in [
        (0, 0, 4096),
        (0, 4096, 0),
        (0, 4096, 2048),
        (1, 4096, 4096),
        (0, u64::MAX, 4096),
        (u64::MAX - 4095, 8192, 4096),
        (0, 1 << 40, 4096),
    ] {
        let report = [words(&[1 << 20, 8 | GET]), longs(&[iova, len, page])].concat();
        assert_eq!(
            client.ask(FEATURE, &report, &[]).0,
            EINVAL,
            "{iova:#x} {len:#x}"
        );
    }
    drop(client);
    bench.end();
}
