//! Translation by the software unit, for device models on `vm-memory`.
//!
//! # The protocol
//!
//! A device model's access goes through [`UnitIommu::translate`], which has the unit walk the tables, and holds the
//! result for as long as the access lasts. An unmap must not return before:
//!
//! ```text
//! access:  enter the current period;  walk;  copy;  leave the period
//! unmap:   empty tables;  flush the unit;  wait for the period before;  begin a new one;  wait for the last one
//! ```
//!
//! An access that enters after the new period has begun comes after the flush, and finds the tables emptied. One that
//! entered earlier is waited for. So an unmap waits for the accesses that began before it and for no others, however
//! many follow. Entering takes a lock for a moment, so that both sides agree on the order.
//!
//! The address space flushes the unit first and its listeners then, which is the order needed here.

use std::fmt;
use std::ops::Deref;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ioas::{Area, Listener};
use iommu::{DeviceId, FlushError, Port, SoftwareUnit};
use iopt::HeapTables;
use iopt::walk::Access;
use runs::{Iova, Span};
use vm_memory::iommu::{Error, IotlbIterator, IovaRange};
use vm_memory::{GuestAddress, Iommu, Iotlb, Permissions};

/// The unit: it walks tables on the heap. Device models reach the data by themselves.
pub(crate) type Unit = SoftwareUnit<Arc<HeapTables>, ()>;
type UnitPort = Port<Arc<HeapTables>, ()>;

/// The longest access that is translated at once, bytes: longer ones are refused, since they would hold the unit for
/// too long.
pub const MOST_ACCESS: usize = 16 << 20;

/// Translates device addresses by the tables of the address space, for [`vm_memory::IommuMemory`].
///
/// An access that is not permitted fails with the unit's fault, and is in its log
/// ([`ClientMemory::drain_faults`](crate::ClientMemory::drain_faults)).
pub struct UnitIommu {
    unit: Unit,
    device: DeviceId,
    periods: Mutex<Periods>,
    /// An access has left.
    left: Condvar,
    wait: Duration,
}

/// Accesses under way.
#[derive(Default)]
struct Periods {
    /// The current one is the lowest bit.
    period: u64,
    /// Accesses under way that entered in an even period, and in an odd one.
    under_way: [u64; 2],
    /// Ports that no access uses.
    ports: Vec<UnitPort>,
}

impl Periods {
    const fn current(&self) -> usize {
        (self.period & 1) as usize
    }
}

impl UnitIommu {
    pub(crate) fn new(unit: Unit, device: DeviceId, wait: Duration) -> Self {
        Self {
            unit,
            device,
            periods: Mutex::default(),
            left: Condvar::new(),
            wait,
        }
    }

    fn lock(&self) -> MutexGuard<'_, Periods> {
        self.periods.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn enter(&self) -> AccessGuard<'_> {
        let mut periods = self.lock();
        let period = periods.current();
        periods.under_way[period] += 1;
        let port = periods.ports.pop();
        drop(periods);
        AccessGuard {
            iotlb: Iotlb::new(),
            iommu: self,
            period,
            port: Some(port.unwrap_or_else(|| self.unit.port(self.device))),
        }
    }

    /// Waits until all accesses that are under way have ended. Returns how long it has waited in vain, if it did.
    pub(crate) fn settle(&self) -> Result<(), Duration> {
        let begun = Instant::now();
        let mut periods = self.lock();
        // Accesses of the period before are still under way if an earlier wait was in vain.
        for begin_new in [true, false] {
            let other = periods.current() ^ 1;
            while periods.under_way[other] > 0 {
                let waited = begun.elapsed();
                let Some(rest) = self.wait.checked_sub(waited).filter(|rest| !rest.is_zero())
                else {
                    return Err(waited);
                };
                let woken = self.left.wait_timeout(periods, rest);
                (periods, _) = woken.unwrap_or_else(PoisonError::into_inner);
            }
            if begin_new {
                periods.period += 1;
            }
        }
        Ok(())
    }
}

impl fmt::Debug for UnitIommu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UnitIommu")
            .field("device", &self.device)
            .finish_non_exhaustive()
    }
}

/// Translation that an access uses; the access is under way until this is dropped.
pub struct AccessGuard<'a> {
    iotlb: Iotlb,
    iommu: &'a UnitIommu,
    period: usize,
    port: Option<UnitPort>,
}

impl fmt::Debug for AccessGuard<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.iotlb.fmt(f)
    }
}

impl Deref for AccessGuard<'_> {
    type Target = Iotlb;

    fn deref(&self) -> &Iotlb {
        &self.iotlb
    }
}

impl Drop for AccessGuard<'_> {
    fn drop(&mut self) {
        let mut periods = self.iommu.lock();
        periods.ports.extend(self.port.take());
        periods.under_way[self.period] -= 1;
        if periods.under_way[self.period] == 0 {
            self.iommu.left.notify_all();
        }
    }
}

impl Iommu for UnitIommu {
    type IotlbGuard<'a> = AccessGuard<'a>;

    fn translate(
        &self,
        iova: GuestAddress,
        length: usize,
        access: Permissions,
    ) -> Result<IotlbIterator<AccessGuard<'_>>, Error> {
        let refused = |reason: String| Error::CannotResolve {
            iova_range: IovaRange { base: iova, length },
            reason,
        };
        if length > MOST_ACCESS {
            return Err(refused(format!(
                "{length} bytes at once, {MOST_ACCESS} are allowed"
            )));
        }
        // vm-memory's ranges end before 2^64.
        if iova.0.checked_add(length as u64).is_none() {
            return Err(refused("the range ends beyond 2^64".into()));
        }
        let mut held = self.enter();
        let (iotlb, Some(port)) = (&mut held.iotlb, &mut held.port) else {
            return Err(refused("no port".into()));
        };
        let mut at = iova.0;
        // It refuses nothing so far; what it would refuse is not found below.
        let mut note = |run: Span<runs::Pa>| {
            let (from, to) = (GuestAddress(at), GuestAddress(run.start));
            let _ = iotlb.set_mapping(from, to, run.len as usize, access);
            at += run.len;
        };
        // Both at once is what an access for reading and writing takes.
        let both = [Access::Read, Access::Write];
        let accesses = match access {
            Permissions::No => return Err(refused("an access for nothing".into())),
            Permissions::Read => &both[..1],
            Permissions::Write => &both[1..],
            Permissions::ReadWrite => &both[..],
        };
        for (nth, access) in accesses.iter().enumerate() {
            let found = match nth {
                0 => port.translate(iova.0, length as u64, *access, &mut note),
                _ => port.translate(iova.0, length as u64, *access, &mut |_| ()),
            };
            found.map_err(|aborted| refused(aborted.fault.to_string()))?;
        }
        Iotlb::lookup(held, iova, length, access)
            .map_err(|fails| refused(format!("{} stretches are missing", fails.misses.len())))
    }
}

impl Listener for UnitIommu {
    fn mapped(&self, _area: &Area) {}

    fn unmapped(&self, range: Span<Iova>) -> Result<(), FlushError> {
        self.settle()
            .map_err(|waited| FlushError::Held { range, waited })
    }
}
