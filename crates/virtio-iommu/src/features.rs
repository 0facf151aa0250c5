//! Feature bits (VIRTIO 1.3, 5.13.3).

/// `input_range` of the configuration space says which addresses can be mapped.
pub const INPUT_RANGE: u64 = 1 << 0;
/// `domain_range` says how domains can be numbered.
pub const DOMAIN_RANGE: u64 = 1 << 1;
/// MAP and UNMAP requests are there.
pub const MAP_UNMAP: u64 = 1 << 2;
/// Endpoints without a domain are in bypass mode. Superseded by [`BYPASS_CONFIG`], and never offered.
pub const BYPASS: u64 = 1 << 3;
/// The PROBE request is there.
pub const PROBE: u64 = 1 << 4;
/// [`MapFlags::MMIO`](crate::wire::map_flags::MMIO) is there.
pub const MMIO: u64 = 1 << 5;
/// `bypass` of the configuration space says whether endpoints without a domain are in bypass mode, and
/// there are bypass domains.
pub const BYPASS_CONFIG: u64 = 1 << 6;

/// The bits that belong to the type of a device (VIRTIO 1.3, 2.2): others are the transport's and the
/// rings'.
pub const OF_DEVICE: u64 = !(((1 << 50) - 1) & !((1 << 24) - 1));
