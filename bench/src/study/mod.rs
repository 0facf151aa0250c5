//! Simulations of measurements that others have published.
//!
//! A [`Study`] says of each input whether it is published, fitted or assumed, and of each row whether
//! an input was fitted to it: such a row does not count as reproduced, and neither does one of the
//! same configuration. Each assumed input is varied, by 20 % up and down or to what else it might have been, and
//! the study says how far the rows move.
//!
//! [`allreduce`] is the machines of origin 5.

mod allreduce;

use serde::Serialize;

use crate::simulation::{DomainError, SimulationError};

pub use allreduce::{allreduce, allreduce_rows};

/// How far a row may be off to count as reproduced.
pub const TOLERANCE: f64 = 0.10;

/// Part by which assumed inputs are varied, up and down, unless they are counts of a few.
pub const VARIED: f64 = 0.20;

/// Inputs and results of a study, and the spread of the results.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Study {
    /// The measurement, and its authors.
    pub title: &'static str,
    /// The inputs.
    pub inputs: Vec<Input>,
    /// The results, beside the measurements.
    pub rows: Vec<Row>,
    /// How far the rows move with each assumed input.
    pub spread: Vec<Spread>,
}

/// Something that is put in.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Input {
    /// The name.
    pub name: &'static str,
    /// Its value, in `unit`.
    pub value: f64,
    /// The unit.
    pub unit: &'static str,
    /// Where it comes from.
    pub basis: Basis,
}

/// Where an input comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", tag = "kind", content = "from")]
pub enum Basis {
    /// It was measured and published: source.
    Published(&'static str),
    /// It is the value with which these rows come out best.
    Fitted(&'static str),
    /// No source gives it: reason for this value.
    Assumed(&'static str),
}

/// A measurement, and what the simulation makes of it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    /// The measurement.
    pub name: String,
    /// The published value.
    pub published: f64,
    /// The simulated value.
    pub simulated: f64,
    /// The unit of both.
    pub unit: &'static str,
    /// Standing of the row.
    pub standing: Standing,
}

/// Standing of a row: it can count as reproduced, or not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Standing {
    /// It can.
    Counts,
    /// An input was fitted to it.
    Fitted,
    /// It is the configuration of a fitted row in another place, so it follows from that.
    Follows,
}

/// How far rows move with one input.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Spread {
    /// The input.
    pub input: &'static str,
    /// The changed value.
    pub value: f64,
    /// The change of the row that fell most, or rose least, as a part of the row: -0.05 is 5 % less.
    pub lowest: f64,
    /// The change of the row that rose most, or fell least.
    pub highest: f64,
}

/// Why a study came to no end.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StudyError {
    /// The tables were not built.
    #[error(transparent)]
    Domain(#[from] DomainError),
    /// The simulation was refused or met a fault.
    #[error(transparent)]
    Simulation(#[from] SimulationError),
    /// A simulation has no outcome for a device.
    #[error("the simulation has no result for a device")]
    NoOutcome,
}

impl Row {
    /// How far the simulation is off, as a part of what was published.
    pub fn off(&self) -> f64 {
        self.simulated / self.published - 1.0
    }

    /// It counts, and is off by [`TOLERANCE`] at most.
    pub fn is_reproduced(&self) -> bool {
        self.standing == Standing::Counts && self.off().abs() <= TOLERANCE
    }
}

impl Study {
    /// The rows that count.
    pub fn counting(&self) -> impl Iterator<Item = &Row> {
        let counts = |row: &&Row| row.standing == Standing::Counts;
        self.rows.iter().filter(counts)
    }
}

/// An input by its place in the values of a scenario.
struct Knob<V> {
    name: &'static str,
    unit: &'static str,
    basis: Basis,
    varied: Varied,
    at: fn(&mut V) -> &mut f64,
}

/// How an assumed input is varied.
enum Varied {
    /// A part of itself, [`VARIED`], down and up.
    ByPart,
    /// To these.
    To([f64; 2]),
}

/// Runs a scenario as it is, and once more for each assumed input up and down.
fn study<V: Copy>(
    title: &'static str,
    values: V,
    knobs: &[Knob<V>],
    rows: fn(&V) -> Result<Vec<Row>, StudyError>,
) -> Result<Study, StudyError> {
    let found = rows(&values)?;
    let mut spread = Vec::new();
    let assumed = |knob: &&Knob<V>| matches!(knob.basis, Basis::Assumed(_));
    for knob in knobs.iter().filter(assumed) {
        let found_with = *(knob.at)(&mut { values });
        let to = match knob.varied {
            Varied::ByPart => [1.0 - VARIED, 1.0 + VARIED].map(|factor| found_with * factor),
            Varied::To(values) => values,
        };
        for value in to {
            let mut values = values;
            *(knob.at)(&mut values) = value;
            let moved = rows(&values)?;
            let changes = moved.iter().zip(&found);
            let changes = changes.map(|(moved, row)| moved.simulated / row.simulated - 1.0);
            spread.push(Spread {
                input: knob.name,
                value,
                lowest: changes.clone().fold(f64::INFINITY, f64::min),
                highest: changes.fold(f64::NEG_INFINITY, f64::max),
            });
        }
    }
    let inputs = knobs.iter().map(|knob| Input {
        name: knob.name,
        value: *(knob.at)(&mut { values }),
        unit: knob.unit,
        basis: knob.basis,
    });
    Ok(Study {
        title,
        inputs: inputs.collect(),
        rows: found,
        spread,
    })
}

/// A count that is kept as a number that can be varied.
fn whole(value: f64) -> u32 {
    value.round().clamp(0.0, f64::from(u32::MAX)) as u32
}
