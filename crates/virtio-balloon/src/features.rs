//! Feature bits (VIRTIO 1.3, 5.5.3), and the bit for messages in bulk, which is private.
//!
//! The series of 2016 took the bits 3 and 4, which today mean free page hinting and page poison; a
//! standard driver would take them for these. So the bulk bit is a [`BulkBit`] that the monitor chooses,
//! the same as its driver, and which no draft of the standard and no proposal with code uses for a
//! balloon:
//!
//! | bits | used by | source |
//! |---|---|---|
//! | 0–5 | the standard | VIRTIO 1.4 (CS01, April 2026), 5.5.3; Linux and QEMU, `linux/virtio_balloon.h` |
//! | 6 | `DEVICE_INIT_REPORTED` | oasis-tcs/virtio-spec issue 244, with patches for Linux and QEMU (2026) |
//! | 7 | `DEVICE_INIT_ON_INFLATE`: see [`InitBit`] | oasis-tcs/virtio-spec issue 242, which names 6; its patches moved it to 7 |
//! | 8 | `WS_REPORTING` | crosvm, `devices/src/virtio/balloon.rs` |
//! | 9–23, 50–63 | none: for the bulk bit | VIRTIO 1.4, 2.2: for the type of device |
//! | 24–43 | rings, transports, negotiation | VIRTIO 1.4, 6 and 6.3; Linux, `linux/virtio_config.h` |
//! | 44–49 | reserved | VIRTIO 1.4, 2.2 |
//!
//! Earlier proposals had 6 as well (`CONT_PAGES` 2020, `RECOVER` and crosvm's `RESPONSIVE_DEVICE` 2022, QEMU's
//! `WS_REPORTING` 2023) and 7 (crosvm's `EVENTS_VQ` 2022). VIRTIO 1.4 lists 41 and 42 among those of the type of
//! device, and gives 41 to administration virtqueues; neither is taken here.

/// A set of feature bits, offered or negotiated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Features(pub u64);

impl Features {
    /// The driver tells the host before it uses pages of the balloon (`VIRTIO_BALLOON_F_MUST_TELL_HOST`).
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

/// The bit cannot stand for messages in bulk ([`BulkBit`]), or for what the device initializes ([`InitBit`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BadBulkBit {
    /// The standard has given it a meaning (5.5.3, 6, 6.3).
    #[error("feature bit {bit} is {name} of the standard")]
    Taken {
        /// The bit.
        bit: u8,
        /// Its name there.
        name: &'static str,
    },
    /// A proposal or another monitor uses it for balloons.
    #[error("feature bit {bit} is {name}, which is proposed for balloons")]
    Proposed {
        /// The bit.
        bit: u8,
        /// Its name there.
        name: &'static str,
    },
    /// It does not belong to the type of device (2.2).
    #[error("feature bit {bit} is none of a device's own: those are 0 to 23 and 50 to 63")]
    NotOfDevices {
        /// The bit.
        bit: u8,
    },
}

impl BulkBit {
    /// Bit 23, the last of the lower ones: above those that the standard and other monitors use.
    pub const DEFAULT: Self = Self(23);

