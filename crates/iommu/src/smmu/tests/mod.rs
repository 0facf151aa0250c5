//! The driver against a model of the unit.

mod access;
mod broken;
mod faults;
mod flush;
mod formats;
mod handover;
mod model;
mod order;
mod rig;

use std::boxed::Box;
use std::sync::Arc;
use std::vec::Vec;

use iopt::format::{ArmConfig, ArmGranule, ArmStage1, ArmStage2, K4};
use iopt::{FormatId, HeapTables, Prot, Table, TableOps as _};
use runs::Span;

use super::*;
use crate::suite::prelude::*;
use access::Seen;
use model::{Model, Received};

/// S1TS, S2TS, NTS, SMS; CTTW; 15 bits of stream ids; 16 stream mapping registers; all AArch32 tables.
const IDR0: u32 = 0xf << 27 | 1 << 14 | 15 << 9 | 16;
/// Pages of 4 KiB, 16 of them in each half; 6 context banks, of which 2 only know stage 2.
const IDR1: u32 = 3 << 28 | 2 << 16 | 6;
/// Addresses of 48 bits; AArch64 tables of 4, 16 and 64 KiB.
const IDR2: u32 = 0b111 << 12 | 5 << 8 | 5 << 4 | 5;
/// IDR2 of an SMMU of version 1: addresses of 40 bits.
const IDR2_V1: u32 = 2 << 4 | 2;

const DOMAIN: DomainId = DomainId(0x1_0007);
const DEVICE: DeviceId = DeviceId(0x123);
const STREAM: u16 = 0x123;

/// Where the data is.
const DATA: u64 = 0x40_0000_0000;

/// CR0 as the driver sets it.
const ON: u64 = 0x20_1c12;

const V1: Config = Config {
    version: Version::V1,
    ignored: 0,
    node: None,
};
const V2: Config = Config {
    version: Version::V2,
    ..V1
};

type First = Table<ArmStage1<K4>, Arc<HeapTables>>;
type Second = Table<ArmStage2<K4>, Arc<HeapTables>>;

fn memory() -> Arc<HeapTables> {
    Arc::new(HeapTables::with_tables_at(2048, 1 << 32).unwrap())
}

/// A driver and its unit, not enabled yet.
fn unit_with(memory: Arc<HeapTables>, config: Config, idr: [u32; 3]) -> (Smmu<Model>, Model) {
    let version = match config.version {
        Version::V1 => 1,
        Version::V2 => 2,
    };
    let model = Model::new(memory, version, idr);
    let driver = Smmu::new(model.clone(), config).unwrap();
    model.received();
    (driver, model)
}

/// An enabled unit of version 2, and memory for tables.
fn enabled() -> (Smmu<Model>, Model, Arc<HeapTables>) {
    let memory = memory();
    let (driver, model) = unit_with(memory.clone(), V2, [IDR0, IDR1, IDR2]);
    driver.enable().unwrap();
    model.received();
    (driver, model, memory)
}

/// A table of stage 1 with 16 pages at 0, and those of `other` 1 GiB higher.
fn first(memory: &Arc<HeapTables>, other: u64) -> First {
    let format = ArmStage1::new(48, 48).unwrap();
    let mut table: First = Table::new(format, memory.clone()).unwrap();
    let pages = Span::new(DATA + (other << 30), 16 << 12);
    table.map(0, &[pages], Prot::RW).unwrap();
    table
}

/// The same of stage 2.
fn second(memory: &Arc<HeapTables>, input_bits: u32) -> Second {
    let format = ArmStage2::new(input_bits, 40).unwrap();
    let mut table: Second = Table::new(format, memory.clone()).unwrap();
    let pages = Span::new(DATA, 16 << 12);
    table.map(0, &[pages], Prot::RW).unwrap();
    table
}

/// Access to an unmapped page of a table: TF.
const NOT_PRESENT: Seen = Seen::Context(1);
/// Access of a stream that is not mapped: USF.
const NOT_MAPPED: Seen = Seen::Global(1);
