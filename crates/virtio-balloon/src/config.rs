//! The configuration space (VIRTIO 1.3, 5.5.4), and two fields behind it for messages in bulk.
//!
//! All fields are le32, also for legacy devices ("unlike the usual convention", ibid.). The driver
//! writes `actual` and `poison_val` and nothing else; a write that touches another field changes those
//! two only. Legacy drivers write `actual` byte by byte; a device takes it as it stands when the byte
//! at offset 7 was written (5.5.6.2, "Legacy Interface"), which [`BalloonConfig::write`] tells.

use crate::format::LEAST_MESSAGE_BYTES;

/// Bytes of the standard's configuration space.
pub const CONFIG_BYTES: usize = 16;

/// Bytes with the fields for messages in bulk, which are there if the bulk feature is offered.
pub const BULK_CONFIG_BYTES: usize = 24;

/// The fields.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BalloonConfig {
    /// Offset 0: pages of 4 KiB that the device wants in the balloon.
    pub num_pages: u32,
    /// Offset 4: pages of 4 KiB that are in it; written by the driver.
    pub actual: u32,
    /// Offset 8: what free page hinting is to do: [`HINT_STOP`](Self::HINT_STOP),
    /// [`HINT_DONE`](Self::HINT_DONE), or a command's id.
    pub free_page_hint_cmd_id: u32,
    /// Offset 12: what the driver fills free pages with; written by the driver.
    pub poison_val: u32,
    /// Offset 16: the format of messages in bulk: [`BITMAP_RECORDS`](Self::BITMAP_RECORDS).
    pub bulk_format: u32,
    /// Offset 20: the longest message in bulk that the device takes, in bytes.
    pub bulk_message_bytes: u32,
}

impl BalloonConfig {
    /// `VIRTIO_BALLOON_CMD_ID_STOP`: hinting stops, and hinted pages stay as they are.
    pub const HINT_STOP: u32 = 0;
    /// `VIRTIO_BALLOON_CMD_ID_DONE`: hinting is over, and hinted pages may be used.
    pub const HINT_DONE: u32 = 1;
    /// The first id of a command.
    pub const HINT_FIRST: u32 = 2;
    /// [`BitmapRecords`](crate::BitmapRecords), the one format in bulk. 2 to 6 were others, and are not given
    /// again.
    pub const BITMAP_RECORDS: u32 = 1;

    /// The whole space; without the bulk feature only [`CONFIG_BYTES`] of it are there.
    pub fn to_bytes(&self) -> [u8; BULK_CONFIG_BYTES] {
        let mut bytes = [0; BULK_CONFIG_BYTES];
        let fields = [
            self.num_pages,
            self.actual,
            self.free_page_hint_cmd_id,
            self.poison_val,
            self.bulk_format,
            self.bulk_message_bytes,
        ];
        for (place, field) in bytes.chunks_exact_mut(4).zip(fields) {
            place.copy_from_slice(&field.to_le_bytes());
        }
        bytes
    }

    /// Reads a space of at least [`CONFIG_BYTES`]; what is not there is 0, a field by itself.
    pub fn from_bytes(bytes: &[u8]) -> Self {
        let field = |nr: usize| {
            let bytes = bytes
                .get(4 * nr..4 * nr + 4)
                .and_then(|field| field.try_into().ok());
            bytes.map_or(0, u32::from_le_bytes)
        };
        Self {
            num_pages: field(0),
            actual: field(1),
            free_page_hint_cmd_id: field(2),
            poison_val: field(3),
            bulk_format: field(4),
            bulk_message_bytes: field(5),
        }
    }

    /// The driver writes `data` at `offset`. True when `actual` is complete: its last byte was among
    /// them. Bytes outside the two fields of the driver are left as they are.
    pub fn write(&mut self, offset: u64, data: &[u8]) -> bool {
        let mut bytes = self.to_bytes();
        let mut complete = false;
        for (nr, byte) in data.iter().enumerate() {
            // The driver's fields are at 4 and 12.
            let Some(at) = offset
                .checked_add(nr as u64)
                .filter(|at| matches!(at, 4..8 | 12..16))
            else {
                continue;
            };
            complete |= at == 7;
            if let Some(place) = bytes.get_mut(at as usize) {
                *place = *byte;
            }
        }
        *self = Self::from_bytes(&bytes);
        complete
    }

    /// True when messages in bulk are [`BitmapRecords`](crate::BitmapRecords), and long enough for any record.
    pub const fn has_bulk(&self) -> bool {
        self.bulk_format == Self::BITMAP_RECORDS
            && self.bulk_message_bytes >= LEAST_MESSAGE_BYTES as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_little_endian_at_their_offsets() {
        let config = BalloonConfig {
            num_pages: 0x0403_0201,
            actual: 0x0807_0605,
            free_page_hint_cmd_id: 0x0c0b_0a09,
            poison_val: 0x100f_0e0d,
            bulk_format: 0x1413_1211,
            bulk_message_bytes: 0x1817_1615,
        };
        let expected: [u8; 24] = core::array::from_fn(|at| at as u8 + 1);
        assert_eq!(config.to_bytes(), expected);
        assert_eq!(BalloonConfig::from_bytes(&expected), config);
        let short = BalloonConfig::from_bytes(&expected[..CONFIG_BYTES + 3]);
        assert_eq!(
            short,
            BalloonConfig {
                bulk_format: 0,
                bulk_message_bytes: 0,
                ..config
            }
        );
    }

    #[test]
    fn the_driver_writes_two_fields_and_no_other() {
        let mut config = BalloonConfig::default();
        assert!(config.write(0, &[0xff; 32]));
        assert_eq!(
            config,
            BalloonConfig {
                actual: u32::MAX,
                poison_val: u32::MAX,
                ..BalloonConfig::default()
            }
        );
        for (nr, last) in [(0, false), (1, false), (2, false), (3, true)] {
            assert_eq!(config.write(4 + nr, &[0x10 + nr as u8]), last);
        }
        assert_eq!(config.actual, 0x1312_1110);
        let before = config;
        assert!(
            !config.write(16, &[1; 8])
                && !config.write(u64::MAX, &[1; 8])
                && !config.write(8, &[1; 4])
        );
        assert_eq!(config, before);
    }

    #[test]
    fn messages_in_bulk_are_bitmap_records_with_room_for_one() {
        for (format, bytes, there) in [
            (1, 24, true),
            (1, u32::MAX, true),
            (1, 23, false),
            (0, 24, false),
            (2, 24, false),
            (u32::MAX, u32::MAX, false),
        ] {
            let config = BalloonConfig {
                bulk_format: format,
                bulk_message_bytes: bytes,
                ..BalloonConfig::default()
            };
            assert_eq!(config.has_bulk(), there, "{format} {bytes}");
        }
    }
}
