//! An NVMe controller, asked what it is: queues in mapped memory, and an answer written there.
//!
//! Source: NVM Express Base Specification 2.0: 3.1.3 "Controller Properties", 3.5.1 "Memory-based
//! Controller Initialization", 4.2 "Completion Queue Entry", 5.17 "Identify command".

use std::{
    sync::atomic::Ordering,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};
use guest::machines::{NVME, NVME_SERIAL};
use hostmem::{Backing, Mapping};
use ioas::vfio::{Register, Registers, config};
use iopt::Prot;
use runs::Span;

use crate::{
    dma::{IOVA, memory},
    pci,
    space::{Interface, Space},
};

const CONFIGURATION: u64 = 0x14;
const STATUS: u64 = 0x1c;
const ADMIN_QUEUE_ATTRIBUTES: u64 = 0x24;
const ADMIN_SUBMISSION_QUEUE: u64 = 0x28;
const ADMIN_COMPLETION_QUEUE: u64 = 0x30;
/// The tail of the admin submission queue.
const DOORBELL: u64 = 0x1000;

/// Configuration: enabled; entries of 64 bytes to submit, and of 16 to complete.
const ENABLE: u32 = 1 | 6 << 16 | 4 << 20;
/// Status: ready.
const READY: u32 = 1;
/// Identify (6) with the command identifier 1.
const IDENTIFY: u64 = 6 | 1 << 16;
/// Identify: the controller.
const CONTROLLER: u64 = 1;

/// Offsets in the memory: a page each for the two queues and the answer.
const SUBMISSION: u64 = 0;
const COMPLETION: u64 = 0x1000;
const ANSWER: u64 = 0x2000;

const PATIENCE: Duration = Duration::from_secs(60);

/// The controller answers who it is by DMA to where it was told, and its serial number is the one
/// that the machine gave it.
pub(crate) fn identify<I: Interface>() -> anyhow::Result<()> {
    let mut space = Space::<I>::open(pci::Device(NVME))?;
    let memory = memory(Backing::Anon4K, 0x3000)?;
    // In a queue that nobody has written to all is zero.
    for cell in memory.cells() {
        cell.store(0, Ordering::Relaxed);
    }
    space.map_host(IOVA, &memory, Prot::RW)?;
    let device = space.device()?;
    let space_of_config = device.config()?;
    let command: u16 = device.read(&space_of_config, config::COMMAND)?;
    let command = command | config::COMMAND_MEMORY;
    device.write(&space_of_config, config::COMMAND, command)?;
    device.set_bus_master(true)?;
    let registers = device.map(&device.region(0)?, Span::new(0, 0x2000))?;

    registers.write(CONFIGURATION, 0_u32)?;
    until(&registers, STATUS, |status: u32| status & READY == 0).context("it stays ready")?;
    // Two entries each, counted from 0.
    registers.write(ADMIN_QUEUE_ATTRIBUTES, 1_u32 | 1 << 16)?;
    registers.write(ADMIN_SUBMISSION_QUEUE, IOVA + SUBMISSION)?;
    registers.write(ADMIN_COMPLETION_QUEUE, IOVA + COMPLETION)?;
    registers.write(CONFIGURATION, ENABLE)?;
    until(&registers, STATUS, |status: u32| status & READY != 0).context("it is not ready")?;

    // Double words 0 and 1, 6 and 7 (where the answer goes), 10 and 11.
    set(&memory, SUBMISSION, IDENTIFY);
    set(&memory, SUBMISSION + 24, IOVA + ANSWER);
    set(&memory, SUBMISSION + 40, CONTROLLER);
    // The store to a register of the device comes after those to memory, for it and the compiler.
    std::sync::atomic::fence(Ordering::SeqCst);
    registers.write(DOORBELL, 1_u32)?;
    let start = Instant::now();
    // Double words 2 and 3 of the first entry: the phase turns when it is there.
    let entry = loop {
        let entry = get(&memory, COMPLETION + 8);
        if entry >> 48 & 1 != 0 {
            break entry;
        }
        ensure!(start.elapsed() < PATIENCE, "no completion");
        thread::sleep(Duration::from_millis(1));
    };
    let (identifier, status) = (entry >> 32 & 0xffff, entry >> 49);
    ensure!(
        identifier == 1 && status == 0,
        "command {identifier} ended with status {status:#x}"
    );
    std::sync::atomic::fence(Ordering::SeqCst);
    let answer: Vec<u8> = (ANSWER..ANSWER + 24)
        .step_by(8)
        .flat_map(|offset| get(&memory, offset).to_le_bytes())
        .collect();
    // Bytes 4 to 23, padded with spaces.
    let serial = String::from_utf8_lossy(&answer[4..24]);
    ensure!(
        serial.trim_end() == NVME_SERIAL,
        "its serial number is {serial:?}"
    );
    // It does no DMA any more.
    registers.write(CONFIGURATION, 0_u32)?;
    until(&registers, STATUS, |status: u32| status & READY == 0).context("it stays ready")
}

fn until<T: Register>(
    registers: &Registers,
    offset: u64,
    reached: impl Fn(T) -> bool,
) -> anyhow::Result<()> {
    let start = Instant::now();
    while !reached(registers.read(offset)?) {
        ensure!(start.elapsed() < PATIENCE, "for {} s", PATIENCE.as_secs());
        thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

fn set(memory: &Mapping, offset: u64, value: u64) {
    memory.cells()[offset as usize / 8].store(value.to_le(), Ordering::Relaxed);
}

fn get(memory: &Mapping, offset: u64) -> u64 {
    u64::from_le(memory.cells()[offset as usize / 8].load(Ordering::Relaxed))
}
