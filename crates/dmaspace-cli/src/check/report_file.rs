//! The report that a volunteer can send: what the project needs to know of hardware that it does not have.
//!
//! It is made of chosen fields, and none of them has a name of the machine or of a user, a serial number, or an address:
//! devices are given by vendor and device numbers, a unit by its name up to its register address, windows of
//! device addresses are left out (they show what the firmware reserves), and so are addresses in refusals.

use std::fs;

use dmaspace::devices::{DevicesReport, Places};
use hostmem::{HugeSize, Machine, ThpMode};
use serde_json::json;

use super::report::CheckReport;
use crate::devices::units::units;
use crate::private::{Private, release, without_address, without_addresses};

/// The document for this machine.
pub(super) fn write(report: &CheckReport) -> anyhow::Result<String> {
    let machine = Machine::probe()?;
    let places = Places::default();
    let mut units = units(&places, &DevicesReport::read(&places)?);
    for unit in &mut units {
        unit.name = without_address(&unit.name).into();
    }
    let mut steps = report.steps.clone();
    for refused in steps.iter_mut().filter_map(|done| done.refused.as_mut()) {
        refused.error = without_addresses(&refused.error);
    }
    let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let sizes = [HugeSize::TwoMiB, HugeSize::OneGiB].into_iter();
    let pools = sizes.filter(|size| machine.pool(*size).is_some());
    let kernel = report.kernel.clone().unwrap_or_default();
    let over_kernel = report.kernel.as_ref();
    let document = crate::json::json(&json!({
        "dmaspace": env!("CARGO_PKG_VERSION"),
        "kernel": release(&fs::read_to_string("/proc/sys/kernel/osrelease")?),
        "processor_vendor": line(&cpuinfo, "vendor_id"),
        "processor": line(&cpuinfo, "model name"),
        "units": units,
        "page_bytes": machine.page,
        "memory_nodes": machine.nodes.len(),
        "transparent_huge_pages": match machine.thp {
            ThpMode::Always => "always",
            ThpMode::Madvise => "madvise",
            ThpMode::Never => "never",
        },
        "huge_page_bytes": pools.map(HugeSize::bytes).collect::<Vec<_>>(),
        "backend": report.backend,
        "devices": kernel.devices.iter().map(|device| &device.id).collect::<Vec<_>>(),
        "granule_bytes": over_kernel.map(|kernel| kernel.granule_bytes),
        "page_sizes_bytes": kernel.page_sizes_bytes,
        "most_mappings": kernel.most_mappings,
        "lacks": kernel.lacks,
        "pin": report.memory.pin,
        "counter": report.memory.counter,
        "limited": report.memory.limit_bytes.is_some(),
        "steps": steps,
        "right": report.is_right(),
        "times": report.times,
    }))?;
    Ok(Private::of_this_machine().without(&document))
}

/// The first line of this name in `/proc/cpuinfo`.
fn line(text: &str, name: &str) -> Option<String> {
    let lines = text.lines().filter_map(|line| line.split_once(':'));
    let mut values = lines.filter(|(key, _)| key.trim() == name);
    values.next().map(|(_, value)| value.trim().into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_processor_is_named_and_its_serial_number_is_not() {
        let cpuinfo = "processor\t: 0\nvendor_id\t: GenuineIntel\nmodel name\t: A Processor\n";
        assert_eq!(line(cpuinfo, "vendor_id").as_deref(), Some("GenuineIntel"));
        assert_eq!(line(cpuinfo, "serial"), None);
    }
}
