//! Simulated devices on real tables, and what comes out beside what others have measured. These are
//! computations: they come out the same on every machine.

#![allow(clippy::unwrap_used, reason = "helpers of tests panic as tests do")]

use dmaspace_bench::simulation::{
    DeviceModel, DeviceTlb, Domain, Order, Outcome, ReadTimes, Simulation, SimulationError,
    UnitModel,
};
use dmaspace_bench::study::{self, Basis, Standing, Study};
use iopt::FormatId;
use runs::Span;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const START: u64 = 1 << 32;

/// Tables on `node` for 64 MiB in leaves of `leaf` bytes.
fn tables(leaf: u64, node: u32) -> Domain {
    let range = Span::new(START, 64 * MIB);
    Domain::map(FormatId::VtdSs, range, leaf, Some(node)).unwrap()
}

/// On node 0, with an IOTLB of 64 entries, all upper tables kept, and one walk at a time.
fn unit() -> UnitModel {
    UnitModel {
        node: Some(0),
        iotlb_entries: 64,
        upper_entries: [64; 5],
        walks: 1,
        miss_ns: 0.0,
    }
}

/// 4 KiB at a time through all 64 MiB, one request after the other; 4.096 bytes a nanosecond, so that
/// a page takes 1000 ns.
fn device() -> DeviceModel {
    DeviceModel {
        unit: 0,
        domain: 0,
        request_bytes: 4 * KIB,
        outstanding: 1,
        link_bytes_per_second: 4.096e9,
        latency_ns: 0.0,
        tlb: None,
        streams: vec![Span::new(START, 64 * MIB)],
        order: Order::Sequential,
        peer: None,
    }
}

fn simulation<'a>(devices: &[DeviceModel], domains: &[&'a Domain]) -> Simulation<'a> {
    Simulation {
        units: vec![unit()],
        devices: devices.into(),
        domains: domains.into(),
        reads: ReadTimes::new(100.0, 200.0),
        seed: 7,
        warm_up: 1000,
        requests: 5000,
    }
}

fn run(simulation: &Simulation<'_>) -> Vec<Outcome> {
    simulation.run().unwrap()
}

/// One of them, alone.
fn alone(device: DeviceModel, domain: &Domain) -> Outcome {
    run(&simulation(&[device], &[domain]))[0]
}

fn near(found: f64, expected: f64, part: f64) {
    assert!(
        (found / expected - 1.0).abs() <= part,
        "{found}, not {expected}"
    );
}

#[test]
fn remote_reads_are_counted() {
    for (node, time) in [(0, 100.0), (1, 200.0)] {
        let found = alone(device(), &tables(4 * KIB, node));
        // Each page once: a miss each, one read where the upper tables are known, and for each 2 MiB
        // one read more.
        assert_eq!((found.iotlb_hits, found.joined, found.walks), (0, 0, 5000));
        let reads = found.local_reads + found.remote_reads;
        let expected = 5000..5000 + 5000 / 512 + 2;
        assert!(expected.contains(&reads), "{found:?}");
        assert_eq!(found.remote_share(), f64::from(node));
        // The serial form: the page on the link, and its reads.
        near(
            found.mean_ns,
            1000.0 + found.reads_per_request() * time,
            1e-6,
        );
        near(found.bytes_per_second, 4096.0 / found.mean_ns * 1e9, 1e-6);
    }
}

/// No read is called remote if the node of the unit, or of the tables, is not known.
#[test]
fn what_is_not_known_is_not_remote() {
    let unknown = Domain::map(FormatId::VtdSs, Span::new(START, 64 * MIB), 4 * KIB, None).unwrap();
    assert_eq!(alone(device(), &unknown).remote_reads, 0);
    let far = tables(4 * KIB, 1);
    let mut somewhere = simulation(&[device()], &[&far]);
    somewhere.units[0].node = None;
    assert_eq!(run(&somewhere)[0].remote_reads, 0);
}

/// A unit without caches of upper levels reads all four levels, one with reads the last.
#[test]
fn upper_levels_that_are_kept_save_reads() {
    let domain = tables(4 * KIB, 0);
    for (kept, reads) in [
        ([0; 5], 4.0),
        ([0, 0, 1, 0, 0], 3.0),
        ([0, 1, 0, 0, 0], 2.0),
    ] {
        let mut simulation = simulation(&[device()], &[&domain]);
        simulation.units[0].upper_entries = kept;
        assert_eq!(run(&simulation)[0].reads_per_request(), reads);
    }
}

