//! Files that block where they are written to, looked at or closed.

use std::net::TcpStream;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;

use dmaspace_vfio_user::{ClientLimits, INTX, MSIX};
use rustix::event::{EventfdFlags, epoll, eventfd};
use rustix::io::ioctl_fionbio;
use rustix::time::{TimerfdClockId, TimerfdFlags, timerfd_create};

use crate::client::*;
use crate::engine::STORE;

/// `DATA_EVENTFD` and `DATA_NONE`, each with `ACTION_TRIGGER`.
const SET: u32 = 1 << 2 | 1 << 5;
const TRIGGER: u32 = 1 | 1 << 5;

fn set_irq(client: &mut Client, flags: u32, index: u32, file: Option<&OwnedFd>) -> u32 {
    let fds: Vec<_> = file.iter().map(|file| file.as_fd()).collect();
    client
        .ask(SET_IRQS, &words(&[20, flags, index, 0, 1]), &fds)
        .0
}

fn is_served(mut client: Client) {
    let file = memory_file(PAGE);
    assert_eq!(client.map(&file, 0, 0, PAGE), 0);
    let event = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    assert_eq!(set_irq(&mut client, SET, MSIX as u32, Some(&event)), 0);
    assert!(client.dma(STORE, 0, 8));
    let mut raised = [0; 8];
    rustix::io::read(&event, &mut raised).unwrap();
    assert_eq!(u64::from_ne_bytes(raised), 1);
}

#[test]
fn an_event_that_is_full_and_made_to_block_delays_no_device_and_no_other_client() {
    let bench = Bench::new(2, ClientLimits::default());
    let mut client = bench.client();
    let file = memory_file(PAGE);
    assert_eq!(client.map(&file, 0, 0, PAGE), 0);
    let event = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    for index in [INTX, MSIX] {
        assert_eq!(set_irq(&mut client, SET, index as u32, Some(&event)), 0);
        // The flag is the open file's, which the client has, too.
        ioctl_fionbio(&event, false).unwrap();
    }
    rustix::io::write(&event, &(u64::MAX - 1).to_ne_bytes()).unwrap();
    // The device raises it while a request is served, and in a thread of its own; so does the client.
    assert!(client.dma(STORE, 0, 8));
    for index in [INTX, MSIX] {
        assert!(bench.irqs.trigger(index, 0));
        assert_eq!(set_irq(&mut client, TRIGGER, index as u32, None), 0);
    }
    drop(client);
    is_served(bench.client());
    bench.end();
}

#[test]
fn what_is_no_event_is_refused_whatever_it_is() {
    let bench = Bench::new(1, ClientLimits::default());
    let mut client = bench.client();
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    let (socket, _other) = UnixStream::pair().unwrap();
    let timer = timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC).unwrap();
    let set = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
    let null = std::fs::File::open("/dev/null").unwrap();
    let files: [OwnedFd; 7] = [
        reader,
        writer,
        socket.into(),
        timer,
        set,
        null.into(),
        memory_file(PAGE),
    ];
    for file in &files {
        assert_eq!(set_irq(&mut client, SET, MSIX as u32, Some(file)), EINVAL);
        assert!(bench.engine.refusal().contains("no eventfd"));
    }
    assert_eq!(bench.irqs.configured(), 0);
    is_served(client);
    bench.end();
}

/// Sends a message with one of [`lingering`], and keeps no descriptor of it: it is the server that closes it.
fn send_lingering(client: &mut Client, message: &[u8]) -> TcpStream {
    let (first, rest) = message.split_at(1);
    let (socket, other) = lingering();
    client.send(first, &[socket.as_fd()]);
    drop(socket);
    client.send(rest, &[]);
    other
}

#[test]
fn a_file_that_blocks_when_it_is_closed_delays_no_request() {
    let bench = Bench::new(2, ClientLimits::default());
    let mut client = bench.client();
    let mut others = Vec::new();
    for (command, payload) in [
        (SET_IRQS, words(&[20, SET, 2, 0, 1])),
        (DMA_MAP, map(3, 0, 0, PAGE)),
        (GET_INFO, words(&[16, 0, 0, 0])),
    ] {
        let message = client.message(command, 0, &payload);
        others.push(send_lingering(&mut client, &message));
        assert_eq!(client.reply().2.0, EINVAL);
        bench.engine.refusal();
    }
    // More than a message may have.
    let (socket, other) = lingering();
    let many = [socket.as_fd(); 40];
    let message = client.message(GET_INFO, 0, &words(&[16, 0, 0, 0]));
    client.send(&message[..1], &many);
    drop(socket);
    client.send(&message[1..], &[]);
    assert_eq!(client.reply().2.0, EINVAL);
    bench.engine.refusal();
    drop(client);
    is_served(bench.client());
    bench.end();
    drop((others, other));
}

#[test]
fn a_file_that_was_not_received_and_blocks_when_it_is_closed_delays_no_other_client() {
    let bench = Bench::new(2, ClientLimits::default());
    let mut client = bench.client();
    // While the server stands in the device, another client sends what is not received when it is refused.
    let device = bench.engine.buffer.lock().unwrap();
    let read = client.message(REGION_READ, 0, &access(2, 0, 8));
    client.send(&read, &[]);
    let mut second = bench.connect();
    let refused = send_lingering(&mut second, b"more");
    drop(device);
    assert_eq!(client.reply().2.0, 0);
    assert!(second.is_closed());
    // This one sends it behind what ends its connection.
    let device = bench.engine.buffer.lock().unwrap();
    client.send(&read, &[]);
    client.send(&header(1, SET_IRQS, 15, 0), &[]);
    let unread = send_lingering(&mut client, b"more");
    drop(device);
    assert_eq!(client.reply().2.0, 0);
    assert_eq!(client.reply().2.0, EINVAL);
    drop((client, second));
    is_served(bench.client());
    let served = bench.end();
    assert_eq!(served[0].others, 1);
    drop((unread, refused));
}
