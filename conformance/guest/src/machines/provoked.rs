//! Machines on which faults and refusals are provoked, for the corpus by which `dmaspace explain` is judged.

use super::{Machine, Unit};

/// A machine whose tests provoke faults.
#[derive(Debug)]
pub struct Provoked {
    /// Its IOMMU and its tests.
    pub machine: Machine,
    /// Further arguments of QEMU.
    pub qemu: &'static [&'static str],
    /// Further parameters of the kernel.
    pub kernel: &'static str,
}

impl Provoked {
    /// What a machine has beside others, if it is one of these.
    pub fn of(machine: &Machine) -> Option<&'static Self> {
        let mut all = PROVOKED.iter();
        all.find(|provoked| provoked.machine.name == machine.name)
    }
}

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

/// QEMU's arguments for [`MANY`].
const MANY_ARGUMENTS: &[&str] = &[
    "-device",
    "edu,dma_mask=0xffffffffffffffff,bus=pcie.0,addr=10.0",
    "-device",
    "edu,dma_mask=0xffffffffffffffff,bus=pcie.0,addr=11.0",
    "-device",
    "edu,dma_mask=0xffffffffffffffff,bus=pcie.0,addr=12.0",
    "-device",
    "edu,dma_mask=0xffffffffffffffff,bus=pcie.0,addr=13.0",
    "-device",
    "edu,dma_mask=0xffffffffffffffff,bus=pcie.0,addr=14.0",
    "-device",
    "edu,dma_mask=0xffffffffffffffff,bus=pcie.0,addr=15.0",
    "-device",
    "edu,dma_mask=0xffffffffffffffff,bus=pcie.0,addr=16.0",
    "-device",
    "edu,dma_mask=0xffffffffffffffff,bus=pcie.0,addr=17.0",
];

/// Faults of devices that VFIO has, and of devices of the host.
const FAULTS: &[&str] = &[
    "provoke_nothing",
    "provoke_never_mapped",
    "provoke_after_unmap",
    "provoke_read_only",
    "provoke_null",
    "provoke_physical",
    "provoke_beyond_the_width",
    "provoke_no_domain",
    "provoke_host_physical",
    "provoke_host_unmapped_strict",
    "provoke_host_unmapped_lazy",
    "provoke_flood",
];

/// Faults of interrupts.
const INTERRUPTS: &[&str] = &["provoke_interrupt"];

/// All of them.
pub const PROVOKED: &[Provoked] = &[
    faults("vtd", Unit::Intel, &[FAULTS, INTERRUPTS]),
    faults(
        "vtd-scalable-second",
        Unit::IntelSecond,
        &[FAULTS, INTERRUPTS],
    ),
    faults(
        "vtd-scalable-first",
        Unit::IntelFirst,
        &[FAULTS, INTERRUPTS],
    ),
    faults("amd-vi", Unit::Amd, &[FAULTS]),
    faults("smmuv3-stage1", Unit::Smmu1, &[FAULTS]),
    faults("smmuv3-stage2", Unit::Smmu2, &[FAULTS]),
    faults("riscv-iommu", Unit::RiscV, &[FAULTS]),
];

const fn faults(
    name: &'static str,
    unit: Unit,
    tests: &'static [&'static [&'static str]],
) -> Provoked {
    Provoked {
        machine: Machine {
            name,
            unit,
            nodes: None,
            tests,
        },
        qemu: MANY_ARGUMENTS,
        kernel: "",
    }
}
