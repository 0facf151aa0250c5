//! The driver against a model of the unit.

mod broken;
mod commands;
mod flush;
mod model;
mod order;
mod rig;
mod spaces;

use std::boxed::Box;
use std::sync::Arc;
use std::vec::Vec;

use iopt::{FormatId, HeapTables, Invalidation, Root};
use runs::Span;

use super::*;
use crate::suite::prelude::*;
use model::{Model, Received, Space};

/// Version 1.0, Sv39 to Sv57 in both stages, ATS, 56 bits of addresses, process directories of all sizes.
const PLAIN: u64 = 0x10 | 7 << 9 | 7 << 17 | 1 << 25 | 56 << 32 | 7 << 38;
/// Extended contexts, accessed and dirty bits, NL and S.
const RICH: u64 = PLAIN | 1 << 22 | 1 << 24 | 3 << 42;

const DOMAIN: DomainId = DomainId(7);
const OTHER: DomainId = DomainId(8);
const DEVICE: DeviceId = DeviceId::pci(3, 5, 1);
const ID: u64 = 0x0329;

type Driver = RiscvIommu<Model, Arc<HeapTables>>;

const CONFIG: Config = Config {
    device_bits: 16,
    pasid_bits: 0,
    node: None,
};
const PROCESSES: Config = Config {
    pasid_bits: 8,
    ..CONFIG
};

fn root(address: u64, levels: u8) -> Root {
    Root {
        format: FormatId::RiscV,
        address,
        levels,
    }
}

fn second(address: u64, levels: u8) -> Root {
    Root {
        format: FormatId::RiscVG,
        address,
        levels,
    }
}

fn memory() -> Arc<HeapTables> {
    Arc::new(HeapTables::with_tables(64).unwrap())
}

/// A driver and its unit, not enabled yet.
fn unit(capabilities: u64, config: Config) -> (Driver, Model) {
    let memory = memory();
    let model = Model::new(memory.clone(), capabilities);
    let driver = RiscvIommu::new(model.clone(), memory, config).unwrap();
    (driver, model)
}

/// A unit that translates.
fn enabled(capabilities: u64, config: Config) -> (Driver, Model) {
    let (driver, model) = unit(capabilities, config);
    driver.enable().unwrap();
    model.received();
    (driver, model)
}

/// All of a first-stage table's domain.
const fn whole(domain: u64) -> Received {
    Received::Table(Space::Pscid(domain), None)
}
