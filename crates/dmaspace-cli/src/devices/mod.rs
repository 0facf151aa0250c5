//! `dmaspace devices`: which devices can be given to a program, and what is missing.

mod names;
mod text;

use dmaspace::devices::{DevicesReport, Places};

use crate::draw::sheet::Paint;
use crate::{exit, fail, json, print, refuse};

pub(crate) use names::Names;

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
    let report = match DevicesReport::read(&Places::default()) {
        Ok(report) => report,
        Err(error) => return fail(&error, exit::WRONG),
    };
    let text = if args.json {
        match json(&report) {
            Ok(json) => json,
            Err(error) => return fail(&error, exit::WRONG),
        }
    } else {
        text::write(&report, &Names::open(), Paint::for_stdout())
    };
    match print(&text) {
        Ok(()) => exit::RIGHT,
        Err(error) => refuse(&error),
    }
}
