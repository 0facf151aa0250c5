//! A server without a descriptor left. The limit is the process's, so this is the only test here.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use dmaspace_vfio_user::{ClientLimits, Description, DeviceModel, Server};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, connect, socket};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::time::{ClockId, clock_gettime};

const PATIENCE: Duration = Duration::from_secs(300);

/// A device that notes why clients were not accepted.
#[derive(Default)]
struct Noting(Mutex<Vec<Option<i32>>>);

impl Noting {
    fn wait(&self, reports: usize) {
        let deadline = Instant::now() + PATIENCE;
        while self.0.lock().unwrap().len() < reports {
            assert!(Instant::now() < deadline, "nothing is reported");
            thread::sleep(Duration::from_millis(1));
        }
    }
}

impl DeviceModel for Noting {
    fn read(&self, _region: usize, _offset: u64, _bytes: &mut [u8]) -> io::Result<()> {
        Ok(())
    }

    fn write(&self, _region: usize, _offset: u64, _bytes: &[u8]) -> io::Result<()> {
        Ok(())
    }

    fn reset(&self) {}

    fn not_accepted(&self, error: &io::Error) {
        self.0.lock().unwrap().push(error.raw_os_error());
    }
}

/// A socket that takes no more descriptors when it connects.
fn made() -> OwnedFd {
    socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap()
}

fn connected(socket: OwnedFd, path: &Path) -> UnixStream {
    connect(&socket, &SocketAddrUnix::new(path).unwrap()).unwrap();
    let stream = UnixStream::from(socket);
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream
}

/// Agrees on a version.
fn is_served(mut client: &UnixStream) {
    let words = [1_u32 << 16 | 1, 20, 0, 0, 0];
    let message: Vec<u8> = words.into_iter().flat_map(u32::to_ne_bytes).collect();
    client.write_all(&message).unwrap();
    let mut header = [0; 16];
    client.read_exact(&mut header).unwrap();
    assert_eq!(
        header[8..],
        [1, 0, 0, 0, 0, 0, 0, 0],
        "a reply, and no error"
    );
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
fn without_descriptors_clients_wait_and_no_processor_is_busy() {
    let directory = std::env::temp_dir();
    let path = directory.join(format!("dmaspace-descriptors.{}", std::process::id()));
    let listener = UnixListener::bind(&path).unwrap();
    let server = Server::new(listener, Description::default(), ClientLimits::default()).unwrap();
    let device = Arc::new(Noting::default());
    let idle = open();
    let serving = device.clone();
    let serving = thread::spawn(move || [0; 2].map(|_| server.serve(&*serving).unwrap()));
    let first = connected(made(), &path);
    is_served(&first);

    // Another one cannot be refused while this one says nothing.
    let second = made();
    let limit = take_all();
    let mut second = connected(second, &path);
    device.wait(1);
    others_wait();
    setrlimit(Resource::Nofile, limit).unwrap();
    let end = second.read(&mut [0; 1]).unwrap();
    assert_eq!(end, 0, "refused, as it should be");

    // The next one cannot be served.
    drop((first, second));
    let deadline = Instant::now() + PATIENCE;
    while open() > idle {
        assert!(Instant::now() < deadline, "descriptors are left");
        thread::sleep(Duration::from_millis(1));
    }
    let third = made();
    let limit = take_all();
    let third = connected(third, &path);
    device.wait(2);
    others_wait();
    setrlimit(Resource::Nofile, limit).unwrap();
    is_served(&third);
    drop(third);
    let served = serving.join().unwrap();
    assert_eq!((served[0].others, served[1].others), (1, 0));
    std::fs::remove_file(&path).unwrap();
    let reports = device.0.lock().unwrap();
    let expected = Some(Errno::MFILE.raw_os_error());
    assert_eq!(*reports, [expected; 2], "each time once");
}
