//! A unit that answers anything: every call ends in time, without a panic, and what the driver says of
//! its devices stays true.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::vec::Vec;

use super::*;

/// Rounds that the driver may wait at a time.
const ROUNDS: u32 = 3;
/// Calls of `wait` that one operation may take: a few waits.
const MOST_WAITS: u32 = 20 * (ROUNDS + 1);

/// Takes its answers from bytes, then answers as if all went well.
struct Hostile(Arc<Mutex<Script>>);

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

    /// What stands in a register, or anything, or that with a few bits changed.
    fn answer(&mut self, offset: usize, good: u64) -> u64 {
        let good = self.registers.get(&offset).copied().unwrap_or(good);
        match self.byte() {
            0xff => self.word(),
            bit @ 0xc0.. => good ^ 1 << (bit & 0x3f),
            _ => good,
        }
    }
}

impl Hostile {
    fn with<V>(&self, what: impl FnOnce(&mut Script) -> V) -> V {
        what(&mut self.0.lock().unwrap())
    }
}

impl Registers for Hostile {
    fn read32(&self, offset: usize) -> u32 {
        self.with(|script| match offset {
            0x00 => 0x10,
            // The status follows the command.
            0x1c => script.answer(0x18, 0) as u32 & !(1 << 27),
            _ => script.answer(offset, 0) as u32,
        })
    }
    fn write32(&self, offset: usize, value: u32) {
        let value = if offset == 0x34 { 0 } else { value };
        self.with(|script| script.registers.insert(offset, value.into()));
    }
    fn read64(&self, offset: usize) -> u64 {
        self.with(|script| match offset {
            0x80 => script.answer(0x88, 0),
            0x08 => script.answer(offset, CAP),
            0x10 => script.answer(offset, ECAP | SCALABLE_BOTH),
            // Register commands are done.
            0x28 => script.answer(offset, 0) & !(1 << 63) | 3 << 59,
            0xf8 => script.answer(offset, 0) & !(1 << 63) | 3 << 57,
            _ => script.answer(offset, 0),
        })
    }
    fn write64(&self, offset: usize, value: u64) {
        self.with(|script| script.registers.insert(offset, value));
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
    let mode = match next() % 3 {
        0 => Mode::Legacy,
        1 => Mode::ScalableSecond,
        _ => Mode::ScalableFirst,
    };
    let config = Config {
        mode,
        ..Config::default()
    };
    let Ok(driver) = Vtd::new(Hostile(script.clone()), memory(), config) else {
        return (0, 0);
    };
    let can = driver.capabilities();
    let support = can.formats[0].unwrap();
    let caching = driver.offer.caching_mode();
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
                let root = Root {
                    format: support.format,
                    address,
                    levels: support.levels.trailing_zeros() as u8,
                };
                let fresh = Known {
                    domain: domain.0,
                    address,
                };
                let same = |there: &Known| there.domain == domain.0 && there.address != address;
                let result = driver.attach(device, domain, root);
                match result {
                    Err(AttachError::ReservedDomain { .. }) => assert!(caching && domain.0 == 0),
                    Err(AttachError::AlreadyAttached { domain, .. }) => {
                        assert_eq!(known[&device.0].domain, domain.0);
                    }
                    Err(AttachError::OtherRoot { .. }) => assert!(known.values().any(same)),
                    Err(AttachError::Memory { .. }) => {}
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
                assert!(faults <= 256);
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
        // By registers each command waits for itself.
        let most = MOST_WAITS + 2 * (ROUNDS + 1) * MOST_PAGE_COMMANDS as u32;
        assert!(waits <= most, "{waits} waits in operation {operation}");
    }
    (well, failed)
}

#[test]
fn a_hostile_unit_brings_nothing_down() {
    let mut random = 0x2545_f491_4f6c_dd1du64;
    let (mut well, mut failed) = (0, 0);
    for _ in 0..2000 {
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
