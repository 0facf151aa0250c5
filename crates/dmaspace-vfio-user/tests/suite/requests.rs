//! Requests other than for memory: information, regions, interrupts, reset.

use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::atomic::Ordering;

use dmaspace_vfio_user::{ClientLimits, INTX};
use rustix::event::{EventfdFlags, eventfd};

use crate::client::*;
use crate::engine::{BUFFER, STORE};

const NONE: u32 = 1;
const BOOL: u32 = 1 << 1;
const EVENTFD: u32 = 1 << 2;
const MASK: u32 = 1 << 3;
const UNMASK: u32 = 1 << 4;
const TRIGGER: u32 = 1 << 5;

fn event(value: u32) -> OwnedFd {
    eventfd(value, EventfdFlags::CLOEXEC).unwrap()
}

fn value(event: &OwnedFd) -> u64 {
    let mut bytes = [0; 8];
    let flags = rustix::fs::fcntl_getfl(event).unwrap();
    rustix::fs::fcntl_setfl(event, flags | rustix::fs::OFlags::NONBLOCK).unwrap();
    match rustix::io::read(event, &mut bytes) {
        Ok(_) => u64::from_ne_bytes(bytes),
        Err(_) => 0,
    }
}

#[test]
fn the_device_is_described() {
    let bench = Bench::new(1, ClientLimits::default());
    let mut client = bench.client();
    let (_, info) = client.ask(GET_INFO, &words(&[16, 0, 0, 0]), &[]);
    assert_eq!(info, words(&[16, 3, 9, 5]));
    let region = |client: &mut Client, index| {
        let payload = [words(&[32, 0, index, 0]), longs(&[0, 0])].concat();
        client.ask(GET_REGION_INFO, &payload, &[])
    };
    let expected = [words(&[32, 3, 2, 0]), longs(&[BUFFER as u64, 0])].concat();
    assert_eq!(region(&mut client, 2), (0, expected));
    let absent = [words(&[32, 0, 1, 0]), longs(&[0, 0])].concat();
    assert_eq!(region(&mut client, 1), (0, absent));
    assert_eq!(region(&mut client, 9).0, EINVAL);
    assert_eq!(region(&mut client, u32::MAX).0, EINVAL);
    let (_, irqs) = client.ask(GET_IRQ_INFO, &words(&[16, 0, 2, 0]), &[]);
    assert_eq!(irqs, words(&[16, 9, 2, 4]));
    let (error, _) = client.ask(GET_IRQ_INFO, &words(&[16, 0, 5, 0]), &[]);
    assert_eq!(error, EINVAL);
    drop(client);
    bench.end();
}

#[test]
fn accesses_outside_a_region_are_refused() {
    let bench = Bench::new(1, ClientLimits::default());
    let mut client = bench.client();
    let end = BUFFER as u64;
    for (region, offset, count) in [
        (2, end, 1),
        (2, end - 1, 2),
        (2, u64::MAX, 1),
        (2, 0, 0),
        (2, 0, u32::MAX),
        (1, 0, 1),
        (9, 0, 1),
        (u32::MAX, 0, 1),
    ] {
        assert!(client.read(region, offset, count).is_err());
        if count < 10 {
            assert_ne!(client.write(region, offset, &vec![0; count as usize]), 0);
        }
    }
    // The count is another one than there are bytes.
    let payload = [access(2, 0, 8), vec![0; 7]].concat();
    assert_eq!(client.ask(REGION_WRITE, &payload, &[]).0, EINVAL);
    // The device refuses.
    assert_eq!(client.read(7, 0, 4), Err(5));
    assert_eq!(client.read(2, end - 1, 1), Ok(vec![0]));
    drop(client);
    bench.end();
}

