//! A device's way to memory.

use std::fmt;
use std::mem;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use iopt::Prot;
use iopt::walk::{Access, UpperTable, WalkCache, WalkMemory};
use runs::{Pa, Span};

use super::Shared;
use super::cache::{Cache, CacheValue, Key};
use super::registry::{Context, Device};
use super::slot::{PortCounters, Slot};
use crate::fault::{Fault, FaultReason};
use crate::target::{BadTarget, TargetMemory};
use crate::unit::DomainId;

/// A guard is left and entered anew at multiples of this many bytes of input addresses, so that a
/// flush never waits for more than one such copy.
const GUARDED_BYTES: u64 = 2 << 20;

/// A device's way to memory: DMA by input address.
///
/// A port belongs to one thread; a device may have several. Dropping it keeps what it has counted.
///
/// An access may be of any length. Addresses are multiples of 8. It goes page by page, one look-up
/// for each page (and for each 2 MiB of a larger one), and is as atomic as DMA is: each word by
/// itself.
pub struct Port<T, D> {
    shared: Arc<Shared<T, D>>,
    device: Arc<Device>,
    slot: Arc<Slot>,
    /// A copy of the device's context, and its generation.
    context: Option<Context>,
    generation: u64,
}

/// An access that came to a fault on its way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{fault}{}", match .done {
    0 => String::new(),
    done => format!(", after {done:#x} bytes"),
})]
pub struct Aborted {
    /// How many bytes were transferred before.
    pub done: u64,
    /// Why it went no further. It is in the unit's fault log too, if there was room.
    pub fault: Fault,
}

impl<T, D> Port<T, D> {
    pub(super) fn new(shared: Arc<Shared<T, D>>, device: Arc<Device>, slot: Arc<Slot>) -> Self {
        let (generation, context) = device.context();
        Self {
            shared,
            device,
            slot,
            context,
            generation,
        }
    }

    /// Counters of this port.
    pub fn counters(&self) -> super::AccessCounters {
        self.slot.counters.counters()
    }
}

impl<T: WalkMemory, D> Port<T, D> {
    /// Calls `visit` with the physical runs behind `len` bytes from `iova` on, in order: for a device model that
    /// reaches memory by itself. Any address will do, and no data memory is needed.
    ///
    /// A flush waits for this call and not for what the caller does with the runs afterwards: the caller has flushes
    /// wait for that too, as an address space's listener. Translations for writing mark what they translate as
    /// written, at once.
    ///
    /// # Errors
    ///
    /// The first address that is not translated. `visit` has been called with the runs before it.
    pub fn translate(
        &mut self,
        iova: u64,
        len: u64,
        access: Access,
        visit: &mut dyn FnMut(Span<Pa>),
    ) -> Result<(), Aborted> {
        self.each_run(iova, len, access, &mut |_, run, done| {
            visit(run);
            *done += run.len;
            Ok(())
        })
    }

    /// Calls `each` with the physical runs behind `len` bytes from `iova` on, in order. It counts in its last argument how
    /// many of these bytes are done.
    #[inline]
    fn each_run(
        &mut self,
        iova: u64,
        len: u64,
        access: Access,
        each: &mut impl FnMut(&D, Span<Pa>, &mut u64) -> Result<(), FaultReason>,
    ) -> Result<(), Aborted> {
        if len == 0 {
            return Ok(());
        }
        if iova.checked_add(len - 1).is_none() {
            return Err(self.refused(iova, access, FaultReason::WrapsAround { len }));
        }
        let mut done = 0;
        while done < len {
            // No overflow: `done` is less than `len` here.
            let from = iova + done;
            let guarded = (GUARDED_BYTES - from % GUARDED_BYTES).min(len - done);
            let inside = self.slot.enter();
            // The first look inside the guard: whether the context is still the one.
            if self.device.generation() != self.generation {
                (self.generation, self.context) = self.device.context();
            }
            let stopped = match &self.context {
                None => Err(FaultReason::NotAttached),
                Some(context) => {
                    let path = Path {
                        shared: &self.shared,
                        counters: &self.slot.counters,
                        context,
                    };
                    path.each_run(iova, &mut done, from + (guarded - 1), access, each)
                }
            };
            drop(inside);
            if let Err(reason) = stopped {
                return Err(self.abort(done, iova + done, access, reason));
            }
        }
        Ok(())
    }

