//! The ledger: charges for locked memory, one for each request.
//!
//! The kernel charges a pin to a counter with a limit (`RLIMIT_MEMLOCK`). The ledger keeps the same
//! account on this side, so that a request that cannot succeed is refused before anything is
//! touched, and with numbers. A request is charged in one step, whatever its number of pages.

use alloc::sync::Arc;
use core::fmt;
use core::sync::atomic::{AtomicU64, Ordering};

use runs::Bytes;

/// One account of locked memory, shared by all address spaces of its owner.
#[derive(Debug)]
pub struct Ledger {
    counter: &'static str,
    limit: Option<u64>,
    /// Bytes in use: what was there before, and what is charged here.
    in_use: AtomicU64,
    steps: AtomicU64,
    /// Others may use some of the same counter; how much cannot be read.
    others: bool,
    /// Guest memory that is charged here.
    #[cfg(all(feature = "linux", feature = "vm-memory"))]
    pub(crate) guests: crate::memory::regions::Regions,
}

impl Ledger {
    /// An account on the kernel's `counter` of which at most `limit` bytes may be in use, and of
    /// which `in_use` bytes are already, as far as is known. `None` when no limit applies.
    pub fn new(counter: &'static str, limit: Option<u64>, in_use: u64) -> Arc<Self> {
        Self::with(counter, limit, in_use, false)
    }

    /// The same, of a counter that is kept by user: other processes may hold some of it, and no file
    /// says how much. Then a [`forecast`](Self::forecast) cannot promise that anything fits.
    pub fn of_user(counter: &'static str, limit: Option<u64>, in_use: u64) -> Arc<Self> {
        Self::with(counter, limit, in_use, true)
    }

    fn with(counter: &'static str, limit: Option<u64>, in_use: u64, others: bool) -> Arc<Self> {
        Arc::new(Self {
            counter,
            limit,
            in_use: in_use.into(),
            steps: 0.into(),
            others,
            #[cfg(all(feature = "linux", feature = "vm-memory"))]
            guests: Default::default(),
        })
    }

    /// An account that refuses nothing.
    pub fn unlimited() -> Arc<Self> {
        Self::new("no counter", None, 0)
    }

    /// The kernel's counter.
    pub const fn counter(&self) -> &'static str {
        self.counter
    }

    /// The limit in bytes.
    pub const fn limit(&self) -> Option<u64> {
        self.limit
    }

    /// Bytes in use.
    pub fn in_use(&self) -> u64 {
        self.in_use.load(Ordering::Relaxed)
    }

    /// Number of charges so far: one per request, not per page.
    pub fn steps(&self) -> u64 {
        self.steps.load(Ordering::Relaxed)
    }

    /// Says if `bytes` more would fit, as far as can be known. Nothing is charged.
    pub fn forecast(&self, bytes: u64) -> Forecast {
        let in_use = self.in_use();
        let Some(limit) = self.limit else {
            return Forecast::Fits { needed: bytes };
        };
        let sum = in_use.checked_add(bytes).filter(|sum| *sum <= limit);
        match sum {
            None => Forecast::DoesNotFit(OverLimit {
                needed: bytes,
                limit,
                in_use,
                counter: self.counter,
            }),
            Some(sum) if self.others && bytes > 0 => Forecast::Unknown {
                needed: bytes,
                room_for_others: limit - sum,
                counter: self.counter,
            },
            Some(_) => Forecast::Fits { needed: bytes },
        }
    }

    /// Charges `bytes` in one step, or refuses and charges nothing. The charge is given back,
    /// exactly, when it is dropped.
    pub fn charge(self: &Arc<Self>, bytes: u64) -> Result<Charge, OverLimit> {
        let limit = self.limit.unwrap_or(u64::MAX);
        self.in_use
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |in_use| {
                in_use.checked_add(bytes).filter(|sum| *sum <= limit)
            })
            .map_err(|in_use| OverLimit {
                needed: bytes,
                limit,
                in_use,
                counter: self.counter,
            })?;
        self.steps.fetch_add(1, Ordering::Relaxed);
        Ok(Charge {
            ledger: Arc::clone(self),
            bytes,
        })
    }
}

