//! State of single threads: see the head of [`Dma`](super::Dma)'s module.

use alloc::boxed::Box;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::time::Duration;
use core::{mem, slice};

use iopt::{AnyMemory, Gather};
use runs::{Offset, Span};

use super::iova::place;
use super::{DmaBuffer, whole};
use crate::lock::{Mutex, RwLock};
use crate::memory::object::Cause;
use crate::memory::{Hold, Memory};
use crate::own::Devices;
use crate::space::error::{DetachError, MapError};
use crate::space::flush::Flushing;

/// All of them: one for about each thread. Dropped, no device reaches the buffers any more, or they stay held.
pub(super) struct Shards(pub(super) Box<[Shard]>);

/// State of single threads, in cache lines of its own.
#[repr(align(128))]
pub(super) struct Shard {
    /// The same in all of them.
    pub(super) devices: RwLock<Arc<Attached>>,
    pub(super) local: Mutex<Local>,
    /// Out of it, what is being flushed or could not be. Locked for as long as a flush takes, so that a second thread
    /// waits for what the first one has taken.
    pub(super) flushing: Mutex<Batch>,
}

#[derive(Default)]
pub(super) struct Attached {
    pub(super) devices: Devices,
    /// A unit remembers what was not present.
    pub(super) told_of_maps: bool,
}

/// Buffers of a thread.
#[derive(Default)]
pub(super) struct Local {
    /// Records of buffers that were mapped here, from before the first entry is stored until after the flush.
    records: Vec<Option<Record>>,
    /// Places in it.
    free: Vec<u32>,
    memories: Vec<Used>,
    /// Unmapped here, and in no flush yet.
    pub(super) unmapped: Batch,
    /// When the first of these has come, by the clock of lazy flushing.
    since: Option<Duration>,
    /// Buffers that were unmapped here and that no flush has succeeded for.
    pub(super) waiting: usize,
}

/// Memory that stays where it is. Without parts in records it is kept for the next buffer, until a flush of all.
#[derive(Default)]
struct Used {
    memory: Option<Arc<Memory>>,
    parts: usize,
}

pub(super) enum Record {
    One(Part),
    List(Vec<Part>),
}

/// Holder of a part of memory.
pub(super) enum Part {
    Hold(Hold),
    /// Memory that stays where it is: a place in [`Local::memories`].
    Given(usize),
}

/// Buffers that are unmapped and have to be flushed.
#[derive(Default)]
pub(super) struct Batch {
    pub(super) gather: Gather,
    pub(super) buffers: Vec<DmaBuffer>,
}

impl Shards {
    /// The shard of this thread, with its number.
    pub(super) fn own(&self) -> (u32, &Shard) {
        let place = place() % self.0.len();
        (place as u32, &self.0[place])
    }

    /// Changes the list of devices while no thread maps or unmaps.
    pub(super) fn change<E>(
        &self,
        change: impl FnOnce(&mut Devices) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut all: Vec<_> = self.0.iter().map(|shard| shard.devices.write()).collect();
        let mut devices = all
            .first()
            .map(|one| one.devices.clone())
            .unwrap_or_default();
        let changed = change(&mut devices);
        let told_of_maps = devices
            .units()
            .any(|unit| unit.capabilities().caches_not_present);
        let now = Arc::new(Attached {
            devices,
            told_of_maps,
        });
        all.iter_mut().for_each(|one| **one = Arc::clone(&now));
        changed
    }

    /// Detaches every device that its unit releases. The error is that of the first one that stays.
    pub(super) fn leave(&self) -> Result<(), DetachError> {
        self.change(Devices::detach_all)
    }

    /// Releases the memory of a buffer that no device reaches. Returns why some is still pinned.
    pub(super) fn release(&self, buffer: &DmaBuffer) -> Option<Cause> {
        let shard = self.0.get(buffer.shard as usize)?;
        let record = shard.local.lock().remove(buffer.slot)?;
        record.release()
    }
}

impl Drop for Shards {
    fn drop(&mut self) {
        if self.leave().is_err() {
            for shard in &mut self.0 {
                mem::forget(mem::take(shard.local.get_mut()));
            }
        }
    }
}

/// Holds of a map under way. Dropped otherwise than by [`note`](Self::note), it has panicked, and all of it stays held.
pub(super) struct ShardHold<'a> {
    pub(super) shard: &'a Shard,
    pub(super) record: Option<Record>,
}

