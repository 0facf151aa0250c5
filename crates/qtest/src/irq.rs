//! Interrupt lines, as far as QEMU told of them.

use std::collections::VecDeque;

/// A line that was raised or lowered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Irq {
    /// The number of the input or output of the device that is intercepted.
    pub line: u8,
    /// Raised, or lowered.
    pub raised: bool,
}

/// How many changes are kept for [`Lines::take`]; the oldest go first.
const KEPT: usize = 4096;

/// Interrupts received so far.
#[derive(Debug)]
pub(crate) struct Lines {
    raised: [bool; 256],
    changes: VecDeque<Irq>,
}

impl Lines {
    pub(crate) const fn new() -> Self {
        Self {
            raised: [false; 256],
            changes: VecDeque::new(),
        }
    }

    pub(crate) fn note(&mut self, irq: Irq) {
        self.raised[usize::from(irq.line)] = irq.raised;
        if self.changes.len() == KEPT {
            self.changes.pop_front();
        }
        self.changes.push_back(irq);
    }

    pub(crate) const fn raised(&self, line: u8) -> bool {
        self.raised[line as usize]
    }

    pub(crate) fn take(&mut self) -> Option<Irq> {
        self.changes.pop_front()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_changes_are_kept_and_all_levels() {
        let mut lines = Lines::new();
        for nth in 0..=KEPT {
            lines.note(Irq {
                line: (nth % 256) as u8,
                raised: true,
            });
        }
        assert!((0..=255).all(|line| lines.raised(line)));
        assert_eq!(lines.take().map(|irq| irq.line), Some(1));
        assert_eq!(std::iter::from_fn(|| lines.take()).count(), KEPT - 1);
    }
}
