//! One device that reads at random in windows of different size, through one unit.
//!
//! R. Neugebauer, G. Antichi, J. F. Zazo, Y. Audzevich, S. López-Buedo, A. W. Moore: "Understanding
//! PCIe performance for end host networking", SIGCOMM 2018, and its data set (github.com/pcie-bench/
//! data): an NFP-6000 in a Xeon E5-2630 v4, VT-d without large pages, caches cold, files
//! `bw_dma_win_sweep_rd_rnd_64`, `..._128` and `lat_cmd_sweep_rd_rnd_64`. The row with large pages is
//! of another machine, a Xeon E5-2620 v2.

use iopt::FormatId;
use runs::Span;

use super::{Basis, Knob, Row, Standing, Study, StudyError, Varied, study, whole};
use crate::simulation::{DeviceModel, Domain, Order, ReadTimes, Simulation, UnitModel};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

/// Window in KiB, Gb/s of 64-byte reads, Gb/s of 128-byte reads.
const WINDOWS: [(u64, f64, f64); 11] = [
    (256, 27.580, 41.947),
    (512, 20.198, 35.909),
    (1024, 14.330, 27.646),
    (1536, 12.556, 24.486),
    (2048, 11.735, 23.019),
    (3072, 10.996, 21.678),
    (4096, 10.653, 21.027),
    (8192, 10.176, 20.137),
    (16384, 9.945, 19.689),
    (32768, 9.867, 19.524),
    (65536, 9.843, 19.484),
];

/// Of 64-byte reads in 64 MiB of large pages.
const LARGE_PAGES: f64 = 27.9;

#[derive(Clone, Copy)]
pub(super) struct Values {
    pub(super) outstanding: f64,
    latency_ns: f64,
    link_gbps: f64,
    pub(super) iotlb: f64,
    upper: f64,
    pub(super) walks: f64,
    pub(super) read_ns: f64,
    miss_ns: f64,
}

pub(super) const VALUES: Values = Values {
    outstanding: 26.0,
    latency_ns: 490.0,
    link_gbps: 42.0,
    iotlb: 64.0,
    upper: 8.0,
    walks: 5.0,
    read_ns: 87.0,
    miss_ns: MISS_NS,
};

/// What a miss takes besides three reads: 287 ns less 3 times 87.
pub(super) const MISS_NS: f64 = 26.0;

const KNOBS: [Knob<Values>; 8] = [
    Knob {
        name: "latency of a read of 64 bytes",
        unit: "ns",
        basis: Basis::Published("data set, lat_cmd_sweep_rd_rnd_64, cold, 256 KiB"),
        varied: Varied::ByPart,
        at: |values| &mut values.latency_ns,
    },
    Knob {
        name: "reads under way",
        unit: "",
        basis: Basis::Fitted("64 B, 256 KiB"),
        varied: Varied::ByPart,
        at: |values| &mut values.outstanding,
    },
    Knob {
        name: "link",
        unit: "Gb/s",
        basis: Basis::Fitted("128 B, 256 KiB"),
        varied: Varied::ByPart,
        at: |values| &mut values.link_gbps,
    },
    Knob {
        name: "IOTLB",
        unit: "entries",
        basis: Basis::Published("the paper, section 6.5: the knee at 256 KiB of 4 KiB pages"),
        varied: Varied::ByPart,
        at: |values| &mut values.iotlb,
    },
    Knob {
        name: "walks at the same time",
        unit: "",
        basis: Basis::Fitted("64 B, 64 MiB"),
        varied: Varied::ByPart,
        at: |values| &mut values.walks,
    },
    Knob {
        name: "read of a table entry",
        unit: "ns",
        basis: Basis::Fitted("64 B, 64 MiB, within the published 80 to 100"),
        varied: Varied::ByPart,
        at: |values| &mut values.read_ns,
    },
    Knob {
        name: "miss, besides its reads",
        unit: "ns",
        basis: Basis::Published(
            "data set, lat_cmd_sweep_rd_rnd_64: 777 ns in 64 MiB, less 490, less three reads",
        ),
        varied: Varied::ByPart,
        at: |values| &mut values.miss_ns,
    },
    Knob {
        name: "tables of the third level kept, none below: three reads a miss",
        unit: "entries",
        basis: Basis::Assumed("so that reads of 80 to 100 ns make most of the 287 ns of a miss"),
        varied: Varied::ByPart,
        at: |values| &mut values.upper,
    },
];

