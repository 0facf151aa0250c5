//! The driver against a model of the unit.

mod absent;
mod broken;
mod devices;
mod flush;
mod guest;
mod model;
mod order;
mod rig;

use std::boxed::Box;
use std::sync::Arc;
use std::vec::Vec;

use iopt::{FormatId, HeapTables, Root};

use super::*;
use crate::suite::prelude::*;
use model::{Model, Received};

/// INVALIDATE_IOMMU_ALL, six levels.
const FEATURES: u64 = 1 << 6 | 2 << 10;

const DOMAIN: DomainId = DomainId(7);
const DEVICE: DeviceId = DeviceId::pci(3, 5, 1);
const SOURCE: u16 = 0x0329;

type Driver = AmdVi<Model, Arc<HeapTables>>;

const CONFIG: Config = Config {
    mode: Mode::Host,
    segment: 0,
    last_device: 0x3ff,
    host_bits: 48,
    input_bits: 64,
    caches_not_present: false,
    device_tlbs: false,
    pasid_bits: 0,
    node: None,
};

fn root(address: u64, levels: u8) -> Root {
    Root {
        format: FormatId::AmdV1,
        address,
        levels,
    }
}

fn memory() -> Arc<HeapTables> {
    Arc::new(HeapTables::with_tables(64).unwrap())
}

/// A driver and its unit, not enabled yet.
fn unit(features: u64, config: Config) -> (Driver, Model) {
    let memory = memory();
    let model = Model::new(memory.clone(), features);
    (AmdVi::new(model.clone(), memory, config).unwrap(), model)
}

/// A unit that translates.
fn enabled(config: Config) -> (Driver, Model) {
    let (driver, model) = unit(FEATURES, config);
    driver.enable().unwrap();
    model.received();
    (driver, model)
}

/// All of a domain.
const fn whole(domain: u16) -> Received {
    Received::Pages(domain, 0, 52, true)
}
