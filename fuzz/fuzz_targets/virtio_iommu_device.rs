#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| dmaspace_fuzz::virtio_iommu::run(
    "virtio_iommu_device",
    data
));
