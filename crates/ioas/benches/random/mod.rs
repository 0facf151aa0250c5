//! Numbers in no order, the same ones each time.

/// xorshift64*: Vigna, "An experimental exploration of Marsaglia's xorshift generators,
/// scrambled" (2016).
pub(crate) struct Random(u64);

impl Default for Random {
    fn default() -> Self {
        Self(88_172_645_463_325_252)
    }
}

impl Random {
    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        let high = self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32;
        (high * end) >> 32
    }

    pub(crate) fn shuffle<T>(&mut self, list: &mut [T]) {
        for i in (1..list.len()).rev() {
            list.swap(i, self.below(i as u64 + 1) as usize);
        }
    }
}
