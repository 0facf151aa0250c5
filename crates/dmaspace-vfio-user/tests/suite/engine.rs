//! A DMA engine: registers for address, length and command in region 0, and a buffer in region 2.

use std::error::Error as _;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use dmaspace_vfio_user::{
    ClientMemory, Description, DeviceModel, Irqs, MSIX, Migration, RequestRefusal,
};
use vm_memory::{Bytes as _, GuestAddress};

pub(crate) const BUFFER: usize = 1 << 20;
/// Commands.
pub(crate) const FETCH: u64 = 1;
pub(crate) const STORE: u64 = 2;

pub(crate) const DESCRIPTION: Description = Description {
    regions: [32, 0, BUFFER as u64, 0, 0, 0, 0, 256, 0],
    irqs: [1, 0, 4, 0, 0],
    migration: true,
};

pub(crate) struct Engine {
    memory: Arc<ClientMemory>,
    irqs: Arc<Irqs>,
    /// Address, length, command, status.
    registers: [AtomicU64; 4],
    pub(crate) buffer: Mutex<Vec<u8>>,
    pub(crate) faults: Mutex<Vec<String>>,
    pub(crate) refusals: Mutex<Vec<String>>,
    pub(crate) stopped: AtomicBool,
    pub(crate) resets: AtomicU64,
    pub(crate) left: AtomicU64,
}

impl Engine {
    pub(crate) fn new(memory: Arc<ClientMemory>, irqs: Arc<Irqs>) -> Self {
        Self {
            memory,
            irqs,
            registers: Default::default(),
            buffer: Mutex::new(vec![0; BUFFER]),
            faults: Mutex::default(),
            refusals: Mutex::default(),
            stopped: AtomicBool::new(false),
            resets: AtomicU64::new(0),
            left: AtomicU64::new(0),
        }
    }

    /// The only refusal since the last call.
    pub(crate) fn refusal(&self) -> String {
        let mut refusals = self.refusals.lock().unwrap();
        assert_eq!(refusals.len(), 1, "{refusals:?}");
        refusals.remove(0)
    }

    /// The only fault since the last call.
    pub(crate) fn fault(&self) -> String {
        let mut faults = self.faults.lock().unwrap();
        assert_eq!(faults.len(), 1, "{faults:?}");
        faults.remove(0)
    }

    fn dma(&self, command: u64) {
        let [iova, len, ..] = [0, 1].map(|n: usize| self.registers[n].load(Ordering::Relaxed));
        let mut buffer = self.buffer.lock().unwrap();
        let len = (len as usize).min(BUFFER);
        let (view, at) = (self.memory.view(), GuestAddress(iova));
        let done = match command {
            FETCH => view.read_slice(&mut buffer[..len], at),
            _ => view.write_slice(&buffer[..len], at),
        };
        let status = u64::from(done.is_err());
        self.registers[3].store(status, Ordering::Relaxed);
        let mut faults = self.faults.lock().unwrap();
        self.memory
            .drain_faults(&mut |fault| faults.push(fault.to_string()));
        self.irqs.trigger(MSIX, 0);
    }
}

impl DeviceModel for Engine {
    fn read(&self, region: usize, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        match region {
            0 => {
                let all = self.registers.iter();
                let all = all.flat_map(|word| word.load(Ordering::Relaxed).to_le_bytes());
                let all = all.skip(offset as usize);
                bytes.iter_mut().zip(all).for_each(|(to, from)| *to = from);
            }
            2 => {
                let from = offset as usize;
                bytes.copy_from_slice(&self.buffer.lock().unwrap()[from..from + bytes.len()]);
            }
            _ => return Err(io::Error::other("nothing is there")),
        }
        Ok(())
    }

    fn write(&self, region: usize, offset: u64, bytes: &[u8]) -> io::Result<()> {
        match region {
            0 => {
                let word = bytes.try_into().map_err(io::Error::other)?;
                let value = u64::from_le_bytes(word);
                self.registers[offset as usize / 8].store(value, Ordering::Relaxed);
                if offset == 16 {
                    self.dma(value);
                }
            }
            2 => {
                let to = offset as usize;
                self.buffer.lock().unwrap()[to..to + bytes.len()].copy_from_slice(bytes);
            }
            _ => return Err(io::Error::other("nothing is there")),
        }
        Ok(())
    }

    fn reset(&self) {
        self.resets.fetch_add(1, Ordering::Relaxed);
        self.registers
            .iter()
            .for_each(|word| word.store(0, Ordering::Relaxed));
    }

    fn left(&self) {
        self.left.fetch_add(1, Ordering::Relaxed);
    }

    fn refused(&self, _command: u16, refusal: &RequestRefusal) {
        let mut said = refusal.to_string();
        let mut cause = refusal.source();
        while let Some(error) = cause {
            said += &format!(": {error}");
            cause = error.source();
        }
        self.refusals.lock().unwrap().push(said);
    }

    fn migration(&self) -> Option<&dyn Migration> {
        Some(self)
    }
}

impl Migration for Engine {
    fn stop(&self) {
        self.stopped.store(true, Ordering::Relaxed);
    }

    fn resume(&self) {
        self.stopped.store(false, Ordering::Relaxed);
    }

    fn save(&self) -> Vec<u8> {
        let all = self.registers.iter();
        all.flat_map(|word| word.load(Ordering::Relaxed).to_le_bytes())
            .collect()
    }

    fn load(&self, state: &[u8]) -> io::Result<()> {
        if state.len() != 32 {
            return Err(io::Error::other(format!("{} bytes", state.len())));
        }
        for (word, bytes) in self.registers.iter().zip(state.chunks_exact(8)) {
            let value = u64::from_le_bytes(bytes.try_into().map_err(io::Error::other)?);
            word.store(value, Ordering::Relaxed);
        }
        Ok(())
    }
}
