//! Migration: states, and the data that is read and written in them.
//!
//! ```text
//! RUNNING ⇄ STOP ⇄ STOP_COPY (data is read)
//!            ⇅
//!         RESUMING (data is written)
//! ```
//!
//! Every transition goes through `STOP`, which is the shortest path. `PRE_COPY` and the
//! states of peer-to-peer DMA are not offered, and refused. A transition that fails, because the device does not accept
//! the data written, leaves the device in `STOP`, with the state that it had.
//!
//! Source: vfio-user protocol specification, "Device Features", "Direct State Transitions",
//! "Complex State Transitions".

use crate::device::{MOST_STATE, Migration};
use crate::error::RequestRefusal;

const ERROR: u32 = 0;
const STOP: u32 = 1;
const RUNNING: u32 = 2;
const STOP_COPY: u32 = 3;
const RESUMING: u32 = 4;

/// `VFIO_MIGRATION_STOP_COPY`.
pub(crate) const FLAGS: u64 = 1;

/// State of the device, and the transfer under way.
#[derive(Debug)]
pub(crate) struct Progress {
    state: u32,
    /// Data still to be read, or written so far.
    data: Vec<u8>,
    /// Bytes of `data` that were read.
    read: usize,
}

impl Progress {
    pub(crate) const fn new() -> Self {
        Self {
            state: RUNNING,
            data: Vec::new(),
            read: 0,
        }
    }

    pub(crate) const fn state(&self) -> u32 {
        self.state
    }

    /// The client has left: data is dropped. A device that was stopped goes on; one that was given half of a state keeps its own.
    pub(crate) fn leave(&mut self, device: Option<&dyn Migration>) {
        if let Some(device) = device {
            self.reset(device);
        }
    }

    /// After a reset: the device runs, and data is dropped.
    pub(crate) fn reset(&mut self, device: &dyn Migration) {
        if self.state != RUNNING {
            device.resume();
        }
        *self = Self::new();
    }

    /// Goes to `to`, through `STOP` if need be.
    pub(crate) fn go(&mut self, device: &dyn Migration, to: u32) -> Result<(), RequestRefusal> {
        let from = self.state;
        if !(STOP..=RESUMING).contains(&to) || from == ERROR {
            return Err(RequestRefusal::MigrationState { from, to });
        }
        if from == to {
            return Ok(());
        }
        if from == RUNNING {
            device.stop();
        }
        self.state = STOP;
        let data = std::mem::take(&mut self.data);
        self.read = 0;
        if from == RESUMING {
            device.load(&data).map_err(RequestRefusal::MigrationLoad)?;
        }
        match to {
            RUNNING => device.resume(),
            STOP_COPY => {
                let data = device.save();
                if data.len() > MOST_STATE {
                    let (bytes, most) = (data.len(), MOST_STATE);
                    return Err(RequestRefusal::MigrationLength { bytes, most });
                }
                self.data = data;
            }
            _ => {}
        }
        self.state = to;
        Ok(())
    }

    /// The next bytes of the state, `size` at most; fewer at its end.
    pub(crate) fn read(&mut self, size: usize) -> Result<&[u8], RequestRefusal> {
        let state = self.state;
        if state != STOP_COPY {
            return Err(RequestRefusal::MigrationData { state });
        }
        let rest = self.data.get(self.read..).unwrap_or_default();
        let next = rest.get(..size).unwrap_or(rest);
        self.read += next.len();
        Ok(next)
    }

    pub(crate) fn write(&mut self, data: &[u8]) -> Result<(), RequestRefusal> {
        let state = self.state;
        if state != RESUMING {
            return Err(RequestRefusal::MigrationData { state });
        }
        let (bytes, most) = (self.data.len() + data.len(), MOST_STATE);
        if bytes > most {
            return Err(RequestRefusal::MigrationLength { bytes, most });
        }
        self.data.extend_from_slice(data);
        Ok(())
    }
}
