//! Interrupts: the client's eventfds.
//!
//! A client may send any file instead of an eventfd, and an eventfd whose counter is full, where a write would
//! block the device for good. So only a [`PeerEvent`] is taken, which is raised without waiting whatever the client does
//! with it: an interrupt that finds the counter full is one that the client has not seen yet anyway. It is raised under
//! the lock of all interrupts, which is therefore never held for long.
//!
//! INTx is a level: raised once, it is masked until the client unmasks it, and raised again then if the device still
//! wants it. The others are messages, and are not masked.
//!
//! Source: vfio-user protocol specification, `VFIO_USER_DEVICE_SET_IRQS`; Linux, `<linux/vfio.h>`,
//! `struct vfio_irq_set`.

use std::sync::{Mutex, MutexGuard, PoisonError};

use hostmem::{PeerEvent, PeerFile};

use crate::device::{INTX, IRQS};
use crate::error::RequestRefusal;

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
    indices: Mutex<Indices>,
}

type Indices = [Vec<Place>; IRQS];

/// An interrupt.
#[derive(Debug, Default)]
struct Place {
    event: Option<PeerEvent>,
    masked: bool,
    /// To be raised when it is unmasked.
    pending: bool,
}

impl Place {
    fn raise(&mut self, index: usize) -> bool {
        if self.masked {
            self.pending = true;
            return true;
        }
        self.masked = index == INTX;
        let event = self.event.as_ref();
        event.is_some_and(|event| event.raise().is_ok())
    }

    fn mask(&mut self, masked: bool) {
        self.masked = masked;
        if !masked && std::mem::take(&mut self.pending) {
            self.raise(INTX);
        }
    }
}

impl Irqs {
    pub(crate) fn new(counts: [u32; IRQS]) -> Self {
        let places = counts.map(|count| (0..count).map(|_| Place::default()).collect());
        Self {
            indices: Mutex::new(places),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Indices> {
        self.indices.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Raises interrupt `number` of `index`, without waiting for the client. Returns false if it has not asked for it.
    pub fn trigger(&self, index: usize, number: u32) -> bool {
        let mut indices = self.lock();
        let places = indices.get_mut(index);
        let place = places.and_then(|of| of.get_mut(number as usize));
        place.is_some_and(|place| place.raise(index))
    }

    /// The device does not want the interrupt any more: one that waits to be unmasked is not raised.
    pub fn lower(&self, index: usize, number: u32) {
        let mut indices = self.lock();
        let places = indices.get_mut(index);
        if let Some(place) = places.and_then(|of| of.get_mut(number as usize)) {
            place.pending = false;
        }
    }

    /// Interrupts for which the client has sent an eventfd.
    pub fn configured(&self) -> usize {
        let indices = self.lock();
        let places = indices.iter().flatten();
        places.filter(|place| place.event.is_some()).count()
    }

    pub(crate) fn count(&self, index: usize) -> u32 {
        self.lock().get(index).map_or(0, |of| of.len() as u32)
    }

    pub(crate) fn clear(&self) {
        for place in self.lock().iter_mut().flatten() {
            *place = Place::default();
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
        fds: Vec<PeerFile>,
    ) -> Result<(), RequestRefusal> {
        let mut indices = self.lock();
        let there = indices.get(index as usize).map_or(0, Vec::len) as u32;
        let end = start.checked_add(count).filter(|end| *end <= there);
        let places = indices.get_mut(index as usize);
        let (Some(end), Some(places)) = (end, places) else {
            return Err(RequestRefusal::Interrupts {
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
            return Err(RequestRefusal::Descriptors { given, expected });
        }
        let data = match flags & DATA_BOOL {
            0 => 0,
            _ => count as usize,
        };
        if bools.len() != data {
            return Err(RequestRefusal::Payload {
                given: 20 + bools.len(),
                needed: 20 + data,
            });
        }
        match (
            flags & (ACTION_MASK | ACTION_UNMASK | ACTION_TRIGGER),
            flags & !(ACTION_MASK | ACTION_UNMASK | ACTION_TRIGGER),
        ) {
            (ACTION_MASK | ACTION_UNMASK, DATA_NONE | DATA_BOOL)
                if index as usize == INTX && count > 0 =>
            {
                let masked = flags & ACTION_MASK != 0;
                chosen(places, flags, bools).for_each(|place| place.mask(masked));
                Ok(())
            }
            (ACTION_MASK | ACTION_UNMASK, DATA_NONE | DATA_BOOL | DATA_EVENTFD) => {
                Err(RequestRefusal::NotMaskable { index })
            }
            // "a count (and start) of 0 [...] disables all interrupts of the index"
            (ACTION_TRIGGER, DATA_NONE) if count == 0 && start == 0 => {
                if let Some(all) = indices.get_mut(index as usize) {
                    all.iter_mut().for_each(|place| *place = Place::default());
                }
                Ok(())
            }
            _ if count == 0 => Err(RequestRefusal::Interrupts {
                index,
                start,
                count,
                there,
            }),
            (ACTION_TRIGGER, DATA_NONE | DATA_BOOL) => {
                chosen(places, flags, bools).for_each(|place| {
                    place.raise(index as usize);
                });
                Ok(())
            }
            (ACTION_TRIGGER, DATA_EVENTFD) => {
                let events = (start..).zip(fds).map(|(vector, file)| {
                    let event = file.into_event();
                    event.map_err(|_| RequestRefusal::NotEventFd { vector })
                });
                let events: Vec<_> = events.collect::<Result<_, _>>()?;
                let mut events = events.into_iter();
                places.iter_mut().for_each(|place| {
                    *place = Place {
                        event: events.next(),
                        ..Place::default()
                    }
                });
                Ok(())
            }
            _ => Err(RequestRefusal::Flags { flags }),
        }
    }
}

/// Interrupts out of `places` that a request selects.
fn chosen<'a>(
    places: &'a mut [Place],
    flags: u32,
    bools: &'a [u8],
) -> impl Iterator<Item = &'a mut Place> {
    let all = flags & DATA_NONE != 0;
    let means = move |nth: usize| all || bools.get(nth).is_some_and(|bool| *bool != 0);
    let places = places.iter_mut().enumerate();
    places
        .filter(move |(nth, _)| means(*nth))
        .map(|(_, place)| place)
}
