//! Accounts on the kernel's own counters of locked and pinned memory.

use std::sync::{Arc, OnceLock};

use hostmem::{Counter, Limits, LimitsError, Pinner, PinnerError};

#[cfg(any(feature = "vfio", feature = "iommufd"))]
use crate::errno::Profile;
use crate::memory::ledger::{Account, Ledger};

impl Ledger {
    /// The account of what this process pins by itself, for tables of ours: on the counter of
    /// [its pinner](Pinner::of_process), with the room that the counter has when this is first called.
    ///
    /// # Errors
    ///
    /// When there is no pinner, or the limit cannot be read.
    pub fn of_process() -> Result<Arc<Self>, PinnerError> {
        static ACCOUNT: OnceLock<Arc<Ledger>> = OnceLock::new();
        if let Some(account) = ACCOUNT.get() {
            return Ok(Arc::clone(account));
        }
        let pinner = Pinner::of_process()?;
        let (counter, room) = (pinner.counter(), pinner.room()?);
        let account = || Self::on(counter, room, 0);
        Ok(Arc::clone(ACCOUNT.get_or_init(account)))
    }

    /// The account of what a kernel maps for this process, with the limit and what is in use when this is
    /// first called: type 1 counts by process, iommufd by user unless its file
    /// [says otherwise](crate::iommufd::Iommufd::ledger).
    ///
    /// # Errors
    ///
    /// When `/proc` does not say what is in use.
    #[cfg(any(feature = "vfio", feature = "iommufd"))]
    pub fn of_kernel(profile: Profile) -> Result<Arc<Self>, LimitsError> {
        static ACCOUNTS: [OnceLock<Arc<Ledger>>; 2] = [const { OnceLock::new() }; 2];
        let [type1, iommufd] = &ACCOUNTS;
        let account = match profile {
            Profile::Type1 => type1,
            Profile::Iommufd => iommufd,
        };
        if let Some(account) = account.get() {
            return Ok(Arc::clone(account));
        }
        let limits = Limits::read()?;
        let counter = match profile {
            // `vfio_lock_acct()`: what is mapped is locked.
            Profile::Type1 => Counter::MmLockedVm,
            // `iopt_pages`: with `CAP_IPC_LOCK` only what is pinned is counted.
            Profile::Iommufd if limits.privileged => Counter::PinnedVm,
            Profile::Iommufd => Counter::UserLockedVm,
        };
        let ledger = Self::of_counter(counter, &limits)?;
        Ok(Arc::clone(account.get_or_init(|| ledger)))
    }

    /// The account on `counter`, with what `limits` allow of it and what is in use now.
    ///
    /// # Errors
    ///
    /// When `/proc` does not say what is in use.
    pub fn of_counter(counter: Counter, limits: &Limits) -> Result<Arc<Self>, LimitsError> {
        let in_use = Limits::in_use(counter)?.known;
        Ok(Self::on(counter, limits.limit(counter), in_use))
    }

    /// The account on `counter` as it is now; `None` when `/proc` does not say.
    #[cfg(feature = "vfio")]
    pub(crate) fn now(counter: impl FnOnce(&Limits) -> Counter) -> Option<Arc<Self>> {
        let limits = Limits::read().ok()?;
        Self::of_counter(counter(&limits), &limits).ok()
    }

    fn on(counter: Counter, limit: Option<u64>, in_use: u64) -> Arc<Self> {
        match counter {
            Counter::UserLockedVm => Self::of_user(counter.name(), limit, in_use),
            Counter::MmLockedVm | Counter::PinnedVm => Self::new(counter.name(), limit, in_use),
        }
    }
}

impl Account {
    pub(crate) fn ledger(&self) -> Result<Arc<Ledger>, PinnerError> {
        match self {
            Self::OfProcess => Ledger::of_process(),
            #[cfg(any(feature = "vfio", feature = "iommufd"))]
            Self::OfKernel(profile) => Ok(Ledger::of_kernel(*profile)?),
            Self::Given(ledger) => Ok(Arc::clone(ledger)),
        }
    }
}