/// The account of an address space.
#[derive(Clone, Debug)]
pub(crate) enum Account {
    /// Pins of this process.
    OfProcess,
    /// Mappings of a kernel's interface.
    #[cfg(any(feature = "vfio", feature = "iommufd"))]
    OfKernel(#[cfg_attr(not(feature = "linux"), expect(dead_code))] crate::errno::Profile),
    /// Ledger of the opened file, or another one that was asked for.
    Given(#[cfg_attr(not(feature = "linux"), expect(dead_code))] Arc<Ledger>),
}

/// Bytes that are charged until this is dropped.
#[derive(Debug)]
#[must_use = "dropping a charge gives it back"]
pub struct Charge {
    ledger: Arc<Ledger>,
    bytes: u64,
}

impl Charge {
    /// Number of bytes.
    pub const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Takes `bytes` of it out, or what there is.
    pub(crate) fn split(&mut self, bytes: u64) -> Self {
        let bytes = bytes.min(self.bytes);
        self.bytes -= bytes;
        Self {
            ledger: Arc::clone(&self.ledger),
            bytes,
        }
    }

    /// No bytes.
    pub(crate) fn nothing(ledger: &Arc<Ledger>) -> Self {
        Self {
            ledger: Arc::clone(ledger),
            bytes: 0,
        }
    }

    /// Charges `bytes` more to the same ledger.
    pub(crate) fn more(&self, bytes: u64) -> Result<Self, OverLimit> {
        self.ledger.charge(bytes)
    }

    /// Takes in `other`, of the same ledger.
    pub(crate) fn join(&mut self, mut other: Self) {
        debug_assert!(Arc::ptr_eq(&self.ledger, &other.ledger));
        self.bytes += core::mem::take(&mut other.bytes);
    }

    /// Gives back all but `bytes`. It never grows: what is charged for parts of a huge page may
    /// for a moment be more than was charged for the whole.
    #[cfg(any(feature = "vfio", feature = "iommufd"))]
    pub(crate) fn shrink_to(&mut self, bytes: u64) {
        let stays = self.split(bytes);
        drop(core::mem::replace(self, stays));
    }

    /// Never gives it back: what it was charged for may still be pinned.
    pub(crate) fn keep(mut self) {
        self.bytes = 0;
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        // Most are empty when they go: joined with others.
        if self.bytes > 0 {
            self.ledger.in_use.fetch_sub(self.bytes, Ordering::Relaxed);
        }
    }
}

/// Answer to whether a request fits under the limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Forecast {
    /// It does.
    Fits {
        /// Bytes that it would charge.
        needed: u64,
    },
    /// It does not, for sure.
    DoesNotFit(OverLimit),
    /// It fits if the other processes of this user hold no more than `room_for_others` bytes on the
    /// same counter, which no file shows.
    Unknown {
        /// Bytes that it would charge.
        needed: u64,
        /// Bytes that others may hold at most.
        room_for_others: u64,
        /// The kernel's counter.
        counter: &'static str,
    },
}

/// A sentence with the numbers.
impl fmt::Display for Forecast {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fits { needed } => write!(f, "{} fit", Bytes(*needed)),
            Self::DoesNotFit(cause) => cause.fmt(f),
            Self::Unknown {
                needed,
                room_for_others,
                counter,
            } => write!(
                f,
                "{} fit if other processes of this user hold no more than {} ({counter})",
                Bytes(*needed),
                Bytes(*room_for_others)
            ),
        }
    }
}

/// A charge that was refused. Nothing was charged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "needs {}, {} allowed, {} in use ({counter}){}",
    Bytes(*.needed),
    Bytes(*.limit),
    Bytes(*.in_use),
    Raise(self)
)]
pub struct OverLimit {
    /// Bytes that were to be charged.
    pub needed: u64,
    /// Bytes that are allowed.
    pub limit: u64,
    /// Bytes in use.
    pub in_use: u64,
    /// The kernel's counter.
    pub counter: &'static str,
}

impl OverLimit {
    /// Bytes by which the limit is too low.
    pub const fn missing(&self) -> u64 {
        let sum = self.in_use.saturating_add(self.needed);
        sum.saturating_sub(self.limit)
    }
}

/// Bytes that are missing, processes that the limit counts, and how it is raised. A counter that is none of the kernel's has a limit
/// that the program itself has set.
struct Raise<'a>(&'a OverLimit);

impl fmt::Display for Raise<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, ": {} short", Bytes(self.0.missing()))?;
        let counts = match self.0.counter {
            "user->locked_vm" => "all processes of the user",
            "mm->locked_vm" => "this process",
            _ => return Ok(()),
        };
        write!(
            f,
            "; RLIMIT_MEMLOCK, which counts {counts}, is raised by `ulimit -l` or LimitMEMLOCK=, and lifted by CAP_IPC_LOCK"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::string::ToString;

    #[test]
    fn a_forecast_says_what_is_not_known() {
        let mine = Ledger::new("mm->locked_vm", Some(64), 12);
        assert_eq!(mine.forecast(52), Forecast::Fits { needed: 52 });
        assert_eq!(
            mine.forecast(53).to_string(),
            "needs 53 bytes, 64 bytes allowed, 12 bytes in use (mm->locked_vm): 1 bytes short; RLIMIT_MEMLOCK, which \
             counts this process, is raised by `ulimit -l` or LimitMEMLOCK=, and lifted by CAP_IPC_LOCK"
        );
        let users = Ledger::of_user("user->locked_vm", Some(64), 12);
        assert_eq!(
            users.forecast(50).to_string(),
            "50 bytes fit if other processes of this user hold no more than 2 bytes \
             (user->locked_vm)"
        );
        // A limit of the program's own.
        let own = OverLimit {
            needed: 5,
            limit: 8,
            in_use: 4,
            counter: "mine",
        };
        assert_eq!(own.missing(), 1);
        assert!(own.to_string().ends_with("(mine): 1 bytes short"), "{own}");
        assert_eq!(users.forecast(0), Forecast::Fits { needed: 0 });
        assert!(matches!(users.forecast(53), Forecast::DoesNotFit(_)));
        let free = Ledger::of_user("user->locked_vm", None, 12);
        let all = Forecast::Fits { needed: u64::MAX };
        assert_eq!(free.forecast(u64::MAX), all);
        assert_eq!(mine.in_use(), 12);
    }

    #[test]
    fn a_charge_is_refused_with_numbers_and_given_back_exactly() {
        let ledger = Ledger::new("user->locked_vm", Some(64 << 20), 12 << 20);
        assert_eq!(
            ledger.charge(2 << 30).unwrap_err().to_string(),
            "needs 2 GiB, 64 MiB allowed, 12 MiB in use (user->locked_vm): 1.9 GiB short; RLIMIT_MEMLOCK, which \
             counts all processes of the user, is raised by `ulimit -l` or LimitMEMLOCK=, and lifted by CAP_IPC_LOCK"
        );
        let first = ledger.charge(50 << 20).unwrap();
        let second = ledger.charge(2 << 20).unwrap();
        assert!(ledger.charge(1).is_err());
        assert!(ledger.charge(u64::MAX).is_err());
        drop(first);
        assert_eq!(ledger.in_use(), 14 << 20);
        drop(second);
        assert_eq!((ledger.in_use(), ledger.steps()), (12 << 20, 2));
    }
}
