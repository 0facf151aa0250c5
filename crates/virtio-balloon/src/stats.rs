//! Statistics of the guest, on statsq (VIRTIO 1.3, 5.5.6.3 and 5.5.6.4).
//!
//! Entries of 10 bytes, packed: 16 bits of tag, 64 bits of value. (The standard's "multiple of 6 bytes"
//! contradicts its own structure.) They are little-endian; on a legacy device, in the byte order of the
//! guest. Tags may come in any order, and unknown ones are left out. Tags 0 to 9 are the standard's, 10 to
//! 15 Linux's.

use crate::refusal::{Refusal, Refusals};

/// The byte order of entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ByteOrder {
    /// That of the standard, and of legacy guests that are little-endian.
    Little,
    /// That of legacy guests that are big-endian.
    Big,
}

/// Meaning of a value. Memory is in bytes, the rest counts events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum Tag {
    /// Bytes that were swapped in.
    SwapIn,
    /// Bytes that were swapped out.
    SwapOut,
    /// Major page faults.
    MajorFaults,
    /// Minor page faults.
    MinorFaults,
    /// Bytes that are not used for anything.
    FreeMemory,
    /// Bytes of memory in all.
    TotalMemory,
    /// Bytes that could be had for new programs without swapping.
    AvailableMemory,
    /// Bytes that could be had quickly, without input or output: the disk caches.
    DiskCaches,
    /// Huge pages that were allocated.
    HugetlbAllocations,
    /// Huge pages that could not be allocated.
    HugetlbFailures,
    /// Processes killed for want of memory.
    OomKills,
    /// Allocations that had to wait.
    AllocationStalls,
    /// Bytes looked at by reclaim in the background.
    AsyncScanned,
    /// Bytes looked at by reclaim in an allocation.
    DirectScanned,
    /// Bytes reclaimed in the background.
    AsyncReclaimed,
    /// Bytes reclaimed in an allocation.
    DirectReclaimed,
}

impl Tag {
    /// All, in the order of their numbers.
    pub const ALL: [Self; 16] = [
        Self::SwapIn,
        Self::SwapOut,
        Self::MajorFaults,
        Self::MinorFaults,
        Self::FreeMemory,
        Self::TotalMemory,
        Self::AvailableMemory,
        Self::DiskCaches,
        Self::HugetlbAllocations,
        Self::HugetlbFailures,
        Self::OomKills,
        Self::AllocationStalls,
        Self::AsyncScanned,
        Self::DirectScanned,
        Self::AsyncReclaimed,
        Self::DirectReclaimed,
    ];

    /// Its number.
    pub const fn number(self) -> u16 {
        self as u16
    }

    /// The tag of this number.
    pub fn from_number(number: u16) -> Option<Self> {
        Self::ALL.get(usize::from(number)).copied()
    }
}

/// An entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stat {
    /// The tag, by [`Tag::number`].
    pub tag: u16,
    /// How much.
    pub value: u64,
}

impl Stat {
    /// Bytes of an entry.
    pub const BYTES: usize = 10;

    /// As it stands in the buffer.
    pub fn to_bytes(self, order: ByteOrder) -> [u8; Self::BYTES] {
        let (tag, value) = match order {
            ByteOrder::Little => (self.tag.to_le_bytes(), self.value.to_le_bytes()),
            ByteOrder::Big => (self.tag.to_be_bytes(), self.value.to_be_bytes()),
        };
        let mut bytes = [0; Self::BYTES];
        let both = tag.into_iter().chain(value);
        bytes
            .iter_mut()
            .zip(both)
            .for_each(|(place, byte)| *place = byte);
        bytes
    }

    /// Reads an entry.
    pub const fn from_bytes(bytes: [u8; Self::BYTES], order: ByteOrder) -> Self {
        let [t, u, a, b, c, d, e, f, g, h] = bytes;
        let (tag, value) = ([t, u], [a, b, c, d, e, f, g, h]);
        match order {
            ByteOrder::Little => Self {
                tag: u16::from_le_bytes(tag),
                value: u64::from_le_bytes(value),
            },
            ByteOrder::Big => Self {
                tag: u16::from_be_bytes(tag),
                value: u64::from_be_bytes(value),
            },
        }
    }
}

/// Values of a buffer of statsq.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    values: [Option<u64>; Tag::ALL.len()],
}

impl Stats {
    /// Bytes of a buffer with all tags.
    pub const MOST_BYTES: usize = Stat::BYTES * Tag::ALL.len();

