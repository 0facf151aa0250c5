//! A unit that answers anything: every call ends in time, without a panic, and what the driver says of
//! its devices stays true.

use std::collections::BTreeMap;
use std::sync::Mutex;

use iopt::{Cell, TableMemory};

use super::*;

/// Rounds that the driver may wait at a time.
const ROUNDS: u32 = 3;
/// Calls of `wait` that one operation may take: a few waits, or one for each of a log's events.
const MOST_WAITS: u32 = (RING as u32 + 20) * (ROUNDS + 1);

/// Takes its answers from bytes, then answers as if all went well.
struct Hostile(Arc<Mutex<Script>>, Arc<HeapTables>);

struct Script {
    bytes: Vec<u8>,
    at: usize,
    registers: BTreeMap<usize, u64>,
    waits: u32,
}

impl Script {
    fn byte(&mut self) -> u8 {
        let byte = self.bytes.get(self.at).copied().unwrap_or(0);
        self.at += 1;
        byte
    }

    fn word(&mut self) -> u64 {
        (0..8).fold(0, |word, _| word << 8 | u64::from(self.byte()))
    }

    /// What is good, or anything, or that with a bit changed.
    fn answer(&mut self, good: u64) -> u64 {
        match self.byte() {
            0xff => self.word(),
            bit @ 0xe0.. => good ^ 1 << (bit & 0x1f),
            _ => good,
        }
    }

    fn register(&self, offset: usize) -> u64 {
        self.registers.get(&offset).copied().unwrap_or(0)
    }
}

impl Hostile {
    fn with<V>(&self, what: impl FnOnce(&mut Script) -> V) -> V {
        what(&mut self.0.lock().unwrap())
    }
}

impl Registers for Hostile {
    fn read32(&self, _offset: usize) -> u32 {
        0
    }
    fn write32(&self, _offset: usize, _value: u32) {}
    fn read64(&self, offset: usize) -> u64 {
        self.with(|script| {
            let control = script.register(0x18);
            let good = match offset {
                0x30 => FEATURES,
                // Commands are fetched at once.
                0x2000 => script.register(0x2008),
                0x2020 if control & 1 == 1 => (control >> 8 & 1 << 4) | (control << 1 & 1 << 3),
                0x2020 => 0,
                _ => script.register(offset),
            };
            script.answer(good)
        })
    }
    fn write64(&self, offset: usize, value: u64) {
        let (lost, last) = self.with(|script| {
            script.registers.insert(offset, value);
            let commands = script.register(0x08) & 0x000f_ffff_ffff_f000;
            // The command before the tail is a wait.
            let last = commands + (value.wrapping_sub(16) & 0xff0);
            (script.byte() > 0xe0, last)
        });
        if offset == 0x2008 && !lost {
            let [first, ticket] = [0, 8].map(|word| self.1.read(last + word).unwrap_or(0));
            if first >> 60 == 1 {
                let status = self.1.entries(first & 0x000f_ffff_ffff_fff8, 1);
                status[0].set_release(ticket);
            }
        }
    }
    fn wait(&self, round: u32) -> bool {
        self.with(|script| script.waits += 1);
        round < ROUNDS
    }
}

/// What the driver must say of a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Known {
    domain: u32,
    address: u64,
}

fn play(bytes: Vec<u8>) -> (u32, u32) {
    let script = Arc::new(Mutex::new(Script {
        bytes,
        at: 0,
        registers: BTreeMap::new(),
        waits: 0,
    }));
    let next = || script.lock().unwrap().byte();
    let memory = memory();
    let registers = Hostile(script.clone(), memory.clone());
    let Ok(driver) = AmdVi::new(registers, memory, CONFIG) else {
        return (0, 0);
    };
    let mut known: BTreeMap<u32, Known> = BTreeMap::new();
    let (mut well, mut failed) = (0, 0);
    let goes_on = || {
        let mut script = script.lock().unwrap();
        script.waits = 0;
        script.at < script.bytes.len()
    };
    while goes_on() {
        let operation = next();
        let device = DeviceId(u32::from(next() & 3) << 6);
        let domain = DomainId(u32::from(next() & 3));
        let address = u64::from(next() & 1) << 12;
        let result = match operation % 8 {
            0 | 1 => {
                let fresh = Known {
                    domain: domain.0,
                    address,
                };
                let same = |there: &Known| there.domain == domain.0 && there.address != address;
                let result = driver.attach(device, domain, root(address, 3));
                match result {
                    Err(AttachError::AlreadyAttached { domain, .. }) => {
                        assert_eq!(known[&device.0].domain, domain.0);
                    }
                    Err(AttachError::OtherRoot { .. }) => assert!(known.values().any(same)),
                    Ok(()) | Err(AttachError::Unit { .. }) => {
                        assert!(!known.values().any(same));
                        assert_eq!(known.insert(device.0, fresh), None);
                    }
                    Err(other) => panic!("{other}"),
                }
                result.is_ok()
            }
            2 => {
                let result = driver.detach(device);
                match result {
                    Ok(()) => assert!(known.remove(&device.0).is_some()),
                    Err(AttachError::NotAttached { .. }) => {
                        assert!(!known.contains_key(&device.0));
                    }
                    Err(AttachError::Unit { .. }) => assert!(known.contains_key(&device.0)),
                    Err(other) => panic!("{other}"),
                }
                result.is_ok()
            }
            3 | 4 => {
                let (start, pages) = (next(), next());
                let range = Span::new(
                    u64::from(start) << 12 << (pages & 31),
                    u64::from(pages) << 12,
                );
                let what = Invalidation::of(range, 1 << (address >> 12), operation > 128);
                driver.invalidate(domain, &what).is_ok()
            }
            5 => driver.enable().is_ok(),
            6 => {
                let mut faults = 0;
                driver.drain_faults(&mut |_| faults += 1);
                assert!(faults <= RING);
                true
            }
            _ => driver.disable().is_ok(),
        };
        if result {
            well += 1
        } else {
            failed += 1
        }
        let waits = script.lock().unwrap().waits;
        // A unit that says it cannot forget all at once takes more to enable.
        let most = MOST_WAITS * if operation % 8 == 5 { 20 } else { 1 };
        assert!(waits <= most, "{waits} waits in operation {operation}");
    }
    (well, failed)
}

#[test]
fn a_hostile_unit_brings_nothing_down() {
    let mut random = 0x2545_f491_4f6c_dd1du64;
    let (mut well, mut failed) = (0, 0);
    for _ in 0..1000 {
        let mut bytes = Vec::new();
        for _ in 0..400 {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            bytes.push((random >> 32) as u8);
        }
        let (more, less) = play(bytes);
        (well, failed) = (well + more, failed + less);
    }
    // Both happen often, or the test shows little.
    assert!(well > 1000 && failed > 1000, "{well} {failed}");
}
