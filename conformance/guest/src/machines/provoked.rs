//! Machines on which faults are provoked, for the corpus by which `dmaspace explain` is judged.

use super::{Machine, Unit};

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
    "provoke_flood",
];

/// A device without a domain. The SMMU's driver has it abort, without an event (IHI 0070, section 5.2, STE.Config).
const NO_DOMAIN: &[&str] = &["provoke_no_domain"];

/// A buffer that a driver of the host unmaps: where the kernel has that driver.
const UNMAPPED: &[&str] = &["provoke_host_unmapped_strict", "provoke_host_unmapped_lazy"];

/// Interrupts, which these machines remap.
const INTERRUPTS: &[&str] = &["provoke_interrupt"];

const VTD: &[&[&str]] = &[FAULTS, UNMAPPED, NO_DOMAIN, INTERRUPTS];
const SMMU: &[&[&str]] = &[FAULTS, UNMAPPED];

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
];

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
