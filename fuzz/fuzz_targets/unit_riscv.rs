#![no_main]

dmaspace_fuzz::target!(iommu, "unit_riscv");
