//! Notifications of the device to its monitor.

use runs::{GuestAddr, Span};

use super::discarder::NotDiscarded;
use crate::dma::KeepReason;
use crate::stats::Stats;

/// The monitor, notified by the device of what has happened.
///
/// Calls come from within calls of the device, on the same thread.
pub trait BalloonMonitor {
    /// The configuration space has changed: send the driver a configuration change notification.
    fn config_changed(&mut self) {}

    /// Something has happened.
    fn event(&mut self, _event: BalloonEvent) {}

    /// Statistics of the guest: the answer to a request if they were `asked` for, otherwise what the
    /// driver's first buffer held.
    fn stats(&mut self, _stats: &Stats, _asked: bool) {}

    /// Runs of free pages that the driver hints at, merged and ascending, under the current command.
    ///
    /// A driver may use such pages again at any time, even before the device has seen the hint; what it
    /// has written since the command was given is to stay (VIRTIO 1.3, 5.5.6.5). So only who knows
    /// what was written since, by a dirty log, or who knows the driver, may say [`Hint::Discard`]. A
    /// migration clears the bits of these pages in its bitmap and says [`Hint::Noted`].
    fn hinted(&mut self, _runs: &[Span<GuestAddr>]) -> Hint {
        Hint::Noted
    }
}

/// A monitor that ignores all events.
impl BalloonMonitor for () {}

/// Handling of pages that the driver hints at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hint {
    /// The monitor has noted them; the memory stays as it is.
    Noted,
    /// They are discarded before the driver gets its buffer back.
    Discard,
}

/// An event of a device that its monitor hears of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum BalloonEvent {
    /// The driver has told how much is in the balloon.
    Progress {
        /// Bytes wanted in the balloon.
        target: u64,
        /// Bytes that are in it.
        actual: u64,
    },
    /// A part of what the guest has given stays in sight of devices, and was not discarded.
    Kept {
        /// The part.
        run: Span<GuestAddr>,
        /// Why.
        reason: KeepReason,
    },
    /// Devices do not see a part of what the guest takes back.
    NotRestored {
        /// The part.
        run: Span<GuestAddr>,
        /// Why.
        reason: KeepReason,
        /// The reaction of the device.
        then: Unrestored,
    },
    /// A part of what the guest has given could not be discarded.
    NotDiscarded {
        /// The part.
        run: Span<GuestAddr>,
        /// Why.
        cause: NotDiscarded,
    },
    /// The driver begins with hints of this command.
    HintsBegin {
        /// The command's id.
        id: u32,
    },
    /// The driver has no more hints.
    HintsEnd,
    /// The device goes on only after a reset: set `DEVICE_NEEDS_RESET` (VIRTIO 1.3, 2.1.2).
    NeedsReset,
}

/// Handling of a message of deflateq when devices cannot be given its pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Unrestored {
    /// The message is held, and deflateq stands still. The next time it is drained, or on demand, it
    /// is tried again. The guest waits for these pages; nothing is lost.
    #[default]
    Hold,
    /// The message goes back: the guest uses the pages, and devices fault there.
    HandBack,
    /// The message is held and the device stops until it is reset.
    NeedsReset,
}
