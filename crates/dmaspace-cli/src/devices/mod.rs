//! `dmaspace devices`: which devices can be given to a program, and what is missing.

mod names;
mod text;
pub(crate) mod units;

use dmaspace::devices::{DevicesReport, Places};

use crate::draw::sheet::Paint;
use crate::json::json;
use crate::output::{exit, fail, print, refuse};

pub(crate) use names::Names;
use units::UnitReport;

/// Devices and units.
#[derive(serde::Serialize)]
struct Machine {
    #[serde(flatten)]
    devices: DevicesReport,
    units: Vec<UnitReport>,
}

/// The options of `dmaspace devices`.
#[derive(Debug, clap::Args)]
pub(crate) struct DevicesArgs {
    /// Print the report as JSON
    ///
    /// Names are stable. Nothing else is printed on stdout.
    ///
    /// Example: --json | jq '.devices[].state'
    #[arg(long)]
    pub(crate) json: bool,
}

/// `dmaspace devices`.
pub(crate) fn run(args: &DevicesArgs) -> u8 {
    let places = Places::default();
    let report = match DevicesReport::read(&places) {
        Ok(devices) => Machine {
            units: units::units(&places, &devices),
            devices,
        },
        Err(error) => return fail(&error, exit::WRONG),
    };
    let text = if args.json {
        match json(&report) {
            Ok(json) => json,
            Err(error) => return fail(&error, exit::WRONG),
        }
    } else {
        text::write(
            &report.devices,
            &report.units,
            &Names::open(),
            Paint::for_stdout(),
        )
    };
    match print(&text) {
        Ok(()) => exit::RIGHT,
        Err(error) => refuse(&error),
    }
}
