//! A client that sends what a test wants it to, byte by byte, and a server in a thread.

use std::io::{IoSlice, Read as _, Write as _};
use std::mem::MaybeUninit;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use dmaspace_vfio_user::{ClientLimits, ClientMemory, Irqs, Server, SessionReport};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

use crate::engine::{DESCRIPTION, Engine};

pub(crate) const PAGE: u64 = 4096;
pub(crate) const VERSION: u16 = 1;
pub(crate) const DMA_MAP: u16 = 2;
pub(crate) const DMA_UNMAP: u16 = 3;
pub(crate) const GET_INFO: u16 = 4;
pub(crate) const GET_REGION_INFO: u16 = 5;
pub(crate) const GET_IRQ_INFO: u16 = 7;
pub(crate) const SET_IRQS: u16 = 8;
pub(crate) const REGION_READ: u16 = 9;
pub(crate) const REGION_WRITE: u16 = 10;
pub(crate) const RESET: u16 = 13;
pub(crate) const WRITE_MULTI: u16 = 15;
pub(crate) const FEATURE: u16 = 16;
pub(crate) const MIG_READ: u16 = 17;
pub(crate) const MIG_WRITE: u16 = 18;

pub(crate) const EBUSY: u32 = 16;
pub(crate) const EEXIST: u32 = 17;
pub(crate) const EINVAL: u32 = 22;
pub(crate) const ENOSPC: u32 = 28;
pub(crate) const ENOTSUP: u32 = 95;

/// A server, its device, and a thread that serves one client after the other.
pub(crate) struct Bench {
    pub(crate) memory: Arc<ClientMemory>,
    pub(crate) irqs: Arc<Irqs>,
    pub(crate) engine: Arc<Engine>,
    path: PathBuf,
    thread: JoinHandle<Vec<SessionReport>>,
}

static BENCHES: AtomicU32 = AtomicU32::new(0);

impl Bench {
    /// For `clients` clients.
    pub(crate) fn new(clients: usize, limits: ClientLimits) -> Self {
        hostmem::ShrinkWatch::install().unwrap();
        let number = BENCHES.fetch_add(1, Ordering::Relaxed);
        let name = format!("dmaspace-vfio-user.{}.{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let listener = UnixListener::bind(&path).unwrap();
        let server = Server::new(listener, DESCRIPTION, limits).unwrap();
        let (memory, irqs) = (server.memory().clone(), server.irqs().clone());
        let engine = Arc::new(Engine::new(memory.clone(), irqs.clone()));
        let device = engine.clone();
        let thread = thread::spawn(move || {
            (0..clients)
                .map(|_| server.serve(&*device).unwrap())
                .collect()
        });
        Self {
            memory,
            irqs,
            engine,
            path,
            thread,
        }
    }

    pub(crate) fn path(&self) -> &std::path::Path {
        &self.path
    }

    /// A connection that has said nothing yet.
    pub(crate) fn connect(&self) -> Client {
        let stream = UnixStream::connect(&self.path).unwrap();
        // A server that hangs is a test that fails.
        stream
            .set_read_timeout(Some(Duration::from_secs(20)))
            .unwrap();
        Client { stream, id: 7 }
    }

    /// A client that has agreed on the version.
    pub(crate) fn client(&self) -> Client {
        let mut client = self.connect();
        client.agree();
        client
    }

    /// After all clients have left: what each of them did, and nothing of any of them is there.
    pub(crate) fn end(self) -> Vec<SessionReport> {
        let served = self.thread.join().unwrap();
        let left = self.memory.counts();
        assert_eq!((left.maps, left.bytes, left.files), (0, 0, 0));
        assert_eq!(self.irqs.configured(), 0);
        std::fs::remove_file(&self.path).unwrap();
        served
    }
}

/// A client; without limits of its own.
pub(crate) struct Client {
    pub(crate) stream: UnixStream,
    id: u16,
}

/// A reply's error, 0 if there is none, and its payload.
pub(crate) type Reply = (u32, Vec<u8>);

impl Client {
    pub(crate) fn agree(&mut self) {
        let (error, payload) = self.ask(VERSION, &[0; 4], &[]);
        assert_eq!(error, 0);
        assert_eq!(payload[..4], [0; 4]);
        assert_eq!(payload.last(), Some(&0));
    }