#[test]
fn several_writes_in_one_message_are_all_made_or_none() {
    let bench = Bench::new(1, ClientLimits::default());
    let mut client = bench.client();
    let write = |offset, count, data: u64| [access(2, offset, count), longs(&[data])].concat();
    let both = [
        longs(&[2]),
        write(0, 2, 0x4241),
        write(2, 8, 0x4a49_4847_4645_4443),
    ]
    .concat();
    let (error, reply) = client.ask(WRITE_MULTI, &both, &[]);
    assert_eq!((error, reply), (0, longs(&[2])));
    assert_eq!(client.read(2, 0, 10).unwrap(), b"ABCDEFGHIJ");
    for wrong in [
        [longs(&[2]), write(0, 1, 0x5a), write(1, 9, 0)].concat(),
        [longs(&[2]), write(0, 1, 0x5a), write(BUFFER as u64, 1, 0)].concat(),
        [longs(&[3]), write(0, 1, 0x5a), write(1, 1, 0)].concat(),
        [longs(&[u64::MAX]), write(0, 1, 0x5a)].concat(),
        [longs(&[u64::MAX / 24 + 2]), write(0, 1, 0x5a)].concat(),
    ] {
        assert_eq!(client.ask(WRITE_MULTI, &wrong, &[]).0, EINVAL);
    }
    assert_eq!(client.read(2, 0, 1).unwrap(), b"A");
    drop(client);
    bench.end();
}

#[test]
fn interrupts_reach_the_eventfds_of_the_client() {
    let bench = Bench::new(1, ClientLimits::default());
    let mut client = bench.client();
    let file = memory_file(PAGE);
    assert_eq!(client.map(&file, 0, 0, PAGE), 0);
    let (first, second) = (event(0), event(7));
    let set = |client: &mut Client, flags, start, count, fds: &[&OwnedFd]| {
        let fds: Vec<_> = fds.iter().map(|fd| fd.as_fd()).collect();
        client
            .ask(SET_IRQS, &words(&[20, flags, 2, start, count]), &fds)
            .0
    };
    assert_eq!(
        set(&mut client, EVENTFD | TRIGGER, 0, 2, &[&first, &second]),
        0
    );
    assert!(client.dma(STORE, 0, 8));
    assert_eq!(value(&first), 1);
    assert_eq!(set(&mut client, NONE | TRIGGER, 1, 1, &[]), 0);
    assert_eq!(value(&second), 8);
    let bools = [words(&[22, BOOL | TRIGGER, 2, 0, 2]), vec![1, 0]].concat();
    assert_eq!(client.ask(SET_IRQS, &bools, &[]).0, 0);
    assert_eq!((value(&first), value(&second)), (1, 0));
    // Without descriptors they are taken away.
    assert_eq!(set(&mut client, EVENTFD | TRIGGER, 0, 1, &[]), 0);
    assert!(client.dma(STORE, 0, 8));
    assert_eq!(value(&first), 0);
    assert_eq!(bench.irqs.configured(), 1);
    assert_eq!(set(&mut client, NONE | TRIGGER, 0, 0, &[]), 0);
    assert_eq!(bench.irqs.configured(), 0);
    drop(client);
    bench.end();
}

#[test]
fn interrupts_that_are_none_are_refused() {
    let bench = Bench::new(1, ClientLimits::default());
    let mut client = bench.client();
    let event = event(0);
    let one = [event.as_fd()];
    let two = [event.as_fd(), event.as_fd()];
    let cases: [(&[u32], usize); 16] = [
        (&[3, NONE | TRIGGER, 2, 0, 0], 0),
        (&[20, NONE | TRIGGER, 5, 0, 0], 0),
        (&[20, MASK | UNMASK | NONE, 2, 0, 1], 0),
        (&[20, TRIGGER | NONE | BOOL, 2, 0, 1], 0),
        (&[20, NONE | MASK, 2, 0, 1], 0),
        (&[20, NONE | TRIGGER, 2, 3, 2], 0),
        (&[20, NONE | TRIGGER, 2, 5, 1], 0),
        (&[20, EVENTFD | TRIGGER, 2, 1, u32::MAX], 0),
        (&[20, NONE | TRIGGER, 3, 0, 1], 0),
        (&[20, NONE | TRIGGER, 2, 1, 0], 0),
        (&[20, BOOL | TRIGGER, 2, 0, 0], 0),
        (&[20, NONE | TRIGGER, 2, 0, 1], 1),
        (&[20, EVENTFD | TRIGGER, 2, 0, 2], 1),
        (&[20, EVENTFD | TRIGGER, 2, 0, 1], 2),
        (&[20, BOOL | TRIGGER, 2, 0, 2], 0),
        (&[20, 0, 2, 0, 1], 0),
    ];
    for (fields, fds) in cases {
        let fds = [&[][..], &one, &two][fds];
        let (error, _) = client.ask(SET_IRQS, &words(fields), fds);
        assert_eq!(error, EINVAL, "{fields:?}");
    }
    assert_eq!(bench.irqs.configured(), 0);
    drop(client);
    bench.end();
}

