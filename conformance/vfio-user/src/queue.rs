//! A queue of the disk: requests from the ring to the file and back.
//!
//! Every queue has a thread. It works while it holds the queue's lock, so that who takes the lock knows
//! that no request is under way: a reset, for instance.
//!
//! Views of the memory go stale: what the client maps later is not in them. So the ring's index is read first, and a
//! fresh view is taken for the requests before that index, whose memory was mapped before they were put into the ring.
//!
//! Source: VIRTIO 1.3, 2.7 (split virtqueues), 5.2.6 (requests of a block device).

use std::fs::File;
use std::io::{self, Seek as _, SeekFrom};
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use crate::disk::Interrupts;
use dmaspace_vfio_user::{ClientMemory, INTX, Irqs, MSIX, View};
use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_OK, VIRTIO_BLK_S_UNSUPP, VIRTIO_BLK_T_FLUSH,
    VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT,
};
use virtio_queue::{Queue, QueueT as _};
use vm_memory::{Bytes as _, GuestAddress};

/// Bytes of a sector.
pub(crate) const SECTOR: u64 = 512;
/// The most requests in a ring.
pub(crate) const SIZE: u16 = 256;
/// The longest piece that is moved at once, bytes: an unmap waits for no more.
const PIECE: u32 = 1 << 20;
/// A vector that is none (VIRTIO 1.3, 4.1.5.1.2.1).
pub(crate) const NO_VECTOR: u16 = 0xffff;
/// Bits of the ISR status.
pub(crate) const ISR_QUEUE: u8 = 1;
pub(crate) const ISR_CONFIG: u8 = 2;
/// Name of the disk, as a driver reads it.
const ID: &[u8; 20] = b"dmaspace-vfio-user\0\0";

/// State that all queues share.
pub(crate) struct Shared {
    pub(crate) memory: Arc<ClientMemory>,
    pub(crate) irqs: Arc<Irqs>,
    pub(crate) interrupts: Interrupts,
    /// Why the line is raised.
    pub(crate) isr: AtomicU8,
    pub(crate) sectors: u64,
    /// Requests that were served.
    pub(crate) requests: AtomicU64,
    /// Requests with more than one piece of data.
    pub(crate) gathered: AtomicU64,
}

impl Shared {
    /// Interrupts the driver: by the message `vector`, or by the line, for the reason `isr`.
    pub(crate) fn interrupt(&self, vector: u16, isr: u8) {
        match self.interrupts {
            Interrupts::Msix if vector == NO_VECTOR => {}
            Interrupts::Msix => {
                self.irqs.trigger(MSIX, vector.into());
            }
            Interrupts::Intx => {
                self.isr.fetch_or(isr, Ordering::SeqCst);
                self.irqs.trigger(INTX, 0);
            }
        }
    }

    /// Reading lowers the line.
    pub(crate) fn read_isr(&self) -> u8 {
        // Before the reason is taken: one that comes now is raised again.
        self.irqs.lower(INTX, 0);
        self.isr.swap(0, Ordering::SeqCst)
    }
}

/// A queue, and its thread's bell.
pub(crate) struct Slot {
    state: Mutex<State>,
    rung: Mutex<bool>,
    bell: Condvar,
}

/// A queue as the driver has set it up.
pub(crate) struct State {
    pub(crate) queue: Queue,
    pub(crate) vector: u16,
    /// It cannot go on until it is reset.
    pub(crate) broken: bool,
    file: File,
}

/// A descriptor: address, bytes, and whether the device writes to it.
type Piece = (GuestAddress, u32, bool);

impl Slot {
    /// Over a file that is opened for this queue alone.
    pub(crate) fn new(file: File) -> io::Result<Self> {
        Ok(Self {
            state: Mutex::new(State {
                queue: Queue::new(SIZE).map_err(io::Error::other)?,
                vector: NO_VECTOR,
                broken: false,
                file,
            }),
            rung: Mutex::new(false),
            bell: Condvar::new(),
        })
    }

    /// While this is held no request is under way.
    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The driver has put requests into the ring.
    pub(crate) fn ring(&self) {
        *self.rung.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.bell.notify_one();
    }

    /// Serves the queue for good. `broken` is called when it cannot go on.
    pub(crate) fn serve(&self, shared: &Shared, broken: impl Fn(&str)) {
        loop {
            let mut rung = self.rung.lock().unwrap_or_else(PoisonError::into_inner);
            while !*rung {
                rung = self.bell.wait(rung).unwrap_or_else(PoisonError::into_inner);
            }
            *rung = false;
            drop(rung);
            let mut state = self.lock();
            if !state.queue.ready() || state.broken {
                continue;
            }
            let done = state.drain(shared);
            state.broken = done.is_err();
            // Callees may wait for a thread that waits for this queue.
            drop(state);
            if let Err(error) = done {
                broken(&error.to_string());
            }
            shared
                .memory
                .drain_faults(&mut |fault| println!("fault {fault}"));
        }
    }
}

impl State {
    /// Serves all requests.
    fn drain(&mut self, shared: &Shared) -> Result<(), virtio_queue::Error> {
        loop {
            let view = shared.memory.view();
            self.queue.disable_notification(&*view)?;
            let end = self.queue.avail_idx(&*view, Ordering::Acquire)?.0;
            let waiting = end.wrapping_sub(self.queue.next_avail());
            if waiting > self.queue.size() {
                return Err(virtio_queue::Error::InvalidAvailRingIndex);
            }
            // Memory of these requests was mapped before they came.
            let view = shared.memory.view();
            for _ in 0..waiting {
                let Some(chain) = self.queue.pop_descriptor_chain(view.clone()) else {
                    return Err(virtio_queue::Error::InvalidAvailRingIndex);
                };
                let head = chain.head_index();
                let pieces: Vec<Piece> = chain
                    .map(|one| (one.addr(), one.len(), one.is_write_only()))
                    .collect();
                let written = self.request(shared, &view, &pieces);
                self.queue.add_used(&*view, head, written)?;
                shared.requests.fetch_add(1, Ordering::Relaxed);
            }
            if waiting > 0 && self.queue.needs_notification(&*view)? {
                shared.interrupt(self.vector, ISR_QUEUE);
            }
            if !self.queue.enable_notification(&*view)? {
                return Ok(());
            }
        }
    }

