//! Cost of the memory side, seen by a client on the socket: rust-vmm's, with the DMA engine in a process of its own.
//!
//! Maps and unmaps of single pages, each with its answer, as a guest with an IOMMU has them; and the time from the
//! connection to the first DMA that has arrived, for several sizes of guest memory.

use std::fs::File;
use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use clap::Parser;
use device_rig::engine::{ADDRESS, COMMAND, DATA, FETCH, STATUS, STORE};
use dmaspace_vfio_user::CONFIG_REGION;
use hostmem::{Backing, Mapping};
use vfio_user::Client;

const PAGE: u64 = 4096;
const GIB: u64 = 1 << 30;
const REPEATS: usize = 5;

/// Measures maps and unmaps, and the time to the first DMA.
#[derive(Parser)]
struct Options {
    /// The program of the devices.
    #[arg(long, value_name = "PROGRAM")]
    device: PathBuf,
    /// The largest guest memory, GiB.
    #[arg(long, value_name = "NUMBER", default_value_t = 16)]
    most: u64,
    /// Pages that are mapped at a time.
    #[arg(long, value_name = "NUMBER", default_value_t = 10_000)]
    pages: u64,
}

/// The device, ended when dropped.
struct Engine {
    child: Child,
    socket: PathBuf,
}

impl Engine {
    fn start(device: &Path) -> anyhow::Result<Self> {
        let name = format!("dmaspace-measure.{}", std::process::id());
        let socket = std::env::temp_dir().join(name);
        let mut command = Command::new(device);
        command.arg("--socket").arg(&socket).arg("engine");
        command.stdout(std::process::Stdio::null());
        let child = command.spawn().context("the device cannot be started")?;
        let begun = Instant::now();
        while !socket.exists() {
            ensure!(
                begun.elapsed() < Duration::from_secs(10),
                "it does not listen"
            );
            thread::sleep(Duration::from_millis(5));
        }
        Ok(Self { child, socket })
    }

    fn connect(&self) -> anyhow::Result<Client> {
        Ok(Client::new(&self.socket)?)
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_file(&self.socket);
    }
}

/// Has the engine read or write a word, which must arrive.
fn dma(client: &mut Client, command: u32, at: u64, data: u32) -> anyhow::Result<u32> {
    let region = CONFIG_REGION as u32;
    for (offset, word) in [
        (ADDRESS, at as u32),
        (ADDRESS + 4, (at >> 32) as u32),
        (DATA, data),
        (STATUS, u32::MAX),
        (COMMAND, command),
    ] {
        client.region_write(region, offset, &word.to_le_bytes())?;
    }
    let (mut status, mut data) = ([0; 4], [0; 4]);
    client.region_read(region, STATUS, &mut status)?;
    ensure!(status == [0; 4], "no memory at {at:#x}");
    client.region_read(region, DATA, &mut data)?;
    Ok(u32::from_le_bytes(data))
}

fn median(mut samples: Vec<f64>) -> f64 {
    samples.sort_by(f64::total_cmp);
    samples.get(samples.len() / 2).copied().unwrap_or(f64::NAN)
}

fn main() -> anyhow::Result<()> {
    let options = Options::parse();
    let engine = Engine::start(&options.device)?;
    maps(&engine, options.pages)?;
    first(&engine, options.most)
}

/// Pages of one file, mapped one by one and unmapped one by one.
fn maps(engine: &Engine, pages: u64) -> anyhow::Result<()> {
    let memory = Mapping::new(Backing::Memfd, GIB, None)?;
    let file = memory.fd().context("no file")?.as_raw_fd();
    let mut client = engine.connect()?;
    // The file stays mapped, as that of a guest with rings.
    client.dma_map(0, 1 << 40, PAGE, file)?;
    let (mut map, mut unmap) = (Vec::new(), Vec::new());
    for _ in 0..REPEATS {
        // Every other page, far from each other in the file.
        let place = |page: u64| (page * 97 % (GIB / PAGE) * PAGE, 2 * page * PAGE);
        let begun = Instant::now();
        for (offset, iova) in (0..pages).map(place) {
            client.dma_map(offset, iova, PAGE, file)?;
        }
        map.push(pages as f64 / begun.elapsed().as_secs_f64());
        // They are there, and afterwards they are not.
        let (offset, iova) = place(pages - 1);
        let word = dma(&mut client, FETCH, iova, 7)?;
        ensure!(word == 0, "{word} at {offset:#x}");
        let begun = Instant::now();
        for (_, iova) in (0..pages).map(place) {
            client.dma_unmap(iova, PAGE)?;
        }
        unmap.push(pages as f64 / begun.elapsed().as_secs_f64());
        ensure!(dma(&mut client, FETCH, iova, 7).is_err(), "still mapped");
    }
    println!(
        "single pages, each with its answer, a second: {:.0} maps, {:.0} unmaps (median of {REPEATS})",
        median(map),
        median(unmap)
    );
    // The same without any map: what a message costs.
    let begun = Instant::now();
    let mut word = [0; 4];
    for _ in 0..pages {
        client.region_read(CONFIG_REGION as u32, 0, &mut word)?;
    }
    let reads = pages as f64 / begun.elapsed().as_secs_f64();
    println!("reads of a register, a second: {reads:.0}");
    Ok(())
}

/// From the connection to a word that has arrived.
fn first(engine: &Engine, most: u64) -> anyhow::Result<()> {
    for gib in [1, 2, 4, 8, 16].into_iter().filter(|gib| *gib <= most) {
        for backing in [Backing::Memfd, Backing::Hugetlb2M] {
            let memory = match Mapping::new(backing, gib * GIB, None) {
                Ok(memory) => memory,
                Err(error) => {
                    println!("{gib} GiB of {backing}: left out: {error}");
                    continue;
                }
            };
            let file: File = memory.fd().context("no file")?.try_clone_to_owned()?.into();
            let (mut times, mut mapped) = (Vec::new(), Vec::new());
            for _ in 0..REPEATS {
                let begun = Instant::now();
                let mut client = engine.connect()?;
                let connected = Instant::now();
                client.dma_map(0, 0, gib * GIB, file.as_raw_fd())?;
                mapped.push(connected.elapsed().as_secs_f64() * 1e6);
                // The last word: nothing of it depends on what lies before.
                dma(&mut client, STORE, gib * GIB - 4, 0x1234_5678)?;
                times.push(begun.elapsed().as_secs_f64() * 1e6);
            }
            println!(
                "{gib} GiB of {backing}: first DMA after {:.0} µs, of which {:.0} µs for the map (median of {REPEATS})",
                median(times),
                median(mapped)
            );
        }
    }
    Ok(())
}
