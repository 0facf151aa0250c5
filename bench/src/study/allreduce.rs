//! The machines of origin 5: four NICs and four GPUs on each of two sockets, an NCCL allreduce.
//!
//! A ring goes through all NICs, so it is as fast as the slowest. With `n` GPUs each NIC carries
//! `2 (n - 1) / n` times the rate of the allreduce, divided by the number of NICs (NCCL's
//! documentation of its tests, "Performance", "AllReduce": the bus bandwidth). How many machines took part, and so
//! `n`, was not published: it is an assumed input.
//!
//! Each NIC translates a page, transfers it, and goes to the next, in as many streams as its
//! channels have buffers: it has ATS, and talks to the memory of a GPU below the same unit.

use iopt::FormatId;
use runs::Span;

use super::{Basis, Knob, Row, Standing, Study, StudyError, Varied, study, whole};
use crate::simulation::{DeviceModel, DeviceTlb, Domain, Order, ReadTimes, Simulation, UnitModel};

const PAGE: u64 = 4096;
/// NICs of a socket, and as many GPUs.
const NICS: usize = 4;
/// Where the buffers begin.
const BUFFERS: u64 = 1 << 32;

#[derive(Clone, Copy)]
struct Values {
    hosts: f64,
    link_gbps: f64,
    local_ns: f64,
    remote_ns: f64,
    miss_ns: f64,
    streams: f64,
    buffer_mib: f64,
    device_tlb: f64,
    iotlb: f64,
    upper: f64,
    walks: f64,
}

const VALUES: Values = Values {
    hosts: 2.0,
    link_gbps: 200.0,
    local_ns: 90.0,
    remote_ns: 170.0,
    miss_ns: 26.0,
    streams: 16.0,
    buffer_mib: 4.0,
    device_tlb: 64.0,
    iotlb: 64.0,
    upper: 14.0,
    walks: 5.0,
};

const KNOBS: [Knob<Values>; 11] = [
    Knob {
        name: "read of a table entry, local",
        unit: "ns",
        basis: Basis::Published("DRAM of servers, 80 to 100 (arXiv 2204.03290): the middle"),
        varied: Varied::ByPart,
        at: |values| &mut values.local_ns,
    },
    Knob {
        name: "read of a table entry, remote",
        unit: "ns",
        basis: Basis::Published("DRAM of servers, 140 to 200 (arXiv 2204.03290): the middle"),
        varied: Varied::ByPart,
        at: |values| &mut values.remote_ns,
    },
    Knob {
        name: "buffer of a stream",
        unit: "MiB",
        basis: Basis::Published("NCCL's documentation, NCCL_BUFFSIZE"),
        varied: Varied::ByPart,
        at: |values| &mut values.buffer_mib,
    },
    Knob {
        name: "tables kept, a level",
        unit: "entries",
        basis: Basis::Fitted("second socket alone, shared table"),
        varied: Varied::ByPart,
        at: |values| &mut values.upper,
    },
    Knob {
        name: "machines",
        unit: "",
        basis: Basis::Assumed("an allreduce over NICs needs two; the origin does not state it"),
        varied: Varied::To([1.0, 4.0]),
        at: |values| &mut values.hosts,
    },
    Knob {
        name: "miss, besides its reads",
        unit: "ns",
        basis: Basis::Assumed("as in pcie-bench"),
        varied: Varied::ByPart,
        at: |values| &mut values.miss_ns,
    },
    Knob {
        name: "link of a NIC, and of a GPU",
        unit: "Gb/s",
        basis: Basis::Assumed("NICs of that year"),
        varied: Varied::ByPart,
        at: |values| &mut values.link_gbps,
    },
    Knob {
        name: "streams of a NIC",
        unit: "",
        basis: Basis::Assumed("8 channels, each sends and receives; they take turns at random"),
        varied: Varied::ByPart,
        at: |values| &mut values.streams,
    },
    Knob {
        name: "TLB of a NIC",
        unit: "entries",
        basis: Basis::Assumed("as the unit's; far less than the buffers"),
        varied: Varied::ByPart,
        at: |values| &mut values.device_tlb,
    },
    Knob {
        name: "IOTLB of a unit; each NIC has a unit, with its GPU",
        unit: "entries",
        basis: Basis::Assumed("as in pcie-bench"),
        varied: Varied::ByPart,
        at: |values| &mut values.iotlb,
    },
    Knob {
        name: "walks at the same time",
        unit: "",
        basis: Basis::Assumed("as in pcie-bench"),
        varied: Varied::ByPart,
        at: |values| &mut values.walks,
    },
];

/// Simulates the table of origin 5.
///
/// # Errors
///
/// When there is no memory for the tables.
pub fn allreduce() -> Result<Study, StudyError> {
    let title = "origin 5: NCCL allreduce on machines of two sockets, GB/s";
    study(title, VALUES, &KNOBS, rows)
}

