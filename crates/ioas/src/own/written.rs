//! What devices have written to through tables that are gone, until it is harvested.

use alloc::vec::Vec;
use core::mem;

use runs::Span;

/// Ranges, in no order.
#[derive(Debug, Default)]
pub(crate) struct Written(Vec<Span>);

impl Written {
    pub(crate) const fn new() -> Self {
        Self(Vec::new())
    }

    /// Ranges of another process.
    pub(crate) const fn of(ranges: Vec<Span>) -> Self {
        Self(ranges)
    }

    pub(crate) fn ranges(&self) -> &[Span] {
        &self.0
    }

    pub(crate) fn clear(&mut self) {
        self.0.clear();
    }

    pub(crate) fn add(&mut self, range: Span) {
        match self.0.last_mut() {
            Some(last) if last.last().checked_add(1) == Some(range.start) => last.len += range.len,
            _ => self.0.push(range),
        }
    }

    pub(crate) fn append(&mut self, other: Self) {
        self.0.extend(other.0);
    }

    /// Takes out what lies in `span` and hands it to `each`.
    pub(crate) fn take(&mut self, span: Span, each: &mut dyn FnMut(Span)) {
        for range in mem::take(&mut self.0) {
            let Some(inside) = range.intersection(&span) else {
                self.0.push(range);
                continue;
            };
            each(inside);
            let before = Span::new(range.start, inside.start - range.start);
            if !before.is_empty() {
                self.0.push(before);
            }
            let after = inside.last().checked_add(1);
            self.0
                .extend(after.and_then(|start| Span::inclusive(start, range.last())));
        }
    }
}