    /// This bit: 9 to 23, or 50 to 63 (2.2: to 127; of these, [`Features`] has 64). See the module.
    ///
    /// # Errors
    ///
    /// The bit has another meaning, which the error names, or belongs to no device: see [`BadBulkBit`].
    pub const fn new(bit: u8) -> Result<Self, BadBulkBit> {
        let name = match bit {
            9..=23 | 50..=63 => return Ok(Self(bit)),
            0 => "VIRTIO_BALLOON_F_MUST_TELL_HOST",
            1 => "VIRTIO_BALLOON_F_STATS_VQ",
            2 => "VIRTIO_BALLOON_F_DEFLATE_ON_OOM",
            3 => "VIRTIO_BALLOON_F_FREE_PAGE_HINT",
            4 => "VIRTIO_BALLOON_F_PAGE_POISON",
            5 => "VIRTIO_BALLOON_F_PAGE_REPORTING",
            6 => return Err(Self::proposed(bit, "VIRTIO_BALLOON_F_DEVICE_INIT_REPORTED")),
            7 => {
                return Err(Self::proposed(
                    bit,
                    "VIRTIO_BALLOON_F_DEVICE_INIT_ON_INFLATE",
                ));
            }
            8 => return Err(Self::proposed(bit, "VIRTIO_BALLOON_F_WS_REPORTING")),
            24 => "VIRTIO_F_NOTIFY_ON_EMPTY",
            27 => "VIRTIO_F_ANY_LAYOUT",
            28 => "VIRTIO_F_INDIRECT_DESC",
            29 => "VIRTIO_F_EVENT_IDX",
            32 => "VIRTIO_F_VERSION_1",
            33 => "VIRTIO_F_ACCESS_PLATFORM",
            34 => "VIRTIO_F_RING_PACKED",
            35 => "VIRTIO_F_IN_ORDER",
            36 => "VIRTIO_F_ORDER_PLATFORM",
            37 => "VIRTIO_F_SR_IOV",
            38 => "VIRTIO_F_NOTIFICATION_DATA",
            39 => "VIRTIO_F_NOTIF_CONFIG_DATA",
            40 => "VIRTIO_F_RING_RESET",
            41 => "VIRTIO_F_ADMIN_VQ",
            43 => "VIRTIO_F_SUSPEND",
            _ => return Err(BadBulkBit::NotOfDevices { bit }),
        };
        Err(BadBulkBit::Taken { bit, name })
    }

