//! Tables of registered buffers: io_uring instances that are used for nothing but their pins.
//!
//! Registering a buffer pins its pages for the long term (`FOLL_LONGTERM`). A table is made
//! sparse, with empty slots only; a lease of consecutive slots is filled by one call and
//! emptied by one call, in which the kernel unpins before it returns. No I/O is ever submitted,
//! so the kernel reads and writes none of the pinned bytes.
//!
//! **Why many small tables.** For each huge page of a new buffer the kernel looks through all
//! buffers of the same table to see whether it has charged that page already
//! (`headpage_already_acct()` in `io_uring/rsrc.c`), so the cost of filling a table grows with
//! the square of its size. A table therefore takes 256 MiB only. Since each is an open file, of
//! which a process has a limited number, that bound grows with what is pinned altogether, so that
//! twice the memory takes 32 tables more.
//!
//! **Why another table for the rest.** For the same reason a buffer that shares a huge page
//! with an older one of its table is charged nothing for it, and the charge vanishes with the
//! older one. The rest of a buffer that is cut is therefore registered in another table.
//!
//! Tables are emptied explicitly before they are closed: after a mere `close()` the kernel drops
//! the pins some time later.
//!
//! Source: io_uring_register(2), IORING_REGISTER_BUFFERS2 and IORING_REGISTER_BUFFERS_UPDATE.

use std::io;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use io_uring::IoUring;
use runs::{Offset, Span, bitmap};

use crate::sys::Region;

/// Slots of a table: the first ones', and what the kernel allows (`IORING_MAX_REG_BUFFERS`).
const FEWEST_SLOTS: u64 = 128;
const MOST_SLOTS: u64 = 1 << 14;
/// Bytes of the buffers of a table, until there is more than 32 times as much in all tables.
pub(crate) const FEWEST_BYTES: u64 = 256 << 20;
/// The part of everything that is pinned that one table may hold.
const SHARE: u64 = 32;

/// `IORING_REGISTER_BUFFERS_UPDATE` of `include/uapi/linux/io_uring.h`, since Linux 5.13.
const REGISTER_BUFFERS_UPDATE: libc::c_uint = 16;

/// `struct io_uring_rsrc_update2` of `include/uapi/linux/io_uring.h`.
#[repr(C)]
#[derive(Default)]
struct UpdateArgument {
    offset: u32,
    resv: u32,
    data: u64,
    tags: u64,
    nr: u32,
    resv2: u32,
}

/// One table.
#[derive(Debug)]
pub(crate) struct Table {
    /// Tells tables apart.
    pub(crate) id: u64,
    slots: u32,
    ring: Uring,
}

struct Uring(IoUring);

impl std::fmt::Debug for Uring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Uring({})", self.0.as_raw_fd())
    }
}

impl Table {
    /// A table of as many slots as the first one has.
    pub(crate) fn new() -> io::Result<Self> {
        Self::with_slots(FEWEST_SLOTS as u32)
    }

    fn with_slots(slots: u32) -> io::Result<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let ring = IoUring::builder().dontfork().build(1)?;
        ring.submitter().register_buffers_sparse(slots)?;
        Ok(Self {
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            slots,
            ring: Uring(ring),
        })
    }

    /// Fills the slots from `first` on with `parts` of the region, in order; returns how many of
    /// them are pinned now. An error means that not even the first is.
    pub(crate) fn fill(
        &self,
        first: u32,
        region: &Region,
        parts: &[Span<Offset>],
    ) -> io::Result<u32> {
        let vectors: Vec<_> = parts
            .iter()
            .map(|part| region.iovec(*part))
            .collect::<Result<_, _>>()?;
        self.update(first, &vectors)
    }

    /// Empties `count` slots from `first` on; returns how many are empty now.
    pub(crate) fn empty(&self, first: u32, count: u32) -> io::Result<u32> {
        let nothing = libc::iovec {
            iov_base: std::ptr::null_mut(),
            iov_len: 0,
        };
        self.update(first, &vec![nothing; count as usize])
    }

    /// The crate's `register_buffers_update` keeps to itself how many slots the kernel did, so
    /// the call is made here.
    fn update(&self, first: u32, vectors: &[libc::iovec]) -> io::Result<u32> {
        let argument = UpdateArgument {
            offset: first,
            data: vectors.as_ptr() as u64,
            nr: vectors.len() as u32,
            ..UpdateArgument::default()
        };
        // SAFETY: the kernel reads the argument and its `nr` vectors. It checks the memory that
        // the vectors name and pins it, which changes none of its bytes; it would access them
        // only for I/O, and none is ever submitted on this ring.
        let done = unsafe {
            libc::syscall(
                libc::SYS_io_uring_register,
                self.ring.0.as_raw_fd(),
                REGISTER_BUFFERS_UPDATE,
                &raw const argument,
                size_of::<UpdateArgument>(),
            )
        };
        u32::try_from(done).map_err(|_| io::Error::last_os_error())
    }
}

impl Drop for Table {
    fn drop(&mut self) {
        if let Err(error) = self.ring.0.submitter().unregister_buffers() {
            tracing::error!(%error, "unregister a table of buffers");
        }
    }
}

/// Consecutive slots of one table, taken.
#[derive(Debug)]
pub(crate) struct Lease {
    pub(crate) table: Arc<Table>,
    pub(crate) first: u32,
    pub(crate) count: u32,
}

#[derive(Debug)]
struct Seat {
    table: Arc<Table>,
    /// The free slots, a bit each.
    free: Vec<u64>,
    /// Slots and bytes that are leased.
    slots: u64,
    bytes: u64,
}