#[test]
fn intx_is_masked_when_it_is_raised_until_the_client_unmasks_it() {
    let bench = Bench::new(1, ClientLimits::default());
    let mut client = bench.client();
    let (_, irqs) = client.ask(GET_IRQ_INFO, &words(&[16, 0, 0, 0]), &[]);
    assert_eq!(irqs, words(&[16, 7, 0, 1]));
    let event = event(0);
    let mut set_with = |flags, bools: &[u8]| {
        let fds = [event.as_fd()];
        let fds = if flags & EVENTFD == 0 { &[][..] } else { &fds };
        let fixed = words(&[20 + bools.len() as u32, flags, 0, 0, 1]);
        client.ask(SET_IRQS, &[&fixed, bools].concat(), fds).0
    };
    let mut set = |flags| set_with(flags, &[]);
    assert_eq!(set(EVENTFD | TRIGGER), 0);
    for _ in 0..3 {
        assert!(bench.irqs.trigger(INTX, 0));
    }
    assert_eq!(value(&event), 1, "once");
    assert_eq!(set(NONE | UNMASK), 0);
    assert_eq!(value(&event), 1, "it was wanted again");
    bench.irqs.trigger(INTX, 0);
    bench.irqs.lower(INTX, 0);
    assert_eq!(set(NONE | UNMASK), 0);
    assert_eq!(value(&event), 0, "it is not wanted any more");
    assert_eq!(set(NONE | MASK), 0);
    bench.irqs.trigger(INTX, 0);
    assert_eq!(value(&event), 0);
    assert_eq!(set(NONE | UNMASK), 0);
    assert_eq!(value(&event), 1);
    assert_eq!(set(EVENTFD | UNMASK), EINVAL);
    // A 0 means none of them.
    bench.irqs.trigger(INTX, 0);
    for (bool, raised) in [(0, 0), (1, 1)] {
        assert_eq!(set_with(BOOL | UNMASK, &[bool]), 0);
        assert_eq!(value(&event), raised);
    }
    assert_eq!(set_with(BOOL | UNMASK, &[1]), 0);
    for (bool, raised) in [(0, 1), (1, 0)] {
        assert_eq!(set_with(BOOL | MASK, &[bool]), 0);
        bench.irqs.trigger(INTX, 0);
        assert_eq!(value(&event), raised);
        bench.irqs.lower(INTX, 0);
        assert_eq!(set_with(NONE | UNMASK, &[]), 0);
    }
    drop(client);
    bench.end();
}

#[test]
fn a_reset_reaches_the_device() {
    let bench = Bench::new(1, ClientLimits::default());
    let mut client = bench.client();
    assert_eq!(client.write(0, 0, &[1; 8]), 0);
    assert_eq!(client.ask(RESET, &[], &[]).0, 0);
    assert_eq!(client.read(0, 0, 8).unwrap(), [0; 8]);
    assert_eq!(bench.engine.resets.load(Ordering::Relaxed), 1);
    drop(client);
    bench.end();
}
