#![no_main]

dmaspace_fuzz::target!(iommu, "kernel_log");
