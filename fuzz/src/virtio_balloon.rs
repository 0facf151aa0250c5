//! The balloon's: messages, and its device.

#[path = "../../crates/virtio-balloon/tests/fuzz_bodies/mod.rs"]
pub mod bodies;
#[path = "../../crates/virtio-balloon/tests/fuzz_bodies/device.rs"]
pub mod device;

/// All targets.
pub const TARGETS: [bodies::Target; 9] = {
    let [a, b, c, d, e, f, g, h] = bodies::TARGETS;
    [a, b, c, d, e, f, g, h, device::TARGET]
};
