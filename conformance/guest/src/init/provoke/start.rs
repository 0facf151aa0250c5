//! Machines that started with something wrong: options, tables of firmware.

use anyhow::ensure;
use guest::machines::{EDU, Machine, Unit};

use super::case::{Case, Expected, groups};
use crate::pci::Device;

/// Options that no driver knows, and those of a driver that this machine has no use for.
pub(crate) fn options(machine: &Machine) -> anyhow::Result<()> {
    let mut case = Case::since_the_start("options")?;
    case.file("cmdline", "/proc/cmdline")?;
    case.expect(Expected::new("option.unknown-value"));
    match machine.unit {
        // AMD's fullflush sets the mode of Intel's unit as well, as the kernel's line on its policy says.
        Unit::Intel => {
            case.expect(Expected::new("option.repeated"));
            case.expect(Expected::new("option.without-effect"));
        }
        _ => case.expect(Expected::new("option.other-vendor")),
    }
    if machine.unit == Unit::Amd {
        // QEMU's table has none without remapping of interrupts.
        case.allow(&["firmware.ioapic-missing"]);
    }
    case.end(1, "Linux version")
}

/// A table of [`guest::firmware`].
pub(crate) fn firmware(machine: &Machine) -> anyhow::Result<()> {
    let mut case = Case::since_the_start("boot")?;
    case.table("DMAR")?;
    case.expect(Expected::new(match machine.name {
        "dmar-one-to-one" => "firmware.one-to-one",
        "dmar-bad-region" => "firmware.bad-region",
        "dmar-scope" => "firmware.scope-unmatched",
        _ => "firmware.bad-table",
    }));
    if ["dmar-one-to-one", "dmar-scope"].contains(&machine.name) {
        // The kernel misses the region in the memory map.
        case.expect(Expected::new("firmware.bad-region"));
    }
    if machine.name == "dmar-one-to-one" {
        let device = Device(EDU);
        device.bind_to_vfio()?;
        let opened = super::open();
        ensure!(opened.is_err(), "a device with a region of firmware");
        case.file(
            "reserved_regions",
            &device
                .path("iommu_group/reserved_regions")
                .display()
                .to_string(),
        )?;
        case.text("groups.txt", &groups()?)?;
    }
    case.end(1, "Linux version")
}
