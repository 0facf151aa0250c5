//! The machines, before anything is plugged in.

use qtest::pci::Window;

use crate::qemu::Board;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

impl Board {
    /// Arguments of QEMU for the machine.
    pub(crate) const fn arguments(self) -> &'static [&'static str] {
        match self {
            // So that there is memory beyond 1 TiB: with a processor of AMD's all that does not fit below
            // it would begin there.
            Self::Q35 => &[
                "-machine",
                "q35",
                "-cpu",
                "qemu64,vendor=GenuineIntel,phys-bits=46",
            ],
            Self::ArmVirt => &[
                "-machine",
                "virt,iommu=smmuv3,highmem-ecam=off",
                "-cpu",
                "max",
            ],
            Self::RiscvVirt => &["-machine", "virt", "-bios", "none", "-smp", "4"],
        }
    }

    /// How many processors it has, one to a node: RISC-V's wants one in each.
    pub(crate) const fn processors(self) -> usize {
        match self {
            Self::Q35 | Self::ArmVirt => 1,
            Self::RiscvVirt => 4,
        }
    }

    /// How much memory lies before an address from 4 GiB on.
    pub(crate) const fn memory_below(self, address: u64) -> u64 {
        match self {
            // From 0 on, without the upper half of the first 4 GiB.
            Self::Q35 => address - 2 * GIB,
            // From 1 and 2 GiB on.
            Self::ArmVirt => address - GIB,
            Self::RiscvVirt => address - 2 * GIB,
        }
    }

    /// Where PCI's configuration space lies, or is placed.
    pub(crate) const fn ecam(self) -> u64 {
        match self {
            // Between the low memory and the interrupt controllers.
            Self::Q35 => 0xb000_0000,
            Self::ArmVirt => 0x3f00_0000,
            Self::RiscvVirt => 0x3000_0000,
        }
    }

    /// Where PCI devices' registers can be.
    pub(crate) const fn window(self) -> Window {
        match self {
            Self::Q35 => Window::new(0xc000_0000, 256 * MIB),
            Self::ArmVirt => Window::new(0x1000_0000, 256 * MIB),
            Self::RiscvVirt => Window::new(0x4000_0000, 256 * MIB),
        }
    }
}