    /// The value of a tag, if the guest gave it.
    pub fn get(&self, tag: Tag) -> Option<u64> {
        self.values
            .get(usize::from(tag.number()))
            .copied()
            .flatten()
    }

    /// Sets the value of a tag.
    pub fn set(&mut self, tag: Tag, value: u64) {
        if let Some(place) = self.values.get_mut(usize::from(tag.number())) {
            *place = Some(value);
        }
    }

    /// Reads a buffer. The last value of a tag that comes twice holds; unknown tags are left out
    /// (5.5.6.3.2); an entry that is cut short is refused.
    pub fn decode(buffer: &[u8], order: ByteOrder, refusals: &mut Refusals) -> Self {
        let mut stats = Self::default();
        let entries = buffer.chunks_exact(Stat::BYTES);
        let rest = entries.remainder();
        for entry in entries {
            let stat = Stat::from_bytes(entry.try_into().unwrap_or_default(), order);
            if let Some(tag) = Tag::from_number(stat.tag) {
                stats.set(tag, stat.value);
            }
        }
        if !rest.is_empty() {
            refusals.add(Refusal::Length {
                bytes: buffer.len(),
                unit: Stat::BYTES,
            });
        }
        stats
    }

    /// Writes all values that there are, by ascending tags, as far as the buffer holds whole entries.
    /// Returns the bytes.
    pub fn encode(&self, buffer: &mut [u8], order: ByteOrder) -> usize {
        let there = Tag::ALL
            .into_iter()
            .filter_map(|tag| Some((tag, self.get(tag)?)));
        let mut used = 0;
        for (place, (tag, value)) in buffer.chunks_exact_mut(Stat::BYTES).zip(there) {
            let stat = Stat {
                tag: tag.number(),
                value,
            };
            place.copy_from_slice(&stat.to_bytes(order));
            used += Stat::BYTES;
        }
        used
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn an_entry_byte_by_byte() {
        let stat = Stat {
            tag: Tag::DirectReclaimed.number(),
            value: 0x0102_0304_0506_0708,
        };
        assert_eq!(
            stat.to_bytes(ByteOrder::Little),
            [15, 0, 8, 7, 6, 5, 4, 3, 2, 1]
        );
        assert_eq!(
            stat.to_bytes(ByteOrder::Big),
            [0, 15, 1, 2, 3, 4, 5, 6, 7, 8]
        );
    }

    #[test]
    fn tags_have_the_numbers_of_the_standard_and_of_linux() {
        assert_eq!(
            Tag::ALL.map(Tag::number),
            core::array::from_fn(|nr| nr as u16)
        );
        assert_eq!(Tag::FreeMemory.number(), 4);
        assert_eq!(Tag::HugetlbFailures.number(), 9);
        assert_eq!(Tag::OomKills.number(), 10);
        assert_eq!(Tag::from_number(16), None);
    }

    proptest! {
        #[test]
        fn what_is_known_comes_back_in_both_orders(values in proptest::array::uniform16(any::<Option<u64>>())) {
            let stats = Stats { values };
            for order in [ByteOrder::Little, ByteOrder::Big] {
                let mut buffer = [0; Stats::MOST_BYTES];
                let used = stats.encode(&mut buffer, order);
                prop_assert_eq!(used, values.iter().flatten().count() * 10);
                let mut refusals = Refusals::new();
                prop_assert_eq!(Stats::decode(&buffer[..used], order, &mut refusals), stats);
                prop_assert_eq!(refusals.total(), 0);
            }
        }

        #[test]
        fn any_bytes_are_read(bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
            let mut refusals = Refusals::new();
            Stats::decode(&bytes, ByteOrder::Little, &mut refusals);
            prop_assert_eq!(refusals.total(), u64::from(bytes.len() % 10 != 0));
        }
    }

    #[test]
    fn unknown_tags_are_left_out_and_the_last_value_holds() {
        let mut buffer = [0; 30];
        for (place, (tag, value)) in buffer.chunks_exact_mut(10).zip([(4, 1), (16, 2), (4, 3)]) {
            place.copy_from_slice(&Stat { tag, value }.to_bytes(ByteOrder::Little));
        }
        let stats = Stats::decode(&buffer, ByteOrder::Little, &mut Refusals::new());
        let mut expected = Stats::default();
        expected.set(Tag::FreeMemory, 3);
        assert_eq!(stats, expected);
        assert_eq!(stats.get(Tag::TotalMemory), None);
    }
}
