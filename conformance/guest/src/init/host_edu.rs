//! Registers of an `edu` that VFIO does not have: a device of the host, in the kernel's own domain.
//!
//! Source: Linux, Documentation/PCI/sysfs-pci.rst; QEMU, docs/specs/edu.

use std::{
    fs::{File, OpenOptions},
    os::unix::fs::FileExt as _,
    ptr::{self, NonNull},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use crate::{
    edu::{BUFFER_ADDRESS, COMMAND, COUNT, DESTINATION, SOURCE, START, TO_MEMORY},
    pci::Device,
};

/// The command register of configuration space, and its bits: memory, and DMA.
const PCI_COMMAND: u64 = 4;
const MEMORY: u16 = 1 << 1;
const MASTER: u16 = 1 << 2;

const BYTES: usize = 4096;
const PATIENCE: Duration = Duration::from_secs(60);

/// The first page of BAR 0.
pub(crate) struct HostEdu(NonNull<u64>);

impl HostEdu {
    /// Allows the device DMA.
    pub(crate) fn open(device: Device) -> anyhow::Result<Self> {
        let open = |name: &str| -> anyhow::Result<File> {
            let path = device.path(name);
            let options = OpenOptions::new().read(true).write(true).open(&path);
            options.with_context(|| path.display().to_string())
        };
        let space = open("config")?;
        let command = Self::command(&space)? | MEMORY | MASTER;
        space.write_all_at(&command.to_le_bytes(), PCI_COMMAND)?;
        let bar = open("resource0")?;
        let flags = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        // SAFETY: a new mapping, which the kernel places.
        let at = unsafe { mmap(ptr::null_mut(), BYTES, flags.0, flags.1, &bar, 0) }?;
        Ok(Self(NonNull::new(at.cast()).context("mapped at zero")?))
    }

    fn command(space: &File) -> anyhow::Result<u16> {
        let mut command = [0; 2];
        space.read_exact_at(&mut command, PCI_COMMAND)?;
        Ok(u16::from_le_bytes(command))
    }

    /// True if the device may do DMA.
    pub(crate) fn is_master(device: Device) -> anyhow::Result<bool> {
        let space = File::open(device.path("config"))?;
        Ok(Self::command(&space)? & MASTER != 0)
    }

    fn cell(&self, offset: u64) -> *mut u64 {
        let nth = offset as usize % BYTES / 8;
        self.0.as_ptr().wrapping_add(nth)
    }

    fn read(&self, offset: u64) -> u64 {
        // SAFETY: in the mapping, which lives as long as `self`; the device answers every read.
        unsafe { self.cell(offset).read_volatile() }
    }

    fn write(&self, offset: u64, value: u64) {
        // SAFETY: in the mapping, as above; a device may be written to at any time.
        unsafe { self.cell(offset).write_volatile(value) }
    }

    /// Fills the first `len` bytes of the buffer from an address.
    pub(crate) fn read_from(&self, address: u64, len: u64) -> anyhow::Result<()> {
        self.begin(address, BUFFER_ADDRESS, len, START);
        self.end()
    }

    /// Writes the first `len` bytes of the buffer to an address.
    pub(crate) fn write_to(&self, address: u64, len: u64) -> anyhow::Result<()> {
        self.begin_write(address, len);
        self.end()
    }

    /// Begins to write `len` bytes of the buffer to an address.
    pub(crate) fn begin_write(&self, address: u64, len: u64) {
        self.begin(BUFFER_ADDRESS, address, len, START | TO_MEMORY);
    }

    fn begin(&self, from: u64, to: u64, len: u64, command: u64) {
        self.write(SOURCE, from);
        self.write(DESTINATION, to);
        self.write(COUNT, len);
        self.write(COMMAND, command);
    }

    /// Waits until nothing is under way.
    pub(crate) fn end(&self) -> anyhow::Result<()> {
        let start = Instant::now();
        while self.read(COMMAND) & START != 0 {
            ensure!(start.elapsed() < PATIENCE, "no end of a transfer");
            thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }
}

impl Drop for HostEdu {
    fn drop(&mut self) {
        // SAFETY: the mapping is that of `open`, and no pointer to it is left.
        // It goes with the process otherwise.
        let _ = unsafe { munmap(self.0.as_ptr().cast(), BYTES) };
    }
}
