//! Accounts on the kernel's own counters of locked and pinned memory.

use std::sync::Arc;

use hostmem::{Counter, Limits, LimitsError};

use crate::Ledger;
#[cfg(feature = "iommufd")]
use crate::iommufd::RlimitMode;

impl Ledger {
    /// The account on `counter`, with what `limits` allow of it and what is in use now.
    ///
    /// # Errors
    ///
    /// When `/proc` does not say what is in use.
    pub fn of_counter(counter: Counter, limits: &Limits) -> Result<Arc<Self>, LimitsError> {
        let name = match counter {
            Counter::UserLockedVm => "user->locked_vm",
            Counter::MmLockedVm => "mm->locked_vm",
            Counter::PinnedVm => "mm->pinned_vm",
        };
        let limit = limits.limit(counter);
        let in_use = Limits::in_use(counter)?.known;
        Ok(match counter {
            Counter::UserLockedVm => Self::of_user(name, limit, in_use),
            Counter::MmLockedVm | Counter::PinnedVm => Self::new(name, limit, in_use),
        })
    }
}

#[cfg(feature = "iommufd")]
impl RlimitMode {
    /// The counter that the kernel raises for what it maps by itself: containers of VFIO's type 1 count by
    /// process; iommufd counts as its file [says](crate::iommufd::Iommufd::rlimit_mode), and for a privileged
    /// user only what is pinned.
    pub const fn counter(self, limits: &Limits) -> Counter {
        match self {
            Self::Process => Counter::MmLockedVm,
            Self::User if limits.privileged => Counter::PinnedVm,
            Self::User => Counter::UserLockedVm,
        }
    }
}
