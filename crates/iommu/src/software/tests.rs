//! The unit over tables that are written by hand, word by word.

mod dirty;
mod flush;
mod stress;
mod translate;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use iopt::walk::{BadAddress, WalkMemory};
use iopt::{FormatId, Root};

use super::*;
use crate::fault::FaultReason;
use crate::run_map::RunMap;
use crate::target::TargetMemory;

/// Table memory: words from address 0 on.
#[derive(Clone)]
struct Words(Arc<[AtomicU64]>);

impl Words {
    /// Room for `pages` tables.
    fn new(pages: u64) -> Self {
        Self((0..pages * 512).map(|_| AtomicU64::new(0)).collect())
    }

    fn set(&self, address: u64, word: u64) {
        self.0[address as usize / 8].store(word, Ordering::Release);
    }
}

impl WalkMemory for Words {
    fn read_u64(&self, address: u64) -> Result<u64, BadAddress> {
        let word = self
            .0
            .get(address as usize / 8)
            .ok_or(BadAddress { address })?;
        Ok(word.load(Ordering::Acquire))
    }

    fn compare_exchange_u64(
        &self,
        address: u64,
        old: u64,
        new: u64,
    ) -> Result<Result<(), u64>, BadAddress> {
        let word = self
            .0
            .get(address as usize / 8)
            .ok_or(BadAddress { address })?;
        let done = word.compare_exchange(old, new, Ordering::AcqRel, Ordering::Acquire);
        Ok(done.map(drop))
    }
}

type Data = Arc<RunMap<Vec<AtomicU64>>>;
type Unit_ = SoftwareUnit<Words, Data>;

/// Where data memory begins.
const DATA: u64 = 0x4000_0000;

/// `bytes` of data; each word holds its own physical address.
fn data(bytes: u64) -> Data {
    let words = (0..bytes / 8)
        .map(|n| AtomicU64::new(DATA + n * 8))
        .collect();
    Arc::new(RunMap::new([(DATA, words)]).unwrap())
}

fn cell(data: &Data, pa: u64) -> u64 {
    let mut word = 0;
    let visit = &mut |cells: &[AtomicU64]| word = cells[0].load(Ordering::Relaxed);
    data.with_cells(Span::new(pa, 8), visit).unwrap();
    word
}

const RW: u64 = 0b11;
const ROOT: Root = Root {
    format: FormatId::VtdSs,
    address: 0x1000,
    levels: 3,
};
const NIC: DeviceId = DeviceId::pci(0, 5, 0);
const DISK: DeviceId = DeviceId::pci(0, 6, 0);
const D1: DomainId = DomainId(1);
const D2: DomainId = DomainId(2);

/// VT-d second stage, three levels: the root at 0x1000 leads to 0x2000, that to 0x3000, which holds
/// the leaves of the first 2 MiB; all read and write.
fn tables() -> Words {
    let words = Words::new(32);
    words.set(0x1000, 0x2000 | RW);
    words.set(0x2000, 0x3000 | RW);
    words
}

fn quick() -> SoftwareConfig {
    SoftwareConfig {
        flush_timeout: Duration::from_millis(50),
        ..SoftwareConfig::default()
    }
}

/// A unit with [`tables`] and 4 MiB of data, to which the NIC is attached in domain 1.
fn unit_with(config: SoftwareConfig) -> (Unit_, Words, Data) {
    let (words, data) = (tables(), data(4 << 20));
    let unit = SoftwareUnit::with_config(words.clone(), data.clone(), config);
    unit.attach(NIC, D1, ROOT).unwrap();
    (unit, words, data)
}

fn unit() -> (Unit_, Words, Data) {
    unit_with(quick())
}

fn read(port: &mut Port<Words, Data>, iova: u64) -> Result<u64, FaultReason> {
    let mut word = [0];
    port.read(iova, &mut word)
        .map_err(|aborted| aborted.fault.reason)?;
    Ok(word[0])
}

fn page(iova: u64) -> [Span<Iova>; 1] {
    [Span::new(iova, 0x1000)]
}

/// Sets a flag at the end, also when an assertion fails: other threads wait for it.
struct Finally<'f>(&'f AtomicBool, bool);

impl Drop for Finally<'_> {
    fn drop(&mut self) {
        self.0.store(self.1, Ordering::SeqCst);
    }
}
