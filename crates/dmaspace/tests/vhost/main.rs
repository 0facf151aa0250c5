//! A balloon over vhost-user, with a front end that comes, goes, and does what it must not.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "helpers of tests panic as tests do"
)]

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use dmaspace::vhost::{BackendEvent, BalloonError, BalloonJob, BalloonReport, Command, Operator};
use hostmem::{Backing, HugeSize, Mapping, RaisedPool};
use vhost::vhost_user::message::{
    VhostUserConfigFlags, VhostUserHeaderFlag, VhostUserProtocolFeatures,
};
use vhost::vhost_user::{Frontend, VhostUserFrontend as _};
use vhost::{VhostBackend as _, VhostUserMemoryRegionInfo, VringConfigData};
use vm_memory::{Bytes as _, FileOffset, GuestAddress, GuestMemoryBackend as _, GuestMemoryMmap};
use vmm_sys_util::eventfd::EventFd;

mod events;
mod shrunk;

const PATIENCE: Duration = Duration::from_secs(600);
/// Start of the guest's memory, and in its file.
const BASE: u64 = 1 << 30;
const OFFSET: u64 = 3 << 30;
const BYTES: usize = 8 << 20;
/// Pages from here on go into the balloon.
const PAGES: u64 = BASE + (4 << 20);
const SIZE: u16 = 16;
const INFLATE: usize = 0;
const STATS: usize = 2;
const REPORTING: usize = 3;
/// Features that a back end needs, and statistics.
const FEATURES: u64 = 1 << 32 | 1 << 30 | 0b11;
/// Page poison and page reporting.
const POISON: u64 = 0b11_0000;

/// A job on a thread, with this test as its operator.
struct Running {
    commands: Sender<Command>,
    events: Receiver<BackendEvent>,
    thread: JoinHandle<Result<BalloonReport, BalloonError>>,
    socket: PathBuf,
    _directory: tempfile::TempDir,
}

struct Channels(Receiver<Command>, Sender<BackendEvent>);

impl Operator for Channels {
    fn next(&mut self, patience: Duration) -> Option<Command> {
        self.0.recv_timeout(patience).ok()
    }

    fn tell(&mut self, event: &BackendEvent) {
        let _ = self.1.send(event.clone());
    }
}

impl Running {
    fn start(target: u64) -> Self {
        Self::start_asking(target, None)
    }

    /// Asks for statistics so often.
    fn start_asking(target: u64, stats: Option<Duration>) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("socket");
        let job = BalloonJob {
            socket: socket.clone(),
            target,
            stats,
            bulk: None,
            reporting: true,
        };
        let (commands, receiver) = mpsc::channel();
        let (sender, events) = mpsc::channel();
        let thread = thread::spawn(move || job.run(&mut Channels(receiver, sender)));
        let mut running = Self {
            commands,
            events,
            thread,
            socket,
            _directory: directory,
        };
        running.wait(|event| matches!(event, BackendEvent::Listening { .. }));
        running
    }

    fn wait(&mut self, wanted: impl Fn(&BackendEvent) -> bool) -> BackendEvent {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let event = self.events.recv_timeout(left).expect("the event comes");
            if wanted(&event) {
                return event;
            }
        }
    }

    /// Ends it; how many front ends it has reported.
    fn end_of_all(self) -> usize {
        self.commands.send(Command::End).unwrap();
        self.thread.join().unwrap().unwrap();
        let connected = |event: &BackendEvent| *event == BackendEvent::Connected;
        self.events.try_iter().filter(connected).count()
    }

    fn end(self) -> BalloonReport {
        self.commands.send(Command::End).unwrap();
        let report = self.thread.join().unwrap().unwrap();
        assert!(!self.socket.exists());
        report
    }
}

/// A monitor and its guest, from the first message to the last.
struct Monitor {
    front: Frontend,
    /// The same connection, for messages that the front end does not send.
    socket: UnixStream,
    channel: UnixStream,
    memory: GuestMemoryMmap,
    kicks: Vec<EventFd>,
    calls: Vec<EventFd>,
}

