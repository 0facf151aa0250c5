//! Interrupts: the client's eventfds.
//!
//! A client may send any file instead of an eventfd, and an eventfd whose counter is full, where a write would
//! block the device for good. So a descriptor is looked at first (its name in `/proc`), and made non-blocking: an
//! interrupt that finds the counter full is one that the client has not seen yet anyway. That flag belongs to the open
//! file, which the client shares; eventfds for interrupts are non-blocking at either end.
//!
//! Source: vfio-user protocol specification, `VFIO_USER_DEVICE_SET_IRQS`; Linux, `<linux/vfio.h>`,
//! `struct vfio_irq_set`.

use std::os::fd::{AsRawFd as _, OwnedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl, readlink};

use crate::device::IRQS;
use crate::error::Refusal;

const DATA_NONE: u32 = 1;
const DATA_BOOL: u32 = 1 << 1;
const DATA_EVENTFD: u32 = 1 << 2;
const ACTION_MASK: u32 = 1 << 3;
const ACTION_UNMASK: u32 = 1 << 4;
const ACTION_TRIGGER: u32 = 1 << 5;

/// The device's interrupts, by index (`VFIO_PCI_MSIX_IRQ_INDEX`, for instance) and number.
#[derive(Debug)]
pub struct Irqs {
    /// One place for each interrupt.
    indices: Mutex<[Vec<Option<OwnedFd>>; IRQS]>,
}

impl Irqs {
    pub(crate) fn new(counts: [u32; IRQS]) -> Self {
        let places = counts.map(|count| (0..count).map(|_| None).collect());
        Self {
            indices: Mutex::new(places),
        }
    }

    fn lock(&self) -> MutexGuard<'_, [Vec<Option<OwnedFd>>; IRQS]> {
        self.indices.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Raises interrupt `number` of `index`. Returns false if the client has not asked for it.
    pub fn trigger(&self, index: usize, number: u32) -> bool {
        let indices = self.lock();
        let place = indices.get(index).and_then(|of| of.get(number as usize));
        place.is_some_and(|place| raise(place.as_ref()))
    }

    /// Interrupts for which the client has sent an eventfd.
    pub fn configured(&self) -> usize {
        self.lock().iter().flatten().flatten().count()
    }

    pub(crate) fn count(&self, index: usize) -> u32 {
        self.lock().get(index).map_or(0, |of| of.len() as u32)
    }

    pub(crate) fn clear(&self) {
        for place in self.lock().iter_mut().flatten() {
            *place = None;
        }
    }

    /// `VFIO_USER_DEVICE_SET_IRQS`, all of it or nothing. `bools` is the data behind the fixed part.
    pub(crate) fn set(
        &self,
        flags: u32,
        index: u32,
        start: u32,
        count: u32,
        bools: &[u8],
        fds: Vec<OwnedFd>,
    ) -> Result<(), Refusal> {
        let mut indices = self.lock();
        let there = indices.get(index as usize).map_or(0, Vec::len) as u32;
        let end = start.checked_add(count).filter(|end| *end <= there);
        let places = indices.get_mut(index as usize);
        let (Some(end), Some(places)) = (end, places) else {
            return Err(Refusal::Interrupts {
                index,
                start,
                count,
                there,
            });
        };
        let places = places.get_mut(start as usize..end as usize);
        let places = places.unwrap_or_default();
        let expected = match flags & DATA_EVENTFD {
            0 => 0,
            _ => count as usize,
        };
        if fds.len() > expected || (!fds.is_empty() && fds.len() != expected) {
            let given = fds.len();
            return Err(Refusal::Descriptors { given, expected });
        }
        let data = match flags & DATA_BOOL {
            0 => 0,
            _ => count as usize,
        };
        if bools.len() != data {
            return Err(Refusal::Payload {
                given: 20 + bools.len(),
                needed: 20 + data,
            });
        }
        match (
            flags & (ACTION_MASK | ACTION_UNMASK | ACTION_TRIGGER),
            flags & !(ACTION_MASK | ACTION_UNMASK | ACTION_TRIGGER),
        ) {
            (ACTION_MASK | ACTION_UNMASK, DATA_NONE | DATA_BOOL | DATA_EVENTFD) => {
                Err(Refusal::NotMaskable { index })
            }
            // "a count (and start) of 0 [...] disables all interrupts of the index"
            (ACTION_TRIGGER, DATA_NONE) if count == 0 && start == 0 => {
                if let Some(all) = indices.get_mut(index as usize) {
                    all.iter_mut().for_each(|place| *place = None);
                }
                Ok(())
            }
            _ if count == 0 => Err(Refusal::Interrupts {
                index,
                start,
                count,
                there,
            }),
            (ACTION_TRIGGER, DATA_NONE) => {
                places.iter().for_each(|place| {
                    raise(place.as_ref());
                });
                Ok(())
            }
            (ACTION_TRIGGER, DATA_BOOL) => {
                let chosen = places.iter().zip(bools).filter(|(_, bool)| **bool != 0);
                chosen.for_each(|(place, _)| {
                    raise(place.as_ref());
                });
                Ok(())
            }
            (ACTION_TRIGGER, DATA_EVENTFD) => {
                for (vector, fd) in (start..).zip(&fds) {
                    check(vector, fd)?;
                }
                let mut fds = fds.into_iter();
                places.iter_mut().for_each(|place| *place = fds.next());
                Ok(())
            }
            _ => Err(Refusal::Flags { flags }),
        }
    }
}

/// Refuses what is no eventfd, and keeps writes to one from blocking.
fn check(vector: u32, fd: &OwnedFd) -> Result<(), Refusal> {
    let name = readlink(format!("/proc/self/fd/{}", fd.as_raw_fd()), Vec::new());
    if !name.is_ok_and(|name| name.as_bytes() == b"anon_inode:[eventfd]") {
        return Err(Refusal::NotEventFd { vector });
    }
    fcntl_getfl(fd)
        .and_then(|flags| fcntl_setfl(fd, flags | OFlags::NONBLOCK))
        .map_err(|_| Refusal::NotEventFd { vector })
}

fn raise(fd: Option<&OwnedFd>) -> bool {
    let one = 1_u64.to_ne_bytes();
    fd.is_some_and(|fd| {
        let written = rustix::io::write(fd, &one);
        // Its counter is full: there is an interrupt to be seen already.
        matches!(written, Ok(_) | Err(rustix::io::Errno::AGAIN))
    })
}
