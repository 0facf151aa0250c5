//! One front end, from its connection to its end, on `vhost-user-backend`.
//!
//! A [`Link`] lives as long as the front end is connected, and leaves the back end as it was: the next
//! front end gets a link of its own, so nothing of the protocol's state is left over. Three threads
//! belong to it: one takes the protocol's requests and another their answers through [`super::channel`],
//! and `vhost-user-backend` handles the requests in a third. A fourth serves the queues; only this one calls [`Backend::kicked`] and [`Backend::woken`].
//! None of them waits for a file of the front end, so [`Link::close`] need not either.
//!
//! The daemon of `vhost-user-backend` accepts its connection itself, from a listening socket. It gets one
//! in a directory with access for this user only, which is removed once it is connected.

use std::io;
use std::net::Shutdown;
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};

use hostmem::{PeerEvent, PeerFile};
use rustix::net::shutdown;
use vhost::vhost_user::Listener;
use vhost::vhost_user::message::{VhostUserProtocolFeatures, VhostUserVirtioFeatures};
use vhost_user_backend::{VhostUserBackend, VhostUserDaemon};
use vm_memory::{GuestAddressSpace as _, GuestMemoryAtomic, GuestMemoryMmap};
use vmm_sys_util::epoll::EventSet;
use vmm_sys_util::event::{
    EventConsumer, EventFlag, EventNotifier, new_event_consumer_and_notifier,
};

use super::channel::{self, Channel};
use super::vring::Vring;
use super::watched::{MemoryLost, Watched};

/// The longest queue that is served, in descriptors.
pub const MOST_QUEUE_SIZE: u16 = 1024;

/// The memory of a guest; another one when the front end says so.
pub type BackendMemory = GuestMemoryAtomic<GuestMemoryMmap>;

/// A device, as far as vhost-user asks. It outlives its front ends.
pub trait Backend: Send + Sync + 'static {
    /// The queues that it can have.
    const QUEUES: u16;

    /// The device's features, without those of vhost-user.
    fn features(&self) -> u64;

    /// The driver accepted these of them.
    fn negotiated(&self, features: u64);

    /// `size` bytes of the configuration space from `offset` on; what is not there is 0.
    fn read_config(&self, offset: u32, size: u32) -> Vec<u8>;

    /// The driver writes `bytes` at `offset`.
    fn write_config(&self, offset: u32, bytes: &[u8]);

    /// The guest has this memory from now on: what `memory` holds now. A later change of `memory` is reported before
    /// it may be used, as only then it is watched for becoming shorter.
    ///
    /// # Errors
    ///
    /// The memory cannot be used; the error goes to the front end.
    fn memory(&self, memory: &BackendMemory) -> io::Result<()>;

    /// The driver has put something into queue number `queue`.
    fn kicked(&self, queue: u16, vrings: &[Vring]);

    /// [`Link::wake`] was called.
    fn woken(&self, vrings: &[Vring]);

    /// The front end stopped queue number `queue`.
    fn stopped(&self, queue: u16);

    /// The driver started anew.
    fn reset(&self);
}

/// Number of the event that wakes the thread of the queues besides kicks. The numbers up to that of the queues are
/// taken.
const fn wake<B: Backend>() -> u16 {
    B::QUEUES + 1
}

/// Failure to open a link.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LinkError {
    /// Sockets, events or threads cannot be had.
    #[error("cannot serve the front end")]
    System(#[from] io::Error),
    /// `vhost-user-backend` does not start.
    #[error("cannot serve the front end: {0}")]
    Daemon(String),
}

/// A connected front end.
pub struct Link<B: Backend> {
    daemon: Option<VhostUserDaemon<Arc<Served<B>>>>,
    ended: Arc<AtomicBool>,
    wake: EventNotifier,
    /// Kept open for as long as the thread of the queues may look at it.
    woken: Arc<EventConsumer>,
    channel: Arc<Channel>,
    watched: Arc<Watched>,
    /// Closed last, by another thread: what was not received of it may block.
    front: PeerFile,
    relays: Vec<JoinHandle<io::Result<()>>>,
}

