//! What the drivers' tests of hostile units share: a unit that answers anything. Every call ends in time,
//! without a panic, and what the driver says of its devices stays true.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::vec::Vec;

use iopt::{Invalidation, Root};
use runs::Span;

use crate::capabilities::Capabilities;
use crate::error::{AttachError, UnitError};
use crate::unit::{DeviceId, DeviceTlb, DomainId, Pasid, Unit};

/// Rounds that a driver may wait at a time.
pub(crate) const ROUNDS: u32 = 3;

/// Answers are taken from bytes; when there are no more, all goes well.
pub(crate) struct Script {
    bytes: Vec<u8>,
    at: usize,
    pub(crate) registers: BTreeMap<usize, u64>,
    waits: u32,
}

impl Script {
    pub(crate) fn byte(&mut self) -> u8 {
        let byte = self.bytes.get(self.at).copied().unwrap_or(0);
        self.at += 1;
        byte
    }

    fn word(&mut self) -> u64 {
        (0..8).fold(0, |word, _| word << 8 | u64::from(self.byte()))
    }

    /// What is good, or anything, or what is good with one of its lowest `bits` bits (32, 64) changed.
    pub(crate) fn answer(&mut self, good: u64, bits: u8) -> u64 {
        match self.byte() {
            0xff => self.word(),
            bit if bit >= 0u8.wrapping_sub(bits) => good ^ 1 << (bit & (bits - 1)),
            _ => good,
        }
    }

    pub(crate) fn register(&self, offset: usize) -> u64 {
        self.registers.get(&offset).copied().unwrap_or(0)
    }
}

/// The registers of a hostile unit.
#[derive(Clone)]
pub(crate) struct Hostile(Arc<Mutex<Script>>);

impl Hostile {
    pub(crate) fn with<V>(&self, what: impl FnOnce(&mut Script) -> V) -> V {
        what(&mut self.0.lock().unwrap())
    }

    pub(crate) fn byte(&self) -> u8 {
        self.with(Script::byte)
    }

    /// One more round of a wait; false when it is enough.
    pub(crate) fn wait(&self, round: u32) -> bool {
        self.with(|script| script.waits += 1);
        round < ROUNDS
    }
}

/// A driver that can be told to begin and to end.
pub(crate) trait Driver: Unit {
    /// PASIDs and TLBs in devices are played, too.
    fn tagged(&self) -> bool {
        false
    }

    fn enable(&self) -> Result<(), UnitError>;
    fn disable(&self) -> Result<(), UnitError>;
}

/// What holds of a unit, whatever it answers.
pub(crate) struct Truth<'a> {
    /// The root of a table that is there.
    pub(crate) root: &'a dyn Fn(u64) -> Root,
    /// A domain that nobody can have.
    pub(crate) reserved: Option<DomainId>,
    /// An attach may want memory, or a place.
    pub(crate) grows: bool,
    /// Faults that are drained at once.
    pub(crate) most_faults: usize,
    /// Calls of [`Hostile::wait`] that an operation may take, by its number modulo 8: 0 and 1 attach, 2
    /// detaches, 3 and 4 invalidate, 5 enables, 6 drains faults, 7 disables, or switches a TLB.
    pub(crate) most_waits: &'a dyn Fn(u8) -> u32,
}

/// What the driver must say of a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Known {
    domain: u32,
    address: u64,
}