    /// An access that is none. The record names the domain of now, which this port may not have seen yet.
    #[cold]
    fn refused(&mut self, iova: u64, access: Access, reason: FaultReason) -> Aborted {
        (self.generation, self.context) = self.device.context();
        self.abort(0, iova, access, reason)
    }

    #[cold]
    fn abort(&self, done: u64, iova: u64, access: Access, reason: FaultReason) -> Aborted {
        let domain = self.context.map(|context| context.domain);
        let fault = Fault {
            device: self.device.id,
            pasid: None,
            domain,
            iova,
            access: Some(access),
            reason,
        };
        self.slot.counters.faults.add(1);
        self.shared.faults.record(fault);
        Aborted { done, fault }
    }
}

impl<T: WalkMemory, D: TargetMemory> Port<T, D> {
    /// Reads `out.len()` words from `iova` on.
    pub fn read(&mut self, iova: u64, mut out: &mut [u64]) -> Result<(), Aborted> {
        let len = size_of_val(out) as u64;
        let result = self.transfer(iova, len, Access::Read, &mut |cells| {
            let (now, later) = mem::take(&mut out).split_at_mut(cells.len());
            out = later;
            for (word, cell) in now.iter_mut().zip(cells) {
                *word = cell.load(Ordering::Relaxed);
            }
        });
        self.slot
            .counters
            .bytes_read
            .add(result.as_ref().map_or_else(|e| e.done, |()| len));
        result
    }

    /// Writes `words` from `iova` on.
    pub fn write(&mut self, iova: u64, mut words: &[u64]) -> Result<(), Aborted> {
        let len = size_of_val(words) as u64;
        let result = self.transfer(iova, len, Access::Write, &mut |cells| {
            let (now, later) = words.split_at(cells.len());
            words = later;
            for (word, cell) in now.iter().zip(cells) {
                cell.store(*word, Ordering::Relaxed);
            }
        });
        self.slot
            .counters
            .bytes_written
            .add(result.as_ref().map_or_else(|e| e.done, |()| len));
        result
    }

    /// Calls `copy` with the cells of `len` bytes from `iova` on, in order and never with more.
    #[inline]
    fn transfer(
        &mut self,
        iova: u64,
        len: u64,
        access: Access,
        copy: &mut dyn FnMut(&[AtomicU64]),
    ) -> Result<(), Aborted> {
        if len > 0 && iova % 8 != 0 {
            return Err(self.refused(iova, access, FaultReason::Misaligned));
        }
        self.each_run(iova, len, access, &mut |data, run, done| {
            let begin = *done;
            let copied = data.with_cells(run, &mut |cells| {
                let room = ((run.len - (*done - begin)) / 8) as usize;
                let cells = cells.get(..room).unwrap_or(cells);
                copy(cells);
                *done += size_of_val(cells) as u64;
            });
            copied.map_err(FaultReason::Target)?;
            if *done - begin < run.len {
                let address = run.start + (*done - begin);
                return Err(FaultReason::Target(BadTarget { address }));
            }
            Ok(())
        })
    }
}

/// Borrowed state of an access while its guard is held.
struct Path<'p, T, D> {
    shared: &'p Shared<T, D>,
    counters: &'p PortCounters,
    context: &'p Context,
}