    /// Serves a request; returns the bytes that were written for the driver.
    fn request(&mut self, shared: &Shared, view: &View, pieces: &[Piece]) -> u32 {
        let (out, into): (Vec<Piece>, Vec<Piece>) = pieces.iter().partition(|piece| !piece.2);
        // The last byte is the status, and the first 16 are what is asked for, however they are cut.
        let total: u64 = into.iter().map(|piece| u64::from(piece.1)).sum();
        let Some(data) = total.checked_sub(1) else {
            return 0;
        };
        let into_data = part(&into, 0, data);
        let status_at = part(&into, data, 1);
        let mut header = [0; 16];
        let mut at = 0;
        for (address, len, _) in part(&out, 0, 16) {
            let Some(place) = header.get_mut(at..at + len as usize) else {
                return 0;
            };
            if view.read_slice(place, address).is_err() {
                return 0;
            }
            at += len as usize;
        }
        let out_data = part(&out, 16, u64::MAX);
        if into_data.len() > 1 || out_data.len() > 1 {
            shared.gathered.fetch_add(1, Ordering::Relaxed);
        }
        let done = match at {
            16 => self.transfer(shared, view, &header, &into_data, &out_data),
            _ => Err(VIRTIO_BLK_S_IOERR),
        };
        let (written, status) = match done {
            Ok(written) => (written, VIRTIO_BLK_S_OK),
            Err(status) => (0, status),
        };
        for (address, ..) in status_at {
            if view.write_obj(status as u8, address).is_err() {
                return written;
            }
        }
        written + 1
    }

    fn transfer(
        &mut self,
        shared: &Shared,
        view: &View,
        header: &[u8; 16],
        into: &[Piece],
        out: &[Piece],
    ) -> Result<u32, u32> {
        let failed = |_| VIRTIO_BLK_S_IOERR;
        let [t0, t1, t2, t3, _, _, _, _, sector @ ..] = *header;
        let sector = u64::from_le_bytes(sector);
        let kind = u32::from_le_bytes([t0, t1, t2, t3]);
        let bytes = |pieces: &[Piece]| pieces.iter().map(|piece| u64::from(piece.1)).sum::<u64>();
        let inside = |bytes: u64| {
            let end = sector.checked_add(bytes / SECTOR);
            let inside = end.is_some_and(|end| end <= shared.sectors);
            match inside && bytes.is_multiple_of(SECTOR) {
                true => Ok(()),
                false => Err(VIRTIO_BLK_S_IOERR),
            }
        };
        match kind {
            VIRTIO_BLK_T_IN => {
                inside(bytes(into))?;
                let place = SeekFrom::Start(sector * SECTOR);
                self.file.seek(place).map_err(|_| VIRTIO_BLK_S_IOERR)?;
                for (address, len) in small(into) {
                    let read = view.read_exact_volatile_from(address, &mut self.file, len);
                    read.map_err(failed)?;
                }
                Ok(bytes(into) as u32)
            }
            VIRTIO_BLK_T_OUT => {
                inside(bytes(out))?;
                let place = SeekFrom::Start(sector * SECTOR);
                self.file.seek(place).map_err(|_| VIRTIO_BLK_S_IOERR)?;
                for (address, len) in small(out) {
                    let written = view.write_all_volatile_to(address, &mut self.file, len);
                    written.map_err(failed)?;
                }
                Ok(0)
            }
            VIRTIO_BLK_T_FLUSH => {
                self.file.sync_data().map_err(|_| VIRTIO_BLK_S_IOERR)?;
                Ok(0)
            }
            VIRTIO_BLK_T_GET_ID => {
                let mut id = ID.as_slice();
                for (address, len, _) in into {
                    let (now, later) = id.split_at(id.len().min(*len as usize));
                    view.write_slice(now, *address).map_err(failed)?;
                    id = later;
                }
                Ok((ID.len() - id.len()) as u32)
            }
            _ => Err(VIRTIO_BLK_S_UNSUPP),
        }
    }
}

/// Bytes of `pieces` from `from` on, `len` at most.
fn part(pieces: &[Piece], mut from: u64, mut len: u64) -> Vec<Piece> {
    let mut found = Vec::new();
    for (address, bytes, writes) in pieces {
        let skipped = from.min((*bytes).into());
        from -= skipped;
        let taken = (u64::from(*bytes) - skipped).min(len);
        len -= taken;
        if taken > 0 {
            // An address that wraps around is none that is mapped.
            let address = GuestAddress(address.0.wrapping_add(skipped));
            found.push((address, taken as u32, *writes));
        }
    }
    found
}

/// `pieces` in pieces that are moved at once.
fn small(pieces: &[Piece]) -> impl Iterator<Item = (GuestAddress, usize)> {
    pieces.iter().flat_map(|(address, len, _)| {
        (0..*len).step_by(PIECE as usize).map(move |done| {
            let at = GuestAddress(address.0.wrapping_add(done.into()));
            (at, (*len - done).min(PIECE) as usize)
        })
    })
}
