//! Pages that were taken and not yet told, on their way into ascending runs.
//!
//! For messages in bulk these are bitmaps of 32 KiB, each over a window of 262,144 pages, of which a
//! *pass* fills as many as it meets and can have, up to 32 (32 GiB of pages of 4 KiB). Page numbers, where there is no
//! memory for one bitmap, do with a short list. When neither has room, what is there must be
//! told first: that is one pass more, and nothing is lost.

use runs::{GuestAddr, Span, bitmap};

use crate::source::GuestPage;

/// Words of a bitmap.
pub(super) const WORDS: usize = 4096;

/// The most bitmaps of a pass.
pub(super) const MOST_BITMAPS: usize = 32;

/// Runs of the list, which is there for want of memory. It lies on the stack of who makes a driver.
const LISTED: usize = 16;

#[derive(Debug)]
struct Window<W> {
    words: W,
    /// The first address, a multiple of the window's size.
    base: u64,
    empty: bool,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Pending<W> {
    page: GuestPage,
    windows: [Option<Window<W>>; MOST_BITMAPS],
    /// The most windows; 0 where the list is used.
    most: usize,
    list: [Span<GuestAddr>; LISTED],
    listed: usize,
}

impl<W: AsRef<[u64]> + AsMut<[u64]>> Pending<W> {
    /// Nothing, in a list.
    pub(super) fn listed(page: GuestPage) -> Self {
        Self {
            page,
            windows: [const { None }; MOST_BITMAPS],
            most: 0,
            list: [Span::default(); LISTED],
            listed: 0,
        }
    }

    /// From now on in at most `most` bitmaps, of which this is the first; in a list, if there is none. It is empty.
    pub(super) fn use_bitmaps(&mut self, first: Option<W>, most: usize) {
        self.clear();
        self.windows.fill_with(|| None);
        self.most = match first {
            Some(_) => most.clamp(1, MOST_BITMAPS),
            None => 0,
        };
        if let Some(place) = self.windows.first_mut() {
            *place = first.map(|words| Window {
                words,
                base: 0,
                empty: true,
            });
        }
    }

    /// Adds a block, which does not cross a multiple of a window's size. `more` gives a bitmap, all 0.
    /// False when there is no room, which cannot be when it is empty.
    pub(super) fn add(&mut self, block: Span<GuestAddr>, more: impl FnOnce() -> Option<W>) -> bool {
        if self.most == 0 {
            let Some(place) = self.list.get_mut(self.listed) else {
                return false;
            };
            *place = block;
            self.listed += 1;
            return true;
        }
        let size = (WORDS as u64 * 64) << self.page.shift();
        let base = block.start & !(size - 1);
        let first = (block.start - base) >> self.page.shift();
        let bits = first..first + (block.len >> self.page.shift());
        let Some(place) = self.place(base, more) else {
            return false;
        };
        bitmap::set(place.words.as_mut(), bits);
        (place.base, place.empty) = (base, false);
        true
    }

    /// The window of this base, or one that is not used, or a new one.
    fn place(&mut self, base: u64, more: impl FnOnce() -> Option<W>) -> Option<&mut Window<W>> {
        let of_base = |window: &Window<W>| !window.empty && window.base == base;
        let there = |f: &dyn Fn(&Window<W>) -> bool| {
            self.windows
                .iter()
                .position(|window| window.as_ref().is_some_and(f))
        };
        let at = match there(&of_base).or_else(|| there(&|window| window.empty)) {
            Some(at) => at,
            None => {
                let at = self.windows.iter().position(Option::is_none)?;
                if at >= self.most {
                    return None;
                }
                let words = more()?;
                let empty = true;
                *self.windows.get_mut(at)? = Some(Window { words, base, empty });
                at
            }
        };
        self.windows.get_mut(at)?.as_mut()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.listed == 0 && self.windows.iter().flatten().all(|window| window.empty)
    }

    /// Puts list and bitmaps into ascending order.
    pub(super) fn sort(&mut self) {
        let (list, _) = self.list.split_at_mut(self.listed);
        list.sort_unstable_by_key(|run| run.start);
        self.listed = runs::merge_sorted(list);
        self.windows.sort_unstable_by_key(|window| {
            let window = window.as_ref();
            (window.is_none(), window.map_or(0, |window| window.base))
        });
    }

    /// Runs in the list.
    pub(super) fn list(&self) -> impl Iterator<Item = Span<GuestAddr>> {
        self.list.iter().take(self.listed).copied()
    }

    /// The bitmaps that hold something, so many, each with its first address.
    pub(super) fn bitmaps(&self) -> ([(u64, &[u64]); MOST_BITMAPS], usize) {
        let mut bitmaps: [(u64, &[u64]); MOST_BITMAPS] = [(0, &[]); MOST_BITMAPS];
        let mut count = 0;
        let used = self.windows.iter().flatten().filter(|window| !window.empty);
        for (place, window) in bitmaps.iter_mut().zip(used) {
            *place = (window.base, window.words.as_ref());
            count += 1;
        }
        (bitmaps, count)
    }

    /// Forgets all of it; bitmaps are kept.
    pub(super) fn clear(&mut self) {
        self.listed = 0;
        for window in self.windows.iter_mut().flatten() {
            if !window.empty {
                window.words.as_mut().fill(0);
                window.empty = true;
            }
        }
    }
}
