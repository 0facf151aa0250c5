//! A cache of aligned stretches that forgets what was used longest ago.
//!
//! Ours and not `lru`, which finds equal keys: an address is looked for in stretches of any size.

/// The most entries, all of which a look visits.
pub(super) const MOST: u32 = 4096;

/// A stretch of a domain: its first address and its size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Key {
    pub(super) domain: usize,
    pub(super) first: u64,
    pub(super) log2: u32,
}

#[derive(Debug)]
pub(super) struct Lru<T> {
    entries: Vec<Entry<T>>,
    room: usize,
    clock: u64,
}

#[derive(Debug)]
struct Entry<T> {
    key: Key,
    used: u64,
    value: T,
}

impl<T: Copy> Lru<T> {
    pub(super) fn new(room: u32) -> Self {
        Self {
            entries: Vec::with_capacity(room as usize),
            room: room as usize,
            clock: 0,
        }
    }

    /// Returns the value of the stretch around `iova`, if it is cached.
    pub(super) fn find(&mut self, domain: usize, iova: u64) -> Option<T> {
        let around = |key: &Key| key.domain == domain && (iova ^ key.first) >> key.log2 == 0;
        let entry = self.entries.iter_mut().find(|entry| around(&entry.key))?;
        self.clock += 1;
        entry.used = self.clock;
        Some(entry.value)
    }

    /// Keeps it, in place of what has the same key, or of what was used longest ago.
    pub(super) fn insert(&mut self, key: Key, value: T) {
        self.clock += 1;
        let used = self.clock;
        let new = Entry { key, used, value };
        if let Some(same) = self.entries.iter_mut().find(|entry| entry.key == key) {
            *same = new;
        } else if self.entries.len() < self.room {
            self.entries.push(new);
        } else if let Some(oldest) = self.entries.iter_mut().min_by_key(|entry| entry.used) {
            *oldest = new;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_used_longest_ago_is_forgotten() {
        let key = |first| Key {
            domain: 0,
            first,
            log2: 12,
        };
        let mut cache = Lru::new(2);
        cache.insert(key(0), 'a');
        cache.insert(key(0x1000), 'b');
        assert_eq!(cache.find(0, 0xfff), Some('a'));
        cache.insert(key(0x2000), 'c');
        assert_eq!(cache.find(0, 0x1000), None);
        assert_eq!(cache.find(0, 0), Some('a'));
        assert_eq!(cache.find(0, 0x2abc), Some('c'));
        assert_eq!(cache.find(1, 0x2abc), None);
        cache.insert(key(0), 'd');
        assert_eq!(cache.find(0, 0), Some('d'));
        let mut none = Lru::new(0);
        none.insert(key(0), 'a');
        assert_eq!(none.find(0, 0), None);
    }
}
