//! A balloon's operations: memory of the guest that devices let go of and have back.

use std::ops::Range;

use runs::Span;
use virtio_balloon::{Dma as _, Reason};

use crate::world::World;
use crate::{GUEST, MEMORIES, MEMORY, PAGE};

impl World {
    /// Runs of the guest's memory, as a balloon tells them, and the pages of memory in them.
    fn some_runs(&mut self) -> (Vec<Span>, Vec<Range<usize>>) {
        let number = self.random.below(MEMORIES as u64);
        let whole = Span::new(0, MEMORY);
        let mut parts: Vec<Span> = (0..1 + self.random.below(4))
            .map(|_| self.some_part(whole))
            .collect();
        parts.sort_by_key(|part| part.start);
        // They ascend and do not touch.
        let mut behind = 0;
        parts.retain(|part| {
            let apart = behind == 0 || part.start > behind;
            if apart {
                behind = part.start + part.len;
            }
            apart
        });
        let first = number * (MEMORY / PAGE);
        let pages = |part: &Span| {
            let start = (first + part.start / PAGE) as usize;
            start..start + (part.len / PAGE) as usize
        };
        let memory = parts.iter().map(pages).collect();
        let guest = |part: Span| Span::new(number * GUEST + part.start, part.len);
        (parts.into_iter().map(guest).collect(), memory)
    }

    /// A balloon takes memory: devices let go of it, then it is discarded.
    pub(crate) fn inflate(&mut self) {
        let (runs, memory) = self.some_runs();
        let pages = self.model.over(&memory);
        self.moving(pages.iter().copied());
        self.arm();
        let mut kept: Vec<(Span, Reason)> = Vec::new();
        self.dma
            .release(&runs, &mut |span, why| kept.push((span, why)));
        self.moved("inflate", &runs, pages, true, &kept);
        for (run, pages) in runs.iter().zip(memory) {
            let parts = without(*run, &kept);
            let number = (run.start / GUEST) as usize;
            for part in parts {
                let inside = Span::new(part.start % GUEST, part.len);
                self.discard(
                    number,
                    inside,
                    pages.start + ((part.start - run.start) / PAGE) as usize,
                );
            }
        }
    }

    fn discard(&mut self, number: usize, part: Span, first: usize) {
        let mut kept = 0;
        let done = self.discards[number].discard(&[part], &mut |span, _| kept += span.len);
        if done.is_err() || kept > 0 {
            let text = format!("{part} of memory {number} is not discarded: {done:?}, kept {kept}");
            return self.scene.complain(text);
        }
        (first..first + (part.len / PAGE) as usize).for_each(|page| self.scene.zeroed(page));
    }

    /// The balloon gives memory back.
    pub(crate) fn deflate(&mut self) {
        let (runs, memory) = self.some_runs();
        let pages = self.model.over(&memory);
        self.moving(pages.iter().copied());
        self.arm();
        let mut failed = Vec::new();
        self.dma
            .restore(&runs, &mut |span, why| failed.push((span, why)));
        self.moved("deflate", &runs, pages, false, &failed);
    }

    /// The pages are released or not, as it was asked; where some stay as they were, the model learns which.
    /// A return may find the limit reached, when no device was there to keep the charge.
    fn moved(
        &mut self,
        name: &'static str,
        runs: &[Span],
        pages: Vec<usize>,
        released: bool,
        stayed: &[(Span, Reason)],
    ) {
        for page in &pages {
            if let Some(page) = &mut self.model.pages[*page] {
                page.released = released;
            }
        }
        let said = match stayed.first() {
            None => Ok(()),
            Some((span, why)) => Err((format!("{span} stays as it was: {why:?}"), false)),
        };
        if !self.note(name, &format!("{runs:?}"), said) {
            self.learn(&pages);
        }
        self.settle(pages);
    }
}

/// `run` without what was kept of it.
fn without(run: Span, kept: &[(Span, Reason)]) -> Vec<Span> {
    let mut left = vec![run];
    for (span, _) in kept {
        let cut = |part: Span| -> Vec<Span> {
            let Some(both) = part.intersection(span) else {
                return vec![part];
            };
            let behind = both.start + both.len;
            let head = Span::new(part.start, both.start - part.start);
            let tail = Span::new(behind, part.start + part.len - behind);
            let both = [head, tail].into_iter();
            both.filter(|part| part.len > 0).collect()
        };
        left = left.into_iter().flat_map(cut).collect();
    }
    left
}
