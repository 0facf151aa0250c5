//! A balloon without a descriptor left. The limit is the process's, so this is the only test here.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::io::{Read as _, Write as _};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread;
use std::time::{Duration, Instant};

use dmaspace::vhost::{BackendEvent, BalloonJob, Command, Operator};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, connect, socket};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::time::{ClockId, clock_gettime};

const PATIENCE: Duration = Duration::from_secs(300);

struct Channels(Receiver<Command>, Sender<BackendEvent>);

impl Operator for Channels {
    fn next(&mut self, patience: Duration) -> Option<Command> {
        self.0.recv_timeout(patience).ok()
    }

    fn tell(&mut self, event: &BackendEvent) {
        let _ = self.1.send(event.clone());
    }
}

fn made() -> OwnedFd {
    socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap()
}

/// Leaves the process no descriptor; the limit as it was.
fn take_all() -> Rlimit {
    let limit = getrlimit(Resource::Nofile);
    // The lowest that is free.
    let current = Some(made().as_raw_fd() as u64);
    setrlimit(Resource::Nofile, Rlimit { current, ..limit }).unwrap();
    let error = socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap_err();
    assert_eq!(error, Errno::MFILE);
    limit
}

/// Descriptors of this process.
fn open() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Processor time of the process, and of this thread.
fn used() -> [Duration; 2] {
    [ClockId::ProcessCPUTime, ClockId::ThreadCPUTime].map(|clock| {
        let time = clock_gettime(clock);
        Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
    })
}

/// Computes for a while, and asserts that the other threads do not. They would get as much time, on a busy machine too.
fn others_wait() {
    const WHILE: Duration = Duration::from_millis(500);
    let [process, own] = used();
    let own = loop {
        let own = used()[1] - own;
        if own >= WHILE {
            break own;
        }
    };
    let others = used()[0] - process - own;
    assert!(others < WHILE / 4, "{others:?}");
}

#[test]
fn without_descriptors_front_ends_wait_and_no_processor_is_busy() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("socket");
    let job = BalloonJob {
        socket: path.clone(),
        target: 0,
        stats: None,
        bulk: None,
        reporting: true,
    };
    let (commands, receiver) = mpsc::channel();
    let (sender, events) = mpsc::channel();
    let thread = thread::spawn(move || job.run(&mut Channels(receiver, sender)));
    let mut seen = Vec::new();
    let mut wait = |wanted: fn(&BackendEvent) -> bool| {
        while !seen.last().is_some_and(wanted) {
            seen.push(events.recv_timeout(PATIENCE).expect("the event comes"));
        }
        let refusals = seen.iter();
        let refusals = refusals.filter(|event| matches!(event, BackendEvent::Refused { .. }));
        refusals.cloned().collect::<Vec<_>>()
    };
    wait(|event| matches!(event, BackendEvent::Listening { .. }));
    wait(|event| matches!(event, BackendEvent::Balloon(_)));
    let idle = open();
    for round in 1..3 {
        let deadline = Instant::now() + PATIENCE;
        while open() > idle {
            assert!(Instant::now() < deadline, "descriptors are left");
            thread::sleep(Duration::from_millis(1));
        }
        let front = made();
        let limit = take_all();
        connect(&front, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        wait(|event| matches!(event, BackendEvent::Refused { .. }));
        others_wait();
        setrlimit(Resource::Nofile, limit).unwrap();
        let mut front = UnixStream::from(front);
        front.set_read_timeout(Some(PATIENCE)).unwrap();
        let get_features = [1_u32, 1, 0].map(u32::to_ne_bytes).concat();
        front.write_all(&get_features).unwrap();
        front.read_exact(&mut [0; 20]).unwrap();
        drop(front);
        let refusals = wait(|event| matches!(event, BackendEvent::Disconnected { .. }));
        let cause = "front ends cannot be accepted: Too many open files (os error 24)".into();
        assert_eq!(
            refusals,
            vec![BackendEvent::Refused { cause }; round],
            "each time once"
        );
    }
    commands.send(Command::End).unwrap();
    thread.join().unwrap().unwrap();
}