    const fn proposed(bit: u8, name: &'static str) -> BadBulkBit {
        BadBulkBit::Proposed { bit, name }
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

/// The feature bit of `VIRTIO_BALLOON_F_DEVICE_INIT_ON_INFLATE`: behind the page numbers of each message on inflateq
/// is a bitmap, in which the device says which of these pages it has initialized.
///
/// It is a proposal (oasis-tcs/virtio-spec issue 242), whose number is not given yet: the issue asks for 6, its patches
/// for 7. So there is no default.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InitBit(u8);

impl InitBit {
    /// This bit: 6 or 7, as proposed, or one that a [`BulkBit`] may be.
    ///
    /// # Errors
    ///
    /// The bit has another meaning, which the error names, or belongs to no device: see [`BadBulkBit`].
    pub const fn new(bit: u8) -> Result<Self, BadBulkBit> {
        match BulkBit::new(bit) {
            Ok(_) | Err(BadBulkBit::Proposed { bit: 6 | 7, .. }) => Ok(Self(bit)),
            Err(error) => Err(error),
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
    use std::string::ToString;

    #[test]
    fn the_bulk_bit_is_never_one_of_the_standard() {
        let free: [u8; 29] = core::array::from_fn(|nr| nr as u8 + if nr < 15 { 9 } else { 35 });
        for bit in 0..=u8::MAX {
            match BulkBit::new(bit) {
                Ok(bulk) => {
                    assert!(free.contains(&bit), "{bit}");
                    assert_eq!((bulk.number(), bulk.feature().0), (bit, 1 << bit));
                }
                Err(error) => {
                    assert!(!free.contains(&bit), "{bit}");
                    let said = error.to_string();
                    assert!(
                        said.starts_with(&std::format!("feature bit {bit} is ")),
                        "{said}"
                    );
                }
            }
        }
        assert_eq!(BulkBit::new(23), Ok(BulkBit::DEFAULT));
    }

    #[test]
    fn a_bit_with_another_meaning_is_refused_by_its_name() {
        let ours = [
            (Features::MUST_TELL_HOST, "VIRTIO_BALLOON_F_MUST_TELL_HOST"),
            (Features::STATS_VQ, "VIRTIO_BALLOON_F_STATS_VQ"),
            (Features::DEFLATE_ON_OOM, "VIRTIO_BALLOON_F_DEFLATE_ON_OOM"),
            (Features::FREE_PAGE_HINT, "VIRTIO_BALLOON_F_FREE_PAGE_HINT"),
            (Features::PAGE_POISON, "VIRTIO_BALLOON_F_PAGE_POISON"),
            (Features::PAGE_REPORTING, "VIRTIO_BALLOON_F_PAGE_REPORTING"),
            (Features::VERSION_1, "VIRTIO_F_VERSION_1"),
        ];
        for (feature, name) in ours {
            let bit = feature.0.trailing_zeros() as u8;
            assert_eq!(BulkBit::new(bit), Err(BadBulkBit::Taken { bit, name }));
        }
        let proposed = [
            (6, "VIRTIO_BALLOON_F_DEVICE_INIT_REPORTED"),
            (7, "VIRTIO_BALLOON_F_DEVICE_INIT_ON_INFLATE"),
            (8, "VIRTIO_BALLOON_F_WS_REPORTING"),
        ];
        for (bit, name) in proposed {
            assert_eq!(BulkBit::new(bit), Err(BadBulkBit::Proposed { bit, name }));
        }
        for bit in [25, 26, 30, 31, 42, 44, 49, 64, 127] {
            assert_eq!(BulkBit::new(bit), Err(BadBulkBit::NotOfDevices { bit }));
        }
    }

    #[test]
    fn the_bit_of_initialized_pages_is_a_proposed_one_or_a_free_one() {
        for bit in 0..=u8::MAX {
            let proposed = matches!(bit, 6 | 7);
            match (InitBit::new(bit), BulkBit::new(bit)) {
                (Ok(init), bulk) => {
                    assert!(proposed || bulk.is_ok(), "{bit}");
                    assert_eq!((init.number(), init.feature().0), (bit, 1 << bit));
                }
                (Err(error), bulk) => {
                    assert!(!proposed, "{bit}");
                    assert_eq!(bulk, Err(error));
                }
            }
        }
    }

    #[cfg(feature = "device")]
    #[test]
    fn the_bits_of_rings_are_those_of_the_machine_s_headers() {
        use virtio_bindings::{virtio_config as config, virtio_ring as ring};
        for (bit, name) in [
            (config::VIRTIO_F_NOTIFY_ON_EMPTY, "VIRTIO_F_NOTIFY_ON_EMPTY"),
            (config::VIRTIO_F_ANY_LAYOUT, "VIRTIO_F_ANY_LAYOUT"),
            (ring::VIRTIO_RING_F_INDIRECT_DESC, "VIRTIO_F_INDIRECT_DESC"),
            (ring::VIRTIO_RING_F_EVENT_IDX, "VIRTIO_F_EVENT_IDX"),
            (config::VIRTIO_F_VERSION_1, "VIRTIO_F_VERSION_1"),
            (config::VIRTIO_F_ACCESS_PLATFORM, "VIRTIO_F_ACCESS_PLATFORM"),
            (config::VIRTIO_F_RING_PACKED, "VIRTIO_F_RING_PACKED"),
            (config::VIRTIO_F_IN_ORDER, "VIRTIO_F_IN_ORDER"),
            (config::VIRTIO_F_ORDER_PLATFORM, "VIRTIO_F_ORDER_PLATFORM"),
            (config::VIRTIO_F_SR_IOV, "VIRTIO_F_SR_IOV"),
            (
                config::VIRTIO_F_NOTIFICATION_DATA,
                "VIRTIO_F_NOTIFICATION_DATA",
            ),
            (
                config::VIRTIO_F_NOTIF_CONFIG_DATA,
                "VIRTIO_F_NOTIF_CONFIG_DATA",
            ),
            (config::VIRTIO_F_RING_RESET, "VIRTIO_F_RING_RESET"),
            (config::VIRTIO_F_ADMIN_VQ, "VIRTIO_F_ADMIN_VQ"),
        ] {
            let bit = bit as u8;
            assert_eq!(BulkBit::new(bit), Err(BadBulkBit::Taken { bit, name }));
        }
    }
}
