#![no_main]

dmaspace_fuzz::target!(virtio_iommu, "virtio_iommu_device");
