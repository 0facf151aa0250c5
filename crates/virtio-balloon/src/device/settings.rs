//! Settings of a device.

use std::vec::Vec;

use runs::Span;
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};

use super::error::BalloonSetupError;
use super::monitor::Unrestored;
use crate::features::{BulkBit, Features, InitBit};
use crate::format::{LEAST_MESSAGE_BYTES, MOST_MESSAGE_BYTES};
use crate::map::Region;
use crate::queues::Numbering;
use crate::stats::ByteOrder;

/// Features that a device offers, and how it behaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BalloonSettings {
    /// Features of balloons to offer (VIRTIO 1.3, 5.5.3). By default `MUST_TELL_HOST`, `STATS_VQ`,
    /// `DEFLATE_ON_OOM`, `PAGE_POISON` and `PAGE_REPORTING`: all but free page hinting, which is for
    /// monitors that do something with it.
    pub features: Features,
    /// Features of the transport and its rings to offer with them. By default `VIRTIO_F_VERSION_1`,
    /// `VIRTIO_F_INDIRECT_DESC` and `VIRTIO_F_EVENT_IDX`.
    pub transport: Features,
    /// Messages in bulk; by default none.
    pub bulk: Option<Bulk>,
    /// The bit of `VIRTIO_BALLOON_F_DEVICE_INIT_ON_INFLATE` (`docs/balloon-bulk.md`); by default the feature is not
    /// offered. It tells the guest which pages it need not zero, so offer it only if what [`Discarder`](super::Discarder)
    /// says of zeros is true: not with a user-fault handler that brings discarded pages back.
    pub init_on_inflate: Option<InitBit>,
    /// How queues are numbered; by default as Linux and the monitors do.
    pub numbering: Numbering,
    /// The byte order of a legacy guest, in which its page numbers, statistics and commands are; one of the
    /// standard is little-endian. Rings in that order are the transport's affair.
    pub legacy_order: ByteOrder,
    /// Handling of a message of deflateq when devices cannot be given its pages.
    pub unrestored: Unrestored,
    /// Bytes of messages after which a queue is left for the next time, by default 1 MiB.
    pub drain_bytes: usize,
}

/// Messages in bulk (`docs/balloon-bulk.md`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bulk {
    /// The feature bit.
    pub bit: BulkBit,
    /// The longest message, in bytes: 24 to 32,776.
    pub message_bytes: u32,
}

impl Default for Bulk {
    /// Under the default bit, with messages as long as they may be.
    fn default() -> Self {
        Self {
            bit: BulkBit::DEFAULT,
            message_bytes: MOST_MESSAGE_BYTES as u32,
        }
    }
}

/// All features of balloons.
const BALLOON: Features = Features(0x3f);

impl Default for BalloonSettings {
    fn default() -> Self {
        let rings = 1 << VIRTIO_RING_F_INDIRECT_DESC | 1 << VIRTIO_RING_F_EVENT_IDX;
        Self {
            features: BALLOON.without(Features::FREE_PAGE_HINT),
            transport: Features(1 << VIRTIO_F_VERSION_1 | rings),
            bulk: None,
            init_on_inflate: None,
            numbering: Numbering::Compressed,
            legacy_order: ByteOrder::Little,
            unrestored: Unrestored::Hold,
            drain_bytes: 1 << 20,
        }
    }
}

impl BalloonSettings {
    pub(super) fn check(&self) -> Result<(), BalloonSetupError> {
        let unknown = self.features.without(BALLOON);
        if unknown.0 != 0 {
            return Err(BalloonSetupError::Feature { unknown });
        }
        if let Some((init, bulk)) = self.init_on_inflate.zip(self.bulk) {
            let bit = init.number();
            if bit == bulk.bit.number() {
                return Err(BalloonSetupError::SameBit { bit });
            }
        }
        let bounds = LEAST_MESSAGE_BYTES as u32..=MOST_MESSAGE_BYTES as u32;
        match self.bulk.map(|bulk| bulk.message_bytes) {
            Some(bytes) if !bounds.contains(&bytes) => Err(BalloonSetupError::Message { bytes }),
            _ => Ok(()),
        }
    }
}

/// The regions of vm-memory's guest memory, all backed by pages of `page` bytes.
pub fn regions(memory: &impl vm_memory::GuestMemoryBackend, page: u64) -> Vec<Region> {
    use vm_memory::GuestMemoryRegion;
    let regions = memory.iter().map(|region| Region {
        guest: Span::new(region.start_addr().0, region.len()),
        page,
        memory: (),
    });
    regions.collect()
}