/// Plays the rest of the script. Returns how many operations went well, and how many failed.
pub(crate) fn play(hostile: &Hostile, driver: &impl Driver, truth: &Truth<'_>) -> (u32, u32) {
    let mut known: BTreeMap<(u32, u32), Known> = BTreeMap::new();
    let (mut well, mut failed) = (0, 0);
    let tagged = driver.tagged();
    let Capabilities {
        pasid_bits,
        device_tlbs,
        ..
    } = driver.capabilities();
    let next = || hostile.byte();
    let goes_on = |script: &mut Script| {
        script.waits = 0;
        script.at < script.bytes.len()
    };
    while hostile.with(goes_on) {
        let operation = next();
        let device = DeviceId(u32::from(next() & 3) << 6);
        let domain = DomainId(u32::from(next() & 3));
        let address = u64::from(next() & 1) << 12;
        let pasid = Pasid(if tagged { next() & 1 } else { 0 }.into());
        let place = (device.0, pasid.0);
        let plain = pasid.0 == 0;
        let result = match operation % 8 {
            0 | 1 => {
                let fresh = Known {
                    domain: domain.0,
                    address,
                };
                let same = |there: &Known| there.domain == domain.0 && there.address != address;
                let root = (truth.root)(address);
                let result = match plain {
                    true => driver.attach(device, domain, root),
                    false => driver.attach_pasid(device, pasid, domain, root),
                };
                match result {
                    Err(AttachError::ReservedDomain { .. }) => {
                        assert_eq!(truth.reserved, Some(domain));
                    }
                    Err(AttachError::AlreadyAttached { domain, .. }) => {
                        assert_eq!(known[&place].domain, domain.0);
                    }
                    Err(AttachError::Pasid { .. }) => assert!(!plain && pasid_bits == 0),
                    Err(AttachError::OtherRoot { .. }) => assert!(known.values().any(same)),
                    // Tables are made as devices come.
                    Err(AttachError::Memory { .. } | AttachError::NoRoom { .. }) => {
                        assert!(truth.grows);
                    }
                    Ok(()) | Err(AttachError::Unit { .. }) => {
                        assert!(!known.values().any(same));
                        assert_eq!(known.insert(place, fresh), None);
                    }
                    Err(other) => panic!("{other}"),
                }
                result.is_ok()
            }
            2 => {
                let result = match plain {
                    true => driver.detach(device),
                    false => driver.detach_pasid(device, pasid),
                };
                match result {
                    Ok(()) => assert!(known.remove(&place).is_some()),
                    Err(AttachError::NotAttached { .. }) => {
                        assert!(!known.contains_key(&place));
                    }
                    Err(AttachError::Pasid { .. }) => assert!(!plain && pasid_bits == 0),
                    Err(AttachError::Unit { .. }) => assert!(known.contains_key(&place)),
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
                assert!(faults <= truth.most_faults);
                true
            }
            _ if !plain => {
                let queue_depth = domain.0 as u8;
                let tlb = (address != 0).then_some(DeviceTlb { queue_depth });
                let result = driver.set_device_tlb(device, tlb);
                let attached = known.keys().any(|place| place.0 == device.0);
                match result {
                    Err(AttachError::AlreadyAttached { .. }) => assert!(attached),
                    Err(AttachError::NoDeviceTlbs { .. }) => assert!(!device_tlbs),
                    Err(AttachError::Memory { .. }) => assert!(truth.grows),
                    Ok(()) | Err(AttachError::Unit { .. }) => {
                        assert!(!attached && (device_tlbs || tlb.is_none()));
                    }
                    Err(other) => panic!("{other}"),
                }
                result.is_ok()
            }
            _ => driver.disable().is_ok(),
        };
        if result {
            well += 1
        } else {
            failed += 1
        }
        let waits = hostile.with(|script| script.waits);
        let most = (truth.most_waits)(operation);
        assert!(waits <= most, "{waits} waits in operation {operation}");
    }
    (well, failed)
}

/// Has `play` play with this many hostile units.
pub(crate) fn brings_nothing_down(units: u32, play: impl Fn(Hostile) -> (u32, u32)) {
    let mut random = 0x2545_f491_4f6c_dd1du64;
    let (mut well, mut failed) = (0, 0);
    for _ in 0..units {
        let mut bytes = Vec::new();
        for _ in 0..400 {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            bytes.push((random >> 32) as u8);
        }
        let (at, registers, waits) = (0, BTreeMap::new(), 0);
        let script = Script {
            bytes,
            at,
            registers,
            waits,
        };
        let (more, less) = play(Hostile(Arc::new(Mutex::new(script))));
        (well, failed) = (well + more, failed + less);
    }
    // Both happen often, or the test shows little.
    assert!(well > 1000 && failed > 1000, "{well} {failed}");
}
