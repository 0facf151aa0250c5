//! Devices of the software unit: they read, compare and write every page, in stretches of neighbours, so that what
//! a unit has in its cache is used.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use ioas::HostTables;
use iommu::Port;

use super::PAGE;
use super::pattern::{differing, shuffled, word_of};
use super::ram::Physical;
use super::scene::{Expect, Scene};

const WORDS: usize = PAGE as usize / 8;
/// In the version of a page that a device works on.
const TAKEN: u32 = 1 << 31;
/// Pages of a stretch.
const STRETCH: u64 = 4;
/// One access of so many reads only.
const ONLY_READS: u64 = 3;
/// So many stretches, then a pause: others are to run on these processors too.
const PAUSE: u64 = 16;

pub(crate) type DevicePort = Port<Arc<HostTables>, Arc<Physical>>;

/// A software device.
pub(crate) struct Player<'a> {
    pub(crate) scene: &'a Scene,
    pub(crate) number: usize,
    pub(crate) port: DevicePort,
}

/// The word at `offset` of a page of memory of which `version` was written.
fn word(page: u32, offset: usize, version: u32) -> u64 {
    match version {
        0 => 0,
        _ => word_of(u64::from(page) << 12 | offset as u64 | u64::from(version) << 44),
    }
}

fn add(count: &AtomicU64, more: u64) {
    count.fetch_add(more, Ordering::Relaxed);
}

/// Plays these devices in turn until they are to stop.
pub(crate) fn play(players: &mut [Player<'_>], seed: u64) {
    let mut random = fastrand::Rng::with_seed(seed);
    let Some(scene) = players.first().map(|player| player.scene) else {
        return;
    };
    let stretches = scene.len() as u64 / STRETCH;
    let mut way = || shuffled(stretches, random.u64(..));
    let mut ways: Vec<_> = players.iter().map(|_| way()).collect();
    let mut count = 0u64;
    loop {
        for (player, stretches) in players.iter_mut().zip(&mut ways) {
            count += 1;
            let Some(stretch) = stretches.next() else {
                *stretches = way();
                continue;
            };
            for page in stretch * STRETCH..(stretch + 1) * STRETCH {
                if scene.stopped() {
                    return;
                }
                let _gate = scene.gate();
                player.access(page as usize, !(count + page).is_multiple_of(ONLY_READS));
            }
            if count.is_multiple_of(PAUSE) {
                thread::sleep(Duration::from_micros(20));
            }
        }
    }
}

impl Player<'_> {
    fn access(&mut self, page: usize, writes: bool) {
        let scene = self.scene;
        let iova = scene.base + page as u64 * PAGE;
        match scene.expect(self.number, page) {
            // It may fault, or read whatever was or will be there: never what no owner has pinned.
            Expect::Moving => _ = self.port.read(iova, &mut [0; WORDS]),
            Expect::Hole => self.fault(iova),
            Expect::Mapped {
                page: memory,
                write,
            } => {
                let cell = &scene.versions[memory as usize];
                let version = loop {
                    let version = cell.fetch_or(TAKEN, Ordering::SeqCst);
                    if version & TAKEN == 0 {
                        break version;
                    }
                    thread::yield_now();
                };
                let next = self.exchange(page, (memory, version), write, writes);
                cell.store(next, Ordering::SeqCst);
            }
        }
    }

    fn complain(&self, iova: u64, text: &str) {
        let number = self.number;
        let text = format!("device {number} at {iova:#x}: {text}");
        self.scene.complain(text);
    }

    /// Neither a read nor a write gets through.
    fn fault(&mut self, iova: u64) {
        let read = self.port.read(iova, &mut [0]).is_ok();
        let written = self.port.write(iova + 8, &[0]).is_ok();
        let device_counts = self.scene.device_counts(self.number);
        for reached in [read, written] {
            match reached {
                false => add(&device_counts.faults, 1),
                true => self.complain(iova, "reached a hole"),
            }
        }
    }

    /// Reads and compares the page, and writes the next version. Returns the one that it has now.
    fn exchange(
        &mut self,
        page: usize,
        (memory, version): (u32, u32),
        writable: bool,
        writes: bool,
    ) -> u32 {
        let scene = self.scene;
        let iova = scene.base + page as u64 * PAGE;
        let device_counts = scene.device_counts(self.number);
        let mut words = [0; WORDS];
        if let Err(fault) = self.port.read(iova, &mut words) {
            self.complain(iova, &format!("is mapped, and a read faults: {fault:?}"));
            return version;
        }
        let of = |version| (0..WORDS).map(move |n| word(memory, n * 8, version));
        let wrong = differing(words.into_iter(), of(version));
        add(&device_counts.read, PAGE);
        if wrong > 0 {
            let text = format!("page {memory} of version {version}: {wrong} bytes differ");
            self.complain(iova, &text);
            return version;
        }
        if !writes {
            return version;
        }
        let next = (version + 1) & !TAKEN;
        words
            .iter_mut()
            .zip(of(next))
            .for_each(|(to, word)| *to = word);
        if writable {
            scene.begin_write(page);
        }
        match (self.port.write(iova, &words), writable) {
            (Ok(()), true) => {
                scene.end_write(page);
                next
            }
            (Err(_), false) => version,
            (Ok(()), false) => {
                self.complain(iova, "is read-only, and was written to");
                next
            }
            (Err(fault), true) => {
                self.complain(iova, &format!("is writable, and a write faults: {fault:?}"));
                version
            }
        }
    }
}