impl<T: WalkMemory, D> Path<'_, T, D> {
    /// Goes on from `iova + done` to `last`, both included.
    #[inline]
    fn each_run(
        &self,
        iova: u64,
        done: &mut u64,
        last: u64,
        access: Access,
        each: &mut impl FnMut(&D, Span<Pa>, &mut u64) -> Result<(), FaultReason>,
    ) -> Result<(), FaultReason> {
        let end = last - iova + 1;
        while *done < end {
            let (pa, rest_of_page) = self.translate(iova + *done, access)?;
            let run = Span::new(pa, rest_of_page.min(end - *done));
            each(&self.shared.data, run, done)?;
        }
        Ok(())
    }

    /// The physical address of `iova`, and how many bytes of its page there are from there on.
    #[inline]
    fn translate(&self, iova: u64, access: Access) -> Result<(u64, u64), FaultReason> {
        let iotlb = &self.shared.iotlb;
        let domain = self.context.domain;
        for log2 in iotlb.sizes() {
            if let Some(held) = iotlb.find(Key { domain, iova, log2 }) {
                self.counters.iotlb_hits.add(1);
                // A translation that does not allow the access is walked again: the fault then
                // names the entry. So is one of a clean leaf for the first write, which marks it.
                let allowed = held.bits >> PROT_SHIFT & u64::from(access.needs().bits()) != 0;
                let unmarked = access == Access::Write && held.bits & CLEAN != 0;
                if allowed && !unmarked {
                    let offset = iova & ((1 << log2) - 1);
                    return Ok((held.address | offset, (1 << log2) - offset));
                }
                return self.walk(iova, access);
            }
        }
        self.counters.iotlb_misses.add(1);
        self.walk(iova, access)
    }

    #[inline(never)]
    fn walk(&self, iova: u64, access: Access) -> Result<(u64, u64), FaultReason> {
        let Context { domain, walker } = *self.context;
        let clock = &self.shared.clock;
        // Before the first look into a cache or a table: see the protocol.
        let begun = clock.now();
        let may_insert = || begun & 1 == 0 && clock.now() == begun;
        let mut upper = Upper {
            cache: &self.shared.upper,
            domain,
            levels: walker.root().levels,
            needs: access.needs(),
            hit: false,
            may_insert: &may_insert,
        };
        let found = walker.walk(&self.shared.tables, iova, access, &mut upper);
        self.counters.walks.add(1);
        self.counters.upper_hits.add(u64::from(upper.hit));
        let reads = found
            .as_ref()
            .map_or_else(|fault| fault.reads, |found| found.reads);
        self.counters.table_reads.add(u64::from(reads));
        let found = found.map_err(FaultReason::Walk)?;
        let log2 = found.page.len.trailing_zeros();
        let clean = if found.clean { CLEAN } else { 0 };
        let bits = clean | u64::from(found.prot.bits()) << PROT_SHIFT | u64::from(found.level);
        let held = CacheValue {
            address: found.page.pa,
            bits,
        };
        self.shared
            .iotlb
            .insert(Key { domain, iova, log2 }, held, may_insert);
        Ok((found.pa, found.page.len - (iova - found.page.iova)))
    }
}

impl<T, D> Drop for Port<T, D> {
    fn drop(&mut self) {
        self.device.close(&self.slot);
    }
}

impl<T, D> fmt::Debug for Port<T, D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Port")
            .field("device", &self.device.id)
            .field("context", &self.context)
            .field("counters", &self.counters())
            .finish_non_exhaustive()
    }
}

/// Where a cache entry's permissions begin, above its level.
const PROT_SHIFT: u32 = 8;
/// Flag of a leaf that the unit has still to mark as dirty.
const CLEAN: u64 = 1 << 63;

/// The unit's cache of upper levels, for one walk.
struct Upper<'w> {
    cache: &'w Cache,
    domain: DomainId,
    levels: u8,
    needs: Prot,
    hit: bool,
    may_insert: &'w dyn Fn() -> bool,
}

impl WalkCache for Upper<'_> {
    fn find(&mut self, iova: u64) -> Option<UpperTable> {
        // The lowest level first: it saves the most reads. The root itself is never kept.
        (0..self.levels.saturating_sub(1)).find_map(|level| {
            let span_log2 = UpperTable::span_log2(level);
            let held = self.cache.find(Key {
                domain: self.domain,
                iova,
                log2: span_log2,
            })?;
            let prot = Prot::from_bits_truncate((held.bits >> PROT_SHIFT) as u32);
            // Otherwise from further up, so that the walk meets the entry that forbids it.
            if !prot.contains(self.needs) {
                return None;
            }
            self.hit = true;
            let first = iova & (u64::MAX.checked_shl(span_log2).unwrap_or(0));
            Some(UpperTable {
                iova: first,
                span_log2,
                level,
                address: held.address,
                prot,
            })
        })
    }

    fn found(&mut self, table: &UpperTable) {
        let key = Key {
            domain: self.domain,
            iova: table.iova,
            log2: table.span_log2,
        };
        let bits = u64::from(table.prot.bits()) << PROT_SHIFT | u64::from(table.level);
        self.cache.insert(
            key,
            CacheValue {
                address: table.address,
                bits,
            },
            self.may_insert,
        );
    }
}
