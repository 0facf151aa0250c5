//! A guest whose memory the host may have back, with a device passed through: Linux's drivers of virtio's IOMMU and of the
//! balloon, which reports free pages. What no domain maps goes, and a device's memory stays what it was.

use std::{
    fs::{self, File},
    sync::Arc,
    thread,
    time::Duration,
};

use anyhow::{Context as _, bail, ensure};
use guest::machines::{EDU, Machine};
use hostmem::{Backing, Mapping};
use iopt::Prot;
use rustix::system::finit_module;

use crate::{
    dma::{IOVA, check, memory},
    host::{self, Endpoint, Ram, Transfer, expect},
    pci::Device,
    space::{Interface, Space},
};

const MIB: u64 = 1 << 20;
/// Memory of the device.
const BUFFERS: u64 = 16 * MIB;
/// Memory that comes and goes: what the guest frees, and what the balloon takes.
const REST: u64 = 256 * MIB;
/// A net: looks at the host's memory, each a tenth of a second after the one before.
const LOOKS: usize = 6000;

/// Reports and the balloon take what the guest does not need. The device reads all of its memory and writes it back
/// after each: a page that was taken from under it would come back as zeros. What is taken comes back for the
/// guest, and for the device, which it is mapped for.
pub(crate) fn keeps<I: Interface>(_: &Machine) -> anyhow::Result<()> {
    let mut space = Space::<I>::open(Device(EDU))?;
    let edu = Endpoint::at(EDU)?;
    let buffers = memory(Backing::Anon4K, BUFFERS)?;
    space.map_host(IOVA, &buffers, Prot::RW)?;
    // The host has given it, and the guest needs it no more.
    drop(memory(Backing::Anon4K, REST)?);
    let full = host::ram()?;
    ensure!(full.there > REST + BUFFERS, "{full:?}");

    let driver = File::open("/bin/virtio_balloon.ko").context("no module of Linux's balloon")?;
    finit_module(&driver, c"", 0).context("the balloon's driver")?;
    wait("reports of free memory", |ram| {
        ram.reported > 0 && ram.there + REST / 2 <= full.there
    })?;
    goes_round(edu, IOVA, &buffers)?;

    host::balloon(REST)?;
    wait("the balloon full", |ram| ram.actual == REST)?;
    goes_round(edu, IOVA, &buffers)?;
    host::balloon(0)?;
    wait("the balloon empty", |ram| ram.actual == 0)?;

    // Memory that was gone, at least in part: less is free otherwise.
    let parts = REST / BUFFERS;
    let again = (0..parts).map(|_| memory(Backing::Anon4K, BUFFERS));
    let again = again.collect::<anyhow::Result<Vec<_>>>()?;
    for (at, memory) in (IOVA + BUFFERS..).step_by(BUFFERS as usize).zip(&again) {
        space.map_host(at, memory, Prot::RW)?;
        goes_round(edu, at, memory)?;
    }
    goes_round(edu, IOVA, &buffers)?;
    let ram = host::ram()?;
    ensure!(
        ram.kept == 0,
        "the driver called free what was mapped: {ram:?}"
    );
    Ok(())
}

/// The device has all of the memory as the guest has it, and gives it back so.
fn goes_round(edu: Endpoint, iova: u64, memory: &Arc<Mapping>) -> anyhow::Result<()> {
    expect(edu.read(iova, memory.len())?, Transfer::Done)?;
    expect(edu.write(iova, memory.len())?, Transfer::Done)?;
    check(memory.cells(), |nth| nth)
}

/// Waits until the host's memory is as it should be.
fn wait(what: &str, come: impl Fn(&Ram) -> bool) -> anyhow::Result<()> {
    for _ in 0..LOOKS {
        // Free pages that processors keep for themselves are not reported; each update of counts gives some back.
        fs::write("/proc/sys/vm/stat_refresh", "1")?;
        if come(&host::ram()?) {
            return Ok(());
        }
        thread::sleep(Duration::from_millis(100));
    }
    bail!("{what} did not come: {:?}", host::ram()?)
}