impl<B: Backend> Link<B> {
    /// Serves the front end at the other end of `front`.
    ///
    /// # Errors
    ///
    /// [`LinkError`]; nothing of it is left then.
    pub fn new(front: UnixStream, backend: Arc<B>) -> Result<Self, LinkError> {
        let front = PeerFile::from(front);
        PeerEvent::supported()?;
        let flags = EventFlag::NONBLOCK | EventFlag::CLOEXEC;
        let (woken, wake) = new_event_consumer_and_notifier(flags)?;
        let (woken, ended) = (Arc::new(woken), Arc::new(AtomicBool::new(false)));
        let watched = Arc::new(Watched::default());
        let served = Served {
            backend,
            ended: ended.clone(),
            woken: woken.clone(),
            watched: watched.clone(),
        };
        let failed = |error: vhost_user_backend::Error| LinkError::Daemon(error.to_string());
        let memory = GuestMemoryAtomic::new(GuestMemoryMmap::new());
        let daemon = VhostUserDaemon::new("vhost-user".into(), Arc::new(served), memory);
        let mut link = Self {
            daemon: Some(daemon.map_err(failed)?),
            ended,
            wake,
            woken,
            channel: Arc::default(),
            watched,
            front,
            relays: Vec::new(),
        };
        link.connect()?;
        Ok(link)
    }

    fn connect(&mut self) -> Result<(), LinkError> {
        let failed = |error: vhost_user_backend::Error| LinkError::Daemon(error.to_string());
        let Some(daemon) = &mut self.daemon else {
            return Ok(());
        };
        for handler in daemon.get_epoll_handlers() {
            handler.register_listener(self.woken.as_raw_fd(), EventSet::IN, wake::<B>().into())?;
        }
        let directory = tempfile::tempdir()?;
        let path = directory.path().join("socket");
        let listener = UnixListener::bind(&path)?;
        let inner = UnixStream::connect(&path)?;
        // It waits at the listener and needs no name any more. If this process is killed before this point, a directory
        // is left behind.
        directory.close()?;
        daemon
            .start(&mut Listener::from(listener))
            .map_err(failed)?;
        // The other side of either socket is shut down when one thread comes to its end.
        let front = || self.front.as_fd().try_clone_to_owned();
        let pair = || Ok::<_, io::Error>((UnixStream::from(front()?), inner.try_clone()?));
        let over = |front: &UnixStream, inner: &UnixStream| {
            let _ = front.shutdown(Shutdown::Both);
            let _ = inner.shutdown(Shutdown::Both);
        };
        let (front, back) = pair()?;
        let channel = self.channel.clone();
        let requests = move || {
            let done = channel::requests(&front, &back, &channel);
            over(&front, &back);
            done
        };
        self.relays.push(thread::Builder::new().spawn(requests)?);
        let (front, back) = pair()?;
        let channel = self.channel.clone();
        let answers = move || {
            let done = channel::answers(&back, &front, &channel);
            over(&front, &back);
            done
        };
        self.relays.push(thread::Builder::new().spawn(answers)?);
        Ok(())
    }

    /// True when the front end has gone, or has taken memory away that it shares.
    pub fn ended(&self) -> bool {
        self.relays.iter().any(JoinHandle::is_finished) || self.lost().is_some()
    }

    /// Part of the shared memory that the front end has taken away, if an access has found it missing, in a program
    /// that outlives it (`hostmem::ShrinkWatch::install`). The back end receives no calls any more then, and the link
    /// is to be closed.
    pub fn lost(&self) -> Option<MemoryLost> {
        self.watched.lost()
    }

    /// Has the thread of the queues call [`Backend::woken`].
    pub fn wake(&self) {
        // A counter that is full wakes it, too.
        let _ = self.wake.notify();
    }

