//! Machines on which faults are provoked, for the corpus by which `dmaspace explain` is judged.

use super::{Machine, TWO_NODES, Unit};

/// Devices that all do DMA at once, and none that VFIO has.
pub const MANY: [&str; 8] = [
    "0000:00:10.0",
    "0000:00:11.0",
    "0000:00:12.0",
    "0000:00:13.0",
    "0000:00:14.0",
    "0000:00:15.0",
    "0000:00:16.0",
    "0000:00:17.0",
];

/// Functions of one slot without ACS, and so of one group; a driver of the host takes the second.
pub const FUNCTIONS: [&str; 2] = ["0000:00:1a.0", "0000:00:1a.1"];

/// Faults of a device that VFIO has, and of devices of the host.
const FAULTS: &[&str] = &[
    "provoke_nothing",
    "provoke_never_mapped",
    "provoke_after_unmap",
    "provoke_read_only",
    "provoke_null",
    "provoke_physical",
    "provoke_beyond_the_width",
    "provoke_host_physical",
    "provoke_beyond_the_aperture",
    "provoke_flood",
];

/// A device without a domain. The SMMU's driver has it abort, without an event (IHI 0070, section 5.2, STE.Config).
const NO_DOMAIN: &[&str] = &["provoke_no_domain"];

/// A buffer that a driver of the host unmaps: where the kernel has that driver.
const UNMAPPED: &[&str] = &["provoke_host_unmapped_strict", "provoke_host_unmapped_lazy"];

/// Ranges that groups reserve for interrupts, and the limit of locked memory, which type 1 tells of.
const LIMITS: &[&str] = &["provoke_reserved", "provoke_memlock"];

/// QEMU, which cannot start with a device.
const MONITOR: &[&str] = &[
    "provoke_monitor_group",
    "provoke_monitor_memlock",
    "provoke_monitor_mappings",
    "provoke_monitor_pool",
];

/// A guest wider than the unit: AMD's tables take all addresses that QEMU gives.
const WIDTH: &[&str] = &["provoke_monitor_width"];

/// Interrupts, which these machines remap.
const INTERRUPTS: &[&str] = &["provoke_interrupt"];

const VTD: &[&[&str]] = &[FAULTS, UNMAPPED, NO_DOMAIN, INTERRUPTS, LIMITS];
const SMMU: &[&[&str]] = &[FAULTS, UNMAPPED, LIMITS];
const OPTIONS: &[&[&str]] = &[&["provoke_options"]];
const FIRMWARE: &[&[&str]] = &[&["provoke_firmware"]];

/// All of them.
pub const PROVOKED: &[Machine] = &[
    provoked("vtd", Unit::Intel, VTD),
    provoked("vtd-scalable-second", Unit::IntelSecond, VTD),
    provoked("vtd-scalable-first", Unit::IntelFirst, VTD),
    // QEMU logs each fault as an interrupt at address 0 (flag I of its event): there is nothing to judge by.
    provoked("amd-vi", Unit::Amd, &[&["provoke_nothing"]]),
    provoked("smmuv3-stage1", Unit::Smmu1, SMMU),
    provoked("smmuv3-stage2", Unit::Smmu2, SMMU),
    provoked("riscv-iommu", Unit::RiscV, &[FAULTS, NO_DOMAIN]),
    provoked("vtd-options", Unit::Intel, OPTIONS),
    provoked("amd-vi-options", Unit::Amd, OPTIONS),
    // Tables of firmware of `crate::firmware`.
    provoked("dmar-one-to-one", Unit::Intel, FIRMWARE),
    provoked("dmar-bad-region", Unit::Intel, FIRMWARE),
    provoked("dmar-scope", Unit::Intel, FIRMWARE),
    provoked("dmar-no-registers", Unit::Intel, FIRMWARE),
    provoked("vtd-monitor", Unit::Intel, &[MONITOR, WIDTH]),
    provoked("amd-vi-monitor", Unit::Amd, &[MONITOR]),
    Machine {
        nodes: Some(TWO_NODES),
        ..provoked("vtd-nodes", Unit::Intel, &[&["provoke_monitor_node"]])
    },
];

/// Parameters of the kernel of the machine of this name.
pub(super) fn kernel(name: &str) -> &'static str {
    match name {
        "vtd-options" => "intel_iommu=on,fast amd_iommu=fullflush iommu.strict=never",
        "amd-vi-options" => "amd_iommu=on,enabled intel_iommu=on",
        _ => "",
    }
}

/// True if the machine of this name has a QEMU of its own, and devices for the guest of that.
pub fn is_monitor(name: &str) -> bool {
    name.ends_with("-monitor") || name == "vtd-nodes"
}

const fn provoked(
    name: &'static str,
    unit: Unit,
    tests: &'static [&'static [&'static str]],
) -> Machine {
    Machine {
        name,
        unit,
        nodes: None,
        tests,
    }
}
