//! The driver against a model of the unit.

mod broken;
mod caches;
mod flush;
mod formats;
mod model;
mod order;
mod pasids;
mod rig;

use std::boxed::Box;
use std::sync::Arc;
use std::vec::Vec;

use iopt::format::{ArmConfig, ArmGranule};
use iopt::{FormatId, HeapTables};
use runs::Span;

use super::*;
use crate::suite::prelude::*;
use caches::{ContextHit, Looked};
use model::{Model, Received};

/// Both stages, AArch64, coherent, HTTU, BTM, ATS, 16-bit ASIDs and VMIDs, two-level contexts and streams; no
/// MSI, and stalls are possible.
const IDR0: u32 =
    0b1_1011 | 1 << 5 | 2 << 6 | 1 << 10 | 1 << 12 | 1 << 18 | 1 << 19 | 2 << 21 | 1 << 27;
/// 16 bits of StreamIDs, 20 of PASIDs, large queues, ATTR_TYPES_OVR.
const IDR1: u32 = 16 | 20 << 6 | 19 << 16 | 19 << 21 | 1 << 27;
/// RIL, BBML 2.
const IDR3: u32 = 1 << 10 | 2 << 11;
/// 48 bits, all granules.
const IDR5: u32 = 5 | 7 << 4;
const IDS: [u32; 6] = [IDR0, IDR1, 0, IDR3, 0, IDR5];
/// IDR0.MSI.
const MSI: u32 = 1 << 13;

/// The VMID of stage 1.
const VMID: u16 = 0xffff;
const DOMAIN: DomainId = DomainId(7);
const DEVICE: DeviceId = DeviceId::pci(3, 5, 1);
const STREAM: u32 = 0x0329;

type Driver = SmmuV3<Model, Arc<HeapTables>>;

const CONFIG: Config = Config {
    last_device: 0x3ff,
    pasid_bits: 0,
    device_tlbs: false,
    node: None,
};

const fn config(granule: ArmGranule, input_bits: u8) -> ArmConfig {
    ArmConfig {
        granule,
        input_bits,
        upper: false,
    }
}

/// A table of stage 1 with four levels.
const fn root(address: u64) -> Root {
    Root {
        format: FormatId::ArmStage1(config(ArmGranule::K4, 48)),
        address,
        levels: 4,
    }
}

/// A table of stage 2 with three levels.
const fn second(address: u64) -> Root {
    Root {
        format: FormatId::ArmStage2(config(ArmGranule::K4, 39)),
        address,
        levels: 3,
    }
}

fn memory() -> Arc<HeapTables> {
    Arc::new(HeapTables::with_tables(256).unwrap())
}

/// A driver and its unit, not enabled yet.
fn unit(ids: [u32; 6], config: Config) -> (Driver, Model) {
    let memory = memory();
    let model = Model::new(memory.clone(), ids);
    (SmmuV3::new(model.clone(), memory, config).unwrap(), model)
}

/// A unit that translates.
fn enabled_with(ids: [u32; 6], config: Config) -> (Driver, Model) {
    let (driver, model) = unit(ids, config);
    driver.enable().unwrap();
    model.received();
    (driver, model)
}

fn enabled(config: Config) -> (Driver, Model) {
    enabled_with(IDS, config)
}

/// Tag number and root of a translation, if one was found.
fn found(looked: Looked) -> Option<(u16, Root)> {
    looked.ok().map(|found| {
        let ContextHit { tag, root, .. } = found;
        assert!(tag.1.is_none() || tag.0 == VMID, "{tag:?}");
        (tag.1.unwrap_or(tag.0), root)
    })
}

/// All of a domain of stage 1.
const fn whole(domain: u16) -> Received {
    Received::Asid(VMID, domain)
}