impl ShardHold<'_> {
    /// Holds the parts of a list, all or none.
    pub(super) fn hold(
        &mut self,
        list: &[(&Arc<Memory>, Span<Offset>)],
        granule: u64,
    ) -> Result<&Record, MapError> {
        let hold = |(memory, part): &(&Arc<Memory>, Span<Offset>)| {
            let (part, object) = (whole(*part, granule), memory.len());
            if !Span::new(0, object).covers(&part) {
                return Err(MapError::Part {
                    part,
                    object,
                    granule,
                });
            }
            Ok(match memory.object().fixed_runs() {
                Some(_) => Part::Given(self.shard.local.lock().keep(memory)),
                None => Part::Hold(memory.hold(part, &mut ())?),
            })
        };
        if let [one] = list {
            return Ok(self.record.insert(Record::One(hold(one)?)));
        }
        let mut parts = Vec::with_capacity(list.len());
        for one in list {
            match hold(one) {
                Ok(part) => parts.push(part),
                Err(cause) => {
                    self.record = Some(Record::List(parts));
                    return Err(cause);
                }
            }
        }
        Ok(self.record.insert(Record::List(parts)))
    }

    /// Notes it among the records: its place.
    pub(super) fn note(mut self) -> u32 {
        self.keep()
    }

    fn keep(&mut self) -> u32 {
        let record = self.record.take();
        self.shard.local.lock().insert(record.unwrap_or_default())
    }
}

impl Drop for ShardHold<'_> {
    fn drop(&mut self) {
        if self.record.is_some() {
            self.keep();
        }
    }
}

impl Default for Record {
    fn default() -> Self {
        Self::List(Vec::new())
    }
}

impl Record {
    pub(super) fn parts(&self) -> &[Part] {
        match self {
            Self::One(part) => slice::from_ref(part),
            Self::List(parts) => parts,
        }
    }

    /// Releases what is held. Returns why some is still pinned.
    fn release(self) -> Option<Cause> {
        let release = |part| match part {
            Part::Hold(hold) => hold.release().1,
            Part::Given(_) => None,
        };
        match self {
            Self::One(part) => release(part),
            Self::List(parts) => parts
                .into_iter()
                .fold(None, |failed, part| failed.or(release(part))),
        }
    }
}

impl Local {
    /// Notes that a record has a part of memory that stays where it is.
    fn keep(&mut self, memory: &Arc<Memory>) -> usize {
        let known = |used: &Used| matches!(&used.memory, Some(known) if Arc::ptr_eq(known, memory));
        let mut all = self.memories.iter();
        let place = all.position(known).unwrap_or_else(|| {
            let unused = self.memories.iter().position(|used| used.parts == 0);
            let place = unused.unwrap_or(self.memories.len());
            if unused.is_none() {
                self.memories.push(Used::default());
            }
            self.memories[place].memory = Some(Arc::clone(memory));
            place
        });
        self.memories[place].parts += 1;
        place
    }

    fn insert(&mut self, record: Record) -> u32 {
        let place = self.free.pop().unwrap_or_else(|| {
            self.records.push(None);
            self.records.len() as u32 - 1
        });
        self.records[place as usize] = Some(record);
        place
    }

    /// Takes a record out, whose memory no device reaches.
    fn remove(&mut self, place: u32) -> Option<Record> {
        let record = self.records.get_mut(place as usize)?.take()?;
        self.free.push(place);
        for part in record.parts() {
            if let Part::Given(place) = part {
                if let Some(used) = self.memories.get_mut(*place) {
                    used.parts -= 1;
                }
            }
        }
        Some(record)
    }

    /// Memory without parts in records is not kept for the next buffer any more.
    pub(super) fn forget_unused(&mut self) {
        for used in self.memories.iter_mut().filter(|used| used.parts == 0) {
            used.memory = None;
        }
    }

    /// A buffer waits for a flush, that of what the gather has.
    pub(super) fn wait(&mut self, buffer: DmaBuffer) {
        self.unmapped.buffers.push(buffer);
        self.waiting += 1;
    }

    /// Moves what is in no flush yet into `batch`.
    pub(super) fn flush_into(&mut self, batch: &mut Batch, memory: &AnyMemory) {
        self.since = None;
        memory.join(&mut batch.gather, mem::take(&mut self.unmapped.gather));
        batch.buffers.append(&mut self.unmapped.buffers);
    }

    /// Returns true if unmapped buffers are to be flushed now.
    pub(super) fn is_due(&mut self, flushing: Flushing) -> bool {
        match flushing {
            _ if self.waiting == 0 => false,
            Flushing::Strict => true,
            Flushing::Lazy { holds, age, now } => {
                let now = now();
                let since = *self.since.get_or_insert(now);
                self.waiting > holds || now.saturating_sub(since) >= age
            }
        }
    }
}