    /// Tells the front end that the configuration space changed. False when it has given no channel
    /// to tell it on.
    ///
    /// # Errors
    ///
    /// When it does not take the message.
    pub fn config_changed(&self) -> io::Result<bool> {
        self.channel.config_changed()
    }

    /// Ends the connection, if it has not ended, and all that belongs to it. What was wrong with it,
    /// if anything was.
    pub fn close(mut self) -> Option<String> {
        self.end()
    }

    fn end(&mut self) -> Option<String> {
        let daemon = self.daemon.take()?;
        let _ = shutdown(&self.front, rustix::net::Shutdown::Both);
        let mut wrong = self.lost().map(|lost| lost.to_string());
        for relay in self.relays.drain(..) {
            if let Ok(Err(error)) = relay.join() {
                wrong = wrong.or_else(|| Some(error.to_string()));
            }
        }
        let mut daemon = daemon;
        daemon.request_shutdown();
        // Also what a front end did that the protocol does not allow ends here. That it went, in the
        // middle of a message or not, is no fault.
        let _ = daemon.wait();
        self.ended.store(true, Ordering::Release);
        self.wake();
        // Waits for the thread of the queues.
        drop(daemon);
        wrong
    }
}

impl<B: Backend> Drop for Link<B> {
    fn drop(&mut self) {
        let _ = self.end();
    }
}

/// The back end as `vhost-user-backend` sees it.
struct Served<B> {
    backend: Arc<B>,
    ended: Arc<AtomicBool>,
    woken: Arc<EventConsumer>,
    watched: Arc<Watched>,
}

impl<B: Backend> VhostUserBackend for Served<B> {
    type Bitmap = ();
    type Vring = Vring;

    fn num_queues(&self) -> usize {
        B::QUEUES.into()
    }

    fn max_queue_size(&self) -> usize {
        MOST_QUEUE_SIZE.into()
    }

    fn features(&self) -> u64 {
        self.backend.features() | VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits()
    }

    fn acked_features(&self, features: u64) {
        let own = VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits();
        self.backend.negotiated(features & !own);
    }

    fn protocol_features(&self) -> VhostUserProtocolFeatures {
        VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::REPLY_ACK
            | VhostUserProtocolFeatures::BACKEND_REQ
            | VhostUserProtocolFeatures::CONFIG
            | VhostUserProtocolFeatures::RESET_DEVICE
    }

    fn reset_device(&self) {
        self.backend.reset();
    }

    fn set_event_idx(&self, _enabled: bool) {}

    fn get_config(&self, offset: u32, size: u32) -> Vec<u8> {
        self.backend.read_config(offset, size)
    }

    fn set_config(&self, offset: u32, bytes: &[u8]) -> io::Result<()> {
        self.backend.write_config(offset, bytes);
        Ok(())
    }

    fn update_memory(&self, memory: BackendMemory) -> io::Result<()> {
        let latest = memory.memory();
        self.watched.add(&latest)?;
        self.backend.memory(&memory)?;
        self.watched.keep_latest(&latest);
        Ok(())
    }

    fn stop_vring(&self, queue: u32) -> io::Result<()> {
        if let Ok(queue) = u16::try_from(queue) {
            self.backend.stopped(queue);
        }
        Ok(())
    }

    fn handle_event(
        &self,
        event: u16,
        _set: EventSet,
        vrings: &[Vring],
        _thread: usize,
    ) -> io::Result<()> {
        if event != wake::<B>() {
            if self.watched.lost().is_none() {
                self.backend.kicked(event, vrings);
            }
            return Ok(());
        }
        if self.ended.load(Ordering::Acquire) {
            // An error is how a thread of `vhost-user-backend` ends without an exit event, whose file
            // descriptor would stay open.
            return Err(io::ErrorKind::ConnectionAborted.into());
        }
        let _ = self.woken.consume();
        if self.watched.lost().is_none() {
            self.backend.woken(vrings);
        }
        Ok(())
    }
}
