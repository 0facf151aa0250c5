//! The balloon's: messages, and its device.

#[path = "../../crates/virtio-balloon/tests/fuzz_bodies/mod.rs"]
pub mod bodies;
#[path = "../../crates/virtio-balloon/tests/fuzz_bodies/device.rs"]
pub mod device;

/// All targets.
pub const TARGETS: [bodies::Target; 4] = {
    let [a, b, c] = bodies::TARGETS;
    [a, b, c, device::TARGET]
};
