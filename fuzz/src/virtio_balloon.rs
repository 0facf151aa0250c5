//! The balloon's: messages, and its device.

#[path = "../../crates/virtio-balloon/tests/fuzz_bodies/mod.rs"]
pub mod bodies;
#[path = "../../crates/virtio-balloon/tests/fuzz_bodies/device.rs"]
pub mod device;

/// Runs the target of this name.
pub fn run(name: &str, data: &[u8]) {
    let mut decoders = bodies::TARGETS.iter();
    match decoders.find(|(target, _)| *target == name) {
        Some((_, body)) => body(data),
        None if name == device::NAME => device::play(data),
        None => panic!("there is no target {name}"),
    }
}
