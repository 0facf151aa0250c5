//! A DMA engine, like QEMU's `edu`: its driver names an address, and it reads or writes a word there.
//!
//! Its registers lie in its configuration space, behind the standard part, where a guest's program reaches them without a
//! driver: address (8 bytes), data (4), command (4: 1 reads the word at the address, 2 writes it), and
//! status (4: 0 done, 1 fault). A write to the command does it at once.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use dmaspace_vfio_user::{CONFIG_REGION, ClientMemory, Description, DeviceModel, RequestRefusal};
use vm_memory::{Bytes as _, GuestAddress};

use crate::pci::{BYTES, ConfigSpace, Identity};

/// The vendor of QEMU's teaching devices, and a number that it does not use.
pub const VENDOR: u16 = 0x1234;
/// See [`VENDOR`].
pub const DEVICE: u16 = 0x11e9;
/// Where the registers lie.
pub const ADDRESS: u64 = 0xc0;
/// See [`ADDRESS`].
pub const DATA: u64 = 0xc8;
/// See [`ADDRESS`].
pub const COMMAND: u64 = 0xcc;
/// See [`ADDRESS`].
pub const STATUS: u64 = 0xd0;
/// A command.
pub const FETCH: u32 = 1;
/// A command.
pub const STORE: u32 = 2;

/// The engine.
#[derive(Debug)]
pub struct Engine<M> {
    memory: M,
    config: Mutex<ConfigSpace>,
}

/// Its description.
pub fn description() -> Description {
    let mut description = Description::default();
    description.regions[CONFIG_REGION] = BYTES as u64;
    // QEMU asks for one for errors (`VFIO_PCI_ERR_IRQ_INDEX`), and warns where there is none. None occur.
    description.irqs[3] = 1;
    description
}

impl Engine<Arc<ClientMemory>> {
    /// Over the memory of the client.
    pub fn new(memory: Arc<ClientMemory>) -> Self {
        let mut config = ConfigSpace::new(Identity {
            vendor: VENDOR,
            device: DEVICE,
            class: 0x00_ff00,
            subsystem: (VENDOR, 0),
        });
        config.allow(ADDRESS as usize, &[0xff; 20]);
        Self {
            memory,
            config: Mutex::new(config),
        }
    }

    fn lock(&self) -> MutexGuard<'_, ConfigSpace> {
        self.config.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn dma(&self, config: &mut ConfigSpace) {
        let mut registers = [0; 16];
        config.read(ADDRESS, &mut registers);
        let word = |at: usize| registers[at..at + 4].try_into().unwrap_or_default();
        let low = u32::from_le_bytes(word(0));
        let high = u32::from_le_bytes(word(4));
        let at = GuestAddress(u64::from(high) << 32 | u64::from(low));
        let mut data: [u8; 4] = word(8);
        let view = self.memory.view();
        let done = match u32::from_le_bytes(word(12)) {
            FETCH => view.read_slice(&mut data, at),
            STORE => view.write_slice(&data, at),
            _ => return,
        };
        config.write(DATA, &data);
        config.write(STATUS, &u32::from(done.is_err()).to_le_bytes());
        self.memory
            .drain_faults(&mut |fault| println!("fault {fault}"));
    }
}

impl DeviceModel for Engine<Arc<ClientMemory>> {
    fn read(&self, region: usize, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        match region {
            CONFIG_REGION => self.lock().read(offset, bytes),
            _ => bytes.fill(0),
        }
        Ok(())
    }

    fn write(&self, region: usize, offset: u64, bytes: &[u8]) -> io::Result<()> {
        if region == CONFIG_REGION {
            let config = &mut *self.lock();
            config.write(offset, bytes);
            if offset == COMMAND {
                self.dma(config);
            }
        }
        Ok(())
    }

    fn reset(&self) {
        self.lock().write(ADDRESS, &[0; 20]);
    }

    fn refused(&self, command: u16, refusal: &RequestRefusal) {
        println!("refused {command}: {refusal:?}");
    }
}