fn guest() -> File {
    let file = tempfile::tempfile_in("/dev/shm").unwrap();
    file.set_len(OFFSET + BYTES as u64).unwrap();
    file
}

/// The parts of a queue's ring.
fn ring(queue: usize) -> [u64; 4] {
    let at = BASE + 0x1_0000 * queue as u64;
    [at, at + 0x1000, at + 0x2000, at + 0x4000]
}

impl Monitor {
    /// Connects with this memory, the rings at these positions.
    fn connect(socket: &Path, file: &File, bases: [u16; 3]) -> Self {
        Self::connect_with(socket, file, &bases, FEATURES, None)
    }

    /// The same, with these features; of a driver that sets up before the front end has told of its
    /// memory, the value with which it fills pages.
    fn connect_with(
        socket: &Path,
        file: &File,
        bases: &[u16],
        wanted: u64,
        poison: Option<u32>,
    ) -> Self {
        let socket = UnixStream::connect(socket).unwrap();
        Self::over(socket, file, bases, wanted, poison)
    }

    /// The same over a connection.
    fn over(
        socket: UnixStream,
        file: &File,
        bases: &[u16],
        wanted: u64,
        poison: Option<u32>,
    ) -> Self {
        let begin = file.metadata().unwrap().len() - BYTES as u64;
        let place = FileOffset::new(file.try_clone().unwrap(), begin);
        let ranges = [(GuestAddress(BASE), BYTES, Some(place))];
        let memory = GuestMemoryMmap::from_ranges_with_files(ranges).unwrap();
        let (mut front, channel) = Self::agree(&socket, bases.len() as u64, wanted);
        if let Some(poison) = poison {
            set_poison(&mut front, poison);
        }
        Self::share(&front, &memory);
        let host = |address| memory.get_host_address(GuestAddress(address)).unwrap() as u64;
        let (mut kicks, mut calls) = (Vec::new(), Vec::new());
        for (queue, base) in bases.iter().copied().enumerate() {
            let (kick, call) = (EventFd::new(0).unwrap(), EventFd::new(0).unwrap());
            // Before anything else is known of the ring, as User-Mode Linux does.
            front.set_vring_call(queue, &call).unwrap();
            front.set_vring_num(queue, SIZE).unwrap();
            let [descriptors, available, used, _] = ring(queue).map(host);
            let config = VringConfigData {
                queue_max_size: SIZE,
                queue_size: SIZE,
                flags: 0,
                desc_table_addr: descriptors,
                used_ring_addr: used,
                avail_ring_addr: available,
                log_addr: None,
            };
            front.set_vring_base(queue, base).unwrap();
            front.set_vring_addr(queue, &config).unwrap();
            front.set_vring_kick(queue, &kick).unwrap();
            front.set_vring_enable(queue, true).unwrap();
            kicks.push(kick);
            calls.push(call);
        }
        Self {
            front,
            socket,
            channel,
            memory,
            kicks,
            calls,
        }
    }

    /// Agrees on features, and gives the channel on which the back end tells of changes.
    fn agree(socket: &UnixStream, queues: u64, wanted: u64) -> (Frontend, UnixStream) {
        let mut front = Frontend::from_stream(socket.try_clone().unwrap(), queues);
        front.set_owner().unwrap();
        let features = front.get_features().unwrap();
        assert_eq!(features & wanted, wanted);
        let protocol = VhostUserProtocolFeatures::REPLY_ACK
            | VhostUserProtocolFeatures::BACKEND_REQ
            | VhostUserProtocolFeatures::CONFIG;
        assert!(front.get_protocol_features().unwrap().contains(protocol));
        front.set_protocol_features(protocol).unwrap();
        front.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
        let (channel, theirs) = UnixStream::pair().unwrap();
        channel.set_read_timeout(Some(PATIENCE)).unwrap();
        front.set_backend_request_fd(&theirs).unwrap();
        front.set_features(wanted).unwrap();
        (front, channel)
    }

