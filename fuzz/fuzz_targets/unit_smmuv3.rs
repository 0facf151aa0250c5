#![no_main]

dmaspace_fuzz::target!(iommu, "unit_smmuv3");
