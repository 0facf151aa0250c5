//! Memory that a guest gives up and takes back: every other piece of 64 MiB, so that no two join.
//!
//! `cargo bench -p dmaspace --all-features --bench reclaim`; another size of the whole in MiB by
//! `DMASPACE_BENCH_MIB`, other rounds than seven by `DMASPACE_BENCH_ROUNDS`. Without `--bench` (as `cargo test
//! --benches` runs it) one small round. The columns are those of HyperAlloc (EuroSys 2025), whose figures are of
//! another machine: *reclaim* of memory that was touched, and *return*, after which it may be used:
//!
//! - *no device*: reclaim is a discard; return is nothing, and the first touch of each page brings it in;
//! - *device*: all memory is pinned and mapped for a device. Reclaim unmaps, flushes, unpins, discards; return
//!   brings in, pins and maps;
//! - *virtual IOMMU*: the guest has mapped a sixteenth of its memory for its device, elsewhere. Reclaim looks whether
//!   something is mapped, then discards; return is as without a device.
//!
//! GiB in a second of processor time of this process, medians with the least and the most; *touched* is return with
//! the first touch of each piece. The device is one in software, whose pins are real.

#![allow(clippy::panic, reason = "a bench that measures something else stops")]

use std::error::Error;
use std::fs::File;
use std::sync::{Arc, Mutex, PoisonError};

use dmaspace::hostmem::RaisedPool;
use dmaspace::ioas::Cause;
use dmaspace::virtio_iommu::wire::{Attach, MOST_REQUEST_BYTES, Map, Request, map_flags};
use dmaspace::virtio_iommu::{
    Domains, EndpointConfig, MemoryRegion, VirtioIommu, VirtioIommuConfig,
};
use dmaspace::{
    AttachError, Backing, DetachError, DeviceId, GuestAddr, GuestBalloon, GuestRam, Ioas, Ledger,
    Mapping, Prot, SoftwareIommu, Span,
};
use rustix::time::{ClockId, clock_gettime};
use virtio_queue::{Queue, QueueT as _};
use vm_memory::{Bytes as _, FileOffset, GuestAddress, GuestMemoryMmap};

#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    NoDevice,
    Device,
    Virtual,
}

const WAYS: [(Way, &str); 3] = [
    (Way::NoDevice, "no device"),
    (Way::Device, "device"),
    (Way::Virtual, "virtual IOMMU"),
];

/// Maker of the address spaces of the guest's domains.
struct Passthrough(SoftwareIommu);

impl Domains for Passthrough {
    fn space(&mut self) -> Result<Ioas, Cause> {
        Ok(Ioas::over(&self.0)?)
    }

    fn attach(&mut self, endpoint: u32, space: &Ioas) -> Result<(), AttachError> {
        space.attach(self.0.device(DeviceId(endpoint)))
    }

    fn detach(&mut self, endpoint: u32, space: &Ioas) -> Result<(), DetachError> {
        space.detach(DeviceId(endpoint))
    }
}

/// A virtual IOMMU whose guest has mapped the first sixteenth of its memory, piece by piece.
fn virtual_iommu(
    ram: &GuestRam,
    ledger: &Arc<Ledger>,
    piece: u64,
    len: u64,
) -> Result<VirtioIommu<Passthrough>, Box<dyn Error>> {
    let config = VirtioIommuConfig {
        input: Some(0..=(1 << 48) - 1),
        endpoints: vec![EndpointConfig::new(8)],
        most_mappings: 1 << 20,
        ..VirtioIommuConfig::default()
    };
    let mut iommu = VirtioIommu::new(config, Passthrough(SoftwareIommu::new()?))?;
    let regions = ram.regions();
    let regions = regions.map(|(base, memory)| MemoryRegion::new(base.0, memory.clone()));
    iommu.set_memory(regions.collect())?;
    iommu.ack_features(iommu.features())?;
    let rings = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), 0x5000)])?;
    let mut queue = Queue::new(2)?;
    queue.set_avail_ring_address(Some(0x1000), None);
    queue.set_used_ring_address(Some(0x2000), None);
    queue.set_ready(true);
    let mut sent = 0_u16;
    let mut send = |request: Request| -> Result<(), Box<dyn Error>> {
        let mut buffer = [0; MOST_REQUEST_BYTES];
        let bytes = request.encode(&mut buffer);
        rings.write_slice(bytes, GuestAddress(0x3000))?;
        // A buffer to read and one for the status.
        for (at, word) in [
            (0, 0x3000),
            (8, bytes.len() as u64 | 1 << 32 | 1 << 48),
            (16, 0x4000),
            (24, request.answer_bytes(0) as u64 | 2 << 32),
        ] {
            rings.write_obj(word, GuestAddress(at))?;
        }
        sent = sent.wrapping_add(1);
        rings.write_obj(sent, GuestAddress(0x1002))?;
        let _ = iommu.requests(&mut queue, &rings)?;
        Ok(())
    };
    send(Request::Attach(Attach {
        domain: 1,
        endpoint: 8,
        flags: 0,
        reserved: [0; 4],
    }))?;
    for start in (0..len / 16).step_by(piece as usize) {
        // Apart, so that each is an area of its own.
        send(Request::Map(Map {
            domain: 1,
            virt_start: 2 * start,
            virt_end: 2 * start + piece - 1,
            phys_start: start,
            flags: map_flags::READ | map_flags::WRITE,
        }))?;
    }
    let mapped = ledger.in_use();
    assert!(mapped >= len / 16, "{mapped} bytes are mapped");
    Ok(iommu)
}

