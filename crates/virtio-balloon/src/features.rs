//! Feature bits (VIRTIO 1.3, 5.5.3), and the bit for messages in bulk, which is nobody's but ours.
//!
//! The series of 2016 took the bits 3 and 4, which today mean free page hinting and page poison; a
//! driver of the standard that met them would be told something else. So the bulk bit is a
//! [`BulkBit`] that the monitor chooses, the same as its driver, among those that the standard leaves to the type
//! of device and has not given away.

/// A set of feature bits, offered or negotiated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Features(pub u64);

impl Features {
    /// The host is told before pages of the balloon are used (`VIRTIO_BALLOON_F_MUST_TELL_HOST`).
    pub const MUST_TELL_HOST: Self = Self(1 << 0);
    /// There is a statsq (`VIRTIO_BALLOON_F_STATS_VQ`).
    pub const STATS_VQ: Self = Self(1 << 1);
    /// The balloon gives way when the guest is out of memory (`VIRTIO_BALLOON_F_DEFLATE_ON_OOM`).
    pub const DEFLATE_ON_OOM: Self = Self(1 << 2);
    /// There is a free_page_vq (`VIRTIO_BALLOON_F_FREE_PAGE_HINT`).
    pub const FREE_PAGE_HINT: Self = Self(1 << 3);
    /// `poison_val` is valid (`VIRTIO_BALLOON_F_PAGE_POISON`).
    pub const PAGE_POISON: Self = Self(1 << 4);
    /// There is a reporting_vq (`VIRTIO_BALLOON_F_PAGE_REPORTING`).
    pub const PAGE_REPORTING: Self = Self(1 << 5);
    /// The device is one of the standard, not a legacy one (`VIRTIO_F_VERSION_1`; 6).
    pub const VERSION_1: Self = Self(1 << 32);

    /// True when all bits of `other` are here.
    pub const fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// The bits of both.
    pub const fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// The bits that are not in `other`.
    pub const fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }
}

/// The feature bit that stands for messages in bulk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BulkBit(u8);

/// The bit cannot stand for messages in bulk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BadBulkBit {
    /// The standard has given it a meaning for balloons (5.5.3).
    #[error("feature bit {bit} has a meaning in the standard")]
    Taken {
        /// The bit.
        bit: u8,
    },
    /// It does not belong to the type of device (2.2).
    #[error("feature bit {bit} is none of a device's own: those are 6 to 23 and 50 to 63")]
    NotOfDevices {
        /// The bit.
        bit: u8,
    },
}

impl BulkBit {
    /// Bit 23, the last of the lower ones: above those that the standard and other monitors use.
    pub const DEFAULT: Self = Self(23);

    /// This bit: 6 to 23, or 50 to 63 (VIRTIO 1.3, 2.2: 0 to 23 and 50 to 127 are for the type of
    /// device; of these, [`Features`] has 64).
    pub const fn new(bit: u8) -> Result<Self, BadBulkBit> {
        match bit {
            0..=5 => Err(BadBulkBit::Taken { bit }),
            6..=23 | 50..=63 => Ok(Self(bit)),
            _ => Err(BadBulkBit::NotOfDevices { bit }),
        }
    }

    /// Its number.
    pub const fn number(self) -> u8 {
        self.0
    }

    /// The set of this bit alone.
    pub const fn feature(self) -> Features {
        Features(1 << self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bulk_bit_is_never_one_of_the_standard() {
        for bit in 0..=u8::MAX {
            match BulkBit::new(bit) {
                Ok(bulk) => {
                    assert!((6..24).contains(&bit) || (50..64).contains(&bit));
                    assert_eq!(bulk.feature().0, 1 << bit);
                }
                Err(BadBulkBit::Taken { bit: found }) => assert!(found == bit && bit < 6),
                Err(BadBulkBit::NotOfDevices { bit: found }) => {
                    assert!(found == bit && ((24..50).contains(&bit) || bit > 63));
                }
            }
        }
        assert!(
            !BulkBit::DEFAULT
                .feature()
                .contains(Features::FREE_PAGE_HINT)
        );
    }
}
