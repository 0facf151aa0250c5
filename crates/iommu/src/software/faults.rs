//! The fault log: bounded, and honest about what it lost.

use std::collections::VecDeque;
use std::mem;
use std::sync::{Mutex, PoisonError};

use crate::fault::Fault;

pub(super) struct FaultLog {
    log: Mutex<Log>,
    room: usize,
}

#[derive(Default)]
struct Log {
    faults: VecDeque<Fault>,
    lost: u64,
}

impl FaultLog {
    pub(super) fn new(room: usize) -> Self {
        Self {
            log: Mutex::default(),
            room,
        }
    }

    /// Records a fault. When there is no room the new one is lost, as in hardware: the first
    /// faults of a series are the ones that tell the cause.
    pub(super) fn record(&self, fault: Fault) {
        let mut log = self.log.lock().unwrap_or_else(PoisonError::into_inner);
        if log.faults.len() < self.room {
            log.faults.push_back(fault);
        } else {
            log.lost += 1;
        }
    }

    pub(super) fn drain(&self, sink: &mut dyn FnMut(Fault)) -> u64 {
        let Log { faults, lost } =
            mem::take(&mut *self.log.lock().unwrap_or_else(PoisonError::into_inner));
        // Not under the lock: the sink may do DMA that faults.
        faults.into_iter().for_each(sink);
        lost
    }
}
