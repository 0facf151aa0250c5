//! A queue whose events are the front end's.
//!
//! The events of `vhost-user-backend` block where the front end wants them to: it has the same open file, whose flag says
//! whether a write to a full counter waits, and it can read a kick before this side does. A back end that is blocked cannot
//! be closed, and the next front end is not served. So a [`Vring`] is that crate's, but reads kicks and raises calls as
//! [`PeerEvent`]s, which never wait. The crate keeps kicks only to wait for them (`epoll`), and has no calls.

use std::fs::File;
use std::io;
use std::ops::{Deref, DerefMut};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hostmem::{PeerEvent, PeerFile};
use rustix::io::Errno;
use rustix::net::{SendFlags, send};
use vhost_user_backend::{VringMutex, VringState, VringStateGuard, VringStateMutGuard, VringT};
use virtio_queue::Error;

use super::channel::is_local_stream;
use super::link::BackendMemory;

/// A queue. A look at it ([`get_ref`](VringT::get_ref), [`get_mut`](VringT::get_mut)) holds its lock.
#[derive(Clone)]
pub struct Vring {
    state: VringMutex<BackendMemory>,
    events: Arc<Mutex<Events>>,
}

/// The event that the front end has given last; `None` where it was no event.
#[derive(Default)]
struct Events {
    kick: Option<PeerEvent>,
    call: Option<Call>,
}

/// The file by which the driver is called.
enum Call {
    Event(PeerEvent),
    /// A local socket, which is sent what an event would be written.
    Socket(PeerFile),
}

impl Call {
    fn of(file: File) -> Option<Self> {
        match PeerFile::from(file).into_event() {
            Ok(event) => Some(Self::Event(event)),
            Err(file) => is_local_stream(&file).then_some(Self::Socket(file)),
        }
    }

    fn raise(&self) -> io::Result<()> {
        let socket = match self {
            Self::Event(event) => return event.raise(),
            Self::Socket(socket) => socket,
        };
        // The message's flag, and not the socket's, which the front end has, too, keeps this from waiting for room. A socket
        // that is full has something to be read already, and a reader that has gone needs nothing.
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        match send(socket, &1_u64.to_ne_bytes(), flags) {
            Ok(_) | Err(Errno::AGAIN | Errno::PIPE | Errno::CONNRESET) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

/// A queue that is looked at.
pub struct VringGuard<'a> {
    state: MutexGuard<'a, VringState<BackendMemory>>,
    events: &'a Mutex<Events>,
}

fn lock(events: &Mutex<Events>) -> MutexGuard<'_, Events> {
    events.lock().unwrap_or_else(PoisonError::into_inner)
}

fn signal(events: &Mutex<Events>) -> io::Result<()> {
    lock(events).call.as_ref().map_or(Ok(()), Call::raise)
}

impl VringGuard<'_> {
    /// Tells the driver that buffers were used, and does not wait for its front end.
    ///
    /// # Errors
    ///
    /// See [`PeerEvent::raise`].
    pub fn signal_used_queue(&self) -> io::Result<()> {
        signal(self.events)
    }
}

impl Deref for VringGuard<'_> {
    type Target = VringState<BackendMemory>;

    fn deref(&self) -> &Self::Target {
        &self.state
    }
}

impl DerefMut for VringGuard<'_> {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.state
    }
}

impl<'a> VringStateGuard<'a, BackendMemory> for Vring {
    type G = VringGuard<'a>;
}

impl<'a> VringStateMutGuard<'a, BackendMemory> for Vring {
    type G = VringGuard<'a>;
}

fn event(file: impl Into<OwnedFd>) -> Option<PeerEvent> {
    PeerFile::from(file).into_event().ok()
}

impl VringT<BackendMemory> for Vring {
    fn new(memory: BackendMemory, most: u16) -> Result<Self, Error> {
        Ok(Self {
            state: VringMutex::new(memory, most)?,
            events: Arc::default(),
        })
    }