#[test]
fn large_leaves_fit_into_the_iotlb() {
    for (leaf, walks) in [(4 * KIB, 5000), (2 * MIB, 0)] {
        let domain = tables(leaf, 0);
        let mut simulation = simulation(&[device()], &[&domain]);
        // Warm-up until each page was there once.
        simulation.warm_up = 64 * MIB / (4 * KIB);
        let found = run(&simulation)[0];
        assert_eq!((found.walks, found.iotlb_hits), (walks, 5000 - walks));
    }
}

/// The concurrent form of the model: latency, link, and walks each set the pace in turn.
#[test]
fn many_requests_under_way_are_bounded_by_latency_link_or_walks() {
    let domain = tables(4 * KIB, 0);
    let reader = DeviceModel {
        request_bytes: 64,
        outstanding: 32,
        latency_ns: 500.0,
        link_bytes_per_second: 1e12,
        order: Order::Random,
        streams: vec![Span::new(START, 64 * KIB)],
        ..device()
    };
    // All in the IOTLB: 32 in 500 ns.
    near(
        alone(reader.clone(), &domain).bytes_per_second,
        32.0 * 64.0 / 500e-9,
        0.01,
    );
    let slow = DeviceModel {
        link_bytes_per_second: 1e9,
        ..reader.clone()
    };
    near(alone(slow, &domain).bytes_per_second, 1e9, 0.01);
    // Almost none in the IOTLB: a walk of one read each, one at a time.
    let wide = DeviceModel {
        streams: vec![Span::new(START, 64 * MIB)],
        ..reader
    };
    let found = alone(wide, &domain);
    near(found.bytes_per_second, 64.0 / 100e-9, 0.02);
    assert!(found.joined > 0);
}

#[test]
fn device_tlbs_are_simulated() {
    let domain = tables(4 * KIB, 0);
    // 8 reads of a page follow each other.
    let plain = DeviceModel {
        request_bytes: 512,
        ..device()
    };
    let ats = DeviceModel {
        tlb: Some(DeviceTlb {
            entries: 4,
            hit_ns: 5.0,
        }),
        ..plain.clone()
    };
    let (plain, ats) = (alone(plain, &domain), alone(ats, &domain));
    assert_eq!(
        (plain.device_tlb_hits, plain.iotlb_hits, plain.walks),
        (0, 4375, 625)
    );
    assert_eq!(
        (ats.device_tlb_hits, ats.iotlb_hits, ats.walks),
        (4375, 0, 625)
    );
    near(ats.mean_ns - plain.mean_ns, 5.0 * 7.0 / 8.0, 1e-6);
}

#[test]
fn peer_to_peer_traffic_is_simulated() {
    let domain = tables(2 * MIB, 0);
    let silent = DeviceModel {
        outstanding: 0,
        ..device()
    };
    let to = |peer| DeviceModel { peer, ..device() };
    let rate = |devices: &[DeviceModel]| run(&simulation(devices, &[&domain]))[0].bytes_per_second;
    near(rate(&[to(None), to(None), silent.clone()]), 4.096e9, 0.001);
    // Two that write to one peer share its link; a slower link of the peer is the pace of both.
    near(
        rate(&[to(Some(2)), to(Some(2)), silent.clone()]),
        4.096e9 / 2.0,
        0.001,
    );
    let slow = DeviceModel {
        link_bytes_per_second: 1.024e9,
        ..silent
    };
    let found = run(&simulation(&[to(Some(1)), slow], &[&domain]));
    near(found[0].bytes_per_second, 1.024e9, 0.001);
    assert_eq!(found[1], Outcome::default());
}

#[test]
fn the_same_seed_gives_the_same_outcome() {
    let domain = tables(4 * KIB, 0);
    let reader = DeviceModel {
        outstanding: 9,
        order: Order::Random,
        ..device()
    };
    let mut simulation = simulation(&[reader.clone(), reader], &[&domain]);
    let first = run(&simulation);
    assert_eq!(run(&simulation), first);
    assert_ne!(
        first[0], first[1],
        "each device has random numbers of its own"
    );
    simulation.seed += 1;
    assert_ne!(run(&simulation), first);
}

