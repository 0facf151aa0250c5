//! A client that says anything, with any files.
//!
//! One server serves all inputs, one after the other. When a client has left, nothing of it is there.

use std::io::{self, IoSlice, Read as _, Write as _};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread;
use std::time::Duration;

use dmaspace_vfio_user::{ClientLimits, ClientMemory, Description, DeviceModel, Server};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use vm_memory::{Bytes as _, GuestAddress};

use super::Bytes;

/// Does DMA at the address that is written to it.
struct Reader(Arc<ClientMemory>);

impl DeviceModel for Reader {
    fn read(&self, _region: usize, _offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        bytes.fill(0);
        Ok(())
    }

    fn write(&self, _region: usize, _offset: u64, bytes: &[u8]) -> io::Result<()> {
        let mut at = [0; 8];
        at.iter_mut().zip(bytes).for_each(|(to, from)| *to = *from);
        let at = GuestAddress(u64::from_le_bytes(at));
        let view = self.0.view();
        let _ = view.write_slice(&[1; 100], at);
        let _ = view.read_slice(&mut [0; 5000], at);
        Ok(())
    }

    fn reset(&self) {}
}

/// Server for all inputs.
struct Bench {
    socket: PathBuf,
    memory: Arc<ClientMemory>,
    left: Mutex<Receiver<u64>>,
    files: [OwnedFd; 4],
}

fn bench() -> &'static Bench {
    static BENCH: OnceLock<Bench> = OnceLock::new();
    BENCH.get_or_init(|| {
        hostmem::ShrinkWatch::install().expect("signals can be handled");
        let name = format!("dmaspace-vfio-user.fuzz.{}", std::process::id());
        let socket = std::env::temp_dir().join(name);
        let listener = UnixListener::bind(&socket).expect("a socket can be bound");
        let mut description = Description::default();
        description.regions[0] = 1 << 16;
        description.irqs[2] = 3;
        let limits = ClientLimits {
            tables: 256,
            ..ClientLimits::default()
        };
        let server = Server::new(listener, description, limits).expect("there is a server");
        let memory = server.memory().clone();
        let device = Reader(memory.clone());
        let (sender, left) = mpsc::channel();
        thread::spawn(move || {
            while let Ok(served) = server.serve(&device) {
                if sender.send(served.requests).is_err() {
                    break;
                }
            }
        });
        let memfd = |bytes| {
            let file = memfd_create("fuzz", MemfdFlags::ALLOW_SEALING).expect("a memory file");
            ftruncate(&file, bytes).expect("it has a length");
            file
        };
        let sealed = memfd(1 << 20);
        fcntl_add_seals(&sealed, SealFlags::SHRINK).expect("it is sealed");
        let event = eventfd(0, EventfdFlags::CLOEXEC).expect("an event");
        let files = [sealed, memfd(1 << 16), event, memfd(100)];
        Bench {
            socket,
            memory,
            left: Mutex::new(left),
            files,
        }
    })
}

fn send(stream: &mut UnixStream, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
    let mut ancillary = SendAncillaryBuffer::new(&mut room);
    if !fds.is_empty() {
        ancillary.push(SendAncillaryMessage::ScmRights(fds));
    }
    let iov = [IoSlice::new(bytes)];
    let sent = sendmsg(&*stream, &iov, &mut ancillary, SendFlags::NOSIGNAL)?;
    stream.write_all(bytes.get(sent..).unwrap_or_default())
}

/// The first byte says whether the version comes first. Each message is a command, flags, files and a payload; one in
/// sixteen has another size than it says.
pub fn messages(data: &[u8]) {
    let bench = bench();
    let mut input = Bytes(data);
    let left = bench.left.lock().expect("no input has failed");
    let mut stream = UnixStream::connect(&bench.socket).expect("the server listens");
    let mut replies = stream.try_clone().expect("a descriptor");
    // Unread replies would delay the server.
    let reader = thread::spawn(move || {
        let mut all = Vec::new();
        let _ = replies.read_to_end(&mut all);
    });
    let mut message =
        |command: u16, flags: u32, size: u32, payload: &[u8], fds: &[BorrowedFd<'_>]| {
            let mut bytes = Vec::new();
            bytes.extend_from_slice(&[0; 2]);
            bytes.extend_from_slice(&command.to_ne_bytes());
            for word in [size, flags, 0] {
                bytes.extend_from_slice(&word.to_ne_bytes());
            }
            bytes.extend_from_slice(payload);
            // The server may have ended the connection.
            send(&mut stream, &bytes, fds).is_ok()
        };
    let mut goes_on = input.flag() || message(1, 0, 20, &[0; 4], &[]);
    while goes_on && !input.is_empty() {
        let (command, how, files) = (input.u8() % 20, input.u8(), input.u8());
        let mut payload: Vec<u8> = Vec::new();
        for _ in 0..input.u8() % 12 {
            match input.flag() {
                true => payload
                    .extend_from_slice(&u64::from(input.u16()).wrapping_shl(12).to_ne_bytes()),
                false => payload.extend_from_slice(&u32::from(input.u8()).to_ne_bytes()),
            }
        }
        let mut size = 16 + payload.len() as u32;
        if how >> 4 == 0xf {
            size = u32::from(input.u16());
        }
        let fds = bench.files.iter().enumerate();
        let fds = fds.filter(|(nth, _)| files >> nth & 1 == 1);
        let fds: Vec<_> = fds.map(|(_, file)| file.as_fd()).collect();
        let flags = u32::from(how & 0xf) | u32::from(how >> 4 & 1) << 4;
        let flags = if how & 8 == 0 { flags & 0x10 } else { flags };
        goes_on = message(command.into(), flags, size, &payload, &fds);
    }
    let _ = stream.shutdown(Shutdown::Write);
    let served = left.recv_timeout(Duration::from_secs(60));
    served.expect("the server goes on");
    let _ = reader.join();
    let counts = bench.memory.counts();
    assert_eq!((counts.maps, counts.files), (0, 0), "something is left");
}