impl Seat {
    fn new(table: Table) -> Self {
        let slots = u64::from(table.slots);
        let mut free = vec![0; slots.div_ceil(64) as usize];
        bitmap::set(&mut free, 0..slots);
        Self {
            table: Arc::new(table),
            free,
            slots: 0,
            bytes: 0,
        }
    }

    /// Leases slots for the first of `parts`: consecutive ones, and none for bytes over `most`
    /// unless it is the table's only part.
    fn take(&mut self, parts: &[Span<Offset>], most: u64) -> Option<Lease> {
        let free = bitmap::runs(&self.free).next()?;
        let mut end = free.start;
        let mut bytes = self.bytes;
        for part in parts {
            if end == free.end || (bytes > 0 && bytes + part.len > most) {
                break;
            }
            bytes += part.len;
            end += 1;
        }
        if end == free.start {
            return None;
        }
        bitmap::clear(&mut self.free, free.start..end);
        self.slots += end - free.start;
        self.bytes = bytes;
        Some(Lease {
            table: Arc::clone(&self.table),
            first: free.start as u32,
            count: (end - free.start) as u32,
        })
    }
}

/// All tables of one pinner.
#[derive(Debug)]
pub(crate) struct Tables {
    seats: Mutex<Vec<Seat>>,
}

impl Tables {
    pub(crate) fn new(first: Table) -> Self {
        Self {
            seats: Mutex::new(vec![Seat::new(first)]),
        }
    }

    fn seats(&self) -> MutexGuard<'_, Vec<Seat>> {
        self.seats.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes consecutive free slots for the first one or more of `parts` in a table that
    /// `excluded` does not name; opens a table when there are none.
    pub(crate) fn lease(&self, parts: &[Span<Offset>], excluded: &[u64]) -> io::Result<Lease> {
        let mut seats = self.seats();
        let (slots, bytes) = seats
            .iter()
            .fold((0, 0), |sum, seat| (sum.0 + seat.slots, sum.1 + seat.bytes));
        let most = (bytes / SHARE).max(FEWEST_BYTES);
        // The newest tables have the most room.
        for seat in seats.iter_mut().rev() {
            if excluded.contains(&seat.table.id) {
                continue;
            }
            if let Some(lease) = seat.take(parts, most) {
                return Ok(lease);
            }
        }
        let slots = (slots / SHARE).next_power_of_two();
        let table = Table::with_slots(slots.clamp(FEWEST_SLOTS, MOST_SLOTS) as u32)?;
        let mut seat = Seat::new(table);
        let lease = seat.take(parts, most);
        seats.push(seat);
        lease.ok_or_else(|| io::Error::from_raw_os_error(libc::EINVAL))
    }

    /// Takes back `count` slots that are empty, leased for `bytes` together. A table that is
    /// wholly free is closed, but for the last.
    pub(crate) fn give_back(&self, table: &Arc<Table>, first: u32, count: u32, bytes: u64) {
        let mut seats = self.seats();
        let Some(index) = seats.iter().position(|seat| seat.table.id == table.id) else {
            return;
        };
        if let Some(seat) = seats.get_mut(index) {
            let slots = first.into()..u64::from(first) + u64::from(count);
            seat.slots -= bitmap::set(&mut seat.free, slots).min(seat.slots);
            seat.bytes -= bytes.min(seat.bytes);
            if seat.slots == 0 && seats.len() > 1 {
                seats.remove(index);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts(count: u64, len: u64) -> Vec<Span<Offset>> {
        (0..count).map(|i| Span::new(i * len, len)).collect()
    }

    fn tables() -> Option<Tables> {
        match Table::new() {
            Ok(table) => Some(Tables::new(table)),
            Err(error) => {
                eprintln!("not run: no io_uring here: {error}");
                None
            }
        }
    }

    #[test]
    fn slots_are_leased_once_and_a_table_that_is_free_again_is_closed() {
        let Some(tables) = tables() else { return };
        let lease = |count| tables.lease(&parts(count, 4096), &[]).unwrap();
        let a = lease(118);
        let b = lease(100);
        assert_eq!((a.first, a.count), (0, 118));
        assert_eq!((b.first, b.count), (118, 10));
        assert_eq!(a.table.id, b.table.id);
        let c = lease(5);
        assert_ne!(c.table.id, a.table.id, "the first table is full");
        let d = tables.lease(&parts(1, 4096), &[c.table.id]).unwrap();
        assert_ne!(d.table.id, c.table.id, "an excluded table is not used");
        tables.give_back(&c.table, c.first, c.count, 5 * 4096);
        assert_eq!(tables.seats().len(), 2);
        tables.give_back(&d.table, d.first, d.count, 4096);
        tables.give_back(&a.table, 3, 4, 4 * 4096);
        let e = lease(100);
        assert_eq!((e.first, e.count), (3, 4), "the lowest free run");
    }

    #[test]
    fn the_number_of_tables_grows_with_the_logarithm_of_the_bytes() {
        let Some(tables) = tables() else { return };
        let mut counts = Vec::new();
        let mut left = 0u64;
        for gib in [8, 8, 16, 32, 64] {
            left += gib << 9;
            while left > 0 {
                let lease = tables.lease(&parts(left.min(64), 2 << 20), &[]).unwrap();
                left -= u64::from(lease.count);
            }
            counts.push(tables.seats().len());
        }
        assert_eq!(counts[0], 32);
        for pair in counts.windows(2) {
            assert!(pair[1] - pair[0] <= 33, "{counts:?}");
        }
    }
}
