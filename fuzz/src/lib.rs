//! The bodies of the fuzz targets, which the tests of their crates replay the corpus through as well.

#[path = "../../crates/iommu/tests/fuzz_bodies/mod.rs"]
pub mod iommu;
#[path = "../../crates/iopt/tests/fuzz_bodies/mod.rs"]
pub mod iopt;
pub mod virtio_balloon;
#[path = "../../crates/virtio-iommu/tests/fuzz_bodies/mod.rs"]
pub mod virtio_iommu;