    fn get_ref(&self) -> VringGuard<'_> {
        self.get_mut()
    }

    fn get_mut(&self) -> VringGuard<'_> {
        VringGuard {
            state: self.state.get_mut(),
            events: &self.events,
        }
    }

    fn signal_used_queue(&self) -> io::Result<()> {
        signal(&self.events)
    }

    /// True if the queue is enabled. A kick that was read already is none, and nothing goes wrong.
    fn read_kick(&self) -> io::Result<bool> {
        if let Some(kick) = &lock(&self.events).kick {
            kick.take()?;
        }
        Ok(self.get_ref().is_enabled())
    }

    fn set_kick(&self, file: Option<File>) {
        // Without a descriptor left the queue is not served, as if the front end had given no event.
        let own = file.as_ref().and_then(|file| file.try_clone().ok());
        let kick = own.and_then(event);
        self.state.set_kick(file.filter(|_| kick.is_some()));
        lock(&self.events).kick = kick;
    }

    fn set_call(&self, file: Option<File>) {
        lock(&self.events).call = file.and_then(Call::of);
    }

    /// Unused: errors of a queue are not reported.
    fn set_err(&self, file: Option<File>) {
        drop(file.map(PeerFile::from));
    }

    fn add_used(&self, index: u16, len: u32) -> Result<(), Error> {
        self.state.add_used(index, len)
    }

    fn enable_notification(&self) -> Result<bool, Error> {
        self.state.enable_notification()
    }

    fn disable_notification(&self) -> Result<(), Error> {
        self.state.disable_notification()
    }

    fn needs_notification(&self) -> Result<bool, Error> {
        self.state.needs_notification()
    }

    fn set_enabled(&self, enabled: bool) {
        self.state.set_enabled(enabled);
    }

    fn set_queue_info(&self, descriptors: u64, available: u64, used: u64) -> Result<(), Error> {
        self.state.set_queue_info(descriptors, available, used)
    }

    fn queue_next_avail(&self) -> u16 {
        self.state.queue_next_avail()
    }

    fn set_queue_next_avail(&self, base: u16) {
        self.state.set_queue_next_avail(base);
    }

    fn set_queue_next_used(&self, index: u16) {
        self.state.set_queue_next_used(index);
    }

    fn queue_used_idx(&self) -> Result<u16, Error> {
        self.state.queue_used_idx()
    }

    fn set_queue_size(&self, size: u16) {
        self.state.set_queue_size(size);
    }

    fn set_queue_event_idx(&self, enabled: bool) {
        self.state.set_queue_event_idx(enabled);
    }

    fn set_queue_ready(&self, ready: bool) {
        self.state.set_queue_ready(ready);
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};

    use rustix::event::{EventfdFlags, eventfd};
    use rustix::io::ioctl_fionbio;
    use vm_memory::{GuestAddress, GuestMemoryMmap};

    use super::*;

    /// An event that blocks, as one of this side and one of the front end.
    fn event() -> (File, File) {
        let event = File::from(eventfd(0, EventfdFlags::CLOEXEC).unwrap());
        (event.try_clone().unwrap(), event)
    }

    fn value(mut event: &File) -> u64 {
        let mut bytes = [0; 8];
        event.read_exact(&mut bytes).unwrap();
        u64::from_ne_bytes(bytes)
    }

    fn vring() -> Vring {
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 0x1000)]).unwrap();
        Vring::new(BackendMemory::new(memory), 16).unwrap()
    }

    #[test]
    fn a_call_is_raised_by_each_way_and_never_waits() {
        let vring = vring();
        let all = || {
            vring.signal_used_queue().unwrap();
            vring.get_ref().signal_used_queue().unwrap();
            vring.get_mut().signal_used_queue().unwrap();
        };
        all();
        let (ours, mut theirs) = event();
        vring.set_call(Some(ours));
        all();
        assert_eq!(value(&theirs), 3);
        theirs.write_all(&(u64::MAX - 1).to_ne_bytes()).unwrap();
        all();
        assert_eq!(value(&theirs), u64::MAX);
        vring.set_call(None);
        all();
    }

    #[test]
    fn a_kick_is_read_without_waiting_and_is_waited_for_where_it_is_an_event() {
        let vring = vring();
        assert!(!vring.read_kick().unwrap());
        let (ours, mut theirs) = event();
        vring.set_kick(Some(ours));
        // The flag is the open file's, which the front end has, too.
        ioctl_fionbio(&theirs, false).unwrap();
        vring.set_enabled(true);
        // None is left where another queue with the same event has read it.
        for kicks in [1_u64, 0, 2] {
            if kicks > 0 {
                theirs.write_all(&kicks.to_ne_bytes()).unwrap();
            }
            assert!(vring.read_kick().unwrap());
        }
        theirs.write_all(&(u64::MAX - 1).to_ne_bytes()).unwrap();
        assert!(vring.read_kick().unwrap());
        theirs.write_all(&5_u64.to_ne_bytes()).unwrap();
        assert_eq!(value(&theirs), 5, "all of the others were read");
        assert!(vring.get_ref().get_kick().is_some());
        vring.set_kick(Some(File::open("/dev/zero").unwrap()));
        assert!(vring.get_ref().get_kick().is_none());
        assert!(vring.read_kick().unwrap());
    }
}
