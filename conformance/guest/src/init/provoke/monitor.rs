//! QEMU in the guest, which cannot start with a device that it is given: its words, and what it asked for.

use std::{
    fs,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail, ensure};
use guest::machines::{EDU, Machine, provoked::FUNCTIONS};
use rustix::thread::{CapabilitySet, remove_capability_from_bounding_set};

use super::case::{Case, Expected, groups};
use crate::{limit::limited, pci::Device};

/// Time in which QEMU refuses: many times what it takes in an emulated machine.
const PATIENCE: Duration = Duration::from_secs(200);
/// The loader, and QEMU with its own libraries, as [`conformance::newer_qemu`] packs them.
const LOADER: &str = "/qemu/ld.so";
const PROGRAM: &str = "qemu-system-x86_64";

/// Runs it until it ends; its messages.
fn said(arguments: &str) -> anyhow::Result<String> {
    let log = "/tmp/qemu.log";
    let mut qemu = Command::new(LOADER)
        .args(["--argv0", PROGRAM, "--library-path", "/qemu/lib"])
        .args(["/qemu/qemu", "-L", "/qemu/share"])
        .args(arguments.split(' '))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(fs::File::create(log)?)
        .spawn()?;
    let start = Instant::now();
    let status = loop {
        if let Some(status) = qemu.try_wait()? {
            break status;
        }
        if start.elapsed() > PATIENCE {
            qemu.kill()?;
            qemu.wait()?;
            bail!("it runs: {}", fs::read_to_string(log)?);
        }
        thread::sleep(Duration::from_millis(100));
    };
    let said = fs::read_to_string(log)?;
    ensure!(!status.success() && !said.is_empty(), "{status}: {said}");
    Ok(said)
}

impl Case {
    /// Starts QEMU in vain.
    fn start_qemu(&mut self, memory: &str, devices: &[&str]) -> anyhow::Result<()> {
        let mut arguments =
            format!("-nodefaults -display none -machine q35 -accel tcg,tb-size=32 {memory}");
        for device in devices {
            let address = device.trim_start_matches("0000:");
            arguments += &format!(" -device vfio-pci,host={address}");
        }
        let said = said(&arguments)?;
        self.text("command.txt", &format!("{PROGRAM} {arguments}\n"))?;
        self.text("qemu.log", &said)
    }
}

/// A second function of the slot has a driver of the host.
pub(crate) fn group(_: &Machine) -> anyhow::Result<()> {
    let [first, second] = FUNCTIONS.map(Device);
    first.bind_to_vfio()?;
    let driver = second.link("driver").context("no driver of the host")?;
    ensure!(driver == "virtio-pci", "{driver}");
    let mut case = Case::new("group")?;
    case.start_qemu("-m 256", &[first.0])?;
    case.text("groups.txt", &groups()?)?;
    case.expect(Expected::new("group.not-viable"));
    case.allow(&["group.inseparable"]);
    case.end(0, "")
}

/// Less memory may be locked than the guest has.
pub(crate) fn memlock(_: &Machine) -> anyhow::Result<()> {
    Device(EDU).bind_to_vfio()?;
    let mut case = Case::new("memlock")?;
    let start = |case: &mut Case| {
        // The privilege that lifts the limit: no program that this thread starts has it.
        remove_capability_from_bounding_set(CapabilitySet::IPC_LOCK)?;
        case.start_qemu("-m 256", &[EDU])
    };
    limited(64 << 20, || {
        let started = thread::scope(|scope| scope.spawn(|| start(&mut case)).join());
        started.map_err(|_| anyhow::anyhow!("panicked"))?
    })??;
    case.expect(Expected::new("memlock.too-low"));
    case.end(0, "")
}

/// A container of two mappings.
pub(crate) fn mappings(_: &Machine) -> anyhow::Result<()> {
    const LIMIT: &str = "/sys/module/vfio_iommu_type1/parameters/dma_entry_limit";
    Device(EDU).bind_to_vfio()?;
    let before = fs::read_to_string(LIMIT)?;
    fs::write(LIMIT, "2")?;
    let mut case = Case::new("mappings")?;
    let started = case.start_qemu("-m 256", &[EDU]);
    fs::write(LIMIT, before)?;
    started?;
    case.expect(Expected::new("memlock.mapping-limit"));
    case.end(0, "")
}

/// Memory of the guest above what the unit translates.
pub(crate) fn width(_: &Machine) -> anyhow::Result<()> {
    Device(EDU).bind_to_vfio()?;
    let mut case = Case::new("width")?;
    let memory = "-cpu qemu64,phys-bits=52 -m 256,slots=1,maxmem=1P -object memory-backend-ram,id=high,size=128M \
                  -device pc-dimm,memdev=high,addr=0x1000000000000";
    case.start_qemu(memory, &[EDU])?;
    case.expect(Expected::new("layout.address-width"));
    case.end(0, "")
}

/// Free huge pages of each node, as `grep` prints them.
fn free_pages() -> anyhow::Result<String> {
    let mut all = String::new();
    for node in 0..2 {
        let path = format!(
            "/sys/devices/system/node/node{node}/hugepages/hugepages-2048kB/free_hugepages"
        );
        if let Ok(free) = fs::read_to_string(&path) {
            all += &format!("{path}:{free}");
        }
    }
    ensure!(!all.is_empty(), "no pools");
    Ok(all)
}

fn short(name: &'static str, memory: &str, cause: &'static str) -> anyhow::Result<()> {
    Device(EDU).bind_to_vfio()?;
    let mut case = Case::new(name)?;
    case.text("pools.txt", &free_pages()?)?;
    case.start_qemu(memory, &[EDU])?;
    case.expect(Expected::new(cause));
    case.end(0, "")
}

/// More huge pages than the pool has.
pub(crate) fn pool(_: &Machine) -> anyhow::Result<()> {
    let memory = "-m 256 -object memory-backend-memfd,id=ram,size=256M,hugetlb=on,hugetlbsize=2M,prealloc=on \
                  -machine memory-backend=ram";
    short("pool", memory, "pages.short")
}

/// More than the pool of one node has, and not more than those of both.
pub(crate) fn node(_: &Machine) -> anyhow::Result<()> {
    let memory = "-m 96 -object memory-backend-memfd,id=ram,size=96M,hugetlb=on,hugetlbsize=2M,prealloc=on,host-nodes=1,policy=bind \
                  -machine memory-backend=ram";
    short("node", memory, "pages.short-on-node")
}
