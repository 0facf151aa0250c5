//! Names of the bits of an entry, and meanings of their values: for people who read one.
//!
//! Written from the specifications, field by field, beside [`iopt::walk`] which decides by them. The
//! tables here say nothing that the walker does not do: a test turns over every bit of every kind of
//! entry and compares. Each layout covers every bit of its entry exactly once.

mod amd;
mod arm;
mod armv7;
mod dart;
mod riscv;
mod x86;

use iopt::FormatId;
use serde::Serialize;

use crate::json::hex;

/// Kind of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// It leads to a table.
    Table,
    /// It is a leaf.
    Leaf,
    /// It is not present.
    Absent,
    /// It is present, and what it is has to be seen from itself.
    Unknown,
}

/// A field of an entry.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Field {
    /// Its highest bit.
    pub high: u8,
    /// Its lowest bit.
    pub low: u8,
    /// Its name in the specification.
    pub name: &'static str,
    /// Its value.
    #[serde(with = "hex")]
    pub value: u64,
    /// Meaning of the value.
    pub meaning: String,
    /// The specification and section that say so.
    pub source: &'static str,
    /// The unit wants another value, and faults.
    pub wrong: bool,
}

/// A field in a layout.
#[derive(Clone, Copy, Debug)]
struct Bits {
    high: u8,
    low: u8,
    name: &'static str,
    what: What,
}

/// Meaning of a field's value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum What {
    /// Not looked at by the unit.
    Ignored(&'static str),
    /// Must be 0.
    Reserved,
    /// A part of the address that the entry leads to; the lowest bit of the address.
    Address(u8),
    /// One bit: what 0 and 1 mean.
    Flag(&'static str, &'static str),
    /// A small number: what each value means.
    Code(&'static [&'static str]),
    /// A number.
    Number(&'static str),
}

const fn bits(high: u8, low: u8, name: &'static str, what: What) -> Bits {
    Bits {
        high,
        low,
        name,
        what,
    }
}

const fn flag(bit: u8, name: &'static str, zero: &'static str, one: &'static str) -> Bits {
    bits(bit, bit, name, What::Flag(zero, one))
}

const fn ignored(high: u8, low: u8) -> Bits {
    bits(high, low, "ignored", What::Ignored("ignored"))
}

const fn reserved(high: u8, low: u8) -> Bits {
    bits(high, low, "reserved", What::Reserved)
}

const fn address(high: u8, low: u8) -> Bits {
    bits(high, low, "address", What::Address(low))
}

/// A layout and where it is specified.
struct Layout {
    fields: Vec<Bits>,
    source: &'static str,
}

fn layout(format: FormatId, level: u8, kind: Kind, word: u64) -> Layout {
    match format {
        FormatId::AmdV1 => amd::layout(level, kind, word),
        FormatId::X86_64 => x86::first_stage(level, kind, word),
        FormatId::VtdSs => x86::second_stage(level, kind, word),
        FormatId::ArmStage1(config) => arm::stage1(config.granule, level, kind, word),
        FormatId::ArmStage2(config) => arm::stage2(config.granule, level, kind, word),
        FormatId::ArmV7s => armv7::layout(level, kind, word),
        FormatId::RiscV => riscv::layout(false, level, kind, word),
        FormatId::RiscVG => riscv::layout(true, level, kind, word),
        FormatId::Dart(config) => dart::layout(config, level, kind),
        _ => Layout {
            fields: vec![ignored(63, 0)],
            source: "",
        },
    }
}

/// The fields of an entry, from bit 0 up.
pub fn fields(format: FormatId, level: u8, kind: Kind, word: u64) -> Vec<Field> {
    let Layout { fields, source } = layout(format, level, kind, word);
    let field = |bits: &Bits| {
        let value = word >> bits.low & (u64::MAX >> (63 - (bits.high - bits.low)));
        let wrong = bits.what == What::Reserved && value != 0;
        let meaning = match bits.what {
            What::Ignored(why) => why.into(),
            What::Reserved if wrong => "must be 0: the unit faults".into(),
            What::Reserved => "must be 0".into(),
            What::Address(lowest) => format!("{:#x}", value << lowest),
            What::Flag(zero, one) => if value == 0 { zero } else { one }.into(),
            What::Code(meanings) => usize::try_from(value)
                .ok()
                .and_then(|value| meanings.get(value))
                .map_or("reserved", |meaning| *meaning)
                .into(),
            What::Number(of) => format!("{value} {of}").trim().into(),
        };
        Field {
            high: bits.high,
            low: bits.low,
            name: bits.name,
            value,
            meaning,
            source,
            wrong,
        }
    };
    fields.iter().map(field).collect()
}
