//! What devices have written to, beside what a harvest finds.
//!
//! A write that was over when a harvest began is found by it, or was found by the one before; and what a
//! harvest finds was written to since the one before began. Pages that an operation has touched in between
//! are left out.

#[derive(Debug, Default)]
pub(crate) struct Dirty {
    on: bool,
    /// Leaves may be larger than a page: more is found than was written to.
    blurred: bool,
    touched: Vec<u64>,
    found: Vec<u64>,
    perhaps: Vec<u64>,
}

impl Dirty {
    /// Whether it is tracked.
    pub(crate) const fn is_on(&self) -> bool {
        self.on
    }

    /// Tracking of so many pages has begun: `blurred` when leaves were left as they are.
    pub(crate) fn begin(&mut self, pages: usize, blurred: bool) {
        let words = pages.div_ceil(64);
        let none = || vec![0; words];
        *self = Self {
            on: true,
            blurred,
            touched: none(),
            found: none(),
            // What was written on the way here may or may not be found.
            perhaps: vec![u64::MAX; words],
        };
    }

    pub(crate) fn end(&mut self) {
        self.on = false;
    }

    pub(crate) fn blur(&mut self) {
        self.blurred = true;
    }

    pub(crate) fn touch(&mut self, page: usize) {
        if let Some(word) = self.touched.get_mut(page / 64) {
            *word |= 1 << (page % 64);
        }
    }

    /// Pages that were missed, and those that are too many.
    pub(crate) fn judge(&mut self, sure: &[u64], perhaps: Vec<u64>, found: Vec<u64>) -> (u32, u32) {
        let (mut missed, mut more) = (0, 0);
        for n in 0..sure.len() {
            let known = found[n] | self.found[n] | self.touched[n];
            missed += (sure[n] & !known).count_ones();
            let may = perhaps[n] | self.perhaps[n] | self.touched[n];
            more += (found[n] & !may).count_ones();
        }
        if self.blurred {
            more = 0;
        }
        self.touched.fill(0);
        (self.found, self.perhaps) = (found, perhaps);
        (missed, more)
    }
}
