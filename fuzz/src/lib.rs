//! The bodies of the fuzz targets, which the tests of their crates replay the corpus through as well.

pub mod allocated;
#[path = "../../crates/dmaspace/tests/fuzz_bodies/mod.rs"]
pub mod dmaspace;
#[path = "../../crates/dmaspace-cli/tests/fuzz_bodies/mod.rs"]
pub mod dmaspace_cli;
#[path = "../../crates/dmaspace-vfio-user/tests/fuzz_bodies/mod.rs"]
pub mod dmaspace_vfio_user;
#[path = "../../crates/ioas/tests/fuzz_bodies/mod.rs"]
pub mod ioas;
#[path = "../../crates/iommu/tests/fuzz_bodies/mod.rs"]
pub mod iommu;
#[path = "../../crates/iopt/tests/fuzz_bodies/mod.rs"]
pub mod iopt;
pub mod virtio_balloon;
#[path = "../../crates/virtio-iommu/tests/fuzz_bodies/mod.rs"]
pub mod virtio_iommu;

/// No input makes any of them allocate more.
#[global_allocator]
static ALLOCATOR: allocated::Counting<{ 512 << 20 }> = allocated::Counting;

/// The program of a crate's target: `target!(iopt, "walk")`.
#[macro_export]
macro_rules! target {
    ($module:ident, $name:literal) => {
        libfuzzer_sys::fuzz_target!(|data: &[u8]| $crate::run(
            &$crate::$module::TARGETS,
            $name,
            data
        ));
    };
}

/// Runs the target of this name.
pub fn run(targets: &[(&str, fn(&[u8]))], name: &str, data: &[u8]) {
    let target = targets.iter().find(|(target, _)| *target == name);
    let (_, body) = target.unwrap_or_else(|| panic!("there is no target {name}"));
    body(data);
}
