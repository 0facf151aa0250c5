//! The kernel's own benchmark of its DMA API: `CONFIG_DMA_MAP_BENCHMARK`.
//!
//! A driver that any PCI device can be bound to. Its threads map a buffer of their own by `dma_map_single`, unmap it by
//! `dma_unmap_single`, and read the clock before and after each. A figure includes the DMA API, the device address, the
//! table and the invalidation: strict, descriptors, the register write and one poll; lazy, the queue of 256 addresses or
//! 10 ms. The figure of a domain without translation is subtracted. The benchmark rounds each time down to 100 ns: a
//! figure, or its mean, may be too low by 6 instructions.
//!
//! Source of the structure: Linux 7.2, `include/uapi/linux/map_benchmark.h`.

use std::fs::{self, File};

use anyhow::{Context as _, ensure};
use rustix::ioctl::{Opcode, Updater, ioctl, opcode};

use crate::{machines::EDU, pci::Device, samples::SECONDS};

/// The driver, and its file.
const DRIVER: &str = "dma_map_benchmark";
const FILE: &str = "/sys/kernel/debug/dma_map_benchmark";
const PAGE: u64 = 4096;

/// `DMA_MAP_FROM_DEVICE`: with another direction it writes to the buffer before each map. Nothing else depends on
/// it, since the devices of this machine see the processors' caches.
const FROM_DEVICE: u32 = 2;
/// `NUMA_NO_NODE`.
const NO_NODE: i32 = -1;

/// `struct map_benchmark`: what it found, times in units of 100 ns, and what it is to do.
#[repr(C)]
struct Benchmark {
    map: u64,
    map_deviation: u64,
    unmap: u64,
    unmap_deviation: u64,
    threads: u32,
    seconds: u32,
    node: i32,
    address_bits: u32,
    direction: u32,
    transfer_ns: u32,
    pages: u32,
    /// 0: a buffer that is contiguous.
    mode: u8,
    reserved: [u8; 75],
}

/// `DMA_MAP_BENCHMARK`.
const RUN: Opcode = opcode::read_write::<Benchmark>(b'd', 1);

/// Translation of a device's DMA.
#[derive(Clone, Copy, Debug)]
pub enum Domain {
    /// Device addresses are physical ones.
    Identity,
    /// Tables, with an invalidation for each unmap.
    Strict,
    /// Tables, with one invalidation for many.
    Lazy,
}

impl Domain {
    /// As sysfs calls it.
    const fn name(self) -> &'static str {
        match self {
            Self::Identity => "identity",
            Self::Strict => "DMA",
            Self::Lazy => "DMA-FQ",
        }
    }
}

/// A device with that driver; without it when dropped.
#[derive(Debug)]
pub struct Linux(Device);

impl Linux {
    /// Gives the device such a domain, and the driver.
    ///
    /// # Errors
    ///
    /// When the kernel refuses the domain, or the driver the device.
    pub fn new(domain: Domain) -> anyhow::Result<Self> {
        let device = Device(EDU);
        let kind = device.path("iommu_group/type");
        let write =
            |name: &str| fs::write(&kind, name).with_context(|| format!("a domain of type {name}"));
        // A new one each time: from strict to lazy the old one would stay.
        write(Domain::Identity.name())?;
        write(domain.name())?;
        let now = fs::read_to_string(&kind)?;
        ensure!(now.trim() == domain.name(), "its type is {now}");
        device.bind(DRIVER)?;
        Ok(Self(device))
    }

    /// Nanoseconds of a map and of an unmap of `size` bytes.
    ///
    /// # Errors
    ///
    /// When the driver cannot be asked, or has mapped nothing.
    pub fn run(&self, threads: u32, size: u64) -> anyhow::Result<[f64; 2]> {
        let mut what = Benchmark {
            map: 0,
            map_deviation: 0,
            unmap: 0,
            unmap_deviation: 0,
            threads,
            seconds: SECONDS,
            node: NO_NODE,
            address_bits: 64,
            direction: FROM_DEVICE,
            transfer_ns: 0,
            pages: u32::try_from(size / PAGE)?,
            mode: 0,
            reserved: [0; 75],
        };
        let file = File::options()
            .read(true)
            .write(true)
            .open(FILE)
            .context(FILE)?;
        // SAFETY: the number is that of this structure, which the kernel reads and writes.
        unsafe { ioctl(&file, Updater::<RUN, Benchmark>::new(&mut what)) }?;
        ensure!(what.map > 0, "nothing was mapped");
        Ok([what.map, what.unmap].map(|time| time as f64 * 100.0))
    }
}

impl Drop for Linux {
    fn drop(&mut self) {
        // Another driver cannot have it then, which is an error there.
        let _ = self.0.unbind();
    }
}