/// Seconds of processor time of this process.
fn processor() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// Bytes in a second: reclaimed, returned, and returned with the first touch.
type Rates = [Vec<f64>; 3];

fn measure(
    way: Way,
    (backing, piece): (Backing, u64),
    len: u64,
    rounds: usize,
) -> Result<Rates, Box<dyn Error>> {
    let mapping = Mapping::new(backing, len, None)?;
    let file = File::from(mapping.fd().ok_or("no file")?.try_clone_to_owned()?);
    let ranges = [(
        GuestAddress(0),
        len as usize,
        Some(FileOffset::new(file, 0)),
    )];
    let memory = GuestMemoryMmap::<()>::from_ranges_with_files(ranges)?;
    let touch = |start: u64| memory.write_obj(start, GuestAddress(start));
    for page in (0..len).step_by(4096) {
        touch(page)?;
    }
    let ledger = Ledger::new("devices", None, 0);
    let software = SoftwareIommu::new()?;
    let space = Arc::new(Ioas::over(&software)?);
    let ram = GuestRam::new(&memory, &ledger)?;
    let mut balloon = match way {
        Way::Device => {
            space.attach(software.device(DeviceId(8)))?;
            space.map_guest_ram(&ram, Prot::RW)?;
            GuestBalloon::new(&memory, [&ram], [space])?
        }
        Way::NoDevice => GuestBalloon::new(&memory, [&ram], [])?,
        Way::Virtual => {
            let iommu = Mutex::new(virtual_iommu(&ram, &ledger, piece, len)?);
            let mut balloon = GuestBalloon::new(&memory, [&ram], [])?;
            balloon.add_mapped_by_guest(move |memory, part| {
                let iommu = iommu.lock().unwrap_or_else(PoisonError::into_inner);
                iommu.first_mapped(memory, part)
            });
            balloon
        }
    };
    // The sixteenth that is mapped is left out.
    let first = len / 16;
    let runs = (first..len).step_by(2 * piece as usize);
    let runs: Vec<Span<GuestAddr>> = runs.map(|start| Span::new(start, piece)).collect();
    let bytes = runs.len() as u64 * piece;
    let mut rates = Rates::default();
    for round in 0..=rounds {
        let begun = processor();
        let back = balloon.inflate(&runs, &mut |run, why| panic!("kept {run}: {why}"))?;
        let reclaimed = processor();
        assert_eq!(back, bytes);
        balloon.deflate(&runs, &mut |run, why| panic!("lacks {run}: {why}"))?;
        let returned = processor();
        runs.iter().try_for_each(|run| touch(run.start))?;
        let touched = processor();
        // Pages that a hypervisor has not backed yet take longer.
        if round > 0 {
            let ends = [reclaimed - begun, returned - reclaimed, touched - reclaimed];
            for (rates, seconds) in rates.iter_mut().zip(ends) {
                rates.push(bytes as f64 / f64::from(1 << 30) / seconds);
            }
        }
    }
    Ok(rates)
}

fn main() {
    let bench = std::env::args().any(|argument| argument == "--bench");
    let number = |name: &str| std::env::var(name).ok()?.parse::<u64>().ok();
    let (len, rounds) = if bench {
        let len = number("DMASPACE_BENCH_MIB").map_or(64, |mib| mib.next_multiple_of(64));
        let rounds = number("DMASPACE_BENCH_ROUNDS").map_or(7, |rounds| rounds.max(1) as usize);
        (len << 20, rounds)
    } else {
        (64 << 20, 1)
    };
    for (backing, piece) in [(Backing::Memfd, 4 << 10), (Backing::Hugetlb2M, 2 << 20)] {
        let pool = backing.huge_size();
        let pool = pool.map(|size| RaisedPool::raise(size, len)).transpose();
        println!(
            "\n{} MiB of {backing}, pieces of {} KiB",
            len >> 20,
            piece >> 10
        );
        if let Err(error) = &pool {
            println!("not run: {error}");
            continue;
        }
        println!(
            "{:<14}{:>24}{:>24}{:>24}",
            "GiB/s", "reclaim", "return", "touched"
        );
        for (way, name) in WAYS {
            match measure(way, (backing, piece), len, rounds) {
                Ok(mut rates) => {
                    print!("{name:<14}");
                    for rates in &mut rates {
                        rates.sort_by(f64::total_cmp);
                        let range = format!("{:.2}..{:.2}", rates[0], rates[rates.len() - 1]);
                        print!("{:>10.2} {range:>13}", rates[rates.len() / 2]);
                    }
                    println!();
                }
                Err(error) => println!("{name}: not run: {error}"),
            }
        }
    }
}
