//! The input of a fuzz target.

#![allow(dead_code, reason = "no crate's targets take everything")]

/// The input, taken piece by piece; zeros when it is used up.
pub struct Bytes<'a>(pub &'a [u8]);

impl Bytes<'_> {
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn take<const N: usize>(&mut self) -> [u8; N] {
        let mut piece = [0; N];
        let (now, rest) = self.0.split_at(N.min(self.0.len()));
        piece[..now.len()].copy_from_slice(now);
        self.0 = rest;
        piece
    }

    pub fn u8(&mut self) -> u8 {
        u8::from_le_bytes(self.take())
    }

    pub fn u16(&mut self) -> u16 {
        u16::from_le_bytes(self.take())
    }

    pub fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.take())
    }

    pub fn flag(&mut self) -> bool {
        self.u8() & 1 != 0
    }

    /// A number below `end`.
    pub fn below(&mut self, end: usize) -> usize {
        usize::from(self.u8()) % end
    }
}

/// One target, and what it does with bytes: it panics when something does not hold.
pub type Target = (&'static str, fn(&[u8]));