/// Simulates the windows.
///
/// # Errors
///
/// When there is no memory for the tables.
pub fn pcie_bench() -> Result<Study, StudyError> {
    let title = "pcie-bench: random reads by window in 4 KiB pages, VT-d, Gb/s";
    study(title, VALUES, &KNOBS, rows)
}

pub(super) fn rows(values: &Values) -> Result<Vec<Row>, StudyError> {
    let all = Span::new(1 << 32, 64 * MIB);
    let small = Domain::map(FormatId::VtdSs, all, 4 * KIB, Some(0))?;
    let large = Domain::map(FormatId::VtdSs, all, 2 * MIB, Some(0))?;
    let row = |bytes, window: u64, leaf: &str, domain, published, standing| {
        Ok::<_, StudyError>(Row {
            name: format!("{bytes} B, {}{leaf}", size(window)),
            published,
            simulated: gbps(values, domain, bytes, window * KIB)?,
            unit: "Gb/s",
            standing,
        })
    };
    let mut rows = Vec::new();
    let last = WINDOWS.len() - 1;
    for (place, (window, published, _)) in WINDOWS.into_iter().enumerate() {
        let standing = fitted(place == 0 || place == last);
        rows.push(row(64, window, "", &small, published, standing)?);
    }
    for (place, (window, _, published)) in WINDOWS.into_iter().enumerate() {
        let standing = fitted(place == 0);
        rows.push(row(128, window, "", &small, published, standing)?);
    }
    let window = 64 * MIB / KIB;
    rows.push(row(
        64,
        window,
        ", 2M pages",
        &large,
        LARGE_PAGES,
        Standing::Counts,
    )?);
    Ok(rows)
}

const fn fitted(fitted: bool) -> Standing {
    if fitted {
        Standing::Fitted
    } else {
        Standing::Counts
    }
}

/// What a window in KiB is called.
fn size(window: u64) -> String {
    match window {
        0..1024 => format!("{window} KiB"),
        _ => format!("{} MiB", window as f64 / 1024.0),
    }
}

fn gbps(values: &Values, domain: &Domain, bytes: u64, window: u64) -> Result<f64, StudyError> {
    let simulation = Simulation {
        units: vec![UnitModel {
            node: Some(0),
            iotlb_entries: whole(values.iotlb),
            upper_entries: [0, 0, whole(values.upper), 0, 0],
            walks: whole(values.walks),
            miss_ns: values.miss_ns,
        }],
        devices: vec![DeviceModel {
            unit: 0,
            domain: 0,
            request_bytes: bytes,
            outstanding: whole(values.outstanding),
            link_bytes_per_second: values.link_gbps * 1e9 / 8.0,
            latency_ns: values.latency_ns,
            tlb: None,
            streams: vec![Span::new(1 << 32, window)],
            order: Order::Random,
            peer: None,
        }],
        domains: vec![domain],
        reads: ReadTimes::new(values.read_ns, values.read_ns),
        seed: 1,
        warm_up: 2000,
        requests: 20_000,
    };
    let outcomes = simulation.run()?;
    let outcome = outcomes.first().ok_or(StudyError::NoOutcome)?;
    Ok(outcome.bytes_per_second * 8.0 / 1e9)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How far 64-byte reads in this window, in KiB, of 4 KiB pages are from what was measured.
    fn off(values: &Values, window: u64) -> f64 {
        let all = Span::new(1 << 32, 64 * MIB);
        let domain = Domain::map(FormatId::VtdSs, all, 4 * KIB, Some(0)).unwrap();
        let (_, published, _) = WINDOWS.into_iter().find(|row| row.0 == window).unwrap();
        let simulated = gbps(values, &domain, 64, window * KIB).unwrap();
        (simulated / published - 1.0).abs()
    }

    #[test]
    fn what_is_fitted_is_fitted() {
        let (narrow, wide) = (256, 65536);
        let best = off(&VALUES, narrow);
        for other in [25.0, 27.0] {
            let values = Values {
                outstanding: other,
                ..VALUES
            };
            assert!(off(&values, narrow) > best, "{other}");
        }
        let best = off(&VALUES, wide);
        for (walks, read_ns) in [(4.0, 80.0), (6.0, 100.0), (5.0, 80.0), (5.0, 95.0)] {
            let values = Values {
                walks,
                read_ns,
                ..VALUES
            };
            assert!(off(&values, wide) > best, "{walks} {read_ns}");
        }
    }
}
