//! Devices under a load on a machine that is given. Units and times are those of
//! [`allreduce`](super::allreduce()).

use std::fmt;

use runs::{Iova, Span};
use serde::Serialize;

use super::StudyError;
use crate::simulation::{DeviceModel, Domain, Order, Outcome, ReadTimes, Simulation, UnitModel};

/// Buffers of a device that streams.
pub const STREAMS: u64 = 16;
/// Bytes of one.
pub const BUFFER: u64 = 4 << 20;
/// Requests of all devices together, so that many take no longer than a few.
const REQUESTS: u64 = 32_000;

/// What devices do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Traffic {
    /// Each device goes through 16 buffers of 4 MiB, page by page, one page at a time.
    Streams,
    /// Each device has 64 reads of 512 bytes under way, anywhere.
    Random,
}

impl fmt::Display for Traffic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Streams => "streams",
            Self::Random => "random",
        })
    }
}

/// A device of the machine.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LoadedDevice {
    /// The place of its unit.
    pub unit: usize,
    /// The place of its domain.
    pub domain: usize,
    /// What its link carries.
    pub link_bytes_per_second: f64,
}

/// What becomes of each device when all work in `memory` at once, with the units on these nodes.
///
/// # Errors
///
/// When something cannot be simulated.
pub fn under_load(
    traffic: Traffic,
    memory: Span<Iova>,
    units: &[Option<u32>],
    devices: &[LoadedDevice],
    domains: Vec<&Domain>,
    reads: ReadTimes,
) -> Result<Vec<Outcome>, StudyError> {
    let unit = |node: &Option<u32>| UnitModel {
        node: *node,
        iotlb_entries: 64,
        upper_entries: [14; 5],
        walks: 5,
        miss_ns: 26.0,
    };
    let buffer = BUFFER.min(memory.len);
    let device = |(place, device): (u64, &LoadedDevice)| {
        let buffers = (0..STREAMS).map(|stream| {
            let nth = (place * STREAMS + stream) % (memory.len / buffer).max(1);
            Span::new(memory.start + nth * buffer, buffer)
        });
        let streams = DeviceModel {
            unit: device.unit,
            domain: device.domain,
            request_bytes: 4096,
            outstanding: 1,
            link_bytes_per_second: device.link_bytes_per_second,
            latency_ns: 0.0,
            tlb: None,
            streams: buffers.collect(),
            order: Order::Sequential,
            peer: None,
        };
        match traffic {
            Traffic::Streams => streams,
            Traffic::Random => DeviceModel {
                request_bytes: 512,
                outstanding: 64,
                latency_ns: 490.0,
                streams: vec![memory],
                order: Order::Random,
                ..streams
            },
        }
    };
    let each = (REQUESTS / devices.len().max(1) as u64).clamp(200, 2000);
    let simulation = Simulation {
        units: units.iter().map(unit).collect(),
        devices: (0..).zip(devices).map(device).collect(),
        domains,
        reads,
        seed: 1,
        warm_up: each / 4,
        requests: each - each / 4,
    };
    Ok(simulation.run()?)
}