    /// Shares this memory.
    fn share(front: &Frontend, memory: &GuestMemoryMmap) {
        let region = memory.iter().next().unwrap();
        let info = VhostUserMemoryRegionInfo::from_guest_region(region).unwrap();
        front.set_mem_table(&[info]).unwrap();
    }

    /// Makes `bytes` available in `queue` as message number `nth`.
    fn send(&self, queue: usize, nth: u16, bytes: &[u8]) {
        self.put(queue, nth, bytes);
        self.kicks[queue].write(1).unwrap();
    }

    /// The same, and says nothing.
    fn put(&self, queue: usize, nth: u16, bytes: &[u8]) {
        let [.., buffer] = ring(queue);
        let slot = nth % SIZE;
        let at = buffer + 0x400 * u64::from(slot);
        self.memory.write_slice(bytes, GuestAddress(at)).unwrap();
        self.offer(queue, nth, at, bytes.len() as u64);
    }

    /// Reports these bytes as free, as message number `nth`, and waits.
    fn report(&self, nth: u16, at: u64, len: u64) {
        const WRITE: u64 = 2 << 32;
        self.offer(REPORTING, nth, at, len | WRITE);
        self.kicks[REPORTING].write(1).unwrap();
        self.used(REPORTING, nth + 1);
    }

    /// Makes a descriptor available: its address, and its length and flags.
    fn offer(&self, queue: usize, nth: u16, at: u64, len: u64) {
        let [descriptors, available, ..] = ring(queue);
        let write = |at, value: u16| self.memory.write_obj(value, GuestAddress(at)).unwrap();
        let slot = nth % SIZE;
        let descriptor = descriptors + 16 * u64::from(slot);
        self.memory.write_obj(at, GuestAddress(descriptor)).unwrap();
        self.memory
            .write_obj(len, GuestAddress(descriptor + 8))
            .unwrap();
        write(available + 4 + 2 * u64::from(slot), slot);
        write(available + 2, nth + 1);
    }

