//! Events of a running balloon.

use serde::Serialize;
use virtio_balloon::{Features, Stats, Tag};

/// Something that happened. In JSON the name stands under `event`, and names of numbers end in their
/// unit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
#[non_exhaustive]
pub enum BackendEvent {
    /// Front ends can connect.
    Listening {
        /// To this socket.
        socket: String,
    },
    /// A front end did, and has sent its first message.
    Connected,
    /// The guest has other memory than the last one.
    Memory {
        /// Bytes of it.
        bytes: u64,
    },
    /// A driver took these features.
    Negotiated {
        /// Names of the features in the standard, without `VIRTIO_BALLOON_F_`.
        features: Vec<&'static str>,
    },
    /// State of the balloon, when it has changed.
    Balloon(BalloonReport),
    /// Statistics of the guest.
    Stats(StatsReport),
    /// The driver begins with hints at free pages.
    HintsBegin {
        /// The command's id.
        id: u32,
    },
    /// It has no more.
    HintsEnd {
        /// Bytes hinted at since the start, each time they were.
        hinted_bytes: u64,
    },
    /// Memory could not be given back to the machine.
    NotDiscarded {
        /// The guest's address.
        address: u64,
        /// Its length, bytes.
        bytes: u64,
        /// Cause.
        cause: String,
    },
    /// Something of the driver or the front end was refused.
    Refused {
        /// Cause.
        cause: String,
    },
    /// Events were dropped.
    Lost {
        /// Number of dropped events.
        events: u64,
    },
    /// The front end has gone.
    Disconnected {
        /// Error of the connection, if there was one.
        cause: Option<String>,
    },
}

/// State of a balloon. Counts go on from the start of the program.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct BalloonReport {
    /// Wanted in the balloon.
    pub target_bytes: u64,
    /// In it, as the driver says.
    pub actual_bytes: u64,
    /// Time to reach the last target that was reached, in nanoseconds.
    pub reached_ns: u64,
    /// Messages of all queues.
    pub messages: u64,
    /// Given by the driver.
    pub inflated_bytes: u64,
    /// Taken back by it.
    pub deflated_bytes: u64,
    /// Reported as free.
    pub reported_bytes: u64,
    /// Given back to the machine.
    pub discarded_bytes: u64,
    /// In so many runs, a call each.
    pub discards: u64,
    /// Time of the device's work in its queues, in nanoseconds.
    pub busy_ns: u64,
    /// Part of it spent on giving memory back.
    pub discarding_ns: u64,
    /// Parts of messages that were refused.
    pub refused: u64,
}

/// Statistics of the guest; what it does not say is left out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub struct StatsReport {
    /// Swapped in.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub swapped_in_bytes: Option<u64>,
    /// Swapped out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub swapped_out_bytes: Option<u64>,
    /// Page faults that took input or output.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub major_faults: Option<u64>,
    /// Page faults without input or output.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub minor_faults: Option<u64>,
    /// Not used for anything.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub free_bytes: Option<u64>,
    /// In all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub total_bytes: Option<u64>,
    /// To be had without swapping.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub available_bytes: Option<u64>,
    /// Caches of files.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cache_bytes: Option<u64>,
    /// Huge pages that were had.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub huge_page_allocations: Option<u64>,
    /// Huge pages that were not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub huge_page_failures: Option<u64>,
    /// Processes killed for want of memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub oom_kills: Option<u64>,
}

impl From<&Stats> for StatsReport {
    fn from(stats: &Stats) -> Self {
        Self {
            swapped_in_bytes: stats.get(Tag::SwapIn),
            swapped_out_bytes: stats.get(Tag::SwapOut),
            major_faults: stats.get(Tag::MajorFaults),
            minor_faults: stats.get(Tag::MinorFaults),
            free_bytes: stats.get(Tag::FreeMemory),
            total_bytes: stats.get(Tag::TotalMemory),
            available_bytes: stats.get(Tag::AvailableMemory),
            cache_bytes: stats.get(Tag::DiskCaches),
            huge_page_allocations: stats.get(Tag::HugetlbAllocations),
            huge_page_failures: stats.get(Tag::HugetlbFailures),
            oom_kills: stats.get(Tag::OomKills),
        }
    }
}

/// The names of the balloon's features that are among these.
pub(super) fn names(features: Features) -> Vec<&'static str> {
    let known = [
        (Features::MUST_TELL_HOST, "MUST_TELL_HOST"),
        (Features::STATS_VQ, "STATS_VQ"),
        (Features::DEFLATE_ON_OOM, "DEFLATE_ON_OOM"),
        (Features::FREE_PAGE_HINT, "FREE_PAGE_HINT"),
        (Features::PAGE_POISON, "PAGE_POISON"),
        (Features::PAGE_REPORTING, "PAGE_REPORTING"),
    ];
    let there = known.into_iter().filter(|(one, _)| features.contains(*one));
    there.map(|(_, name)| name).collect()
}