/// The rows of [`allreduce`] alone, without varying an input.
///
/// # Errors
///
/// Errors of [`allreduce`].
pub fn allreduce_rows() -> Result<Vec<Row>, StudyError> {
    rows(&VALUES)
}

/// The sockets that take part.
const FIRST: &[u32] = &[0];
const SECOND: &[u32] = &[1];
const BOTH: &[u32] = &[0, 1];

fn rows(values: &Values) -> Result<Vec<Row>, StudyError> {
    use Standing::{Counts, Fitted, Follows};
    let mapped = Span::new(BUFFERS, buffers(values, 2 * NICS));
    let tables = |node| Domain::map(FormatId::VtdSs, mapped, PAGE, Some(node));
    let (first, second) = (tables(0)?, tables(1)?);
    // One table for all lies on the second socket: that is the one that was not slow.
    let shared = [&second, &second];
    let per_node = [&first, &second];
    let row = |name: &str, sockets, tables, published, standing| {
        Ok::<_, StudyError>(Row {
            name: name.into(),
            published,
            simulated: rate(values, sockets, tables)?,
            unit: "GB/s",
            standing,
        })
    };
    Ok(vec![
        row(
            "first socket alone, shared table",
            FIRST,
            shared,
            24.0,
            Counts,
        )?,
        row(
            "second socket alone, shared table",
            SECOND,
            shared,
            32.0,
            Fitted,
        )?,
        row("both sockets, shared table", BOTH, shared, 45.0, Counts)?,
        row(
            "first socket alone, table per node",
            FIRST,
            per_node,
            32.0,
            Follows,
        )?,
        row(
            "second socket alone, table per node",
            SECOND,
            per_node,
            32.0,
            Follows,
        )?,
        row("both sockets, table per node", BOTH, per_node, 63.0, Counts)?,
    ])
}

/// Bytes of the buffers of so many NICs.
fn buffers(values: &Values, nics: usize) -> u64 {
    nics as u64 * u64::from(whole(values.streams)) * buffer(values)
}

/// Bytes of one buffer, whole pages.
fn buffer(values: &Values) -> u64 {
    (values.buffer_mib * f64::from(1 << 20)) as u64 / PAGE * PAGE
}

/// GB/s of the allreduce over the NICs of these sockets, of which `tables[socket]` are walked.
fn rate(values: &Values, sockets: &[u32], tables: [&Domain; 2]) -> Result<f64, StudyError> {
    let (mut units, mut devices) = (Vec::new(), Vec::new());
    for (at, socket) in sockets.iter().enumerate() {
        for nic in at * NICS..(at + 1) * NICS {
            let streams = (0..u64::from(whole(values.streams))).map(|stream| {
                let start = BUFFERS + buffers(values, nic) + stream * buffer(values);
                Span::new(start, buffer(values))
            });
            let nic = DeviceModel {
                unit: units.len(),
                domain: *socket as usize,
                request_bytes: PAGE,
                outstanding: 1,
                link_bytes_per_second: values.link_gbps * 1e9 / 8.0,
                latency_ns: 0.0,
                tlb: Some(DeviceTlb {
                    entries: whole(values.device_tlb),
                    hit_ns: 0.0,
                }),
                streams: streams.collect(),
                order: Order::Sequential,
                peer: Some(devices.len() + 1),
            };
            // It only answers.
            let gpu = DeviceModel {
                outstanding: 0,
                tlb: None,
                peer: None,
                ..nic.clone()
            };
            devices.extend([nic, gpu]);
            units.push(UnitModel {
                node: Some(*socket),
                iotlb_entries: whole(values.iotlb),
                upper_entries: [whole(values.upper); 5],
                walks: whole(values.walks),
                miss_ns: values.miss_ns,
            });
        }
    }
    let nics = (units.len()) as f64;
    let simulation = Simulation {
        units,
        devices,
        domains: tables.into(),
        reads: ReadTimes::new(values.local_ns, values.remote_ns),
        seed: 1,
        warm_up: 1000,
        requests: 4000,
    };
    let outcomes = simulation.run()?;
    let rates = outcomes.iter().filter(|outcome| outcome.requests > 0);
    let slowest = rates
        .map(|outcome| outcome.bytes_per_second)
        .reduce(f64::min);
    let slowest = slowest.ok_or(StudyError::NoOutcome)?;
    let gpus = values.hosts * nics;
    Ok(slowest * nics * gpus / (2.0 * (gpus - 1.0)) / 1e9)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_fitted_is_fitted() {
        let off = |upper| {
            let values = Values { upper, ..VALUES };
            let mapped = Span::new(BUFFERS, buffers(&values, NICS));
            let tables = Domain::map(FormatId::VtdSs, mapped, PAGE, Some(1)).unwrap();
            (rate(&values, SECOND, [&tables, &tables]).unwrap() - 32.0).abs()
        };
        let best = off(VALUES.upper);
        for other in [4.0, 12.0, 13.0, 15.0, 16.0, 20.0] {
            assert!(off(other) > best, "{other}");
        }
    }
}