    /// Sends any bytes with any descriptors.
    pub(crate) fn send(&mut self, bytes: &[u8], fds: &[BorrowedFd<'_>]) {
        let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
        let mut ancillary = SendAncillaryBuffer::new(&mut room);
        if !fds.is_empty() {
            assert!(ancillary.push(SendAncillaryMessage::ScmRights(fds)));
        }
        let iov = [IoSlice::new(bytes)];
        let sent = sendmsg(&self.stream, &iov, &mut ancillary, SendFlags::NOSIGNAL);
        let sent = sent.unwrap();
        self.stream.write_all(&bytes[sent..]).unwrap();
    }

    /// A message with the header that belongs to it.
    pub(crate) fn message(&mut self, command: u16, flags: u32, payload: &[u8]) -> Vec<u8> {
        self.id = self.id.wrapping_add(1);
        header(self.id, command, 16 + payload.len() as u32, flags)
            .into_iter()
            .chain(payload.iter().copied())
            .collect()
    }

    /// Sends a command, and has its reply, which must be one to it.
    pub(crate) fn ask(&mut self, command: u16, payload: &[u8], fds: &[BorrowedFd<'_>]) -> Reply {
        let message = self.message(command, 0, payload);
        self.send(&message, fds);
        let (id, replied, reply) = self.reply();
        assert_eq!((id, replied), (self.id, command));
        reply
    }

    /// The next reply: message ID, command, error and payload.
    pub(crate) fn reply(&mut self) -> (u16, u16, Reply) {
        let mut header = [0; 16];
        self.stream.read_exact(&mut header).unwrap();
        let word = |at: usize| u32::from_ne_bytes(header[at..at + 4].try_into().unwrap());
        let half = |at: usize| u16::from_ne_bytes(header[at..at + 2].try_into().unwrap());
        let (size, flags, error) = (word(4), word(8), word(12));
        assert_eq!(flags & 0xf, 1, "no reply");
        assert_eq!(flags & 0x20 != 0, error != 0);
        let mut payload = vec![0; size as usize - 16];
        self.stream.read_exact(&mut payload).unwrap();
        if error != 0 {
            assert!(payload.is_empty(), "an error with a payload");
        }
        (half(0), half(2), (error, payload))
    }

    /// True if the server has closed the connection.
    pub(crate) fn is_closed(&mut self) -> bool {
        matches!(self.stream.read(&mut [0; 1]), Ok(0) | Err(_))
    }

    pub(crate) fn map(&mut self, file: &OwnedFd, offset: u64, iova: u64, size: u64) -> u32 {
        self.map_for(3, file, offset, iova, size)
    }

    pub(crate) fn map_for(
        &mut self,
        flags: u32,
        file: &OwnedFd,
        offset: u64,
        iova: u64,
        size: u64,
    ) -> u32 {
        let payload = map(flags, offset, iova, size);
        self.ask(DMA_MAP, &payload, &[file.as_fd()]).0
    }

    pub(crate) fn unmap(&mut self, iova: u64, size: u64) -> u32 {
        let payload = unmap(0, iova, size);
        let (error, reply) = self.ask(DMA_UNMAP, &payload, &[]);
        if error == 0 {
            assert_eq!(reply, payload);
        }
        error
    }

    /// Has the engine do DMA: true if it has arrived.
    pub(crate) fn dma(&mut self, command: u64, iova: u64, len: u64) -> bool {
        for (at, value) in [(0, iova), (8, len), (16, command)] {
            assert_eq!(self.write(0, at, &value.to_le_bytes()), 0);
        }
        let status = self.read(0, 24, 8).unwrap();
        u64::from_le_bytes(status.try_into().unwrap()) == 0
    }

    pub(crate) fn read(&mut self, region: u32, offset: u64, count: u32) -> Result<Vec<u8>, u32> {
        let payload = access(region, offset, count);
        let (error, reply) = self.ask(REGION_READ, &payload, &[]);
        match error {
            0 => {
                assert_eq!(reply[..16], payload);
                Ok(reply[16..].to_vec())
            }
            error => Err(error),
        }
    }

    pub(crate) fn write(&mut self, region: u32, offset: u64, bytes: &[u8]) -> u32 {
        let mut payload = access(region, offset, bytes.len() as u32);
        payload.extend_from_slice(bytes);
        self.ask(REGION_WRITE, &payload, &[]).0
    }
}

pub(crate) fn header(id: u16, command: u16, size: u32, flags: u32) -> Vec<u8> {
    let mut bytes = Vec::new();
    bytes.extend_from_slice(&id.to_ne_bytes());
    bytes.extend_from_slice(&command.to_ne_bytes());
    for word in [size, flags, 0] {
        bytes.extend_from_slice(&word.to_ne_bytes());
    }
    bytes
}

pub(crate) fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

pub(crate) fn longs(longs: &[u64]) -> Vec<u8> {
    longs.iter().flat_map(|long| long.to_ne_bytes()).collect()
}

pub(crate) fn map(flags: u32, offset: u64, iova: u64, size: u64) -> Vec<u8> {
    [words(&[32, flags]), longs(&[offset, iova, size])].concat()
}

pub(crate) fn unmap(flags: u32, iova: u64, size: u64) -> Vec<u8> {
    [words(&[24, flags]), longs(&[iova, size])].concat()
}

pub(crate) fn access(region: u32, offset: u64, count: u32) -> Vec<u8> {
    [longs(&[offset]), words(&[region, count])].concat()
}

/// A memory file that cannot become shorter.
pub(crate) fn memory_file(bytes: u64) -> OwnedFd {
    let file = unsealed_file(bytes);
    fcntl_add_seals(&file, SealFlags::SHRINK).unwrap();
    file
}

pub(crate) fn unsealed_file(bytes: u64) -> OwnedFd {
    let flags = MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC;
    let file = memfd_create("client", flags).unwrap();
    ftruncate(&file, bytes).unwrap();
    file
}

/// `bytes` of a file from `offset` on.
pub(crate) fn contents(file: &OwnedFd, offset: u64, bytes: usize) -> Vec<u8> {
    let mut found = vec![0; bytes];
    assert_eq!(rustix::io::pread(file, &mut found, offset).unwrap(), bytes);
    found
}

/// A socket whose last close waits until all that was sent is taken, which nothing does while the other end is there.
pub(crate) fn lingering() -> (OwnedFd, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (other, _) = listener.accept().unwrap();
    socket.set_nonblocking(true).unwrap();
    while socket.write(&[0; 1 << 16]).is_ok() {}
    let patience = Duration::from_secs(1 << 20);
    rustix::net::sockopt::set_socket_linger(&socket, Some(patience)).unwrap();
    (socket.into(), other)
}

pub(crate) fn put(file: &OwnedFd, offset: u64, bytes: &[u8]) {
    let put = rustix::io::pwrite(file, bytes, offset).unwrap();
    assert_eq!(put, bytes.len());
}