/// Devices that read at random in the same memory do not follow each other: 64 of 16,384 pages are known,
/// whichever device asked for them.
#[test]
fn random_reads_of_several_devices_have_nothing_in_common() {
    let domain = tables(4 * KIB, 0);
    let random = DeviceModel {
        order: Order::Random,
        ..device()
    };
    for seed in 0..4 {
        let mut simulation = simulation(&vec![random.clone(); 8], &[&domain]);
        simulation.seed = seed;
        for found in run(&simulation) {
            assert!(found.walks > found.requests * 98 / 100, "{seed}: {found:?}");
        }
    }
}

#[test]
fn what_cannot_be_simulated_is_refused() {
    type Change = fn(&mut Simulation<'_>);
    let changes: [(Change, &str); 12] = [
        (|s| s.units[0].walks = 0, "unit 0: walks are 1 to 4096"),
        (
            |s| s.units[0].iotlb_entries = 4097,
            "unit 0: a cache has at most",
        ),
        (
            |s| s.units[0].miss_ns = f64::NAN,
            "unit 0: walks are 1 to 4096",
        ),
        (|s| s.reads.remote_ns = -1.0, "reads 0: they take"),
        (|s| s.requests = 0, "requests 0: some are counted"),
        (
            |s| s.devices[0].unit = 1,
            "device 0: its unit or domain is not there",
        ),
        (
            |s| s.devices[0].peer = Some(1),
            "device 0: its peer is not there",
        ),
        (
            |s| s.devices[0].request_bytes = 3000,
            "device 0: requests have a power of two",
        ),
        (
            |s| s.devices[0].link_bytes_per_second = 0.0,
            "device 0: its link carries",
        ),
        (|s| s.devices[0].streams.clear(), "device 0: it has streams"),
        (
            |s| s.devices[0].streams[0].start += 1,
            "device 0: it has streams",
        ),
        (
            |s| s.devices[0].streams[0].start = 0,
            "device 0: read of 0x0: ",
        ),
    ];
    let domain = tables(4 * KIB, 0);
    for (change, expected) in changes {
        let mut simulation = simulation(&[device()], &[&domain]);
        change(&mut simulation);
        let error: SimulationError = simulation.run().unwrap_err();
        assert!(error.to_string().starts_with(expected), "{error}");
    }
}

/// The rows that count and are not reproduced.
fn off(study: &Study) -> Vec<&str> {
    let off = study.counting().filter(|row| !row.is_reproduced());
    off.map(|row| row.name.as_str()).collect()
}

/// A study says where its inputs come from, and varies those that are assumed.
fn is_complete(study: &Study) {
    let fitted = study
        .inputs
        .iter()
        .any(|input| matches!(input.basis, Basis::Fitted(_)));
    let rows = study
        .rows
        .iter()
        .any(|row| row.standing == Standing::Fitted);
    assert!(fitted && rows);
    let assumed = study
        .inputs
        .iter()
        .filter(|input| matches!(input.basis, Basis::Assumed(_)));
    let varied: Vec<_> = study
        .spread
        .iter()
        .map(|spread| (spread.input, spread.value))
        .collect();
    let expected: Vec<_> = assumed
        .flat_map(|input| match input.name {
            "machines" => [1.0, 4.0].map(|value| (input.name, value)),
            name => [0.8, 1.2].map(|factor| (name, input.value * factor)),
        })
        .collect();
    assert_eq!(varied, expected);
    for spread in &study.spread {
        assert!(
            spread.lowest <= spread.highest && spread.lowest > -0.2,
            "{spread:?}"
        );
    }
}

#[test]
fn the_origins_table() {
    let study = study::allreduce().unwrap();
    is_complete(&study);
    assert_eq!(off(&study), [""; 0]);
    let counting: Vec<_> = study.counting().map(|row| row.name.as_str()).collect();
    let expected = [
        "first socket alone, shared table",
        "both sockets, shared table",
        "both sockets, table per node",
    ];
    assert_eq!(counting, expected);
    // How many machines took part is assumed, and the rows depend on it.
    let machines: Vec<_> = study
        .spread
        .iter()
        .filter(|it| it.input == "machines")
        .collect();
    assert_eq!(machines.len(), 2);
    near(machines[0].highest, 7.0 / 6.0 - 1.0, 1e-9);
    near(machines[1].lowest, 14.0 / 15.0 - 1.0, 1e-9);
    // Also where a row does not count: before and after, as in the origin.
    for row in &study.rows {
        near(row.simulated, row.published, 0.10);
    }
}
