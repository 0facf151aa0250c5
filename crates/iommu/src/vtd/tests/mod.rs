//! The driver against a model of the unit.

mod absent;
mod broken;
mod devices;
mod flush;
mod look_up;
mod model;
mod order;
mod pasids;
mod rig;
mod scalable;

use std::boxed::Box;
use std::sync::Arc;
use std::vec::Vec;

use iopt::{FormatId, HeapTables, Root};

use super::*;
use crate::suite::prelude::*;
use model::{Model, Received};

// Capability bits.
const CACHING_MODE: u64 = 1 << 7;
const WRITE_BUFFERS: u64 = 1 << 4;
const PROTECTED_MEMORY: u64 = 3 << 5;
const PAGE_SELECTIVE: u64 = 1 << 39;
const QUEUED: u64 = 1 << 1;
const DEVICE_TLBS: u64 = 1 << 2;
/// PASIDs of 20 bits.
const PASIDS: u64 = 1 << 40 | 19 << 35;
const SCALABLE_BOTH: u64 = 1 << 43 | 1 << 46 | 1 << 47;

/// 256 domains, 3 and 4 levels, 48 bits, 2 MiB and 1 GiB, pages to 2^18 at once, two fault records
/// at 0x220, draining.
const CAP: u64 = 2
    | 0b110 << 8
    | 47 << 16
    | 0x22 << 24
    | 3 << 34
    | PAGE_SELECTIVE
    | 1 << 40
    | 18 << 48
    | 3 << 54;
/// Coherent walks, a queue, snoop control, IOTLB registers at 0xf0.
const ECAP: u64 = 1 | QUEUED | 1 << 7 | 0xf << 8;

const DOMAIN: DomainId = DomainId(7);
const DEVICE: DeviceId = DeviceId::pci(3, 5, 1);
const SOURCE: u16 = 0x0329;

type Driver = Vtd<Model, Arc<HeapTables>>;

fn root(address: u64, levels: u8) -> Root {
    Root {
        format: FormatId::VtdSs,
        address,
        levels,
    }
}

fn memory() -> Arc<HeapTables> {
    Arc::new(HeapTables::with_tables(256).unwrap())
}

/// A driver and its unit, not enabled yet.
fn unit(cap: u64, ecap: u64, mode: Mode) -> (Driver, Model) {
    let memory = memory();
    let model = Model::new(memory.clone(), cap, ecap);
    let config = Config {
        mode,
        ..Config::default()
    };
    (Vtd::new(model.clone(), memory, config).unwrap(), model)
}

/// A unit that translates.
fn enabled(cap: u64, ecap: u64, mode: Mode) -> (Driver, Model) {
    let (driver, model) = unit(cap, ecap, mode);
    driver.enable().unwrap();
    model.received();
    (driver, model)
}

/// Everything that the unit has received, without tickets.
fn received(model: &Model) -> std::vec::Vec<Received> {
    let received = model.received().into_iter();
    received
        .map(|received| match received {
            Received::Wait(_) => Received::Wait(0),
            other => other,
        })
        .collect()
}
