//! CRC-32C, the checksum of images: RFC 3720, appendix B.4, "CRC Examples".

/// The polynomial 0x1EDC6F41, bits reversed.
const POLYNOMIAL: u32 = 0x82f6_3b78;

const TABLE: [u32; 256] = {
    let mut table = [0; 256];
    let mut byte = 0;
    while byte < 256 {
        let mut crc = byte as u32;
        let mut bit = 0;
        while bit < 8 {
            crc = if crc & 1 != 0 {
                crc >> 1 ^ POLYNOMIAL
            } else {
                crc >> 1
            };
            bit += 1;
        }
        table[byte] = crc;
        byte += 1;
    }
    table
};

/// A checksum over bytes that come piece by piece.
#[derive(Clone, Copy, Debug)]
pub(super) struct Crc(u32);

impl Crc {
    pub(super) const fn new() -> Self {
        Self(u32::MAX)
    }

    pub(super) fn add(&mut self, bytes: &[u8]) {
        for byte in bytes {
            let index = (self.0 ^ u32::from(*byte)) & 0xff;
            self.0 = self.0 >> 8 ^ TABLE[index as usize];
        }
    }

    pub(super) const fn value(self) -> u32 {
        !self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_examples_of_the_rfc() {
        let crc = |bytes: &[u8]| {
            let mut crc = Crc::new();
            crc.add(bytes);
            crc.value()
        };
        assert_eq!(crc(&[0; 32]), 0x8a91_36aa);
        assert_eq!(crc(&[0xff; 32]), 0x62a8_ab43);
        let up: [u8; 32] = core::array::from_fn(|n| n as u8);
        assert_eq!(crc(&up), 0x46dd_794e);
        assert_eq!(crc(b"123456789"), 0xe306_9283);
    }
}