    /// Waits until `count` messages of `queue` came back.
    fn used(&self, queue: usize, count: u16) {
        let [_, _, used, _] = ring(queue);
        let deadline = Instant::now() + PATIENCE;
        while self.memory.read_obj::<u16>(GuestAddress(used + 2)).unwrap() != count {
            assert!(
                Instant::now() < deadline,
                "message {count} does not come back"
            );
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// Gives 256 pages from `first` on to the balloon, and says that `actual` are in it.
    fn inflate(&mut self, nth: u16, first: u64, actual: u32) {
        let pages = (0..256).map(|page| (first / 4096 + page) as u32);
        let message: Vec<u8> = pages.flat_map(u32::to_le_bytes).collect();
        self.send(INFLATE, nth, &message);
        self.used(INFLATE, nth + 1);
        let flags = VhostUserConfigFlags::WRITABLE;
        self.front
            .set_config(4, flags, &actual.to_le_bytes())
            .unwrap();
    }

    /// Target and size, in pages.
    fn config(&mut self) -> [u32; 2] {
        let flags = VhostUserConfigFlags::empty();
        let (_, bytes) = self.front.get_config(0, 8, flags, &[0; 8]).unwrap();
        [0, 4].map(|at| u32::from_le_bytes(*bytes[at..].first_chunk().unwrap()))
    }
}

fn set_poison(front: &mut Frontend, poison: u32) {
    let flags = VhostUserConfigFlags::WRITABLE;
    front.set_config(12, flags, &poison.to_le_bytes()).unwrap();
}

fn held(file: &File) -> u64 {
    512 * file.metadata().unwrap().blocks()
}

#[test]
fn a_front_end_that_comes_back_finds_the_balloon_as_it_was() {
    let mut running = Running::start(1 << 20);
    let file = guest();
    let mut monitor = Monitor::connect(&running.socket, &file, [0; 3]);
    // Pages of the rings and buffers are there before anything is counted.
    let rings = [0; 0x3_0000];
    monitor
        .memory
        .write_slice(&rings, GuestAddress(BASE))
        .unwrap();
    let ones = vec![1; 2 << 20];
    monitor
        .memory
        .write_slice(&ones, GuestAddress(PAGES))
        .unwrap();
    let before = held(&file);
    monitor.inflate(0, PAGES, 256);
    assert_eq!(before - held(&file), 1 << 20, "one message, one mebibyte");
    assert!(monitor.calls[INFLATE].read().is_ok());
    assert_eq!(monitor.config(), [256, 256]);

    // A target, and the message that tells of it; one that tells of the first target may come before.
    running.commands.send(Command::Target(2 << 20)).unwrap();
    let mut message = [0; 12];
    loop {
        monitor.channel.read_exact(&mut message).unwrap();
        assert_eq!(message.map(u32::from), [2, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
        match monitor.config() {
            [256, 256] => {}
            config => break assert_eq!(config, [512, 256]),
        }
    }

    // It goes without a word, and comes back: rings are taken up where they were used last.
    drop(monitor);
    running.wait(|event| matches!(event, BackendEvent::Disconnected { .. }));
    let mut monitor = Monitor::connect(&running.socket, &file, [1, 0, 0]);
    monitor.inflate(1, PAGES + (1 << 20), 512);
    assert_eq!(before - held(&file), 2 << 20);
    assert_eq!(monitor.config(), [512, 512]);

    // Another guest: an empty balloon, and the same target.
    drop(monitor);
    running.wait(|event| matches!(event, BackendEvent::Disconnected { .. }));
    let mut monitor = Monitor::connect(&running.socket, &guest(), [0; 3]);
    assert_eq!(monitor.config(), [512, 0]);
    drop(monitor);
    let report = running.end();
    assert_eq!((report.discarded_bytes, report.discards), (2 << 20, 2));
    assert_eq!(report.refused, 0);
}

#[test]
fn a_buffer_for_statistics_outlasts_a_front_end() {
    let mut running = Running::start(0);
    let file = guest();
    let free = |value: u64| [&4u16.to_le_bytes()[..], &value.to_le_bytes()].concat();
    let said = |event: &BackendEvent| match event {
        BackendEvent::Stats(stats) => stats.free_bytes,
        _ => None,
    };
    let monitor = Monitor::connect(&running.socket, &file, [0; 3]);
    monitor.send(STATS, 0, &free(1));
    running.wait(|event| said(event) == Some(1));
    drop(monitor);
    running.wait(|event| matches!(event, BackendEvent::Disconnected { .. }));

    // The buffer was not used, so it is available once more; then it is asked for, and answered.
    let monitor = Monitor::connect(&running.socket, &file, [0; 3]);
    running.wait(|event| said(event) == Some(1));
    running.commands.send(Command::Stats).unwrap();
    monitor.used(STATS, 1);
    monitor.send(STATS, 1, &free(2));
    running.wait(|event| said(event) == Some(2));
    drop(monitor);
    assert_eq!(running.end().refused, 0);
}

#[test]
fn statistics_are_asked_for_as_often_as_the_job_says() {
    let running = Running::start_asking(0, Some(Duration::from_millis(1)));
    let monitor = Monitor::connect(&running.socket, &guest(), [0; 3]);
    for nth in 0..3 {
        monitor.send(STATS, nth, &[0; 10]);
        monitor.used(STATS, nth + 1);
    }
    drop(monitor);
    assert_eq!(running.end().refused, 0);
}

#[test]
fn a_front_end_is_told_of_changes_only_once_it_has_given_its_own_memory() {
    let mut running = Running::start(0);
    drop(Monitor::connect(&running.socket, &guest(), [0; 3]));
    running.wait(|event| matches!(event, BackendEvent::Disconnected { .. }));
    let socket = UnixStream::connect(&running.socket).unwrap();
    let (front, mut channel) = Monitor::agree(&socket, 3, FEATURES);
    // Told after the message would have been.
    running.commands.send(Command::Target(1 << 20)).unwrap();
    running.wait(
        |event| matches!(event, BackendEvent::Balloon(report) if report.target_bytes == 1 << 20),
    );
    channel.set_nonblocking(true).unwrap();
    let early = channel.read(&mut [0; 12]).unwrap_err();
    assert_eq!(early.kind(), std::io::ErrorKind::WouldBlock);
    channel.set_nonblocking(false).unwrap();
    let place = FileOffset::new(guest(), OFFSET);
    let ranges = [(GuestAddress(BASE), BYTES, Some(place))];
    let memory = GuestMemoryMmap::from_ranges_with_files(ranges).unwrap();
    Monitor::share(&front, &memory);
    channel.read_exact(&mut [0; 12]).unwrap();
    drop((front, socket));
    running.end();
}

#[test]
fn a_front_end_that_talks_nonsense_is_left_and_the_next_is_served() {
    let mut running = Running::start(1 << 20);
    for nonsense in [&[0xff; 64][..], &[5; 7], b"GET / HTTP/1.1\r\n\r\n"] {
        let mut front = UnixStream::connect(&running.socket).unwrap();
        front.set_read_timeout(Some(PATIENCE)).unwrap();
        front.write_all(nonsense).unwrap();
        front.shutdown(std::net::Shutdown::Write).unwrap();
        let cause = "connections that began with no message of vhost-user: 1".to_string();
        running.wait(|event| {
            *event
                == BackendEvent::Refused {
                    cause: cause.clone(),
                }
        });
        let end = front.read(&mut [0; 16]);
        assert!(matches!(end, Ok(0) | Err(_)), "{end:?}");
    }
    for nonsense in [[47; 52], [0xff; 52]] {
        let mut front = first_message(&running.socket);
        front.write_all(&nonsense).unwrap();
        front.shutdown(std::net::Shutdown::Write).unwrap();
        running.wait(|event| matches!(event, BackendEvent::Disconnected { .. }));
    }
    let mut monitor = Monitor::connect(&running.socket, &guest(), [0; 3]);
    monitor.inflate(0, PAGES, 256);
    assert_eq!(monitor.config(), [256, 256]);
    drop(monitor);
    running.end();
}

/// A connection that has asked for the features and has got them.
fn first_message(socket: &Path) -> UnixStream {
    let mut front = UnixStream::connect(socket).unwrap();
    front.set_read_timeout(Some(PATIENCE)).unwrap();
    let get_features = [1u32, 1, 0];
    let bytes: Vec<u8> = get_features
        .into_iter()
        .flat_map(u32::to_ne_bytes)
        .collect();
    front.write_all(&bytes).unwrap();
    front.read_exact(&mut [0; 20]).unwrap();
    front
}

#[test]
fn connections_that_send_nothing_neither_count_nor_keep_a_front_end_waiting() {
    let running = Running::start(0);
    let path = running.socket.clone();
    let silent: Vec<_> = (0..100)
        .map(|nth| {
            let front = UnixStream::connect(&path).unwrap();
            (nth % 2 == 0).then_some(front)
        })
        .collect();
    let front = first_message(&path);
    drop((front, silent));
    assert_eq!(running.end_of_all(), 1);
}

#[test]
fn a_socket_in_use_is_left_alone_and_one_left_behind_is_replaced() {
    let running = Running::start(0);
    let job = |socket: &Path| BalloonJob {
        socket: socket.to_owned(),
        target: 0,
        stats: None,
        bulk: None,
        reporting: true,
    };
    let refusal = |socket: &Path| {
        let (_commands, receiver) = mpsc::channel();
        let (sender, _events) = mpsc::channel();
        let error = job(socket)
            .run(&mut Channels(receiver, sender))
            .unwrap_err();
        assert!(error.is_input());
        error.to_string()
    };
    let path = running.socket.clone();
    assert_eq!(
        refusal(&path),
        format!("{} is in use by another program", path.display())
    );
    // The first one has served a front end since, and says nothing of the second.
    drop(first_message(&path));
    assert_eq!(running.end_of_all(), 1);
    let file = tempfile::NamedTempFile::new().unwrap();
    assert!(refusal(file.path()).ends_with(" is no socket"));
    assert!(file.path().exists());
}

#[test]
fn what_a_guest_poisons_is_inflated_and_not_taken_by_reports() {
    const VALUE: u32 = 0xaaaa_aaaa;
    const MIB: u64 = 1 << 20;
    // Drivers set up before their front end has told of its memory, or after; either is before the ring
    // says that the driver is a new one.
    for early in [true, false] {
        let running = Running::start(MIB);
        let file = guest();
        let value = early.then_some(VALUE);
        let features = FEATURES | POISON;
        let mut monitor = Monitor::connect_with(&running.socket, &file, &[0; 4], features, value);
        if !early {
            set_poison(&mut monitor.front, VALUE);
        }
        let poison = |monitor: &mut Monitor| {
            let flags = VhostUserConfigFlags::empty();
            let (_, bytes) = monitor.front.get_config(12, 4, flags, &[0; 4]).unwrap();
            u32::from_le_bytes(bytes.try_into().unwrap())
        };
        assert_eq!(poison(&mut monitor), VALUE);
        let memory = monitor.memory.clone();
        let write = |bytes: &[u8], at| memory.write_slice(bytes, GuestAddress(at)).unwrap();
        let word = |at| memory.read_obj::<u32>(GuestAddress(at)).unwrap();
        write(&[0; 0x4_0000], BASE);
        write(&vec![0xaa; 3 << 20], PAGES);

        // Inflated pages are given back; the driver fills them again when it has them back.
        let before = held(&file);
        monitor.inflate(0, PAGES, 256);
        assert_eq!(before - held(&file), MIB);
        assert_eq!(poison(&mut monitor), VALUE);
        // A report must leave what the guest is to find there (VIRTIO 1.3, 5.5.6.7.2).
        monitor.report(0, PAGES + MIB, MIB);
        assert_eq!((before - held(&file), word(PAGES + MIB)), (MIB, VALUE));
        // With pages of zeros it takes them.
        set_poison(&mut monitor.front, 0);
        monitor.report(1, PAGES + 2 * MIB, MIB);
        assert_eq!((before - held(&file), word(PAGES + 2 * MIB)), (2 * MIB, 0));
        drop(monitor);
        let report = running.end();
        assert_eq!((report.reported_bytes, report.refused), (MIB, 0));
    }
}

#[test]
fn memory_of_huge_pages_goes_when_one_is_whole() {
    const HUGE: u64 = 2 << 20;
    let size = HugeSize::TwoMiB;
    let pool = match RaisedPool::raise(size, BYTES as u64) {
        Ok(pool) => pool,
        Err(error) => return eprintln!("not run: {error}"),
    };
    let mapping = Mapping::new(Backing::Hugetlb2M, BYTES as u64, None).unwrap();
    let file = File::from(mapping.fd().unwrap().try_clone_to_owned().unwrap());
    let running = Running::start(HUGE);
    let mut monitor = Monitor::connect(&running.socket, &file, [0; 3]);
    let memory = monitor.memory.clone();
    let byte = |at| memory.read_obj::<u8>(GuestAddress(at)).unwrap();
    let ones = vec![1; 2 * HUGE as usize];
    memory.write_slice(&ones, GuestAddress(PAGES)).unwrap();
    let before = held(&file);

    // Half of a huge page is in the balloon and stays; its other half brings all of it.
    monitor.inflate(0, PAGES + HUGE / 2, 256);
    assert_eq!((held(&file), byte(PAGES + HUGE / 2)), (before, 1));
    monitor.inflate(1, PAGES, 512);
    assert_eq!(before - held(&file), HUGE);
    assert_eq!((byte(PAGES), byte(PAGES + HUGE)), (0, 1));
    drop((monitor, memory));
    let report = running.end();
    assert_eq!(
        (report.inflated_bytes, report.discarded_bytes),
        (HUGE, HUGE)
    );
    assert_eq!((report.discards, report.refused), (1, 0));
    drop((mapping, file));
    pool.restore().unwrap();
}
