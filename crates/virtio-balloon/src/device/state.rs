//! State of a device, as plain data: for a monitor that goes on with the same guest elsewhere or
//! later.

use std::vec::Vec;

use runs::{GuestAddr, Span};

use crate::config::BalloonConfig;
use crate::features::Features;

/// A device's state. Counters and refusals are not in it, and neither are the rings, which are the
/// transport's.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BalloonState {
    /// The features, once they are negotiated.
    pub negotiated: Option<Features>,
    /// The configuration space: among others the target, `actual` and the hints' command.
    pub config: BalloonConfig,
    /// The buffer of statsq that waits for a request.
    pub stats: StatsState,
    /// The message of deflateq that is held.
    pub held: Option<PendingDeflate>,
    /// Where hinting stands.
    pub hints: Hints,
    /// Parts of huge pages that are in the balloon.
    pub partial: Vec<PartialState>,
}

/// Where statistics stand.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StatsState {
    /// The first descriptor of the buffer that the device has.
    pub buffer: Option<u16>,
    /// A request is under way.
    pub asked: bool,
    /// The driver's first buffer has come.
    pub first_seen: bool,
}

/// A message of deflateq that is held, since devices could not be given its pages.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PendingDeflate {
    /// Its first descriptor.
    pub head: u16,
    /// Runs that devices still lack.
    pub runs: Vec<Span<GuestAddr>>,
}

/// Where free page hinting stands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Hints {
    /// The id of the latest command; 0 before the first.
    pub latest: u32,
    /// The command whose hints the driver sends.
    pub begun: Option<u32>,
    /// The driver has said that it stopped, since the latest command.
    pub stopped: bool,
}

/// Ballooned pages of a region's huge pages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PartialState {
    /// The region, of whole huge pages.
    pub region: Span<GuestAddr>,
    /// A bit for each page of 4 KiB.
    pub bits: Vec<u64>,
}
